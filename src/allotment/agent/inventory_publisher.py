# SPDX-License-Identifier: Apache-2.0
"""Publishes the node's devices for schedulers, and the amounts that no placement explains.

    devices, health, cordons ─┐
    links                     ├──► NodeInventory ──► the annotation `allotment.dev/devices`
    shares without placement ─┘

Written at each change, and again after a foreign change (`kube.nodes`). Placements of scheduled
pods are not in it: such pods come and go without a write to the node.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import Final, NoReturn

from allotment.agent.allocation.reconcile import claimed, placed_slices, unplaced
from allotment.agent.mig.state import CutGpu
from allotment.agent.node_state import AnnotatedNode, NodeState, poll_folders
from allotment.agent.protocols import Pods, Reports
from allotment.agent.resources import as_whole
from allotment.kube.inventories import DEVICES, cordoned, encode
from allotment.model.clusters import NodeDevice, NodeInventory, NodeMig, TakenPart
from allotment.model.devices import Device
from allotment.model.errors import AllotError
from allotment.model.mig import MigPlace
from allotment.model.modes import has_only_slices, has_slices
from allotment.model.placements import MAX_SHARES
from allotment.model.reported import Reported
from allotment.model.structs import replace
from allotment.modes import traits_of
from allotment.shares.booking import Bookings, default_host_budget
from allotment.shares.folders import StateFolder
from allotment.shares.mode_policy import narrowed
from allotment.shares.pods import CORDONED
from allotment.shares.record import LoadedShare

_KEPT: Final = "its mode policy allows none of its modes"
GATHER_S: Final = 0.2
"""Changes within this time are one write."""
LEAST_S: Final = 2.0
"""The shortest time between two writes: many pods may start at once. A GPU that is closed or opened
does not wait for it."""
WATCH_S: Final = 0.5
"""How often the shares' folder is polled: `allot run` sends no signal."""
LOOK_S: Final = 10.0
"""The longest time between two updates: `allot resize` and `suspend` change a share in place."""


def build_inventory(
    state: NodeState,
    problems: Mapping[str, str],
    *,
    taken: Mapping[str, TakenPart],
    placed: Collection[tuple[str, MigPlace]] = (),
    claims: Collection[str] = (),
) -> NodeInventory | None:
    """Return the inventory for schedulers; None: no device of the node is given in parts.

    `problems` and `taken` are by UUID. `placed` are slices with a placement: a scheduler counts
    them itself. `claims` are shares of ResourceClaims: a scheduler counts them itself while they
    are not in the inventory. The node's name, CPU and memory are not in the annotation.
    """
    offer, cut_gpus = state.offer, state.cut_gpus
    devices = [as_whole(state.devices[uuid]) for uuid in offer.parted if uuid in state.devices]
    if not devices:
        return None
    paused = {
        uuid: f"MIG is off, and {why}"
        for uuid, why in state.mig_paused.items()
        if uuid in cut_gpus and not cut_gpus[uuid].is_enabled
    }

    def described(device: Device) -> NodeDevice:
        uuid = device.uuid
        open_modes = _open_modes(state, uuid)
        mig = None
        if uuid in cut_gpus and uuid not in paused:
            mig = _mig(uuid, cut_gpus[uuid], placed)
        mig_off = paused.get(uuid, "") if has_slices(open_modes) else ""
        problem = problems.get(uuid) or (mig_off if has_only_slices(open_modes) else "")
        return NodeDevice(
            uuid=uuid,
            model=device.name,
            memory_bytes=device.allottable_bytes,
            index=device.index,
            numa_node=device.numa_node,
            # A GPU without `mig` has not been inspected yet.
            modes=tuple(mode for mode in open_modes if mig or not traits_of(mode).is_slice),
            mig=mig,
            max_shares=MAX_SHARES,
            problem=problem or ("" if open_modes else _KEPT),
            mig_off=mig_off,
            taken=taken.get(uuid) or TakenPart(),
        )

    uuids = {each.uuid for each in devices}
    pairs = {
        tuple(sorted(pair)): points for pair, points in state.links.scores.items() if pair <= uuids
    }
    return NodeInventory(
        name="",
        devices=tuple(map(described, devices)),
        host_budget_bytes=default_host_budget(devices),
        resized=state.resized,
        claims=frozenset(claims),
        links={(pair[0], pair[1]): points for pair, points in pairs.items() if len(pair) > 1},
    )


def _open_modes(state: NodeState, uuid: str) -> tuple[str, ...]:
    """Return the modes of which a GPU takes new shares, in the node's own order."""
    modes = state.offer.shared[uuid]
    allowed = narrowed(modes, state.mode_policies.get(uuid))
    return tuple(mode for mode in modes if mode in allowed)


def _mig(uuid: str, gpu: CutGpu, placed: Collection[tuple[str, MigPlace]]) -> NodeMig:
    names = gpu.names
    return NodeMig(
        profiles=gpu.profiles,
        # Idle slices give way to a share of another mode: for a scheduler MIG is off.
        is_enabled=gpu.is_enabled and not gpu.gives_way,
        slices=tuple(
            replace(each, holder="")
            for each in gpu.slices
            if each.profile in names
            and (uuid, MigPlace(names[each.profile], each.start)) not in placed
        ),
    )


class InventoryPublisher:
    """Keeps the annotation. For one event loop; needs `run` running."""

    def __init__(
        self,
        folder: StateFolder,
        *,
        state: NodeState,
        node: AnnotatedNode,
        pods: Pods,
        reports: Reports,
        least_s: float = LEAST_S,
        on_shares: Callable[[Sequence[LoadedShare]], None] | None = None,
    ) -> None:
        """`least_s`: from one write to the next. `on_shares` gets the node's shares each time."""
        self._shares = folder.shares
        self._bookings = Bookings(folder)
        self._state = state
        self._node = node
        self._pods = pods
        self._reports = reports
        self._least_s = least_s
        self._on_shares = on_shares
        self._reported = Reported[str]()
        self._wake = asyncio.Event()
        self._hurry = asyncio.Event()
        self._closed: tuple[Mapping[str, str], Collection[str]] = {}, frozenset()
        """Unusable and cordoned devices, as they were published last."""

    def wake(self) -> None:
        """Update soon."""
        self._wake.set()

    async def run(self) -> NoReturn:
        async with asyncio.TaskGroup() as group:
            changes = self._pods.changes(), self._state.changed.changes(), self._state.offers()
            for each in changes:
                group.create_task(self._follow(each))
            group.create_task(self._follow_cordons())
            group.create_task(self._follow_folder())
            await self._keep()
        raise AssertionError  # none of them ends by itself

    async def _follow(self, changes: AsyncIterator[object]) -> None:
        async for _ in changes:
            if (self._state.unusable, self._state.cordoned) != self._closed:
                self._hurry.set()
            self.wake()

    async def _follow_cordons(self) -> None:
        async for _ in self._node.changes():
            node = self._node.current
            if node is not None and (uuids := cordoned(node.annotations)) != self._state.cordoned:
                self._state.cordoned = uuids
                self._hurry.set()
                self.wake()

    async def _follow_folder(self) -> None:
        async for _ in poll_folders(self._shares, period_s=WATCH_S):
            self.wake()

    async def _keep(self) -> NoReturn:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._wake.wait()
            await asyncio.sleep(GATHER_S)
            self._wake.clear()
            self._hurry.clear()
            self._closed = self._state.unusable, self._state.cordoned
            await self._publish()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._least_s - GATHER_S)):
                    await self._hurry.wait()

    async def _publish(self) -> None:
        if not self._state.has_offer or not self._pods.is_synced:
            return  # an incomplete inventory would be wrong; the published one stays
        state = self._state
        try:
            is_asked = self._on_shares is not None or state.offer.parted
            shares = await asyncio.to_thread(self._read) if is_asked else []
            if self._on_shares is not None:
                self._on_shares(shares)
            inventory = build_inventory(
                state,
                {
                    **state.reserved_whole(),
                    **dict.fromkeys(state.cordoned, CORDONED),
                    **state.unusable,
                },
                taken=unplaced(shares, self._pods.get),
                placed=placed_slices(self._pods.all()),
                claims=claimed(shares, state.cut_gpus.values()),
            )
            text = None if inventory is None else encode(inventory)
        except (AllotError, ValueError) as error:
            # No inventory is better than a wrong one: schedulers skip this node.
            self._fail(str(error))
            text = None
        else:
            self._reported.over(DEVICES)
        self._node.set_annotation(DEVICES, text)

    def _read(self) -> list[LoadedShare]:
        """Read without the folder's lock: starts must not wait for this."""
        return self._bookings.read() if self._shares.is_dir() else []

    def _fail(self, problem: str) -> None:
        if self._reported.is_new(DEVICES, problem):
            text = f"cannot publish the GPU inventory: {problem}"
            self._reports.node("DevicesNotTold", text, is_warning=True)

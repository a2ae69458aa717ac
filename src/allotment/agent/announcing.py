# SPDX-License-Identifier: Apache-2.0
"""Tells schedulers what this node's devices are and what of them is not theirs to give.

    devices, health, cordons ─┐
    links                     ├──► NodeInventory ──► the annotation `allotment.dev/devices`
    shares without placement ─┘

It is written when it changes, and put right when somebody else changes it (`kube.nodes`). What
scheduled pods have is not in it: they come and go without a write to the node.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import replace
from typing import Final, NoReturn, Protocol

from allotment.agent.compute_modes import ComputeModes
from allotment.agent.cut_gpus import CutGpu
from allotment.agent.device_modes import DeviceModes
from allotment.agent.device_plugin.preferred import Links
from allotment.agent.protocols import Pods, Reports
from allotment.agent.resources import Offer, as_whole
from allotment.agent.slices import NodeSlices
from allotment.agent.tenancy.node_shares import CORDONED
from allotment.agent.tenancy.unplaced import placed_slices, unplaced
from allotment.kube.inventories import DEVICES, cordoned, encode
from allotment.model.clusters import NodeDevice, NodeInventory, NodeMig, Taken
from allotment.model.devices import Device
from allotment.model.errors import AllotError
from allotment.model.mig import MigPlace
from allotment.model.placements import MAX_SHARES
from allotment.model.requests import MIG
from allotment.shares.bookings import Bookings, default_host_budget
from allotment.shares.folders import StateFolder
from allotment.shares.found import Found
from allotment.shares.modes_of_gpus import Allowed, narrowed

__all__ = ["Announcing", "announced"]

_KEPT: Final = "kept for other modes than its own"
GATHER_S: Final = 0.2
"""What changes within so short a time is told at once."""
LEAST_S: Final = 2.0
"""From one look to the next: many pods that start at once are no reason for as many writes."""
WATCH_S: Final = 0.5
"""How often it is asked whether shares have come or gone: `allot run` tells nobody."""
LOOK_S: Final = 10.0
"""How often everything is looked at without news: `allot resize` and `suspend` change a share."""


class _Offering(Protocol):
    """What the node offers (`agent.offering`)."""

    @property
    def followers(self) -> list[Callable[[Offer], None]]: ...

    @property
    def current(self) -> Offer: ...

    @property
    def devices(self) -> Mapping[str, Device]: ...

    @property
    def unusable(self) -> Mapping[str, str]: ...


class _Says(Protocol):
    @property
    def annotations(self) -> Mapping[str, str]: ...


class _Node(Protocol):
    """This node's object (`kube.nodes.OwnNode`)."""

    @property
    def current(self) -> _Says | None: ...

    def changes(self) -> AsyncIterator[None]: ...

    def set_annotation(self, key: str, text: str | None) -> None: ...


def announced(
    offer: Offer,
    devices: Mapping[str, Device],
    problems: Mapping[str, str],
    *,
    taken: Mapping[str, Taken],
    links: Links,
    cut: Mapping[str, CutGpu] | None = None,
    placed: Collection[tuple[str, MigPlace]] = (),
    allowed: Mapping[str, Allowed] | None = None,
    paused: Mapping[str, str] | None = None,
) -> NodeInventory | None:
    """Return what is to be told; None: no device of the node is given in parts.

    `problems`, `taken`, `cut`, `allowed` and `paused` are by UUID; the last one says why MIG is not
    switched on for now. `placed` are the slices for which placements stand: a scheduler knows of
    them, and counts them. The node's name, CPU and memory are not in the annotation.
    """
    told = [as_whole(devices[uuid]) for uuid in offer.parted if uuid in devices]
    off = {
        uuid: why
        for uuid, why in (paused or {}).items()
        if uuid in (cut or {}) and not (cut or {})[uuid].is_enabled
    }
    migs = {uuid: _mig(uuid, each, placed) for uuid, each in (cut or {}).items() if uuid not in off}
    modes = {each.uuid: _open(offer, each.uuid, allowed or {}) for each in told}
    whys = {
        uuid: f"MIG is off, and {why}" for uuid, why in off.items() if MIG in modes.get(uuid, ())
    }
    if not told:
        return None
    there = {each.uuid for each in told}
    pairs = {tuple(sorted(pair)): points for pair, points in links.items() if pair <= there}
    return NodeInventory(
        name="",
        devices=tuple(
            NodeDevice(
                uuid=each.uuid,
                model=each.name,
                memory_bytes=each.allottable_bytes,
                index=each.index,
                numa_node=each.numa_node,
                modes=tuple(
                    mode
                    for mode in modes[each.uuid]
                    if mode != MIG or each.uuid in migs  # what it can be cut into is not known yet
                ),
                mig=migs.get(each.uuid),
                max_shares=MAX_SHARES,
                problem=problems.get(each.uuid)
                or (whys.get(each.uuid, "") if modes[each.uuid] == (MIG,) else "")
                or ("" if modes[each.uuid] else _KEPT),
                mig_off=whys.get(each.uuid, ""),
                taken=taken.get(each.uuid) or Taken(),
            )
            for each in told
        ),
        host_budget_bytes=default_host_budget(told),
        links={(pair[0], pair[1]): points for pair, points in pairs.items() if len(pair) > 1},
    )


def _open(offer: Offer, uuid: str, allowed: Mapping[str, Allowed]) -> tuple[str, ...]:
    """Return the modes of which a GPU takes new shares, the node's own order kept."""
    left = narrowed(offer.shared[uuid], allowed.get(uuid))
    return tuple(mode for mode in offer.shared[uuid] if mode in left)


def _mig(uuid: str, gpu: CutGpu, placed: Collection[tuple[str, MigPlace]]) -> NodeMig:
    names = gpu.names
    return NodeMig(
        profiles=gpu.profiles,
        # A share of another mode has it at once: to a scheduler it is as good as off.
        is_enabled=gpu.is_enabled and not gpu.gives_way,
        slices=tuple(
            replace(each, holder="")
            for each in gpu.slices
            if each.profile in names
            and (uuid, MigPlace(names[each.profile], each.start)) not in placed
        ),
    )


class Announcing:
    """Keeps the annotation. All of it belongs to one event loop; `run` has to be running."""

    def __init__(
        self,
        folder: StateFolder,
        *,
        offering: _Offering,
        node: _Node,
        pods: Pods,
        links: Callable[[], Links],
        reports: Reports,
        slices: NodeSlices | None = None,
        modes: DeviceModes | None = None,
        compute_modes: ComputeModes | None = None,
    ) -> None:
        """Take what it tells of, and where.

        `slices`: what GPUs are cut into for who asks; `modes`: what they are for; `compute_modes`:
        which of them somebody else keeps.
        """
        self._shares = folder.shares
        self._bookings = Bookings(folder)
        self._offering = offering
        self._node = node
        self._pods = pods
        self._links = links
        self._reports = reports
        self._slices = slices
        self._modes = modes
        self._compute_modes = compute_modes
        if compute_modes is not None:
            compute_modes.followers.append(self.wake)
        if modes is not None:
            modes.followers.append(self.wake)
        if slices is not None:
            slices.followers.append(self.wake)
        self._is_offered = False
        self._problem = ""
        self._cordoned: frozenset[str] = frozenset()
        self._wake = asyncio.Event()
        offering.followers.append(self._follow)

    @property
    def cordoned(self) -> frozenset[str]:
        """UUIDs of the devices that take nothing new, as the node's object says."""
        return self._cordoned

    def wake(self) -> None:
        """Something of it may have changed."""
        self._wake.set()

    async def run(self) -> NoReturn:
        """Tell until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_pods())
            group.create_task(self._follow_cordons())
            group.create_task(self._follow_folder())
            await self._keep()
        raise AssertionError  # none of them ends by itself

    # ---- news ----

    def _follow(self, _: Offer) -> None:
        self._is_offered = True
        self.wake()

    async def _follow_pods(self) -> None:
        async for _ in self._pods.changes():
            self.wake()

    async def _follow_cordons(self) -> None:
        async for _ in self._node.changes():
            node = self._node.current
            found = self._cordoned if node is None else cordoned(node.annotations)
            if found != self._cordoned:
                self._cordoned = found
                self.wake()

    async def _follow_folder(self) -> None:
        before = 0
        while True:
            with contextlib.suppress(OSError):  # emptied, or not made yet: then it is told of later
                now = os.stat(self._shares).st_mtime_ns  # noqa: PTH116 - twice a second
                if now != before:
                    before = now
                    self.wake()
            await asyncio.sleep(WATCH_S)

    # ---- telling ----

    async def _keep(self) -> NoReturn:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._wake.wait()
            await asyncio.sleep(GATHER_S)
            self._wake.clear()
            await self._tell()
            await asyncio.sleep(LEAST_S - GATHER_S)

    @property
    def kept(self) -> Mapping[str, str]:
        """Why GPUs take no share that somebody else keeps, by UUID; in MIG mode none is meant.

        There the driver asks each slice's own mode. From any thread.
        """
        kept = self._compute_modes.kept if self._compute_modes is not None else {}
        cut = self._slices.current if self._slices is not None else {}
        return {
            uuid: why for uuid, why in kept.items() if uuid not in cut or not cut[uuid].is_enabled
        }

    async def _tell(self) -> None:
        if not self._is_offered or not self._pods.is_synced:
            return  # what cannot be known yet would be told wrong; what was told before stays
        offer = self._offering.current
        try:
            shares = await asyncio.to_thread(self._read) if offer.parted else []
            inventory = announced(
                offer,
                self._offering.devices,
                {
                    **self.kept,
                    **dict.fromkeys(self._cordoned, CORDONED),
                    **self._offering.unusable,
                },
                taken=unplaced(shares, self._pods.get),
                links=self._links(),
                cut=self._slices.current if self._slices is not None else None,
                placed=placed_slices(self._pods.all()),
                allowed=self._modes.current if self._modes is not None else None,
                paused=self._slices.paused if self._slices is not None else None,
            )
            text = None if inventory is None else encode(inventory)
        except (AllotError, ValueError) as error:
            # Nothing is better than what is not so: no scheduler counts on this node then.
            self._fail(str(error))
            text = None
        else:
            self._problem = ""
        self._node.set_annotation(DEVICES, text)

    def _read(self) -> list[Found]:
        """Read what is booked; not under the folder's lock, since starts must not wait for this."""
        return self._bookings.read() if self._shares.is_dir() else []

    def _fail(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            text = f"the node's devices cannot be told to schedulers: {problem}"
            self._reports.node("DevicesNotTold", text, is_warning=True)

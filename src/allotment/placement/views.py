# SPDX-License-Identifier: Apache-2.0
"""What is left of a node's devices for one container, and their MIG layouts.

A container ignores containers of its pod that are never in use at the same time. `judge` evaluates
these states.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

from allotment.model.compute import WHOLE
from allotment.model.devices import Device
from allotment.model.mig import (
    MigHold,
    MigLayout,
    MigPlace,
    MigProfile,
    MigRequest,
    MigSlice,
)
from allotment.model.modes import SOFT, has_slices, traits_of
from allotment.model.placements import DeviceState
from allotment.model.requests import Request
from allotment.model.structs import replace
from allotment.placement.booking import Footprint, HeldPart, Load, footprint, host_part
from allotment.placement.constraints import link_score
from allotment.placement.mig import serving
from allotment.placement.mig.slots import cover

if TYPE_CHECKING:  # `allot run` starts without the scheduler's values
    from allotment.model.clusters import NodeDevice, NodeInventory, NodeMig, PlacedContainer


class DeviceRoom(msgspec.Struct, frozen=True, kw_only=True):
    """What one more share can use of a device."""

    model: str
    memory: int
    """Bytes available to shares in total."""
    free: int = WHOLE
    kept: int = 0
    """Time that is not guaranteed, beyond `free`: for shares without a compute request."""
    free_memory: int
    shares: int = 0
    modes: frozenset[str] = frozenset({SOFT})
    """Modes in which it takes one more share now: offered there, not blocked by other shares, with
    a free seat. Empty: none, because it is unhealthy, lost or cordoned."""
    numa_node: int | None = None
    layout: MigLayout | None = None
    """Its MIG layout, if it takes one more slice."""


class Hardware:
    """A node's devices without their use."""

    def __init__(self, inventory: NodeInventory) -> None:
        self.inventory = inventory
        self.devices = tuple(map(described_device, inventory.devices))
        self.columns = {each.uuid: column for column, each in enumerate(self.devices)}
        self._twins: dict[tuple[bool, bool], list[int]] = {}

    def twins(self, *, by_numa: bool, by_links: bool) -> list[int]:
        """Numbers of devices; interchangeable idle devices have the same number.

        They have one model and, if relevant, the same NUMA node and the same links.
        """
        known = self._twins.get((by_numa, by_links))
        if known is None:
            known = []
            for column in range(len(self.devices)):
                earlier = (at for at in range(column) if known[at] == at)
                alike = (at for at in earlier if self._is_twin(at, column, by_numa, by_links))
                known.append(next(alike, column))
            self._twins[by_numa, by_links] = known
        return known

    def _is_twin(self, one: int, other: int, by_numa: bool, by_links: bool) -> bool:  # noqa: FBT001 - private
        first, second = (self.inventory.devices[column] for column in (one, other))
        if by_numa and first.numa_node != second.numa_node:
            return False
        if (first.model, first.memory_bytes) != (second.model, second.memory_bytes):
            return False
        links = self.inventory.links
        return not by_links or all(
            link_score(links, first.uuid, each.uuid) == link_score(links, second.uuid, each.uuid)
            for column, each in enumerate(self.devices)
            if column not in {one, other}
        )


def described_device(device: NodeDevice) -> Device:
    """A node's device without what only its node knows."""
    return Device(
        uuid=device.uuid,
        name=device.model,
        index=device.index,
        memory_bytes=device.memory_bytes,
        sm_count=0,
        compute_capability=(0, 0),
        numa_node=device.numa_node,
        pci_bus_id="",
        simulated=False,
        mig=False,
    )


class View:
    """The node's devices under some load, for one pod with some containers placed."""

    def __init__(self, hardware: Hardware, loads: Sequence[Load]) -> None:
        self.hardware = hardware
        self._loads = loads
        self._base: list[DeviceState | None] = [None] * len(loads)
        self.may_overflow = any(load.oversubscribed for load in loads)
        promised = sum(
            load.on_host(device.memory_bytes)
            for load, device in zip(loads, hardware.inventory.devices, strict=True)
        )
        # A budget lowered below the bookings leaves none, and takes none back.
        self.host_left = max(0, hardware.inventory.host_budget_bytes - promised)

    def states(self, own: dict[str, HeldPart], *, outside: int = 0) -> list[DeviceState]:
        """Each device as a container sees it that has `own` of its pod beside it.

        `outside`: additional host memory behind the pod.
        """
        left = self.host_left - outside
        return [
            self._state(column, own.get(device.uuid), left)
            if outside or device.uuid in own
            else self.state(column)
            for column, device in enumerate(self.hardware.devices)
        ]

    def state(self, column: int) -> DeviceState:
        """One device as a pod without a booking here sees it."""
        known = self._base[column]
        if known is None:
            known = self._base[column] = self._state(column, None, self.host_left)
        return known

    def _state(self, column: int, own: HeldPart | None, left: int) -> DeviceState:
        load, device = self._loads[column], self.hardware.devices[column]
        there = self.hardware.inventory.devices[column]
        kept = reusable = 0
        other_modes: frozenset[str] = frozenset()
        own_slices: tuple[MigPlace, ...] = ()
        if own is not None:
            capacity = there.memory_bytes
            others = load
            load = load.copy()
            load.add(Footprint(own.part, own.shares, own.slices))
            kept, reusable, other_modes = own.kept, own.reusable, own.other_modes
            own_slices = own.handed_on
            # Promised on the same device to containers that never run at the same time.
            whole = host_part(
                capacity,
                others.fixed + own.whole.fixed,
                others.oversubscribed + own.whole.oversubscribed,
            )
            left += whole - load.on_host(capacity)
        return DeviceState(
            device,
            allotted_bytes=load.fixed + load.oversubscribed,
            problem=there.problem,
            mig_off=there.mig_off,
            oversubscribed_bytes=load.oversubscribed,
            host_budget_bytes=left,
            guaranteed=load.guarantee,
            floor=load.floor,
            shares=load.shares,
            mode=load.mode,
            reusable_bytes=reusable,
            most_shares=there.max_shares,
            seats_kept=kept,
            guaranteeable=there.guarantee,
            modes=frozenset(there.modes),
            affinities=frozenset(load.affinities),
            anti_affinities=frozenset(load.anti_affinities),
            exclusions=frozenset(load.exclusions),
            own_modes=other_modes,
            own_slices=own_slices,
            layout=None if there.mig is None else layout_of(there, load),
        )

    def on_host(self, placed: Sequence[PlacedContainer]) -> int:
        more = 0
        for uuid, there in footprint(placed).items():
            column = self.hardware.columns[uuid]
            load, capacity = (
                self._loads[column],
                self.hardware.inventory.devices[column].memory_bytes,
            )
            after = load.copy()
            after.add(there)
            more += after.on_host(capacity) - load.on_host(capacity)
        return more


_OF_A_POD = "a pod"
_STRANGE = -1
"""A profile id that no driver uses."""


def layout_of(device: NodeDevice, load: Load) -> MigLayout | None:
    """A device's layout; None: its node creates no slices, or other shares use it."""
    mig = device.mig
    is_of_others = bool(load.mode) and not traits_of(load.mode).is_slice
    if mig is None or is_of_others or not has_slices(device.modes):
        return None
    booked = [_booked(place, mig) for place in sorted(load.slices)]
    return MigLayout(
        gpu=device.uuid,
        profiles=mig.profiles,
        slices=(*booked, *_others(mig.slices, booked)),
        # MIG is on, or about to be, because a slice is booked.
        is_enabled=mig.is_enabled or bool(booked),
        model=device.model,
    )


def handed_on(
    layout: MigLayout, places: Collection[MigPlace], request: MigRequest
) -> list[tuple[MigProfile, int]]:
    """The pod's own slices that serve one more container, smallest first, with starts.

    `places`: slices of containers that never run at the same time.
    """
    if not places:
        return []
    return [
        (profile, place.start)
        for profile in serving(layout.profiles, request, model=layout.model)
        for place in sorted(places)
        if place.profile == profile.name
    ]


@lru_cache(maxsize=1024)
def slices_of(request: Request) -> MigRequest:
    """The request for slices.

    With a profile, a memory part is ignored: it is the default of requests.
    """
    memory = request.memory
    return MigRequest(
        profile=request.mig_profile,
        memory_bytes=memory.size_bytes or 0,
        memory_part=None if request.mig_profile else memory.part,
        compute=request.compute.guarantee,
        count=request.count,
        groups=request.mig_groups,
    )


@lru_cache(maxsize=1024)
def one_slice_of(request: Request) -> MigRequest:
    return replace(slices_of(request), count=1)


def _booked(place: MigPlace, mig: NodeMig) -> MigSlice:
    """A pod's slice. One of an unknown profile takes the whole GPU."""
    for profile in mig.profiles:
        if profile.name == place.profile:
            return MigSlice(
                profile=profile.number, start=place.start, size=profile.size, holder=_OF_A_POD
            )
    slots = max(
        (start + profile.size for profile in mig.profiles for start in profile.starts), default=1
    )
    named = f" of {place.profile}, which is not one of its profiles" if place.profile else ""
    return MigSlice(profile=_STRANGE, start=0, size=slots, holder=f"{_OF_A_POD}{named}")


def _others(slices: Iterable[MigSlice], booked: Iterable[MigSlice]) -> list[MigSlice]:
    mask, places = 0, set()
    for each in booked:
        mask |= cover(each.start, each.size)
        places.add((each.profile, each.start))
    return [
        slice_
        for slice_ in slices
        if (slice_.profile, slice_.start) not in places
        # The owner removes it, or assigns it to the pod.
        and not (slice_.hold is MigHold.IDLE and cover(slice_.start, slice_.size) & mask)
    ]

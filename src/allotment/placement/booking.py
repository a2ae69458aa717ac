# SPDX-License-Identifier: Apache-2.0
"""What pods use of devices: a pod's containers by phase, and the sums of pods on one device.

A pod counts with the maximum over its phases, as in Kubernetes and in the node's agent
(`allotment.shares.booking`). A slice of an init container stays booked as long as its pod. Sums are
exact integers, so removing a pod restores the earlier state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from allotment.model.accounting import (
    DeviceAmount,
    Phased,
    beside,
    device_amount,
    most_of,
    overlap,
    phases,
)
from allotment.model.mig import MigPlace
from allotment.model.modes import mode_of_all, traits_of
from allotment.model.structs import replace

if TYPE_CHECKING:  # `allot run` starts without the scheduler's values
    from allotment.model.clusters import NodeDevice, PlacedContainer

UNKNOWN = MigPlace("", 0)
"""A slice with unknown place."""


class Footprint(NamedTuple):
    """What one pod uses of one device, seen by all other pods."""

    part: DeviceAmount
    shares: tuple[PlacedContainer, ...]
    slices: tuple[MigPlace, ...] = ()

    @property
    def floor(self) -> int:
        """Basis points of its time that are kept from guarantees."""
        return max((each.floor for each in self.shares), default=0)


class Load(msgspec.Struct):
    """The total use of one device. Counts are numbers of shares."""

    fixed: int = 0
    oversubscribed: int = 0
    guarantee: int = 0
    shares: int = 0
    modes: dict[str, int] = msgspec.field(default_factory=dict)
    affinities: dict[str, int] = msgspec.field(default_factory=dict)
    anti_affinities: dict[str, int] = msgspec.field(default_factory=dict)
    exclusions: dict[str, int] = msgspec.field(default_factory=dict)
    floors: dict[int, int] = msgspec.field(default_factory=dict)
    """Number of shares by floor."""
    slices: dict[MigPlace, int] = msgspec.field(default_factory=dict)
    """Slices of pods. A count above 1 at one place means an invalid placement."""

    def copy(self) -> Load:
        return Load(
            self.fixed,
            self.oversubscribed,
            self.guarantee,
            self.shares,
            dict(self.modes),
            dict(self.affinities),
            dict(self.anti_affinities),
            dict(self.exclusions),
            dict(self.floors),
            dict(self.slices),
        )

    def add(self, there: Footprint, *, sign: int = 1) -> None:
        """Add a pod; `sign` -1: remove it."""
        part = there.part
        self.fixed += sign * part.fixed
        self.oversubscribed += sign * part.oversubscribed
        self.guarantee += sign * part.guarantee
        self.shares += sign * len(there.shares)
        for share in there.shares:
            _count(self.modes, share.mode, sign)
            _count(self.exclusions, share.exclusion or "", sign)
            if share.affinity:
                _count(self.affinities, share.affinity, sign)
            if share.anti_affinity:
                _count(self.anti_affinities, share.anti_affinity, sign)
            if share.floor:
                _count(self.floors, share.floor, sign)
        for place in there.slices:
            _count(self.slices, place, sign)

    @property
    def mode(self) -> str:
        """Mode of its shares; empty: no shares, or unknown."""
        return mode_of_all(self.modes)

    @property
    def floor(self) -> int:
        """Basis points of its time that are kept from guarantees."""
        return max(self.floors, default=0)

    def on_host(self, capacity: int) -> int:
        """Host memory that backs promises beyond the device's memory."""
        return host_part(capacity, self.fixed, self.oversubscribed)


_Key = TypeVar("_Key")


def _count(counts: dict[_Key, int], key: _Key, sign: int) -> None:
    number = counts.get(key, 0) + sign
    if number:
        counts[key] = number
    else:
        counts.pop(key, None)


def base_load(device: NodeDevice) -> Load:
    taken = device.taken
    # Any use counts as a share, even if no share was reported.
    shares = max(taken.shares, 1 if taken.memory or taken.guarantee else 0)
    load = Load(fixed=taken.memory, guarantee=taken.guarantee, shares=shares)
    if shares:
        load.modes[taken.mode] = shares
        load.exclusions[""] = shares
    return load


def footprint(containers: Sequence[PlacedContainer]) -> dict[str, Footprint]:
    """What a pod uses of each of its devices, by UUID, seen by all other pods."""
    if len(containers) == 1:
        only = containers[0]
        is_cut = traits_of(only.mode).is_slice
        return {
            uuid: Footprint(part, (only,), _places(uuid, only) if is_cut else ())
            for uuid, part in _parts(only).items()
        }
    found: dict[str, Footprint] = {}
    for uuid, here in _by_device(containers).items():
        slices = _slices(uuid, (one for _, one in here))
        found[uuid] = Footprint(
            _whole(here, slices),
            tuple(one for _, one in here),
            tuple(place for place, _ in slices.elements()),
        )
    return found


_Slices = Counter[tuple[MigPlace, DeviceAmount]]


def held_slices(containers: Sequence[PlacedContainer]) -> tuple[DeviceAmount, ...]:
    """Return what each slice has that a pod holds: all of them for as long as the pod is there."""
    uuids = dict.fromkeys(
        each.uuid for one in containers if traits_of(one.mode).is_slice for each in one.devices
    )
    return tuple(part for uuid in uuids for _, part in _slices(uuid, containers).elements())


class HeldPart(NamedTuple):
    """What a pod already uses of one device, seen by a further container of it."""

    part: DeviceAmount
    whole: DeviceAmount
    """Seen by all other pods."""
    shares: tuple[PlacedContainer, ...]
    """Containers that can be in use at the same time as this one."""
    kept: int
    """Number of the other containers; they keep their seats."""
    slices: tuple[MigPlace, ...]
    """Slices of all of them."""
    handed_on: tuple[MigPlace, ...]
    """Of these, slices that this container may reuse: their containers never run at the same time.
    """
    other_modes: frozenset[str]
    """Modes of the containers that are never in use at the same time as this one."""

    @property
    def reusable(self) -> int:
        """Bytes booked for the other containers, which this one can reuse."""
        return max(0, self.whole.memory - self.part.memory)


def seen(containers: Sequence[PlacedContainer], by: Phased) -> dict[str, HeldPart]:
    """What a pod's containers use of each device, seen by one more container."""
    found: dict[str, HeldPart] = {}
    for uuid, here in _by_device(containers).items():
        together = tuple(one for _, one in here if overlap(by, one))
        slices = _slices(uuid, (one for _, one in here))
        whole = _whole(here, slices)
        cut = (one for one in together if traits_of(one.mode).is_slice)
        used = {place for one in cut for place in _places(uuid, one)}
        found[uuid] = HeldPart(
            whole if slices else most_of(beside(by, here), DeviceAmount()),
            whole,
            together,
            kept=len(here) - len(together),
            slices=tuple(place for place, _ in slices.elements()),
            handed_on=tuple(place for place, _ in slices if place not in used),
            other_modes=frozenset(one.mode for _, one in here if one not in together),
        )
    return found


def _places(uuid: str, container: PlacedContainer) -> tuple[MigPlace, ...]:
    return tuple(each.slice or UNKNOWN for each in container.devices if each.uuid == uuid)


def _slices(uuid: str, containers: Iterable[PlacedContainer]) -> _Slices:
    """Return how often a pod has each slice of a device, with what that has: the most at once."""
    cut = [
        (
            Counter(
                (each.slice or UNKNOWN, DeviceAmount(fixed=each.memory, guarantee=each.guarantee))
                for each in one.devices
                if each.uuid == uuid
            ),
            one,
        )
        for one in containers
        if traits_of(one.mode).is_slice
    ]
    return most_of(phases(cut), Counter())


def _by_device(
    containers: Iterable[PlacedContainer],
) -> dict[str, list[tuple[DeviceAmount, PlacedContainer]]]:
    devices: dict[str, list[tuple[DeviceAmount, PlacedContainer]]] = {}
    for one in containers:
        for uuid, part in _parts(one).items():
            devices.setdefault(uuid, []).append((part, one))
    return devices


def _whole(
    here: Sequence[tuple[DeviceAmount, PlacedContainer]],
    slices: _Slices,
) -> DeviceAmount:
    """Return what a pod has of one device, as all others see it."""
    if not slices:
        return most_of(phases(here), DeviceAmount())
    uncut = [part for part, one in here if not traits_of(one.mode).is_slice]
    return sum((*uncut, *(part for _, part in slices.elements())), DeviceAmount())


def _parts(container: PlacedContainer) -> dict[str, DeviceAmount]:
    """Return what one container has of each device."""
    parts: dict[str, DeviceAmount] = {}
    for device in container.devices:
        part = device_amount(
            mode=container.mode,
            memory=device.memory,
            guarantee=device.guarantee,
            may_oversubscribe=container.may_oversubscribe,
        )
        before = parts.get(device.uuid)
        parts[device.uuid] = part if before is None else before + part
    return parts


def larger_of(
    one: Sequence[PlacedContainer], other: Sequence[PlacedContainer]
) -> tuple[PlacedContainer, ...]:
    """Return the larger amounts of each of a pod's containers, on the same devices."""
    others = {each.name: each for each in other}
    return tuple(_larger(each, others.get(each.name, each)) for each in one)


def _larger(one: PlacedContainer, other: PlacedContainer) -> PlacedContainer:
    devices = (
        replace(
            mine,
            memory=max(mine.memory, its.memory),
            guarantee=max(mine.guarantee, its.guarantee),
        )
        for mine, its in zip(one.devices, other.devices, strict=True)
    )
    parts = [each.part for each in (one, other) if each.part is not None]
    return replace(
        one,
        devices=tuple(devices),
        floor=max(one.floor, other.floor),
        part=max(parts, default=None),
    )


class Promised(NamedTuple):
    """Promised amounts of one device."""

    capacity: int
    fixed: int
    oversubscribed: int


def host_part(capacity: int, fixed: int, oversubscribed: int) -> int:
    """Host memory that backs promises beyond a device's capacity."""
    return max(0, fixed + oversubscribed - capacity)


def budget_left(budget: int, devices: Iterable[Promised]) -> int:
    """Rest of a machine's budget; negative if the budget was lowered below the bookings."""
    return budget - sum(host_part(*device) for device in devices)

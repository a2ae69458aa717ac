# SPDX-License-Identifier: Apache-2.0
"""What pods take of devices: a pod's containers by phase, and the sums of pods on one device.

A pod counts on each device as Kubernetes counts it: the most of what is in use at once, for each
amount by itself. The node's agent counts its shares the same way (`allotment.shares.bookings`), so
that what is decided here fits there. Slices are the exception: one of an init container stays for
as long as its pod does, and is the next container's as well only where that was given the very
same. All of it are sums of whole numbers: taking a pod away leaves exactly what was there before it
came, in whatever order pods come and go.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from allotment.model.clusters import NodeDevice, PlacedContainer
from allotment.model.mig import MigPlace
from allotment.model.phases import Phased, beside, overlap, phases
from allotment.model.requests import MIG, SOFT, TIMESLICE
from allotment.placement.constraints import exclusion_of
from allotment.placement.host_memory import host_part

__all__ = [
    "UNKNOWN",
    "Footprint",
    "Load",
    "Part",
    "Seen",
    "base_load",
    "footprint",
    "held_slices",
    "seen",
]

UNKNOWN = MigPlace("", 0)
"""A slice of which nobody knows where it is."""


class Part(NamedTuple):
    """An amount of one device. Bytes, and basis points of its time."""

    fixed: int = 0
    oversubscribed: int = 0
    """Memory that may live on the host."""
    guarantee: int = 0

    @property
    def memory(self) -> int:
        """Bytes, wherever they may live."""
        return self.fixed + self.oversubscribed

    def plus(self, other: "Part") -> "Part":
        """Return both together."""
        return Part(
            self.fixed + other.fixed,
            self.oversubscribed + other.oversubscribed,
            self.guarantee + other.guarantee,
        )

    def most(self, other: "Part") -> "Part":
        """Return what covers either."""
        return Part(
            max(self.fixed, other.fixed),
            max(self.oversubscribed, other.oversubscribed),
            max(self.guarantee, other.guarantee),
        )


class Footprint(NamedTuple):
    """What one pod has of one device, as all others see it."""

    part: Part
    shares: tuple[PlacedContainer, ...]
    slices: tuple[MigPlace, ...] = ()


@dataclass(slots=True)
class Load:
    """What all pods, and whoever else, have of one device. Counts are by how many shares."""

    fixed: int = 0
    oversubscribed: int = 0
    guarantee: int = 0
    shares: int = 0
    modes: dict[str, int] = field(default_factory=dict)
    affinities: dict[str, int] = field(default_factory=dict)
    anti_affinities: dict[str, int] = field(default_factory=dict)
    exclusions: dict[str, int] = field(default_factory=dict)
    slices: dict[MigPlace, int] = field(default_factory=dict)
    """Those that pods have. More than one of a place: somebody has written what cannot be."""

    def copy(self) -> "Load":
        """Return one that can be changed by itself."""
        return Load(
            self.fixed,
            self.oversubscribed,
            self.guarantee,
            self.shares,
            dict(self.modes),
            dict(self.affinities),
            dict(self.anti_affinities),
            dict(self.exclusions),
            dict(self.slices),
        )

    def add(self, there: Footprint, *, sign: int = 1) -> None:
        """Add a pod; `sign` -1: take it away."""
        part = there.part
        self.fixed += sign * part.fixed
        self.oversubscribed += sign * part.oversubscribed
        self.guarantee += sign * part.guarantee
        self.shares += sign * len(there.shares)
        for share in there.shares:
            _count(self.modes, share.mode, sign)
            _count(self.exclusions, exclusion_of(share.exclusion), sign)
            if share.affinity:
                _count(self.affinities, share.affinity, sign)
            if share.anti_affinity:
                _count(self.anti_affinities, share.anti_affinity, sign)
        for place in there.slices:
            _count(self.slices, place, sign)

    @property
    def memory(self) -> int:
        """Bytes, wherever they may live."""
        return self.fixed + self.oversubscribed

    @property
    def mode(self) -> str:
        """How its shares are enforced; empty where there are none, or nobody knows."""
        others = [mode for mode in self.modes if mode not in {SOFT, ""}]
        return min(others) if others else SOFT if SOFT in self.modes else ""

    def on_host(self, capacity: int) -> int:
        """Return how much host memory stands for what is promised beyond the device's."""
        return host_part(capacity, self.fixed, self.oversubscribed)


_Key = TypeVar("_Key")


def _count(counts: dict[_Key, int], key: _Key, sign: int) -> None:
    number = counts.get(key, 0) + sign
    if number:
        counts[key] = number
    else:
        counts.pop(key, None)


def base_load(device: NodeDevice) -> Load:
    """Return what those have of a device for whom no placement stands."""
    taken = device.taken
    # What has something of it is a share, also where nobody counted it.
    shares = max(taken.shares, 1 if taken.memory or taken.guarantee else 0)
    load = Load(fixed=taken.memory, guarantee=taken.guarantee, shares=shares)
    if shares:
        load.modes[taken.mode] = shares
        load.exclusions[""] = shares
    return load


def footprint(containers: Sequence[PlacedContainer]) -> dict[str, Footprint]:
    """Return what a pod has of each of its devices, by UUID, as all others see it."""
    if len(containers) == 1:
        only = containers[0]
        return {
            uuid: Footprint(part, (only,), _places(uuid, only) if only.mode == MIG else ())
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


def held_slices(containers: Sequence[PlacedContainer]) -> tuple[Part, ...]:
    """Return what each slice has that a pod holds: all of them for as long as the pod is there."""
    uuids = dict.fromkeys(
        each.uuid for one in containers if one.mode == MIG for each in one.devices
    )
    return tuple(part for uuid in uuids for _, part in _slices(uuid, containers).elements())


class Seen(NamedTuple):
    """What a pod has of one device already, as one more container of it sees that."""

    part: Part
    whole: Part
    """As all others see it."""
    shares: tuple[PlacedContainer, ...]
    """Those that can be in use at once with it."""
    kept: int
    """How many others there are: they have their seats."""
    slices: tuple[MigPlace, ...]
    """Of all of them."""
    handed_on: tuple[MigPlace, ...]
    """Of these, those that it may have as well: of containers that are never in use with it."""
    other_modes: frozenset[str]
    """Of those others."""

    @property
    def reusable(self) -> int:
        """Bytes that are booked for those others, and that it can have in their place."""
        return max(0, self.whole.memory - self.part.memory)


def seen(containers: Sequence[PlacedContainer], by: Phased) -> dict[str, Seen]:
    """Return what a pod's containers have of each device, as one more container sees it."""
    found: dict[str, Seen] = {}
    for uuid, here in _by_device(containers).items():
        together = tuple(one for _, one in here if overlap(by, one))
        slices = _slices(uuid, (one for _, one in here))
        whole = _whole(here, slices)
        used = {place for one in together if one.mode == MIG for place in _places(uuid, one)}
        found[uuid] = Seen(
            whole if slices else _most(beside(by, here)),
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


def _slices(uuid: str, containers: Iterable[PlacedContainer]) -> "Counter[tuple[MigPlace, Part]]":
    """Return how often a pod has each slice of a device, with what that has: the most at once."""
    cut = [
        (
            Counter(
                (each.slice or UNKNOWN, Part(fixed=each.memory, guarantee=each.guarantee))
                for each in one.devices
                if each.uuid == uuid
            ),
            one,
        )
        for one in containers
        if one.mode == MIG
    ]
    most: Counter[tuple[MigPlace, Part]] = Counter()
    for together in phases(cut):
        most |= sum(together, Counter())
    return most


def _by_device(
    containers: Iterable[PlacedContainer],
) -> dict[str, list[tuple[Part, PlacedContainer]]]:
    devices: dict[str, list[tuple[Part, PlacedContainer]]] = {}
    for one in containers:
        for uuid, part in _parts(one).items():
            devices.setdefault(uuid, []).append((part, one))
    return devices


def _whole(
    here: Sequence[tuple[Part, PlacedContainer]], slices: "Counter[tuple[MigPlace, Part]]"
) -> Part:
    """Return what a pod has of one device, as all others see it."""
    if not slices:
        return _most(phases(here))
    uncut = [part for part, one in here if one.mode != MIG]
    return _most([[*uncut, *(part for _, part in slices.elements())]])


def _most(together: Iterable[Sequence[Part]]) -> Part:
    most = Part()
    for parts in together:
        total = Part()
        for each in parts:
            total = total.plus(each)
        most = most.most(total)
    return most


def _parts(container: PlacedContainer) -> dict[str, Part]:
    """Return what one container has of each device; time-sliced ones are promised nothing."""
    parts: dict[str, Part] = {}
    for device in container.devices:
        if container.mode == TIMESLICE:
            part = Part()
        elif container.may_oversubscribe:
            part = Part(oversubscribed=device.memory, guarantee=device.guarantee)
        else:
            part = Part(fixed=device.memory, guarantee=device.guarantee)
        before = parts.get(device.uuid)
        parts[device.uuid] = part if before is None else before.plus(part)
    return parts

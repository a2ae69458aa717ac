# SPDX-License-Identifier: Apache-2.0
"""What pods take of devices: a pod's containers by phase, and the sums of pods on one device.

A pod counts on each device as Kubernetes counts it: the most of what is in use at once, for each
amount by itself. The node's agent counts its shares the same way (`allotment.shares.bookings`), so
that what is decided here fits there. All of it are sums of whole numbers: taking a pod away leaves
exactly what was there before it came, in whatever order pods come and go.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

from allotment.model.clusters import NodeDevice, PlacedContainer
from allotment.model.pods import ContainerKind
from allotment.model.requests import SOFT, TIMESLICE
from allotment.placement.constraints import exclusion_of
from allotment.placement.host_memory import host_part

__all__ = ["Footprint", "Load", "Part", "Seen", "base_load", "footprint", "overlap", "seen"]


class Phased(Protocol):
    """A container, as far as it says what it runs beside."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def kind(self) -> ContainerKind:
        """When it runs."""
        ...

    @property
    def place(self) -> int:
        """Its place among the pod's containers."""
        ...


_Each = TypeVar("_Each", bound=Phased)


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


def _count(counts: dict[str, int], key: str, sign: int) -> None:
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


def overlap(one: Phased, other: Phased) -> bool:
    """Tell whether two containers of one pod can run at the same time."""
    if one.name == other.name:
        return True
    if ContainerKind.INIT not in (one.kind, other.kind):
        return True
    if ContainerKind.SIDECAR not in (one.kind, other.kind):
        return False
    sidecar, init = (one, other) if one.kind is ContainerKind.SIDECAR else (other, one)
    return sidecar.place < init.place


def _phases(containers: Sequence[_Each]) -> Iterator[list[_Each]]:
    """Yield those that are in use at once, the largest sets."""
    has_init = False
    for init in containers:
        if init.kind is ContainerKind.INIT:
            has_init = True
            yield [each for each in containers if overlap(init, each)]
    last = [each for each in containers if each.kind is not ContainerKind.INIT]
    if last or not has_init:
        yield last


def _beside(by: Phased, containers: Sequence[_Each]) -> list[list[_Each]]:
    """Return who else of the pod is in use at once with one more container, by phase."""
    if by.kind is ContainerKind.INIT:
        return [[each for each in containers if overlap(by, each)]]
    return [
        phase
        for phase in _phases(containers)
        if all(overlap(by, each) for each in phase if each.kind is ContainerKind.INIT)
    ]


def footprint(containers: Sequence[PlacedContainer]) -> dict[str, Footprint]:
    """Return what a pod has of each of its devices, by UUID, as all others see it."""
    if len(containers) == 1:
        only = containers[0]
        return {uuid: Footprint(part, (only,)) for uuid, part in _parts(only).items()}
    return {
        uuid: Footprint(
            _most(_phases([one for one, _ in here]), {id(one): part for one, part in here}),
            tuple(one for one, _ in here),
        )
        for uuid, here in _by_device(containers).items()
    }


class Seen(NamedTuple):
    """What a pod has of one device already, as one more container of it sees that."""

    part: Part
    whole: Part
    """As all others see it."""
    shares: tuple[PlacedContainer, ...]
    """Those that can be in use at once with it."""
    kept: int
    """How many others there are: they have their seats."""

    @property
    def reusable(self) -> int:
        """Bytes that are booked for those others, and that it can have in their place."""
        return max(0, self.whole.memory - self.part.memory)


def seen(containers: Sequence[PlacedContainer], by: Phased) -> dict[str, Seen]:
    """Return what a pod's containers have of each device, as one more container sees it."""
    found: dict[str, Seen] = {}
    for uuid, here in _by_device(containers).items():
        parts = {id(one): part for one, part in here}
        group = [one for one, _ in here]
        part = _most(_beside(by, group), parts)
        together = tuple(one for one in group if overlap(by, one))
        whole = _most(_phases(group), parts)
        found[uuid] = Seen(part, whole, together, kept=len(group) - len(together))
    return found


def _by_device(
    containers: Iterable[PlacedContainer],
) -> dict[str, list[tuple[PlacedContainer, Part]]]:
    devices: dict[str, list[tuple[PlacedContainer, Part]]] = {}
    for one in containers:
        for uuid, part in _parts(one).items():
            devices.setdefault(uuid, []).append((one, part))
    return devices


def _most(phases: Iterable[Sequence[PlacedContainer]], parts: Mapping[int, Part]) -> Part:
    most = Part()
    for phase in phases:
        total = Part()
        for each in phase:
            total = total.plus(parts[id(each)])
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

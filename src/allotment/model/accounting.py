# SPDX-License-Identifier: Apache-2.0
"""What a pod takes by phase: the one rule for the node, the scheduler and quotas.

Containers of a pod run in phases: init containers one after the other, then the regular ones.
A pod counts as the most that it uses at once, for each amount by itself, as Kubernetes counts.
All sums are of whole numbers: removing a pod leaves exactly what there was before it.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import reduce
from operator import add, or_
from typing import NamedTuple, Protocol, Self, TypeVar

from allotment.model.modes import traits_of
from allotment.model.pods import ContainerKind


class Phased(Protocol):
    """A container, or anything of one container: when it runs."""

    @property
    def name(self) -> str:
        """The container's; unique in its pod."""
        ...

    @property
    def kind(self) -> ContainerKind: ...

    @property
    def place(self) -> int | None:
        """Among the pod's containers, init containers first, as specified; None: not known."""
        ...


class RunTime(NamedTuple):
    """When a container runs: the plainest `Phased`."""

    name: str
    kind: ContainerKind
    place: int | None


_Any = TypeVar("_Any")
_Key = TypeVar("_Key", bound=Hashable)
Member = tuple[_Any, Phased]
"""An amount or an id, and the container that it belongs to."""


def overlap(one: Phased, other: Phased) -> bool:
    """Return whether two containers of one pod can run at the same time.

    One container may have two shares, by two resources: these run together.
    """
    if one.name == other.name:
        return True
    kinds = {one.kind, other.kind}
    if ContainerKind.INIT not in kinds:
        return True
    if kinds != {ContainerKind.INIT, ContainerKind.SIDECAR}:
        return False
    sidecar, init = (one, other) if one.kind is ContainerKind.SIDECAR else (other, one)
    return sidecar.place is not None and init.place is not None and sidecar.place < init.place


def phases(members: Sequence[Member[_Any]]) -> Iterator[tuple[_Any, ...]]:
    """Yield the largest sets of a pod's members that are in use at the same time."""
    for phase in _phases(members):
        yield tuple(key for key, _ in phase)


def beside(by: Phased, members: Sequence[Member[_Any]]) -> tuple[tuple[_Any, ...], ...]:
    """Return the other members that are in use at once with one more container, by phase."""
    if by.kind is ContainerKind.INIT:
        return (tuple(key for key, each in members if overlap(by, each)),)
    found = tuple(
        tuple(key for key, _ in phase)
        for phase in _phases(members)
        # An init container's phase is one of this sidecar if they overlap.
        if all(overlap(by, each) for _, each in phase if each.kind is ContainerKind.INIT)
    )
    return found or ((),)


def holders(by: Phased, members: Iterable[Member[_Key]], now: Iterable[_Key]) -> set[_Key]:
    """Return whose guarantees are in force once the container of `by` starts.

    `members` are the pod's shares, that of `by` among them; `now` are those whose guarantees are in
    force. The result is always within one phase, so its sum was booked.
    """
    known = list(members)
    if by.kind is ContainerKind.SIDECAR:
        # It restarts at any time, and the phase then goes on; init containers before it are over.
        held = set(now)
        return {
            key
            for key, each in known
            if each.name == by.name or (key in held and overlap(by, each))
        }
    return {key for key, each in known if overlap(by, each)}


def _phases(members: Sequence[Member[_Any]]) -> Iterator[list[Member[_Any]]]:
    inits = {each.name: each for _, each in members if each.kind is ContainerKind.INIT}
    for init in inits.values():
        yield [member for member in members if overlap(init, member[1])]
    last = [member for member in members if member[1].kind is not ContainerKind.INIT]
    if last or not inits:
        yield last


class _Amount(Protocol):
    """Amounts that add up; `|` has the larger of each. A `Counter` is one."""

    def __add__(self, other: Self, /) -> Self: ...

    def __or__(self, other: Self, /) -> Self: ...


_A = TypeVar("_A", bound=_Amount)


def most_of(sets: Iterable[Iterable[_A]], nothing: _A) -> _A:
    """Return the most that any of these sets sums to, for each amount by itself."""
    return reduce(or_, (reduce(add, together, nothing) for together in sets), nothing)


class DeviceAmount(NamedTuple):
    """An amount of one device: bytes, and basis points of its time."""

    fixed: int = 0
    oversubscribed: int = 0
    """Memory that may live on the host."""
    guarantee: int = 0

    @property
    def memory(self) -> int:
        """Bytes, wherever they may live."""
        return self.fixed + self.oversubscribed

    def __add__(self, other: "DeviceAmount") -> "DeviceAmount":  # type: ignore[override]
        """Return both together."""
        return DeviceAmount(
            self.fixed + other.fixed,
            self.oversubscribed + other.oversubscribed,
            self.guarantee + other.guarantee,
        )

    def __or__(self, other: "DeviceAmount") -> "DeviceAmount":
        """Return the larger of each amount."""
        return DeviceAmount(
            max(self.fixed, other.fixed),
            max(self.oversubscribed, other.oversubscribed),
            max(self.guarantee, other.guarantee),
        )


def device_amount(
    *, mode: str, memory: int, guarantee: int, may_oversubscribe: bool
) -> DeviceAmount:
    """Return what a share is promised of one device; a time-sliced one is promised nothing."""
    if traits_of(mode).is_time_sliced:
        return DeviceAmount()
    if may_oversubscribe:
        return DeviceAmount(oversubscribed=memory, guarantee=guarantee)
    return DeviceAmount(fixed=memory, guarantee=guarantee)

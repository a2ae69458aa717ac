# SPDX-License-Identifier: Apache-2.0
"""Which containers of a pod run at the same time: only these need their parts side by side.

A pod's init containers run one after the other, each beside the sidecars that come before it; then
its regular containers run, beside all sidecars. Kubernetes counts a pod's resources so, and the
kubelet hands an ended init container's devices on to a later one. A share of a container stays
until that is known to have ended for good, so the shares of one pod are more than ever run at
once, and are booked by phase: by the scheduler as by the node, so that what one decides fits at the
other. docs/designs/pod-shares.md has the reasons. Pure.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from allotment.model.pods import ContainerKind

__all__ = ["Member", "Phased", "beside", "holders", "overlap", "phases"]


class Phased(Protocol):
    """A container, or what is a container's, as far as it says what it runs beside."""

    @property
    def name(self) -> str:
        """The container's, which it has alone in its pod."""
        ...

    @property
    def kind(self) -> ContainerKind:
        """When it runs."""
        ...

    @property
    def place(self) -> int | None:
        """Among the pod's containers, init containers first, as specified; None: not known."""
        ...


_Any = TypeVar("_Any")
_Key = TypeVar("_Key", bound=Hashable)
Member = tuple[_Any, Phased]
"""Whatever stands for a share, and whose it is."""


def overlap(one: Phased, other: Phased) -> bool:
    """Tell whether two containers of one pod can run at the same time.

    One container may have two shares, by two resources: these are of the same time.
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
    """Yield the sets of a pod's shares that are in use at the same time, the largest ones."""
    for phase in _phases(members):
        yield tuple(key for key, _ in phase)


def beside(by: Phased, members: Sequence[Member[_Any]]) -> tuple[tuple[_Any, ...], ...]:
    """Return who else of the pod is in use at once with one more container, by phase."""
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
    force. What comes out is always of one phase, so that its sum was booked.
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

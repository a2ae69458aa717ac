# SPDX-License-Identifier: Apache-2.0
"""Which containers of a pod run at the same time: only these need their parts side by side.

A pod's init containers run one after the other, each beside the sidecars that come before it; then
its regular containers run, beside all sidecars. Kubernetes counts a pod's resources so, and the
kubelet hands an ended init container's devices on to a later one. A share of a container stays
until that is known to have ended for good, so the shares of one pod are more than ever run at
once, and are booked by phase. docs/designs/pod-shares.md has the reasons. Pure.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

from allotment.model.pods import ContainerKind, Owner

__all__ = ["beside", "holders", "overlap", "phases"]

_Key = TypeVar("_Key", bound=Hashable)
Member = tuple[_Key, Owner]
"""A share, whatever stands for it, and whose it is."""


def overlap(one: Owner, other: Owner) -> bool:
    """Tell whether two containers of one pod can run at the same time.

    One container may have two shares, by two resources: these are of the same time.
    """
    if one.container == other.container:
        return True
    kinds = {one.kind, other.kind}
    if ContainerKind.INIT not in kinds:
        return True
    if kinds != {ContainerKind.INIT, ContainerKind.SIDECAR}:
        return False
    sidecar, init = (one, other) if one.kind is ContainerKind.SIDECAR else (other, one)
    return sidecar.place is not None and init.place is not None and sidecar.place < init.place


def phases(members: Sequence[Member[_Key]]) -> Iterator[tuple[_Key, ...]]:
    """Yield the sets of a pod's shares that are in use at the same time, the largest ones."""
    inits = {owner.container for _, owner in members if owner.kind is ContainerKind.INIT}
    for container in sorted(inits):
        init = next(owner for _, owner in members if owner.container == container)
        yield tuple(key for key, owner in members if overlap(init, owner))
    last = tuple(key for key, owner in members if owner.kind is not ContainerKind.INIT)
    if last or not inits:
        yield last


def beside(owner: Owner, members: Sequence[Member[_Key]]) -> tuple[tuple[_Key, ...], ...]:
    """Return who else of the pod is in use at once with one more container, by phase."""
    if owner.kind is ContainerKind.INIT:
        return (tuple(key for key, each in members if overlap(owner, each)),)
    known = [phase for phase in phases(members) if phase]
    by_key = dict(members)
    found = [
        phase
        for phase in known
        # An init container's phase is one of this sidecar if they overlap.
        if all(
            overlap(owner, by_key[key]) for key in phase if by_key[key].kind is ContainerKind.INIT
        )
    ]
    return tuple(found) or ((),)


def holders(owner: Owner, members: Iterable[Member[_Key]], now: Iterable[_Key]) -> set[_Key]:
    """Return whose guarantees are in force once the container of `owner` starts.

    `members` are the pod's shares, that of `owner` among them; `now` are those whose guarantees
    are in force. What comes out is always of one phase, so that its sum was booked.
    """
    known = list(members)
    if owner.kind is ContainerKind.SIDECAR:
        # It restarts at any time, and the phase then goes on; init containers before it are over.
        held = set(now)
        return {
            key
            for key, each in known
            if each.container == owner.container or (key in held and overlap(owner, each))
        }
    return {key for key, each in known if overlap(owner, each)}

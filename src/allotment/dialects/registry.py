# SPDX-License-Identifier: Apache-2.0
"""The dialects that a node and a scheduler read, and the functions that read a pod by them.

Other systems' dialects are not among them: their pods are translated when they are created.
"""

from collections.abc import Collection, Sequence

from allotment.dialects.allotment import RESOURCES, AllotmentDialect, with_preference
from allotment.dialects.annotations import wishes_of
from allotment.dialects.nvidia import NvidiaDialect
from allotment.dialects.protocol import Dialect, refusal
from allotment.model.clusters import WantedContainer
from allotment.model.pods import Container, ContainerAsk, Pod
from allotment.model.requests import SOFT

__all__ = ["asks_of", "dialects", "wanted"]


def dialects(*, nvidia: Collection[str]) -> tuple[Dialect, ...]:
    """Return all dialects; `nvidia` has the names of NVIDIA's resources that a node offers."""
    return (AllotmentDialect(), NvidiaDialect(set(nvidia) - set(RESOURCES)))


def asks_of(pod: Pod, *, nvidia: Collection[str]) -> tuple[ContainerAsk, ...]:
    """Say what each container of a pod asks for, in their order; empty: it asks for no GPU.

    `nvidia` has the names of NVIDIA's resources that the node offers. Raises `UsageError`: a pod
    that is wrong in one of its containers is refused as a whole, since it could never be whole.
    """
    speakers = {
        container.name: (container, dialect)
        for container in pod.containers
        if (dialect := _dialect_of(pod, container, dialects(nvidia=nvidia))) is not None
    }
    if not speakers:
        return ()
    takers = {name: dialect.takes for name, (_, dialect) in speakers.items()}
    wishes = wishes_of(pod, takers)
    return tuple(
        ask
        for name, (container, dialect) in speakers.items()
        for ask in dialect.asks(pod, container, wishes[name])
    )


def wanted(pod: Pod, *, modes: Sequence[str] = (SOFT,)) -> tuple[WantedContainer, ...]:
    """Say what a scheduler has to place of a pod, in the order of its containers; empty: nothing.

    That is what is asked for by Allotment's own resources; the kubelet chooses devices of others.
    A placement that is there already is not looked at. `modes` are for containers that leave it
    open, the best first. Raises `UsageError`.
    """
    dialect = AllotmentDialect()
    asking = [(place, each) for place, each in enumerate(pod.containers) if dialect.resources(each)]
    if not asking:
        return ()
    takers = {each.name: dialect.takes for _, each in asking}
    wishes = wishes_of(pod, takers, has_placement=False)
    return tuple(
        WantedContainer(
            name=each.name,
            request=with_preference(pod, each, wishes[each.name], modes=modes),
            kind=each.kind,
            place=place,
        )
        for place, each in asking
    )


def _dialect_of(pod: Pod, container: Container, known: tuple[Dialect, ...]) -> Dialect | None:
    """Return the dialect that a container speaks; None: it asks for no GPU."""
    spoken = [(dialect, found) for dialect in known if (found := dialect.resources(container))]
    if len(spoken) > 1:
        both = " and ".join(f"{dialect.name} {', '.join(found)}" for dialect, found in spoken)
        hint = "keep one of them: a container has whole GPUs or parts of GPUs, not both"
        raise refusal(pod, container.name, f"it asks for {both}", hint=hint)
    return spoken[0][0] if spoken else None

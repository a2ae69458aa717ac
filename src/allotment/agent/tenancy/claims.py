# SPDX-License-Identifier: Apache-2.0
"""Who holds these ids, which of them may be starting, and what is to be done for it. Pure.

The kubelet gives an id to one pod at a time, but to several of its containers: what an init
container held goes on to those after it (pkg/kubelet/cm/devicemanager/manager.go, devicesToReuse,
v1.36). So the pod is always certain, and the container is not: shares are made for all that it can
be, each under the name that its own answer gave.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from allotment.agent.protocols import CheckpointEntry
from allotment.agent.resources import Offer
from allotment.agent.tenancy.orders import ShareOrder, again, order_for, share_of
from allotment.model.errors import StateError
from allotment.model.pods import Container, ContainerKind, Pod
from allotment.model.quantities import MAX_BYTES
from allotment.model.shares import Share, ShareId

__all__ = ["Work", "claimants", "is_complete", "is_past_init", "superseded", "work_for"]


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be done so that a container can start."""

    make: tuple[ShareOrder, ...]
    """In this order: large ones first, since those of one pod can use the same place in turn."""
    starting: ShareId
    """The one that most likely is starting."""
    keep: frozenset[ShareId] = frozenset()
    """Of these, the shares that are there and are only completed."""
    end: tuple[ShareId, ...] = ()
    """What an earlier answer to the same containers left."""


def claimants(
    entries: Iterable[CheckpointEntry], resource: str, ids: frozenset[str]
) -> tuple[CheckpointEntry, ...]:
    """Return every container that holds just these ids; all are of one pod. Raises `StateError`."""
    found = tuple(each for each in entries if each.resource == resource and each.ids == ids)
    shown = ", ".join(sorted(ids))
    if not found:
        raise StateError(
            f"the kubelet's checkpoint has no container that holds {shown} of {resource}",
            hint="the kubelet asks again by itself; if it goes on, delete the pod",
        )
    pods = {each.pod for each in found}
    if len(pods) > 1:
        raise StateError(
            f"the kubelet's checkpoint gives {shown} of {resource} to several pods:"
            f" {', '.join(sorted(pods))}",
            hint="delete all but one of these pods; the kubelet clears its checkpoint then",
        )
    return found


def is_complete(claims: Iterable[CheckpointEntry], shares: Mapping[ShareId, Share]) -> bool:
    """Are all their shares there, so that nothing has to be known about the pod?"""
    return all(share_of(each) in shares for each in claims)


def is_past_init(pod: Pod) -> bool:
    """Have all of its init containers but the sidecars finished?"""
    return all(each.has_finished for each in pod.containers if each.kind is ContainerKind.INIT)


def work_for(
    pod: Pod | None,
    claims: tuple[CheckpointEntry, ...],
    offer: Offer,
    shares: Mapping[ShareId, Share],
    *,
    is_repeated: bool,
) -> Work:
    """Say what is to be done for containers of which one is starting.

    `pod` may be None only when all shares are there. `is_repeated`: the same ids were asked for a
    moment ago, so that the first attempt may have been for the wrong one. Raises `AllotError`.
    """
    chosen = _startable(pod, claims, is_repeated=is_repeated)
    orders = [_order(pod, entry, offer, shares) for entry in chosen]
    return Work(
        make=tuple(sorted(orders, key=_size, reverse=True)),
        starting=orders[-1].id,
        keep=frozenset(each.id for each in orders if each.id in shares),
        end=superseded(claims, shares),
    )


def _size(order: ShareOrder) -> tuple[int, Fraction, int]:
    request = order.request
    # A part of a device is taken for more than any number of bytes: most often it is all of it.
    part = request.memory.part or Fraction(0)
    size = part * MAX_BYTES + (request.memory.size_bytes or 0)
    return (request.count, size, request.compute.guarantee)


def superseded(
    entries: Iterable[CheckpointEntry], shares: Mapping[ShareId, Share]
) -> tuple[ShareId, ...]:
    """Return shares whose container has been given another one since."""
    current = {(each.pod, each.container, each.resource): share_of(each) for each in entries}
    named = set(current.values())
    return tuple(
        share.id
        for share in shares.values()
        if share.owner is not None
        and share.id not in named
        and (share.owner.uid, share.owner.container, share.owner.resource) in current
    )


def _order(
    pod: Pod | None, entry: CheckpointEntry, offer: Offer, shares: Mapping[ShareId, Share]
) -> ShareOrder:
    there = shares.get(share_of(entry))
    if there is not None:
        owner = there.owner
        if owner is None or (owner.uid, owner.container) != (entry.pod, entry.container):
            raise StateError(
                f"share {there.id} is {owner or there.name}'s, and the kubelet's checkpoint names"
                f" it for container {entry.container!r} of pod {entry.pod}",
                hint="delete the pod: it gets a name of its own then",
            )
        return again(there, owner)
    if pod is None:
        raise StateError(
            f"the API server has not told of pod {entry.pod} yet, whose container"
            f" {entry.container!r} is to start",
            hint="the kubelet asks again by itself; see that the node's agent reaches the API"
            " server",
        )
    return order_for(pod, entry, offer)


def _startable(
    pod: Pod | None, claims: tuple[CheckpointEntry, ...], *, is_repeated: bool
) -> tuple[CheckpointEntry, ...]:
    """Return who may be starting; last the one that most likely is.

    Containers that have finished do not start again, unless the pod's sandbox is made anew: then
    the kubelet repeats its question, and all are prepared.
    """
    if pod is None or len(claims) == 1:
        return claims
    rank = {each.name: index for index, each in enumerate(pod.containers)}
    ordered = sorted(claims, key=lambda each: rank.get(each.container, len(rank)))
    open_ones = [each for each in ordered if not _has_finished(pod, each)]
    if is_repeated or not open_ones:
        open_ones = ordered
    # The kubelet starts them in their order, so the first that is not known to have run is next.
    # Of those that have, the last: what came before it has ended, though nobody has said so yet.
    ahead = [each for each in open_ones if not _is_started(pod, each)]
    starting = ahead[0] if ahead else open_ones[-1]
    return (*(each for each in open_ones if each is not starting), starting)


def _container(pod: Pod, entry: CheckpointEntry) -> Container | None:
    return pod.container(entry.container)


def _has_finished(pod: Pod, entry: CheckpointEntry) -> bool:
    container = _container(pod, entry)
    return container is not None and container.has_finished


def _is_started(pod: Pod, entry: CheckpointEntry) -> bool:
    container = _container(pod, entry)
    return container is not None and container.is_started

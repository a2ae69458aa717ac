# SPDX-License-Identifier: Apache-2.0
"""Who holds these ids, which of them may be starting, and what is to be done for it. Pure.

The kubelet gives an id to one pod at a time, but to several of its containers: what an init
container held goes on to those after it (pkg/kubelet/cm/devicemanager/manager.go, devicesToReuse,
v1.36). So the pod is always certain, and the container is not: shares are made for all that it can
be, each under the name that its own answer gave.

Where that name is all that was handed in (CDI), a container whose share is not there cannot start
by mistake. So one that is not to be had keeps no other from starting.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from allotment.agent.protocols import CheckpointEntry
from allotment.agent.resources import Offer
from allotment.agent.tenancy.orders import ShareOrder, again, order_for, share_of
from allotment.model.errors import AllotError, StateError
from allotment.model.pods import Container, ContainerKind, Pod
from allotment.model.quantities import MAX_BYTES
from allotment.model.shares import Injection, Share, ShareId

__all__ = [
    "Starts",
    "Work",
    "claimants",
    "is_past_init",
    "needs_pod",
    "starts_of",
    "superseded",
    "work_for",
]

Starts = tuple[tuple[str, bool, int], ...]
"""Of containers: whether they have ever run, and how often they were started again."""


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
    may_fail: frozenset[ShareId] = frozenset()
    """Those without which others can start, since their own container cannot."""
    instead: frozenset[ShareId] = frozenset()
    """Those that may be starting in place of the likely one: they run before it, and are not known
    to be over."""
    failed: Mapping[ShareId, AllotError] = field(default_factory=dict)
    """What of `may_fail` cannot even be tried."""


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


def needs_pod(claims: Iterable[CheckpointEntry], shares: Mapping[ShareId, Share]) -> bool:
    """Does something have to be known about the pod, before any of them can start?"""
    known = tuple(claims)
    missing = [each for each in known if share_of(each) not in shares]
    # What has ended is not made again for a restart of which the API server knows nothing.
    is_any_there = len(missing) < len(known)
    return bool(missing) and not (is_any_there and all(map(_may_fail, missing)))


def starts_of(pod: Pod | None, claims: Iterable[CheckpointEntry]) -> Starts:
    """Return what tells whether one of them has started since this was asked last."""
    found = (pod.container(each.container) for each in claims) if pod else ()
    return tuple((each.name, each.is_started, each.restarts) for each in found if each)


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

    `pod` may be None where `needs_pod` says so. `is_repeated`: the same ids were asked for a moment
    ago, and none has started since, so that the first attempt may have been for the wrong one.
    Raises `AllotError` where nobody can start.
    """
    chosen = _startable(pod, claims, shares, is_repeated=is_repeated)
    starting = chosen[-1]
    orders: list[ShareOrder] = []
    failed: dict[ShareId, AllotError] = {}
    for entry in chosen:
        try:
            orders.append(_order(pod, entry, offer, shares))
        except AllotError as error:
            if not _may_fail(entry):
                raise
            failed[share_of(entry)] = error
    made = {each.id for each in orders}
    instead = _before(pod, starting, chosen)
    if share_of(starting) in failed and not instead & made:
        raise failed[share_of(starting)]
    return Work(
        make=tuple(sorted(orders, key=_size, reverse=True)),
        starting=share_of(starting),
        keep=frozenset(made & set(shares)),
        end=superseded(claims, shares),
        may_fail=frozenset(share_of(each) for each in chosen if _may_fail(each)),
        instead=instead,
        failed=failed,
    )


def _may_fail(entry: CheckpointEntry) -> bool:
    """Does its container wait for its share by itself, or need none of ours?"""
    return entry.share is None or entry.injection is Injection.CDI


def _before(
    pod: Pod | None, starting: CheckpointEntry, chosen: tuple[CheckpointEntry, ...]
) -> frozenset[ShareId]:
    names = [each.name for each in pod.containers] if pod else []
    if starting.container not in names:
        return frozenset()
    earlier = names[: names.index(starting.container)]
    return frozenset(share_of(each) for each in chosen if each.container in earlier)


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
    pod: Pod | None,
    claims: tuple[CheckpointEntry, ...],
    shares: Mapping[ShareId, Share],
    *,
    is_repeated: bool,
) -> tuple[CheckpointEntry, ...]:
    """Return who may be starting; last the one that most likely is.

    Containers that have finished do not start again, unless the pod's sandbox is made anew. The API
    server has them as finished until they run; but then none of the others runs, and the kubelet
    repeats its question. So all are prepared where that comes again and none has started between.
    """
    if pod is None or len(claims) == 1:
        return tuple(sorted(claims, key=lambda each: share_of(each) in shares))
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

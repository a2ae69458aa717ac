# SPDX-License-Identifier: Apache-2.0
"""Which containers hold these ids, which may be starting, and what to do for them. Pure.

The kubelet passes an init container's ids on to later containers of the pod
(pkg/kubelet/cm/devicemanager/manager.go, devicesToReuse, v1.36). So the pod is certain and the
container is not: every possible container gets the share that its answer named. With CDI, a
container without its share cannot start, so its failure delays no other.
"""

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

import msgspec

from allotment.agent.allocation.orders import again, order_for, share_of
from allotment.agent.protocols import CheckpointEntry
from allotment.agent.resources import Offer
from allotment.model.errors import AllotError, IdentityError
from allotment.model.pods import ContainerKind, Pod
from allotment.model.quantities import MAX_BYTES
from allotment.model.shares import Injection, Share, ShareId
from allotment.shares.placing import ShareOrder

Starts = tuple[tuple[str, bool, int], ...]
"""Containers' names, whether they have ever run, and their restarts."""


class ClaimWork(msgspec.Struct, frozen=True):
    """What to do so that a container can start."""

    make: tuple[ShareOrder, ...]
    """Large shares first: a pod's later containers can use the same place in turn."""
    starting: ShareId
    """The share of the container that most likely is starting."""
    keep: frozenset[ShareId] = frozenset()
    """Shares of `make` that exist and are only completed."""
    end: tuple[ShareId, ...] = ()
    """Shares of earlier answers to the same containers."""
    optional: frozenset[ShareId] = frozenset()
    """Shares whose failure delays only their own container."""
    alternatives: frozenset[ShareId] = frozenset()
    """Shares of earlier containers that may still be the starting one."""
    failed: Mapping[ShareId, AllotError] = msgspec.field(default_factory=dict)
    """Shares of `optional` for which no order could be made."""


def claimants(
    entries: Iterable[CheckpointEntry], resource: str, ids: frozenset[str]
) -> tuple[CheckpointEntry, ...]:
    """Return the containers of one pod that hold exactly these ids. Raises `IdentityError`."""
    claims = tuple(each for each in entries if each.resource == resource and each.ids == ids)
    shown = ", ".join(sorted(ids))
    if not claims:
        raise IdentityError(
            f"the kubelet's checkpoint has no container that holds {shown} of {resource}",
            hint="the kubelet asks again by itself; if it goes on, delete the pod",
        )
    pods = {each.pod for each in claims}
    if len(pods) > 1:
        raise IdentityError(
            f"the kubelet's checkpoint gives {shown} of {resource} to several pods:"
            f" {', '.join(sorted(pods))}",
            hint="delete all but one of these pods; the kubelet clears its checkpoint then",
        )
    return claims


def needs_pod(claims: Sequence[CheckpointEntry], shares: Mapping[ShareId, Share]) -> bool:
    """Return whether no container can start before the API server reports the pod."""
    missing = [each for each in claims if share_of(each) not in shares]
    # A share that ended is not made again for a restart that the API server has not reported.
    is_any_present = len(missing) < len(claims)
    return bool(missing) and not (is_any_present and all(map(_is_optional, missing)))


def starts_of(pod: Pod | None, claims: Iterable[CheckpointEntry]) -> Starts:
    """Return the starts of the containers: a change means that one has started since."""
    containers = (pod.container(each.container) for each in claims) if pod else ()
    return tuple((each.name, each.is_started, each.restarts) for each in containers if each)


def is_past_init(pod: Pod) -> bool:
    """Return whether all its init containers, without sidecars, have finished."""
    return all(each.has_finished for each in pod.containers if each.kind is ContainerKind.INIT)


def work_for(
    pod: Pod | None,
    claims: tuple[CheckpointEntry, ...],
    offer: Offer,
    shares: Mapping[ShareId, Share],
    *,
    is_repeated: bool,
) -> ClaimWork:
    """Return what to do for containers of which one is starting.

    `pod` may be None unless `needs_pod`. `is_repeated`: the same ids were requested a moment ago,
    and no container has started since. The first attempt may have been for the wrong container.
    Raises `AllotError` if no container can start.
    """
    chosen = _startable(pod, claims, shares, is_repeated=is_repeated)
    starting = chosen[-1]
    orders: list[ShareOrder] = []
    failed: dict[ShareId, AllotError] = {}
    for entry in chosen:
        try:
            orders.append(_order(pod, entry, offer, shares))
        except AllotError as error:
            if not _is_optional(entry):
                raise
            failed[share_of(entry)] = error
    made = {each.id for each in orders}
    alternatives = _earlier(pod, starting, chosen)
    if share_of(starting) in failed and not alternatives & made:
        raise failed[share_of(starting)]
    return ClaimWork(
        make=tuple(sorted(orders, key=_size, reverse=True)),
        starting=share_of(starting),
        keep=frozenset(made & set(shares)),
        end=superseded(claims, shares),
        optional=frozenset(share_of(each) for each in chosen if _is_optional(each)),
        alternatives=alternatives,
        failed=failed,
    )


def _is_optional(entry: CheckpointEntry) -> bool:
    """Return whether its container waits for its share by itself, or needs none of ours."""
    return entry.share is None or entry.injection is Injection.CDI


def _earlier(
    pod: Pod | None, starting: CheckpointEntry, chosen: tuple[CheckpointEntry, ...]
) -> frozenset[ShareId]:
    names = [each.name for each in pod.containers] if pod else []
    if starting.container not in names:
        return frozenset()
    earlier = names[: names.index(starting.container)]
    return frozenset(share_of(each) for each in chosen if each.container in earlier)


def _size(order: ShareOrder) -> tuple[int, Fraction, int]:
    request = order.request
    # A part of a device counts as more than any number of bytes: most often it is all of it.
    part = request.memory.part or Fraction(0)
    size = part * MAX_BYTES + (request.memory.size_bytes or 0)
    return (request.count, size, request.compute.guarantee)


def superseded(
    entries: Iterable[CheckpointEntry], shares: Mapping[ShareId, Share]
) -> tuple[ShareId, ...]:
    """Return shares whose container has got another answer since."""
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
    share = shares.get(share_of(entry))
    if share is not None:
        owner = share.owner
        if owner is None or (owner.uid, owner.container) != (entry.pod, entry.container):
            raise IdentityError(
                f"share {share.id} belongs to {owner or share.name}, and the kubelet's checkpoint"
                f" names it for container {entry.container!r} of pod {entry.pod}",
                hint="delete the pod: its successor gets a new share",
            )
        return again(share, owner)
    if pod is None:
        raise IdentityError(
            f"the API server has not reported pod {entry.pod} yet, whose container"
            f" {entry.container!r} is starting",
            hint="the kubelet asks again by itself; check that the node's agent reaches the API"
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
    """Return the entries of containers that may be starting; the most likely one last.

    A finished container starts again only in a new sandbox. The API server shows it as finished
    until it runs. But then no other container runs, and the kubelet repeats its call. So all
    shares are prepared if the call is repeated and no container has started between.
    """
    if pod is None or len(claims) == 1:
        return tuple(sorted(claims, key=lambda each: share_of(each) in shares))
    names = [container.name for container in pod.containers]
    finished = {container.name for container in pod.containers if container.has_finished}
    started = {container.name for container in pod.containers if container.is_started}
    ordered = sorted(
        claims,
        key=lambda each: names.index(each.container) if each.container in names else len(names),
    )
    possible = [each for each in ordered if each.container not in finished]
    if is_repeated or not possible:
        possible = ordered
    # The kubelet starts them in order, so the first that has never run is next. If all have run, it
    # is the last: earlier ones have ended, though the API server has not reported it yet.
    ahead = [each for each in possible if each.container not in started]
    starting = ahead[0] if ahead else possible[-1]
    return (*(each for each in possible if each is not starting), starting)

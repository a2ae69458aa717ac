# SPDX-License-Identifier: Apache-2.0
"""Which shares have served their time, and which are missing. Pure.

What may still be needed is never ended: a share goes when its pod is known to be gone or to have
ended, or its container has finished for good and is no init container. Whether any process is still
in it is asked by whoever ends it. While the API server is away, nothing is known to be gone.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from allotment.agent.protocols import CheckpointEntry
from allotment.agent.resources import Offer
from allotment.agent.tenancy.claims import superseded
from allotment.agent.tenancy.orders import holds_gpus, share_of
from allotment.model.pods import ContainerKind, Pod, PodUid
from allotment.model.shares import Share, ShareId

__all__ = ["FINISHED_GRACE_S", "Due", "Findings", "Why", "reconcile", "served"]

FINISHED_GRACE_S = 10.0
"""How old a share is at least when its finished container ends it. A container that starts again in
a new sandbox is shown as finished until it runs."""


class Why(StrEnum):
    """Why a share has served its time."""

    POD_GONE = "pod-gone"
    POD_ENDED = "pod-ended"
    CONTAINER_FINISHED = "container-finished"
    SUPERSEDED = "superseded"


@dataclass(frozen=True, slots=True)
class Due:
    """A share that is to be ended."""

    share: Share
    why: Why


@dataclass(frozen=True, slots=True)
class Findings:
    """What a look at everything has found."""

    due: tuple[Due, ...]
    missing: tuple[CheckpointEntry, ...]
    """Containers that run, or were given something by another plugin, and have no share."""
    next_in_s: float | None
    """When a share will be due that is not yet, in seconds; None: that depends on news."""


def reconcile(
    shares: Mapping[ShareId, Share],
    pods: Mapping[PodUid, Pod],
    *,
    is_synced: bool,
    entries: Iterable[CheckpointEntry] | None,
    offer: Offer,
    now: float,
) -> Findings:
    """Compare what is there with what is known.

    `is_synced`: every pod of the node has been heard of, so that one that is not in `pods` is gone.
    `entries` None: the checkpoint could not be read. `now`: seconds after the epoch.
    """
    known = None if entries is None else tuple(entries)
    stale = _replaced(known or (), shares)
    due, waits = [], []
    for share in shares.values():
        pod = pods.get(share.owner.uid) if share.owner else None
        why = Why.SUPERSEDED if share.id in stale else served(share, pod, is_synced=is_synced)
        if why is None:
            continue
        left = share.created + FINISHED_GRACE_S - now
        # A clock that was set back must not keep it for longer than the grace.
        if why is Why.CONTAINER_FINISHED and 0 < left <= FINISHED_GRACE_S:
            waits.append(left)
        else:
            due.append(Due(share, why))
    return Findings(
        due=tuple(due),
        missing=_missing(known or (), pods, shares, offer),
        next_in_s=min(waits, default=None),
    )


def served(share: Share, pod: Pod | None, *, is_synced: bool) -> Why | None:
    """Return why a share has served its time, going by its pod alone; None: it has not."""
    if share.owner is None:
        return None
    if pod is None:
        return Why.POD_GONE if is_synced else None
    if pod.has_ended:
        return Why.POD_ENDED
    container = pod.container(share.owner.container)
    if container is None or not container.has_finished:
        return None
    # An init container runs again when its pod gets another sandbox, under the same name, and
    # Kubernetes counts the greater of it and the others for as long as the pod is there.
    return None if container.kind is ContainerKind.INIT else Why.CONTAINER_FINISHED


def _replaced(
    entries: tuple[CheckpointEntry, ...], shares: Mapping[ShareId, Share]
) -> frozenset[ShareId]:
    """Return shares whose successor is there.

    Until it is, the container of the former may run: the kubelet asks anew for containers that run
    when it has lost its checkpoint.
    """
    there = [each for each in entries if share_of(each) in shares]
    named = {share_of(each) for each in entries}
    return frozenset(each for each in superseded(there, shares) if each not in named)


def _missing(
    entries: tuple[CheckpointEntry, ...],
    pods: Mapping[PodUid, Pod],
    shares: Mapping[ShareId, Share],
    offer: Offer,
) -> tuple[CheckpointEntry, ...]:
    return tuple(each for each in entries if _is_missing(each, pods.get(each.pod), shares, offer))


def _is_missing(
    entry: CheckpointEntry, pod: Pod | None, shares: Mapping[ShareId, Share], offer: Offer
) -> bool:
    if share_of(entry) in shares or pod is None or pod.has_ended:
        return False
    container = pod.container(entry.container)
    if container is None or container.has_finished:
        return False
    whose = (entry.pod, entry.container, entry.resource)
    if any(
        (each.owner.uid, each.owner.container, each.owner.resource) == whose
        for each in shares.values()
        if each.owner
    ):
        # The kubelet has lost its checkpoint and given another answer; it runs with the former.
        return False
    # What starts from now on is prepared when it starts. What another plugin gave never asks.
    if entry.share is None:
        return holds_gpus(entry, offer)
    return container.is_started and offer.resource(entry.resource) is not None

# SPDX-License-Identifier: Apache-2.0
"""Which shares are no longer needed, and which are missing. Pure.

A share ends when its pod is certainly gone or has ended, or when its container has finished for
good and is no init container. The caller checks for processes in it. While the API server is away,
no pod counts as gone.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from enum import StrEnum

import msgspec

from allotment.agent.allocation.claims import superseded
from allotment.agent.allocation.orders import holds_gpus, share_of
from allotment.agent.mig.state import CutGpu
from allotment.agent.protocols import CheckpointEntry
from allotment.agent.resources import Offer
from allotment.dialects import asks_of
from allotment.dialects.own.allotment import GPU, GPU_COMPUTE, GPU_MEMORY
from allotment.dialects.own.placement import PLACEMENT, RESIZE, accepted_resize, read_booking
from allotment.model.accounting import Member, RunTime, most_of, phases
from allotment.model.clusters import AcceptedResize, PlacedContainer, PlacedDevice, TakenPart
from allotment.model.compute import MOST_COMPUTE, WHOLE, Compute, exceeds, greater, in_full
from allotment.model.errors import UsageError
from allotment.model.formats import format_bytes
from allotment.model.mig import MigPlace
from allotment.model.pods import ContainerKind, Pod, PodUid
from allotment.model.quantities import MAX_BYTES
from allotment.model.shares import Share, ShareId
from allotment.model.structs import replace
from allotment.modes import traits_of
from allotment.shares.booking import booked
from allotment.shares.folders import RUN_FOLDER
from allotment.shares.record import LoadedShare

FINISHED_GRACE_S = 10.0
"""The least age of a share that ends with its container. A container that starts again in a new
sandbox is shown as finished until it runs."""


class Why(StrEnum):
    """Why a share is no longer needed."""

    POD_GONE = "pod-gone"
    POD_ENDED = "pod-ended"
    CONTAINER_FINISHED = "container-finished"
    SUPERSEDED = "superseded"
    CLAIM_RELEASED = "claim-released"


class Due(msgspec.Struct, frozen=True):
    """A share to end."""

    share: Share
    why: Why


class Findings(msgspec.Struct, frozen=True):
    """The differences between shares, pods and checkpoint."""

    due: tuple[Due, ...]
    missing: tuple[CheckpointEntry, ...]
    """Containers without a share that run, or that another plugin gave GPUs."""
    next_in_s: float | None
    """Seconds until the next share is due; None: that depends on news."""


def reconcile(
    shares: Mapping[ShareId, Share],
    pods: Mapping[PodUid, Pod],
    *,
    is_synced: bool,
    entries: Iterable[CheckpointEntry] | None,
    offer: Offer,
    now: float,
) -> Findings:
    """Compare shares with pods and the checkpoint's entries.

    `is_synced`: all pods of the node have been reported; one that is not in `pods` is gone.
    `entries` None: the checkpoint could not be read. `now`: seconds after the epoch.
    """
    known = tuple(entries or ())
    stale = _replaced(known, shares)
    due, waits = [], []
    for share in shares.values():
        pod = pods.get(share.owner.uid) if share.owner else None
        why = Why.SUPERSEDED if share.id in stale else served(share, pod, is_synced=is_synced)
        if why is None:
            continue
        left = share.created + FINISHED_GRACE_S - now
        # A clock that was set back must not prolong the grace.
        if why is Why.CONTAINER_FINISHED and 0 < left <= FINISHED_GRACE_S:
            waits.append(left)
        else:
            due.append(Due(share, why))
    return Findings(
        due=tuple(due),
        missing=tuple(
            each for each in known if _is_missing(each, pods.get(each.pod), shares, offer)
        ),
        next_in_s=min(waits, default=None),
    )


def resized_pods(shares: Iterable[Share], pods: Mapping[PodUid, Pod]) -> tuple[Pod, ...]:
    """Return the pods whose shares may have to follow `allotment.dev/resize`."""
    changed = {share.owner.uid for share in shares if share.owner and share.is_resized}
    return tuple(
        pod
        for pod in pods.values()
        if not pod.has_ended and (pod.uid in changed or accepted_resize(pod) != AcceptedResize())
    )


def released(shares: Iterable[Share], pods: Iterable[Pod]) -> Mapping[str, int]:
    """Return by how much resized pods have less than their resources ask for, by resource.

    Below 0: they have more. Memory of a container that names no amount is not counted, as in
    kube-scheduler.
    """
    present: Counter[tuple[PodUid, str, str]] = Counter()
    for share in shares:
        is_fixed = bool(traits_of(share.mode).fixed_because)
        if share.owner is not None and share.owner.resource == GPU and not is_fixed:
            key = share.owner.uid, share.owner.container
            present[*key, GPU_MEMORY] = sum(each.memory_bytes for each in share.devices)
            guarantee = sum(each.compute.guarantee for each in share.devices)
            present[*key, GPU_COMPUTE] = -(-guarantee * 100 // WHOLE)
    found = Counter({GPU_MEMORY: 0, GPU_COMPUTE: 0})
    for pod in pods:
        counted: list[Member[Counter[str]]] = []
        has: list[Member[Counter[str]]] = []
        for place, container in enumerate(pod.containers):
            when = RunTime(container.name, container.kind, place)
            asked = Counter({name: container.resources.get(name, 0) for name in found})
            counted.append((asked, when))
            now = Counter(
                {
                    name: amount
                    if name == GPU_MEMORY and name not in container.resources
                    else present.get((pod.uid, container.name, name), amount)
                    for name, amount in asked.items()
                }
            )
            has.append((now, when))
        found.update(most_of(phases(counted), Counter()))
        found.subtract(most_of(phases(has), Counter()))
    return {name: amount for name, amount in found.items() if amount}


def served(share: Share, pod: Pod | None, *, is_synced: bool) -> Why | None:
    """Return why a share is no longer needed, by its pod alone; None: it is needed."""
    if share.owner is None or share.owner.is_claim:
        return None
    if pod is None:
        return Why.POD_GONE if is_synced else None
    if pod.has_ended:
        return Why.POD_ENDED
    container = pod.container(share.owner.container)
    if container is None or not container.has_finished:
        return None
    # An init container runs again in a new sandbox, under the same name. Kubernetes counts the
    # greater of it and the other containers as long as the pod exists.
    return None if container.kind is ContainerKind.INIT else Why.CONTAINER_FINISHED


def _replaced(
    entries: tuple[CheckpointEntry, ...], shares: Mapping[ShareId, Share]
) -> frozenset[ShareId]:
    """Return shares whose successor exists.

    Before that, the former share's container may run: a kubelet that lost its checkpoint allocates
    again for running containers.
    """
    present = [each for each in entries if share_of(each) in shares]
    named = {share_of(each) for each in entries}
    return frozenset(each for each in superseded(present, shares) if each not in named)


def _is_missing(
    entry: CheckpointEntry, pod: Pod | None, shares: Mapping[ShareId, Share], offer: Offer
) -> bool:
    if share_of(entry) in shares or pod is None or pod.has_ended:
        return False
    container = pod.container(entry.container)
    if container is None or container.has_finished:
        return False
    holder = (entry.pod, entry.container, entry.resource)
    if any(
        (each.owner.uid, each.owner.container, each.owner.resource) == holder
        for each in shares.values()
        if each.owner
    ):
        # The kubelet lost its checkpoint and got another answer; the container has the former one.
        return False
    # `PreStartContainer` prepares later starts, but does not come for another plugin's containers.
    if entry.share is None:
        return holds_gpus(entry, offer)
    return container.is_started and offer.resource(entry.resource) is not None


def unplaced(
    shares: Iterable[LoadedShare], pod: Callable[[PodUid], Pod | None]
) -> Mapping[str, TakenPart]:
    """Return the part of each device, by UUID, that shares use without a placement.

    `pod` returns a pod by its uid.
    """
    counted = [rest for each in shares if (rest := _rest(each, pod)) is not None]
    return {
        uuid: TakenPart(booking.memory, booking.guaranteed, booking.shares, booking.mode)
        for uuid, booking in booked(counted).items()
    }


def claimed(shares: Iterable[LoadedShare], gpus: Iterable[CutGpu]) -> frozenset[ShareId]:
    """Return the shares of claims that an inventory counts: of slices, once their GPU has them."""
    holders = {each.holder for gpu in gpus for each in gpu.slices}
    return frozenset(
        each.id
        for each in shares
        if each.owner is not None
        and each.owner.is_claim
        and (each.id in holders or not traits_of(each.mode).is_slice)
    )


def placed_slices(pods: Iterable[Pod]) -> frozenset[tuple[str, MigPlace]]:
    """Return the slices that pods' placements name, with their GPU's UUID."""
    return frozenset(
        (one.uuid, one.slice)
        for pod in pods
        if not pod.has_ended
        for container in _containers(pod)
        for one in container.devices
        if one.slice is not None
    )


def _rest(found: LoadedShare, pod: Callable[[PodUid], Pod | None]) -> LoadedShare | None:
    """Return the part of a share that its pod's placement does not count; None: no part."""
    share = found.share
    if share is None or share.owner is None:
        return found
    owner = pod(share.owner.uid)
    # The scheduler does not count an ended pod, even if its share remains.
    if owner is None or owner.has_ended:
        return found
    if traits_of(share.mode).is_slice:
        return None  # its slices count, not a part of the GPU
    placed = {
        device.uuid: device
        for container in _containers(owner)
        if container.name == share.owner.container
        for device in container.devices
    }
    if not {each.uuid for each in share.devices} <= placed.keys():
        return found
    return _grown(found, share, placed)


def beyond_promise(share: Share, pod: Pod | None) -> str:
    """Say which amounts in a share's record are more than its pod has; empty: none.

    Its placement counts, and its request: all of its compute, and without a placement its bytes.
    """
    if pod is None or share.owner is None or traits_of(share.mode).fixed_because:
        return ""
    name = share.owner.container
    placed = {
        device.uuid: device
        for container in _containers(pod)
        for device in container.devices
        if container.name == name
    }
    memory, compute = _asked(pod, name)
    more = []
    for each in share.devices:
        most_bytes, most = memory, compute
        if placed:
            device = placed.get(each.uuid) or PlacedDevice(each.uuid, MAX_BYTES, WHOLE)
            most_bytes, guarantee = device.memory, device.guarantee
            most = replace(compute, guarantee=guarantee, ceiling=max(compute.ceiling, guarantee))
        if each.memory_bytes > most_bytes:
            has, allowed = map(format_bytes, (each.memory_bytes, most_bytes))
            more.append((f"{has} of {each.uuid}", allowed))
        if exceeds(each.compute, most):
            has, allowed = map(in_full, (each.compute, most))
            more.append((f"compute {has} of {each.uuid}", allowed))
    text = "; ".join(
        f"the share's record allows {has}; the pod's placement or request allows {allowed}"
        for has, allowed in more
    )
    return text and f"{text}: create the pod again, and look for pods that can write {RUN_FOLDER}"


def _asked(pod: Pod, container: str) -> tuple[int, Compute]:
    """Return the bytes and the compute of each GPU that a container may have by its request.

    A resize that its node refuses, because more memory is in use, leaves the compute as before.
    Without a placement a resize changes class and weight, and raises nothing else.
    """
    for annotations in (pod.annotations, _without_resize(pod.annotations)):
        with suppress(UsageError):  # a refused resize, or annotations that changed since its start
            for ask in asks_of(replace(pod, annotations=annotations), nvidia=()):
                if ask.container == container and ask.request and ask.own:
                    most = greater(ask.own.compute, ask.request.compute)
                    return ask.own.memory.size_bytes or MAX_BYTES, most
            break
    return MAX_BYTES, MOST_COMPUTE


def _without_resize(annotations: Mapping[str, str]) -> Mapping[str, str]:
    return {key: text for key, text in annotations.items() if key != RESIZE}


def _containers(pod: Pod) -> tuple[PlacedContainer, ...]:
    try:
        booking = read_booking(pod.annotations.get(PLACEMENT, ""), uid=pod.uid, node=pod.node)
    except UsageError:
        return ()  # the scheduler does not count it either
    return booking.containers


def _grown(
    found: LoadedShare, share: Share, placed: Mapping[str, PlacedDevice]
) -> LoadedShare | None:
    """Return the part of a share beyond its placement; None: no part.

    A share is made by its pod's request at its start. If that is more than the placement, the
    scheduler would give the difference to another pod, which could never start.
    """
    more = tuple(
        replace(
            each,
            memory_bytes=max(0, each.memory_bytes - there.memory),
            compute=Compute(guarantee=max(0, each.compute.guarantee - there.guarantee)),
        )
        for each in share.devices
        if each.memory_bytes > (there := placed[each.uuid]).memory
        or each.compute.guarantee > there.guarantee
    )
    return replace(found, share=replace(share, devices=more)) if more else None

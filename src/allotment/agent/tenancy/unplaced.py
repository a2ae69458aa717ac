# SPDX-License-Identifier: Apache-2.0
"""What of the devices is given away that no scheduler's placement stands for. Pure.

A scheduler counts what it has placed by what it wrote on the pods. The rest only the node knows:
`allot run`, pods that the agent placed by itself or that another plugin gave something, and shares
that are still there although their pod is gone. Both together are all that is booked, and nothing
is in both.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from allotment.dialects.decisions import read_booking
from allotment.dialects.placements import PLACEMENT
from allotment.model.clusters import PlacedContainer, PlacedDevice, Taken
from allotment.model.compute import Compute
from allotment.model.errors import UsageError
from allotment.model.mig import MigPlace
from allotment.model.pods import Pod, PodUid
from allotment.model.requests import MIG
from allotment.model.shares import Share
from allotment.shares.bookings import booked
from allotment.shares.found import Found

__all__ = ["placed_slices", "unplaced"]


def unplaced(shares: Iterable[Found], pod: Callable[[PodUid], Pod | None]) -> Mapping[str, Taken]:
    """Return what is taken of each device, by UUID; `pod` finds those that there are."""
    counted = [rest for each in shares if (rest := _rest(each, pod)) is not None]
    return {
        uuid: Taken(booking.memory, booking.guaranteed, booking.shares, booking.mode)
        for uuid, booking in booked(counted).items()
    }


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


def _rest(found: Found, pod: Callable[[PodUid], Pod | None]) -> Found | None:
    """Return what of a share its pod's placement does not say; None: nothing."""
    share = found.share
    if share is None or share.owner is None:
        return found
    owner = pod(share.owner.uid)
    # One that has ended counts for nothing at a scheduler, whatever is still there of it.
    if owner is None or owner.has_ended:
        return found
    if share.mode == MIG:
        return None  # what is taken of a GPU that is cut are slices
    placed = _counted(owner).get(share.owner.container, {})
    if not {each.uuid for each in share.devices} <= placed.keys():
        return found
    return _grown(found, share, placed)


def _counted(pod: Pod) -> Mapping[str, Mapping[str, PlacedDevice]]:
    """Return what a scheduler counts for a pod, by container and UUID: it reads the same."""
    return {each.name: {one.uuid: one for one in each.devices} for each in _containers(pod)}


def _containers(pod: Pod) -> tuple[PlacedContainer, ...]:
    try:
        booking = read_booking(pod.annotations.get(PLACEMENT, ""), uid=pod.uid, node=pod.node)
    except UsageError:
        return ()  # it counts nothing then, either
    return booking.containers


def _grown(found: Found, share: Share, placed: Mapping[str, PlacedDevice]) -> Found | None:
    """Return by how much a share is larger than it was placed; None: it is not.

    A share is made as its pod says when it starts. Where that is more than was decided, a scheduler
    would give the difference to another pod as well, which then never starts.
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

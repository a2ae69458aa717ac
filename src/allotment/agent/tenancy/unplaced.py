# SPDX-License-Identifier: Apache-2.0
"""What of the devices is given away that no scheduler's placement stands for. Pure.

A scheduler counts what it has placed by what it wrote on the pods. The rest only the node knows:
`allot run`, pods that the agent placed by itself or that another plugin gave something, and shares
that are still there although their pod is gone. Both together are all that is booked, and nothing
is in both.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from allotment.dialects.placements import bound_placements
from allotment.dialects.wishes import PlacementWish
from allotment.model.clusters import Taken
from allotment.model.compute import Compute
from allotment.model.pods import Pod, PodUid
from allotment.shares.bookings import booked
from allotment.shares.found import Found

__all__ = ["unplaced"]


def unplaced(shares: Iterable[Found], pod: Callable[[PodUid], Pod | None]) -> Mapping[str, Taken]:
    """Return what is taken of each device, by UUID; `pod` finds those that there are."""
    counted = [rest for each in shares if (rest := _rest(each, pod)) is not None]
    return {
        uuid: Taken(booking.memory, booking.guaranteed, booking.shares, booking.mode)
        for uuid, booking in booked(counted).items()
    }


def _rest(found: Found, pod: Callable[[PodUid], Pod | None]) -> Found | None:
    """Return what of a share its pod's placement does not say; None: nothing."""
    share = found.share
    if share is None or share.owner is None:
        return found
    owner = pod(share.owner.uid)
    # One that has ended counts for nothing at a scheduler, whatever is still there of it.
    if owner is None or owner.has_ended:
        return found
    placed = bound_placements(owner).get(share.owner.container)
    if placed is None or not {each.uuid for each in share.devices} <= set(placed.devices):
        return found
    return _grown(found, placed)


def _grown(found: Found, placed: PlacementWish) -> Found | None:
    """Return by how much a share was made larger than it was placed; None: it was not."""
    share = found.share
    if share is None or placed.memory_bytes is None:
        return None
    more = tuple(
        replace(each, memory_bytes=each.memory_bytes - placed.memory_bytes, compute=Compute())
        for each in share.devices
        if each.memory_bytes > placed.memory_bytes
    )
    return replace(found, share=replace(share, devices=more)) if more else None

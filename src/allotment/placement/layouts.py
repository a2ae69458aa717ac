# SPDX-License-Identifier: Apache-2.0
"""What MIG makes of a device of a node: what its agent tells, and what pods have been given since.

Of the same place, what was decided counts, and not what the agent has seen: it tells of changes
some time after they have been made.
"""

from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import lru_cache

from allotment.model.clusters import NodeDevice, NodeMig
from allotment.model.mig import (
    MigHold,
    MigLayout,
    MigPlace,
    MigProfile,
    MigRequest,
    MigSlice,
)
from allotment.model.requests import MIG, Request
from allotment.placement.booking import Load
from allotment.placement.mig import serving
from allotment.placement.mig.slots import cover

__all__ = ["handed_on", "layout_of", "one_slice_of", "slices_of"]

_OF_A_POD = "a pod"
_STRANGE = -1
"""A profile's number that no driver has."""


def layout_of(device: NodeDevice, load: Load) -> MigLayout | None:
    """Return how a device is cut; None: its node cuts none, or others than slices are on it."""
    mig = device.mig
    if mig is None or MIG not in device.modes or load.mode not in {"", MIG}:
        return None
    booked = [_booked(place, mig) for place in sorted(load.slices)]
    return MigLayout(
        gpu=device.uuid,
        profiles=mig.profiles,
        slices=(*booked, *_others(mig.slices, booked)),
        # Who has a slice of it has had it switched on, or is about to.
        is_enabled=mig.is_enabled or bool(booked),
        model=device.model,
    )


def handed_on(
    layout: MigLayout, places: Collection[MigPlace], request: MigRequest
) -> list[tuple[MigProfile, int]]:
    """Return which of a pod's own slices serve one more container, smallest first, with start.

    `places`: those that no container of the pod has at the same time.
    """
    if not places:
        return []
    return [
        (profile, place.start)
        for profile in serving(layout.profiles, request, model=layout.model)
        for place in sorted(places)
        if place.profile == profile.name
    ]


@lru_cache(maxsize=1024)
def slices_of(request: Request) -> MigRequest:
    """Return what slices a request asks for.

    With a profile, a part of the device says no more: it is what requests have that say nothing.
    """
    memory = request.memory
    return MigRequest(
        profile=request.mig_profile,
        memory_bytes=memory.size_bytes or 0,
        memory_part=None if request.mig_profile else memory.part,
        compute=request.compute.guarantee,
        count=request.count,
        groups=request.mig_groups,
    )


@lru_cache(maxsize=1024)
def one_slice_of(request: Request) -> MigRequest:
    """Return what one of the slices is that a request asks for."""
    return replace(slices_of(request), count=1)


def _booked(place: MigPlace, mig: NodeMig) -> MigSlice:
    """Return a pod's slice. One of a profile that the GPU has not takes all of it: who knows?"""
    for each in mig.profiles:
        if each.name == place.profile:
            return MigSlice(
                profile=each.number, start=place.start, size=each.size, holder=_OF_A_POD
            )
    slots = max((start + each.size for each in mig.profiles for start in each.starts), default=1)
    named = f" of {place.profile}, a profile that it has not" if place.profile else ""
    return MigSlice(profile=_STRANGE, start=0, size=slots, holder=f"{_OF_A_POD}{named}")


def _others(slices: Iterable[MigSlice], booked: Iterable[MigSlice]) -> list[MigSlice]:
    """Return what the agent has seen beside what pods have been given."""
    mask, places = 0, set()
    for each in booked:
        mask |= cover(each.start, each.size)
        places.add((each.profile, each.start))
    return [
        each
        for each in slices
        if (each.profile, each.start) not in places
        # Its owner removes it, or gives it to the pod.
        and not (each.hold is MigHold.IDLE and cover(each.start, each.size) & mask)
    ]

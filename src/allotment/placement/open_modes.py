# SPDX-License-Identifier: Apache-2.0
"""Requests that leave open how they are enforced: one for each mode, the one liked best first."""

from dataclasses import replace

from allotment.model.clusters import PodBooking, PodNeed, WantedContainer
from allotment.model.requests import Request

__all__ = ["in_each_mode", "in_later_modes", "is_open"]


def in_each_mode(request: Request) -> tuple[Request, ...]:
    """Return what is asked for in each of the modes that would do, in order of preference."""
    if not request.other_modes:
        return (request,)
    modes = dict.fromkeys((request.mode, *request.other_modes))
    return tuple(replace(request, mode=mode, other_modes=()) for mode in modes)


def is_open(request: Request) -> bool:
    """Would more than one mode do?"""
    return any(mode != request.mode for mode in request.other_modes)


def in_later_modes(need: PodNeed, booking: PodBooking) -> PodNeed | None:
    """Return what a pod asks for without the modes that it was given, and those liked better.

    None: no container of it leaves another one.
    """
    given = {each.name: each.mode for each in booking.containers}
    left = tuple(_after(each, given.get(each.name, "")) for each in need.containers)
    return replace(need, containers=left) if left != need.containers else None


def _after(wanted: WantedContainer, given: str) -> WantedContainer:
    request = wanted.request
    modes = tuple(dict.fromkeys((request.mode, *request.other_modes)))
    later = modes[modes.index(given) + 1 :] if given in modes else ()
    if not later:
        return wanted
    return replace(wanted, request=replace(request, mode=later[0], other_modes=later[1:]))

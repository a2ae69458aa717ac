# SPDX-License-Identifier: Apache-2.0
"""Whether one device can serve its part of a request."""

from functools import lru_cache

from allotment.model.placements import MAX_MPS_SHARES, DeviceState, Verdict
from allotment.model.quantities import MemoryAmount
from allotment.model.requests import EXCLUSIVE, MIG, MPS, SOFT, Request
from allotment.placement.constraints import keeps_company, unsuited
from allotment.placement.host_memory import host_part, room, room_fixed
from allotment.placement.layouts import handed_on, one_slice_of
from allotment.placement.mig import is_served, room_of
from allotment.placement.select import is_selected

__all__ = [
    "MIG_IS_OFF",
    "MIG_IS_ON",
    "NOT_ALONE",
    "NOT_SELECTED",
    "NOT_SERVED",
    "NO_PROFILE",
    "NO_SEAT",
    "NO_SLOTS",
    "OTHER_MODE",
    "TAKEN_WHOLE",
    "TOO_LITTLE_COMPUTE",
    "TOO_LITTLE_HOST_MEMORY",
    "TOO_LITTLE_MEMORY",
    "judge",
    "memory_room",
    "open_modes",
    "overflow",
]

NOT_SELECTED = "not selected by --gpu"
NOT_SERVED = "not for this mode, by the node's configuration"
TOO_LITTLE_MEMORY = "too little memory left"
TOO_LITTLE_HOST_MEMORY = "too little host memory left"
TOO_LITTLE_COMPUTE = "too little compute left"
NO_SEAT = "as many shares as a device can have"
NOT_ALONE = "other shares are on it"
TAKEN_WHOLE = "another share has all of it"
OTHER_MODE = "its shares are of another mode"
MIG_IS_ON = "it is in MIG mode until its last slice has gone"
MIG_IS_OFF = "MIG is off, and cannot be switched on beside what is there"
NO_PROFILE = "no such profile"
NO_SLOTS = "no room for such a slice"


def judge(state: DeviceState, request: Request) -> Verdict:
    """Weigh one device against a request; the verdict has need and have either way.

    In mode `mig` against one slice of a device that its node tells the layout of.
    """
    if request.mode == MIG and state.modes is not None:
        return _judge_slices(state, request)
    need = request.memory.of(state.device.allottable_bytes)
    have = memory_room(state, may_oversubscribe=request.may_oversubscribe)
    return Verdict(
        state,
        need_bytes=need,
        have_bytes=have,
        reason=_unfit(state, request) or _lacks(state, request, need_bytes=need, have_bytes=have),
        need_guarantee=request.compute.guarantee,
        have_guarantee=state.free_guarantee,
    )


def _unfit(state: DeviceState, request: Request) -> str:
    """Say why the request cannot be on a device, however much of it is left."""
    if request.selectors and not is_selected(state.device, request):
        return NOT_SELECTED
    return unsuited(state.device, request.constraints) or state.problem or _company(state, request)


def _company(state: DeviceState, request: Request) -> str:
    """Say why the request cannot be on a device with those that are there, however much is left."""
    reason = _not_of_mode(state, request.mode)
    if reason or not state.shares:
        return reason
    if state.mode == EXCLUSIVE:
        return TAKEN_WHOLE
    if request.mode == EXCLUSIVE or request.constraints.is_alone:
        return NOT_ALONE
    if state.mode and state.mode != request.mode:
        return OTHER_MODE
    return keeps_company(state, request.constraints)


def _not_of_mode(state: DeviceState, mode: str) -> str:
    """Say why a device cannot be in a mode, be there shares or not."""
    if state.modes is not None and mode not in state.modes:
        return (state.mig_off if mode == MIG else "") or NOT_SERVED
    # A container's share stays when it has ended: MIG cannot be switched till then, MPS lets nobody
    # else on, and whoever comes to one of two modes keeps an init container from its next start.
    if any(_are_apart(each, mode) for each in state.own_modes):
        return OTHER_MODE
    layout = state.layout
    if mode != MIG and layout is not None and layout.is_enabled:
        return OTHER_MODE if state.mode == MIG else MIG_IS_ON
    return ""


def _are_apart(one: str, other: str) -> bool:
    """Tell whether shares of these modes can never be on a device in turn."""
    return one != other and (MIG in {one, other} or EXCLUSIVE not in {one, other})


def _judge_slices(state: DeviceState, request: Request) -> Verdict:
    reason = _unfit(state, request)
    layout = state.layout
    if not reason and _cannot_be_cut(state):
        reason = NOT_SERVED if layout is None else MIG_IS_OFF
    if reason or layout is None:
        return Verdict(state, need_bytes=0, have_bytes=0, reason=reason)
    wanted = one_slice_of(request)
    number = room_of(layout, wanted) + len(handed_on(layout, state.own_slices, wanted))
    if not number:
        reason = NO_SLOTS if is_served(layout, wanted) else NO_PROFILE
    return Verdict(state, need_bytes=0, have_bytes=0, slices=number, reason=reason)


def _lacks(state: DeviceState, request: Request, *, need_bytes: int, have_bytes: int) -> str:
    if need_bytes > have_bytes:
        return TOO_LITTLE_MEMORY
    if request.compute.guarantee > state.free_guarantee:
        return TOO_LITTLE_COMPUTE
    if _is_crowded(state, request.mode):
        return NO_SEAT
    return ""


def memory_room(state: DeviceState, *, may_oversubscribe: bool) -> int:
    """Return how large a limit of one more share can be, in bytes; never negative."""
    oversubscribed = state.oversubscribed_bytes
    fixed = state.allotted_bytes - oversubscribed
    rule = room if may_oversubscribe else room_fixed
    return rule(
        state.device.allottable_bytes, fixed, oversubscribed, budget_left=state.host_budget_bytes
    )


def overflow(state: DeviceState, more_bytes: int) -> int:
    """Return how much more host memory is promised when one more share has so many bytes."""
    capacity, allotted = state.device.allottable_bytes, state.allotted_bytes
    return host_part(capacity, allotted, more_bytes) - host_part(capacity, allotted, 0)


def open_modes(state: DeviceState) -> frozenset[str]:
    """Return the modes of which a device takes one more share, by who is on it, if that is small.

    A share without tags and without any other wish.
    """
    if state.problem:
        return frozenset()
    return frozenset(
        mode
        for mode in state.modes or ()
        if not _company(state, _plain(mode))
        and not _is_crowded(state, mode)
        and not (mode == MIG and _cannot_be_cut(state))
    )


def _cannot_be_cut(state: DeviceState) -> bool:
    return state.layout is None or (bool(state.shares) and not state.layout.is_enabled)


def _is_crowded(state: DeviceState, mode: str) -> bool:
    if mode == MPS:
        return state.shares >= MAX_MPS_SHARES
    return mode == SOFT and state.shares + state.seats_kept >= state.most_shares


@lru_cache(maxsize=64)
def _plain(mode: str) -> Request:
    return Request(MemoryAmount("0", size_bytes=0), mode=mode)

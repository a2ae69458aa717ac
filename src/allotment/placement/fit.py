# SPDX-License-Identifier: Apache-2.0
"""Whether one device can serve its part of a request."""

from dataclasses import replace

from allotment.model.placements import DeviceState, Verdict
from allotment.model.requests import EXCLUSIVE, SOFT, Request
from allotment.placement.host_memory import host_part, room, room_fixed
from allotment.placement.select import is_selected

__all__ = [
    "MAX_SHARES",
    "NOT_ALONE",
    "NOT_SELECTED",
    "NO_SEAT",
    "OTHER_MODE",
    "TAKEN_WHOLE",
    "TOO_LITTLE_COMPUTE",
    "TOO_LITTLE_HOST_MEMORY",
    "TOO_LITTLE_MEMORY",
    "judge",
    "memory_room",
    "overflow",
]

NOT_SELECTED = "not selected by --gpu"
TOO_LITTLE_MEMORY = "too little memory left"
TOO_LITTLE_HOST_MEMORY = "too little host memory left"
TOO_LITTLE_COMPUTE = "too little compute left"
NO_SEAT = "as many shares as a device can have"
NOT_ALONE = "other shares are on it"
TAKEN_WHOLE = "another share has all of it"
OTHER_MODE = "its shares are of another mode"

MAX_SHARES = 63
"""Shares of one device: the seats of its contract (native/lease.h, ALLOT_SEAT_UNBOOKED)."""


def judge(state: DeviceState, request: Request) -> Verdict:
    """Weigh one device against a request; the verdict has need and have either way."""
    verdict = Verdict(
        state,
        need_bytes=request.memory.of(state.device.allottable_bytes),
        have_bytes=memory_room(state, may_oversubscribe=request.may_oversubscribe),
        need_guarantee=request.compute.guarantee,
        have_guarantee=state.free_guarantee,
    )
    return replace(verdict, reason=_reason(verdict, request))


def _reason(verdict: Verdict, request: Request) -> str:
    state = verdict.state
    if not is_selected(state.device, request):
        return NOT_SELECTED
    if state.problem:
        return state.problem
    return _company(state, request) or _room(verdict, request)


def _company(state: DeviceState, request: Request) -> str:
    """Say why the request cannot be on a device with those that are there, however much is left."""
    if not state.shares:
        return ""
    if state.mode == EXCLUSIVE:
        return TAKEN_WHOLE
    if request.mode == EXCLUSIVE:
        return NOT_ALONE
    return OTHER_MODE if state.mode and state.mode != request.mode else ""


def _room(verdict: Verdict, request: Request) -> str:
    if verdict.need_bytes > verdict.have_bytes:
        return TOO_LITTLE_MEMORY
    if verdict.need_guarantee > verdict.have_guarantee:
        return TOO_LITTLE_COMPUTE
    if verdict.state.shares >= MAX_SHARES and request.mode == SOFT:
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

# SPDX-License-Identifier: Apache-2.0
"""Whether one device can serve its part of a request, by selection, mode, room and isolation."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

from allotment.model.devices import Device
from allotment.model.modes import has_slices, traits_of
from allotment.model.placements import DeviceState, Verdict
from allotment.model.quantities import MemoryAmount
from allotment.model.requests import Request
from allotment.model.structs import replace
from allotment.placement.booking import host_part
from allotment.placement.constraints import keeps_company, unsuited
from allotment.placement.mig import is_served, room_of
from allotment.placement.views import handed_on, one_slice_of

if TYPE_CHECKING:  # `allot run` starts without the scheduler's values
    from allotment.model.clusters import PodBooking, PodNeed, WantedContainer

NOT_SELECTED = "not selected by --gpu"
NOT_SERVED = "the node's configuration does not allow this mode"
TOO_LITTLE_MEMORY = "too little memory left"
TOO_LITTLE_HOST_MEMORY = "too little host memory left"
TOO_LITTLE_COMPUTE = "too little compute left"
ALL_GUARANTEED = "its compute is guaranteed to other shares"
NO_SEAT = "the device has the most shares it can take"
NOT_ALONE = "other shares are on it"
TAKEN_WHOLE = "another share uses all of it"
OTHER_MODE = "its shares use another mode"
MIG_IS_ON = "it stays in MIG mode until its last slice is removed"
MIG_IS_OFF = "MIG is off and cannot be switched on while the GPU is in use"
NO_PROFILE = "no such profile"
NO_SLOTS = "no room for such a slice"


def judge(state: DeviceState, request: Request) -> Verdict:
    """Compare one device with a request; the verdict always has need and have.

    In mode `mig`: one slice of a device with a known layout.
    """
    if traits_of(request.mode).is_slice and state.modes is not None:
        return _judge_slices(state, request)
    need = request.memory.of(state.device.allottable_bytes)
    have = memory_room(state, may_oversubscribe=request.may_oversubscribe)
    reason = _unfit(state, request)
    if reason:
        pass
    elif need > have:
        reason = TOO_LITTLE_MEMORY
    elif request.compute.guarantee > state.free_guarantee:
        reason = TOO_LITTLE_COMPUTE
    elif traits_of(request.mode).takes_turns and request.floor > state.unguaranteed:
        reason = ALL_GUARANTEED
    elif _is_crowded(state, request.mode):
        reason = NO_SEAT
    return Verdict(
        state,
        need_bytes=need,
        have_bytes=have,
        reason=reason,
        need_guarantee=request.compute.guarantee,
        have_guarantee=state.free_guarantee,
    )


def given_bytes(verdict: Verdict, request: Request) -> int:
    """The memory that a share has of a device that serves it: all, where it is alone there."""
    is_whole = traits_of(request.mode).is_exclusive
    return verdict.state.device.allottable_bytes if is_whole else verdict.need_bytes


def _unfit(state: DeviceState, request: Request) -> str:
    """Why the request never fits a device, regardless of free room."""
    if request.selectors and not is_selected(state.device, request):
        return NOT_SELECTED
    return unsuited(state.device, request.constraints) or state.problem or _company(state, request)


def _company(state: DeviceState, request: Request) -> str:
    """Why the device's current shares exclude the request, regardless of free room."""
    reason = _not_of_mode(state, request.mode)
    if reason or not state.shares:
        return reason
    if traits_of(state.mode).is_exclusive:
        return TAKEN_WHOLE
    if traits_of(request.mode).is_exclusive or request.constraints.is_alone:
        return NOT_ALONE
    if state.mode and state.mode != request.mode:
        return OTHER_MODE
    return keeps_company(state, request.constraints)


def _not_of_mode(state: DeviceState, mode: str) -> str:
    is_slice = traits_of(mode).is_slice
    if state.modes is not None and mode not in state.modes:
        return (state.mig_off if is_slice else "") or NOT_SERVED
    # A container's share stays after it ends: MIG cannot be switched until then, MPS admits no
    # other share, and a share in another mode would block an init container's restart.
    if any(_are_apart(own_mode, mode) for own_mode in state.own_modes):
        return OTHER_MODE
    layout = state.layout
    if not is_slice and layout is not None and layout.is_enabled:
        return OTHER_MODE if traits_of(state.mode).is_slice else MIG_IS_ON
    return ""


def _are_apart(one: str, other: str) -> bool:
    """True if shares of these modes can never take turns on a device."""
    is_whole = traits_of(one).is_exclusive or traits_of(other).is_exclusive
    return one != other and (has_slices((one, other)) or not is_whole)


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


def memory_room(state: DeviceState, *, may_oversubscribe: bool) -> int:
    """The largest limit of one more share; never negative.

    Device memory is used first; only the rest counts against the host's budget.
    """
    capacity, allotted = state.device.allottable_bytes, state.allotted_bytes
    room = max(0, capacity - allotted) + max(0, state.host_budget_bytes)
    if may_oversubscribe:
        return room
    # It may push oversubscribed shares to the host, but all others together fit the device.
    fixed = allotted - state.oversubscribed_bytes
    return min(room, max(0, capacity - fixed))


def overflow(state: DeviceState, more_bytes: int) -> int:
    """Additional host memory promised if one more share has this many bytes."""
    capacity, allotted = state.device.allottable_bytes, state.allotted_bytes
    return host_part(capacity, allotted, more_bytes) - host_part(capacity, allotted, 0)


def open_modes(state: DeviceState) -> frozenset[str]:
    """Modes in which a device takes one more small share, given its current shares.

    A share without tags and other constraints.
    """
    if state.problem:
        return frozenset()
    return frozenset(
        mode
        for mode in state.modes or ()
        if not _company(state, _plain(mode))
        and not _is_crowded(state, mode)
        and not (traits_of(mode).is_slice and _cannot_be_cut(state))
    )


def _cannot_be_cut(state: DeviceState) -> bool:
    return state.layout is None or (bool(state.shares) and not state.layout.is_enabled)


def _is_crowded(state: DeviceState, mode: str) -> bool:
    traits = traits_of(mode)
    if traits.needs_daemon:
        return state.shares >= state.device.mps_clients
    return traits.takes_turns and state.shares + state.seats_kept >= state.most_shares


@lru_cache(maxsize=64)
def _plain(mode: str) -> Request:
    return Request(MemoryAmount("0", size_bytes=0), mode=mode)


_UUID_PREFIXES = ("gpu-", "mig-")
_WORD = re.compile(r"[a-z0-9]+")


def is_selected(device: Device, request: Request) -> bool:
    """True if the selectors admit this device; no selectors admit every device."""
    return not request.selectors or any(_matches(device, one) for one in request.selectors)


def unknown_selectors(devices: Iterable[Device], request: Request) -> list[str]:
    known = list(devices)
    return [one for one in request.selectors if not any(_matches(each, one) for each in known)]


def _matches(device: Device, selector: str) -> bool:
    wanted = selector.strip().lower()
    if wanted.startswith(_UUID_PREFIXES):
        return len(wanted) > len(_UUID_PREFIXES[0]) and device.uuid.lower().startswith(wanted)
    return model_matches(device.name, wanted)


def model_matches(name: str, wanted: str) -> bool:
    """True if the words of `wanted` are words of the name, or several of them joined.

    `wanted` is in small letters. So `a100-80gb` is `NVIDIA A100-SXM4-80GB`, and `rtx4090` is
    `NVIDIA GeForce RTX 4090`, but `a10` is not an A100. This is for users at a machine; a pod's
    rules match substrings, as in HAMi (`constraints.matches_model`).
    """
    words = _WORD.findall(name.lower())
    runs = {
        "".join(words[start:end])
        for start in range(len(words))
        for end in range(start + 1, len(words) + 1)
    }
    asked = _WORD.findall(wanted)
    return bool(asked) and all(word in runs for word in asked)


def in_each_mode(request: Request) -> tuple[Request, ...]:
    """The request in each of its modes, in order of preference."""
    if not request.other_modes:
        return (request,)
    return tuple(replace(request, mode=mode, other_modes=()) for mode in request.modes)


def in_later_modes(need: PodNeed, booking: PodBooking) -> PodNeed | None:
    """The pod's request without the modes already tried, and better ones.

    None: no container has another mode left.
    """
    given = {container.name: container.mode for container in booking.containers}
    left = tuple(_after(container, given.get(container.name, "")) for container in need.containers)
    return replace(need, containers=left) if left != need.containers else None


def _after(wanted: WantedContainer, given: str) -> WantedContainer:
    modes = wanted.request.modes
    later = modes[modes.index(given) + 1 :] if given in modes else ()
    if not later:
        return wanted
    return replace(wanted, request=replace(wanted.request, mode=later[0], other_modes=later[1:]))

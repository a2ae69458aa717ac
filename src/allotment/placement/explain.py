# SPDX-License-Identifier: Apache-2.0
"""The words for a rejection: what was needed, and what each device has."""

from collections import Counter
from collections.abc import Mapping

from allotment.model.compute import WHOLE
from allotment.model.formats import format_bytes, format_count, format_percent
from allotment.model.placements import Rejection, Verdict
from allotment.model.requests import EXCLUSIVE, TIMESLICE, Request
from allotment.placement.constraints import OF_OTHER_MODEL, OF_OTHER_UUID
from allotment.placement.fit import (
    NO_SEAT,
    NOT_ALONE,
    NOT_SELECTED,
    NOT_SERVED,
    OTHER_MODE,
    TAKEN_WHOLE,
    TOO_LITTLE_COMPUTE,
    TOO_LITTLE_MEMORY,
)

__all__ = ["explain", "is_asked_for", "main_reason", "models_of", "most_telling"]

_NAMES = 3
"""How many shares of a device are named; of more than that, only how many."""


def explain(rejection: Rejection) -> str:
    """Return one line for the whole and one for each device, without a full stop."""
    request = rejection.request
    number = len(rejection.verdicts)
    there = format_count(number, "GPU fits", "GPUs fit")
    apart = f", but not {rejection.together}" if rejection.together else ""
    lines = [f"no room for {_asked(rejection)}: {rejection.fitting} of {there}{apart}"]
    lines += [f"  {_line(verdict, request)}" for verdict in rejection.verdicts]
    return "\n".join(lines)


def main_reason(rejection: Rejection) -> str:
    """Return the one reason that tells most of why there is no room, without a full stop."""
    if rejection.together:
        return f"no GPUs that fit are {rejection.together}"
    verdicts = [each for each in rejection.verdicts if not each.fits]
    asked_for = [each for each in verdicts if is_asked_for(each)] or verdicts
    able = [each for each in asked_for if not each.state.problem] or asked_for
    lines = {each.state.device.uuid: _reason(each, rejection.request) for each in able}
    return most_telling(lines, is_all=len(able) == len(asked_for))


def most_telling(reasons: Mapping[str, str], *, is_all: bool = True) -> str:
    """Return the reason that most GPUs have, by UUID; with the GPU's name where it is not all's."""
    if not reasons:
        return ""
    [(common, number)] = Counter(reasons.values()).most_common(1)
    if is_all and number == len(reasons):
        return common
    return next(f"{uuid}: {why}" for uuid, why in reasons.items() if why == common)


def is_asked_for(verdict: Verdict) -> bool:
    """Tell whether a device is one of those that a request names, where it names any."""
    return verdict.reason not in {NOT_SELECTED, OF_OTHER_MODEL, OF_OTHER_UUID}


def _asked(rejection: Rejection) -> str:
    request = rejection.request
    if request.mode in {EXCLUSIVE, TIMESLICE}:
        kind = "whole" if request.mode == EXCLUSIVE else "time-sliced"
        return f"{request.count} {kind} GPUs" if request.count > 1 else f"a {kind} GPU"
    part = _part(rejection)
    if request.compute.guarantee:
        part += f" and {format_percent(request.compute.guarantee)} % of compute"
    return f"{request.count} GPUs with {part} each" if request.count > 1 else f"a GPU with {part}"


def _part(rejection: Rejection) -> str:
    """Tell what is wanted of each one's memory; of a part also what it comes to, if one amount."""
    memory = rejection.request.memory
    if memory.part is None:
        return f"{memory}"
    if memory.part == 1:
        return "all of its memory"
    percent = format_percent(round(memory.part * WHOLE))
    sizes = {memory.of(each.state.device.allottable_bytes) for each in rejection.verdicts}
    come_to = f" ({format_bytes(sizes.pop())})" if len(sizes) == 1 else ""
    return f"{percent} % of its memory{come_to}"


def _line(verdict: Verdict, request: Request) -> str:
    device = verdict.state.device
    return f"{device.uuid} ({device.name}): {_reason(verdict, request)}"


def _reason(verdict: Verdict, request: Request) -> str:
    state, reason = verdict.state, verdict.reason
    need, have = _distinct(verdict.need_bytes, verdict.have_bytes)
    if verdict.fits:
        is_alone = request.mode == EXCLUSIVE or request.constraints.is_alone
        text = "fits, need it alone, have no other share there" if is_alone else ""
        text = text or f"fits, need {need}, have {have}"
    elif reason in {NOT_ALONE, TAKEN_WHOLE, OTHER_MODE}:
        text = _company(verdict, request)
    elif reason == TOO_LITTLE_MEMORY:
        total = format_bytes(state.device.allottable_bytes)
        given = format_bytes(state.allotted_bytes)
        text = f"need {need}, have {have} ({given} of {total} allotted{_host(verdict)})"
    elif reason == TOO_LITTLE_COMPUTE:
        asked, left = (
            format_percent(each) for each in (verdict.need_guarantee, verdict.have_guarantee)
        )
        given = format_percent(state.guaranteed)
        text = f"need {asked} % of compute, have {left} % ({given} % guaranteed)"
    elif reason == NO_SEAT:
        text = f"{reason}: {state.shares}"
    elif reason == OF_OTHER_MODEL:
        text = f"need {models_of(request)}, have {state.device.name}"
    elif reason in {NOT_SELECTED, NOT_SERVED, OF_OTHER_UUID, state.problem, state.mig_off}:
        text = reason
    else:
        text = f"{reason}, need {need}, have {have}"
    return text


def _company(verdict: Verdict, request: Request) -> str:
    """Tell who else is there, where that is what keeps the request out."""
    state = verdict.state
    who = ", ".join(state.sharers)
    if len(state.sharers) > _NAMES:
        who = f"{', '.join(state.sharers[:_NAMES])} and {len(state.sharers) - _NAMES} more"
    if verdict.reason == TAKEN_WHOLE:
        part = "it alone" if request.mode == EXCLUSIVE else "a part of it"
        return f"need {part}, have none: all of it is given to {who}"
    if verdict.reason == NOT_ALONE:
        return f"need it alone, have {format_count(state.shares, 'share')} there ({who})"
    return f"need mode {request.mode}, have shares of mode {state.mode} there ({who})"


def models_of(request: Request) -> str:
    """Name the models that a request admits: `A100 or H100`, `no T4`."""
    wanted = request.constraints
    texts = [" or ".join(rule.text for rule in wanted.models)] if wanted.models else []
    texts += [f"no {rule.text}" for rule in wanted.not_models]
    return " and ".join(texts)


def _distinct(need: int, have: int) -> tuple[str, str]:
    """Format both; where rounding would hide their difference, in bytes."""
    texts = format_bytes(need), format_bytes(have)
    return texts if need == have or texts[0] != texts[1] else (f"{need}B", f"{have}B")


def _host(verdict: Verdict) -> str:
    """Tell what is left of the host's memory, where some of it stands for the device's."""
    state = verdict.state
    if not state.oversubscribed_bytes and verdict.have_bytes <= state.device.allottable_bytes:
        return ""
    return f", {format_bytes(state.host_budget_bytes)} of host memory left"

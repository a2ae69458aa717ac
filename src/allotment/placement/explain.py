# SPDX-License-Identifier: Apache-2.0
"""The words for a rejection: what was needed, and what each device has."""

from allotment.model.formats import format_bytes, format_count, format_percent
from allotment.model.placements import Rejection, Verdict
from allotment.placement.fit import (
    NO_SEAT,
    NOT_SELECTED,
    TOO_LITTLE_COMPUTE,
    TOO_LITTLE_MEMORY,
)

__all__ = ["explain"]


def explain(rejection: Rejection) -> str:
    """Return one line for the whole and one for each device, without a full stop."""
    request = rejection.request
    number = len(rejection.verdicts)
    part = f"{request.memory}"
    if request.compute.guarantee:
        part += f" and {format_percent(request.compute.guarantee)} % of compute"
    asked = f"{request.count} GPUs with {part} each" if request.count > 1 else f"a GPU with {part}"
    there = format_count(number, "GPU fits", "GPUs fit")
    lines = [f"no room for {asked}: {rejection.fitting} of {there}"]
    lines += [f"  {_line(verdict)}" for verdict in rejection.verdicts]
    return "\n".join(lines)


def _line(verdict: Verdict) -> str:
    device = verdict.state.device
    return f"{device.uuid} ({device.name}): {_reason(verdict)}"


def _reason(verdict: Verdict) -> str:
    state = verdict.state
    need, have = _distinct(verdict.need_bytes, verdict.have_bytes)
    if verdict.fits:
        return f"fits, need {need}, have {have}"
    if verdict.reason == TOO_LITTLE_MEMORY:
        total = format_bytes(state.device.allottable_bytes)
        given = format_bytes(state.allotted_bytes)
        return f"need {need}, have {have} ({given} of {total} allotted{_host(verdict)})"
    if verdict.reason == TOO_LITTLE_COMPUTE:
        asked, left = (
            format_percent(each) for each in (verdict.need_guarantee, verdict.have_guarantee)
        )
        given = format_percent(state.guaranteed)
        return f"need {asked} % of compute, have {left} % ({given} % guaranteed)"
    if verdict.reason == NO_SEAT:
        return f"{verdict.reason}: {state.shares}"
    if verdict.reason in {NOT_SELECTED, state.problem}:
        return verdict.reason
    return f"{verdict.reason}, need {need}, have {have}"


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

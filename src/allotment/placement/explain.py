# SPDX-License-Identifier: Apache-2.0
"""The words for a rejection: what was needed, and what each device has."""

from allotment.model.formats import format_bytes
from allotment.model.placements import Rejection, Verdict
from allotment.placement.fit import NOT_SELECTED, TOO_LITTLE_MEMORY

__all__ = ["explain"]


def explain(rejection: Rejection) -> str:
    """Return one line for the whole and one for each device, without a full stop."""
    request = rejection.request
    number = len(rejection.verdicts)
    asked = (
        f"{request.count} GPUs with {request.memory} each"
        if request.count > 1
        else (f"a GPU with {request.memory}")
    )
    lines = [f"no room for {asked}: {rejection.fitting} of {number} GPUs fit"]
    lines += [f"  {_line(verdict)}" for verdict in rejection.verdicts]
    return "\n".join(lines)


def _line(verdict: Verdict) -> str:
    device = verdict.state.device
    return f"{device.uuid} ({device.name}): {_reason(verdict)}"


def _reason(verdict: Verdict) -> str:
    need, have = _distinct(verdict.need_bytes, verdict.have_bytes)
    if verdict.fits:
        return f"fits, need {need}, have {have}"
    if verdict.reason == TOO_LITTLE_MEMORY:
        total = format_bytes(verdict.state.device.allottable_bytes)
        given = format_bytes(verdict.state.allotted_bytes)
        return f"need {need}, have {have} ({given} of {total} allotted)"
    if verdict.reason in {NOT_SELECTED, verdict.state.problem}:
        return verdict.reason
    return f"{verdict.reason}, need {need}, have {have}"


def _distinct(need: int, have: int) -> tuple[str, str]:
    """Format both; where rounding would hide their difference, in bytes."""
    texts = format_bytes(need), format_bytes(have)
    return texts if need == have or texts[0] != texts[1] else (f"{need}B", f"{have}B")

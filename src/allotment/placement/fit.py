# SPDX-License-Identifier: Apache-2.0
"""Whether one device can serve its part of a request."""

from allotment.model.placements import DeviceState, Verdict
from allotment.model.requests import Request
from allotment.placement.select import is_selected

__all__ = ["NOT_SELECTED", "TOO_LITTLE_MEMORY", "judge"]

NOT_SELECTED = "not selected by --gpu"
TOO_LITTLE_MEMORY = "too little memory left"


def judge(state: DeviceState, request: Request) -> Verdict:
    """Weigh one device against a request; the verdict has need and have in bytes either way."""
    need = request.memory.of(state.device.allottable_bytes)
    have = state.free_bytes
    if not is_selected(state.device, request):
        return Verdict(state, need, have, NOT_SELECTED)
    if state.problem:
        return Verdict(state, need, have, state.problem)
    if need > have:
        return Verdict(state, need, have, TOO_LITTLE_MEMORY)
    return Verdict(state, need, have)

# SPDX-License-Identifier: Apache-2.0
"""The choice among devices that fit: the tightest ones (binpack), so that the rest stays whole."""

from collections.abc import Iterable

from allotment.model.placements import DeviceState, Placed, Placement, Rejection, Verdict
from allotment.model.requests import Request
from allotment.placement.fit import judge

__all__ = ["choose"]


def choose(states: Iterable[DeviceState], request: Request) -> Placement | Rejection:
    """Pick `request.count` distinct devices, those first that it leaves least of.

    Ties go to the lower index, then to the UUID that sorts first, so that the choice is the same
    each time. The devices of a placement are in index order, as the driver would number them.
    """
    verdicts = tuple(judge(state, request) for state in states)
    fitting = sorted((verdict for verdict in verdicts if verdict.fits), key=_leaves)
    if len(fitting) < request.count:
        return Rejection(request, verdicts)
    chosen = sorted(fitting[: request.count], key=_order)
    return Placement(request, tuple(Placed(one.state.device, one.need_bytes) for one in chosen))


def _leaves(verdict: Verdict) -> tuple[int, int, str]:
    return (verdict.have_bytes - verdict.need_bytes, *_order(verdict))


def _order(verdict: Verdict) -> tuple[int, str]:
    return (verdict.state.device.index, verdict.state.device.uuid)

# SPDX-License-Identifier: Apache-2.0
"""The choice among devices that fit: the tightest ones (binpack), so that the rest stays whole."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from allotment.model.placements import DeviceState, Placed, Placement, Rejection, Verdict
from allotment.model.requests import Request
from allotment.placement.fit import TOO_LITTLE_HOST_MEMORY, judge, overflow

__all__ = ["choose", "follow"]


def choose(states: Iterable[DeviceState], request: Request) -> Placement | Rejection:
    """Pick `request.count` distinct devices, those first that it leaves least of.

    A device that needs host memory for it comes after all that do not; one where it goes into what
    is booked for its own pod already comes first of its kind. Ties go to the lower index,
    then to the UUID that sorts first, so that the choice is the same each time. The devices of a
    placement are in index order, as the driver would number them.
    """
    verdicts = [judge(state, request) for state in states]
    fitting = [number for number, verdict in enumerate(verdicts) if verdict.fits]
    fitting.sort(key=lambda number: _leaves(verdicts[number]))
    chosen: list[Verdict] = []
    promised = 0
    # Those that need least of the host's memory come first: if these need too much, all others do.
    for number in fitting[: request.count]:
        verdict = verdicts[number]
        more = overflow(verdict.state, verdict.need_bytes)
        if promised + more > verdict.state.host_budget_bytes:
            have = verdict.have_bytes - promised
            verdicts[number] = replace(verdict, have_bytes=have, reason=TOO_LITTLE_HOST_MEMORY)
            continue
        promised += more
        chosen.append(verdict)
    if len(chosen) < request.count:
        return Rejection(request, tuple(verdicts))
    ordered = sorted(chosen, key=_order)
    return Placement(request, tuple(Placed(one.state.device, one.need_bytes) for one in ordered))


def follow(
    states: Iterable[DeviceState], request: Request, devices: Sequence[str]
) -> Placement | Rejection:
    """Place a request on the devices that somebody has chosen for it, by UUID, and on no others.

    A device that is named several times gives that many parts, each as large as the request says.
    A device of which there is no state has to be refused by the caller.
    """
    parts = Counter(devices)
    verdicts = [
        judge(state, request.times(parts[state.device.uuid]))
        for state in states
        if state.device.uuid in parts
    ]
    promised = 0
    for number, verdict in enumerate(verdicts):
        more = overflow(verdict.state, verdict.need_bytes)
        if verdict.fits and promised + more > verdict.state.host_budget_bytes:
            have = max(0, verdict.have_bytes - promised)
            verdicts[number] = replace(verdict, have_bytes=have, reason=TOO_LITTLE_HOST_MEMORY)
        promised += more
    if not all(verdict.fits for verdict in verdicts):
        return Rejection(request, tuple(verdicts))
    placed = (
        Placed(
            one.state.device,
            one.need_bytes,
            compute=request.times(parts[one.state.device.uuid]).compute,
        )
        for one in sorted(verdicts, key=_order)
    )
    return Placement(request, tuple(placed))


def _leaves(verdict: Verdict) -> tuple[int, int, int, int, str]:
    more = overflow(verdict.state, verdict.need_bytes)
    new = -min(verdict.need_bytes, verdict.state.reusable_bytes)
    return (more, new, verdict.have_bytes - verdict.need_bytes, *_order(verdict))


def _order(verdict: Verdict) -> tuple[int, str]:
    return (verdict.state.device.index, verdict.state.device.uuid)

# SPDX-License-Identifier: Apache-2.0
"""The choice among devices that fit: the tightest ones (binpack), so that the rest stays whole."""

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import MappingProxyType

from allotment.model.placements import DeviceState, Placed, Placement, Rejection, Verdict
from allotment.model.requests import Constraints, Request
from allotment.placement.constraints import Links
from allotment.placement.fit import TOO_LITTLE_HOST_MEMORY, judge, overflow
from allotment.placement.selections import Candidate, Effort, candidates_of, selections

__all__ = ["choose", "follow"]

NO_LINKS: Links = MappingProxyType({})


def choose(
    states: Iterable[DeviceState], request: Request, *, links: Links = NO_LINKS
) -> Placement | Rejection:
    """Pick `request.count` distinct devices, those first that it leaves least of.

    A device that needs host memory for it comes after all that do not; one where it goes into what
    is booked for its own pod already comes first of its kind. Ties go to the lower index,
    then to the UUID that sorts first, so that the choice is the same each time. The devices of a
    placement are in index order, as the driver would number them. `links` says which devices are
    joined by NVLink, for requests that want that.
    """
    verdicts = [judge(state, request) for state in states]
    fitting = candidates_of(sorted(verdicts, key=_leaves))
    budget = max((each.verdict.state.host_budget_bytes for each in fitting), default=0)
    # Unbounded: these are the devices of one machine, and `links` leave few sets to look at.
    effort = Effort(left=sys.maxsize)
    sets = selections(fitting, request, host_budget=budget, effort=effort, links=links)
    chosen = next(sets, None)
    if chosen is None:
        return _rejection(request, verdicts, fitting)
    ordered = sorted((each.verdict for each in chosen), key=_order)
    return Placement(request, tuple(Placed(one.state.device, one.need_bytes) for one in ordered))


def _rejection(
    request: Request, verdicts: Sequence[Verdict], fitting: Sequence[Candidate]
) -> Rejection:
    """Say why no set of devices does, where enough of them fit one by one."""
    promised = 0
    lacking: dict[str, Verdict] = {}
    # Those that need least of the host's memory come first: if these need too much, all others do.
    for each in fitting[: request.count]:
        budget = each.verdict.state.host_budget_bytes
        if promised + each.on_host > budget:
            have = each.verdict.have_bytes - promised
            lacking[each.uuid] = replace(
                each.verdict, have_bytes=have, reason=TOO_LITTLE_HOST_MEMORY
            )
        else:
            promised += each.on_host
    after = tuple(lacking.get(each.state.device.uuid, each) for each in verdicts)
    is_apart = len(fitting) >= request.count and not lacking
    return Rejection(request, after, together=_together(request) if is_apart else "")


def _together(request: Request) -> str:
    wanted = request.constraints
    parts = ["on one NUMA node"] * wanted.same_numa + ["joined by NVLink"] * wanted.needs_nvlink
    return " and ".join(parts)


def follow(
    states: Iterable[DeviceState], request: Request, devices: Sequence[str]
) -> Placement | Rejection:
    """Place a request on the devices that somebody has chosen for it, by UUID, and on no others.

    A device that is named several times gives that many parts, each as large as the request says.
    A device of which there is no state has to be refused by the caller. Constraints are for who
    chooses: what else was on the devices when they were chosen, nobody knows by now.
    """
    request = replace(request, constraints=Constraints())
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

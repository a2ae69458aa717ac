# SPDX-License-Identifier: Apache-2.0
"""Pods come one after the other and stay: how full does the cluster get?"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns

from allotment.simulate.outcomes import Arrivals, Point
from allotment.simulate.placers import Placer, Spot
from allotment.simulate.traces import TracePod

__all__ = ["Counts", "Progress", "decide", "replay"]

Progress = Callable[[float], None]
"""Hears how much of a replay is done, from 0 to 1."""

_STEP_PCT = 5
_PODS_A_REPORT = 100


@dataclass(slots=True)
class Counts:
    """What happened to pods, however they come."""

    placed: int = 0
    impossible: int = 0
    decided_ns: list[int] = field(default_factory=list)


def decide(placer: Placer, pod: TracePod, counts: Counts) -> Spot | None:
    """Have a pod that has come placed and booked; the decision is timed."""
    placer.arrived(pod)
    begun = perf_counter_ns()
    spot = placer.place(pod)
    counts.decided_ns.append(perf_counter_ns() - begun)
    if spot is None:
        counts.impossible += not placer.fits_when_empty(pod)
    else:
        placer.book(spot)
        counts.placed += 1
    return spot


def replay(
    placer: Placer, pods: Sequence[TracePod], *, capacity_milli: int, progress: Progress
) -> tuple[Arrivals, Counts]:
    """Let them come. Raises `ValueError` if the placer chooses what is not there."""
    counts = Counts()
    points: list[Point] = []
    arrived = allocated = 0
    mark = _STEP_PCT
    for number, pod in enumerate(pods, start=1):
        arrived += pod.shape.size_milli
        if decide(placer, pod, counts) is not None:
            allocated += pod.shape.size_milli
        if arrived * 100 >= mark * capacity_milli or number == len(pods):
            points.append(
                Point(
                    100 * arrived / capacity_milli,
                    100 * allocated / capacity_milli,
                    100 * placer.fragmented_milli() / capacity_milli,
                )
            )
            mark = _STEP_PCT * (arrived * 100 // (_STEP_PCT * capacity_milli) + 1)
        if number % _PODS_A_REPORT == 0:
            progress(number / len(pods))
    return Arrivals(points=tuple(points)), counts

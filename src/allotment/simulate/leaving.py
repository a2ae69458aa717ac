# SPDX-License-Identifier: Apache-2.0
"""Pods come, wait where there is no room, and leave: how full is the cluster over time?

Whoever waits is looked at again when a pod leaves a node: does it fit there? Those that have waited
longest go first, but nobody waits for one before it that does not fit.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from allotment.simulate.arriving import Counts, Progress, decide
from allotment.simulate.outcomes import Departures, percentile
from allotment.simulate.placers import Placer, Spot
from allotment.simulate.traces import PodShape
from allotment.simulate.workloads import Visit, late

__all__ = ["replay_visits"]

_SAMPLES = 100
"""How many times in all one looks at what is fragmented: that takes longer than a decision."""
_PODS_A_REPORT = 100
_Waiting = tuple[int, Visit]


@dataclass(slots=True)
class _Integral:
    """What a figure comes to over time."""

    total: float = 0.0
    late: float = 0.0

    def add(self, value: float, *, begin: float, end: float, middle: float) -> None:
        self.total += value * (end - begin)
        self.late += value * max(0.0, end - max(begin, middle))


class _Replay:
    """The state of one replay."""

    def __init__(self, placer: Placer, visits: Sequence[Visit], capacity_milli: int) -> None:
        self._placer = placer
        self._visits = visits
        self._capacity = capacity_milli
        self._begin, self._end = visits[0].at_s, visits[-1].at_s
        self._now = self._begin
        self._allocated = self._most = 0
        self._integral = _Integral()
        self._leaving: list[tuple[float, int, Spot]] = []
        self._waiting: dict[tuple[PodShape, int], deque[_Waiting]] = {}
        self._waits: list[float] = []
        self._fragmented: list[float] = []
        self.counts = Counts()

    def run(self, progress: Progress) -> Departures:
        """Let all come."""
        for number, visit in enumerate(self._visits):
            self._go_to(visit.at_s)
            spot = decide(self._placer, visit.pod, self.counts)
            if spot is not None:
                self._begins(spot, visit, number)
            elif self._placer.fits_when_empty(visit.pod):
                key = (visit.pod.shape, visit.pod.memory_mib)
                self._waiting.setdefault(key, deque()).append((number, visit))
            if number % _PODS_A_REPORT == 0:
                progress(number / len(self._visits))
        return self._told()

    def _go_to(self, moment: float) -> None:
        """Let those leave that do until then."""
        while self._leaving and self._leaving[0][0] <= moment:
            when, _, spot = heappop(self._leaving)
            self._pass(when)
            self._placer.release(spot)
            self._allocated -= spot.pod.shape.size_milli
            self._call(spot.node)
        self._pass(moment)

    def _pass(self, moment: float) -> None:
        """Let time pass in which nothing happens."""
        middle = (self._begin + self._end) / 2
        self._integral.add(self._allocated, begin=self._now, end=moment, middle=middle)
        span = self._end - self._begin
        while span and len(self._fragmented) < _SAMPLES * (moment - self._begin) / span:
            self._fragmented.append(self._placer.fragmented_milli())
        self._now = moment

    def _call(self, node: int) -> None:
        """Look whom of the waiting there is room for on the node."""
        for key in sorted(self._waiting, key=lambda key: self._waiting[key][0][0]):
            queue = self._waiting[key]
            while queue and (spot := self._placer.place(queue[0][1].pod, node)) is not None:
                number, visit = queue.popleft()
                self._placer.book(spot)
                self.counts.placed += 1
                self._waits.append(self._now - visit.at_s)
                self._begins(spot, visit, number)
            if not queue:
                del self._waiting[key]

    def _begins(self, spot: Spot, visit: Visit, number: int) -> None:
        self._allocated += spot.pod.shape.size_milli
        self._most = max(self._most, self._allocated)
        heappush(self._leaving, (self._now + visit.duration_s, number, spot))

    def _asked(self) -> float:
        """Return what was asked for, had nobody waited, over the second half of the time."""
        return sum(
            visit.pod.shape.size_milli
            * late(visit.at_s, visit.duration_s, begin=self._begin, end=self._end)
            for visit in self._visits
        )

    def _told(self) -> Departures:
        span = (self._end - self._begin) or 1.0
        still = [self._end - visit.at_s for queue in self._waiting.values() for _, visit in queue]
        waits = sorted(self._waits + still)
        percent = 100 / self._capacity
        half = len(self._fragmented) // 2
        return Departures(
            asked_pct=percent * self._asked() / (span / 2),
            allocated_pct=percent * self._integral.total / span,
            allocated_late_pct=percent * self._integral.late / (span / 2),
            allocated_most_pct=percent * self._most,
            fragmented_pct=percent * _mean(self._fragmented[half:]),
            waited=len(waits),
            still_waiting=len(still),
            wait_s={
                "mean": _mean(waits),
                "p50": percentile(waits, 50),
                "p99": percentile(waits, 99),
            },
        )


def replay_visits(
    placer: Placer, visits: Sequence[Visit], *, capacity_milli: int, progress: Progress
) -> tuple[Departures, Counts]:
    """Let them come and go. Raises `ValueError` if the placer chooses what is not there."""
    state = _Replay(placer, visits, capacity_milli)
    return state.run(progress), state.counts


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))

# SPDX-License-Identifier: Apache-2.0
"""Replays: pods of a trace arrive, wait, are placed and leave.

When a pod leaves a node, waiting pods are tried on that node, the longest waiting first. A pod
that does not fit does not block the pods behind it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from time import perf_counter_ns

import msgspec

from allotment.simulate.csv_files import TracePod, TraceShape
from allotment.simulate.outcomes import Arrivals, Departures, Point, percentile
from allotment.simulate.placers import ArrayPlacer, Spot
from allotment.simulate.workloads import Visit, late

Progress = Callable[[float], None]
"""Receives the completed part of a replay, from 0 to 1."""

_STEP_PCT = 5
_PODS_A_REPORT = 100


class Counts(msgspec.Struct):
    """Counts over all pods of a replay."""

    placed: int = 0
    impossible: int = 0
    decided_ns: list[int] = msgspec.field(default_factory=list)


def decide(placer: ArrayPlacer, pod: TracePod, counts: Counts) -> Spot | None:
    """Place and book a pod that has arrived; the decision is timed."""
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
    placer: ArrayPlacer, pods: Sequence[TracePod], *, capacity_milli: int, progress: Progress
) -> tuple[Arrivals, Counts]:
    """Replay arrivals. Raises `ValueError` if the placer chooses an impossible spot."""
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


_SAMPLES = 100
"""Number of fragmentation samples: each one takes longer than a decision."""
_Waiting = tuple[int, Visit]


class _Integral(msgspec.Struct):
    """The integral of a figure over time."""

    total: float = 0.0
    late: float = 0.0

    def add(self, value: float, *, begin: float, end: float, middle: float) -> None:
        self.total += value * (end - begin)
        self.late += value * max(0.0, end - max(begin, middle))


class _Replay:
    """The state of one replay with departures."""

    def __init__(self, placer: ArrayPlacer, visits: Sequence[Visit], capacity_milli: int) -> None:
        self._placer = placer
        self._visits = visits
        self._capacity = capacity_milli
        self._begin, self._end = visits[0].at_s, visits[-1].at_s
        self._now = self._begin
        self._allocated = self._most = 0
        self._integral = _Integral()
        self._leaving: list[tuple[float, int, Spot]] = []
        self._waiting: dict[tuple[TraceShape, int], deque[_Waiting]] = {}
        self._waits: list[float] = []
        self._fragmented: list[float] = []
        self.counts = Counts()

    def run(self, progress: Progress) -> Departures:
        for number, visit in enumerate(self._visits):
            self._advance_to(visit.at_s)
            spot = decide(self._placer, visit.pod, self.counts)
            if spot is not None:
                self._start(spot, visit, number)
            elif self._placer.fits_when_empty(visit.pod):
                key = (visit.pod.shape, visit.pod.memory_mib)
                self._waiting.setdefault(key, deque()).append((number, visit))
            if number % _PODS_A_REPORT == 0:
                progress(number / len(self._visits))
        return self._departures()

    def _advance_to(self, moment: float) -> None:
        while self._leaving and self._leaving[0][0] <= moment:
            when, _, spot = heappop(self._leaving)
            self._advance(when)
            self._placer.release(spot)
            self._allocated -= spot.pod.shape.size_milli
            self._place_waiting(spot.node)
        self._advance(moment)

    def _advance(self, moment: float) -> None:
        """Advance the clock without events."""
        middle = (self._begin + self._end) / 2
        self._integral.add(self._allocated, begin=self._now, end=moment, middle=middle)
        span = self._end - self._begin
        while span and len(self._fragmented) < _SAMPLES * (moment - self._begin) / span:
            self._fragmented.append(self._placer.fragmented_milli())
        self._now = moment

    def _place_waiting(self, node: int) -> None:
        for key in sorted(self._waiting, key=lambda key: self._waiting[key][0][0]):
            queue = self._waiting[key]
            while queue and (spot := self._placer.place(queue[0][1].pod, node)) is not None:
                number, visit = queue.popleft()
                self._placer.book(spot)
                self.counts.placed += 1
                self._waits.append(self._now - visit.at_s)
                self._start(spot, visit, number)
            if not queue:
                del self._waiting[key]

    def _start(self, spot: Spot, visit: Visit, number: int) -> None:
        self._allocated += spot.pod.shape.size_milli
        self._most = max(self._most, self._allocated)
        heappush(self._leaving, (self._now + visit.duration_s, number, spot))

    def _asked(self) -> float:
        """Return the requests over the second half of the time, as if no pod had waited."""
        return sum(
            visit.pod.shape.size_milli
            * late(visit.at_s, visit.duration_s, begin=self._begin, end=self._end)
            for visit in self._visits
        )

    def _departures(self) -> Departures:
        span = (self._end - self._begin) or 1.0
        still_waiting_s = [
            self._end - visit.at_s for queue in self._waiting.values() for _, visit in queue
        ]
        waits = sorted(self._waits + still_waiting_s)
        percent = 100 / self._capacity
        half = len(self._fragmented) // 2
        return Departures(
            asked_pct=percent * self._asked() / (span / 2),
            allocated_pct=percent * self._integral.total / span,
            allocated_late_pct=percent * self._integral.late / (span / 2),
            allocated_most_pct=percent * self._most,
            fragmented_pct=percent * _mean(self._fragmented[half:]),
            waited=len(waits),
            still_waiting=len(still_waiting_s),
            wait_s={
                "mean": _mean(waits),
                "p50": percentile(waits, 50),
                "p99": percentile(waits, 99),
            },
        )


def replay_visits(
    placer: ArrayPlacer, visits: Sequence[Visit], *, capacity_milli: int, progress: Progress
) -> tuple[Departures, Counts]:
    """Replay arrivals and departures. Raises `ValueError` like `replay`."""
    state = _Replay(placer, visits, capacity_milli)
    return state.run(progress), state.counts


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))

# SPDX-License-Identifier: Apache-2.0
"""Programs that share a device by the pure core of leases, in simulated time.

As naive as can be: whoever holds the lease runs one kernel after the other, charges each when it
has ended, and looks whether it has to give way. No queues, no latencies, no processes: what
differs from what was promised here is the core's own doing.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from lease_states import Core, Kind, PlaceIs

US: Final = 1_000
MS: Final = 1_000_000
S: Final = 1_000_000_000

#: How often somebody who waits looks again while nobody holds the lease.
LOOK_NS: Final = 200 * US
#: What is measured is added up in pieces of this length.
BUCKET_NS: Final = 10 * MS

#: A program is what it does: kernels (positive, ns) and times without a wish for any (negative).
Program = Iterator[int]


@dataclass(eq=False)
class Runner:
    """A share's only process."""

    place: int
    seat: int
    program: Program
    kernel_ns: int = 0
    """The next kernel, or the one that runs. 0: it wants nothing."""
    wanted_at: int = 0
    used: list[int] = field(default_factory=list)
    """GPU time in each bucket, ns."""
    waits: list[int] = field(default_factory=list)
    """From each wish to the start of its kernel, ns."""

    def add(self, start: int, end: int) -> None:
        """Count GPU time."""
        while start < end:
            bucket, until = start // BUCKET_NS, min(end, (start // BUCKET_NS + 1) * BUCKET_NS)
            self.used.extend([0] * (bucket + 1 - len(self.used)))
            self.used[bucket] += until - start
            start = until

    def time_in(self, start: int, end: int) -> int:
        """GPU time between two ends of buckets, ns."""
        return sum(self.used[start // BUCKET_NS : end // BUCKET_NS])

    def part_of(self, start: int, end: int) -> float:
        """The same in points: percent of the device."""
        return 100 * self.time_in(start, end) / (end - start)


class Device:
    """A device, its shares, and the clock."""

    def __init__(self) -> None:
        self.core = Core()
        self.now = 1 * S
        self.runners: list[Runner] = []
        self.idle_ns = 0
        """While somebody who might run waited."""
        self._ends = 0
        self._agenda: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = count()

    @property
    def elapsed(self) -> int:
        """Simulated time since the beginning, ns. The buckets count from there."""
        return self.now - S

    def add(self, word: int, program: Program) -> Runner:
        """A share of those terms, whose process does that."""
        seat = len(self.runners)
        self.core.take_seat(seat, word)
        self.core.decide(Kind.JOIN, self.now, place=seat, seat=seat)
        runner = Runner(place=seat, seat=seat, program=program)
        self.runners.append(runner)
        self._proceed(runner)
        return runner

    def at(self, elapsed: int, action: Callable[[], None]) -> None:
        """Have something done at that time."""
        heapq.heappush(self._agenda, (S + elapsed, next(self._numbers), action))

    def run(self, until: int) -> None:
        """Go on to that time."""
        end = S + until
        while self.now < end:
            if self.core.state.holder == -1:
                self._wait(end)
            else:
                self._run_kernel(self.runners[self.core.state.holder])

    def windows(self, start: int, end: int, length: int) -> Iterator[tuple[int, int]]:
        """All windows of that length, one for each bucket that they can begin with."""
        for first in range(start, end - length + 1, BUCKET_NS):
            yield first, first + length

    def _wait(self, end: int) -> None:
        if any(place.state == PlaceIs.WAITING for place in self.core.state.places[:8]):
            self._advance(min(self.now + LOOK_NS, end))
            self.core.decide(Kind.LOOK, self.now)
        elif self._agenda:
            self._advance(min(self._agenda[0][0], end))
        else:
            self.now = end

    def _advance(self, until: int) -> None:
        """Let time pass, and do what is to be done meanwhile."""
        while self._agenda and self._agenda[0][0] <= until:
            at, _, action = heapq.heappop(self._agenda)
            self.now = max(self.now, at)
            action()
        self.now = max(self.now, until)

    def _run_kernel(self, runner: Runner) -> None:
        start, length = self.now, runner.kernel_ns
        runner.waits.append(start - runner.wanted_at)
        runner.add(start - S, start - S + length)
        self._advance(start + length)
        place, now = runner.place, self.now
        self.core.decide(Kind.CHARGE, now, place=place, used_ns=length)
        runner.kernel_ns, runner.wanted_at = 0, now
        step = next(runner.program, 0)
        if step > 0:
            runner.kernel_ns = step
            if self.core.must_yield(now):
                self.core.decide(Kind.RELEASE, now, place=place)
                self.core.decide(Kind.WANT, now, place=place)
            return
        self.core.decide(Kind.RELEASE, now, place=place)
        self._sleep(runner, -step)

    def _sleep(self, runner: Runner, length: int) -> None:
        if length > 0:
            self.at(self.elapsed + length, lambda: self._proceed(runner))

    def _proceed(self, runner: Runner) -> None:
        """It wakes up, or begins."""
        step = next(runner.program, 0)
        if step > 0:
            runner.kernel_ns, runner.wanted_at = step, self.now
            self.core.decide(Kind.WANT, self.now, place=runner.place)
        else:
            self._sleep(runner, -step)


def always(kernel_ns: int) -> Program:
    """One kernel after the other."""
    while True:
        yield kernel_ns


def jain(values: list[float]) -> float:
    """Jain's index: 1 when all are equal."""
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))

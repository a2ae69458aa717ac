# SPDX-License-Identifier: Apache-2.0
"""Programs that share a device by the pure core of leases, in simulated time.

As naive as can be: whoever holds the lease runs one kernel after the other, charges each when it
has ended, and looks whether it has to give way. In its gaps it keeps the lease for as long as the
core lets it. No latencies, no processes: what differs from what was promised here is the core's own
doing.
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
    queue_ns: int = 0
    """So much is queued behind the kernel that runs, and runs even if others wait."""
    queued_ns: int = 0
    burst_ns: int = 0
    gap_ns: int = 0
    """Moving means of what it does between two gaps, and of these."""
    begun_ns: int = 0
    """Of this burst."""
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

    def add(self, word: int, program: Program, *, queue_ns: int = 0) -> Runner:
        """A share of those terms, whose process does that."""
        seat = len(self.runners)
        self.core.take_seat(seat, word)
        self.core.decide(Kind.JOIN, self.now, place=seat, seat=seat)
        runner = Runner(place=seat, seat=seat, program=program, queue_ns=queue_ns)
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
        now = self.now
        self._tell(Kind.CHARGE, runner, length)
        runner.kernel_ns = 0
        runner.begun_ns += length
        runner.queued_ns -= length
        step = next(runner.program, 0)
        if step > 0:
            self._go_on(runner, step)
        elif step == 0 or not self._keep(runner, -step):
            self._tell(Kind.RELEASE, runner)
            self._sleep(runner, -step, now - step if step < 0 else 0)

    def _go_on(self, runner: Runner, kernel_ns: int) -> None:
        """The holder has another kernel: for this lease, or for its next."""
        runner.kernel_ns, runner.wanted_at = kernel_ns, self.now
        if runner.queued_ns > 0:
            return
        runner.queued_ns = 0
        if self.core.must_yield(self.now):
            self._tell(Kind.RELEASE, runner)
            self._want(runner)
        else:
            runner.queued_ns = runner.queue_ns

    def _keep(self, runner: Runner, gap_ns: int) -> bool:
        """Keep the lease over a gap. False: the core does not let it, or no longer."""
        state, began = self.core.state, self.now
        end = began + gap_ns
        while not self._has_to_go(runner):
            if self.now >= end:
                self._end_gap(runner, gap_ns)
                self._go_on(runner, next(runner.program))
                return True
            if self.now >= began + state.keep_ns:
                return False
            until = min(end, began + state.keep_ns)
            if self.now < state.expires_ns and state.next != -1:
                until = min(until, state.expires_ns)
            if self._agenda:
                until = min(until, self._agenda[0][0])
            self._advance(until)
        return False

    def _has_to_go(self, runner: Runner) -> bool:
        """Its lease is over, and a charge does not show that it is still furthest behind."""
        if self.core.must_yield(self.now):
            self._tell(Kind.CHARGE, runner)
        return self.core.must_yield(self.now)

    def _end_gap(self, runner: Runner, gap_ns: int) -> None:
        runner.gap_ns = (3 * runner.gap_ns + gap_ns) // 4
        runner.burst_ns = (3 * runner.burst_ns + runner.begun_ns) // 4
        runner.begun_ns = 0

    def _sleep(self, runner: Runner, gap_ns: int, until: int) -> None:
        if until > 0:
            self.at(until - S, lambda: self._proceed(runner, gap_ns))

    def _proceed(self, runner: Runner, gap_ns: int = 0) -> None:
        """It wakes up, or begins."""
        step = next(runner.program, 0)
        if step > 0:
            if gap_ns > 0:
                self._end_gap(runner, gap_ns)
            runner.kernel_ns, runner.wanted_at = step, self.now
            self._want(runner)
        else:
            self._sleep(runner, -step, self.now - step if step < 0 else 0)

    def _want(self, runner: Runner) -> None:
        launch_ns = max(runner.kernel_ns, runner.queue_ns)
        self.core.decide(Kind.WANT, self.now, place=runner.place, launch_ns=launch_ns)

    def _tell(self, kind: Kind, runner: Runner, used_ns: int = 0) -> None:
        self.core.decide(
            kind,
            self.now,
            place=runner.place,
            used_ns=used_ns,
            burst_ns=runner.burst_ns,
            gap_ns=runner.gap_ns,
        )


def always(kernel_ns: int) -> Program:
    """One kernel after the other."""
    while True:
        yield kernel_ns


def jain(values: list[float]) -> float:
    """Jain's index: 1 when all are equal."""
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))

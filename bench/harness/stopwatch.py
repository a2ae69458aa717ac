# SPDX-License-Identifier: Apache-2.0
"""Times the calls of one process by name, by the wall clock and by the processor's."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from bench.harness.quantiles import summarize
from bench.harness.results import Result

_Answer = TypeVar("_Answer")
_METHOD = (
    "one process; processor time of each call, p50 / p99; `figure` is the p99. In brackets the same"
    " by the wall clock"
)


class Stopwatch:
    """Times by name, in milliseconds."""

    def __init__(self) -> None:
        self._wall: dict[str, list[float]] = {}
        self._cpu: dict[str, list[float]] = {}

    def of(self, name: str, call: Callable[[], _Answer]) -> _Answer:
        """Call, and keep how long it took."""
        wall, cpu = time.perf_counter(), time.process_time()
        answer = call()
        self._cpu.setdefault(name, []).append(1000 * (time.process_time() - cpu))
        self._wall.setdefault(name, []).append(1000 * (time.perf_counter() - wall))
        return answer

    def clear(self) -> None:
        """Forget what was timed."""
        self._wall.clear()
        self._cpu.clear()

    def results(self) -> Iterator[Result]:
        """Return a result for each name."""
        for name, times in self._cpu.items():
            summary, wall = summarize(times), summarize(self._wall[name])
            yield Result(
                name=name,
                topic="decisions",
                unit="ms",
                value=summary.p99,
                seen=f"{summary.p50:.3f} / {summary.p99:.3f} ms"
                f" ({wall.p50:.3f} / {wall.p99:.3f} ms)",
                summary=summary,
                samples=len(times),
                method=_METHOD,
            )


@contextmanager
def without_gc() -> Iterator[None]:
    """Keep the collector of cycles from running: it is no part of a call."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()

# SPDX-License-Identifier: Apache-2.0
"""What MPS brings beside taking turns.

Two programs run the same small kernels: without shares (the driver slices time), in two shares of
half the GPU's time (mode soft), and in two shares of half its multiprocessors (mode mps).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Final

from allotment.modes.mps.state import DaemonState
from bench.harness.options import Options
from bench.harness.results import Result
from bench.harness.tables import number
from bench.mps.stage import BLOCKS, PATIENCE_S, Stage, kernels

_TARGET: Final = 1.5


def mps_throughput(stage: Stage, options: Options) -> Iterator[Result]:
    """Measure kernels of two lengths."""
    seconds, rounds = (0.5, 1) if options.is_quick else (3.0, 3)
    for kernel_us in (200, 50):
        yield _throughput(stage, kernel_us=kernel_us, seconds=seconds, rounds=rounds)


def _throughput(stage: Stage, *, kernel_us: int, seconds: float, rounds: int) -> Result:
    """Compare the three ways, in turn in each round."""
    words = (str(kernel_us), str(BLOCKS), str(seconds))
    had: dict[str, list[float]] = {"bare": [], "soft": [], "mps": []}
    for _ in range(rounds):
        for way, figures in had.items():
            begin = [
                stage.bare(*words) if way == "bare" else stage.share(way, *words) for _ in range(2)
            ]
            figures.append(kernels(begin) / seconds)
            if way == "mps":
                _await_stopped(stage)  # the GPU is kept for MPS clients until then
    rate = {way: statistics.median(figures) for way, figures in had.items()}
    ratios = [mps / bare for mps, bare in zip(had["mps"], had["bare"], strict=True)]
    return Result(
        topic="throughput",
        name=f"two programs, kernels of {kernel_us} µs on 20 of 108 multiprocessors",
        beside=f"{rate['bare']:.0f} kernels/s",
        seen=f"{rate['mps']:.0f} kernels/s (mode soft: {rate['soft']:.0f})",
        value=statistics.median(ratios),
        unit="x",
        target=_TARGET,
        at_least=True,
        samples=rounds,
        method=f"{number(seconds)} s with both under way; ratio to the driver's time slicing,"
        f" least of {rounds} rounds {min(ratios):.2f}",
    )


def _await_stopped(stage: Stage) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while stage.status().state is not DaemonState.STOPPED:
        if time.monotonic() > deadline:
            message = "the daemon does not stop"
            raise RuntimeError(message)
        time.sleep(0.1)

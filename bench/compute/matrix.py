# SPDX-License-Identifier: Apache-2.0
"""Does a program that waits for each result keep its guarantee beside launches of any length?

Each of its gaps can lend the GPU to a launch that cannot be taken back.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Final

from bench.compute.diagnostics import show
from bench.compute.rig import Rig, Terms
from bench.compute.scene import SECOND, Part, play
from bench.compute.sizes import Sizes
from bench.harness.options import Options
from bench.harness.results import Result
from bench.harness.tables import number

_KERNEL_NS: Final = 1_000_000
_GAPS_MS: Final = (0.0, 0.1, 0.5, 2, 20)
_LAUNCHES: Final = {
    "200us": ("--kernels", "200000"),
    "5ms": ("--kernels", "5000000"),
    "50ms": ("--kernels", "50000", "--graph", "1000"),
}
_SPLITS: Final = ((75, 25), (50, 50), (25, 75), (10, 90), (1, 99), (99, 1))
_LOOPS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    """A program that waits, its neighbour, and what else the computer does."""

    split: tuple[int, int]
    gap_ms: float
    launch: str
    is_busy: bool

    @property
    def name(self) -> str:
        """Return its name in the table."""
        return (
            f"{self.split[0]} (1 ms kernels, {number(self.gap_ms)} ms asleep) and {self.split[1]} "
            f"({self.launch} launches)" + (f", {_LOOPS} busy loops" if self.is_busy else "")
        )


def compute_matrix(rig: Rig, options: Options) -> Iterator[Result]:
    """Measure each cell, on a quiet computer and beside busy loops."""
    sizes = Sizes.of(options)
    cells = [
        _Cell(split=split, gap_ms=gap_ms, launch=launch, is_busy=is_busy)
        for is_busy, split, launch, gap_ms in product((False, True), _SPLITS, _LAUNCHES, _GAPS_MS)
    ]
    if sizes.quick:
        cells = [each for each in cells if each.split == (75, 25) and each.gap_ms == 0]
    for cell in cells:
        with _loops(_LOOPS if cell.is_busy else 0):
            yield _measured(rig, cell, sizes)
    yield from rig.ledger_error()


@contextmanager
def _loops(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for each in loops:
            each.kill()
            each.wait()


def _measured(rig: Rig, cell: _Cell, sizes: Sizes) -> Result:
    seconds = 1.0 + sizes.split_seconds
    waits = rig.program("steps", _KERNEL_NS, int(cell.gap_ms * 1e6), seconds)
    wants = rig.program("load", *_LAUNCHES[cell.launch], "--seconds", seconds)
    terms = [Terms(compute=f"{each}:100") for each in cell.split]
    recording = play(
        rig,
        [
            Part(command=waits, gpu=0, terms=terms[0], name="waits"),
            Part(command=wants, gpu=0, terms=terms[1], name="wants"),
            Part(command=waits, gpu=1, terms=terms[0], name="alone"),
        ],
    )
    first = recording.begun_ns + SECOND
    last = recording.begun_ns + int(seconds * SECOND)
    show(rig, recording, first, last)
    waiting, wanting, alone = (
        recording.percent(part, from_ns=first, to_ns=last) for part in range(3)
    )
    due = (min(cell.split[0], alone), cell.split[1])
    idle = 100 - waiting - wanting
    return Result(
        topic="gaps beside long launches",
        name=cell.name,
        beside=f"alone {alone:.1f} %",
        seen=f"{waiting:.1f} and {wanting:.1f} %, idle {idle:.1f}",
        value=max(0.0, due[0] - waiting, due[1] - wanting),
        unit="points below",
        target=3.0,
        samples=2,
        method="one kernel, its end, then asleep, and again, beside a program that always has "
        "launches queued; each share's guarantee has a ceiling of 100; at the same time the first "
        f"one alone on another GPU; percent of the GPU's time over {number(sizes.split_seconds)} s "
        "after the first second; by how much a share has less than its guarantee, or than alone",
    )

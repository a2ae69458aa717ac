# SPDX-License-Identifier: Apache-2.0
"""What do programs get that wait for each result, and leave the GPU idle in between?

Without limits one's kernel runs in the other's gap. In shares the lease has to change hands for
that, twice a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from bench.compute.diagnostics import show
from bench.compute.rig import Rig, Terms
from bench.compute.scene import SECOND, Part, play
from bench.compute.sizes import Sizes
from bench.harness.options import Options
from bench.harness.results import Result
from bench.harness.tables import number

_KERNEL_MS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """Two programs on one GPU: their terms, and how long each is on the CPU after a kernel."""

    guarantees: tuple[int, int]
    gaps_ms: tuple[float, float]

    @property
    def name(self) -> str:
        """Return their name in the table."""
        return " and ".join(
            f"{guarantee}:100 ({_KERNEL_MS}/{number(gap)} ms)"
            for guarantee, gap in zip(self.guarantees, self.gaps_ms, strict=True)
        )


_PAIRS: Final = (
    _Pair(guarantees=(50, 50), gaps_ms=(1, 1)),
    _Pair(guarantees=(30, 70), gaps_ms=(1, 0.4)),
)


def gaps(rig: Rig, options: Options) -> Iterator[Result]:
    """Measure pairs of programs with gaps, in shares and under plain time slicing."""
    sizes = Sizes.of(options)
    seconds = 1.0 + sizes.split_seconds
    recording = play(
        rig,
        [
            part
            for position, pair in enumerate(_PAIRS)
            for is_shared in (True, False)
            for part in _parts(rig, pair, seconds, position=position, is_shared=is_shared)
        ],
    )
    first, last = recording.begun_ns + SECOND, recording.begun_ns + int(seconds * SECOND)
    show(rig, recording, first, last)
    had = [
        recording.percent(part, from_ns=first, to_ns=last) for part in range(len(recording.parts))
    ]
    for position, pair in enumerate(_PAIRS):
        yield from _findings(pair, had[4 * position :][:2], had[4 * position + 2 :][:2], sizes)
    yield from rig.ledger_error()


def _parts(rig: Rig, pair: _Pair, seconds: float, *, position: int, is_shared: bool) -> list[Part]:
    return [
        Part(
            command=rig.program("steps", _KERNEL_MS * 1_000_000, int(gap * 1e6), seconds),
            gpu=2 * position + (0 if is_shared else 1),
            terms=Terms(compute=f"{guarantee}:100") if is_shared else None,
            name=f"{'waits' if is_shared else 'bare'}-{position}-{which}",
        )
        for which, (guarantee, gap) in enumerate(zip(pair.guarantees, pair.gaps_ms, strict=True))
    ]


def _findings(pair: _Pair, seen: list[float], bare: list[float], sizes: Sizes) -> Iterator[Result]:
    yield Result(
        topic="waiting",
        name=f"waiting for each result, {pair.name}: GPU time of both",
        beside=f"{sum(bare):.1f} %",
        seen=f"{sum(seen):.1f} %",
        value=sum(seen) / sum(bare) * 100,
        unit="% of it",
        target=90.0,
        at_least=True,
        samples=1,
        method=f"one kernel of {_KERNEL_MS} ms, its end, then so long on the CPU (2/1: 1 ms, "
        "asleep), and again; percent of the GPU's time over "
        f"{number(sizes.split_seconds)} s after the first second; without limits one's kernels run "
        "in the other's gaps, which takes no change of a lease",
    )
    yield Result(
        topic="waiting's parts",
        name=f"waiting for each result, {pair.name}: part of each",
        beside=f"{' '.join(f'{each:.1f}' for each in bare)} %",
        seen=f"{' '.join(f'{each:.1f}' for each in seen)} %",
        value=max(0.0, *(due - each for due, each in zip(pair.guarantees, seen, strict=True))),
        unit="points below",
        target=None,
        samples=2,
        method="the same; worst is the most that one had less than its guarantee, which it is "
        "promised of the time in which it has work, and not of the gaps that it leaves",
    )

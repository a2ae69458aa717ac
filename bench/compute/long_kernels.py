# SPDX-License-Identifier: Apache-2.0
"""Do ceilings and guarantees hold for kernels that are much longer than a lease?

One kernel of 100 ms is ten leases, and the process that launched it may be gone before anybody
has charged it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from bench.compute.diagnostics import show
from bench.compute.rig import Rig, Terms
from bench.compute.scene import SECOND, Part, Recording, play
from bench.compute.sizes import Sizes
from bench.harness.options import Options
from bench.harness.results import Result
from bench.harness.tables import number

_BRIEF_CAP: Final = 10
_BRIEF_NS: Final = 100_000_000
_LONG_NS: Final = 500_000_000
_SPLIT: Final = (90, 10)


def long_kernels(rig: Rig, options: Options) -> Iterator[Result]:
    """Measure short processes under a ceiling, and on another GPU long kernels beside others."""
    sizes = Sizes.of(options)
    brief = rig.program("brief", _BRIEF_NS, sizes.brief_seconds)
    # Windows of that length, three tenths of it apart at most.
    seconds = 1.0 + 1.3 * sizes.long_seconds
    loads = [
        rig.program("load", "--kernels", nanoseconds, "--seconds", seconds)
        for nanoseconds in (_LONG_NS, 2_000_000)
    ]
    recording = play(
        rig,
        [
            Part(command=brief, gpu=0, terms=Terms(compute=str(_BRIEF_CAP)), name="brief"),
            Part(command=brief, gpu=1, name="bare-brief"),
            *(
                Part(command=load, gpu=2, terms=Terms(compute=f"{part}:100"), name=f"long-{part}")
                for load, part in zip(loads, _SPLIT, strict=True)
            ),
            *(Part(command=load, gpu=3, name="bare-long") for load in loads),
        ],
    )
    show(rig, recording, recording.begun_ns + SECOND, _end(recording, seconds))
    yield _brief(recording, sizes)
    yield _long(recording, sizes, _end(recording, seconds))
    yield from rig.ledger_error()


def _end(recording: Recording, seconds: float) -> int:
    return recording.begun_ns + int(seconds * SECOND)


def _brief(recording: Recording, sizes: Sizes) -> Result:
    first = recording.begun_ns
    # The processes are too many and too short to be sampled one by one: all that their GPU did.
    inside, outside = (
        100 - recording.idle_percent(gpu, from_ns=first, to_ns=_end(recording, sizes.brief_seconds))
        for gpu in (0, 1)
    )
    processes, unlimited = (recording.answers[part][0]["processes"] for part in (0, 1))
    return Result(
        topic="short processes",
        name=f"a ceiling of {_BRIEF_CAP} over processes of one 100 ms kernel each, one after the "
        "other",
        beside=f"{outside:.1f} % ({unlimited} processes)",
        seen=f"{inside:.1f} % ({processes} processes)",
        value=inside,
        unit="%",
        target=12.0,
        samples=processes,
        method="each process launches one kernel, waits for its end and returns from main; all "
        f"that their GPU computed in {number(sizes.brief_seconds)} s, the first kernel included",
    )


def _long(recording: Recording, sizes: Sizes, last: int) -> Result:
    first, length = recording.begun_ns + SECOND, int(sizes.long_seconds * SECOND)
    seen, bare = (
        [recording.percent(part, from_ns=first, to_ns=last) for part in parts]
        for parts in ((2, 3), (4, 5))
    )
    windows = [
        (percent, due)
        for part, due in zip((2, 3), _SPLIT, strict=True)
        for _, percent in recording.windows(part, length_ns=length, from_ns=first, to_ns=last)
    ]
    longest = recording.answers[3][0]["gap_ns"]["max"] / 1e6
    return Result(
        topic="long kernels",
        name="contended 90/10: 500ms beside 2ms kernels",
        beside=f"{' '.join(f'{each:.1f}' for each in bare)} %",
        seen=f"{' '.join(f'{each:.1f}' for each in seen)} % (the 10 waits {longest:.0f} ms)",
        value=max(abs(percent - due) for percent, due in windows),
        unit="points",
        target=2.0,
        samples=len(windows),
        method="percent of the GPU's time over every window of "
        f"{number(sizes.long_seconds)} s after the first second, of which one turn of the 10 after "
        "each kernel of 500 ms is half a point; shown are means, and the worst window; in brackets "
        "the longest time between two ends of the 2 ms kernels",
    )

# SPDX-License-Identifier: Apache-2.0
"""Does a ceiling hold, whatever the kernels are and however they are launched?"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from bench.compute.diagnostics import show
from bench.compute.rig import Rig, Terms
from bench.compute.scene import SECOND, Part, Recording, play
from bench.compute.sizes import ONLY_KERNELS, PATTERNS, VARYING, Sizes, kernel_words
from bench.harness.options import Options
from bench.harness.results import Result
from bench.harness.tables import number

_WORDS = {
    "stream": "one stream",
    "streams": "4 streams",
    "threads": "4 per-thread streams",
    "processes": "4 processes",
    "quarters": "4 streams, each kernel a quarter of the GPU",
}


def ceilings(rig: Rig, options: Options) -> Iterator[Result]:
    """Measure shares that are alone on their devices, each with another ceiling."""
    sizes = Sizes.of(options)
    for pattern in sizes.patterns:
        for kernels in sizes.kernels:
            if ONLY_KERNELS.get(pattern, kernels) != kernels or (
                kernels == VARYING and pattern != "stream"
            ):
                continue
            yield _capped(rig, sizes, pattern, kernels)
    yield from rig.ledger_error()


def _capped(rig: Rig, sizes: Sizes, pattern: str, kernels: str) -> Result:
    options, processes = PATTERNS[pattern]
    seconds = sizes.capped_seconds
    command = rig.program("load", *kernel_words(kernels), "--seconds", seconds, *options)
    parts = [
        Part(
            command=command,
            gpu=gpu,
            terms=Terms(compute=str(cap)),
            processes=processes,
            name=f"cap-{cap}",
        )
        for gpu, cap in enumerate(sizes.caps)
    ]
    parts.append(Part(command=command, gpu=len(sizes.caps), processes=processes, name="bare"))
    recording = play(rig, parts)
    first, last = recording.begun_ns + SECOND, recording.begun_ns + int(seconds * SECOND)
    means, worst, samples = [], 0.0, 0
    for number_, cap in enumerate(sizes.caps):
        windows = _windows(recording, number_, sizes, first, last)
        means.append(statistics.mean(windows))
        worst = max(worst, *(abs(each - cap) for each in windows))
        samples += len(windows)
    show(rig, recording, first, last)
    bare = recording.percent(len(sizes.caps), from_ns=first, to_ns=last)
    name = f"graphs of 1,000 kernels of {kernels}"
    if pattern != "graph":
        name = f"{kernels} kernels, {_WORDS[pattern]}"
    return Result(
        topic="ceilings",
        name=f"ceilings {' '.join(map(str, sizes.caps))}: {name}",
        beside=f"{number(bare)} %",
        seen=f"{' '.join(f'{each:.1f}' for each in means)} %",
        value=worst,
        unit="points",
        target=2.0,
        samples=samples,
        method="one share on each GPU, each with another ceiling, and the same program outside of "
        "any share on one more; the GPU time that the simulator gave to each (what runs at once "
        f"counts once), over every window of {number(sizes.window_seconds)} s after the first "
        "second, in steps of 50 ms; shown are means, and the worst window of all",
    )


def _windows(recording: Recording, part: int, sizes: Sizes, first: int, last: int) -> list[float]:
    length = int(sizes.window_seconds * SECOND)
    return [
        percent
        for _, percent in recording.windows(part, length_ns=length, from_ns=first, to_ns=last)
    ]

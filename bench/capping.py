# SPDX-License-Identifier: Apache-2.0
"""Does a ceiling hold, whatever the kernels are and however they are launched?"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from asked import ONLY_KERNELS, PATTERNS, VARYING, Asked, kernel_words
from findings import Finding, number
from grounds import Ground, Terms
from scenes import SECOND, Part, Recording, play
from telling import tell

_WORDS = {
    "stream": "one stream",
    "streams": "4 streams",
    "threads": "4 per-thread streams",
    "processes": "4 processes",
    "quarters": "4 streams, each kernel a quarter of the GPU",
}


def capping(ground: Ground, asked: Asked) -> Iterator[Finding]:
    """Measure shares that are alone on their devices, each with another ceiling."""
    for pattern in asked.patterns:
        for kernels in asked.kernels:
            if ONLY_KERNELS.get(pattern, kernels) != kernels or (
                kernels == VARYING and pattern != "stream"
            ):
                continue
            yield _capped(ground, asked, pattern, kernels)


def _capped(ground: Ground, asked: Asked, pattern: str, kernels: str) -> Finding:
    options, processes = PATTERNS[pattern]
    seconds = asked.capped_seconds
    command = ground.program("load", *kernel_words(kernels), "--seconds", seconds, *options)
    parts = [
        Part(
            command=command,
            gpu=gpu,
            terms=Terms(compute=str(cap)),
            processes=processes,
            name=f"cap-{cap}",
        )
        for gpu, cap in enumerate(asked.caps)
    ]
    parts.append(Part(command=command, gpu=len(asked.caps), processes=processes, name="bare"))
    recording = play(ground, parts)
    first, last = recording.begun_ns + SECOND, recording.begun_ns + int(seconds * SECOND)
    means, worst, samples = [], 0.0, 0
    for number_, cap in enumerate(asked.caps):
        windows = _windows(recording, number_, asked, first, last)
        means.append(statistics.mean(windows))
        worst = max(worst, *(abs(each - cap) for each in windows))
        samples += len(windows)
    tell(ground, recording, first, last)
    bare = recording.percent(len(asked.caps), from_ns=first, to_ns=last)
    name = f"graphs of 1,000 kernels of {kernels}"
    if pattern != "graph":
        name = f"{kernels} kernels, {_WORDS[pattern]}"
    return Finding(
        question="ceilings",
        name=f"ceilings {' '.join(map(str, asked.caps))}: {name}",
        without=f"{number(bare)} %",
        seen=f"{' '.join(f'{each:.1f}' for each in means)} %",
        reached=worst,
        unit="points",
        target=2.0,
        samples=samples,
        method="one share on each GPU, each with another ceiling, and the same program outside of "
        "any share on one more; the GPU time that the simulator gave to each (what runs at once "
        f"counts once), over every window of {number(asked.window_seconds)} s after the first "
        "second, in steps of 50 ms; shown are means, and the worst window of all",
    )


def _windows(recording: Recording, part: int, asked: Asked, first: int, last: int) -> list[float]:
    length = int(asked.window_seconds * SECOND)
    return [
        percent
        for _, percent in recording.windows(part, length_ns=length, from_ns=first, to_ns=last)
    ]

# SPDX-License-Identifier: Apache-2.0
"""Does a latency-critical service notice its neighbour, and does that neighbour get the rest?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from asked import KERNELS, Asked, kernel_words
from findings import Finding, number
from grounds import Ground, Terms
from scenes import SECOND, Part, Recording, play
from telling import tell

_KERNEL_NS = 1_000_000
_RATE = 20


def serving(ground: Ground, asked: Asked) -> Iterator[Finding]:
    """Measure a service of class latency beside a saturating job of class besteffort."""
    for kernels in ("200us", "2ms"):
        yield from _beside(ground, asked, kernels)


def _beside(ground: Ground, asked: Asked, kernels: str) -> Iterator[Finding]:
    seconds = asked.service_seconds
    service = ground.program("service", _KERNEL_NS, _RATE, seconds)
    job = ground.program("load", *kernel_words(kernels), "--seconds", seconds)
    recording = play(
        ground,
        [
            Part(
                command=service,
                gpu=0,
                terms=Terms(compute="10:100", share_class="latency"),
                name="service",
            ),
            Part(
                command=job,
                gpu=0,
                terms=Terms(compute="0:100", share_class="besteffort"),
                name="job",
            ),
            Part(command=service, gpu=1, name="alone"),
            Part(command=service, gpu=2, name="bare-service"),
            Part(command=job, gpu=2, name="bare-job"),
        ],
    )
    first, last = recording.begun_ns + SECOND, recording.begun_ns + int(seconds * SECOND)
    tell(ground, recording, first, last)
    within, alone, bare = (_milliseconds(recording, part) for part in (0, 2, 3))
    neighbour = int(KERNELS[kernels]) / 1e6
    yield Finding(
        question="latency",
        name=f"p99 of a latency service beside a best-effort job of {kernels} kernels",
        without=f"{_both(bare)} (alone {_both(alone)})",
        seen=_both(within),
        reached=_quantile(within, 0.99),
        unit="ms",
        target=1.2 * _quantile(alone, 0.99) + neighbour,
        samples=len(within),
        method="1 ms kernels, 20 requests a second at uneven intervals, from the launch (or the "
        "request's arrival, when the one before was late) to its end seen; p50 / p99; at the same "
        "time alone on another GPU, and with the job and no limits on a third; the target is "
        "1.2 x the p99 alone plus one kernel of the job",
    )
    service_part = recording.percent(0, from_ns=first, to_ns=last)
    job_part = recording.percent(1, from_ns=first, to_ns=last)
    bare_part = recording.percent(4, from_ns=first, to_ns=last)
    yield Finding(
        question="the rest",
        name=f"what the best-effort job of {kernels} kernels keeps of the rest",
        without=f"{bare_part:.1f} % of the device",
        seen=f"{job_part:.1f} % of the device",
        reached=job_part / (100 - service_part) * 100,
        unit="%",
        target=85.0,
        at_least=True,
        samples=1,
        method=f"of the GPU's time less the service's, over {number(seconds - 1)} s",
    )


def _milliseconds(recording: Recording, part: int) -> list[float]:
    (answer,) = recording.answers[part]
    return sorted(each / 1e6 for each in answer["latencies_ns"])


def _quantile(ordered: Sequence[float], fraction: float) -> float:
    return ordered[round(fraction * (len(ordered) - 1))]


def _both(ordered: Sequence[float]) -> str:
    return f"{_quantile(ordered, 0.5):.2f} / {_quantile(ordered, 0.99):.2f} ms"

# SPDX-License-Identifier: Apache-2.0
"""Does a latency-critical service notice its neighbour, and does that neighbour get the rest?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.compute.diagnostics import show
from bench.compute.rig import Rig, Terms
from bench.compute.scene import SECOND, Part, Recording, play
from bench.compute.sizes import KERNELS, Sizes, kernel_words
from bench.harness.options import Options
from bench.harness.quantiles import quantile, summarize
from bench.harness.results import Result
from bench.harness.tables import number

_KERNEL_NS = 1_000_000
_RATE = 20


def latency(rig: Rig, options: Options) -> Iterator[Result]:
    """Measure a service of class latency beside a saturating job of class besteffort."""
    sizes = Sizes.of(options)
    for kernels in ("200us", "2ms"):
        yield from _beside(rig, sizes, kernels)
    yield from rig.ledger_error()


def _beside(rig: Rig, sizes: Sizes, kernels: str) -> Iterator[Result]:
    seconds = sizes.service_seconds
    service = rig.program("service", _KERNEL_NS, _RATE, seconds)
    job = rig.program("load", *kernel_words(kernels), "--seconds", seconds)
    recording = play(
        rig,
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
    show(rig, recording, first, last)
    within, alone, bare = (_milliseconds(recording, part) for part in (0, 2, 3))
    neighbour = int(KERNELS[kernels]) / 1e6
    yield Result(
        topic="latency",
        name=f"p99 of a latency service beside a best-effort job of {kernels} kernels",
        beside=f"{_both(bare)} (alone {_both(alone)})",
        seen=_both(within),
        value=quantile(within, 0.99),
        summary=summarize(within),
        base=summarize(bare),
        unit="ms",
        target=1.2 * quantile(alone, 0.99) + neighbour,
        samples=len(within),
        method="1 ms kernels, 20 requests a second at uneven intervals, from the launch (or the "
        "request's arrival, when the one before was late) to its end seen; p50 / p99; at the same "
        "time alone on another GPU, and with the job and no limits on a third; the target is "
        "1.2 x the p99 alone plus one kernel of the job",
    )
    service_part = recording.percent(0, from_ns=first, to_ns=last)
    job_part = recording.percent(1, from_ns=first, to_ns=last)
    bare_part = recording.percent(4, from_ns=first, to_ns=last)
    yield Result(
        topic="the rest",
        name=f"what the best-effort job of {kernels} kernels keeps of the rest",
        beside=f"{bare_part:.1f} % of the device",
        seen=f"{job_part:.1f} % of the device",
        value=job_part / (100 - service_part) * 100,
        unit="%",
        target=85.0,
        at_least=True,
        samples=1,
        method=f"of the GPU's time less the service's, over {number(seconds - 1)} s",
    )


def _milliseconds(recording: Recording, part: int) -> list[float]:
    (answer,) = recording.answers[part]
    return sorted(each / 1e6 for each in answer["latencies_ns"])


def _both(ordered: Sequence[float]) -> str:
    return f"{quantile(ordered, 0.5):.2f} / {quantile(ordered, 0.99):.2f} ms"

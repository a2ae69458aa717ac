# SPDX-License-Identifier: Apache-2.0
"""Shares of a real GPU's time under PyTorch: ceilings, splits, borrowing, latency.

A real GPU keeps no accounts that could be the truth. It is taken from the programs: what a share
finishes in a second, against what the same program finishes alone on the same GPU in the same run,
is the part of the GPU that it had. Without limits the same programs run together as they would
without Allotment.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.compute.rig import Rig, Terms
from bench.compute.scene import SECOND, Part, Recording, play
from bench.compute.sizes import CAPS, SPLITS
from bench.gpu.rig import GpuRig
from bench.harness.options import Options
from bench.harness.quantiles import quantile
from bench.harness.results import Result

HERE: Final = Path(__file__).resolve().parent
_SETTLING_NS: Final = SECOND
_RATE: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A program that always wants more, and the same as a service."""

    name: str
    command: Sequence[str]


def kinds(rig: Rig, *, python: str, with_torch: bool) -> list[Kind]:
    """Return what runs: PyTorch's products of several sizes, else the bench's own kernels."""
    if not with_torch:
        spin = rig.program("load", "--progress", "--kernels")
        return [
            Kind(name="200us kernels", command=[*spin, "200000"]),
            Kind(name="graphs of 1,000 kernels", command=[*spin, "20000", "--graph", "1000"]),
        ]
    torch = [python, str(HERE / "torch_load.py"), "--size"]
    return [
        Kind(name="products of 512", command=[*torch, "512"]),
        Kind(name="products of 2048", command=[*torch, "2048"]),
        Kind(name="products of 8192", command=[*torch, "8192"]),
        Kind(name="graphs of 100 products of 1024", command=[*torch, "1024", "--graph", "100"]),
    ]


def gpu_turns(gpu: GpuRig, options: Options) -> Iterator[Result]:
    """Ask all questions of every kind of program; a share is of GPU 0."""
    gpu.require_torch()
    with gpu.machine() as rig:
        yield from _turns(rig, options, with_torch=gpu.torch is not None)


def _turns(rig: Rig, options: Options, *, with_torch: bool) -> Iterator[Result]:
    quick, python = options.is_quick, options.python
    seconds = 1.7 if quick else 6.0
    several = kinds(rig, python=python, with_torch=with_torch)
    for kind in several:
        print(f"measuring: shares of time, {kind.name}", file=sys.stderr)
        alone = rate_of(_play(rig, [(kind, None)], seconds), 0)
        yield _ceilings(rig, kind, alone, seconds, CAPS[1:2] if quick else CAPS)
        for split in SPLITS[:1] if quick else SPLITS[:3]:
            yield from _split(rig, kind, alone, seconds, split)
    if not quick:
        yield _lending(rig, several[1])
    if with_torch:
        yield _latency(rig, several, seconds=seconds * 2, python=python)


def _play(rig: Rig, programs: Sequence[tuple[Kind, Terms | None]], seconds: float) -> Recording:
    parts = [
        Part(
            command=[*kind.command, "--seconds", str(seconds)],
            terms=terms,
            name=f"turns-{number}",
        )
        for number, (kind, terms) in enumerate(programs)
    ]
    return play(rig, parts, is_sampled=False)


def rate_of(recording: Recording, part: int) -> float:
    """Return what a part finished in a second, after its first second."""
    begin = recording.begun_ns + _SETTLING_NS
    return rate_between(recording, part, begin, recording.ended_ns)


def rate_between(recording: Recording, part: int, from_ns: int, to_ns: int) -> float:
    """Return what a part finished in a second, between two moments."""
    progress = recording.answers[part][0]["progress"]
    times = [at for at, _ in progress]
    first = min(bisect_left(times, from_ns), len(progress) - 1)
    last = max(bisect_left(times, to_ns) - 1, first)
    if last == first:
        return 0.0
    (began, before), (ended, after) = progress[first], progress[last]
    return float((after - before) / (ended - began) * SECOND)


def _ceilings(rig: Rig, kind: Kind, alone: float, seconds: float, caps: Sequence[int]) -> Result:
    seen = [
        rate_of(_play(rig, [(kind, Terms(compute=str(cap)))], seconds), 0) / alone * 100
        for cap in caps
    ]
    return Result(
        topic="ceilings",
        name=f"ceilings of {' '.join(map(str, caps))} %: {kind.name}",
        beside="100 %",
        seen=f"{' '.join(f'{each:.1f}' for each in seen)} %",
        value=max(abs(had - cap) for had, cap in zip(seen, caps, strict=True)),
        unit="points",
        target=2.0,
        samples=len(caps),
        method="one share on the GPU after the other, each with another ceiling: what it finishes "
        f"in a second, over {seconds - 1:.1f} s, against the same program alone without limits",
    )


def _split(
    rig: Rig, kind: Kind, alone: float, seconds: float, split: Sequence[int]
) -> Iterator[Result]:
    inside = _play(rig, [(kind, Terms(compute=f"{part}:100")) for part in split], seconds)
    outside = _play(rig, [(kind, None)] * len(split), seconds)
    seen = [rate_of(inside, part) / alone * 100 for part in range(len(split))]
    bare = [rate_of(outside, part) / alone * 100 for part in range(len(split))]
    due = [part + (100 - sum(split)) / len(split) for part in split]
    name = "/".join(map(str, split))
    yield Result(
        topic="splits",
        name=f"contended {name}: {kind.name}",
        beside=f"{' '.join(f'{each:.1f}' for each in bare)} %",
        seen=f"{' '.join(f'{each:.1f}' for each in seen)} %",
        value=max(abs(had - want) for had, want in zip(seen, due, strict=True)),
        unit="points",
        target=2.0,
        samples=len(split),
        method="shares that always want more, each a guarantee with a ceiling of 100; then the "
        "same programs together without limits; each against itself alone",
    )
    yield Result(
        topic="throughput",
        name=f"work done together, {name}: {kind.name}",
        beside=f"{sum(bare):.1f} %",
        seen=f"{sum(seen):.1f} %",
        value=sum(seen) / sum(bare) * 100,
        unit="%",
        target=97.0,
        at_least=True,
        samples=1,
        method="the sums of the line above, in shares against plain time slicing",
    )


def _lending(rig: Rig, kind: Kind) -> Result:
    parts = [
        Part(command=[*kind.command, "--seconds", "9"], terms=Terms(compute="30:100"), name="a"),
        Part(
            command=[*kind.command, "--seconds", "9", "--phases", "3-6"],
            terms=Terms(compute="70"),
            name="b",
        ),
    ]
    recording = play(rig, parts, is_sampled=False)
    (wake,) = recording.answers[1][0]["wakes_ns"]
    alone = rate_between(recording, 0, wake - 2 * SECOND, wake)
    after = rate_between(recording, 0, wake + SECOND // 5, wake + 3 * SECOND - SECOND // 5)
    return Result(
        topic="lending",
        name=f"30:100 beside a 70 that wakes: {kind.name}",
        seen=f"{after / alone * 100:.1f} % from 200 ms after the wake on",
        value=abs(after / alone * 100 - 30),
        unit="points",
        target=2.0,
        samples=1,
        method="against what it had while the other slept",
    )


def _latency(rig: Rig, several: Sequence[Kind], *, seconds: float, python: str) -> Result:
    service = [python, str(HERE / "torch_load.py"), "--size", "2048", "--rate", str(_RATE)]
    service += ["--seconds", str(seconds)]
    job = [*several[2].command, "--seconds", str(seconds)]
    alone = _p99(play(rig, [Part(command=service)], is_sampled=False))
    bare = _p99(play(rig, [Part(command=service), Part(command=job)], is_sampled=False))
    limits = (
        Terms(compute="10:100", share_class="latency"),
        Terms(compute="0:100", share_class="besteffort"),
    )
    parts = [
        Part(command=command, terms=terms, name=name)
        for command, terms, name in zip((service, job), limits, ("s", "j"), strict=True)
    ]
    recording = play(rig, parts, is_sampled=False)
    kernels = recording.answers[1][0]["kernels"]
    kernel_ms = seconds * 1000 / max(1, kernels)
    return Result(
        topic="latency",
        name="p99 of a latency service beside a best-effort job of products of 8192",
        beside=f"{bare:.2f} ms (alone {alone:.2f} ms)",
        seen=f"{_p99(recording):.2f} ms",
        value=_p99(recording),
        unit="ms",
        target=1.2 * alone + kernel_ms,
        samples=int(seconds * _RATE),
        method=f"products of 2048, {_RATE} requests a second; the target is 1.2 x the p99 alone "
        f"plus one kernel of the job ({kernel_ms:.1f} ms)",
    )


def _p99(recording: Recording) -> float:
    return quantile(recording.answers[0][0]["latencies_ns"], 0.99) / 1e6

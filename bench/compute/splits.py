# SPDX-License-Identifier: Apache-2.0
"""Does each share get its part when all want more, and is nothing lost by taking turns?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.compute.diagnostics import show
from bench.compute.rig import Rig, Terms
from bench.compute.scene import SECOND, Part, Recording, play
from bench.compute.sizes import VARYING, Sizes, kernel_words
from bench.harness.options import Options
from bench.harness.results import Result
from bench.harness.tables import number

_SETTLING_SECONDS = 1.0


def splits(rig: Rig, options: Options) -> Iterator[Result]:
    """Measure contended shares beside the same programs under plain time slicing."""
    sizes = Sizes.of(options)
    known = ("200us", "mixed", VARYING)
    wanted = [each for each in known if each in sizes.kernels] or sizes.kernels[:1]
    lost: list[tuple[float, str]] = []
    for kernels in wanted:
        for split in sizes.splits[:1] if kernels == VARYING else sizes.splits:
            recording = _play(rig, sizes, split, [kernels] * len(split))
            lost.append(_throughput(recording, f"{_name(split)}, {kernels} kernels"))
            yield _deviation(sizes, recording, split, f"{kernels} kernels")
            if len(set(split)) == 1:
                yield _fairness(sizes, recording, split, f"{kernels} kernels")
    if not sizes.quick:
        recording = _play(rig, sizes, (30, 70), ["20us", "20ms"])
        lost.append(_throughput(recording, "20us beside 20ms kernels"))
        yield _deviation(sizes, recording, (30, 70), "20us beside 20ms kernels")
    least, where = min(lost)
    yield Result(
        topic="throughput",
        name="work done by contended shares together",
        beside="100 %",
        seen=f"{' '.join(f'{each:.1f}' for each, _ in lost)} %",
        value=least,
        unit="%",
        target=97.0,
        at_least=True,
        samples=len(lost),
        method="kernels finished in all shares, by their durations, against the same programs "
        f"under plain time slicing, in each of the scenes above; the worst is {where}",
    )
    yield from rig.ledger_error()


def _name(split: Sequence[int]) -> str:
    return f"{split[0]}x{len(split)}" if len(set(split)) == 1 else "/".join(map(str, split))


def _play(rig: Rig, sizes: Sizes, split: Sequence[int], kernels: Sequence[str]) -> Recording:
    seconds = _SETTLING_SECONDS + sizes.split_seconds
    parts = []
    for gpu, is_shared in ((0, True), (1, False)):
        parts += [
            Part(
                command=rig.program("load", *kernel_words(each), "--seconds", seconds),
                gpu=gpu,
                terms=Terms(compute=f"{guarantee}:100") if is_shared else None,
                name=f"{'share' if is_shared else 'bare'}-{position}",
            )
            for position, (guarantee, each) in enumerate(zip(split, kernels, strict=True))
        ]
    recording = play(rig, parts)
    show(rig, recording, *_span(sizes, recording))
    return recording


def _span(sizes: Sizes, recording: Recording) -> tuple[int, int]:
    first = recording.begun_ns + int(_SETTLING_SECONDS * SECOND)
    return first, first + int(sizes.split_seconds * SECOND)


def _percents(sizes: Sizes, recording: Recording, parts: range) -> list[float]:
    first, last = _span(sizes, recording)
    return [recording.percent(part, from_ns=first, to_ns=last) for part in parts]


def _fair(split: Sequence[int]) -> list[float]:
    # What the guarantees leave is shared alike.
    rest = (100 - sum(split)) / len(split)
    return [each + rest for each in split]


def _throughput(recording: Recording, where: str) -> tuple[float, str]:
    half = len(recording.parts) // 2
    inside = sum(recording.work_ns(part) for part in range(half))
    outside = sum(recording.work_ns(part) for part in range(half, 2 * half))
    return inside / outside * 100, where


def _deviation(sizes: Sizes, recording: Recording, split: Sequence[int], kernels: str) -> Result:
    bare = _percents(sizes, recording, range(len(split), 2 * len(split)))
    seen = _percents(sizes, recording, range(len(split)))
    return Result(
        topic="splits",
        name=f"contended {_name(split)}: {kernels}",
        beside=f"{' '.join(f'{each:.1f}' for each in bare)} %",
        seen=f"{' '.join(f'{each:.1f}' for each in seen)} %",
        value=max(abs(had - due) for had, due in zip(seen, _fair(split), strict=True)),
        unit="points",
        target=2.0,
        samples=len(split),
        method="shares that always want more, each a guarantee with a ceiling of 100, on one GPU; "
        "the same programs outside of any share on another at the same time; percent of the GPU's "
        f"time over {number(sizes.split_seconds)} s after the first second",
    )


def _fairness(sizes: Sizes, recording: Recording, split: Sequence[int], kernels: str) -> Result:
    seen = _percents(sizes, recording, range(len(split)))
    bare = _percents(sizes, recording, range(len(split), 2 * len(split)))
    return Result(
        topic="fairness",
        name=f"Jain index of {_name(split)}: {kernels}",
        beside=f"{_jain(bare):.4f}",
        seen=f"{_jain(seen):.4f}",
        value=_jain(seen),
        unit="",
        target=0.995,
        at_least=True,
        samples=len(split),
        method="(sum of parts)² / (n x sum of their squares), of the equal splits",
    )


def _jain(parts: Sequence[float]) -> float:
    squares = sum(each * each for each in parts)
    return sum(parts) ** 2 / (len(parts) * squares) if squares else 0.0

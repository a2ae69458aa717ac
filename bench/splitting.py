# SPDX-License-Identifier: Apache-2.0
"""Does each share get its part when all want more, and is nothing lost by taking turns?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from asked import VARYING, Asked, kernel_words
from findings import Finding, number
from grounds import Ground, Terms
from scenes import SECOND, Part, Recording, play
from telling import tell

_SETTLING_SECONDS = 1.0


def splitting(ground: Ground, asked: Asked) -> Iterator[Finding]:
    """Measure contended shares beside the same programs under plain time slicing."""
    known = ("200us", "mixed", VARYING)
    wanted = [each for each in known if each in asked.kernels] or asked.kernels[:1]
    lost: list[tuple[float, str]] = []
    for kernels in wanted:
        for split in asked.splits[:1] if kernels == VARYING else asked.splits:
            recording = _play(ground, asked, split, [kernels] * len(split))
            lost.append(_throughput(recording, f"{_name(split)}, {kernels} kernels"))
            yield _deviation(asked, recording, split, f"{kernels} kernels")
            if len(set(split)) == 1:
                yield _fairness(asked, recording, split, f"{kernels} kernels")
    if not asked.quick:
        recording = _play(ground, asked, (30, 70), ["20us", "20ms"])
        lost.append(_throughput(recording, "20us beside 20ms kernels"))
        yield _deviation(asked, recording, (30, 70), "20us beside 20ms kernels")
    least, where = min(lost)
    yield Finding(
        question="throughput",
        name="work done by contended shares together",
        without="100 %",
        seen=f"{' '.join(f'{each:.1f}' for each, _ in lost)} %",
        reached=least,
        unit="%",
        target=97.0,
        at_least=True,
        samples=len(lost),
        method="kernels finished in all shares, by their durations, against the same programs "
        f"under plain time slicing, in each of the scenes above; the worst is {where}",
    )


def _name(split: Sequence[int]) -> str:
    return f"{split[0]}x{len(split)}" if len(set(split)) == 1 else "/".join(map(str, split))


def _play(ground: Ground, asked: Asked, split: Sequence[int], kernels: Sequence[str]) -> Recording:
    seconds = _SETTLING_SECONDS + asked.split_seconds
    parts = []
    for gpu, is_shared in ((0, True), (1, False)):
        parts += [
            Part(
                command=ground.program("load", *kernel_words(each), "--seconds", seconds),
                gpu=gpu,
                terms=Terms(compute=f"{guarantee}:100") if is_shared else None,
                name=f"{'share' if is_shared else 'bare'}-{position}",
            )
            for position, (guarantee, each) in enumerate(zip(split, kernels, strict=True))
        ]
    recording = play(ground, parts)
    tell(ground, recording, *_span(asked, recording))
    return recording


def _span(asked: Asked, recording: Recording) -> tuple[int, int]:
    first = recording.begun_ns + int(_SETTLING_SECONDS * SECOND)
    return first, first + int(asked.split_seconds * SECOND)


def _percents(asked: Asked, recording: Recording, parts: range) -> list[float]:
    first, last = _span(asked, recording)
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


def _deviation(asked: Asked, recording: Recording, split: Sequence[int], kernels: str) -> Finding:
    bare = _percents(asked, recording, range(len(split), 2 * len(split)))
    seen = _percents(asked, recording, range(len(split)))
    return Finding(
        question="splits",
        name=f"contended {_name(split)}: {kernels}",
        without=f"{' '.join(f'{each:.1f}' for each in bare)} %",
        seen=f"{' '.join(f'{each:.1f}' for each in seen)} %",
        reached=max(abs(had - due) for had, due in zip(seen, _fair(split), strict=True)),
        unit="points",
        target=2.0,
        samples=len(split),
        method="shares that always want more, each a guarantee with a ceiling of 100, on one GPU; "
        "the same programs outside of any share on another at the same time; percent of the GPU's "
        f"time over {number(asked.split_seconds)} s after the first second",
    )


def _fairness(asked: Asked, recording: Recording, split: Sequence[int], kernels: str) -> Finding:
    seen = _percents(asked, recording, range(len(split)))
    bare = _percents(asked, recording, range(len(split), 2 * len(split)))
    return Finding(
        question="fairness",
        name=f"Jain index of {_name(split)}: {kernels}",
        without=f"{_jain(bare):.4f}",
        seen=f"{_jain(seen):.4f}",
        reached=_jain(seen),
        unit="",
        target=0.995,
        at_least=True,
        samples=len(split),
        method="(sum of parts)² / (n x sum of their squares), of the equal splits",
    )


def _jain(parts: Sequence[float]) -> float:
    squares = sum(each * each for each in parts)
    return sum(parts) ** 2 / (len(parts) * squares) if squares else 0.0

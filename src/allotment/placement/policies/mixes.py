# SPDX-License-Identifier: Apache-2.0
"""The mix: kinds of pods and their frequencies, learnt from arrivals or given.

Older arrivals can decay, by half after a number of arrivals. Kinds are unlimited, because each
amount of CPU makes another one; only the most frequent are kept.
"""

from collections.abc import Mapping
from functools import lru_cache
from math import inf, log2

from allotment.model.compute import WHOLE
from allotment.model.structs import replace
from allotment.placement.cluster.arrays import PodShape

_MOST_KINDS = 8192
_LARGEST_STEP = 1e12
"""Counts are rescaled before their step grows beyond this."""
_GUARANTEE_STEP = WHOLE // 20
_MEMORY_STEPS = 4
"""Steps of device memory, in each doubling."""

ShapeKey = tuple[int, str, frozenset[str] | None, int, int, int, int]
"""Key of kinds that differ only slightly in amounts."""


class Mix:
    """How often each kind comes.

    A learnt mix changes with each arrival; `epoch` changes when it is worth a new look: after
    `growth` times as many pods, and at the latest after half a half-life.
    """

    def __init__(self, *, growth: float = 1.25, half_life: float = inf) -> None:
        self.epoch = 0
        self.step = 1.0
        """How much the last arrival counts."""
        self._growth, self._half_life = growth, half_life
        self._ratio = 1.0 if half_life == inf else 2.0 ** (1 / half_life)
        self._counts: dict[PodShape, float] = {}
        self._arrived = 0
        self._next = 1.0
        self._is_known = False

    @property
    def is_known(self) -> bool:
        """True if the mix was given; arrivals then change nothing."""
        return self._is_known

    def arrived(self, kind: PodShape) -> None:
        if self._is_known:
            return
        self.step *= self._ratio
        self._counts[kind] = self._counts.get(kind, 0.0) + self.step
        self._arrived += 1
        if self._arrived >= self._next or self.step > _LARGEST_STEP:
            grown = self._arrived * self._growth
            self._next = min(grown, self._arrived + self._half_life / 2)
            self._tidy()
            self.epoch += 1

    def expect(self, mix: Mapping[PodShape, float]) -> None:
        self._counts = {kind: count for kind, count in mix.items() if count > 0}
        self._is_known = True
        self.epoch += 1

    def typical(self, part: float) -> list[tuple[PodShape, float]]:
        """The most frequent kinds that make up this part of all pods, with frequencies.

        Kinds that differ only in memory are merged. Frequencies sum to 1. Ties: the largest first.
        """
        counts: dict[PodShape, float] = {}
        for kind, count in self._counts.items():
            bare = replace(kind, memory_bytes=0, device_memory_bytes=0, device_memory_part=None)
            counts[bare] = counts.get(bare, 0.0) + count
        total = sum(counts.values())
        chosen: list[tuple[PodShape, float]] = []
        reached = 0.0
        for kind, count in sorted(counts.items(), key=_frequency, reverse=True):
            if reached >= part * total:
                break
            chosen.append((kind, count))
            reached += count
        return [(kind, count / reached) for kind, count in chosen]

    def shapes(self, most: int) -> list[tuple[PodShape, float]]:
        """The most frequent shapes with devices: the most frequent kind of each, and its count.

        Counts are in units of `step`.
        """
        counts: dict[ShapeKey, float] = {}
        kinds: dict[ShapeKey, PodShape] = {}
        for kind, count in sorted(self._counts.items(), key=_order):
            if kind.count:
                shape = shape_of(kind)
                counts[shape] = counts.get(shape, 0.0) + count
                kinds.setdefault(shape, kind)
        # The sort is stable: ties keep the order of their first kinds.
        shapes = sorted(counts, key=lambda shape: -counts[shape])[:most]
        return [(kinds[shape], counts[shape]) for shape in shapes]

    def _tidy(self) -> None:
        if self.step > _LARGEST_STEP:
            self._counts = {kind: count / self.step for kind, count in self._counts.items()}
            self.step = 1.0
        if len(self._counts) > _MOST_KINDS:
            kept = sorted(self._counts.items(), key=_order)[: _MOST_KINDS // 2]
            self._counts = dict(kept)


@lru_cache(maxsize=_MOST_KINDS)
def shape_of(kind: PodShape) -> ShapeKey:
    """The kind's shape: steps of 5 % of a device's time, doublings of CPU and memory."""
    part = kind.device_memory_part
    if part is not None:
        memory = -1 - int(part * 20)
    else:
        memory = int(_MEMORY_STEPS * log2(1 + kind.device_memory_bytes))
    return (
        kind.count,
        kind.mode,
        kind.models,
        kind.guarantee // _GUARANTEE_STEP,
        memory,
        int(log2(1 + kind.cpu_milli)),
        int(log2(1 + kind.memory_bytes)),
    )


def _frequency(each: tuple[PodShape, float]) -> tuple[float, int, int, int, str, str]:
    kind, count = each
    models = "|".join(sorted(kind.models or ()))
    return count, kind.cpu_milli, kind.guarantee, kind.count, models, kind.mode


def _order(each: tuple[PodShape, float]) -> tuple[float, list[str], str]:
    """Sort key of kinds. A set's own text differs between processes."""
    kind, count = each
    return -count, sorted(kind.models or ()), repr(replace(kind, models=None))

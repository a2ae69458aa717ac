# SPDX-License-Identifier: Apache-2.0
"""The mix: which kinds of pods come, and how often; learnt from those that came, or known.

What came long ago counts less, if that is wanted: by half after so many arrivals. There may be any
number of kinds, since every amount of CPU makes another one; only the most frequent are remembered.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import inf, log2

from allotment.model.compute import WHOLE
from allotment.placement.arrays import Kind

__all__ = ["Mix", "Shape", "shape_of"]

_MOST_KINDS = 8192
_LARGEST_STEP = 1e12
"""Counts are made smaller, all alike, before the step by which they grow is more than this."""
_GUARANTEE_STEP = WHOLE // 20
_MEMORY_STEPS = 4
"""Of device memory, in each doubling."""

Shape = tuple[int, str, frozenset[str] | None, int, int, int, int]
"""What is alike of kinds that differ in amounts only, and in these by little."""


class Mix:
    """How often each kind comes.

    A learnt mix changes with each arrival; `epoch` says when it is worth to look at it again: when
    `growth` times as many pods have come, and at the latest after half a half-life.
    """

    def __init__(self, *, growth: float = 1.25, half_life: float = inf) -> None:
        self.epoch = 0
        self.step = 1.0
        """How much the last arrival counts."""
        self._growth, self._half_life = growth, half_life
        self._ratio = 1.0 if half_life == inf else 2.0 ** (1 / half_life)
        self._counts: dict[Kind, float] = {}
        self._arrived = 0
        self._next = 1.0
        self._is_known = False

    @property
    def is_known(self) -> bool:
        """Did somebody say what it is? Then arrivals change nothing."""
        return self._is_known

    def arrived(self, kind: Kind) -> None:
        """Count one more pod of this kind, unless the mix is known."""
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

    def expect(self, mix: Mapping[Kind, float]) -> None:
        """Take the mix from somebody who knows it: counts or frequencies, of any scale."""
        self._counts = {kind: count for kind, count in mix.items() if count > 0}
        self._is_known = True
        self.epoch += 1

    def typical(self, part: float) -> list[tuple[Kind, float]]:
        """Return the most frequent kinds that make up this part of all pods, with frequencies.

        Kinds that differ in memory alone are one, without memory. Frequencies are of those that are
        returned, and so sum to 1. Among equally frequent ones the largest come first.
        """
        counts: dict[Kind, float] = {}
        for kind, count in self._counts.items():
            bare = replace(kind, memory_bytes=0, device_memory_bytes=0, device_memory_part=None)
            counts[bare] = counts.get(bare, 0.0) + count
        total = sum(counts.values())
        chosen: list[tuple[Kind, float]] = []
        reached = 0.0
        for kind, count in sorted(counts.items(), key=_frequency, reverse=True):
            if reached >= part * total:
                break
            chosen.append((kind, count))
            reached += count
        return [(kind, count / reached) for kind, count in chosen]

    def shapes(self, most: int) -> list[tuple[Kind, float]]:
        """Return the most frequent shapes that ask for devices: a kind for each, and its count.

        The kind is the shape's most frequent one. Counts are in units of `step`.
        """
        counts: dict[Shape, float] = {}
        kinds: dict[Shape, Kind] = {}
        for kind, count in sorted(self._counts.items(), key=_order):
            if kind.count:
                shape = shape_of(kind)
                counts[shape] = counts.get(shape, 0.0) + count
                kinds.setdefault(shape, kind)
        # Sorting keeps equals in their order, which is the one of their first kinds.
        shapes = sorted(counts, key=lambda shape: -counts[shape])[:most]
        return [(kinds[shape], counts[shape]) for shape in shapes]

    def _tidy(self) -> None:
        if self.step > _LARGEST_STEP:
            self._counts = {kind: count / self.step for kind, count in self._counts.items()}
            self.step = 1.0
        if len(self._counts) > _MOST_KINDS:
            kept = sorted(self._counts.items(), key=_order)[: _MOST_KINDS // 2]
            self._counts = dict(kept)


def shape_of(kind: Kind) -> Shape:
    """Return the kind's shape: steps of 5 % of a device's time, doublings of CPU and memory."""
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


def _frequency(each: tuple[Kind, float]) -> tuple[float, int, int, int, str, str]:
    kind, count = each
    models = "|".join(sorted(kind.models or ()))
    return count, kind.cpu_milli, kind.guarantee, kind.count, models, kind.mode


def _order(each: tuple[Kind, float]) -> tuple[float, list[str], str]:
    """Return what sorts kinds. A set's own text is in another order in each process."""
    kind, count = each
    return -count, sorted(kind.models or ()), repr(replace(kind, models=None))

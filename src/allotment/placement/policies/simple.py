# SPDX-License-Identifier: Apache-2.0
"""Policies that use only what is left on each node.

`binpack` is the literature's best fit. `first-fit` and `random` are for comparison.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from itertools import combinations
from math import comb
from random import Random

import numpy as np

from allotment.model.compute import WHOLE
from allotment.placement.cluster.arrays import Arrays, FloatArray, IntArray, PodShape

_CPU_SCALE = 128_000
"""Thousandths of a core with the weight of eight devices, as in the literature's best fit."""
_GPU_SCALE = 8 * WHOLE


class _StaticPolicy:
    """Base of policies that ignore arrivals."""

    def arrived(self, kind: PodShape) -> None: ...

    def expect(self, mix: Mapping[PodShape, float]) -> None: ...


class Binpack(_StaticPolicy):
    """Best fit: the node and devices with the least left."""

    name = "binpack"
    _sign = 1
    """-1: the devices with the most room first."""

    def costs(self, arrays: Arrays, kind: PodShape, rows: IntArray | None = None) -> FloatArray:
        """What would be left on each row, in units of about a node.

        Half of it is CPU, half devices: the lesser of guarantee and memory.
        """
        where = slice(None) if rows is None else rows
        free, memory = arrays.free[where], arrays.memory[where]
        with np.errstate(divide="ignore", invalid="ignore"):
            part = np.where(memory > 0, arrays.free_memory[where] / memory, 1.0)
        devices = np.minimum(free, part * WHOLE).sum(axis=1) - kind.size
        cpu = arrays.cpu_free[where] - kind.cpu_milli
        rest = 0.5 * devices / _GPU_SCALE + 0.5 * cpu / _CPU_SCALE
        return np.where(arrays.fitting(kind, where), rest, np.inf)

    def device_order(self, arrays: Arrays, kind: PodShape, row: int) -> list[int]:
        columns = arrays.serving_columns(kind, row)
        if len(columns) < 2:  # noqa: PLR2004 - nothing to sort
            return columns
        amounts = (arrays.free[row], arrays.free_memory[row], arrays.memory[row])
        rooms = [
            self._sign * (free / WHOLE + free_memory / max(memory, 1))
            for free, free_memory, memory in zip(*(each.tolist() for each in amounts), strict=True)
        ]
        return sorted(columns, key=rooms.__getitem__)


class Spread(Binpack):
    """The node and devices with the most left."""

    name = "spread"
    _sign = -1

    def costs(self, arrays: Arrays, kind: PodShape, rows: IntArray | None = None) -> FloatArray:
        rest = super().costs(arrays, kind, rows)
        return np.where(np.isinf(rest), np.inf, -rest)


class FirstFit(_StaticPolicy):
    """The first node by name where it fits, and the first devices there."""

    name = "first-fit"

    def costs(self, arrays: Arrays, kind: PodShape, rows: IntArray | None = None) -> FloatArray:
        where = slice(None) if rows is None else rows
        return np.where(arrays.fitting(kind, where), 0.0, np.inf)

    def device_order(self, arrays: Arrays, kind: PodShape, row: int) -> list[int]:
        return arrays.serving_columns(kind, row)


class RandomChoice(_StaticPolicy):
    """Any fitting node and devices; the same for the same seed and calls."""

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)  # noqa: S311 - no secret, only repeatable
        self._generator = np.random.default_rng(seed)

    def costs(self, arrays: Arrays, kind: PodShape, rows: IntArray | None = None) -> FloatArray:
        where = slice(None) if rows is None else rows
        fits = arrays.fitting(kind, where)
        return np.where(fits, self._generator.random(len(fits)), np.inf)

    def device_order(self, arrays: Arrays, kind: PodShape, row: int) -> list[int]:
        columns = arrays.serving_columns(kind, row)
        self._random.shuffle(columns)
        return columns


_MOST_SETS = 2_000
"""Most sets of devices compared on a node; beyond that, a greedy choice."""


class _Near(Binpack, ABC):
    """The node with the nearest fitting devices; ties go to the fullest node."""

    def costs(self, arrays: Arrays, kind: PodShape, rows: IntArray | None = None) -> FloatArray:
        rest = super().costs(arrays, kind, rows)
        numbers = np.arange(len(arrays)) if rows is None else rows
        costs = rest.copy()
        for place in np.isfinite(rest).nonzero()[0]:
            row = int(numbers[place])
            chosen = self.device_order(arrays, kind, row)[: kind.count]
            # What is left is below 2 on any real machine: it only breaks ties.
            costs[place] += 16 * self.distance(arrays, row, chosen)
        return costs

    def device_order(self, arrays: Arrays, kind: PodShape, row: int) -> list[int]:
        columns = super().device_order(arrays, kind, row)
        chosen = _nearest(
            columns,
            kind.count,
            lambda some: self.distance(arrays, row, some),
            lambda some: self.cut(arrays, row, some),
        )
        return [*chosen, *(column for column in columns if column not in chosen)]

    @abstractmethod
    def distance(self, arrays: Arrays, row: int, columns: Iterable[int]) -> float:
        """Distance among these devices of the row, lower is nearer."""

    def cut(self, arrays: Arrays, row: int, columns: Iterable[int]) -> float:
        """What other idle devices of the row lose, for sets at an equal distance."""
        del arrays, row, columns
        return 0.0


class Numa(_Near):
    """Devices on the fewest NUMA nodes."""

    name = "numa"

    def distance(self, arrays: Arrays, row: int, columns: Iterable[int]) -> float:
        """Number of their NUMA nodes; unknown ones count as one each."""
        nodes = [int(arrays.numa[row, column]) for column in columns]
        unknown = nodes.count(-1)
        return len(set(nodes) - {-1}) + unknown


class Topology(_Near):
    """Devices with the best links between each two of them.

    A pod with one device gets the one with the worst links to idle ones, which stay together.
    """

    name = "topology"

    def distance(self, arrays: Arrays, row: int, columns: Iterable[int]) -> float:
        """The negative mean score of their links; 0 if unknown."""
        links = arrays.links(row)
        chosen = sorted(columns)
        if links is None or not chosen:
            return 0.0
        if len(chosen) == 1:
            return self.cut(arrays, row, chosen) / max(1, len(links) - 1)
        pairs = [float(links[one, other]) for one, other in combinations(chosen, 2)]
        return -sum(pairs) / len(pairs)

    def cut(self, arrays: Arrays, row: int, columns: Iterable[int]) -> float:
        """The scores of their links to other idle devices."""
        links = arrays.links(row)
        if links is None:
            return 0.0
        chosen = list(columns)
        idle = arrays.idle[row, : len(links)] & arrays.usable[row, : len(links)]
        idle[chosen] = False
        return float(links[chosen][:, idle].sum())


_Measure = Callable[[Iterable[int]], float]


def _nearest(columns: list[int], count: int, distance: _Measure, cut: _Measure) -> tuple[int, ...]:
    """The `count` columns nearest to each other; ties go to the least cut, then the first ones."""
    if count >= len(columns) or not count:
        return tuple(columns[:count])
    if comb(len(columns), count) <= _MOST_SETS:
        sets = list(combinations(columns, count))
    else:
        sets = [tuple(_grown([start], columns, count, distance)) for start in columns]
    distances = [distance(some) for some in sets]
    least = min(distances)
    return min((some for some, each in zip(sets, distances, strict=True) if each == least), key=cut)


def _grown(chosen: list[int], columns: list[int], count: int, distance: _Measure) -> list[int]:
    """Add one column at a time, each time the nearest one."""
    while len(chosen) < count:
        others = [column for column in columns if column not in chosen]
        chosen.append(min(others, key=lambda column: distance([*chosen, column])))
    return chosen

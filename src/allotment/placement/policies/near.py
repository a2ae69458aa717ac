# SPDX-License-Identifier: Apache-2.0
"""Policies for pods with several devices: near to each other by link, or on one NUMA node."""

from collections.abc import Callable, Iterable
from itertools import combinations
from math import comb

import numpy as np

from allotment.placement.arrays import Arrays, FloatArray, IntArray, Kind
from allotment.placement.policies.simple import Binpack, by_room, left

__all__ = ["Numa", "Topology"]

_MOST_SETS = 2_000
"""Sets of devices that are compared one by one on a node; beyond that, a greedy choice."""


class _Near(Binpack):
    """The node with the nearest devices that fit; among equals, the one that it leaves least of."""

    def costs(self, arrays: Arrays, kind: Kind, rows: IntArray | None = None) -> FloatArray:
        """Return how far the nearest devices are from each other, then what would be left."""
        rest = left(arrays, kind, rows)
        numbers = np.arange(len(arrays)) if rows is None else rows
        costs = rest.copy()
        for place in np.isfinite(rest).nonzero()[0]:
            row = int(numbers[place])
            chosen = self.device_order(arrays, kind, row)[: kind.count]
            # What is left is below 2 on any machine that there is: it decides among equals only.
            costs[place] += 16 * self.distance(arrays, row, chosen)
        return costs

    def device_order(self, arrays: Arrays, kind: Kind, row: int) -> list[int]:
        """Return the nearest devices first, then the others."""
        columns = by_room(arrays, kind, row, sign=1)
        chosen = _nearest(columns, kind.count, lambda some: self.distance(arrays, row, some))
        return [*chosen, *(column for column in columns if column not in chosen)]

    def distance(self, arrays: Arrays, row: int, columns: Iterable[int]) -> float:
        """Return how far these devices of the row are from each other, lower is nearer."""
        raise NotImplementedError


class Numa(_Near):
    """Devices on as few NUMA nodes as can be."""

    name = "numa"

    def distance(self, arrays: Arrays, row: int, columns: Iterable[int]) -> float:
        """Return on how many NUMA nodes they are; those that are not known count as one each."""
        nodes = [int(arrays.numa[row, column]) for column in columns]
        unknown = nodes.count(-1)
        return len(set(nodes) - {-1}) + unknown


class Topology(_Near):
    """Devices with the best links between each two of them.

    A pod with one device takes the one with the worst links, so that the others stay together.
    """

    name = "topology"

    def distance(self, arrays: Arrays, row: int, columns: Iterable[int]) -> float:
        """Return the negative of the mean score of their links; 0 where links are not known."""
        links = arrays.links(row)
        chosen = sorted(columns)
        if links is None or not chosen:
            return 0.0
        if len(chosen) == 1:
            return float(links[chosen[0]].sum()) / max(1, len(links) - 1)
        pairs = [float(links[one, other]) for one, other in combinations(chosen, 2)]
        return -sum(pairs) / len(pairs)


def _nearest(
    columns: list[int], count: int, distance: Callable[[Iterable[int]], float]
) -> tuple[int, ...]:
    """Return the `count` columns that are nearest to each other; among equals, the first ones."""
    if count >= len(columns) or not count:
        return tuple(columns[:count])
    if comb(len(columns), count) <= _MOST_SETS:
        return min(combinations(columns, count), key=distance)
    starts = [_grown([start], columns, count, distance) for start in columns]
    return tuple(min(starts, key=distance))


def _grown(
    chosen: list[int], columns: list[int], count: int, distance: Callable[[Iterable[int]], float]
) -> list[int]:
    """Add one column at a time, each time the one that keeps them nearest."""
    while len(chosen) < count:
        others = [column for column in columns if column not in chosen]
        chosen.append(min(others, key=lambda column: distance([*chosen, column])))
    return chosen

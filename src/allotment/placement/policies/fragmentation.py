# SPDX-License-Identifier: Apache-2.0
"""`fragmentation`: a place costs what it takes from the pods that may still come.

For each typical kind of pod there are *slots*: how many such pods the cluster could still take
(`slots.py`). A slot's *price* is how often the kind comes, divided by how many slots there are, and
by the cube root of the kind's size. A pod goes where the slots that it takes from all kinds are
worth least together. That is the greedy step of making Σ frequency x log(slots) as large as can be:
the scarcer a kind's room, the dearer, without a parameter for any cluster or mix of pods.

The mix is learnt from the pods that come, and what came long ago counts less; pods that leave give
their room back, and prices fall.
"""

from collections import OrderedDict
from collections.abc import Mapping

import numpy as np

from allotment.model.compute import WHOLE
from allotment.model.requests import EXCLUSIVE, SOFT
from allotment.placement.arrays import Arrays, FloatArray, IntArray, Kind
from allotment.placement.policies.losses import Ledger, Losses
from allotment.placement.policies.mixes import Mix, Shape, shape_of
from allotment.placement.policies.simple import by_room, left
from allotment.placement.policies.slots import Types

__all__ = ["Fragmentation"]

_MOST_SHAPES = 96
"""Kinds that have prices; those that come less often have none, unless alike to one of these."""
_SIZE_EXPONENT = 1 / 3
"""Anything up to 1/2 gives about the same; from 3/4 on, mixes of many large pods lose by points."""
_LEAST_SLOTS = 1.0
"""Prices rise no further when there are fewer."""
_HALF_LIFE = 5_000
"""Arrivals after which an earlier one counts half as much."""
_GROWTH = 2.0
_EXPECTED = 1.0
"""So many arrivals count each of those that may always come."""
_MOST_BYTES = 192 * 2**20
"""Of losses that are kept, by kind; the kind that was asked for least recently goes first."""


class Fragmentation:
    """What takes least from the pods that may still come; ties to the first node by name."""

    name = "fragmentation"

    def __init__(self) -> None:
        self._mix = Mix(growth=_GROWTH, half_life=_HALF_LIFE)
        self._kept: OrderedDict[Kind, Losses] = OrderedDict()
        self._ledger: Ledger | None = None
        self._epoch = -1
        self._kinds: list[Kind] = []
        self._counts = np.zeros(0)
        self._places: dict[Shape, int] = {}

    def arrived(self, kind: Kind) -> None:
        """Count the kind, unless the mix is known."""
        self._mix.arrived(kind)
        if not kind.count or self._mix.is_known or self._mix.epoch != self._epoch:
            return
        place = self._places.get(shape_of(kind))
        if place is not None:
            self._counts[place] += self._mix.step

    def expect(self, mix: Mapping[Kind, float]) -> None:
        """Take the mix as known."""
        self._mix.expect(mix)

    def costs(self, arrays: Arrays, kind: Kind, rows: IntArray | None = None) -> FloatArray:
        """Return the worth of the slots that the best choice takes."""
        losses = self._losses(arrays, kind)
        if losses is None:
            return left(arrays, kind, rows)
        costs = losses.costs(self._prices())
        return costs if rows is None else costs[rows]

    def device_order(self, arrays: Arrays, kind: Kind, row: int) -> list[int]:
        """Return the devices of the best choice, then of the next one; then the fullest first."""
        losses = self._losses(arrays, kind)
        in_order: dict[int, None] = {}
        if losses is not None:
            for choice in losses.choices(row, self._prices()):
                in_order.update(dict.fromkeys(choice))
        in_order.update(dict.fromkeys(by_room(arrays, kind, row, sign=1)))
        return list(in_order)

    def _prices(self) -> FloatArray:
        ledger = self._ledger
        assert ledger is not None  # noqa: S101 - for the type checker: losses have one
        scarcity = np.maximum(ledger.total, _LEAST_SLOTS)
        prices: FloatArray = self._counts / self._counts.sum() / scarcity
        return np.asarray(prices / ledger.types.size**_SIZE_EXPONENT, dtype=np.float64)

    def _losses(self, arrays: Arrays, kind: Kind) -> Losses | None:
        """Return what is kept of this kind, brought up to date; None where there is no device."""
        ledger = self._current(arrays)
        if not self._kinds:
            return None
        ledger.renew()
        losses = self._kept.get(kind)
        if losses is not None:
            losses.renew()
            self._kept.move_to_end(kind)
            return losses
        losses = self._kept[kind] = Losses(kind, ledger)
        losses.renew()
        size = sum(each.size for each in self._kept.values())
        while size > _MOST_BYTES and len(self._kept) > 1:
            size -= self._kept.popitem(last=False)[1].size
        return losses

    def _current(self, arrays: Arrays) -> Ledger:
        """Return the ledger of this cluster and of the typical kinds as they are."""
        ledger = self._ledger
        if ledger is not None and (ledger.arrays is not arrays or not ledger.is_current):
            ledger = None
        if ledger is None or self._epoch != self._mix.epoch:
            before = self._kinds
            self._learn(arrays)
            if ledger is None or before != self._kinds:
                ledger = self._ledger = Ledger(arrays, Types(self._kinds, arrays))
                self._kept.clear()
        return ledger

    def _learn(self, arrays: Arrays) -> None:
        """Take the typical kinds from the mix; those that were there before keep their places."""
        self._epoch = self._mix.epoch
        known = {shape_of(kind): (kind, count) for kind, count in self._mix.shapes(_MOST_SHAPES)}
        if not self._mix.is_known:
            for kind in _always_expected(arrays):
                shape = shape_of(kind)
                before, count = known.get(shape, (kind, 0.0))
                known[shape] = before, count + _EXPECTED * self._mix.step
        if known.keys() != self._places.keys():
            self._places = {shape: place for place, shape in enumerate(known)}
            self._kinds = [kind for kind, _ in known.values()]
        self._counts = np.array([known[shape][1] for shape in self._places], dtype=np.float64)


def _always_expected(arrays: Arrays) -> list[Kind]:
    """Return pods that may come though none has: with 1, 2, 4 and so on whole devices of a node."""
    largest = int(arrays.gpu_there.sum(axis=1).max(initial=0))
    counts = {2**power for power in range(largest.bit_length())} | ({largest} - {0})
    modes = [mode for mode in (SOFT, EXCLUSIVE) if mode in arrays.mode_names]
    return [
        Kind(count=count, guarantee=WHOLE, mode=mode) for mode in modes for count in sorted(counts)
    ]

# SPDX-License-Identifier: Apache-2.0
"""What a place takes from each typical kind: slots before less slots after, kept by kind and node.

Prices change with every pod, losses on a node only with the node. So losses are kept, and renewed
for the rows that were written since; a decision is then one product of them with the prices.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from allotment.placement.arrays import Arrays, BoolArray, FloatArray, IntArray, Kind
from allotment.placement.policies.slots import Room, SlotArray, Types

__all__ = ["Ledger", "Losses"]

_CHUNK = 256
"""Rows that are looked at in one go when all are: their figures fit the processor's cache."""
_MIXER = 6_364_136_223_846_793_005
"""Knuth's multiplier for linear congruences: odd, and of many bits. What overflows is let go."""


class Ledger:
    """The slots of each node as it is, by row and kind, and in all."""

    def __init__(self, arrays: Arrays, types: Types) -> None:
        self.arrays, self.types = arrays, types
        shape = (len(arrays), len(types.kinds))
        self.parts = np.zeros((shape[0], arrays.columns, shape[1]), dtype=np.float32)
        self.sums = np.zeros(shape, dtype=np.float64)
        self.slots = np.zeros(shape, dtype=np.float64)
        self.total = np.zeros(shape[1], dtype=np.float64)
        self._changes = 0

    @property
    def is_current(self) -> bool:
        """Do columns, models and modes have their places here? More rows are no matter."""
        return self.parts.shape[1] == self.arrays.columns and self.types.is_current

    def renew(self) -> None:
        """Look again at the rows that were written since."""
        arrays = self.arrays
        if self._changes == arrays.changes:
            return
        self.parts = _with_rows(self.parts, len(arrays))
        self.sums = _with_rows(self.sums, len(arrays))
        self.slots = _with_rows(self.slots, len(arrays))
        stale = (arrays.version > self._changes).nonzero()[0]
        for start in range(0, len(stale), _CHUNK):
            self._renew(stale[start : start + _CHUNK])
        self._changes = arrays.changes
        if len(stale) > _CHUNK:
            # Sums that only ever have differences added drift.
            self.total = self.slots.sum(axis=0)

    def _renew(self, rows: IntArray) -> None:
        arrays = self.arrays
        room = Room.of(arrays, rows[:, None], np.arange(arrays.columns))
        parts = self.types.parts(room).astype(np.float32)
        self.parts[rows] = parts
        self.sums[rows] = parts.sum(axis=1, dtype=np.float64)
        slots = self._slots(self.sums[rows], rows, None)
        self.total += (slots - self.slots[rows]).sum(axis=0)
        self.slots[rows] = slots

    def losses(self, kind: Kind, rows: IntArray, columns: IntArray) -> FloatArray:
        """Return what each kind loses when one pod of `kind` takes these columns of these rows.

        `columns` has one line for each row, of `kind.count` columns.
        """
        total = self.sums[rows]
        if kind.count:
            before = self.parts[rows[:, None], columns]
            room = Room.of(self.arrays, rows[:, None], columns).less(kind, self.arrays)
            after = self.types.parts(room).astype(np.float32)
            total += after.sum(axis=1, dtype=np.float64) - before.sum(axis=1, dtype=np.float64)
        return self.slots[rows] - self._slots(total, rows, kind)

    def _slots(self, parts: FloatArray, rows: IntArray, kind: Kind | None) -> FloatArray:
        cpu, memory = self.arrays.cpu_free[rows], self.arrays.memory_free[rows]
        if kind is not None:
            cpu, memory = cpu - kind.cpu_milli, memory - kind.memory_bytes
        return self.types.slots(parts, np.maximum(cpu, 0), np.maximum(memory, 0))


@dataclass(slots=True)
class _More:
    """Further choices on rows that have several, one a line; row -1: not so any more."""

    row: IntArray
    columns: IntArray
    loss: SlotArray


class Losses:
    """All choices that a pod of one kind has, and what each of them costs each typical kind."""

    def __init__(self, kind: Kind, ledger: Ledger) -> None:
        rows, types = ledger.slots.shape
        self.kind, self._ledger = kind, ledger
        self.fits = np.zeros(rows, dtype=np.bool_)
        self._columns = np.zeros((rows, kind.count), dtype=np.int64)
        self._loss = np.zeros((rows, types), dtype=np.float32)
        self._more = self._none()
        self._changes = 0

    @property
    def size(self) -> int:
        """Return about how many bytes this takes."""
        lines = len(self._loss) + len(self._more.row)
        return lines * (self._loss.shape[1] * 4 + 8 * (self.kind.count + 1))

    def renew(self) -> None:
        """Look again at the rows that were written since."""
        arrays = self._ledger.arrays
        if self._changes == arrays.changes:
            return
        self.fits = _with_rows(self.fits, len(arrays))
        self._columns = _with_rows(self._columns, len(arrays))
        self._loss = _with_rows(self._loss, len(arrays))
        stale = arrays.version > self._changes
        rows = stale.nonzero()[0]
        self._changes = arrays.changes
        if len(self._more.row):
            stays = ~stale[self._more.row]
            if not stays.all():
                more = self._more
                self._more = _More(more.row[stays], more.columns[stays], more.loss[stays])
        for start in range(0, len(rows), _CHUNK):
            self._renew(rows[start : start + _CHUNK])

    def costs(self, prices: FloatArray) -> FloatArray:
        """Return the cost of the cheapest choice by row, `inf` where none fits."""
        weights = prices.astype(np.float32)
        # Not `@`: its last bits depend on where in the array a row is, and ties would with them.
        costs: FloatArray = np.einsum("rt,t->r", self._loss, weights).astype(np.float64)
        costs[~self.fits] = np.inf
        if len(self._more.row):
            more = np.einsum("rt,t->r", self._more.loss, weights)
            np.minimum.at(costs, self._more.row, more)
        return costs

    def choices(self, row: int, prices: FloatArray) -> list[tuple[int, ...]]:
        """Return the row's choices of columns, the cheapest first; ties by index."""
        if not self.fits[row]:
            return []
        lines = (self._more.row == row).nonzero()[0]
        columns = [self._columns[row], *self._more.columns[lines]]
        loss = np.concatenate([self._loss[row][None, :], self._more.loss[lines]])
        costs = np.einsum("rt,t->r", loss, prices.astype(np.float32)).tolist()
        pairs = zip(costs, [tuple(each.tolist()) for each in columns], strict=True)
        return [choice for _, choice in sorted(pairs)]

    def _renew(self, rows: IntArray) -> None:
        kind, arrays = self.kind, self._ledger.arrays
        fits = arrays.fitting(kind, rows)
        self.fits[rows] = fits
        self._loss[rows] = 0
        rows = rows[fits]
        if not len(rows):
            return
        lines, columns, is_first = self._enumerate(rows)
        loss = self._ledger.losses(kind, rows[lines], columns).astype(np.float32)
        first = rows[lines[is_first]]
        self._columns[first] = columns[is_first]
        self._loss[first] = loss[is_first]
        if not is_first.all():
            more, others = self._more, ~is_first
            self._more = _More(
                np.concatenate([more.row, rows[lines[others]]]),
                np.concatenate([more.columns, columns[others]]),
                np.concatenate([more.loss, loss[others]]),
            )

    def _enumerate(self, rows: IntArray) -> tuple[IntArray, IntArray, BoolArray]:
        """Return all choices on these rows: which row, which columns, whether the row's first.

        One device: each that is not like one before it. Several: the ones with least room, since
        whatever they are taken from stays the more whole.
        """
        kind, arrays = self.kind, self._ledger.arrays
        if not kind.count:
            lines = np.arange(len(rows))
            return lines, np.zeros((len(rows), 0), dtype=np.int64), np.ones(len(rows), np.bool_)
        serving = arrays.serving(kind, rows)
        if kind.count > 1:
            room = np.where(serving, arrays.free[rows], np.inf)
            memory = arrays.free_memory[rows]
            # Sorted twice, the second time without disturbing equals: by room, memory, index.
            by_memory = np.argsort(memory, axis=1, kind="stable")
            by_room = np.argsort(np.take_along_axis(room, by_memory, 1), axis=1, kind="stable")
            columns = np.take_along_axis(by_memory, by_room, 1)[:, : kind.count]
            return np.arange(len(rows)), np.sort(columns, axis=1), np.ones(len(rows), np.bool_)
        distinct = serving & ~_repeats(arrays, rows, serving)
        lines, chosen = distinct.nonzero()
        is_first = np.ones(len(lines), dtype=np.bool_)
        is_first[1:] = lines[1:] != lines[:-1]
        return lines, chosen[:, None], is_first

    def _none(self) -> _More:
        return _More(
            np.zeros(0, dtype=np.int64),
            np.zeros((0, self.kind.count), dtype=np.int64),
            np.zeros((0, self._loss.shape[1]), dtype=np.float32),
        )


_Any = TypeVar("_Any", bound=np.generic)


def _with_rows(array: NDArray[_Any], rows: int) -> NDArray[_Any]:
    """Return the array with so many rows, what is new being 0; itself where it has them."""
    missing = rows - len(array)
    if not missing:
        return array
    return np.concatenate([array, np.zeros((missing, *array.shape[1:]), dtype=array.dtype)])


def _repeats(arrays: Arrays, rows: IntArray, serving: BoolArray) -> BoolArray:
    """Say which devices have just what a serving one before them on their node has.

    All that matters of a device goes into one number. Two that share theirs by chance (one in
    2^64) cost a choice, and nothing else.
    """
    number = arrays.free[rows].astype(np.int64)
    for array in (arrays.free_memory, arrays.memory, arrays.model, arrays.modes):
        number = number * _MIXER + array[rows].astype(np.int64)
    alike = (number[:, :, None] == number[:, None, :]) & serving[:, None, :]
    columns = np.arange(serving.shape[1])
    alike &= columns[:, None] > columns
    same: BoolArray = alike.any(axis=2)
    return same

# SPDX-License-Identifier: Apache-2.0
"""`fragmentation`: the cost of a place is what it takes from pods that may still come.

A typical kind's *slots* are the pods of it that still fit (`slots.py`). A slot's *price* is the
kind's frequency, divided by its slots and the cube root of its size. A pod goes where the lost
slots are cheapest. docs/concepts has the reasons.
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple, TypeVar
from weakref import WeakValueDictionary

import msgspec
import numpy as np
from numpy.typing import NDArray

from allotment.model.compute import WHOLE
from allotment.model.modes import MODES, traits_of
from allotment.model.structs import replace
from allotment.placement.cluster.arrays import Arrays, BoolArray, FloatArray, IntArray, PodShape
from allotment.placement.policies.mixes import Mix, ShapeKey, shape_of
from allotment.placement.policies.simple import Binpack
from allotment.placement.policies.slots import Room, SlotArray, Types

_CHUNK = 256
"""Rows processed at once in a full pass: their data fits the processor's cache."""


class SlotCounts:
    """Current slots of each node, by kind, and in total."""

    def __init__(self, arrays: Arrays, types: Types) -> None:
        self.arrays, self.types = arrays, types
        self.weights = types.size**_SIZE_EXPONENT
        """By kind: what its size makes of its price."""
        number = len(types.kinds)
        self.parts = np.zeros((0, number), dtype=np.float32)
        """By room."""
        self.sums = np.zeros((0, number), dtype=np.float64)
        """By group, as the following two."""
        self.by_group = np.zeros((0, number), dtype=np.float64)
        self.is_first = np.zeros((0, arrays.columns), dtype=np.bool_)
        """By group and column: no earlier device of the node has the same room."""
        self.slots = np.zeros((0, number), dtype=np.float64)
        """By row."""
        self.total = np.zeros(number, dtype=np.float64)
        self._seen_rooms = self._seen_groups = self._changes = 0
        self.rests: WeakValueDictionary[PodShape, Rest] = WeakValueDictionary()
        """By what is asked of a device."""

    def rest(self, kind: PodShape) -> "Rest":
        """What one pod of this kind leaves of each room; kept as long as it is in use."""
        asked = replace(kind, cpu_milli=0, memory_bytes=0, count=1)
        rest = self.rests.get(asked)
        if rest is None:
            rest = self.rests[asked] = Rest(asked, self.arrays, self.types)
        return rest

    @property
    def is_current(self) -> bool:
        """False if columns, models or modes moved. Additional rows do not matter."""
        return self.is_first.shape[1] == self.arrays.columns and self.types.is_current

    def renew(self) -> bool:
        """Return whether anything changed."""
        arrays = self.arrays
        if self._changes == arrays.changes:
            return False
        self._renew_rooms()
        self._renew_groups()
        self.slots = _with_rows(self.slots, len(arrays.version))
        stale = (arrays.version > self._changes).nonzero()[0]
        for start in range(0, len(stale), _CHUNK):
            rows = stale[start : start + _CHUNK]
            slots = self.by_group.take(arrays.group[rows], axis=0)
            self.total += (slots - self.slots.take(rows, axis=0)).sum(axis=0)
            self.slots[rows] = slots
        self._changes = arrays.changes
        if len(stale) > _CHUNK:
            # Sums built only from differences drift.
            self.total = self.slots.sum(axis=0)
        return True

    def _renew_rooms(self) -> None:
        rooms = self.arrays.rooms
        if self._seen_rooms == rooms.changes:
            return
        fresh = rooms.since(self._seen_rooms)
        self._seen_rooms = rooms.changes
        self.parts = _with_rows(self.parts, rooms.capacity)
        self.parts[fresh] = self.types.parts(Room.of(rooms, fresh))

    def _renew_groups(self) -> None:
        arrays = self.arrays
        fresh = arrays.groups.since(self._seen_groups)
        self._seen_groups = arrays.groups.changes
        if len(self.sums) < arrays.groups.capacity:
            self.sums = _with_rows(self.sums, arrays.groups.capacity)
            self.by_group = _with_rows(self.by_group, arrays.groups.capacity)
            self.is_first = _with_rows(self.is_first, arrays.groups.capacity)
        rows = arrays.members[fresh]
        fresh, rows = fresh[rows >= 0], rows[rows >= 0]
        rooms = arrays.room[rows]
        self.sums[fresh] = sums = self.parts.take(rooms, axis=0).sum(axis=1, dtype=np.float64)
        # -1 where a node was removed.
        cpu, memory = np.maximum(arrays.cpu_free[rows], 0), np.maximum(arrays.memory_free[rows], 0)
        self.by_group[fresh] = self.types.slots(sums, cpu, memory)
        self.is_first[fresh] = _is_first(rooms)


class Rest:
    """The parts of each room after one pod took what its kind asks of a device.

    One for all kinds that ask the same of a device.
    """

    def __init__(self, kind: PodShape, arrays: Arrays, types: Types) -> None:
        self._kind, self._arrays, self._types = kind, arrays, types
        self.parts = np.zeros((0, len(types.kinds)), dtype=np.float32)
        self._changes = 0

    def renew(self) -> None:
        rooms = self._arrays.rooms
        if self._changes == rooms.changes:
            return
        fresh = rooms.since(self._changes)
        self._changes = rooms.changes
        self.parts = _with_rows(self.parts, rooms.capacity)
        for start in range(0, len(fresh), _CHUNK):
            numbers = fresh[start : start + _CHUNK]
            less = Room.of(rooms, numbers).less(self._kind, self._arrays)
            self.parts[numbers] = self._types.parts(less)


class _More(msgspec.Struct):
    """Further choices in groups with several, one a line."""

    group: IntArray
    columns: IntArray
    loss: SlotArray


class Losses:
    """All choices for one kind of pod, and the cost of each to each typical kind.

    By group of equal nodes, on which the choices are the same.
    """

    def __init__(self, kind: PodShape, ledger: SlotCounts) -> None:
        self.kind, self._ledger = kind, ledger
        self._fits = np.zeros(0, dtype=np.bool_)
        self._columns = np.zeros((0, kind.count), dtype=np.int64)
        self._loss = np.zeros((0, len(ledger.types.kinds)), dtype=np.float32)
        self._more = self._none()
        self._rest = ledger.rest(kind)
        self._changes = 0

    @property
    def size(self) -> int:
        lines = len(self._loss) + len(self._more.group)
        return lines * (self._loss.shape[1] * 4 + 8 * (self.kind.count + 1))

    def renew(self) -> None:
        arrays = self._ledger.arrays
        groups = arrays.groups
        if self._changes == groups.changes:
            return
        if len(self._more.group):
            more = self._more
            is_current = groups.version[more.group] <= self._changes
            if not is_current.all():
                self._more = _More(
                    more.group[is_current], more.columns[is_current], more.loss[is_current]
                )
        fresh = groups.since(self._changes)
        self._changes = groups.changes
        if len(self._fits) < groups.capacity:
            self._fits = _with_rows(self._fits, groups.capacity)
            self._columns = _with_rows(self._columns, groups.capacity)
            self._loss = _with_rows(self._loss, groups.capacity)
        fresh = fresh[arrays.members[fresh] >= 0]
        self._rest.renew()
        for start in range(0, len(fresh), _CHUNK):
            self._renew(fresh[start : start + _CHUNK])

    def lost(self, rows: IntArray, columns: IntArray) -> FloatArray:
        """Slots of each kind lost when one pod takes these columns of these rows.

        `columns` has one line for each row, of `kind.count` columns.
        """
        kind, ledger = self.kind, self._ledger
        arrays = ledger.arrays
        group = arrays.group[rows]
        parts = ledger.sums.take(group, axis=0)
        if kind.count:
            rooms = arrays.room[rows[:, None], columns]
            before, after = (each.take(rooms, axis=0) for each in (ledger.parts, self._rest.parts))
            parts += after.sum(axis=1, dtype=np.float64) - before.sum(axis=1, dtype=np.float64)
        cpu = arrays.cpu_free[rows] - kind.cpu_milli
        memory = arrays.memory_free[rows] - kind.memory_bytes
        return ledger.by_group.take(group, axis=0) - ledger.types.slots(parts, cpu, memory)

    def costs(self, prices: FloatArray) -> FloatArray:
        """Cost of the cheapest choice by row, `inf` if none fits."""
        arrays = self._ledger.arrays
        number = len(arrays.groups)
        fits = self._fits[:number]
        if not fits.any():
            return np.full(len(arrays), np.inf)
        weights = prices.astype(np.float32)
        # Not `@`: its last bits depend on a row's position in the array, which would break ties.
        first = np.einsum("rt,t->r", self._loss[:number], weights)
        costs: FloatArray = np.where(fits, first, np.float64(np.inf))
        if len(self._more.group):
            more = np.einsum("rt,t->r", self._more.loss, weights)
            np.minimum.at(costs, self._more.group, more)
        return costs[arrays.group]

    def choices(self, row: int, prices: FloatArray) -> list[tuple[int, ...]]:
        """The row's choices of columns, cheapest first; ties by index."""
        group = self._ledger.arrays.group[row]
        if not self._fits[group]:
            return []
        lines = (self._more.group == group).nonzero()[0]
        if not len(lines):
            return [tuple(self._columns[group].tolist())]
        columns = [self._columns[group], *self._more.columns[lines]]
        loss = np.concatenate([self._loss[group][None, :], self._more.loss[lines]])
        costs = np.einsum("rt,t->r", loss, prices.astype(np.float32)).tolist()
        pairs = zip(costs, [tuple(column.tolist()) for column in columns], strict=True)
        return [choice for _, choice in sorted(pairs)]

    def _renew(self, groups: IntArray) -> None:
        kind, arrays = self.kind, self._ledger.arrays
        rows = arrays.members[groups]
        serving = arrays.serving(kind, rows)
        fits = arrays.fitting(kind, rows, serving)
        self._fits[groups] = fits
        groups, rows = groups[fits], rows[fits]
        if not len(rows):
            return
        lines, columns, is_first = self._enumerate(rows, serving[fits])
        loss = self.lost(rows[lines], columns).astype(np.float32)
        if len(lines) > len(rows):
            more, others = self._more, ~is_first
            self._more = _More(
                np.concatenate([more.group, groups[lines[others]]]),
                np.concatenate([more.columns, columns[others]]),
                np.concatenate([more.loss, loss[others]]),
            )
            columns, loss = columns[is_first], loss[is_first]
        # Each row has a first choice.
        self._columns[groups] = columns
        self._loss[groups] = loss

    def _enumerate(
        self, rows: IntArray, serving: BoolArray
    ) -> tuple[IntArray, IntArray, BoolArray]:
        """All choices on these rows: line in `rows`, columns, and whether it is the row's first.

        One device: each that differs from those before it. Several: the fullest ones, because
        taking them leaves the rest whole.
        """
        kind, arrays = self.kind, self._ledger.arrays
        if not kind.count:
            lines = np.arange(len(rows))
            return lines, np.zeros((len(rows), 0), dtype=np.int64), np.ones(len(rows), np.bool_)
        if kind.count > 1:
            room = np.where(serving, arrays.free[rows], np.inf)
            memory = arrays.free_memory[rows]
            # Two stable sorts: by room, memory, index.
            by_memory = np.argsort(memory, axis=1, kind="stable")
            by_room = np.argsort(np.take_along_axis(room, by_memory, 1), axis=1, kind="stable")
            columns = np.take_along_axis(by_memory, by_room, 1)[:, : kind.count]
            return np.arange(len(rows)), np.sort(columns, axis=1), np.ones(len(rows), np.bool_)
        distinct = serving & self._ledger.is_first[arrays.group[rows]]
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
    """The array extended by zeros to this many rows; unchanged if it has them."""
    if rows == len(array):
        return array
    extended = np.zeros((rows, *array.shape[1:]), dtype=array.dtype)
    extended[: len(array)] = array
    return extended


def _is_first(rooms: IntArray) -> BoolArray:
    """True for devices that equal no earlier one on their node."""
    first = (rooms[:, :, None] == rooms[:, None, :]).argmax(axis=2)
    is_first: BoolArray = first == np.arange(rooms.shape[1])
    return is_first


_MOST_SHAPES = 96
"""Most kinds with prices; rarer kinds have none, unless similar to one of these."""
_SIZE_EXPONENT = 1 / 3
"""Up to 1/2 results are about equal; from 3/4 on, mixes of many large pods get worse by points."""
_LEAST_SLOTS = 1.0
"""Below this number of slots, prices stop rising."""
_HALF_LIFE = 5_000
"""Arrivals after which an earlier one counts half."""
_GROWTH = 2.0
_EXPECTED = 1.0
"""Weight in arrivals of each kind that is always expected."""
_MOST_BYTES = 192 * 2**20
"""Most cached losses, by kind; the least recently used goes first."""


class PackingValues(NamedTuple):
    """What is free, as the policy values it at present."""

    kinds: tuple[PodShape, ...]
    """Typical kinds, the most frequent first."""
    frequencies: FloatArray
    """By kind, as are the following two."""
    slots: FloatArray
    """On all nodes together."""
    prices: FloatArray
    """Of one slot."""
    values: FloatArray
    """By row: the price of all its slots, which is the cost of taking all that is free there."""


class Fragmentation:
    """Takes least from pods that may still come; ties to the first node by name."""

    name = "fragmentation"

    def __init__(self) -> None:
        self._mix = Mix(growth=_GROWTH, half_life=_HALF_LIFE)
        self._kept: OrderedDict[PodShape, Losses] = OrderedDict()
        self._ledger: SlotCounts | None = None
        self._epoch = -1
        self._fallback = Binpack()
        self._kinds: list[PodShape] = []
        self._counts = np.zeros(0)
        self._prices: FloatArray | None = None
        self._places: dict[ShapeKey, int] = {}

    def arrived(self, kind: PodShape) -> None:
        self._mix.arrived(kind)
        if not kind.count or self._mix.is_known or self._mix.epoch != self._epoch:
            return
        place = self._places.get(shape_of(kind))
        if place is not None:
            self._counts[place] += self._mix.step
            self._prices = None

    def expect(self, mix: Mapping[PodShape, float]) -> None:
        self._mix.expect(mix)

    def costs(self, arrays: Arrays, kind: PodShape, rows: IntArray | None = None) -> FloatArray:
        losses = self._losses(arrays, kind)
        if losses is None:
            return self._fallback.costs(arrays, kind, rows)
        costs = losses.costs(self._prices_now())
        return costs if rows is None else costs[rows]

    def standing(self, arrays: Arrays) -> PackingValues | None:
        """None before the first typical kind."""
        ledger = self._current(arrays)
        if not self._kinds:
            return None
        if ledger.renew():
            self._prices = None
        prices = self._prices_now()
        order = np.argsort(-self._counts, kind="stable")
        return PackingValues(
            kinds=tuple(self._kinds[place] for place in order.tolist()),
            frequencies=self._counts[order] / self._counts.sum(),
            slots=ledger.total[order],
            prices=prices[order],
            values=ledger.slots @ prices,
        )

    def device_order(self, arrays: Arrays, kind: PodShape, row: int) -> list[int]:
        """Devices of the best choice, then of the next one; then the fullest first.

        Devices with equal room follow each other.
        """
        losses = self._losses(arrays, kind)
        fullest = self._fallback.device_order(arrays, kind, row)
        if losses is None:
            return fullest
        in_order: dict[int, None] = {}
        rooms = arrays.room[row].tolist()
        for choice in losses.choices(row, self._prices_now()):
            # A choice of one device stands for all that equal it.
            same = {rooms[column] for column in choice} if kind.count == 1 else ()
            in_order.update(
                (column, None) for column in fullest if column in choice or rooms[column] in same
            )
        in_order.update(dict.fromkeys(fullest))
        return list(in_order)

    def _prices_now(self) -> FloatArray:
        if self._prices is None:
            ledger = self._ledger
            assert ledger is not None  # noqa: S101 - for the type checker: losses have one
            scarcity = np.maximum(ledger.total, _LEAST_SLOTS)
            prices: FloatArray = self._counts / self._counts.sum() / scarcity
            self._prices = np.asarray(prices / ledger.weights, dtype=np.float64)
        return self._prices

    def _losses(self, arrays: Arrays, kind: PodShape) -> Losses | None:
        ledger = self._current(arrays)
        if not self._kinds:
            return None
        if ledger.renew():
            self._prices = None
        losses = self._kept.get(kind)
        if losses is not None:
            losses.renew()
            self._kept.move_to_end(kind)
            return losses
        losses = self._kept[kind] = Losses(kind, ledger)
        losses.renew()
        size = sum(rest.parts.nbytes for rest in ledger.rests.values())
        size += sum(each.size for each in self._kept.values())
        while size > _MOST_BYTES and len(self._kept) > 1:
            size -= self._kept.popitem(last=False)[1].size
        return losses

    def _current(self, arrays: Arrays) -> SlotCounts:
        ledger = self._ledger
        if ledger is not None and (ledger.arrays is not arrays or not ledger.is_current):
            ledger = None
        if ledger is None or self._epoch != self._mix.epoch:
            before = self._kinds
            self._learn(arrays)
            if ledger is None or before != self._kinds:
                ledger = self._ledger = SlotCounts(arrays, Types(self._kinds, arrays))
                self._kept.clear()
        return ledger

    def _learn(self, arrays: Arrays) -> None:
        """Update the typical kinds from the mix; existing ones keep their positions."""
        self._epoch = self._mix.epoch
        self._prices = None
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


def _always_expected(arrays: Arrays) -> list[PodShape]:
    """Pods always expected: with 1, 2, 4 and so on whole devices of a node."""
    largest = int(arrays.gpu_there.sum(axis=1).max(initial=0))
    counts = {2**power for power in range(largest.bit_length())} | ({largest} - {0})
    modes = [
        mode
        for mode in MODES
        if mode in arrays.mode_names
        and (traits_of(mode).takes_turns or traits_of(mode).is_exclusive)
    ]
    return [
        PodShape(count=count, guarantee=WHOLE, mode=mode)
        for mode in modes
        for count in sorted(counts)
    ]

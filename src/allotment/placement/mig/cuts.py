# SPDX-License-Identifier: Apache-2.0
"""The MIG layouts of a cluster's GPUs, numbered: free slices and their costs.

GPUs with equal layouts share a number, so a request is evaluated once per layout. The value of a
start depends on the cluster's totals and the covered slots, so a few hundred values cover all GPUs.
The rules are those of `placement.mig`.
"""

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from allotment.model.mig import MigHold, MigLayout, MigRequest
from allotment.placement.mig import room_of, serving
from allotment.placement.mig.slots import Place, Slots, TakenSlots, slots_of

NOTHING = 0
"""The number of GPUs without free slices."""
_MOST_REQUESTS = 256
_MOST_CHANGES = 1 << 14
_MOST_SHAPES = 512
_MOST_STARTS = 8
_RANK = 64.0
"""Above the value of any place: each shape adds less than 1, and one GPU has few."""

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


class _Way(NamedTuple):
    """The layout behind one number."""

    layout: MigLayout
    slots: Slots
    taken: TakenSlots


class _Answer(msgspec.Struct):
    """The answer to one request, by layout number."""

    version: int = 0
    rooms: IntArray = msgspec.field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    starts: NDArray[np.int32] = msgspec.field(
        default_factory=lambda: np.full((1, _MOST_STARTS), -1, dtype=np.int32)
    )
    """Indexes into `Cuts._changes`, one for each start; -1: none."""
    ranks: FloatArray = msgspec.field(default_factory=lambda: np.zeros((1, _MOST_STARTS)))


class Cuts:
    """Numbers layouts, and answers for all numbers at once."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._keys: list[Hashable] = [None]
        self._ways: list[_Way | None] = [None]
        self._counts: list[int] = [0]
        """GPUs with each number."""
        self._born: list[int] = [0]
        """At which version each number came to mean what it means."""
        self._unused: list[int] = []
        self._version = 0
        self._shapes: dict[str, int] = {}
        """Columns of the following, by shape's name."""
        self._totals: FloatArray = np.zeros(0)
        """How many instances of each shape fit in all GPUs together."""
        self._changes: dict[Hashable, int] = {}
        """Changes of covered slots by their places in the following."""
        self._gone: FloatArray = np.zeros((0, 0))
        """How many places of which shapes a change takes. There may be more rows than changes."""
        self._answers: OrderedDict[MigRequest, _Answer] = OrderedDict()

    def take(self, layout: MigLayout | None) -> int:
        if layout is None:
            return NOTHING
        key = self._key(layout)
        number = self._numbers.get(key)
        if number is None:
            number = self._new(key, layout)
        self._counts[number] += 1
        self._count(number, 1)
        return number

    def release(self, number: int) -> None:
        if number == NOTHING:
            return
        self._counts[number] -= 1
        self._count(number, -1)
        if not self._counts[number]:
            del self._numbers[self._keys[number]]
            self._ways[number] = None
            self._unused.append(number)
            self._version += 1
            self._born[number] = self._version

    def check_invariants(
        self, numbers: Mapping[int, int], layouts: Mapping[int, MigLayout]
    ) -> None:
        counted = {number: count for number, count in enumerate(self._counts) if count}
        totals = dict.fromkeys(self._shapes, 0)
        for number, count in counted.items():
            way = self._ways[number]
            if way is None or self._numbers[self._key(layouts[number])] != number:
                raise AssertionError(number, way, layouts[number])
            for shape, room in way.slots.rooms(way.taken.mask).items():
                totals[shape] += count * room
        if counted != numbers or list(totals.values()) != self._totals.tolist():
            raise AssertionError(counted, numbers, totals, self._totals)

    def rooms(self, request: MigRequest) -> IntArray:
        """Number of such slices available at the same time, by layout number."""
        return self._of(request).rooms

    def costs(self, request: MigRequest) -> FloatArray:
        """Cost of the best place for one such slice, by layout number; `inf`: none.

        GPUs with MIG on come first, and an existing slice comes before a new one.
        """
        answer = self._of(request)
        losses = np.append(self._losses(), np.inf)
        costs: FloatArray = (answer.ranks * _RANK + losses[answer.starts]).min(axis=1)
        return costs

    def _key(self, layout: MigLayout) -> Hashable:
        slices = tuple(
            sorted(
                (slice_.profile, slice_.start, slice_.size, slice_.hold is MigHold.IDLE)
                for slice_ in layout.slices
            )
        )
        return slots_of(layout.profiles), layout.model, layout.is_enabled, slices

    def _new(self, key: Hashable, layout: MigLayout) -> int:
        if self._unused:
            number = self._unused.pop()
        else:
            number = len(self._ways)
            self._ways.append(None)
            self._keys.append(None)
            self._counts.append(0)
            self._born.append(0)
        if len(self._changes) > _MOST_CHANGES or len(self._shapes) > _MOST_SHAPES:
            self._forget()
        self._ways[number] = _Way(layout, slots_of(layout.profiles), TakenSlots.on(layout))
        self._keys[number] = key
        self._numbers[key] = number
        self._version += 1
        self._born[number] = self._version
        return number

    def _forget(self) -> None:
        """Rebuild from current layouts: profiles of removed GPUs take space."""
        self._answers.clear()
        self._changes.clear()
        self._shapes.clear()
        self._totals, self._gone = np.zeros(0), np.zeros((0, 0))
        for number, count in enumerate(self._counts):
            if count:
                self._count(number, count)

    def _count(self, number: int, sign: int) -> None:
        way = self._ways[number]
        assert way is not None  # noqa: S101 - for the type checker: a number in use has a layout
        for shape, room in way.slots.rooms(way.taken.mask).items():
            column = self._column(shape)  # first: it may rebuild the totals
            self._totals[column] += sign * room

    def _column(self, shape: str) -> int:
        column = self._shapes.setdefault(shape, len(self._shapes))
        if column == len(self._totals):
            self._totals = np.append(self._totals, 0.0)
            self._gone = np.pad(self._gone, ((0, 0), (0, 1)))
        return column

    def _losses(self) -> FloatArray:
        """The value of each change in the current cluster (`mig.scarcity`)."""
        gone, totals = self._gone[: len(self._changes)], self._totals
        return np.asarray((gone / ((totals + 1) * np.maximum(1, totals + 1 - gone))).sum(axis=1))

    def _of(self, request: MigRequest) -> _Answer:
        answer = self._answers.get(request)
        if answer is None:
            if len(self._answers) >= _MOST_REQUESTS:
                self._answers.popitem(last=False)
            answer = self._answers[request] = _Answer()
        self._answers.move_to_end(request)
        more = len(self._ways) - len(answer.rooms)
        if more > 0:
            answer.rooms = np.append(answer.rooms, np.zeros(more, dtype=np.int64))
            answer.starts = np.append(
                answer.starts, np.full((more, _MOST_STARTS), -1, dtype=np.int32), axis=0
            )
            answer.ranks = np.append(answer.ranks, np.zeros((more, _MOST_STARTS)), axis=0)
        if answer.version != self._version:
            for number, born in enumerate(self._born):
                if born > answer.version:
                    self._evaluate(request, number, answer)
            answer.version = self._version
        return answer

    def _evaluate(self, request: MigRequest, number: int, answer: _Answer) -> None:
        answer.rooms[number] = 0
        answer.starts[number] = -1
        answer.ranks[number] = 0
        way = self._ways[number]
        if way is None:
            return
        answer.rooms[number] = room_of(way.layout, request)
        idle = {(slice_.profile, slice_.start) for slice_ in way.layout.slices
                if slice_.hold is MigHold.IDLE}  # fmt: skip
        for profile in serving(way.slots.profiles, request, model=way.layout.model):
            starts = way.slots.starts(profile, way.taken)
            for place, start in enumerate(starts[:_MOST_STARTS]):
                after = way.taken.plus(Place(profile, start))
                answer.starts[number, place] = self._change(way, after.mask)
                is_cut = (profile.number, start) not in idle
                answer.ranks[number, place] = is_cut + 2 * (not way.layout.is_enabled)
            if starts:
                return

    def _change(self, way: _Way, after: int) -> int:
        key = way.slots, way.taken.mask, after
        row = self._changes.get(key)
        if row is None:
            row = self._changes[key] = len(self._changes)
            if row == len(self._gone):
                self._gone = np.pad(self._gone, ((0, max(64, row)), (0, 0)))
            self._gone[row] = 0
            then = way.slots.rooms(after)
            for shape, room in way.slots.rooms(way.taken.mask).items():
                self._gone[row, self._column(shape)] = room - then[shape]
        return row

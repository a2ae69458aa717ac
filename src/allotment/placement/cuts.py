# SPDX-License-Identifier: Apache-2.0
"""How all GPUs of a cluster are cut, each by a number: what slices they have room for, and where.

GPUs that are cut alike have one number, and what a request finds on such a GPU is worked out once.
What a start is worth depends on what there is in the whole cluster and on which slots are covered:
so the worth of all starts on all GPUs is that of a few hundred changes of covered slots, and one
look for each GPU. The rules are those of `placement.mig`.
"""

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from allotment.model.mig import MigHold, MigLayout, MigRequest
from allotment.placement.mig import room_of, serving
from allotment.placement.mig.slots import Place, Slots, Taken, slots_of

__all__ = ["NOTHING", "Cuts"]

NOTHING = 0
"""The number of GPUs from which nothing can be cut now."""
_MOST_REQUESTS = 256
_MOST_CHANGES = 1 << 14
_MOST_SHAPES = 512
_MOST_STARTS = 8
_RANK = 64.0
"""More than any place is worth: each shape adds less than 1, and few are on one GPU."""

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


class _Way(NamedTuple):
    """How GPUs are cut that have one number."""

    layout: MigLayout
    slots: Slots
    taken: Taken


@dataclass(slots=True)
class _Found:
    """What one request finds, by number of GPU."""

    version: int = 0
    rooms: IntArray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    starts: NDArray[np.int32] = field(
        default_factory=lambda: np.full((1, _MOST_STARTS), -1, dtype=np.int32)
    )
    """The places of changes in `Cuts._changes`, one for each start; -1: none."""
    ranks: FloatArray = field(default_factory=lambda: np.zeros((1, _MOST_STARTS)))


class Cuts:
    """Gives numbers to layouts, and answers for all numbers at once."""

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
        self._slots: dict[int, tuple[object, Slots]] = {}
        self._shapes: dict[str, int] = {}
        """Columns of the following, by shape's name."""
        self._totals: FloatArray = np.zeros(0)
        """How many instances of each shape fit in all GPUs together."""
        self._changes: dict[Hashable, int] = {}
        """Changes of covered slots by their places in the following."""
        self._gone: FloatArray = np.zeros((0, 0))
        """How many places of which shapes a change takes. There may be more rows than changes."""
        self._found: OrderedDict[MigRequest, _Found] = OrderedDict()

    def take(self, layout: MigLayout | None) -> int:
        """Return the number of GPUs that are cut so, with one more of them there."""
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
        """Count one GPU with a number less."""
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
        """Raise AssertionError unless so many GPUs have these numbers, which stand for these."""
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
        """Return how many such slices can be had at once, by number."""
        return self._of(request).rooms

    def costs(self, request: MigRequest) -> FloatArray:
        """Return what the best place for one such slice costs, by number; `inf`: there is none.

        GPUs whose mode is on come before others, and a slice that is there before one that is to be
        made.
        """
        found = self._of(request)
        losses = np.append(self._losses(), np.inf)
        costs: FloatArray = (found.ranks * _RANK + losses[found.starts]).min(axis=1)
        return costs

    def _key(self, layout: MigLayout) -> Hashable:
        slices = tuple(sorted((each.profile, each.start, each.size, each.hold is MigHold.IDLE)
                              for each in layout.slices))  # fmt: skip
        return self._slots_of(layout), layout.model, layout.is_enabled, slices

    def _slots_of(self, layout: MigLayout) -> Slots:
        known = self._slots.get(id(layout.profiles))
        if known is None or known[0] is not layout.profiles:
            if len(self._slots) > _MOST_REQUESTS:
                self._slots.clear()
            known = self._slots[id(layout.profiles)] = layout.profiles, slots_of(layout.profiles)
        return known[1]

    def _new(self, key: Hashable, layout: MigLayout) -> int:
        if self._unused:
            number = self._unused.pop()
        else:
            number = len(self._ways)
            self._ways.append(None)
            self._keys.append(None)
            self._counts.append(0)
            self._born.append(0)
        taken = Taken.by(each for each in layout.slices if each.hold is not MigHold.IDLE)
        if len(self._changes) > _MOST_CHANGES or len(self._shapes) > _MOST_SHAPES:
            self._forget()
        self._ways[number] = _Way(layout, self._slots_of(layout), taken)
        self._keys[number] = key
        self._numbers[key] = number
        self._version += 1
        self._born[number] = self._version
        return number

    def _forget(self) -> None:
        """Begin anew with what is there now: profiles that were there once take room."""
        self._found.clear()
        self._changes.clear()
        self._shapes.clear()
        self._totals, self._gone = np.zeros(0), np.zeros((0, 0))
        for number, count in enumerate(self._counts):
            if count:
                self._count(number, count)

    def _count(self, number: int, sign: int) -> None:
        way = self._ways[number]
        assert way is not None  # noqa: S101 - for the type checker: somebody has the number
        for shape, room in way.slots.rooms(way.taken.mask).items():
            column = self._column(shape)  # first: it may make the totals anew
            self._totals[column] += sign * room

    def _column(self, shape: str) -> int:
        column = self._shapes.setdefault(shape, len(self._shapes))
        if column == len(self._totals):
            self._totals = np.append(self._totals, 0.0)
            self._gone = np.pad(self._gone, ((0, 0), (0, 1)))
        return column

    def _losses(self) -> FloatArray:
        """Return what each change is worth in the cluster as it is (`mig.scarcity`)."""
        gone, totals = self._gone[: len(self._changes)], self._totals
        return np.asarray((gone / ((totals + 1) * np.maximum(1, totals + 1 - gone))).sum(axis=1))

    def _of(self, request: MigRequest) -> _Found:
        """Return what a request finds, brought up to date."""
        found = self._found.get(request)
        if found is None:
            if len(self._found) >= _MOST_REQUESTS:
                self._found.popitem(last=False)
            found = self._found[request] = _Found()
        self._found.move_to_end(request)
        more = len(self._ways) - len(found.rooms)
        if more > 0:
            found.rooms = np.append(found.rooms, np.zeros(more, dtype=np.int64))
            found.starts = np.append(
                found.starts, np.full((more, _MOST_STARTS), -1, dtype=np.int32), axis=0
            )
            found.ranks = np.append(found.ranks, np.zeros((more, _MOST_STARTS)), axis=0)
        if found.version != self._version:
            for number, born in enumerate(self._born):
                if born > found.version:
                    self._look(request, number, found)
            found.version = self._version
        return found

    def _look(self, request: MigRequest, number: int, found: _Found) -> None:
        found.rooms[number] = 0
        found.starts[number] = -1
        found.ranks[number] = 0
        way = self._ways[number]
        if way is None:
            return
        found.rooms[number] = room_of(way.layout, request)
        idle = {(each.profile, each.start) for each in way.layout.slices
                if each.hold is MigHold.IDLE}  # fmt: skip
        for profile in serving(way.slots.profiles, request, model=way.layout.model):
            starts = way.slots.starts(profile, way.taken)
            for place, start in enumerate(starts[:_MOST_STARTS]):
                after = way.taken.plus(Place(profile, start))
                found.starts[number, place] = self._change(way, after.mask)
                is_cut = (profile.number, start) not in idle
                found.ranks[number, place] = is_cut + 2 * (not way.layout.is_enabled)
            if starts:
                return

    def _change(self, way: _Way, after: int) -> int:
        key = way.slots, way.taken.mask, after
        known = self._changes.get(key)
        if known is None:
            known = self._changes[key] = len(self._changes)
            if known == len(self._gone):
                self._gone = np.pad(self._gone, ((0, max(64, known)), (0, 0)))
            self._gone[known] = 0
            then = way.slots.rooms(after)
            for shape, room in way.slots.rooms(way.taken.mask).items():
                self._gone[known, self._column(shape)] = room - then[shape]
        return known

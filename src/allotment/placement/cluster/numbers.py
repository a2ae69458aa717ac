# SPDX-License-Identifier: Apache-2.0
"""Numbers for equal values: devices with equal room share one, and so do equal nodes.

What a policy finds for a number holds for all that have it, so a request is evaluated once for
each number in place of once for each device or node.
"""

from collections.abc import Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

_Value = TypeVar("_Value", bound=Hashable)


class Numbers(Generic[_Value]):
    """Numbers values by their first use. A number without uses is given to another value."""

    def __init__(self, *, spare: int = 0) -> None:
        """`spare`: how many numbers without uses keep their values, for the next use of these."""
        self.changes = 0
        """How many times a number got a value."""
        self.version = np.zeros(16, dtype=np.int64)
        """By number: the value of `changes` when it got its value."""
        self._spare = spare
        self._numbers: dict[_Value, int] = {}
        self._values: list[_Value] = []
        self._uses: list[int] = []
        self._unused: dict[int, None] = {}
        """Numbers without uses that keep their values, the longest unused first."""
        self._free: list[int] = []
        """Numbers without a value."""

    def __len__(self) -> int:
        return len(self._values)

    @property
    def capacity(self) -> int:
        """Length of arrays by number: at least the count of numbers, and it grows in steps."""
        return len(self.version)

    def value(self, number: int) -> _Value:
        return self._values[number]

    def since(self, changes: int) -> IntArray:
        """The numbers that got their values after this value of `changes`."""
        return (self.version[: len(self)] > changes).nonzero()[0]

    def take(self, value: _Value) -> int:
        """Return the value's number, with one use more."""
        number = self._numbers.get(value)
        if number is None:
            number = self._numbers[value] = self._new(value)
            self.changes += 1
            self.version[number] = self.changes
        elif not self._uses[number]:
            del self._unused[number]
        self._uses[number] += 1
        return number

    def release(self, number: int) -> None:
        """Count one use less."""
        self._uses[number] -= 1
        if self._uses[number]:
            return
        self._unused[number] = None
        if len(self._unused) > self._spare:
            forgotten = next(iter(self._unused))
            del self._unused[forgotten], self._numbers[self._values[forgotten]]
            self._free.append(forgotten)

    def check_invariants(self, used: Sequence[int]) -> None:
        """Raise `AssertionError` unless exactly these uses are counted."""
        counts = np.bincount(np.array(used, dtype=np.int64), minlength=len(self)).tolist()
        unused = {number for number, count in enumerate(counts) if not count}
        free = set(self._free)
        numbers = {value: number for number, value in enumerate(self._values) if number not in free}
        if counts != self._uses or unused != self._unused.keys() | free or numbers != self._numbers:
            raise AssertionError(counts, self._uses, self._unused, self._free)

    def _new(self, value: _Value) -> int:
        """Return the number of a value that has none."""
        if self._free:
            number = self._free.pop()
            self._values[number] = value
            return number
        self._values.append(value)
        self._uses.append(0)
        if len(self) > len(self.version):
            self.version = np.concatenate([self.version, np.zeros_like(self.version)])
        return len(self) - 1


class RoomValue(NamedTuple):
    """What one more share can use of a device; `model` and `modes` as in `Arrays`."""

    free: float
    unguaranteed: float
    free_memory: float
    memory: float
    model: int
    modes: int


NO_ROOM = 0
"""The number where there is no device."""
_SPARE_ROOMS = 1024


class Rooms(Numbers[RoomValue]):
    """The distinct rooms of devices, as arrays by number."""

    def __init__(self) -> None:
        super().__init__(spare=_SPARE_ROOMS)
        self.table = np.zeros((len(RoomValue._fields), 0))
        """A line for each field of `RoomValue`, a column for each number."""
        self.take(RoomValue(0, 0, 0, 0, -1, 0))

    def _new(self, value: RoomValue) -> int:
        number = super()._new(value)
        missing = self.capacity - self.table.shape[1]
        if missing:
            self.table = np.pad(self.table, ((0, 0), (0, missing)))
        self.table[:, number] = value
        return number

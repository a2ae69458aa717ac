# SPDX-License-Identifier: Apache-2.0
"""Policies that look at one node at a time, and at nothing but what is left there.

`binpack` is the literature's best fit. `first-fit` and `random` are there to compare with.
"""

from collections.abc import Mapping
from random import Random

import numpy as np

from allotment.model.compute import WHOLE
from allotment.placement.arrays import Arrays, FloatArray, IntArray, Kind

__all__ = ["Binpack", "FirstFit", "RandomChoice", "Spread", "left"]

_CPU_SCALE = 128_000
"""Thousandths of a core that weigh as much as eight devices, as in the literature's best fit."""
_GPU_SCALE = 8 * WHOLE


def left(arrays: Arrays, kind: Kind, rows: IntArray | None = None) -> FloatArray:
    """Return how much would be left on each row, in about full nodes; `inf` where it does not fit.

    Half of it is CPU, half devices: of these the guarantee and the memory, whichever is less.
    """
    where = slice(None) if rows is None else rows
    free, memory = arrays.free[where], arrays.memory[where]
    with np.errstate(divide="ignore", invalid="ignore"):
        part = np.where(memory > 0, arrays.free_memory[where] / memory, 1.0)
    devices = np.minimum(free, part * WHOLE).sum(axis=1) - kind.size
    cpu = arrays.cpu_free[where] - kind.cpu_milli
    rest = 0.5 * devices / _GPU_SCALE + 0.5 * cpu / _CPU_SCALE
    return np.where(arrays.fitting(kind, where), rest, np.inf)


class _Unlearning:
    """What policies share that heed no arrivals."""

    def arrived(self, kind: Kind) -> None:
        """Let it be: who comes makes no difference here."""

    def expect(self, mix: Mapping[Kind, float]) -> None:
        """Let it be: who comes makes no difference here."""


class Binpack(_Unlearning):
    """The node, and on it the devices, that it leaves least of: best fit."""

    name = "binpack"

    def costs(self, arrays: Arrays, kind: Kind, rows: IntArray | None = None) -> FloatArray:
        """Return what would be left."""
        return left(arrays, kind, rows)

    def device_order(self, arrays: Arrays, kind: Kind, row: int) -> list[int]:
        """Return the fullest devices first; ties by index."""
        return by_room(arrays, kind, row, sign=1)


class Spread(_Unlearning):
    """The node, and on it the devices, that have most left."""

    name = "spread"

    def costs(self, arrays: Arrays, kind: Kind, rows: IntArray | None = None) -> FloatArray:
        """Return the negative of what would be left."""
        rest = left(arrays, kind, rows)
        return np.where(np.isinf(rest), np.inf, -rest)

    def device_order(self, arrays: Arrays, kind: Kind, row: int) -> list[int]:
        """Return the emptiest devices first; ties by index."""
        return by_room(arrays, kind, row, sign=-1)


class FirstFit(_Unlearning):
    """The first node by name where it fits, and the first devices there."""

    name = "first-fit"

    def costs(self, arrays: Arrays, kind: Kind, rows: IntArray | None = None) -> FloatArray:
        """Return 0 wherever it fits."""
        where = slice(None) if rows is None else rows
        return np.where(arrays.fitting(kind, where), 0.0, np.inf)

    def device_order(self, arrays: Arrays, kind: Kind, row: int) -> list[int]:
        """Return the devices that fit, by index."""
        return _serving(arrays, kind, row)


class RandomChoice(_Unlearning):
    """Any node where it fits, and any devices there; the same ones for the same seed and calls."""

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)  # noqa: S311 - no secret, only repeatable
        self._generator = np.random.default_rng(seed)

    def costs(self, arrays: Arrays, kind: Kind, rows: IntArray | None = None) -> FloatArray:
        """Return a random number wherever it fits."""
        where = slice(None) if rows is None else rows
        fits = arrays.fitting(kind, where)
        return np.where(fits, self._generator.random(len(fits)), np.inf)

    def device_order(self, arrays: Arrays, kind: Kind, row: int) -> list[int]:
        """Return the devices that fit, shuffled."""
        columns = _serving(arrays, kind, row)
        self._random.shuffle(columns)
        return columns


def by_room(arrays: Arrays, kind: Kind, row: int, *, sign: int) -> list[int]:
    """Return the devices that fit by what they have left, the least first; `sign` -1: the most."""
    columns = np.array(_serving(arrays, kind, row), dtype=np.int64)
    memory = np.maximum(arrays.memory[row, columns], 1)
    time = arrays.free[row, columns] / WHOLE
    room = sign * (time + arrays.free_memory[row, columns] / memory)
    in_order: list[int] = columns[np.lexsort((columns, room))].tolist()
    return in_order


def _serving(arrays: Arrays, kind: Kind, row: int) -> list[int]:
    fits: list[int] = arrays.serving(kind, np.array([row]))[0].nonzero()[0].tolist()
    return fits

# SPDX-License-Identifier: Apache-2.0
"""`fgd`: fragmentation gradient descent, the best published rule, for comparison.

Weng et al., "Beware of Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation Gradient
Descent", USENIX ATC 2023. A pod goes where the device room that typical pods cannot use grows
least. Scores are whole numbers from 0 to 100, as in the authors' scheduler. Device memory is
ignored, as in the paper.
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import numpy as np

from allotment.model.compute import WHOLE
from allotment.placement.cluster.arrays import Arrays, BoolArray, FloatArray, IntArray, PodShape
from allotment.placement.policies.mixes import Mix

_TYPICAL = 0.95
"""The typical kinds make up this part of all pods."""
_MOST_KINDS = 128
"""Number of kinds with cached scores."""


class _Scores(msgspec.Struct):
    """Cached scores of a kind: by row, valid for `arrays` at `changes`."""

    score: FloatArray
    column: IntArray
    changes: int
    epoch: int


class _Typical(NamedTuple):
    """The typical kinds as arrays, by kind."""

    kinds: tuple[PodShape, ...]
    part: FloatArray
    cpu: FloatArray
    need: FloatArray
    wanted: FloatArray


class Fgd:
    """The least growth of fragmentation, in whole steps; ties to the first node by name."""

    name = "fgd"

    def __init__(self) -> None:
        self._mix = Mix()
        self._kept: OrderedDict[PodShape, _Scores] = OrderedDict()
        self._typical = _as_arrays([])
        self._epoch = -1

    def arrived(self, kind: PodShape) -> None:
        self._mix.arrived(kind)

    def expect(self, mix: Mapping[PodShape, float]) -> None:
        self._mix.expect(mix)

    def costs(self, arrays: Arrays, kind: PodShape, rows: IntArray | None = None) -> FloatArray:
        where = slice(None) if rows is None else rows
        scores = self._scores(arrays, kind)
        return np.where(arrays.fitting(kind, where), -scores.score[where], np.inf)

    def device_order(self, arrays: Arrays, kind: PodShape, row: int) -> list[int]:
        """The device with the best score, then the others by index."""
        columns = arrays.serving_columns(kind, row)
        if not _is_share(kind):
            return columns
        chosen = int(self._scores(arrays, kind).column[row])
        return sorted(columns, key=lambda column: (column != chosen, column))

    def _scores(self, arrays: Arrays, kind: PodShape) -> _Scores:
        if self._epoch != self._mix.epoch:
            self._epoch = self._mix.epoch
            self._typical = _as_arrays(self._mix.typical(_TYPICAL))
        kept = self._kept.get(kind)
        if kept is None or len(kept.score) != len(arrays) or kept.epoch != self._epoch:
            kept = _Scores(np.zeros(len(arrays)), np.zeros(len(arrays), np.int64), 0, self._epoch)
            self._kept[kind] = kept
        self._kept.move_to_end(kind)
        if len(self._kept) > _MOST_KINDS:
            self._kept.popitem(last=False)
        if kept.changes != arrays.changes:
            stale = (arrays.version > kept.changes).nonzero()[0]
            kept.score[stale], kept.column[stale] = _score(arrays, kind, stale, self._typical)
            kept.changes = arrays.changes
        return kept


def fragmentation(
    arrays: Arrays, mix: Mapping[PodShape, float], rows: IntArray | None = None
) -> FloatArray:
    """Device room of each row that pods of this mix cannot use, in basis points."""
    known = Mix()
    known.expect(mix)
    typical = _as_arrays(known.typical(_TYPICAL))
    groups = arrays.group if rows is None else arrays.group[rows]
    found, where = np.unique(groups, return_inverse=True)
    numbers = arrays.members[found]
    state = _State(arrays, numbers, typical)
    lost = np.where(state.runs(state.count, arrays.cpu_free[numbers]), state.bad, state.total)
    return np.asarray((lost @ typical.part)[where], dtype=np.float64)


def _is_share(kind: PodShape) -> bool:
    return kind.count == 1 and kind.size < WHOLE


def _as_arrays(typical: list[tuple[PodShape, float]]) -> _Typical:
    kinds = tuple(kind for kind, _ in typical)
    part = np.array([part for _, part in typical], dtype=np.float64)
    return _Typical(
        kinds,
        # Scaled by the typical kinds only, as in the authors' code: the score's steps depend on it.
        part / max(part.sum(), 1e-300),
        np.array([kind.cpu_milli for kind in kinds], dtype=np.float64),
        np.array([kind.size // max(1, kind.count) for kind in kinds], dtype=np.float64),
        np.array([kind.count for kind in kinds], dtype=np.float64),
    )


class _State:
    """Rows and what typical kinds can use of them: arrays by row, (device,) and kind."""

    def __init__(self, arrays: Arrays, rows: IntArray, typical: _Typical) -> None:
        self.typical = typical
        self.left = np.where(arrays.usable[rows], arrays.free[rows], 0.0)
        self.suits = np.ones((*self.left.shape, len(typical.kinds)), dtype=np.bool_)
        for place, kind in enumerate(typical.kinds):
            if kind.models is not None:
                self.suits[:, :, place] = arrays.matching(kind, rows)
        self.good = self.serves(self.left)
        self.count = self.good.sum(axis=1)
        self.bad = np.where(self.good, 0.0, self.left[:, :, None]).sum(axis=1)
        self.total = self.left.sum(axis=1)[:, None]

    def serves(self, left: FloatArray) -> BoolArray:
        return self.suits & (left[:, :, None] >= self.typical.need) & (left[:, :, None] > 0)

    def runs(self, count: IntArray, cpu: FloatArray) -> BoolArray:
        typical = self.typical
        enough = (count >= typical.wanted) & (typical.wanted > 0)
        return enough & (cpu[..., None] >= typical.cpu)


def _score(
    arrays: Arrays, kind: PodShape, rows: IntArray, typical: _Typical
) -> tuple[FloatArray, IntArray]:
    """The best score of each row, and its column if the request is for a share."""
    if not len(typical.kinds):
        return np.zeros(len(rows)), np.zeros(len(rows), np.int64)
    state = _State(arrays, rows, typical)
    cpu = arrays.cpu_free[rows]
    before = np.where(state.runs(state.count, cpu), state.bad, state.total) @ typical.part
    taken = kind.size / max(1, kind.count)
    serving = arrays.serving(kind, rows)
    if not _is_share(kind):
        # The first devices that serve; none for a kind without devices.
        serving &= np.cumsum(serving, axis=1) <= kind.count
        left = state.left - np.where(serving, taken, 0.0)
        good = state.serves(left)
        bad = np.where(good, 0.0, left[:, :, None]).sum(axis=1)
        runs = state.runs(good.sum(axis=1), cpu - kind.cpu_milli)
        after = np.where(runs, bad, left.sum(axis=1)[:, None]) @ typical.part
        return _steps(before - after), np.zeros(len(rows), np.int64)
    left = state.left - taken
    good = state.serves(left)
    count = state.count[:, None, :] - state.good + good
    bad = (
        state.bad[:, None, :]
        - np.where(state.good, 0.0, state.left[:, :, None])
        + np.where(good, 0.0, left[:, :, None])
    )
    runs = state.runs(count, (cpu - kind.cpu_milli)[:, None])
    after = np.where(runs, bad, state.total[:, :, None] - taken) @ typical.part
    steps = np.where(serving, _steps(before[:, None] - after), -1.0)
    column = steps.argmax(axis=1)
    return steps[np.arange(len(rows)), column], column


def _steps(gain: FloatArray) -> FloatArray:
    """Whole scores from 0 to 100 of the fall in fragmentation, in basis points."""
    return np.floor(100 / (1 + np.exp(-gain / WHOLE)))

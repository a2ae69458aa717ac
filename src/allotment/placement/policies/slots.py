# SPDX-License-Identifier: Apache-2.0
"""How many pods of each typical kind still fit: the counts behind `fragmentation`.

A device's *part* is the shares of a kind that it could take. A node's *slots* are its devices'
parts, capped by CPU and memory. CPU and memory count in fractions, shares partly so, whole devices
never: half of eight idle GPUs fits no pod that wants eight.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from allotment.model.compute import WHOLE
from allotment.model.modes import traits_of
from allotment.placement.cluster.arrays import Arrays, BoolArray, FloatArray, IntArray, PodShape
from allotment.placement.cluster.numbers import Rooms

SlotArray = NDArray[np.float32]

_SMOOTH = 0.7
"""Weight of a fraction below one whole share."""
_MOST = 64.0
"""Cap on a device's shares, for kinds that ask for nothing that is counted."""
_ALMOST = 1e-6
"""A quotient this close below a whole number is that number."""
_LEAST_SIZE = 0.01
"""Smallest size on a device, for a kind's weight."""


class Room(msgspec.Struct, frozen=True):
    """Devices, one a row, and what is left on each."""

    free: FloatArray
    unguaranteed: FloatArray
    free_memory: FloatArray
    memory: FloatArray
    model: IntArray
    modes: IntArray
    """Bits, as in `Arrays`."""

    @classmethod
    def of(cls, rooms: Rooms, numbers: IntArray) -> "Room":
        table = rooms.table[:, numbers]
        return cls(*table[:4], *table[4:].astype(np.int64))

    def less(self, kind: PodShape, arrays: Arrays) -> "Room":
        if traits_of(kind.mode).is_exclusive:
            nothing = np.zeros_like(self.free)
            return Room(
                nothing, nothing, nothing, self.memory, self.model, np.zeros_like(self.modes)
            )
        if kind.device_memory_part is None:
            memory: FloatArray | float = float(kind.device_memory_bytes)
        else:
            memory = self.memory * float(kind.device_memory_part)
        bit = 1 << arrays.mode_names.index(kind.mode) if kind.mode in arrays.mode_names else 0
        return Room(
            np.maximum(np.minimum(self.unguaranteed - kind.floor, self.free - kind.guarantee), 0),
            np.maximum(self.unguaranteed - kind.guarantee, 0),
            np.maximum(self.free_memory - memory, 0),
            self.memory,
            self.model,
            self.modes & bit,
        )


class Types:
    """The typical kinds, one a column; those without devices have none."""

    def __init__(self, kinds: Sequence[PodShape], arrays: Arrays) -> None:
        self.kinds = tuple(kinds)
        self.place = {kind: place for place, kind in enumerate(kinds)}
        self._arrays = arrays
        self._names = arrays.names_version
        self._suits_model = np.ones((len(arrays.model_names) + 1, len(kinds)), dtype=np.bool_)
        self._suits_model[-1] = False
        self._bits = np.zeros(len(kinds), dtype=np.int64)
        self._inverse_time, self._no_time = _inverse([float(each.guarantee) for each in kinds])
        self._inverse_memory, self._no_memory = _inverse(
            [float(each.device_memory_bytes) for each in kinds]
        )
        parts = [float(each.device_memory_part or 0) for each in kinds]
        self._inverse_part, self._no_part = _inverse(parts)
        self._asks_memory = bool((self._inverse_memory > 0).any())
        self._asks_part = bool((self._inverse_part > 0).any())
        self._inverse_cpu, self._no_cpu = _inverse([float(each.cpu_milli) for each in kinds])
        self._inverse_host, self._no_host = _inverse([float(each.memory_bytes) for each in kinds])
        self._count = np.array([float(each.count) for each in kinds])
        self._floor = np.array([float(each.floor) for each in kinds])
        self._is_several = self._count > 1
        is_whole = [_is_whole(each) or each.count > 1 for each in kinds]
        self._smooth = np.where(is_whole, 0.0, _SMOOTH)
        self._most = np.where(is_whole, 1.0, _MOST)
        for place, kind in enumerate(kinds):
            if kind.mode in arrays.mode_names:
                self._bits[place] = 1 << arrays.mode_names.index(kind.mode)
            if kind.models is not None:
                names = [name in kind.models for name in arrays.model_names]
                self._suits_model[:-1, place] = names
        self.size = self._sizes()

    @property
    def is_current(self) -> bool:
        """False if the cluster's models or modes moved."""
        return self._names == self._arrays.names_version

    def parts(self, room: Room) -> FloatArray:
        """Shares of each kind that each device could take, by device and kind."""
        ratio = room.free[..., None] * self._inverse_time + self._no_time
        if self._asks_memory:
            by_bytes = room.free_memory[..., None] * self._inverse_memory + self._no_memory
            ratio = np.minimum(ratio, by_bytes)
        if self._asks_part:
            part = room.free_memory / np.maximum(room.memory, 1)
            ratio = np.minimum(ratio, part[..., None] * self._inverse_part + self._no_part)
        ratio = np.minimum(ratio, _MOST)
        whole = np.minimum(np.floor(ratio + _ALMOST), self._most)
        parts = whole + self._smooth * (ratio - whole)
        return np.where(self._suits(room), parts, 0.0)

    def slots(self, parts: FloatArray, cpu: FloatArray, memory: FloatArray) -> FloatArray:
        """Pods of each kind that nodes could take, by node and kind.

        `parts` are the sums over a node's devices; CPU and memory are what is left.
        """
        by_devices = np.where(self._is_several, np.floor(parts / self._count + _ALMOST), parts)
        host = np.minimum(
            cpu[:, None] * self._inverse_cpu + self._no_cpu,
            memory[:, None] * self._inverse_host + self._no_host,
        )
        return np.minimum(by_devices, host)

    def _suits(self, room: Room) -> BoolArray:
        suits: BoolArray = (room.modes[..., None] & self._bits) != 0
        suits &= self._suits_model[room.model]
        if self._floor.any():
            suits &= room.unguaranteed[..., None] >= self._floor
        return suits

    def _sizes(self) -> FloatArray:
        """Each kind's size on devices: time or memory, whichever is larger."""
        there = self._arrays.gpu_there
        memory = float(self._arrays.memory[there].mean()) if there.any() else 1.0
        sizes = []
        for kind in self.kinds:
            part = float(kind.device_memory_part or 0)
            if kind.device_memory_part is None:
                part = min(1.0, kind.device_memory_bytes / max(memory, 1.0))
            time = 1.0 if traits_of(kind.mode).is_exclusive else kind.guarantee / WHOLE
            sizes.append(kind.count * max(time, part, _LEAST_SIZE))
        return np.array(sizes, dtype=np.float64)


def _is_whole(kind: PodShape) -> bool:
    return (
        traits_of(kind.mode).is_exclusive
        or kind.guarantee >= WHOLE
        or (kind.device_memory_part is not None and kind.device_memory_part >= 1)
    )


def _inverse(amounts: list[float]) -> tuple[FloatArray, FloatArray]:
    """Factor and summand, so that a kind without a request has enough."""
    values = np.array(amounts, dtype=np.float64)
    asks = values > 0
    inverse = np.where(asks, 1 / np.where(asks, values, 1.0), 0.0)
    return inverse, np.where(asks, 0.0, 1e9)

# SPDX-License-Identifier: Apache-2.0
"""The cluster's free room as arrays, changed in place and read by policies.

A node is a row, its devices are columns. `Cluster` rewrites a row when its node changes and raises
the row's version, which invalidates cached costs. Guarantees are in basis points of a device's
time, memory in bytes, CPU in thousandths of a core.
"""

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

import msgspec
import numpy as np
from numpy.typing import NDArray

from allotment.model.compute import WHOLE
from allotment.model.mig import MigRequest
from allotment.model.modes import SOFT, has_slices, traits_of
from allotment.placement.cluster.numbers import NO_ROOM, Numbers, Rooms, RoomValue
from allotment.placement.mig.cuts import NOTHING, Cuts
from allotment.placement.views import DeviceRoom

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]
LinkArray = NDArray[np.float32]

_NO_NUMA = -1
_NO_MODEL = -1
_NO_GROUP = -1
_MOST_MASKS = 1024
_MOST_DENOMINATOR = 1 << 31
"""Of a part of a device's memory: products with larger ones do not fit into 64 bits."""
_MOST_ANSWERS = 256


class PodShape(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """The request of a pod with at most one GPU container and no further constraint.

    Policies count pods and cache costs by this value.
    """

    cpu_milli: int = 0
    memory_bytes: int = 0
    """Of the node, not of a device."""
    count: int = 0
    """Number of distinct devices, each with the following amounts; 0: CPU and memory only."""
    guarantee: int = 0
    device_memory_bytes: int = 0
    device_memory_part: Fraction | None = None
    """A part of the device's memory for shares, in place of bytes."""
    floor: int = 0
    """Part of each device's time that must not be guaranteed to others."""
    models: frozenset[str] | None = None
    """Names of models, as reported by devices; None: any."""
    mode: str = SOFT
    slice: MigRequest = msgspec.field(default=MigRequest())
    """In mode `mig`: each of `count` slices, on any devices."""

    @property
    def size(self) -> int:
        """Its part of the time of all its devices together; whole devices if exclusive."""
        return self.count * (WHOLE if traits_of(self.mode).is_exclusive else self.guarantee)


class _Answer(msgspec.Struct):
    """Which rooms serve one request, by number."""

    serves: BoolArray
    changes: int = 0


class Arrays:
    """Nodes in rows, devices in columns. Rows of removed nodes are reused.

    All arrays are read-only for others. They are replaced by larger ones when the cluster grows: do
    not keep references.
    """

    cpu_free: FloatArray
    """By row; -1 without a node: nothing fits."""
    memory_free: FloatArray
    gpu_there: BoolArray
    """By row and column, as all that follow."""
    usable: BoolArray
    """It takes one more share of some mode."""
    idle: BoolArray
    """It exists and has no share."""
    free: FloatArray
    """Guarantee left; 0 without a device or with an exclusive share."""
    unguaranteed: FloatArray
    """Time that is not guaranteed: `free`, and what shares without a compute request keep."""
    free_memory: FloatArray
    memory: FloatArray
    shares: NDArray[np.int32]
    model: NDArray[np.int16]
    """Index into `model_names`; -1 without a device."""
    modes: NDArray[np.uint8]
    """Bits by index into `mode_names`: modes in which it takes one more share now."""
    numa: NDArray[np.int16]
    """-1: unknown."""
    cut: NDArray[np.int32]
    """Its number in `cuts`."""
    room: IntArray
    """Its number in `rooms`."""
    group: IntArray
    """By row: its number in `groups`."""
    version: IntArray
    """By row: the value of `changes` at its last write."""

    def __init__(self) -> None:
        self.names: list[str] = []
        """By row; empty where there is no node."""
        self.row: dict[str, int] = {}
        self.model_names: list[str] = []
        """Those that devices have; empty where one is gone: its place is for the next."""
        self.mode_names: list[str] = []
        self.names_version = 0
        """How many times a place in either of these came to mean something else."""
        self.changes = 0
        """How many times any row was written."""
        self.cuts = Cuts()
        self.rooms = Rooms()
        """Devices with the same number have the same model and room."""
        self.groups: Numbers[tuple[float | bytes, ...]] = Numbers()
        """Nodes with the same number are equal in all that is free."""
        self.members: IntArray = np.full(self.groups.capacity, -1, dtype=np.int64)
        """A row of each group; -1: it has none. May be longer than `groups`."""
        self._links: dict[int, LinkArray] = {}
        self._unused: list[int] = []
        self._order: IntArray | None = None
        self._rows: IntArray | None = None
        self._masks: dict[frozenset[str], BoolArray] = {}
        self._answers: dict[PodShape, _Answer] = {}
        self._places: dict[str, int] = {}
        """Of models that are there, in `model_names`."""
        self._of_model: list[int] = []
        """How many devices there are of each."""
        self._room: dict[str, NDArray[np.generic]] = {}
        self._grow(rows=0, columns=1)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def columns(self) -> int:
        return int(self.free.shape[1])

    @property
    def rows(self) -> IntArray:
        """The rows with a node, in order. Read-only."""
        if self._rows is None:
            self._rows = np.array(sorted(self.row.values()), dtype=np.int64)
        return self._rows

    @property
    def order(self) -> IntArray:
        """The rank of each row by node name, which breaks ties."""
        if self._order is None:
            by_name = np.array(sorted(range(len(self)), key=self._name_key), dtype=np.int64)
            order = np.empty(len(self), dtype=np.int64)
            order[by_name] = np.arange(len(self))
            self._order = order
        return self._order

    def put(
        self,
        name: str,
        devices: Sequence[DeviceRoom],
        *,
        cpu_free: int,
        memory_free: int,
        links: LinkArray | None = None,
    ) -> int:
        """Write a new or changed node and return its row. `links`: scores of pairs of devices."""
        row = self.row.get(name)
        if row is None:
            row = self._new_row(name)
        if len(devices) > self.columns:
            self._grow(rows=len(self), columns=len(devices))
        # Kept until the new devices are written: most have the same models.
        before = self._taken_by(row)
        self._clear(row)
        self.update(row, dict(enumerate(devices)), cpu_free=cpu_free, memory_free=memory_free)
        self._release(*before)
        if links is not None:
            self._links[row] = links
        return row

    def update(
        self, row: int, devices: Mapping[int, DeviceRoom], *, cpu_free: int, memory_free: int
    ) -> None:
        """Write some devices, by column, and free CPU and memory; below 0 counts as 0."""
        for column, device in devices.items():
            self._write(row, column, device)
        self.cpu_free[row] = max(0, cpu_free)
        self.memory_free[row] = max(0, memory_free)
        self._touch(row)

    def drop(self, name: str) -> None:
        """Remove a node; its row fits nothing until reused. Unknown names are ignored."""
        row = self.row.pop(name, None)
        if row is None:
            return
        self._release(*self._taken_by(row))
        self._clear(row)
        self.names[row] = ""
        self.cpu_free[row] = -1
        self.memory_free[row] = -1
        self._unused.append(row)
        self._order = self._rows = None
        self._touch(row)

    def links(self, row: int) -> LinkArray | None:
        return self._links.get(row)

    def serving(self, kind: PodShape, rows: IntArray | slice | int = slice(None)) -> BoolArray:
        """True for devices with room for one part of this request, by row and column."""
        if traits_of(kind.mode).is_slice:
            return self.slices(kind, rows) > 0
        serves: BoolArray = self._serving_rooms(kind).take(self.room[rows])
        return serves

    def _serving_rooms(self, kind: PodShape) -> BoolArray:
        """True for rooms with room for one part of this request, by number."""
        answer = self._answers.get(kind)
        if answer is None:
            if len(self._answers) >= _MOST_ANSWERS:
                self._answers.clear()
            answer = self._answers[kind] = _Answer(np.zeros(0, dtype=np.bool_))
        if answer.changes == self.rooms.changes:
            return answer.serves
        fresh = self.rooms.since(answer.changes)
        answer.changes = self.rooms.changes
        missing = self.rooms.capacity - len(answer.serves)
        if missing:
            answer.serves = np.pad(answer.serves, (0, missing))
        free, unguaranteed, free_memory, memory, models, modes = self.rooms.table[:, fresh]
        serves = self._has_bit(kind, modes.astype(np.int64))
        if kind.models is not None:
            serves &= self._mask(kind.models)[models.astype(np.int64)]
        serves &= (free >= kind.guarantee) & (unguaranteed >= kind.floor)
        answer.serves[fresh] = serves & (free_memory >= _memory_need(kind, memory))
        return answer.serves

    def serving_columns(self, kind: PodShape, row: int) -> list[int]:
        """Devices of a row with room for one part of this request, by index."""
        columns: list[int] = self.serving(kind, row).nonzero()[0].tolist()
        return columns

    def fitting(
        self,
        kind: PodShape,
        rows: IntArray | slice = slice(None),
        serving: BoolArray | None = None,
    ) -> BoolArray:
        """True for rows with room for the kind. `serving`: the answer of that method, if known."""
        fits = (self.cpu_free[rows] >= kind.cpu_milli) & (
            self.memory_free[rows] >= kind.memory_bytes
        )
        if traits_of(kind.mode).is_slice:
            fits &= self.slices(kind, rows).sum(axis=1) >= kind.count
        elif kind.count:
            serving = self.serving(kind, rows) if serving is None else serving
            fits &= serving.any(axis=1) if kind.count == 1 else serving.sum(axis=1) >= kind.count
        return fits

    def slices(self, kind: PodShape, rows: IntArray | slice | int = slice(None)) -> IntArray:
        """Number of such slices available at the same time, by row and column."""
        rooms = self.cuts.rooms(kind.slice)
        return np.where(self._open(kind, rows), rooms[self.cut[rows]], 0)

    def slice_costs(self, kind: PodShape) -> FloatArray:
        """Cost of the best place for one such slice, by row; `inf` if it does not fit."""
        costs = self.cuts.costs(kind.slice)
        best = np.where(self._open(kind, slice(None)), costs[self.cut], np.inf).min(axis=1)
        return np.where(self.fitting(kind), best, np.inf)

    def memory_need(self, kind: PodShape, rows: IntArray | slice = slice(None)) -> FloatArray:
        """Memory that the request takes of each device, by row and column."""
        return _memory_need(kind, self.memory[rows])

    def matching(self, kind: PodShape, rows: IntArray | slice | int = slice(None)) -> BoolArray:
        """True for devices of the requested models, usable or not, by row and column."""
        if kind.models is None:
            return self.gpu_there[rows].copy()
        fits: BoolArray = self._mask(kind.models)[self.model[rows]]
        return fits

    def _mask(self, models: frozenset[str]) -> BoolArray:
        """Which models are among these, by index; the last entry, index -1, is for no device."""
        mask = self._masks.get(models)
        if mask is None:
            mask = np.array([*(name in models for name in self.model_names), False])
            if len(self._masks) >= _MOST_MASKS:
                self._masks.clear()
            self._masks[models] = mask
        return mask

    def _open(self, kind: PodShape, rows: IntArray | slice | int) -> BoolArray:
        fits = self._has_bit(kind, self.modes[rows])
        if kind.models is not None:
            fits &= self.matching(kind, rows)
        return fits

    def _has_bit(self, kind: PodShape, modes: NDArray[np.integer]) -> BoolArray:
        if kind.mode not in self.mode_names:
            return np.zeros(modes.shape, dtype=np.bool_)
        bit = 1 << self.mode_names.index(kind.mode)
        has_bit: BoolArray = (modes & bit) != 0
        return has_bit

    def check_invariants(self) -> None:
        """Raise `AssertionError` unless the numbers are those of the amounts."""
        fields = [getattr(self, name) for name in RoomValue._fields]
        for row, column in np.argwhere(self.gpu_there).tolist():
            amounts = RoomValue(*(field[row, column] for field in fields))
            number = int(self.room[row, column])
            if self.rooms.value(number) != amounts or (*self.rooms.table[:, number],) != amounts:
                raise AssertionError(row, column, amounts, self.rooms.value(number))
        if self.room[~self.gpu_there].any():
            raise AssertionError(self.room)
        self.rooms.check_invariants([NO_ROOM, *self.room[self.gpu_there].tolist()])
        self.groups.check_invariants(self.group.tolist())
        alike: dict[int, object] = {}
        for row, group in enumerate(self.group.tolist()):
            free = self.cpu_free[row], self.memory_free[row], self.room[row].tolist()
            member = self.group[self.members[group]]
            if alike.setdefault(group, free) != free or member != group:
                raise AssertionError(row, group, free, alike[group])

    def _name_key(self, row: int) -> tuple[bool, str]:
        return (not self.names[row], self.names[row])

    def _touch(self, row: int) -> None:
        self.changes += 1
        self.version[row] = self.changes
        amounts = float(self.cpu_free[row]), float(self.memory_free[row])
        devices = (array[row].tobytes().rstrip(b"\0") for array in (self.room, self.cut))
        before = int(self.group[row])
        self.group[row] = group = self.groups.take((*amounts, *devices))
        missing = self.groups.capacity - len(self.members)
        if missing:
            self.members = np.pad(self.members, (0, missing), constant_values=-1)
        self.members[group] = row
        if before != _NO_GROUP:
            self.groups.release(before)
            if group != before and self.members[before] == row:
                others = (self.group == before).nonzero()[0]
                self.members[before] = others[0] if len(others) else -1

    def _taken_by(self, row: int) -> tuple[list[int], list[int], list[int]]:
        """The indexes and numbers of a row's devices, for `_release`."""
        return self.model[row].tolist(), self.cut[row].tolist(), self.room[row].tolist()

    def _new_row(self, name: str) -> int:
        if self._unused:
            row = self._unused.pop()
        else:
            row = len(self.names)
            self.names.append("")
            self._grow(rows=row + 1, columns=self.columns)
        self.names[row] = name
        self.row[name] = row
        self._order = self._rows = None
        return row

    def _clear(self, row: int) -> None:
        for name, empty, _ in _BY_DEVICE:
            getattr(self, name)[row] = empty
        self._links.pop(row, None)

    def _write(self, row: int, column: int, device: DeviceRoom) -> None:
        bits = 0
        for mode in device.modes:
            if mode not in self.mode_names:
                self.mode_names.append(mode)
                self.names_version += 1
            bits |= 1 << self.mode_names.index(mode)
        before = int(self.model[row, column])
        if before == _NO_MODEL or self.model_names[before] != device.model:
            self.model[row, column] = self._taken(device.model)
            self._release([before], (), ())
        self.gpu_there[row, column] = True
        self.usable[row, column] = bits != 0
        self.idle[row, column] = device.shares == 0
        free = max(0, device.free)
        room = RoomValue(
            free,
            free + device.kept,
            max(0, device.free_memory),
            device.memory,
            int(self.model[row, column]),
            bits,
        )
        self.free[row, column] = room.free
        self.unguaranteed[row, column] = room.unguaranteed
        self.free_memory[row, column] = room.free_memory
        self.memory[row, column] = room.memory
        self.shares[row, column] = device.shares
        self.modes[row, column] = bits
        self.numa[row, column] = _NO_NUMA if device.numa_node is None else device.numa_node
        was = int(self.cut[row, column])
        if was != NOTHING or device.layout is not None:
            layout = device.layout if has_slices(device.modes) else None
            self.cut[row, column] = self.cuts.take(layout)
            self.cuts.release(was)
        before = int(self.room[row, column])
        self.room[row, column] = self.rooms.take(room)
        self._release((), (), [before])

    def _taken(self, model: str) -> int:
        place = self._places.get(model)
        if place is None:
            unused = (at for at, number in enumerate(self._of_model) if not number)
            place = next(unused, len(self.model_names))
            if place == len(self.model_names):
                self.model_names.append(model)
                self._of_model.append(0)
            self.model_names[place] = model
            self._places[model] = place
            self._names_changed()
        self._of_model[place] += 1
        return place

    def _release(self, models: Iterable[int], cuts: Iterable[int], rooms: Iterable[int]) -> None:
        """Count one device less at each of these indexes; an index with count 0 is reused."""
        for number in rooms:
            if number != NO_ROOM:
                self.rooms.release(number)
        for number in cuts:
            self.cuts.release(number)
        for place in models:
            if place == _NO_MODEL:
                continue
            self._of_model[place] -= 1
            if not self._of_model[place]:
                del self._places[self.model_names[place]]
                self.model_names[place] = ""
                self._names_changed()

    def _names_changed(self) -> None:
        self.names_version += 1
        self._masks.clear()
        self._answers.clear()

    def _grow(self, *, rows: int, columns: int) -> None:
        have = self._room["free"].shape if self._room else (-1, -1)
        if rows > have[0] or columns > have[1]:
            self._enlarge(rows, columns)
        for name, room in self._room.items():
            setattr(self, name, room[:rows])

    def _enlarge(self, rows: int, columns: int) -> None:
        capacity = max(16, rows * 2)
        room: dict[str, NDArray[np.generic]] = {}
        for name, empty, dtype in _BY_DEVICE:
            room[name] = np.full((capacity, columns), empty, dtype=dtype)
        for name, empty, dtype in _BY_NODE:
            room[name] = np.full(capacity, empty, dtype=dtype)
        for name, before in self._room.items():
            room[name][tuple(slice(0, length) for length in before.shape)] = before
        self._room = room


_BY_DEVICE: tuple[tuple[str, float, type[np.generic]], ...] = (
    ("gpu_there", False, np.bool_),
    ("usable", False, np.bool_),
    ("idle", False, np.bool_),
    ("free", 0, np.float64),
    ("unguaranteed", 0, np.float64),
    ("free_memory", 0, np.float64),
    ("memory", 0, np.float64),
    ("shares", 0, np.int32),
    ("model", _NO_MODEL, np.int16),
    ("modes", 0, np.uint8),
    ("numa", _NO_NUMA, np.int16),
    ("cut", NOTHING, np.int32),
    ("room", NO_ROOM, np.int32),
)
_BY_NODE: tuple[tuple[str, float, type[np.generic]], ...] = (
    ("cpu_free", -1, np.float64),
    ("memory_free", -1, np.float64),
    ("group", _NO_GROUP, np.int64),
    ("version", 0, np.int64),
)


def _memory_need(kind: PodShape, memory: FloatArray) -> FloatArray:
    """Memory that the request takes of each device, by what the device has in total."""
    part = kind.device_memory_part
    if part is None:
        return np.full(memory.shape, float(kind.device_memory_bytes))
    # Integers: a product of floats could round up to more than the device's memory.
    if part.denominator > _MOST_DENOMINATOR:
        sizes, places = np.unique(memory, return_inverse=True)
        needs = [int(size) * part.numerator // part.denominator for size in sizes.tolist()]
        return np.array(needs, dtype=np.float64)[places].reshape(memory.shape)
    quotient, rest = np.divmod(memory.astype(np.int64), part.denominator)
    need = quotient * part.numerator + rest * part.numerator // part.denominator
    return np.asarray(need, dtype=np.float64)

# SPDX-License-Identifier: Apache-2.0
"""The cluster's free room as arrays, changed in place: what policies look at.

A node is a row, its devices are columns: a decision over thousands of nodes is then a few passes
over memory in place of a loop over objects. There is nothing here that is not known elsewhere:
`Cluster` writes a row anew whenever something on its node changes, and each time the row's version
goes up, so that a policy knows which of the costs that it keeps are out of date.

Guarantees are in basis points of a device's time, memory is in bytes, CPU in thousandths of a core.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from allotment.model.compute import WHOLE
from allotment.model.mig import MigLayout, MigRequest
from allotment.model.mig_groups import MigModelGroups
from allotment.model.requests import EXCLUSIVE, MIG, SOFT
from allotment.placement.cuts import NOTHING, Cuts

__all__ = ["Arrays", "BoolArray", "DeviceRoom", "FloatArray", "IntArray", "Kind", "LinkArray"]

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]
LinkArray = NDArray[np.float32]

_NO_NUMA = -1
_NO_MODEL = -1
_MOST_MASKS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What a pod with at most one GPU container and no further constraint asks for.

    Pods that ask for the same are of one kind: policies count kinds and keep costs by kind.
    """

    cpu_milli: int = 0
    memory_bytes: int = 0
    """Of the node, not of a device."""
    count: int = 0
    """So many distinct devices, with each of the following on each; 0: CPU and memory alone."""
    guarantee: int = 0
    device_memory_bytes: int = 0
    device_memory_part: Fraction | None = None
    """Of what a device can give to shares in all, in place of bytes."""
    models: frozenset[str] | None = None
    """Names of models as devices bear them; None: any."""
    mode: str = SOFT
    mig_profile: str = ""
    """In mode `mig`: the one that is named. Then `count` is of slices, on whichever devices."""
    mig_groups: tuple[MigModelGroups, ...] = ()
    """In mode `mig`: which profiles an administrator allows."""

    @property
    def size(self) -> int:
        """What it asks for of the time of all its devices together; whole ones if exclusive."""
        return self.count * (WHOLE if self.mode == EXCLUSIVE else self.guarantee)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRoom:
    """What one more share can have of a device."""

    model: str
    memory: int
    """What it can give to shares in all."""
    free: int = WHOLE
    free_memory: int
    shares: int = 0
    modes: frozenset[str] = frozenset({SOFT})
    """Those of which it takes one more share now: served there, and no other share is in the way
    (of another mode, or any where exclusive is asked for), and there is a seat. Empty: none, since
    it is sick, lost or cordoned."""
    numa_node: int | None = None
    layout: MigLayout | None = None
    """How it is cut, where it takes one more slice."""


class Arrays:
    """Nodes in rows, devices in columns. Rows of nodes that are gone are used again.

    All arrays may be read by anybody and are written here alone. They are replaced by larger ones
    when nodes come or have more devices than any before: take them from here each time.
    """

    cpu_free: FloatArray
    """By row; -1 where there is no node: nothing fits."""
    memory_free: FloatArray
    gpu_there: BoolArray
    """By row and column, as all that follow."""
    usable: BoolArray
    """It takes one more share of some mode."""
    idle: BoolArray
    """It is there and has no share."""
    free: FloatArray
    """Guarantee that is left; 0 where there is no device, and where an exclusive share is."""
    free_memory: FloatArray
    memory: FloatArray
    shares: NDArray[np.int32]
    model: NDArray[np.int16]
    """Index into `model_names`, which changes with it; -1 where there is no device."""
    modes: NDArray[np.uint8]
    """Bits by index into `mode_names`: of which modes it takes one more share now."""
    numa: NDArray[np.int16]
    """-1: not known."""
    cut: NDArray[np.int32]
    """How it is cut, by number in `cuts`."""
    version: IntArray
    """By row: the value of `changes` when it was written last."""

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
        self._links: dict[int, LinkArray] = {}
        self._unused: list[int] = []
        self._order: IntArray | None = None
        self._rows: IntArray | None = None
        self._masks: dict[frozenset[str], BoolArray] = {}
        self._places: dict[str, int] = {}
        """Of models that are there, in `model_names`."""
        self._of_model: list[int] = []
        """How many devices there are of each."""
        self._room: dict[str, NDArray[np.generic]] = {}
        self._grow(rows=0, columns=1)

    def __len__(self) -> int:
        """Return the number of rows, of nodes and unused ones."""
        return len(self.names)

    @property
    def columns(self) -> int:
        """Return the number of columns: the devices of the largest node so far, at least 1."""
        return int(self.free.shape[1])

    @property
    def rows(self) -> IntArray:
        """Return the rows that have a node, in order. To be read only."""
        if self._rows is None:
            self._rows = np.array(sorted(self.row.values()), dtype=np.int64)
        return self._rows

    @property
    def order(self) -> IntArray:
        """Return the place of each row when nodes are sorted by name: what decides ties."""
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
        """Write a node, new or changed, and return its row. `links`: scores of pairs of devices."""
        row = self.row.get(name)
        if row is None:
            row = self._new_row(name)
        if len(devices) > self.columns:
            self._grow(rows=len(self), columns=len(devices))
        # Counted as there until the new ones are written: most are of the same models.
        before, cut = self.model[row].tolist(), self.cut[row].tolist()
        self._clear(row)
        for column, device in enumerate(devices):
            self._write(row, column, device)
        self._release(before)
        self._release_cuts(cut)
        if links is not None:
            self._links[row] = links
        self.set_host(row, cpu_free=cpu_free, memory_free=memory_free)
        return row

    def set_host(self, row: int, *, cpu_free: int, memory_free: int) -> None:
        """Write what the node has left besides devices. Below 0 counts as 0."""
        self.cpu_free[row] = max(0, cpu_free)
        self.memory_free[row] = max(0, memory_free)
        self._touch(row)

    def set_device(self, row: int, column: int, device: DeviceRoom) -> None:
        """Write one device of a node that is there."""
        self._write(row, column, device)
        self._touch(row)

    def drop(self, name: str) -> None:
        """Forget a node; its row takes nothing until another has it. Unknown names are let be."""
        row = self.row.pop(name, None)
        if row is None:
            return
        self._release(self.model[row].tolist())
        self._release_cuts(self.cut[row].tolist())
        self._clear(row)
        self.names[row] = ""
        self.cpu_free[row] = -1
        self.memory_free[row] = -1
        self._unused.append(row)
        self._order = self._rows = None
        self._touch(row)

    def links(self, row: int) -> LinkArray | None:
        """Return how near the node's devices are to each other; None where it is not known."""
        return self._links.get(row)

    def serving(self, kind: Kind, rows: IntArray | slice = slice(None)) -> BoolArray:
        """Say which devices have room for one of the kind's parts, by row and column."""
        if kind.mode == MIG:
            return self.slices(kind, rows) > 0
        fits = self._open(kind, rows)
        if kind.guarantee:
            fits &= self.free[rows] >= kind.guarantee
        if kind.device_memory_part is not None:
            fits &= self.free_memory[rows] >= self.memory_need(kind, rows)
        elif kind.device_memory_bytes:
            fits &= self.free_memory[rows] >= kind.device_memory_bytes
        return fits

    def fitting(self, kind: Kind, rows: IntArray | slice = slice(None)) -> BoolArray:
        """Say which nodes have room for the kind, by row."""
        fits = (self.cpu_free[rows] >= kind.cpu_milli) & (
            self.memory_free[rows] >= kind.memory_bytes
        )
        if kind.mode == MIG:
            fits &= self.slices(kind, rows).sum(axis=1) >= kind.count
        elif kind.count == 1:
            fits &= self.serving(kind, rows).any(axis=1)
        elif kind.count:
            fits &= self.serving(kind, rows).sum(axis=1) >= kind.count
        return fits

    def slices(self, kind: Kind, rows: IntArray | slice = slice(None)) -> IntArray:
        """Return how many of the kind's slices could be had at once, by row and column."""
        rooms = self.cuts.rooms(slices_of(kind))
        return np.where(self._open(kind, rows), rooms[self.cut[rows]], 0)

    def slice_costs(self, kind: Kind) -> FloatArray:
        """Return the cost of the best place for one of the kind's slices, by row.

        `inf` where the kind does not fit.
        """
        costs = self.cuts.costs(slices_of(kind))
        best = np.where(self._open(kind, slice(None)), costs[self.cut], np.inf).min(axis=1)
        return np.where(self.fitting(kind), best, np.inf)

    def memory_need(self, kind: Kind, rows: IntArray | slice = slice(None)) -> FloatArray:
        """Return what the kind takes of each device's memory, by row and column."""
        part = kind.device_memory_part
        if part is None:
            return np.full(self.free[rows].shape, float(kind.device_memory_bytes))
        # Integers: a product of floats would be rounded up to what the device does not have.
        whole = self.memory[rows].astype(np.int64)
        quotient, rest = np.divmod(whole, part.denominator)
        need = quotient * part.numerator + rest * part.numerator // part.denominator
        return np.asarray(need, dtype=np.float64)

    def matching(self, kind: Kind, rows: IntArray | slice = slice(None)) -> BoolArray:
        """Say which devices are of the kind's models, usable or not, by row and column."""
        if kind.models is None:
            return self.gpu_there[rows].copy()
        mask = self._masks.get(kind.models)
        if mask is None:
            # One place more: -1, which stands for no device, reads the last one.
            mask = np.array([*(name in kind.models for name in self.model_names), False])
            if len(self._masks) >= _MOST_MASKS:
                self._masks.clear()
            self._masks[kind.models] = mask
        fits: BoolArray = mask[self.model[rows]]
        return fits

    def _open(self, kind: Kind, rows: IntArray | slice) -> BoolArray:
        if kind.mode not in self.mode_names:
            return np.zeros(self.usable[rows].shape, dtype=np.bool_)
        bit = 1 << self.mode_names.index(kind.mode)
        fits: BoolArray = (self.modes[rows] & bit) != 0
        if kind.models is not None:
            fits &= self.matching(kind, rows)
        return fits

    def _name_key(self, row: int) -> tuple[bool, str]:
        return (not self.names[row], self.names[row])

    def _touch(self, row: int) -> None:
        self.changes += 1
        self.version[row] = self.changes

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
            bits |= 1 << self._mode(mode)
        before = int(self.model[row, column])
        if before == _NO_MODEL or self.model_names[before] != device.model:
            self.model[row, column] = self._taken(device.model)
            self._release([before])
        self.gpu_there[row, column] = True
        self.usable[row, column] = bits != 0
        self.idle[row, column] = device.shares == 0
        self.free[row, column] = max(0, device.free)
        self.free_memory[row, column] = max(0, device.free_memory)
        self.memory[row, column] = device.memory
        self.shares[row, column] = device.shares
        self.modes[row, column] = bits
        self.numa[row, column] = _NO_NUMA if device.numa_node is None else device.numa_node
        was = int(self.cut[row, column])
        if was != NOTHING or device.layout is not None:
            self.cut[row, column] = self.cuts.take(device.layout if MIG in device.modes else None)
            self.cuts.release(was)

    def _mode(self, name: str) -> int:
        """Return the mode's place, at the end where it is new."""
        if name not in self.mode_names:
            self.mode_names.append(name)
            self.names_version += 1
        return self.mode_names.index(name)

    def _taken(self, model: str) -> int:
        """Return the model's place, with one more device there."""
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

    def _release(self, places: Iterable[int]) -> None:
        """Count one device less at each of these places; one that has none is for another model.

        Whoever may write a node's devices may write another model with each write.
        """
        for place in places:
            if place == _NO_MODEL:
                continue
            self._of_model[place] -= 1
            if not self._of_model[place]:
                del self._places[self.model_names[place]]
                self.model_names[place] = ""
                self._names_changed()

    def _release_cuts(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.cuts.release(number)

    def _names_changed(self) -> None:
        self.names_version += 1
        self._masks.clear()

    def _grow(self, *, rows: int, columns: int) -> None:
        """Have room for so many rows and columns; views of what is in use go into the arrays."""
        if not self._room or self._is_too_small(rows, columns):
            self._enlarge(rows, columns)
        for name, room in self._room.items():
            setattr(self, name, room[:rows])

    def _is_too_small(self, rows: int, columns: int) -> bool:
        have: tuple[int, ...] = self._room["free"].shape
        return rows > have[0] or columns > have[1]

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


def slices_of(kind: Kind) -> MigRequest:
    """Return what slices a kind of mode `mig` asks for."""
    return MigRequest(
        profile=kind.mig_profile,
        memory_bytes=kind.device_memory_bytes,
        memory_part=None if kind.mig_profile else kind.device_memory_part,
        compute=kind.guarantee,
        groups=kind.mig_groups,
    )


_BY_DEVICE: tuple[tuple[str, float, type[np.generic]], ...] = (
    ("gpu_there", False, np.bool_),
    ("usable", False, np.bool_),
    ("idle", False, np.bool_),
    ("free", 0, np.float64),
    ("free_memory", 0, np.float64),
    ("memory", 0, np.float64),
    ("shares", 0, np.int32),
    ("model", _NO_MODEL, np.int16),
    ("modes", 0, np.uint8),
    ("numa", _NO_NUMA, np.int16),
    ("cut", NOTHING, np.int32),
)
_BY_NODE: tuple[tuple[str, float, type[np.generic]], ...] = (
    ("cpu_free", -1, np.float64),
    ("memory_free", -1, np.float64),
    ("version", 0, np.int64),
)

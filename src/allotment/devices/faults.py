# SPDX-License-Identifier: Apache-2.0
"""Faults of a simulated machine on demand, for tests of health checks and error handling.

A fault is written into the machine file, and every program on the machine sees it at its next call.
No library is needed.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Final

import msgspec

from allotment.devices import layout
from allotment.devices.packing import read_machine
from allotment.model.errors import StateError, UsageError

_LOST_XID: Final = 79
_DOUBLE_BIT_XID: Final = 48
_RING: Final = 64
_HIGHEST: Final = 2**32 - 1
_FIELDS: Final = {**layout.MACHINE_FIELDS, **layout.FAULTS_FIELDS, **layout.GPU_FAULTS_FIELDS}
_COUNTERS: Final = (
    "ecc_volatile_corrected",
    "ecc_volatile_uncorrected",
    "ecc_aggregate_corrected",
    "ecc_aggregate_uncorrected",
    "retired_pages_sbe",
    "retired_pages_dbe",
    "remapped_rows_correctable",
    "remapped_rows_uncorrectable",
)


class MigCall(IntEnum):
    """The driver's calls that change MIG, numbered as in native/simulated/machine.h."""

    SET_MODE = 0
    CREATE_GPU = 1
    CREATE_COMPUTE = 2
    DESTROY_GPU = 3
    DESTROY_COMPUTE = 4
    RESET = 5


class MigFault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault of one of a GPU's calls that change MIG."""

    slow_us: int = 0
    """Additional duration."""
    error: int = 0
    """An `nvmlReturn_t` returned without any effect; 0: none."""
    ends_before: bool = False
    """It kills the calling process (SIGKILL) before any effect."""
    ends_after: bool = False
    """It kills the process after the effect: the caller never sees the result."""


class GpuFaults(msgspec.Struct, frozen=True):
    """Faults of one GPU. `xids` are the last ones (up to 64) since `clear_faults`, oldest first."""

    lost: bool
    hang_us: int
    xids: tuple[int, ...]
    counters: Mapping[str, int]
    mig: Mapping[MigCall, MigFault]
    """Calls with a fault."""


class DriverFaults(msgspec.Struct, frozen=True):
    """Faults of the whole machine. `cuda_init_error` is a CUresult, 0: none."""

    nvml_not_loaded: bool
    cuda_init_error: int
    release_us: int
    """How long the driver keeps the memory of a process that has ended, and lists it."""


def set_fault(
    machine: Path,
    gpu: int,
    *,
    xid: int | None = None,
    lost: bool | None = None,
    hang_us: int | None = None,
    counters: Mapping[str, int] | None = None,
) -> None:
    """Set a GPU's faults; None leaves a value unchanged.

    `xid` is reported once to each listener. A lost GPU also reports XID 79, a rising count of
    uncorrected ECC errors XID 48. `counters` are set by their names in `allot_gpu_faults` of
    native/simulated/machine.h. Raises `UsageError`, `StateError`.
    """
    with open_machine(machine) as file:
        base = _base_of(file, gpu)
        before = _read(file, base)
        if hang_us is not None:
            _put(file, base, "hang_us", hang_us)
        for name, value in (counters or {}).items():
            if name not in _COUNTERS:
                raise UsageError(
                    f"unknown counter {name!r}", hint=f"counters: {', '.join(_COUNTERS)}"
                )
            _put(file, base, name, value)
            if name == "ecc_volatile_uncorrected" and value > before.counters[name]:
                _report(file, base, _DOUBLE_BIT_XID)
        if xid is not None:
            _report(file, base, xid)
        if lost is not None:
            if lost and not before.lost:
                _report(file, base, _LOST_XID)
            _put(file, base, "lost", int(lost))


def set_mig_fault(machine: Path, gpu: int, call: MigCall, fault: MigFault) -> None:
    with open_machine(machine) as file:
        base = _base_of(file, gpu)
        _put(file, base, "mig_slow_us", fault.slow_us, index=call)
        _put(file, base, "mig_errors", fault.error, index=call)
        ends = (("mig_ends_before", fault.ends_before), ("mig_ends_after", fault.ends_after))
        for name, is_set in ends:
            others = _get(file, base, name) & ~(1 << call)
            _put(file, base, name, others | is_set << call)


def set_driver_fault(
    machine: Path,
    *,
    nvml_not_loaded: bool | None = None,
    cuda_init_error: int | None = None,
    release_us: int | None = None,
) -> None:
    """Make nvmlInit fail, or cuInit with a CUresult (0: no failure), or memory be freed late."""
    with open_machine(machine) as file:
        values = {
            "nvml_not_loaded": nvml_not_loaded,
            "cuda_init_error": cuda_init_error,
            "release_us": release_us,
        }
        for name, value in values.items():
            if value is not None:
                _put(file, layout.FAULTS_AT, name, int(value))


def clear_faults(machine: Path) -> None:
    set_driver_fault(machine, nvml_not_loaded=False, cuda_init_error=0, release_us=0)
    for gpu in range(len(read_machine(machine).devices)):
        _forget_xids(machine, gpu)
        set_fault(machine, gpu, lost=False, hang_us=0, counters=dict.fromkeys(_COUNTERS, 0))
        for call in MigCall:
            set_mig_fault(machine, gpu, call, MigFault())


def _forget_xids(machine: Path, gpu: int) -> None:
    """Show earlier XIDs no longer; programs that listen still get them."""
    with open_machine(machine) as file:
        base = _base_of(file, gpu)
        _put(file, base, "xids_cleared", _get(file, base, "xid_head"))


def read_faults(machine: Path) -> tuple[GpuFaults, ...]:
    count = len(read_machine(machine).devices)
    with open_machine(machine) as file:
        return tuple(_read(file, _base_of(file, gpu)) for gpu in range(count))


def read_driver_faults(machine: Path) -> DriverFaults:
    with open_machine(machine) as file:
        return DriverFaults(
            nvml_not_loaded=bool(_get(file, layout.FAULTS_AT, "nvml_not_loaded")),
            cuda_init_error=_get(file, layout.FAULTS_AT, "cuda_init_error"),
            release_us=_get(file, layout.FAULTS_AT, "release_us"),
        )


# ---- the file ------------------------------------------------------------------------------------


@contextmanager
def open_machine(machine: Path) -> Iterator[int]:
    """Open a machine file to change it, one writer at a time. Raises `StateError`."""
    read_machine(machine)  # only a valid machine file is written to
    try:
        file = os.open(machine, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise StateError(
            f"cannot change the simulated machine {machine}: {error.strerror}",
            hint="run as a user with write access to it",
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
    finally:
        os.close(file)


def _base_of(file: int, gpu: int) -> int:
    count = _get(file, 0, "gpu_count")
    if not 0 <= gpu < count:
        raise UsageError(f"the simulated machine has GPUs 0 to {count - 1}, no GPU {gpu}")
    return layout.FAULTS_AT + layout.FAULTS_FIELDS["gpus"][0] + gpu * layout.GPU_FAULTS_SIZE


def _put(file: int, base: int, name: str, value: int, *, index: int = 0) -> None:
    """Write a field, or an item of an array."""
    if not 0 <= value <= _HIGHEST:
        raise UsageError(f"{value} is not between 0 and {_HIGHEST}")
    at, item = _item(name, index)
    os.pwrite(file, item.pack(value), base + at)


def _get(file: int, base: int, name: str, *, index: int = 0) -> int:
    at, item = _item(name, index)
    (value,) = item.unpack(os.pread(file, item.size, base + at))
    return int(value)


def _item(name: str, index: int) -> tuple[int, struct.Struct]:
    at, code = _FIELDS[name]
    item = struct.Struct(f"<{code[-1]}")
    return at + index * item.size, item


def _report(file: int, base: int, xid: int) -> None:
    """Write an XID into the ring, then count it: readers see only complete ones."""
    if not 0 < xid <= _HIGHEST:
        raise UsageError(f"{xid} is not an XID")
    head = _get(file, base, "xid_head")
    ring = base + layout.GPU_FAULTS_FIELDS["xids"][0]
    os.pwrite(file, struct.pack("<QQ", time.monotonic_ns(), xid), ring + head % _RING * 16)
    _put(file, base, "xid_head", (head + 1) & _HIGHEST)


def _read(file: int, base: int) -> GpuFaults:
    head = _get(file, base, "xid_head")
    ring = base + layout.GPU_FAULTS_FIELDS["xids"][0]
    numbers = range(max(_get(file, base, "xids_cleared"), head - _RING), head)
    return GpuFaults(
        lost=bool(_get(file, base, "lost")),
        hang_us=_get(file, base, "hang_us"),
        xids=tuple(
            struct.unpack("<QQ", os.pread(file, 16, ring + number % _RING * 16))[1]
            for number in numbers
        ),
        counters={name: _get(file, base, name) for name in _COUNTERS},
        mig={call: fault for call in MigCall if (fault := _mig(file, base, call)) != MigFault()},
    )


def _mig(file: int, base: int, call: MigCall) -> MigFault:
    return MigFault(
        slow_us=_get(file, base, "mig_slow_us", index=call),
        error=_get(file, base, "mig_errors", index=call),
        ends_before=bool(_get(file, base, "mig_ends_before") >> call & 1),
        ends_after=bool(_get(file, base, "mig_ends_after") >> call & 1),
    )

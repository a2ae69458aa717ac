# SPDX-License-Identifier: Apache-2.0
"""Faults of a simulated machine, on demand: what health checks and error handling are tried on.

A fault is written into the machine file and is seen by every program on that machine at its next
call. Nothing here needs the libraries.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Final

from allotment.devices import layout
from allotment.devices.simulated import read_machine
from allotment.model.errors import StateError, UsageError

__all__ = [
    "DriverFaults",
    "GpuFaults",
    "MigCall",
    "MigFault",
    "clear_faults",
    "read_driver_faults",
    "read_faults",
    "set_driver_fault",
    "set_fault",
    "set_mig_fault",
]

_LOST_XID: Final = 79
_DOUBLE_BIT_XID: Final = 48
_RING: Final = 64
_HIGHEST: Final = 2**32 - 1
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
    """The driver's calls that change MIG, as native/simulated/machine.h numbers them."""

    SET_MODE = 0
    CREATE_GPU = 1
    CREATE_COMPUTE = 2
    DESTROY_GPU = 3
    DESTROY_COMPUTE = 4
    RESET = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class MigFault:
    """What is wrong with one of a GPU's calls that change MIG."""

    slow_us: int = 0
    """How much longer it takes."""
    error: int = 0
    """An `nvmlReturn_t` that it returns without doing anything; 0: none."""
    ends_before: bool = False
    """It ends the calling process by SIGKILL before it does anything."""
    ends_after: bool = False
    """And once it has: a crash with the call's effect, of which the caller has not heard."""


@dataclass(frozen=True, slots=True)
class GpuFaults:
    """What is wrong with one GPU. `xids` are the last ones (up to 64), oldest first."""

    lost: bool
    hang_us: int
    xids: tuple[int, ...]
    counters: Mapping[str, int]
    mig: Mapping[MigCall, MigFault]
    """Of the calls that have one."""


@dataclass(frozen=True, slots=True)
class DriverFaults:
    """What is wrong with the whole machine. `cuda_init_error` is a CUresult, 0: none."""

    nvml_not_loaded: bool
    cuda_init_error: int


def set_fault(
    machine: Path,
    gpu: int,
    *,
    xid: int | None = None,
    lost: bool | None = None,
    hang_us: int | None = None,
    counters: Mapping[str, int] | None = None,
) -> None:
    """Give a GPU a fault; what is None stays as it is.

    `xid` is reported once to everyone who listens. A GPU that gets lost reports XID 79 as well, a
    rising count of uncorrected ECC errors XID 48. `counters` are set, by the names of
    `allot_gpu_faults` in native/simulated/machine.h. Raises `UsageError`, `StateError`.
    """
    with _opened(machine) as file:
        base = _base_of(file, gpu)
        before = _read(file, base)
        if hang_us is not None:
            _put(file, base, "hang_us", hang_us)
        for name, value in (counters or {}).items():
            if name not in _COUNTERS:
                raise UsageError(
                    f"there is no counter {name!r}", hint=f"counters: {', '.join(_COUNTERS)}"
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
    """Give a GPU's call that changes MIG a fault, in place of the one that it has."""
    with _opened(machine) as file:
        base = _base_of(file, gpu)
        for name, value in (("mig_slow_us", fault.slow_us), ("mig_errors", fault.error)):
            at, code = layout.GPU_FAULTS_FIELDS[name]
            _write(file, base + at + 4 * call, code[-1], value)
        ends = (("mig_ends_before", fault.ends_before), ("mig_ends_after", fault.ends_after))
        for name, is_set in ends:
            others = _get(file, base, name) & ~(1 << call)
            _put(file, base, name, others | is_set << call)


def set_driver_fault(
    machine: Path, *, nvml_not_loaded: bool | None = None, cuda_init_error: int | None = None
) -> None:
    """Let nvmlInit fail, or cuInit with a CUresult (0: not)."""
    with _opened(machine) as file:
        values = {"nvml_not_loaded": nvml_not_loaded, "cuda_init_error": cuda_init_error}
        for name, value in values.items():
            if value is not None:
                at, code = layout.FAULTS_FIELDS[name]
                _write(file, layout.FAULTS_AT + at, code, int(value))


def clear_faults(machine: Path) -> None:
    """Repair everything. XIDs that were reported stay reported."""
    set_driver_fault(machine, nvml_not_loaded=False, cuda_init_error=0)
    for gpu in range(len(read_machine(machine).devices)):
        set_fault(machine, gpu, lost=False, hang_us=0, counters=dict.fromkeys(_COUNTERS, 0))
        for call in MigCall:
            set_mig_fault(machine, gpu, call, MigFault())


def read_faults(machine: Path) -> tuple[GpuFaults, ...]:
    """Return what is wrong with each GPU."""
    count = len(read_machine(machine).devices)
    with _opened(machine) as file:
        return tuple(_read(file, _base_of(file, gpu)) for gpu in range(count))


def read_driver_faults(machine: Path) -> DriverFaults:
    """Return what is wrong with the whole machine."""
    with _opened(machine) as file:
        values = {}
        for name in ("nvml_not_loaded", "cuda_init_error"):
            at, code = layout.FAULTS_FIELDS[name]
            data = os.pread(file, struct.calcsize(f"<{code}"), layout.FAULTS_AT + at)
            (values[name],) = struct.unpack(f"<{code}", data)
    return DriverFaults(bool(values["nvml_not_loaded"]), values["cuda_init_error"])


# ---- the file ------------------------------------------------------------------------------------


@contextmanager
def _opened(machine: Path) -> Iterator[int]:
    """Open the machine file; makers of faults take turns."""
    read_machine(machine)  # a file that is no machine is never written to
    try:
        file = os.open(machine, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise StateError(
            f"cannot change the simulated machine {machine}: {error.strerror}"
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
    finally:
        os.close(file)


def _base_of(file: int, gpu: int) -> int:
    at, code = layout.MACHINE_FIELDS["gpu_count"]
    (count,) = struct.unpack(f"<{code}", os.pread(file, struct.calcsize(code), at))
    if not 0 <= gpu < count:
        raise UsageError(f"the simulated machine has GPUs 0 to {count - 1}, and none is {gpu}")
    return layout.FAULTS_AT + layout.FAULTS_FIELDS["gpus"][0] + gpu * layout.GPU_FAULTS_SIZE


def _put(file: int, base: int, name: str, value: int) -> None:
    at, code = layout.GPU_FAULTS_FIELDS[name]
    _write(file, base + at, code, value)


def _write(file: int, at: int, code: str, value: int) -> None:
    if not 0 <= value <= _HIGHEST:
        raise UsageError(f"{value} is not between 0 and {_HIGHEST}")
    os.pwrite(file, struct.pack(f"<{code}", value), at)


def _get(file: int, base: int, name: str) -> int:
    at, code = layout.GPU_FAULTS_FIELDS[name]
    value: int = struct.unpack(f"<{code}", os.pread(file, struct.calcsize(f"<{code}"), base + at))[
        0
    ]
    return value


def _report(file: int, base: int, xid: int) -> None:
    """Put an XID into the ring, and only then count it: readers see whole ones."""
    if not 0 < xid <= _HIGHEST:
        raise UsageError(f"{xid} is not an XID")
    head = _get(file, base, "xid_head")
    ring = base + layout.GPU_FAULTS_FIELDS["xids"][0]
    os.pwrite(file, struct.pack("<QQ", time.monotonic_ns(), xid), ring + head % _RING * 16)
    _put(file, base, "xid_head", (head + 1) & _HIGHEST)


def _read(file: int, base: int) -> GpuFaults:
    head = _get(file, base, "xid_head")
    ring = base + layout.GPU_FAULTS_FIELDS["xids"][0]
    numbers = range(max(0, head - _RING), head)
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
    numbers = {}
    for name in ("mig_slow_us", "mig_errors"):
        at, _ = layout.GPU_FAULTS_FIELDS[name]
        (numbers[name],) = struct.unpack("<I", os.pread(file, 4, base + at + 4 * call))
    return MigFault(
        slow_us=numbers["mig_slow_us"],
        error=numbers["mig_errors"],
        ends_before=bool(_get(file, base, "mig_ends_before") >> call & 1),
        ends_after=bool(_get(file, base, "mig_ends_after") >> call & 1),
    )

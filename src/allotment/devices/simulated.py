# SPDX-License-Identifier: Apache-2.0
"""Simulated machines: the files behind our libcuda.so.1 and libnvidia-ml.so.1.

A machine is one file in a state folder, named by its description's hash, so equal requests share a
machine. Creation is atomic (a temporary file, then a link). The file's few megabytes are allocated
at creation: a full disk later would kill programs that map it (SIGBUS).
"""

import contextlib
import ctypes
import errno
import os
import struct
import time
from pathlib import Path
from typing import ClassVar, Final

import msgspec

from allotment.devices import layout, loading
from allotment.devices.descriptions import MachineDescription, parse_short, parse_yaml
from allotment.devices.packing import (
    damaged_machine,
    identity,
    pack,
    pack_mig,
    read_machine,
)
from allotment.devices.sources import Inventory, Problem
from allotment.model.devices import Device
from allotment.model.errors import BusyError, StateError, UsageError
from allotment.model.structs import replace

DEFAULT_PATH: Final = Path("/run/allotment/simulated/machine")
"""Path for the libraries without the variable: a share's own mount."""

_FULL_HINT: Final = (
    f"it needs {-(-layout.MACHINE_RINGS_AT >> 20)} MiB: make room, or choose another state folder"
    " with --state or ALLOTMENT_STATE"
)
_TOUCHED_EVERY_S: Final = 3600.0
"""Interval of marking a machine as used: unused ones are removed in time."""
_LOST: Final = "the GPU is lost (it has fallen off the bus)"
_YAML_SUFFIXES: Final = (".yaml", ".yml")


def parse_spec(spec: str) -> MachineDescription:
    """Parse the short form (`a100-80gb:2,t4`), or the YAML file named by `spec`.

    A name with a `/`, or one that ends in `.yaml` or `.yml`, is a file. Raises `UsageError`.
    """
    if not (spec.endswith(_YAML_SUFFIXES) or "/" in spec):
        return parse_short(spec)
    try:
        text = Path(spec).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(
            f"cannot read the simulated machine {spec!r}: {reason}",
            hint="name a YAML file, or write GPUs like a100-80gb:2,t4",
        ) from error
    return parse_yaml(text, source=spec)


def machine_path(state_dir: Path, spec: str) -> Path:
    """The machine file for `spec` in a state folder, created if missing.

    Raises `UsageError` for an invalid spec, `StateError` if creation fails.
    """
    description = parse_spec(spec)
    packed, slices = pack(description), pack_mig(description)
    path = state_dir / "simulated" / identity(packed, slices) / "machine"
    try:
        unused_s = time.time() - path.stat().st_mtime
    except OSError:  # missing; or unreadable, then creating it raises the reason
        _make(path, packed, slices)
    else:
        if unused_s > _TOUCHED_EVERY_S:
            with contextlib.suppress(OSError):  # another user's: that user also removes old ones
                os.utime(path)
    return path


def is_as_made(path: Path) -> bool:
    """True if a machine has its original slices, and no faults.

    False for another release's machine. Raises `OSError`.
    """
    with path.open("rb") as file:
        described = file.read(layout.MACHINE_SIZE)
        file.seek(layout.FAULTS_AT)
        faults = file.read(layout.FAULTS_SIZE)
        file.seek(layout.MIG_AT)
        mig = file.read(layout.MACHINE_GPUS * layout.GPU_MIG_SIZE)
    return identity(described, mig) == path.parent.name and not any(faults)


class ProcessTime(msgspec.Struct, frozen=True):
    """One process's use of a simulated GPU since the process began; times in nanoseconds."""

    pid: int
    """The pid inside its own namespace."""

    lives: bool
    """Whether it still runs: rows of ended processes stay until reused."""

    busy_ns: int
    """Time in which at least one of its kernels ran."""

    copy_ns: int
    """Time of copy engines for it."""

    memory_bytes: int


class GpuTimes(msgspec.Struct, frozen=True):
    """A simulated GPU's totals at one moment."""

    now_ns: int
    """The moment, on the clock of `time.monotonic_ns`."""

    busy_ns: int
    """Time in which at least one kernel ran, of any process, since the machine began."""

    processes: tuple[ProcessTime, ...]


def gpu_times(machine: Path) -> dict[str, GpuTimes]:
    """Exact totals of each GPU at this moment, by UUID, from the engine's own account.

    The reference for benches and tests. Raises `StateError` for a file that is not a machine, or
    without room for one more process.
    """
    library = loading.simulated_library()
    rows = (_TimeRow * (layout.MACHINE_PROCESSES))()
    times: dict[str, GpuTimes] = {}
    for index, device in enumerate(read_machine(machine).devices):
        count = ctypes.c_uint(len(rows))
        busy, now = ctypes.c_ulonglong(), ctypes.c_ulonglong()
        error = library.allotSimulatedTimes(
            os.fsencode(machine),
            index,
            rows,
            ctypes.byref(count),
            ctypes.byref(busy),
            ctypes.byref(now),
        )
        if error != 0:
            raise damaged_machine(machine, os.strerror(-error))
        times[device.uuid] = GpuTimes(
            now_ns=now.value,
            busy_ns=busy.value,
            processes=tuple(
                ProcessTime(row.pid, bool(row.lives), row.busy_ns, row.copy_ns, row.memory_bytes)
                for row in rows[: count.value]
            ),
        )
    return times


def reset_gpu(machine: Path, gpu: int) -> None:
    """Reset a GPU by its number, like `nvidia-smi --gpu-reset`, to apply a pending MIG mode.

    All its slices are removed. Raises `BusyError` if the GPU or one joined by NVLink is in use,
    `StateError` for an invalid file or a set fault.
    """
    uuid = read_machine(machine).devices[gpu].uuid
    error = loading.simulated_library().allotSimulatedReset(os.fsencode(machine), gpu)
    if error == -errno.EBUSY:
        raise BusyError(
            f"GPU {uuid} cannot be reset: it is in use, or a GPU joined to it by NVLink is in use",
            hint="end the programs that `allot ps` and `nvidia-smi` show on them",
        )
    if error != 0:
        raise StateError(f"GPU {uuid} cannot be reset: {os.strerror(-error)}")


def capabilities_path(machine: Path) -> Path:
    return machine.parent / "capabilities"


class _TimeRow(ctypes.Structure):
    """`allot_simulated_time` of native/simulated/nvml/times.h."""

    _fields_: ClassVar = [
        ("pid", ctypes.c_int32),
        ("lives", ctypes.c_uint32),
        ("start_time", ctypes.c_uint64),
        ("busy_ns", ctypes.c_uint64),
        ("copy_ns", ctypes.c_uint64),
        ("memory_bytes", ctypes.c_uint64),
    ]


class SimulatedMachine(msgspec.Struct, frozen=True):
    """The devices of a machine file, read without NVML."""

    path: Path

    def inventory(self) -> Inventory:
        """The devices as described, and separately those with a fault that blocks answers."""
        working: list[Device] = []
        problems: list[Problem] = []
        devices = self.devices()
        faults_at = layout.FAULTS_AT + layout.FAULTS_FIELDS["gpus"][0]
        field = layout.GPU_FAULTS_FIELDS["lost"]
        lost = _flags(self.path, faults_at, layout.GPU_FAULTS_SIZE, field)
        for device, is_lost in zip(devices, lost, strict=False):
            if is_lost:
                problems.append(Problem(device.index, device.uuid, _LOST, device))
            else:
                working.append(device)
        return Inventory(devices=tuple(working), problems=tuple(problems))

    def devices(self) -> tuple[Device, ...]:
        """All devices as described, also lost ones.

        As with a real driver (`nvml`), one in MIG mode is not available as a whole.
        """
        described = read_machine(self.path).devices
        field = layout.GPU_MIG_FIELDS["enabled"]
        split = _flags(self.path, layout.MIG_AT, layout.GPU_MIG_SIZE, field)
        return tuple(
            replace(device, mig=True) if is_split else device
            for device, is_split in zip(described, split, strict=False)
        )


def _flags(path: Path, gpus_at: int, gpu_size: int, field: tuple[int, str]) -> list[bool]:
    """Read one flag of each possible GPU of a machine."""
    try:
        with path.open("rb") as file:
            file.seek(gpus_at)
            data = file.read(layout.MACHINE_GPUS * gpu_size)
    except OSError as error:
        raise damaged_machine(path, error.strerror or str(error)) from error
    at, code = field
    numbers = range(layout.MACHINE_GPUS)
    return [struct.unpack_from(f"<{code}", data, gpu * gpu_size + at)[0] != 0 for gpu in numbers]


def _make(path: Path, description: bytes, mig: bytes) -> None:
    import shutil  # late: most starts find their machine created
    import tempfile

    machines = path.parent.parent
    try:
        machines.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=".machine-", dir=machines))
        try:
            whole = draft / path.parent.name
            whole.mkdir()
            whole.chmod(0o755)
            with (whole / path.name).open("wb") as file:
                file.write(description)
                file.seek(layout.MIG_AT)
                file.write(mig)
                file.flush()
                os.posix_fallocate(file.fileno(), 0, layout.MACHINE_RINGS_AT)
                file.truncate(layout.MACHINE_FILE_BYTES)
                # All users' programs use it, as with /dev/nvidia0.
                os.fchmod(file.fileno(), 0o666)
            try:
                whole.rename(path.parent)
            except OSError:
                # Another process, perhaps another user's, created the same machine meanwhile. By no
                # path that another user, where a folder is for all, can lead elsewhere.
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                folder = os.open(path.parent, flags)
                try:
                    with contextlib.suppress(FileExistsError):
                        os.link(whole / path.name, path.name, dst_dir_fd=folder)
                finally:
                    os.close(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        raise StateError(
            f"cannot create the simulated machine {path}: {error.strerror}",
            hint=_FULL_HINT
            if error.errno in {errno.ENOSPC, errno.EDQUOT}
            else "choose a writable state folder with --state or ALLOTMENT_STATE",
        ) from error

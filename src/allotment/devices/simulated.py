# SPDX-License-Identifier: Apache-2.0
"""Simulated machines: the files that our libcuda.so.1 and libnvidia-ml.so.1 run on.

A machine is one file below a state folder, named by the hash of its description, so that everyone
who asks for `a100-80gb:2` with the same state folder is on the same machine. It appears whole (a
temporary file, then a link), and two makers at once get the same one. The file is sparse: hundreds
of megabytes long, a few megabytes of space, which it has from the beginning: programs map it, and
a disk that is full only then would end them by SIGBUS.

Reading a description goes straight to the file: no NVML, nothing to load.
"""

import contextlib
import ctypes
import errno
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Final

from allotment.devices import layout
from allotment.devices.descriptions import MachineDescription, parse_short, parse_yaml
from allotment.devices.packing import MachineFacts, identity, identity_of, pack, pack_mig, unpack
from allotment.devices.sources import Inventory, Problem
from allotment.model.devices import Device
from allotment.model.errors import BusyError, StateError, UsageError

__all__ = [
    "DEFAULT_PATH",
    "MACHINE_VARIABLE",
    "SPEC_VARIABLE",
    "GpuTimes",
    "ProcessTime",
    "SimulatedMachine",
    "capabilities_path",
    "gpu_times",
    "is_as_made",
    "machine_path",
    "parse_spec",
    "read_machine",
    "reset_gpu",
]

MACHINE_VARIABLE: Final = "ALLOTMENT_SIMULATED_MACHINE"
"""Names the machine file to the libraries."""

SPEC_VARIABLE: Final = "ALLOTMENT_SIMULATED"
"""What `--simulated` says, for a whole shell."""

DEFAULT_PATH: Final = Path("/run/allotment/simulated/machine")
"""Where the libraries look when the variable is not set: a share's own mount."""

_FULL_HINT: Final = (
    f"it needs {-(-layout.MACHINE_RINGS_AT >> 20)} MiB: make room, or choose another state folder"
    " with --state or ALLOTMENT_STATE"
)
_TOUCHED_EVERY_S: Final = 3600.0
"""How often it is noted that a machine is used: the older ones are removed in time."""
_LOST: Final = "the GPU is lost (it has fallen off the bus)"
_YAML_SUFFIXES: Final = (".yaml", ".yml")


def parse_spec(spec: str) -> MachineDescription:
    """Parse the short form (`a100-80gb:2,t4`), or the YAML file that `spec` names.

    A file is meant by a name with a `/` or one that ends in `.yaml` or `.yml`. Raises `UsageError`.
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
    """Return the machine file for `spec` in a state folder, made if it is not there yet.

    Raises `UsageError` for a spec that cannot be meant, `StateError` if the file cannot be made.
    """
    description = parse_spec(spec)
    path = state_dir / "simulated" / identity(description) / "machine"
    try:
        unused_s = time.time() - path.stat().st_mtime
    except OSError:  # it is not there, or making it says why that cannot be told
        _make(path, pack(description), pack_mig(description))
    else:
        if unused_s > _TOUCHED_EVERY_S:
            with contextlib.suppress(OSError):  # another user's: whoever removes old ones is, too
                os.utime(path)
    return path


def is_as_made(path: Path) -> bool:
    """Tell whether a machine has the cuts that it was made with, and no faults.

    One of another release, which nobody can tell of, is not. Raises `OSError`.
    """
    with path.open("rb") as file:
        described = file.read(layout.MACHINE_SIZE)
        file.seek(layout.FAULTS_AT)
        faults = file.read(layout.FAULTS_SIZE)
        file.seek(layout.MIG_AT)
        mig = file.read(layout.MACHINE_GPUS * layout.GPU_MIG_SIZE)
    return identity_of(described, mig) == path.parent.name and not any(faults)


def read_machine(path: Path) -> MachineFacts:
    """Read what a machine is; raise `StateError` for a file that is none."""
    try:
        with path.open("rb") as file:
            data = file.read(layout.MACHINE_SIZE)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise StateError(
            f"cannot read the simulated machine {path}: {error.strerror}",
            hint="make it again with --simulated, or unset ALLOTMENT_SIMULATED_MACHINE",
        ) from error
    try:
        facts = unpack(data)
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    if size < layout.MACHINE_FILE_BYTES:
        raise _damaged(path, f"it has {size} of {layout.MACHINE_FILE_BYTES} bytes")
    return facts


@dataclass(frozen=True, slots=True)
class ProcessTime:
    """What one process has had of a simulated GPU since it began; times in nanoseconds."""

    pid: int
    """As the process itself knows it."""

    lives: bool
    """Whether it still runs: rows of ended ones stay until others take their place."""

    busy_ns: int
    """Time in which at least one kernel of it ran."""

    copy_ns: int
    """Time that copy engines worked for it."""

    memory_bytes: int


@dataclass(frozen=True, slots=True)
class GpuTimes:
    """What a simulated GPU has done up to one moment."""

    now_ns: int
    """The moment, on the clock of `time.monotonic_ns`."""

    busy_ns: int
    """Time in which at least one kernel ran, of any process, since the machine began."""

    processes: tuple[ProcessTime, ...]


def gpu_times(machine: Path) -> dict[str, GpuTimes]:
    """Measure what each GPU of a machine has done, by UUID, exactly and at this moment.

    The truth that benches and tests compare with: the engine's own account. Raises `StateError`
    for a file that is no machine, or that has no room for one more process.
    """
    from allotment.devices import loading  # late: it names machines by this module

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
            raise _damaged(machine, os.strerror(-error))
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
    """Reset a GPU by its number, as `nvidia-smi --gpu-reset` does: a pending MIG mode is in force.

    All that is cut from it goes. Raises `BusyError` while somebody uses the GPU, or one that NVLink
    joins to it; `StateError` for a file that is no machine or a fault that is set.
    """
    from allotment.devices import loading  # late: it names machines by this module

    uuid = read_machine(machine).devices[gpu].uuid
    error = loading.simulated_library().allotSimulatedReset(os.fsencode(machine), gpu)
    if error == -errno.EBUSY:
        raise BusyError(
            f"GPU {uuid} cannot be reset: somebody uses it, or a GPU that NVLink joins to it",
            hint="end the programs that `allot ps` and `nvidia-smi` show on them",
        )
    if error != 0:
        raise StateError(f"GPU {uuid} cannot be reset: {os.strerror(-error)}")


def capabilities_path(machine: Path) -> Path:
    """Return what a simulated machine has for /proc/driver/nvidia/capabilities."""
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


class SimulatedMachine:
    """The devices of a machine file, as a `DeviceSource` that needs no NVML."""

    __slots__ = ("path",)

    def __init__(self, path: Path) -> None:
        self.path = path

    def inventory(self) -> Inventory:
        """Return the devices as described, and apart those that a fault keeps from answering."""
        from allotment.devices.faults import read_faults  # late: it reads machines by this module

        working: list[Device] = []
        problems: list[Problem] = []
        for device, faults in zip(self.devices(), read_faults(self.path), strict=True):
            if faults.lost:
                problems.append(Problem(device.index, device.uuid, _LOST, device))
            else:
                working.append(device)
        return Inventory(devices=tuple(working), problems=tuple(problems))

    def devices(self) -> tuple[Device, ...]:
        """Return all devices as described. One that is lost by a fault is still among them.

        One in MIG mode can be given to nobody as a whole, as with a real driver (`nvml`).
        """
        described = read_machine(self.path).devices
        return tuple(
            replace(device, mig=True, reserved_bytes=device.memory_bytes) if is_split else device
            for device, is_split in zip(described, _mig_modes(self.path), strict=False)
        )


def _mig_modes(path: Path) -> Iterator[bool]:
    """Yield for each GPU that a machine may have whether its MIG mode is on."""
    at, code = layout.GPU_MIG_FIELDS["enabled"]
    try:
        with path.open("rb") as file:
            file.seek(layout.MIG_AT)
            data = file.read(layout.MACHINE_GPUS * layout.GPU_MIG_SIZE)
    except OSError as error:
        raise _damaged(path, error.strerror or str(error)) from error
    for gpu in range(layout.MACHINE_GPUS):
        (is_enabled,) = struct.unpack_from(f"<{code}", data, gpu * layout.GPU_MIG_SIZE + at)
        yield bool(is_enabled)


def _make(path: Path, description: bytes, mig: bytes) -> None:
    import tempfile  # late: most starts find their machine made

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=".machine-", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(description)
                file.seek(layout.MIG_AT)
                file.write(mig)
                file.flush()
                os.posix_fallocate(file.fileno(), 0, layout.MACHINE_RINGS_AT)
                file.truncate(layout.MACHINE_FILE_BYTES)
                # Programs of any user run on it, as they do on /dev/nvidia0.
                os.fchmod(file.fileno(), 0o666)
            # Somebody else made the same machine meanwhile: theirs is as good.
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)
        finally:
            Path(temporary).unlink()
    except OSError as error:
        raise StateError(
            f"cannot make the simulated machine {path}: {error.strerror}",
            hint=_FULL_HINT
            if error.errno in {errno.ENOSPC, errno.EDQUOT}
            else "choose a writable state folder with --state or ALLOTMENT_STATE",
        ) from error


def _damaged(path: Path, problem: str) -> StateError:
    return StateError(
        f"{path} is no simulated machine: {problem}",
        hint=f"end the programs that use it, and remove it: rm -r {path.parent}",
    )

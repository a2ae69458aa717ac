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
import errno
import os
from pathlib import Path
from typing import Final

from allotment.devices import layout
from allotment.devices.descriptions import MachineDescription, parse_short, parse_yaml
from allotment.devices.packing import MachineFacts, identity, pack, unpack
from allotment.devices.sources import Inventory, Problem
from allotment.model.devices import Device
from allotment.model.errors import StateError, UsageError

__all__ = [
    "DEFAULT_PATH",
    "MACHINE_VARIABLE",
    "SPEC_VARIABLE",
    "SimulatedMachine",
    "machine_path",
    "parse_spec",
    "read_machine",
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
    if not path.exists():
        _make(path, pack(description))
    return path


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
        """Return all devices as described. One that is lost by a fault is still among them."""
        return read_machine(self.path).devices


def _make(path: Path, description: bytes) -> None:
    import tempfile  # late: most starts find their machine made

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=".machine-", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(description)
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

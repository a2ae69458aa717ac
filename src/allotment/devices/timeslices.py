# SPDX-License-Identifier: Apache-2.0
"""How long the turns are that a driver gives the processes of one GPU, one after the other.

It is the GPU's setting, for all of its processes, and stays until it is made another or the driver
is loaded again. NVIDIA names four lengths and tells no figures (`nvidia-smi compute-policy --help`:
DEFAULT 0, SHORT 1, MEDIUM 2, LONG 3); NVML has no call for it. Simulated GPUs have figures of their
own: a longer name is a longer turn, which is all that may be relied on.
"""

import fcntl
import os
import struct
import subprocess
from enum import StrEnum
from pathlib import Path
from typing import Final

from allotment.devices import layout
from allotment.devices.simulated import read_machine
from allotment.model.errors import (
    NoDevicesError,
    NotFoundError,
    PrerequisiteError,
    StateError,
    UsageError,
)

__all__ = ["TimeSlice", "parse_time_slice", "set_time_slice", "simulated_slice_us"]

_PATIENCE_S: Final = 30.0


class TimeSlice(StrEnum):
    """The lengths that there are."""

    DEFAULT = "default"
    SHORT = "short"
    MEDIUM = "medium"
    LONG = "long"


_NUMBERS: Final = {each: number for number, each in enumerate(TimeSlice)}
# Of the machine's own: 2 ms unless its description says another.
_PARTS: Final = {
    TimeSlice.DEFAULT: (1, 1),
    TimeSlice.SHORT: (1, 2),
    TimeSlice.MEDIUM: (2, 1),
    TimeSlice.LONG: (4, 1),
}


def parse_time_slice(text: str) -> TimeSlice:
    """Parse a length as people write it; raise `UsageError`."""
    try:
        return TimeSlice(text.strip().lower())
    except ValueError:
        raise UsageError(
            f"{text!r} is not the length of a time slice",
            hint=f"the lengths are: {', '.join(TimeSlice)}",
        ) from None


def set_time_slice(
    uuid: str,
    length: TimeSlice,
    *,
    machine: Path | None = None,
    command: tuple[str, ...] = ("nvidia-smi",),
) -> None:
    """Set the length of a GPU's turns: of a simulated machine (its file) or of this computer.

    `command` is how nvidia-smi is run (`chroot /driver-root nvidia-smi`). It may take seconds, and
    does not wait for ever. Raises `NotFoundError`, `PrerequisiteError` (no nvidia-smi, or one or a
    GPU that cannot), `NoDevicesError` (the driver does not answer) or `StateError`.
    """
    if machine is not None:
        _set_simulated(machine, uuid, length)
        return
    words = [*command, "compute-policy", "-i", uuid, f"--set-timeslice={_NUMBERS[length]}"]
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_PATIENCE_S,
        )
    except FileNotFoundError as error:
        raise PrerequisiteError(
            f"{command[0]} is not here, and nothing else sets the length of {uuid}'s time slices",
            hint="install the driver's tools, or leave the length at default",
        ) from error
    except subprocess.TimeoutExpired as error:
        raise NoDevicesError(
            f"nvidia-smi has not set the time slice of {uuid} within {_PATIENCE_S:.0f} s",
            hint="see whether the driver answers: nvidia-smi",
        ) from error
    if done.returncode != 0:
        said = " ".join(f"{done.stdout} {done.stderr}".split())[:300]
        raise PrerequisiteError(
            f"nvidia-smi does not set the time slice of {uuid} to {length}: {said}",
            hint="it takes a Volta or newer GPU, and root; leave the length at default elsewhere",
        )


def simulated_slice_us(machine: Path, uuid: str) -> int:
    """Return how long the turns of a simulated GPU are, in microseconds."""
    own, _ = _place_of(machine, uuid)
    with machine.open("rb") as file:
        file.seek(own)
        (slice_us,) = struct.unpack("<I", file.read(4))
    return int(slice_us) or read_machine(machine).timeslice_us


def _set_simulated(machine: Path, uuid: str, length: TimeSlice) -> None:
    at, whole_us = _place_of(machine, uuid)
    times, parts = _PARTS[length]
    slice_us = 0 if length is TimeSlice.DEFAULT else max(1, whole_us * times // parts)
    try:
        descriptor = os.open(machine, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # as faults are: one writer at a time
            os.pwrite(descriptor, struct.pack("<I", slice_us), at)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StateError(
            f"cannot change the simulated machine {machine}: {error.strerror}",
            hint="run as a user who may write it",
        ) from error


def _place_of(machine: Path, uuid: str) -> tuple[int, int]:
    """Return where a GPU's own length is in the file, and the machine's, in microseconds."""
    facts = read_machine(machine)
    for number, device in enumerate(facts.devices):
        if device.uuid == uuid:
            offset, _ = layout.GPU_FIELDS["timeslice_us"]
            gpus, _ = layout.MACHINE_FIELDS["gpus"]
            return gpus + number * layout.GPU_SIZE + offset, facts.timeslice_us
    raise NotFoundError(
        f"GPU {uuid} is not one of the simulated machine {machine}", hint="see `allot devices`"
    )

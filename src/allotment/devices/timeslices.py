# SPDX-License-Identifier: Apache-2.0
"""Length of the turns that a driver gives the processes of one GPU.

The setting applies to all processes of the GPU, until it is changed or the driver reloads. NVIDIA
has four lengths without figures (`nvidia-smi compute-policy --help`: DEFAULT 0, SHORT 1, MEDIUM 2,
LONG 3). Simulated GPUs have figures of their own; rely only on their order.
"""

import os
import subprocess
from enum import StrEnum
from pathlib import Path
from typing import Final

from allotment.devices import loading
from allotment.devices.packing import damaged_machine, read_machine
from allotment.model.errors import (
    NoDevicesError,
    NotFoundError,
    PrerequisiteError,
)

_PATIENCE_S: Final = 30.0


class TimeSlice(StrEnum):
    """The available lengths."""

    DEFAULT = "default"
    SHORT = "short"
    MEDIUM = "medium"
    LONG = "long"


def set_time_slice(
    uuid: str,
    length: TimeSlice,
    *,
    machine: Path | None = None,
    command: tuple[str, ...] = ("nvidia-smi",),
) -> None:
    """Set the length of a GPU's turns, on a simulated machine (its file) or this computer.

    `command` runs nvidia-smi (`chroot /driver-root nvidia-smi`), within a time limit of seconds.
    Raises `NotFoundError`, `PrerequisiteError` (nvidia-smi is missing, or it or the GPU lacks
    support), `NoDevicesError` (the driver does not answer) or `StateError`.
    """
    if machine is not None:
        _set_simulated(machine, uuid, length)
        return
    words = [
        *command,
        "compute-policy",
        "-i",
        uuid,
        f"--set-timeslice={list(TimeSlice).index(length)}",
    ]
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
            f"{command[0]} is missing; it is needed to set the length of {uuid}'s time slices",
            hint="install the driver's tools, or keep the default length",
        ) from error
    except subprocess.TimeoutExpired as error:
        raise NoDevicesError(
            f"nvidia-smi did not set the time slice of {uuid} within {_PATIENCE_S:.0f} s",
            hint="check that the driver answers: nvidia-smi",
        ) from error
    if done.returncode != 0:
        answer = " ".join(f"{done.stdout} {done.stderr}".split())[:300]
        raise PrerequisiteError(
            f"nvidia-smi failed to set the time slice of {uuid} to {length}: {answer}",
            hint="it needs root and a Volta or newer GPU; otherwise keep the default length",
        )


def _set_simulated(machine: Path, uuid: str, length: TimeSlice) -> None:
    uuids = [device.uuid for device in read_machine(machine).devices]
    if uuid not in uuids:
        raise NotFoundError(
            f"GPU {uuid} is not one of the simulated machine {machine}", hint="see `allot devices`"
        )
    error = loading.simulated_library().allotSimulatedSetTimeslice(
        os.fsencode(machine), uuids.index(uuid), list(TimeSlice).index(length)
    )
    if error != 0:
        raise damaged_machine(machine, os.strerror(-error))

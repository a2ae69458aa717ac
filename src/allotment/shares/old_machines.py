# SPDX-License-Identifier: Apache-2.0
"""Removes unused simulated machines when another one is created.

A machine is named by its description and can be created from it again. It costs some megabytes, in
memory if the state folder is below /run. It is removed after days without use, if no program is on
it and it has no share, slice, fault or mode. In doubt it stays.
"""

import fcntl
import os
import shutil
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from allotment.devices import layout
from allotment.devices.compute_modes import ComputeMode, GpuSettings
from allotment.devices.packing import read_machine
from allotment.devices.simulated import is_as_made
from allotment.model.errors import AllotError
from allotment.modes.mig.journal import Journal
from allotment.shares import mps_daemons
from allotment.shares.folders import StateFolder
from allotment.shares.mode_policy import read_mode_policies
from allotment.shares.recovery import list_shares

_UNUSED_S: Final = 3 * 86_400.0
"""A shell prepared by `allot env` may be idle over a week-end, and needs its GPUs after it. Files'
times may be a day behind (mount(8), relatime)."""
_PROC: Final = Path("/proc")


def remove_old_machines(folder: StateFolder) -> list[Path]:
    """Remove the unused machines of a state folder; return their files.

    Reads only the times of files while none is old. Unreadable machines and other users' stay.
    """
    removed = []
    for path in sorted(folder.simulated.glob("*/machine")):
        with suppress(OSError, AllotError):
            if _is_old(path) and not _is_in_use(folder, path) and _remove(folder, path):
                removed.append(path)
    return removed


def _is_old(path: Path) -> bool:
    status = path.stat()
    unused_s = time.time() - max(status.st_atime, status.st_mtime)
    return status.st_uid == os.geteuid() and unused_s > _UNUSED_S


def _is_in_use(folder: StateFolder, path: Path) -> bool:
    """Whether it has state that a new one would lack, or a program is on it."""
    if not is_as_made(path) or _has_shares(folder, path):
        return True
    policies = read_mode_policies(folder)
    for device in read_machine(path).devices:
        journal = Journal(folder.mig / device.uuid)
        if device.uuid in policies or journal.is_switched or journal.read().records:
            return True
        if mps_daemons.place_of(folder, device.uuid).is_owned():
            return True
        if GpuSettings(device.uuid, machine=path).compute_mode() is not ComputeMode.DEFAULT:
            return True
    return _is_mapped(path)


def _has_shares(folder: StateFolder, path: Path) -> bool:
    return any(
        loaded.share is None or loaded.share.machine == str(path) for loaded in list_shares(folder)
    )


def _is_mapped(path: Path) -> bool:
    """Whether a process whose maps are readable has it mapped."""
    mark = f" {path.stat().st_ino} "
    for process in _PROC.iterdir():
        if process.name.isdecimal() and int(process.name) != os.getpid():
            with suppress(OSError):
                if mark in (process / "maps").read_text("utf-8", errors="replace"):
                    return True
    return False


def _remove(folder: StateFolder, path: Path) -> bool:
    """Remove a machine if no program can be on it; return if it is removed.

    Programs on the machine lock a byte of the file, and processes that cut a GPU another one
    (native/simulated/engine/state.h, mig.c). A share is created under the folder's lock, after a
    change of the file's time: so a later time means a later user.
    """
    with folder.locked(), path.open("r+b") as file:
        lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, layout.PROCESS_LOCK_BASE, 0, 0)
        try:
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, lock)
        except BlockingIOError:
            return False
        # Not the time of reading: this process has read it since.
        if time.time() - path.stat().st_mtime <= _UNUSED_S or _has_shares(folder, path):
            return False
        aside = path.parent.with_name(f".{path.parent.name}-{os.urandom(6).hex()}")
        path.parent.rename(aside)
        shutil.rmtree(aside)
    return True

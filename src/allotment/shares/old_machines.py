# SPDX-License-Identifier: Apache-2.0
"""Simulated machines that nobody needs any more are removed by whoever makes another one.

A machine is named by its description, and made again from that when somebody asks for it. So one
that is as it was made is no loss; it costs some megabytes, in memory where the state folder is
below /run. It goes when nobody has named or read it for days, no program is on it, and nothing was
done to it that the next one would not have: no share, no slice, no fault, no mode. What cannot be
told for sure stays.
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
from allotment.devices.simulated import is_as_made, read_machine
from allotment.model.errors import AllotError
from allotment.modes.mig.journal import Journal
from allotment.shares import lives, mps_daemons
from allotment.shares.folders import StateFolder
from allotment.shares.modes_of_gpus import read_allowed

__all__ = ["remove_old_machines"]

_UNUSED_S: Final = 3 * 86_400.0
"""A shell that `allot env` set up may be left over a week-end, and is to find its GPUs there. The
times of files may be a day behind (mount(8), relatime)."""
_PROC: Final = Path("/proc")


def remove_old_machines(folder: StateFolder) -> list[Path]:
    """Remove the machines of a state folder that nobody needs; return their files.

    Looks at each machine's file and at little else while none is old. What cannot be asked, or is
    another user's, stays.
    """
    removed = []
    for path in sorted(folder.simulated.glob("*/machine")):
        with suppress(OSError, AllotError):
            if _is_old(path) and not _is_wanted(folder, path) and _remove(folder, path):
                removed.append(path)
    return removed


def _is_old(path: Path) -> bool:
    status = path.stat()
    unused_s = time.time() - max(status.st_atime, status.st_mtime)
    return status.st_uid == os.geteuid() and unused_s > _UNUSED_S


def _is_wanted(folder: StateFolder, path: Path) -> bool:
    """Tell whether anything would be missed, or anybody is on it."""
    if not is_as_made(path) or _has_shares(folder, path):
        return True
    said = read_allowed(folder)
    for device in read_machine(path).devices:
        journal = Journal(folder.mig / device.uuid)
        if device.uuid in said or journal.is_switched or journal.read().records:
            return True
        if mps_daemons.place_of(folder, device.uuid).is_owned():
            return True
        if GpuSettings(device.uuid, machine=path).compute_mode() is not ComputeMode.DEFAULT:
            return True
    return _is_mapped(path)


def _has_shares(folder: StateFolder, path: Path) -> bool:
    return any(each.share is None or each.share.machine == str(path) for each in lives.look(folder))


def _is_mapped(path: Path) -> bool:
    """Tell whether any process that can be looked into has it open as memory."""
    mark = f" {path.stat().st_ino} "
    for each in _PROC.iterdir():
        if each.name.isdecimal() and int(each.name) != os.getpid():
            with suppress(OSError):
                if mark in (each / "maps").read_text("utf-8", errors="replace"):
                    return True
    return False


def _remove(folder: StateFolder, path: Path) -> bool:
    """Remove a machine while nobody can come to it; tell whether that could be.

    Programs hold a lock on a byte of the file for as long as they are on the machine, and whoever
    cuts a GPU on another (native/simulated/engine/state.h, mig.c). Shares are made under the
    folder's lock, by who has named the machine before: it is theirs who did since it was found old.
    """
    with folder.locked(), path.open("r+b") as file:
        lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, layout.PROCESS_LOCK_BASE, 0, 0)
        try:
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, lock)
        except BlockingIOError:
            return False
        # Not the time of reading: it is this process that has read it since.
        if time.time() - path.stat().st_mtime <= _UNUSED_S or _has_shares(folder, path):
            return False
        aside = path.parent.with_name(f".{path.parent.name}-{os.urandom(6).hex()}")
        path.parent.rename(aside)
        shutil.rmtree(aside)
    return True

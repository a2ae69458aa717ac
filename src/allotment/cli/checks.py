# SPDX-License-Identifier: Apache-2.0
"""The checks of `allot doctor`: each looks at one prerequisite, and knows the fix when it lacks."""

import ctypes
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

from allotment.ledger import read_contract, read_leases
from allotment.libraries import LEDGER, SHIM, SIMULATED_CUDA, SIMULATED_NVML, library_path
from allotment.model.errors import AllotError, LedgerError
from allotment.model.formats import format_count
from allotment.model.requests import MPS
from allotment.modes.mps import DaemonState, MpsStatus
from allotment.shares.folders import RUN_FOLDER, StateFolder, shared_folder_command
from allotment.shares.lives import look
from allotment.shares.mps_daemons import place_of, statuses
from allotment.shares.namespaces import PRELOAD_FILE, can_unshare

__all__ = ["Finding", "Outcome", "examine"]

_OLDEST_GLIBC = (2, 17)
_TIMEOUT_S = 20


class Outcome(StrEnum):
    """What a check found."""

    OK = "ok"
    NOTE = "note"
    """It works, but not at its best, or not for everything."""
    MISSING = "missing"
    """Allotment does not work without it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One prerequisite.

    `fix` is empty where there is nothing to do; of one that is there, it says what more could be
    had.
    """

    name: str
    outcome: Outcome
    detail: str
    fix: str = ""


def examine(folder: StateFolder) -> Iterator[Finding]:
    """Look at everything that Allotment needs of this machine, the indispensable first."""
    checks: tuple[Callable[[StateFolder], Iterator[Finding]], ...] = (
        _system,
        _libraries,
        _state,
        _turns,
        _mps,
        _injection,
        _driver,
        _mig,
        _containers,
    )
    for check in checks:
        yield from check(folder)


def _system(folder: StateFolder) -> Iterator[Finding]:
    del folder
    name, text = platform.libc_ver()
    version = tuple(int(part) for part in text.split(".")[:2] if part.isdecimal())
    if name == "glibc" and version >= _OLDEST_GLIBC:
        yield Finding("C library", Outcome.OK, f"glibc {text}")
    else:
        yield Finding(
            "C library",
            Outcome.MISSING,
            f"{name or 'not glibc'} {text}".strip(),
            "use a system with glibc 2.17 or later: the shim cannot enter programs of another libc",
        )
    machine = os.uname().machine
    if machine in {"x86_64", "aarch64"}:
        yield Finding("processor", Outcome.OK, machine)
    else:
        yield Finding("processor", Outcome.MISSING, machine, "use an x86-64 or arm64 machine")


def _libraries(folder: StateFolder) -> Iterator[Finding]:
    del folder
    for name in (LEDGER, SHIM, SIMULATED_CUDA, SIMULATED_NVML):
        try:
            path = library_path(name)
        except AllotError as error:
            yield Finding(name, Outcome.MISSING, error.message, error.hint or "")
            continue
        complaint = _load(path)
        if complaint:
            fix = "build it anew: `make native` in a clone, or reinstall the wheel"
            yield Finding(name, Outcome.MISSING, f"{path} cannot be loaded: {complaint}", fix)
        else:
            yield Finding(name, Outcome.OK, str(path))


def _load(path: Path) -> str:
    """Let a process of its own load a library; return what the loader says against it."""
    done = subprocess.run(
        ["/bin/true"],
        env={"LD_PRELOAD": str(path), "LD_BIND_NOW": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIMEOUT_S,
    )
    return done.stderr.strip() or ("" if done.returncode == 0 else f"status {done.returncode}")


def _state(folder: StateFolder) -> Iterator[Finding]:
    root = folder.root
    try:
        folder.prepare()
        with folder.locked():
            pass
    except AllotError as error:
        yield Finding("state folder", Outcome.MISSING, error.message, error.hint or "")
        return
    status = root.stat()
    mode = f"{root}, mode {status.st_mode & 0o7777:04o}"
    if status.st_mode & 0o002:
        yield Finding("state folder", Outcome.OK, f"{mode}, shared by all users")
    elif root == RUN_FOLDER:
        folders = "{shares,devices,shim,simulated,simulated/lib}"
        fix = f"to let all users share its GPUs: chmod 1777 {root} {root}/{folders}"
        if any(folder.devices.iterdir()):
            fix += f"; chmod 666 {folder.devices}/*/*"
        yield Finding("state folder", Outcome.OK, f"{mode}, root's alone", fix)
    else:
        yield Finding(
            "state folder",
            Outcome.NOTE,
            f"{mode}: shares of other folders are not seen, so a GPU may be given out twice",
            f"to share GPUs among users, let root make it: {shared_folder_command(RUN_FOLDER)}",
        )
    if os.statvfs(root).f_flag & os.ST_NOEXEC and not can_unshare():
        yield Finding(
            "state folder: noexec",
            Outcome.MISSING,
            f"{root} is on a file system without execution, so no shim can be loaded from there",
            "choose another folder with --state or ALLOTMENT_STATE",
        )


def _turns(folder: StateFolder) -> Iterator[Finding]:
    """Look at the contracts of the devices: what is promised of their time."""
    try:
        contracts = sorted(folder.devices.glob("[!.]*/contract"))
    except OSError:
        contracts = []
    governed = 0
    for path in contracts:
        try:
            contract = read_contract(path)
            read_leases(path.with_name("leases"))
        except LedgerError as error:
            name = f"turns on GPU {path.parent.name}"
            yield Finding(name, Outcome.NOTE, error.message, error.hint or "")
            continue
        governed += contract.is_governed
    said = []
    if governed:
        said.append(f"shares take turns as they were promised compute; GPUs: {governed}")
    if by_driver := _held_by_mps(folder):
        said.append(f"MPS holds shares to their part of the multiprocessors; GPUs: {by_driver}")
    detail = "; ".join(said) or "no share asks for compute: nobody takes turns"
    yield Finding("compute", Outcome.OK, detail)


def _held_by_mps(folder: StateFolder) -> int:
    """Return on how many GPUs a share of mode mps asks for compute: nobody takes turns there."""
    return len(
        {
            device.uuid
            for each in look(folder)
            if each.mode == MPS and each.share
            for device in each.share.devices
            if device.compute.is_governed
        }
    )


def _mps(folder: StateFolder) -> Iterator[Finding]:
    """Look at the control daemons of GPUs that shares have used by MPS."""
    for uuid, status in statuses(folder).items():
        name = f"MPS on GPU {uuid}"
        log = f"see {place_of(folder, uuid).root}/events.log"
        if status.state is DaemonState.FAILED:
            yield Finding(name, Outcome.NOTE, status.problem, status.hint or log)
            continue
        detail = str(status.state)
        if status.restarts:
            detail += f", started again {format_count(status.restarts, 'time')}"
        for loss in status.losses[-1:]:
            when = datetime.fromtimestamp(loss.time, UTC).isoformat(timespec="seconds")
            detail += f"; at {when} {loss.reason}, and programs of these shares lost what they had"
            detail += f" there: {', '.join(loss.shares) or 'none'}"
        if status.daemon is not None:
            detail += f"; {_protocol(status)}"
        is_well = status.state is not DaemonState.FAULTED and not status.losses
        if status.daemon is not None and not status.is_exclusive:
            detail += "; the GPU is not kept for MPS clients: a program can go round the daemon"
            is_well = False
        yield Finding(name, Outcome.OK if is_well else Outcome.NOTE, detail, "" if is_well else log)


def _protocol(status: MpsStatus) -> str:
    if status.has_namespaces:
        return "the daemon holds each share to its part (MPS v3)"
    why = f"; no v3: {status.older_because}" if status.older_because else ""
    return f"parts are told to each program (MPS v2{why})"


def _injection(folder: StateFolder) -> Iterator[Finding]:
    del folder
    if not can_unshare():
        yield Finding(
            "mount namespace",
            Outcome.NOTE,
            "no CAP_SYS_ADMIN: limits go by the environment, and what scrubs its environment"
            " escapes (`allot ps` shows it as not enforced where the driver tells)",
            "run `allot run` as root",
        )
        return
    complaint = _try_namespace()
    if complaint:
        yield Finding(
            "mount namespace",
            Outcome.NOTE,
            f"{complaint}: limits go by the environment",
            "in a container: start it with --cap-add SYS_ADMIN and a seccomp profile that allows"
            " mount",
        )
    else:
        yield Finding("mount namespace", Outcome.OK, "limits hold for scrubbed environments too")
    yield _preload_file()


def _try_namespace() -> str:
    """Let a child leave for a mount namespace; return why it could not."""
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "slave", "true"],
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIMEOUT_S,
    )
    return done.stderr.strip()


def _preload_file() -> Finding:
    path = Path(PRELOAD_FILE)
    if path.exists():
        others = path.read_text(errors="replace").split()
        detail = f"names {' '.join(others)}, which stay preloaded" if others else "there, and empty"
        return Finding(PRELOAD_FILE, Outcome.OK, detail)
    if os.access(path.parent, os.W_OK):
        return Finding(PRELOAD_FILE, Outcome.OK, "not there; the first `allot run` makes it, empty")
    fix = f"make an empty one: touch {path}"
    return Finding(PRELOAD_FILE, Outcome.NOTE, "not there, and cannot be made", fix)


def _driver(folder: StateFolder) -> Iterator[Finding]:
    del folder
    simulated = "needed for real GPUs only; simulated ones work: --simulated a100-80gb"
    install = "install NVIDIA's driver (nvidia.com/drivers, or the distribution's package)"
    try:
        ctypes.CDLL("libcuda.so.1")
        yield Finding("CUDA driver", Outcome.OK, "libcuda.so.1 loads")
    except OSError as error:
        yield Finding("CUDA driver", Outcome.NOTE, f"{error}; {simulated}", install)
    from allotment.cli.machines import real_inventory

    try:
        inventory = real_inventory()
    except AllotError as error:
        yield Finding("NVML", Outcome.NOTE, f"{error.message}; {simulated}", install)
        return
    names = ", ".join(device.name for device in inventory.devices) or "no GPU"
    yield Finding("NVML", Outcome.OK, f"{format_count(len(inventory.devices), 'GPU')}: {names}")
    for problem in inventory.problems:
        fix = "see the kernel's log (dmesg | grep -i xid); reset or replace the GPU"
        name = problem.uuid or f"number {problem.index}"
        yield Finding(f"GPU {name}", Outcome.NOTE, problem.message, fix)


def _mig(folder: StateFolder) -> Iterator[Finding]:
    """Look at GPUs in MIG mode, or on their way there: real ones, and those of known machines."""
    from allotment.cli.machines import known_machines
    from allotment.cli.mig_rows import mig_complaints

    for complaint in mig_complaints(folder, known_machines(folder)):
        yield Finding(complaint.name, Outcome.NOTE, complaint.detail, complaint.fix)


def _containers(folder: StateFolder) -> Iterator[Finding]:
    del folder
    runtimes = [name for name in ("docker", "podman") if shutil.which(name)]
    folders = [path for path in ("/etc/cdi", "/var/run/cdi") if Path(path).is_dir()]
    if not runtimes:
        yield Finding(
            "containers",
            Outcome.NOTE,
            "neither docker nor podman is here; needed for `allot cdi` only",
            "install Docker 28.3 or later (earlier: enable its feature `cdi`), or Podman",
        )
        return
    where = ", ".join(folders) or "made by the first `allot cdi create`"
    yield Finding("containers", Outcome.OK, f"{', '.join(runtimes)}; CDI folders: {where}")

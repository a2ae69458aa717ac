# SPDX-License-Identifier: Apache-2.0
"""The driver's checkpoint calls: move a process's GPU memory to the host, and back.

    with Checkpoints() as driver:                # the driver of this computer
    with Checkpoints(machine=path) as driver:    # a simulated machine's
        driver.lock(pid, timeout_ms=5000)
        driver.checkpoint(pid)

A child process loads the driver's library, so a hanging call can be abandoned. It reads a line per
call (`lock 4711 5000`) and answers with one (`600 CUDA_ERROR_NOT_READY 0`).
"""

# cuda.h of CUDA 12.8, "CUDA Checkpointing": drivers from 570 on, Linux; pids as the caller sees
# them. NVIDIA/cuda-checkpoint: x86-64 only (issue 51). Processes with managed or IPC memory may not
# survive it (README, of 570), nor one whose restore finds no room (issue 44, seen with 580).

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import subprocess
import sys
from enum import IntEnum
from pathlib import Path
from typing import Final, Self

from allotment.devices.packing import MACHINE_VARIABLE
from allotment.libraries import SIMULATED_CUDA, library_path

_REAL: Final = "libcuda.so.1"
_SUCCESS: Final = 0
_NOT_INITIALIZED: Final = 3
_NOT_SUPPORTED: Final = 801
_MISSING: Final = -1  # no such library, or no such function in it
_SILENT: Final = -2  # no answer in time
_PATIENCE_S: Final = 300.0
"""For one call: moving tens of gigabytes takes tens of seconds."""
# Variables of a share or its shim: the child is in no share and sees all GPUs.
_NOT_FOR_THE_CHILD: Final = ("ALLOTMENT_SHARE", "CUDA_VISIBLE_DEVICES", "LD_PRELOAD")


class ProcessState(IntEnum):
    """CUprocessState."""

    RUNNING = 0
    LOCKED = 1
    CHECKPOINTED = 2
    FAILED = 3
    CHECKPOINTING = 4
    RESTORING = 5


class DriverRefusal(Exception):  # noqa: N818 - the driver's refusal is not our error
    """The driver refused the call; `code` is its CUresult."""

    def __init__(self, call: str, pid: int, code: int, name: str) -> None:
        super().__init__(call, pid, code, name)
        self.call = call
        self.pid = pid
        self.code = code
        self.name = name

    @property
    def is_unsupported(self) -> bool:
        """True if this driver has no checkpoints at all, or none for such a process."""
        return self.code in {_MISSING, _NOT_SUPPORTED}

    def __str__(self) -> str:
        result = self.name if self.code < 0 else f"{self.name} ({self.code})"
        return f"{self.call} of process {self.pid}: {result}"


class Checkpoints:
    """The checkpoint calls of one driver, while it is entered."""

    __slots__ = ("_child", "_machine")

    def __init__(self, *, machine: Path | None = None) -> None:
        self._machine = machine
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def state(self, pid: int) -> ProcessState:
        """The driver's state of a process. `DriverRefusal`: it does not use a GPU."""
        return ProcessState(self._ask("state", pid))

    def lock(self, pid: int, *, timeout_ms: int) -> None:
        """Wait for running work and block further calls; `DriverRefusal` (as `NOT_READY`).

        After a refusal the process continues.
        """
        self._ask("lock", pid, timeout_ms)

    def checkpoint(self, pid: int) -> None:
        """Move the GPU memory of a locked process to the host; raise `DriverRefusal`."""
        self._ask("checkpoint", pid)

    def restore(self, pid: int) -> None:
        """Move the memory back; the process stays locked. `DriverRefusal` (`OUT_OF_MEMORY`)."""
        self._ask("restore", pid)

    def unlock(self, pid: int) -> None:
        """Let a locked process continue; raise `DriverRefusal`."""
        self._ask("unlock", pid)

    def _ask(self, call: str, pid: int, argument: int = 0) -> int:
        child = self._child = self._child or self._start()
        if child.stdin is None or child.stdout is None:
            raise AssertionError
        try:
            child.stdin.write(b"%s %d %d\n" % (call.encode(), pid, argument))
            child.stdin.flush()
            ready, _, _ = select.select([child.stdout], [], [], _PATIENCE_S + argument / 1000)
            line = child.stdout.readline() if ready else b""
        except OSError:
            line = b""
        words = line.split()
        if len(words) != 3:  # noqa: PLR2004 - code, name, value
            silent = child.poll() is None
            self._end()
            failure = (
                "no answer" if silent else f"the driver's library ended with {child.returncode}"
            )
            raise DriverRefusal(call, pid, _SILENT, failure)
        code, value = int(words[0]), int(words[2])
        if code != _SUCCESS:
            raise DriverRefusal(call, pid, code, words[1].decode(errors="replace"))
        return value

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {
            name: value for name, value in os.environ.items() if name not in _NOT_FOR_THE_CHILD
        }
        library = _REAL
        if self._machine is not None:
            library = str(library_path(SIMULATED_CUDA))
            environment[MACHINE_VARIABLE] = str(self._machine)
        return subprocess.Popen(
            [sys.executable, "-m", __name__, library],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # the parent handles Ctrl-C
        )

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        if child.stdin is not None:
            child.stdin.close()  # end of input ends the child
        try:
            child.wait(1)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        if child.stdout is not None:
            child.stdout.close()


# ---- in the child ----


class _LockArguments(ctypes.Structure):
    """CUcheckpointLockArgs."""

    _fields_ = (
        ("timeout_ms", ctypes.c_uint),
        ("reserved0", ctypes.c_uint),
        ("reserved1", ctypes.c_uint64 * 7),
    )


def _call(library: ctypes.CDLL, call: str, pid: int, argument: int) -> tuple[int, int]:
    state = ctypes.c_int(0)
    try:
        match call:
            case "state":
                result = library.cuCheckpointProcessGetState(pid, ctypes.byref(state))
            case "lock":
                arguments = _LockArguments(timeout_ms=argument)
                result = library.cuCheckpointProcessLock(pid, ctypes.byref(arguments))
            case "checkpoint":
                result = library.cuCheckpointProcessCheckpoint(pid, None)
            case "restore":
                result = library.cuCheckpointProcessRestore(pid, None)
            case _:
                result = library.cuCheckpointProcessUnlock(pid, None)
    except AttributeError:
        return _MISSING, 0
    return int(result), state.value


def _name(library: ctypes.CDLL, code: int) -> str:
    text = ctypes.c_char_p()
    with contextlib.suppress(AttributeError):  # the number is reported in any case
        library.cuGetErrorName(code, ctypes.byref(text))
    return (text.value or b"").decode() or f"CUresult-{code}"


def _answer(library: ctypes.CDLL, call: str, pid: int, argument: int) -> str:
    code, value = _call(library, call, pid, argument)
    if code == _NOT_INITIALIZED and library.cuInit(0) == _SUCCESS:
        code, value = _call(library, call, pid, argument)
    if code == _MISSING:
        return f"{code} no-such-call-in-this-driver {value}"
    return f"{code} {_name(library, code)} {value}"


def _serve(library: str) -> None:
    try:
        loaded = ctypes.CDLL(library)
    except OSError:
        loaded = None
    for line in sys.stdin:
        call, pid, argument = line.split()
        if loaded is None:
            answer = f"{_MISSING} no-driver 0"
        else:
            answer = _answer(loaded, call, int(pid), int(argument))
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve(sys.argv[1])

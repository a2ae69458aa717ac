# SPDX-License-Identifier: Apache-2.0
"""Run a command inside a share, as if `allot` were not there.

The command stays in `allot`'s process group and session. So the terminal's own signals (Ctrl-C,
Ctrl-Z, a resized window, a hang-up) reach it directly, also in a pipeline, and an interactive shell
can take the terminal and give it back. What someone sends to `allot` itself is passed on; when the
command stops, `allot` stops with it, so that the user's shell gets the prompt. At the end `allot`
ends the way the command did.
"""

import errno
import os
import signal
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from allotment.model.errors import (
    CommandNotExecutableError,
    CommandNotFoundError,
    PrerequisiteError,
)

__all__ = [
    "Program",
    "SignalState",
    "adopt_orphans",
    "end_as",
    "find_program",
    "signals_held",
    "start",
    "wait",
]

_SI_KERNEL = 0x80  # <asm-generic/siginfo.h>: sent by the kernel, like the terminal's signals
_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
_UNBLOCKABLE = {signal.SIGKILL, signal.SIGSTOP}
# Faults of `allot` itself: they have to end it, not be passed on.
_OWN_FAULTS = {
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGTRAP,
    signal.SIGSYS,
    signal.SIGABRT,
}
_TERMINAL_STOPS = {signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}


@dataclass(frozen=True, slots=True)
class SignalState:
    """What this process was given of signals, and its child is to have."""

    mask: frozenset[signal.Signals | int]
    ignores_children: bool


@dataclass(frozen=True, slots=True)
class Program:
    """A command that is there: the file to execute, and the arguments as they were given."""

    path: str
    arguments: tuple[str, ...]


def find_program(arguments: Sequence[str], search_path: str | None) -> Program:
    """Find a command as a shell does, before anything is made for it.

    Raises `CommandNotFoundError` (127) or `CommandNotExecutableError` (126).
    """
    name = arguments[0]
    if "/" in name:
        candidates = [name]
    else:
        folders = (search_path if search_path is not None else os.defpath).split(os.pathsep)
        candidates = [os.path.join(folder, name) for folder in folders] if name else []  # noqa: PTH118 - empty is here
    present = ""
    for candidate in candidates:
        try:
            mode = os.stat(candidate).st_mode  # noqa: PTH116 - per candidate
        except OSError as error:
            if error.errno == errno.EACCES:
                present = present or candidate
            continue
        if stat.S_ISREG(mode) and os.access(candidate, os.X_OK):
            return Program(candidate, tuple(arguments))
        if "/" in name or not stat.S_ISDIR(mode):
            present = present or candidate
    if present:
        kind = "a folder" if Path(present).is_dir() else "not executable"
        raise CommandNotExecutableError(
            f"{present}: {kind}",
            hint=f"make it executable: chmod +x {present}" if kind != "a folder" else None,
        )
    hint = (
        "there is no such file: see its path, which counts from this folder unless it begins with /"
        if "/" in name
        else "no folder of PATH has it: correct its name, or write its path (./NAME in this folder)"
    )
    raise CommandNotFoundError(f"{name}: command not found", hint=hint)


@contextmanager
def signals_held() -> Iterator[SignalState]:
    """Let signals wait for `wait`, from before a child is started until its share has ended.

    Yields how it was before. A parent that ignores its children's end hands that down, and then
    nobody could wait for them: it is undone for as long.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _passed_on() | {signal.SIGCHLD})
    children = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield SignalState(frozenset(mask), children is signal.SIG_IGN)
    finally:
        signal.signal(signal.SIGCHLD, children)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def start(
    program: Program,
    environment: Mapping[str, str],
    *,
    signals: SignalState,
    prepare: Callable[[], None] | None = None,
) -> int:
    """Start a program in a child that calls `prepare` first; return the child's process id.

    The caller holds signals; the program gets them as they were before. Raises `PrerequisiteError`
    when `prepare` failed (nothing runs then), `CommandNotExecutableError` when the kernel would not
    execute the program.
    """
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        _become(program, environment, signals, prepare, write_end)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        report = pipe.read()
    if not report:
        return child
    os.waitpid(child, 0)
    stage, number, text = report.decode(errors="replace").split("\0", 2)
    if stage == "prepare":
        raise PrerequisiteError(
            f"no private mount namespace for the share: {text}",
            hint="use --inject environment, and see `allot doctor`",
        )
    hint = "its interpreter (first line) is not there" if int(number) == errno.ENOENT else None
    raise CommandNotExecutableError(f"{program.path}: {text}", hint=hint)


def _become(
    program: Program,
    environment: Mapping[str, str],
    signals: SignalState,
    prepare: Callable[[], None] | None,
    report: int,
) -> NoReturn:
    """Turn this child into the program; whatever fails is told through the pipe."""
    stage = "prepare"
    try:
        if prepare is not None:
            prepare()
        stage = "exec"
        # What Python set up for itself is not the program's.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        if signals.ignores_children:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, signals.mask)
        try:
            os.execve(program.path, program.arguments, environment)
        except OSError as error:
            if error.errno != errno.ENOEXEC:
                raise
            # A script whose first line names no interpreter is a shell's, as execvp(3) has it.
            shell = ("/bin/sh", program.path, *program.arguments[1:])
            os.execve(shell[0], shell, environment)
    except BaseException as error:  # noqa: BLE001 - a forked child must not live on as `allot`
        number = error.errno if isinstance(error, OSError) else 0
        text = _in_words(error) if isinstance(error, OSError) else repr(error)
        os.write(report, f"{stage}\0{number or 0}\0{text}".encode(errors="replace")[:4096])
    os._exit(127)


def _in_words(error: OSError) -> str:
    words = error.strerror or str(error)
    name = error.filename if isinstance(error.filename, str) else ""
    return f"{name}: {words}" if name else words


def wait(child: int, *, on_stop: Callable[[], None] = lambda: None) -> int:
    """Wait for the child to end, passing signals on; return its wait status.

    `on_stop` is called when the child was stopped, before this process stops along.
    """
    awaited = _passed_on() | {signal.SIGCHLD}
    while True:
        ended, status = os.waitpid(child, os.WNOHANG | os.WUNTRACED)
        if ended and not os.WIFSTOPPED(status):
            return status
        if ended:
            on_stop()
            _stop_along(child, os.WSTOPSIG(status))
            continue
        _reap_adopted(child)
        info = signal.sigwaitinfo(awaited)
        if info.si_signo != signal.SIGCHLD and not _came_to_both(child, info.si_code):
            _send(child, info.si_signo)


def adopt_orphans() -> None:
    """Become the parent of what the command leaves behind (daemons), instead of process 1.

    So whatever comes from the command is known to. A kernel that will not goes on without.
    """
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), *[ctypes.c_ulong(0)] * 3)


def _reap_adopted(child: int) -> None:
    """Let adopted processes that ended go; the child's own end is left for `wait`."""
    while True:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None or ended.si_pid == child:
            return
        os.waitpid(ended.si_pid, os.WNOHANG)


def _passed_on() -> set[signal.Signals]:
    return signal.valid_signals() - _UNBLOCKABLE - _OWN_FAULTS - {signal.SIGCHLD}


def _came_to_both(child: int, code: int) -> bool:
    """Tell whether a signal was the terminal's, for the group that the child is in too."""
    try:
        return code == _SI_KERNEL and os.getpgid(child) == os.getpgrp()
    except ProcessLookupError:
        return True


def _stop_along(child: int, number: int) -> None:
    """Stop as the child has, so that a shell sees its job stopped; go on together.

    A child that someone else stopped (a debugger, `kill -STOP`) is left to them.
    """
    if number not in _TERMINAL_STOPS and not _is_foreground():
        return
    os.kill(os.getpid(), signal.SIGSTOP)
    _send(child, signal.SIGCONT)


def _is_foreground() -> bool:
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _send(child: int, number: int) -> None:
    with suppress(ProcessLookupError):  # it has ended; the next waitpid tells how
        os.kill(child, number)


def end_as(status: int) -> NoReturn:
    """End this process the way a child ended: by the same exit status or the same signal.

    As process 1 of a container a signal may not end it: then by 128 and the signal's number.
    """
    if not os.WIFSIGNALED(status):
        os._exit(os.WEXITSTATUS(status))
    number = os.WTERMSIG(status)
    _leave_no_core()
    if number not in _UNBLOCKABLE:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    os._exit(128 + number)


def _leave_no_core() -> None:
    """The child's core, if any, is the one of interest."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))

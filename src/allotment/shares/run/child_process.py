# SPDX-License-Identifier: Apache-2.0
"""Run a command as if `allot` were not there.

The command stays in `allot`'s process group and session: the terminal's signals reach it directly,
and an interactive shell can take the terminal. Signals sent to `allot` are passed on. When the
command stops, `allot` stops too, so that the user's shell shows its prompt. `allot` ends the way
the command did.
"""

import errno
import os
import signal
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from pwd import getpwnam, getpwuid, struct_passwd
from time import monotonic
from typing import NoReturn

import msgspec

from allotment.model.errors import (
    CommandNotExecutableError,
    CommandNotFoundError,
    PrerequisiteError,
    UsageError,
)

_SI_KERNEL = 0x80  # <asm-generic/siginfo.h>: sent by the kernel, like the terminal's signals
_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
_UNBLOCKABLE = {signal.SIGKILL, signal.SIGSTOP}
# Faults of `allot` itself: these end it and are not passed on.
_OWN_FAULTS = {
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGTRAP,
    signal.SIGSYS,
    signal.SIGABRT,
}
_PASSED_ON = signal.valid_signals() - _UNBLOCKABLE - _OWN_FAULTS - {signal.SIGCHLD}
_LOOK_S = 5.0
_TERMINAL_STOPS = {signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}


class SignalState(msgspec.Struct, frozen=True):
    """The signal settings that this process inherited, and its child gets."""

    mask: frozenset[signal.Signals | int]
    ignores_children: bool


class Program(msgspec.Struct, frozen=True):
    """An existing command: the file to execute, and the arguments as given."""

    path: str
    arguments: tuple[str, ...]


def find_program(arguments: Sequence[str], search_path: str | None) -> Program:
    """Find a command as a shell does.

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
        "no such file: correct its path, which is relative to this folder unless it begins with /"
        if "/" in name
        else "no folder of PATH has it: correct its name, or write its path (./NAME in this folder)"
    )
    raise CommandNotFoundError(f"{name}: command not found", hint=hint)


def find_user(name: str) -> struct_passwd:
    """Find a user by name or number, to `start` a program as; root alone can."""
    if os.geteuid() != 0:
        raise PrerequisiteError(
            f"only root can run a command as another user ({name})",
            hint="run it with sudo, or leave out --user",
        )
    try:
        return getpwnam(name)
    except KeyError:
        pass
    try:
        return getpwuid(int(name))
    except (KeyError, ValueError, OverflowError):
        raise UsageError(
            f"--user: there is no user {name!r}", hint="see the users: getent passwd"
        ) from None


@contextmanager
def signals_held() -> Iterator[SignalState]:
    """Block signals for `wait`, from before a child is started until its share has ended.

    Yields the inherited settings. SIGCHLD may be inherited as ignored, and then no child could be
    waited for: meanwhile it is not.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON | {signal.SIGCHLD})
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
    user: struct_passwd | None = None,
) -> int:
    """Start a program in a child that calls `prepare` first; return the child's process id.

    The caller holds signals; the program gets the inherited ones. With `user` it is that user's,
    with none of root's capabilities. Raises `PrerequisiteError` if `prepare` failed or the user
    cannot be had (nothing runs then), `CommandNotExecutableError` if the kernel refuses the
    program.
    """
    if user is not None:
        environment = {
            **environment,
            "HOME": user.pw_dir,
            "USER": user.pw_name,
            "LOGNAME": user.pw_name,
        }
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        _become(program, environment, signals, prepare, user, write_end)
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
    if stage == "user":
        raise PrerequisiteError(
            f"cannot run a command as another user: {text}",
            hint="this needs the capabilities SETUID and SETGID, and the user's limit of processes",
        )
    hint = "its interpreter (first line) does not exist" if int(number) == errno.ENOENT else None
    raise CommandNotExecutableError(f"{program.path}: {text}", hint=hint)


def _become(
    program: Program,
    environment: Mapping[str, str],
    signals: SignalState,
    prepare: Callable[[], None] | None,
    user: struct_passwd | None,
    report: int,
) -> NoReturn:
    """Execute the program in this child; report a failure through the pipe."""
    stage = "prepare"
    try:
        if prepare is not None:
            prepare()
        stage = "user"
        if user is not None:
            os.initgroups(user.pw_name, user.pw_gid)
            os.setgid(user.pw_gid)
            os.setuid(user.pw_uid)
        stage = "exec"
        # Undo Python's own settings.
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
            # A script without an interpreter in its first line: use a shell, like execvp(3).
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


def wait(
    child: int,
    *,
    on_stop: Callable[[], None] = lambda: None,
    look: Callable[[], None] | None = None,
) -> int:
    """Wait for the child to end, passing signals on; return its wait status.

    Calls `on_stop` when the child was stopped, before this process stops too, and `look` at times.
    """
    awaited = _PASSED_ON | {signal.SIGCHLD}
    next_look = monotonic() + _LOOK_S
    while True:
        if monotonic() >= next_look:  # however many signals come
            if look is not None:
                look()
            next_look = monotonic() + _LOOK_S
        ended, status = os.waitpid(child, os.WNOHANG | os.WUNTRACED)
        if ended and not os.WIFSTOPPED(status):
            return status
        if ended:
            on_stop()
            _stop_along(child, os.WSTOPSIG(status))
            continue
        _reap_adopted(child)
        # Not for ever: another thread of this process may get SIGCHLD, which is nothing to it.
        info = signal.sigtimedwait(awaited, max(0.0, next_look - monotonic()))
        if info is None:
            continue
        if info.si_signo != signal.SIGCHLD and not _reached_child(child, info.si_code):
            _send(child, info.si_signo)


def adopt_orphans() -> None:
    """Become the parent of the command's orphans (daemons), instead of process 1.

    So all its descendants are known. Without support in the kernel, nothing changes.
    """
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), *[ctypes.c_ulong(0)] * 3)


def _reap_adopted(child: int) -> None:
    """Reap adopted processes; the child's own end is left for `wait`."""
    while True:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None or ended.si_pid == child:
            return
        os.waitpid(ended.si_pid, os.WNOHANG)


def _reached_child(child: int, code: int) -> bool:
    """Whether the terminal sent the signal, to the group that the child is in too."""
    try:
        return code == _SI_KERNEL and os.getpgid(child) == os.getpgrp()
    except ProcessLookupError:
        return True


def _stop_along(child: int, number: int) -> None:
    """Stop as the child did, so that a shell sees its job stopped; then continue both.

    A child stopped by a debugger or `kill -STOP` is left alone.
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
    with suppress(ProcessLookupError):  # it has ended; the next waitpid reports it
        os.kill(child, number)


def end_as(status: int) -> NoReturn:
    """End this process as a child ended: by the same exit status or signal.

    Process 1 of a container may survive the signal: then by 128 and the signal's number.
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

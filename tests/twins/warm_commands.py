# SPDX-License-Identifier: Apache-2.0
"""Runs `allot` without loading Python and its modules again for every command.

Nine tenths of a command's CPU time are imports. One server process has imported everything; each
command is a fork of it, with its own pid, environment, folder and standard streams. So a command
is a real process: what it locks, maps, kills or prints is what the installed `allot` does.

    with WarmCommands() as commands:
        done = commands.run(["ps"], env={...})          # like subprocess.run

Not for commands whose start is under test: the dynamic linker and the interpreter read their
variables (LD_*, PYTHON*) once, when the server starts.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import pkgutil
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn, Self

import msgspec

# The rooms of the commands that users call on one machine; the daemons' rooms stay unloaded.
_ROOMS: Final = ("model", "placement", "devices", "ledger", "modes", "shares", "burn")
_COMMANDS: Final = ("run", "ps", "top", "devices", "mig", "resize", "suspend", "resume", "rm",
                    "cdi", "env", "fault", "burn", "demo", "doctor", "completion")  # fmt: skip
_LATE: Final = ("rich.live", "rich.table", "rich.text", "yaml", "pynvml", "difflib", "uuid")
_INT: Final = struct.Struct("=i")
_LENGTH: Final = struct.Struct("=I")


class _Order(msgspec.Struct, frozen=True):
    arguments: list[str]
    environment: dict[str, str]
    folder: str


def can_be_warm(environment: Mapping[str, str]) -> bool:
    """Say whether none of the variables is one that only a new program reads."""
    return all(
        os.environ.get(name) == value
        for name, value in environment.items()
        if name.startswith(("LD_", "PYTHON", "COVERAGE", "_ALLOT"))
    )


class WarmCommands:
    """The server, and the way to run commands in it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="allot-warm-")
        self._address = str(Path(self._folder.name) / "socket")
        self._server: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.communicate(timeout=30)
        self._folder.cleanup()

    def run(
        self, arguments: Sequence[str], *, env: Mapping[str, str], stdin: str, timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """Run one command until it has ended and its output is closed."""
        with contextlib.ExitStack() as stack:
            source = stack.enter_context(tempfile.TemporaryFile())
            source.write(stdin.encode())
            source.seek(0)
            (out, out_end), (err, err_end) = os.pipe(), os.pipe()
            connection = stack.enter_context(self._connected())
            order = _Order(list(arguments), dict(env), str(Path.cwd()))
            body = msgspec.json.encode(order)
            streams = [source.fileno(), out_end, err_end]
            socket.send_fds(connection, [_LENGTH.pack(len(body))], streams)
            os.close(out_end)
            os.close(err_end)
            connection.sendall(body)
            outcome = _Outcome(connection.fileno(), out, err)
            stack.callback(os.close, out)
            stack.callback(os.close, err)
            if not outcome.collect(timeout_s):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(outcome.pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(
                    ["allot", *arguments], timeout_s, outcome.text(out), outcome.text(err)
                )
            return subprocess.CompletedProcess(
                ["allot", *arguments], outcome.returncode, outcome.text(out), outcome.text(err)
            )

    def _connected(self) -> socket.socket:
        if self._server is None:
            self._server = self._started()
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._address)
        return connection

    def _started(self) -> subprocess.Popen[bytes]:
        server = subprocess.Popen(
            [sys.executable, __file__, self._address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        server.stdout.close()
        return server


class _Outcome:
    """What one command printed, and how it ended."""

    def __init__(self, connection: int, out: int, err: int) -> None:
        self._read: dict[int, bytearray] = {
            connection: bytearray(),
            out: bytearray(),
            err: bytearray(),
        }
        self._connection = connection

    @property
    def pid(self) -> int:
        """The command's process."""
        return int(_INT.unpack_from(self._read[self._connection])[0])

    @property
    def returncode(self) -> int:
        """As subprocess has it: the exit code, or less than 0 for a signal."""
        return int(_INT.unpack_from(self._read[self._connection], _INT.size)[0])

    def text(self, stream: int) -> str:
        """What came of one stream."""
        return self._read[stream].decode()

    def collect(self, timeout_s: float) -> bool:
        """Read all streams to their end; False: there was not time enough."""
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            for stream in self._read:
                selector.register(stream, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                    data = os.read(key.fd, 1 << 16)
                    self._read[key.fd] += data
                    if not data:
                        selector.unregister(key.fd)
                if selector.get_map() and time.monotonic() >= deadline:
                    return False
        return True


# ---- in the server -------------------------------------------------------------------------------


def _load() -> None:
    for room in _ROOMS:
        package = importlib.import_module(f"allotment.{room}")
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(found.name)
    for name in _COMMANDS:
        importlib.import_module(f"allotment.cli.{name}")
    for name in _LATE:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def _serve(address: str) -> NoReturn:
    _load()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    os.write(1, b"ready\n")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    # Its standard input ends with the tests, however they end.
    while 0 not in select.select([listener.fileno(), 0], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _keep(connection)
        connection.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
    os._exit(0)


def _keep(connection: socket.socket) -> NoReturn:
    """Start one command, wait for it, and report how it ended."""
    head, streams, _, _ = socket.recv_fds(connection, _LENGTH.size, 3)
    with connection.makefile("rb") as source:
        order = msgspec.json.decode(source.read(_LENGTH.unpack(head)[0]), type=_Order)
    pid = os.fork()
    if pid == 0:
        connection.close()
        _become(order, streams)
    for stream in streams:
        os.close(stream)
    connection.sendall(_INT.pack(pid))
    _, status = os.waitpid(pid, 0)
    connection.sendall(_INT.pack(os.waitstatus_to_exitcode(status)))
    os._exit(0)


def _become(order: _Order, streams: Sequence[int]) -> NoReturn:
    """Be the command: its streams, folder and variables, then its main program."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(order.folder)
    os.environ.clear()
    os.environ.update(order.environment)
    sys.argv = ["allot", *order.arguments]
    from allotment.cli import main

    # Taking down what the fork has in common with the server would copy all of it first.
    try:
        main()
    except SystemExit as ending:
        atexit._run_exitfuncs()  # noqa: SLF001 - as Python does at its end
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ending.code if isinstance(ending.code, int) else 0)
    raise AssertionError


if __name__ == "__main__":
    _serve(sys.argv[1])

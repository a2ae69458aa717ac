# SPDX-License-Identifier: Apache-2.0
"""`nvidia-cuda-mps-control`: the driver's control daemon, by each of its protocols.

`Control` uses protocol version 2, which every driver with MPS has (nvidia-cuda-mps-control(1),
docs.nvidia.com/deploy/mps), `NamespaceControl` version 3. A silent daemon costs a few seconds.
"""

import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from allotment.model.errors import PrerequisiteError
from allotment.modes.mps.mode import Limits
from allotment.modes.mps.state import OLDER, WITH_NAMESPACES

PROGRAM: Final = "nvidia-cuda-mps-control"
_PATIENCE_S: Final = 5.0
_FAULT: Final = "FAULT"
_ACTIVE: Final = "ACTIVE"


class MpsUnreachableError(Exception):
    """The daemon does not answer as expected."""


class Control(msgspec.Struct, frozen=True):
    """The program, for the daemon of one pipe directory with one GPU."""

    pipes: Path
    logs: Path
    uuid: str
    program: str = PROGRAM
    environment: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Additional variables: a simulated machine's file."""
    patience_s: float = _PATIENCE_S
    """Limit for one answer."""

    def start(self) -> subprocess.Popen[bytes]:
        """Start the daemon in the foreground, as a child of this process in its own session.

        Root's daemon is for all users: otherwise a user's clients would wait until another user's
        programs have ended. Raises `PrerequisiteError`.
        """
        try:
            return subprocess.Popen(
                [self.program, "-f", *self._options()],
                env=self._variables(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise PrerequisiteError(
                f"{self.program}: the control daemon of MPS cannot be started: {error.strerror}",
                hint="install the driver's tools for it (on many systems a package named"
                " nvidia-compute-utils or cuda-mps), or use --mode soft",
            ) from error

    def daemons(self) -> tuple[int, ...]:
        """Return the process ids of daemons of this pipe directory, even if they do not answer.

        Reads /proc; only root may read other users' processes.
        """
        ours = f"CUDA_MPS_PIPE_DIRECTORY={self.pipes}".encode()
        name = Path(self.program).name.encode()
        pids = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_bytes().split(b"\0")
                # A script in the program's place comes after its interpreter.
                called = any(word.rpartition(b"/")[2] == name for word in words[:2])
                if not called or b"-f" not in words:
                    continue
                variables = (process / "environ").read_bytes().split(b"\0")
            except OSError:
                continue  # it has ended, or is another user's
            if ours in variables:
                pids.append(int(process.name))
        return tuple(pids)

    def offers_namespaces(self) -> bool:
        """Whether the program has protocol version 3, where the daemon itself enforces limits.

        Its help lists the modules of that version (NVIDIA's guide to limits by MPS checks this);
        before driver 615 it has neither option nor modules. Call it while no daemon runs: otherwise
        the program uses that daemon's version.
        """
        try:
            done = subprocess.run(
                [self.program, "-p", "3", "-h"],
                env=self._variables(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=self.patience_s,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        words = set(f"{done.stdout} {done.stderr}".replace(",", " ").split())
        return done.returncode == 0 and {"server", "namespace"} <= words

    def ask(self, command: str) -> str:
        """Give one command, and return the answer; raise `MpsUnreachableError`."""
        return self._run((), f"{command}\n", called=command)

    def answers(self) -> bool:
        """Whether the daemon answers a harmless command, as in NVIDIA's own check."""
        try:
            float(self.ask("get_default_active_thread_percentage"))
        except (MpsUnreachableError, ValueError):
            return False
        return True

    def servers(self) -> tuple[int, ...]:
        """Return the process ids of its servers; raise `MpsUnreachableError`."""
        return tuple(int(word) for word in self.ask("get_server_list").split() if word.isdecimal())

    def start_server(self) -> None:
        """Start a server of this user, so that the first client does not wait for one."""
        self.ask(f"start_server -uid {os.geteuid()}")

    def others(self) -> tuple[str, ...]:
        """Return the names of servers besides the shares': none with protocol 2."""
        return ()

    def hold_others(self) -> None:
        """Limit programs outside of the shares' parts: impossible with protocol 2."""

    def is_active(self, server: int) -> bool:
        """Whether a server takes clients; raise `MpsUnreachableError`."""
        return self.ask(f"get_server_status {server}") == _ACTIVE

    def is_faulted(self, server: int) -> bool:
        """Whether a client's fault keeps it from taking clients."""
        return self.ask(f"get_server_status {server}") == _FAULT

    def quit(self, within_s: int) -> None:
        """End the daemon after its clients, and by force after so many seconds."""
        self.ask(f"quit -t {within_s}")

    @property
    def protocol(self) -> int:
        """The version of the daemon that `start` starts."""
        return OLDER

    def _options(self) -> list[str]:
        return ["-multiuser-server"] if os.geteuid() == 0 else []

    def _run(self, words: Sequence[str], text: str = "", *, called: str) -> str:
        """Run the program with `text` as input; return its output. Raises `MpsUnreachableError`."""
        try:
            done = subprocess.run(
                [self.program, *words],
                env=self._variables(),
                input=text,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=self.patience_s,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise MpsUnreachableError(f"{called}: {error}") from error
        if done.returncode != 0:
            answer = " ".join(f"{done.stdout} {done.stderr}".split())
            raise MpsUnreachableError(f"{called}: {answer or f'status {done.returncode}'}")
        return done.stdout.strip()

    def _variables(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("CUDA_")}
        return {
            **kept,
            **self.environment,
            "CUDA_VISIBLE_DEVICES": self.uuid,
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipes),
            "CUDA_MPS_LOG_DIRECTORY": str(self.logs),
        }


_SERVER: Final = "shares"
_DEFAULT: Final = "default"
_TRIAL: Final = "allotment_trial"
"""Longer than a share's id, to detect a path that is too long."""
_TRIAL_LIMITS: Final = Limits(percentage=50, memory_mib=512, is_below_normal=True)
_MINIMUM: Final = Limits(percentage=1)
_READY: Final = "ready"
_FAULT_BY_NAMESPACES: Final = "fault"
_CSV: Final = "--format=csv,noheader"
_UNITS: Final = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class NamespaceControl(Control, frozen=True):
    """The program, for a daemon of protocol version 3."""

    @property
    def protocol(self) -> int:
        """The version of the daemon that `start` starts."""
        return WITH_NAMESPACES

    def answers(self) -> bool:
        """Whether the daemon answers a harmless command."""
        try:
            self._servers()
        except MpsUnreachableError:
            return False
        return True

    def servers(self) -> tuple[int, ...]:
        """Return the process id of the server; raise `MpsUnreachableError`."""
        return tuple(self._servers())

    def start_server(self) -> None:
        """Start the server, of this user, or for all users if that is root."""
        self._do("server", "create", _SERVER)
        self._do("server", "set", _SERVER, *_options_of(_MINIMUM))

    def others(self) -> tuple[str, ...]:
        """Return the names of servers besides ours; raise `MpsUnreachableError`.

        The daemon starts one without limits if a client connects while ours does not run.
        """
        return tuple(row[0] for row in self._rows() if row[0] != _SERVER)

    def hold_others(self) -> None:
        """Limit programs outside of the shares' namespaces to a minimum.

        Otherwise a program that sees the daemon's folder could use the whole GPU: in `default`, or
        in another server, which is ended with its clients. Raises `MpsUnreachableError`.
        """
        for name in self.others():
            self._do("server", "delete", name, "--force")
        options = _options_of(_MINIMUM)
        self._do("server", "set", _SERVER, *options)
        self._check(_DEFAULT, options)

    def is_active(self, server: int) -> bool:
        """Whether a server takes clients; raise `MpsUnreachableError`."""
        return self._servers().get(server) == _READY

    def is_faulted(self, server: int) -> bool:
        """Whether a client's fault keeps it from taking clients."""
        return _FAULT_BY_NAMESPACES in self._servers().get(server, "")

    def quit(self, within_s: int) -> None:
        """End the daemon with its servers and their clients, at once."""
        del within_s
        self._do("--quit")

    # ---- namespaces ------------------------------------------------------------------------------

    def namespaces(self) -> frozenset[str]:
        """Return the names of the created namespaces; raise `MpsUnreachableError`."""
        rows = self._do("namespace", "list", f"--server={_SERVER}", _CSV).splitlines()
        return frozenset(row.split(",")[0] for row in rows if row) - {_DEFAULT}

    def create(self, name: str) -> None:
        """Create a namespace without limits; raise `MpsUnreachableError`."""
        self._do("namespace", "create", name, f"--server={_SERVER}")

    def limit(self, name: str, limits: Limits) -> None:
        """Set a namespace's limits for new clients, and check them.

        Raises `MpsUnreachableError`.
        """
        options = _options_of(limits)
        self._do("namespace", "set", name, f"--server={_SERVER}", *options)
        self._check(name, options)

    def _check(self, name: str, options: Iterable[str]) -> None:
        for option in options:
            field, _, limit = option.removeprefix("--").partition("=")
            answer = self._do("namespace", "get", name, _SERVER, field)
            if _amount(answer) != _amount(limit):
                raise MpsUnreachableError(f"namespace {name}: {field} is {answer}, not {limit}")

    def delete(self, name: str) -> None:
        """Remove a namespace; raise `MpsUnreachableError`, also if it has clients."""
        self._do("namespace", "delete", name, f"--server={_SERVER}")

    def try_namespaces(self, scratch: Path) -> None:
        """Create a namespace, read it back, and remove it. Raises `MpsUnreachableError`.

        Checks that its socket is in the clients' folder and can be linked to `scratch`, and that
        programs outside of our namespaces can be limited.
        """
        self.hold_others()
        if _TRIAL in self.namespaces():
            self.delete(_TRIAL)
        self.create(_TRIAL)
        try:
            self.limit(_TRIAL, _TRIAL_LIMITS)
            answer = self._do("namespace", "get", _TRIAL, _SERVER, "pipe-directory")
            folder = folder_of(self.pipes, _TRIAL)
            if answer != str(folder):
                raise MpsUnreachableError(f"a namespace is at {answer}, not {folder}")
            scratch.unlink(missing_ok=True)
            os.link(folder / "control", scratch)
            scratch.unlink()
        except OSError as error:
            raise MpsUnreachableError(f"a namespace's socket: {error}") from error
        self.delete(_TRIAL)

    def _servers(self) -> dict[int, str]:
        """Return the status of our server by its process id, in small letters."""
        return {
            int(row[2]): row[3].strip().lower()
            for row in self._rows()
            if len(row) > 3 and row[0] == _SERVER and row[2].isdecimal()  # noqa: PLR2004
        }

    def _rows(self) -> list[list[str]]:
        """Return the daemon's row of each server."""
        rows = self._do("server", "list", _CSV).splitlines()
        return [row.split(",") for row in rows if row]

    def _do(self, *words: str) -> str:
        return self._run(words, called=" ".join(words))

    def _options(self) -> list[str]:
        return ["-p", "3", *(["--multiuser"] if os.geteuid() == 0 else [])]


def folder_of(pipes: Path, name: str) -> Path:
    """Return the pipe directory of a namespace's clients, for the daemon at `pipes`."""
    return pipes / _SERVER / name


def with_namespaces(control: Control) -> NamespaceControl:
    """Return the same program for a daemon of protocol version 3."""
    return NamespaceControl(
        control.pipes, control.logs, control.uuid, control.program, control.environment
    )


def _options_of(limits: Limits) -> tuple[str, ...]:
    options = [f"--client-priority={int(limits.is_below_normal)}"]
    if limits.percentage is not None:
        # Only whole numbers are documented.
        options.append(f"--active-thread-percentage={int(limits.percentage)}")
    if limits.memory_mib is not None:
        options.append(f"--pinned-memory-limit={limits.memory_mib}M")
    return tuple(options)


def _amount(text: str) -> float | str:
    """Read a number, or an amount of memory in bytes: daemons write 4096M as 4G."""
    unit = _UNITS.get(text[-1:].upper(), 0)
    try:
        return float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        return text

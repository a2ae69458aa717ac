# SPDX-License-Identifier: Apache-2.0
"""`nvidia-cuda-mps-control` by protocol version 3: one server, and a namespace for each share.

A namespace's limits are the daemon's word: a client has those of the namespace whose socket it came
through, whatever its own variables say. Commands, fields and folders are those of
docs.nvidia.com/deploy/mps ("MPS v3 Interface", "MPS v3 Namespaces", driver 615). What is set is
read back, for a daemon that takes a value as it comes says nothing.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from allotment.modes.mps.controls import Control, MpsUnreachableError
from allotment.modes.mps.places import WITH_NAMESPACES
from allotment.modes.mps.settings import Limits

__all__ = ["NamespaceControl", "folder_of", "with_namespaces"]

_SERVER: Final = "shares"
_DEFAULT: Final = "default"
_TRIAL: Final = "allotment_trial"
"""Longer than a share's id, so that a path that is too long is found."""
_TRIAL_LIMITS: Final = Limits(percentage=50, memory_mib=512, is_below_normal=True)
_NEXT_TO_NOTHING: Final = Limits(percentage=1)
_READY: Final = "ready"
_FAULT: Final = "fault"
_CSV: Final = "--format=csv,noheader"
_UNITS: Final = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True, slots=True)
class NamespaceControl(Control):
    """The program, for a daemon of protocol version 3."""

    @property
    def protocol(self) -> int:
        """The version of the daemon that `start` starts."""
        return WITH_NAMESPACES

    def answers(self) -> bool:
        """Tell whether the daemon answers a harmless command."""
        try:
            self._servers()
        except MpsUnreachableError:
            return False
        return True

    def servers(self) -> tuple[int, ...]:
        """Return the process id of the server; raise `MpsUnreachableError`."""
        return tuple(self._servers())

    def start_server(self) -> None:
        """Have the server, of this user, or for all users where that is root."""
        self._do("server", "create", _SERVER)
        self._do("server", "set", _SERVER, *_options_of(_NEXT_TO_NOTHING))

    def others(self) -> tuple[str, ...]:
        """Return the names of servers besides ours; raise `MpsUnreachableError`.

        The daemon makes one, without limits, for who connects to it while ours is not there.
        """
        return tuple(row[0] for row in self._rows() if row[0] != _SERVER)

    def hold_others(self) -> None:
        """Leave next to nothing to who comes by no share's namespace.

        A program that sees the daemon's folder would else have the whole GPU: in `default`, or in a
        server besides ours, which is ended with its clients. Raises `MpsUnreachableError`.
        """
        for name in self.others():
            self._do("server", "delete", name, "--force")
        options = _options_of(_NEXT_TO_NOTHING)
        self._do("server", "set", _SERVER, *options)
        self._check(_DEFAULT, options)

    def is_active(self, server: int) -> bool:
        """Tell whether a server takes clients; raise `MpsUnreachableError`."""
        return self._servers().get(server) == _READY

    def is_faulted(self, server: int) -> bool:
        """Tell whether a client's fault keeps it from taking clients."""
        return _FAULT in self._servers().get(server, "")

    def quit(self, within_s: int) -> None:
        """Have the daemon end with its servers and their clients, at once."""
        del within_s
        self._do("--quit")

    # ---- namespaces ------------------------------------------------------------------------------

    def namespaces(self) -> frozenset[str]:
        """Return the names of those that were made; raise `MpsUnreachableError`."""
        rows = self._do("namespace", "list", f"--server={_SERVER}", _CSV).splitlines()
        return frozenset(row.split(",")[0] for row in rows if row) - {_DEFAULT}

    def create(self, name: str) -> None:
        """Make a namespace without limits; raise `MpsUnreachableError`."""
        self._do("namespace", "create", name, f"--server={_SERVER}")

    def limit(self, name: str, limits: Limits) -> None:
        """Set a namespace's limits for clients that come; raise `MpsUnreachableError`.

        That says so too where the daemon has others afterwards.
        """
        options = _options_of(limits)
        self._do("namespace", "set", name, f"--server={_SERVER}", *options)
        self._check(name, options)

    def _check(self, name: str, options: Iterable[str]) -> None:
        for option in options:
            field, _, wanted = option.removeprefix("--").partition("=")
            had = self._do("namespace", "get", name, _SERVER, field)
            if _amount(had) != _amount(wanted):
                raise MpsUnreachableError(f"namespace {name}: {field} is {had}, not {wanted}")

    def delete(self, name: str) -> None:
        """Remove a namespace; raise `MpsUnreachableError`, also where it has clients."""
        self._do("namespace", "delete", name, f"--server={_SERVER}")

    def try_namespaces(self, scratch: Path) -> None:
        """Make a namespace, read it back, and remove it. Raises `MpsUnreachableError`.

        Its socket must be where the clients are told, and have a second name at `scratch`. Who
        comes by no namespace of ours must be held.
        """
        self.hold_others()
        if _TRIAL in self.namespaces():
            self.delete(_TRIAL)
        self.create(_TRIAL)
        try:
            self.limit(_TRIAL, _TRIAL_LIMITS)
            where = self._do("namespace", "get", _TRIAL, _SERVER, "pipe-directory")
            folder = folder_of(self.pipes, _TRIAL)
            if where != str(folder):
                raise MpsUnreachableError(f"a namespace is at {where}, not {folder}")
            scratch.unlink(missing_ok=True)
            os.link(folder / "control", scratch)
            scratch.unlink()
        except OSError as error:
            raise MpsUnreachableError(f"a namespace's socket: {error}") from error
        self.delete(_TRIAL)

    # ---- how -------------------------------------------------------------------------------------

    def _servers(self) -> dict[int, str]:
        """Return the status of our server by its process id, in small letters."""
        return {
            int(row[2]): row[3].strip().lower()
            for row in self._rows()
            if len(row) > 3 and row[0] == _SERVER and row[2].isdecimal()  # noqa: PLR2004
        }

    def _rows(self) -> list[list[str]]:
        """Return what is said of each server."""
        rows = self._do("server", "list", _CSV).splitlines()
        return [row.split(",") for row in rows if row]

    def _do(self, *words: str) -> str:
        return self._run(words, called=" ".join(words))

    def _options(self) -> list[str]:
        return ["-p", "3", *(["--multiuser"] if os.geteuid() == 0 else [])]


def folder_of(pipes: Path, name: str) -> Path:
    """Return the pipe directory of a namespace's clients, of a daemon that is at `pipes`."""
    return pipes / _SERVER / name


def with_namespaces(control: Control) -> NamespaceControl:
    """Return the same program for a daemon of protocol version 3."""
    return NamespaceControl(
        control.pipes, control.logs, control.uuid, control.program, control.environment
    )


def _options_of(limits: Limits) -> tuple[str, ...]:
    options = [f"--client-priority={int(limits.is_below_normal)}"]
    if limits.percentage is not None:
        # Whole ones are documented; a program's own variable may say less, which it is not held to.
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

# SPDX-License-Identifier: Apache-2.0
"""One GPU's control daemon as a process: adopted, started by either protocol, and ended.

Protocol 3 with namespaces is preferred, and tried before programs depend on it. Otherwise the older
one serves, and the reason is recorded.
"""

import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from allotment.model.errors import AllotError, PrerequisiteError
from allotment.modes.mps.control import (
    Control,
    MpsUnreachableError,
    NamespaceControl,
    folder_of,
    with_namespaces,
)
from allotment.modes.mps.mode import Limits
from allotment.modes.mps.state import OLDER, DaemonState, MpsJournal, MpsPlace, process_start

_QUITS_WITHIN_S: Final = 5
_TRIES_S: Final = 8.0
"""For a daemon with namespaces: the older one must still be ready while the programs wait."""
_MIG: Final = "MIG-"


class Daemon:
    """The daemon of one GPU, and the shares' parts of it. For its supervisor."""

    def __init__(
        self,
        journal: MpsJournal,
        control: Control,
        part_limits: Callable[[], Mapping[str, Limits | None] | None],
        *,
        ready_s: float,
    ) -> None:
        """Starts nothing yet.

        `part_limits` returns the shares' limits, as `parts` of `Supervisor` does. A server must be
        active within `ready_s`.
        """
        self._journal = journal
        self._place = journal.place
        self.control = self._older = control
        """For the protocol of the running daemon."""
        self._part_limits = part_limits
        self._ready_s = ready_s
        self._parts = Parts(journal.place)
        self._child: subprocess.Popen[bytes] | None = None
        self.watched = -1
        """A descriptor that is readable when the daemon has ended; negative: no daemon."""
        self.servers: frozenset[int] = frozenset()
        """Their process ids, as of the last check."""
        self.holds_others = True
        """With namespaces, programs outside of the shares' namespaces are limited to a minimum."""

    def adopt(self) -> bool:
        """Continue with an earlier supervisor's daemon; False: none runs."""
        pid = self._journal.status.daemon
        if pid is None or process_start(pid) != self._journal.status.daemon_start:
            return False
        try:
            self.watched = os.pidfd_open(pid)
        except OSError:
            return False
        if self._journal.status.has_namespaces:
            self.control = with_namespaces(self._older)
        if not self.control.answers():
            self.stop()
            return False
        with suppress(MpsUnreachableError):
            self.servers = frozenset(self.control.servers())
        self.hold_others()
        self._journal.write(state=DaemonState.READY, protocol=self.control.protocol)
        self.update_parts()
        return True

    def start(self) -> None:
        """Start a daemon with namespaces if possible, else the older one.

        Shares that started with the older one have no namespace's socket: they keep it.
        """
        self.end_unknown()
        offers = self._older.offers_namespaces()
        why = ""
        self._journal.write(state=DaemonState.STARTING, daemon=None, parts=())
        if offers:
            why = self._why_older()
            if not why:
                return
            self._place.log(f"no namespaces: {why}")
        self._launch(self._older, self._ready_s)
        self._started(why)

    def update_parts(self) -> None:
        """Create the parts of new shares, and remove those of ended shares."""
        part_limits = self._part_limits()
        if part_limits is None:
            return
        problem = (
            "" if self._parts.are(part_limits) else self._parts.update(self.control, part_limits)
        )
        if problem and problem != self._journal.status.problem:
            self._place.log(f"a share's part cannot be made: {problem}")
        if (self._parts.names, problem) != (
            self._journal.status.parts,
            self._journal.status.problem,
        ):
            self._journal.write(parts=self._parts.names, problem=problem)

    def serve_again(self) -> None:
        """Replace a server that ended: with protocol 2 the daemon does that."""
        if isinstance(self.control, NamespaceControl):
            self._parts.forget()
            self._journal.write(parts=())
            with suppress(MpsUnreachableError):
                self.control.start_server()
            self.hold_others()

    def hold_others(self) -> None:
        """Limit programs outside of the shares' namespaces; a failure is retried at each check."""
        try:
            self.control.hold_others()
        except MpsUnreachableError as error:
            if self.holds_others:
                self._place.log(f"programs besides the shares' are not held: {error}")
            self.holds_others = False
        else:
            self.holds_others = True

    def is_running(self) -> bool:
        if self._child is not None:
            return self._child.poll() is None
        return self.watched >= 0 and not select.select([self.watched], [], [], 0)[0]

    def stop(self) -> None:
        """End the daemon: by its own command, else by force."""
        if self.watched < 0:
            return
        if self.is_running():
            with suppress(MpsUnreachableError):
                self.control.quit(0)
                select.select([self.watched], [], [], _QUITS_WITHIN_S)
        if self.is_running():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.watched, signal.SIGKILL)
            select.select([self.watched], [], [], _QUITS_WITHIN_S)
        self._forget()

    def end_unknown(self) -> None:
        """End a daemon whose supervisor was killed before it recorded the pid.

        No program uses it, and it blocks every other daemon.
        """
        for pid in self.control.daemons():
            with suppress(ProcessLookupError):
                self.watched = os.pidfd_open(pid)
                self.stop()
                self._place.log(f"ended the daemon {pid}, which was not written down")

    def leave(self) -> None:
        """Leave it running for the next supervisor, which finds it by the status."""
        if self._child is not None:
            self._child.returncode = 0  # no longer our child to wait for
            self._child = None
        self._forget()

    def _why_older(self) -> str:
        """Start a daemon with namespaces; return why that is impossible, empty: it serves."""
        if self._older.uuid.startswith(_MIG):
            return "protocol 3 serves no MIG devices"
        if self._has_older_shares():
            return "some shares started without namespaces"
        control = with_namespaces(self._older)
        try:
            self._launch(control, min(_TRIES_S, self._ready_s))
            control.try_namespaces(self._place.root / "trial")
            self.holds_others = True
            problem = self._make_parts()
        except (PrerequisiteError, MpsUnreachableError) as error:
            problem = error.message if isinstance(error, AllotError) else str(error)
        if problem:
            self.stop()
            return problem
        self._started("")
        return ""

    def _has_older_shares(self) -> bool:
        """Whether a share has a link to the daemon's own folder, and may have mounted it."""
        if self._journal.status.protocol != OLDER:
            return False
        part_limits = self._part_limits()
        return part_limits is None or any(
            self._place.part(name).is_symlink() for name in part_limits
        )

    def _make_parts(self) -> str:
        """Create all parts for a new daemon; return the problem, if any."""
        self._parts.forget()
        part_limits = self._part_limits()
        return "" if part_limits is None else self._parts.update(self.control, part_limits)

    def _launch(self, control: Control, within_s: float) -> None:
        """Start a daemon and wait for it. Raises `PrerequisiteError`."""
        self.control = control
        self._child = control.start()
        pid = self._child.pid
        self.watched = os.pidfd_open(pid)
        self._journal.write(daemon=pid, daemon_start=process_start(pid) or 0)
        self._await_ready(within_s)

    def _started(self, why: str) -> None:
        if self.control is self._older:
            self._make_parts()
        # Before the status: a waiting process finds the line in the log.
        self._place.log(
            f"daemon {self._journal.status.daemon} is ready, by protocol {self.control.protocol}"
        )
        self._journal.write(
            state=DaemonState.READY,
            protocol=self.control.protocol,
            older_because=why,
            parts=self._parts.names,
        )

    def _await_ready(self, within_s: float) -> None:
        """Wait until a command is answered and a server is active; raise `PrerequisiteError`."""
        deadline = time.monotonic() + within_s
        pause_s = 0.005
        while not self._is_ready():
            if not self.is_running():
                raise PrerequisiteError(
                    f"{self.control.program}: the control daemon of MPS ended at once",
                    hint=f"see {self._place.logs}/control.log",
                )
            if time.monotonic() > deadline:
                self.stop()
                raise PrerequisiteError(
                    f"{self.control.program}: no MPS server became active within {within_s:.0f} s",
                    hint=f"see {self._place.logs}/control.log and server.log",
                )
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.1)

    def _is_ready(self) -> bool:
        if not self.control.answers():
            return False
        with suppress(MpsUnreachableError):
            if not self.control.servers():
                self.control.start_server()
            self.servers = frozenset(self.control.servers())
            return any(self.control.is_active(server) for server in self.servers)
        return False

    def _forget(self) -> None:
        if self.watched >= 0:
            os.close(self.watched)
        self.watched = -1
        if self._child is not None:
            self._child.wait()
            self._child = None


_SOCKET: Final = "control"


class Parts:
    """The shares' parts of one daemon. For its supervisor."""

    def __init__(self, place: MpsPlace) -> None:
        self._place = place
        self._made: dict[str, Limits] = {}
        self._left: frozenset[str] = frozenset()
        """Unused namespaces that could not be deleted."""

    @property
    def names(self) -> tuple[str, ...]:
        """Parts whose programs can start."""
        return tuple(sorted(self._made))

    def forget(self) -> None:
        """Create all of them again: the daemon is new, or its parts are unknown."""
        self._made.clear()

    def are(self, part_limits: Mapping[str, Limits | None]) -> bool:
        """Whether the parts are as part_limits."""
        is_made = all(
            limits is None or self._made.get(name) == limits for name, limits in part_limits.items()
        )
        return is_made and self._made.keys() <= part_limits.keys() and not self._left

    def update(self, control: Control, part_limits: Mapping[str, Limits | None]) -> str:
        """Create missing parts and remove unused ones; return the problem, if any.

        A part with limits None is unchanged: its limits are unreadable, and it may be in use. A
        part that cannot be created is missing from `names` until a later attempt succeeds.
        """
        try:
            namespaces = self._remove_unused(control, part_limits)
        except MpsUnreachableError as error:
            return str(error)
        problems = []
        for name, limits in part_limits.items():
            if limits is None or self._made.get(name) == limits:
                continue
            self._made.pop(name, None)
            try:
                self._make(control, name, limits, exists=name in namespaces)
            except (MpsUnreachableError, OSError) as error:
                problems.append(str(error))
            else:
                self._made[name] = limits
        return "; ".join(problems)

    def _remove_unused(self, control: Control, part_limits: Mapping[str, object]) -> frozenset[str]:
        """Remove unused parts; return the names of the daemon's namespaces."""
        namespaces = frozenset[str]()
        left = set[str]()
        if isinstance(control, NamespaceControl):
            namespaces = control.namespaces()
            for name in namespaces - part_limits.keys():
                try:
                    control.delete(name)
                except MpsUnreachableError:  # it still has clients: the next time
                    left.add(name)
        self._left = frozenset(left)
        for name in self._made.keys() - part_limits.keys():
            del self._made[name]
        for path in self._place.parts.iterdir() if self._place.parts.is_dir() else ():
            if path.name not in part_limits:
                _remove(path)
        return namespaces

    def _make(self, control: Control, name: str, limits: Limits, *, exists: bool) -> None:
        path = self._place.part(name)
        if isinstance(control, NamespaceControl):
            if not exists:
                control.create(name)
            control.limit(name, limits)
            if path.is_symlink():
                path.unlink()
            path.mkdir(exist_ok=True)
            path.chmod(0o755)
            _link_socket(folder_of(control.pipes, name) / _SOCKET, path / _SOCKET)
        elif path.is_dir() and not path.is_symlink():
            # May be mounted, from a daemon with namespaces that could not be restarted.
            _link_socket(self._place.pipes / _SOCKET, path / _SOCKET)
        elif not path.is_symlink():
            path.symlink_to(os.path.relpath(self._place.pipes, path.parent))


def _link_socket(socket: Path, name: Path) -> None:
    if name.exists() and name.samefile(socket):
        return
    name.unlink(missing_ok=True)
    os.link(socket, name)


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)

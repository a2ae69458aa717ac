# SPDX-License-Identifier: Apache-2.0
"""One GPU's control daemon as a process: found, started by whichever protocol, and ended.

One with namespaces is preferred (`namespaces`), and tried before programs depend on it; where there
is none, the older one serves, and why is written down.
"""

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

from allotment.model.errors import AllotError, PrerequisiteError
from allotment.modes.mps.controls import Control, MpsUnreachableError
from allotment.modes.mps.namespaces import NamespaceControl, with_namespaces
from allotment.modes.mps.parts import Parts
from allotment.modes.mps.places import OLDER, DaemonState, Journal, process_start
from allotment.modes.mps.settings import Limits

__all__ = ["Daemon"]

_QUITS_WITHIN_S: Final = 5
_TRIES_S: Final = 8.0
"""For a daemon with namespaces: the older one has to be ready within what the programs wait."""
_MIG: Final = "MIG-"


class Daemon:
    """The daemon of one GPU, and the shares' parts of it. For its supervisor."""

    def __init__(
        self,
        journal: Journal,
        control: Control,
        wanted: Callable[[], Mapping[str, Limits | None] | None],
        *,
        ready_s: float,
    ) -> None:
        """Know how it is started; nothing is, and none is looked for yet.

        `wanted` is what the shares may have, as `Supervisor` takes it. A server must be active
        within `ready_s`.
        """
        self._journal = journal
        self._place = journal.place
        self.control = self._older = control
        """By the protocol of the daemon that runs."""
        self._wanted = wanted
        self._ready_s = ready_s
        self._parts = Parts(journal.place)
        self._child: subprocess.Popen[bytes] | None = None
        self.watched = -1
        """A descriptor that can be read from when the daemon has ended; negative: none is known."""
        self.servers: frozenset[int] = frozenset()
        """Their process ids, as of the last look."""
        self.holds_others = True
        """Who comes by no share's namespace has next to nothing, where there are namespaces."""

    def adopt(self) -> bool:
        """Go on with a daemon that a supervisor before this one left; False: there is none."""
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
        self.share_out()
        return True

    def start(self) -> None:
        """Start a daemon with namespaces where there can be one, else the older one.

        Shares that began by the older way have no namespace's socket: they keep to it.
        """
        self.end_unknown()
        offers = self._older.offers_namespaces()
        why = ""
        self._journal.write(state=DaemonState.STARTING, daemon=None, parts=())
        if offers:
            why = self._why_older()
            if not why:
                return
            self._place.tell(f"no namespaces: {why}")
        self._launch(self._older, self._ready_s)
        self._started(why)

    def share_out(self) -> None:
        """Make the parts of shares that have come, and remove those of shares that have gone."""
        wanted = self._wanted()
        if wanted is None:
            return
        problem = "" if self._parts.are(wanted) else self._parts.update(self.control, wanted)
        if problem and problem != self._journal.status.problem:
            self._place.tell(f"a share's part cannot be made: {problem}")
        if (self._parts.names, problem) != (
            self._journal.status.parts,
            self._journal.status.problem,
        ):
            self._journal.write(parts=self._parts.names, problem=problem)

    def serve_again(self) -> None:
        """Have a server in place of one that ended: by protocol 2 the daemon sees to that."""
        if isinstance(self.control, NamespaceControl):
            self._parts.forget()
            self._journal.write(parts=())
            with suppress(MpsUnreachableError):
                self.control.start_server()
            self.hold_others()

    def hold_others(self) -> None:
        """Hold who comes by no share's namespace; what cannot be done is tried at the next look."""
        try:
            self.control.hold_others()
        except MpsUnreachableError as error:
            if self.holds_others:
                self._place.tell(f"programs besides the shares' are not held: {error}")
            self.holds_others = False
        else:
            self.holds_others = True

    def is_running(self) -> bool:
        """Tell whether the process is there."""
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
        """End what a supervisor started that was killed before it wrote down the daemon's pid.

        No program had begun with it, and beside it no other daemon can start.
        """
        for pid in self.control.daemons():
            with suppress(ProcessLookupError):
                self.watched = os.pidfd_open(pid)
                self.stop()
                self._place.tell(f"ended the daemon {pid}, which was not written down")

    def leave(self) -> None:
        """Let it run on for whoever finds it by what is written down."""
        if self._child is not None:
            self._child.returncode = 0  # it is nobody's to wait for: another finds it by its pid
            self._child = None
        self._forget()

    def _why_older(self) -> str:
        """Start a daemon with namespaces; return why there is none, empty: it serves."""
        if self._older.uuid.startswith(_MIG):
            return "protocol 3 serves no MIG devices"
        if self._has_older_shares():
            return "shares are there that began without"
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
        """Tell whether a share has a link to the daemon's own folder, which it may have mounted."""
        if self._journal.status.protocol != OLDER:
            return False
        wanted = self._wanted()
        return wanted is None or any(self._place.part(name).is_symlink() for name in wanted)

    def _make_parts(self) -> str:
        """Make the parts of a daemon that is new; return what went wrong, if anything."""
        self._parts.forget()
        wanted = self._wanted()
        return "" if wanted is None else self._parts.update(self.control, wanted)

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
        # Whoever waits for it finds the line there.
        self._place.tell(
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

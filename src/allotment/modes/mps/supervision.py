# SPDX-License-Identifier: Apache-2.0
"""One GPU's control daemon, kept running while any share needs it.

A `Supervisor` is driven by steps: whoever has it (a process of its own on one machine, the agent on
a node) calls `step` when the daemon ends or when the time that it returned is over. It keeps no
state that is not in the status, so that a supervisor that was killed is followed by another, which
finds the daemon running and goes on with it: the programs notice nothing.

The GPU is kept for MPS clients by its compute mode, for a program that does not find the daemon
would run beside all shares and without a limit, in silence. What the mode was before is written
down before it is changed, and put back at the end.
"""

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, Protocol

from allotment.devices.compute_modes import ComputeMode
from allotment.model.errors import AllotError, BusyError, PrerequisiteError, StateError
from allotment.modes.mps.controls import Control, MpsUnreachableError
from allotment.modes.mps.namespaces import NamespaceControl, with_namespaces
from allotment.modes.mps.parts import Parts
from allotment.modes.mps.places import (
    OLDER,
    DaemonState,
    Loss,
    MpsPlace,
    MpsStatus,
    process_start,
)
from allotment.modes.mps.settings import Limits

__all__ = ["GpuAccess", "Supervisor", "Timing"]

_MOST_LOSSES: Final = 8
_MOST_SILENT: Final = 3
_QUITS_WITHIN_S: Final = 5
_TRIES_S: Final = 8.0
"""For a daemon with namespaces: the older one has to be ready within what the programs wait."""
_MIG: Final = "MIG-"
_SERVING: Final = frozenset({DaemonState.READY, DaemonState.FAULTED})
_WAKES: Final = 4096
"""Bytes: more than there can be of them between two looks."""
_IDLE_LOOK: Final = 0.25
"""Of a look's time while no share needs the daemon: the next one may want the GPU for itself."""


class GpuAccess(Protocol):
    """What is asked of the GPU's driver."""

    def compute_mode(self) -> ComputeMode:
        """Return who may have a context."""
        ...

    def set_compute_mode(self, mode: ComputeMode) -> None:
        """Set it; raise `PrerequisiteError` where only root may."""
        ...

    def computing(self) -> tuple[int, ...]:
        """Return the process ids that have a context."""
        ...


@dataclass(frozen=True, slots=True)
class Timing:
    """How long things may take, in seconds."""

    look: float = 1.0
    """Between two looks at the daemon's health and the shares."""
    idle: float = 10.0
    """Without a share until the daemon is stopped."""
    ready: float = 20.0
    """From the daemon's start until a server is active."""
    retry: float = 0.5
    """After a start that failed; doubled each time, up to `look`'s thirtyfold."""


class Supervisor:
    """Keeps one GPU's daemon. For one thread, and for whoever owns the place."""

    def __init__(
        self,
        place: MpsPlace,
        control: Control,
        gpu: GpuAccess,
        *,
        shares: Callable[[], Collection[str]],
        parts: Callable[[], Mapping[str, Limits | None] | None] = dict,
        served: Callable[[], Collection[str]] | None = None,
        gives_way: Callable[[], bool] = lambda: False,
        timing: Timing | None = None,
    ) -> None:
        """Know what to do; nothing is started yet.

        `shares` are names of those that need the daemon, `parts` what they may have of it, by the
        name of the part; None, of one or of all of them: that cannot be read now, and what is there
        stays. `served` are those shares whose programs may have begun, where that is known: they
        lose what a daemon takes with it, also one that ended before this supervisor began.
        `gives_way` tells, while there are none, that the GPU is wanted for something else: the
        daemon stops at once then, and where that was asked for (`MpsPlace.ask_for_way`).
        """
        self._place = place
        self._control = self._older = control
        self._gpu = gpu
        self._shares = shares
        self._wanted = parts
        self._parts = Parts(place)
        self._served = served or shares
        self._knows_served = served is not None
        self._seen: frozenset[str] = frozenset()  # served at the last look: they may end at once
        self._gives_way = gives_way
        self._timing = timing or Timing()
        self._status = replace(
            place.status(), supervisor=os.getpid(), problem="", hint="", is_busy=False
        )
        self._child: subprocess.Popen[bytes] | None = None
        self._watched = -1
        self._woken = -1
        self._used = time.monotonic()
        self._silent = 0
        self._servers: frozenset[int] = frozenset()
        self._holds_others = True
        """Who comes by no share's namespace has next to nothing, where there are namespaces."""
        self._pause = self._timing.retry
        self._again = 0.0
        """When a start is tried again; the shares are looked at meanwhile."""

    @property
    def status(self) -> MpsStatus:
        """What is written down."""
        return self._status

    def begin(self) -> None:
        """Have a daemon that is ready: the one that is there, or a new one.

        Raises `AllotError` where the GPU is somebody else's, or no daemon can be had; what was
        changed is put back. A daemon that was there runs on.
        """
        try:
            self._begin()
        except BaseException:
            self.leave()
            raise

    def _begin(self) -> None:
        had_one = self._status.daemon is not None
        self._woken = self._place.listen()
        if self._adopt():
            self._place.tell(f"goes on with the daemon {self._status.daemon}")
            return
        began = time.monotonic()
        has_lost = had_one and self._knows_served and bool(self._served())
        if has_lost:
            self._note("the control daemon ended while nobody kept it")
        try:
            self._keep_for_clients()
            self._start()
            self._used = time.monotonic()
        except AllotError as error:
            self._stop()
            with suppress(StateError):  # a full disk, say: what went wrong first is what is told
                self._fail(error)
            self._place.tell(f"cannot begin: {error.message}")
            with suppress(StateError):
                self._let_go(DaemonState.FAILED)
            raise
        if has_lost:
            self._come_back(began)

    def leave(self) -> None:
        """Go, and let the daemon run on for whoever supervises it next."""
        if self._child is not None:
            self._child.returncode = 0  # it is nobody's to wait for: another finds it by its pid
            self._child = None
        self._forget()
        self._forget_wakes()

    def step(self) -> float | None:
        """Look at everything once; return the seconds until the next look, None: it is over.

        A daemon that has ended is started again for the shares there are. One whose files were
        removed is ended: neither a program nor the next supervisor would find it. Raises
        `StateError` where something cannot be written down.
        """
        if self._place.is_written():
            try:
                return self._step()
            except StateError:
                if self._place.is_written():
                    raise
        # Also while it looked: most of a step reads and writes files.
        with suppress(StateError):
            self.close()
        self._place.tell("stopped: its files were removed")
        return None

    def _step(self) -> float | None:
        reason = self._lost()
        if reason and not self._shares():
            self.close()
            self._place.tell(f"stopped: {reason}, and no share needs it")
            return None
        if reason:
            wait_s = self._again - time.monotonic()
            return self._recover(reason) if wait_s <= 0 else min(wait_s, self._timing.look)
        self._share_out()
        self._seen = frozenset(self._served())
        if self._seen or self._shares():
            self._used = time.monotonic()
            self._place.forget_wish()
            return self._timing.look
        is_over = time.monotonic() - self._used >= self._timing.idle
        if not is_over and not self._gives_way() and not self._place.is_wanted():
            return self._timing.look * _IDLE_LOOK
        return None if self._end() else self._timing.look

    def wait(self, seconds: float) -> None:
        """Sleep so long, or until the daemon ends or a share comes."""
        watched = [each for each in (self._watched, self._woken) if each >= 0]
        if self._woken in select.select(watched, [], [], seconds)[0]:
            with suppress(BlockingIOError):
                os.read(self._woken, _WAKES)

    def clear(self) -> None:
        """Stop what was left of a daemon that no share needs, and put the GPU back."""
        try:
            if not self._adopt():
                self._end_unknown()
            self.close()
        finally:
            self.leave()
        self._place.tell("cleared: no share needs it")

    def close(self) -> None:
        """Stop the daemon, whoever uses it, and put the GPU back.

        Raises `StateError` when that is done and cannot be written down.
        """
        self._stop()
        self._forget_wakes()
        try:
            self._let_go(DaemonState.STOPPED)
        finally:
            self._place.forget_wish()

    # ---- the daemon ------------------------------------------------------------------------------

    def _adopt(self) -> bool:
        """Go on with a daemon that a supervisor before this one left running."""
        pid = self._status.daemon
        if pid is None or process_start(pid) != self._status.daemon_start:
            return False
        try:
            self._watched = os.pidfd_open(pid)
        except OSError:
            return False
        if self._status.has_namespaces:
            self._control = with_namespaces(self._older)
        if not self._control.answers():
            self._stop()
            return False
        with suppress(MpsUnreachableError):
            self._servers = frozenset(self._control.servers())
        self._hold_others()
        self._write(state=DaemonState.READY, protocol=self._control.protocol)
        self._share_out()
        return True

    def _end_unknown(self) -> None:
        """End what a supervisor started that was killed before it wrote down the daemon's pid.

        No program had begun with it, and beside it no other daemon can start.
        """
        for pid in self._control.daemons():
            with suppress(ProcessLookupError):
                self._watched = os.pidfd_open(pid)
                self._stop()
                self._place.tell(f"ended the daemon {pid}, which was not written down")

    def _start(self) -> None:
        """Start a daemon with namespaces where there can be one, else the older one.

        Shares that began by the older way have no namespace's socket: they keep to it.
        """
        self._end_unknown()
        offers = self._older.offers_namespaces()
        why = ""
        self._write(state=DaemonState.STARTING, daemon=None, parts=())
        if offers:
            why = self._why_older()
            if not why:
                return
            self._place.tell(f"no namespaces: {why}")
        self._launch(self._older, self._timing.ready)
        self._started(why)

    def _why_older(self) -> str:
        """Start a daemon with namespaces; return why there is none, empty: it serves."""
        if self._older.uuid.startswith(_MIG):
            return "protocol 3 serves no MIG devices"
        if self._has_older_shares():
            return "shares are there that began without"
        control = with_namespaces(self._older)
        try:
            self._launch(control, min(_TRIES_S, self._timing.ready))
            control.try_namespaces(self._place.root / "trial")
            self._holds_others = True
            problem = self._make_parts()
        except (PrerequisiteError, MpsUnreachableError) as error:
            problem = error.message if isinstance(error, AllotError) else str(error)
        if problem:
            self._stop()
            return problem
        self._started("")
        return ""

    def _has_older_shares(self) -> bool:
        """Tell whether a share has a link to the daemon's own folder, which it may have mounted."""
        if self._status.protocol != OLDER:
            return False
        wanted = self._wanted()
        return wanted is None or any(self._place.part(name).is_symlink() for name in wanted)

    def _make_parts(self) -> str:
        """Make the parts of a daemon that is new; return what went wrong, if anything."""
        self._parts.forget()
        wanted = self._wanted()
        return "" if wanted is None else self._parts.update(self._control, wanted)

    def _launch(self, control: Control, within_s: float) -> None:
        """Start a daemon and wait for it. Raises `PrerequisiteError`."""
        self._control = control
        self._child = control.start()
        pid = self._child.pid
        self._watched = os.pidfd_open(pid)
        self._write(daemon=pid, daemon_start=process_start(pid) or 0)
        self._await_ready(within_s)

    def _started(self, why: str) -> None:
        self._silent = 0
        self._pause = self._timing.retry
        if self._control is self._older:
            self._make_parts()
        # Whoever waits for it finds the line there.
        self._place.tell(
            f"daemon {self._status.daemon} is ready, by protocol {self._control.protocol}"
        )
        self._write(
            state=DaemonState.READY,
            protocol=self._control.protocol,
            older_because=why,
            parts=self._parts.names,
        )

    def _share_out(self) -> None:
        """Make the parts of shares that have come, and remove those of shares that have gone."""
        wanted = self._wanted()
        if wanted is None:
            return
        problem = "" if self._parts.are(wanted) else self._parts.update(self._control, wanted)
        if problem and problem != self._status.problem:
            self._place.tell(f"a share's part cannot be made: {problem}")
        if (self._parts.names, problem) != (self._status.parts, self._status.problem):
            self._write(parts=self._parts.names, problem=problem)

    def _await_ready(self, within_s: float) -> None:
        """Wait until a command is answered and a server is active; raise `PrerequisiteError`."""
        deadline = time.monotonic() + within_s
        pause_s = 0.005
        while not self._is_ready():
            if not self._is_running():
                raise PrerequisiteError(
                    f"{self._control.program}: the control daemon of MPS ended at once",
                    hint=f"see {self._place.logs}/control.log",
                )
            if time.monotonic() > deadline:
                self._stop()
                raise PrerequisiteError(
                    f"{self._control.program}: no MPS server became active within {within_s:.0f} s",
                    hint=f"see {self._place.logs}/control.log and server.log",
                )
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.1)

    def _is_ready(self) -> bool:
        if not self._control.answers():
            return False
        with suppress(MpsUnreachableError):
            if not self._control.servers():
                self._control.start_server()
            self._servers = frozenset(self._control.servers())
            return any(self._control.is_active(server) for server in self._servers)
        return False

    def _is_running(self) -> bool:
        if self._child is not None:
            return self._child.poll() is None
        return self._watched >= 0 and not select.select([self._watched], [], [], 0)[0]

    def _stop(self) -> None:
        """End the daemon: by its own command, else by force."""
        if self._watched < 0:
            return
        if self._is_running():
            with suppress(MpsUnreachableError):
                self._control.quit(0)
                select.select([self._watched], [], [], _QUITS_WITHIN_S)
        if self._is_running():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._watched, signal.SIGKILL)
            select.select([self._watched], [], [], _QUITS_WITHIN_S)
        self._forget()

    def _forget(self) -> None:
        if self._watched >= 0:
            os.close(self._watched)
        self._watched = -1
        if self._child is not None:
            self._child.wait()
            self._child = None

    def _forget_wakes(self) -> None:
        if self._woken >= 0:
            os.close(self._woken)
        self._woken = -1

    # ---- what goes wrong -------------------------------------------------------------------------

    def _lost(self) -> str:
        """Look at the daemon; return why it is of no use any more, empty: it is."""
        if self._is_running() and self._look():
            return ""
        return f"the control daemon {'did not answer' if self._is_running() else 'ended'}"

    def _recover(self, reason: str) -> float:
        """Start the daemon again, and name who lost what it had; return the seconds to wait."""
        began = time.monotonic()
        if self._status.state in _SERVING:
            self._note(reason)
        self._stop()
        try:
            self._start()
        except AllotError as error:
            self._stop()  # also one whose pid cannot be written down
            self._fail(error)
            self._place.tell(f"not back: {error.message}")
            self._pause = min(self._pause * 2, 30 * self._timing.look)
            self._again = time.monotonic() + self._pause
            return min(self._pause, self._timing.look)
        self._come_back(began)
        return self._timing.look

    def _come_back(self, began: float) -> None:
        *before, last = self._status.losses
        last = replace(last, recovered_s=round(time.monotonic() - began, 3))
        self._write(
            restarts=self._status.restarts + 1,
            losses=(*before, last),
            problem="",
            hint="",
            is_busy=False,
        )
        self._place.tell(f"back after {last.recovered_s} s")

    def _fail(self, error: AllotError) -> None:
        self._write(
            state=DaemonState.FAILED,
            problem=error.message,
            hint=error.hint or "",
            is_busy=isinstance(error, BusyError),
        )

    def _look(self) -> bool:
        """Look at servers and their states. False: the daemon has been silent for too long."""
        try:
            servers = frozenset(self._control.servers())
            others = self._control.others()
            faulted = any(self._control.is_faulted(server) for server in servers)
        except MpsUnreachableError:
            self._silent += 1
            return self._silent < _MOST_SILENT and self._is_running()
        self._silent = 0
        # An answer may be cut short on a busy machine: the kernel knows who has ended.
        alive = {server for server in self._servers if process_start(server) is not None}
        if self._servers - alive:
            if not self._is_running():
                return False  # they ended with their daemon, which is told of once
            self._note("an MPS server ended")
        if not servers and not alive:
            self._serve_again()
        elif others or not self._holds_others:
            self._hold_others()
        self._servers = servers | alive
        if faulted and self._status.state is DaemonState.READY:
            self._note("a fault of one of their programs, which MPS does not keep apart")
            self._write(state=DaemonState.FAULTED)
        elif not faulted and self._status.state is DaemonState.FAULTED:
            self._write(state=DaemonState.READY)
            self._place.tell("the faulted clients have left")
        return True

    def _serve_again(self) -> None:
        """Have a server in place of one that ended: by protocol 2 the daemon sees to that."""
        if isinstance(self._control, NamespaceControl):
            self._parts.forget()
            self._write(parts=())
            with suppress(MpsUnreachableError):
                self._control.start_server()
            self._hold_others()

    def _hold_others(self) -> None:
        """Hold who comes by no share's namespace; what cannot be done is tried at the next look."""
        try:
            self._control.hold_others()
        except MpsUnreachableError as error:
            if self._holds_others:
                self._place.tell(f"programs besides the shares' are not held: {error}")
            self._holds_others = False
        else:
            self._holds_others = True

    def _note(self, reason: str) -> None:
        shares = tuple(sorted(self._seen | frozenset(self._served())))
        losses = (*self._status.losses, Loss(time.time(), reason, shares))[-_MOST_LOSSES:]
        self._write(losses=losses)
        self._place.tell(f"{reason}; affected: {', '.join(shares) or 'no share'}")

    # ---- the GPU ---------------------------------------------------------------------------------

    def _keep_for_clients(self) -> None:
        """Let nobody but MPS clients onto the GPU; raise `BusyError` where somebody is there."""
        mode = self._gpu.compute_mode()
        is_ours = self._status.mode_before is not None
        ours = (
            {ComputeMode.DEFAULT, ComputeMode.EXCLUSIVE_PROCESS}
            if is_ours
            else {ComputeMode.DEFAULT}
        )
        if mode not in ours:
            raise BusyError(
                f"GPU {self._control.uuid} is in compute mode {mode.name}, which somebody else set:"
                " it is kept for their program",
                hint=f"if it is not needed: nvidia-smi -i {self._control.uuid} -c DEFAULT",
            )
        others = self._gpu.computing()
        if others and not is_ours:
            raise BusyError(
                f"GPU {self._control.uuid} is in use by other programs"
                f" ({', '.join(map(str, others[:8]))}), which MPS would lock out",
                hint="end them first, or use another GPU",
            )
        if not is_ours:
            self._write(mode_before=int(mode))
        try:
            self._gpu.set_compute_mode(ComputeMode.EXCLUSIVE_PROCESS)
        except PrerequisiteError as error:
            # Without root's right the daemon still serves; only a program that goes round it is
            # not held back, and that is this user's own.
            self._write(mode_before=None, is_exclusive=False)
            self._place.tell(f"the GPU is not kept for MPS clients: {error.message}")
        else:
            self._write(is_exclusive=True)

    def _let_go(self, state: DaemonState) -> None:
        before = self._status.mode_before
        if state is DaemonState.STOPPED:  # who comes next begins anew
            self._status = replace(self._status, protocol=0)
        if before is not None:
            try:
                self._put_back(ComputeMode(before))
            except AllotError as error:
                self._place.tell(f"the compute mode is not put back: {error.message}")
                self._write(state=state, daemon=None, supervisor=None, parts=())
                return
        self._write(
            state=state,
            daemon=None,
            supervisor=None,
            parts=(),
            mode_before=None,
            is_exclusive=False,
        )

    def _put_back(self, before: ComputeMode) -> None:
        """Put the compute mode back, unless somebody else has set another one meanwhile."""
        now = self._gpu.compute_mode()
        if now is ComputeMode.EXCLUSIVE_PROCESS:
            self._gpu.set_compute_mode(before)
        elif now is not before:
            self._place.tell(f"compute mode {now.name}, which somebody else set, stays")

    def _end(self) -> bool:
        """Stop, unless a share has come. One that comes later finds that nothing is ready."""
        with suppress(StateError):
            self._write(state=DaemonState.STOPPING)
        if self._shares():
            self._used = time.monotonic()
            self._write(state=DaemonState.READY)
            return False
        self.close()
        self._place.tell("stopped: no share needs it")
        return True

    def _write(self, **changes: object) -> None:
        self._status = replace(self._status, **changes)  # type: ignore[arg-type]
        self._place.write(self._status)

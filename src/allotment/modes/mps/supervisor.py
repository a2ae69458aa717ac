# SPDX-License-Identifier: Apache-2.0
"""One GPU's control daemon, kept running while any share needs it.

A `Supervisor` is driven by steps: its process (its own on one machine, the agent on a node) calls
`step` when the daemon ends or the returned time is over. All its state is in the status: after a
kill the next supervisor adopts the running daemon, and programs notice nothing.

`daemons` owns the daemon's process; `gpu_access` reserves the GPU.
"""

import os
import select
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Final

import msgspec

from allotment.model.errors import AllotError, BusyError, StateError
from allotment.model.structs import replace
from allotment.modes.mps.control import Control, MpsUnreachableError
from allotment.modes.mps.daemons import Daemon
from allotment.modes.mps.gpu_access import GpuAccess, Reservation
from allotment.modes.mps.mode import Limits
from allotment.modes.mps.state import (
    DaemonState,
    Loss,
    MpsJournal,
    MpsPlace,
    MpsStatus,
    process_start,
)

_MOST_LOSSES: Final = 8
_MOST_SILENT: Final = 3
_SERVING: Final = frozenset({DaemonState.READY, DaemonState.FAULTED})
_WAKES: Final = 4096
"""Bytes: more than can be written between two checks."""
_IDLE_LOOK: Final = 0.25
"""The part of `Timing.look` while no share needs the daemon: another mode may need the GPU."""


class Timing(msgspec.Struct, frozen=True):
    """Durations in seconds."""

    look: float = 1.0
    """Between two checks of the daemon's health and the shares."""
    idle: float = 10.0
    """Without a share until the daemon is stopped."""
    ready: float = 20.0
    """From the daemon's start until a server is active."""
    retry: float = 0.5
    """After a failed start; doubled each time, up to 30 times `look`."""


class Supervisor:
    """Keeps one GPU's daemon running. For one thread, and for the owner of the place."""

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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts nothing yet.

        `shares` returns the names of shares that need the daemon; `parts` their limits by the name
        of the part, None (for one or all) if unreadable now: then nothing changes. `served` returns
        the shares whose programs may have started, if known: they lose their state with the daemon.
        `gives_way` returns if the GPU is needed in another mode: then an unused daemon stops at
        once, as after `MpsPlace.ask_for_way`.
        """
        self._place = place
        self._shares = shares
        self._served = served or shares
        self._knows_served = served is not None
        self._seen: frozenset[str] = frozenset()  # served at the last check
        self._gives_way = gives_way
        self._timing = timing or Timing()
        self._journal = MpsJournal(place)
        self._daemon = Daemon(self._journal, control, parts, ready_s=self._timing.ready)
        self._gpu = Reservation(gpu, control.uuid, self._journal)
        self._woken = -1
        self._clock = clock
        self._used = clock()
        self._silent = 0
        self._pause = self._timing.retry
        self._again = 0.0
        """When a start is tried again; the shares are checked meanwhile."""

    @property
    def status(self) -> MpsStatus:
        return self._journal.status

    def begin(self) -> None:
        """Adopt the running daemon, or start a new one, until it is ready.

        Raises `AllotError` if the GPU is in use or the start fails; changes are undone then. A
        daemon that was running keeps running.
        """
        try:
            self._begin()
        except BaseException:
            self.leave()
            raise

    def _begin(self) -> None:
        had_one = self._journal.status.daemon is not None
        self._woken = self._place.listen()
        if self._daemon.adopt():
            self._place.log(f"goes on with the daemon {self._journal.status.daemon}")
            return
        began = self._clock()
        has_lost = had_one and self._knows_served and bool(self._served())
        if has_lost:
            self._note("the control daemon ended without a supervisor")
        try:
            self._gpu.reserve()
            self._start()
            self._used = self._clock()
        except AllotError as error:
            self._daemon.stop()
            with suppress(StateError):  # a full disk, say: the first error counts
                self._fail(error)
            self._place.log(f"cannot begin: {error.message}")
            with suppress(StateError):
                self._gpu.release(DaemonState.FAILED)
            raise
        if has_lost:
            self._record_recovery(began)

    def leave(self) -> None:
        """End the supervision; the daemon keeps running for the next supervisor."""
        self._daemon.leave()
        self._forget_wakes()

    def step(self) -> float | None:
        """Check everything once; return the seconds until the next check, None: it is over.

        Restarts a daemon that has ended if shares need it. Ends a daemon whose files were removed:
        no program or supervisor would find it. Raises `StateError` if the status cannot be written.
        """
        if self._place.is_written():
            try:
                return self._step()
            except StateError:
                if self._place.is_written():
                    raise
        # Also if they were removed during the step.
        with suppress(StateError):
            self.close()
        self._place.log("stopped: its files were removed")
        return None

    def _step(self) -> float | None:
        reason = self._lost()
        if reason and not self._shares():
            self.close()
            self._place.log(f"stopped: {reason}, and no share needs it")
            return None
        if reason:
            wait_s = self._again - self._clock()
            return self._recover(reason) if wait_s <= 0 else min(wait_s, self._timing.look)
        self._daemon.update_parts()
        self._seen = frozenset(self._served())
        if self._seen or self._shares():
            self._used = self._clock()
            self._place.forget_wish()
            return self._timing.look
        is_over = self._clock() - self._used >= self._timing.idle
        if not is_over and not self._gives_way() and not self._place.is_wanted():
            return self._timing.look * _IDLE_LOOK
        return None if self._end() else self._timing.look

    def wait(self, seconds: float) -> None:
        """Sleep so long, or until the daemon ends or a share is created."""
        watched = [number for number in (self._daemon.watched, self._woken) if number >= 0]
        if self._woken in select.select(watched, [], [], seconds)[0]:
            with suppress(BlockingIOError):
                os.read(self._woken, _WAKES)

    def clear(self) -> None:
        """Stop an unused daemon of an earlier supervisor, and release the GPU."""
        try:
            if not self._daemon.adopt():
                self._daemon.end_unknown()
            self.close()
        finally:
            self.leave()
        self._place.log("cleared: no share needs it")

    def close(self) -> None:
        """Stop the daemon, even if it is in use, and release the GPU.

        Raises `StateError` if the status cannot be written after that.
        """
        self._daemon.stop()
        self._forget_wakes()
        try:
            self._gpu.release(DaemonState.STOPPED)
        finally:
            self._place.forget_wish()

    def _end(self) -> bool:
        """Stop, unless a share was created. A later share finds no ready daemon."""
        with suppress(StateError):
            self._journal.write(state=DaemonState.STOPPING)
        if self._shares():
            self._used = self._clock()
            self._journal.write(state=DaemonState.READY)
            return False
        self.close()
        self._place.log("stopped: no share needs it")
        return True

    def _start(self) -> None:
        self._daemon.start()
        self._silent = 0
        self._pause = self._timing.retry

    def _forget_wakes(self) -> None:
        if self._woken >= 0:
            os.close(self._woken)
        self._woken = -1

    # ---- what goes wrong -------------------------------------------------------------------------

    def _lost(self) -> str:
        """Check the daemon; return why it is lost, empty: it serves."""
        if self._daemon.is_running() and self._check_servers():
            return ""
        return f"the control daemon {'did not answer' if self._daemon.is_running() else 'ended'}"

    def _recover(self, reason: str) -> float:
        """Restart the daemon, and record the affected shares; return the seconds to wait."""
        began = self._clock()
        if self._journal.status.state in _SERVING:
            self._note(reason)
        self._daemon.stop()
        try:
            self._start()
        except AllotError as error:
            self._daemon.stop()  # also one whose pid cannot be recorded
            self._fail(error)
            self._place.log(f"not back: {error.message}")
            self._pause = min(self._pause * 2, 30 * self._timing.look)
            self._again = self._clock() + self._pause
            return min(self._pause, self._timing.look)
        self._record_recovery(began)
        return self._timing.look

    def _record_recovery(self, began: float) -> None:
        *before, last = self._journal.status.losses
        last = replace(last, recovered_s=round(self._clock() - began, 3))
        self._journal.write(
            restarts=self._journal.status.restarts + 1,
            losses=(*before, last),
            problem="",
            hint="",
            is_busy=False,
        )
        self._place.log(f"back after {last.recovered_s} s")

    def _fail(self, error: AllotError) -> None:
        self._journal.write(
            state=DaemonState.FAILED,
            problem=error.message,
            hint=error.hint or "",
            is_busy=isinstance(error, BusyError),
        )

    def _check_servers(self) -> bool:
        """Check servers and their states. False: the daemon has been silent for too long."""
        try:
            servers = frozenset(self._daemon.control.servers())
            others = self._daemon.control.others()
            faulted = any(self._daemon.control.is_faulted(server) for server in servers)
        except MpsUnreachableError:
            self._silent += 1
            return self._silent < _MOST_SILENT and self._daemon.is_running()
        self._silent = 0
        # An answer may be incomplete or late on a busy machine: the kernel knows the processes.
        known = self._daemon.servers
        alive = frozenset(each for each in servers | known if process_start(each) is not None)
        if known - alive:
            if not self._daemon.is_running():
                return False  # they ended with their daemon, which is reported once
            self._note("an MPS server ended")
        self._daemon.servers = alive
        if not servers and not alive:
            self._daemon.serve_again()
        elif others or not self._daemon.holds_others:
            self._daemon.hold_others()
        if faulted and self._journal.status.state is DaemonState.READY:
            self._note("a fault of one of their programs, which MPS does not keep apart")
            self._journal.write(state=DaemonState.FAULTED)
        elif not faulted and self._journal.status.state is DaemonState.FAULTED:
            self._journal.write(state=DaemonState.READY)
            self._place.log("the faulted clients have left")
        return True

    def _note(self, reason: str) -> None:
        shares = tuple(sorted(self._seen | frozenset(self._served())))
        losses = (*self._journal.status.losses, Loss(time.time(), reason, shares))[-_MOST_LOSSES:]
        self._journal.write(losses=losses)
        self._place.log(f"{reason}; affected: {', '.join(shares) or 'no share'}")

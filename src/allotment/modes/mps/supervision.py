# SPDX-License-Identifier: Apache-2.0
"""One GPU's control daemon, kept running while any share needs it.

A `Supervisor` is driven by steps: whoever has it (a process of its own on one machine, the agent on
a node) calls `step` when the daemon ends or when the time that it returned is over. It keeps no
state that is not in the status, so that a supervisor that was killed is followed by another, which
finds the daemon running and goes on with it: the programs notice nothing.

The daemon's process is `daemons`' affair, and that nobody else comes onto the GPU is `keeping`'s.
"""

import os
import select
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from allotment.model.errors import AllotError, BusyError, StateError
from allotment.modes.mps.controls import Control, MpsUnreachableError
from allotment.modes.mps.daemons import Daemon
from allotment.modes.mps.keeping import GpuAccess, Keeping
from allotment.modes.mps.places import (
    DaemonState,
    Journal,
    Loss,
    MpsPlace,
    MpsStatus,
    process_start,
)
from allotment.modes.mps.settings import Limits

__all__ = ["Supervisor", "Timing"]

_MOST_LOSSES: Final = 8
_MOST_SILENT: Final = 3
_SERVING: Final = frozenset({DaemonState.READY, DaemonState.FAULTED})
_WAKES: Final = 4096
"""Bytes: more than there can be of them between two looks."""
_IDLE_LOOK: Final = 0.25
"""Of a look's time while no share needs the daemon: the next one may want the GPU for itself."""


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
        self._shares = shares
        self._served = served or shares
        self._knows_served = served is not None
        self._seen: frozenset[str] = frozenset()  # served at the last look: they may end at once
        self._gives_way = gives_way
        self._timing = timing or Timing()
        self._journal = Journal(place)
        self._daemon = Daemon(self._journal, control, parts, ready_s=self._timing.ready)
        self._gpu = Keeping(gpu, control.uuid, self._journal)
        self._woken = -1
        self._used = time.monotonic()
        self._silent = 0
        self._pause = self._timing.retry
        self._again = 0.0
        """When a start is tried again; the shares are looked at meanwhile."""

    @property
    def status(self) -> MpsStatus:
        """What is written down."""
        return self._journal.status

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
        had_one = self._journal.status.daemon is not None
        self._woken = self._place.listen()
        if self._daemon.adopt():
            self._place.tell(f"goes on with the daemon {self._journal.status.daemon}")
            return
        began = time.monotonic()
        has_lost = had_one and self._knows_served and bool(self._served())
        if has_lost:
            self._note("the control daemon ended while nobody kept it")
        try:
            self._gpu.keep_for_clients()
            self._start()
            self._used = time.monotonic()
        except AllotError as error:
            self._daemon.stop()
            with suppress(StateError):  # a full disk, say: what went wrong first is what is told
                self._fail(error)
            self._place.tell(f"cannot begin: {error.message}")
            with suppress(StateError):
                self._gpu.let_go(DaemonState.FAILED)
            raise
        if has_lost:
            self._come_back(began)

    def leave(self) -> None:
        """Go, and let the daemon run on for whoever supervises it next."""
        self._daemon.leave()
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
        self._daemon.share_out()
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
        watched = [each for each in (self._daemon.watched, self._woken) if each >= 0]
        if self._woken in select.select(watched, [], [], seconds)[0]:
            with suppress(BlockingIOError):
                os.read(self._woken, _WAKES)

    def clear(self) -> None:
        """Stop what was left of a daemon that no share needs, and put the GPU back."""
        try:
            if not self._daemon.adopt():
                self._daemon.end_unknown()
            self.close()
        finally:
            self.leave()
        self._place.tell("cleared: no share needs it")

    def close(self) -> None:
        """Stop the daemon, whoever uses it, and put the GPU back.

        Raises `StateError` when that is done and cannot be written down.
        """
        self._daemon.stop()
        self._forget_wakes()
        try:
            self._gpu.let_go(DaemonState.STOPPED)
        finally:
            self._place.forget_wish()

    def _end(self) -> bool:
        """Stop, unless a share has come. One that comes later finds that nothing is ready."""
        with suppress(StateError):
            self._journal.write(state=DaemonState.STOPPING)
        if self._shares():
            self._used = time.monotonic()
            self._journal.write(state=DaemonState.READY)
            return False
        self.close()
        self._place.tell("stopped: no share needs it")
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
        """Look at the daemon; return why it is of no use any more, empty: it is."""
        if self._daemon.is_running() and self._look():
            return ""
        return f"the control daemon {'did not answer' if self._daemon.is_running() else 'ended'}"

    def _recover(self, reason: str) -> float:
        """Start the daemon again, and name who lost what it had; return the seconds to wait."""
        began = time.monotonic()
        if self._journal.status.state in _SERVING:
            self._note(reason)
        self._daemon.stop()
        try:
            self._start()
        except AllotError as error:
            self._daemon.stop()  # also one whose pid cannot be written down
            self._fail(error)
            self._place.tell(f"not back: {error.message}")
            self._pause = min(self._pause * 2, 30 * self._timing.look)
            self._again = time.monotonic() + self._pause
            return min(self._pause, self._timing.look)
        self._come_back(began)
        return self._timing.look

    def _come_back(self, began: float) -> None:
        *before, last = self._journal.status.losses
        last = replace(last, recovered_s=round(time.monotonic() - began, 3))
        self._journal.write(
            restarts=self._journal.status.restarts + 1,
            losses=(*before, last),
            problem="",
            hint="",
            is_busy=False,
        )
        self._place.tell(f"back after {last.recovered_s} s")

    def _fail(self, error: AllotError) -> None:
        self._journal.write(
            state=DaemonState.FAILED,
            problem=error.message,
            hint=error.hint or "",
            is_busy=isinstance(error, BusyError),
        )

    def _look(self) -> bool:
        """Look at servers and their states. False: the daemon has been silent for too long."""
        try:
            servers = frozenset(self._daemon.control.servers())
            others = self._daemon.control.others()
            faulted = any(self._daemon.control.is_faulted(server) for server in servers)
        except MpsUnreachableError:
            self._silent += 1
            return self._silent < _MOST_SILENT and self._daemon.is_running()
        self._silent = 0
        # An answer may be cut short on a busy machine: the kernel knows who has ended.
        alive = {server for server in self._daemon.servers if process_start(server) is not None}
        if self._daemon.servers - alive:
            if not self._daemon.is_running():
                return False  # they ended with their daemon, which is told of once
            self._note("an MPS server ended")
        if not servers and not alive:
            self._daemon.serve_again()
        elif others or not self._daemon.holds_others:
            self._daemon.hold_others()
        self._daemon.servers = servers | alive
        if faulted and self._journal.status.state is DaemonState.READY:
            self._note("a fault of one of their programs, which MPS does not keep apart")
            self._journal.write(state=DaemonState.FAULTED)
        elif not faulted and self._journal.status.state is DaemonState.FAULTED:
            self._journal.write(state=DaemonState.READY)
            self._place.tell("the faulted clients have left")
        return True

    def _note(self, reason: str) -> None:
        shares = tuple(sorted(self._seen | frozenset(self._served())))
        losses = (*self._journal.status.losses, Loss(time.time(), reason, shares))[-_MOST_LOSSES:]
        self._journal.write(losses=losses)
        self._place.tell(f"{reason}; affected: {', '.join(shares) or 'no share'}")

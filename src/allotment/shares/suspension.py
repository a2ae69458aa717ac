# SPDX-License-Identifier: Apache-2.0
"""What suspend and resume share: the locked share, its processes, the driver's checkpoints."""

import fcntl
import os
import signal
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import msgspec

from allotment import ledger
from allotment.devices.checkpoints import Checkpoints, DriverRefusal, ProcessState
from allotment.model.errors import BusyError, NotFoundError, StateError, UsageError
from allotment.model.shares import Runner, Share, ShareDevice, SuspendedBy, Suspension
from allotment.model.structs import replace
from allotment.modes import SoftMode, ledger_mode, traits_of
from allotment.shares.folders import StateFolder, explained, lock_holder
from allotment.shares.lifecycle import find
from allotment.shares.process_tree import census, is_alive, is_stopped, named
from allotment.shares.record import LoadedShare, check_owner, note_event, write_record
from allotment.shares.status import ProcessView, Readings, view

DriverOf = Callable[[Path | None], AbstractContextManager[Checkpoints]]
"""Opens the checkpoints of a simulated machine (its file) or of this computer (None)."""


def driver_of(machine: Path | None) -> Checkpoints:
    return Checkpoints(machine=machine)


class SuspendOutcome(msgspec.Struct, frozen=True):
    """The result for `allot suspend` and `allot resume`."""

    name: str
    by: SuspendedBy
    programs: int
    """Number of processes that were stopped or continued."""
    has_ended: bool = False
    """All programs ended as soon as they continued, by signals that were pending."""


class LockedShare(msgspec.Struct, frozen=True):
    """One share while `allot suspend` or `allot resume` works on it."""

    folder: StateFolder
    found: LoadedShare
    share: Share
    readings: Readings

    @property
    def machine(self) -> Path | None:
        """The file of its simulated machine; None: this computer."""
        return Path(self.share.machine) if self.share.machine else None

    def members(self) -> set[int]:
        """The share's processes by PID on this machine."""
        return census([(self.share, self.found.directory)])[self.share.id]

    def gpu_users(self) -> dict[int, ProcessView]:
        """The share's processes that use a GPU, by PID on this machine."""
        current = replace(self.found, ledger=ledger.read(self.found.directory), problem=None)
        users = {}
        (seen,) = view([current], self.readings)
        for process in seen.processes:
            if process.is_enforced and not any(process.used):
                continue  # it loaded the driver, and uses no GPU memory
            # Programs can write any other's there.
            if process.pid is None or process.pid not in seen.pids:
                raise BusyError(
                    f"process {process.pid_inside} of share {self.share.name} ({process.command})"
                    " cannot be found on this machine: this is its PID in its container, or what"
                    " its programs wrote into the ledger",
                    hint="run `allot` as root, which sees all processes",
                )
            users[process.pid] = process
        return users

    def record(self, suspension: Suspension | None) -> None:
        """Write the progress, and keep what else has changed in the record meanwhile."""
        with self.folder.locked():
            found = find(self.folder, self.share.id)
            share = readable(found)
            if share.suspension != suspension:
                write_record(found.directory, replace(share, suspension=suspension))
                self._note(suspension)

    def _note(self, now: Suspension | None) -> None:
        kind = ""
        if now is not None and now.is_complete:
            kind, text = "suspended", f"its memory is on the host, by {now.by}"
        elif now is None and self.share.suspension is not None:
            kind, text = "resumed", ""
        if kind:
            note_event(self.folder, kind, share=self.share.name, share_id=self.share.id, text=text)

    def set_suspended(self, *, is_suspended: bool) -> None:
        """Take its turns on its devices away, or give them back."""
        with self.folder.locked():
            found = find(self.folder, self.share.id)
            readable(found)
            mode = check_has_ledger(found)
            for uuid, terms in found.terms.items():
                if terms.is_suspended != is_suspended:
                    changed = replace(terms, is_suspended=is_suspended)
                    mode.revise(found.directory, uuid, changed, devices=self.folder.devices)


@contextmanager
def locked_share(
    folder: StateFolder, found: LoadedShare, readings: Readings
) -> Iterator[LockedShare]:
    """Read a share again under its own lock.

    Raises `BusyError` if another `allot` has the lock, `StateError` for another user's share.
    """
    check_owner(found)
    try:
        descriptor = os.open(found.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise explained(error, found.directory, "open the share") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(
                f"share {found.name} is being suspended or resumed: {lock_holder(descriptor)} has"
                " its lock",
                hint="wait for it, and see `allot ps`",
            ) from None
        current = find(folder, found.id)
        yield LockedShare(folder, current, readable(current), readings)
    finally:
        os.close(descriptor)


def readable(found: LoadedShare) -> Share:
    """Return a share's record; raise the error that makes the share unreadable or fixed."""
    if found.problem:
        raise found.problem
    if found.share is None:
        raise StateError(f"{found.directory}: cannot be read")
    check_has_ledger(found)
    return found.share


def check_has_ledger(found: LoadedShare) -> SoftMode:
    """Return the share's mode; raise `UsageError` if it has no ledger to change."""
    mode = ledger_mode(found.mode)
    if mode is None or found.ledger is None:
        why = traits_of(found.mode).fixed_because or "Allotment is not in it"
        raise UsageError(
            f"share {found.name} is of mode {found.mode}: {why}, and it cannot be"
            " resized, suspended or resumed",
            hint="create its pod again with the new request"
            if found.owner
            else "run them in a new share with another request, or in mode soft, whose shares can"
            " be changed",
        )
    return mode


def missing_gpu(share: Share, device: ShareDevice) -> NotFoundError:
    return NotFoundError(
        f"GPU {device.uuid} of share {share.name} is not on this machine",
        hint="see `allot devices` and `allot doctor`",
    )


def check_ours(pids: Iterable[int]) -> None:
    """Raise `StateError` if this user may not stop one of the processes."""
    for pid in pids:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            continue
        except PermissionError as error:
            raise StateError(
                f"process {pid} is another user's: it cannot be stopped",
                hint="run as its user, or as root",
            ) from error


def still_stopped(processes: Iterable[Runner]) -> set[int]:
    """The PIDs of those that live and are stopped."""
    return {process.pid for process in processes if is_alive(process) and is_stopped(process.pid)}


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to all that live."""
    for pid in pids:
        with suppress(ProcessLookupError):  # it has ended: neither stopped nor in the way
            os.kill(pid, number)


def states(driver: Checkpoints, pids: Iterable[int]) -> Mapping[int, ProcessState]:
    """The driver's state of each process that it knows."""
    process_states = {}
    for pid in sorted(pids):
        with suppress(DriverRefusal):
            process_states[pid] = driver.state(pid)
    return process_states


def checkpoint_all(driver: Checkpoints, pids: Iterable[int], patience_s: float) -> None:
    """Lock all, then checkpoint all: a running process may use another's memory.

    `patience_s`: time for the running GPU work of each. Raises `DriverRefusal`, and undoes nothing.
    """
    locked = []
    for pid in pids:
        with _unless_gone(pid):
            if driver.state(pid) is ProcessState.RUNNING:
                driver.lock(pid, timeout_ms=max(1, round(patience_s * 1000)))
            locked.append(pid)
    for pid in locked:
        with _unless_gone(pid):
            if driver.state(pid) is ProcessState.LOCKED:
                driver.checkpoint(pid)


def restore_all(driver: Checkpoints, pids: Collection[int]) -> None:
    """Restore all, then unlock all. Raises `DriverRefusal`; restored processes stay locked."""
    for pid in sorted(pids):
        with _unless_gone(pid):
            if driver.state(pid) is ProcessState.CHECKPOINTED:
                driver.restore(pid)
    for pid in sorted(pids):
        with _unless_gone(pid):
            if driver.state(pid) is ProcessState.LOCKED:
                driver.unlock(pid)


@contextmanager
def _unless_gone(pid: int) -> Iterator[None]:
    """Ignore a refusal if the process has ended: it uses no GPU then."""
    before = named(pid)
    try:
        yield
    except DriverRefusal:
        if is_alive(before):
            raise

# SPDX-License-Identifier: Apache-2.0
"""`allot suspend` and `allot resume`: a share's programs stop, and its GPU memory is for others.

The driver checkpoints every process of the share that uses a GPU, all or none of them; then all of
the share's programs are stopped (SIGSTOP). Where the driver has no checkpoints, and the share may
oversubscribe, the shim moves what can move to the host instead.

What is done is known from the driver's own state of each process, not from what was written
down: who was cut off in the midst of either is finished by the next one that is asked for. While
it is suspended by a checkpoint, none of the share's memory is booked; to resume it has to find
room again.
"""

import fcntl
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from allotment import ledger
from allotment.devices.checkpoints import Checkpoints, DriverRefusal, ProcessState
from allotment.model.devices import Device
from allotment.model.errors import (
    AllotError,
    BusyError,
    DoesNotFitError,
    NotFoundError,
    PrerequisiteError,
    StateError,
    UsageError,
)
from allotment.model.formats import format_bytes
from allotment.model.shares import Share, SuspendedBy, Suspension
from allotment.modes import mode_named
from allotment.placement import memory_room, overflow
from allotment.shares.folders import StateFolder, explained
from allotment.shares.lives import Found, booked, find, look, states_of
from allotment.shares.processes import census, is_alive, named
from allotment.shares.records import write_record
from allotment.shares.sessions import refuse_nesting
from allotment.shares.views import ProcessView, Readings, view

__all__ = ["Checkpointer", "Outcome", "resume", "suspend"]

_OUT_OF_MEMORY = 2
_NOT_READY = 600
_POLL_S = 0.01
_ROUNDS = 8
"""How often is looked for programs that were started while the others were being stopped."""


class Checkpointer(Protocol):
    """What suspending needs of a driver; `Checkpoints` is it. All of it raises `DriverRefusal`."""

    def state(self, pid: int) -> ProcessState:
        """Return how the driver sees a process."""
        ...

    def lock(self, pid: int, *, timeout_ms: int) -> None:
        """Hold back its calls."""
        ...

    def checkpoint(self, pid: int) -> None:
        """Move its GPU memory to the host."""
        ...

    def restore(self, pid: int) -> None:
        """Move it back."""
        ...

    def unlock(self, pid: int) -> None:
        """Let it go on."""
        ...


DriverOf = Callable[[Path | None], AbstractContextManager[Checkpointer]]
"""The driver of a simulated machine (its file) or of this computer (None)."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it."""

    name: str
    by: SuspendedBy
    programs: int
    """How many processes were stopped, or go on."""


def _driver_of(machine: Path | None) -> Checkpoints:
    return Checkpoints(machine=machine)


# ---- suspending ----


def suspend(
    folder: StateFolder,
    name: str,
    readings: Readings,
    *,
    patience_s: float,
    driver_of: DriverOf = _driver_of,
) -> Outcome:
    """Stop a share's programs and free its GPU memory; finish it where that was begun before.

    `patience_s` is how long running GPU work may take to end, for each process. Raises
    `PrerequisiteError` (the driver cannot, or not for such a share), `BusyError` (it does not do it
    now; process and reason are named) or `StateError`; then the share runs as before.
    """
    refuse_nesting()
    found = find(folder, name)
    with _alone(found):
        found = find(folder, found.id)
        share = _readable(found)
        _check_ours(_members(found, share))
        with driver_of(Path(share.machine) if share.machine else None) as driver:
            users = _users(found, readings)
            way = _way(driver, share, users)
            since = share.suspension.since if share.suspension else time.time()
            _record(folder, found, Suspension(since, way))
            try:
                _set_suspended(folder, found, is_suspended=True)
                if way is SuspendedBy.CHECKPOINT:
                    stopped = _checkpoint(driver, found, share, users, readings, patience_s)
                else:
                    _await_eviction(found, users, patience_s)
                    stopped = _stop(found, share)
            except BaseException:
                _undo(folder, driver, found, share, readings)
                raise
            _record(folder, found, Suspension(since, way, is_complete=True))
        return Outcome(found.name, way, len(stopped))


def _way(driver: Checkpointer, share: Share, users: Mapping[int, ProcessView]) -> SuspendedBy:
    """Return how this share can be suspended; raise an error that says why it cannot."""
    refusal: DriverRefusal | None = None
    for pid in users:
        try:
            if driver.state(pid) is ProcessState.FAILED:
                raise BusyError(
                    f"process {pid} of share {share.name} failed in an earlier checkpoint",
                    hint=f"end it (kill {pid}), then suspend the share again",
                )
        except DriverRefusal as error:
            if is_alive(named(pid)):
                refusal = error
                break
    if refusal is None:
        _check_host_room(share, users)
        return SuspendedBy.CHECKPOINT
    if not refusal.is_unsupported:
        raise _refused(share, refusal)
    if not all(device.is_oversubscribed for device in share.devices):
        raise PrerequisiteError(
            f"share {share.name} cannot be suspended: the driver has no checkpoints ({refusal}),"
            " and its memory may not live on the host",
            hint="use a driver from 570 on, or run its programs with --oversubscribe",
        )
    outside = [pid for pid, user in users.items() if not user.is_enforced]
    if outside:
        raise PrerequisiteError(
            f"share {share.name} cannot be suspended: the driver has no checkpoints ({refusal}),"
            f" and the shim is not in process {outside[0]} ({users[outside[0]].command})",
            hint=f"use a driver from 570 on, or end that process: kill {outside[0]}",
        )
    return SuspendedBy.EVICTION


def _check_host_room(share: Share, users: Mapping[int, ProcessView]) -> None:
    """Raise `DoesNotFitError` where the host has no room for what is on the devices."""
    if share.machine:
        return  # what simulated GPUs hold takes the same memory of the host wherever it lies
    need = sum(sum(user.used) for user in users.values())
    have = _available_bytes()
    if need > have:
        raise DoesNotFitError(
            f"share {share.name} has no room on the host: need {format_bytes(need)}, have"
            f" {format_bytes(have)}",
            hint="make room in the host's memory, or end the share's programs",
        )


def _available_bytes() -> int:
    with Path("/proc/meminfo").open(encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _checkpoint(
    driver: Checkpointer,
    found: Found,
    share: Share,
    users: Mapping[int, ProcessView],
    readings: Readings,
    patience_s: float,
) -> set[int]:
    """Checkpoint all that use a GPU and stop all that are there; return whom it stopped."""
    stopped: set[int] = set()
    done: set[int] = set()
    pending = set(users)
    for _ in range(_ROUNDS):
        # Those that came up while others were being stopped are stopped too, and cannot be locked.
        _signal(pending & stopped, signal.SIGCONT)
        try:
            _take_off(driver, sorted(pending), patience_s)
        except DriverRefusal as error:
            raise _refused(share, error) from error
        done |= pending
        stopped |= _stop(found, share)
        pending = set(_users(found, readings)) - done
        if not pending:
            return stopped
    raise BusyError(
        f"share {share.name} starts programs faster than they can be suspended",
        hint="end what starts them, then suspend it again",
    )


def _take_off(driver: Checkpointer, pids: Iterable[int], patience_s: float) -> None:
    """Lock all, then checkpoint all: while one is still running it may use another's memory."""
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


def _await_eviction(found: Found, users: Mapping[int, ProcessView], patience_s: float) -> None:
    """Wait until the shims have moved the share's memory; raise `BusyError` naming who has not."""
    deadline = time.monotonic() + patience_s
    while True:
        left = [each for each in ledger.read(found.directory).processes if each.to_evict]
        if not left:
            return
        if time.monotonic() > deadline:
            pids = {user.pid_inside: pid for pid, user in users.items()}
            pid = pids.get(left[0].pid, left[0].pid)
            raise BusyError(
                f"process {pid} of share {found.name} ({left[0].command}) has not moved its memory"
                f" within {patience_s:g} s",
                hint="it may be stopped, or run a long kernel: try again with a longer --timeout",
            )
        time.sleep(_POLL_S)


def _undo(
    folder: StateFolder, driver: Checkpointer, found: Found, share: Share, readings: Readings
) -> None:
    """Let the share run as before, as far as that can be done; what cannot is left recorded."""
    # Whatever fails here leaves it recorded as on its way: `allot resume` goes on from there.
    with suppress(AllotError, DriverRefusal):
        _signal(_members(found, share), signal.SIGCONT)
        _bring_back(driver, sorted(_users(found, readings)))
        _set_suspended(folder, found, is_suspended=False)
        _record(folder, found, None)


# ---- resuming ----


def resume(
    folder: StateFolder,
    name: str,
    readings: Readings,
    devices: Iterable[Device],
    *,
    host_budget: int | None = None,
    driver_of: DriverOf = _driver_of,
) -> Outcome:
    """Bring a suspended share's memory back and let its programs go on.

    `devices` are those of its machine; `host_budget` as in `lives.Order`. Raises `DoesNotFitError`
    (with need and have: others have the room by now), `BusyError` or `UsageError` (it is not
    suspended); then it stays as it was.
    """
    refuse_nesting()
    found = find(folder, name)
    with _alone(found):
        found = find(folder, found.id)
        share = _readable(found)
        if share.suspension is None:
            raise UsageError(
                f"share {share.name} is not suspended",
                hint=f"see `allot ps`; to suspend it: allot suspend {share.name}",
            )
        members = _members(found, share)
        _check_ours(members)
        before = share.suspension
        _book(folder, found, devices, host_budget)
        users = _users(found, readings)
        _signal(users, signal.SIGCONT)
        with driver_of(Path(share.machine) if share.machine else None) as driver:
            if before.by is SuspendedBy.CHECKPOINT:
                try:
                    _bring_back(driver, sorted(users))
                except BaseException as error:
                    _put_back(driver, users)
                    _record(folder, found, before)
                    if isinstance(error, DriverRefusal):
                        raise _not_back(share, error) from error
                    raise
        _set_suspended(folder, found, is_suspended=False)
        members |= _members(found, share)
        _signal(members, signal.SIGCONT)
        if share.runner and is_alive(share.runner):
            _signal({share.runner.pid}, signal.SIGCONT)
        _record(folder, found, None)
        return Outcome(found.name, before.by, len(members))


def _book(
    folder: StateFolder, found: Found, devices: Iterable[Device], host_budget: int | None
) -> None:
    """Book the share's memory again; raise `DoesNotFitError` where there is no room for it."""
    known = {device.uuid: device for device in devices}
    with folder.locked():
        again = find(folder, found.id)
        share = _readable(again)
        if share.suspension is None or not share.is_off_device:
            return  # booked as it is
        bookings = booked(each for each in look(folder) if each.id != found.id)
        states = {
            state.device.uuid: state for state in states_of(known.values(), bookings, host_budget)
        }
        promised = 0
        limits = again.limits()
        for device in share.devices:
            state = states.get(device.uuid)
            if state is None:
                raise NotFoundError(
                    f"GPU {device.uuid} of share {share.name} is not here",
                    hint="see `allot devices` and `allot doctor`",
                )
            need = limits[device.uuid]
            have = memory_room(state, may_oversubscribe=device.is_oversubscribed)
            have = max(0, have - promised)
            if need > have:
                raise DoesNotFitError(
                    f"share {share.name} finds no room on {device.uuid} ({device.name}): need"
                    f" {format_bytes(need)}, have {format_bytes(have)} beside the other shares",
                    hint="make room (`allot ps` shows who has it, `allot suspend` frees some),"
                    f" then: allot resume {share.name}",
                )
            promised += overflow(state, need)
        suspension = replace(share.suspension, is_complete=False)
        write_record(again.directory, replace(share, suspension=suspension))


def _bring_back(driver: Checkpointer, pids: Collection[int]) -> None:
    """Restore all, then let all go on."""
    for pid in pids:
        with _unless_gone(pid):
            if driver.state(pid) is ProcessState.CHECKPOINTED:
                driver.restore(pid)
    for pid in pids:
        with _unless_gone(pid):
            if driver.state(pid) is ProcessState.LOCKED:
                driver.unlock(pid)


def _put_back(driver: Checkpointer, pids: Collection[int]) -> None:
    """Take those off again that were restored already."""
    for pid in sorted(pids):
        with suppress(DriverRefusal):
            if driver.state(pid) is ProcessState.LOCKED:
                driver.checkpoint(pid)
    _signal(pids, signal.SIGSTOP)


# ---- both ----


@contextmanager
def _alone(found: Found) -> Iterator[None]:
    """Keep others from suspending or resuming the same share meanwhile; raise `BusyError`."""
    try:
        descriptor = os.open(found.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise explained(error, found.directory, "open the share") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(
                f"another `allot` suspends or resumes share {found.name} at this moment",
                hint="wait for it, and see `allot ps`",
            ) from None
        yield
    finally:
        os.close(descriptor)


def _readable(found: Found) -> Share:
    if found.problem:
        raise found.problem
    if found.share is None or found.ledger is None:
        raise StateError(f"{found.directory}: cannot be read")
    return found.share


def _record(folder: StateFolder, found: Found, suspension: Suspension | None) -> None:
    """Write down how far it is, beside whatever else has changed in the record meanwhile."""
    with folder.locked():
        again = find(folder, found.id)
        share = _readable(again)
        if share.suspension != suspension:
            write_record(again.directory, replace(share, suspension=suspension))


def _set_suspended(folder: StateFolder, found: Found, *, is_suspended: bool) -> None:
    """Give it no more turns on its devices, or turns again."""
    with folder.locked():
        again = find(folder, found.id)
        mode = mode_named(_readable(again).mode)
        for uuid, terms in again.terms.items():
            if terms.is_suspended != is_suspended:
                changed = replace(terms, is_suspended=is_suspended)
                mode.revise(again.directory, uuid, changed, devices=folder.devices)


def _members(found: Found, share: Share) -> set[int]:
    return census([(share, found.directory)])[share.id]


def _users(found: Found, readings: Readings) -> dict[int, ProcessView]:
    """Return the share's processes that use a GPU, by their number on this machine."""
    again = Found(
        found.id, found.directory, found.share, ledger.read(found.directory), terms=found.terms
    )
    users = {}
    for process in view([again], readings)[0].processes:
        if not any(process.used):
            continue  # it has loaded the driver, and nothing of it is on a GPU
        if process.pid is None:
            raise BusyError(
                f"process {process.pid_inside} of share {found.name} ({process.command}) cannot be"
                " found on this machine: its number is one of its container's",
                hint="run `allot` as root, where all processes can be seen",
            )
        users[process.pid] = process
    return users


def _check_ours(pids: Iterable[int]) -> None:
    """Raise `StateError` where one of the processes is not ours to stop."""
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


def _stop(found: Found, share: Share) -> set[int]:
    """Stop all programs of the share, and those that they start meanwhile; return them."""
    stopped: set[int] = set()
    for _ in range(_ROUNDS):
        new = _members(found, share) - stopped
        if not new:
            break
        _signal(new, signal.SIGSTOP)
        stopped |= new
    return stopped


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # it has ended: neither stopped nor in the way
            os.kill(pid, number)


@contextmanager
def _unless_gone(pid: int) -> Iterator[None]:
    """Let a refusal pass when the process has ended: nothing of it is on a GPU then."""
    before = named(pid)
    try:
        yield
    except DriverRefusal:
        if is_alive(before):
            raise


def _refused(share: Share, refusal: DriverRefusal) -> AllotError:
    hint = "memory that it shares with other processes (IPC), or MPS, rules checkpoints out"
    if refusal.code == _NOT_READY:
        hint = "its GPU work did not end in time: try again with a longer --timeout"
    return BusyError(
        f"share {share.name} cannot be suspended: the driver refused the {refusal}", hint=hint
    )


def _not_back(share: Share, refusal: DriverRefusal) -> AllotError:
    message = f"share {share.name} stays suspended: the driver refused the {refusal}"
    hint = f"when that is mended: allot resume {share.name}"
    if refusal.code == _OUT_OF_MEMORY:
        hint = "something outside of the shares has the room: see `allot ps` and `allot devices`"
        return DoesNotFitError(message, hint=hint)
    return BusyError(message, hint=hint)

# SPDX-License-Identifier: Apache-2.0
"""`allot suspend`: a share's programs stop, and its GPU memory is for others.

The driver checkpoints every process of the share that uses a GPU, all or none of them; then all of
the share's programs are stopped (SIGSTOP). Where that cannot be, and the share may oversubscribe,
the shim moves what can move to the host instead.

What is done is known from the driver's own state of each process, not from what was written
down: who was cut off in the midst of it is finished by the next `allot suspend` or `allot resume`.
While it is suspended by a checkpoint, none of the share's memory is booked.
"""

import os
import signal
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from allotment import ledger
from allotment.devices.checkpoints import DriverRefusal, ProcessState
from allotment.model.errors import (
    AllotError,
    BusyError,
    DoesNotFitError,
    NotFoundError,
    NotInModeError,
    PrerequisiteError,
)
from allotment.model.formats import format_bytes
from allotment.model.requests import MPS
from allotment.model.shares import Share, SuspendedBy, Suspension
from allotment.shares.checkpointing import (
    Checkpointer,
    DriverOf,
    bring_back,
    driver_of,
    states,
    take_off,
)
from allotment.shares.folders import StateFolder
from allotment.shares.lives import Found, find
from allotment.shares.processes import is_alive, named
from allotment.shares.sessions import refuse_inside
from allotment.shares.stopping import (
    ROUNDS,
    check_ours,
    gpu_users,
    members,
    send,
    still_stopped,
    stop,
    stopped_already,
)
from allotment.shares.suspensions import Outcome, alone, readable, record, set_suspended
from allotment.shares.views import ProcessView, Readings

__all__ = ["suspend"]

_NOT_READY = 600
_POLL_S = 0.01


def suspend(
    folder: StateFolder,
    name: str,
    readings: Readings,
    *,
    patience_s: float,
    drivers: DriverOf = driver_of,
) -> Outcome:
    """Stop a share's programs and free its GPU memory; finish it where that was begun before.

    `patience_s` is how long running GPU work may take to end, for each process. Raises
    `PrerequisiteError` (the driver cannot, or not for such a share), `BusyError` (it does not do it
    now, process and reason are named; or it is done already), `NotFoundError` (its programs ended
    meanwhile) or `StateError`; then the share runs as before.
    """
    refuse_inside(f"allot suspend {name}")
    found = find(folder, name)
    try:
        with alone(found):
            return _suspend(folder, find(folder, found.id), readings, patience_s, drivers)
    except AllotError as error:
        if found.directory.exists():
            raise
        raise NotFoundError(
            f"share {found.name} has ended meanwhile", hint="see `allot ps`"
        ) from error


def _suspend(
    folder: StateFolder,
    found: Found,
    readings: Readings,
    patience_s: float,
    drivers: DriverOf,
) -> Outcome:
    share = readable(found)
    _check_mode(share)
    if share.suspension and share.suspension.is_complete:
        raise BusyError(
            f"share {share.name} is suspended already",
            hint=f"bring it back with: allot resume {share.name}",
        )
    check_ours(members(found, share))
    with drivers(Path(share.machine) if share.machine else None) as driver:
        users = gpu_users(found, readings)
        begun = share.suspension or Suspension(
            time.time(), SuspendedBy.CHECKPOINT, stopped=stopped_already(found, share)
        )
        suspension = replace(begun, by=_way(driver, found, share, users))
        kept = still_stopped(suspension.stopped)
        record(folder, found, suspension)
        try:
            set_suspended(folder, found, is_suspended=True)
            if suspension.by is SuspendedBy.CHECKPOINT:
                stopped = _checkpoint(driver, found, share, users, readings, patience_s, kept)
            else:
                _await_eviction(found, users, patience_s)
                stopped = stop(found, share)
        except BaseException:
            _undo(folder, driver, found, share, readings, kept)
            raise
        record(folder, found, replace(suspension, is_complete=True))
    return Outcome(found.name, suspension.by, len(stopped))


def _check_mode(share: Share) -> None:
    """Raise `NotInModeError` for a mode whose programs cannot be taken off a GPU.

    What NVIDIA documents of checkpoints (group CUDA_CHECKPOINT of the driver's interface, README of
    cuda-checkpoint) says nothing of MPS clients, and a try that fails may leave the program broken.
    The shim's way needs turns, which these shares do not take.
    """
    if share.mode == MPS:
        raise NotInModeError(
            f"share {share.name} cannot be suspended: its programs are clients of MPS, and the"
            " driver is not known to checkpoint those without harm",
            hint="end its programs instead, or run what is to be suspended with --mode soft",
        )


def _way(
    driver: Checkpointer, found: Found, share: Share, users: Mapping[int, ProcessView]
) -> SuspendedBy:
    """Return how this share can be suspended; raise an error that says why it cannot."""
    movable = all(device.is_oversubscribed for device in share.devices)
    managed = [pid for pid, user in users.items() if user.pid_inside in _managed(found)]
    if managed:
        if movable:
            return _evictable(share, users, f"process {managed[0]} has managed memory")
        raise PrerequisiteError(
            f"share {share.name} cannot be suspended: process {managed[0]}"
            f" ({users[managed[0]].command}) has managed memory (cuMemAllocManaged), and drivers do"
            " not checkpoint such a process without harm to it",
            hint="end that process, or run the share's programs with --oversubscribe",
        )
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
    if movable and refusal.is_unsupported:
        return _evictable(share, users, f"the driver has no checkpoints ({refusal})")
    raise _refused(share, refusal)


def _managed(found: Found) -> set[int]:
    """Return the processes that have managed memory, by the numbers that they know."""
    return {each.pid for each in ledger.read(found.directory).processes if each.managed}


def _evictable(share: Share, users: Mapping[int, ProcessView], why: str) -> SuspendedBy:
    """Check that the shim can do it instead of the driver: it has to be in every process."""
    outside = [pid for pid, user in users.items() if not user.is_enforced]
    if outside:
        raise PrerequisiteError(
            f"share {share.name} cannot be suspended: {why}, and the shim is not in process"
            f" {outside[0]} ({users[outside[0]].command})",
            hint=f"end that process: kill {outside[0]}",
        )
    _check_host_room(share, users)
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
    kept: Collection[int],
) -> set[int]:
    """Checkpoint all that use a GPU and stop all that are there; return whom it stopped.

    `kept` are stopped from before: those of them that use a GPU run until they are locked.
    """
    stopped: set[int] = set()
    done: set[int] = set()
    pending = set(users)
    for _ in range(ROUNDS):
        # Those that came up while others were being stopped are stopped too, and cannot be locked.
        send(pending & (stopped | set(kept)), signal.SIGCONT)
        try:
            take_off(driver, sorted(pending), patience_s)
        except DriverRefusal as error:
            raise _refused(share, error) from error
        done |= pending
        stopped |= stop(found, share)
        pending = set(gpu_users(found, readings)) - done
        if not pending:
            return stopped
    raise BusyError(
        f"share {share.name} starts programs faster than they can be suspended",
        hint="end what starts them, then suspend it again",
    )


def _await_eviction(found: Found, users: Mapping[int, ProcessView], patience_s: float) -> None:
    """Wait until the shims have moved the share's memory; raise `BusyError` naming who has not."""
    deadline = time.monotonic() + patience_s
    while True:
        processes = ledger.read(found.directory).processes
        left = [each for each in processes if each.managed - each.evicted]
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
    folder: StateFolder,
    driver: Checkpointer,
    found: Found,
    share: Share,
    readings: Readings,
    kept: Collection[int],
) -> None:
    """Let the share run as before, as far as that can be done; what cannot is left recorded."""
    # Whatever fails here leaves it recorded as on its way: `allot resume` goes on from there.
    with suppress(AllotError, DriverRefusal):
        there = members(found, share)
        send(there.difference(kept), signal.SIGCONT)
        known = states(driver, there | set(gpu_users(found, readings)))
        send((pid for pid in known if known[pid] is not ProcessState.RUNNING), signal.SIGCONT)
        try:
            bring_back(driver, known)
        finally:
            send(kept, signal.SIGSTOP)
        set_suspended(folder, found, is_suspended=False)
        record(folder, found, None)


def _refused(share: Share, refusal: DriverRefusal) -> AllotError:
    if refusal.is_unsupported:
        return PrerequisiteError(
            f"share {share.name} cannot be suspended: the driver has no checkpoints ({refusal}),"
            " and the share's memory may not live on the host",
            hint="use a driver from 570 on (on x86-64), or run its programs with --oversubscribe",
        )
    hint = "memory that it shares with other processes (IPC), or MPS, rules checkpoints out"
    if refusal.code == _NOT_READY:
        hint = "its GPU work did not end in time: try again with a longer --timeout"
    return BusyError(
        f"share {share.name} cannot be suspended: the driver refused the {refusal}", hint=hint
    )

# SPDX-License-Identifier: Apache-2.0
"""`allot suspend`: stops a share's programs and frees their GPU memory for others.

The driver checkpoints all processes of the share that use a GPU, or none; then the programs are
stopped (SIGSTOP). If the driver cannot, and the share may oversubscribe, the shim moves memory to
the host. Progress is read from the driver's state of each process, so that the next `allot suspend`
or `allot resume` finishes an interrupted one.
"""

import os
import signal
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from allotment import ledger
from allotment.devices.checkpoints import Checkpoints, DriverRefusal, ProcessState
from allotment.model.errors import (
    AllotError,
    BusyError,
    DoesNotFitError,
    NotFoundError,
    NotInModeError,
    PrerequisiteError,
)
from allotment.model.formats import need_and_have
from allotment.model.shares import Runner, Share, SuspendedBy, Suspension
from allotment.model.structs import replace
from allotment.modes import traits_of
from allotment.shares.folders import StateFolder
from allotment.shares.lifecycle import find
from allotment.shares.process_tree import is_alive, is_stopped, living_runner, named
from allotment.shares.run.command import refuse_inside
from allotment.shares.status import ProcessView, Readings
from allotment.shares.suspension import (
    DriverOf,
    LockedShare,
    SuspendOutcome,
    check_ours,
    checkpoint_all,
    driver_of,
    locked_share,
    restore_all,
    send,
    states,
    still_stopped,
)

_NOT_READY = 600
_POLL_S = 0.01
_ROUNDS = 8
"""Number of searches for programs that started while others were being stopped."""


def suspend(
    folder: StateFolder,
    name: str,
    readings: Readings,
    *,
    patience_s: float,
    drivers: DriverOf = driver_of,
) -> SuspendOutcome:
    """Stop a share's programs and free its GPU memory; finish an interrupted suspend.

    `patience_s`: time for the running GPU work of each process. Raises `PrerequisiteError` (not
    possible with this driver or share), `BusyError` (not possible now, with process and reason; or
    already suspended), `NotFoundError` (its programs ended) or `StateError`; it runs on then.
    """
    refuse_inside(f"allot suspend {name}")
    found = find(folder, name)
    try:
        with locked_share(folder, found, readings) as locked:
            return _suspend(locked, patience_s, drivers)
    except AllotError as error:
        if found.directory.exists():
            raise
        raise NotFoundError(
            f"share {found.name} has ended meanwhile", hint="see `allot ps`"
        ) from error


def _suspend(locked: LockedShare, patience_s: float, drivers: DriverOf) -> SuspendOutcome:
    share = locked.share
    _check_mode(share)
    if share.suspension and share.suspension.is_complete:
        raise BusyError(
            f"share {share.name} is suspended already", hint=f"run: allot resume {share.name}"
        )
    check_ours(locked.members())
    with drivers(locked.machine) as driver:
        users = locked.gpu_users()
        begun = share.suspension or Suspension(
            time.time(), SuspendedBy.CHECKPOINT, stopped=_stopped_already(locked)
        )
        suspension = replace(begun, by=_way(driver, locked, users))
        kept = still_stopped(suspension.stopped)
        locked.record(suspension)
        try:
            locked.set_suspended(is_suspended=True)
            if suspension.by is SuspendedBy.CHECKPOINT:
                stopped = _checkpoint(driver, locked, users, patience_s, kept)
            else:
                _await_eviction(locked, users, patience_s)
                stopped = _stop(locked)
        except BaseException:
            _undo(driver, locked, kept)
            raise
        locked.record(replace(suspension, is_complete=True))
    return SuspendOutcome(share.name, suspension.by, len(stopped))


def _check_mode(share: Share) -> None:
    """Raise `NotInModeError` for a mode whose programs cannot be taken off a GPU.

    NVIDIA documents no checkpoints of MPS clients (group CUDA_CHECKPOINT of the driver's interface,
    README of cuda-checkpoint), and a failed try may break the program. The shim needs turns, which
    these shares do not take.
    """
    if why := traits_of(share.mode).pinned_because:
        raise NotInModeError(
            f"share {share.name} cannot be suspended: {why}",
            hint="end its programs instead, or run programs to be suspended with --mode soft",
        )


def _way(driver: Checkpoints, locked: LockedShare, users: Mapping[int, ProcessView]) -> SuspendedBy:
    """Return how this share can be suspended; raise an error with the reason if it cannot."""
    share = locked.share
    movable = all(device.is_oversubscribed for device in share.devices)
    processes = ledger.read(locked.found.directory).processes
    managed = {process.pid for process in processes if process.managed}
    for pid, user in users.items():
        if user.pid_inside not in managed:
            continue
        if movable:
            return _evictable(share, users, f"process {pid} has managed memory")
        raise PrerequisiteError(
            f"share {share.name} cannot be suspended: process {pid} ({user.command}) has managed"
            " memory (cuMemAllocManaged), which a driver's checkpoint may damage",
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


def _evictable(share: Share, users: Mapping[int, ProcessView], why: str) -> SuspendedBy:
    """Check that the shim, which replaces the driver here, is in every process."""
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
    """Raise `DoesNotFitError` if the host has no room for the memory on the devices."""
    if share.machine:
        return  # memory of simulated GPUs is host memory already
    need = sum(sum(user.used) for user in users.values())
    have = _available_bytes()
    if need > have:
        raise DoesNotFitError(
            f"share {share.name} has no room on the host: {need_and_have(need, have)}",
            hint="free host memory, or end the share's programs",
        )


def _available_bytes() -> int:
    with Path("/proc/meminfo").open(encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _checkpoint(
    driver: Checkpoints,
    locked: LockedShare,
    users: Mapping[int, ProcessView],
    patience_s: float,
    kept: Collection[int],
) -> set[int]:
    """Checkpoint all GPU users, stop all processes, and return those that it stopped.

    `kept`: stopped before; those that use a GPU run until they are locked.
    """
    stopped: set[int] = set()
    done: set[int] = set()
    pending = set(users)
    for _ in range(_ROUNDS):
        # A stopped process cannot be locked; new ones were stopped with the others.
        send(pending & (stopped | set(kept)), signal.SIGCONT)
        try:
            checkpoint_all(driver, sorted(pending), patience_s)
        except DriverRefusal as error:
            raise _refused(locked.share, error) from error
        done |= pending
        stopped |= _stop(locked)
        pending = set(locked.gpu_users()) - done
        if not pending:
            return stopped
    raise BusyError(
        f"share {locked.share.name} starts programs faster than they can be suspended",
        hint="end the program that starts them, then suspend the share again",
    )


def _await_eviction(
    locked: LockedShare, users: Mapping[int, ProcessView], patience_s: float
) -> None:
    """Wait until the shims have moved the share's memory; raise `BusyError` after `patience_s`."""
    deadline = time.monotonic() + patience_s
    while True:
        processes = ledger.read(locked.found.directory).processes
        pending = [process for process in processes if process.managed - process.evicted]
        if not pending:
            return
        if time.monotonic() > deadline:
            pids = {user.pid_inside: pid for pid, user in users.items()}
            pid = pids.get(pending[0].pid, pending[0].pid)
            raise BusyError(
                f"process {pid} of share {locked.share.name} ({pending[0].command}) has not moved"
                f" its memory within {patience_s:g} s",
                hint="it may be stopped, or run a long kernel: try again with a longer --timeout",
            )
        time.sleep(_POLL_S)


def _undo(driver: Checkpoints, locked: LockedShare, kept: Collection[int]) -> None:
    """Let the share run as before, as far as possible; the rest stays recorded."""
    # After a failure here the record stays incomplete: `allot resume` continues from there.
    with suppress(AllotError, DriverRefusal):
        members = locked.members()
        send(members.difference(kept), signal.SIGCONT)
        process_states = states(driver, members | set(locked.gpu_users()))
        send(
            (pid for pid, state in process_states.items() if state is not ProcessState.RUNNING),
            signal.SIGCONT,
        )
        try:
            restore_all(driver, process_states)
        finally:
            send(kept, signal.SIGSTOP)
        locked.set_suspended(is_suspended=False)
        locked.record(None)


def _refused(share: Share, refusal: DriverRefusal) -> AllotError:
    if refusal.is_unsupported:
        return PrerequisiteError(
            f"share {share.name} cannot be suspended: the driver has no checkpoints ({refusal}),"
            " and the share's memory may not live on the host",
            hint="use a driver from 570 on (on x86-64), or run its programs with --oversubscribe",
        )
    hint = "checkpoints exclude MPS and memory shared with other processes (IPC)"
    if refusal.code == _NOT_READY:
        hint = "its GPU work did not end in time: try again with a longer --timeout"
    return BusyError(
        f"share {share.name} cannot be suspended: the driver refused the {refusal}", hint=hint
    )


def _stopped_already(locked: LockedShare) -> tuple[Runner, ...]:
    """The share's processes that another program stopped, its `allot run` (Ctrl-Z) included."""
    pids = locked.members()
    if runner := living_runner(locked.share, locked.found.directory):
        pids.add(runner.pid)
    return tuple(named(pid) for pid in sorted(pids) if is_stopped(pid))


def _stop(locked: LockedShare) -> set[int]:
    """Stop all programs of the share, also those that start meanwhile; return them."""
    stopped: set[int] = set()
    for _ in range(_ROUNDS):
        started = locked.members() - stopped
        if not started:
            break
        send(started, signal.SIGSTOP)
        stopped |= started
    return stopped

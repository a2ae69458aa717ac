# SPDX-License-Identifier: Apache-2.0
"""`allot resume`: a suspended share's memory returns to the GPU, and its programs continue.

The memory of a suspended share is not booked, so it has to find room again. It is booked before it
moves, and stays booked if `allot` is interrupted.
"""

import signal
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress

from allotment.devices.checkpoints import Checkpoints, DriverRefusal, ProcessState
from allotment.model.devices import Device
from allotment.model.errors import (
    AllotError,
    BusyError,
    DoesNotFitError,
)
from allotment.model.formats import format_bytes, need_and_have
from allotment.model.shares import Share, SuspendedBy
from allotment.model.structs import replace
from allotment.placement import memory_room, overflow
from allotment.shares.booking import booked, states_of
from allotment.shares.folders import StateFolder
from allotment.shares.lifecycle import find
from allotment.shares.process_tree import is_alive, living_runner, named
from allotment.shares.record import LoadedShare, write_record
from allotment.shares.recovery import list_shares
from allotment.shares.run.command import refuse_inside
from allotment.shares.status import ProcessView, Readings, share_status
from allotment.shares.suspension import (
    DriverOf,
    LockedShare,
    SuspendOutcome,
    check_ours,
    driver_of,
    locked_share,
    missing_gpu,
    readable,
    restore_all,
    send,
    states,
    still_stopped,
)

_OUT_OF_MEMORY = 2


def resume(
    folder: StateFolder,
    name: str,
    readings: Readings,
    devices: Iterable[Device],
    *,
    host_budget: int | None = None,
    drivers: DriverOf = driver_of,
) -> SuspendOutcome:
    """Move a suspended share's memory back and continue its programs.

    `devices` are those of its machine; `host_budget` as in `ShareOrder`. Raises `DoesNotFitError`
    (others use the room; with need and have) or `BusyError` (not suspended, or the driver refuses);
    then it stays suspended. Programs that end on the way are no error: pending signals arrive when
    they continue.
    """
    refuse_inside(f"allot resume {name}")
    found = find(folder, name)
    try:
        with locked_share(folder, found, readings) as locked:
            return _resume(locked, tuple(devices), host_budget, drivers)
    except AllotError:
        suspension = found.share.suspension if found.share else None
        if suspension is None or found.directory.exists():
            raise
        return SuspendOutcome(found.name, suspension.by, 0, has_ended=True)


def _resume(
    locked: LockedShare,
    devices: Collection[Device],
    host_budget: int | None,
    drivers: DriverOf,
) -> SuspendOutcome:
    share, before = locked.share, locked.share.suspension
    if before is None:
        raise BusyError(
            f"share {share.name} is not suspended",
            hint=f"see `allot ps`; to suspend it: allot suspend {share.name}",
        )
    members = locked.members()
    check_ours(members)
    kept = still_stopped(before.stopped)
    by_checkpoint = before.by is SuspendedBy.CHECKPOINT
    users = locked.gpu_users()
    if by_checkpoint:
        _check_device_room(locked, users, devices)
    _book(locked, devices, host_budget)
    try:
        with drivers(locked.machine) as driver:
            if by_checkpoint:
                _restore(driver, share, members | set(users))
    except BaseException:
        locked.record(before)
        raise
    send(kept, signal.SIGSTOP)  # some of them had to run to be restored
    locked.set_suspended(is_suspended=False)
    members |= locked.members()
    continued = [named(pid) for pid in sorted(members - kept)]
    send(members - kept, signal.SIGCONT)
    if runner := living_runner(share, locked.found.directory):
        send({runner.pid} - kept, signal.SIGCONT)
    locked.record(None)
    alive = sum(map(is_alive, continued))
    return SuspendOutcome(share.name, before.by, alive, has_ended=bool(continued) and not alive)


def _restore(driver: Checkpoints, share: Share, pids: Collection[int]) -> None:
    """Restore all checkpointed processes, also those that the driver no longer lists."""
    process_states = {
        pid: state
        for pid, state in states(driver, pids).items()
        if state is not ProcessState.RUNNING
    }
    failed = [pid for pid, state in process_states.items() if state is ProcessState.FAILED]
    if failed:
        raise BusyError(
            f"process {failed[0]} of share {share.name} did not survive its checkpoint",
            hint=f"end it (kill -9 {failed[0]}), then: allot resume {share.name}",
        )
    send(process_states, signal.SIGCONT)  # its own threads do part of the work
    try:
        restore_all(driver, process_states)
    except BaseException as error:
        _checkpoint_again(driver, process_states)
        send(process_states, signal.SIGSTOP)
        if isinstance(error, DriverRefusal):
            raise _not_restored(share, error) from error
        raise


def _checkpoint_again(driver: Checkpoints, pids: Collection[int]) -> None:
    """Take restored processes off again, as far as the driver allows."""
    for pid in sorted(pids):
        with suppress(DriverRefusal):
            if driver.state(pid) is ProcessState.LOCKED:
                driver.checkpoint(pid)


def _book(locked: LockedShare, devices: Iterable[Device], host_budget: int | None) -> None:
    """Book the share's memory again; raise `DoesNotFitError` without room for it."""
    folder = locked.folder
    with folder.locked():
        found = find(folder, locked.share.id)
        share = readable(found)
        if share.suspension is None or not share.is_off_device:
            return  # still booked
        bookings = booked(other for other in list_shares(folder) if other.id != found.id)
        device_states = {
            state.device.uuid: state for state in states_of(devices, bookings, host_budget)
        }
        promised_bytes = 0
        limits = found.limits()
        for device in share.devices:
            state = device_states.get(device.uuid)
            if state is None:
                raise missing_gpu(share, device)
            need = limits[device.uuid]
            have = memory_room(state, may_oversubscribe=device.is_oversubscribed)
            have = max(0, have - promised_bytes)
            if need > have:
                raise DoesNotFitError(
                    f"share {share.name} has no room on {device.uuid} ({device.name}):"
                    f" {need_and_have(need, have)} beside the other shares",
                    hint="make room (`allot ps` shows the shares, `allot suspend` frees memory),"
                    f" then: allot resume {share.name}",
                )
            promised_bytes += overflow(state, need)
        suspension = replace(share.suspension, is_complete=False)
        write_record(found.directory, replace(share, suspension=suspension))


def _check_device_room(
    locked: LockedShare, users: Mapping[int, ProcessView], devices: Iterable[Device]
) -> None:
    """Raise `DoesNotFitError` if users outside of shares take the room.

    Checked in advance, because a process may be lost if its restore finds no room.
    """
    share, found = locked.share, locked.found
    others = [other for other in list_shares(locked.folder) if other.id != share.id]
    outside: Counter[str] = Counter()
    for user in share_status([found, *others], locked.readings, machines=(locked.machine,)).outside:
        outside[user.uuid] += user.used or 0
    capacities = {device.uuid: device.allottable_bytes for device in devices}
    for index, uuid in enumerate(found.limits()):
        need = sum(user.used[index] for user in users.values())
        fixed = sum(_fixed_bytes(other, uuid) for other in others)
        have = capacities.get(uuid, need) - outside[uuid] - fixed
        if outside[uuid] and need > have:
            raise DoesNotFitError(
                f"share {share.name} has no room on {uuid}: {need_and_have(need, max(0, have))};"
                f" programs outside of shares use {format_bytes(outside[uuid])}",
                hint=f"end them (`allot ps` shows them), then: allot resume {share.name}",
            )


def _fixed_bytes(found: LoadedShare, uuid: str) -> int:
    """A share's memory on a device that cannot be moved to the host.

    Its programs write the use, so it counts up to what they may have.
    """
    if found.ledger is None or (found.share and found.share.is_off_device):
        return 0
    after_force = (each.most_bytes or 0 for each in found.devices() if each.uuid == uuid)
    most = max([found.limits().get(uuid, 0), *after_force])
    pairs = zip(found.ledger.policy.devices, found.ledger.devices, strict=True)
    return sum(
        max(0, min(use.used, most) - use.host_bytes) for policy, use in pairs if policy.uuid == uuid
    )


def _not_restored(share: Share, refusal: DriverRefusal) -> AllotError:
    message = f"share {share.name} stays suspended: the driver refused the {refusal}"
    hint = f"fix the cause, then: allot resume {share.name}"
    if refusal.code == _OUT_OF_MEMORY:
        hint = "programs outside of the shares use the memory: see `allot ps` and `allot devices`"
        return DoesNotFitError(message, hint=hint)
    return BusyError(message, hint=hint)

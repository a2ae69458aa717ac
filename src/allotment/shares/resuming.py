# SPDX-License-Identifier: Apache-2.0
"""`allot resume`: a suspended share's memory comes back, and its programs go on.

Its memory has to find room again: it was booked by nobody while its share was suspended. It is
booked before it moves, and stays so while `allot` is cut off in the midst of it.
"""

import signal
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from allotment.devices.checkpoints import DriverRefusal, ProcessState
from allotment.model.devices import Device
from allotment.model.errors import (
    AllotError,
    BusyError,
    DoesNotFitError,
    NotFoundError,
)
from allotment.model.formats import format_bytes
from allotment.model.shares import Share, SuspendedBy
from allotment.placement import memory_room, overflow
from allotment.shares.checkpointing import (
    Checkpointer,
    DriverOf,
    bring_back,
    driver_of,
    put_back,
    states,
)
from allotment.shares.folders import StateFolder
from allotment.shares.lives import Found, booked, find, look, states_of
from allotment.shares.processes import is_alive, named
from allotment.shares.records import write_record
from allotment.shares.sessions import refuse_inside
from allotment.shares.stopping import check_ours, gpu_users, members, send, still_stopped
from allotment.shares.suspensions import Outcome, alone, readable, record, set_suspended
from allotment.shares.views import ProcessView, Readings, overview

__all__ = ["resume"]

_OUT_OF_MEMORY = 2


def resume(
    folder: StateFolder,
    name: str,
    readings: Readings,
    devices: Iterable[Device],
    *,
    host_budget: int | None = None,
    drivers: DriverOf = driver_of,
) -> Outcome:
    """Bring a suspended share's memory back and let its programs go on.

    `devices` are those of its machine; `host_budget` as in `lives.Order`. Raises `DoesNotFitError`
    (with need and have: others have the room by now) or `BusyError` (it is not suspended, or the
    driver refuses); then it stays as it was. That its programs end on the way is no error: signals
    that were sent to them meanwhile come when they go on.
    """
    refuse_inside(f"allot resume {name}")
    found = find(folder, name)
    try:
        with alone(found):
            again = find(folder, found.id)
            return _resume(folder, again, readings, tuple(devices), host_budget, drivers)
    except AllotError:
        suspension = found.share.suspension if found.share else None
        if suspension is None or found.directory.exists():
            raise
        return Outcome(found.name, suspension.by, 0, has_ended=True)


def _resume(
    folder: StateFolder,
    found: Found,
    readings: Readings,
    devices: Collection[Device],
    host_budget: int | None,
    drivers: DriverOf,
) -> Outcome:
    share = readable(found)
    if share.suspension is None:
        raise BusyError(
            f"share {share.name} is not suspended",
            hint=f"see `allot ps`; to suspend it: allot suspend {share.name}",
        )
    there = members(found, share)
    check_ours(there)
    before = share.suspension
    kept = still_stopped(before.stopped)
    by_checkpoint = before.by is SuspendedBy.CHECKPOINT
    users = gpu_users(found, readings)
    if by_checkpoint:
        _check_device_room(folder, found, users, devices, readings)
    _book(folder, found, devices, host_budget)
    try:
        with drivers(Path(share.machine) if share.machine else None) as driver:
            if by_checkpoint:
                _bring_back(driver, share, there | set(users))
    except BaseException:
        record(folder, found, before)
        raise
    send(kept, signal.SIGSTOP)  # those of them that had to run to be brought back
    set_suspended(folder, found, is_suspended=False)
    there |= members(found, share)
    woken = [named(pid) for pid in sorted(there - kept)]
    send(there - kept, signal.SIGCONT)
    if share.runner and is_alive(share.runner):
        send({share.runner.pid} - kept, signal.SIGCONT)
    record(folder, found, None)
    left = sum(map(is_alive, woken))
    return Outcome(found.name, before.by, left, has_ended=bool(woken) and not left)


def _bring_back(driver: Checkpointer, share: Share, pids: Collection[int]) -> None:
    """Restore whoever was checkpointed, those too that the driver's lists do not show any more."""
    held = {
        pid: state
        for pid, state in states(driver, pids).items()
        if state is not ProcessState.RUNNING
    }
    failed = [pid for pid, state in held.items() if state is ProcessState.FAILED]
    if failed:
        raise BusyError(
            f"process {failed[0]} of share {share.name} did not survive its checkpoint",
            hint=f"end it (kill -9 {failed[0]}), then: allot resume {share.name}",
        )
    send(held, signal.SIGCONT)  # its own threads do part of it
    try:
        bring_back(driver, held)
    except BaseException as error:
        put_back(driver, held)
        send(held, signal.SIGSTOP)
        if isinstance(error, DriverRefusal):
            raise _not_back(share, error) from error
        raise


def _book(
    folder: StateFolder, found: Found, devices: Iterable[Device], host_budget: int | None
) -> None:
    """Book the share's memory again; raise `DoesNotFitError` where there is no room for it."""
    known = {device.uuid: device for device in devices}
    with folder.locked():
        again = find(folder, found.id)
        share = readable(again)
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


def _check_device_room(
    folder: StateFolder,
    found: Found,
    users: Mapping[int, ProcessView],
    devices: Iterable[Device],
    readings: Readings,
) -> None:
    """Raise `DoesNotFitError` where users outside of shares leave no room for what comes back.

    To try it is no way to find out: a process whose restore found no room may be lost.
    """
    outside: dict[str, int] = {}
    others = [each for each in look(folder) if each.id != found.id]
    machine = found.share.machine if found.share else None
    seen = overview([found, *others], readings, machines=(Path(machine) if machine else None,))
    for one in seen.outside:
        outside[one.uuid] = outside.get(one.uuid, 0) + (one.used or 0)
    capacities = {device.uuid: device.allottable_bytes for device in devices}
    for index, uuid in enumerate(found.limits()):
        need = sum(user.used[index] for user in users.values())
        kept = sum(_kept_on(each, uuid) for each in others)
        have = capacities.get(uuid, need) - outside.get(uuid, 0) - kept
        if outside.get(uuid) and need > have:
            raise DoesNotFitError(
                f"share {found.name} finds no room on {uuid}: need {format_bytes(need)}, have"
                f" {format_bytes(max(0, have))}; programs outside of shares have"
                f" {format_bytes(outside[uuid])}",
                hint=f"end them (`allot ps` shows them), then: allot resume {found.name}",
            )


def _kept_on(found: Found, uuid: str) -> int:
    """Return what a share has on a device and nobody can move away."""
    if found.ledger is None or (found.share and found.share.is_off_device):
        return 0
    pairs = zip(found.ledger.policy.devices, found.ledger.devices, strict=True)
    return sum(max(0, use.used - use.host_bytes) for policy, use in pairs if policy.uuid == uuid)


def _not_back(share: Share, refusal: DriverRefusal) -> AllotError:
    message = f"share {share.name} stays suspended: the driver refused the {refusal}"
    hint = f"when that is mended: allot resume {share.name}"
    if refusal.code == _OUT_OF_MEMORY:
        hint = "something outside of the shares has the room: see `allot ps` and `allot devices`"
        return DoesNotFitError(message, hint=hint)
    return BusyError(message, hint=hint)

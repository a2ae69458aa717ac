# SPDX-License-Identifier: Apache-2.0
"""The life of a share on one machine: `create` is the one call that every front door ends in.

A share is booked from the moment its directory appears (one rename, under the folder's lock) until
that directory is gone. One whose runner died stays as long as any process is in it, and is removed
by whoever looks next. What is damaged stays booked at its recorded size, is shown with its error,
and never keeps the others from working.
"""

import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from allotment.ledger.layout import NAME_BYTES
from allotment.model.devices import Device
from allotment.model.errors import (
    BusyError,
    DoesNotFitError,
    NotFoundError,
    StateError,
    UsageError,
)
from allotment.model.formats import format_count
from allotment.model.placements import Placed, Placement
from allotment.model.requests import Request
from allotment.model.shares import Injection, Share, ShareDevice, ShareId
from allotment.modes import all_modes, mode_named
from allotment.placement import unknown_selectors
from allotment.shares.bookings import Booking, allotted, booked, states_of
from allotment.shares.cdi import remove_spec, spec_name
from allotment.shares.folders import StateFolder, explained
from allotment.shares.found import Found, read_share
from allotment.shares.guarantees import settle
from allotment.shares.modes_of_gpus import read_allowed, refusal_on
from allotment.shares.placing import Order, place
from allotment.shares.processes import census, is_alive, named
from allotment.shares.records import RECORD, write_record
from allotment.shares.steps import step
from allotment.shares.traces import read_traces, write_traces

__all__ = [
    "Booking",
    "Fill",
    "Found",
    "Order",
    "allotted",
    "booked",
    "build_placed",
    "create",
    "create_placed",
    "destroy",
    "find",
    "look",
    "place_and_build",
    "recover",
    "remove",
    "states_of",
    "users_of",
]

_DRAFT = ".new-"
_REMOVED = ".old-"
# As CDI has the names of devices.
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", re.ASCII)


Fill = Callable[[Path, Share], None]
"""Puts more files into a share's directory before it is seen; the share tells where it will be."""


def create(folder: StateFolder, order: Order, devices: Iterable[Device]) -> tuple[Share, Path]:
    """Place a request on the devices and make its share; return it and its directory.

    Raises `DoesNotFitError` (with need and have per device), `NotFoundError` (a selector names no
    device), `UsageError` (the name), `StateError`. Nothing is left behind by a failure.
    """
    check_name(order.name)
    known = tuple(devices)
    broken = tuple(each.device for each in order.problems if each.device)
    unknown = unknown_selectors((*known, *broken), order.request)
    if unknown:
        there = "\n".join(f"  {device.uuid} ({device.name})" for device in known)
        raise NotFoundError(
            f"no GPU here is {' or '.join(map(repr, unknown))}; there are:\n{there}",
            hint="name a GPU by its UUID (or the start of it) or model, as `allot devices` has it",
        )
    folder.prepare()
    with folder.locked():
        others = recover(folder)
        _check_name_is_free(others, order.name)
        return place_and_build(folder, order, known, others)


def create_placed(folder: StateFolder, order: Order, placement: Placement) -> tuple[Share, Path]:
    """Make the share of a placement that is made: on a slice that is there for it.

    Raises as `create`.
    """
    check_name(order.name)
    with folder.locked():
        _check_name_is_free(recover(folder), order.name)
        return build_placed(folder, order, placement, fill=None)


def build_placed(
    folder: StateFolder, order: Order, placement: Placement, *, fill: Fill | None
) -> tuple[Share, Path]:
    """Do the part of `create_placed` that needs the folder's lock, which the caller holds."""
    _refuse_kept(folder, order, placement)
    return _build(folder, order, placement, fill)


def _refuse_kept(folder: StateFolder, order: Order, placement: Placement) -> None:
    """Refuse a slice of a GPU that was said to be for other modes while it was cut."""
    if order.owner and order.devices:
        return  # chosen before by who chooses elsewhere
    said = read_allowed(folder)
    for placed in placement.devices:
        if why := refusal_on(said, placed.device, order.request.mode):
            raise DoesNotFitError(
                f"GPU {placed.gpu or placed.device.uuid}: {why}",
                hint="`allot devices` shows what GPUs are for",
            )


def place_and_build(
    folder: StateFolder,
    order: Order,
    devices: Iterable[Device],
    others: Iterable[Found],
    *,
    fill: Fill | None = None,
) -> tuple[Share, Path]:
    """Do the part of `create` that needs the folder's lock, which the caller holds.

    `others` are all shares that are there.
    """
    there = list(others)
    # Its inventory may be older than another's switching MIG on.
    now = [_as_cut(folder, device) for device in devices]
    placement = place(order, now, booked(there, seen_by=order.owner), allowed=read_allowed(folder))
    if order.owner is not None:
        chosen = {placed.device.uuid for placed in placement.devices}
        settle(folder, order.owner, there, devices=chosen)
    step("create.placed")
    return _build(folder, order, placement, fill)


def _as_cut(folder: StateFolder, device: Device) -> Device:
    """Return the device as it is for others while `allot` has it in MIG mode: nobody's."""
    if device.mig or not (folder.mig / device.uuid).is_dir():
        return device
    from allotment.modes.mig.journal import Journal  # late: few have MIG, and all would load it

    if not Journal(folder.mig / device.uuid).is_switched:
        return device
    return replace(device, mig=True, reserved_bytes=device.memory_bytes)


def check_name(name: str | None) -> None:
    """Raise `UsageError` unless the name can be a share's (it becomes a CDI device's name too)."""
    if name is not None and not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot be a share's name",
            hint="use up to 63 letters, digits, dots, dashes and underscores; a letter or digit at"
            " both ends",
        )


def _check_name_is_free(others: Iterable[Found], name: str | None) -> None:
    for other in others:
        if name is not None and name in {other.name, other.id}:
            raise UsageError(
                f"there is a share named {name!r} already ({other.id})",
                hint="choose another --name, or see it with `allot ps`",
            )


def _build(
    folder: StateFolder, order: Order, placement: Placement, fill: Fill | None
) -> tuple[Share, Path]:
    """Make the share's directory out of sight, then show it whole."""
    share_id = order.id or ShareId(os.urandom(6).hex())
    share = Share(
        id=share_id,
        name=str(order.owner) if order.owner else order.name or share_id,
        created=time.time(),
        mode=order.request.mode,
        devices=tuple(_booked(placed, order.request) for placed in placement.devices),
        injection=order.injection,
        machine=str(order.machine) if order.machine else None,
        spec=order.spec,
        runner=order.runner,
        command=order.command,
        user_id=os.geteuid(),
        cdi_spec=str(order.cdi_folder / spec_name(share_id)) if order.cdi_folder else None,
        owner=order.owner,
    )
    directory = folder.share(share_id)
    draft = folder.shares / f"{_DRAFT}{share_id}"
    try:
        if draft.exists():  # of a try that was cut off
            _abandon(folder, draft, share)
        draft.mkdir()
        draft.chmod(0o755)
        step("create.drafted")
        mode = mode_named(share.mode)
        name = share.name if len(share.name.encode()) < NAME_BYTES else share_id
        mode.create(draft, placement, share=share_id, name=name, devices=folder.devices)
        step("create.enforced")
        if order.injection in {Injection.CDI, Injection.MOUNTS}:
            # Whatever user a container's programs run as, they take slots and turns in it.
            for path in (draft / "usage", *draft.glob("leases-*")):
                if path.exists():
                    path.chmod(0o666)
        if fill is not None:
            fill(draft, share)
        step("create.filled")
        write_record(draft, share)
        step("create.recorded")
        draft.rename(directory)
        step("create.shown")
    except OSError as error:
        _abandon(folder, draft, share)
        raise explained(error, directory, "make the share") from error
    except BaseException:
        _abandon(folder, draft, share)
        raise
    return share, directory


def _booked(placed: Placed, request: Request) -> ShareDevice:
    where = placed.device.slice_of
    return ShareDevice(
        placed.device.uuid,
        placed.device.name,
        placed.memory_bytes,
        compute=placed.compute or request.compute,
        is_oversubscribed=request.may_oversubscribe,
        gpu="" if where is None else where.gpu,
        profile="" if where is None else where.profile,
    )


def _abandon(folder: StateFolder, draft: Path, share: Share) -> None:
    """Undo a share that was not to be: with the lock held, so that nobody saw it."""
    for mode in all_modes():
        mode.destroy(share.id, devices=folder.devices)
    shutil.rmtree(draft, ignore_errors=True)


def look(folder: StateFolder) -> list[Found]:
    """Return every share, oldest first; nothing is changed but dead processes' use reclaimed."""
    try:
        names = sorted(path.name for path in folder.shares.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise explained(error, folder.shares, "list the shares") from error
    found = [read_share(folder.share(ShareId(name))) for name in names if not name.startswith(".")]
    present = [each for each in found if each is not None]
    return sorted(present, key=lambda each: (each.share.created if each.share else 0.0, each.id))


def recover(folder: StateFolder) -> list[Found]:
    """Remove what ended without its runner's care; return the shares that remain.

    The caller holds the folder's lock: then whatever is half made or half removed is left over.
    """
    for path in folder.shares.iterdir():
        if path.name.startswith((_DRAFT, _REMOVED)) or _is_nobodys(path):
            shutil.rmtree(path, ignore_errors=True)
    shares = look(folder)
    there = {each.id: tuple(each.limits()) for each in shares}
    for mode in all_modes():
        mode.sweep(there, devices=folder.devices)
    orphans = [each for each in shares if each.share and _is_orphan(each.share)]
    if not orphans:
        return shares
    members = census((each.share, each.directory) for each in orphans if each.share)
    ended = {
        each.id
        for each in orphans
        if not members[each.id] and not (each.ledger and each.ledger.processes)
    }
    for each in orphans:
        if each.id in ended:
            remove(folder, each)
        else:
            _remember(each.directory, members[each.id])
    return [each for each in shares if each.id not in ended]


def _is_nobodys(path: Path) -> bool:
    """Tell a folder of a container runtime's making: some make what they are to mount and miss.

    It has directories where a share has files, and would be in the way of the share of that id.
    """
    return (
        path.is_dir()
        and not path.is_symlink()
        and not (path / RECORD).exists()
        and not (path / "policy").is_file()
    )


def _is_orphan(share: Share) -> bool:
    return share.runner is not None and not is_alive(share.runner)


def _remember(directory: Path, members: Iterable[int]) -> None:
    """Write down who is in a share that no runner stands for any more: nothing else may tell."""
    before = read_traces(directory)
    after = replace(before, members=tuple(map(named, sorted(members))))
    if after != before:
        with suppress(StateError):  # another user's share: its owner sees to it
            write_traces(directory, after)


def end(folder: StateFolder, share: Share, *, strangers: Collection[int] = ()) -> bool:
    """End a share whose command has ended, unless processes are left in it; tell if it is gone.

    What is left is written down. `strangers` are children of the runner that are not the share's.
    """
    directory = folder.share(share.id)
    with folder.locked():
        found = read_share(directory)
        if found is None:
            return True
        left = census([(share, directory)], strangers=strangers)[share.id]
        left.discard(os.getpid())
        if left or (found.ledger and found.ledger.processes):
            _remember(directory, left)
            return False
        remove(folder, found)
    return True


def destroy(folder: StateFolder, found: Found, *, force: bool) -> None:
    """Remove a share that nothing uses; with `force`, one in use as well.

    Programs that run in it keep the memory limit that they have, but it is booked no longer, and
    they have the compute that others leave. Those of a suspended share would be lost: nothing else
    tells that they can be resumed. Raises `BusyError` for these, and without `force`; `StateError`
    when it cannot be removed.
    """
    with folder.locked():
        again = read_share(found.directory)
        if again is None:
            return
        users = users_of(again)
        some = ", ".join(map(str, sorted(users)[:8]))
        if again.share and again.share.suspension and users - {_runner_pid(again.share)}:
            raise BusyError(
                f"share {again.name} is suspended, and its processes ({some}) could never go on"
                " without it",
                hint=f"bring it back first (allot resume {again.name}), or end them by kill -9",
            )
        if users and not force:
            raise BusyError(
                f"share {again.name} is in use by"
                f" {format_count(len(users), 'process', 'processes')} ({some})",
                hint="end them first, or add --force: they keep running, with memory that is booked"
                " no longer and the compute that others leave",
            )
        if again.owner and not force:
            raise BusyError(
                f"share {again.name} is a pod's: while that is there, its container may start again"
                " and need it",
                hint=f"delete the pod (kubectl -n {again.owner.namespace} delete pod"
                f" {again.owner.pod}), and the node agent removes it; or add --force",
            )
        remove(folder, again)


def _runner_pid(share: Share) -> int | None:
    return share.runner.pid if share.runner else None


def users_of(found: Found) -> set[int]:
    """Return the processes of a share, by their number here, or inside where that is not known."""
    users = {process.pid for process in found.ledger.processes} if found.ledger else set()
    if found.share:
        members = census([(found.share, found.directory)])[found.id]
        if members:
            return members
        if found.share.runner and is_alive(found.share.runner):
            users.add(found.share.runner.pid)
    return users


def remove(folder: StateFolder, found: Found) -> None:
    """Take a share out of sight in one step, then delete it. The caller holds the folder's lock.

    What names it elsewhere goes first, while the share still tells of it.
    """
    if found.share and found.share.cdi_spec:
        remove_spec(Path(found.share.cdi_spec))
    step("remove.unpublished")
    grave = found.directory.with_name(f"{_REMOVED}{found.id}")
    try:
        found.directory.rename(grave)
    except FileNotFoundError:
        return
    except OSError as error:
        raise explained(error, found.directory, "remove the share") from error
    step("remove.hidden")
    for mode in all_modes():
        mode.destroy(found.id, devices=folder.devices)
    step("remove.freed")
    shutil.rmtree(grave, ignore_errors=True)
    step("remove.cleared")


def find(folder: StateFolder, name: str) -> Found:
    """Return the share of that name, id or beginning of an id; raise `NotFoundError`."""
    shares = look(folder) if folder.exists() else []
    exact = [each for each in shares if name in {each.name, each.id}]
    begins = [each for each in shares if name and each.id.startswith(name)]
    matches = exact or begins
    if len(matches) == 1:
        return matches[0]
    if matches:
        ids = ", ".join(each.id for each in matches)
        raise UsageError(f"{name!r} may be any of {ids}", hint="write more of the id")
    there = ", ".join(each.name for each in shares) or "none"
    raise NotFoundError(f"there is no share {name!r}", hint=f"the shares are: {there}")

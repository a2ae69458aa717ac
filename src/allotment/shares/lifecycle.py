# SPDX-License-Identifier: Apache-2.0
"""The life of a share on one machine. Every front door calls `create`.

A share is booked from the rename that shows its directory, under the folder's lock, until the
directory is removed. After its runner's death it stays while any process uses it; then the next
command removes it. A damaged share stays booked at its recorded size, is shown with its error, and
never affects the others.
"""

import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from allotment.ledger.layout import NAME_BYTES
from allotment.model.devices import Device
from allotment.model.errors import (
    BusyError,
    DoesNotFitError,
    NotFoundError,
    UsageError,
)
from allotment.model.formats import format_bytes, format_count, format_pids, meant
from allotment.model.placements import Placed, Placement
from allotment.model.shares import Amounts, Injection, Share, ShareDevice
from allotment.modes import mode_named, turns
from allotment.shares.booking import apply_guarantees
from allotment.shares.failpoints import failpoint
from allotment.shares.folders import StateFolder, explained
from allotment.shares.mode_lives import Acquired, life_of
from allotment.shares.placing import ShareOrder, place_now, refuse_kept
from allotment.shares.process_tree import census
from allotment.shares.record import (
    LoadedShare,
    check_owner,
    note_event,
    read_share,
    write_record,
)
from allotment.shares.recovery import (
    DRAFT,
    list_shares,
    recover,
    remember_members,
    remove,
    users_of,
)

# A CDI device's name.
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", re.ASCII)


class FrontDoor(msgspec.Struct, frozen=True, kw_only=True):
    """What a front door adds when a share is created."""

    locked: Callable[[], AbstractContextManager[None]]
    """Holds the state folder's lock."""
    known_shares: Callable[[], list[LoadedShare]] | None = None
    """Returns the shares as read before; None: all are read and recovered."""
    fill: Callable[[Path, Share, Sequence[Device]], None] | None = None
    """Adds files to a share's folder before it is visible. The devices are all that were offered.
    """
    publish: Callable[[Share, Path], None] | None = None
    """Publishes a complete share elsewhere. If it fails, the share is removed."""


def create(
    folder: StateFolder,
    order: ShareOrder,
    devices: Iterable[Device],
    *,
    door: FrontDoor | None = None,
) -> tuple[Share, Path]:
    """Create a share in the order's mode on some of the devices; return it and its folder.

    Raises `DoesNotFitError` (with need and have per device), `NotFoundError` (a selector names no
    device), `NotInModeError` (impossible in its mode), `UsageError` (the name), `StateError`, and
    for mode mig the driver's errors. A failure leaves nothing behind.
    """
    door = door or FrontDoor(locked=folder.locked)
    if order.name is not None:
        check_name(order.name)
    if order.allowance is not None:
        from allotment.shares import allowances  # late: few machines have a configuration

        allowances.check_one_share(order.allowance, order)
    offered = tuple(devices)
    with life_of(order.request.mode).acquire(folder, order, offered) as acquired:
        if order.owner is None:
            folder.prepare()
        with door.locked():
            shares = recover(folder) if door.known_shares is None else door.known_shares()
            _check_is_new(shares, acquired.order)
            try:
                share, directory = _place_and_build(folder, acquired, door, shares, offered)
            except DoesNotFitError:
                if door.known_shares is None or acquired.placement is not None:
                    raise
                # An ended share whose runner died may hold the missing room.
                share, directory = _place_and_build(
                    folder, acquired, door, recover(folder), offered
                )
            try:
                if door.publish is not None:
                    door.publish(share, directory)
            except BaseException:
                if (built := read_share(directory)) is not None:
                    remove(folder, built)
                raise
            return share, directory


def _place_and_build(
    folder: StateFolder,
    acquired: Acquired,
    door: FrontDoor,
    shares: Sequence[LoadedShare],
    offered: Sequence[Device],
) -> tuple[Share, Path]:
    order, placement, devices = acquired.order, acquired.placement, acquired.devices
    if order.allowance is not None:
        from allotment.shares import allowances  # late: few machines have a configuration

        if placement is None:
            devices = allowances.allowed_devices(order.allowance, order, devices, shares)
        else:
            allowances.check_placement(order.allowance, placement, offered, shares)
    if placement is not None:
        refuse_kept(folder, order, placement)
    else:
        placement = place_now(folder, order, devices, shares)
        if order.owner is not None:
            chosen = {placed.device.uuid for placed in placement.devices}
            apply_guarantees(folder, order.owner, shares, devices=chosen)
        failpoint("create.placed")

    return _build(folder, acquired, placement, door)


def check_name(name: str) -> None:
    """Raise `UsageError` for an invalid name: it becomes a CDI device's name too."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot be a share's name",
            hint="use up to 63 letters, digits, dots, dashes and underscores; a letter or digit at"
            " both ends",
        )


def _check_is_new(others: Iterable[LoadedShare], order: ShareOrder) -> None:
    name = order.name
    for other in others:
        if other.id == order.id:
            raise ValueError(order)
        if name is not None and name in {other.name, other.id}:
            raise UsageError(
                f"there is a share named {name!r} already ({other.id})",
                hint="choose another --name, or see it with `allot ps`",
            )


def _build(
    folder: StateFolder, acquired: Acquired, placement: Placement, door: FrontDoor
) -> tuple[Share, Path]:
    """Build the share's folder out of sight, then make it visible by one rename."""
    order = acquired.order
    if order.injection is None:
        raise ValueError(order)
    share_id, spec = order.id, None
    if order.cdi_folder:
        from allotment.shares.cdi import spec_name

        spec = str(order.cdi_folder / spec_name(share_id))
    share = Share(
        id=share_id,
        name=str(order.owner) if order.owner else order.name or share_id,
        created=time.time(),
        mode=order.request.mode,
        devices=tuple(_booked(placed, order) for placed in placement.devices),
        injection=order.injection,
        machine=str(order.machine) if order.machine else None,
        spec=order.spec,
        runner=order.runner,
        command=order.command,
        cdi_spec=spec,
        owner=order.owner,
    )
    directory = folder.share(share_id)
    draft = folder.shares / f"{DRAFT}{share_id}"
    try:
        if draft.exists():  # an attempt was cut off
            _abandon(folder, draft, share)
        draft.mkdir()
        draft.chmod(0o755)
        failpoint("create.drafted")
        mode = mode_named(share.mode)
        name = share.name if len(share.name.encode()) < NAME_BYTES else share_id
        mode.create(draft, placement, share=share_id, name=name, devices=folder.devices)
        failpoint("create.enforced")
        if folder.is_closed() or order.injection in {Injection.CDI, Injection.MOUNTS}:
            # Its programs take slots and turns as any user.
            for path in (draft / "usage", *draft.glob("seat-*")):
                if path.exists():
                    path.chmod(0o666)
        if door.fill is not None:
            door.fill(draft, share, acquired.devices)
        failpoint("create.filled")
        write_record(draft, share)
        failpoint("create.recorded")
        draft.rename(directory)
        failpoint("create.shown")
    except OSError as error:
        _abandon(folder, draft, share)
        raise explained(error, directory, "make the share") from error
    except BaseException:
        _abandon(folder, draft, share)
        raise
    note_event(folder, "created", share=share.name, share_id=share_id, text=_described(share))
    return share, directory


def _described(share: Share) -> str:
    parts = (f"{format_bytes(each.memory_bytes)} of {each.uuid}" for each in share.devices)
    return f"{', '.join(parts)}, mode {share.mode}"


def _booked(placed: Placed, order: ShareOrder) -> ShareDevice:
    origin = placed.device.slice_of
    request, asked = order.request, order.asked
    size = placed.device.allottable_bytes
    return ShareDevice(
        placed.device.uuid,
        placed.device.name,
        placed.memory_bytes,
        compute=placed.compute or request.compute,
        is_oversubscribed=request.may_oversubscribe,
        gpu=origin.gpu if origin else "",
        profile=origin.profile if origin else "",
        asked=None
        if asked is None
        else Amounts(asked.memory.of(size), asked.compute.guarantee, asked.compute.ceiling),
    )


def _abandon(folder: StateFolder, draft: Path, share: Share) -> None:
    """Undo an unfinished share. The lock is held, so no other process saw it."""
    turns.free_seats(folder.devices, share.id)
    shutil.rmtree(draft, ignore_errors=True)


def end(folder: StateFolder, share: Share, *, excluded: Collection[int] = ()) -> bool:
    """Remove a share whose command has ended, unless processes still use it; return if it is gone.

    Remaining processes are recorded. `excluded` are children of the runner outside of the share.
    """
    directory = folder.share(share.id)
    with folder.locked():
        loaded = read_share(directory, written=share)
        if loaded is None:
            return True
        members = census([(share, directory)], excluded=excluded)[share.id]
        members.discard(os.getpid())
        if members or (loaded.ledger and loaded.ledger.processes):
            remember_members(directory, members)
            return False
        remove(folder, loaded)
    return True


def destroy(
    folder: StateFolder, loaded: LoadedShare, *, force: bool, ends_owned: bool = False
) -> None:
    """Remove an unused share; with `force`, one in use as well.

    With `force` its programs keep their memory limit, which is no longer booked, and get spare
    compute only. Those of a suspended share could not be resumed: `BusyError` in any case.
    Raises `BusyError` for a share in use without `force`, and for one of a pod or a claim without
    `force` or `ends_owned`; `StateError` if it cannot be removed or belongs to another user.
    """
    check_owner(loaded)
    with folder.locked():
        current = read_share(loaded.directory)
        if current is None:
            return
        users = users_of(current)
        pids = format_pids(users)
        share = current.share
        if share and share.suspension and users - {share.runner.pid if share.runner else None}:
            raise BusyError(
                f"share {current.name} is suspended, and its processes ({pids}) could never go on"
                " without it",
                hint=f"bring it back first (allot resume {current.name}), or end them by kill -9",
            )
        if users and not force:
            raise BusyError(
                f"share {current.name} is in use by"
                f" {format_count(len(users), 'process', 'processes')} ({pids})",
                hint="end them first, or add --force: they keep running, with memory that is booked"
                " no longer and the compute that others leave",
            )
        owner = None if force or ends_owned else current.owner
        if owner and owner.is_claim:
            raise BusyError(
                f"share {current.name} belongs to a ResourceClaim: its containers may start again"
                " and need it",
                hint=f"delete the pods that use the claim ({owner.users_of_claim} lists"
                " them), and the node agent removes it; or add --force",
            )
        if owner:
            raise BusyError(
                f"share {current.name} belongs to a pod: its container may start again and need it",
                hint=f"delete the pod (kubectl -n {owner.namespace} delete pod"
                f" {owner.pod}), and the node agent removes it; or add --force",
            )
        remove(folder, current)


def find(folder: StateFolder, name: str) -> LoadedShare:
    """Return the share with that name, id or prefix of an id; raise `NotFoundError`."""
    return pick(list_shares(folder) if folder.exists() else [], name)


def pick(shares: Sequence[LoadedShare], name: str) -> LoadedShare:
    """Return the one of these shares that `find` finds."""
    exact = [share for share in shares if name in {share.name, share.id}]
    matches = exact or [share for share in shares if name and share.id.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        ids = ", ".join(share.id for share in matches)
        raise UsageError(f"{name!r} may be any of {ids}", hint="write more of the id")
    names = [share.name for share in shares]
    raise NotFoundError(
        f"there is no share {name!r}{meant(name, names)}",
        hint=f"the shares are: {', '.join(names) or 'none'}",
    )

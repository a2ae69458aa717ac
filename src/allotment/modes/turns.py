# SPDX-License-Identifier: Apache-2.0
"""The devices' folders, with the files by which shares take turns.

    devices/UUID/contract       the promises to each share
    devices/UUID/seats/SERIAL   a share's running and waiting processes, and used time

A share has a seat in the contract of each of its devices. Its folder has hard links to the contract
and to its seat's file, and a link to the folder of all seats, which its programs only read. A seat
is
taken before its share is visible and freed after it is hidden. `sweep` frees seats left by an
interruption in between. The caller holds the state folder's lock.
"""

import os
import shutil
import stat
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Final

import msgspec

from allotment.files import read_regular
from allotment.ledger.lease_layout import CONTRACT_SIZE
from allotment.ledger.leases import (
    CONTRACT,
    SEATS,
    Contract,
    Seat,
    Terms,
    create_device,
    damaged,
    free,
    mend,
    read_contract,
    take,
)
from allotment.model.errors import LedgerError
from allotment.model.shares import ShareId

_DRAFT = ".new-"
_SHARED = 0o002


class LinkNames(msgspec.Struct, frozen=True):
    """The names in a share's folder for one of its devices."""

    contract: str
    seats: str
    """The folder of all seats' files."""
    own: str
    """The share's own file in it, which its programs write."""


@cache
def link_names(index: int) -> LinkNames:
    """Return the names in a share's folder for its device number `index`."""
    return LinkNames(f"{CONTRACT}-{index}", f"{SEATS}-{index}", f"seat-{index}")


def take_seat(devices: Path, uuid: str, share: str, terms: Terms) -> Seat:
    """Take a seat for a share; creates the device's folder if necessary.

    Frees the share's earlier seat, left by an interrupted attempt. Repairs damage by programs of
    other shares. Raises `DoesNotFitError` (guarantees, seats) or `LedgerError`.
    """
    folder = _device_folder(devices, uuid)
    with suppress(OSError):  # `take` reports the problem
        if share.encode() in read_regular(folder / CONTRACT, CONTRACT_SIZE):
            _free_seats(folder, read_contract(folder / CONTRACT), share)
    seat = take(folder, share, terms)
    _mend(folder, read_contract(folder / CONTRACT))
    return seat


def link_files(devices: Path, uuid: str, directory: Path, index: int, seat: Seat) -> None:
    """Link the files of a device into a share's directory, as its device number `index`."""
    names, device = link_names(index), devices / uuid
    with _opened(device) as (folder, seats):
        for place, source, name in (
            (folder, CONTRACT, names.contract),
            (seats, str(seat.serial), names.own),
        ):
            status = os.stat(source, dir_fd=place, follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode):
                raise damaged(device / source, "it is no file")
            os.link(source, directory / name, src_dir_fd=place, follow_symlinks=False)
    # The share is moved to its place beside its draft: the relative path stays right.
    (directory / names.seats).symlink_to(os.path.relpath(device / SEATS, directory))


def free_seats(devices: Path, share: str) -> None:
    """Free every seat of a share. May be repeated.

    Unreadable or read-only contracts are left to the next `sweep`.
    """
    for path in _folders(devices):
        with suppress(LedgerError):
            _free_seats(path, read_contract(path / CONTRACT), share)


def sweep(devices: Path, shares: Mapping[ShareId, Collection[str]]) -> None:
    """Free the seats of removed shares, and of shares without a part of that device.

    `shares` are all shares, with their devices' UUIDs. A damaged folder that no share uses is
    removed; the next share creates it again. Damage to one in use is repaired.
    """
    used = {uuid for uuids in shares.values() for uuid in uuids}
    for path in _folders(devices):
        if path.name.startswith(_DRAFT):
            shutil.rmtree(path, ignore_errors=True)
            continue
        try:
            contract = read_contract(path / CONTRACT)
        except LedgerError:
            if path.name not in used:
                shutil.rmtree(path, ignore_errors=True)
            continue
        # A share with unreadable devices keeps its seats.
        users = {share for share, uuids in shares.items() if not uuids or path.name in uuids}
        removed = {taken.share_id for taken in contract.seats} - users
        for share in removed:
            with suppress(LedgerError):  # another user's: its owner frees it
                _free_seats(path, contract, share)
        with suppress(LedgerError):  # as above
            if removed:
                contract = read_contract(path / CONTRACT)
            _mend(path, contract)
            _remove_old_seats(path, contract)


def files_of_turns(devices: Path, *, among: Collection[str] | None = None) -> Iterator[Path]:
    """Yield the contracts and the seats' files, which programs of several shares can open.

    `among` are the UUIDs of devices; None: all.
    """
    for path in _folders(devices) if among is None else map(devices.joinpath, among):
        yield path / CONTRACT
        with suppress(OSError):  # a folder of an older version
            yield from (path / SEATS).iterdir()


_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def _opened(device: Path) -> Iterator[tuple[int, int]]:
    """Open the folder of a device, and that of its seats; raise `OSError`.

    In a folder for all users the first user of a device owns them, and can put a link to any folder
    in their place at any time.
    """
    folder = os.open(device, _FOLDER)
    try:
        seats = os.open(SEATS, _FOLDER, dir_fd=folder)
        try:
            yield folder, seats
        finally:
            os.close(seats)
    finally:
        os.close(folder)


def _mend(path: Path, contract: Contract) -> None:
    """Repair the seats' files of a device, and record the shares that damaged them."""
    with suppress(OSError), _opened(path) as (_, seats):  # a folder of an older version, say
        _mend_in(seats, path, contract)


def _mend_in(seats: int, path: Path, contract: Contract) -> None:
    for taken in contract.seats:
        with suppress(LedgerError):  # another user's: its owner repairs it
            if damage := mend(f"/proc/self/fd/{seats}/{taken.seat.serial}"):
                record_tampering(
                    f"GPU {path.name}: the file by which share {taken.share_id} takes turns was"
                    f" {damage}, by a program of it; it is repaired",
                    [taken.share_id],
                    device=path.name,
                )


def _remove_old_seats(path: Path, contract: Contract) -> None:
    """Remove the files of seats that were never taken, or could not be removed when freed."""
    serials = {str(taken.seat.serial) for taken in contract.seats}
    with suppress(OSError), _opened(path) as (_, seats):  # another user's, or an older version's
        for name in os.listdir(seats):  # noqa: PTH208 - names are all
            if name not in serials and not name.startswith("."):
                os.unlink(name, dir_fd=seats)


def _free_seats(path: Path, contract: Contract, share: str) -> None:
    for taken in contract.seats:
        if taken.share_id == share:
            free(path, taken.seat)


def _folders(devices: Path) -> list[Path]:
    try:
        return [path for path in devices.iterdir() if not path.is_symlink()]
    except OSError:  # created by the first share
        return []


def _device_folder(devices: Path, uuid: str) -> Path:
    """Return a device's folder; it appears by one rename, complete."""
    path = devices / uuid
    is_shared = bool(devices.stat().st_mode & _SHARED)
    if path.is_symlink():
        raise damaged(path / CONTRACT, "its folder is a link")
    if path.is_dir():
        _make_seats(path, 0o1777 if is_shared else 0o755)
        return path
    # A name of its own: another user's command may have been killed here. `sweep` removes it.
    draft = devices / f"{_DRAFT}{uuid}-{os.urandom(6).hex()}"
    draft.mkdir()
    draft.chmod(0o755)
    create_device(draft, uuid)
    # In a folder for all users, each of them takes seats.
    (draft / CONTRACT).chmod(0o666 if is_shared else 0o644)
    (draft / SEATS).chmod(0o1777 if is_shared else 0o755)
    draft.rename(path)
    return path


def _make_seats(device: Path, mode: int) -> None:
    """Make the folder of seats that a device's folder of an older version lacks.

    Its shares take turns among themselves until they end. Raises `OSError`.
    """
    folder = os.open(device, _FOLDER)
    try:
        with suppress(FileExistsError):
            os.mkdir(SEATS, dir_fd=folder)
            seats = os.open(SEATS, _FOLDER, dir_fd=folder)
            try:
                os.fchmod(seats, mode)  # not by its path, where a link may be by now
            finally:
                os.close(seats)
    finally:
        os.close(folder)


_MOST: Final = 256
"""Hostile programs can cause any number: the oldest are dropped."""


class Damage(msgspec.Struct, frozen=True):
    """A file that was damaged, and is repaired."""

    message: str
    shares: tuple[ShareId, ...]
    """Shares whose programs have access to the file."""
    device: str = ""
    """UUID of the device, if the file is one by which its shares take turns."""


_damages: deque[Damage] = deque(maxlen=_MOST)  # its methods are atomic


def record_tampering(message: str, shares: Collection[str], *, device: str = "") -> None:
    """Record a damage for `take_damages`."""
    _damages.append(Damage(message, tuple(map(ShareId, sorted(shares))), device))


def take_damages() -> tuple[Damage, ...]:
    """Return the damages recorded in this process since the last call, oldest first."""
    taken = []
    while _damages:
        try:
            taken.append(_damages.popleft())
        except IndexError:  # another thread took the last one
            break
    return tuple(taken)

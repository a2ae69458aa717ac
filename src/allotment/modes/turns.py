# SPDX-License-Identifier: Apache-2.0
"""The devices' folders: where the shares of a device have the files by which they take turns.

    devices/UUID/contract       what each share is promised
    devices/UUID/leases         who runs, who waits, and what each has had

A share has a seat in the contract of each of its devices, and hard links to both files. A seat is
taken before its share can be seen and freed after it cannot be any more; whatever is cut off in
between leaves a seat of a share that is not there, which `sweep` frees. The caller holds the state
folder's lock.
"""

import os
import shutil
import stat
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from allotment.ledger.leases import (
    CONTRACT,
    LEASES,
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
from allotment.modes.damages import put_down

__all__ = ["leave", "link", "link_names", "sit", "sweep"]

_DRAFT = ".new-"
_SHARED = 0o002


def link_names(index: int) -> tuple[str, str]:
    """Return what a share calls both files of its device number `index`."""
    return f"{CONTRACT}-{index}", f"{LEASES}-{index}"


def sit(devices: Path, uuid: str, share: str, terms: Terms) -> Seat:
    """Take a seat for a share, making the device's folder if it is the first.

    One that it has already is of a try that was cut off: it is freed. What programs of other
    shares damaged is put right. Raises `DoesNotFitError` (guarantees, seats) or `LedgerError`.
    """
    folder = _device_folder(devices, uuid)
    with suppress(OSError):  # taking the seat says what is wrong
        if share.encode() in (folder / CONTRACT).read_bytes():
            _free_seats(folder, read_contract(folder / CONTRACT), share)
    seat = take(folder, share, terms)
    _mend(folder, beside=share)
    return seat


def link(devices: Path, uuid: str, directory: Path, index: int) -> None:
    """Put both files of a device into a share's directory, as its device number `index`."""
    for file, name in zip((CONTRACT, LEASES), link_names(index), strict=True):
        source = devices / uuid / file
        if not stat.S_ISREG(source.lstat().st_mode):
            raise damaged(source, "it is no file")
        os.link(source, directory / name, follow_symlinks=False)


def leave(devices: Path, share: str) -> None:
    """Free every seat of a share. May be repeated; what cannot be read or written is passed over.

    The next `sweep` sees to what was passed over.
    """
    for path in _folders(devices):
        with suppress(LedgerError):
            _free_seats(path, read_contract(path / CONTRACT), share)


def sweep(devices: Path, shares: Mapping[ShareId, Collection[str]]) -> None:
    """Free the seats of shares that are not there any more, or have no part of that device.

    `shares` are those that are, with the UUIDs of their devices. A damaged folder that none of them
    has a part of is removed, so that the next share makes it anew. What programs damaged of one
    that is in use is put right.
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
        # One whose devices cannot be read keeps what it has.
        there = {share for share, uuids in shares.items() if not uuids or path.name in uuids}
        for gone in {each.share_id for each in contract.seats} - there:
            with suppress(LedgerError):  # another user's: its owner sees to it
                _free_seats(path, contract, gone)
        with suppress(LedgerError):  # as above
            _mend(path)


def _mend(path: Path, *, beside: str = "") -> None:
    """Put the leases of a device right, and say whose programs had them, but for a new share's."""
    found = mend(path)
    if not found:
        return
    had = {each.share_id for each in read_contract(path / CONTRACT).seats} - {beside}
    put_down(
        f"GPU {path.name}: the file by which its shares take turns was {found}, by a program of one"
        f" of them ({', '.join(sorted(had)) or 'those that ended'}); it is put right",
        had,
        device=path.name,
    )


def _free_seats(path: Path, contract: Contract, share: str) -> None:
    for each in contract.seats:
        if each.share_id == share:
            free(path, each.seat)


def _folders(devices: Path) -> list[Path]:
    try:
        return list(devices.iterdir())
    except OSError:  # made by the first share
        return []


def _device_folder(devices: Path, uuid: str) -> Path:
    """Return a device's folder, whole: it appears by one rename, with both files in it."""
    path = devices / uuid
    if path.is_dir():
        return path
    draft = devices / f"{_DRAFT}{uuid}"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    draft.chmod(0o755)
    create_device(draft, uuid)
    # In a folder for all users, whoever makes a share takes a seat, and its programs take turns.
    is_shared = bool(devices.stat().st_mode & _SHARED)
    (draft / CONTRACT).chmod(0o666 if is_shared else 0o644)
    (draft / LEASES).chmod(0o666 if is_shared else 0o644)
    draft.rename(path)
    return path

# SPDX-License-Identifier: Apache-2.0
"""What is written down while a share is suspended or resumed, by one `allot` at a time."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from allotment.model.errors import BusyError, StateError, UsageError
from allotment.model.requests import MIG
from allotment.model.shares import Share, SuspendedBy, Suspension
from allotment.modes import LedgerMode, ledger_mode
from allotment.shares.folders import StateFolder, explained
from allotment.shares.lives import Found, find
from allotment.shares.records import write_record

__all__ = [
    "Outcome",
    "alone",
    "check_has_ledger",
    "readable",
    "record",
    "set_suspended",
]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it."""

    name: str
    by: SuspendedBy
    programs: int
    """How many processes were stopped, or go on."""
    has_ended: bool = False
    """Its programs ended as soon as they went on: by signals that came meanwhile."""


@contextmanager
def alone(found: Found) -> Iterator[None]:
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


def readable(found: Found) -> Share:
    """Return what is written down about a share; raise what keeps it from being read."""
    if found.problem:
        raise found.problem
    if found.share is None:
        raise StateError(f"{found.directory}: cannot be read")
    check_has_ledger(found)
    return found.share


def check_has_ledger(found: Found) -> LedgerMode:
    """Return the mode that keeps a share to its ledger; raise `UsageError` where none does."""
    mode = ledger_mode(found.mode)
    if mode is None or found.ledger is None:
        why = "its slice is the hardware's" if found.mode == MIG else "Allotment is not in it"
        raise UsageError(
            f"share {found.name} is of mode {found.mode}: {why}, and nothing can be changed for"
            " its programs",
            hint="make its pod anew, with what it is to have"
            if found.owner
            else "run them in a new share that asks for something else, or in mode soft, whose"
            " shares can be resized, suspended and resumed",
        )
    return mode


def record(folder: StateFolder, found: Found, suspension: Suspension | None) -> None:
    """Write down how far it is, beside whatever else has changed in the record meanwhile."""
    with folder.locked():
        again = find(folder, found.id)
        share = readable(again)
        if share.suspension != suspension:
            write_record(again.directory, replace(share, suspension=suspension))


def set_suspended(folder: StateFolder, found: Found, *, is_suspended: bool) -> None:
    """Give it no more turns on its devices, or turns again."""
    with folder.locked():
        again = find(folder, found.id)
        readable(again)
        mode = check_has_ledger(again)
        for uuid, terms in again.terms.items():
            if terms.is_suspended != is_suspended:
                changed = replace(terms, is_suspended=is_suspended)
                mode.revise(again.directory, uuid, changed, devices=folder.devices)

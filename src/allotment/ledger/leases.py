# SPDX-License-Identifier: Apache-2.0
"""How the shares of one device take turns, seen from the agent's side: native/lease.h.

A device's folder has two files: `contract` (what each share is promised, written here alone) and
`leases` (who runs, who waits, and what each has had, written by the shares' processes). Both are
read through copies, never through a mapping. Whatever changes a contract is done by the same C
that the shim runs; the caller holds the state folder's lock meanwhile.
"""

from __future__ import annotations

import ctypes
import errno
import os
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Final

from allotment.ledger import lease_layout as layout
from allotment.ledger.lengths import cut_down
from allotment.libraries import LEDGER, load_library
from allotment.model.compute import Compute, ComputeClass
from allotment.model.errors import DoesNotFitError, LedgerError
from allotment.model.formats import format_bytes

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "CONTRACT",
    "LEASES",
    "Contract",
    "Leases",
    "PlaceState",
    "Seat",
    "SeatAccount",
    "Terms",
    "change",
    "create_device",
    "free",
    "is_governed",
    "mend",
    "read_contract",
    "read_leases",
    "read_terms",
    "take",
]

CONTRACT: Final = "contract"
LEASES: Final = "leases"

_CLASSES: Final = (ComputeClass.LATENCY, ComputeClass.NORMAL, ComputeClass.BESTEFFORT)
_FIELD: Final = 0x3FFF
_CEILING_SHIFT, _WEIGHT_SHIFT, _CLASS_SHIFT = 14, 28, 42
_HEAD_BYTES: Final = layout.LEASES_FILE_ROOT_AT + 8
_PATIENCE: Final = 1000  # how often a state that changes under the reader is read again


class PlaceState(Enum):
    """What a process does on a device."""

    IDLE = layout.PLACE_IDLE
    WAITING = layout.PLACE_WAITING
    HOLDING = layout.PLACE_HOLDING


@dataclass(frozen=True, slots=True)
class Terms:
    """What one share is promised of one device: all of it fits in one word, and changes at once."""

    compute: Compute
    is_suspended: bool = False
    """It gets no lease."""
    is_oversubscribed: bool = False

    def pack(self) -> int:
        """Return the word of a seat that is taken on these terms."""
        return (
            self.compute.guarantee
            | self.compute.ceiling << _CEILING_SHIFT
            | self.compute.weight << _WEIGHT_SHIFT
            | _CLASSES.index(self.compute.kind) << _CLASS_SHIFT
            | layout.TERMS_TAKEN
            | (layout.TERMS_GOVERNED if self.compute.is_governed else 0)
            | (layout.TERMS_SUSPENDED if self.is_suspended else 0)
            | (layout.TERMS_OVERSUBSCRIBED if self.is_oversubscribed else 0)
        )


@dataclass(frozen=True, slots=True)
class Seat:
    """A share's place in the contract of one device; another serial each time it changes hands."""

    number: int
    serial: int


@dataclass(frozen=True, slots=True)
class TakenSeat:
    """A seat of a contract that some share has."""

    seat: Seat
    share_id: str
    terms: Terms


@dataclass(frozen=True, slots=True)
class Contract:
    """What the shares of one device are promised, at one moment."""

    uuid: str
    generation: int
    quantum_us: int
    """How long a lease is while others wait."""
    is_governed: bool
    """Do the shares of the device take turns, because one of them needs that?"""
    seats: tuple[TakenSeat, ...]

    def terms_of(self, seat: Seat) -> Terms | None:
        """Return the terms of a seat; None when it is another's."""
        found = [each.terms for each in self.seats if each.seat == seat]
        return found[0] if found else None


@dataclass(frozen=True, slots=True)
class SeatAccount:
    """What one share had of one device since it took its seat. Nanoseconds of GPU time."""

    used_ns: int = 0
    borrowed_ns: int = 0
    """Of `used_ns`, what was beyond its guarantee."""
    lent_ns: int = 0
    """Guaranteed to it, unused by it, and used by others."""
    leases: int = 0
    evictions: int = 0
    """Leases that were taken from it: its process died, was stopped, or ran over."""
    holding: int = 0
    """How many of its processes hold the device: one or none."""
    waiting: int = 0
    """How many of them wait for it."""


@dataclass(frozen=True, slots=True)
class Leases:
    """The turns of one device at one moment."""

    epoch: int
    waiting: int
    accounts: dict[int, SeatAccount]
    """By the seat's serial."""


@cache
def _library() -> ctypes.CDLL:
    library = load_library(LEDGER)
    text, word, number = ctypes.c_char_p, ctypes.c_uint64, ctypes.c_int
    library.allot_contract_create.argtypes = [text, text]
    library.allot_contract_take.argtypes = [text, text, word, ctypes.POINTER(word)]
    library.allot_contract_change.argtypes = [text, number, word, word]
    library.allot_leases_mend.argtypes = [text]
    library.allot_contract_free.argtypes = [text, number, word]
    return library


def create_device(directory: Path, uuid: str) -> None:
    """Make both files of a device in its folder, which exists.

    Raises:
        LedgerError: they are there, or the disk is full or read-only.
    """
    _check(
        _library().allot_contract_create(os.fsencode(directory), uuid.encode()),
        directory,
        "make the contract",
    )


def mend(directory: Path) -> str:
    """Put `leases` right if a program of a share damaged it; return what was found, or nothing.

    It stays the same file. Programs that met it while it was short are ended (SIGBUS); all others
    go on, with accounts that begin anew where it was short.

    Raises:
        LedgerError: the contract is missing, damaged, or of another version; or the file cannot be
            written.
    """
    code = int(_library().allot_leases_mend(os.fsencode(directory)))
    _check(code, directory, "put right what its shares take turns by")
    grown = cut_down(directory / LEASES, layout.LEASES_FILE_SIZE)
    found = "cut short or written over" if code > 0 else ""
    return f"longer by {format_bytes(grown)}" if grown else found


def take(directory: Path, share_id: str, terms: Terms) -> Seat:
    """Give a share a seat in a device's contract.

    Raises:
        DoesNotFitError: all seats are taken, or the guarantees would pass the whole device.
        LedgerError: the contract cannot be read or written.
    """
    serial = ctypes.c_uint64()
    number = int(
        _library().allot_contract_take(
            os.fsencode(directory), share_id.encode(), terms.pack(), ctypes.byref(serial)
        )
    )
    if number == -errno.ENOSPC and not _has_free_seat(directory):
        raise DoesNotFitError(
            f"{layout.SEAT_UNBOOKED} shares have a part of GPU {directory.name}, and no more can",
            hint="take another GPU, or end a share that is there: `allot ps` shows them",
        )
    _check(number, directory, "take a seat in the contract")
    return Seat(number, serial.value)


def change(directory: Path, seat: Seat, terms: Terms) -> None:
    """Change the terms of a seat; in force when this returns.

    Raises:
        DoesNotFitError: the guarantees would pass the whole device.
        LedgerError: the seat is another's, or the contract cannot be read or written.
    """
    code = _library().allot_contract_change(
        os.fsencode(directory), seat.number, seat.serial, terms.pack()
    )
    _check(code, directory, "change the contract")


def free(directory: Path, seat: Seat) -> None:
    """Give a seat back; also when it is another's by now, or the contract is gone.

    Raises:
        LedgerError: the contract cannot be written.
    """
    code = int(_library().allot_contract_free(os.fsencode(directory), seat.number, seat.serial))
    if code != -errno.ENOENT:
        _check(code, directory, "give a seat back")


def read_contract(path: Path) -> Contract:
    """Read a contract, as a whole: again while it changes.

    Raises:
        LedgerError: it is missing, damaged, or of another version.
    """
    data = _contract_bytes(path)
    seats = (_taken_seat(data, number) for number in range(layout.SEAT_UNBOOKED))
    return Contract(
        uuid=_text(data, layout.CONTRACT_UUID_AT, 48),
        generation=_u64(data, layout.CONTRACT_GENERATION_AT),
        quantum_us=_u32(data, layout.CONTRACT_QUANTUM_US_AT),
        is_governed=_is_governed(data),
        seats=tuple(seat for seat in seats if seat is not None),
    )


def read_terms(path: Path, seat: Seat) -> Terms | None:
    """Read the terms of one seat from a contract; None when it is another's.

    Raises:
        LedgerError: as read_contract.
    """
    found = _taken_seat(_contract_bytes(path), seat.number)
    return found.terms if found is not None and found.seat == seat else None


def is_governed(path: Path) -> bool:
    """Tell from a contract whether the shares of the device take turns.

    Raises:
        LedgerError: as read_contract.
    """
    return _is_governed(_contract_bytes(path))


def read_leases(path: Path) -> Leases:
    """Read the turns of a device: the state in force, whole.

    Raises:
        LedgerError: it is missing, damaged, or of another version.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise damaged(path, error.strerror or str(error)) from error
    try:
        for _ in range(_PATIENCE):
            head = os.pread(descriptor, _HEAD_BYTES, 0)
            _check_head(path, head, size=_HEAD_BYTES, magic=layout.LEASES_MAGIC)
            root = head[layout.LEASES_FILE_ROOT_AT :]
            buffer = _u64(root, 0) >> 16 & 0xFFFF
            if buffer >= 2 * layout.PLACES:
                raise damaged(path, f"its state is number {buffer}")
            at = layout.LEASES_FILE_STATES_AT + buffer * layout.LEASE_STATE_SIZE
            state = os.pread(descriptor, layout.LEASE_STATE_SIZE, at)
            if os.pread(descriptor, 8, layout.LEASES_FILE_ROOT_AT) == root:
                return _leases(path, state)
    finally:
        os.close(descriptor)
    raise damaged(path, "it changes all the time")


def damaged(path: Path, why: str) -> LedgerError:
    """Return the error for a file that is not what the shares of a device take turns by."""
    return LedgerError(
        f"{path}: not a usable file of turns: {why}",
        hint="end the shares that have a part of this GPU (`allot ps`), then remove the folder:"
        f" rm -r {path.parent}",
    )


def _check(code: int, directory: Path, doing: str) -> None:
    number = -code
    if number <= 0:
        return
    if number == errno.ERANGE:
        raise DoesNotFitError(
            f"GPU {directory.name}: the guarantees of its shares would be more than 100 %",
            hint="guarantee less, or make room: `allot ps` shows the shares, `allot resize`"
            " changes one",
        )
    if number in (errno.EINVAL, errno.EPROTO):
        raise damaged(directory / CONTRACT, "damaged, truncated or of another version")
    hint = {
        errno.ENOSPC: "free some space there, or choose another folder with --state",
        errno.EROFS: "choose a writable folder with --state or ALLOTMENT_STATE",
        errno.EACCES: "run as the owner of that file, or choose another folder with --state",
        errno.ESTALE: "the share was removed meanwhile: see `allot ps`",
    }.get(number, "see `allot doctor`")
    raise LedgerError(f"{directory}: cannot {doing}: {os.strerror(number)}", hint=hint)


def _has_free_seat(directory: Path) -> bool:
    return len(read_contract(directory / CONTRACT).seats) < layout.SEAT_UNBOOKED


def _u32(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "little")


def _u64(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")


def _text(data: bytes, at: int, size: int) -> str:
    return data[at : at + size].split(b"\0", 1)[0].decode(errors="replace")


def _head(path: Path, *, size: int, magic: int) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise damaged(path, error.strerror or str(error)) from error
    _check_head(path, data, size=size, magic=magic)
    return data


def _check_head(path: Path, data: bytes, *, size: int, magic: int) -> None:
    if len(data) < size:
        raise damaged(path, f"it has {len(data)} bytes, {size} are needed")
    if _u64(data, 0) != magic:
        raise damaged(path, "it does not start with its mark")
    version = _u32(data, 8)
    if version != layout.LEASE_VERSION:
        raise LedgerError(
            f"{path}: version {version}, this program reads {layout.LEASE_VERSION}",
            hint="use the version of Allotment that made it, or end the GPU's shares and remove"
            f" {path.parent}",
        )


def _contract_bytes(path: Path) -> bytes:
    """Read a contract until it has not changed meanwhile."""
    generation = -1
    for _ in range(_PATIENCE):
        data = _head(path, size=layout.CONTRACT_SIZE, magic=layout.CONTRACT_MAGIC)
        before, generation = generation, _u64(data, layout.CONTRACT_GENERATION_AT)
        if before == generation:
            return data
    raise damaged(path, "it changes all the time")


def _is_governed(data: bytes) -> bool:
    return _u32(data, layout.CONTRACT_GOVERNED_AT) > 0


def _taken_seat(data: bytes, number: int) -> TakenSeat | None:
    at = layout.CONTRACT_SEATS_AT + number * layout.CONTRACT_SEAT_SIZE
    if not 0 <= number < layout.SEAT_UNBOOKED:  # that one is nobody's
        return None
    terms = _terms(_u64(data, at + layout.CONTRACT_SEAT_TERMS_AT))
    if terms is None:
        return None
    seat = Seat(number, _u64(data, at + layout.CONTRACT_SEAT_SERIAL_AT))
    return TakenSeat(seat, _text(data, at + layout.CONTRACT_SEAT_SHARE_ID_AT, 64), terms)


def _terms(word: int) -> Terms | None:
    """Unpack a word; None for a seat that is free. What cannot be meant becomes the nearest."""
    if not word & layout.TERMS_TAKEN:
        return None
    ceiling = min(max(word >> _CEILING_SHIFT & _FIELD, 1), layout.WHOLE)
    return Terms(
        Compute(
            guarantee=min(word & _FIELD, ceiling),
            ceiling=ceiling,
            weight=min(max(word >> _WEIGHT_SHIFT & _FIELD, 1), 10_000),
            kind=_CLASSES[min(word >> _CLASS_SHIFT & 3, len(_CLASSES) - 1)],
            is_governed=bool(word & layout.TERMS_GOVERNED),
        ),
        is_suspended=bool(word & layout.TERMS_SUSPENDED),
        is_oversubscribed=bool(word & layout.TERMS_OVERSUBSCRIBED),
    )


def _leases(path: Path, state: bytes) -> Leases:
    # A state that no process ever wrote is a hole at the end of the file: all zero.
    if len(state) < layout.LEASE_STATE_SIZE:
        if state.strip(b"\0"):
            raise damaged(path, f"its state has {len(state)} bytes")
        state = state.ljust(layout.LEASE_STATE_SIZE, b"\0")
    counts: dict[tuple[int, int], int] = {}
    for place in range(layout.PLACES):
        at = layout.LEASE_STATE_PLACES_AT + place * layout.PLACE_STATE_SIZE
        seat = int.from_bytes(state[at : at + 2], "little")
        at += layout.PLACE_STATE_STATE_AT
        doing = int.from_bytes(state[at : at + 2], "little")
        counts[seat, doing] = counts.get((seat, doing), 0) + 1
    accounts = {}
    for seat in range(layout.SEATS):
        at = layout.LEASE_STATE_SEATS_AT + seat * layout.SEAT_STATE_SIZE
        serial = _u64(state, at + layout.SEAT_STATE_SERIAL_AT)
        if serial:
            accounts[serial] = SeatAccount(
                used_ns=_u64(state, at + layout.SEAT_STATE_USED_NS_AT),
                borrowed_ns=_u64(state, at + layout.SEAT_STATE_BORROWED_NS_AT),
                lent_ns=_u64(state, at + layout.SEAT_STATE_LENT_NS_AT),
                leases=_u64(state, at + layout.SEAT_STATE_LEASES_AT),
                evictions=_u64(state, at + layout.SEAT_STATE_EVICTIONS_AT),
                holding=counts.get((seat, PlaceState.HOLDING.value), 0),
                waiting=counts.get((seat, PlaceState.WAITING.value), 0),
            )
    return Leases(
        epoch=_u64(state, layout.LEASE_STATE_EPOCH_AT),
        waiting=_u32(state, layout.LEASE_STATE_WAITING_AT),
        accounts=accounts,
    )

# SPDX-License-Identifier: Apache-2.0
"""How the shares of one device take turns, from the agent's side: native/lease.h.

A device's folder has `contract` (each share's terms, written here only) and `seats/`: a file for
each share, named by its seat's serial, which its processes write (running, waiting and used time).
Readers copy the files and never map them. The shim's own C code changes a contract, under the state
folder's lock.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from contextlib import suppress
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from allotment.files import open_regular, read_regular, without_leases
from allotment.ledger import lease_layout as layout
from allotment.libraries import LEDGER, load_library
from allotment.model.compute import Compute, ComputeClass
from allotment.model.errors import DoesNotFitError, LedgerError
from allotment.model.formats import format_bytes
from allotment.model.structs import replace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

_Content = TypeVar("_Content")

CONTRACT: Final = "contract"
SEATS: Final = "seats"

_CLASSES: Final = (ComputeClass.LATENCY, ComputeClass.NORMAL, ComputeClass.BESTEFFORT)
_FIELD: Final = 0x3FFF
_CEILING_SHIFT, _WEIGHT_SHIFT, _CLASS_SHIFT = 14, 28, 42
_CONTRACT_HEAD: Final = (layout.CONTRACT_MAGIC, layout.CONTRACT_VERSION)
_SEAT_HEAD: Final = (layout.SEAT_MAGIC, layout.SEAT_VERSION)
_HEAD_BYTES: Final = layout.LEASES_FILE_HEADS_AT + layout.OWN_PLACES * layout.PLACE_HEAD_SIZE
_PATIENCE: Final = 1000  # retries if a state changes while it is read
_LENT: Final = struct.Struct("<QQ")


class Terms(msgspec.Struct, frozen=True):
    """One share's terms on one device: they fit in one word, and change atomically."""

    compute: Compute
    is_suspended: bool = False
    """It gets no lease."""
    is_oversubscribed: bool = False

    def pack(self) -> int:
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


class Seat(msgspec.Struct, frozen=True):
    """A share's place in the contract of one device; the serial changes with each owner."""

    number: int
    serial: int


class TakenSeat(msgspec.Struct, frozen=True):
    """A seat in use by a share."""

    seat: Seat
    share_id: str
    terms: Terms


class Contract(msgspec.Struct, frozen=True):
    """The terms of all shares of one device, at one moment."""

    uuid: str
    generation: int
    is_governed: bool
    """Whether the shares take turns, because one of them needs it."""
    seats: tuple[TakenSeat, ...]


class SeatAccount(msgspec.Struct, frozen=True):
    """GPU time of one share on one device since it took its seat. Nanoseconds."""

    used_ns: int = 0
    running_ns: int = 0
    """Of work that has not ended, and is not in `used_ns` yet."""
    borrowed_ns: int = 0
    """The part of `used_ns` beyond its guarantee."""
    lent_ns: int = 0
    """Guaranteed to it, unused by it, and used by others."""
    leases: int = 0
    evictions: int = 0
    """Revoked leases: its process died, was stopped, or ran over."""
    holding: int = 0
    """Number of its processes that hold the device: one or none."""
    waiting: int = 0
    """Number of its processes that wait for the device."""


class Leases(msgspec.Struct, frozen=True):
    """The turns of one device."""

    accounts: Mapping[int, SeatAccount]
    """By the seat's serial. Missing: its file is damaged, or the share is of an older version."""
    distrusted: Mapping[int, tuple[str, ...]]
    """By the seat's serial: the shares that go on without turns with it."""
    is_governed: bool = False
    """Whether the shares take turns, because one of them needs it."""


@cache
def library() -> ctypes.CDLL:
    """Return the ledger's C library: native/ledger.h and native/lease.h."""
    loaded = load_library(LEDGER)
    text, word, number = ctypes.c_char_p, ctypes.c_uint64, ctypes.c_int
    word_out, ledger = ctypes.POINTER(ctypes.c_uint64), ctypes.c_void_p
    for name, arguments in (
        ("allot_contract_create", (text, text)),
        ("allot_contract_take", (text, text, word, word_out)),
        ("allot_contract_change", (text, number, word, word)),
        ("allot_contract_free", (text, number, word)),
        ("allot_leases_mend", (text,)),
        ("allot_ledger_create", (text, text)),
        ("allot_ledger_open", (ledger, text)),
        ("allot_ledger_close", (ledger,)),
        ("allot_ledger_clear", (ledger, word)),
        ("allot_ledger_set_limit", (text, number, word, ctypes.c_bool, word_out)),
    ):
        getattr(loaded, name).argtypes = arguments
    loaded.allot_ledger_close.restype = None
    return loaded


def create_device(directory: Path, uuid: str) -> None:
    """Create the contract and the seats' folder of a device in its existing folder.

    Raises `LedgerError` if they exist, or the disk is full or read-only.
    """
    _check(
        library().allot_contract_create(os.fsencode(directory), uuid.encode()),
        directory,
        "make the contract",
    )


def seat_file(directory: Path, serial: int) -> str:
    """Return the path of a seat's file in a device's folder."""
    return f"{directory}/{SEATS}/{serial}"


def mend(path: Path | str) -> str:
    """Repair a seat's file if a program of its share damaged it; return the damage, or nothing.

    The file stays the same. Programs of the share that access it while it is short die (SIGBUS);
    all others continue, with accounts reset in the missing part.

    Raises `LedgerError` if the file cannot be read or written.
    """
    code = int(library().allot_leases_mend(os.fsencode(path)))
    if code == -errno.ENOENT:  # a share of an older version
        return ""
    _check(code, path, "repair its file of turns")
    grown = cut_down(path, layout.LEASES_FILE_SIZE)
    damage = "truncated or overwritten" if code > 0 else ""
    return f"longer by {format_bytes(grown)}" if grown else damage


def take(directory: Path, share_id: str, terms: Terms) -> Seat:
    """Give a share a seat in a device's contract.

    Raises `DoesNotFitError` if all seats are used or guarantees exceed the device, `LedgerError` if
    the contract cannot be read or written.
    """
    serial = ctypes.c_uint64()
    number = _changed(
        directory,
        lambda: library().allot_contract_take(
            os.fsencode(directory), share_id.encode(), terms.pack(), ctypes.byref(serial)
        ),
    )
    if number == -errno.ENOSPC and (
        len(read_contract(directory / CONTRACT).seats) == layout.SEAT_UNBOOKED
    ):
        raise DoesNotFitError(
            f"{layout.SEAT_UNBOOKED} shares already use GPU {directory.name}, the most a GPU "
            "can have",
            hint="choose another GPU, or end one of its shares: see `allot ps`",
        )
    _check(number, directory, "take a seat in the contract")
    return Seat(number, serial.value)


def change(directory: Path, seat: Seat, terms: Terms) -> None:
    """Change the terms of a seat; in force on return.

    Raises `DoesNotFitError` if guarantees exceed the device, `LedgerError` if the seat has another
    owner or the contract cannot be read or written.
    """
    code = _changed(
        directory,
        lambda: library().allot_contract_change(
            os.fsencode(directory), seat.number, seat.serial, terms.pack()
        ),
    )
    _check(code, directory, "change the contract")


def free(directory: Path, seat: Seat) -> None:
    """Free a seat; does nothing if it has another owner or the contract is gone.

    Raises `LedgerError` if the contract cannot be written.
    """
    code = _changed(
        directory,
        lambda: library().allot_contract_free(os.fsencode(directory), seat.number, seat.serial),
    )
    if code != -errno.ENOENT:
        _check(code, directory, "free a seat")


def _changed(directory: Path, call: Callable[[], int]) -> int:
    """Return the result of a call that opens the device's contract for writing."""
    return without_leases([directory / CONTRACT], call)


def read_contract(path: Path) -> Contract:
    """Read a consistent contract, with retries. Raises `LedgerError`."""
    return _parsed(_contract_bytes(str(path)))


@lru_cache(maxsize=64)  # a look at many shares reads each device's contract several times
def _parsed(data: bytes) -> Contract:
    seats = (_taken_seat(data, number) for number in range(layout.SEAT_UNBOOKED))
    return Contract(
        uuid=text(data, layout.CONTRACT_UUID_AT, 48),
        generation=u64(data, layout.CONTRACT_GENERATION_AT),
        is_governed=u32(data, layout.CONTRACT_GOVERNED_AT) > 0,
        seats=tuple(seat for seat in seats if seat is not None),
    )


class DeviceFiles:
    """Reads the files of each device once, through any of the links in its shares' folders.

    For one look at many shares: what changes meanwhile is not seen. Every method raises
    `LedgerError`.
    """

    def __init__(self) -> None:
        self._contracts: dict[tuple[int, int], bytes] = {}
        self._leases: dict[tuple[int, int], Leases] = {}

    def terms(self, path: Path | str, seat: Seat) -> Terms | None:
        """Return the terms of a seat in a contract; None: the seat has another owner."""
        taken = _taken_seat(self._contract(path), seat.number)
        return taken.terms if taken is not None and taken.seat == seat else None

    def leases(self, contract: Path | str, seats: Path | str) -> Leases:
        """Return what the shares of a device publish, by its contract and its folder `seats`."""

        def read(path: str) -> Leases:
            return read_leases(_parsed(self._contract(path)), seats)

        return _once(self._leases, str(contract), read)

    def _contract(self, path: Path | str) -> bytes:
        return _once(self._contracts, str(path), _contract_bytes)


def _once(
    known: dict[tuple[int, int], _Content], path: str, read: Callable[[str], _Content]
) -> _Content:
    """Return a file's content as first read through any of its links."""
    try:
        status = os.stat(path)  # noqa: PTH116 - for each share
    except OSError as error:
        raise damaged(path, error.strerror or str(error)) from error
    inode = status.st_dev, status.st_ino
    if inode not in known:
        known[inode] = read(path)
    return known[inode]


def read_leases(contract: Contract, seats: Path | str) -> Leases:
    """Read what the shares of a device publish of themselves, in the folder `seats`.

    A damaged file is its own share's loss: that share has no account.
    """
    news = {}
    for taken in contract.seats:
        with suppress(OSError, LedgerError):
            news[taken.seat.serial] = _read_seat(f"{seats}/{taken.seat.serial}", taken.seat)
    lent: dict[int, int] = {}
    distrusted: dict[int, tuple[str, ...]] = {}
    for taken in contract.seats:
        if (new := news.get(taken.seat.serial)) is None:
            continue
        for serial, lent_ns in new.lent:
            lent[serial] = lent.get(serial, 0) + lent_ns
        for other in contract.seats if new.distrusted else ():
            if new.distrusted >> other.seat.number & 1:
                serial = other.seat.serial
                distrusted[serial] = (*distrusted.get(serial, ()), taken.share_id)
    accounts = {
        serial: replace(new.account, lent_ns=lent[serial]) if serial in lent else new.account
        for serial, new in news.items()
    }
    return Leases(accounts, distrusted, contract.is_governed)


class _SeatNews(msgspec.Struct, frozen=True):
    """The content of one seat's file."""

    account: SeatAccount
    lent: tuple[tuple[int, int], ...]
    """Serials of other seats, and their guaranteed time that this share used."""
    distrusted: int
    """A bit for each seat."""


def _read_seat(path: str, seat: Seat) -> _SeatNews:
    """Raises `OSError` or `LedgerError`."""
    descriptor = open_regular(path, os.O_RDONLY)
    try:
        for _ in range(_PATIENCE):
            head = os.pread(descriptor, _HEAD_BYTES, 0)
            _check_head(path, head, size=_HEAD_BYTES, head=_SEAT_HEAD)
            root = u64(head, layout.LEASES_FILE_ROOT_AT)
            buffer = root >> 16 & 0xFFFF
            if buffer >= 2 * layout.OWN_PLACES:
                raise damaged(path, f"its state number is {buffer}")
            at = layout.LEASES_FILE_BUFFERS_AT + buffer * layout.SEAT_BUFFER_SIZE
            data = os.pread(descriptor, layout.SEAT_BUFFER_STATE_AT, at)
            if len(data) < layout.SEAT_BUFFER_STATE_AT:
                raise damaged(path, f"its state has {len(data)} bytes")
            if u64(data, layout.SEAT_FACTS_ROOT_AT) == root:
                distrusted = u64(head, layout.LEASES_FILE_DISTRUSTED_AT)
                account = replace(_account(data, seat), running_ns=_running(head))
                return _SeatNews(account, _lent(data), distrusted)
    finally:
        os.close(descriptor)
    raise damaged(path, "it changes constantly")


def _account(data: bytes, seat: Seat) -> SeatAccount:
    at = layout.SEAT_FACTS_ACCOUNT_AT
    if u64(data, at + layout.SEAT_STATE_SERIAL_AT) != seat.serial:
        return SeatAccount()
    holding = layout.SEAT_FACTS_HOLDING_AT + layout.PLACE_STATE_STATE_AT
    return SeatAccount(
        used_ns=u64(data, at + layout.SEAT_STATE_USED_NS_AT),
        borrowed_ns=u64(data, at + layout.SEAT_STATE_BORROWED_NS_AT),
        leases=u64(data, at + layout.SEAT_STATE_LEASES_AT),
        evictions=u64(data, at + layout.SEAT_STATE_EVICTIONS_AT),
        holding=int(data[holding] == layout.PLACE_HOLDING),
        waiting=u32(data, layout.SEAT_FACTS_WAITING_AT),
    )


def _running(head: bytes) -> int:
    """Return how long the work runs that has not ended: of its processes one has the device."""
    longest = 0
    end = len(head.rstrip(b"\0"))  # most places were never taken
    for at in range(layout.LEASES_FILE_HEADS_AT, end, layout.PLACE_HEAD_SIZE):
        since = u64(head, at + layout.PLACE_HEAD_RUNNING_NS_AT)
        if since and u32(head, at + layout.PLACE_HEAD_BUSY_AT):
            since = max(since, u64(head, at + layout.PLACE_HEAD_CHARGED_NS_AT))
            longest = max(longest, u64(head, at + layout.PLACE_HEAD_BEAT_NS_AT) - since)
    return longest


def _lent(data: bytes) -> tuple[tuple[int, int], ...]:
    end = layout.SEAT_BUFFER_LENT_AT + layout.SEATS * layout.LENT_SIZE
    lent = data[layout.SEAT_BUFFER_LENT_AT : end]
    if not lent.strip(b"\0"):  # most shares borrow nothing
        return ()
    return tuple((serial, lent_ns) for serial, lent_ns in _LENT.iter_unpack(lent) if serial)


def damaged(path: Path | str, why: str) -> LedgerError:
    return LedgerError(
        f"{path}: not a usable file of turns: {why}",
        hint="end the shares on this GPU (`allot ps`), then remove the folder: rm -r"
        f" {_folder(path)}",
    )


def _folder(path: Path | str) -> str:
    return os.path.dirname(path)  # noqa: PTH120 - paths are plain here


def _check(code: int, at: Path | str, doing: str) -> None:
    number = -code
    if number <= 0:
        return
    if number == errno.ERANGE:
        gpu = os.path.basename(at)  # noqa: PTH119 - paths are plain here
        raise DoesNotFitError(
            f"GPU {gpu}: the guarantees of its shares would exceed 100 %",
            hint="guarantee less, or make room: `allot ps` shows the shares, `allot resize`"
            " changes one",
        )
    if number in (errno.EINVAL, errno.EPROTO):
        raise damaged(f"{at}/{CONTRACT}", "damaged, truncated or another version")
    hint = {
        errno.ENOSPC: "free some space there, or choose another folder with --state",
        errno.EROFS: "choose a writable folder with --state or ALLOTMENT_STATE",
        errno.EACCES: "run as the owner of that file, or choose another folder with --state",
        errno.ESTALE: "the share was removed in the meantime: see `allot ps`",
    }.get(number, "see `allot doctor`")
    raise LedgerError(f"{at}: cannot {doing}: {os.strerror(number)}", hint=hint)


def u32(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "little")


def u64(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")


def text(data: bytes, at: int, size: int) -> str:
    return data[at : at + size].split(b"\0", 1)[0].decode(errors="replace")


def _check_head(path: str, data: bytes, *, size: int, head: tuple[int, int]) -> None:
    if len(data) < size:
        raise damaged(path, f"it has {len(data)} bytes, {size} are needed")
    magic, version = head
    if u64(data, 0) != magic:
        raise damaged(path, "it does not start with the magic number")
    if u32(data, 8) != version:
        raise LedgerError(
            f"{path}: version {u32(data, 8)}, this program reads {version}",
            hint=(
                "use the version of Allotment that created it, or end the GPU's shares and "
                f"remove {_folder(path)}"
            ),
        )


def _contract_bytes(path: str) -> bytes:
    generation = -1
    for _ in range(_PATIENCE):
        try:
            data = read_regular(path, layout.CONTRACT_SIZE)
        except OSError as error:
            raise damaged(path, error.strerror or str(error)) from error
        _check_head(path, data, size=layout.CONTRACT_SIZE, head=_CONTRACT_HEAD)
        before, generation = generation, u64(data, layout.CONTRACT_GENERATION_AT)
        if before == generation:
            return data
    raise damaged(path, "it changes constantly")


def _taken_seat(data: bytes, number: int) -> TakenSeat | None:
    """None for a free or unused seat. An invalid word becomes the nearest valid terms."""
    if not 0 <= number < layout.SEAT_UNBOOKED:
        return None
    at = layout.CONTRACT_SEATS_AT + number * layout.CONTRACT_SEAT_SIZE
    return _seat_of(data[at : at + layout.CONTRACT_SEAT_SIZE], number)


@lru_cache(maxsize=1024)  # most seats are as at the last look
def _seat_of(data: bytes, number: int) -> TakenSeat | None:
    word = u64(data, layout.CONTRACT_SEAT_TERMS_AT)
    if not word & layout.TERMS_TAKEN:
        return None
    ceiling = min(max(word >> _CEILING_SHIFT & _FIELD, 1), layout.WHOLE)
    terms = Terms(
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
    seat = Seat(number, u64(data, layout.CONTRACT_SEAT_SERIAL_AT))
    return TakenSeat(seat, text(data, layout.CONTRACT_SEAT_SHARE_ID_AT, 64), terms)


_BLOCK = 512  # the unit of st_blocks, on every file system
_SLACK = 4 << 20  # space that a file system may reserve for a file: huge pages


def cut_down(path: Path | str, size: int) -> int:
    """Truncate a file to `size` bytes; return the number of bytes removed.

    Space allocated behind the file's end counts too. Mappings of the right length are undisturbed,
    and a shorter file stays short. 0 for a missing file or another user's.
    """
    try:
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode) or not _excess(status, size):
            return 0
        flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, flags)
        try:
            before = os.fstat(descriptor)
            os.ftruncate(descriptor, min(size, before.st_size))
            after = os.fstat(descriptor)
        finally:
            os.close(descriptor)
    except OSError:
        return 0
    return max(0, _excess(before, size) - _excess(after, size))


def _excess(status: os.stat_result, size: int) -> int:
    longer = status.st_size - size
    space = status.st_blocks * _BLOCK - size
    return max(0, longer, space if space > _SLACK else 0)

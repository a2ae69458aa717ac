# SPDX-License-Identifier: Apache-2.0
"""Changes a ledger, through native/ledger.c and ctypes."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from typing import TYPE_CHECKING

from allotment.files import without_leases
from allotment.ledger import layout
from allotment.ledger.leases import cut_down, library
from allotment.ledger.snapshots import damaged, read
from allotment.model.errors import LedgerError, LimitBelowUseError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from allotment.ledger.snapshots import LedgerPolicy


FILES = ("policy", "usage")


class _Ledger(ctypes.Structure):
    """allot_ledger of native/ledger.h."""

    _fields_ = (
        ("policy", ctypes.c_void_p),
        ("usage", ctypes.c_void_p),
        ("slot", ctypes.c_int),
        ("slot_map", ctypes.c_void_p),
        ("directory", ctypes.c_char * 1024),
    )


def _put_text(data: bytearray, at: int, size: int, text: str, what: str) -> None:
    written = text.encode()
    if len(written) >= size:
        raise LedgerError(
            f"{what} {text!r} has {len(written)} bytes, at most {size - 1} fit",
            hint="choose a shorter one",
        )
    data[at : at + len(written)] = written


def _policy_bytes(policy: LedgerPolicy) -> bytes:
    if not 0 < len(policy.devices) <= layout.MAX_DEVICES:
        raise LedgerError(
            f"a share has 1 to {layout.MAX_DEVICES} devices, not {len(policy.devices)}",
            hint="ask for fewer devices",
        )
    data = bytearray(layout.POLICY_SIZE)
    struct.pack_into("<I", data, layout.POLICY_DEVICE_COUNT_AT, len(policy.devices))
    _put_text(data, layout.POLICY_SHARE_ID_AT, layout.NAME_BYTES, policy.share_id, "share id")
    _put_text(data, layout.POLICY_SHARE_NAME_AT, layout.NAME_BYTES, policy.share_name, "share name")
    for index, device in enumerate(policy.devices):
        at = layout.POLICY_DEVICES_AT + index * layout.DEVICE_POLICY_SIZE
        _put_text(data, at + layout.DEVICE_POLICY_UUID_AT, layout.UUID_BYTES, device.uuid, "UUID")
        numbers = [
            ("<Q", layout.DEVICE_POLICY_MEMORY_LIMIT_AT, device.memory_limit),
            ("<Q", layout.DEVICE_POLICY_CONTEXT_BYTES_AT, device.context_bytes),
        ]
        if device.seat is not None:
            numbers.append(("<Q", layout.DEVICE_POLICY_SEAT_SERIAL_AT, device.seat.serial))
            numbers.append(("<I", layout.DEVICE_POLICY_SEAT_AT, device.seat.number))
        flags = layout.DEVICE_OVERSUBSCRIBED if device.is_oversubscribed else 0
        flags |= layout.DEVICE_MPS if device.is_of_mps else 0
        numbers.append(("<I", layout.DEVICE_POLICY_FLAGS_AT, flags))
        for kind, field_at, value in numbers:
            struct.pack_into(kind, data, at + field_at, value)
    return bytes(data)


def _files(directory: Path) -> Iterator[Path]:
    return (directory / name for name in FILES)


def _failure(directory: Path, code: int, doing: str) -> LedgerError:
    number = -code
    if number in (errno.EINVAL, errno.EPROTO):
        return damaged(directory / FILES[0], "damaged, truncated or another version")
    hint = {
        errno.ENOSPC: "free some space there, or choose another folder with --state",
        errno.EROFS: "choose a writable folder with --state or ALLOTMENT_STATE",
        errno.EACCES: "run as the share's owner, or choose another folder with --state",
    }.get(number, "see `allot doctor`")
    return LedgerError(f"{directory}: cannot {doing}: {os.strerror(number)}", hint=hint)


def create(directory: Path, policy: LedgerPolicy) -> None:
    """Create the two files of a ledger in `directory`, both or none.

    Raises `LedgerError` if the disk is full or read-only, a ledger exists, or a name is too long.
    """
    code = library().allot_ledger_create(os.fsencode(directory), _policy_bytes(policy))
    if code != 0:
        raise _failure(directory, code, "make the ledger")


def reap(directory: Path, *, asked_ns: int = 0) -> int:
    """Reclaim the entries of dead processes; return their number.

    An entry with memory is left for some seconds first, as the driver may not have freed it.
    `asked_ns`: when the driver was asked (CLOCK_BOOTTIME), and seen to hold no dead process's
    memory. Entries that were left before are reclaimed at once.
    """
    ledger = _Ledger()
    code = without_leases(
        _files(directory),
        lambda: library().allot_ledger_open(ctypes.byref(ledger), os.fsencode(directory)),
    )
    if code != 0:
        raise _failure(directory, code, "open the ledger")
    try:
        cleared = int(library().allot_ledger_clear(ctypes.byref(ledger), asked_ns))
    finally:
        library().allot_ledger_close(ctypes.byref(ledger))
    if -cleared in (errno.EACCES, errno.EPERM, errno.EROFS):
        return 0  # another user's share: its own processes and owner reap it
    if cleared < 0:
        raise _failure(directory, cleared, "clear dead processes from the ledger")
    return cleared


def cut_usage(directory: Path) -> int:
    """Truncate data that programs appended to `usage`; return the bytes. Never fails."""
    return cut_down(f"{directory}/usage", layout.USAGE_SIZE)


def set_limit(directory: Path, device: int, memory_limit: int, *, force: bool = False) -> int:
    """Change the limit (bytes) of device number `device`; return the bytes in use.

    From the return on, no allocation succeeds under the old limit. The caller holds the state
    folder's lock.

    Raises `LimitBelowUseError` if more is in use and `force` is false; nothing has changed then.
    Raises `LedgerError` if the ledger cannot be read or written.
    """
    used = ctypes.c_uint64()
    code = without_leases(
        _files(directory),
        lambda: library().allot_ledger_set_limit(
            os.fsencode(directory), device, memory_limit, force, ctypes.byref(used)
        ),
    )
    if code == -errno.EBUSY:
        has_leaving = read(directory).has_leaving
        raise LimitBelowUseError(need=used.value, have=memory_limit, has_leaving=has_leaving)
    if code != 0:
        raise _failure(directory, code, "change the limit")
    return used.value

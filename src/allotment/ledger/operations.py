# SPDX-License-Identifier: Apache-2.0
"""What changes a ledger, done by native/ledger.c through ctypes."""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache
from typing import TYPE_CHECKING

from allotment.ledger import layout
from allotment.ledger.lengths import cut_down
from allotment.ledger.snapshots import damaged
from allotment.libraries import LEDGER, load_library
from allotment.model.errors import LedgerError, LimitBelowUseError

if TYPE_CHECKING:
    from pathlib import Path

    from allotment.ledger.snapshots import Policy


class _Ledger(ctypes.Structure):
    """allot_ledger of native/ledger.h."""

    _fields_ = (
        ("policy", ctypes.c_void_p),
        ("usage", ctypes.c_void_p),
        ("slot", ctypes.c_int),
        ("slot_map", ctypes.c_void_p),
        ("directory", ctypes.c_char * 1024),
    )


@cache
def _library() -> ctypes.CDLL:
    library = load_library(LEDGER)
    library.allot_ledger_create.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    library.allot_ledger_open.argtypes = [ctypes.POINTER(_Ledger), ctypes.c_char_p]
    library.allot_ledger_close.argtypes = [ctypes.POINTER(_Ledger)]
    library.allot_ledger_close.restype = None
    library.allot_ledger_reap.argtypes = [ctypes.POINTER(_Ledger)]
    library.allot_ledger_set_limit.argtypes = [
        ctypes.c_char_p,
        ctypes.c_int,
        ctypes.c_uint64,
        ctypes.c_bool,
        ctypes.POINTER(ctypes.c_uint64),
    ]
    return library


def _field(text: str, size: int, what: str) -> bytes:
    data = text.encode()
    if len(data) >= size:
        raise LedgerError(
            f"{what} {text!r} has {len(data)} bytes, at most {size - 1} fit",
            hint="choose a shorter one",
        )
    return data


def _policy_bytes(policy: Policy) -> bytes:
    if not 0 < len(policy.devices) <= layout.MAX_DEVICES:
        raise LedgerError(
            f"a share has 1 to {layout.MAX_DEVICES} devices, not {len(policy.devices)}",
            hint="ask for fewer devices",
        )
    data = bytearray(layout.POLICY_SIZE)

    def put(at: int, value: bytes) -> None:
        data[at : at + len(value)] = value

    put(layout.POLICY_DEVICE_COUNT_AT, len(policy.devices).to_bytes(4, "little"))
    put(layout.POLICY_SHARE_ID_AT, _field(policy.share_id, layout.NAME_BYTES, "share id"))
    put(layout.POLICY_SHARE_NAME_AT, _field(policy.share_name, layout.NAME_BYTES, "share name"))
    for index, device in enumerate(policy.devices):
        at = layout.POLICY_DEVICES_AT + index * layout.DEVICE_POLICY_SIZE
        put(at + layout.DEVICE_POLICY_UUID_AT, _field(device.uuid, layout.UUID_BYTES, "UUID"))
        put(at + layout.DEVICE_POLICY_MEMORY_LIMIT_AT, device.memory_limit.to_bytes(8, "little"))
        put(at + layout.DEVICE_POLICY_CONTEXT_BYTES_AT, device.context_bytes.to_bytes(8, "little"))
        if device.seat is not None:
            serial = device.seat.serial.to_bytes(8, "little")
            put(at + layout.DEVICE_POLICY_SEAT_SERIAL_AT, serial)
            put(at + layout.DEVICE_POLICY_SEAT_AT, device.seat.number.to_bytes(4, "little"))
        flags = layout.DEVICE_OVERSUBSCRIBED if device.is_oversubscribed else 0
        put(at + layout.DEVICE_POLICY_FLAGS_AT, flags.to_bytes(4, "little"))
    return bytes(data)


def _failure(directory: Path, code: int, doing: str) -> LedgerError:
    number = -code
    if number in (errno.EINVAL, errno.EPROTO):
        return damaged(directory / "policy", "damaged, truncated or of another version")
    hint = {
        errno.ENOSPC: "free some space there, or choose another folder with --state",
        errno.EROFS: "choose a writable folder with --state or ALLOTMENT_STATE",
        errno.EACCES: "run as the share's owner, or choose another folder with --state",
    }.get(number, "see `allot doctor`")
    return LedgerError(f"{directory}: cannot {doing}: {os.strerror(number)}", hint=hint)


def create(directory: Path, policy: Policy) -> None:
    """Make the two files of a ledger in `directory`, both or none.

    Raises:
        LedgerError: the disk is full or read-only, a ledger is there, or a name is too long.
    """
    code = _library().allot_ledger_create(os.fsencode(directory), _policy_bytes(policy))
    if code != 0:
        raise _failure(directory, code, "make the ledger")


def reap(directory: Path) -> int:
    """Reclaim what dead processes left; return how many there were."""
    library = _library()
    ledger = _Ledger()
    code = library.allot_ledger_open(ctypes.byref(ledger), os.fsencode(directory))
    if code != 0:
        raise _failure(directory, code, "open the ledger")
    try:
        cleared = int(library.allot_ledger_reap(ctypes.byref(ledger)))
    finally:
        library.allot_ledger_close(ctypes.byref(ledger))
    if -cleared in (errno.EACCES, errno.EPERM, errno.EROFS):
        return 0  # another user's share: its own processes and its owner see to it
    if cleared < 0:
        raise _failure(directory, cleared, "clear dead processes from the ledger")
    return cleared


def cut_usage(directory: Path) -> int:
    """Take away what programs appended to `usage`; return how many bytes that were. Never fails."""
    return cut_down(directory / "usage", layout.USAGE_SIZE)


def set_limit(directory: Path, device: int, memory_limit: int, *, force: bool = False) -> int:
    """Change the limit (bytes) of device number `device` of the policy; return the bytes in use.

    From the return on, no allocation succeeds under the old limit. The caller holds the state
    folder's lock.

    Raises:
        LimitBelowUseError: more is in use and `force` is false; nothing was changed.
        LedgerError: the ledger cannot be read or written.
    """
    used = ctypes.c_uint64()
    code = _library().allot_ledger_set_limit(
        os.fsencode(directory),
        device,
        memory_limit,
        force,
        ctypes.byref(used),
    )
    if code == -errno.EBUSY:
        raise LimitBelowUseError(need=used.value, have=memory_limit)
    if code != 0:
        raise _failure(directory, code, "change the limit")
    return used.value

# SPDX-License-Identifier: Apache-2.0
"""Read a ledger into frozen values."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from allotment.ledger import layout
from allotment.ledger.leases import Seat
from allotment.model.errors import LedgerError

if TYPE_CHECKING:
    from pathlib import Path

_OPERATION_BITS = 48
# struct flock: l_type, l_whence, l_start, l_len, l_pid (64-bit Linux).
_FLOCK = struct.Struct("hhxxxxqqixxxx")


@dataclass(frozen=True, slots=True)
class DevicePolicy:
    """What a share may use of one device. Bytes."""

    uuid: str
    memory_limit: int
    context_bytes: int = 0
    seat: Seat | None = None
    """Its seat in the device's contract; None: it takes no turns."""
    is_oversubscribed: bool = False
    """Its allocations may live on the host."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What a share may use."""

    share_id: str
    share_name: str
    devices: tuple[DevicePolicy, ...]
    generation: int = 1


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """What all processes of a share use of one device, in bytes, and refusals since its start.

    The figures of compute are of all the share's processes, since it was made; times are in
    nanoseconds.
    """

    used: int
    peak: int
    refusals: int
    gpu_ns: int = 0
    """Measured GPU time of kernels and graphs."""
    copy_ns: int = 0
    """Measured time of copies and memsets, on the copy engines."""
    held_ns: int = 0
    """For how long launches were held back, added up over threads."""
    throttled: int = 0
    """How many launches were held back."""
    moved_bytes: int = 0
    """Oversubscribed memory that was brought to the device."""
    host_bytes: int = 0
    """Of its allocations, how much may live on the host now."""
    lease_waits: tuple[int, ...] = (0,) * layout.WAIT_BUCKETS
    """Waits for a lease by length: entry i has those under WAIT_FIRST_NS << i; the last, others."""
    lease_wait_ns: int = 0
    """All of them together."""


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """One live process of a share; `pid` as seen inside the share.

    `used`, `context` and `peak` are bytes, one number for each device of the policy; `context` is
    the part of `used` that contexts and modules take. `start_time` is in clock ticks after boot.
    GPU time and the time that launches were held back are nanoseconds, over all devices.
    """

    pid: int
    start_time: int
    command: str
    refusals: int
    used: tuple[int, ...]
    context: tuple[int, ...]
    peak: tuple[int, ...]
    gpu_ns: int = 0
    held_ns: int = 0
    throttled: int = 0
    managed: frozenset[int] = frozenset()
    """Devices, by their place in the policy, of which it has managed memory."""
    evicted: frozenset[int] = frozenset()
    """Of these, where all of that lies on the host because the share is suspended."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """A ledger at one moment. `devices` has the order of `policy.devices`.

    `read_ns` is that moment, by the monotonic clock: the rates of two readings go by it.
    """

    policy: Policy
    devices: tuple[DeviceUse, ...]
    processes: tuple[ProcessUse, ...]
    read_ns: int = 0


def _text(data: bytes, at: int, size: int) -> str:
    return data[at : at + size].split(b"\0", 1)[0].decode(errors="replace")


def _u32(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "little")


def _u64(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")


def damaged(path: Path, why: str) -> LedgerError:
    """Return the error for a file that is not a whole ledger."""
    return LedgerError(
        f"{path}: not a usable ledger: {why}",
        hint=f"its programs run on; end them and remove the share: allot rm {path.parent.name}",
    )


def _load(path: Path, *, size: int, magic: int) -> bytes:
    try:
        # No more than is needed: the share's programs may have made the file as long as they like.
        with path.open("rb", buffering=0) as file:
            data = file.read(size)
    except OSError as error:
        raise damaged(path, error.strerror or str(error)) from error
    if len(data) < size:
        raise damaged(path, f"it has {len(data)} bytes, {size} are needed")
    if _u64(data, 0) != magic:
        raise damaged(path, "it does not start with a ledger's mark")
    version = _u32(data, 8)
    if version != layout.LEDGER_VERSION:
        raise LedgerError(
            f"{path}: ledger version {version}, this program reads {layout.LEDGER_VERSION}",
            hint="use the version of Allotment that made the share, or end it and run it again",
        )
    return data


def _read_policy(path: Path) -> Policy:
    data = _load(path, size=layout.POLICY_SIZE, magic=layout.POLICY_MAGIC)
    count = _u32(data, layout.POLICY_DEVICE_COUNT_AT)
    if not 0 < count <= layout.MAX_DEVICES:
        raise damaged(path, f"it names {count} devices")
    devices = []
    for index in range(count):
        at = layout.POLICY_DEVICES_AT + index * layout.DEVICE_POLICY_SIZE
        devices.append(
            DevicePolicy(
                uuid=_text(data, at + layout.DEVICE_POLICY_UUID_AT, layout.UUID_BYTES),
                memory_limit=_u64(data, at + layout.DEVICE_POLICY_MEMORY_LIMIT_AT),
                context_bytes=_u64(data, at + layout.DEVICE_POLICY_CONTEXT_BYTES_AT),
                seat=_seat(data, at),
                is_oversubscribed=bool(
                    _u32(data, at + layout.DEVICE_POLICY_FLAGS_AT) & layout.DEVICE_OVERSUBSCRIBED
                ),
            ),
        )
    return Policy(
        share_id=_text(data, layout.POLICY_SHARE_ID_AT, layout.NAME_BYTES),
        share_name=_text(data, layout.POLICY_SHARE_NAME_AT, layout.NAME_BYTES),
        devices=tuple(devices),
        generation=_u64(data, layout.POLICY_GENERATION_AT),
    )


def _seat(data: bytes, at: int) -> Seat | None:
    serial = _u64(data, at + layout.DEVICE_POLICY_SEAT_SERIAL_AT)
    return Seat(_u32(data, at + layout.DEVICE_POLICY_SEAT_AT), serial) if serial else None


def _device_use(data: bytes, index: int) -> DeviceUse:
    at = layout.USAGE_DEVICES_AT + index * layout.USAGE_DEVICE_SIZE
    used = _u64(data, at + layout.USAGE_DEVICE_TOTAL_VALUE_AT)
    waits = at + layout.USAGE_DEVICE_LEASE_WAITS_AT
    return DeviceUse(
        used=used,
        peak=_u64(data, at + layout.USAGE_DEVICE_PEAK_AT),
        refusals=_u64(data, at + layout.USAGE_DEVICE_REFUSALS_AT),
        gpu_ns=_u64(data, at + layout.USAGE_DEVICE_GPU_NS_AT),
        copy_ns=_u64(data, at + layout.USAGE_DEVICE_COPY_NS_AT),
        held_ns=_u64(data, at + layout.USAGE_DEVICE_HELD_NS_AT),
        throttled=_u64(data, at + layout.USAGE_DEVICE_THROTTLED_AT),
        moved_bytes=_u64(data, at + layout.USAGE_DEVICE_MOVED_BYTES_AT),
        # What a process had that was killed is still in it, until the last of the share has ended.
        host_bytes=min(used, _u64(data, at + layout.USAGE_DEVICE_HOST_BYTES_AT)),
        lease_waits=tuple(_u64(data, waits + 8 * i) for i in range(layout.WAIT_BUCKETS)),
        lease_wait_ns=_u64(data, at + layout.USAGE_DEVICE_LEASE_WAIT_NS_AT),
    )


def _slot_used(data: bytes, slot: int, device: int) -> int:
    at = layout.USAGE_SLOTS_AT + slot * layout.SLOT_SIZE
    at += layout.SLOT_DEVICES_AT + device * layout.SLOT_DEVICE_SIZE
    operation = _u64(data, at + layout.SLOT_DEVICE_PART_OPERATION_AT)
    last = layout.USAGE_DEVICES_AT + device * layout.USAGE_DEVICE_SIZE
    last = _u64(data, last + layout.USAGE_DEVICE_TOTAL_LAST_AT)
    # An operation is in the device's total before its slot says that it is committed.
    done = last == slot << _OPERATION_BITS | operation or (
        _u64(data, at + layout.SLOT_DEVICE_PART_COMMITTED_AT) >= operation
    )
    return _u64(data, at + layout.SLOT_DEVICE_PART_INTENTS_AT + 16 * (operation & 1) + 8 * done)


def _process_use(data: bytes, slot: int, device_count: int) -> ProcessUse:
    at = layout.USAGE_SLOTS_AT + slot * layout.SLOT_SIZE
    per_device = range(
        at + layout.SLOT_DEVICES_AT,
        at + layout.SLOT_DEVICES_AT + device_count * layout.SLOT_DEVICE_SIZE,
        layout.SLOT_DEVICE_SIZE,
    )
    return ProcessUse(
        pid=_u32(data, at + layout.SLOT_PID_AT),
        start_time=_u64(data, at + layout.SLOT_START_TIME_AT),
        command=_text(data, at + layout.SLOT_COMMAND_AT, layout.NAME_BYTES),
        refusals=_u64(data, at + layout.SLOT_REFUSALS_AT),
        used=tuple(_slot_used(data, slot, device) for device in range(device_count)),
        context=tuple(_u64(data, each + layout.SLOT_DEVICE_CONTEXT_AT) for each in per_device),
        peak=tuple(_u64(data, each + layout.SLOT_DEVICE_PEAK_AT) for each in per_device),
        gpu_ns=_u64(data, at + layout.SLOT_GPU_NS_AT),
        held_ns=_u64(data, at + layout.SLOT_HELD_NS_AT),
        throttled=_u64(data, at + layout.SLOT_THROTTLED_AT),
        managed=_bits(_u64(data, at + layout.SLOT_MOVABLE_AT), device_count),
        evicted=_bits(_u64(data, at + layout.SLOT_MOVABLE_AT) >> 32, device_count),
    )


def _bits(word: int, device_count: int) -> frozenset[int]:
    return frozenset(device for device in range(device_count) if word >> device & 1)


def _is_locked(descriptor: int, slot: int) -> bool:
    """Tell whether the slot's owner lives: the kernel drops the lock with its last mapping."""
    request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, layout.SLOT_LOCK_BASE + slot, 1, 0)
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, request)
    except OSError as error:
        if error.errno == errno.EINVAL:  # no such locks on this file system: nobody could hold one
            return False
        raise
    return int(_FLOCK.unpack(answer)[0]) != fcntl.F_UNLCK


def read(directory: Path) -> Ledger:
    """Return the ledger in `directory`; only live processes are listed.

    Totals are those of the file: call reap() first where a process may have died just now.

    Raises:
        LedgerError: a file is missing, damaged, or of another version.
    """
    policy = _read_policy(directory / "policy")
    path = directory / "usage"
    read_ns = time.monotonic_ns()
    data = _load(path, size=layout.USAGE_SIZE, magic=layout.USAGE_MAGIC)
    high = min(_u32(data, layout.USAGE_HIGH_SLOT_AT), layout.MAX_SLOTS)
    count = len(policy.devices)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise damaged(path, error.strerror or str(error)) from error
    try:
        processes = tuple(
            _process_use(data, slot, count)
            for slot in range(high)
            if _u32(data, layout.USAGE_SLOTS_AT + slot * layout.SLOT_SIZE) == layout.SLOT_TAKEN
            and _is_locked(descriptor, slot)
        )
    finally:
        os.close(descriptor)
    return Ledger(
        policy=policy,
        devices=tuple(_device_use(data, index) for index in range(count)),
        processes=processes,
        read_ns=read_ns,
    )

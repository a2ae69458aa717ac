# SPDX-License-Identifier: Apache-2.0
"""Reads a ledger into frozen values."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

from allotment.files import open_regular, read_regular
from allotment.ledger import layout
from allotment.ledger.leases import Seat, text, u32, u64
from allotment.model.errors import LedgerError

if TYPE_CHECKING:
    from pathlib import Path

_OPERATION_BITS = 48
# struct flock: l_type, l_whence, l_start, l_len, l_pid (64-bit Linux).
_FLOCK = struct.Struct("hhxxxxqqixxxx")
_USAGE_WORDS = struct.Struct(f"<{layout.USAGE_DEVICE_SIZE // 8}Q")
_MOST_CACHED = 1024
"""Of what many shares read in turn have in common, or have kept since the last look."""


class DevicePolicy(msgspec.Struct, frozen=True):
    """Limits of a share on one device. Bytes."""

    uuid: str
    memory_limit: int
    context_bytes: int = 0
    seat: Seat | None = None
    """Its seat in the device's contract; None: it takes no turns."""
    is_oversubscribed: bool = False
    """Its allocations may live on the host."""
    is_of_mps: bool = False
    """Its programs must be clients of MPS."""


class LedgerPolicy(msgspec.Struct, frozen=True):
    """Limits of a share on all its devices."""

    share_id: str
    share_name: str
    devices: tuple[DevicePolicy, ...]
    generation: int = 1


class DeviceUse(msgspec.Struct, frozen=True):
    """Use of one device by all processes of a share, in bytes, and refusals since its start.

    Compute figures cover all the share's processes since its creation; times are in nanoseconds.
    """

    used: int
    peak: int
    refusals: int
    gpu_ns: int = 0
    """Measured GPU time of kernels and graphs."""
    copy_ns: int = 0
    """Measured time of copies and memsets, on the copy engines."""
    held_ns: int = 0
    """Time that launches were delayed, summed over threads."""
    throttled: int = 0
    """Number of delayed launches."""
    moved_bytes: int = 0
    """Oversubscribed memory moved to the device."""
    host_bytes: int = 0
    """Of its allocations, bytes that may live on the host now."""
    lease_waits: tuple[int, ...] = (0,) * layout.WAIT_BUCKETS
    """Waits for a lease by length: entry i counts those under WAIT_FIRST_NS << i; the last, longer
    ones."""
    lease_wait_ns: int = 0
    """Sum of all waits."""
    launches: int = 0
    """Number of launches of kernels and graphs that have ended."""


class ProcessUse(msgspec.Struct, frozen=True):
    """One live process of a share; `pid` as seen inside the share.

    `used`, `context` and `peak` are bytes, one number for each device of the policy; `context` is
    the part of `used` in contexts and modules. `start_time` is in clock ticks after boot. GPU time
    and delays are nanoseconds, over all devices.
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
    """Positions in the policy of devices where it has managed memory."""
    evicted: frozenset[int] = frozenset()
    """Of these, devices whose managed memory is all on the host because the share is suspended."""


class Ledger(msgspec.Struct, frozen=True):
    """A ledger at one moment. `devices` has the order of `policy.devices`.

    `read_ns` is that moment on the monotonic clock, for rates between two readings.
    """

    policy: LedgerPolicy
    devices: tuple[DeviceUse, ...]
    processes: tuple[ProcessUse, ...]
    read_ns: int = 0
    has_leaving: bool = False
    """Its use includes that of dead processes, until the driver has freed their memory."""
    has_dead: bool = False
    """Slots of dead processes are still taken."""


def damaged(path: Path | str, why: str) -> LedgerError:
    share = os.path.basename(os.path.dirname(path))  # noqa: PTH119, PTH120 - paths are plain here
    return LedgerError(
        f"{path}: not a usable ledger: {why}",
        hint=f"its programs still run; end them and remove the share: allot rm {share}",
    )


def _check(path: str, data: bytes, *, have: int, size: int, magic: int) -> None:
    if have < size:
        raise damaged(path, f"it has {have} bytes, {size} are needed")
    if u64(data, 0) != magic:
        raise damaged(path, "it does not start with a ledger's magic number")
    version = u32(data, 8)
    if version != layout.LEDGER_VERSION:
        raise LedgerError(
            f"{path}: ledger version {version}, this program reads {layout.LEDGER_VERSION}",
            hint=(
                "use the version of Allotment that created the share, or end it and run it again"
            ),
        )


def _read_policy(path: str) -> LedgerPolicy:
    try:
        # Read no more than needed: the share's programs may have extended the file.
        data = read_regular(path, layout.POLICY_SIZE)
    except OSError as error:
        raise damaged(path, error.strerror or str(error)) from error
    _check(path, data, have=len(data), size=layout.POLICY_SIZE, magic=layout.POLICY_MAGIC)
    count = u32(data, layout.POLICY_DEVICE_COUNT_AT)
    if not 0 < count <= layout.MAX_DEVICES:
        raise damaged(path, f"it names {count} devices")
    return _policy(data, count)


@lru_cache(maxsize=_MOST_CACHED)
def _policy(data: bytes, count: int) -> LedgerPolicy:
    devices = []
    for index in range(count):
        at = layout.POLICY_DEVICES_AT + index * layout.DEVICE_POLICY_SIZE
        serial = u64(data, at + layout.DEVICE_POLICY_SEAT_SERIAL_AT)
        number = u32(data, at + layout.DEVICE_POLICY_SEAT_AT)
        flags = u32(data, at + layout.DEVICE_POLICY_FLAGS_AT)
        devices.append(
            DevicePolicy(
                uuid=text(data, at + layout.DEVICE_POLICY_UUID_AT, layout.UUID_BYTES),
                memory_limit=u64(data, at + layout.DEVICE_POLICY_MEMORY_LIMIT_AT),
                context_bytes=u64(data, at + layout.DEVICE_POLICY_CONTEXT_BYTES_AT),
                seat=Seat(number, serial) if serial else None,
                is_oversubscribed=bool(flags & layout.DEVICE_OVERSUBSCRIBED),
                is_of_mps=bool(flags & layout.DEVICE_MPS),
            ),
        )
    return LedgerPolicy(
        share_id=text(data, layout.POLICY_SHARE_ID_AT, layout.NAME_BYTES),
        share_name=text(data, layout.POLICY_SHARE_NAME_AT, layout.NAME_BYTES),
        devices=tuple(devices),
        generation=u64(data, layout.POLICY_GENERATION_AT),
    )


@lru_cache(maxsize=_MOST_CACHED)
def _device_use(data: bytes) -> DeviceUse:
    words = _USAGE_WORDS.unpack(data)
    used = words[layout.USAGE_DEVICE_TOTAL_VALUE_AT // 8]
    waits = layout.USAGE_DEVICE_LEASE_WAITS_AT // 8
    return DeviceUse(
        used=used,
        peak=words[layout.USAGE_DEVICE_PEAK_AT // 8],
        refusals=words[layout.USAGE_DEVICE_REFUSALS_AT // 8],
        gpu_ns=words[layout.USAGE_DEVICE_GPU_NS_AT // 8],
        copy_ns=words[layout.USAGE_DEVICE_COPY_NS_AT // 8],
        held_ns=words[layout.USAGE_DEVICE_HELD_NS_AT // 8],
        throttled=words[layout.USAGE_DEVICE_THROTTLED_AT // 8],
        moved_bytes=words[layout.USAGE_DEVICE_MOVED_BYTES_AT // 8],
        # Entries of killed processes remain until the last process of the share has ended.
        host_bytes=min(used, words[layout.USAGE_DEVICE_HOST_BYTES_AT // 8]),
        lease_waits=words[waits : waits + layout.WAIT_BUCKETS],
        lease_wait_ns=words[layout.USAGE_DEVICE_LEASE_WAIT_NS_AT // 8],
        launches=words[layout.USAGE_DEVICE_LAUNCHES_AT // 8],
    )


def _device_uses(data: bytes, count: int) -> tuple[DeviceUse, ...]:
    size = layout.USAGE_DEVICE_SIZE
    starts = range(layout.USAGE_DEVICES_AT, layout.USAGE_DEVICES_AT + count * size, size)
    return tuple(_device_use(data[at : at + size]) for at in starts)


def _slot_used(data: bytes, slot: int, device: int) -> int:
    at = layout.USAGE_SLOTS_AT + slot * layout.SLOT_SIZE
    at += layout.SLOT_DEVICES_AT + device * layout.SLOT_DEVICE_SIZE
    operation = u64(data, at + layout.SLOT_DEVICE_PART_OPERATION_AT)
    last = layout.USAGE_DEVICES_AT + device * layout.USAGE_DEVICE_SIZE
    last = u64(data, last + layout.USAGE_DEVICE_TOTAL_LAST_AT)
    # An operation enters the device's total before its slot is marked committed.
    done = last == slot << _OPERATION_BITS | operation or (
        u64(data, at + layout.SLOT_DEVICE_PART_COMMITTED_AT) >= operation
    )
    return u64(data, at + layout.SLOT_DEVICE_PART_INTENTS_AT + 16 * (operation & 1) + 8 * done)


def _process_use(data: bytes, slot: int, device_count: int) -> ProcessUse:
    at = layout.USAGE_SLOTS_AT + slot * layout.SLOT_SIZE
    per_device = range(
        at + layout.SLOT_DEVICES_AT,
        at + layout.SLOT_DEVICES_AT + device_count * layout.SLOT_DEVICE_SIZE,
        layout.SLOT_DEVICE_SIZE,
    )
    return ProcessUse(
        pid=u32(data, at + layout.SLOT_PID_AT),
        start_time=u64(data, at + layout.SLOT_START_TIME_AT),
        command=text(data, at + layout.SLOT_COMMAND_AT, layout.NAME_BYTES),
        refusals=u64(data, at + layout.SLOT_REFUSALS_AT),
        used=tuple(_slot_used(data, slot, device) for device in range(device_count)),
        context=tuple(u64(data, each + layout.SLOT_DEVICE_CONTEXT_AT) for each in per_device),
        peak=tuple(u64(data, each + layout.SLOT_DEVICE_PEAK_AT) for each in per_device),
        gpu_ns=u64(data, at + layout.SLOT_GPU_NS_AT),
        held_ns=u64(data, at + layout.SLOT_HELD_NS_AT),
        throttled=u64(data, at + layout.SLOT_THROTTLED_AT),
        managed=_bits(u64(data, at + layout.SLOT_MOVABLE_AT), device_count),
        evicted=_bits(u64(data, at + layout.SLOT_MOVABLE_AT) >> 32, device_count),
    )


def _bits(word: int, device_count: int) -> frozenset[int]:
    return frozenset(device for device in range(device_count) if word >> device & 1)


def _is_locked(descriptor: int, slot: int) -> bool:
    """True if the slot's owner lives: the kernel drops the lock with its last mapping."""
    request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, layout.SLOT_LOCK_BASE + slot, 1, 0)
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, request)
    except OSError as error:
        if error.errno == errno.EINVAL:  # no such locks on this file system, so no owner
            return False
        raise
    return int(_FLOCK.unpack(answer)[0]) != fcntl.F_UNLCK


def read(directory: Path) -> Ledger:
    """Read the ledger in `directory`; only live processes are listed.

    Totals are those of the file: call `reap` first if a process may have died. Raises `LedgerError`
    if a file is missing, damaged, or of another version.
    """
    # Plain paths: there may be hundreds of shares.
    policy = _read_policy(f"{directory}/policy")
    path = f"{directory}/usage"
    read_ns = time.monotonic_ns()
    count = len(policy.devices)
    try:
        descriptor = open_regular(path, os.O_RDONLY)
    except OSError as error:
        raise damaged(path, error.strerror or str(error)) from error
    try:
        data, high = _usage(descriptor, path)
        states = [
            u32(data, layout.USAGE_SLOTS_AT + slot * layout.SLOT_SIZE) for slot in range(high)
        ]
        processes = tuple(
            _process_use(data, slot, count)
            for slot, state in enumerate(states)
            if state == layout.SLOT_TAKEN and _is_locked(descriptor, slot)
        )
    finally:
        os.close(descriptor)
    return Ledger(
        policy=policy,
        devices=_device_uses(data, count),
        processes=processes,
        read_ns=read_ns,
        has_leaving=layout.SLOT_LEAVING in states,
        has_dead=len(processes) < len(states) - states.count(layout.SLOT_FREE),
    )


def _usage(descriptor: int, path: str) -> tuple[bytes, int]:
    """Read the slots in use, and what is before them: most of a ledger has never been used.

    Returns the number of slots, too. Their number is read first: a slot that a process takes
    meanwhile is left out.
    """
    try:
        size = os.fstat(descriptor).st_size
        head = os.pread(descriptor, layout.USAGE_SLOTS_AT, 0)
        _check(path, head, have=size, size=layout.USAGE_SIZE, magic=layout.USAGE_MAGIC)
        high = min(u32(head, layout.USAGE_HIGH_SLOT_AT), layout.MAX_SLOTS)
        end = layout.USAGE_SLOTS_AT + high * layout.SLOT_SIZE
        data = os.pread(descriptor, end, 0) if high else head
    except OSError as error:
        raise damaged(path, error.strerror or str(error)) from error
    if len(data) < end:
        raise damaged(path, f"it has {len(data)} bytes, {layout.USAGE_SIZE} are needed")
    return data, high

# SPDX-License-Identifier: Apache-2.0
"""A share's record: `share.json`, and its processes' identities: `processes.json`.

`events`, in the state folder, has what happened to all shares: the commands and the agent append
lines to it, and drop the oldest.
"""

import json
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import msgspec

from allotment.files import atomic_write, read_regular
from allotment.ledger import Ledger, Terms
from allotment.ledger.leases import DeviceFiles
from allotment.model.accounting import DeviceAmount, device_amount
from allotment.model.errors import AllotError, LedgerError, StateError, UsageError
from allotment.model.pods import Owner
from allotment.model.shares import Runner, Share, ShareDevice, ShareId
from allotment.model.structs import prepared
from allotment.modes import DEFAULT_MODE, mode_named
from allotment.shares.folders import StateFolder, explained, user_name

RECORD = "share.json"
_VERSION = 3
_READABLE = {1, 2, _VERSION}  # 1 has no compute, 2 no owner
_LATEST = 253_402_300_800  # the year 10000
_LONGEST_KEPT = 16 << 10  # most records have one or two thousand bytes
_LONGEST = 32 << 20  # a command can have 2 MiB, and some characters take six bytes here
_REQUIRED = {*Share.__struct_fields__} - {"suspension", "owner", "is_resized"}
_REQUIRED_COMPUTE = {"guarantee", "ceiling", "weight", "class"}


def write_record(directory: Path, share: Share) -> None:
    """Write a share's record in one step; raise `StateError`."""
    path = directory / RECORD
    try:
        _write(path, _encode(share))
    except OSError as error:
        raise explained(error, path, "write the share's record") from error


def _write(path: Path, text: str) -> None:
    """Write a file in a share's folder: no other user can lead it elsewhere by a link."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        atomic_write(Path(f"/proc/self/fd/{folder}/{path.name}"), text)
    finally:
        os.close(folder)


def read_record(directory: Path, *, written: Share | None = None) -> Share:
    """Read a share's record. One that is as `written` needs no parsing.

    Raises `StateError` if it is damaged or of another version, `FileNotFoundError` if the share is
    gone.
    """
    try:
        data = read_regular(f"{directory}/{RECORD}", _LONGEST)
    except FileNotFoundError:
        if directory.is_dir():
            raise _damaged(directory, "it is missing") from None
        raise
    except OSError as error:
        raise explained(error, directory / RECORD, "read the share's record") from error
    if written is not None and data == _encode(written).encode():
        return written
    try:
        version, share = _kept(data) if len(data) <= _LONGEST_KEPT else _parsed(data)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _damaged(directory, "it is truncated or changed") from error
    if share is None:
        raise _damaged(directory, f"it has version {version!r}, this program reads {_VERSION}")
    return share


def _parsed(data: bytes) -> tuple[object, Share | None]:
    """The version, and the share if this program reads it. Raises `ValueError` and others."""
    document = json.loads(data.decode())
    version = document["version"]
    return version, _from_document(document) if version in _READABLE else None


# Records seldom change between two looks of `allot top` or the agent.
_kept = lru_cache(maxsize=1024)(_parsed)


def _damaged(directory: Path, why: str) -> StateError:
    return StateError(
        f"{directory / RECORD}: not a usable record of a share: {why}",
        hint=f"end its programs and remove it: allot rm {directory.name} --force",
    )


def _encode(share: Share) -> str:
    document = msgspec.to_builtins(share)
    for device in document["devices"]:
        _rename(device, is_oversubscribed="oversubscribed")
        _rename(device["compute"], kind="class", is_governed="governed")
    _rename(document, is_resized="resized")
    if share.suspension:
        _rename(document["suspension"], is_complete="complete")
    return json.dumps({"version": _VERSION, **document}) + "\n"


def _from_document(document: dict[str, Any]) -> Share:
    """Check every field's type: the file may have been edited. Raises `ValueError` and others."""
    if missing := _REQUIRED - document.keys():
        raise KeyError(*missing)
    devices = []
    for written in document["devices"]:
        device = {key: value for key, value in written.items() if value is not None}
        _rename(device, oversubscribed="is_oversubscribed")
        if compute := device.get("compute"):
            if missing := _REQUIRED_COMPUTE - compute.keys():
                raise KeyError(*missing)
            _rename(compute, **{"class": "kind"}, governed="is_governed")
        devices.append(device)
    if suspension := document.get("suspension"):
        _rename(suspension, complete="is_complete")
    _rename(document, resized="is_resized")
    try:
        share = msgspec.convert({**document, "devices": devices}, prepared(Share))
    except msgspec.ValidationError as error:
        raise ValueError(*error.args) from error
    if any(min(each.memory_bytes, each.compute.guarantee) < 0 for each in share.devices):
        raise ValueError(share.devices)  # it would be booked as room for others
    since = share.suspension.since if share.suspension else 0
    if not (0 <= share.created < _LATEST and 0 <= since < _LATEST):
        raise ValueError(share.created, since)  # no calendar has it, or it is no number
    "".join((share.name, *(each.uuid for each in share.devices))).encode()  # can be printed
    return share


def _rename(document: dict[str, Any], **names: str) -> None:
    """Rename the keys that are present."""
    for old, new in names.items():
        if old in document:
            document[new] = document.pop(old)


_NAME = "processes.json"


class Traces(msgspec.Struct, frozen=True):
    """How a share's processes are identified."""

    namespace: int | None = None
    """The inode of its command's mount namespace."""
    members: tuple[Runner, ...] = ()


def write_traces(directory: Path, traces: Traces) -> None:
    """Write them in one step; raise `StateError`."""
    path = directory / _NAME
    document = {
        "namespace": traces.namespace,
        "members": [[each.pid, each.start_time, each.boot_id] for each in traces.members],
    }
    try:
        _write(path, json.dumps(document) + "\n")
    except OSError as error:
        raise explained(error, path, "write down the share's processes") from error


def read_traces(directory: Path) -> Traces:
    """Empty if they cannot be read."""
    try:
        document = json.loads(read_regular(f"{directory}/{_NAME}", _LONGEST).decode())
        namespace = document["namespace"]
        members = tuple(
            Runner(int(pid), int(start_time), str(boot_id))
            for pid, start_time, boot_id in document["members"]
        )
    except (OSError, ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return Traces()
    return Traces(namespace if isinstance(namespace, int) else None, members)


_EVENTS_MOST_BYTES = 256 << 10
_CLOCKS_DIFFER_S = 1.0


class ShareEvent(msgspec.Struct, frozen=True):
    """What happened to a share, or to a request for one."""

    time: float
    """Seconds after the epoch."""
    kind: str
    """`created`, `refused`, `resized`, `suspended`, `resumed`, `damaged`, `ended`, `lost`."""
    share: str
    """The share's name; empty: none."""
    id: str
    text: str = ""


def note_event(
    folder: StateFolder, kind: str, *, share: str, share_id: str, text: str = ""
) -> None:
    """Append an event. A folder that cannot be written has none: no command fails for it.

    Nor does one wait: where a folder is for all users, each of them could hold a lock of the file.
    """
    event = ShareEvent(time.time(), kind, share, share_id, text)
    line = json.dumps(msgspec.structs.asdict(event)).encode() + b"\n"
    with suppress(OSError):
        _drop_oldest(folder)
        descriptor = folder.open_events(os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)


def _drop_oldest(folder: StateFolder) -> None:
    """Keep the later half of a long file; a command that drops them has the file's lock.

    It is copied to the start, and what follows is cut off then: a command that is killed between
    the two leaves events twice, and loses none. A rename would do, but in a sticky folder only the
    file's owner can replace it.
    """
    import fcntl

    try:
        file = os.fdopen(folder.open_events(os.O_RDWR), "r+b", buffering=0)
    except FileNotFoundError:
        return
    with file:
        if os.fstat(file.fileno()).st_size <= _EVENTS_MOST_BYTES:
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        size = os.fstat(file.fileno()).st_size
        if size > _EVENTS_MOST_BYTES:
            half = _EVENTS_MOST_BYTES // 2
            kept = os.pread(file.fileno(), half, size - half).partition(b"\n")[2]
            file.truncate(os.pwrite(file.fileno(), kept, 0))


def read_events(folder: StateFolder) -> list[ShareEvent]:
    """Return the events, oldest first; lines that are none are skipped.

    Where a folder is for all users, each of them can write any line, and any amount.
    """
    try:
        descriptor = folder.open_events(os.O_RDONLY)
    except OSError:
        return []
    try:
        size = os.fstat(descriptor).st_size
        most = 2 * _EVENTS_MOST_BYTES
        lines = os.pread(descriptor, most, max(0, size - most)).splitlines()
    except OSError:
        return []
    finally:
        os.close(descriptor)
    latest = time.time() + _CLOCKS_DIFFER_S
    events = []
    for line in lines:
        with suppress(ValueError, TypeError, KeyError, RecursionError, OverflowError):
            found = json.loads(line)
            texts = (str(found[name]) for name in ("kind", "share", "id", "text"))
            event = ShareEvent(float(found["time"]), *texts)
            if 0 < event.time <= latest:
                events.append(event)
    return sorted(dict.fromkeys(events), key=lambda each: each.time)


def note_damage(folder: StateFolder, shares: Iterable["LoadedShare"]) -> None:
    """Append an event for each damaged share that has none yet."""
    damaged = [loaded for loaded in shares if loaded.problem]
    if not damaged:
        return
    known = {(each.id, each.text) for each in read_events(folder) if each.kind == "damaged"}
    for loaded in damaged:
        text = loaded.problem.one_line() if loaded.problem else ""
        if (loaded.id, text) not in known:
            note_event(folder, "damaged", share=loaded.name, share_id=loaded.id, text=text)


class LoadedShare(msgspec.Struct, frozen=True, dict=True):
    """A share's directory and its contents as far as readable; else `problem` has the reason."""

    id: ShareId
    directory: Path
    share: Share | None
    ledger: Ledger | None
    """None also in a mode without a ledger."""
    problem: AllotError | None = None
    terms: Mapping[str, Terms] = msgspec.field(default_factory=dict)
    """The compute in force on each device with turns, by UUID."""

    @property
    def name(self) -> str:
        return self.share.name if self.share else self.id

    @property
    def mode(self) -> str:
        return self.share.mode if self.share else DEFAULT_MODE

    @property
    def owner(self) -> Owner | None:
        """Its container on Kubernetes."""
        return self.share.owner if self.share else None

    def age_key(self) -> tuple[float, ShareId]:
        """Sorts shares by age, oldest first."""
        return (self.share.created if self.share else 0.0, self.id)

    def limits(self) -> dict[str, int]:
        """Return the limit on each device, by UUID, in bytes.

        The greater of record and ledger if both can be read: a resize writes one after the other,
        and the booking must never be below the limit in force.
        """
        limits: dict[str, int] = {}
        if self.share:
            limits = {device.uuid: device.memory_bytes for device in self.share.devices}
        if self.ledger:
            for device in self.ledger.policy.devices:
                limits[device.uuid] = max(limits.get(device.uuid, 0), device.memory_limit)
        return limits

    def has_limits_of(self, other: "LoadedShare") -> bool:
        """Whether record and ledger allow the same memory: no resize has come between."""
        policies = [each.ledger and each.ledger.policy for each in (self, other)]
        return self.devices() == other.devices() and policies[0] == policies[1]

    def booked_memory(self) -> dict[str, int]:
        """Return the booked memory of each device, by UUID, in bytes.

        Its limits; 0 while it is suspended and its memory is off its devices.
        """
        is_off = self.share is not None and self.share.is_off_device
        return {uuid: 0 if is_off else limit for uuid, limit in self.limits().items()}

    def guarantees(self) -> dict[str, int]:
        """Return the guaranteed compute on each device, by UUID, in basis points.

        As with limits, the greater of the recorded guarantee and the one in force.
        """
        booked = {device.uuid: device.compute.guarantee for device in self.devices()}
        for uuid, terms in self.terms.items():
            booked[uuid] = max(booked.get(uuid, 0), terms.compute.guarantee)
        return booked

    @cached_property
    def parts(self) -> Mapping[str, DeviceAmount]:
        """Its part of each device, by UUID. Every start adds up those of all shares of the node."""
        guarantees = self.guarantees()
        oversubscribed = {device.uuid for device in self.devices() if device.is_oversubscribed}
        return {
            uuid: device_amount(
                mode=self.mode,
                memory=limit,
                guarantee=guarantees.get(uuid, 0),
                may_oversubscribe=uuid in oversubscribed,
            )
            for uuid, limit in self.booked_memory().items()
        }

    def devices(self) -> tuple[ShareDevice, ...]:
        """Return its devices as booked; none if its record cannot be read."""
        return self.share.devices if self.share else ()


def read_share(
    directory: Path, *, written: Share | None = None, files: DeviceFiles | None = None
) -> LoadedShare | None:
    """Read one share, and reclaim dead processes' use; None if it is gone.

    `written`: its record as the caller wrote it; `allot run` starts and ends faster without a
    parser. `files`: of the devices, where many shares are read at once.
    """
    share_id = ShareId(directory.name)
    share: Share | None = None
    problem: AllotError | None = None
    try:
        share = read_record(directory, written=written)
        if share.id != share_id:  # another user made it: the processes of two would be mixed up
            share, problem = None, _damaged(directory, "it is of another share")
    except FileNotFoundError:
        return None
    except StateError as error:
        problem = error
    name = share.mode if share else DEFAULT_MODE
    snapshot: Ledger | None = None
    terms: Mapping[str, Terms] = {}
    try:
        mode = mode_named(name)
        snapshot = mode.reconcile(directory)
        if snapshot is not None:
            terms = mode.terms(directory, snapshot, files or DeviceFiles())
    except (LedgerError, UsageError) as error:
        if not directory.is_dir():
            return None
        problem = problem or error
    return LoadedShare(share_id, directory, share, snapshot, problem, terms)


def _foreign_owner(found: LoadedShare) -> int | None:
    """The other user whose share it is; None: this user may change it, or it has ended."""
    try:
        owner = found.directory.stat().st_uid
    except FileNotFoundError:
        return None
    return None if os.geteuid() in {0, owner} else owner


def is_ours(found: LoadedShare) -> bool:
    """Whether this user may change a share: its owner, and root."""
    return _foreign_owner(found) is None


def check_owner(found: LoadedShare) -> None:
    """Raise `StateError` for the share of another user, unless this is root."""
    if (owner := _foreign_owner(found)) is not None:
        raise StateError(
            f"share {found.name} belongs to {user_name(owner)}",
            hint="run this command as that user, or as root",
        )

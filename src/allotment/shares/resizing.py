# SPDX-License-Identifier: Apache-2.0
"""Another limit for a share that lives: seen by its programs at their next call.

What is booked (the record) is never below what is in force (the ledger), whenever this is cut off:
growing is booked first, shrinking last.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from allotment.ledger import Ledger
from allotment.model.devices import Device
from allotment.model.errors import AllotError, DoesNotFitError, NotFoundError, StateError
from allotment.model.formats import format_bytes
from allotment.model.quantities import MemoryAmount, check_part
from allotment.model.shares import Share
from allotment.modes import mode_named
from allotment.shares.folders import StateFolder
from allotment.shares.lives import Found, allotted, find, look
from allotment.shares.records import write_record

__all__ = ["resize"]


def resize(
    folder: StateFolder, name: str, memory: MemoryAmount, devices: Iterable[Device], *, force: bool
) -> Found:
    """Change a share's limit on each of its devices, live; return the share as it is then.

    Every device is checked before any is changed. Raises `DoesNotFitError`, `LimitBelowUseError`
    (more is in use and `force` is false) or `NotFoundError`; then no limit is changed.
    """
    by_uuid = {device.uuid: device for device in devices}
    folder.prepare()
    with folder.locked():
        found = find(folder, name)
        if found.problem:
            raise found.problem
        share, snapshot = found.share, found.ledger
        if share is None or snapshot is None:
            raise StateError(f"{found.directory}: cannot be read")
        others = allotted(each for each in look(folder) if each.id != found.id)
        new = {}
        for device in share.devices:
            if device.uuid not in by_uuid:
                raise NotFoundError(
                    f"GPU {device.uuid} of share {share.name} is not here",
                    hint="see `allot devices` and `allot doctor`",
                )
            new[device.uuid] = _new_limit(by_uuid[device.uuid], memory, others)
        _apply(found, share, snapshot, new, force=force)
        return find(folder, found.id)


def _new_limit(device: Device, memory: MemoryAmount, others: Mapping[str, int]) -> int:
    check_part(memory, device.allottable_bytes)
    need = memory.of(device.allottable_bytes)
    have = device.allottable_bytes - others.get(device.uuid, 0)
    if need > have:
        raise DoesNotFitError(
            f"{device.uuid} ({device.name}): need {format_bytes(need)}, have"
            f" {format_bytes(max(0, have))} beside the other shares",
            hint="ask for less, or make room: `allot ps` shows the shares",
        )
    return need


def _apply(
    found: Found, share: Share, snapshot: Ledger, new: Mapping[str, int], *, force: bool
) -> None:
    """Set the limits; a refusal puts back what was changed before it."""
    mode = mode_named(share.mode)
    old = {device.uuid: device.memory_limit for device in snapshot.policy.devices}
    booked = {uuid: max(size, old.get(uuid, 0)) for uuid, size in new.items()}
    write_record(found.directory, _with_limits(share, booked))
    done: list[str] = []
    try:
        for uuid, size in new.items():
            mode.resize(found.directory, uuid, size, force=force)
            done.append(uuid)
    except AllotError:
        for uuid in done:
            mode.resize(found.directory, uuid, old[uuid], force=True)
        write_record(found.directory, _with_limits(share, old))
        raise
    write_record(found.directory, _with_limits(share, new))


def _with_limits(share: Share, limits: Mapping[str, int]) -> Share:
    return replace(
        share,
        devices=tuple(
            replace(device, memory_bytes=limits.get(device.uuid, device.memory_bytes))
            for device in share.devices
        ),
    )

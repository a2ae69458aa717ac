# SPDX-License-Identifier: Apache-2.0
"""Changes the limits and the compute of a live share: for `allot resize`, and for pods.

Its programs see a new limit at their next call; compute is in force when `resize` returns. The
booking (the record) is never below the values in force (the ledger, the contracts), even after an
interruption: growth is booked first, shrinking last.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from allotment.ledger import Terms
from allotment.model.accounting import overlap
from allotment.model.allowances import Allowance, GpuAmounts
from allotment.model.compute import Compute, ComputeClass, exceeds, greater, lesser, revised
from allotment.model.devices import Device
from allotment.model.errors import (
    AllotError,
    DoesNotFitError,
    StateError,
    UsageError,
)
from allotment.model.formats import format_bytes, format_percent, need_and_have
from allotment.model.placements import DeviceState
from allotment.model.quantities import MemoryAmount, check_part
from allotment.model.shares import Share, ShareDevice
from allotment.model.structs import replace
from allotment.modes import SoftMode
from allotment.placement import memory_room, overflow
from allotment.shares.booking import booked, states_of
from allotment.shares.folders import StateFolder
from allotment.shares.lifecycle import find
from allotment.shares.record import LoadedShare, check_owner, note_event, write_record
from allotment.shares.recovery import recover
from allotment.shares.run.command import refuse_inside
from allotment.shares.suspension import check_has_ledger, missing_gpu


class LimitChange(msgspec.Struct, frozen=True):
    """The new values on each device of a share. None: unchanged."""

    memory: MemoryAmount | None = None
    compute: Compute | None = None
    """Guarantee and ceiling only."""
    weight: int | None = None
    kind: ComputeClass | None = None
    host_budget: int | None = None
    """As in `ShareOrder`."""

    @property
    def is_of_compute(self) -> bool:
        return any(value is not None for value in (self.compute, self.weight, self.kind))


class _Part(msgspec.Struct, frozen=True):
    """A share's part of one device, old or new."""

    memory: int
    terms: Terms | None


class _Change(NamedTuple):
    """Parts by device."""

    old: Mapping[str, _Part]
    new: Mapping[str, _Part]


def resize(
    folder: StateFolder,
    name: str,
    change: LimitChange,
    devices: Iterable[Device],
    *,
    force: bool,
    allowance: Allowance | None = None,
) -> LoadedShare:
    """Change a live share on each of its devices; return the changed share.

    All devices are checked before any changes. Raises `DoesNotFitError` (with need and have),
    `LimitBelowUseError` (more is in use and `force` is false), `NotInModeError` (the mode cannot
    change it for running programs), `NotFoundError` or `UsageError` (inside of a share, or a share
    that cannot change); then nothing has changed.
    """
    refuse_inside(f"allot resize {name}")
    check_owner(find(folder, name))
    folder.prepare()
    with folder.locked():
        shares = recover(folder)
        found = find(folder, name)
        if found.owner is not None and found.owner.is_claim:
            raise UsageError(
                f"share {found.name} is a ResourceClaim's, and has what the claim asks for, which"
                " cannot be changed",
                hint="make a claim with the new amounts for new pods, and delete the pods that use"
                f" this one: {found.owner.users_of_claim}",
            )
        if found.owner is not None:
            raise UsageError(
                f"share {found.name} is a pod's, and has what its pod asks for",
                hint=f"kubectl allot resize {found.owner.namespace}/{found.owner.pod}",
            )
        return change_limits(
            folder, found, change, devices, shares=shares, force=force, allowance=allowance
        )


def change_limits(
    folder: StateFolder,
    found: LoadedShare,
    change: LimitChange,
    devices: Iterable[Device],
    *,
    shares: Iterable[LoadedShare],
    force: bool = False,
    allowance: Allowance | None = None,
) -> LoadedShare:
    """Change any live share, as `resize` does. The caller holds the lock and has read `shares`."""
    by_uuid = {device.uuid: device for device in devices}
    if found.problem:
        raise found.problem
    share, snapshot = found.share, found.ledger
    if share is None:
        raise StateError(f"{found.directory}: cannot be read")
    mode = check_has_ledger(found)
    if snapshot is None:
        raise StateError(f"{found.directory}: cannot be read")
    for device in share.devices:
        if device.uuid not in by_uuid:
            raise missing_gpu(share, device)
    others = booked((each for each in shares if each.id != found.id), seen_by=share.owner)
    limits = {device.uuid: device.memory_limit for device in snapshot.policy.devices}
    # A killed resize leaves the record larger. A ledger above its record was tampered with.
    old = {
        device.uuid: _Part(min(limits[device.uuid], device.memory_bytes), _terms_of(found, device))
        for device in share.devices
    }
    states = states_of(by_uuid.values(), others, change.host_budget)
    new = _new_parts(mode, share, old, {state.device.uuid: state for state in states}, change)
    if allowance is not None:
        others_shares = [each for each in shares if each.id != found.id]
        _check_allowance(allowance, _Change(old, new), by_uuid, others_shares)
    before = {uuid: _Part(limits[uuid], found.terms.get(uuid)) for uuid in old}
    after = _in_turn(found, new, shares)
    most = {device.uuid: device.most_bytes for device in share.devices}
    if before == after and _with_parts(share, new, most=most).devices == share.devices:
        return found
    _apply(mode, folder, found, share, _Change(old, new), _Change(before, after), force=force)
    text = ", ".join(f"{format_bytes(part.memory)} of {uuid}" for uuid, part in new.items())
    note_event(folder, "resized", share=share.name, share_id=share.id, text=text)
    return find(folder, found.id)


def _check_allowance(
    allowance: Allowance,
    change: _Change,
    devices: Mapping[str, Device],
    others: Iterable[LoadedShare],
) -> None:
    """Refuse growth beyond the user's ceilings; less is never refused."""
    from allotment.shares import allowances  # late: few machines have a configuration

    grown: dict[tuple[str, int], GpuAmounts] = {}
    for uuid, part in change.new.items():
        before, after = change.old[uuid].terms, part.terms
        had = before.compute if before else Compute()
        has = after.compute if after else Compute()
        if exceeds(has, had):
            allowances.check_compute(allowance, has)
        gpu = allowances.gpu_of(devices[uuid], devices.values())
        grown[gpu] = GpuAmounts(
            part.memory if part.memory > change.old[uuid].memory else 0,
            has.guarantee if has.guarantee > had.guarantee else 0,
        )
    allowances.check_parts(allowance, grown, others)


def _terms_of(found: LoadedShare, device: ShareDevice) -> Terms | None:
    """Return the compute before: the lesser of record and contract, as with memory.

    Of a pod's container as booked: in force is less while another one has the same guarantee.
    """
    terms = found.terms.get(device.uuid)
    if terms is None:
        return None
    is_pods = found.owner is not None
    compute = device.compute if is_pods else lesser(terms.compute, device.compute)
    return replace(terms, compute=compute)


def _new_parts(
    mode: SoftMode,
    share: Share,
    old: Mapping[str, _Part],
    states: Mapping[str, DeviceState],
    change: LimitChange,
) -> dict[str, _Part]:
    """The share's new part of each device. Raises `DoesNotFitError`."""
    new = {}
    promised = 0  # host memory for the devices so far
    for device in share.devices:
        part, state = old[device.uuid], states[device.uuid]
        if change.memory is not None:
            state = replace(state, host_budget_bytes=max(0, state.host_budget_bytes - promised))
            part = replace(part, memory=_new_limit(device, state, change.memory))
        mode.check_change(device, memory_bytes=part.memory, of_compute=change.is_of_compute)
        promised += overflow(state, part.memory)
        if change.is_of_compute:
            part = replace(part, terms=_new_terms(device, state, part.terms, change))
        new[device.uuid] = part
    return new


def _new_limit(device: ShareDevice, state: DeviceState, memory: MemoryAmount) -> int:
    check_part(memory, state.device.allottable_bytes)
    need = memory.of(state.device.allottable_bytes)
    have = memory_room(state, may_oversubscribe=device.is_oversubscribed)
    if need > have:
        raise DoesNotFitError(
            f"{device.uuid} ({device.name}): {need_and_have(need, have)} beside the other shares",
            hint=_hint_of_memory(device, state, need),
        )
    return need


def _hint_of_memory(device: ShareDevice, state: DeviceState, need: int) -> str:
    whole = state.device.allottable_bytes
    if device.is_oversubscribed:
        return (
            "ask for less, make room (`allot ps` shows the shares), or allow more host memory with"
            " --host-memory"
        )
    if need > whole:
        return f"ask for less: this GPU has {format_bytes(whole)}, even when empty"
    return "ask for less, or make room: `allot ps` shows the shares"


def _new_terms(
    device: ShareDevice, state: DeviceState, terms: Terms | None, change: LimitChange
) -> Terms:
    if terms is None:
        raise StateError(
            f"{device.uuid} ({device.name}): this share takes no turns on it",
            hint="run its programs in a new share: allot run --compute ...",
        )
    compute = revised(terms.compute, compute=change.compute, weight=change.weight, kind=change.kind)
    if compute.guarantee > state.free_guarantee:
        raise DoesNotFitError(
            f"{device.uuid} ({device.name}): need {format_percent(compute.guarantee)} % of compute,"
            f" have {format_percent(state.free_guarantee)} % beside the other shares",
            hint="guarantee less (`--compute 0:100` uses only spare time), or make room: `allot ps`"
            " shows the shares",
        )
    return replace(terms, compute=compute)


def _apply(
    mode: SoftMode,
    folder: StateFolder,
    found: LoadedShare,
    share: Share,
    booked: _Change,
    in_force: _Change,
    *,
    force: bool,
) -> None:
    """Put the new parts in force; after a refusal the old parts are restored."""
    assert found.ledger is not None  # noqa: S101 - the caller has read it
    uses = [device.used for device in found.ledger.devices]
    in_use = {each.uuid: use for each, use in zip(found.ledger.policy.devices, uses, strict=False)}
    old, new = booked
    before, after = in_force
    both = {uuid: _greater(old[uuid], new[uuid]) for uuid in new}
    most = {device.uuid: device.most_bytes for device in share.devices}
    allowed = {
        device.uuid: max(device.memory_bytes, device.most_bytes or 0) for device in share.devices
    }
    write_record(found.directory, _with_parts(share, both, most=allowed))
    kept: dict[str, int | None] = {}
    changed: list[str] = []
    try:
        for uuid in new:
            changed.append(uuid)
            used = _enforce(mode, folder, found, uuid, before[uuid], after[uuid], force=force)
            kept[uuid] = min(in_use[uuid] if used is None else used, allowed[uuid])
    except AllotError:
        for uuid in changed:
            restored = replace(before[uuid], memory=old[uuid].memory)
            _enforce(mode, folder, found, uuid, after[uuid], restored, force=True)
        write_record(found.directory, _with_parts(share, old, most=most))
        raise
    write_record(found.directory, _with_parts(share, new, most=kept))


def _in_turn(
    found: LoadedShare, parts: Mapping[str, _Part], shares: Iterable[LoadedShare]
) -> dict[str, _Part]:
    """Return what is in force: no guarantee while another container of the pod has it."""
    owner = found.owner
    taken = {
        uuid
        for each in shares
        if owner and each.owner and each.owner.uid == owner.uid and not overlap(owner, each.owner)
        for uuid, terms in each.terms.items()
        if terms.compute.guarantee
    }
    return {
        uuid: replace(part, terms=_unguaranteed(part.terms)) if uuid in taken else part
        for uuid, part in parts.items()
    }


def _unguaranteed(terms: Terms | None) -> Terms | None:
    return terms and replace(terms, compute=replace(terms.compute, guarantee=0))


def _enforce(
    mode: SoftMode,
    folder: StateFolder,
    found: LoadedShare,
    uuid: str,
    before: _Part,
    after: _Part,
    *,
    force: bool,
) -> int | None:
    """Return the memory in use after a change of the limit."""
    used = None
    if after.memory != before.memory:
        used = mode.resize(found.directory, uuid, after.memory, force=force)
    if after.terms is not None and after.terms != before.terms:
        mode.revise(found.directory, uuid, after.terms, devices=folder.devices)
    return used


def _greater(one: _Part, other: _Part) -> _Part:
    """The smallest part that covers both."""
    terms = one.terms
    if one.terms is not None and other.terms is not None:
        terms = replace(one.terms, compute=greater(one.terms.compute, other.terms.compute))
    return _Part(max(one.memory, other.memory), terms)


def _with_parts(
    share: Share, parts: Mapping[str, _Part], *, most: Mapping[str, int | None]
) -> Share:
    devices = tuple(_with_part(each, parts[each.uuid], most[each.uuid]) for each in share.devices)
    return replace(share, devices=devices, is_resized=True)


def _with_part(device: ShareDevice, part: _Part, most: int | None) -> ShareDevice:
    compute = device.compute if part.terms is None else part.terms.compute
    begun = device.begun_bytes
    if begun is None and part.memory != device.memory_bytes:
        begun = device.memory_bytes
    above = most if most is not None and most > part.memory else None
    return replace(
        device, memory_bytes=part.memory, compute=compute, begun_bytes=begun, most_bytes=above
    )

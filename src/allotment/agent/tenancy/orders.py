# SPDX-License-Identifier: Apache-2.0
"""What is to be made for a container: the dialect's ask, the kubelet's ids and the node's offer.

Pure. An order is complete: nothing else has to be asked to carry it out, now or again.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace

from allotment.agent.protocols import CheckpointEntry
from allotment.agent.resources import ENFORCED, GPU_SHARE, Offer, Resource
from allotment.dialects import asks_of
from allotment.dialects.modes import in_modes, suiting, unsuited
from allotment.model.compute import WHOLE, Compute
from allotment.model.errors import StateError, UsageError
from allotment.model.formats import format_bytes, format_percent
from allotment.model.mig import MigPlace
from allotment.model.pods import ContainerAsk, ContainerKind, Owner, Pod
from allotment.model.quantities import MemoryAmount
from allotment.model.requests import (
    EXCLUSIVE,
    MPS,
    TIMESLICE,
    Constraints,
    Request,
    replicas_of,
    whole_devices,
)
from allotment.model.shares import Injection, Share, ShareId

__all__ = [
    "ShareOrder",
    "adopted",
    "again",
    "describe",
    "device_of",
    "holds_gpus",
    "order_for",
    "share_of",
]

_REPLICA = "::"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareOrder:
    """A share to be made."""

    id: ShareId
    owner: Owner
    request: Request
    devices: tuple[str, ...] = ()
    """UUIDs: these and no others; one that is named several times gives that many parts. Empty:
    some of the candidates."""
    candidates: tuple[str, ...] = ()
    """UUIDs of the devices that serve in this mode."""
    slices: tuple[MigPlace, ...] = ()
    """In mode mig, which slice of each of `devices`."""
    otherwise: "tuple[ShareOrder, ...]" = ()
    """The same in other modes, to be tried in turn where there is no room in this one."""
    injection: Injection | None = None
    """How the container gets it, as it was answered; `NONE`: it is booked and nothing else. None:
    as the configuration in force has it."""


def share_of(entry: CheckpointEntry) -> ShareId:
    """Return the id of an entry's share.

    An entry that another plugin answered names none. Its booking has one that is always the same,
    so that whoever looks again after a crash finds it.
    """
    if entry.share is not None:
        return entry.share
    whose = "\0".join((entry.pod, entry.container, entry.resource, *sorted(entry.ids)))
    return ShareId(hashlib.sha256(whose.encode()).hexdigest()[:12])


def device_of(slot: str) -> str:
    """Return the device that an id of NVIDIA's resources stands for: `UUID` or `UUID::N`."""
    return slot.partition(_REPLICA)[0]


def order_for(pod: Pod, entry: CheckpointEntry, offer: Offer) -> ShareOrder:
    """Say what is to be made for a container that holds ids. Raises `AllotError`."""
    if entry.share is None:
        return adopted(pod, entry)
    ask = _ask(pod, entry, offer)
    resource = offer.resource(entry.resource)
    if resource is None:
        there = ", ".join(each.name for each in offer.resources) or "none"
        raise StateError(
            f"pod {pod}, container {ask.container!r}: this node no longer offers {entry.resource}"
            f" (it offers: {there})",
            hint="delete the pod, so that it is placed anew, or give the node its configuration"
            " back",
        )
    if ask.request is not None:
        return _of_parts(pod, entry, ask, ask.request, resource=resource, offer=offer)
    return _of_slots(pod, entry, ask, resource=resource, offer=offer)


def adopted(pod: Pod, entry: CheckpointEntry) -> ShareOrder:
    """Book what another plugin gave: a whole device, or one that is shared without limits."""
    devices = tuple(sorted({device_of(each) for each in entry.ids}))
    mode = TIMESLICE if any(_REPLICA in each for each in entry.ids) else EXCLUSIVE
    return ShareOrder(
        id=share_of(entry),
        owner=_owner(pod, entry),
        request=whole_devices(len(devices), mode=mode),
        devices=devices,
        candidates=devices,
        injection=Injection.NONE,
    )


def again(share: Share, owner: Owner) -> ShareOrder:
    """Order what is there already, so that what is missing of it is made again.

    What its container asks for by now does not matter: annotations may be edited, shares are not.
    """
    first = share.devices[0] if share.devices else None
    size = first.memory_bytes if first else 0
    uuids = tuple(each.uuid for each in share.devices)
    return ShareOrder(
        id=share.id,
        owner=owner,
        request=Request(
            MemoryAmount(f"{size}", size_bytes=size),
            count=len(uuids),
            compute=first.compute if first else Compute(),
            may_oversubscribe=bool(first and first.is_oversubscribed),
            mode=share.mode,
        ),
        devices=uuids,
        candidates=uuids,
        injection=share.injection,
    )


def _owner(pod: Pod, entry: CheckpointEntry) -> Owner:
    names = [each.name for each in pod.containers]
    place = names.index(entry.container) if entry.container in names else None
    return Owner(
        uid=pod.uid,
        namespace=pod.namespace,
        pod=pod.name,
        container=entry.container,
        kind=ContainerKind.REGULAR if place is None else pod.containers[place].kind,
        resource=entry.resource,
        place=place,
    )


def _ask(pod: Pod, entry: CheckpointEntry, offer: Offer) -> ContainerAsk:
    """Return what the container asks of the resource that the entry is of."""
    names = {each.name for each in offer.resources} - {GPU_SHARE}
    if entry.resource != GPU_SHARE:
        names.add(entry.resource)
    asks = [each for each in asks_of(pod, nvidia=names) if each.container == entry.container]
    found = next((each for each in asks if each.resource == entry.resource), None)
    if found is None:
        raise StateError(
            f"pod {pod}: the kubelet gave {entry.resource} to container {entry.container!r}, which"
            " does not ask for it",
            hint="delete the pod, so that it is placed anew",
        )
    if found.count != len(entry.ids):
        raise StateError(
            f"pod {pod}, container {entry.container!r}: it asks for {found.count} of"
            f" {entry.resource}, the kubelet gave {len(entry.ids)}",
            hint="delete the pod, so that it is placed anew",
        )
    limited = [each.resource for each in asks if _mode(offer, each.resource) in ENFORCED]
    if len(asks) > 1 and limited:
        raise UsageError(
            f"pod {pod}, container {entry.container!r}: it asks for"
            f" {' and '.join(each.resource for each in asks)}, and {limited[0]} is a part of GPUs",
            hint="ask for more of one of them: a container has its part of GPUs by one resource",
        )
    return found


def _mode(offer: Offer, name: str) -> str:
    resource = offer.resource(name)
    return resource.mode if resource else ""


def _of_parts(
    pod: Pod,
    entry: CheckpointEntry,
    ask: ContainerAsk,
    request: Request,
    *,
    resource: Resource,
    offer: Offer,
) -> ShareOrder:
    """Order what names its amounts; ids that stand for no device."""
    unknown = [each for each in ask.devices if each not in offer.modes]
    if unknown:
        raise UsageError(
            f"pod {pod}, container {ask.container!r}: allotment.dev/placement names"
            f" {', '.join(unknown)}, which this node has not",
            hint="remove the annotation, so that the node chooses; it has:"
            f" {', '.join(sorted(offer.modes)) or 'no GPU'}",
        )
    modes = _modes_of(pod, ask, request, offer)
    other = next((each for each in ask.devices if each not in offer.in_mode(modes[0])), None)
    if other is not None:
        there = offer.shared.get(other) or (offer.modes[other],)
        why = (
            f"whose mode is {' or '.join(map(repr, there))} and not {modes[0]!r}"
            if modes[0] not in there
            else f"which is not given as {resource.name} but in replicas"
        )
        raise UsageError(
            f"pod {pod}, container {ask.container!r}: allotment.dev/placement names {other}, {why}",
            hint="remove the annotation, so that the node chooses",
        )
    if ask.devices:
        # Whoever chose them has seen to these, with what was there then: one that was to be alone
        # has company when the node starts again.
        request = replace(request, constraints=Constraints())
    orders = [
        ShareOrder(
            id=share_of(entry),
            owner=_owner(pod, entry),
            request=in_modes(request, (mode,)),
            devices=ask.devices,
            slices=ask.slices,
            candidates=offer.in_mode(mode),
            injection=entry.injection,
        )
        for mode in modes
    ]
    return replace(orders[0], otherwise=tuple(orders[1:]))


def _modes_of(pod: Pod, ask: ContainerAsk, request: Request, offer: Offer) -> tuple[str, ...]:
    """Return in which modes a part of this node's GPUs may be given, the best first.

    Who leaves that open has the modes of the node, in its order, as far as they suit the request.
    """
    there = tuple(dict.fromkeys(each for modes in offer.shared.values() for each in modes))
    wanted = suiting(request, there) if ask.mode is None else (ask.mode, *request.other_modes)
    found = wanted if ask.devices else tuple(each for each in wanted if each in there)
    if found:
        return found
    has = " or ".join(map(repr, there)) or "of no mode"
    if ask.mode is None:
        problem = f"what it asks for cannot be had in mode {has}: {_unsuited(request, there)}"
        hint = "ask for bytes, or name a profile (allotment.dev/mig-profile), or choose a node that"
        hint += " has GPUs of mode soft"
    else:
        problem = f"it wants mode {' or '.join(map(repr, wanted))}, and {ask.resource} of this node"
        problem += f" is {has}"
        hint = "remove the annotation allotment.dev/mode, or choose a node that has such GPUs"
    raise UsageError(f"pod {pod}, container {ask.container!r}: {problem}", hint=hint)


def _unsuited(request: Request, modes: Iterable[str]) -> str:
    return "; ".join(
        f"in mode {mode} {unsuited(request, mode) or 'nobody sees to its compute'}"
        for mode in modes
    )


def _of_slots(
    pod: Pod, entry: CheckpointEntry, ask: ContainerAsk, *, resource: Resource, offer: Offer
) -> ShareOrder:
    """Order the devices that the ids name, as much of each as their mode gives for an id."""
    known = {slot.id: slot.device for slot in resource.slots}
    slots = sorted(known.get(each) or device_of(each) for each in entry.ids)
    uuids = sorted(set(slots))
    mode = _mode_of(pod, ask, uuids, resource=resource, offer=offer)
    is_part = mode in ENFORCED
    return ShareOrder(
        id=share_of(entry),
        owner=_owner(pod, entry),
        request=_replicas(resource, count=len(uuids))
        if is_part
        else whole_devices(len(uuids), mode=mode),
        devices=tuple(slots if is_part else uuids),
        candidates=tuple(uuids),
        injection=entry.injection,
    )


def _replicas(resource: Resource, *, count: int) -> Request:
    """Return the request for replicas that are parts of a device.

    By MPS these are NVIDIA's: as much of the multiprocessors as there are parts and no more, in
    whole percents (k8s-device-plugin v0.20, cmd/mps-control-daemon/mps/daemon.go).
    """
    request = replicas_of(resource.replicas, count=count)
    if resource.mode != MPS:
        return request
    part = 100 // resource.replicas * (WHOLE // 100)
    return replace(request, mode=MPS, compute=Compute(part, part, is_governed=True))


def _mode_of(
    pod: Pod, ask: ContainerAsk, uuids: Iterable[str], *, resource: Resource, offer: Offer
) -> str:
    """Return the mode of devices that were given together.

    One of NVIDIA's resources may have whole GPUs beside replicas of others. A container that was
    given some of each has nothing enforced.
    """
    found = set()
    for uuid in uuids:
        mode = offer.modes.get(uuid)
        found.add(mode)
        is_like = mode == resource.mode or not ENFORCED & {mode, resource.mode}
        if mode is not None and is_like:
            continue
        problem = (
            f"{uuid} is not on this node any more"
            if mode is None
            else f"the mode of {uuid} is {mode!r} by now, and {resource.name} is {resource.mode!r}"
        )
        raise StateError(
            f"pod {pod}, container {ask.container!r}: {problem}",
            hint="delete the pod, so that it is placed anew",
        )
    mode = resource.mode if resource.mode in ENFORCED else TIMESLICE
    mode = EXCLUSIVE if found == {EXCLUSIVE} else mode
    _check_wish(pod, ask, mode)
    return mode


def _check_wish(pod: Pod, ask: ContainerAsk, mode: str) -> None:
    """Refuse a pod that wants another mode than it would have."""
    if ask.mode not in {None, mode}:
        raise UsageError(
            f"pod {pod}, container {ask.container!r}: it wants mode {ask.mode!r}, and"
            f" {ask.resource} of this node is {mode!r}",
            hint="remove the annotation allotment.dev/mode, or choose a node that has such GPUs",
        )


def holds_gpus(entry: CheckpointEntry, offer: Offer) -> bool:
    """Are its ids devices of this node, whoever gave them?"""
    return bool(entry.ids) and all(device_of(each) in offer.modes for each in entry.ids)


def describe(share: Share) -> str:
    """Say in a line what a share has, for its owner's event."""
    parts = []
    for device in share.devices:
        text = f"{device.uuid} ({device.name})"
        if share.mode in ENFORCED:
            compute = f" and {_shown(device.compute)}" if device.compute.is_governed else ""
            text = f"{format_bytes(device.memory_bytes)}{compute} of {text}"
        parts.append(text)
    return f"share {share.id}: {'; '.join(parts)}, mode {share.mode}"


def _shown(compute: Compute) -> str:
    guarantee, ceiling = format_percent(compute.guarantee), format_percent(compute.ceiling)
    if compute.guarantee == compute.ceiling:
        return f"{guarantee} % of compute"
    if compute.guarantee:
        return f"{guarantee} to {ceiling} % of compute"
    if compute.ceiling < WHOLE:
        return f"up to {ceiling} % of compute"
    return "the compute that others leave"

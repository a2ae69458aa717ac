# SPDX-License-Identifier: Apache-2.0
"""The order for a container's share: from its request, the kubelet's ids and the node's offer.

Pure. An order is complete: carrying it out needs no further question, also when repeated.
"""

import hashlib
from collections.abc import Iterable, Iterator

from allotment.agent.protocols import CheckpointEntry
from allotment.agent.resources import GPU_SHARE, Offer, Resource
from allotment.dialects import asks_of
from allotment.dialects.own.protocol import (
    in_modes,
    suiting,
    unresizable,
    unsuited,
    without_effect,
)
from allotment.model.compute import WHOLE, Compute
from allotment.model.errors import MisplacedError, StateError, UsageError
from allotment.model.formats import format_bytes, format_percent
from allotment.model.modes import EXCLUSIVE, TIMESLICE, traits_of
from allotment.model.pods import ContainerAsk, ContainerKind, Owner, Pod
from allotment.model.quantities import MemoryAmount
from allotment.model.requests import Constraints, Request, replicas_of, whole_devices
from allotment.model.shares import Injection, Share, ShareId
from allotment.model.structs import replace
from allotment.modes import ledger_mode
from allotment.shares.placing import ShareOrder

_REPLICA = "::"
_PLACE_AGAIN = (
    "delete the pod and create it again, without a placement of your own; for a pod with a"
    " controller the agent does so"
)
_OTHER_MODE = (
    "create the pod again without the annotation allotment.dev/mode, or choose a node that has such"
    " GPUs"
)


def share_of(entry: CheckpointEntry) -> ShareId:
    """Return the id of an entry's share.

    An entry that another plugin answered names none. Its id is derived from its content, so that
    the agent finds the share again after a crash.
    """
    if entry.share is not None:
        return entry.share
    content = "\0".join((entry.pod, entry.container, entry.resource, *sorted(entry.ids)))
    return ShareId(hashlib.sha256(content.encode()).hexdigest()[:12])


def device_of(slot: str) -> str:
    """Return the device of an id of NVIDIA's resources: `UUID` or `UUID::N`."""
    return slot.partition(_REPLICA)[0]


def order_for(pod: Pod, entry: CheckpointEntry, offer: Offer) -> ShareOrder:
    """Return the order for a container that holds ids. Raises `AllotError`."""
    if entry.share is None:
        return adopted(pod, entry)
    ask = _ask(pod, entry, offer)
    resource = offer.resource(entry.resource)
    if resource is None:
        names = ", ".join(each.name for each in offer.resources) or "none"
        raise MisplacedError(
            f"pod {pod}, container {ask.container!r}: this node no longer offers {entry.resource}"
            f" (it offers: {names})",
            hint=f"{_PLACE_AGAIN}, or restore the node's configuration",
        )
    if ask.request is not None:
        return _of_parts(pod, entry, ask, ask.request, resource=resource, offer=offer)
    return _of_slots(pod, entry, ask, resource=resource, offer=offer)


def adopted(pod: Pod, entry: CheckpointEntry) -> ShareOrder:
    """Order what another plugin gave: a whole device, or one that is shared without limits."""
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


def nearest_first(order: ShareOrder, shares: Iterable[Share]) -> Iterator[ShareOrder]:
    """Yield an order for devices of the pod's other shares, then without that limit.

    Kubernetes counts the greater of two containers that run one after the other. On the same
    devices they take no more than that.
    """
    mine = order.owner
    # An idle slice may serve the next container as it is: no device is preferred.
    is_free = not order.devices and not traits_of(order.request.mode).is_slice
    for share in shares if is_free else ():
        owner = share.owner
        if mine is None or owner is None or owner.uid != mine.uid or share.id == order.id:
            continue
        uuids = tuple(device.uuid for device in share.devices)
        fits = len(uuids) == order.request.count and set(uuids) <= set(order.candidates or ())
        if fits and ContainerKind.INIT in {mine.kind, owner.kind}:
            yield replace(order, candidates=uuids)
            break
    yield order


def is_room_coming(
    order: ShareOrder, shares: Iterable[Share], entries: Iterable[CheckpointEntry]
) -> bool:
    """Return whether a share on the order's GPUs is of a pod that the kubelet has dropped.

    Its checkpoint lists the order's pod and not that one: it gave the devices to the next pod
    before it reported the end. Claims are not in the checkpoint: they never wait for this.
    """
    counted = {each.pod for each in entries}
    if order.owner is None or order.owner.uid not in counted:
        return False
    wanted = order.devices or order.candidates
    return any(
        share.owner is not None
        and not share.owner.is_claim
        and share.owner.uid not in counted
        and (wanted is None or any(each.uuid in wanted for each in share.devices))
        for share in shares
    )


def again(share: Share, owner: Owner) -> ShareOrder:
    """Order an existing share as it is, so that its missing files are made again.

    Its container's present request does not count: annotations may change, shares do not.
    """
    first = share.devices[0] if share.devices else None
    size = first.memory_bytes if first else 0
    asked = first.asked if first else None
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
        asked=None
        if asked is None
        else Request(
            MemoryAmount(f"{asked.memory_bytes}", size_bytes=asked.memory_bytes),
            compute=Compute(asked.guarantee, asked.ceiling),
        ),
        devices=uuids,
        candidates=uuids,
        injection=share.injection,
    )


def request_of_share(pod: Pod, share: Share, offer: Offer) -> Request | None:
    """Return what a share's container asks for at present. Raises `UsageError`.

    None: it asks for no part by amounts, or for no change of amounts that its mode fixes. What it
    has there may be more than it asks for, as a whole slice.
    """
    owner = share.owner
    names = {resource.name for resource in offer.resources}
    for ask in asks_of(pod, nvidia=names):
        if owner is None or (ask.container, ask.resource) != (owner.container, owner.resource):
            continue
        own, request = ask.own, ask.request
        if own is None or request is None:
            return None
        sizes = [device.memory_bytes for device in share.devices]
        if traits_of(share.mode).fixed_because and not any(
            unresizable(own, request, share.mode, size) for size in sizes
        ):
            return None
        return in_modes(request, (share.mode,))
    return None


def _owner(pod: Pod, entry: CheckpointEntry) -> Owner:
    names = [container.name for container in pod.containers]
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
    """Return the container's request of the entry's resource."""
    nvidia = {each.name for each in offer.resources} - {GPU_SHARE}
    if entry.resource != GPU_SHARE:
        nvidia.add(entry.resource)
    asks = [ask for ask in asks_of(pod, nvidia=nvidia) if ask.container == entry.container]
    own = next((ask for ask in asks if ask.resource == entry.resource), None)
    if own is None:
        raise StateError(
            f"pod {pod}: the kubelet gave {entry.resource} to container {entry.container!r}, which"
            " does not request it",
            hint=_PLACE_AGAIN,
        )
    if own.count != len(entry.ids):
        raise StateError(
            f"pod {pod}, container {entry.container!r}: it requests {own.count} of"
            f" {entry.resource}, the kubelet gave {len(entry.ids)}",
            hint=_PLACE_AGAIN,
        )
    if len(asks) > 1:
        names = [ask.resource for ask in asks]
        resources = map(offer.resource, names)
        limited = [each.name for each in resources if each and ledger_mode(each.mode)]
        if limited:
            raise UsageError(
                f"pod {pod}, container {entry.container!r}: it requests {' and '.join(names)}, and"
                f" {limited[0]} is a part of GPUs",
                hint="request more of one of them: a container gets parts of GPUs by one resource",
            )
    return own


def _of_parts(
    pod: Pod,
    entry: CheckpointEntry,
    ask: ContainerAsk,
    request: Request,
    *,
    resource: Resource,
    offer: Offer,
) -> ShareOrder:
    """Order parts of GPUs by their amounts; the ids name no device."""
    unknown = [uuid for uuid in ask.devices if uuid not in offer.modes]
    if unknown:
        raise MisplacedError(
            f"pod {pod}, container {ask.container!r}: allotment.dev/placement names"
            f" {', '.join(unknown)}, not on this node; it has:"
            f" {', '.join(sorted(offer.modes)) or 'no GPU'}",
            hint=_PLACE_AGAIN,
        )
    modes = _modes_of(pod, ask, request, offer)
    other = next((uuid for uuid in ask.devices if uuid not in offer.in_mode(modes[0])), None)
    if other is not None:
        its_modes = offer.shared.get(other) or (offer.modes[other],)
        why = (
            f"whose mode is {' or '.join(map(repr, its_modes))} and not {modes[0]!r}"
            if modes[0] not in its_modes
            else f"which is offered in replicas, not as {resource.name}"
        )
        raise MisplacedError(
            f"pod {pod}, container {ask.container!r}: allotment.dev/placement names {other}, {why}",
            hint=_PLACE_AGAIN,
        )
    if ask.devices:
        # The scheduler checked the constraints at its time. A share that wanted to be alone may
        # have other shares beside it when the node starts again.
        request = replace(request, constraints=Constraints())
    orders = [
        ShareOrder(
            id=share_of(entry),
            owner=_owner(pod, entry),
            request=in_modes(request, (mode,)),
            devices=ask.devices,
            slices=ask.slices,
            asked=None if ask.devices else ask.own,
            candidates=offer.in_mode(mode),
            injection=entry.injection,
        )
        for mode in modes
    ]
    return replace(orders[0], otherwise=tuple(orders[1:]))


def _modes_of(pod: Pod, ask: ContainerAsk, request: Request, offer: Offer) -> tuple[str, ...]:
    """Return the modes for the container's share, the preferred mode first.

    If its pod names none, these are the node's modes, in the node's order, that suit the request.
    """
    offered = tuple(dict.fromkeys(mode for modes in offer.shared.values() for mode in modes))
    wanted = suiting(request, offered) if ask.mode is None else (ask.mode, *request.other_modes)
    possible = wanted if ask.devices else tuple(mode for mode in wanted if mode in offered)
    if possible:
        return possible
    has = " or ".join(map(repr, offered)) or "of no mode"
    if ask.mode is None:
        reasons = "; ".join(f"in mode {mode} {_unsuited(request, mode)}" for mode in offered)
        problem = f"mode {has} cannot serve this request: {reasons}"
        hint = "request bytes, name a profile (allotment.dev/mig-profile), or choose a node that"
        hint += " has GPUs of mode soft"
    else:
        problem = f"it wants mode {' or '.join(map(repr, wanted))}, and {ask.resource} of this node"
        problem += f" is {has}"
        hint = _OTHER_MODE
    raise UsageError(f"pod {pod}, container {ask.container!r}: {problem}", hint=hint)


def _unsuited(request: Request, mode: str) -> str:
    lost = without_effect(request, mode)
    return unsuited(request, mode) or f"{' and '.join(lost)} has no effect"


def _of_slots(
    pod: Pod, entry: CheckpointEntry, ask: ContainerAsk, *, resource: Resource, offer: Offer
) -> ShareOrder:
    """Order the devices that the ids name."""
    known = resource.devices_by_slot
    slots = sorted(known.get(slot) or device_of(slot) for slot in entry.ids)
    uuids = sorted(set(slots))
    mode = _mode_of(pod, ask, uuids, resource=resource, offer=offer)
    is_part = ledger_mode(mode) is not None
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

    In mode mps these are NVIDIA's: each part gets an equal limit of multiprocessors, in whole
    percents (k8s-device-plugin v0.20, cmd/mps-control-daemon/mps/daemon.go).
    """
    request = replicas_of(resource.replicas, count=count)
    if not traits_of(resource.mode).needs_daemon:
        return request
    part = 100 // resource.replicas * (WHOLE // 100)
    return replace(request, mode=resource.mode, compute=Compute(part, part, is_governed=True))


def _mode_of(
    pod: Pod, ask: ContainerAsk, uuids: Iterable[str], *, resource: Resource, offer: Offer
) -> str:
    """Return the mode of devices that one container was given.

    One of NVIDIA's resources may have whole GPUs beside replicas of others. Nothing is enforced for
    a container that has some of each.
    """
    modes = set()
    for uuid in uuids:
        mode = offer.modes.get(uuid)
        if mode is not None and (
            mode == resource.mode or not (ledger_mode(mode) or ledger_mode(resource.mode))
        ):
            modes.add(mode)
            continue
        problem = (
            f"{uuid} is no longer on this node"
            if mode is None
            else f"the mode of {uuid} is now {mode!r}, and {resource.name} is {resource.mode!r}"
        )
        raise MisplacedError(
            f"pod {pod}, container {ask.container!r}: {problem}",
            hint=_PLACE_AGAIN,
        )
    mode = modes.pop() if len(modes) == 1 else TIMESLICE
    if ask.mode not in {None, mode}:
        raise UsageError(
            f"pod {pod}, container {ask.container!r}: it wants mode {ask.mode!r}, and"
            f" {ask.resource} of this node is {mode!r}",
            hint=_OTHER_MODE,
        )
    return mode


def holds_gpus(entry: CheckpointEntry, offer: Offer) -> bool:
    """Return whether its ids are devices of this node, given by any plugin."""
    return bool(entry.ids) and all(device_of(each) in offer.modes for each in entry.ids)


def describe(share: Share) -> str:
    """Return a share's devices and amounts in a line, for its owner's event."""
    parts = []
    for device in share.devices:
        text = f"{device.uuid} ({device.name})"
        if ledger_mode(share.mode):
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

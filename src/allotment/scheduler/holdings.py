# SPDX-License-Identifier: Apache-2.0
"""Who has what: each device of a cluster with its holders, what is left, and the pods that wait.

Pure. All sums are those of the scheduler's own books (`placement.nodes`). Holders are listed as
placed: init containers reuse memory, so the holders of a device may have more than its sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec

from allotment.dialects.foreign.claim_bookings import claim_booking
from allotment.model.accounting import DeviceAmount
from allotment.model.clusters import (
    NodeDevice,
    NodeInventory,
    PlacedContainer,
    PlacedDevice,
    PodBooking,
    PodNeed,
    TakenPart,
)
from allotment.model.compute import WHOLE, Compute
from allotment.model.mig import MigPlace
from allotment.model.modes import traits_of
from allotment.model.pods import ContainerKind, PodUid
from allotment.model.structs import replace
from allotment.placement.booking import footprint
from allotment.placement.nodes import Node

if TYPE_CHECKING:
    from allotment.dialects.own.resource_claims import ResourceClaim
    from allotment.kube.live import LiveCluster, LivePod


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """A pod on a node, or a ResourceClaim with devices of one."""

    booking: PodBooking
    """Without containers: its devices are unknown, as its node's agent chose them."""
    namespace: str
    name: str
    need: PodNeed | None = None
    """What it asks for now, after a resize. None: a claim, or a pod of another system."""
    phase: str = ""
    """The pod's `status.phase`, or `Terminating`; empty for a claim."""
    is_claim: bool = False
    pods: tuple[str, ...] = ()
    """Names of the pods that use the claim."""
    counted: frozenset[str] = frozenset()
    """The claim's requests that the node's inventory counts already."""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A container's part of one device, or that of a claim's request."""

    uid: PodUid
    namespace: str
    name: str
    """Of the pod or the claim."""
    container: str
    """Or the claim's request."""
    is_claim: bool = False
    pods: tuple[str, ...] = ()
    """Names of the pods that use the claim."""
    kind: ContainerKind = ContainerKind.REGULAR
    phase: str = ""
    mode: str
    memory_bytes: int = 0
    """Promised memory; 0 in a mode without promises."""
    is_oversubscribed: bool = False
    """Its memory may live on the host."""
    guarantee: int = 0
    """Promised part of the device's time, in basis points."""
    compute: Compute | None = None
    """Guarantee, ceiling, weight and class. None: its mode enforces none."""
    slice: MigPlace | None = None

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}/{self.container}"


class DeviceHoldings(msgspec.Struct, frozen=True, kw_only=True):
    """A device and its holders. Bytes; basis points of its time."""

    device: NodeDevice
    mode: str = ""
    """Of its shares; empty: there are none."""
    shares: int = 0
    allotted_bytes: int = 0
    oversubscribed_bytes: int = 0
    """Of these, what may live on the host."""
    guaranteed: int = 0
    is_open: bool = True
    """It takes another share: it is healthy, not used alone, and has a free seat."""
    free_bytes: int = 0
    """The most memory of another share; 0 if it takes none."""
    free_guarantee: int = 0
    holders: tuple[Holder, ...] = ()
    parts: Mapping[PodUid, DeviceAmount] = msgspec.field(default_factory=dict)
    """What each pod and claim has of it, over all its containers, as the sums count it."""
    others: TakenPart = msgspec.field(default=TakenPart())
    """Use without a known holder: programs of the host, pods that the node's agent placed."""


class NodeHoldings(msgspec.Struct, frozen=True, kw_only=True):
    """A node's devices in the order of their indexes."""

    name: str
    address: str = ""
    """Its internal one, if known."""
    devices: tuple[DeviceHoldings, ...] = ()
    unlocated: tuple[Tenant, ...] = ()
    """Pods on the node that have GPUs, and it is unknown which: the node's agent chose them, or the
    node reports no GPU of this UUID."""

    @property
    def memory_bytes(self) -> int:
        return sum(each.device.memory_bytes for each in self.devices)

    @property
    def allotted_bytes(self) -> int:
        return sum(each.allotted_bytes for each in self.devices)

    @property
    def guaranteed(self) -> int:
        """Basis points of one device's time, summed."""
        return sum(each.guaranteed for each in self.devices)


class ClusterHoldings(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes with devices, by name, and the pods that wait for some."""

    nodes: tuple[NodeHoldings, ...] = ()
    waiting: tuple[LivePod, ...] = ()
    """In scheduling order."""
    without_devices: tuple[str, ...] = ()
    """Names of the other nodes."""
    problems: tuple[str, ...] = ()
    """Objects that could not be read, and are left out."""

    def node(self, name: str) -> NodeHoldings | None:
        return next((node for node in self.nodes if node.name == name), None)


def cluster_holdings(live: LiveCluster) -> ClusterHoldings:
    """Return who has what in a cluster that was just read."""
    nodes = {inventory.name: Node(inventory) for inventory in live.nodes}
    tenants: dict[str, list[Tenant]] = {}
    names = {}
    for pod in live.pods:
        booking = pod.booking
        if booking is None:
            continue
        if booking.node in nodes:
            nodes[booking.node].book(booking)
        names[pod.need.uid] = pod.need.name
        if booking.containers or pod.need.containers:
            tenants.setdefault(booking.node, []).append(_pod(pod, booking))
    for part in live.claims:
        if part.node in nodes:
            nodes[part.node].book(part)
    for claim in live.allocated:
        node = nodes.get(claim.devices[0].pool)
        if node is not None and (tenant := claim_tenant(claim, node.inventory, names)):
            tenants.setdefault(node.inventory.name, []).append(tenant)
    found = [
        node_holdings(node, tenants.pop(name, ()), address=live.addresses.get(name, ""))
        for name, node in nodes.items()
    ]
    found += [NodeHoldings(name=name, unlocated=tuple(rest)) for name, rest in tenants.items()]
    return ClusterHoldings(
        nodes=tuple(sorted(found, key=lambda node: node.name)),
        waiting=tuple(pod for pod in live.pods if pod.booking is None and pod.need.containers),
        without_devices=live.without_devices,
        problems=live.problems,
    )


def _pod(pod: LivePod, booking: PodBooking) -> Tenant:
    return Tenant(
        booking=booking,
        namespace=pod.need.namespace,
        name=pod.need.name,
        need=pod.resized or pod.need,
        phase="Terminating" if pod.is_ending else pod.phase,
    )


def claim_tenant(
    claim: ResourceClaim, node: NodeInventory, names: Mapping[PodUid, str]
) -> Tenant | None:
    """Return a claim with all its devices on a node; None: it has none there.

    `names` has the names of pods.
    """
    booking = claim_booking(claim, replace(node, claims=frozenset()))
    if booking is None:
        return None
    return Tenant(
        booking=booking,
        namespace=claim.namespace,
        name=claim.name,
        is_claim=True,
        pods=tuple(sorted(names[uid] for uid in claim.pods if uid in names)),
        counted=frozenset(
            each.name for each in booking.containers if claim.share_id(each.name) in node.claims
        ),
    )


class _Column(msgspec.Struct):
    """What is known of the holders of one device."""

    holders: list[Holder] = msgspec.field(default_factory=list)
    counted: list[Holder] = msgspec.field(default_factory=list)
    """Of these, those that the node's inventory counts."""
    parts: dict[PodUid, DeviceAmount] = msgspec.field(default_factory=dict)


def node_holdings(node: Node, tenants: Iterable[Tenant], *, address: str = "") -> NodeHoldings:
    """Return a node's devices with these holders. The sums are those of the node."""
    found = {uuid: _Column() for uuid in node.hardware.columns}
    unlocated = []
    for tenant in tenants:
        containers = tenant.booking.containers
        is_known = bool(containers)
        uid = tenant.booking.uid
        is_booked = node.bookings.get(uid) is tenant.booking
        prints = node.footprint(uid) if is_booked else footprint(containers)
        for uuid, print_ in prints.items():
            if uuid in found:
                found[uuid].parts[uid] = print_.part
            else:
                is_known = False
        for container, placed, holder in _holders(tenant):
            column = found.get(placed.uuid)
            if column is None:
                continue
            column.holders.append(holder)
            if container.name in tenant.counted:
                column.counted.append(holder)
        if not is_known:
            unlocated.append(tenant)
    devices = (_device(node, node.hardware.columns[uuid], each) for uuid, each in found.items())
    return NodeHoldings(
        name=node.inventory.name,
        address=address,
        devices=tuple(sorted(devices, key=lambda each: (each.device.index, each.device.uuid))),
        unlocated=tuple(unlocated),
    )


def _device(node: Node, number: int, column: _Column) -> DeviceHoldings:
    state, room = node.view.state(number), node.room(number)
    device = node.inventory.devices[number]
    return DeviceHoldings(
        device=device,
        mode=state.mode,
        shares=state.shares,
        allotted_bytes=state.allotted_bytes,
        oversubscribed_bytes=state.oversubscribed_bytes,
        guaranteed=state.guaranteed,
        is_open=bool(room.modes),
        free_bytes=room.free_memory if room.modes else 0,
        free_guarantee=room.free if room.modes else 0,
        holders=tuple(column.holders),
        parts=column.parts,
        others=_rest(device.taken, column.counted),
    )


def _rest(taken: TakenPart, counted: Iterable[Holder]) -> TakenPart:
    """Return what is left of a device's use without the claims that are known by name."""
    for holder in counted:
        shares = max(0, taken.shares - 1)
        taken = TakenPart(
            max(0, taken.memory - holder.memory_bytes) if shares else 0,
            max(0, taken.guarantee - holder.guarantee) if shares else 0,
            shares,
            taken.mode if shares else "",
        )
    return taken


def _holders(tenant: Tenant) -> Iterator[tuple[PlacedContainer, PlacedDevice, Holder]]:
    need = tenant.need
    asked = {each.name: each.request.compute for each in need.containers} if need else {}
    for container in tenant.booking.containers:
        is_promised = not traits_of(container.mode).is_time_sliced
        for placed in container.devices:
            guarantee = placed.guarantee if is_promised else 0
            holder = Holder(
                uid=tenant.booking.uid,
                namespace=tenant.namespace,
                name=tenant.name,
                container=container.name,
                is_claim=tenant.is_claim,
                pods=tenant.pods,
                kind=container.kind,
                phase=tenant.phase,
                mode=container.mode,
                memory_bytes=placed.memory if is_promised else 0,
                is_oversubscribed=container.may_oversubscribe,
                guarantee=guarantee,
                compute=_compute(asked.get(container.name), container.mode, guarantee),
                slice=placed.slice,
            )
            yield container, placed, holder


def _compute(asked: Compute | None, mode: str, guarantee: int) -> Compute | None:
    """Return the compute in force: the booked guarantee, with what else is asked for."""
    traits = traits_of(mode)
    if not traits.enforces_compute:
        return None
    guarantee = min(guarantee, WHOLE)
    if traits.is_slice:
        return Compute(guarantee, guarantee or WHOLE, is_governed=True)
    compute = asked or Compute(is_governed=guarantee > 0)
    if compute.guarantee == guarantee:
        return compute
    return replace(compute, guarantee=guarantee, ceiling=max(compute.ceiling, guarantee))

# SPDX-License-Identifier: Apache-2.0
"""The cluster as the scheduler sees it: nodes with devices, pods' needs, bookings.

A pod counts by phase, as in Kubernetes: the larger of (regular containers plus sidecars) and (one
init container plus the sidecars before it). This holds for each device separately.
"""

from collections.abc import Mapping
from typing import Final, Protocol

import msgspec

from allotment.model.compute import WHOLE
from allotment.model.mig import MigPlace, MigProfile, MigSlice
from allotment.model.modes import SOFT
from allotment.model.pods import ContainerKind, ForeignPod, Pod, PodUid
from allotment.model.requests import Request


class TakenPart(msgspec.Struct, frozen=True):
    """The part of a device that is used or requested. Bytes; basis points of its time."""

    memory: int = 0
    guarantee: int = 0
    shares: int = 0
    mode: str = ""
    """Modes of these shares; empty: there are none."""


class NodeMig(msgspec.Struct, frozen=True, kw_only=True):
    """The MIG state of a device, or its state once MIG is on."""

    profiles: tuple[MigProfile, ...]
    """As the driver reports them. Devices with the same profiles share one object."""
    slices: tuple[MigSlice, ...] = ()
    """Instances without a placement of ours: idle or foreign ones."""
    is_enabled: bool = True
    """MIG is on, and not only for warm slices that can be removed. If off, the node's agent
    switches it on for the first slice, on an idle device."""


class NodeDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device of a node, as published by the node's agent."""

    uuid: str
    model: str
    memory_bytes: int
    """Bytes available to shares in total."""
    index: int = 0
    numa_node: int | None = None
    modes: tuple[str, ...] = (SOFT,)
    """Modes that the node offers on it for `allotment.dev/gpu`."""
    max_shares: int = 63
    problem: str = ""
    """Why it takes no share for now: unhealthy, lost, cordoned. Empty: it takes shares."""
    taken: TakenPart = msgspec.field(default=TakenPart())
    """Users without a placement of ours: host programs, pods placed by the agent alone, pods of an
    earlier device plugin."""
    guarantee: int = WHOLE
    """Basis points of its time that can be guaranteed in total."""
    mig: NodeMig | None = None
    """None: its node creates no slices on it on demand."""
    mig_off: str = ""
    """Why slices are unavailable for a time although its modes allow them. Empty: available."""


class NodeInventory(msgspec.Struct, frozen=True, kw_only=True):
    """A node with devices. Allocatable CPU in thousandths of a core, memory in bytes."""

    name: str
    devices: tuple[NodeDevice, ...] = ()
    cpu_milli: int = 0
    memory_bytes: int = 0
    host_budget_bytes: int = 0
    """Bytes that may be promised beyond device memory, backed by host memory."""
    resized: Mapping[PodUid, int] = msgspec.field(default_factory=dict)
    """The generation of the last resize in force, of each pod that has one."""
    claims: frozenset[str] = frozenset()
    """Ids of the shares of ResourceClaims that the devices' `taken` and slices count."""
    links: Mapping[tuple[str, str], int] = msgspec.field(default_factory=dict)
    """Proximity of two devices, by UUIDs in text order: the score of k8s-device-plugin's
    `GetPreferredAllocation` (100 for each NVLink, PCIe 10 to 60), and 100 for each NVLink through
    NVSwitches."""


class WantedContainer(msgspec.Struct, frozen=True, kw_only=True):
    """The request of one container of a pod."""

    name: str
    request: Request
    kind: ContainerKind = ContainerKind.REGULAR
    place: int = 0
    """Position among the pod's containers, init containers first, as specified."""


class PodNeed(msgspec.Struct, frozen=True, kw_only=True):
    """The full request of a pod; CPU and memory as kube-scheduler counts them."""

    uid: PodUid
    namespace: str = ""
    name: str = ""
    cpu_milli: int = 0
    memory_bytes: int = 0
    priority: int = 0
    """Priority, which decides who may use devices kept for a preempting pod."""
    containers: tuple[WantedContainer, ...] = ()
    """Containers that ask for devices."""

    def __str__(self) -> str:
        """`namespace/name`."""
        return f"{self.namespace}/{self.name}"


class PlacedDevice(msgspec.Struct, frozen=True):
    """A container's part of one device. Bytes; basis points of its time."""

    uuid: str
    """UUID of the whole GPU, also for a slice."""
    memory: int
    guarantee: int = 0
    slice: MigPlace | None = None
    """In mode `mig`: the slice, whose `memory` and `guarantee` apply. A container with several
    slices of one GPU has a `PlacedDevice` for each."""


class PlacedContainer(msgspec.Struct, frozen=True, kw_only=True):
    """A container's devices, in the order in which the container sees them."""

    name: str
    devices: tuple[PlacedDevice, ...]
    kind: ContainerKind = ContainerKind.REGULAR
    place: int = 0
    mode: str = SOFT
    affinity: str = ""
    anti_affinity: str = ""
    exclusion: str | None = None
    may_oversubscribe: bool = False
    floor: int = 0
    """Basis points of each device's time that are not guaranteed to others, for this container and
    all like it."""
    part: int | None = None
    """Basis points of each device's memory after a resize, for quotas; None: as requested."""


class AcceptedResize(msgspec.Struct, frozen=True):
    """The text of `allotment.dev/resize` that a scheduler accepted."""

    wish: str = ""
    """Empty: the pod has what its resources and other annotations ask for."""
    generation: int = 0
    """Raised by each accepted text. The node reports the generation that is in force."""


class PodBooking(msgspec.Struct, frozen=True, kw_only=True):
    """What a pod uses or will use on its node. Without containers: CPU and memory only."""

    uid: PodUid
    node: str
    cpu_milli: int = 0
    memory_bytes: int = 0
    containers: tuple[PlacedContainer, ...] = ()
    resize: AcceptedResize = msgspec.field(default=AcceptedResize())
    """Until its node has it in force, the amounts are the larger ones of before and after."""


class NamespaceQuota(msgspec.Struct, frozen=True, kw_only=True):
    """What one ResourceQuota allows in its namespace."""

    namespace: str
    name: str
    hard: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Limits of extended resources, by name: `limits.nvidia.com/gpumem: 40960`."""
    is_scoped: bool = False
    """It applies to some pods only, by priority class or lifetime."""

    def __str__(self) -> str:
        return f"ResourceQuota {self.namespace}/{self.name}"


class Protected(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a pod that a disruption budget reads."""

    namespace: str
    name: str
    labels: Mapping[str, str]


class ClusterPod(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a pod that the scheduler reads."""

    uid: PodUid
    """The API server's UID."""
    namespace: str
    name: str
    version: str = ""
    """The object's resource version; empty for bound pods, which do not need it."""
    node: str = ""
    cpu_milli: int = 0
    memory_bytes: int = 0
    priority: int = 0
    nominated_node: str = ""
    """For a waiting pod: the node where other pods are being preempted for it."""
    tried_first: str = ""
    """For a waiting pod: the node that an Allotment scheduler nominated, so that kube-scheduler
    tries it before all others. No pod ends for it there."""
    constraints: str = ""
    """For a waiting pod: its scheduler, node selector, affinity and tolerations, as written. Pods
    with equal ones may go to the same nodes. Empty while scheduling gates hold it."""
    is_ending: bool = False
    """It is being deleted; its resources stay reserved until it is gone."""
    dialect: str = ""
    """Dialect that it was translated from, if any."""
    passed_over: str = ""
    """Parts of the foreign request without effect, for a waiting pod."""
    asks: Pod | None = None
    """Its request for our GPUs; None: no request, or the pod has ended."""
    booking: PodBooking | None = None
    """The booking of a bound pod, until it ends."""
    problem: str = ""
    """Why its placement does not count, or that it asks for GPUs without a placement."""
    foreign: ForeignPod | None = None
    """The original pod, if it is bound and another system may have assigned GPUs to it. The node's
    own state decides which."""
    labels: Mapping[str, str] = msgspec.field(default_factory=lambda: NO_LABELS)
    """Labels of a bound pod that runs; disruption budgets select by them."""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Listener(Protocol):
    """Receives cluster events and keeps the bookings."""

    def pod_put(self, pod: ClusterPod) -> None: ...

    def pod_gone(self, uid: PodUid) -> None: ...

    def node_put(self, node: NodeInventory) -> None:
        """Add or update a node with devices."""

    def node_dropped(self, name: str) -> None:
        """Remove a node: it is gone, or has no devices any more."""


NO_LABELS: Final[Mapping[str, str]] = {}


def is_later(version: str, than: str) -> bool:
    """True if `version` is known to be newer than `than`."""
    return version.isdecimal() and than.isdecimal() and int(version) > int(than)


def is_as_late(version: str, other: str) -> bool:
    """True if `version` is known to be `other` or newer."""
    return version.isdecimal() and other.isdecimal() and int(version) >= int(other)

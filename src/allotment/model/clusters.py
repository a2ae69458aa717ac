# SPDX-License-Identifier: Apache-2.0
"""A cluster as far as placement goes: nodes with their devices, what pods need, what was decided.

A pod counts by phase, as Kubernetes counts it: what its regular containers and sidecars have
together, or what one init container has beside the sidecars before it, whichever is more. That goes
for every device by itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from allotment.model.compute import WHOLE
from allotment.model.mig import MigPlace, MigProfile, MigSlice
from allotment.model.pods import ContainerKind, PodUid
from allotment.model.requests import SOFT, Request

__all__ = [
    "NodeDevice",
    "NodeInventory",
    "NodeMig",
    "NodeRejection",
    "PlacedContainer",
    "PlacedDevice",
    "PodBooking",
    "PodNeed",
    "Taken",
    "WantedContainer",
]


@dataclass(frozen=True, slots=True)
class Taken:
    """What of a device is given away, or is to be. Bytes; basis points of its time."""

    memory: int = 0
    guarantee: int = 0
    shares: int = 0
    mode: str = ""
    """How these are enforced; empty where there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMig:
    """What MIG makes of a device, or would."""

    profiles: tuple[MigProfile, ...]
    """As its driver reports them. One object for all devices that have the same."""
    slices: tuple[MigSlice, ...] = ()
    """Those for which no placement of ours stands: idle ones, and those that others made."""
    is_enabled: bool = True
    """Its MIG mode is on, and not for warm slices alone that make way for another mode. Off: its
    agent switches it for the first slice, on an idle device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDevice:
    """A device of a node, as the node's agent publishes it."""

    uuid: str
    model: str
    memory_bytes: int
    """What can be given to shares, in all."""
    index: int = 0
    numa_node: int | None = None
    modes: tuple[str, ...] = (SOFT,)
    """Those that its node serves on it by `allotment.dev/gpu`."""
    max_shares: int = 63
    problem: str = ""
    """Why it takes no share now: sick, lost, cordoned. Empty: it does."""
    taken: Taken = field(default=Taken())
    """By whom no placement of ours stands for: programs of the machine, pods that the agent placed
    by itself, pods of a plugin that was there before."""
    guarantee: int = WHOLE
    """Basis points of its time that can be guaranteed, in all."""
    mig: NodeMig | None = None
    """None: its node cuts no slices from it for who asks."""
    mig_off: str = ""
    """Why no slice is cut from it for a time, though its modes allow it. Empty: it is not so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInventory:
    """A node that has devices. Allocatable CPU in thousandths of a core, memory in bytes."""

    name: str
    devices: tuple[NodeDevice, ...] = ()
    cpu_milli: int = 0
    memory_bytes: int = 0
    host_budget_bytes: int = 0
    """How much more than all its devices hold may be promised, as host memory."""
    links: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """How near two devices are, by their UUIDs in the order of the text: the score of
    k8s-device-plugin's `GetPreferredAllocation` (100 for each NVLink, PCIe 10 to 60)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedContainer:
    """What one container of a pod asks for."""

    name: str
    request: Request
    kind: ContainerKind = ContainerKind.REGULAR
    place: int = 0
    """Among the pod's containers, init containers first, as specified."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodNeed:
    """All that a pod asks for; CPU and memory as kube-scheduler counts them."""

    uid: PodUid
    namespace: str = ""
    name: str = ""
    cpu_milli: int = 0
    memory_bytes: int = 0
    priority: int = 0
    """Who gives way to whom, where devices are kept for a pod that others are being ended for."""
    containers: tuple[WantedContainer, ...] = ()
    """Those that ask for devices."""

    def __str__(self) -> str:
        """Name the pod as people do."""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class PlacedDevice:
    """A container's part of one device. Bytes; basis points of its time."""

    uuid: str
    """The whole GPU's, also for a slice of it."""
    memory: int
    guarantee: int = 0
    slice: MigPlace | None = None
    """In mode `mig`: which slice of it, with `memory` and `guarantee` of what that one has. A
    container may have several slices of one GPU, each a `PlacedDevice`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedContainer:
    """A container's devices, in the order in which it will see them."""

    name: str
    devices: tuple[PlacedDevice, ...]
    kind: ContainerKind = ContainerKind.REGULAR
    place: int = 0
    mode: str = SOFT
    affinity: str = ""
    anti_affinity: str = ""
    exclusion: str | None = None
    may_oversubscribe: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PodBooking:
    """What a pod has, or is to have, on its node. Without containers: CPU and memory alone."""

    uid: PodUid
    node: str
    cpu_milli: int = 0
    memory_bytes: int = 0
    containers: tuple[PlacedContainer, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeRejection:
    """Why a pod cannot be on a node: `reason` is one of a fixed list, for counting."""

    node: str
    reason: str
    text: str
    """Need and have, in words that people read in events: no full stop."""
    stem: str = ""
    """The text with `{have}` in place of an amount, by which nodes that fail alike are known."""
    have: int = 0
    """That amount: bytes, basis points, thousandths of a core, or a count, as `reason` says."""
    details: str = ""
    """What there is to say of single devices, where one node alone is spoken of."""

# SPDX-License-Identifier: Apache-2.0
"""The values that pages show: nodes, their GPUs, and the shares of parts of them.

Made by a `FleetSource` at one moment. Amounts in bytes; parts of a device's time from 0 to 1; None:
unknown or not measured.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import msgspec

from allotment.model.structs import replace


class FleetShare(msgspec.Struct, frozen=True, kw_only=True):
    """One share's part of one GPU."""

    id: str
    """The share's id; of a pod without a reported share, its UID."""
    name: str
    namespace: str = ""
    """Empty on one machine."""
    pod: str = ""
    container: str = ""
    mode: str = ""
    state: str = ""
    command: str = ""
    device: str = ""
    """UUID of the MIG device, or of the GPU."""
    memory_limit: int = 0
    memory_used: int | None = None
    memory_peak: int | None = None
    refusals: int | None = None
    guarantee: float | None = None
    ceiling: float | None = None
    gpu_time: float | None = None
    """Part of the last moments."""
    is_enforced: bool | None = None


class FleetGpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU of a node."""

    uuid: str
    index: int
    model: str = ""
    mode: str = ""
    memory_total: int = 0
    memory_used: int | None = None
    memory_allocated: int = 0
    """To all shares, also hidden ones."""
    guaranteed: float = 0.0
    utilization: float | None = None
    temperature_c: int | None = None
    power_mw: int | None = None
    problem: str = ""
    shares: tuple[FleetShare, ...] = ()

    @property
    def allocated_part(self) -> float:
        return self.memory_allocated / self.memory_total if self.memory_total else 0.0

    @property
    def used_part(self) -> float | None:
        if self.memory_used is None or not self.memory_total:
            return None
        return self.memory_used / self.memory_total


class FleetNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node with its GPUs, by their numbers."""

    name: str
    gpus: tuple[FleetGpu, ...] = ()
    problem: str = ""
    """Why its figures are missing."""


class WaitingPod(msgspec.Struct, frozen=True, kw_only=True):
    """A pod that waits for a part of a GPU."""

    namespace: str
    name: str
    request: str = ""
    priority: int = 0
    created: str = ""
    nominated: str = ""
    """The node where other pods end for it."""


class NamespaceUse(msgspec.Struct, frozen=True, kw_only=True):
    """One limit of a namespace's quota."""

    namespace: str
    limit: str
    """The quota's name, and the resource."""
    used: float
    hard: float
    kind: str = "number"
    """`bytes`, `part` of GPUs, or `number` of GPUs."""


class Happened(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a share, a pod or a node."""

    time: float
    """Seconds after the epoch."""
    kind: str
    subject: str
    text: str = ""
    namespace: str = ""
    node: str = ""
    share: str = ""
    """The share's id, if it is a share's event."""


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """All nodes at one moment."""

    nodes: tuple[FleetNode, ...] = ()
    waiting: tuple[WaitingPod, ...] = ()
    events: tuple[Happened, ...] = ()
    """The newest first."""
    quotas: tuple[NamespaceUse, ...] = ()
    problems: tuple[str, ...] = ()
    """What could not be read."""
    read_at: float = 0.0
    """Seconds after the epoch."""

    def gpus(self) -> Iterator[tuple[FleetNode, FleetGpu]]:
        return ((node, gpu) for node in self.nodes for gpu in node.gpus)

    def shares(self) -> Iterator[tuple[FleetNode, FleetGpu, FleetShare]]:
        return ((node, gpu, share) for node, gpu in self.gpus() for share in gpu.shares)


class FleetSource(Protocol):
    """Where the fleet is read."""

    @property
    def pace_s(self) -> float:
        """Seconds between two readings."""
        ...

    async def read(self) -> Fleet:
        """Raises `AllotError`."""
        ...


class Sight(msgspec.Struct, frozen=True, kw_only=True):
    """What a viewer may see."""

    sees_nodes: bool = True
    """If not, a GPU is seen only through a share that is seen."""
    namespaces: frozenset[str] | None = None
    """Those whose pods and shares are seen; None: all."""
    quotas: frozenset[str] | None = None
    events: frozenset[str] | None = None
    """The same for quotas, and for events."""

    def sees(self, namespace: str) -> bool:
        return _has(self.namespaces, namespace)


def _has(namespaces: frozenset[str] | None, namespace: str) -> bool:
    return namespaces is None or namespace in namespaces


EVERYTHING = Sight()


def visible(fleet: Fleet, sight: Sight) -> Fleet:
    """Return the part of a fleet that a viewer may see.

    With the right to list nodes, GPUs keep the sums of all their shares, as the messages of
    kube-scheduler name them too; without it, nothing of others remains.
    """
    if sight == EVERYTHING:
        return fleet
    nodes = []
    for node in fleet.nodes:
        gpus = tuple(_visible_gpu(gpu, sight) for gpu in node.gpus)
        if not sight.sees_nodes:
            gpus = tuple(gpu for gpu in gpus if gpu.shares)
            if not gpus:
                continue
            node = replace(node, problem="")  # noqa: PLW2901 - the same, less of it
        nodes.append(replace(node, gpus=gpus))
    return replace(
        fleet,
        nodes=tuple(nodes),
        waiting=tuple(pod for pod in fleet.waiting if sight.sees(pod.namespace)),
        quotas=tuple(each for each in fleet.quotas if _has(sight.quotas, each.namespace)),
        events=tuple(event for event in fleet.events if _has(sight.events, event.namespace)),
        problems=fleet.problems if sight.sees_nodes and sight.namespaces is None else (),
    )


def _visible_gpu(gpu: FleetGpu, sight: Sight) -> FleetGpu:
    shares = tuple(each for each in gpu.shares if sight.sees(each.namespace))
    if sight.sees_nodes:
        return replace(gpu, shares=shares)
    used = [each.memory_used for each in shares if each.memory_used is not None]
    return replace(
        gpu,
        shares=shares,
        memory_used=sum(used) if used else None,
        memory_allocated=sum(each.memory_limit for each in shares),
        guaranteed=sum(each.guarantee or 0.0 for each in shares),
        utilization=None,
        temperature_c=None,
        power_mw=None,
    )


class FleetTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over a fleet."""

    nodes: int
    gpus: int
    idle: int
    """GPUs without a share, and without allocated memory."""
    unhealthy: int
    shares: int
    memory_total: int
    memory_allocated: int
    memory_used: int | None
    guaranteed: float
    waiting: int


def totals_of(fleet: Fleet) -> FleetTotals:
    gpus = [gpu for _, gpu in fleet.gpus()]
    used = [gpu.memory_used for gpu in gpus if gpu.memory_used is not None]
    return FleetTotals(
        nodes=len(fleet.nodes),
        gpus=len(gpus),
        idle=sum(not gpu.shares and not gpu.memory_allocated for gpu in gpus),
        unhealthy=sum(bool(gpu.problem) for gpu in gpus),
        shares=len({share.id for gpu in gpus for share in gpu.shares}),
        memory_total=sum(gpu.memory_total for gpu in gpus),
        memory_allocated=sum(gpu.memory_allocated for gpu in gpus),
        memory_used=sum(used) if used else None,
        guaranteed=sum(gpu.guaranteed for gpu in gpus),
        waiting=len(fleet.waiting),
    )


SORTS: Mapping[str, Callable[[FleetNode], tuple[float | str, ...]]] = {
    "name": lambda node: (node.name,),
    "used": lambda node: (-_mean([gpu.used_part or 0.0 for gpu in node.gpus]), node.name),
    "allocated": lambda node: (-_mean([gpu.allocated_part for gpu in node.gpus]), node.name),
    "free": lambda node: (
        -sum(gpu.memory_total - gpu.memory_allocated for gpu in node.gpus),
        node.name,
    ),
}
"""Orders of nodes."""


def _mean(parts: list[float]) -> float:
    return sum(parts) / len(parts) if parts else 0.0


def matching(fleet: Fleet, text: str) -> tuple[FleetNode, ...]:
    """Return the nodes of which a name, model, GPU, namespace, pod or mode contains all words."""
    words = text.casefold().split()
    if not words:
        return fleet.nodes
    return tuple(node for node in fleet.nodes if all(word in _searched(node) for word in words))


def _searched(node: FleetNode) -> str:
    parts = [node.name, node.problem]
    for gpu in node.gpus:
        parts += (gpu.uuid, gpu.model, gpu.mode, gpu.problem)
        for share in gpu.shares:
            parts += (share.name, share.namespace, share.id)
    return "\n".join(parts).casefold()

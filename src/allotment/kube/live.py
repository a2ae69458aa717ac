# SPDX-License-Identifier: Apache-2.0
"""A live cluster as it is at one moment: its nodes with devices, and its pods.

Read once, by lists; nothing is followed and nothing is written. What other systems gave pods that
still run is counted by their records: of all systems that write any, or of those that a scheduler
takes over.
"""

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import msgspec

from allotment.dialects.foreign import ForeignDialect, ForeignPod
from allotment.dialects.registry import wanted
from allotment.dialects.systems import foreign_dialects
from allotment.dialects.taking_over import SYSTEMS, taken_over
from allotment.kube.amounts import requests_of
from allotment.kube.clients import Api
from allotment.kube.cluster_feed import to_cluster_pod
from allotment.kube.errors import GoneError
from allotment.kube.inventories import inventory_of
from allotment.kube.listing import pages
from allotment.kube.objects import (
    ENDED,
    Metadata,
    NodeObject,
    ObjectList,
    PodObject,
    to_pod,
)
from allotment.model.clusters import NodeInventory, PodBooking, PodNeed, WantedContainer
from allotment.model.errors import UsageError
from allotment.model.pods import PodUid
from allotment.model.requests import SOFT

__all__ = ["LiveCluster", "LivePod", "read_cluster"]

_PAGE: Final = 500
_TRIES: Final = 3

_Item = TypeVar("_Item")


class _Dated(Metadata):
    """With when it was made."""

    creation_timestamp: str = ""


class _DatedPod(PodObject):
    """A pod that says when it was made."""

    metadata: _Dated


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePod:
    """A pod that runs or waits."""

    need: PodNeed
    booking: PodBooking | None = None
    """What it has, if it is bound. Without devices though it asks for some: a node's agent has
    chosen them, and the node's inventory counts them as taken."""
    priority: int = 0
    nominated_node: str = ""
    """Of one that waits: where other pods are being ended for it."""
    is_ending: bool = False
    created: str = ""
    """RFC 3339, in UTC: sorts as a text."""
    dialect: str = ""
    """Whose syntax it was written in, if it was translated."""
    scheduler: str = ""
    """The one that it names."""
    foreign: ForeignPod | None = None
    """As its author wrote it, where another system may have given it devices."""

    @property
    def can_move(self) -> bool:
        """It asks for devices, and what it has of them is known."""
        if not self.need.containers:
            return False
        return self.booking is None or bool(self.booking.containers)


@dataclass(frozen=True, slots=True)
class LiveCluster:
    """What there is."""

    nodes: tuple[NodeInventory, ...]
    """By name."""
    pods: tuple[LivePod, ...]
    """As a scheduler takes them: the highest priority first, then the oldest."""
    problems: tuple[str, ...] = ()
    """What could not be read, and is left out therefore."""
    without_devices: tuple[str, ...] = ()
    """Nodes that say nothing of devices, by name."""


async def read_cluster(
    api: Api,
    *,
    dialects: Sequence[ForeignDialect] | None = None,
    systems: Collection[str] = SYSTEMS,
    modes: Sequence[str] = (SOFT,),
) -> LiveCluster:
    """Read nodes and pods. Raises `KubeError`; what is wrong with one of them is a problem.

    Without `dialects`, all are read as they are by default. What pods have by the records of other
    systems than these is a problem, too. `modes` are for containers that leave it open, the best
    first.
    """
    problems: list[str] = []
    nodes = []
    others = []
    for node in await _listed(api, "/api/v1/nodes", NodeObject, asked="list nodes"):
        try:
            found = inventory_of(node)
        except UsageError as error:
            problems.append(error.message)
            continue
        if found is None:
            others.append(node.metadata.name)
        else:
            nodes.append(found)
    pods = []
    for item in await _listed(api, "/api/v1/pods", _DatedPod, asked="list pods"):
        is_leaving = not item.spec.node_name and item.metadata.deletion_timestamp is not None
        if item.status.phase in ENDED or is_leaving:
            continue
        try:
            asked = wanted(replace(to_pod(item), uid=PodUid(item.metadata.uid)), modes=modes)
        except UsageError as error:
            problems.append(error.message)
            if not item.spec.node_name:
                continue
            asked = ()  # what it has is taken all the same
        pods.append(_pod(item, asked))
    nodes.sort(key=lambda node: node.name)
    by_name = {node.name: node for node in nodes}
    known = foreign_dialects() if dialects is None else dialects
    for place, pod in enumerate(pods):
        try:
            pods[place] = _with_devices(pod, by_name, known, systems)
        except UsageError as error:
            problems.append(f"GPUs of another system: {error.message}")
    pods.sort(key=lambda pod: (-pod.priority, pod.created, pod.need.uid))
    return LiveCluster(tuple(nodes), tuple(pods), tuple(problems), tuple(sorted(others)))


def _pod(item: _DatedPod, asked: tuple[WantedContainer, ...]) -> LivePod:
    meta = item.metadata
    cpu_milli, memory_bytes = requests_of(item)
    need = PodNeed(
        uid=PodUid(meta.uid),
        namespace=meta.namespace,
        name=meta.name,
        cpu_milli=cpu_milli,
        memory_bytes=memory_bytes,
        priority=item.spec.priority or 0,
        containers=asked,
    )
    pod = to_cluster_pod(item)
    return LivePod(
        need=need,
        booking=pod.booking,
        dialect=pod.dialect,
        scheduler=item.spec.scheduler_name,
        foreign=pod.foreign,
        priority=item.spec.priority or 0,
        nominated_node=pod.nominated_node,
        is_ending=pod.is_ending,
        created=meta.creation_timestamp,
    )


def _with_devices(
    pod: LivePod,
    nodes: Mapping[str, NodeInventory],
    dialects: Sequence[ForeignDialect],
    systems: Collection[str],
) -> LivePod:
    """Add the devices that another system gave a pod that it bound. Raises `UsageError`."""
    node = nodes.get(pod.booking.node) if pod.booking is not None else None
    if pod.foreign is None or pod.booking is None or node is None:
        return pod
    found = taken_over(pod.foreign, node, dialects, uid=pod.need.uid, systems=systems)
    if found is None:
        return pod
    return replace(pod, booking=replace(pod.booking, containers=found.containers))


async def _listed(api: Api, path: str, kind: type[_Item], *, asked: str) -> list[_Item]:
    """Return all of a list; listed anew if it went stale between two of its pages."""
    decoder = msgspec.json.Decoder(ObjectList[kind])  # type: ignore[valid-type]
    params = {"limit": str(_PAGE)}
    for _ in range(_TRIES - 1):
        with suppress(GoneError):
            return await _all(pages(api, path, decoder, asked=asked, params=params))
    return await _all(pages(api, path, decoder, asked=asked, params=params))


async def _all(found: AsyncIterator[ObjectList[_Item]]) -> list[_Item]:
    return [item async for page in found for item in page.items or ()]

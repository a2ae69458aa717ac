# SPDX-License-Identifier: Apache-2.0
"""All pods and nodes of a cluster, followed, and kept as small as a scheduler needs them.

A cluster of 5,000 nodes has 30,000 pods of 7 KB each. Of a pod that runs, what it has is kept: its
node, CPU, memory and, if it has a placement of ours, its part of devices. Of one that waits, what
it asks for. Each change is told to whoever keeps the books; what nobody needs to hear is not told.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NoReturn, Protocol

import msgspec
import structlog

from allotment.dialects.decisions import placement_of, read_booking
from allotment.dialects.foreign import DIALECT, ForeignPod
from allotment.dialects.placements import PLACEMENT
from allotment.kube.amounts import amounts, requests_of
from allotment.kube.backoff import Backoff
from allotment.kube.clients import Api
from allotment.kube.errors import KubeError
from allotment.kube.foreign_pods import foreign_pod
from allotment.kube.inventories import CORDONS, DEVICES, cordoned, decode
from allotment.kube.objects import Metadata, NodeObject, ObjectList, PodObject, to_pod
from allotment.kube.watching import Following, Subject
from allotment.model.clusters import NodeInventory, PodBooking
from allotment.model.errors import UsageError
from allotment.model.pods import Pod, PodUid

__all__ = ["ClusterFeed", "ClusterPod", "Listener", "to_cluster_pod"]

_OURS = "allotment.dev/"
_ENDED = frozenset({"Succeeded", "Failed"})
_PAGE = 500
_CORDONED = "cordoned"
_ECHO_S = 0.5
"""Under load a watch tells within milliseconds: after so long without, it is not waited for."""
_STEP_S = 0.01

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPod:
    """A pod as far as a scheduler is concerned with it."""

    uid: PodUid
    """The API server's."""
    namespace: str
    name: str
    version: str = ""
    """The object's; of one that is bound, empty: nothing depends on it."""
    node: str = ""
    cpu_milli: int = 0
    memory_bytes: int = 0
    priority: int = 0
    nominated_node: str = ""
    """Of one that waits: where other pods are being ended for it."""
    is_ending: bool = False
    """It is being deleted, and has what it has until it is gone."""
    dialect: str = ""
    """Whose syntax it was written in, if it was translated."""
    asks: Pod | None = None
    """What it has written about our GPUs; None: nothing, or it has ended."""
    booking: PodBooking | None = None
    """What a pod that is bound has, until it has ended."""
    problem: str = ""
    """Why its placement does not count; or that it asks for GPUs and has none."""
    foreign: ForeignPod | None = None
    """As its author wrote it, of a pod that is bound and to which another system may have given
    GPUs; what these are depends on the node's own."""

    def __str__(self) -> str:
        """Name it as people do."""
        return f"{self.namespace}/{self.name}"


class Listener(Protocol):
    """Who keeps the books."""

    def pod_put(self, pod: ClusterPod) -> None:
        """A pod came or changed."""

    def pod_gone(self, uid: PodUid) -> None:
        """A pod is gone."""

    def node_put(self, node: NodeInventory) -> None:
        """A node with devices came or changed."""

    def node_dropped(self, name: str) -> None:
        """A node is gone, or has no devices any more."""


@dataclass(frozen=True, slots=True)
class _ClusterNode:
    """A node as far as it has been understood; without devices: none that are ours."""

    name: str
    inventory: NodeInventory | None


class _NodeReader:
    """Reads nodes, each again only when something of it has changed that matters."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[tuple[object, ...], _ClusterNode]] = {}

    def __call__(self, item: NodeObject) -> _ClusterNode:
        annotations = item.metadata.annotations or {}
        name = item.metadata.name
        text = annotations.get(DEVICES)
        if text is None:
            self._kept.pop(name, None)
            return _ClusterNode(name, None)
        allocatable = amounts(item.status.allocatable)
        content = (text, *(annotations.get(each) for each in CORDONS), allocatable)
        kept = self._kept.get(name)
        if kept is not None and kept[0] == content:
            return kept[1]
        node = _ClusterNode(name, _inventory(name, text, annotations, allocatable))
        self._kept[name] = (content, node)
        return node

    def forget(self, name: str) -> None:
        self._kept.pop(name, None)


def _inventory(
    name: str, text: str, annotations: Mapping[str, str], allocatable: tuple[int, int]
) -> NodeInventory | None:
    """Return the node's devices, those that somebody has cordoned marked so."""
    try:
        found = decode(name, text, cpu_milli=allocatable[0], memory_bytes=allocatable[1])
    except UsageError as error:
        _log.warning(error.message, hint=error.hint, node=name)
        return None
    named = cordoned(annotations)
    if not named:
        return found
    devices = tuple(
        replace(each, problem=each.problem or _CORDONED) if each.uuid in named else each
        for each in found.devices
    )
    return replace(found, devices=devices)


def to_cluster_pod(item: PodObject) -> ClusterPod:
    """Say what a pod is to a scheduler."""
    meta = item.metadata
    uid = PodUid(meta.uid)
    node = item.spec.node_name
    cpu_milli, memory_bytes = requests_of(item)
    if not node:
        return ClusterPod(
            uid=uid,
            namespace=meta.namespace,
            name=meta.name,
            version=meta.resource_version,
            cpu_milli=cpu_milli,
            memory_bytes=memory_bytes,
            priority=item.spec.priority or 0,
            nominated_node=item.status.nominated_node_name,
            is_ending=meta.deletion_timestamp is not None,
            dialect=(meta.annotations or {}).get(DIALECT, ""),
            asks=_without_state(item, uid) if _asks(item) else None,
        )
    booking, asks, problem, foreign = None, None, "", None
    if item.status.phase not in _ENDED:
        booking, problem = _booking(item, uid, cpu_milli, memory_bytes)
        asks = _without_state(item, uid) if _asks(item) else None
        foreign = foreign_pod(item) if asks is None else None
    return ClusterPod(
        uid=uid,
        namespace=meta.namespace,
        name=meta.name,
        node=node,
        cpu_milli=cpu_milli,
        memory_bytes=memory_bytes,
        priority=item.spec.priority or 0,
        is_ending=meta.deletion_timestamp is not None,
        dialect=(meta.annotations or {}).get(DIALECT, "") if asks else "",
        asks=asks,
        booking=booking,
        problem=problem,
        foreign=foreign,
    )


def _booking(
    item: PodObject, uid: PodUid, cpu_milli: int, memory_bytes: int
) -> tuple[PodBooking, str]:
    """Return what a bound pod has, and why that is without devices where it should not be."""
    node = item.spec.node_name
    plain = PodBooking(uid=uid, node=node, cpu_milli=cpu_milli, memory_bytes=memory_bytes)
    text = placement_of(item.metadata.annotations)
    if not text:
        return plain, "it was bound without a placement" if _asks(item) else ""
    try:
        placed = read_booking(
            text, uid=uid, node=node, cpu_milli=cpu_milli, memory_bytes=memory_bytes
        )
    except UsageError as error:
        return plain, error.message
    return placed, ""


def _without_state(item: PodObject, uid: PodUid) -> Pod:
    """Return what was written, and nothing that changes while containers run."""
    item.status.container_statuses = item.status.init_container_statuses = None
    pod = to_pod(item)
    kept = {key: text for key, text in pod.annotations.items() if key != PLACEMENT}
    return replace(pod, uid=uid, node="", annotations=kept)


def _asks(item: PodObject) -> bool:
    """Tell whether a pod asks for anything of ours, rightly or not."""
    for containers in (item.spec.containers, item.spec.init_containers):
        for each in containers or ():
            limits = each.resources.limits if each.resources else None
            if limits and any(name.startswith(_OURS) for name in limits):
                return True
    return False


class ClusterFeed:
    """All pods and nodes. `run` has to be running; changes are told in its event loop."""

    def __init__(self, api: Api, listener: Listener, *, backoff: Backoff | None = None) -> None:
        """Know nothing yet."""
        self._api = api
        self._listener = listener
        self._reader = _NodeReader()
        self._nodes: Following[NodeObject, _ClusterNode] = Following(
            api,
            Subject(
                name="nodes",
                path="/api/v1/nodes",
                fields={},
                item=NodeObject,
                items=ObjectList[NodeObject],
                convert=self._reader,
                page=_PAGE,
            ),
            backoff=backoff,
            on_change=self._node_changed,
        )
        self._pods: Following[PodObject, ClusterPod] = Following(
            api,
            Subject(
                name="pods",
                path="/api/v1/pods",
                fields={},
                item=PodObject,
                items=ObjectList[PodObject],
                convert=to_cluster_pod,
                page=_PAGE,
            ),
            backoff=backoff,
            on_change=self._pod_changed,
        )
        self._names: dict[str, str] = {}
        """Of nodes, by uid: what went is told by its uid."""

    async def run(self) -> NoReturn:
        """Follow for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._nodes.run())
            group.create_task(self._pods.run())
        raise AssertionError("neither ends")

    @property
    def is_synced(self) -> bool:
        """Both have been listed."""
        return self._nodes.is_synced and self._pods.is_synced

    @property
    def problems(self) -> tuple[KubeError, ...]:
        """Why nothing is heard at present."""
        return tuple(each for each in (self._nodes.problem, self._pods.problem) if each)

    @property
    def pods(self) -> Mapping[str, ClusterPod]:
        """All pods, by uid. To be read only."""
        return self._pods.values

    async def wait_synced(self) -> None:
        """Return when both have been listed."""
        for each in (self._nodes, self._pods):
            async for _ in each.signal.changes():
                if each.is_synced:
                    break

    async def look(self) -> None:
        """Return when every pod is known as it was when this was called. Raises `KubeError`.

        The server is asked for the present version, not from its cache, and the watch is waited for
        until it has told of that one or a later. Where nothing happens it tells of none: then the
        pods are listed anew, by a list that is as new as its request.
        """
        params = {"limit": "1"}
        body = await self._api.get("/api/v1/pods", asked="list pods", params=params)
        version = _VERSION.decode(body).metadata.resource_version
        with suppress(TimeoutError):
            async with asyncio.timeout(_ECHO_S):
                # Nobody is told of versions: a bookmark changes nothing else.
                while not _is_as_new(self._pods.version, version):  # noqa: ASYNC110
                    await asyncio.sleep(_STEP_S)
                return
        await self._pods.list_anew()

    def _node_changed(self, uid: str, node: _ClusterNode | None) -> None:
        if node is None:
            name = self._names.pop(uid, None)
            if name is not None:
                self._reader.forget(name)
                self._listener.node_dropped(name)
            return
        self._names[uid] = node.name
        if node.inventory is None:
            self._listener.node_dropped(node.name)
        else:
            self._listener.node_put(node.inventory)

    def _pod_changed(self, uid: str, pod: ClusterPod | None) -> None:
        if pod is None:
            self._listener.pod_gone(PodUid(uid))
        else:
            self._listener.pod_put(pod)


class _Page(msgspec.Struct):
    """A list of which the version alone counts."""

    metadata: Metadata


_VERSION = msgspec.json.Decoder(_Page)


def _is_as_new(heard: str, asked: str) -> bool:
    """Compare versions, which are numbers since Kubernetes 1.35 and were before (KEP 5504)."""
    return heard.isdecimal() and asked.isdecimal() and int(heard) >= int(asked)

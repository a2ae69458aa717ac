# SPDX-License-Identifier: Apache-2.0
"""All pods and nodes of a cluster, followed, and kept as small as a scheduler needs them.

A cluster of 5,000 nodes has 30,000 pods of 7 KB each. Of a pod that runs, what it has is kept: its
node, CPU, memory and, if it has a placement of ours, its part of devices. Of one that waits, what
it asks for. Each change is told to whoever keeps the books; what nobody needs to hear is not told.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from sys import intern
from typing import Final, NoReturn, Protocol

import msgspec
import structlog

from allotment.dialects.decisions import placement_of, read_booking
from allotment.dialects.foreign import DIALECT, PASSED_OVER, ForeignPod
from allotment.dialects.placements import PLACEMENT
from allotment.kube.amounts import amounts, requests_of
from allotment.kube.backoff import Backoff
from allotment.kube.clients import Api
from allotment.kube.errors import KubeError
from allotment.kube.foreign_pods import foreign_pod
from allotment.kube.inventories import CORDONS, DEVICES, inventory_of
from allotment.kube.listing import decoded
from allotment.kube.objects import ENDED, Metadata, NodeObject, ObjectList, PodObject, to_pod
from allotment.kube.versions import is_as_late
from allotment.kube.watching import Following, Subject
from allotment.model.clusters import NodeInventory, PodBooking
from allotment.model.errors import UsageError
from allotment.model.pods import Pod, PodUid

__all__ = ["ClusterFeed", "ClusterPod", "Listener", "to_cluster_pod"]

_OURS = "allotment.dev/"
_NO_LABELS: Final[Mapping[str, str]] = {}
_PAGE = 500
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
    passed_over: str = ""
    """What of that was not honoured, of one that waits."""
    asks: Pod | None = None
    """What it has written about our GPUs; None: nothing, or it has ended."""
    booking: PodBooking | None = None
    """What a pod that is bound has, until it has ended."""
    problem: str = ""
    """Why its placement does not count; or that it asks for GPUs and has none."""
    foreign: ForeignPod | None = None
    """As its author wrote it, of a pod that is bound and to which another system may have given
    GPUs; what these are depends on the node's own."""
    labels: Mapping[str, str] = field(default_factory=lambda: _NO_LABELS)
    """Of a pod that is bound and has not ended: by them a budget may protect it."""

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
    problem: str = ""
    """Why what it says of its devices is not understood."""


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
        content = (
            text,
            *(annotations.get(each) for each in CORDONS),
            amounts(item.status.allocatable),
        )
        kept = self._kept.get(name)
        if kept is not None and kept[0] == content:
            return kept[1]
        try:
            node = _ClusterNode(name, inventory_of(item))
        except UsageError as error:
            _log.warning(error.message, hint=error.hint, node=name)
            node = _ClusterNode(name, None, error.message)
        self._kept[name] = (content, node)
        return node

    def forget(self, name: str) -> None:
        self._kept.pop(name, None)


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
            passed_over=(meta.annotations or {}).get(PASSED_OVER, ""),
            asks=_without_state(item, uid) if _asks(item) else None,
        )
    booking, asks, problem, foreign = None, None, "", None
    labels: Mapping[str, str] = _NO_LABELS
    if item.status.phase not in ENDED:
        booking, problem = _booking(item, uid, cpu_milli, memory_bytes)
        asks = _without_state(item, uid) if _asks(item) else None
        foreign = foreign_pod(item) if asks is None else None
        if meta.labels:
            # The same on every pod of a controller, of which there may be thousands.
            labels = {intern(key): intern(text) for key, text in meta.labels.items()}
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
        labels=labels,
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
        self._left_out: dict[str, str] = {}

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
        version = decoded(_VERSION, body, asked="list pods").metadata.resource_version
        with suppress(TimeoutError):
            async with asyncio.timeout(_ECHO_S):
                # Nobody is told of versions: a bookmark changes nothing else.
                while not is_as_late(self._pods.version, version):  # noqa: ASYNC110
                    await asyncio.sleep(_STEP_S)
                return
        await self._pods.list_anew()

    @property
    def left_out(self) -> Mapping[str, str]:
        """Why some nodes and pods do not count as they are, by uid: what is wrong with each.

        It is that object's trouble alone. A node that is among them has no devices; a pod stays as
        it was known, since what it has may be in use.
        """
        return {**self._nodes.unread, **self._pods.unread, **self._left_out}

    def _node_changed(self, uid: str, node: _ClusterNode | None) -> None:
        self._left_out.pop(uid, None)
        name = self._names.pop(uid, None) if node is None else node.name
        if node is None:
            if name is not None:
                self._reader.forget(name)
                self._tell(uid, f"node {name}", partial(self._listener.node_dropped, name))
            return
        self._names[uid] = node.name
        if node.problem:
            self._left_out[uid] = node.problem
        if node.inventory is not None and self._tell(
            uid, f"node {node.name}", partial(self._listener.node_put, node.inventory)
        ):
            return
        self._tell(uid, f"node {node.name}", partial(self._listener.node_dropped, node.name))

    def _pod_changed(self, uid: str, pod: ClusterPod | None) -> None:
        if pod is None:
            self._left_out.pop(uid, None)
            self._tell(uid, f"pod {uid}", partial(self._listener.pod_gone, PodUid(uid)))
        elif self._tell(uid, f"pod {pod}", partial(self._listener.pod_put, pod)):
            self._left_out.pop(uid, None)

    def _tell(self, uid: str, name: str, tell: Callable[[], None]) -> bool:
        """Tell of one object; say whether that went well.

        Whatever one object's content makes fail, all others are followed on: an error here would
        end the process, and end it again after each start.
        """
        try:
            tell()
        except Exception as error:  # noqa: BLE001 - for that reason
            if uid not in self._left_out:
                _log.exception("not understood, and left out", object=name)
            self._left_out[uid] = f"{type(error).__name__}: {error}"
            return False
        return True


class _Page(msgspec.Struct):
    """A list of which the version alone counts."""

    metadata: Metadata


_VERSION = msgspec.json.Decoder(_Page)

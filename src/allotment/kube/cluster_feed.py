# SPDX-License-Identifier: Apache-2.0
"""Follows all pods and nodes of a cluster, and keeps only what a scheduler needs.

A cluster of 5,000 nodes has 30,000 pods of 7 KB each. Of a bound pod it keeps node, CPU, memory and
devices; of a waiting pod, its request. Relevant changes are passed to a listener.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from sys import intern
from typing import Final, NoReturn

import msgspec
import structlog

from allotment.dialects.foreign.adoption import may_be_given
from allotment.dialects.foreign.base import DIALECT, PASSED_OVER
from allotment.dialects.own.placement import PLACEMENT, placement_of, read_booking
from allotment.dialects.own.resource_claims import ResourceClaim
from allotment.kube.clients import Api, Backoff, read, until_served
from allotment.kube.errors import DeniedError, KubeError, ObjectMissingError
from allotment.kube.inventories import CORDONS, DEVICES, inventory_of
from allotment.kube.objects import (
    ENDED,
    ContainerSpec,
    Metadata,
    NodeObject,
    PodObject,
    PodSpec,
    amounts,
    containers_of,
    is_nominated_by_us,
    limits_of,
    requests_of,
    to_pod,
)
from allotment.kube.resource_claims import API, CLAIMS, ClaimObject, followed_claim
from allotment.kube.watching import Following, Signal, Subject
from allotment.model.clusters import (
    NO_LABELS,
    ClusterPod,
    Listener,
    NodeInventory,
    PodBooking,
    is_as_late,
)
from allotment.model.errors import UsageError
from allotment.model.pods import ForeignContainer, ForeignPod, Pod, PodUid
from allotment.model.structs import replace

_OURS = "allotment.dev/"
_PAGE = 500
_ECHO_S = 0.5
"""Under load a watch reports within milliseconds: longer silence means no change."""
_STEP_S = 0.01

_log = structlog.get_logger(__name__)


class _ClusterNode(msgspec.Struct, frozen=True):
    """A decoded node; `inventory` is None without devices of ours."""

    name: str
    inventory: NodeInventory | None
    problem: str = ""
    """Why its inventory is invalid."""


class _NodeReader:
    """Decodes nodes, each again only after a relevant change."""

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
            *(annotations.get(key) for key in CORDONS),
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


def to_cluster_pod(
    item: PodObject, request: Callable[[PodObject, PodUid], Pod] | None = None
) -> ClusterPod:
    """`request` reads a pod's request, in place of `stateless`."""
    meta = item.metadata
    annotations = meta.annotations or {}
    cpu_milli, memory_bytes = requests_of(item)
    pod = ClusterPod(
        uid=PodUid(meta.uid),
        namespace=meta.namespace,
        name=meta.name,
        node=item.spec.node_name,
        cpu_milli=cpu_milli,
        memory_bytes=memory_bytes,
        priority=item.spec.priority or 0,
        is_ending=meta.deletion_timestamp is not None,
    )
    if item.status.phase in ENDED:
        # Also without a node: one that is deleted while it waits, and kept by a finalizer.
        return pod if pod.node else replace(pod, version=meta.resource_version)
    asks = (request or stateless)(item, pod.uid) if _asks(item) else None
    if not pod.node:
        nominated = item.status.nominated_node_name
        is_ours = bool(nominated) and is_nominated_by_us(meta)
        return replace(
            pod,
            version=meta.resource_version,
            nominated_node="" if is_ours else nominated,
            tried_first=nominated if is_ours else "",
            constraints=_constraints(item.spec) if asks else "",
            dialect=annotations.get(DIALECT, ""),
            passed_over=annotations.get(PASSED_OVER, ""),
            asks=asks,
        )
    booking, problem = _booking(item, pod, asks)
    return replace(
        pod,
        dialect=annotations.get(DIALECT, "") if asks else "",
        asks=asks,
        booking=booking,
        problem=problem,
        foreign=foreign_pod(item) if asks is None else None,
        # The same on every pod of a controller, which may have thousands.
        labels={intern(key): intern(text) for key, text in meta.labels.items()}
        if meta.labels
        else NO_LABELS,
    )


def _constraints(spec: PodSpec) -> str:
    if spec.scheduling_gates:
        return ""
    written = (spec.node_selector, spec.affinity, spec.tolerations)
    return " ".join([spec.scheduler_name, *(bytes(each).decode() for each in written)])


def _booking(item: PodObject, pod: ClusterPod, asks: Pod | None) -> tuple[PodBooking, str]:
    """Return a bound pod's usage, and why it lacks devices if it should have some."""
    cpu_milli, memory_bytes = pod.cpu_milli, pod.memory_bytes
    plain = PodBooking(uid=pod.uid, node=pod.node, cpu_milli=cpu_milli, memory_bytes=memory_bytes)
    text = placement_of(item.metadata.annotations)
    if not text:
        return plain, "it was bound without a placement" if asks else ""
    try:
        placed = read_booking(
            text, uid=pod.uid, node=pod.node, cpu_milli=cpu_milli, memory_bytes=memory_bytes
        )
    except UsageError as error:
        return plain, error.message
    return placed, ""


def stateless(item: PodObject, uid: PodUid) -> Pod:
    """Return the pod's request, without anything that changes while it runs."""
    item.status.container_statuses = item.status.init_container_statuses = None
    item.status.resource_claim_statuses = msgspec.Raw(b"null")
    pod = to_pod(item)
    kept = {key: text for key, text in pod.annotations.items() if key != PLACEMENT}
    return replace(pod, uid=uid, node="", annotations=kept)


def _asks(item: PodObject) -> bool:
    """Return whether a pod requests any resource of ours, validly or not."""
    return any(name.startswith(_OURS) for name in _resources(item))


ClaimListener = Callable[[PodUid, ResourceClaim | None], None]
"""Receives the uid of each claim that came or changed, or that has ended (None)."""


_REFUSALS = (DeniedError, ObjectMissingError)


class _ClaimFeed:
    """Claims that wait or have devices of a driver of ours, of a server that has claims."""

    def __init__(self, api: Api, tell: ClaimListener, *, backoff: Backoff | None) -> None:
        self._api = api
        self.is_synced = False
        """Also without claims: the server lacks them, or this account may not list them."""
        self._claims: Following[ClaimObject, ResourceClaim | None] = Following(
            api,
            Subject("resourceclaims", CLAIMS, ClaimObject, followed_claim, page=_PAGE),
            backoff=backoff,
            on_change=lambda uid, claim: tell(PodUid(uid), claim),
        )

    async def run(self) -> NoReturn:
        await until_served(self._api, API, on_absent=self._settle)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._claims.run())
            async for _ in self.signal.changes():
                if self._claims.is_synced or isinstance(self.problem, _REFUSALS):
                    break
            self._settle()
        raise AssertionError("watches never end")

    def _settle(self) -> None:
        self.is_synced = True
        self.signal.notify()

    @property
    def signal(self) -> Signal:
        return self._claims.signal

    @property
    def problem(self) -> KubeError | None:
        return self._claims.problem

    @property
    def unread(self) -> Mapping[str, str]:
        return self._claims.unread


class ClusterFeed:
    """All pods and nodes. Needs `run` running; the listener is called in its loop."""

    def __init__(
        self,
        api: Api,
        listener: Listener,
        *,
        claims: ClaimListener | None = None,
        backoff: Backoff | None = None,
    ) -> None:
        """`claims` gets the allocated claims; None: they are not followed."""
        self._api = api
        self._listener = listener
        self._reader = _NodeReader()
        self._nodes: Following[NodeObject, _ClusterNode] = Following(
            api,
            Subject("nodes", "/api/v1/nodes", NodeObject, self._reader, page=_PAGE),
            backoff=backoff,
            on_change=self._node_changed,
        )
        self._pods: Following[PodObject, ClusterPod] = Following(
            api,
            Subject("pods", "/api/v1/pods", PodObject, to_cluster_pod, page=_PAGE),
            backoff=backoff,
            on_change=self._pod_changed,
        )
        self._claims = None if claims is None else _ClaimFeed(api, claims, backoff=backoff)
        self._names: dict[str, str] = {}
        """Names of nodes by uid: a deletion is reported by uid."""
        self._left_out: dict[str, str] = {}

    async def run(self) -> NoReturn:
        async with asyncio.TaskGroup() as group:
            for each in self._sources:
                group.create_task(each.run())
        raise AssertionError("watches never end")

    @property
    def _sources(
        self,
    ) -> tuple[
        Following[NodeObject, _ClusterNode] | Following[PodObject, ClusterPod] | _ClaimFeed, ...
    ]:
        return (self._nodes, self._pods, *([self._claims] if self._claims else []))

    @property
    def is_synced(self) -> bool:
        return all(each.is_synced for each in self._sources)

    @property
    def problems(self) -> tuple[KubeError, ...]:
        return tuple(each.problem for each in self._sources if each.problem)

    @property
    def pods(self) -> Mapping[str, ClusterPod]:
        """All pods, by uid. Read-only."""
        return self._pods.values

    async def wait_synced(self) -> None:
        for each in self._sources:
            async for _ in each.signal.changes():
                if each.is_synced:
                    break

    async def look(self) -> None:
        """Return when every pod is at least as new as at the call. Raises `KubeError`.

        Asks the server, not its cache, for the current version and waits until the watch has
        reached it. Without events the watch reports no version: then pods are listed again.
        """
        params = {"limit": "1"}
        page = await read(self._api, "/api/v1/pods", _VERSION, asked="list pods", params=params)
        version = page.metadata.resource_version
        with suppress(TimeoutError):
            async with asyncio.timeout(_ECHO_S):
                # No event for versions: a bookmark changes nothing else.
                while not is_as_late(self._pods.version, version):  # noqa: ASYNC110
                    await asyncio.sleep(_STEP_S)
                return
        await self._pods.list_anew()

    @property
    def left_out(self) -> Mapping[str, str]:
        """Why some nodes and pods are ignored or stale, by uid.

        Such a node has no devices; such a pod keeps its last valid state, because its devices may
        be in use.
        """
        unread = (each.unread for each in self._sources)
        return {**{uid: why for each in unread for uid, why in each.items()}, **self._left_out}

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
        """Pass one object to the listener; return whether it succeeded.

        A failure for one object must not stop the others: it would end the process after each
        start.
        """
        try:
            tell()
        except Exception as error:  # noqa: BLE001 - for that reason
            if uid not in self._left_out:
                _log.exception("cannot be parsed; ignored", object=name)
            self._left_out[uid] = f"{type(error).__name__}: {error}"
            return False
        return True


class _Page(msgspec.Struct):
    """A list of which only the version is read."""

    metadata: Metadata


_VERSION = msgspec.json.Decoder(_Page)


_MOST_CHARACTERS: Final = 64 << 10
"""Of annotations, labels and variables together; longer ones are dropped."""


class _Variable(msgspec.Struct):
    name: str = ""
    value: str | None = None


_variables: Final = msgspec.json.Decoder(list[_Variable] | None)


def foreign_pod(item: PodObject) -> ForeignPod | None:
    """Return a bound pod as written; None if no other system can have given it GPUs."""
    meta, spec = item.metadata, item.spec
    annotations, labels = meta.annotations or {}, meta.labels or {}
    if DIALECT in annotations or PLACEMENT in annotations:
        return None
    if not may_be_given(_resources(item), (*annotations, *labels)):
        return None
    left = _Left(_MOST_CHARACTERS)
    return ForeignPod(
        namespace=meta.namespace,
        name=meta.name,
        labels=left.of(labels),
        annotations=left.of(annotations),
        containers=tuple(
            ForeignContainer(
                name=container.name,
                kind=kind,
                limits=dict(limits_of(container)),
                requests=dict((container.resources and container.resources.requests) or {}),
                environment=left.of(_environment(container)),
            )
            for container, kind in containers_of(item)
        ),
        scheduler=spec.scheduler_name,
        node=spec.node_name,
    )


class _Left:
    """The remaining space for a pod's texts."""

    def __init__(self, characters: int) -> None:
        self._characters = characters

    def of(self, written: Mapping[str, str]) -> dict[str, str]:
        """Keep what fits, the shortest first: kubectl's own annotation is the longest."""
        kept = {}
        for key, text in sorted(written.items(), key=lambda each: (len(each[1]), each)):
            size = len(key) + len(text)
            if size <= self._characters:
                self._characters -= size
                kept[key] = text
        return kept


def _resources(item: PodObject) -> Iterator[str]:
    for spec, _ in containers_of(item):
        yield from limits_of(spec)


def _environment(spec: ContainerSpec) -> dict[str, str]:
    try:
        variables = _variables.decode(spec.env)
    except msgspec.MsgspecError:
        return {}  # the API server admits no such pod
    return {
        variable.name: variable.value for variable in variables or () if variable.value is not None
    }

# SPDX-License-Identifier: Apache-2.0
"""This node's object: reads it, and keeps our fields in it.

Compares wanted and current fields at every change of either, so it repairs any loss: a status
rewritten by the kubelet, a node registered again, a lost request. Merge patches touch only our
keys.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Literal, NoReturn

import msgspec
import structlog

from allotment.kube.clients import Api, Backoff, PatchKind
from allotment.kube.errors import KubeError, ObjectMissingError, UnreachableError
from allotment.kube.objects import DatedPod, NodeObject, to_dated_pod
from allotment.kube.watching import Followed, Following, Subject, decoder_of_lists, pages
from allotment.model.errors import QuantityError
from allotment.model.formats import BINARY_UNITS
from allotment.model.pods import Pod, PodUid
from allotment.model.quantities import parse_whole
from allotment.model.structs import replace

LABELS_ANNOTATION = "allotment.dev/labels"
"""On the node: the keys of our labels, to remove them after a restart."""

_GATHER_S = 0.02
"""Changes within this time are written together."""
_UNDONE_S = 60.0
"""If another program reverts a write so soon, the next writes back off."""
_LABELS_S = 10.0
_ANY_TIME = datetime.fromtimestamp(0, UTC)

_Plans = tuple[dict[str, object] | None, dict[str, object] | None]
"""Patches of metadata and status."""

_PAGE = 500
_nodes = decoder_of_lists(NodeObject)
_log = structlog.get_logger(__name__)

ConditionStatus = Literal["True", "False", "Unknown"]


class NodeCondition(msgspec.Struct, frozen=True, kw_only=True):
    """A condition of a node."""

    status: str
    """True, False or Unknown."""
    reason: str = ""
    message: str = ""


class NodeFields(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of this node's object."""

    name: str
    uid: str
    labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    capacity: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Quantities as written by the API server."""
    allocatable: Mapping[str, str] = msgspec.field(default_factory=dict)
    conditions: Mapping[str, NodeCondition] = msgspec.field(default_factory=dict)
    """By type."""
    container_runtime: str = ""
    """Name and version: `containerd://2.3.7`."""
    kubelet_version: str = ""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """The wanted fields. None: not set yet, so nothing is changed."""

    quantities: Mapping[str, int] | None = None
    """For the status's capacity and allocatable."""
    labels: Mapping[str, str] | None = None
    conditions: Mapping[str, NodeCondition] = msgspec.field(default_factory=dict)
    """By type."""
    annotations: Mapping[str, str | None] = msgspec.field(default_factory=dict)
    """By key; None: remove this key. Other keys are not touched."""


def format_quantity(amount: int) -> str:
    """Write a quantity in binary units: `158Gi`; unless it is whole Mi, as a number."""
    for unit, factor in reversed(BINARY_UNITS.items()):
        if factor >= BINARY_UNITS["Mi"] and amount >= factor and amount % factor == 0:
            return f"{amount // factor}{unit}"
    return str(amount)


def plan_metadata(node: NodeFields, wanted: Wanted) -> dict[str, object] | None:
    """Return the merge patch for labels and annotations; None if nothing differs.

    Only labels that the annotation lists as ours are removed.
    """
    annotations = {
        key: value
        for key, value in wanted.annotations.items()
        if node.annotations.get(key) != value
    }
    if wanted.labels is None:
        return {"metadata": {"annotations": annotations}} if annotations else None
    labels = _plan_labels(node, wanted.labels)
    remembered = ",".join(sorted(wanted.labels)) or None
    if node.annotations.get(LABELS_ANNOTATION) != remembered:
        annotations[LABELS_ANNOTATION] = remembered
    if not labels and not annotations:
        return None
    return {"metadata": {"labels": labels, "annotations": annotations}}


def _plan_labels(node: NodeFields, wanted: Mapping[str, str]) -> dict[str, str | None]:
    ours = {key for key in node.annotations.get(LABELS_ANNOTATION, "").split(",") if key}
    labels: dict[str, str | None] = {
        key: value for key, value in wanted.items() if node.labels.get(key) != value
    }
    return labels | {key: None for key in ours - wanted.keys() if key in node.labels}


def plan_status(
    node: NodeFields, wanted: Wanted, *, owned: frozenset[str], now: datetime
) -> dict[str, object] | None:
    """Return the strategic merge patch for the node's status; None if nothing differs.

    `owned`: our resources; those that are not wanted are removed.
    """
    status: dict[str, object] = {}
    if wanted.quantities is not None:
        for part, current in (("capacity", node.capacity), ("allocatable", node.allocatable)):
            changes = _plan_quantities(current, wanted.quantities, owned)
            if changes:
                status[part] = changes
    conditions = [
        _condition(kind, condition, node.conditions.get(kind), now)
        for kind, condition in wanted.conditions.items()
        if node.conditions.get(kind) != condition
    ]
    if conditions:
        status["conditions"] = conditions
    return {"status": status} if status else None


def _plan_quantities(
    current: Mapping[str, str], wanted: Mapping[str, int], owned: frozenset[str]
) -> dict[str, str | None]:
    changes: dict[str, str | None] = {
        name: format_quantity(amount)
        for name, amount in wanted.items()
        if name not in current or _amount(current[name]) != amount
    }
    return changes | dict.fromkeys((owned & current.keys()) - wanted.keys())


def _amount(text: str) -> int | None:
    try:
        return parse_whole(text)
    except QuantityError:
        return None  # not a number: differs from what we want


def _condition(
    kind: str, condition: NodeCondition, before: NodeCondition | None, now: datetime
) -> dict[str, str]:
    """Write a condition; with a time of transition only if its status changes."""
    at = now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    written = {
        "type": kind,
        "status": condition.status,
        "reason": condition.reason,
        "message": condition.message,
        "lastHeartbeatTime": at,
    }
    if before is None or before.status != condition.status:
        written["lastTransitionTime"] = at
    return written


class OwnNode:
    """This node's object, followed and kept as wanted. Needs `run` running.

    `owned`: the resources of the status that we set and remove.
    """

    def __init__(
        self, api: Api, *, name: str, owned: frozenset[str], backoff: Backoff | None = None
    ) -> None:
        self._api = api
        self._name = name
        self._owned = owned
        self._wanted = Wanted()
        self._problem: KubeError | None = None
        self._following: Following[NodeObject, NodeFields] = Following(
            api,
            Subject(
                name=f"node {name}",
                path="/api/v1/nodes",
                fields={"metadata.name": name},
                item=NodeObject,
                convert=_node,
            ),
            backoff=backoff,
        )
        self._backoff = Backoff(first_s=0.1, most_s=10.0)

    async def run(self) -> NoReturn:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._following.run())
            await self._keep()
        raise AssertionError  # neither ends by itself

    @property
    def current(self) -> NodeFields | None:
        """Its contents; None if it does not exist or is not loaded yet."""
        return next(iter(self._following.values.values()), None)

    @property
    def is_synced(self) -> bool:
        """Whether it is known if the node exists."""
        return self._following.is_synced

    @property
    def problem(self) -> KubeError | None:
        return self._following.problem or self._problem

    @property
    def is_settled(self) -> bool:
        node = self.current
        return node is not None and self._plans() == (None, None)

    def changes(self) -> AsyncIterator[None]:
        """Yield at once, and after each change of current or wanted fields."""
        return self._following.signal.changes()

    async def set_capacity(self, quantities: Mapping[str, int]) -> None:
        """Set these quantities in capacity and allocatable, and remove our others.

        Returns at once; written when the API server is reachable, and again after a revert.
        """
        self._want(replace(self._wanted, quantities=dict(quantities)))

    def set_annotation(self, key: str, text: str | None) -> None:
        """Set this annotation; None removes it.

        Returns at once; written when the API server is reachable, and again after a revert.
        """
        self._want(replace(self._wanted, annotations={**self._wanted.annotations, key: text}))

    async def set_labels(
        self, labels: Mapping[str, str], *, owned_prefixes: Sequence[str] = ()
    ) -> None:
        """Set these labels, and remove our earlier others.

        Returns when they are written. Raises `KubeError` if that fails or takes more than 10 s;
        retries continue nevertheless. Raises `ValueError` for a key outside of a non-empty
        `owned_prefixes`.
        """
        strange = [
            key for key in labels if owned_prefixes and not key.startswith(tuple(owned_prefixes))
        ]
        if strange:
            raise ValueError(f"not a label of Allotment: {', '.join(strange)}")
        self._want(replace(self._wanted, labels=dict(labels)))
        try:
            async with asyncio.timeout(_LABELS_S):
                async for _ in self.changes():
                    if self._has_labels(labels):
                        return
                    if self.problem is not None:
                        raise self.problem
        except TimeoutError:
            raise UnreachableError(
                f"the labels of node {self._name} have not been written within {_LABELS_S:g} s",
                hint="check the node's name with `kubectl get node`",
            ) from None

    async def set_condition(
        self, kind: str, status: ConditionStatus, *, reason: str, message: str
    ) -> None:
        """Set this condition. Returns at once, as `set_annotation`."""
        condition = NodeCondition(status=status, reason=reason, message=message)
        self._want(replace(self._wanted, conditions={**self._wanted.conditions, kind: condition}))

    def _has_labels(self, labels: Mapping[str, str]) -> bool:
        """Return whether these are written, regardless of other fields."""
        node = self.current
        return node is not None and plan_metadata(node, Wanted(labels=labels)) is None

    def _want(self, wanted: Wanted) -> None:
        if wanted != self._wanted:
            self._wanted = wanted
            self._following.signal.notify()

    def _plans(self, now: datetime = _ANY_TIME) -> _Plans:
        node = self.current
        if node is None:
            return None, None
        return (
            plan_metadata(node, self._wanted),
            plan_status(node, self._wanted, owned=self._owned, now=now),
        )

    async def _keep(self) -> NoReturn:
        loop = asyncio.get_running_loop()
        written: _Plans = (None, None)
        written_at = float("-inf")
        async for _ in self.changes():
            plans = self._plans()
            if plans == (None, None):
                continue
            is_undone = plans == written and loop.time() - written_at < _UNDONE_S
            if self._problem is None and not is_undone:
                self._backoff.reset()
                await asyncio.sleep(_GATHER_S)
            else:
                await asyncio.sleep(
                    self._backoff.next(
                        at_least_s=self._problem.retry_after_s if self._problem else None
                    )
                )
            written, written_at = self._plans(), loop.time()
            await self._write()
        raise AssertionError  # changes() does not end

    async def _write(self) -> None:
        try:
            await write_node(self._api, self._name, *self._plans(datetime.now(UTC)))
        except ObjectMissingError as error:
            _log.info(error.message)  # the watch reports its return
        except KubeError as error:
            if self._problem is None or self._problem.status != error.status:
                _log.warning(error.message, hint=error.hint)
            self._problem = error
            self._following.signal.notify()
        else:
            self._problem = None


def plan_removal(node: NodeFields, *, unwanted: Wanted) -> _Plans:
    """Return the patches that remove our labels, and these fields, whatever their values."""
    nothing = Wanted(labels={}, annotations=dict.fromkeys(unwanted.annotations))
    status: dict[str, object] = {
        part: changes
        for part, current in (("capacity", node.capacity), ("allocatable", node.allocatable))
        if (changes := _plan_quantities(current, {}, frozenset(unwanted.quantities or ())))
    }
    stale = [each for each in unwanted.conditions if each in node.conditions]
    if stale:
        status["conditions"] = [{"$patch": "delete", "type": each} for each in stale]
    return plan_metadata(node, nothing), {"status": status} if status else None


async def remove_fields(api: Api, *, unwanted: Wanted, node_name: str = "") -> tuple[str, ...]:
    """Remove what agents wrote into all nodes, or into one; return the names of the changed ones.

    Raises `KubeError`.
    """
    changed = []
    page_of = {"limit": str(_PAGE)}
    if node_name:
        page_of["fieldSelector"] = f"metadata.name={node_name}"
    async for page in pages(api, "/api/v1/nodes", _nodes, asked="list nodes", params=page_of):
        for node in map(_node, page.items or ()):
            plans = plan_removal(node, unwanted=unwanted)
            await write_node(api, node.name, *plans)
            if plans != (None, None):
                changed.append(node.name)
    return tuple(changed)


async def write_node(
    api: Api, name: str, metadata: dict[str, object] | None, status: dict[str, object] | None
) -> None:
    """Send the patches of a node. Raises `KubeError`."""
    path = f"/api/v1/nodes/{name}"
    if metadata is not None:
        await api.patch(path, metadata, asked=f"patch node {name}")
    if status is not None:
        await api.patch(
            f"{path}/status",
            status,
            asked=f"patch nodes/status of {name}",
            kind=PatchKind.STRATEGIC,
        )


def _node(item: NodeObject) -> NodeFields:
    meta, status = item.metadata, item.status
    return NodeFields(
        name=meta.name,
        uid=meta.uid,
        labels=meta.labels or {},
        annotations=meta.annotations or {},
        capacity=status.capacity or {},
        allocatable=status.allocatable or {},
        conditions={
            condition.type: NodeCondition(
                status=condition.status, reason=condition.reason, message=condition.message
            )
            for condition in status.conditions or ()
        },
        container_runtime=status.node_info.container_runtime_version,
        kubelet_version=status.node_info.kubelet_version,
    )


_DOUBT_S = 2.0
"""A watch reports a pod within milliseconds: after longer silence it may be dead."""


class NodePods(Followed[DatedPod, Pod]):
    """The pods of a node."""

    def __init__(self, api: Api, *, node: str, backoff: Backoff | None = None) -> None:
        self._api = api
        super().__init__(
            api,
            Subject(
                name=f"pods of node {node}",
                path="/api/v1/pods",
                fields={"spec.nodeName": node},
                item=DatedPod,
                convert=to_dated_pod,
            ),
            backoff=backoff,
        )

    def get(self, uid: PodUid) -> Pod | None:
        """Return a pod; None if it is unknown or gone.

        Any author can write the uid in a mirror pod's annotations, so a pod with this uid of its
        own has priority.
        """
        values = self._following.values
        own = values.get(uid)
        if own is not None and own.uid == uid:
            return own
        return next((pod for pod in values.values() if pod.uid == uid), None)

    def all(self) -> tuple[Pod, ...]:
        return tuple(self._following.values.values())

    async def delete(self, pod: Pod) -> None:
        """Delete a pod that is not static, with its own grace period. Raises `KubeError`."""
        path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}"
        await self._api.delete(path, uid=pod.uid, asked=f"delete pod {pod}")

    async def annotate(self, pod: Pod, annotations: Mapping[str, str]) -> None:
        """Write annotations of a pod that is not static. Raises `KubeError`.

        Through its status: that right changes nothing that the pod runs.
        """
        change = {"metadata": {"uid": pod.uid, "annotations": annotations}}
        path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}/status"
        await self._api.patch(path, change, asked=f"annotate pod {pod}")

    async def wait_for(self, uid: PodUid, *, timeout_s: float) -> Pod | None:
        """Return a pod as soon as the watch reports it; None after `timeout_s`.

        After a short silence the pods are listed again.
        """
        pod = self.get(uid)
        if pod is not None:
            return pod
        pod = await self._heard_within(uid, min(timeout_s, _DOUBT_S))
        if pod is None and timeout_s > _DOUBT_S:
            self._following.recheck()
            pod = await self._heard_within(uid, timeout_s - _DOUBT_S)
        return pod

    async def _heard_within(self, uid: PodUid, timeout_s: float) -> Pod | None:
        try:
            async with asyncio.timeout(timeout_s):
                async for _ in self.changes():
                    pod = self.get(uid)
                    if pod is not None:
                        return pod
        except TimeoutError:
            return None
        return None

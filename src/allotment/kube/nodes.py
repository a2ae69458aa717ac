# SPDX-License-Identifier: Apache-2.0
"""This node's object: what it says, and what we write into it.

What is to be there is kept here and compared with what is there, at every change of either. So
it does not matter who undid it: a kubelet that wrote its status anew, a node that was deleted and
registered again, a request that was lost. Only keys of ours are written, by merge patches, so that
nobody else's change can be undone by ours.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Literal, NoReturn

import structlog

from allotment.kube.backoff import Backoff
from allotment.kube.clients import Api, PatchKind
from allotment.kube.errors import KubeError, ObjectMissingError, UnreachableError
from allotment.kube.objects import NodeObject, ObjectList
from allotment.kube.watching import Following, Subject
from allotment.model.errors import QuantityError
from allotment.model.formats import BINARY_UNITS
from allotment.model.quantities import parse_whole

__all__ = [
    "LABELS_ANNOTATION",
    "Condition",
    "Node",
    "OwnNode",
    "Wanted",
    "format_quantity",
    "plan_metadata",
    "plan_status",
]

LABELS_ANNOTATION = "allotment.dev/labels"
"""On the node: which labels are ours, by key, so that they can be removed after a restart."""

_GATHER_S = 0.02
"""What is wanted within so short a time is written at once."""
_UNDONE_S = 60.0
"""What has to be written again so soon, someone undoes: then it is written less and less often."""
_LABELS_S = 10.0
_ANY_TIME = datetime.fromtimestamp(0, UTC)

_Plans = tuple[dict[str, object] | None, dict[str, object] | None]
"""Patches of the metadata and of the status."""

_log = structlog.get_logger(__name__)

ConditionStatus = Literal["True", "False", "Unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One of a node's conditions."""

    status: str
    """True, False or Unknown."""
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What this node's object says."""

    name: str
    uid: str
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    capacity: Mapping[str, str] = field(default_factory=dict)
    """Quantities, as the API server writes them."""
    allocatable: Mapping[str, str] = field(default_factory=dict)
    conditions: Mapping[str, Condition] = field(default_factory=dict)
    """By type."""
    container_runtime: str = ""
    """Name and version: `containerd://2.3.7`."""
    kubelet_version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is to be in the node's object. None: nobody has said yet, so that nothing is touched."""

    quantities: Mapping[str, int] | None = None
    """Of the status's capacity, and allocatable with it."""
    labels: Mapping[str, str] | None = None
    conditions: Mapping[str, Condition] = field(default_factory=dict)
    """By type."""
    annotations: Mapping[str, str | None] = field(default_factory=dict)
    """By key; None: there is to be none of that key. Others are not touched."""


def format_quantity(amount: int) -> str:
    """Write a quantity as people read it: `158Gi`; what is not whole Mi, as it is."""
    for unit, factor in reversed(BINARY_UNITS.items()):
        if factor >= BINARY_UNITS["Mi"] and amount >= factor and amount % factor == 0:
            return f"{amount // factor}{unit}"
    return str(amount)


def plan_metadata(node: Node, wanted: Wanted) -> dict[str, object] | None:
    """Return the merge patch that labels and annotations need; None: they are as they should be.

    Labels that are not ours, by the annotation that remembers them, are never removed.
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


def _plan_labels(node: Node, wanted: Mapping[str, str]) -> dict[str, str | None]:
    ours = {key for key in node.annotations.get(LABELS_ANNOTATION, "").split(",") if key}
    labels: dict[str, str | None] = {
        key: value for key, value in wanted.items() if node.labels.get(key) != value
    }
    return labels | {key: None for key in ours - wanted.keys() if key in node.labels}


def plan_status(
    node: Node, wanted: Wanted, *, owned: frozenset[str], now: datetime
) -> dict[str, object] | None:
    """Return the strategic merge patch that the node's status needs; None: it is as it should be.

    `owned`: the resources whose quantities are ours: removed where they are not wanted.
    """
    status: dict[str, object] = {}
    if wanted.quantities is not None:
        for part, there in (("capacity", node.capacity), ("allocatable", node.allocatable)):
            changes = _plan_quantities(there, wanted.quantities, owned)
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
    there: Mapping[str, str], wanted: Mapping[str, int], owned: frozenset[str]
) -> dict[str, str | None]:
    changes: dict[str, str | None] = {
        name: format_quantity(amount)
        for name, amount in wanted.items()
        if name not in there or _amount(there[name]) != amount
    }
    return changes | dict.fromkeys((owned & there.keys()) - wanted.keys())


def _amount(text: str) -> int | None:
    try:
        return parse_whole(text)
    except QuantityError:
        return None  # whatever it is, it is not what we want there


def _condition(
    kind: str, condition: Condition, before: Condition | None, now: datetime
) -> dict[str, str]:
    """Write a condition; its time of transition only where it is one (lists merge by type)."""
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
    """This node's object, followed and kept as wanted. `run` has to be running.

    `owned`: the quantities of the status that are ours to set and remove.
    """

    def __init__(
        self, api: Api, *, name: str, owned: frozenset[str], backoff: Backoff | None = None
    ) -> None:
        """Know nothing and want nothing yet."""
        self._api = api
        self._name = name
        self._owned = owned
        self._wanted = Wanted()
        self._problem: KubeError | None = None
        self._following: Following[NodeObject, Node] = Following(
            api,
            Subject(
                name=f"node {name}",
                path="/api/v1/nodes",
                fields={"metadata.name": name},
                item=NodeObject,
                items=ObjectList[NodeObject],
                convert=_node,
            ),
            backoff=backoff,
        )
        self._backoff = Backoff(first_s=0.1, most_s=10.0)

    async def run(self) -> NoReturn:
        """Follow and write for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._following.run())
            await self._keep()
        raise AssertionError  # neither ends by itself

    @property
    def current(self) -> Node | None:
        """What it says; None: there is no such node, or it has not been heard of."""
        return next(iter(self._following.values.values()), None)

    @property
    def is_synced(self) -> bool:
        """Whether there is such a node is known."""
        return self._following.is_synced

    @property
    def problem(self) -> KubeError | None:
        """Why it can at present not be read, or not be written."""
        return self._following.problem or self._problem

    @property
    def is_settled(self) -> bool:
        """It is there, and says all that is wanted."""
        node = self.current
        return node is not None and self._plans() == (None, None)

    def changes(self) -> AsyncIterator[None]:
        """Yield at once, and when it says something else, or something else is wanted."""
        return self._following.signal.changes()

    async def set_capacity(self, quantities: Mapping[str, int]) -> None:
        """Have these quantities in the node's capacity and allocatable, and no others of ours.

        Returns at once; written as soon as the API server is there, and again when it is undone.
        """
        self._want(replace(self._wanted, quantities=dict(quantities)))

    def set_annotation(self, key: str, text: str | None) -> None:
        """Have this annotation on the node; None: have none of that key.

        Returns at once; written as soon as the API server is there, and again when it is undone.
        """
        self._want(replace(self._wanted, annotations={**self._wanted.annotations, key: text}))

    async def set_labels(
        self, labels: Mapping[str, str], *, owned_prefixes: Sequence[str] = ()
    ) -> None:
        """Have these labels on the node, and none that we set before and are not among them.

        Returns when they are there, and raises `KubeError` when that cannot be done, or not within
        10 s; it goes on being tried nevertheless. Raises `ValueError` for a key outside of
        `owned_prefixes`, where there are any: someone else's.
        """
        strange = [
            key for key in labels if owned_prefixes and not key.startswith(tuple(owned_prefixes))
        ]
        if strange:
            raise ValueError(f"not ours to set: {', '.join(strange)}")
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
                hint="is there a node of that name? `kubectl get node` tells",
            ) from None

    async def set_condition(
        self, kind: str, status: ConditionStatus, *, reason: str, message: str
    ) -> None:
        """Have this condition on the node. Returns at once, likewise."""
        condition = Condition(status=status, reason=reason, message=message)
        self._want(replace(self._wanted, conditions={**self._wanted.conditions, kind: condition}))

    def _has_labels(self, labels: Mapping[str, str]) -> bool:
        """Tell whether these are there, whatever else is still to be written."""
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
        """Write what is missing, at every change of what is there or wanted."""
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
        metadata, status = self._plans(datetime.now(UTC))
        path = f"/api/v1/nodes/{self._name}"
        try:
            if metadata is not None:
                await self._api.patch(path, metadata, asked=f"patch node {self._name}")
            if status is not None:
                await self._api.patch(
                    f"{path}/status",
                    status,
                    asked=f"patch nodes/status of {self._name}",
                    kind=PatchKind.STRATEGIC,
                )
        except ObjectMissingError as error:
            _log.info(error.message)  # that it is there again will be heard of
        except KubeError as error:
            if self._problem is None or self._problem.status != error.status:
                _log.warning(error.message, hint=error.hint)
            self._problem = error
            self._following.signal.notify()
        else:
            self._problem = None


def _node(item: NodeObject) -> Node:
    meta, status = item.metadata, item.status
    return Node(
        name=meta.name,
        uid=meta.uid,
        labels=meta.labels or {},
        annotations=meta.annotations or {},
        capacity=status.capacity or {},
        allocatable=status.allocatable or {},
        conditions={
            each.type: Condition(status=each.status, reason=each.reason, message=each.message)
            for each in status.conditions or ()
        },
        container_runtime=status.node_info.container_runtime_version,
        kubelet_version=status.node_info.kubelet_version,
    )

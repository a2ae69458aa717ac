# SPDX-License-Identifier: Apache-2.0
"""The API server's objects, as far as they concern us, and what they mean.

Narrow on purpose: what is not named here is skipped by the decoder and never becomes an object. Go
writes absent lists and maps as null or leaves them out, so each of them may be None.
"""

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

import msgspec

from allotment.dialects.placements import LEFT_OUT, MOST_CHARACTERS
from allotment.model.errors import QuantityError
from allotment.model.pods import Container, ContainerKind, Pod, PodUid
from allotment.model.quantities import parse_whole

__all__ = [
    "ENDED",
    "ConfigMapObject",
    "Metadata",
    "NodeObject",
    "ObjectList",
    "PodObject",
    "WatchEvent",
    "to_pod",
]

ENDED = frozenset({"Succeeded", "Failed"})
"""Phases of pods of which nothing will run again."""

_MIRROR = "kubernetes.io/config.mirror"
_HASH = "kubernetes.io/config.hash"
_OURS = "allotment.dev/"
# How much of the agent's memory a pod has is not its author's to say: annotations have 256 KiB.
_MAX_UID = 64
_MAX_KEYS = 32  # more than there are that mean something: one that is not known is among them

T = TypeVar("T")


class _Narrow(msgspec.Struct, kw_only=True, rename="camel"):
    """A part of an object; what it does not name is not decoded. Never changed once decoded."""


class Metadata(_Narrow):
    """`metadata` of any object, and of a list."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    deletion_timestamp: str | None = None
    next_page: str = msgspec.field(default="", name="continue")
    """Of a list: what to ask for its next page by; empty: this is the last."""


class ObjectList(_Narrow, Generic[T]):
    """A list of objects, as it is at `metadata.resource_version`."""

    metadata: Metadata
    items: list[T] | None = None


class WatchEvent(_Narrow):
    """One line of a watch."""

    type: str
    """ADDED, MODIFIED, DELETED, BOOKMARK or ERROR."""
    object: msgspec.Raw


# ---- pods ----------------------------------------------------------------------------------------


class ResourceRequirements(_Narrow):
    """`resources` of a container; of what is not CPU or memory, requests equal limits."""

    limits: dict[str, str] | None = None
    requests: dict[str, str] | None = None


class ContainerSpec(_Narrow):
    """A container, as it was asked for."""

    name: str
    resources: ResourceRequirements | None = None
    restart_policy: str | None = None
    """Its own, in place of the pod's; of an init container, Always makes it a sidecar."""
    restart_policy_rules: list[dict[str, object]] | None = None
    env: msgspec.Raw = msgspec.Raw(b"null")
    """Its variables, not decoded: of few pods somebody needs them."""


class PodSpec(_Narrow):
    """`spec` of a pod."""

    node_name: str = ""
    containers: list[ContainerSpec] | None = None
    init_containers: list[ContainerSpec] | None = None
    restart_policy: str = "Always"
    resources: ResourceRequirements | None = None
    """Of the pod as a whole: in place of its containers' sum, where they are given."""
    overhead: dict[str, str] | None = None
    priority: int | None = None
    scheduler_name: str = ""


class Terminated(_Narrow):
    """A container's end."""

    exit_code: int = 0


class ContainerState(_Narrow):
    """How a container is, or was before it was restarted. All None: it waits."""

    running: dict[str, object] | None = None
    terminated: Terminated | None = None


class ContainerStatus(_Narrow):
    """A container, as the kubelet last told."""

    name: str
    state: ContainerState | None = None
    last_state: ContainerState | None = None
    restart_count: int = 0
    resources: ResourceRequirements | None = None
    """In force: differs from what is asked for while a container is being resized."""
    allocated_resources: dict[str, str] | None = None


class PodStatus(_Narrow):
    """`status` of a pod."""

    phase: str = ""
    nominated_node_name: str = ""
    """Where other pods are being ended for this one."""
    container_statuses: list[ContainerStatus] | None = None
    init_container_statuses: list[ContainerStatus] | None = None


class PodObject(_Narrow):
    """A pod."""

    metadata: Metadata
    spec: PodSpec
    status: PodStatus = msgspec.field(default_factory=PodStatus)


def to_pod(item: PodObject) -> Pod:
    """Say what a pod is, in our own words."""
    meta = item.metadata
    return Pod(
        uid=_uid(meta),
        namespace=meta.namespace,
        name=meta.name,
        node=item.spec.node_name,
        annotations=_annotations(meta.annotations or {}),
        containers=tuple(_containers(item)),
        has_ended=item.status.phase in ENDED,
    )


def _annotations(written: Mapping[str, str]) -> dict[str, str]:
    """Keep what is said to us; in place of what is too long, a text that no reader accepts."""
    ours = sorted((key, text) for key, text in written.items() if key.startswith(_OURS))
    kept = {}
    left = MOST_CHARACTERS
    for key, text in ours[:_MAX_KEYS]:
        kept[key] = text if len(text) <= left else LEFT_OUT
        left -= len(kept[key])
    return kept


def _uid(meta: Metadata) -> PodUid:
    """Return the uid that the kubelet knows a pod by.

    A static pod's object at the API server is a mirror with a uid of its own; the kubelet goes by
    the hash of the file (kubelet pkg/kubelet/config/common.go, types/pod_update.go).
    """
    annotations = meta.annotations or {}
    of_file = annotations.get(_HASH) or annotations[_MIRROR] if _MIRROR in annotations else ""
    return PodUid(of_file if 0 < len(of_file) <= _MAX_UID else meta.uid)


def _containers(item: PodObject) -> Iterator[Container]:
    status = {each.name: each for each in item.status.container_statuses or ()}
    status |= {each.name: each for each in item.status.init_container_statuses or ()}
    for spec in item.spec.init_containers or ():
        kind = ContainerKind.SIDECAR if spec.restart_policy == "Always" else ContainerKind.INIT
        yield _container(item, spec, kind, status.get(spec.name))
    for spec in item.spec.containers or ():
        yield _container(item, spec, ContainerKind.REGULAR, status.get(spec.name))


def _container(
    item: PodObject, spec: ContainerSpec, kind: ContainerKind, status: ContainerStatus | None
) -> Container:
    return Container(
        name=spec.name,
        kind=kind,
        resources=_resources((spec.resources and spec.resources.limits) or {}),
        has_finished=_has_finished(item, spec, kind, status),
        is_started=status is not None and _is_started(status),
        restarts=status.restart_count if status else 0,
    )


def _resources(limits: Mapping[str, str]) -> dict[str, int]:
    """Take the resources of extensions; the others are the kubelet's business."""
    found = {}
    for name, quantity in limits.items():
        domain, slash, _ = name.partition("/")
        if not slash or domain == "kubernetes.io" or domain.endswith(".kubernetes.io"):
            continue
        try:
            found[name] = parse_whole(quantity)
        except QuantityError:
            # The API server has let it pass, so that it means something elsewhere; here, nothing.
            continue
    return found


def _is_started(status: ContainerStatus) -> bool:
    states = [each for each in (status.state, status.last_state) if each is not None]
    return status.restart_count > 0 or any(
        each.running is not None or each.terminated is not None for each in states
    )


def _has_finished(
    item: PodObject, spec: ContainerSpec, kind: ContainerKind, status: ContainerStatus | None
) -> bool:
    """Tell whether the kubelet will never start it again, as far as it can be known."""
    if item.status.phase in ENDED:
        return True
    ended = status.state.terminated if status and status.state else None
    if ended is None:
        return False
    if item.metadata.deletion_timestamp is not None:
        return True  # nothing is restarted in a pod that is being deleted
    if kind is ContainerKind.SIDECAR or spec.restart_policy_rules:
        return False
    if kind is ContainerKind.INIT:
        return ended.exit_code == 0
    policy = spec.restart_policy or item.spec.restart_policy
    return policy == "Never" or (policy == "OnFailure" and ended.exit_code == 0)


# ---- nodes ---------------------------------------------------------------------------------------


class NodeSystemInfo(_Narrow):
    """`status.nodeInfo`."""

    container_runtime_version: str = ""
    """`containerd://2.3.7`."""
    kubelet_version: str = ""


class NodeConditionObject(_Narrow):
    """One of `status.conditions`."""

    type: str
    status: str
    reason: str = ""
    message: str = ""


class NodeStatus(_Narrow):
    """`status` of a node."""

    capacity: dict[str, str] | None = None
    allocatable: dict[str, str] | None = None
    conditions: list[NodeConditionObject] | None = None
    node_info: NodeSystemInfo = msgspec.field(default_factory=NodeSystemInfo)


class NodeObject(_Narrow):
    """A node."""

    metadata: Metadata
    status: NodeStatus = msgspec.field(default_factory=NodeStatus)


# ---- config maps ---------------------------------------------------------------------------------


class ConfigMapObject(_Narrow):
    """A config map; `binaryData` is not looked at."""

    metadata: Metadata
    data: dict[str, str] | None = None

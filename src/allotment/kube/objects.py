# SPDX-License-Identifier: Apache-2.0
"""The types of the API server's objects, and their conversion.

Narrow on purpose: the decoder skips other fields. Go writes absent lists and maps as null or omits
them, so each of them may be None.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Final, Generic, NamedTuple, TypeVar

import msgspec

from allotment.dialects.own.placement import KEPT_CHARACTERS, LEFT_OUT
from allotment.model.accounting import Member, RunTime, most_of, phases
from allotment.model.errors import QuantityError
from allotment.model.pods import Container, ContainerKind, Pod, PodUid, UsedClaim
from allotment.model.quantities import parse_rounded_up, parse_whole
from allotment.model.structs import replace

ENDED = frozenset({"Succeeded", "Failed"})
"""Phases of pods that will never run again."""

_MIRROR = "kubernetes.io/config.mirror"
_HASH = "kubernetes.io/config.hash"
_OURS = "allotment.dev/"
# Limits for memory of the agent: annotations can have 256 KiB.
_MAX_UID = 64
_NULL = msgspec.Raw(b"null")
_MAX_KEYS = 32  # more than there are known keys: the rest includes an unknown one

T = TypeVar("T")


class Narrow(msgspec.Struct, kw_only=True, rename="camel"):
    """A part of an object; other fields are not decoded. Never changed after decoding."""


NOMINATOR: Final = "allotment-nominations"
"""The writer of `status.nominatedNodeName` in `managedFields`, where no pod ends for the other. It
is the owner until another program clears or changes the field."""


class ManagedFields(Narrow):
    """An entry of `metadata.managedFields`."""

    manager: str = ""


class OwnerReference(Narrow):
    """An entry of `metadata.ownerReferences`."""

    controller: bool | None = None


class Metadata(Narrow):
    """`metadata` of any object or list."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    deletion_timestamp: str | None = None
    owner_references: list[OwnerReference] | None = None
    managed_fields: msgspec.Raw = _NULL
    """The writers of its fields, undecoded: few objects need them."""
    next_page: str = msgspec.field(default="", name="continue")
    """For a list: the token of its next page; empty: this is the last."""


class ObjectList(Narrow, Generic[T]):
    """A list of objects, as of `metadata.resource_version`."""

    metadata: Metadata
    items: list[T] | None = None


class WatchEvent(Narrow):
    """A line of a watch."""

    type: str
    """ADDED, MODIFIED, DELETED, BOOKMARK or ERROR."""
    object: msgspec.Raw


# ---- pods ----------------------------------------------------------------------------------------


class _ClaimUse(Narrow):
    name: str
    """An entry of the pod's `spec.resourceClaims`."""
    request: str = ""


class ResourceRequirements(Narrow):
    """A container's `resources`; for extended resources, requests equal limits."""

    limits: dict[str, str] | None = None
    requests: dict[str, str] | None = None
    claims: list[_ClaimUse] | None = None


class SecurityContext(Narrow):
    """A container's `securityContext`."""

    privileged: bool | None = None


class ContainerSpec(Narrow):
    """A container's spec."""

    name: str
    resources: ResourceRequirements | None = None
    security_context: SecurityContext | None = None
    restart_policy: str | None = None
    """Its own, in place of the pod's; Always on an init container makes it a sidecar."""
    restart_policy_rules: list[dict[str, object]] | None = None
    env: msgspec.Raw = _NULL
    """Its variables, undecoded: few pods need them."""


class PodSpec(Narrow):
    """A pod's `spec`."""

    node_name: str = ""
    containers: list[ContainerSpec] | None = None
    init_containers: list[ContainerSpec] | None = None
    restart_policy: str = "Always"
    resources: ResourceRequirements | None = None
    """For the whole pod, in place of the containers' sum if set."""
    overhead: dict[str, str] | None = None
    priority: int | None = None
    scheduler_name: str = ""
    node_selector: msgspec.Raw = _NULL
    affinity: msgspec.Raw = _NULL
    tolerations: msgspec.Raw = _NULL
    scheduling_gates: list[dict[str, str]] | None = None
    host_pid: bool | None = msgspec.field(default=None, name="hostPID")
    resource_claims: msgspec.Raw = _NULL
    """Undecoded: few pods have them."""


class Terminated(Narrow):
    """A container's end."""

    exit_code: int = 0


class ContainerState(Narrow):
    """A container's state, or its state before the last restart. All None: it waits."""

    running: dict[str, object] | None = None
    terminated: Terminated | None = None


class ContainerStatus(Narrow):
    """A container, as the kubelet last reported it."""

    name: str
    container_id: str = msgspec.field(default="", name="containerID")
    """Like `containerd://ID`."""
    state: ContainerState | None = None
    last_state: ContainerState | None = None
    restart_count: int = 0
    resources: ResourceRequirements | None = None
    """In force; differs from the spec during a resize."""
    allocated_resources: dict[str, str] | None = None


class _PodClaim(Narrow):
    """An entry of `spec.resourceClaims` or `status.resourceClaimStatuses`, or a claim's name."""

    name: str = ""
    resource_claim_name: str | None = None


class PodStatus(Narrow):
    """A pod's `status`."""

    phase: str = ""
    nominated_node_name: str = ""
    """The node that kube-scheduler tries first."""
    resource_claim_statuses: msgspec.Raw = _NULL
    """The names of claims that were made for the pod by templates."""
    extended_resource_claim_status: _PodClaim | None = None
    """The claim that kube-scheduler made for the pod's extended resources."""
    container_statuses: list[ContainerStatus] | None = None
    init_container_statuses: list[ContainerStatus] | None = None


class PodObject(Narrow):
    """A pod."""

    metadata: Metadata
    spec: PodSpec
    status: PodStatus = msgspec.field(default_factory=PodStatus)


class _DatedMetadata(Metadata):
    creation_timestamp: str = ""


class DatedPod(PodObject):
    """A pod with its time of creation."""

    metadata: _DatedMetadata


_pod_claims: Final = msgspec.json.Decoder(list[_PodClaim] | None)


def claims_of(item: PodObject) -> dict[str, bool]:
    """Return a pod's ResourceClaims by name, as far as they are known.

    True: the claim was made for this pod alone, by a template or for its extended resources.
    """
    claims = dict(_named_claims(item).values())
    extended = item.status.extended_resource_claim_status
    if extended is not None and extended.resource_claim_name:
        claims[extended.resource_claim_name] = True
    return claims


def _named_claims(item: PodObject) -> dict[str, tuple[str, bool]]:
    """Return the same by the names that the pod's containers use."""
    if item.spec.resource_claims == _NULL:
        return {}
    try:
        used = _pod_claims.decode(item.spec.resource_claims) or ()
        made = _pod_claims.decode(item.status.resource_claim_statuses) or ()
    except msgspec.MsgspecError:
        return {}  # the API server admits no such pod
    names = {each.name: each.resource_claim_name for each in made}
    claims: dict[str, tuple[str, bool]] = {}
    for each in used:
        if each.resource_claim_name:
            claims[each.name] = each.resource_claim_name, False
        elif name := names.get(each.name):
            claims[each.name] = name, True
    return claims


_managed: Final = msgspec.json.Decoder(list[ManagedFields] | None)


def to_pod(item: PodObject) -> Pod:
    meta = item.metadata
    is_static = _MIRROR in (meta.annotations or {})
    return Pod(
        uid=_uid(meta),
        namespace=meta.namespace,
        name=meta.name,
        node=item.spec.node_name,
        annotations=_annotations(meta.annotations or {}),
        containers=tuple(_containers(item)),
        has_ended=item.status.phase in ENDED,
        is_ending=meta.deletion_timestamp is not None,
        has_controller=not is_static and any(o.controller for o in meta.owner_references or ()),
        is_static=is_static,
        has_host_pids=bool(item.spec.host_pid),
        claims=claims_of(item),
    )


def to_dated_pod(item: DatedPod) -> Pod:
    return replace(to_pod(item), created=item.metadata.creation_timestamp)


def _annotations(written: Mapping[str, str]) -> dict[str, str]:
    """Keep our annotations; replace too long ones by a text that no reader accepts."""
    ours = sorted((key, text) for key, text in written.items() if key.startswith(_OURS))
    kept = {}
    left = KEPT_CHARACTERS
    for key, text in ours[:_MAX_KEYS]:
        kept[key] = text if len(text) <= left else LEFT_OUT
        left -= len(kept[key])
    return kept


def _uid(meta: Metadata) -> PodUid:
    """Return the uid by which the kubelet knows a pod.

    A static pod's object at the API server is a mirror with another uid; the kubelet uses the hash
    of the file (kubelet pkg/kubelet/config/common.go, types/pod_update.go).
    """
    annotations = meta.annotations or {}
    of_file = annotations.get(_HASH) or annotations[_MIRROR] if _MIRROR in annotations else ""
    return PodUid(of_file if 0 < len(of_file) <= _MAX_UID else meta.uid)


def is_nominated_by_us(meta: Metadata) -> bool:
    """Return whether Allotment's scheduler wrote the pod's nomination, and no other program."""
    if NOMINATOR.encode() not in bytes(meta.managed_fields):
        return False
    return any(entry.manager == NOMINATOR for entry in _managed.decode(meta.managed_fields) or ())


def containers_of(item: PodObject) -> Iterator[tuple[ContainerSpec, ContainerKind]]:
    """The init containers and sidecars, then the regular ones."""
    for spec in item.spec.init_containers or ():
        is_sidecar = spec.restart_policy == "Always"
        yield spec, ContainerKind.SIDECAR if is_sidecar else ContainerKind.INIT
    for spec in item.spec.containers or ():
        yield spec, ContainerKind.REGULAR


def limits_of(spec: ContainerSpec) -> Mapping[str, str]:
    return (spec.resources and spec.resources.limits) or {}


def _containers(item: PodObject) -> Iterator[Container]:
    status = {container.name: container for container in item.status.container_statuses or ()}
    status |= {container.name: container for container in item.status.init_container_statuses or ()}
    claims = _named_claims(item)
    for spec, kind in containers_of(item):
        seen = status.get(spec.name)
        yield Container(
            name=spec.name,
            kind=kind,
            resources=_resources(limits_of(spec)),
            has_finished=_has_finished(item, spec, kind, seen),
            is_started=seen is not None and _is_started(seen),
            is_running=bool(seen and seen.state and seen.state.running is not None),
            restarts=seen.restart_count if seen else 0,
            runtime_id=seen.container_id.partition("://")[2] if seen else "",
            is_privileged=bool(spec.security_context and spec.security_context.privileged),
            claims=tuple(
                UsedClaim(claims[each.name][0], each.request)
                for each in (spec.resources and spec.resources.claims) or ()
                if each.name in claims
            ),
        )


def _resources(limits: Mapping[str, str]) -> dict[str, int]:
    amounts_by_name = {}
    for name, quantity in limits.items():
        domain, slash, _ = name.partition("/")
        if not slash or domain == "kubernetes.io" or domain.endswith(".kubernetes.io"):
            continue
        try:
            amounts_by_name[name] = parse_whole(quantity)
        except QuantityError:
            # Valid for the API server, without meaning here.
            continue
    return amounts_by_name


def _is_started(status: ContainerStatus) -> bool:
    states = [state for state in (status.state, status.last_state) if state is not None]
    return status.restart_count > 0 or any(
        state.running is not None or state.terminated is not None for state in states
    )


def _has_finished(
    item: PodObject, spec: ContainerSpec, kind: ContainerKind, status: ContainerStatus | None
) -> bool:
    """Return whether the kubelet will certainly never start it again."""
    if item.status.phase in ENDED:
        return True
    ended = status.state.terminated if status and status.state else None
    if ended is None:
        return False
    if item.metadata.deletion_timestamp is not None:
        return True  # a pod that is being deleted restarts no container
    if kind is ContainerKind.SIDECAR or spec.restart_policy_rules:
        return False
    if kind is ContainerKind.INIT:
        return ended.exit_code == 0
    policy = spec.restart_policy or item.spec.restart_policy
    return policy == "Never" or (policy == "OnFailure" and ended.exit_code == 0)


# ---- nodes ---------------------------------------------------------------------------------------


class NodeSystemInfo(Narrow):
    """`status.nodeInfo`."""

    container_runtime_version: str = ""
    """`containerd://2.3.7`."""
    kubelet_version: str = ""


class NodeConditionObject(Narrow):
    """An entry of `status.conditions`."""

    type: str
    status: str
    reason: str = ""
    message: str = ""


class NodeAddress(Narrow):
    """An entry of a node's `status.addresses`."""

    type: str = ""
    address: str = ""


class NodeStatus(Narrow):
    """A node's `status`."""

    capacity: dict[str, str] | None = None
    allocatable: dict[str, str] | None = None
    conditions: list[NodeConditionObject] | None = None
    node_info: NodeSystemInfo = msgspec.field(default_factory=NodeSystemInfo)
    addresses: list[NodeAddress] | None = None


class NodeObject(Narrow):
    """A node."""

    metadata: Metadata
    status: NodeStatus = msgspec.field(default_factory=NodeStatus)


# ---- config maps ---------------------------------------------------------------------------------


class ConfigMapObject(Narrow):
    """A config map, without `binaryData`."""

    metadata: Metadata
    data: dict[str, str] | None = None


class HostAmounts(NamedTuple):
    """Thousandths of a core, and bytes."""

    cpu_milli: int = 0
    memory_bytes: int = 0

    def __add__(self, other: "HostAmounts") -> "HostAmounts":  # type: ignore[override]
        """Return both together."""
        return HostAmounts(self[0] + other[0], self[1] + other[1])

    def __or__(self, other: "HostAmounts") -> "HostAmounts":
        """Return the larger of each amount."""
        return HostAmounts(max(self[0], other[0]), max(self[1], other[1]))


_NONE: Final = HostAmounts()
_MILLI: Final = 1000


def amounts(written: Mapping[str, str] | None) -> HostAmounts:
    """Read CPU and memory from a list of resources; invalid amounts count as none."""
    if not written:
        return _NONE
    return HostAmounts(
        _parsed(written.get("cpu", ""), _MILLI), _parsed(written.get("memory", ""), 1)
    )


def requests_of(pod: PodObject) -> HostAmounts:
    spec = pod.spec
    members = _members(pod)
    if spec.init_containers:
        whole = most_of(phases(list(members)), _NONE)
    else:  # of most pods, at each of their changes
        whole = sum((amount for amount, _ in members), _NONE)
    if spec.resources is not None and spec.resources.requests:
        of_pod = amounts(spec.resources.requests)
        whole = HostAmounts(
            of_pod.cpu_milli if "cpu" in spec.resources.requests else whole.cpu_milli,
            of_pod.memory_bytes if "memory" in spec.resources.requests else whole.memory_bytes,
        )
    return whole + amounts(spec.overhead) if spec.overhead else whole


def _members(pod: PodObject) -> Iterator[Member[HostAmounts]]:
    lists = (pod.status.init_container_statuses, pod.status.container_statuses)
    init, regular = ({status.name: status for status in listed or ()} for listed in lists)
    for place, (spec, kind) in enumerate(containers_of(pod)):
        if kind is ContainerKind.REGULAR:
            yield _effective(spec, regular.get(spec.name)), RunTime(spec.name, kind, None)
        else:
            # Only containers that restart can be resized.
            status = init.get(spec.name) if kind is ContainerKind.SIDECAR else None
            yield _effective(spec, status), RunTime(spec.name, kind, place)


def _effective(spec: ContainerSpec, status: ContainerStatus | None) -> HostAmounts:
    asked = amounts(spec.resources.requests) if spec.resources else _NONE
    if status is None or status.resources is None:
        return asked
    return asked | amounts(status.resources.requests) | amounts(status.allocated_resources)


@lru_cache(maxsize=4096)
def _parsed(text: str, parts: int) -> int:
    if not text:
        return 0
    try:
        return parse_rounded_up(text, parts=parts)
    except QuantityError:
        # Valid for the API server: for example a negative allocatable amount.
        return 0

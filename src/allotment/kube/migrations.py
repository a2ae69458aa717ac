# SPDX-License-Identifier: Apache-2.0
"""What a cluster has of other GPU systems, read once for `allot migrate` (docs/designs/migrate.md).

Narrow, like `objects`. Which programs belong to which system is not known here.
"""

import asyncio
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final, TypeVar

import msgspec

from allotment.kube.clients import Api
from allotment.kube.errors import DeniedError, ObjectMissingError
from allotment.kube.live import listed
from allotment.kube.objects import ConfigMapObject, Metadata, Narrow
from allotment.model.errors import AllotError
from allotment.model.structs import prepared

AGENT_LABEL: Final = "allotment.dev/agent"
"""`true` on nodes of the agent, while its DaemonSet selects nodes by it."""
MOVED_LABEL: Final = "allotment.dev/moved-from"
"""The system that a node was taken from: the DaemonSets of that system avoid the node."""
RECORD: Final = "allotment.dev/migration"
"""The annotation of a node with its `MoveRecord`."""
DAEMON_SETS: Final = "/apis/apps/v1/daemonsets"
CLAIMS: Final = "/apis/resource.k8s.io/v1/resourceclaims"

_T = TypeVar("_T")


# ---- objects -------------------------------------------------------------------------------------


class _Resources(Narrow):
    limits: dict[str, str] | None = None


class _VariableSource(Narrow):
    field_ref: dict[str, Any] | None = None
    resource_field_ref: dict[str, Any] | None = None


class _Variable(Narrow):
    name: str = ""
    value: str | None = None
    value_from: _VariableSource | None = None


class _Container(Narrow):
    name: str = ""
    image: str = ""
    command: list[str] | None = None
    args: list[str] | None = None
    env: list[_Variable] | None = None
    env_from: list[dict[str, Any]] | None = None
    resources: _Resources | None = None

    @property
    def options(self) -> list[tuple[str, str]]:
        """Its flags and variables with their values: `--memory-unit`, `MiB`."""
        variables = [(each.name, each.value) for each in self.env or () if each.value is not None]
        # The entry point of Tencent's image takes flags from this variable.
        more = [value for name, value in variables if name == "EXTRA_FLAGS"]
        texts = (*(self.command or ()), *(self.args or ()), *more)
        words = [word for text in texts for word in text.split()]
        flags = []
        for word, following in zip_longest(words, words[1:], fillvalue="-"):
            name, mark, value = word.partition("=")
            if not name.startswith("-"):
                continue
            if not mark and not following.startswith("-"):
                value = following
            # Go's flags may have one dash.
            flags.append((f"--{name.lstrip('-')}", value))
        return [*flags, *(each for each in variables if each[0] != "EXTRA_FLAGS")]

    @property
    def referred(self) -> list[str]:
        """Its variables whose values are in ConfigMaps or Secrets."""
        sources = [(each.name, each.value_from) for each in self.env or ()]
        names = [
            name
            for name, source in sources
            if source and not source.field_ref and not source.resource_field_ref
        ]
        return [*names, *(["envFrom"] if self.env_from else ())]


class _ConfigMapSource(Narrow):
    name: str = ""


class _Volume(Narrow):
    config_map: _ConfigMapSource | None = None


class _PodSpec(Narrow):
    node_name: str = ""
    containers: list[_Container] | None = None
    init_containers: list[_Container] | None = None
    node_selector: dict[str, str] | None = None
    affinity: dict[str, Any] | None = None
    volumes: list[_Volume] | None = None
    runtime_class_name: str | None = None

    @property
    def all_containers(self) -> tuple[_Container, ...]:
        return (*(self.init_containers or ()), *(self.containers or ()))


class _Template(Narrow):
    spec: _PodSpec = msgspec.field(default_factory=_PodSpec)


class _Selector(Narrow):
    match_labels: dict[str, str] | None = None


class _WorkloadSpec(Narrow):
    selector: _Selector = msgspec.field(default_factory=_Selector)
    template: _Template = msgspec.field(default_factory=_Template)


class WorkloadObject(Narrow):
    """A DaemonSet or a Deployment: its programs, and the nodes that it selects."""

    metadata: Metadata
    spec: _WorkloadSpec = msgspec.field(default_factory=_WorkloadSpec)

    @property
    def pod(self) -> _PodSpec:
        return self.spec.template.spec

    @property
    def words(self) -> str:
        """Its name and images, by which a system's programs are found."""
        return " ".join((self.metadata.name, *(each.image for each in self.pod.all_containers)))

    def __str__(self) -> str:
        return f"{self.metadata.namespace}/{self.metadata.name}"


class _Taint(Narrow):
    key: str = ""
    value: str = ""
    effect: str = ""


class _NodeSpec(Narrow):
    taints: list[_Taint] | None = None
    unschedulable: bool | None = None


class _NodeStatus(Narrow):
    capacity: dict[str, str] | None = None


class MovedNode(Narrow):
    """A node: what selects its plugins, and its record."""

    metadata: Metadata
    spec: _NodeSpec = msgspec.field(default_factory=_NodeSpec)
    status: _NodeStatus = msgspec.field(default_factory=_NodeStatus)

    @property
    def labels(self) -> Mapping[str, str]:
        return self.metadata.labels or {}

    @property
    def record(self) -> "MoveRecord | None":
        """Raises `AllotError` if it is unreadable."""
        text = (self.metadata.annotations or {}).get(RECORD)
        if text is None:
            return None
        try:
            return msgspec.json.decode(text, type=prepared(MoveRecord))
        except msgspec.MsgspecError as error:
            raise AllotError(
                f"node {self.metadata.name}: annotation {RECORD} is unreadable: {error}",
                hint="put its labels right by hand, and remove the annotation",
            ) from error


class _Condition(Narrow):
    type: str = ""
    status: str = ""


class _PodStatus(Narrow):
    phase: str = ""
    conditions: list[_Condition] | None = None


class NeighbourPod(Narrow):
    """A pod on a node that moves."""

    metadata: Metadata
    spec: _PodSpec = msgspec.field(default_factory=_PodSpec)
    status: _PodStatus = msgspec.field(default_factory=_PodStatus)

    @property
    def is_ready(self) -> bool:
        conditions = self.status.conditions or ()
        return any(each.type == "Ready" and each.status == "True" for each in conditions)

    @property
    def has_ended(self) -> bool:
        return self.status.phase in {"Succeeded", "Failed"}

    @property
    def asks(self) -> frozenset[str]:
        """The resources in its limits."""
        return frozenset(
            name
            for each in self.spec.all_containers
            for name in (each.resources.limits if each.resources else None) or ()
        )

    def is_of(self, workload: WorkloadObject) -> bool:
        wanted = (workload.spec.selector.match_labels or {}).items()
        return (
            bool(wanted)
            and self.metadata.namespace == workload.metadata.namespace
            and wanted <= (self.metadata.labels or {}).items()
        )

    def __str__(self) -> str:
        return f"{self.metadata.namespace}/{self.metadata.name}"


class _Result(Narrow):
    driver: str = ""
    pool: str = ""


class _Devices(Narrow):
    results: list[_Result] | None = None


class _Allocation(Narrow):
    devices: _Devices = msgspec.field(default_factory=_Devices)


class _Consumer(Narrow):
    name: str = ""
    resource: str = ""


class _ClaimStatus(Narrow):
    allocation: _Allocation | None = None
    reserved_for: list[_Consumer] | None = None


class UsedClaimObject(Narrow):
    """A ResourceClaim: whose devices it has, and for which pods."""

    metadata: Metadata
    status: _ClaimStatus = msgspec.field(default_factory=_ClaimStatus)

    def is_on(self, node: str, *, driver: str) -> bool:
        """Return whether it has a device of a node, whose pool has the node's name."""
        allocation = self.status.allocation
        results = (allocation.devices.results if allocation else None) or ()
        return any((each.driver, each.pool) == (driver, node) for each in results)

    @property
    def pods(self) -> tuple[str, ...]:
        """The pods that use it."""
        users = self.status.reserved_for or ()
        space = self.metadata.namespace
        return tuple(f"{space}/{each.name}" for each in users if each.resource == "pods")


class NamedObject(Narrow):
    """An object whose name is enough."""

    metadata: Metadata


class MoveRecord(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What a node was before it moved, and how far it is: written with the first change."""

    system: str
    labels: Mapping[str, str | None]
    """The old values of the labels that were changed; None: it had no such label."""
    daemon_sets: tuple[str, ...]
    """`namespace/name` of those with a pod on the node."""
    cordoned: bool
    """It was cordoned for the move, and not before."""
    step: str
    """`leaving`, `arriving`, `moved` or `returning`."""


class Departure(msgspec.Struct, frozen=True, kw_only=True):
    """How one node leaves its system."""

    node: str
    system: str
    labels: Mapping[str, str | None]
    """Set or removed (None): they take the plugins off, and select a configuration."""
    annotations: tuple[str, ...]
    """By which the system's scheduler sends pods to the node: removed when the plugins are gone."""
    daemon_sets: tuple[str, ...]
    resources: str
    """Pattern of the resources that the system's pods ask for."""
    claims_of: str = ""
    """The system's driver of ResourceClaims."""
    ends_pods: str = ""
    """Why running pods of the system end or fail when its plugins leave; empty: they run on."""


class MigrationEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """What a cluster has of GPU systems, at one moment."""

    nodes: Sequence[MovedNode]
    pods: Sequence[NeighbourPod]
    daemon_sets: Sequence[WorkloadObject]
    deployments: Sequence[WorkloadObject]
    config_maps: Sequence[ConfigMapObject]
    webhooks: tuple[str, ...] = ()
    runtime_classes: tuple[str, ...] = ()
    device_classes: tuple[str, ...] = ()
    claims: Sequence[UsedClaimObject] | None = ()
    """None: this client may not read them."""
    unread: tuple[str, ...] = ()
    """Why parts are missing."""


async def read_evidence(api: Api) -> MigrationEvidence:
    """Raises `KubeError` for nodes, pods and DaemonSets; other parts may be missing."""
    unread: list[str] = []

    async def optional(path: str, kind: type[_T]) -> list[_T] | None:
        what = path.rpartition("/")[2]
        try:
            return await listed(api, path, kind, asked=f"list {what}")
        except ObjectMissingError:
            return []  # an API that this server does not have
        except DeniedError as error:
            unread.append(error.message)
            return None

    async def names(path: str) -> tuple[str, ...]:
        return tuple(each.metadata.name for each in await optional(path, NamedObject) or ())

    nodes, pods, daemon_sets = await asyncio.gather(
        listed(api, "/api/v1/nodes", MovedNode, asked="list nodes"),
        listed(api, "/api/v1/pods", NeighbourPod, asked="list pods"),
        listed(api, DAEMON_SETS, WorkloadObject, asked="list daemonsets"),
    )
    return MigrationEvidence(
        nodes=sorted(nodes, key=lambda node: node.metadata.name),
        pods=pods,
        daemon_sets=daemon_sets,
        deployments=await optional("/apis/apps/v1/deployments", WorkloadObject) or (),
        config_maps=await optional("/api/v1/configmaps", ConfigMapObject) or (),
        webhooks=await names("/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"),
        runtime_classes=await names("/apis/node.k8s.io/v1/runtimeclasses"),
        device_classes=await names("/apis/resource.k8s.io/v1/deviceclasses"),
        claims=await optional(CLAIMS, UsedClaimObject),
        unread=tuple(unread),
    )

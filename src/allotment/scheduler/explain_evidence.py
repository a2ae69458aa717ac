# SPDX-License-Identifier: Apache-2.0
"""Reads a pod, the cluster and the quotas for `allot explain`."""

from collections.abc import Collection
from difflib import get_close_matches
from enum import StrEnum
from typing import Final

import msgspec

from allotment.dialects.foreign.kubeshare import GROUP
from allotment.dialects.foreign.settings import DialectSettings, foreign_dialects
from allotment.kube.clients import Api
from allotment.kube.errors import DeniedError, KubeError, ObjectMissingError
from allotment.kube.live import LiveCluster, read_cluster
from allotment.kube.objects import DatedPod, ObjectList, PodObject, PodStatus
from allotment.kube.quotas import QuotaObject, quota_of
from allotment.kube.sharepods import MANIFEST
from allotment.model.clusters import NamespaceQuota, NodeDevice, PlacedDevice
from allotment.model.pods import ForeignPod
from allotment.placement.explain import Refusal, RefusalGroup
from allotment.scheduler.admission.pod_patch import read_pod

_NEAR: Final = 3


class PodCondition(msgspec.Struct, kw_only=True, rename="camel"):
    """An entry of a pod's `status.conditions`."""

    type: str
    status: str = ""
    reason: str = ""
    message: str = ""
    last_transition_time: str | None = None


class _Status(PodStatus):
    """A pod's status with its conditions."""

    conditions: list[PodCondition] | None = None


class AskedPod(DatedPod):
    """The pod to explain."""

    status: _Status = msgspec.field(default_factory=_Status)


class _PodStatus(msgspec.Struct):
    """A SharePod's copy of its pod's status, or why it has no pod."""

    phase: str = ""
    message: str = ""


class _SharePodStatus(msgspec.Struct):
    pod_status: _PodStatus = msgspec.field(default_factory=_PodStatus, name="PodStatus")


class _SharePod(msgspec.Struct):
    status: _SharePodStatus = msgspec.field(default_factory=_SharePodStatus)


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """The data from the API server."""

    item: AskedPod
    foreign: ForeignPod
    """The same pod, undecoded for dialects."""
    cluster: LiveCluster
    quotas: tuple[NamespaceQuota, ...] = ()
    problems: tuple[str, ...] = ()
    """What could not be read."""
    settings: DialectSettings = msgspec.field(default=DialectSettings())
    """For dialects and quotas."""

    @property
    def condition(self) -> PodCondition | None:
        """What the scheduler last reported about the pod."""
        conditions = self.item.status.conditions or ()
        return next((each for each in conditions if each.type == "PodScheduled"), None)


_pod: Final = msgspec.json.Decoder(AskedPod)
_sharepod: Final = msgspec.json.Decoder(_SharePod)
_pods: Final = msgspec.json.Decoder(ObjectList[PodObject])
_quotas: Final = msgspec.json.Decoder(ObjectList[QuotaObject])


async def read_evidence(
    api: Api,
    namespace: str,
    name: str,
    *,
    settings: DialectSettings | None = None,
    systems: Collection[str] = (),
    cluster: LiveCluster | None = None,
) -> Evidence:
    """Read the pod, all nodes and pods (or take `cluster`), and the quotas of its namespace.

    `settings` are the scheduler's settings of dialects; None: the defaults. The running pods of
    `systems` count.

    Raises `KubeError`; `ObjectMissingError` for an unknown pod, with similar names.
    """
    path = f"/api/v1/namespaces/{namespace}/pods/{name}"
    try:
        body = await api.get(path, asked=f"read pod {namespace}/{name}")
    except ObjectMissingError as error:
        raise ObjectMissingError(
            f"there is no pod {namespace}/{name}",
            hint=await _near(api, namespace, name),
            status=error.status,
        ) from error
    try:
        item = _pod.decode(body)
    except msgspec.MsgspecError as error:
        raise KubeError(f"cannot read pod {namespace}/{name}: {error}") from error
    foreign = read_pod(body, namespace=namespace).pod
    dialect_settings = settings or DialectSettings()
    if cluster is None:
        dialects = foreign_dialects(dialect_settings)
        cluster = await read_cluster(api, dialects=dialects, systems=systems)
    problems = list(cluster.problems)
    quotas: tuple[NamespaceQuota, ...] = ()
    try:
        path = f"/api/v1/namespaces/{namespace}/resourcequotas"
        page = _quotas.decode(await api.get(path, asked="list resourcequotas"))
        quotas = tuple(quota_of(quota) for quota in page.items or ())
    except DeniedError as error:
        problems.append(f"quotas: {error.message}")
    return Evidence(
        item=item,
        foreign=foreign,
        cluster=cluster,
        quotas=quotas,
        problems=tuple(problems),
        settings=dialect_settings,
    )


async def _near(api: Api, namespace: str, name: str) -> str:
    """Return a hint: similar pod names, or a SharePod of this name."""
    hint = await _of_sharepod(api, namespace, name)
    if hint:
        return hint
    try:
        body = await api.get(f"/api/v1/namespaces/{namespace}/pods", asked="list pods")
        names = [pod.metadata.name for pod in _pods.decode(body).items or ()]
        close = [candidate for candidate in names if name in candidate][:_NEAR]
        close = close or get_close_matches(name, names, n=_NEAR)
        if close:
            return f"did you mean {' or '.join(f'{namespace}/{candidate}' for candidate in close)}?"
        params = {"fieldSelector": f"metadata.name={name}"}
        body = await api.get("/api/v1/pods", asked="list pods", params=params)
        namespaces = [item.metadata.namespace for item in _pods.decode(body).items or ()]
    except (KubeError, msgspec.MsgspecError):
        return f"`kubectl get pods --namespace {namespace}` lists its pods"
    if namespaces:
        return f"did you mean {' or '.join(f'{other}/{name}' for other in namespaces[:_NEAR])}?"
    if not names:
        return f"namespace {namespace} has no pods; `kubectl get pods -A` lists all"
    return f"`kubectl get pods --namespace {namespace}` lists its pods"


async def _of_sharepod(api: Api, namespace: str, name: str) -> str:
    """Return why a SharePod of this name has no pod; empty if unknown."""
    path = f"/apis/{GROUP}/v1/namespaces/{namespace}/sharepods/{name}"
    try:
        sharepod = _sharepod.decode(await api.get(path, asked=f"get sharepod {namespace}/{name}"))
    except (KubeError, msgspec.MsgspecError):
        return ""
    status = sharepod.status.pod_status
    if status.phase in {"Succeeded", "Failed"}:
        return f"SharePod {namespace}/{name} had a pod, which has ended ({status.phase})"
    if status.message:
        return f"SharePod {namespace}/{name} has no pod: {status.message}"
    return (
        f"SharePod {namespace}/{name} has no pod: check that an `allot scheduler` leads and that"
        f" {MANIFEST} is applied"
    )


class Standing(StrEnum):
    """A pod's progress."""

    PLACED = "placed"
    """On a node, with a placement."""
    BOUND = "bound"
    """On a node, without a placement: its agent chose its GPUs, or it has none."""
    PENDING = "pending"
    ENDED = "ended"


class Obstacles(StrEnum):
    """Reasons why a pod is not placed, apart from the GPUs' room."""

    REFUSED = "refused"
    """Its request is invalid."""
    UNTRANSLATED = "untranslated"
    SCHEDULER = "scheduler"
    QUOTA = "quota"
    NO_INVENTORY = "no-inventory"
    FOREIGN = "foreign"
    """Another system bound it."""
    UNPLACED = "unplaced"
    """It is on a node, and its placement is missing or invalid."""
    MISPLACED = "misplaced"
    """Its node changed after its devices were chosen."""
    DELETED = "deleted"
    RESIZE = "resize"
    """Its `allotment.dev/resize` is not in force."""
    NOMINATED = "nominated"
    """Other pods are being evicted for it."""
    KEPT = "kept"
    """Free room on a node is reserved for a pod of the same or higher priority."""


class PlacedPart(msgspec.Struct, frozen=True):
    """A container's part of one device."""

    placed: PlacedDevice
    device: NodeDevice | None = None
    """None if the node does not report this device."""


class ContainerSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A container that asks for GPUs, and its devices."""

    name: str
    kind: str
    text: str
    """Its request as text."""
    mode: str
    """Its mode; without devices, its preferred mode."""
    parts: tuple[PlacedPart, ...] = ()


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """All facts about a pod."""

    namespace: str
    name: str
    uid: str
    standing: Standing
    scheduler: str
    dialect: str = ""
    """The short name of its dialect; empty: Allotment's own, or none."""
    title: str = ""
    """The dialect's name in a sentence: `HAMi's`."""
    policies: tuple[str, ...] = ()
    """The policies that rank nodes, in order."""
    is_own_policy: bool = False
    """The policies are the pod's own."""
    containers: tuple[ContainerSummary, ...] = ()
    """Those with GPU requests; empty if none or if the request is invalid."""
    node: str = ""
    obstacles: tuple[Refusal, ...] = ()
    """Their reasons are `Obstacles`."""
    condition: PodCondition | None = None
    """The scheduler's last condition of a waiting pod."""
    nodes: int = 0
    """The number of nodes, including those without devices."""
    fitting: tuple[str, ...] = ()
    """Nodes that fit, best first, without the pod's own usage."""
    proposal: tuple[ContainerSummary, ...] = ()
    """Of a waiting pod: its devices on the best of these nodes."""
    refused: tuple[RefusalGroup, ...] = ()
    beyond: RefusalGroup | None = None
    """Of a waiting pod: why no node would fit even if all were empty and healthy, by the reason of
    most nodes; None if one would, or if unknown."""
    has_started: bool = False
    """A container that asks for GPUs runs or has run."""
    others: tuple[str, ...] = ()
    """Extended resources that Allotment does not place."""
    claims: tuple[str, ...] = ()
    """Names of its ResourceClaims, which kube-scheduler allocates."""

    @property
    def rank(self) -> int | None:
        """The rank of its node among those that fit, from 1; None if its node is not among them."""
        return self.fitting.index(self.node) + 1 if self.node in self.fitting else None

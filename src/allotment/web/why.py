# SPDX-License-Identifier: Apache-2.0
"""Why a pod waits, where a pod would go, and which pods would have to leave for it.

By the code of `allot explain pod` and of the scheduler's preemption, on the cluster as it was last
read. Nothing is written, and nothing is reserved.
"""

import asyncio
import threading
from typing import Any, Final

import msgspec

from allotment.dialects.own.annotations import MODE, MODELS
from allotment.dialects.own.registry import need_of
from allotment.kube.clients import Api
from allotment.kube.cluster_feed import to_cluster_pod
from allotment.kube.live import LiveCluster
from allotment.kube.objects import ObjectList
from allotment.kube.quotas import QuotaObject, quota_of
from allotment.model.clusters import ClusterPod, NamespaceQuota, PodNeed
from allotment.model.errors import UsageError
from allotment.model.pods import PodUid
from allotment.model.quantities import parse_bytes
from allotment.model.structs import replace
from allotment.scheduler.admission.pod_patch import read_pod
from allotment.scheduler.explain import Clusters, explained
from allotment.scheduler.explain_evidence import (
    AskedPod,
    Evidence,
    Explanation,
    PodCondition,
    Standing,
    read_evidence,
)
from allotment.scheduler.explain_start import PodStart, read_start
from allotment.scheduler.extender import wire
from allotment.scheduler.extender.preemption import Preemption

_NAME: Final = "what-if"
_quotas: Final = msgspec.json.Decoder(ObjectList[QuotaObject])
_pod: Final = msgspec.json.Decoder(AskedPod)
_victims: Final = msgspec.json.Decoder(wire.PreemptionResult)


class Leaver(msgspec.Struct, frozen=True):
    """A pod that would have to leave."""

    namespace: str
    name: str
    priority: int


class PodAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The explanation of a pod, and what would have to leave for it."""

    explanation: Explanation
    leaves_on: str = ""
    """The node with the least loss; empty: no pod has to leave, or it does not help."""
    leavers: tuple[Leaver, ...] = ()
    start: PodStart = msgspec.field(default=PodStart())
    """Where its start went, if it has a node."""


class AskedFor(msgspec.Struct, frozen=True, kw_only=True):
    """A pod that is not there: what it would ask for."""

    namespace: str = "default"
    gpus: int = 1
    memory: str = ""
    """Of each GPU, like `20Gi`; empty: all of it, or as the time."""
    compute: int = 0
    """Percent of each GPU; 0: none is asked for."""
    models: str = ""
    mode: str = ""
    priority: int = 0

    def manifest(self) -> dict[str, Any]:
        """Return the pod as it would be created. Raises `UsageError`.

        A pod's resources are sums over its GPUs.
        """
        limits = {"allotment.dev/gpu": str(self.gpus)}
        if self.memory:
            limits["allotment.dev/gpu-memory"] = str(parse_bytes(self.memory) * self.gpus)
        if self.compute:
            limits["allotment.dev/gpu-compute"] = str(self.compute * self.gpus)
        annotations = {MODELS: self.models, MODE: self.mode}
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": _NAME,
                "namespace": self.namespace,
                "annotations": {key: text for key, text in annotations.items() if text},
            },
            "spec": {
                "containers": [{"name": "main", "resources": {"limits": limits}}],
            },
        }


class Questions:
    """Answers questions about one reading of a cluster, one at a time."""

    def __init__(self, api: Api, live: LiveCluster) -> None:
        self._api = api
        self._live = live
        self._clusters = Clusters(live)
        self._lock = threading.Lock()
        """Held by a thread that answers: it goes on after its request has timed out."""

    def _answer(self, evidence: Evidence) -> PodAnswer:
        with self._lock:
            return _answer(evidence, self._clusters)

    async def why(self, namespace: str, name: str) -> PodAnswer:
        """Explain a pod. Raises `KubeError`; `ObjectMissingError` for an unknown one."""
        evidence = await read_evidence(self._api, namespace, name, cluster=self._live)
        answer = await asyncio.to_thread(self._answer, evidence)
        return replace(answer, start=await read_start(self._api, evidence.item))

    async def what_if(self, asked: AskedFor) -> PodAnswer:
        """Explain a pod as if it had just been created. Raises `UsageError`, `KubeError`."""
        path = f"/api/v1/namespaces/{asked.namespace}/resourcequotas"
        page = _quotas.decode(await self._api.get(path, asked="list resourcequotas"))
        quotas = tuple(quota_of(quota) for quota in page.items or ())
        return await asyncio.to_thread(lambda: self._answer(_made_up(asked, self._live, quotas)))


def _made_up(asked: AskedFor, live: LiveCluster, quotas: tuple[NamespaceQuota, ...]) -> Evidence:
    document = asked.manifest()
    document["metadata"]["uid"] = _NAME
    document["spec"]["priority"] = asked.priority
    schedulers = [pod.scheduler for pod in live.pods if pod.booking and pod.booking.containers]
    document["spec"]["schedulerName"] = next(iter(schedulers), "")
    body = msgspec.json.encode(document)
    item = _pod.decode(body)
    item.status.conditions = [PodCondition(type="PodScheduled")]
    # What the webhook would refuse is refused here.
    need_of(to_cluster_pod(item))
    return Evidence(
        item=item,
        foreign=read_pod(body, namespace=asked.namespace).pod,
        cluster=live,
        quotas=quotas,
    )


def _answer(evidence: Evidence, clusters: Clusters) -> PodAnswer:
    has_node = bool(evidence.item.spec.node_name)
    explanation = explained(evidence, clusters=None if has_node else clusters)
    answer = PodAnswer(explanation=explanation)
    if explanation.standing is not Standing.PENDING or explanation.fitting:
        return answer
    pod = to_cluster_pod(evidence.item)
    try:
        need = need_of(pod)
    except UsageError:
        return answer  # an obstacle of the explanation
    return _with_leavers(answer, evidence, pod, need, clusters) if need.containers else answer


def _with_leavers(
    answer: PodAnswer, evidence: Evidence, pod: ClusterPod, need: PodNeed, clusters: Clusters
) -> PodAnswer:
    live = evidence.cluster
    pods = {
        each.need.uid: ClusterPod(
            uid=each.need.uid,
            namespace=each.need.namespace,
            name=each.need.name,
            node=each.booking.node,
            priority=each.priority,
            is_ending=each.is_ending,
        )
        for each in live.pods
        if each.booking is not None
    }
    lower = {each.node for each in pods.values() if each.priority < need.priority}
    lower &= {node.name for node in live.nodes}
    if not lower:
        return answer
    pods[pod.uid] = pod
    cluster = clusters.filled
    kept = cluster.kept(need.uid)
    chooser = Preemption(cluster, pods=lambda uid: pods.get(PodUid(uid)), echo_s=0)
    asked = wire.PreemptionArguments(
        pod=evidence.item,
        node_name_to_meta_victims={name: wire.MetaVictims(pods=[]) for name in lower},
    )
    try:
        victims = _victims.decode(asyncio.run(chooser.preempt(wire.encode(asked))))
    finally:  # it reserves what it found
        cluster.keep_no_more(need.uid)
        if kept is not None:
            cluster.keep(need, kept)
    for node, chosen in victims.node_name_to_meta_victims.items():
        leavers = [pods[PodUid(each.uid)] for each in chosen.pods or ()]
        return msgspec.structs.replace(
            answer,
            leaves_on=node,
            leavers=tuple(Leaver(each.namespace, each.name, each.priority) for each in leavers),
        )
    return answer

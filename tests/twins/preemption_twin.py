# SPDX-License-Identifier: Apache-2.0
"""Pods of which some are to end for others: the real cluster, book and keeper, by hand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from scheduler_twin import cluster_pod, node, pod_json

from allotment.dialects.own.registry import need_of
from allotment.kube.quotas import Budget, against
from allotment.model.clusters import ClusterPod, PodBooking, Protected
from allotment.model.structs import replace
from allotment.scheduler.core.book import BindOrder, Book
from allotment.scheduler.core.cluster_events import ClusterEventHandler
from allotment.scheduler.core.nominations import NominatedCluster
from allotment.scheduler.core.quota import QuotaBook
from allotment.scheduler.core.reservations import BookSettings
from allotment.scheduler.extender.preemption import Preemption

WHOLE = {"allotment.dev/gpu": "1"}
TENTH = {"allotment.dev/gpu": "1", "allotment.dev/gpu-memory": "8Gi"}


class Scene:
    """Nodes of the same GPUs, the book, the keeper that tells it, and the fourth question."""

    def __init__(self, nodes: dict[str, int], *, leads: bool = True) -> None:
        self.now = 10.0
        self.leads = leads
        self.cluster = NominatedCluster(node_policies=("binpack",), device_policies=("binpack",))
        self.book = Book(self.cluster, settings=BookSettings(candidates=1))
        self.pods: dict[str, ClusterPod] = {}
        self.quotas = QuotaBook()
        quotas = self.quotas
        self.budgets: list[Budget] = []
        self.said: dict[str, int] = {}
        """By node, how many victims of the last answer go against a budget."""
        self.preemption = Preemption(
            self.cluster,
            pods=self.pods.get,
            quotas=quotas,
            budgets=self,
            leads=lambda: self.leads,
            clock=lambda: self.now,
        )
        self.keeper = ClusterEventHandler(
            self.book,
            quotas,
            nominations=self.preemption.nominations,
            clock=lambda: self.now,
        )
        for name, devices in nodes.items():
            self.keeper.node_put(node(name, devices))

    def run(self, name: str, where: str, *, device: int = 0, **options: Any) -> bool:  # noqa: ANN401 - of the pod
        """A pod that is bound, on that device of its node; False: there is no room for it."""
        annotations = {"allotment.dev/uuids": f"GPU-{where}{device}"}
        pod = cluster_pod(name, annotations=annotations, **options)
        placed = self.cluster.place(replace(need_of(pod), priority=1 << 30), where)
        if isinstance(placed, PodBooking):
            self.tell(replace(pod, node=where, booking=placed, version=""))
        return isinstance(placed, PodBooking)

    def wait(self, name: str, **options: Any) -> ClusterPod:  # noqa: ANN401 - of the pod
        """A pod that waits."""
        pod = cluster_pod(name, **options)
        self.tell(pod)
        return pod

    def tell(self, pod: ClusterPod) -> None:
        self.pods[pod.uid] = pod
        self.keeper.pod_put(pod)

    def change(self, name: str, **changes: Any) -> None:  # noqa: ANN401 - of the pod
        self.tell(replace(self.pods[f"uid-{name}"], **changes))

    def end(self, name: str) -> None:
        self.pods.pop(f"uid-{name}")
        self.keeper.pod_gone(cluster_pod(name).uid)

    def against(self, pods: Sequence[Protected]) -> tuple[bool, ...]:
        """As whoever follows the budgets says it."""
        return against(pods, self.budgets)

    def preempt(
        self, name: str, victims: dict[str, Sequence[str]], *, sent: int = 0
    ) -> dict[str, list[str]]:
        """Ask which pods are to end; by kube-scheduler's count, `sent` go against a budget."""
        chosen = {
            where: {"Pods": [{"UID": f"uid-{each}"} for each in names], "NumPDBViolations": sent}
            for where, names in victims.items()
        }
        body = {"Pod": pod_json(name), "NodeNameToMetaVictims": chosen}
        answer = asyncio.run(self.preemption.preempt(json.dumps(body).encode()))
        found = json.loads(answer)["NodeNameToMetaVictims"]
        self.said = {where: each["NumPDBViolations"] for where, each in found.items()}
        return {
            where: [pod["UID"].removeprefix("uid-") for pod in each["Pods"]]
            for where, each in found.items()
        }

    def tick(self, after_s: float = 0.0) -> None:
        self.now += after_s
        asyncio.run(self.preemption.tick())

    def filter(self, name: str) -> str:
        """The node that a pod would go to; empty: none."""
        pod = self.pods[f"uid-{name}"]
        names = list(self.cluster.arrays.row)
        best = self.book.filter(need_of(pod), names, now=self.now, version=pod.version).best
        return best[0] if best else ""

    def bind(self, name: str, where: str) -> str:
        """Bind as kube-scheduler would; the GPU that the pod got, or empty."""
        pod = self.pods[f"uid-{name}"]
        order = self.book.begin_bind(need_of(pod), where, now=self.now, version=pod.version)
        if not isinstance(order, BindOrder):
            return ""
        self.book.bound(order.booking, now=self.now)
        self.tell(replace(pod, node=where, booking=order.booking, version="", nominated_node=""))
        return order.booking.containers[0].devices[0].uuid

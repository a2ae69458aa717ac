# SPDX-License-Identifier: Apache-2.0
"""A scheduler with an API server, over nodes whose GPUs can be cut; and the one that comes next."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from mig_profiles import profiles
from scheduler_twin import GIB, Bindery, Told, cluster_pod_of, pod_json

from allotment.dialects.own.placement import PLACEMENT, read_booking
from allotment.dialects.own.registry import NeedSettings
from allotment.model.clusters import ClusterPod, NodeDevice, NodeInventory, NodeMig
from allotment.model.structs import replace
from allotment.placement.cluster.cluster import Cluster
from allotment.scheduler.core.book import Book
from allotment.scheduler.core.quota import QuotaBook
from allotment.scheduler.core.reservations import BookSettings
from allotment.scheduler.extender.binder import Binder
from allotment.scheduler.extender.extender import Extender

MODEL = "H100-80GB"
PROFILES = profiles(MODEL)
GPU, MEMORY = "allotment.dev/gpu", "allotment.dev/gpu-memory"


def cut(name: str, devices: int = 1, *modes: str, **mig: Any) -> NodeInventory:  # noqa: ANN401
    """A node whose GPUs are cut into slices, among other modes."""
    return NodeInventory(
        name=name,
        devices=tuple(
            NodeDevice(
                uuid=f"GPU-{name}{place}",
                model="NVIDIA H100 80GB HBM3",
                memory_bytes=79 * GIB,
                index=place,
                modes=modes or ("mig",),
                mig=NodeMig(profiles=PROFILES, **mig),
            )
            for place in range(devices)
        ),
        cpu_milli=64_000,
        memory_bytes=512 * GIB,
    )


def asking(gpu: int = 1, memory: str = "") -> dict[str, str]:
    return {GPU: str(gpu), **({MEMORY: memory} if memory else {})}


class Office:
    """A scheduler with an API server."""

    def __init__(
        self,
        *nodes: NodeInventory,
        needs: NeedSettings | None = None,
        bindery: Bindery | None = None,
        quotas: QuotaBook | None = None,
    ) -> None:
        self.now = 10.0
        self.nodes = nodes
        self.needs = needs or NeedSettings()
        self.book = Book(
            Cluster(node_policies=("binpack",), device_policies=("binpack",)),
            settings=BookSettings(candidates=3, needs=self.needs),
            quotas=quotas,
        )
        for each in nodes:
            self.book.node_put(each)
        self.bindery = bindery or Bindery()
        self.told = Told()
        self.pods: dict[str, ClusterPod] = {}
        self.extender = Extender(
            self.book,
            Binder(self.book, self.bindery, clock=lambda: self.now),
            observer=self.told,
            pods=self.pods.get,
            clock=lambda: self.now,
        )

    def schedule(self, name: str, limits: dict[str, str], **annotations: str) -> str:
        """Let a pod come, and be placed; return what keeps it, if anything does."""
        written = {
            f"allotment.dev/{key.replace('_', '-')}": text for key, text in annotations.items()
        }
        return self.schedule_pod(pod_json(name, limits=limits, annotations=written))

    def schedule_pod(self, pod: dict[str, Any]) -> str:
        """The same for a pod as the API has it."""
        name = pod["metadata"]["name"]
        heard = cluster_pod_of(pod)
        self.pods[heard.uid] = heard
        self.bindery.add(heard)
        body = {"Pod": pod, "Nodes": None, "NodeNames": [each.name for each in self.nodes]}
        answer = json.loads(self.extender.filter(json.dumps(body).encode()))
        best = answer.get("NodeNames") or []
        if not best:
            return self.told.refusals[-1]
        args = {"PodName": name, "PodNamespace": "ml", "PodUID": heard.uid, "Node": best[0]}
        answered = json.loads(asyncio.run(self.extender.bind(json.dumps(args).encode())))
        if answered["Error"]:
            return str(answered["Error"])
        bound = self.bindery.pods[heard.uid]
        self.pods[heard.uid] = bound
        self.book.pod_put(bound, now=self.now)
        return ""

    def placement(self, name: str) -> dict[str, Any]:
        binding = next(each for each in self.bindery.asked if each.name == name)
        found = json.loads(binding.annotations[PLACEMENT])
        return dict(found["containers"]["main"])

    def end(self, name: str) -> None:
        uid = self.pods.pop(f"uid-{name}").uid
        self.book.pod_gone(uid)

    def next_one(self) -> Office:
        """Return the scheduler that starts after this one, which knows what is on pods alone."""
        after = Office(*self.nodes, needs=self.needs, bindery=self.bindery)
        written = {each.uid: each for each in self.bindery.asked}
        for uid, pod in self.pods.items():
            binding = written.get(pod.uid)
            if binding is not None:
                text = binding.annotations[PLACEMENT]
                booking = read_booking(text, uid=binding.uid, node=binding.node)
                pod = replace(pod, booking=booking)  # noqa: PLW2901 - as it is read
            after.pods[uid] = pod
            after.book.pod_put(pod, now=self.now)
        return after

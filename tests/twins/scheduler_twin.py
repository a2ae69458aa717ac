# SPDX-License-Identifier: Apache-2.0
"""A small cluster, pods as kube-scheduler sends them, an API server that binds as it is told."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from allotment.dialects.own.placement import PLACEMENT, read_booking
from allotment.kube.bindings import Binding
from allotment.kube.cluster_feed import to_cluster_pod
from allotment.kube.errors import ConflictError, KubeError
from allotment.kube.objects import PodObject
from allotment.model.clusters import ClusterPod, NodeDevice, NodeInventory, PodBooking, PodNeed
from allotment.model.pods import PodUid
from allotment.model.structs import replace
from allotment.placement.cluster.cluster import Cluster
from allotment.scheduler.core.book import Book
from allotment.scheduler.core.reservations import BookSettings

GIB = 1 << 30


def node(name: str, devices: int = 2, *, model: str = "A100") -> NodeInventory:
    return NodeInventory(
        name=name,
        devices=tuple(
            NodeDevice(uuid=f"GPU-{name}{place}", model=model, memory_bytes=80 * GIB, index=place)
            for place in range(devices)
        ),
        cpu_milli=64_000,
        memory_bytes=512 * GIB,
    )


def pod_json(
    name: str = "train",
    *,
    limits: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    version: str = "7",
    **spec: Any,  # noqa: ANN401 - as the API spells it
) -> dict[str, Any]:
    wanted = {"allotment.dev/gpu": "1", "allotment.dev/gpu-memory": "20Gi"}
    resources = {"limits": dict(wanted if limits is None else limits)}
    return {
        "metadata": {
            "name": name,
            "namespace": "ml",
            "uid": f"uid-{name}",
            "resourceVersion": version,
            "annotations": dict(annotations or {}),
        },
        "spec": {"containers": [{"name": "main", "resources": resources}], **spec},
        "status": {"phase": "Pending"},
    }


def cluster_pod(name: str = "train", **options: Any) -> ClusterPod:  # noqa: ANN401 - as above
    return cluster_pod_of(pod_json(name, **options))


def cluster_pod_of(pod: dict[str, Any]) -> ClusterPod:
    """As `kube.cluster_feed` reads it."""
    return to_cluster_pod(msgspec.json.decode(json.dumps(pod), type=PodObject))


class Bindery:
    """An API server for bindings. `answers`: errors to give, in turn; None: do as asked."""

    def __init__(self) -> None:
        self.pods: dict[PodUid, ClusterPod] = {}
        self.asked: list[Binding] = []
        self.answers: deque[KubeError | None] = deque()
        self.does_silently = False
        """A request that is answered by an error is carried out all the same."""
        self.reads = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.hold_from: int | None = None
        """From this request on, all wait; `carry_out` carries out one all the same."""
        self.read_error: KubeError | None = None
        self.reading = asyncio.Event()
        self.reading.set()
        self.broken_off = 0
        self.was_broken_off = asyncio.Event()

    def add(self, pod: ClusterPod) -> None:
        self.pods[pod.uid] = pod

    async def bind(self, binding: Binding) -> None:
        self.asked.append(binding)
        if self.hold_from is not None and len(self.asked) >= self.hold_from:
            self.gate.clear()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.broken_off += 1
            self.was_broken_off.set()
            raise
        error = self.answers.popleft() if self.answers else None
        if error is None or self.does_silently:
            self._bind(binding)
        if error is not None:
            raise error

    async def carry_out(self, binding: Binding) -> None:
        """A request arrives late; whoever waits is answered."""
        self._bind(binding)
        self.hold_from = None
        self.gate.set()

    def _bind(self, binding: Binding) -> None:
        pod = self.pods.get(binding.uid)
        if pod is None or pod.node or binding.version not in {"", pod.version}:
            raise ConflictError("it is not as it was", status=409)
        if PLACEMENT not in binding.annotations:
            self.pods[binding.uid] = replace(pod, node=binding.node, version="")
            return
        booking = read_booking(binding.annotations[PLACEMENT], uid=binding.uid, node=binding.node)
        self.pods[binding.uid] = replace(pod, node=binding.node, booking=booking, version="")

    async def read(self, *, uid: PodUid, namespace: str, name: str) -> ClusterPod | None:
        del namespace, name
        self.reads += 1
        if self.read_error is not None:
            raise self.read_error
        found, reading = self.pods.get(uid), self.reading
        await asyncio.sleep(0)
        await reading.wait()
        return found


class Told:
    """Remembers what was told."""

    def __init__(self) -> None:
        self.refusals: list[str] = []
        self.reasons: dict[str, int] = {}
        self.bound_pods: list[str] = []
        self.unbound_pods: list[str] = []

    def refused(self, pod: ClusterPod, text: str, *, is_mistaken: bool) -> None:
        self.refusals.append(f"{pod.name} {is_mistaken}: {text}")

    def rejected(self, reasons: Mapping[str, int]) -> None:
        self.reasons |= reasons

    def bound(self, need: PodNeed, booking: PodBooking | None) -> None:
        assert booking is not None
        self.bound_pods.append(need.name)

    def unbound(self, pod: ClusterPod | PodNeed, node: str, text: str) -> None:
        self.unbound_pods.append(f"{pod.name} {node}: {text}")


def book_of(nodes: Sequence[NodeInventory], *, candidates: int = 3) -> Book:
    book = Book(
        Cluster(node_policies=("binpack",), device_policies=("binpack",)),
        settings=BookSettings(candidates=candidates),
    )
    for each in nodes:
        book.node_put(each)
    return book

# SPDX-License-Identifier: Apache-2.0
"""A scheduler, an API server and a node with one GPU, between which messages are late or lost."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec
from scheduler_twin import GIB, cluster_pod_of, node, pod_json

from allotment.dialects.own.placement import PLACEMENT, RESIZE, accepted_resize, write_booking
from allotment.dialects.own.registry import asks_of, need_of
from allotment.kube.errors import ConflictError, UnreachableError
from allotment.kube.objects import PodObject, to_pod
from allotment.model.clusters import ClusterPod, NamespaceQuota, PodBooking
from allotment.model.pods import PodUid
from allotment.model.quantities import parse_whole
from allotment.model.requests import Request
from allotment.model.structs import replace
from allotment.placement.cluster.cluster import Cluster
from allotment.placement.explain import Refusal
from allotment.scheduler.core.book import BindOrder, Book
from allotment.scheduler.core.cluster_events import ClusterEventHandler
from allotment.scheduler.core.quota import QuotaBook
from allotment.scheduler.resizing import Resizing

__all__ = ["GIB", "ResizingWorld"]

CAPACITY = 80 * GIB


class ResizingWorld:
    """All of it. `answers` are those to the scheduler's next writes: ok, lost (carried out, and
    not answered) or late (not answered, and carried out by `carry_out_late`)."""

    def __init__(self) -> None:
        self.node = replace(
            node("n", 1), devices=(replace(node("n", 1).devices[0], modes=("soft", "mps")),)
        )
        self.pods: dict[str, dict[str, Any]] = {}
        self.answers: deque[str] = deque()
        self.asked: list[tuple[str, str]] = []
        self.written: list[tuple[str, str]] = []
        self.late: deque[tuple[str, str, str]] = deque()
        self.used: dict[str, int] = {}
        self.refused: dict[str, list[Refusal]] = {}
        self._version = 10
        self._events: deque[tuple[str, dict[str, Any] | None]] = deque()
        """For the scheduler's watch; a name without an object is gone; "": the node's."""
        self._news: deque[tuple[str, dict[str, Any] | None]] = deque()
        """For the node's."""
        self._seen: dict[str, dict[str, Any]] = {}
        """The pods as the node knows them."""
        self._shares: dict[str, Request] = {}
        self.hard: dict[str, str] = {}
        """The quota of the pods' namespace."""
        self._clock = 0.0
        self._start()

    def uid(self, name: str) -> PodUid:
        return PodUid(f"uid-{name}-{self.pods[name]['number']}")

    def limit(self, hard: dict[str, str]) -> None:
        self.hard = hard
        quota = NamespaceQuota(namespace="ml", name="q", hard=hard)
        self.quotas.set_quotas([quota])

    def quota_used(self) -> int:
        (amount,) = (each.used for each in self.quotas.usage("ml"))
        return amount

    # ---- what users do ---------------------------------------------------------------------------

    def create(
        self,
        name: str,
        memory: str,
        *,
        percent: int = 0,
        annotations: Mapping[str, str] | None = None,
    ) -> bool:
        """Create a pod and bind it; False if it does not fit, by the book."""
        limits = {"allotment.dev/gpu": "1"}
        if memory:
            limits["allotment.dev/gpu-memory"] = memory
        if percent:
            limits["allotment.dev/gpu-compute"] = str(percent)
        pod = pod_json(name, limits=limits, annotations=annotations)
        self._version += 1
        pod["number"] = self._version
        pod["metadata"]["uid"] = f"uid-{name}-{self._version}"
        pod["metadata"]["resourceVersion"] = str(self._version)
        waiting = cluster_pod_of(pod)
        self.handler.pod_put(waiting)
        order = self.book.begin_bind(
            need_of(waiting, self.book.settings.needs), "n", now=self._clock, version="1"
        )
        if not isinstance(order, BindOrder):
            self.handler.pod_gone(waiting.uid)
            return False
        self.book.bound(order.booking, now=self._clock)
        pod["spec"]["nodeName"] = "n"
        pod["metadata"]["annotations"][PLACEMENT] = write_booking(order.booking)
        self.pods[name] = pod
        self._changed(name)
        self.hear()
        self.run_node()
        return True

    def wish(self, name: str, text: str) -> None:
        annotations = self.pods[name]["metadata"]["annotations"]
        self.refused.pop(name, None)
        if text:
            annotations[RESIZE] = text
        else:
            annotations.pop(RESIZE, None)
        self._changed(name)

    def remove(self, name: str) -> None:
        """The pod is gone, and so are its share's processes."""
        self._seen.pop(name, None)
        self._shares.pop(name, None)
        self.used.pop(name, None)
        self.refused.pop(name, None)
        self._events.append((str(self.uid(name)), None))
        self._news.append((name, None))
        del self.pods[name]

    # ---- messages --------------------------------------------------------------------------------

    def deliver(self, *, most: int = 1000) -> None:
        """The scheduler's watch reports."""
        for _ in range(min(most, len(self._events))):
            name, item = self._events.popleft()
            if name == "":
                resized = {PodUid(uid): number for uid, number in (item or {}).items()}
                self.handler.node_put(replace(self.node, resized=resized))
            elif item is None:
                self.handler.pod_gone(PodUid(name))
            else:
                self._put(item)

    def _put(self, item: dict[str, Any]) -> None:
        # As the watch does: what the scheduler knows of a bound pod has no version.
        self.handler.pod_put(cluster_pod_of(item))

    def hear(self, *, most: int = 1000) -> None:
        """The node's watch reports."""
        for _ in range(min(most, len(self._news))):
            name, item = self._news.popleft()
            if item is not None and name in self.pods:
                self._seen[name] = item

    def run_node(self) -> None:
        """The node's agent resizes its shares, and reports what is in force."""
        resized: dict[str, Any] = {}
        for name, item in self._seen.items():
            pod = to_pod(msgspec.convert(item, PodObject))
            (ask,) = asks_of(pod, nvidia=())
            assert ask.request is not None
            if ask.request.memory.of(CAPACITY) < self.used.get(name, 0):
                continue
            self._shares[name] = ask.request
            generation = accepted_resize(pod).generation
            if generation:
                resized[item["metadata"]["uid"]] = generation
        self._events.append(("", resized))

    def tick(self) -> None:
        self._clock += 10
        asyncio.run(self.resizing.tick())

    def settle(self) -> None:
        """Nothing is late or lost any more."""
        self.answers.clear()
        while self.late:
            self.carry_out_late()
        for _ in range(12):
            self.hear()
            self.run_node()
            self.deliver()
            self.tick()

    def restart_scheduler(self) -> None:
        """Another leader reads everything. A late request of the earlier one has ended."""
        while self.late:
            self.carry_out_late()
        self._start()

    def _start(self) -> None:
        self._events.clear()
        self.quotas = QuotaBook()
        self.limit(self.hard)
        self.book = Book(Cluster(), quotas=self.quotas)
        self.handler = ClusterEventHandler(self.book, self.quotas, clock=lambda: self._clock)
        self.resizing = Resizing(
            self.book,
            self,
            left_s=lambda: 100.0,
            clock=lambda: self._clock,
            refused=lambda pod, why: self.refused.setdefault(pod.name, []).append(why),
        )
        self.handler.node_put(self.node)
        for item in self.pods.values():
            self._put(copy.deepcopy(item))

    # ---- the API server --------------------------------------------------------------------------

    async def read(self, *, uid: PodUid, namespace: str, name: str) -> ClusterPod | None:
        del namespace
        item = self.pods.get(name)
        if item is None or item["metadata"]["uid"] != uid:
            return None
        version = item["metadata"]["resourceVersion"]
        return replace(cluster_pod_of(copy.deepcopy(item)), version=version)

    async def place_again(self, pod: ClusterPod, placement: str, *, version: str) -> None:
        self.asked.append((pod.name, placement))
        answer = self.answers.popleft() if self.answers else "ok"
        if answer == "late":
            self.late.append((pod.name, placement, version))
        else:
            self._write(pod.name, placement, version)
        if answer != "ok":
            raise UnreachableError("no answer")

    def carry_out_late(self) -> None:
        name, placement, version = self.late.popleft()
        with contextlib.suppress(ConflictError):
            self._write(name, placement, version)

    def _write(self, name: str, placement: str, version: str) -> None:
        item = self.pods.get(name)
        if item is None or item["metadata"]["resourceVersion"] != version:
            raise ConflictError("it has changed", status=409)
        item["metadata"]["annotations"][PLACEMENT] = placement
        self.written.append((name, placement))
        self._changed(name)

    def _changed(self, name: str) -> None:
        self._version += 1
        self.pods[name]["metadata"]["resourceVersion"] = str(self._version)
        item = copy.deepcopy(self.pods[name])
        self._events.append((name, item))
        self._news.append((name, item))

    # ---- what holds ------------------------------------------------------------------------------

    def in_force(self, name: str) -> int:
        return self._shares[name].memory.of(CAPACITY)

    def compute_in_force(self, name: str) -> tuple[int, int]:
        compute = self._shares[name].compute
        return compute.guarantee, compute.ceiling

    def check(self) -> None:
        """Nothing is promised twice, and the placements have at least what is in force."""
        self.book.cluster.check_invariants()
        self.quotas.check_invariants()
        placed = {name: self._placed(name) for name in self.pods}
        for part in (0, 1):
            total = sum(amounts[part] for amounts in placed.values())
            assert total <= (CAPACITY, 10_000)[part], placed
        if hard := self.hard.get("requests.allotment.dev/gpu-memory"):
            assert sum(memory for memory, _ in placed.values()) <= parse_whole(hard), placed
        for name, (memory, guarantee) in placed.items():
            share = self._shares.get(name)
            if share is not None:
                assert share.memory.of(CAPACITY) <= memory, (name, placed)
                assert share.compute.guarantee <= guarantee, (name, placed)
        total = sum(
            booking.containers[0].devices[0].memory
            for name in self.pods
            if isinstance(booking := self.book.booking(self.uid(name)), PodBooking)
        )
        assert total <= CAPACITY or self._events, total

    def _placed(self, name: str) -> tuple[int, int]:
        booking = cluster_pod_of(copy.deepcopy(self.pods[name])).booking
        assert booking is not None
        (device,) = booking.containers[0].devices
        return device.memory, device.guarantee

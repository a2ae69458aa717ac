# SPDX-License-Identifier: Apache-2.0
"""What kube-scheduler asks, by itself: bytes in, bytes out, in this process."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator, Mapping

from allotment.dialects.own.registry import need_of
from allotment.kube.cluster_feed import to_cluster_pod
from allotment.model.clusters import ClusterPod, PodBooking, PodNeed, TakenPart
from allotment.model.modes import SOFT
from allotment.model.structs import replace
from allotment.scheduler.core.book import BindOrder, Book
from allotment.scheduler.core.nominations import NominatedCluster
from allotment.scheduler.core.reservations import BookSettings
from allotment.scheduler.extender.extender import Extender
from allotment.scheduler.extender.wire import read_filter
from bench.harness.options import Options
from bench.harness.quantiles import quantile, summarize
from bench.harness.results import Result
from bench.harness.runner import NoRig
from bench.scheduler.cluster_shape import GIB, Scale, Spec, gpus_of, nodes, specs

_CASES = ((1213, None, 10.0), (5000, 30_000, 50.0))


class Ignored:
    """Receives reports, and ignores them."""

    def refused(self, pod: ClusterPod, text: str, *, is_mistaken: bool) -> None:
        """Nothing."""

    def rejected(self, reasons: Mapping[str, int]) -> None:
        """Nothing."""

    def bound(self, need: PodNeed, booking: PodBooking | None) -> None:
        """Nothing."""

    def unbound(self, pod: ClusterPod | PodNeed, node: str, text: str) -> None:
        """Nothing."""


def body(name: str, spec: Spec, names: list[str]) -> bytes:
    """What kube-scheduler sends."""
    limits = {
        "cpu": f"{spec.cpu}m",
        "memory": "1Gi",
        "allotment.dev/gpu": str(spec.gpus),
        "allotment.dev/gpu-memory": f"{spec.memory * spec.gpus}Gi",
        "allotment.dev/gpu-compute": str(spec.compute * spec.gpus),
    }
    resources = {"limits": limits, "requests": limits}
    pod = {
        "metadata": {"name": name, "namespace": "bench", "uid": name, "resourceVersion": "5"},
        "spec": {"containers": [{"name": "main", "image": "bench", "resources": resources}]},
        "status": {"phase": "Pending"},
    }
    return json.dumps({"Pod": pod, "Nodes": None, "NodeNames": names}).encode()


def filter_latency(_rig: NoRig, options: Options) -> Iterator[Result]:
    """Filter and prioritize, half full, at both sizes of a cluster; and one hard pod."""
    scale = Scale.chosen(options)
    for number, pods, target in _CASES:
        yield from _latency(scale, number=number, pods=pods, target=target)
    yield _many_containers(scale)


def _many_containers(scale: Scale) -> Result:
    """Filter, for a pod of twelve shares that no sum keeps from a node: choices without end.

    The longest of several questions, of which each gets further than the one before it.
    """
    book = Book(NominatedCluster(node_policies=(scale.policy,), device_policies=(scale.policy,)))
    inventories = nodes()
    for place, each in enumerate(inventories):
        devices = tuple(
            replace(
                one,
                taken=TakenPart(memory=(one.index * 3 + 1 + place % 3) * GIB, shares=1, mode=SOFT),
            )
            for one in each.devices
        )
        book.node_put(replace(each, devices=devices))
    containers = []
    for number, size in enumerate((60, 55, 45, 45, 40, 40, 37, 37, 35, 35, 33, 33)):
        limits = {"allotment.dev/gpu": "1", "allotment.dev/gpu-memory": f"{size}Gi"}
        resources = {"limits": limits}
        containers.append({"name": f"c{number}", "image": "bench", "resources": resources})
    pod = {
        "metadata": {"name": "hard", "namespace": "bench", "uid": "hard", "resourceVersion": "5"},
        "spec": {"containers": containers},
        "status": {"phase": "Pending"},
    }
    names = [each.name for each in inventories]
    asked = json.dumps({"Pod": pod, "Nodes": None, "NodeNames": names}).encode()
    heard = {"hard": to_cluster_pod(read_filter(asked).pod)}
    extender = Extender(book, None, observer=Ignored(), pods=heard.get)  # type: ignore[arg-type]
    took: list[float] = []
    for _ in range(scale.of(40)):
        began = time.perf_counter()
        answer = extender.filter(asked)
        took.append((time.perf_counter() - began) * 1000)
        assert not json.loads(answer)["NodeNames"]
        assert b"more combinations" in answer
    return Result(
        name=f"filter, twelve containers with too many choices, {len(names):,} nodes: longest",
        value=max(took),
        unit="ms",
        target=1000.0,
    )


def _latency(scale: Scale, *, number: int, pods: int | None, target: float) -> Iterator[Result]:
    inventories = nodes(number)
    half = gpus_of(inventories) / 2
    cluster = NominatedCluster(node_policies=(scale.policy,), device_policies=(scale.policy,))
    book = Book(cluster, settings=BookSettings(candidates=scale.candidates))
    for each in inventories:
        book.node_put(each)
    names = [each.name for each in inventories]
    wanted = specs(1)
    given, count = 0.0, 0
    while (given < half if pods is None else count < pods) and (not scale.is_quick or count < 200):
        spec = next(wanted) if pods is None else Spec(1, 10, 12, 100)
        need = need_of(to_cluster_pod(read_filter(body(f"b{count}", spec, [])).pod))
        choice = book.filter(need, names, now=0.0, version="5")
        order = book.begin_bind(need, choice.best[0], now=0.0, version="5")
        assert isinstance(order, BindOrder)
        book.bound(order.booking, now=0.0)
        given += spec.gpus * spec.compute / 100
        count += 1
    gc.collect()
    gc.freeze()
    heard: dict[str, ClusterPod] = {}
    extender = Extender(book, None, observer=Ignored(), pods=heard.get)  # type: ignore[arg-type]
    both: list[float] = []
    binds: list[float] = []
    for place in range(scale.of(1000)):
        spec = next(wanted)
        asked = body(f"p{place}", spec, names)
        heard[f"p{place}"] = to_cluster_pod(read_filter(asked).pod)
        began = time.perf_counter()
        answer = extender.filter(asked)
        filtered = time.perf_counter() - began
        best = json.loads(answer)["NodeNames"]
        asked = body(f"p{place}", spec, best)
        began = time.perf_counter()
        extender.prioritize(asked)
        both.append((filtered + time.perf_counter() - began) * 1000)
        need = need_of(heard[f"p{place}"])
        began = time.perf_counter()
        order = book.begin_bind(need, best[0], now=0.0, version="5")
        binds.append((time.perf_counter() - began) * 1000)
        assert isinstance(order, BindOrder)
        book.bound(order.booking, now=0.0)
    what = f"{number:,} nodes, {count:,} pods"
    for name, took, limit in (
        ("filter + prioritize", both, target),
        ("choosing GPUs at bind", binds, None),
    ):
        yield Result(
            name=f"{name}, {what}: p99",
            value=quantile(took, 0.99),
            unit="ms",
            summary=summarize(took),
            target=limit,
            samples=len(took),
            method="bytes in, bytes out, in this process; half full, or with that many pods",
        )
    gc.unfreeze()

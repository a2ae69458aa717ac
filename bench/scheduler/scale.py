# SPDX-License-Identifier: Apache-2.0
"""What a pod costs as a cluster grows, and what breaks first at 100,000 GPUs.

The scheduler's core alone, in a process for each size: no HTTP, no API server, no kube-scheduler.
Curves are fitted through these points, and through stored results of `rate` for the processes of
the control plane. A curve beyond its last point is a guess, and says how well it fits the points.
"""

from __future__ import annotations

import re
import resource
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Final

import numpy as np

from allotment.kube.cluster_feed import to_cluster_pod
from allotment.metrics.scheduler import write_cluster
from allotment.model.clusters import (
    ClusterPod,
    NodeInventory,
    PlacedContainer,
    PlacedDevice,
    PodBooking,
)
from allotment.model.compute import WHOLE
from allotment.model.pods import PodUid
from allotment.scheduler.core.book import BindOrder, Book
from allotment.scheduler.core.cluster_events import KnownClaims
from allotment.scheduler.core.nominations import NominatedCluster
from allotment.scheduler.core.quota import QuotaBook
from allotment.scheduler.core.wait_reasons import WaitReasons
from allotment.scheduler.core.waiting import MOST_AHEAD
from allotment.scheduler.extender.extender import Extender
from allotment.scheduler.extender.wire import read_filter
from allotment.scheduler.figures import Books, series
from bench.harness.options import Options
from bench.harness.quantiles import Summary, summarize
from bench.harness.results import RESULTS, Result
from bench.harness.runner import NoRig
from bench.report import newest
from bench.scheduler.cluster_shape import GIB, Spec, nodes, specs
from bench.scheduler.filter import Ignored, body

SIZES: Final = (50, 200, 1213, 5000, 20_000)
QUICK_SIZES: Final = (50, 1213, 5000)
LARGE: Final = 12_500
"""Nodes of 8 GPUs: 100,000 GPUs."""
_PODS: Final = 300
_REFUSED: Final = 20
_STEPS: Final = {
    "choice": "choosing a node and its GPUs",
    "question": "a question about the nominated node",
    "bind": "reserving the GPUs at bind",
    "refusal": "a question about the full nodes, for a pod that fits on none",
    "figures": "reading the books for a scrape, in the event loop",
    "text": "the text of a scrape, beside it",
}
_RATE: Final = re.compile(
    r"pods with shares, (?P<nodes>[\d,]+) nodes, (empty|half full): a pod's time in (?P<who>.+)"
)
_NOMINATED: Final = 1000
"""Rates of smaller clusters are those of another way: without nominations."""


@dataclass(frozen=True, slots=True)
class Point:
    """A size of a cluster, and what the core took there."""

    nodes: int
    steps: Mapping[str, Summary]
    """Milliseconds of processor time."""
    load_s: float
    """Processor time until all nodes and bound pods are in the book."""
    memory_mib: float


@dataclass(frozen=True, slots=True)
class Curve:
    """A cost that grows with the nodes: a fixed part, and a part for each."""

    fixed: float
    each: float
    worst: float
    """The largest distance from a point, as a part of its value."""

    @classmethod
    def through(cls, points: Mapping[int, float]) -> Curve:
        """Fit it; each point's distance counts relative to its value."""
        x, y = np.array([*points], dtype=float), np.array([*points.values()], dtype=float)
        each, fixed = np.polyfit(x, y, 1, w=1 / y)
        worst = float(np.max(np.abs((fixed + each * x) / y - 1)))
        return cls(float(fixed), float(each), worst)

    def at(self, number: int) -> float:
        return self.fixed + self.each * number

    def formula(self, unit: str) -> str:
        return (
            f"{self.fixed:.3g} {unit} + {1000 * self.each:.3g} for each 1,000 nodes;"
            f" at most {100 * self.worst:.0f} % off"
        )


def scale(_rig: NoRig, options: Options) -> Iterator[Result]:
    """All sizes, the curves, and each one's value for 100,000 GPUs."""
    sizes = QUICK_SIZES if options.is_quick else SIZES
    pods = options.pick(_PODS, 2 * MOST_AHEAD)
    points = [_alone(number, pods) for number in sizes]
    for point in points:
        yield from _rows(point)
    yield from _large(points)
    yield from _from_rates()


def _alone(number: int, pods: int) -> Point:
    """Measure in a fresh process: its memory is that of this size."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(measure, number, pods).result()


def _rows(point: Point) -> Iterator[Result]:
    where = f"{point.nodes:,} nodes"
    for step, took in point.steps.items():
        yield Result(
            name=f"{_STEPS[step]}, {where}",
            value=took.p50,
            unit="ms",
            summary=took,
            samples=took.n or 1,
            topic="the core",
            method="processor time of a call in one process, without HTTP. Every second node has a"
            " pod on each GPU, a whole one or a half. A pod is bound when"
            f" {MOST_AHEAD - 1} others are expected",
        )
    yield Result(name=f"loading, {where}", value=point.load_s, unit="s", topic="the core")
    yield Result(name=f"memory, {where}", value=point.memory_mib, unit="MiB", topic="the core")


def _large(points: Sequence[Point]) -> Iterator[Result]:
    where = f"{LARGE:,} nodes of 8 GPUs, by the curve"
    curves = {
        step: Curve.through({each.nodes: each.steps[step].p50 for each in points})
        for step in _STEPS
    }
    for step, curve in curves.items():
        yield _fitted(f"{_STEPS[step]}, {where}", curve, "ms")
    loading = Curve.through({each.nodes: each.load_s for each in points})
    memory = Curve.through({each.nodes: each.memory_mib for each in points})
    yield _fitted(f"loading, {where}", loading, "s")
    yield _fitted(f"memory, {where}", memory, "MiB")
    placed = sum(curves[step].at(LARGE) for step in ("choice", "question", "bind"))
    yield Result(name=f"pods that one core places, {where}", value=1000 / placed, unit="pods/s")
    refused = 1000 / curves["refusal"].at(LARGE)
    yield Result(name=f"pods that one core refuses, {where}", value=refused, unit="pods/s")


def _from_rates() -> Iterator[Result]:
    """Extrapolate what `rate` has measured: whole processes, with HTTP and the API server."""
    found: dict[str, dict[int, float]] = {}
    for records in newest(RESULTS):
        for each in records:
            match = _RATE.fullmatch(each.name) if each.bench == "rate" else None
            if match is None or each.value is None:
                continue
            number = int(match["nodes"].replace(",", ""))
            if number >= _NOMINATED:
                of = found.setdefault(match["who"], {})
                of[number] = max(of.get(number, 0.0), each.value)
    where = f"a pod's time in {{}}, {LARGE:,} nodes, by the curve of `rate`"
    if not any(len(of) > 1 for of in found.values()):
        seen = "no stored results of `rate` with two sizes from 1,000 nodes on"
        yield Result(name=where.format("each process"), value=None, unit="ms", seen=seen)
    for who, of in found.items():
        if len(of) > 1:
            yield _fitted(where.format(who), Curve.through(of), "ms")


def _fitted(name: str, curve: Curve, unit: str) -> Result:
    return Result(name=name, value=curve.at(LARGE), unit=unit, seen=curve.formula(unit))


# ---- in the process of one size ------------------------------------------------------------------


def measure(number: int, pods: int) -> Point:
    """Fill half of a cluster, then place and refuse pods."""
    before = _rss_mib()
    inventories = nodes(number)
    names = [each.name for each in inventories]
    began = time.thread_time()
    book = Book(NominatedCluster())
    for place, each in enumerate(inventories):
        book.node_put(each)
        if place % 2 == 0:
            for pod in _running(each):
                book.pod_put(pod, now=0.0)
    load_s = time.thread_time() - began
    heard: dict[str, ClusterPod] = {}
    extender = Extender(book, None, observer=Ignored(), pods=heard.get)  # type: ignore[arg-type]
    books = Books(book, QuotaBook(), KnownClaims(), WaitReasons())
    took = {step: list[float]() for step in _STEPS}
    ahead: deque[tuple[str, Spec, str]] = deque()
    for count, spec in zip(range(min(pods, 2 * number)), specs(2), strict=False):
        uid = f"p{count}"
        asked = body(uid, spec, names)
        heard[uid] = to_cluster_pod(read_filter(asked).pod)
        began = time.thread_time()
        extender.filter(asked)
        took["choice"].append(_ms_since(began))
        booking = book.booking(PodUid(uid))
        if booking is None:
            raise ValueError(f"no node for {spec}")
        ahead.append((uid, spec, booking.node))
        if len(ahead) == MOST_AHEAD:
            _bind(book, extender, heard, *ahead.popleft(), took)
            _scrape(books, took)
    for count in range(_REFUSED):
        # Another amount of CPU each time, so that no answer is a repeated one.
        asked = body("large", Spec(2, 80, 100, 1000 + count), names[::2])
        heard["large"] = to_cluster_pod(read_filter(asked).pod)
        began = time.thread_time()
        extender.filter(asked)
        took["refusal"].append(_ms_since(began))
    steps = {step: summarize(samples) for step, samples in took.items()}
    return Point(number, steps, load_s, _rss_mib() - before)


def _scrape(books: Books, took: Mapping[str, list[float]]) -> None:
    began = time.thread_time()
    taken = books.snapshot()
    took["figures"].append(_ms_since(began))
    began = time.thread_time()
    write_cluster(series(taken), is_open=False)
    took["text"].append(_ms_since(began))


def _bind(
    book: Book,
    extender: Extender,
    heard: Mapping[str, ClusterPod],
    uid: str,
    spec: Spec,
    node: str,
    took: Mapping[str, list[float]],
) -> None:
    asked = body(uid, spec, [node])
    need = book.needs.of(heard[uid])
    began = time.thread_time()
    extender.filter(asked)
    took["question"].append(_ms_since(began))
    began = time.thread_time()
    order = book.begin_bind(need, node, now=0.0, version="5")
    took["bind"].append(_ms_since(began))
    assert isinstance(order, BindOrder), order
    book.bound(order.booking, now=0.0)


def _running(node: NodeInventory) -> Iterator[ClusterPod]:
    """Pods on a node, one on each GPU: whole ones and halves in turn."""
    for device in node.devices:
        part = 1 if device.index % 2 else 2
        uid = PodUid(f"on {device.uuid}")
        placed = PlacedDevice(device.uuid, 80 * GIB // part, WHOLE // part)
        booking = PodBooking(
            uid=uid,
            node=node.name,
            cpu_milli=4000 // part,
            memory_bytes=GIB,
            containers=(PlacedContainer(name="main", devices=(placed,)),),
        )
        yield ClusterPod(
            uid=uid,
            namespace="bench",
            name=device.uuid,
            node=node.name,
            cpu_milli=booking.cpu_milli,
            memory_bytes=booking.memory_bytes,
            booking=booking,
        )


def _ms_since(began: float) -> float:
    return 1000 * (time.thread_time() - began)


def _rss_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

# SPDX-License-Identifier: Apache-2.0
"""The cluster's figures: from the books to the text, and what is missing of them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterable

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parsed_open
from prometheus_client.parser import text_string_to_metric_families as parsed
from prometheus_client.samples import Sample
from scheduler_twin import GIB, Bindery, Told, cluster_pod, node, pod_json

from allotment.dialects.own.resource_claims import AllocatedDevice, ResourceClaim
from allotment.metrics.scheduler import AMOUNTS, CLUSTER, PREFIX, write_cluster
from allotment.model.clusters import ClusterPod, NamespaceQuota
from allotment.model.modes import POD_MODES
from allotment.model.pods import PodUid
from allotment.model.structs import replace
from allotment.placement.cluster.cluster import Cluster
from allotment.placement.explain import Reason
from allotment.scheduler.core.book import BindOrder, Book
from allotment.scheduler.core.cluster_events import ClusterEventHandler
from allotment.scheduler.core.quota import QuotaBook
from allotment.scheduler.core.wait_reasons import PLACED, REQUEST, UNTRIED, WAITS
from allotment.scheduler.extender.binder import Binder
from allotment.scheduler.extender.extender import Extender
from allotment.scheduler.figures import _FIELDS, Books, ClusterFigures, Snapshot, series

NAMES = ["a", "b"]
SHARE = {
    "allotment.dev/gpu": "1",
    "allotment.dev/gpu-memory": "20Gi",
    "allotment.dev/gpu-compute": "30",
}


class Scene:
    """Two nodes of two GPUs, and pods of namespace `ml`."""

    def __init__(self) -> None:
        self.quotas = QuotaBook()
        self.book = Book(Cluster(), quotas=self.quotas)
        self.handler = ClusterEventHandler(self.book, self.quotas)
        for name in NAMES:
            inventory = node(name)
            devices = tuple(replace(each, modes=POD_MODES) for each in inventory.devices)
            self.handler.node_put(replace(inventory, devices=devices))
        self.pods: dict[str, ClusterPod] = {}
        self.extender = Extender(
            self.book,
            Binder(self.book, Bindery(), clock=lambda: 0.0),
            observer=Told(),
            pods=self.pods.get,
            waits=self.handler.waits,
        )
        self.books = Books(self.book, self.quotas, self.handler.claims, self.handler.waits)

    def put(self, pod: ClusterPod) -> ClusterPod:
        self.pods[pod.uid] = pod
        self.handler.pod_put(pod)
        return pod

    def filter(self, name: str) -> None:
        body = json.dumps({"Pod": pod_json(name), "Nodes": None, "NodeNames": NAMES})
        self.extender.filter(body.encode())

    def bind(self, pod: ClusterPod, where: str) -> None:
        need = self.book.needs.of(pod)
        order = self.book.begin_bind(need, where, now=0.0, version=pod.version)
        assert isinstance(order, BindOrder)
        self.book.bound(order.booking, now=0.0)
        self.put(replace(pod, node=where, booking=order.booking))

    def samples(self) -> list[Sample]:
        return samples(write_cluster(series(self.books.snapshot()), is_open=False))


def claim_on(node: str, device: str = "") -> tuple[PodUid, ResourceClaim]:
    """A claim for a device of a node; empty: it waits."""
    devices = (AllocatedDevice(request="gpu", pool=node, device=device),) if node else ()
    uid = f"claim-{node}"
    return PodUid(uid), ResourceClaim(uid=uid, namespace="ml", name=uid, devices=devices)


def samples(text: bytes) -> list[Sample]:
    return [each for family in parsed(text.decode()) for each in family.samples]


def value(found: Iterable[Sample], name: str, **labels: str) -> float:
    (sample,) = (
        each
        for each in found
        if each.name == PREFIX + name and labels.items() <= each.labels.items()
    )
    return float(sample.value)


def test_what_pods_hold_counts_by_node_and_by_model() -> None:
    scene = Scene()
    scene.bind(scene.put(cluster_pod("x", limits=SHARE)), "a")
    alone = {"allotment.dev/mode": "exclusive"}
    whole = {"allotment.dev/gpu": "1"}
    scene.bind(scene.put(cluster_pod("y", limits=whole, annotations=alone)), "b")
    found = scene.samples()
    assert value(found, "cluster_read") == 1
    for name, model, one, both in (
        ("devices", 4, 2, 2),
        ("devices_idle", 2, 1, 1),
        ("devices_whole", 1, 0, 1),
        ("shares", 2, 1, 1),
        ("slices", 0, 0, 0),
        ("memory_bytes", 320 * GIB, 160 * GIB, 160 * GIB),
        ("memory_allocated_bytes", 100 * GIB, 20 * GIB, 80 * GIB),
        ("memory_fragmented_bytes", 60 * GIB, 60 * GIB, 0),
        ("compute", 4, 2, 2),
        ("compute_allocated", 1.3, 0.3, 1),
        ("compute_fragmented", 0.7, 0.7, 0),
    ):
        assert value(found, f"device_{name}", model="A100") == model, name
        assert value(found, f"node_{name}", node="a") == one, name
        assert value(found, f"node_{name}", node="b") == both, name
    assert value(found, "namespace_memory_bytes", namespace="ml") == 100 * GIB
    assert value(found, "namespace_compute", namespace="ml") == 1.3
    assert value(found, "namespace_devices", namespace="ml") == 2


def test_pods_wait_for_the_last_reason_that_filter_gave() -> None:
    scene = Scene()

    def waits() -> dict[str, float]:
        return {reason: number for reason, number in scene.handler.waits.counts().items() if number}

    large = {"allotment.dev/gpu": "1", "allotment.dev/gpu-memory": "90Gi"}
    scene.put(cluster_pod("fits", limits=SHARE))
    scene.put(cluster_pod("large", limits=large))
    scene.put(cluster_pod("many", limits={**SHARE, "allotment.dev/gpu": "3"}))
    scene.put(cluster_pod("wrong", limits=SHARE, annotations={"allotment.dev/mode": "x"}))
    scene.put(cluster_pod("plain", limits={}))
    assert waits() == {UNTRIED: 4}
    for name in ("fits", "large", "many", "wrong"):
        scene.filter(name)
    assert waits() == {
        PLACED: 1, REQUEST: 1, Reason.GPU_MEMORY: 1, Reason.TOO_FEW_GPUS: 1,
    }  # fmt: skip
    scene.filter("large")
    scene.put(scene.pods["uid-large"])
    assert waits()[Reason.GPU_MEMORY] == 1
    scene.bind(scene.pods["uid-fits"], "a")
    scene.handler.pod_gone(scene.pods["uid-wrong"].uid)
    scene.put(replace(scene.pods["uid-many"], is_ending=True))
    assert waits() == {Reason.GPU_MEMORY: 1}
    scene.handler.waits.because(scene.pods["uid-large"].uid, "no such reason")
    assert waits() == {Reason.CHANGED: 1}
    found = scene.samples()
    shown = [each.labels["reason"] for each in found if each.name == f"{PREFIX}pods_waiting"]
    assert sorted(shown) == sorted(WAITS)


def test_quotas_are_in_base_units() -> None:
    scene = Scene()
    hard = {
        "requests.allotment.dev/gpu-memory": "100Gi",
        "requests.allotment.dev/gpu-compute": "150",
        "limits.allotment.dev/gpu": "7",
    }
    scene.quotas.set_quotas([NamespaceQuota(namespace="ml", name="q", hard=hard)])
    scene.bind(scene.put(cluster_pod("x", limits=SHARE)), "a")
    scene.put(cluster_pod("waits", limits=SHARE))
    found = scene.samples()
    for key, unit, used, limit in (
        ("requests.allotment.dev/gpu-memory", "bytes", 20 * GIB, 100 * GIB),
        ("requests.allotment.dev/gpu-compute", "gpus", 0.3, 1.5),
        ("limits.allotment.dev/gpu", "devices", 1, 7),
    ):
        labels = {"namespace": "ml", "quota": "q", "resource": key, "unit": unit}
        assert value(found, "quota_used", **labels) == used
        assert value(found, "quota_limit", **labels) == limit


def test_claims_count_on_their_node() -> None:
    scene = Scene()
    scene.handler.claim_changed(*claim_on("a", "GPU-a0"))
    scene.handler.claim_changed(*claim_on(""))
    found = scene.samples()
    assert value(found, "node_claims", node="a") == 1
    assert value(found, "claims", state="allocated") == 1
    assert value(found, "claims", state="waiting") == 1


def test_fragmentation_is_the_packing_policys() -> None:
    scene = Scene()
    for number in range(20):
        scene.put(cluster_pod(f"p{number}", limits=SHARE))
    empty = scene.samples()
    kind = "1 soft, 30 %, 20Gi"
    slots = value(empty, "kind_slots", kind=kind)
    assert value(empty, "kind_frequency_ratio", kind=kind) > 0.5
    worth = value(empty, "node_packing_value", node="a")
    assert worth == pytest.approx(value(empty, "node_packing_value", node="b"))
    scene.bind(scene.pods["uid-p0"], "a")
    found = scene.samples()
    assert value(found, "kind_slots", kind=kind) < slots
    assert value(found, "node_packing_value", node="a") < value(
        found, "node_packing_value", node="b"
    )
    other = Scene()
    other.book.cluster = Cluster(node_policies=("binpack",))
    assert not any("packing" in each.name or "kind" in each.name for each in other.samples())


def test_all_metrics_of_the_table_are_there_once_in_both_formats() -> None:
    scene = Scene()
    hard = {"limits.allotment.dev/gpu": "7"}
    scene.quotas.set_quotas([NamespaceQuota(namespace="ml", name="q", hard=hard)])
    scene.bind(scene.put(cluster_pod("x", limits=SHARE)), "a")
    scene.handler.claim_changed(*claim_on("a", "GPU-a0"))
    taken = scene.books.snapshot()
    for read, is_open in ((parsed, False), (parsed_open, True)):
        text = write_cluster(series(taken), is_open=is_open).decode()
        found = [each for family in read(text) for each in family.samples]
        series_of = Counter((each.name, tuple(sorted(each.labels.items()))) for each in found)
        assert set(series_of.values()) == {1}
        labels = {each.name.removeprefix(PREFIX): {*each.labels} for each in found}
        assert labels == {name: set(names) for name, (names, _) in CLUSTER.items()}
    assert {*_FIELDS} == {*AMOUNTS}


# ---- the scrape ----------------------------------------------------------------------------------


def read_in_a_thread(figures: ClusterFigures, *, calls: int = 1) -> list[bytes]:
    async def work() -> list[bytes]:
        figures.start()
        return [await asyncio.to_thread(figures.text, False) for _ in range(calls)]

    return asyncio.run(work())


def test_only_the_leader_has_them() -> None:
    scene = Scene()
    (text,) = read_in_a_thread(ClusterFigures(scene.books.snapshot, leads=lambda: False))
    (sample,) = samples(text)
    assert (sample.name, sample.value) == (f"{PREFIX}cluster_read", 0)
    (text,) = read_in_a_thread(ClusterFigures(scene.books.snapshot, leads=lambda: True))
    assert value(samples(text), "cluster_read") == 1


def test_scrapes_within_a_second_share_a_text() -> None:
    scene, taken, now = Scene(), list[Snapshot](), [100.0]

    def snapshot() -> Snapshot:
        taken.append(scene.books.snapshot())
        return taken[-1]

    figures = ClusterFigures(snapshot, leads=lambda: True, clock=lambda: now[0])
    assert len(set(read_in_a_thread(figures, calls=3))) == 1
    assert len(taken) == 1
    now[0] += 1.0
    read_in_a_thread(figures)
    assert len(taken) == 2


def test_a_hanging_event_loop_leaves_them_out() -> None:
    scene = Scene()
    figures = ClusterFigures(scene.books.snapshot, leads=lambda: True, patience_s=0.05)
    texts: list[bytes] = []

    async def work() -> None:
        figures.start()
        reader = threading.Thread(target=lambda: texts.append(figures.text(False)))
        reader.start()
        reader.join()  # the loop does nothing meanwhile

    asyncio.run(work())
    assert value(samples(texts[0]), "cluster_read") == 0
    assert figures.text(True).endswith(b"# EOF\n")

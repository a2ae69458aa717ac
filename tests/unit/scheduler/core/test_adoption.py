# SPDX-License-Identifier: Apache-2.0
"""What other systems gave pods that still run is booked, and nothing is placed over it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
from scheduler_twin import GIB, cluster_pod, node
from structlog.testing import CapturingLogger

from allotment.dialects.foreign.base import DIALECT
from allotment.dialects.foreign.settings import SYSTEMS, foreign_dialects
from allotment.dialects.own.registry import need_of
from allotment.metrics.scheduler import SchedulerMetrics
from allotment.model.clusters import ClusterPod, PlacedDevice
from allotment.model.pods import PodUid
from allotment.model.structs import replace
from allotment.placement.explain import Refusal
from allotment.scheduler.core.book import BindOrder, Book, NodeChoice
from allotment.scheduler.core.cluster_events import Adoption, ClusterEventHandler
from allotment.scheduler.core.nominations import NominatedCluster
from allotment.scheduler.core.quota import QuotaBook
from allotment.scheduler.reports import SchedulerReports

HAMI = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "70000", "nvidia.com/gpucores": "50"}
ALIYUN = {"aliyun.com/gpu-mem": "70"}
VOLCANO = {"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory": "70000"}
TENCENT = {"tencent.com/vcuda-core": "90", "tencent.com/vcuda-memory": "280"}


class Office:
    """The books with who keeps them, and what was told."""

    def __init__(self, systems: Collection[str] = SYSTEMS) -> None:
        self.cluster = NominatedCluster(node_policies=("binpack",), device_policies=("binpack",))
        self.book = Book(self.cluster)
        self.told: list[tuple[str, str]] = []
        self.take_over = Adoption(
            foreign_dialects(),
            node=self.cluster.node,
            systems=systems,
            on_unread=lambda pod, why: self.told.append((pod.name, why)),
        )
        self.keeper = ClusterEventHandler(
            self.book, QuotaBook(), take_over=self.take_over, clock=lambda: 0.0
        )

    def choose(self, name: str, memory: str = "20Gi") -> BindOrder | Refusal:
        limits = {"allotment.dev/gpu": "1", "allotment.dev/gpu-memory": memory}
        need = need_of(cluster_pod(name, limits=limits))
        choice = self.book.filter(need, ["n1"], now=0.0, version="1")
        assert isinstance(choice, NodeChoice)
        found = self.book.begin_bind(need, "n1", now=0.0, version="1")
        assert isinstance(found, BindOrder | Refusal)
        return found

    def used(self) -> dict[str, int]:
        """Bytes of each device that pods have."""
        used: dict[str, int] = {}
        for booking in self.cluster.on("n1").values():
            for container in booking.containers:
                for each in container.devices:
                    used[each.uuid] = used.get(each.uuid, 0) + each.memory
        return used


def hami(name: str = "old", **changes: Any) -> ClusterPod:  # noqa: ANN401 - parts of a pod
    annotations = {
        "hami.io/vgpu-node": "n1",
        "hami.io/vgpu-devices-allocated": "GPU-n10,NVIDIA,70000,50:;",
    }
    annotations |= changes.pop("annotations", {})
    options = {"limits": HAMI, "nodeName": "n1", "annotations": annotations}
    return cluster_pod(name, **{**options, **changes})


FOREIGN = {
    "hami": hami(),
    "volcano": cluster_pod(
        "old",
        nodeName="n1",
        limits=VOLCANO,
        annotations={
            "volcano.sh/vgpu-node": "n1",
            "volcano.sh/vgpu-ids-new": "GPU-n10,NVIDIA,70000,50:",
        },
    ),
    "gpushare": cluster_pod(
        "old",
        nodeName="n1",
        limits=ALIYUN,
        annotations={"ALIYUN_COM_GPU_MEM_IDX": "0", "ALIYUN_COM_GPU_MEM_POD": "70"},
    ),
    "aliyun": cluster_pod(
        "old",
        nodeName="n1",
        limits=ALIYUN,
        annotations={"scheduler.framework.gpushare.allocation": '{"0":{"0":70}}'},
    ),
    "tencent": cluster_pod(
        "old",
        nodeName="n1",
        limits=TENCENT,
        annotations={"tencent.com/predicate-gpu-idx-0": "0"},
    ),
}


@pytest.mark.parametrize("system", FOREIGN)
@pytest.mark.parametrize("node_is_first", [True, False])
def test_nothing_is_placed_over_what_runs(system: str, *, node_is_first: bool) -> None:
    office = Office()
    if node_is_first:
        office.keeper.node_put(node("n1", devices=1))
    office.keeper.pod_put(FOREIGN[system])
    if not node_is_first:
        office.keeper.node_put(node("n1", devices=1))
    assert isinstance(office.choose("new", "20Gi"), Refusal)
    assert isinstance(office.choose("small", "5Gi"), BindOrder)
    assert office.used()["GPU-n10"] <= 80 * GIB
    assert office.take_over.taken == {PodUid("uid-old")}
    assert office.told == []


def test_no_gpu_is_over_committed_however_many_come() -> None:
    office = Office()
    office.keeper.node_put(node("n1", devices=2))
    office.keeper.pod_put(hami())
    found = [office.choose(f"new{each}", "20Gi") for each in range(8)]
    assert sum(isinstance(each, BindOrder) for each in found) == 4
    assert office.used() == {"GPU-n10": 70_000 << 20, "GPU-n11": 80 * GIB}


@pytest.mark.parametrize("end", ["gone", "ended"])
def test_when_it_has_ended_its_room_is_free(end: str) -> None:
    office = Office()
    office.keeper.node_put(node("n1", devices=1))
    office.keeper.pod_put(hami())
    if end == "gone":
        office.keeper.pod_gone(PodUid("uid-old"))
    else:
        office.keeper.pod_put(replace(hami(), booking=None, foreign=None))
    assert isinstance(office.choose("new", "80Gi"), BindOrder)
    assert office.take_over.taken == set()


def test_an_index_is_that_of_the_node_as_it_is() -> None:
    office = Office()
    office.keeper.node_put(node("n1", devices=2))
    office.keeper.pod_put(FOREIGN["gpushare"])
    assert set(office.used()) == {"GPU-n10"}
    turned = node("n1", devices=2)
    devices = tuple(replace(each, index=1 - each.index) for each in turned.devices)
    office.keeper.node_put(replace(turned, devices=devices))
    assert set(office.used()) == {"GPU-n11"}


def test_what_cannot_be_read_is_told_once_and_counted_until_it_has_ended() -> None:
    office = Office()
    office.keeper.node_put(node("n1", devices=1))
    broken = hami(annotations={"hami.io/vgpu-devices-allocated": "GPU-n10,NVIDIA,?"})
    for _ in range(3):
        office.keeper.pod_put(broken)
        office.keeper.node_put(node("n1", devices=1))
    ((name, why),) = office.told
    assert name == "old"
    assert "hami.io/vgpu-devices-allocated" in why
    assert "hint: " in why
    assert set(office.take_over.unread) == {PodUid("uid-old")}
    office.keeper.pod_put(hami())
    assert office.take_over.unread == {}
    office.keeper.pod_put(broken)
    office.keeper.pod_gone(PodUid("uid-old"))
    assert office.take_over.unread == {}


def test_nobody_s_pods_are_counted_unless_that_is_said() -> None:
    office = Office(systems=())
    office.keeper.node_put(node("n1", devices=1))
    office.keeper.pod_put(hami())
    assert office.used() == {}
    ((name, why),) = office.told
    assert name == "old"
    assert "--take-over hami" in why
    assert set(office.take_over.unread) == {PodUid("uid-old")}


@pytest.mark.parametrize(
    ("limits", "annotations"),
    [
        # On one's own pod, which asks for nothing: `kubectl annotate` is enough.
        ({"cpu": "10m"}, {"kubeshare/x": "y"}),
        ({"cpu": "10m", "nvidia.com/gpu": "1"}, {"kubeshare/x": "y"}),
        ({"cpu": "10m", "example.com/fpga": "1"}, {}),
    ],
    ids=["a mark", "a whole GPU", "another resource"],
)
def test_a_tenant_occupies_no_gpu_by_a_forged_record(
    limits: dict[str, str], annotations: dict[str, str]
) -> None:
    office = Office()
    office.keeper.node_put(node("n1", devices=1))
    office.keeper.pod_put(
        hami(
            limits=limits,
            annotations={
                "hami.io/vgpu-devices-allocated": "GPU-n10,NVIDIA,81920,100:;",
                **annotations,
            },
        )
    )
    assert office.used() == {}
    assert isinstance(office.choose("new", "80Gi"), BindOrder)


@pytest.mark.parametrize("record", ["GPU-n10,NVIDIA,1,0:;", "GPU-n10,NVIDIA,81920,100:;"])
def test_a_record_is_neither_lowered_nor_raised(record: str) -> None:
    office = Office()
    office.keeper.node_put(node("n1", devices=1))
    office.keeper.pod_put(hami(annotations={"hami.io/vgpu-devices-allocated": record}))
    assert office.used() == {"GPU-n10": 70_000 << 20}


def test_qgpu_does_not_say_where_and_that_is_told() -> None:
    office = Office()
    office.keeper.node_put(node("n1", devices=1))
    office.keeper.pod_put(
        cluster_pod("old", nodeName="n1", limits={"tke.cloud.tencent.com/qgpu-memory": "5"})
    )
    assert "qGPU" in office.told[0][1]


@pytest.mark.parametrize(
    "pod",
    [
        hami(annotations={DIALECT: "hami"}),
        hami(nodeName=""),
        # A record on a pod that asks for nothing by which it could have been given a GPU.
        hami(limits={"cpu": "1"}),
        hami(annotations={"hami.io/vgpu-node": "n2"}),
    ],
    ids=["ours", "waits", "forged", "copied"],
)
def test_what_was_not_given_by_another_system_is_not_counted(pod: ClusterPod) -> None:
    office = Office()
    office.keeper.node_put(node("n1", devices=1))
    office.keeper.pod_put(pod)
    assert office.used() == {}
    assert isinstance(office.choose("new", "80Gi"), BindOrder)
    assert office.told == []


def test_a_pod_that_is_read_by_itself_keeps_what_it_has() -> None:
    office = Office()
    office.keeper.node_put(node("n1", devices=1))
    office.keeper.pod_put(hami())
    again = office.take_over.completed(hami())
    uid = PodUid("uid-old")
    office.book.reread(uid, again, step=office.book.step(uid), now=0.0)
    assert office.used() == {"GPU-n10": 70_000 << 20}
    assert again.booking is not None
    assert again.booking.containers[0].devices == (PlacedDevice("GPU-n10", 70_000 << 20, 5000),)


def test_the_log_names_some_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    log = CapturingLogger()  # wherever other tests have made the log go
    monkeypatch.setattr("allotment.scheduler.reports._log", log)
    reports = SchedulerReports(SchedulerMetrics(), None)
    for each in range(100):
        reports.not_taken_over(hami(f"old-{each}"), "why")
    assert len(log.calls) == 20
    assert "not counted" in str(log.calls[0])

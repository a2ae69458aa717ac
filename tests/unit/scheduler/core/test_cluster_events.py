# SPDX-License-Identifier: Apache-2.0
"""From what is heard to the books: who is told of, and for how long."""

from __future__ import annotations

from scheduler_twin import cluster_pod
from structlog.testing import capture_logs

from allotment.model.clusters import ClusterPod, NodeDevice, NodeInventory, PodBooking
from allotment.model.pods import Pod, PodUid
from allotment.model.structs import replace
from allotment.placement.cluster.cluster import Cluster
from allotment.scheduler.core.book import Book
from allotment.scheduler.core.cluster_events import ClusterEventHandler
from allotment.scheduler.core.quota import QuotaBook
from allotment.scheduler.core.waiting import LEAD, WaitingPods

UID = PodUid("u")
STRANGER = ClusterPod(
    uid=UID,
    namespace="ns",
    name="p",
    node="n1",
    asks=Pod(uid=UID, namespace="ns", name="p"),
    booking=PodBooking(uid=UID, node="n1"),
    problem="it was bound without a placement",
)


def keeper() -> ClusterEventHandler:
    return ClusterEventHandler(Book(Cluster()), QuotaBook())


def test_a_pod_without_a_placement_counts_as_such_until_it_has_ended() -> None:
    kept = keeper()
    kept.pod_put(STRANGER)
    assert kept.unplaced == {UID}
    kept.pod_put(replace(STRANGER, asks=None, booking=None, problem=""))
    assert kept.unplaced == set()


def test_a_gpu_of_which_two_nodes_tell_is_told_once() -> None:
    kept = keeper()
    device = NodeDevice(uuid="GPU-a", model="T4", memory_bytes=16)
    with capture_logs() as logs:
        for name in ("one", "two", "other"):
            uuid = "GPU-b" if name == "other" else "GPU-a"
            kept.node_put(NodeInventory(name=name, devices=(replace(device, uuid=uuid),)))
    told = [each for each in logs if each["log_level"] == "warning"]
    assert [(each["uuid"], each["nodes"]) for each in told] == [("GPU-a", ["one", "two"])]


def test_waiting_pods_are_known_until_they_are_gone() -> None:
    waiting = WaitingPods(clock=lambda: 0.0)
    kept = ClusterEventHandler(Book(Cluster()), QuotaBook(), waiting=waiting)
    pods = [replace(cluster_pod(f"p{number}"), constraints="any") for number in range(LEAD + 3)]
    for pod in pods:
        kept.pod_put(pod)
    waiting.tried(pods[0], ["x"])
    kept.pod_gone(pods[-2].uid)
    found = waiting.next()
    assert found is not None
    assert found.pod is pods[-1]
    assert waiting.next() is None

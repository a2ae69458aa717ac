# SPDX-License-Identifier: Apache-2.0
"""The scheduler with the real kube-scheduler and API server; nodes that only say what they have."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from scheduling import (
    GIB,
    Scheduler,
    add_gpu_nodes,
    gpu_pod,
    inventory,
    placements,
    pods_without_kubelet,
    scheduler_config,
    taken,
)
from testbed.api import Json
from testbed.cluster import Cluster
from testbed.pods import Pods
from testbed.waiting import PATIENCE_S, wait_until


@pytest.fixture(scope="module")
def control_plane(
    testbed_machine: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    del testbed_machine
    state = tmp_path_factory.mktemp("scheduler")
    with Cluster(state=state, settings=None, scheduler_config=scheduler_config()) as made:
        add_gpu_nodes(made, [inventory(f"n{number}", devices=4) for number in range(6)])
        yield made


@pytest.fixture(scope="module")
def scheduler(control_plane: Cluster) -> Iterator[Scheduler]:
    with Scheduler(control_plane) as made:
        yield made


@pytest.fixture
def pods(
    control_plane: Cluster, scheduler: Scheduler, request: pytest.FixtureRequest
) -> Iterator[Pods]:
    # A pod that is gone is out of its figures a moment later.
    wait_until(
        lambda: scheduler.figure('allotment_scheduler_pods{state="bound"}') == 0,
        "end of the pods of the test before",
        explain=lambda: scheduler.get("/metrics")[1],
    )
    name = request.node.name.replace("_", "-")[:50].strip("-")
    with pods_without_kubelet(control_plane, name) as made:
        yield made


def wait_bound(pods: Pods, number: int, *, timeout_s: float = PATIENCE_S) -> list[Json]:
    path = f"/api/v1/namespaces/{pods.namespace}/pods"

    def bound() -> list[Json] | None:
        found = pods.cluster.api.items(path)
        return (
            found if sum(bool(each["spec"].get("nodeName")) for each in found) >= number else None
        )

    return wait_until(bound, f"{number} bound pods", timeout_s=timeout_s)


def test_pods_are_bound_with_their_placement(pods: Pods) -> None:
    for number in range(12):
        pods.create(gpu_pod(f"p{number}", memory="20Gi", compute=25))
    items = wait_bound(pods, 12)
    placed = placements(items)
    assert len(placed) == 12
    for item in items:
        placement = placed[item["metadata"]["name"]]
        assert placement["node"] == item["spec"]["nodeName"]
        assert placement["pod"] == item["metadata"]["uid"]
        part = placement["containers"]["main"]
        assert part["memory"] == 20 * GIB
        assert part["guarantee"] == 2500
        assert part["devices"][0].startswith(f"GPU-{placement['node']}-")
    # Four fit on a device, in memory and in compute: packed, they need three.
    assert taken(items) == dict.fromkeys(taken(items), (80 * GIB, 10_000))
    assert len(taken(items)) == 3


def test_a_pod_for_which_there_is_no_room_is_told_need_and_have(pods: Pods) -> None:
    pods.create(gpu_pod("large", memory="90Gi", compute=None))
    event = pods.wait_event("large", reason="DoesNotFit", contains="90Gi")
    assert "80Gi" in event["message"]
    # kube-scheduler's own words, in the pod's condition: one sentence for all nodes.
    found = pods.wait(
        "large",
        lambda each: "have at most 80Gi" in str(each["status"].get("conditions")),
        "condition with need and have",
    )
    [condition] = found["status"]["conditions"]
    assert condition["reason"] == "Unschedulable"
    assert "6 need a GPU with 90Gi" in condition["message"]


def test_a_pod_that_cannot_be_meant_is_told_the_next_step(pods: Pods) -> None:
    annotations = {"allotment.dev/compute": "300"}
    pods.create(gpu_pod("wrong", annotations=annotations))
    event = pods.wait_event("wrong", reason="BadRequest")
    assert "allotment.dev/compute" in event["message"]


def test_a_place_that_is_given_back_is_given_again(pods: Pods, scheduler: Scheduler) -> None:
    for number in range(24):
        pods.create(gpu_pod(f"whole-{number}", memory=None, compute=100))
    pods.create(gpu_pod("waits", memory=None, compute=100))
    items = wait_bound(pods, 24)
    assert len(taken(items)) == 24
    bound = next(each for each in items if each["spec"].get("nodeName"))["metadata"]["name"]
    path = f"/api/v1/namespaces/{pods.namespace}/pods/{bound}"
    pods.cluster.api.delete(path, gracePeriodSeconds="0")
    wait_bound(pods, 24)
    wait_until(lambda: scheduler.figure('allotment_scheduler_pods{state="bound"}') == 24,
               "24 bound pods in the figures")  # fmt: skip


def test_nothing_is_forgotten_by_a_scheduler_that_is_killed(
    pods: Pods, scheduler: Scheduler
) -> None:
    for number in range(10):
        pods.create(gpu_pod(f"before-{number}", memory="40Gi", compute=50))
    wait_bound(pods, 10)
    scheduler.process.stop(number=signal.SIGKILL)
    for number in range(38):
        pods.create(gpu_pod(f"after-{number}", memory="40Gi", compute=50))
    scheduler.restart(signal.SIGKILL)
    scheduler.wait_ready()
    items = wait_bound(pods, 48, timeout_s=120)
    assert len(placements(items)) == 48
    assert taken(items) == dict.fromkeys(taken(items), (80 * GIB, 10_000))


def test_of_two_replicas_the_one_that_lives_answers(control_plane: Cluster) -> None:
    flags = ("--lease", "default/two-replicas")
    pair = [
        Scheduler(control_plane, *flags, port=9500 + each, name=f"replica-{each}")
        for each in range(2)
    ]
    try:
        leader, follower = wait_until(lambda: led(pair), "a leader and a follower")
        assert follower.get("/readyz")[0] == 200
        assert follower.get("/healthz")[0] == 200
        leader.process.stop(number=signal.SIGKILL)
        wait_until(lambda: leader_of([follower]), "another leader")
        leader.start()
        leader, follower = wait_until(lambda: led(pair), "both again")
        # Told to end, it leaves at once: nobody waits for its lease.
        leader.stop()
        path = "/apis/coordination.k8s.io/v1/namespaces/default/leases/two-replicas"
        held = control_plane.api.get(path)["spec"].get("holderIdentity") or ""
        assert not held.startswith(f"{leader.name}_")
        wait_until(lambda: leader_of([follower]), "a leader")
    finally:
        for each in pair:
            each.stop()


def led(replicas: list[Scheduler]) -> tuple[Scheduler, Scheduler] | None:
    """Who leads of two, and who knows that the other one does."""
    leader = leader_of(replicas)
    if leader is None:
        return None
    (follower,) = (each for each in replicas if each is not leader)
    return (leader, follower) if "another replica leads" in follower.get("/leading")[1] else None


def leader_of(replicas: list[Scheduler]) -> Scheduler | None:
    return next((each for each in replicas if each.get("/leading")[0] == 200), None)


@contextmanager
def configured(cluster: Cluster, config: str) -> Iterator[None]:
    """kube-scheduler with another configuration for the length of a `with`."""
    path = cluster.credentials.folder / "scheduler.yaml"
    before = path.read_text("utf-8")
    kubeconfig = str(cluster.credentials.kubeconfig("scheduler"))
    path.write_text(config.replace("{kubeconfig}", kubeconfig), "utf-8")
    cluster.restart("kube-scheduler")
    try:
        yield
    finally:
        path.write_text(before, "utf-8")
        cluster.restart("kube-scheduler")


def test_whole_nodes_may_be_sent_in_place_of_names(control_plane: Cluster) -> None:
    config = scheduler_config(by_name=False, port=9452)
    with (
        configured(control_plane, config),
        Scheduler(control_plane, "--candidates", "3", port=9452, name="whole-nodes"),
        pods_without_kubelet(control_plane, "whole-nodes") as own,
    ):
        for number in range(3):
            own.create(gpu_pod(f"p{number}", memory="80Gi", compute=100))
        assert len(taken(wait_bound(own, 3))) == 3


def test_a_webhook_that_is_not_installed_is_told(control_plane: Cluster) -> None:
    flags = ("--webhook-listen", "127.0.0.1:9543", "--metrics-listen", "0.0.0.0:9544")
    scheduler = Scheduler(control_plane, *flags, port=9542, name="with-webhook")
    try:
        # It leads, and says what is amiss: its secret and its configuration are not there.
        wait_until(lambda: scheduler.figure("allotment_scheduler_leading") == 1, "a leader")

        def is_told() -> bool:
            status, text = scheduler.get("/readyz")
            return (
                status == 503
                and "the webhook's certificates: " in text
                and len(text.splitlines()) == 1
            )

        wait_until(is_told, "the reason", explain=lambda: str(scheduler.get("/readyz")))
        time.sleep(2.0)  # it asks again
        assert scheduler.process.is_running
    finally:
        scheduler.stop()

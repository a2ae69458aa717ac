# SPDX-License-Identifier: Apache-2.0
"""Pods that wait in kube-scheduler's queue on a large cluster: their nodes are nominated."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator

import pytest
from scheduling import (
    PLACEMENT,
    Scheduler,
    add_gpu_nodes,
    gpu_pod,
    inventory,
    pods_without_kubelet,
    scheduler_config,
)
from testbed.api import Json
from testbed.cluster import Cluster
from testbed.waiting import wait_until

from allotment.kube.objects import NOMINATOR
from allotment.scheduler.core.waiting import LATE_S, LEAD
from allotment.scheduler.nominating import FEWEST_NODES

PODS = 10 * LEAD


@pytest.fixture(scope="module")
def control_plane(
    testbed_machine: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """As many nodes as are needed, with a GPU each."""
    del testbed_machine
    state = tmp_path_factory.mktemp("nominating")
    with Cluster(state=state, settings=None, scheduler_config=scheduler_config()) as made:
        add_gpu_nodes(made, [inventory(f"node-{n}", devices=1) for n in range(FEWEST_NODES)])
        never: Json = {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": "never"},
            "value": 0,
            "preemptionPolicy": "Never",
        }
        made.api.post("/apis/scheduling.k8s.io/v1/priorityclasses", never)
        yield made


def test_pods_that_wait_are_nominated_and_each_has_a_gpu_of_its_own(
    control_plane: Cluster,
) -> None:
    api = control_plane.api
    with Scheduler(control_plane), pods_without_kubelet(control_plane, "waiting") as pods:
        path = f"/api/v1/namespaces/{pods.namespace}/pods"
        before = api.get(path)["metadata"]["resourceVersion"]
        kube_scheduler = control_plane.components["kube-scheduler"].process
        kube_scheduler.send_signal(signal.SIGSTOP)
        try:
            for number in range(PODS):
                pods.create(gpu_pod(f"p-{number}", memory=None, compute=100))
        finally:
            kube_scheduler.send_signal(signal.SIGCONT)
        bound = wait_until(lambda: _bound(api.items(path), PODS), "bound pods")
        # The API server clears nominations at binding: its history has them.
        history = api.text(path, watch="true", resourceVersion=before, timeoutSeconds="1")
    events = [json.loads(line)["object"] for line in history.splitlines()]
    nominated = {
        each["metadata"]["name"]: each["status"]["nominatedNodeName"]
        for each in events
        if each["status"].get("nominatedNodeName")
    }
    nodes = {each["metadata"]["name"]: each["spec"]["nodeName"] for each in bound}
    assert len(nominated) >= PODS // 2
    assert nominated.items() <= nodes.items()
    assert len(set(nodes.values())) == PODS
    assert all(PLACEMENT in each["metadata"]["annotations"] for each in bound)


def test_nominations_of_an_earlier_leader_hold_nothing_up(control_plane: Cluster) -> None:
    """One for a node that is gone leads elsewhere; one for a pod that fits nowhere is withdrawn."""
    api = control_plane.api
    with Scheduler(control_plane), pods_without_kubelet(control_plane, "earlier") as pods:
        path = f"/api/v1/namespaces/{pods.namespace}/pods"
        kube_scheduler = control_plane.components["kube-scheduler"].process
        kube_scheduler.send_signal(signal.SIGSTOP)
        try:
            pods.create(gpu_pod("fits", memory=None, compute=100))
            # kube-scheduler ends no pod for it, and leaves its nomination as it is.
            pods.create(gpu_pod("large", gpus=2, priorityClassName="never"))
            for name, node in (("fits", "gone"), ("large", "node-0")):
                change = {"status": {"nominatedNodeName": node}}
                api.patch(f"{path}/{name}/status", change, fieldManager=NOMINATOR)
        finally:
            kube_scheduler.send_signal(signal.SIGCONT)
        (fits,) = wait_until(lambda: _bound(api.items(path), 1), "bound pod")
        assert fits["metadata"]["name"] == "fits"
        wait_until(
            lambda: "nominatedNodeName" not in api.get(f"{path}/large")["status"],
            "withdrawal",
            timeout_s=4 * LATE_S,
        )


def _bound(items: list[Json], number: int) -> list[Json] | None:
    found = [each for each in items if each["spec"].get("nodeName")]
    return found if len(found) == number else None

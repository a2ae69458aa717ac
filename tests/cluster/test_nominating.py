# SPDX-License-Identifier: Apache-2.0
"""Pods that wait in kube-scheduler's queue on a large cluster: their nodes are nominated."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

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

from allotment.scheduler.core.waiting import LEAD
from allotment.scheduler.nominating import FEWEST_NODES

PODS = 10 * LEAD


def test_pods_that_wait_are_nominated_and_each_has_a_gpu_of_its_own(
    testbed_machine: None, tmp_path: Path
) -> None:
    del testbed_machine
    with Cluster(state=tmp_path, settings=None, scheduler_config=scheduler_config()) as cluster:
        nodes = [inventory(f"node-{number}", devices=1) for number in range(FEWEST_NODES)]
        add_gpu_nodes(cluster, nodes)
        with Scheduler(cluster), pods_without_kubelet(cluster, "waiting") as pods:
            path = f"/api/v1/namespaces/{pods.namespace}/pods"
            before = cluster.api.get(path)["metadata"]["resourceVersion"]
            kube_scheduler = cluster.components["kube-scheduler"].process.pid
            os.kill(kube_scheduler, signal.SIGSTOP)
            try:
                for number in range(PODS):
                    pods.create(gpu_pod(f"p-{number}", memory=None, compute=100))
            finally:
                os.kill(kube_scheduler, signal.SIGCONT)
            bound = wait_until(lambda: _bound(cluster.api.items(path)), "bound pods")
            # The API server clears nominations at binding: its history has them.
            history = cluster.api.text(
                path, watch="true", resourceVersion=before, timeoutSeconds="1"
            )
    events = [json.loads(line)["object"] for line in history.splitlines()]
    assert any(each["status"].get("nominatedNodeName") for each in events)
    assert len({each["spec"]["nodeName"] for each in bound}) == PODS
    assert all(PLACEMENT in each["metadata"]["annotations"] for each in bound)


def _bound(items: list[Json]) -> list[Json] | None:
    found = [each for each in items if each["spec"].get("nodeName")]
    return found if len(found) == PODS else None

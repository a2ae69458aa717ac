# SPDX-License-Identifier: Apache-2.0
"""Pods without GPUs, by the configuration that is printed: in nobody's way, and never waiting."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import count

import pytest
import yaml
from click.testing import CliRunner
from scheduling import PORT, Scheduler, add_gpu_nodes, gpu_pod, inventory, pods_without_kubelet
from testbed.api import Json
from testbed.cluster import Cluster
from testbed.pods import Pods, container, pod
from testbed.waiting import wait_until

from allotment.cli.scheduler import command

PLAIN = 6
_NUMBERS = count(1)


def printed() -> str:
    """What `--print-config` prints, for a kube-scheduler that runs alone and outside of a pod."""
    result = CliRunner().invoke(command, ["--print-config", "--plain-pods", "--listen", f":{PORT}"])
    assert result.exit_code == 0, result.output
    alone: Json = {
        "clientConnection": {"kubeconfig": "{kubeconfig}"},
        "leaderElection": {"leaderElect": False},
    }
    return json.dumps(yaml.safe_load(result.output) | alone)


@pytest.fixture(scope="module")
def control_plane(
    testbed_machine: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Large nodes with GPUs, which kube-scheduler likes best, and a small one without."""
    del testbed_machine
    state = tmp_path_factory.mktemp("plain")
    with Cluster(state=state, settings=None, scheduler_config=printed()) as made:
        add_gpu_nodes(made, [inventory(f"gpu-{number}", devices=2) for number in range(3)])
        made.add_fake_nodes(1, capacity={"cpu": "16"}, prefix="plain")
        yield made


@pytest.fixture
def pods(control_plane: Cluster) -> Iterator[Pods]:
    with pods_without_kubelet(control_plane, f"plain-{next(_NUMBERS)}") as made:
        yield made


def nodes_of(pods: Pods, number: int) -> Counter[str]:
    """Where so many pods are, by the first word of the node's name."""
    path = f"/api/v1/namespaces/{pods.namespace}/pods"
    found: list[str] = []

    def are_bound() -> bool:
        found[:] = [
            each["spec"]["nodeName"]
            for each in pods.cluster.api.items(path)
            if each["spec"].get("nodeName")
        ]
        return len(found) >= number

    wait_until(are_bound, f"{number} bound pods", explain=lambda: str(found))
    return Counter(each.partition("-")[0] for each in found)


def create_plain(pods: Pods) -> None:
    for number in range(PLAIN):
        pods.create(pod(f"p{number}", container(["sleep"], limits={"cpu": "2"})))


def test_they_go_where_no_gpu_is_and_those_with_gpus_go_to_gpus(
    control_plane: Cluster, pods: Pods
) -> None:
    with Scheduler(control_plane) as scheduler:
        scheduler.wait_ready()
        create_plain(pods)
        assert nodes_of(pods, PLAIN) == {"plain": PLAIN}
        pods.create(gpu_pod("share", schedulerName="allotment-scheduler"))
        assert nodes_of(pods, PLAIN + 1) == {"plain": PLAIN, "gpu": 1}


def test_while_nobody_answers_they_are_placed_as_ever(pods: Pods) -> None:
    create_plain(pods)
    pods.create(gpu_pod("share"))
    # As kube-scheduler likes: on the nodes of which the least is taken.
    assert nodes_of(pods, PLAIN)["gpu"] > 0
    # Who asks for a GPU waits for whoever knows which.
    (share,) = (
        each
        for each in pods.cluster.api.items(f"/api/v1/namespaces/{pods.namespace}/pods")
        if each["metadata"]["name"] == "share"
    )
    assert not share["spec"].get("nodeName")

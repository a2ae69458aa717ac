# SPDX-License-Identifier: Apache-2.0
"""Sick GPUs: what is offered, who is told, and that the others go on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest
from stories import (
    GPU,
    GPU_MEMORY,
    NVIDIA,
    PLAIN,
    SOFT,
    NodeAgent,
    node_agent,
    on,
    part,
    undisturbed,
)
from testbed.api import Json
from testbed.cluster import Cluster
from testbed.images import BUSYBOX
from testbed.pods import Pods, container, pod
from testbed.waiting import TestbedError, wait_until

SLEEP = ["sleep", "1000"]


@pytest.fixture
def node(cluster: Cluster) -> Iterator[NodeAgent]:
    """Two soft GPUs, which are well again afterwards."""
    with node_agent(cluster, SOFT) as agent:
        yield agent
        agent.fault("--clear")


def condition(node: NodeAgent) -> Json:
    status = node.cluster.api.get(node.cluster.node_path)["status"]
    return next((each for each in status["conditions"] if each["type"] == "GpuHealthy"), {})


def reset(node: NodeAgent, uuid: str, resource: str, amount: int) -> None:
    """Takes a GPU off the bus for a moment, as whoever resets it. It passes its tests then.

    For longer where the agent, which looks every some seconds, has not come to see it.
    """
    for away_s in (6, 20, 45):
        node.fault("--gpu", uuid, "--lost")
        time.sleep(away_s)
        node.fault("--gpu", uuid, "--found")
        with contextlib.suppress(TestbedError):
            node.cluster.wait_allocatable(resource, amount, timeout_s=40)
            return
    raise TestbedError(f"{uuid} is not offered again\n{node.log_tail()}")


def test_xid_takes_a_gpu_out_and_it_comes_back(node: NodeAgent, pods: Pods) -> None:
    cluster = node.cluster
    pods.create(pod("here", container(SLEEP, image=BUSYBOX, limits=part("4Gi"))))
    pods.wait_ready("here")
    sick = node.share(pods, "here").devices[0].uuid
    (well,) = set(node.gpus()) - {sick}
    other = container(SLEEP, image=BUSYBOX, limits=part("70Gi"))
    pods.create(pod("there", other, annotations=on(well)))
    pods.wait_ready("there")
    memory = str(cluster.api.get(cluster.node_path)["status"]["capacity"][GPU_MEMORY])
    half = f"{int(memory.removesuffix('Mi')) // 2}Mi"
    with undisturbed(pods, "here", "there"):
        node.fault("--gpu", sick, "--xid", "79")
        cluster.wait_allocatable(GPU, 16)
        cluster.wait_allocatable(GPU_MEMORY, half)
        node.wait_node_event("GpuUnhealthy", sick, "79")
        told = pods.wait_event("here", reason="GpuUnhealthy")
        assert sick in told["message"]
        assert [each["reason"] for each in pods.events("there")].count("GpuUnhealthy") == 0
        wait_until(lambda: condition(node).get("status") == "False", "condition")
        assert sick in condition(node)["message"]
        # What comes now goes to the other.
        pods.create(pod("next", container(SLEEP, image=BUSYBOX, limits=part("2Gi"))))
        pods.wait_ready("next")
        assert node.share(pods, "next").devices[0].uuid == well
        reset(node, sick, GPU, 32)
        cluster.wait_allocatable(GPU_MEMORY, memory)
        pods.wait_event("here", reason="GpuRecovered")
        wait_until(lambda: condition(node).get("status") == "True", "condition")
    node.wait_exact()


def test_lost_gpu_of_a_whole_node(cluster: Cluster, pods: Pods) -> None:
    with node_agent(cluster, PLAIN) as node:
        pods.create(pod("one", container(SLEEP, image=BUSYBOX, limits={NVIDIA: 1})))
        pods.wait_ready("one")
        lost = node.share(pods, "one").devices[0].uuid
        node.fault("--gpu", lost, "--lost")
        cluster.wait_allocatable(NVIDIA, 1)
        pods.wait_event("one", reason="GpuUnhealthy", contains=lost)
        node.fault("--gpu", lost, "--found")
        cluster.wait_allocatable(NVIDIA, 2)
        pods.wait_event("one", reason="GpuRecovered", contains=lost)
        # What needs a reset does so for the next agent as well.
        node.fault("--gpu", lost, "--xid", "79")
        cluster.wait_allocatable(NVIDIA, 1)
        node.end()
        node.again()
        node.wait_figure("device_healthy", 1)
        assert node.figure("device_healthy", device=lost) == 0
        cluster.wait_allocatable(NVIDIA, 1)
        assert pods.restarts("one") == 0
        node.fault("--clear")


def test_one_gpu_of_16_that_hangs_stalls_nothing(cluster: Cluster, pods: Pods) -> None:
    spec = "a100-80gb:16"
    node = NodeAgent(cluster, simulated=spec)
    try:
        node.start(SOFT)
        cluster.wait_allocatable(GPU, 256)
        node.end()
        hanging = node.gpus()[7]
        # Longer than anything here waits.
        node.fault("--gpu", hanging, "--hang", "10m")
        node.again()
        cluster.wait_allocatable(GPU, 240)
        for number in range(4):
            name = f"p{number}"
            pods.create(pod(name, container(SLEEP, image=BUSYBOX, limits=part("4Gi"))))
        for number in range(4):
            pods.wait_ready(f"p{number}")
            assert node.share(pods, f"p{number}").devices[0].uuid != hanging
        node.wait_exact()
        pods.delete()
        # It does not wait for the GPU at its end either.
        assert node.end() == 0
    finally:
        node.fault("--clear")
        node.close()

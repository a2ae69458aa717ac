# SPDX-License-Identifier: Apache-2.0
"""MIG devices on a real node, by NVIDIA's strategies: what is offered, and what a pod has of it."""

from __future__ import annotations

import json

import pytest
from stories import (
    GIB,
    GPU,
    MIB,
    NVIDIA,
    NodeAgent,
    burn,
    burn_and_stay,
    burnt,
    node_agent,
    part,
    undisturbed,
)
from testbed.cluster import Cluster
from testbed.pods import Pods, container, pod
from testbed.waiting import TestbedError, wait_until

SMALL = "nvidia.com/mig-1g.10gb"
LARGE = "nvidia.com/mig-3g.40gb"
SMALL_BYTES = 9984 * MIB
"""Of a 1g.10gb on an H100 with 80 GB."""

BESIDE_SOFT = """\
version: v1
flags: {migStrategy: mixed}
allotment: {devices: [{mode: soft}]}
"""
CUTS = """\
version: v1
mig-configs:
  more: [{devices: [0], mig-enabled: true, mig-devices: {1g.10gb: 4, 3g.40gb: 1}}]
  less: [{devices: [0], mig-enabled: true, mig-devices: {1g.10gb: 4}}]
  none: [{devices: [0], mig-enabled: true, mig-devices: {}}]
"""
# What CUDA has in the container, by the driver's own interface.
LOOK = """\
import ctypes, json
cuda = ctypes.CDLL("libcuda.so.1")
count, total = ctypes.c_int(), ctypes.c_size_t()
assert cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
assert cuda.cuDeviceTotalMem_v2(ctypes.byref(total), 0) == 0
print(json.dumps([count.value, total.value]))
"""


def labels(cluster: Cluster) -> dict[str, str]:
    found: dict[str, str] = cluster.api.get(cluster.node_path)["metadata"]["labels"]
    return found


def wait_labels(cluster: Cluster, wanted: dict[str, str]) -> None:
    wait_until(
        lambda: wanted.items() <= labels(cluster).items(),
        f"labels {wanted}",
        explain=lambda: str({key: labels(cluster).get(key) for key in wanted}),
    )


def cut(node: NodeAgent, name: str) -> None:
    """Has the node's first GPU cut anew, by whoever administers it."""
    path = node.cluster.state / "mig.yaml"
    path.write_text(CUTS, "utf-8")
    node.allot("mig", "apply", "--simulated", node.simulated, "-f", str(path), "-c", name)


def test_slices_beside_a_soft_gpu(cluster: Cluster, pods: Pods) -> None:
    machine = "h100-80gb[mig=1g.10gb*3+3g.40gb],h100-80gb"
    with node_agent(cluster, BESIDE_SOFT, simulated=machine) as node:
        cluster.wait_allocatable(SMALL, 3)
        cluster.wait_allocatable(LARGE, 1)
        cluster.wait_allocatable(GPU, 16)
        wait_labels(
            cluster,
            {
                "nvidia.com/mig.strategy": "mixed",
                f"{SMALL}.count": "3",
                f"{SMALL}.product": "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb",
                f"{LARGE}.count": "1",
            },
        )
        split, soft = node.gpus()

        pods.create(pod("slice", container(burn_and_stay("4Gi"), limits={SMALL: "1"})))
        pods.create(pod("part", container(burn_and_stay("5Gi"), limits=part("4Gi"))))
        pods.create(pod("look", container(["python3", "-c", LOOK], limits={SMALL: "1"})))
        there = burnt(pods, "slice")
        assert (there.total_bytes, there.got_bytes, there.errors) == (SMALL_BYTES, 4 * GIB, ())
        beside = burnt(pods, "part")
        assert (beside.uuid, beside.total_bytes) == (soft, 4 * GIB)
        pods.wait_phase("look", "Succeeded")
        assert json.loads(pods.logs("look")) == [1, SMALL_BYTES]
        (device,) = node.share(pods, "slice").devices
        assert device.uuid.startswith("MIG-")
        assert device.name == "NVIDIA H100 80GB HBM3 MIG 1g.10gb"

        # Slices come and go while the agent runs; who has one keeps it.
        with undisturbed(pods, "slice", "part"):
            cut(node, "more")
            cluster.wait_allocatable(SMALL, 4)
            cut(node, "less")
            cluster.wait_allocatable(LARGE, 0)
            wait_until(lambda: f"{LARGE}.count" not in labels(cluster), "labels gone")
            # No program is in it at the moment, and it is the pod's.
            with pytest.raises(
                TestbedError, match=f"in use.* by share {pods.namespace}/slice/main"
            ):
                cut(node, "none")
            # What the GPU has, its slices have.
            node.fault("--gpu", split, "--xid", "79")
            cluster.wait_allocatable(SMALL, 0)
            assert split in pods.wait_event("slice", reason="GpuUnhealthy")["message"]
            cluster.wait_allocatable(GPU, 16)
            assert [each["reason"] for each in pods.events("part")].count("GpuUnhealthy") == 0
        pods.delete()
        node.wait_exact()


def test_all_gpus_cut_alike_are_gpus(cluster: Cluster, pods: Pods) -> None:
    machine = "h100-80gb[mig=1g.10gb*7],h100-80gb[mig=1g.10gb*7]"
    single = "version: v1\nflags: {migStrategy: single}\n"
    with node_agent(cluster, single, simulated=machine) as node:
        cluster.wait_allocatable(NVIDIA, 14)
        wait_labels(
            cluster,
            {
                "nvidia.com/mig.strategy": "single",
                f"{NVIDIA}.product": "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb",
                f"{NVIDIA}.count": "14",
            },
        )
        pods.create(pod("one", container(burn("1Gi"), limits={NVIDIA: "1"})))
        assert burnt(pods, "one").total_bytes == SMALL_BYTES
        # One that is not cut like the others: NVIDIA's plugin gives out none of them either.
        path = cluster.state / "mig.yaml"
        path.write_text(
            "version: v1\nmig-configs: {x: [{devices: [1], mig-enabled: true, mig-devices: {}}]}",
            "utf-8",
        )
        pods.delete()
        node.wait_exact()
        node.allot("mig", "apply", "--simulated", machine, "-f", str(path), "-c", "x")
        cluster.wait_allocatable(NVIDIA, 0)
        node.wait_node_event("ConfigProblem", "device 1 has no MIG devices configured")
        wait_labels(
            cluster,
            {
                f"{NVIDIA}.product": "NVIDIA-H100-80GB-HBM3-MIG-INVALID",
                f"{NVIDIA}.count": "0",
            },
        )


def test_no_strategy_leaves_them_out(cluster: Cluster) -> None:
    machine = "h100-80gb[mig=1g.10gb*3],h100-80gb"
    with node_agent(cluster, "version: v1\n", simulated=machine) as node:
        cluster.wait_allocatable(NVIDIA, 1)
        split, _ = node.gpus()
        node.wait_node_event("ConfigProblem", split, "migStrategy single or mixed")

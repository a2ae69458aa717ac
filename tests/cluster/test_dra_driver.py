# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's DRA driver, unchanged, on a simulated machine: claims become GPUs and MIG slices.

It is one of the programs that tests look for in the folder NVIDIA_PROGRAMS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from claims import (
    API,
    NVIDIAS,
    install_classes,
    nvidias_driver,
    on_nvidias_machine,
    published,
    wait_for_pool,
)
from stories import SOFT, node_agent
from testbed.api import Json
from testbed.cluster import Cluster
from testbed.images import BUSYBOX
from testbed.pods import Pods, container, pod
from testbed.waiting import wait_until

MACHINE = "h100-80gb:2"
NVIDIAS_NAME = SOFT + "  dra:\n    driverName: gpu.nvidia.com\n"
DRAIN = ("--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=60s")
SHOWN = "/dev/nvidia* /usr/lib64/libcuda.so.*"


@pytest.fixture
def devices(cluster: Cluster, nvidia_program: Callable[[str], Path]) -> Iterator[list[Json]]:
    """The devices that NVIDIA's driver publishes of two simulated GPUs, while it runs."""
    for kind in ("gpu", "mig"):
        expression = (
            f"device.driver == '{NVIDIAS}' && device.attributes['{NVIDIAS}'].type == '{kind}'"
        )
        cluster.api.apply(
            f"{API}/deviceclasses/{kind}.nvidia.com",
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "DeviceClass",
                "metadata": {"name": f"{kind}.nvidia.com"},
                "spec": {"selectors": [{"cel": {"expression": expression}}]},
            },
        )
    with nvidias_driver(cluster, nvidia_program("gpu-kubelet-plugin"), MACHINE) as found:
        yield found


def claim(pods: Pods, name: str, kind: str, expression: str = "true") -> Json:
    """Makes a claim of one device, and returns a pod with it that shows what it got."""
    exactly = {
        "deviceClassName": f"{kind}.nvidia.com",
        "selectors": [{"cel": {"expression": expression}}],
    }
    pods.cluster.api.post(
        f"{API}/namespaces/{pods.namespace}/resourceclaims",
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"name": name},
            "spec": {"devices": {"requests": [{"name": "one", "exactly": exactly}]}},
        },
    )
    asking = container(["sh", "-c", f"find {SHOWN} | sort; sleep 1000"], image=BUSYBOX)
    asking["resources"] = {"claims": [{"name": "mine"}]}
    return pod(name, asking, resourceClaims=[{"name": "mine", "resourceClaimName": name}])


def test_a_node_changes_hands_and_back(
    cluster: Cluster, pods: Pods, nvidia_program: Callable[[str], Path]
) -> None:
    """As in the guide: a drained node, the other driver of the same name, the same claim.

    The driver that leaves takes its slices with it no sooner than the kubelet does.
    """
    install_classes(cluster, NVIDIAS)
    program = nvidia_program("gpu-kubelet-plugin")

    def run(name: str) -> str:
        """A pod with a claim that either driver serves; the device that it had."""
        pods.create(claim(pods, name, "gpu"))
        pods.wait_ready(name)
        path = f"{API}/namespaces/{pods.namespace}/resourceclaims/{name}"
        (result,) = cluster.api.get(path)["status"]["allocation"]["devices"]["results"]
        cluster.kubectl_run("drain", cluster.node_name, *DRAIN)
        return str(result["device"])

    def uncordon() -> None:
        cluster.kubectl_run("uncordon", cluster.node_name)

    with nvidias_driver(cluster, program, MACHINE, keeps_slices=True):
        assert run("before") in {"gpu-0", "gpu-1"}
    with node_agent(cluster, NVIDIAS_NAME, simulated=MACHINE) as agent:
        wait_for_pool(cluster, agent.gpus(), NVIDIAS)
        uncordon()
        device = run("ours")
        assert device in {each["name"] for each in published(cluster, NVIDIAS)}
        assert device not in {"gpu-0", "gpu-1"}
        wait_until(lambda: not agent.shares(), "end of the share")
    with nvidias_driver(cluster, program, MACHINE):
        wait_until(
            lambda: {"gpu-0", "gpu-1"} <= {each["name"] for each in published(cluster, NVIDIAS)},
            "slices of NVIDIA's driver alone",
        )
        uncordon()
        assert run("after") in {"gpu-0", "gpu-1"}
        uncordon()


def listed(cluster: Cluster) -> str:
    return cluster.node.run(on_nvidias_machine(MACHINE, "nvidia-smi", "-L")).stdout


def given(pods: Pods, name: str) -> list[str]:
    """The device of a pod's claim, and the files that its container has of a driver."""
    pods.wait_ready(name)
    found = pods.cluster.api.get(f"{API}/namespaces/{pods.namespace}/resourceclaims/{name}")
    (result,) = found["status"]["allocation"]["devices"]["results"]
    return [str(result["device"]), *pods.wait_logs(name, lines=6).split()]


def test_nvidias_dra_driver_serves_claims(
    cluster: Cluster, devices: list[Json], pods: Pods
) -> None:
    gpus = {each["name"]: each["attributes"] for each in devices if "-mig-" not in each["name"]}
    assert sorted(gpus) == ["gpu-0", "gpu-1"]
    for each in gpus.values():
        assert each["uuid"]["string"] in listed(cluster)
        assert each["driverVersion"]["version"] == "580.95.5"
        assert each["resource.kubernetes.io/pcieRoot"]["string"] == "pci0000:00"

    pods.create(claim(pods, "whole", "gpu"))
    gpu, *files = given(pods, "whole")
    nodes = [f"/dev/nvidia{gpu.removeprefix('gpu-')}", "/dev/nvidiactl"]
    assert [each for each in files if each in nodes] == nodes
    assert f"/dev/nvidia{1 - int(gpu[-1])}" not in files
    assert "/usr/lib64/libcuda.so.580.95.05" in files

    profile = f"device.attributes['{NVIDIAS}'].profile == '1g.10gb'"
    pods.create(claim(pods, "slice", "mig", profile))
    mine, *files = given(pods, "slice")
    assert mine.startswith(f"gpu-{1 - int(gpu[-1])}-mig-1g10gb-19-")
    assert len([each for each in files if each.startswith("/dev/nvidia-caps/")]) == 2
    assert listed(cluster).count("MIG 1g.10gb") == 1
    pods.delete()
    wait_until(lambda: "MIG" not in listed(cluster), "end of the slice")

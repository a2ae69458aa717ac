# SPDX-License-Identifier: Apache-2.0
"""Clusters of other GPU systems, as their charts make them, for `allot migrate`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import yaml
from migrated_cluster import AGENT, MigratedCluster

SLICED = """\
version: v1
flags:
  mpsRoot: /run/nvidia/mps
sharing:
  timeSlicing:
    resources:
      - name: nvidia.com/gpu
        replicas: 4
"""
NVIDIA = "nvidia-device-plugin/nvidia-device-plugin"
GPUS = {"nvidia.com/gpu": "8"}
SPECS = {"PASS_DEVICE_SPECS": "true"}
CONFIG_LABEL = "nvidia.com/device-plugin.config"


def container(name: str = "main", *, image: str = "", **more: object) -> dict[str, object]:
    return {"name": name, "image": image, **more}


def variables(**values: str) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in values.items()]


def nvidia(cluster: MigratedCluster) -> None:
    """NVIDIA's chart with time slicing, by a ConfigMap, on two nodes."""
    for name in ("gpu-1", "gpu-2"):
        cluster.add_node(name, labels={"nvidia.com/gpu.present": "true"}, capacity=GPUS)
    cluster.add_node("cpu-1")
    rule = {"key": "nvidia.com/gpu.present", "operator": "In", "values": ["true"]}
    required = {"nodeSelectorTerms": [{"matchExpressions": [rule]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    image = "nvcr.io/nvidia/k8s-device-plugin:v0.20.0"
    cluster.add_daemon_set(
        NVIDIA,
        affinity=affinity,
        containers=[
            container("ctr", image=image, env=variables(DEVICE_LIST_STRATEGY="envvar")),
            container("config", image=image, env=variables(DEFAULT_CONFIG="shared")),
        ],
        volumes=[{"name": "available-configs", "configMap": {"name": "configs"}}],
        runtimeClassName="nvidia",
    )
    cluster.add_daemon_set(f"{NVIDIA}-gpu-feature-discovery", affinity=affinity, image=image)
    cluster.add("config_maps", "nvidia-device-plugin/configs", data={"shared": SLICED})
    cluster.add("config_maps", "other/configs", data={"shared": "not this one"})
    cluster.add_pod("ml/old", "gpu-1", {"nvidia.com/gpu": "1"})
    cluster.add_pod("ml/web", "gpu-1", {"cpu": "1"})


def agent(cluster: MigratedCluster, plan: dict[str, Any]) -> None:
    """What helm installs with the plan's values."""
    systems = plan["values"]["scheduler"].get("takeOver", ())
    args = ["scheduler", *([f"--take-over={','.join(systems)}"] if systems else ())]
    template = {"spec": {"containers": [container("scheduler", args=args)]}}
    cluster.add("deployments", "allotment-system/allotment-scheduler", spec={"template": template})
    cluster.add_daemon_set(
        AGENT,
        selector={
            key: value
            for key, value in plan["values"]["agent"]["nodeSelector"].items()
            if key != "kubernetes.io/os"
        },
    )


def hami(cluster: MigratedCluster) -> None:
    cluster.add_node(
        "gpu-1",
        labels={"gpu": "on"},
        capacity={"nvidia.com/gpu": "20"},
        spec={"taints": [{"key": "team", "value": "x", "effect": "NoSchedule"}]},
    )
    annotations = cluster.nodes["gpu-1"]["metadata"]["annotations"]
    annotations["hami.io/node-nvidia-register"] = "[]"
    flags = ["--mig-strategy=mixed", "--disable-core-limit=true"]
    cluster.add_daemon_set(
        "kube-system/hami-device-plugin",
        selector={"gpu": "on"},
        containers=[container(image="projecthami/hami:v2.10", command=["plugin", *flags])],
    )
    args = ["--node-scheduler-policy=spread", "--gpu-scheduler-policy="]
    image = "projecthami/hami:v2.10"
    template = {"spec": {"containers": [container(image=image, command=["scheduler", *args])]}}
    cluster.add("deployments", "kube-system/hami-scheduler", spec={"template": template})
    cluster.add("webhooks", "hami-webhook")
    section = {
        "nvidia": {
            "resourceCountName": "nvidia.com/gpu",
            "deviceSplitCount": 10,
            "defaultMemory": 4000,
            "gpuCorePolicy": "force",
            "defaultCores": "many",
            "newSetting": 1,
        },
        "mlu": {"resourceCountName": "cambricon.com/vmlu"},
    }
    data = {"device-config.yaml": yaml.safe_dump(section)}
    cluster.add("config_maps", "kube-system/hami-scheduler-device", data=data)
    nodes = [{"name": "gpu-1", "operatingmode": "mig", "devicesplitcount": 5}]
    data = {"config.json": json.dumps({"nodeconfig": nodes})}
    cluster.add("config_maps", "kube-system/hami-device-plugin", data=data)
    cluster.add_pod("ml/old", "gpu-1", {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "4000"})


def volcano(cluster: MigratedCluster) -> None:
    cluster.add_node("gpu-1", capacity={"volcano.sh/vgpu-number": "10"})
    annotations = cluster.nodes["gpu-1"]["metadata"]["annotations"]
    annotations["volcano.sh/node-vgpu-register"] = "x"
    image = "projecthami/volcano-vgpu-device-plugin:v1.11"
    cluster.add_daemon_set("kube-system/volcano-device-plugin", image=image)
    data = {"device-config.yaml": yaml.safe_dump({"nvidia": {"gpuMemoryFactor": 10}})}
    cluster.add("config_maps", "kube-system/volcano-vgpu-device-config", data=data)
    plugin = {"name": "deviceshare", "arguments": {"deviceshare.SchedulePolicy": "binpack"}}
    tiers = [{"plugins": [{"name": "gang"}]}, {"plugins": [plugin]}]
    data = {"volcano-scheduler.conf": yaml.safe_dump({"actions": "allocate", "tiers": tiers})}
    cluster.add("config_maps", "volcano-system/volcano-scheduler-configmap", data=data)
    cluster.add_pod("ml/old", "gpu-1", {"volcano.sh/vgpu-number": "1"})


def aliyun(cluster: MigratedCluster) -> None:
    cluster.add_node("gpu-1", labels={"gpushare": "true"}, capacity={"aliyun.com/gpu-mem": "30"})
    command = ["gpushare-device-plugin-v2", "--memory-unit=MiB", "--health-check"]
    cluster.add_daemon_set(
        "kube-system/gpushare-device-plugin-ds",
        selector={"gpushare": "true"},
        containers=[container(command=command)],
    )
    cluster.add_pod("ml/old", "gpu-1", {"aliyun.com/gpu-mem": "3"})


def tencent(cluster: MigratedCluster) -> None:
    label = {"nvidia-device-enable": "enable"}
    cluster.add_node("gpu-1", labels=label, capacity={"tencent.com/vcuda-core": "100"})
    cluster.add_daemon_set(
        "kube-system/gpu-manager-daemonset",
        selector=label,
        containers=[container(env=variables(EXTRA_FLAGS="--share-mode=true --logtostderr=false"))],
    )
    cluster.add_pod("ml/old", "gpu-1", {"tencent.com/vcuda-core": "50"})


def dra(cluster: MigratedCluster) -> None:
    cluster.add_node("gpu-1")
    image = "registry.k8s.io/dra-driver-nvidia/dra-driver-nvidia-gpu:v0.5"
    gates = "DynamicMIG=true,MPSSupport=false,PassthroughSupport=true,Newer=true"
    cluster.add_daemon_set(
        "dra/nvidia-dra-driver-gpu-kubelet-plugin",
        containers=[
            container("compute-domains", image=image),
            container("gpus", image=image, env=variables(FEATURE_GATES=gates)),
        ],
    )
    cluster.add("device_classes", "gpu.nvidia.com")
    cluster.add("device_classes", "other.example.com")


MADE: dict[str, Callable[[MigratedCluster], None]] = {
    "nvidia": nvidia,
    "hami": hami,
    "volcano": volcano,
    "aliyun": aliyun,
    "tencent": tencent,
    "nvidia-dra": dra,
}

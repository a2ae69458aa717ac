# SPDX-License-Identifier: Apache-2.0
"""ResourceClaims of tests, the pods that use them, and the devices that the agent publishes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from testbed.api import Json
from testbed.cluster import Cluster
from testbed.pods import Pods, container, pod
from testbed.waiting import wait_until

API = "/apis/resource.k8s.io/v1"
DRIVER = "gpu.allotment.dev"
NVIDIAS = "gpu.nvidia.com"
MANIFESTS = Path(__file__).parents[2] / "deploy" / "manifests"
CLASSES = {DRIVER: "device-classes.yaml", NVIDIAS: "device-classes-nvidia.yaml"}


def install_classes(cluster: Cluster, driver: str = DRIVER) -> None:
    for each in yaml.safe_load_all((MANIFESTS / CLASSES[driver]).read_text("utf-8")):
        cluster.api.apply(f"{API}/deviceclasses/{each['metadata']['name']}", each)


def published(cluster: Cluster, driver: str = DRIVER) -> list[Json]:
    """The devices of the node's pool, none without one, and without the time of their taints."""
    (devices,) = wait_until(lambda: _whole(cluster, driver), f"whole pool of {driver}")
    return devices


def _whole(cluster: Cluster, driver: str) -> tuple[list[Json]] | None:
    """The devices, or None while the agent writes the slices of another generation."""
    slices = cluster.api.items(f"{API}/resourceslices", fieldSelector=f"spec.driver={driver}")
    pools = [each["spec"]["pool"] for each in slices]
    if any(
        (each["generation"], each["resourceSliceCount"]) != (pools[0]["generation"], len(slices))
        for each in pools
    ):
        return None
    devices = [device for each in slices for device in each["spec"].get("devices", ())]
    for each in devices:
        for taint in each.get("taints", ()):
            taint.pop("timeAdded", None)
    return (devices,)


def claim(
    pods: Pods,
    name: str,
    *requests: Json,
    config: Sequence[Json] = (),
    driver: str = DRIVER,
) -> None:
    """Makes a claim with these requests."""
    path = f"{API}/namespaces/{pods.namespace}/resourceclaims"
    pods.cluster.api.post(path, written(name, *requests, config=config, driver=driver))


def written(name: str, *requests: Json, config: Sequence[Json] = (), driver: str = DRIVER) -> Json:
    """A claim with these requests and parameters."""
    parameters = [{"opaque": {"driver": driver, "parameters": each}} for each in config]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name},
        "spec": {"devices": {"requests": list(requests), "config": parameters}},
    }


def share(name: str = "gpu", *, count: int = 1, **capacity: str) -> Json:
    """A request for parts of GPUs."""
    exactly: Json = {"deviceClassName": "share.allotment.dev", "count": count}
    if capacity:
        exactly["capacity"] = {"requests": capacity}
    return {"name": name, "exactly": exactly}


def claiming(name: str, command: Sequence[str], claim_name: str, **more: Any) -> Json:  # noqa: ANN401
    """A pod whose container uses a claim."""
    asking = container(command)
    asking["resources"] = {"claims": [{"name": "mine"}]}
    return pod(
        name,
        asking,
        resourceClaims=[{"name": "mine", "resourceClaimName": claim_name}],
        **more,
    )

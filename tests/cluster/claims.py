# SPDX-License-Identifier: Apache-2.0
"""ResourceClaims of tests, the pods that use them, and the devices that the agent publishes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from stories import NodeAgent
from testbed.api import Json
from testbed.cluster import Cluster
from testbed.pods import Pods, container, pod
from testbed.waiting import tail, wait_until

from allotment.model.shares import Share

API = "/apis/resource.k8s.io/v1"
DRIVER = "gpu.allotment.dev"
NVIDIAS = "gpu.nvidia.com"
MANIFESTS = Path(__file__).parents[2] / "deploy" / "manifests"
NVIDIAS_ROOT = "/var/lib/dra"
NVIDIAS_STATE = f"{NVIDIAS_ROOT}-state"
# Its own tool of hooks is part of its image; containers here need no loader cache.
_NVIDIAS_OPTIONS = (
    *("--nvidia-driver-root", NVIDIAS_ROOT),
    *("--container-driver-root", NVIDIAS_ROOT),
    *("--cdi-root", "/var/run/cdi"),
    *("--nvidia-cdi-hook-path", "/bin/true"),
    *("--image-name", "unused"),
    *("--feature-gates", "DynamicMIG=true"),
)
CLASSES = {DRIVER: "device-classes.yaml", NVIDIAS: "device-classes-nvidia.yaml"}


def install_classes(cluster: Cluster, driver: str = DRIVER) -> None:
    for each in yaml.safe_load_all((MANIFESTS / CLASSES[driver]).read_text("utf-8")):
        cluster.api.apply(f"{API}/deviceclasses/{each['metadata']['name']}", each)


def published(cluster: Cluster, driver: str = DRIVER) -> list[Json]:
    """The devices of the node's pool, none without one, and without the time of their taints."""
    (devices,) = wait_until(lambda: _whole(cluster, driver), f"whole pool of {driver}")
    return devices


def wait_for_pool(cluster: Cluster, gpus: Sequence[str], driver: str = DRIVER) -> None:
    """Waits until the pool has these GPUs: that of an agent before has others for a moment."""

    def offered() -> set[str]:
        attributes = [each["attributes"] for each in published(cluster, driver)]
        return {each["uuid"]["string"] for each in attributes if "uuid" in each}

    wait_until(lambda: offered() == set(gpus), "slices", explain=lambda: tail(cluster.log("agent")))


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


def using(name: str, command: Sequence[str], request: str | None = None) -> Json:
    """A container that uses the claim of its pod, or one request of it."""
    uses = {"name": "mine"} if request is None else {"name": "mine", "request": request}
    return {**container(command, name=name), "resources": {"claims": [uses]}}


def of_claim(claim_name: str) -> list[Json]:
    """The claims of a pod whose containers are `using` this one."""
    return [{"name": "mine", "resourceClaimName": claim_name}]


def shares_of(node: NodeAgent, pods: Pods, claim_name: str) -> list[Share]:
    """The shares of a claim."""
    found = node.shares(pods.namespace)
    return [each for each in found if each.owner and each.owner.pod == claim_name]


Story = Callable[[NodeAgent, Pods], Iterator[None]]
"""Makes its claims and pods up to its `yield`, and waits for them after it."""


def play(node: NodeAgent, pods: Pods, *stories: Story) -> None:
    """Plays stories side by side: the pods of all of them start at one time."""
    playing = [story(node, pods) for story in stories]
    for each in playing:
        next(each)
    for each in playing:
        assert next(each, "over") == "over"


# ---- preparation that failed ---------------------------------------------------------------------

NOT_PREPARED = "FailedPrepareDynamicResources"
"""The reason of the kubelet's event on a pod whose claim could not be prepared."""


# ---- NVIDIA's own driver -------------------------------------------------------------------------


def on_nvidias_machine(machine: str, *command: str | Path) -> list[str]:
    """A command that sees the driver's files of a simulated machine."""
    where = ("--simulated", machine, "--driver-root", NVIDIAS_ROOT, "--state", NVIDIAS_STATE)
    return [sys.executable, "-m", "allotment", "env", *where, "--", *map(str, command)]


@contextmanager
def nvidias_driver(
    cluster: Cluster, program: Path, machine: str, *, keeps_slices: bool = False
) -> Iterator[list[Json]]:
    """Runs `gpu-kubelet-plugin` on a simulated machine; yields the devices that it publishes.

    `keeps_slices`: they are left to the kubelet, which deletes them 30 s after the driver's end.
    """
    flags = ("--node-name", cluster.node_name, "--kubeconfig", cluster.kubeconfig)
    log = cluster.log("dra-driver")
    with log.open("a", encoding="utf-8") as file:
        driver = cluster.node.popen(
            on_nvidias_machine(machine, program, *flags, *_NVIDIAS_OPTIONS),
            folder=Path("/"),
            stdout=file,
            stderr=file,
        )

    def devices() -> list[Json]:
        assert driver.is_running, tail(log)
        return published(cluster, NVIDIAS)

    try:
        yield wait_until(devices, "slices of the driver's", explain=lambda: tail(log))
    finally:
        driver.stop()
        if not keeps_slices:
            cluster.api.delete(f"{API}/resourceslices")

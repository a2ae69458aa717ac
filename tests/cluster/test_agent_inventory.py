# SPDX-License-Identifier: Apache-2.0
"""What the agent tells schedulers about its devices, on the real node's object.

And what a scheduler's binding tells the agent: placement and node come in one write.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
from stories import (
    GIB,
    GPU,
    GPU_MEMORY,
    PLAIN,
    SOFT,
    TWO_GPUS,
    NodeAgent,
    burn_and_stay,
    burnt,
    node_agent,
    part,
)
from testbed.api import Json
from testbed.cluster import Cluster
from testbed.pods import Pods, container, pod
from testbed.waiting import wait_until

from allotment.kube.inventories import CORDONS, DEVICES, decode
from allotment.model.clusters import NodeDevice, NodeInventory, TakenPart
from allotment.model.quantities import parse_whole

SECOND = "second-scheduler"


@pytest.fixture(scope="module")
def node(cluster: Cluster) -> Iterator[NodeAgent]:
    """Two GPUs of 80 GiB in mode soft."""
    with node_agent(cluster, SOFT) as agent:
        yield agent


def text_of(cluster: Cluster) -> str | None:
    annotations = cluster.api.get(cluster.node_path)["metadata"].get("annotations", {})
    text = annotations.get(DEVICES)
    return None if text is None else str(text)


def annotate(cluster: Cluster, key: str, text: str | None) -> None:
    cluster.api.patch(cluster.node_path, {"metadata": {"annotations": {key: text}}})


def told(cluster: Cluster) -> NodeInventory | None:
    text = text_of(cluster)
    return None if text is None else decode(cluster.node_name, text)


def wait_told(
    cluster: Cluster, what: str, is_so: Callable[[tuple[NodeDevice, ...]], bool]
) -> tuple[NodeDevice, ...]:
    def look() -> tuple[NodeDevice, ...] | None:
        found = told(cluster)
        return found.devices if found is not None and is_so(found.devices) else None

    return wait_until(look, what, explain=lambda: str(text_of(cluster)))


def wait_taken(cluster: Cluster, **gib: int) -> None:
    """Waits until just so much of these devices, by index, is taken: `_0=4`."""
    wanted = {int(key.strip("_")): amount * GIB for key, amount in gib.items()}

    def is_so(devices: tuple[NodeDevice, ...]) -> bool:
        found = {each.index: each.taken.memory for each in devices if each.taken != TakenPart()}
        return found == wanted

    wait_told(cluster, f"taken {wanted}", is_so)


def bind(
    pods: Pods, body: Json, devices: list[str], *, memory: int, container_name: str = "main"
) -> None:
    """Creates a pod and binds it, as a scheduler does that has chosen its devices."""
    body["spec"]["schedulerName"] = SECOND
    made = pods.create(body)["metadata"]
    cluster = pods.cluster
    placement = {
        "version": 1,
        "node": cluster.node_name,
        "pod": made["uid"],
        "containers": {container_name: {"devices": devices, "memory": memory}},
    }
    cluster.api.post(
        f"/api/v1/namespaces/{pods.namespace}/pods/{made['name']}/binding",
        {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {
                "name": made["name"],
                "uid": made["uid"],
                "annotations": {"allotment.dev/placement": json.dumps(placement)},
            },
            "target": {"apiVersion": "v1", "kind": "Node", "name": cluster.node_name},
        },
    )


def test_devices_are_told_from_the_start(node: NodeAgent, cluster: Cluster) -> None:
    # Until it is told anew, what another agent told is there.
    devices = wait_told(
        cluster,
        "two soft devices",
        lambda found: len(found) == 2 and {each.modes for each in found} == {("soft",)},
    )
    assert [each.uuid for each in devices] == node.gpus()
    assert [each.index for each in devices] == [0, 1]
    assert {each.model for each in devices} == {"NVIDIA A100-SXM4-80GB"}
    assert {each.problem for each in devices} == {""}
    # Both together are the node's quantity, to the byte.
    together = sum(each.memory_bytes for each in devices)

    def offered() -> int:
        allocatable = cluster.api.get(cluster.node_path)["status"]["allocatable"]
        return parse_whole(allocatable.get(GPU_MEMORY, "0"))

    wait_until(
        lambda: offered() == together, "their memory together", explain=lambda: str(offered())
    )
    inventory = told(cluster)
    assert inventory is not None
    assert inventory.host_budget_bytes > 0
    (points,) = inventory.links.values()
    assert points > 0


def test_what_no_scheduler_placed_is_told_as_taken(
    node: NodeAgent, cluster: Cluster, pods: Pods
) -> None:
    cluster.wait_allocatable(GPU, 32)
    first, second = node.gpus()
    wait_taken(cluster)
    node.allot(
        *("cdi", "create", "--memory", "3Gi", "--compute", "20", "--name", "desk"),
        *("--gpu", second, "--simulated", TWO_GPUS),
    )
    try:
        wait_taken(cluster, _1=3)
        # One with `nodeName` and nothing else: the agent places it.
        body = pod("alone", container(burn_and_stay("1Gi"), limits=part("4Gi", compute=30)))
        body["spec"]["nodeName"] = cluster.node_name
        pods.create(body)
        assert burnt(pods, "alone").total_bytes == 4 * GIB
        where = node.gpus().index(node.share(pods, "alone").devices[0].uuid)
        wait_taken(cluster, **({"_0": 4, "_1": 3} if where == 0 else {"_1": 7}))
        devices = told(cluster)
        assert devices is not None
        assert sum(each.taken.guarantee for each in devices.devices) == 5000
        # One that a scheduler has placed is that one's to count.
        placed = pod("placed", container(burn_and_stay("1Gi"), limits=part("5Gi")))
        bind(pods, placed, [first], memory=5 * GIB)
        assert burnt(pods, "placed").total_bytes == 5 * GIB
        assert node.share(pods, "placed").devices[0].uuid == first
        pods.delete("alone")
        wait_taken(cluster, _1=3)
    finally:
        node.allot("rm", "desk")
    wait_taken(cluster)
    assert burnt(pods, "placed").total_bytes == 5 * GIB
    node.wait_exact()


def test_sick_and_cordoned_gpus_are_told(node: NodeAgent, cluster: Cluster, pods: Pods) -> None:
    first, second = node.gpus()
    wait_told(cluster, "well devices", lambda found: not any(each.problem for each in found))
    node.fault("--gpu", first, "--lost")
    try:
        found = wait_told(cluster, "a lost device", lambda found: bool(found[0].problem))
        assert found[1].problem == ""
    finally:
        node.fault("--gpu", first, "--found")
    wait_told(cluster, "a well device", lambda found: not found[0].problem)
    annotate(cluster, CORDONS[0], second)
    try:
        wait_told(cluster, "a cordoned device", lambda found: "cordoned" in found[1].problem)
        pods.create(pod("beside", container(burn_and_stay("1Gi"), limits=part("2Gi"))))
        assert burnt(pods, "beside").total_bytes == 2 * GIB
        assert node.share(pods, "beside").devices[0].uuid == first
    finally:
        annotate(cluster, CORDONS[0], None)
    wait_told(cluster, "no cordon", lambda found: not found[1].problem)


def test_what_others_write_there_is_put_right(node: NodeAgent, cluster: Cluster) -> None:
    # What other tests' pods had is told for as long as their shares are there.
    wait_told(
        cluster,
        "two free devices",
        lambda found: len(found) == 2 and not any(each.taken.shares for each in found),
    )
    right = text_of(cluster)
    for wrong in ('{"version":1,"devices":[]}', "{", None):
        annotate(cluster, DEVICES, wrong)
        wait_until(
            lambda: text_of(cluster) == right,
            "the right annotation",
            explain=lambda: f"wanted {right}\nis {text_of(cluster)}\n{node.log_tail()}",
        )


def test_a_node_without_parts_tells_nothing(node: NodeAgent, cluster: Cluster) -> None:
    wait_told(cluster, "two devices", lambda found: len(found) == 2)
    with node.configured(PLAIN, back_to=SOFT):
        wait_until(lambda: text_of(cluster) is None, "no annotation")
    wait_told(cluster, "two devices", lambda found: len(found) == 2)


def test_a_placement_that_contradicts_what_is_asked_for_is_refused(
    node: NodeAgent, cluster: Cluster, pods: Pods
) -> None:
    # No scheduler waits until the kubelet has GPUs to give.
    cluster.wait_allocatable(GPU, 32)
    first, _ = node.gpus()
    body = pod("wrong", container(burn_and_stay("1Gi"), limits=part("5Gi")))
    bind(pods, body, [first], memory=6 * GIB)
    event = pods.wait_event("wrong", reason="ShareRefused")
    assert "allotment.dev/placement has 6442450944 bytes of each device" in event["message"]
    assert not [each for each in node.shares(pods.namespace) if "/wrong/" in each.name]

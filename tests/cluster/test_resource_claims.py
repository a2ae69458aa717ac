# SPDX-License-Identifier: Apache-2.0
"""ResourceClaims on the stock kube-scheduler and kubelet: shares, whole GPUs and MIG slices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml
from stories import GIB, SOFT, NodeAgent, burn, burn_and_stay, burnt, exit_code, node_agent
from testbed.api import Json
from testbed.cluster import Cluster
from testbed.pods import Pods, container, pod
from testbed.waiting import tail, wait_until

API = "/apis/resource.k8s.io/v1"
DRIVER = "gpu.allotment.dev"
CLASSES = Path(__file__).parents[2] / "deploy" / "manifests" / "device-classes.yaml"


@pytest.fixture(scope="module")
def node(cluster: Cluster) -> Iterator[NodeAgent]:
    """Two GPUs of 80 GiB, and the classes of devices."""
    for each in yaml.safe_load_all(CLASSES.read_text("utf-8")):
        cluster.api.apply(f"{API}/deviceclasses/{each['metadata']['name']}", each)
    with node_agent(cluster, SOFT) as agent:
        wait_until(lambda: published(cluster), "slices", explain=lambda: tail(cluster.log("agent")))
        yield agent


def published(cluster: Cluster) -> list[Json]:
    """The devices of the node's whole pool."""
    slices = cluster.api.items(f"{API}/resourceslices", fieldSelector=f"spec.driver={DRIVER}")
    pools = [each["spec"]["pool"] for each in slices]
    is_whole = bool(pools) and all(
        (each["generation"], each["resourceSliceCount"]) == (pools[0]["generation"], len(slices))
        for each in pools
    )
    return [device for each in slices for device in each["spec"].get("devices", ())] * is_whole


def claim(
    pods: Pods,
    name: str,
    *requests: Json,
    config: Sequence[Json] = (),
) -> None:
    """Makes a claim with these requests."""
    parameters = [{"opaque": {"driver": DRIVER, "parameters": each}} for each in config]
    pods.cluster.api.post(
        f"{API}/namespaces/{pods.namespace}/resourceclaims",
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"name": name},
            "spec": {"devices": {"requests": list(requests), "config": parameters}},
        },
    )


def share(name: str = "gpu", *, count: int = 1, **capacity: str) -> Json:
    """A request for parts of GPUs."""
    exactly: Json = {"deviceClassName": "share.allotment.dev", "count": count}
    if capacity:
        exactly["capacity"] = {"requests": capacity}
    return {"name": name, "exactly": exactly}


def claiming(name: str, command: Sequence[str], claim_name: str, **more: object) -> Json:
    """A pod whose container uses a claim."""
    asking = container(command)
    asking["resources"] = {"claims": [{"name": "mine"}]}
    return pod(
        name,
        asking,
        resourceClaims=[{"name": "mine", "resourceClaimName": claim_name}],
        **more,
    )


def test_a_claim_has_the_memory_that_it_asked_for_and_no_more(node: NodeAgent, pods: Pods) -> None:
    claim(pods, "greedy", share(memory="4Gi", compute="30"))
    pods.create(claiming("greedy", burn("5Gi"), "greedy"))
    refused = pods.wait_phase("greedy", "Failed")
    said = burnt(pods, "greedy")
    assert said.total_bytes == 4 * GIB
    assert 3 * GIB < said.got_bytes < 4 * GIB
    assert set(said.errors) == {"CUDA_ERROR_OUT_OF_MEMORY"}
    assert exit_code(refused) == 9
    pods.delete()
    wait_until(lambda: not node.shares(), "end of the share")


def test_a_claim_of_two_pods_is_one_share(node: NodeAgent, pods: Pods) -> None:
    claim(pods, "both", share(memory="6Gi"))
    pods.create(claiming("one", burn_and_stay("3Gi"), "both"))
    pods.create(claiming("two", burn_and_stay("1Gi"), "both"))
    assert burnt(pods, "one").total_bytes == burnt(pods, "two").total_bytes == 6 * GIB
    (only,) = node.shares()
    assert only.owner is not None
    assert (only.owner.pod, only.owner.container) == ("both", "gpu")
    assert only.devices[0].memory_bytes == 6 * GIB

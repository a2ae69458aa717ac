# SPDX-License-Identifier: Apache-2.0
"""ResourceClaims on the stock kube-scheduler and kubelet: parts of GPUs, and whole ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from claims import DRIVER, claim, claiming, install_classes, published, share
from stories import GIB, SOFT, NodeAgent, burn, burn_and_stay, burnt, exit_code, node_agent
from testbed.cluster import Cluster
from testbed.pods import Pods, container, pod
from testbed.waiting import tail, wait_until


@pytest.fixture(scope="module")
def node(cluster: Cluster) -> Iterator[NodeAgent]:
    """Two GPUs of 80 GiB, and the classes of devices."""
    install_classes(cluster)
    with node_agent(cluster, SOFT) as agent:
        wait_until(lambda: published(cluster), "slices", explain=lambda: tail(cluster.log("agent")))
        yield agent


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


def test_parameters_say_the_rest(node: NodeAgent, pods: Pods) -> None:
    config = {
        "apiVersion": "allotment.dev/v1",
        "kind": "ShareConfig",
        "compute": ":80",
        "class": "latency",
        "weight": 200,
    }
    claim(pods, "tuned", share(memory="4Gi", compute="30"), config=[config])
    pods.create(claiming("tuned", burn_and_stay("1Gi"), "tuned"))
    burnt(pods, "tuned")
    (only,) = node.shares()
    compute = only.devices[0].compute
    assert (compute.guarantee, compute.ceiling) == (3000, 8000)
    assert (str(compute.kind), compute.weight) == ("latency", 200)


def test_wrong_parameters_are_told_with_their_path(node: NodeAgent, pods: Pods) -> None:
    config = {"apiVersion": "allotment.dev/v1", "kind": "ShareConfig", "wieght": 200}
    claim(pods, "wrong", share(memory="4Gi"), config=[config])
    pods.create(claiming("wrong", burn("1Gi"), "wrong"))
    event = pods.wait_event("wrong", reason="FailedPrepareDynamicResources")
    assert "devices.config[0].opaque.parameters.wieght is unknown" in event["message"]
    assert "weight" in event["message"]
    assert not node.shares()


def test_requests_of_a_claim_are_shares_of_their_own(node: NodeAgent, pods: Pods) -> None:
    claim(pods, "pair", share("large", memory="20Gi"), share("small", memory="2Gi"))
    asking = [
        {**container(burn_and_stay("1Gi"), name=name), "resources": {"claims": [wanted]}}
        for name, wanted in (
            ("one", {"name": "mine", "request": "large"}),
            ("two", {"name": "mine", "request": "small"}),
        )
    ]
    pods.create(
        pod("pair", *asking, resourceClaims=[{"name": "mine", "resourceClaimName": "pair"}])
    )
    assert burnt(pods, "pair", "one").total_bytes == 20 * GIB
    assert burnt(pods, "pair", "two").total_bytes == 2 * GIB
    assert len(node.shares()) == 2


def test_the_fullest_gpu_is_taken_first_and_a_whole_one_is_an_empty_one(
    node: NodeAgent, pods: Pods
) -> None:
    for name in ("a", "b"):
        claim(pods, name, share(memory="10Gi"))
        pods.create(claiming(name, burn_and_stay("1Gi"), name))
        burnt(pods, name)
    assert len({device.uuid for each in node.shares() for device in each.devices}) == 1
    claim(pods, "whole", {"name": "gpu", "exactly": {"deviceClassName": DRIVER}})
    pods.create(claiming("whole", burn_and_stay("1Gi"), "whole"))
    assert burnt(pods, "whole").total_bytes > 78 * GIB
    shares = {each.owner.pod: each for each in node.shares() if each.owner}
    assert shares["whole"].mode == "exclusive"
    assert shares["whole"].devices[0].uuid != shares["a"].devices[0].uuid

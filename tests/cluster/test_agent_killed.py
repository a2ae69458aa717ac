# SPDX-License-Identifier: Apache-2.0
"""The agent is killed between any two steps: whatever was half done is done by the next one.

`ALLOTMENT_KILL_AT` names a step at which the agent kills itself (`allotment.shares.failpoints`).
Each agent here dies at another one, of what pods are starting or ending at that moment; the last
one lives, and finds what all of them left.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from stories import (
    GIB,
    SOFT,
    NodeAgent,
    burn,
    burnt,
    node_agent,
    part,
    undisturbed,
    wait_taken_on,
)
from testbed.api import Json
from testbed.cluster import Cluster
from testbed.images import BUSYBOX
from testbed.pods import Pods, container, pod
from testbed.waiting import wait_until

from allotment.shares.failpoints import KILL_VARIABLE

SLEEP = ["sleep", "1000"]

STARTING = (
    "tenancy.adopted",
    "tenancy.claimed",
    "tenancy.decided",
    "prepare.begun",
    "create.placed",
    "create.drafted",
    "create.enforced",
    "create.filled",
    "create.recorded",
    "create.shown",
    "prepare.made",
    "publish.drafted",
    "publish.shown",
    "tenancy.prepared",
)
ENDING = (
    "tenancy.ending",
    "end.begun",
    "remove.unpublished",
    "remove.hidden",
    "remove.freed",
    "remove.cleared",
    "tenancy.ended",
)


@pytest.fixture(scope="module")
def served(cluster: Cluster) -> Iterator[NodeAgent]:
    """Two soft GPUs."""
    with node_agent(cluster, SOFT) as agent:
        yield agent


@pytest.fixture
def node(served: NodeAgent) -> NodeAgent:
    """With an agent, whatever the test before did to it."""
    if not served.is_running:
        served.again()
    return served


def asking(name: str, number: int) -> Json:
    """A pod with an amount of its own."""
    limits = part(f"{number}Gi", compute=5)
    return pod(name, container(SLEEP, image=BUSYBOX, limits=limits), restart="Always")


def die(node: NodeAgent, point: str) -> None:
    """Has the running agent's successor die at a step, at once or when something is asked of it."""
    node.end()
    process = node.again(wait=False, environment={KILL_VARIABLE: point})
    wait_until(
        lambda: not process.is_running or node.is_served(),
        "agent that is ready or dead",
        explain=node.log_tail,
    )


def wait_death(node: NodeAgent, point: str, pods: Pods) -> None:
    """Waits until the agent has died of a step."""
    process = node.process
    assert process is not None
    wait_until(
        lambda: not process.is_running,
        f"end at {point}",
        explain=lambda: "\n".join([*map(pods.explain, pods.names()), node.explain()]),
    )
    assert process.wait(1) == -9, node.log_tail()


@pytest.mark.timeout(420)
def test_killed_at_any_step_of_a_start(node: NodeAgent, pods: Pods) -> None:
    pods.create(pod("bystander", container(SLEEP, image=BUSYBOX, limits=part("9Gi"))))
    pods.wait_ready("bystander")
    bystander = node.share(pods, "bystander")
    names = {point: point.replace(".", "-") for point in STARTING}
    with undisturbed(pods, "bystander"):
        for number, (point, name) in enumerate(names.items(), start=1):
            die(node, point)
            pods.create(asking(name, number))
            wait_death(node, point, pods)
        node.again()
        wait_taken_on(pods, *names.values())
        for number, name in enumerate(names.values(), start=1):
            share = node.share(pods, name)
            assert [each.memory_bytes for each in share.devices] == [number * GIB]
            assert share.devices[0].compute.guarantee == 500
        assert node.share(pods, "bystander") == bystander
        node.wait_exact()
    # What they left half done stands in nobody's way.
    pods.delete()
    node.wait_empty()
    pods.create(pod("after", container(burn("75Gi"), limits=part("76Gi"))))
    pods.wait_phase("after", "Succeeded")
    assert burnt(pods, "after").got_bytes == 75 * GIB


@pytest.mark.timeout(420)
def test_killed_at_any_step_of_an_end(node: NodeAgent, pods: Pods) -> None:
    names = [point.replace(".", "-") for point in ENDING]
    for name in ("bystander", *names):
        pods.create(pod(name, container(SLEEP, image=BUSYBOX, limits=part("4Gi", compute=5))))
    for name in names:
        pods.wait_ready(name)
    with undisturbed(pods, "bystander"):
        for point, name in zip(ENDING, names, strict=True):
            die(node, point)
            pods.delete(name, wait=False)
            wait_death(node, point, pods)
        node.again()
        wait_until(
            lambda: [each.name.split("/")[1] for each in node.shares()] == ["bystander"],
            "end of all other shares",
            explain=node.explain,
        )
        node.wait_exact()
    pods.delete()
    node.wait_empty()

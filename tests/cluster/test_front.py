# SPDX-License-Identifier: Apache-2.0
"""Agent, kubelet, runtime and node go away while pods arrive: none of the pods fails.

The kubelet has its default intervals: for ten seconds after a loss the scheduler still sends pods.
"""

from __future__ import annotations

import random
import signal
import socket
import time
from collections.abc import Callable, Iterator

import pytest
from claims import claim, claiming, install_classes, share, shares_of
from stories import (
    GIB,
    SOFT,
    NodeAgent,
    burn_and_stay,
    burnt,
    deployment,
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

SLEEP = ["sleep", "1000"]


@pytest.fixture(scope="module")
def served(cluster: Cluster) -> Iterator[NodeAgent]:
    """Two soft GPUs."""
    with node_agent(cluster, SOFT) as agent:
        cluster.wait_allocatable("allotment.dev/gpu", 32)
        yield agent


@pytest.fixture
def node(served: NodeAgent) -> NodeAgent:
    """With an agent, whatever the test before did to it."""
    if not served.is_running:
        served.again()
    return served


def small(name: str) -> Json:
    return pod(name, container(SLEEP, image=BUSYBOX, limits=part("1Gi")), restart="Always")


def failed(pods: Pods) -> list[str]:
    """Every pod of the namespace that is Failed, of whichever owner, with the reason."""
    found = pods.cluster.api.items(f"/api/v1/namespaces/{pods.namespace}/pods")
    return [
        f"{each['metadata']['name']}: {each['status'].get('message')}"
        for each in found
        if each["status"].get("phase") == "Failed"
    ]


def test_the_agent_is_killed_twenty_times_while_pods_arrive(node: NodeAgent, pods: Pods) -> None:
    moments = random.Random(15)  # noqa: S311 - the same moments each time
    names = [f"p{number}" for number in range(20)]
    for name in names:
        pods.create(small(name))
        time.sleep(moments.uniform(0, 0.6))
        node.end(signal.SIGKILL)
        node.again(wait=False)
    wait_taken_on(pods, *names)
    assert failed(pods) == []
    node.wait_exact()


def test_the_agent_is_away_for_twenty_seconds(node: NodeAgent, pods: Pods) -> None:
    """Pods arrive one by one and of a Deployment, one goes, and a container crashes meanwhile."""
    path = f"/apis/apps/v1/namespaces/{pods.namespace}/deployments"
    for name in ("before", "goes"):
        pods.create(small(name))
    burns = container(burn_and_stay("512Mi"), limits=part("3Gi"))
    pods.create(pod("crashes", burns, restart="Always"))
    assert burnt(pods, "crashes").total_bytes == 3 * GIB
    crashing = node.share(pods, "crashes")
    wait_taken_on(pods, "before", "goes", "crashes")
    with undisturbed(pods, "before"):
        node.end(signal.SIGTERM)
        node.kill_container(pods, "crashes")
        pods.delete("goes")
        pods.cluster.api.post(path, deployment("d", SLEEP, part("1Gi"), replicas=3))
        names = [f"p{number}" for number in range(10)]
        for name in names:
            pods.create(small(name))
            time.sleep(2)
        assert failed(pods) == []
        node.again()
        wait_taken_on(pods, *names)
        pods.wait_restarted("crashes")
        assert burnt(pods, "crashes").total_bytes == 3 * GIB
        assert node.share(pods, "crashes") == crashing
        wait_until(
            lambda: pods.cluster.api.get(f"{path}/d")["status"].get("readyReplicas") == 3,
            "three pods of the Deployment",
        )
    assert failed(pods) == []
    assert len(pods.names()) == 15
    pods.cluster.api.delete(f"{path}/d", propagationPolicy="Foreground")
    node.wait_exact()


def test_agent_runtime_and_kubelet_are_killed_together(
    node: NodeAgent, cluster: Cluster, pods: Pods
) -> None:
    runs = [f"r{number}" for number in range(4)]
    for name in runs:
        pods.create(small(name))
    wait_taken_on(pods, *runs)
    with undisturbed(pods, *runs):
        arrive = [f"a{number}" for number in range(8)]
        for name in arrive:
            pods.create(small(name))
        wait_until(lambda: len(node.shares(pods.namespace)) >= 6, "some shares", every_s=0.01)
        node.end(signal.SIGKILL)
        for name in ("kubelet", "containerd"):
            cluster.stop(name, signal.SIGKILL)
        for name in ("containerd", "kubelet"):
            cluster.start(name)
        pods.create(small("later"))
        node.again()
        wait_taken_on(pods, *arrive, "later")
    assert failed(pods) == []
    node.wait_exact()


def test_a_new_front_takes_over_while_pods_arrive(
    node: NodeAgent, cluster: Cluster, pods: Pods
) -> None:
    """The one that the agent started ends by itself, as soon as the new one is ready."""
    former = its_pid = cluster.front_pid
    names = [f"p{number}" for number in range(16)]
    front = None
    for number, name in enumerate(names):
        pods.create(small(name))
        if number == 4:
            front = cluster.start_front()
        if number == 8:
            wait_until(lambda: cluster.front_pid not in {None, former}, "new front")
            its_pid = cluster.front_pid
        time.sleep(0.3)
    wait_until(lambda: not cluster.node.path(f"/proc/{former}").exists(), "end of the former front")
    wait_taken_on(pods, *names)
    assert failed(pods) == []
    node.wait_exact()
    assert front is not None
    assert front.is_running
    assert cluster.front_pid == its_pid  # the agent has started no third one
    front.stop()  # it is the test's, and the agent starts another one


def test_the_node_reboots_with_a_front_of_its_own(own_cluster: Callable[..., Cluster]) -> None:
    """A service of the node is there before the kubelet, which no pod can be.

    A pod with a ResourceClaim waits for the agent.
    """
    own = own_cluster()
    pods = Pods(own, "default")
    install_classes(own)
    sizes = {"p1": GIB, "p2": 2 * GIB, "p3": 3 * GIB, "claimed": 4 * GIB}
    with node_agent(own, SOFT) as node:
        claim(pods, "mine", share(memory="4Gi", compute="10"))
        pods.create(claiming("claimed", burn_and_stay("512Mi"), "mine", restart="Always"))
        for number in (1, 2, 3):
            limits = part(f"{number}Gi")
            pods.create(
                pod(
                    f"p{number}", container(burn_and_stay("512Mi"), limits=limits), restart="Always"
                )
            )
        assert {name: burnt(pods, name).total_bytes for name in sizes} == sizes
        (before,) = shares_of(node, pods, "mine")
        ready = own.state / "notify"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
            systemd.bind(str(ready))
            systemd.settimeout(90)

            def start_front() -> None:
                """As systemd starts a service of `Type=notify` before the kubelet."""
                own.start_front(environment={"NOTIFY_SOCKET": str(ready)})
                assert systemd.recv(64) == b"READY=1"

            own.reboot_node(at_boot=start_front)
        node.again()
        for name in sizes:
            pods.wait_restarted(name, timeout_s=120)
        wait_taken_on(pods, "p1", "p2", "p3")
        assert {name: burnt(pods, name).total_bytes for name in sizes} == sizes
        (after,) = shares_of(node, pods, "mine")
        assert (after.id, after.devices) == (before.id, before.devices)
        assert failed(pods) == []
        pods.delete("claimed")
        wait_until(lambda: not shares_of(node, pods, "mine"), "end of the claim's share")
        node.wait_exact()

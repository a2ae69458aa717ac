# SPDX-License-Identifier: Apache-2.0
"""Kubelet, API server and node go away and come back: who runs goes on, who starts gets its own.

The API server's own record of requests (its audit log) is read here too: what the agent asked for.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from stories import (
    GIB,
    SOFT,
    NodeAgent,
    burn_and_stay,
    burnt,
    container_id,
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
AWAY_S = 30.0
"""Longer than any time-out of the agent's requests and of the kubelet's first retries."""


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


def asking(number: int) -> Json:
    """A pod that stays, with an amount of its own."""
    body = container(SLEEP, image=BUSYBOX, limits=part(f"{number}Gi"))
    return pod(f"p{number}", body, restart="Always")


def check(node: NodeAgent, pods: Pods, *numbers: int) -> None:
    """Each of these pods runs, with its own amount."""
    for number in numbers:
        wait_taken_on(pods, f"p{number}")
        share = node.share(pods, f"p{number}")
        assert [each.memory_bytes for each in share.devices] == [number * GIB]
    node.wait_exact()


# ---- the kubelet ---------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["term", "kill"])
def test_kubelet_restarts_while_pods_run_and_start(
    node: NodeAgent, cluster: Cluster, pods: Pods, number: signal.Signals
) -> None:
    for each in (1, 2):
        pods.create(asking(each))
    check(node, pods, 1, 2)
    with undisturbed(pods, "p1", "p2"):
        before = node.share(pods, "p1")
        for each in range(3, 9):
            pods.create(asking(each))
        # Some of them are bound, some admitted, some asked for, some started.
        wait_until(lambda: len(node.shares(pods.namespace)) >= 4, "shares", every_s=0.01)
        cluster.restart("kubelet", number)
        check(node, pods, *range(1, 9))
        assert node.share(pods, "p1") == before
    # A container that starts again does so with what it has had.
    node.kill_container(pods, "p1")
    pods.wait_restarted("p1")
    assert node.share(pods, "p1") == before
    node.wait_exact()


# ---- the agent -----------------------------------------------------------------------------------


def test_agent_restarts_while_pods_run_start_and_end(node: NodeAgent, pods: Pods) -> None:
    for each in (1, 2, 3):
        pods.create(asking(each))
    check(node, pods, 1, 2, 3)
    before = node.share(pods, "p1")
    with undisturbed(pods, "p1", "p2"):
        for each in range(4, 8):
            pods.create(asking(each))
        node.end(signal.SIGKILL)  # test_front.py has SIGTERM
        # What happens while there is none: a pod goes, one comes.
        pods.delete("p3")
        pods.create(asking(8))
        node.again()
        check(node, pods, 1, 2, *range(4, 9))
        assert node.share(pods, "p1") == before
        assert not [each for each in node.shares() if each.name.endswith("/p3/main")]


# ---- the API server ------------------------------------------------------------------------------

AUDIT = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata", "users": ["agent"]}, {"level": "None"}],
}


@contextlib.contextmanager
def audited(cluster: Cluster) -> Iterator[None]:
    """Starts the API server again so that it writes down what the agent asks for."""
    policy, log = cluster.state / "audit.json", cluster.state / "audit.log"
    policy.write_text(json.dumps(AUDIT), encoding="utf-8")
    server = cluster.components["kube-apiserver"]
    plain = server.command
    server.command = (*plain, f"--audit-policy-file={policy}", f"--audit-log-path={log}")
    try:
        yield
    finally:
        server.command = plain


def requests(cluster: Cluster) -> list[Json]:
    """What the agent asked for, in order."""
    text = (cluster.state / "audit.log").read_text(encoding="utf-8")
    # The last line may be in the middle of being written.
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def asked_of(cluster: Cluster, resource: str) -> list[Json]:
    """Of that what is about one resource."""
    # Requests of no object, as for the versions of an API, have no reference.
    found = requests(cluster)
    return [each for each in found if each.get("objectRef", {}).get("resource") == resource]


def test_api_server_is_away(node: NodeAgent, cluster: Cluster, pods: Pods) -> None:
    """Who runs goes on, who crashes starts again, who was created just before starts."""
    pods.create(pod("runs", container(SLEEP, image=BUSYBOX, limits=part("1Gi"))))
    pods.create(
        pod("crashes", container(burn_and_stay("512Mi"), limits=part("2Gi")), restart="Always")
    )
    pods.wait_ready("runs")
    assert burnt(pods, "crashes").total_bytes == 2 * GIB
    share, first = node.share(pods, "crashes"), container_id(pods.wait_ready("crashes"))
    agent = node.process
    assert agent is not None
    with audited(cluster), undisturbed(pods, "runs"):
        for each in (3, 4, 5):
            pods.create(asking(each))
        said_before = node.log
        with cluster.without("kube-apiserver", signal.SIGKILL):
            started = time.monotonic()
            node.kill(first)
            wait_until(lambda: node.processes(share.id), "crashed container's next run")
            time.sleep(max(0.0, AWAY_S - (time.monotonic() - started)))
            assert agent.is_running
            assert node.figure("api_synced") < 2
            assert share.id in {each.id for each in node.shares()}
        cluster.api.close()
        cluster.wait_node_ready()
        # Until it has read its roles, an API server that starts refuses everybody: "not yet".
        served_from = datetime.now(UTC).isoformat()
        check(node, pods, 3, 4, 5)
        # What the API has of the pod may be of before.
        pods.wait_restarted("crashes")
        pods.wait_ready("crashes")
        assert pods.restarts("crashes") == 1
        assert burnt(pods, "crashes").total_bytes == 2 * GIB
        assert node.share(pods, "crashes") == share
        wait_until(lambda: node.figure("api_synced") == 2, "word from the API")
        said_early = len(node.log)
        # A new agent asks for everything anew: that is in the audit log, too.
        node.end()
        node.again()
        node.wait_exact()
        wait_until(
            lambda: {"list", "watch"} <= {each["verb"] for each in asked_of(cluster, "pods")},
            "watch of the pods",
        )
    asked = requests(cluster)
    assert {each["verb"] for each in asked} <= {"get", "list", "watch", "create", "patch"}
    late = [each for each in asked if each["requestReceivedTimestamp"] > served_from]
    assert late
    assert [each for each in late if each["responseStatus"]["code"] == 403] == []
    pods_asked = asked_of(cluster, "pods")
    name = cluster.node_name
    own = f"fieldSelector=spec.nodeName%3D{name}"
    assert [uri for one in pods_asked if own not in (uri := one["requestURI"])] == []
    own = f"fieldSelector=metadata.name%3D{name}"
    nodes_asked = asked_of(cluster, "nodes")
    assert {one["objectRef"].get("name", name) for one in nodes_asked} == {name}
    assert all("name" in one["objectRef"] or own in one["requestURI"] for one in nodes_asked)
    assert "forbidden" not in said_before + node.log[said_early:]

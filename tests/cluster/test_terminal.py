# SPDX-License-Identifier: Apache-2.0
"""The cluster in the terminal, with a reader's rights: pods of several modes, and a claim.

The agent runs on the node without a pod here. A pod on the host's network stands for it: by its
address the API server's proxy reaches the agent's metrics.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import installing
import pytest
import yaml
from claims import claim, claiming, install_classes, share, wait_for_pool
from stories import GIB, NodeAgent, burn, node_agent, part
from testbed.api import Json
from testbed.cluster import Cluster
from testbed.images import BUSYBOX
from testbed.pods import Pods, container, pod
from testbed.waiting import wait_until

from allotment.dialects.own.placement import PLACEMENT, write_booking
from allotment.model.clusters import PlacedContainer, PlacedDevice, PodBooking
from allotment.model.pods import PodUid

MODES = """\
version: v1
allotment:
  devices:
    - {modes: [soft, exclusive]}
"""
READER = installing.ROOT / "deploy" / "manifests" / "reader.yaml"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
STAYS = burn("2Gi", seconds=1000)


@pytest.fixture(scope="module")
def node(cluster: Cluster) -> Iterator[NodeAgent]:
    install_classes(cluster)
    with node_agent(cluster, MODES) as agent:
        wait_for_pool(cluster, agent.gpus())
        yield agent


def bound(pods: Pods, body: Json, uuid: str, *, memory: int, mode: str = "soft") -> None:
    """Create a pod, and bind it with a placement as the scheduler does."""
    name, cluster = body["metadata"]["name"], pods.cluster
    body["spec"]["schedulerName"] = "by-hand"
    uid = PodUid(pods.create(body)["metadata"]["uid"])
    placed = PlacedContainer(name="main", devices=(PlacedDevice(uuid, memory),), mode=mode)
    booking = PodBooking(uid=uid, node=cluster.node_name, containers=(placed,))
    cluster.api.post(
        f"/api/v1/namespaces/{pods.namespace}/pods/{name}/binding",
        {
            "metadata": {"name": name, "annotations": {PLACEMENT: write_booking(booking)}},
            "target": {"kind": "Node", "name": cluster.node_name},
        },
    )
    pods.wait_ready(name)


def reader(cluster: Cluster, namespace: str) -> Path:
    """The kubeconfig of an account with the roles of `reader.yaml`, and no others."""
    installing.make_account(cluster, "reader", namespace=namespace)
    subject = {"kind": "ServiceAccount", "name": "reader", "namespace": namespace}
    for each in yaml.safe_load_all(READER.read_text("utf-8")):
        kind, metadata = each["kind"], each["metadata"]
        where = RBAC
        if kind == "Role":
            metadata["namespace"] = namespace
            where += f"/namespaces/{namespace}"
        cluster.api.apply(f"{where}/{kind.lower()}s/{metadata['name']}", each)
        made = {
            "metadata": {"name": f"reader-{namespace}"},
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": kind,
                "name": metadata["name"],
            },
            "subjects": [subject],
        }
        cluster.api.post(f"{where}/{kind.lower()}bindings", made)
    return installing.as_account(cluster, "reader", namespace=namespace)


class Terminal:
    """Runs commands as that account."""

    def __init__(self, pods: Pods) -> None:
        self.pods = pods
        self.kubeconfig = reader(pods.cluster, pods.namespace)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        command, *rest = words
        return self.pods.cluster.node.run(
            [
                *(sys.executable, "-m", "allotment", command),
                *("--kubeconfig", str(self.kubeconfig), *rest),
            ],
            check=False,
        )

    def json(self, *words: str) -> Any:  # noqa: ANN401 - JSON
        done = self.run(*words, "-o", "json")
        assert done.returncode in {0, 8}, done.stderr
        return json.loads(done.stdout)

    def of_system(self, command: str, *words: str) -> tuple[str, ...]:
        return (command, "--system-namespace", self.pods.namespace, *words)


def test_the_cluster_in_the_terminal(node: NodeAgent, pods: Pods, tmp_path: Path) -> None:
    soft, whole = node.gpus()
    terminal = Terminal(pods)
    bound(pods, pod("placed", container(STAYS, limits=part("4Gi"))), soft, memory=4 * GIB)
    alone = pod(
        "alone",
        container(STAYS, limits=part()),
        annotations={"allotment.dev/mode": "exclusive"},
    )
    size = next(
        each["memory_total_bytes"]
        for each in terminal.json("inspect")["nodes"][0]["devices"]
        if each["uuid"] == whole
    )
    bound(pods, alone, whole, memory=size, mode="exclusive")
    claim(pods, "quarter", share(memory="8Gi", compute="25"))
    pods.create(claiming("claims", STAYS, "quarter"))
    pods.create(pod("large", container(STAYS, limits=part("90Gi")), schedulerName="nobody"))
    labels = {"app.kubernetes.io/name": "allotment", "app.kubernetes.io/component": "agent"}
    stands_in = container(["sleep", "1000"], image=BUSYBOX, name="agent")
    pods.create(pod("agent", stands_in, labels=labels, hostNetwork=True))
    pods.wait_ready("claims")
    pods.wait_ready("agent")
    name = pods.cluster.node_name

    def held() -> dict[str, list[tuple[str, str, int]]]:
        [shown] = terminal.json("inspect", name)["nodes"]
        return {
            each["uuid"]: sorted(
                (holder["name"], holder["mode"], holder["memory_bytes"])
                for holder in each["holders"]
                if holder["namespace"] == pods.namespace
            )
            for each in shown["devices"]
        }

    expected = {
        soft: [("placed", "soft", 4 * GIB), ("quarter", "soft", 8 * GIB)],
        whole: [("alone", "exclusive", size)],
    }
    wait_until(lambda: held() == expected, "holders", explain=lambda: str(held()))
    [shown] = terminal.json("inspect", name)["nodes"]
    first = next(each for each in shown["devices"] if each["uuid"] == soft)
    # However the claim is counted, by the node or by its allocation: once.
    wait_until(
        lambda: (
            next(
                each["memory_allotted_bytes"]
                for each in terminal.json("inspect", name)["nodes"][0]["devices"]
                if each["uuid"] == soft
            )
            == 12 * GIB
        ),
        "sums",
        explain=lambda: str(first),
    )
    table = terminal.run("inspect", name).stdout
    assert f"{pods.namespace}/quarter/gpu (claim)" in table
    assert f"{name}  " in terminal.run("inspect", "--gpushare").stdout

    def used() -> dict[str, int]:
        [of_node] = terminal.json(*terminal.of_system("top", "--cluster"))["nodes"]
        assert of_node["problem"] is None, of_node
        return {
            each["pod"]: each["memory_used_bytes"] or 0
            for each in of_node["shares"]
            if each["namespace"] == pods.namespace
        }

    wait_until(
        lambda: all(used().get(each, 0) >= 2 * GIB for each in ("placed", "alone")),
        "use of the shares",
        explain=lambda: str(used()),
    )

    why = terminal.run("why", f"{pods.namespace}/large").stdout
    assert "no scheduler has reported on it; it names 'nobody'" in why
    assert "even if all were empty and healthy: need a GPU with 90Gi, have at most 79.3Gi" in why
    assert "help: ask for less" in why

    status = terminal.json(*terminal.of_system("status"))
    assert status["sums"]["devices"] == 2
    checks = terminal.json(*terminal.of_system("doctor", "--cluster"))["checks"]
    outcomes = {each["name"]: each["outcome"] for each in checks}
    assert outcomes["agents"] == outcomes["Kubernetes"] == outcomes["other plugins"] == "ok"

    path = pods.cluster.state / "bundle.tar.gz"
    done = terminal.run(*terminal.of_system("bundle", "-f", str(path)))
    assert done.returncode == 0, done.stderr
    with tarfile.open(path) as archive:
        names = {member.name.partition("/")[2] for member in archive}
    # No allotment-config is there; all else could be read with these roles.
    assert names >= {
        "holdings.json",
        "use.json",
        "pods.json",
        "events.json",
        "logs/agent-agent.log",
    }
    texts = tmp_path / "texts"
    with tarfile.open(path) as archive:
        archive.extractall(texts, filter="data")
    refused = [each.read_text() for each in texts.rglob("refused.txt")]
    assert not any("forbidden" in text for text in refused), refused

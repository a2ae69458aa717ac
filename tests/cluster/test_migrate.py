# SPDX-License-Identifier: Apache-2.0
"""`allot migrate` on a real cluster: a node moves to the agent and back, and its pods run on.

NVIDIA's plugin does not run here. A DaemonSet with its name, labels and configuration runs a
stand-in (`others_plugin`). Helm installs the chart with the plan's values; then the agent's
DaemonSet gets what the image of the tests and its simulated GPUs need.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import others_plugin
import pytest
import yaml
from stories import GIB, NVIDIA, NodeAgent, burn_and_stay, burnt, undisturbed
from testbed.build import ROOT, binaries_path
from testbed.cluster import Cluster
from testbed.images import BUSYBOX, TOOLS
from testbed.pods import Pods, container, pod
from testbed.waiting import TestbedError, wait_until

from allotment.agent.configuring import PLUGIN_FOLDER

SPACE = "nvidia-device-plugin"
PLUGIN = "stand-in-for-nvidia-device-plugin"
SETS = f"/apis/apps/v1/namespaces/{SPACE}/daemonsets"
AGENTS = "/apis/apps/v1/namespaces/allotment-system/daemonsets/allotment-agent"
SLICED = """\
version: v1
sharing:
  timeSlicing:
    resources:
      - name: nvidia.com/gpu
        replicas: 2
"""
SHOW = ["sh", "-c", "echo $NVIDIA_VISIBLE_DEVICES; exec sleep 1000"]


class Home:
    """A cluster whose node has the stand-in."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.node = NodeAgent(cluster)
        self.pods = Pods(cluster, cluster.make_namespace("team"))

    def migrate(self, *words: str, check: bool = True) -> str:
        """Runs `allot migrate`; what it wrote, errors included."""
        kubeconfig = ["--kubeconfig", str(self.cluster.kubeconfig)]
        command = [sys.executable, "-m", "allotment", "migrate", *words, *kubeconfig]
        done = self.cluster.node.run(command, timeout_s=200, check=False)
        said = done.stdout + (done.stderr or "")
        if check and done.returncode:
            raise TestbedError(f"allot migrate {' '.join(words)}\n{said}\n{self.explain()}")
        return done.stdout if check else said

    def plan(self, *words: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.migrate("plan", "-o", "json", *words))
        return found

    def labels(self) -> dict[str, str]:
        found: dict[str, str] = self.cluster.api.get(self.cluster.node_path)["metadata"]["labels"]
        return found

    def is_cordoned(self) -> bool:
        spec = self.cluster.api.get(self.cluster.node_path)["spec"]
        return bool(spec.get("unschedulable"))

    def affinity(self) -> object:
        found = self.cluster.api.get(f"{SETS}/{PLUGIN}")
        return found["spec"]["template"]["spec"].get("affinity")

    def running(self, namespace: str) -> list[str]:
        """The names of a namespace's pods."""
        items = self.cluster.api.items(f"/api/v1/namespaces/{namespace}/pods")
        return [each["metadata"]["name"] for each in items]

    def explain(self) -> str:
        found = []
        for namespace in (SPACE, "allotment-system", "team"):
            inside = Pods(self.cluster, namespace)
            found += [f"{each}: {inside.explain(each)}" for each in self.running(namespace)]
        return "\n".join(found)

    def make_plugin(self) -> None:
        """The stand-in's DaemonSet and configuration, as NVIDIA's chart has them."""
        api = self.cluster.api
        self.cluster.make_namespace(SPACE)
        config = {"metadata": {"name": "configs"}, "data": {"shared": SLICED}}
        api.post(f"/api/v1/namespaces/{SPACE}/configmaps", config)
        ids = [f"{uuid}::{number}" for uuid in self.node.gpus() for number in range(2)]
        program = Path(others_plugin.__file__).read_text("utf-8")
        folder = str(PLUGIN_FOLDER)
        main = container(
            ["python3", "-c", program, folder, *ids],
            environment={"DEFAULT_CONFIG": "shared", "DEVICE_LIST_STRATEGY": "envvar"},
            volumeMounts=[{"name": "plugins", "mountPath": folder}],
        )
        volumes = [
            {"name": "plugins", "hostPath": {"path": folder}},
            {"name": "available-configs", "configMap": {"name": "configs"}},
        ]
        labels = {"app.kubernetes.io/name": PLUGIN}
        template = pod("unnamed", main, labels=labels, restart="Always", volumes=volumes)
        body = {
            "metadata": {"name": PLUGIN},
            "spec": {
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": template["spec"]},
            },
        }
        api.post(SETS, body)

    def install(self, values: dict[str, Any], folder: Path) -> None:
        """Installs the chart, and adds what tests need to its DaemonSet."""
        path = folder / "values.yaml"
        registry, _, rest = TOOLS.partition("/")
        repository, _, tag = rest.rpartition(":")
        image = {"registry": registry, "repository": repository, "tag": tag, "pullPolicy": "Never"}
        path.write_text(yaml.safe_dump({**values, "image": image}), "utf-8")
        chart = ROOT / "deploy" / "charts" / "allotment"
        helm = [str(binaries_path() / "helm"), "install", "allotment", str(chart)]
        where = ["--namespace", "allotment-system", "--create-namespace"]
        given = ["--values", str(path), "--kubeconfig", str(self.cluster.kubeconfig)]
        home = {"HOME": str(folder)}
        self.cluster.node.run([*helm, *where, *given], environment=home, timeout_s=120)
        spec = self.cluster.api.get(AGENTS)["spec"]["template"]["spec"]
        for each in spec["containers"]:
            each["command"] = ["allot"]
        spec["containers"][0]["args"] += ["--simulated", self.node.simulated]
        change = {"spec": {"template": {"spec": {"containers": spec["containers"]}}}}
        self.cluster.api.patch(AGENTS, change)


@pytest.fixture
def home(testbed_machine: None, tmp_path: Path) -> Iterator[Home]:
    del testbed_machine
    if not (binaries_path() / "helm").exists():
        pytest.skip("helm is not built here (make testbed)")
    with Cluster(state=tmp_path / "cluster") as cluster:
        yield Home(cluster)


def test_a_node_moves_from_a_stand_in_for_nvidias_plugin_and_back(
    home: Home, tmp_path: Path
) -> None:
    cluster, pods = home.cluster, home.pods
    home.make_plugin()
    cluster.wait_allocatable(NVIDIA, 4)
    before = home.labels()
    whole = container(SHOW, image=BUSYBOX, limits={NVIDIA: 1})
    pods.create(pod("old", whole, restart="Always"))
    pods.wait_ready("old")
    theirs = pods.wait_logs("old").strip()

    plan = home.plan("--enforce")
    assert plan["system"] == "nvidia"
    assert plan["daemon_sets_with_rule"] == [f"{SPACE}/{PLUGIN}"]
    (node,) = plan["nodes"]
    assert (node["name"], node["pods"]) == (cluster.node_name, ["team/old"])
    assert "the agent is not installed" in home.migrate("apply", "--yes", check=False)

    home.install(yaml.safe_load(home.migrate("plan", "--enforce", "-o", "values")), tmp_path)
    assert home.running("allotment-system") == []
    with undisturbed(pods, "old"):
        home.migrate("apply", "--yes")
        assert not home.is_cordoned()
        assert home.running(SPACE) == []
        cluster.wait_allocatable(NVIDIA, 4)
        pods.wait_event("old", reason="ShareTakenOver")
        limits = {NVIDIA: 1}
        pods.create(pod("new", container(burn_and_stay("1Gi"), limits=limits), restart="Always"))
        pods.wait_ready("new", timeout_s=120)
        # Half of the other GPU: the old pod's is its own until it ends.
        said = burnt(pods, "new")
        assert said.total_bytes == pytest.approx(79.26 * GIB / 2, rel=0.01)
        assert said.uuid != theirs.partition("::")[0]
        (node,) = home.plan()["nodes"]
        assert node["state"] == "moved"

    with undisturbed(pods, "old", "new"):
        home.migrate("back", "--yes")
        assert home.running("allotment-system") == []
        assert not home.is_cordoned()
        left = home.labels()
        assert {key: left.get(key) for key in before} == before
        assert not {"allotment.dev/agent", "allotment.dev/moved-from"} & left.keys()
        cluster.wait_allocatable(NVIDIA, 4)
        pods.create(pod("next", whole))
        pods.wait_ready("next")
        ids = {f"{uuid}::{number}" for uuid in home.node.gpus() for number in range(2)}
        assert pods.wait_logs("next").strip() in ids - {theirs}
        assert home.affinity() is not None
        home.migrate("back", "--yes", "--remove-rules")
        assert home.affinity() is None


@pytest.mark.thorough
def test_an_interrupted_move_goes_on(home: Home, tmp_path: Path) -> None:
    """The agent cannot start at first: the move stops, the next one goes on."""
    cluster, pods = home.cluster, home.pods
    home.make_plugin()
    cluster.wait_allocatable(NVIDIA, 4)
    pods.create(pod("old", container(SHOW, image=BUSYBOX, limits={NVIDIA: 1}), restart="Always"))
    home.install(yaml.safe_load(home.migrate("plan", "-o", "values")), tmp_path)
    broken = {"spec": {"template": {"spec": {"nodeSelector": {"no": "node"}}}}}
    with undisturbed(pods, "old"):
        cluster.api.patch(AGENTS, broken)
        said = home.migrate("apply", "--yes", "--timeout", "20s", check=False)
        assert f"node {cluster.node_name} waited 20 s for the agent" in said
        assert home.is_cordoned()
        mended = {"spec": {"template": {"spec": {"nodeSelector": {"no": None}}}}}
        cluster.api.patch(AGENTS, mended)
        home.migrate("apply", "--yes")
        wait_until(lambda: not home.is_cordoned(), "the end of the move")
        home.migrate("back", "--yes")
        wait_until(lambda: home.running(SPACE), "the stand-in")

# SPDX-License-Identifier: Apache-2.0
"""SharePods of KubeShare 1.0, on a cluster with everything: as its README writes one.

A SharePod is applied by kubectl; the scheduler, with the rights of its manifests, makes the pod,
and all between that and the container is what it is for any pod.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import installing
import pytest
import yaml
from scheduling import PLACEMENT, Scheduler, placements, scheduler_config
from stories import GIB, SOFT, NodeAgent, burnt, node_agent
from testbed.api import Json
from testbed.cluster import Cluster
from testbed.pods import Pods
from testbed.waiting import tail, wait_until

MANIFEST = installing.ROOT / "deploy" / "manifests" / "kubeshare-sharepods.yaml"
EXAMPLE = installing.ROOT / "examples" / "dialects" / "kubeshare-sharepod.yaml"
# As KubeShare 1.0 defines them, where the API server has brought that to apiextensions v1.
KUBESHARES_OWN: Json = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "sharepods.kubeshare.nthu"},
    "spec": {
        "group": "kubeshare.nthu",
        "scope": "Namespaced",
        "names": {"kind": "SharePod", "plural": "sharepods", "shortNames": ["shp"]},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "x-kubernetes-preserve-unknown-fields": True,
                    }
                },
            }
        ],
    },
}


@pytest.fixture(scope="module")
def whole(testbed_machine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of one node, with the manifest of the scheduler; nobody has defined SharePods."""
    del testbed_machine
    config = scheduler_config(profiles=["allotment-scheduler"])
    with Cluster(state=tmp_path_factory.mktemp("sharepods"), scheduler_config=config) as made:
        made.allow_agent()
        installing.install(made)
        yield made


@pytest.fixture(scope="module")
def node(whole: Cluster) -> Iterator[NodeAgent]:
    with node_agent(whole, SOFT) as agent:
        yield agent


@pytest.fixture(scope="module")
def scheduler(whole: Cluster, node: NodeAgent) -> Iterator[Scheduler]:
    del node
    with installing.serving(whole) as made:
        installing.wait_translates(whole)
        yield made


@pytest.fixture(scope="module")
def defined(whole: Cluster, scheduler: Scheduler) -> Cluster:
    """SharePods are defined after the scheduler has started: first as KubeShare has them."""
    log = whole.log(scheduler.name)
    path = whole.state / "kubeshares-own.yaml"
    path.write_text(yaml.safe_dump(KUBESHARES_OWN), "utf-8")
    whole.kubectl_run("apply", "-f", str(path))

    def told() -> bool:
        return "without a status" in log.read_text("utf-8")

    wait_until(told, "a word about the definition", explain=lambda: tail(log))
    whole.kubectl_run("apply", "-f", str(MANIFEST))
    wait_until(
        lambda: "SharePods are served" in log.read_text("utf-8"),
        "serving",
        explain=lambda: tail(log),
    )
    return whole


class SharePods:
    """The SharePods of a namespace, and their pods."""

    def __init__(self, cluster: Cluster, pods: Pods) -> None:
        self.cluster = cluster
        self.pods = pods
        self._path = f"/apis/kubeshare.nthu/v1/namespaces/{pods.namespace}/sharepods"

    def apply(self, path: Path) -> None:
        self.cluster.kubectl_run("-n", self.pods.namespace, "apply", "-f", str(path))

    def create(
        self,
        name: str,
        *,
        annotations: dict[str, str] | None = None,
        spec: Mapping[str, object] | None = None,
    ) -> Json:
        body: Json = yaml.safe_load(EXAMPLE.read_text("utf-8"))
        body["metadata"]["name"] = name
        body["metadata"]["annotations"] |= annotations or {}
        body["spec"] |= spec or {}
        return self.cluster.api.post(self._path, body)

    def get(self, name: str) -> Json:
        return self.cluster.api.get(f"{self._path}/{name}")

    def status(self, name: str) -> Json:
        found: Json = self.get(name).get("status", {})
        return found

    def wait_phase(self, name: str, phase: str) -> Json:
        wait_until(
            lambda: self.status(name).get("PodStatus", {}).get("phase") == phase,
            f"SharePod {name} in phase {phase}",
            explain=lambda: f"{self.status(name)}\n{self.pods.explain(name)}",
        )
        return self.status(name)

    def wait_told(self, name: str, word: str) -> Json:
        wait_until(
            lambda: word in self.status(name).get("PodStatus", {}).get("message", ""),
            f"{word!r} on SharePod {name}",
            explain=lambda: f"{self.status(name)}\n{self.pods.explain(name)}",
        )
        found: Json = self.status(name)["PodStatus"]
        return found

    def wait_gone(self, name: str) -> None:
        """Waits until the pod has gone with the SharePod."""
        self.cluster.api.delete(f"{self._path}/{name}")
        wait_until(lambda: name not in self.pods.names(), f"end of pod {name}")

    def columns(self) -> list[dict[str, str]]:
        """What `kubectl get sharepods` prints."""
        text = self.cluster.kubectl_run("-n", self.pods.namespace, "get", "shp")
        head, *rows = text.splitlines()
        names = head.split()
        starts = [head.index(each) for each in names]
        ends = [*starts[1:], None]
        return [
            {
                name: row[start:end].strip()
                for name, start, end in zip(names, starts, ends, strict=True)
            }
            for row in rows
        ]


@pytest.fixture
def sharepods(defined: Cluster, request: pytest.FixtureRequest) -> Iterator[SharePods]:
    name = request.node.name.removeprefix("test_").replace("_", "-")[:50].strip("-")
    pods = Pods(defined, defined.make_namespace(name))
    made = SharePods(defined, pods)
    yield made
    for each in defined.api.items(f"/apis/kubeshare.nthu/v1/namespaces/{name}/sharepods"):
        made.wait_gone(each["metadata"]["name"])
    pods.delete()


def staying(seconds: int = 600) -> dict[str, object]:
    """A spec whose container takes its memory and stays."""
    container: Json = yaml.safe_load(EXAMPLE.read_text("utf-8"))["spec"]["containers"][0]
    command = ["sh", "-c", f"{' '.join(container['command'])}; exec sleep {seconds}"]
    return {
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "containers": [{**container, "command": command}],
    }


def test_a_sharepod_runs_with_the_share_that_it_asks_for(
    node: NodeAgent, sharepods: SharePods
) -> None:
    sharepods.apply(EXAMPLE)
    status = sharepods.wait_phase("sharepod1", "Succeeded")
    said = burnt(sharepods.pods, "sharepod1", "cuda")
    assert said.errors == ()
    assert said.total_bytes == GIB
    assert status["BoundDeviceID"] == said.uuid
    pod = sharepods.pods.get("sharepod1")
    assert status["PodObjectMeta"]["uid"] == pod["metadata"]["uid"]
    assert status["PodStatus"]["containerStatuses"] == pod["status"]["containerStatuses"]
    (placed,) = placements([pod]).values()
    assert placed["containers"]["cuda"]["guarantee"] == 5000
    (row,) = sharepods.columns()
    assert row | {"AGE": ""} == {
        "NAME": "sharepod1",
        "REQUEST": "0.5",
        "LIMIT": "1.0",
        "MEMORY": "1073741824",
        "PHASE": "Succeeded",
        "GPU": said.uuid,
        "MESSAGE": "",
        "AGE": "",
    }
    # It has run to its end: its pod may go, and does not come again.
    sharepods.pods.delete("sharepod1")
    after = sharepods.status("sharepod1")
    # Both may have been copied once more, with the deletion's time and generation.
    copied = ("PodObjectMeta", "PodStatus")
    assert after["PodObjectMeta"]["uid"] == status["PodObjectMeta"]["uid"]
    assert after["PodStatus"]["phase"] == status["PodStatus"]["phase"]
    assert {**after, **dict.fromkeys(copied)} == {**status, **dict.fromkeys(copied)}
    node.wait_exact()


def test_a_pod_goes_with_its_sharepod_and_comes_again_without(
    node: NodeAgent, sharepods: SharePods
) -> None:
    sharepods.create("kept", spec=staying())
    sharepods.wait_phase("kept", "Running")
    first = sharepods.pods.get("kept")["metadata"]["uid"]
    sharepods.pods.delete("kept", wait=False)
    wait_until(
        lambda: sharepods.status("kept").get("PodObjectMeta", {}).get("uid") not in {None, first},
        "another pod",
        explain=lambda: str(sharepods.status("kept")),
    )
    sharepods.wait_phase("kept", "Running")
    sharepods.wait_gone("kept")
    node.wait_exact()


def test_pods_of_one_gpuid_share_a_gpu_on_the_node_that_is_named(
    node: NodeAgent, sharepods: SharePods
) -> None:
    # With KubeShare these two are what its scheduler writes, or an author who goes around it.
    where = {"kubeshare/GPUID": "abcde", "kubeshare/gpu_request": "0.4"}
    spec = {"nodeName": sharepods.cluster.node_name, **staying()}
    for name in ("one", "two"):
        sharepods.create(name, annotations=where, spec=spec)
    devices = {sharepods.wait_phase(name, "Running")["BoundDeviceID"] for name in ("one", "two")}
    assert len(devices) == 1
    node.wait_exact()


def test_what_is_wrong_is_on_the_sharepod_and_is_made_when_corrected(
    sharepods: SharePods, node: NodeAgent
) -> None:
    sharepods.create("greedy", annotations={"kubeshare/gpu_limit": "2.0"})
    told = sharepods.wait_told("greedy", "kubeshare/gpu_limit is '2.0'")
    assert told["reason"] == "ErrValueError"
    namespace = sharepods.pods.namespace
    words = ("-n", namespace, "describe", "shp", "greedy")
    assert "ErrValueError" in sharepods.cluster.kubectl_run(*words)
    wait_until(
        lambda: "gpu_limit is '2.0'" in sharepods.cluster.kubectl_run(*words).split("Events:")[1],
        "event",
        explain=lambda: sharepods.cluster.kubectl_run(*words),
    )
    assert sharepods.pods.names() == []
    sharepods.cluster.kubectl_run(
        *("-n", namespace, "annotate", "--overwrite", "shp", "greedy", "kubeshare/gpu_limit=1.0")
    )
    sharepods.wait_phase("greedy", "Succeeded")
    node.wait_exact()


def test_a_killed_scheduler_makes_no_second_pod_and_misses_nothing(
    node: NodeAgent, sharepods: SharePods, scheduler: Scheduler
) -> None:
    for number in range(6):
        sharepods.create(f"s{number}")
        if number == 3:
            scheduler.restart(signal.SIGKILL)
    uids = set()
    for number in range(6):
        status = sharepods.wait_phase(f"s{number}", "Succeeded")
        assert status["BoundDeviceID"]
        uids.add(status["PodObjectMeta"]["uid"])
    assert len(uids) == len(sharepods.pods.names()) == 6
    node.wait_exact()


def test_a_placement_on_a_sharepod_goes_no_further(sharepods: SharePods) -> None:
    # The scheduler itself may write one, so that no policy keeps it from its pod.
    sharepods.create("forged", annotations={PLACEMENT: '{"version": 1}'})
    sharepods.wait_phase("forged", "Succeeded")
    annotations = sharepods.pods.get("forged")["metadata"]["annotations"]
    assert annotations[PLACEMENT] != '{"version": 1}'
    sharepods.create("marked", annotations={"allotment.dev/dialect": "kubeshare"})
    told = sharepods.wait_told("marked", "allotment.dev/dialect")
    assert told["reason"] == "ErrValueError"


def test_a_namespace_that_is_left_alone_gets_no_pods(sharepods: SharePods) -> None:
    name = sharepods.pods.namespace
    label = {"metadata": {"labels": {"allotment.dev/webhook": "ignore"}}}
    sharepods.cluster.api.patch(f"/api/v1/namespaces/{name}", label)
    sharepods.create("theirs")
    beside = SharePods(
        sharepods.cluster,
        Pods(sharepods.cluster, sharepods.cluster.make_namespace(f"{name}-not")),
    )
    beside.create("ours")
    beside.wait_phase("ours", "Succeeded")
    beside.wait_gone("ours")
    assert sharepods.pods.names() == []
    assert "status" not in sharepods.get("theirs")

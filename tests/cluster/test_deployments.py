# SPDX-License-Identifier: Apache-2.0
"""The chart as it runs: installed by helm as its guide says, reached by Services.

All is as a user has it: images by their names, two replicas and two kube-schedulers, agents by a
DaemonSet, rights, probes, Secrets, Services by kube-proxy, the webhook. Stand-ins are simulated
GPUs, dnsmasq for CoreDNS, and images that the testbed makes: of this tree, and of kube-scheduler.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self

import claims
import installing
import pytest
import rights
import yaml
from installing import SYSTEM
from scheduling import placements
from stories import GIB, GPU_COMPUTE, NodeAgent, burn, burnt, container_id, part
from testbed import dns, images, proxy
from testbed.api import ApiError, Json
from testbed.cluster import Cluster
from testbed.images import BUSYBOX
from testbed.pods import Pods, container, pod
from testbed.waiting import wait_until

import allotment

LEASE = "/apis/coordination.k8s.io/v1/namespaces/allotment-system/leases/allotment-scheduler"
CHART = installing.ROOT / "deploy" / "charts" / "allotment"
RELEASE = ("allotment", "--namespace", "allotment-system")
KEEP_VALUES = ("--reset-then-reuse-values",)
KUBELETS = {
    *(f"/var/lib/kubelet/{name}_pods_state" for name in ("actuated", "allocated")),
    "/var/lib/kubelet/dra_health_state",
    "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint",
    # Empty: made for the agent's mount, and not to be told from Node Feature Discovery's own.
    "/etc/kubernetes/node-feature-discovery",
    "/etc/kubernetes/node-feature-discovery/features.d",
}
"""What the kubelet made."""
_NAMES = itertools.count(1)


def pods_of(cluster: Cluster, component: str) -> list[Json]:
    """Its pods that are ready."""
    chosen = f"app.kubernetes.io/component={component}"
    return [
        each
        for each in cluster.api.items(f"{SYSTEM}/pods", labelSelector=chosen)
        if "deletionTimestamp" not in each["metadata"]
        and any(
            condition["type"] == "Ready" and condition["status"] == "True"
            for condition in each["status"].get("conditions", ())
        )
    ]


@dataclass(frozen=True, slots=True)
class Machine:
    """What an agent may change of a node."""

    files: frozenset[str]
    node: Json

    @classmethod
    def of(cls, cluster: Cluster) -> Self:
        folders = ["/var/lib/kubelet", "/run", "/etc", "/usr", "/opt", "/dev/shm"]  # noqa: S108 - looked at alone
        found = cluster.node.run(["find", *folders, "-xdev"]).stdout.splitlines()
        own = ("/var/lib/kubelet/pods/", "/run/containerd/", "/run/cni-ipam", "/run/testbed/")
        node = cluster.api.get(cluster.node_path)
        metadata, status = node["metadata"], node["status"]
        return cls(
            frozenset(each for each in found if not each.startswith(own)),
            {
                "labels": metadata["labels"],
                "annotations": metadata["annotations"],
                "capacity": status["capacity"],
                "conditions": {each["type"] for each in status["conditions"]},
            },
        )


@pytest.fixture(scope="module")
def bare(testbed_machine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster with the images that a registry would have."""
    del testbed_machine
    for reason in filter(None, (proxy.why_not(), dns.why_not())):
        pytest.skip(reason)
    state = tmp_path_factory.mktemp("deployments")
    with Cluster(state=state, api_server_flags=rights.audit_flags(state)) as cluster:
        cluster.start_proxy()
        cluster.start_dns()
        cluster.import_image(images.allotment_image(allotment.__version__))
        cluster.import_image(images.kube_scheduler_image())
        yield cluster


@pytest.fixture(scope="module")
def untouched(bare: Cluster) -> Machine:
    """The node before anything is installed."""
    return Machine.of(bare)


@pytest.fixture(scope="module")
def installed(bare: Cluster, untouched: Machine) -> Cluster:
    del untouched
    began = time.monotonic()
    values = "agent.simulated=a100-80gb:8,agent.defaultConfig=soft"
    bare.helm("install", *RELEASE, str(CHART), "--create-namespace", "--set", values)
    bare.name_services()
    wait_both(bare, "scheduler")
    wait_both(bare, "kube-scheduler")
    bare.wait_allocatable(GPU_COMPUTE, 800)
    installing.wait_translates(bare)
    pods = Pods(bare, bare.make_namespace("deployments-first"))
    pods.create(pod("quarter", container(burn("20Gi"), limits=part("20Gi", compute=25))))
    assert burnt(pods, "quarter").total_bytes == 20 * GIB
    print(f"from `helm install` to a quarter of a GPU: {time.monotonic() - began:.1f} s")  # noqa: T201
    return bare


def wait_both(cluster: Cluster, component: str) -> None:
    def explain() -> str:
        found = cluster.api.items(
            f"{SYSTEM}/pods", labelSelector=f"app.kubernetes.io/component={component}"
        )
        inside = Pods(cluster, "allotment-system")
        return "\n".join(inside.explain(each["metadata"]["name"]) for each in found)

    wait_until(
        lambda: len(pods_of(cluster, component)) == 2,
        f"two ready pods of {component}",
        timeout_s=150,
        explain=explain,
    )


def wait_image(cluster: Cluster, name: str) -> None:
    """Waits until all pods of Allotment's image are ready and have this one."""

    def is_there() -> bool:
        found = [
            each
            for component, count in (("agent", 1), ("scheduler", 2))
            for each in [pods_of(cluster, component)]
            if len(each) == count
        ]
        pods = [pod for each in found for pod in each]
        names = {c["image"] for pod in pods for c in pod["spec"]["containers"]}
        return len(pods) == 3 and names == {name}

    wait_until(is_there, f"pods of {name}", timeout_s=150)


def leader(cluster: Cluster) -> tuple[str, int]:
    """The pod that leads, and in which term: the next process of a pod begins another one, too."""
    spec = cluster.api.get(LEASE)["spec"]
    return spec["holderIdentity"].partition("_")[0], spec["leaseTransitions"]


def hami_pod(name: str) -> Json:
    """It is created by the webhook's answer alone, and bound by the leader's."""
    limits: dict[str, str | int] = {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 100, "cpu": "1m"}
    body = pod(name, container(["sleep", "1000"], image=BUSYBOX, limits=limits))
    body["spec"]["terminationGracePeriodSeconds"] = 0
    return body


def test_a_pod_in_another_systems_words_runs_with_its_share(installed: Cluster) -> None:
    pods = Pods(installed, installed.make_namespace("deployments-one"))
    limits: dict[str, str | int] = {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 8192}
    pods.create(pod("hami", container(["allot", "burn", "--memory", "7Gi"], limits=limits)))
    found = pods.wait_phase("hami", "Succeeded", timeout_s=120)
    assert found["spec"]["schedulerName"] == "allotment-scheduler"
    (part,) = placements([found])["hami"]["containers"].values()
    assert part["memory"] == 8192 << 20


def kill(cluster: Cluster, name: str) -> None:
    """Its process ends, and the kubelet starts it anew in the same pod."""
    found = cluster.api.get(f"{SYSTEM}/pods/{name}")
    NodeAgent.kill(container_id(found, "scheduler"))


def delete(cluster: Cluster, name: str) -> None:
    """It goes in order, and another one comes."""
    cluster.api.delete(f"{SYSTEM}/pods/{name}")


class Stream:
    """Creates pods one after the other; who is refused tries again."""

    def __init__(self, pods: Pods) -> None:
        self.created: list[str] = []
        self.refused: list[str] = []
        self.well_since = 0
        """How many were created when the last one was refused."""
        self._pods = pods
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(0.3):
            name = f"p{len(self.created)}"
            try:
                self._pods.create(hami_pod(name))
            except (ApiError, OSError) as error:
                self.refused.append(str(error))
                self.well_since = len(self.created)
            else:
                self.created.append(name)
        self._pods.cluster.api.close()  # this thread's connection


@pytest.mark.parametrize(
    ("end", "most_refused"),
    [(kill, None), pytest.param(delete, 1, marks=pytest.mark.measured)],
    ids=["kill", "delete"],
)
def test_when_the_leader_ends_pods_are_created_and_bound_all_the_same(
    installed: Cluster, end: Callable[[Cluster, str], None], most_refused: int | None
) -> None:
    """Of one that is killed the kubelet hears within some seconds, kube-proxy after that: until
    then every other new connection goes to it, and then none. One that ends in order answers until
    it is known.
    """
    wait_both(installed, "scheduler")
    name = f"deployments-{end.__name__}-{next(_NAMES)}"
    pods = Pods(installed, installed.make_namespace(name))
    before = leader(installed)
    with Stream(pods) as stream:
        wait_until(lambda: len(stream.created) >= 5, "some pods")
        end(installed, before[0])
        wait_until(lambda: leader(installed) != before, "another leader")
        there = len(stream.created)
        wait_until(
            lambda: len(stream.created) - max(there, stream.well_since) >= 8,
            "eight pods of which none is refused",
            explain=lambda: "\n".join(stream.refused),
        )
    if most_refused is not None:
        assert len(stream.refused) <= most_refused, stream.refused

    def is_bound() -> bool:
        found = installed.api.items(f"/api/v1/namespaces/{pods.namespace}/pods")
        return sorted(placements(found)) == sorted(stream.created)

    wait_until(is_bound, "every pod's placement", timeout_s=90)
    print(f"{len(stream.created)} created, refused: {stream.refused}")  # noqa: T201 - a figure
    pods.delete()
    wait_both(installed, "scheduler")


def limit_inside(pods: Pods, name: str) -> int:
    """The bytes that a running container's GPU has for a program that asks for more."""
    burning = " ".join(burn("5Gi"))
    said = json.loads(pods.exec(name, ["sh", "-c", f"{burning}; true"]))
    (error,) = said["processes"][0]["errors"]
    assert error["name"] == "CUDA_ERROR_OUT_OF_MEMORY"
    total: int = said["processes"][0]["device"]["total_bytes"]
    return total


USED_ELSEWHERE = {
    # By a pod on a lost GPU: test_tenants.
    ("allotment-agent", "pods", "delete"),
    # By a claim that had to wait, and by a node with fewer GPUs: test_resource_claims.
    ("allotment-agent", "pods/status", "patch"),
    ("allotment-agent", "resourceslices", "delete"),
    # By a repeated event: unit/kube/test_events.
    ("allotment-agent", "events", "patch"),
    ("allotment-scheduler", "events", "patch"),
}
"""Rights whose use is not seen in these requests."""


def test_each_right_is_used_and_none_is_missing(installed: Cluster) -> None:
    installed.helm(
        *("upgrade", *RELEASE, str(CHART), *KEEP_VALUES),
        *("--set", "resourceClaims.enabled=true", "--wait"),
    )
    pods = Pods(installed, installed.make_namespace("deployments-rights"))
    claims.claim(pods, "part", claims.share(memory="4Gi"))
    pods.create(claims.claiming("claiming", burn("5Gi"), "part"))
    assert burnt(pods, "claiming").total_bytes == 4 * GIB
    pods.create(pod("resized", container(["sleep", "1000"], limits=part("4Gi"))))
    pods.wait_phase("resized", "Running")
    path = f"/api/v1/namespaces/{pods.namespace}/pods/resized"
    installed.api.patch(path, {"metadata": {"annotations": {"allotment.dev/resize": "memory:2Gi"}}})
    # It waits, and an event says why.
    pods.create(pod("large", container(["true"], limits=part("90Gi"))))
    (agent,) = pods_of(installed, "agent")
    doctor = ["sh", "-c", "allot doctor; true"]
    said = Pods(installed, "allotment-system").exec(agent["metadata"]["name"], doctor, "agent")
    assert "policies" in said
    given = rights.granted(yaml.safe_load_all(installed.helm("get", "manifest", *RELEASE)))

    def unused() -> set[rights.Right]:
        return given - {right for right, _ in rights.requests(installed.state)}

    wait_until(
        lambda: unused() <= USED_ELSEWHERE, "use of each right", explain=lambda: str(unused())
    )
    refusals = {right for right, status in rights.requests(installed.state) if status == 403}
    assert refusals == set()
    pods.delete()


def test_shares_outlive_upgrade_rollback_and_uninstall(
    installed: Cluster, untouched: Machine
) -> None:
    pods = Pods(installed, installed.make_namespace("deployments-lasting"))
    limits = part("4Gi", compute=25)
    pods.create(pod("lasting", container(["sleep", "1000"], limits=limits)))
    started = container_id(pods.wait_phase("lasting", "Running"))

    def is_as_before() -> None:
        assert limit_inside(pods, "lasting") == 4 * GIB
        assert (
            container_id(installed.api.get(f"/api/v1/namespaces/{pods.namespace}/pods/lasting"))
            == started
        )

    def gives_shares(name: str) -> None:
        pods.create(pod(name, container(burn("5Gi"), limits=limits)))
        assert burnt(pods, name).total_bytes == 4 * GIB

    is_as_before()
    installed.import_image(images.allotment_image("next"))
    installed.helm("upgrade", *RELEASE, str(CHART), *KEEP_VALUES, "--set", "image.tag=next")
    wait_image(installed, "allotment:next")
    is_as_before()
    gives_shares("upgraded")
    installed.helm("rollback", *RELEASE)
    wait_image(installed, f"allotment:{allotment.__version__}")
    is_as_before()
    gives_shares("back")
    installed.helm("uninstall", *RELEASE)
    wait_until(lambda: not installed.api.items(f"{SYSTEM}/pods"), "end of the chart's pods")
    is_as_before()
    kinds = installed.kubectl_run("api-resources", "--verbs=list", "-o", "name").split()
    chosen = ("--all-namespaces", "-l", "app.kubernetes.io/name=allotment", "-o", "name")
    assert not installed.kubectl_run("get", ",".join(kinds), *chosen)
    pods.delete()
    Pods(installed, "deployments-first").delete()
    kubeconfig = ["--kubeconfig", str(installed.kubeconfig)]
    for arguments in (kubeconfig, ["--node"]):
        installed.node.run([sys.executable, "-m", "allotment", "uninstall", *arguments])
    now = Machine.of(installed)
    assert now.node == untouched.node
    assert now.files - untouched.files <= KUBELETS

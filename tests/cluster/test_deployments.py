# SPDX-License-Identifier: Apache-2.0
"""The scheduler's manifest as it runs: its Deployments as pods, reached by their Services.

Besides the image, which nobody builds here, and a name that no DNS answers, all is as shipped: two
replicas and two kube-schedulers, rights, probes, Secrets, Services by kube-proxy, the webhook.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Self

import installing
import pytest
from installing import SYSTEM
from scheduling import placements
from stories import SOFT, NodeAgent, container_id, node_agent
from testbed import proxy
from testbed.api import ApiError, Json
from testbed.cluster import Cluster
from testbed.images import BUSYBOX, TOOLS
from testbed.pods import Pods, container, pod
from testbed.waiting import wait_until

LEASE = "/apis/coordination.k8s.io/v1/namespaces/allotment-system/leases/allotment-scheduler"
EXTENDER_ADDRESS = "10.96.0.77"
_PROGRAMS = "/opt/kubernetes"
_NAMES = itertools.count(1)


def shipped(cluster: Cluster) -> Iterator[Json]:
    """The manifest's objects, with images and a name that are there."""
    for each in installing.documents():
        if each["kind"] == "Deployment":
            spec = each["spec"]["template"]["spec"]
            (main,) = spec["containers"]
            main |= {"image": TOOLS, "imagePullPolicy": "Never"}
            if main["name"] == "kube-scheduler":
                main["command"][0] = f"{_PROGRAMS}/kube-scheduler"
                programs = {"path": str(cluster.binaries)}
                spec["volumes"].append({"name": "programs", "hostPath": programs})
                mount = {"name": "programs", "mountPath": _PROGRAMS, "readOnly": True}
                main["volumeMounts"].append(mount)
                names = ["allotment-scheduler.allotment-system.svc"]
                spec["hostAliases"] = [{"ip": EXTENDER_ADDRESS, "hostnames": names}]
            else:
                main["command"] = ["allot"]
        if each["kind"] == "Service" and each["metadata"]["name"] == "allotment-scheduler":
            each["spec"]["clusterIP"] = EXTENDER_ADDRESS
        yield each


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


@pytest.fixture(scope="module")
def installed(testbed_machine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    del testbed_machine
    reason = proxy.why_not()
    if reason is not None:
        pytest.skip(reason)  # a kernel is as it is
    with Cluster(state=tmp_path_factory.mktemp("deployments")) as cluster:
        cluster.start_proxy()
        cluster.allow_agent()
        with node_agent(cluster, SOFT, simulated="a100-80gb:8"):
            installing.apply_all(cluster, shipped(cluster))
            wait_both(cluster, "scheduler")
            wait_both(cluster, "kube-scheduler")
            installing.wait_translates(cluster)
            yield cluster


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

# SPDX-License-Identifier: Apache-2.0
"""Pods that end for another one, with the real kube-scheduler: as few as do, and once.

No kubelet is there: what is being deleted stays until the test says that it has ended, one pod
after the other, as grace periods end at different times.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping

import pytest
from scheduling import (
    Scheduler,
    add_gpu_nodes,
    gpu_pod,
    inventory,
    placements,
    pods_without_kubelet,
    scheduler_config,
)
from testbed.api import Json
from testbed.cluster import Cluster
from testbed.pods import Pods
from testbed.waiting import wait_until

NODE = "n0"
SMALL = 50
_NUMBERS = itertools.count(1)


@pytest.fixture(scope="module")
def control_plane(
    testbed_machine: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    del testbed_machine
    state = tmp_path_factory.mktemp("preemption")
    with Cluster(state=state, settings=None, scheduler_config=scheduler_config()) as made:
        add_gpu_nodes(made, [inventory(NODE, devices=2)])
        body = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "value": 1000}
        path = "/apis/scheduling.k8s.io/v1/priorityclasses"
        made.api.post(path, {**body, "metadata": {"name": "important"}})
        yield made


@pytest.fixture
def scheduler(control_plane: Cluster) -> Iterator[Scheduler]:
    with Scheduler(control_plane) as made:
        yield made


@pytest.fixture
def pods(control_plane: Cluster, scheduler: Scheduler) -> Iterator[Pods]:
    del scheduler
    with pods_without_kubelet(control_plane, f"preemption-{next(_NUMBERS)}") as made:
        yield made


def listed(pods: Pods) -> list[Json]:
    return pods.cluster.api.items(f"/api/v1/namespaces/{pods.namespace}/pods")


def bound(pods: Pods, start: str) -> list[Json]:
    """Those whose name begins so and that are on a node."""
    return [
        each
        for each in listed(pods)
        if each["metadata"]["name"].startswith(start) and each["spec"].get("nodeName")
    ]


def ending(pods: Pods) -> list[str]:
    """Those that are being deleted, and have not ended."""
    return [
        each["metadata"]["name"] for each in listed(pods) if "deletionTimestamp" in each["metadata"]
    ]


def end(pods: Pods, name: str) -> None:
    """What a kubelet says when a pod's last process has ended."""
    pods.cluster.api.delete(
        f"/api/v1/namespaces/{pods.namespace}/pods/{name}", gracePeriodSeconds="0"
    )


def fill(
    pods: Pods,
    number: int,
    *,
    start: str = "low",
    labels: Mapping[str, Mapping[str, str]] | None = None,
) -> None:
    """Small pods, one by one on this GPU and on the other: kube-scheduler ends the latest first.

    `labels`: of some of them, by name.
    """
    for place in range(number):
        annotations = {"allotment.dev/uuids": f"GPU-{NODE}-{place % 2}"}
        body = gpu_pod(f"{start}-{place:02}", annotations=annotations)
        body["metadata"]["labels"] = dict((labels or {}).get(f"{start}-{place:02}", {}))
        pods.create(body)
    wait_until(lambda: len(bound(pods, start)) == number, "small pods on both GPUs")


def devices(pods: Pods) -> dict[str, str]:
    """The GPU of each pod that is bound."""
    return {
        name: each["containers"]["main"]["devices"][0]
        for name, each in placements(listed(pods)).items()
    }


def important(name: str = "important") -> Json:
    return gpu_pod(name, memory=None, compute=100, priorityClassName="important")


@pytest.mark.parametrize("leader", ["the same", "another"])
def test_a_whole_gpu_is_cleared_once_and_nobody_slips_in(
    pods: Pods, scheduler: Scheduler, leader: str
) -> None:
    fill(pods, 20)
    for number in range(SMALL):
        # Of half of them kube-scheduler's sums say that they fit beside the important pod: it asks
        # for no amount of memory, and they ask for none of compute.
        pods.create(gpu_pod(f"small-{number:02}", compute=10 if number % 2 else None))
    before = devices(pods)
    assert len(before) == 20
    pods.create(important())
    wait_until(lambda: len(ending(pods)) >= 10, "victims")
    victims = ending(pods)
    cleared = {before[name] for name in victims}
    assert (len(victims), len(cleared)) == (10, 1)
    # Victims are asked to go at the same time as this is written.
    pods.wait(
        "important", lambda each: each["status"].get("nominatedNodeName") == NODE, "its nomination"
    )
    if leader == "another":
        scheduler.restart(9)
        scheduler.wait_ready()
    for name in victims:
        end(pods, name)
        time.sleep(0.3)
        assert not bound(pods, "small")
    wait_until(lambda: bound(pods, "important"), "a GPU for the important pod")
    after = devices(pods)
    assert {after["important"]} == cleared
    assert not bound(pods, "small")
    # One round: nobody else was asked to go, and who was not in the way is there.
    assert not ending(pods)
    assert sorted(after) == sorted({*before, "important"} - set(victims))
    end(pods, "important")
    wait_until(lambda: len(bound(pods, "small")) == 10, "small pods in its place")


@pytest.mark.parametrize("protected", ["low-00", "low-01"])
def test_the_gpu_on_which_a_budget_protects_a_pod_is_not_the_one_that_is_cleared(
    pods: Pods, protected: str
) -> None:
    """One on each of the two GPUs in turn: by sums kube-scheduler chooses five of each."""
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "protected"},
        # Nobody writes its status here, which says then that none may go.
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "protected"}}},
    }
    pods.cluster.api.post(
        f"/apis/policy/v1/namespaces/{pods.namespace}/poddisruptionbudgets", budget
    )
    fill(pods, 20, labels={protected: {"app": "protected"}})
    before = devices(pods)
    pods.create(important())
    wait_until(lambda: len(ending(pods)) >= 10, "victims")
    victims = ending(pods)
    assert protected not in victims
    assert len(victims) == 10
    assert before[protected] not in {before[name] for name in victims}
    for name in victims:
        end(pods, name)
    wait_until(lambda: bound(pods, "important"), "a GPU for the important pod")


def test_what_sums_allow_and_no_gpu_does_waits_until_sums_do_not(pods: Pods) -> None:
    """Half of each of two GPUs is free: kube-scheduler sees a whole one, and would end nobody."""
    fill(pods, 10)
    pods.create(important())
    pods.wait(
        "important",
        lambda each: any("100" in one["message"] for one in each["status"].get("conditions", ())),
        "condition with need and have",
    )
    time.sleep(3)
    assert not ending(pods)
    assert not bound(pods, "important")
    end(pods, "important")
    # With a little more on both it does not, and asks; who is in the way goes, not who it chose.
    fill(pods, 4, start="low-more")
    before = devices(pods)
    pods.create(important("other"))
    wait_until(
        lambda: len(ending(pods)) >= 7,
        "victims",
        explain=lambda: f"{ending(pods)}\n{pods.explain('other')}",
    )
    victims = ending(pods)
    cleared = {before[name] for name in victims}
    assert (len(victims), len(cleared)) == (7, 1)
    for name in victims:
        end(pods, name)
    wait_until(lambda: bound(pods, "other"), "a GPU for the important pod")
    assert {devices(pods)["other"]} == cleared

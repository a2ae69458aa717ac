# SPDX-License-Identifier: Apache-2.0
"""Which pod is nominated next, and for which nodes."""

from __future__ import annotations

from dataclasses import replace

from scheduler_twin import cluster_pod

from allotment.dialects.own.registry import need_of
from allotment.model.clusters import ClusterPod
from allotment.scheduler.core.waiting import AHEAD_S, ALLOWED_S, MOST_AHEAD, WaitingPods


class Scene:
    def __init__(self) -> None:
        self.now = 10.0
        self.waiting = WaitingPods(clock=lambda: self.now)

    def put(self, name: str, *, constraints: str = "any", priority: int = 0) -> ClusterPod:
        """A pod arrives."""
        pod = cluster_pod(name, limits={"allotment.dev/gpu": "1"})
        pod = replace(pod, constraints=constraints, priority=priority)
        self.waiting.put(pod, need_of(pod))
        return pod

    def next(self) -> str:
        found = self.waiting.next()
        return found.pod.name if found is not None else ""


def test_the_pod_that_is_tried_already_is_left_out() -> None:
    scene = Scene()
    first, _, _ = [scene.put(name) for name in "abc"]
    assert scene.next() == "", "kube-scheduler has asked about none"
    assert scene.waiting.tried(first, ["x", "y"])
    assert scene.next() == "c", "b is tried by now"
    assert scene.next() == ""


def test_the_most_important_pod_is_next() -> None:
    scene = Scene()
    first = scene.put("first")
    for name, priority in (("low", 0), ("high", 9), ("middle", 5), ("lowest", -1)):
        scene.put(name, priority=priority)
    scene.waiting.tried(first, ["x"])
    assert [scene.next() for _ in range(4)] == ["middle", "low", "lowest", ""]


def test_nodes_are_those_of_a_pod_with_the_same_constraints() -> None:
    scene = Scene()
    here = scene.put("here", constraints="zone a")
    for name in ("b", "c"):
        scene.put(name, constraints="zone a")
        scene.put(f"{name}-there", constraints="zone b")
    scene.waiting.tried(here, ["x", "y"])
    found = [scene.waiting.next(), scene.waiting.next()]
    assert [each and (each.pod.name, each.allowed) for each in found] == [("c", ["x", "y"]), None]


def test_more_nodes_replace_fewer_for_a_while_and_any_afterwards() -> None:
    scene = Scene()
    pods = [scene.put(f"p{number}") for number in range(9)]
    scene.waiting.tried(pods[0], ["x", "y"])
    scene.waiting.tried(pods[1], ["x"])
    scene.next()
    found = scene.waiting.next()
    assert found is not None
    assert found.allowed == ["x", "y"], "a larger pod fits fewer nodes"
    scene.now += ALLOWED_S
    assert scene.next() == "", "a node may have gone"
    scene.waiting.tried(pods[2], ["x"])
    found = scene.waiting.next()
    assert found is not None
    assert found.allowed == ["x"]


def test_the_nominated_node_alone_says_nothing_of_others() -> None:
    scene = Scene()
    first, second = scene.put("a"), scene.put("b")
    assert scene.waiting.tried(first, ["x", "y"])
    assert not scene.waiting.tried(replace(second, nominated_node="x"), ["x"])
    scene.put("c")
    scene.put("d")
    found = [scene.waiting.next(), scene.waiting.next()]
    assert [each and each.allowed for each in found] == [["x", "y"], None]


def test_so_many_are_ahead_and_no_more() -> None:
    scene = Scene()
    pods = [scene.put(f"p{number}") for number in range(MOST_AHEAD + 9)]
    scene.waiting.tried(pods[0], ["x"])
    taken = [name for _ in range(MOST_AHEAD + 9) if (name := scene.next())]
    assert len(taken) == MOST_AHEAD - 1, "with the one that is tried already"
    scene.waiting.tried(pods[2], ["x"])
    assert scene.next() == f"p{MOST_AHEAD + 1}"
    assert scene.next() == ""
    scene.now += AHEAD_S
    scene.waiting.tried(pods[3], ["x"])
    assert scene.next(), "those are held back elsewhere"


def test_a_pod_that_is_gated_nominated_tried_or_gone_is_not_next() -> None:
    scene = Scene()
    first, tried, nominated, gone, ending = [scene.put(name) for name in "abcde"]
    gated = scene.put("f")
    scene.put("g")
    scene.put("h")
    scene.waiting.tried(first, ["x"])
    scene.waiting.tried(tried, ["x"])
    scene.waiting.put(tried, need_of(tried))  # its status has changed
    scene.waiting.put(replace(nominated, nominated_node="x"), need_of(nominated))
    scene.waiting.put(replace(ending, is_ending=True), need_of(ending))
    scene.waiting.put(replace(gated, constraints=""), need_of(gated))
    scene.waiting.gone(gone.uid)
    assert [scene.next(), scene.next()] == ["h", ""]

# SPDX-License-Identifier: Apache-2.0
"""Which pod is nominated next, and for which nodes."""

from __future__ import annotations

from dataclasses import replace

from scheduler_twin import cluster_pod

from allotment.dialects.own.registry import need_of
from allotment.model.clusters import ClusterPod
from allotment.scheduler.core.waiting import AHEAD_S, ALLOWED_S, LEAD, MOST_AHEAD, WaitingPods


class Scene:
    def __init__(self) -> None:
        self.now = 10.0
        self.leads = True
        self.waiting = WaitingPods(clock=lambda: self.now, leads=lambda: self.leads)

    def put(self, name: str, *, constraints: str = "any", priority: int = 0) -> ClusterPod:
        """A pod arrives."""
        pod = cluster_pod(name, limits={"allotment.dev/gpu": "1"})
        pod = replace(pod, constraints=constraints, priority=priority)
        self.waiting.put(pod, need_of(pod))
        return pod

    def try_first(self, names: list[str] | None = None, constraints: str = "any") -> None:
        """kube-scheduler asks about a pod with nothing ahead of it, and some follow it closely."""
        first = self.put("first", constraints=constraints, priority=1000)
        for number in range(LEAD):
            self.put(f"close-{number}", constraints=constraints, priority=999)
        self.waiting.tried(first, names or ["x", "y"])

    def next(self) -> str:
        found = self.waiting.next()
        return found.pod.name if found is not None else ""


def test_pods_that_are_tried_before_a_nomination_reaches_them_are_left_out() -> None:
    scene = Scene()
    pods = [scene.put(f"p{number}") for number in range(LEAD + 3)]
    assert scene.next() == "", "kube-scheduler has asked about none"
    pods += [scene.put(f"q{number}") for number in range(LEAD + 3)]
    scene.waiting.tried(pods[0], ["x", "y"])
    # The first eleven were taken in vain above.
    assert [scene.next() for _ in range(4)] == [f"q{LEAD}", f"q{LEAD + 1}", f"q{LEAD + 2}", ""]


def test_with_pods_ahead_none_is_left_out() -> None:
    scene = Scene()
    scene.try_first()
    scene.put("a")
    assert scene.next() == "a"
    scene.put("b")
    assert scene.next() == "b"


def test_the_most_important_pod_is_next() -> None:
    scene = Scene()
    scene.try_first()
    for name, priority in (("low", 0), ("high", 9), ("middle", 5), ("lowest", -1)):
        scene.put(name, priority=priority)
    assert [scene.next() for _ in range(5)] == ["high", "middle", "low", "lowest", ""]


def test_nodes_are_those_of_a_pod_with_the_same_constraints() -> None:
    scene = Scene()
    scene.try_first(["x", "y"], "zone a")
    scene.put("there", constraints="zone b")
    scene.put("here", constraints="zone a")
    found = [scene.waiting.next(), scene.waiting.next()]
    assert [each and (each.pod.name, each.allowed) for each in found] == [
        ("here", ["x", "y"]),
        None,
    ]


def test_more_nodes_replace_fewer_for_a_while_and_any_afterwards() -> None:
    scene = Scene()
    scene.try_first(["x", "y"])
    large, later = scene.put("large"), scene.put("later")
    scene.waiting.tried(large, ["x"])
    scene.put("a")
    found = scene.waiting.next()
    assert found is not None
    assert found.allowed == ["x", "y"], "a larger pod fits fewer nodes"
    assert scene.next() == "a"
    scene.now += ALLOWED_S
    scene.put("b")
    assert scene.next() == "", "a node may have gone"
    scene.waiting.tried(later, ["x"])
    scene.put("c")
    found = scene.waiting.next()
    assert found is not None
    assert found.allowed == ["x"]


def test_the_nominated_node_alone_says_nothing_of_others() -> None:
    scene = Scene()
    scene.try_first(["x", "y"])
    scene.now += ALLOWED_S
    second = replace(scene.put("second"), nominated_node="x")
    scene.put("a")
    scene.waiting.tried(second, ["x"])
    assert scene.next() == ""


def test_the_names_of_so_many_constraints_are_kept() -> None:
    scene = Scene()
    scene.try_first(constraints="first")
    for number in range(40):
        pod = scene.put(f"other-{number}", constraints=str(number), priority=1)
        scene.waiting.tried(pod, ["x"])
    scene.put("a", constraints="first")
    scene.put("b", constraints="39")
    assert [scene.next(), scene.next()] == ["b", ""]


def test_so_many_are_ahead_and_no_more() -> None:
    scene = Scene()
    scene.try_first()
    pods = [scene.put(f"p{number}") for number in range(MOST_AHEAD + 9)]
    taken = [name for _ in pods if (name := scene.next())]
    assert taken == [f"p{number}" for number in range(MOST_AHEAD)]
    scene.waiting.tried(replace(pods[0], nominated_node="x"), ["x"])
    assert [scene.next(), scene.next()] == [f"p{MOST_AHEAD}", ""]
    scene.now += AHEAD_S
    last = scene.put("last", priority=9)
    scene.waiting.tried(last, ["x"])
    scene.put("new")
    # Those ahead wait for something else. The eight that are left are close again.
    assert [scene.next(), scene.next()] == ["new", ""]


def test_a_pod_that_is_gated_nominated_tried_ending_or_gone_is_not_next() -> None:
    scene = Scene()
    scene.try_first()
    tried, nominated, gone, ending, gated = [scene.put(name) for name in "abcde"]
    scene.put("f")
    scene.waiting.tried(tried, ["x"])
    scene.waiting.put(tried, need_of(tried))  # its status has changed
    scene.waiting.put(replace(nominated, nominated_node="x"), need_of(nominated))
    scene.waiting.put(replace(ending, is_ending=True), need_of(ending))
    scene.waiting.put(replace(gated, constraints=""), need_of(gated))
    scene.waiting.put(replace(gone, node="n"), need_of(gone))
    assert [scene.next(), scene.next()] == ["f", ""]


def test_no_pod_is_nominated_twice() -> None:
    scene = Scene()
    scene.try_first()
    pod = scene.put("a")
    assert scene.next() == "a"
    scene.waiting.put(pod, need_of(pod))  # kube-scheduler found it impossible and cleared it
    assert scene.next() == ""


def test_pods_of_another_leader_s_term_are_left_out() -> None:
    scene = Scene()
    scene.leads = False
    before = scene.put("before")
    scene.leads = True
    scene.try_first()
    scene.waiting.put(before, need_of(before))
    scene.put("after")
    assert [scene.next(), scene.next()] == ["after", ""]


def test_pods_that_come_and_go_without_a_question_leave_nothing() -> None:
    scene = Scene()
    for number in range(1000):
        pod = scene.put(f"p{number}")
        scene.waiting.gone(pod.uid)
    assert len(scene.waiting._queue) < 2 * MOST_AHEAD  # noqa: SLF001 - memory is not visible
    scene.try_first()
    scene.put("a")
    assert scene.next() == "a"

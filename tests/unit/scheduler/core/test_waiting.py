# SPDX-License-Identifier: Apache-2.0
"""Which pod is nominated next, and for which nodes."""

from __future__ import annotations

from scheduler_twin import cluster_pod

from allotment.dialects.own.registry import need_of
from allotment.model.clusters import ClusterPod
from allotment.model.structs import replace
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
    scene.waiting.tried(pods[0], ["x", "y"])
    assert [scene.next() for _ in range(3)] == [f"p{LEAD + 1}", f"p{LEAD + 2}", ""]


def test_of_several_constraints_no_more_are_left_out() -> None:
    scene = Scene()
    first, second = scene.put("first"), scene.put("second", constraints="zone a")
    for number in range(LEAD):
        scene.put(f"any-{number}")
        scene.put(f"zone-{number}", constraints="zone a")
    scene.waiting.tried(first, ["x", "y"])
    scene.waiting.tried(second, ["x"])
    taken = [scene.next() for _ in range(LEAD + 1)]
    half = range(LEAD // 2, LEAD)
    assert taken == [*(name for n in half for name in (f"any-{n}", f"zone-{n}")), ""]


def test_a_long_queue_outlasts_what_is_known_of_the_nodes() -> None:
    scene = Scene()
    scene.try_first()
    pods = [scene.put(f"p{number}") for number in range(2 * LEAD + 2)]
    assert scene.next() == "p0"
    scene.now += ALLOWED_S
    assert scene.next() == "", "no nomination without an answer of kube-scheduler's filters"
    scene.waiting.tried(replace(pods[0], tried_first="x"), ["x"])
    scene.waiting.tried(pods[1], ["y", "z"])
    found = scene.waiting.next()
    assert found is not None
    assert (found.pod.name, found.allowed) == (f"p{LEAD + 2}", ["y", "z"])


def test_a_pod_whose_constraints_change_waits_with_its_new_equals() -> None:
    scene = Scene()
    scene.try_first()
    pod = scene.put("a")
    scene.put("ahead")
    scene.waiting.put(replace(pod, constraints="zone a"), need_of(pod))
    assert [scene.next(), scene.next()] == ["ahead", ""]
    scene.waiting.tried(scene.put("first", constraints="zone a", priority=9), ["x"])
    scene.put("b", constraints="zone a")
    assert [scene.next(), scene.next(), scene.next()] == ["a", "b", ""]


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
    large = scene.put("large")
    scene.waiting.tried(large, ["x"])
    scene.put("a")
    found = scene.waiting.next()
    assert found is not None
    assert found.pod.name == "a"
    assert found.allowed == ["x", "y"], "a larger pod fits fewer nodes"
    scene.now += ALLOWED_S
    scene.put("b")
    assert scene.next() == "", "a node may have gone"
    scene.waiting.tried(large, ["x"])
    for number in range(LEAD):
        scene.put(f"c{number}")
    found = scene.waiting.next()
    assert found is not None
    assert (found.pod.name, found.allowed) == (f"c{LEAD - 1}", ["x"])


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
    for number in range(LEAD + 1):
        scene.put(f"a{number}", constraints="first")
        scene.put(f"b{number}", constraints="39")
    assert [scene.next(), scene.next()] == [f"b{LEAD}", ""]


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
    assert len(scene.waiting._queues["any"]) < 2 * MOST_AHEAD  # noqa: SLF001 - memory is not visible
    scene.try_first()
    scene.put("a")
    assert scene.next() == "a"

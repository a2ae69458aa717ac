# SPDX-License-Identifier: Apache-2.0
"""Nodes are nominated for the pods that kube-scheduler tries soon."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from scheduler_twin import book_of, cluster_pod, node

from allotment.dialects.own.registry import need_of
from allotment.kube.errors import KubeError
from allotment.model.clusters import ClusterPod
from allotment.model.structs import replace
from allotment.scheduler.core.reservations import ReservationState
from allotment.scheduler.core.waiting import LATE_S, LEAD, WaitingPods
from allotment.scheduler.nominating import Nominating

NAMES = ["n0", "n1", "n2"]


class Api:
    def __init__(self) -> None:
        self.nominated: dict[str, str | None] = {}
        self.refused: set[str] = set()
        self.status = 409
        self.is_free = asyncio.Event()
        self.is_free.set()

    async def nominate(self, pod: ClusterPod, node: str | None) -> None:
        await asyncio.sleep(0)
        await self.is_free.wait()
        if pod.name in self.refused:
            raise KubeError("refused", status=self.status)
        self.nominated[pod.name] = node


class Scene:
    def __init__(self, pods: int, *, gpus: int = 8, fewest_nodes: int = 3) -> None:
        self.api = Api()
        self.left_s = 1e9
        self.now = 10.0
        self.preempting: set[str] = set()
        self.book = book_of([node(name, gpus) for name in NAMES], candidates=1)
        self.waiting = WaitingPods(clock=lambda: self.now)
        self.nominating = Nominating(
            self.book,
            self.waiting,
            self.api,
            left_s=lambda: self.left_s,
            clock=lambda: self.now,
            is_preempting=lambda uid: uid in self.preempting,
            fewest_nodes=fewest_nodes,
        )
        self.pods = [self.arrive(f"p{number}") for number in range(pods)]

    def arrive(self, name: str) -> ClusterPod:
        pod = replace(cluster_pod(name, limits={"allotment.dev/gpu": "1"}), constraints="any")
        self.waiting.put(pod, need_of(pod))
        return pod

    def ask(self, pod: ClusterPod, names: list[str], *later: Callable[[], object]) -> None:
        """kube-scheduler's question and later steps, each followed by all that it leads to."""

        async def all_of_them() -> None:
            running = asyncio.create_task(self.nominating.run())
            for step in (lambda: self.nominating.tried(pod, names), *later):
                step()
                for _ in range(200):
                    await asyncio.sleep(0)
            running.cancel()

        asyncio.run(all_of_them())


def test_the_next_pods_are_nominated_and_expected_there() -> None:
    scene = Scene(LEAD + 5)
    scene.ask(scene.pods[0], NAMES)
    after = scene.pods[LEAD + 1 :]
    assert set(scene.api.nominated) == {pod.name for pod in after}
    for pod in after:
        assert scene.book.state(pod.uid) is ReservationState.EXPECTED
        booking = scene.book.booking(pod.uid)
        assert booking is not None
        assert booking.node == scene.api.nominated[pod.name]


def test_no_more_are_nominated_than_there_is_room_for() -> None:
    scene = Scene(LEAD + 9, gpus=1)
    scene.ask(scene.pods[0], NAMES)
    assert sorted(map(str, scene.api.nominated.values())) == NAMES


def test_nodes_are_chosen_from_those_that_kube_scheduler_allows() -> None:
    scene = Scene(LEAD + 9, gpus=1)
    scene.ask(scene.pods[0], ["n1", "n2"])
    assert sorted(map(str, scene.api.nominated.values())) == ["n1", "n2"]


def test_a_replica_that_does_not_lead_nominates_nothing() -> None:
    scene = Scene(LEAD + 5)
    scene.left_s = 0.0
    scene.ask(scene.pods[0], NAMES)
    assert not scene.api.nominated


def test_on_few_nodes_nothing_is_nominated() -> None:
    scene = Scene(LEAD + 5, fewest_nodes=4)
    scene.ask(scene.pods[0], NAMES)
    assert not scene.api.nominated


def test_while_pods_are_ahead_those_that_arrive_are_nominated_at_once() -> None:
    scene = Scene(LEAD + 2)
    scene.ask(
        scene.pods[0],
        NAMES,
        lambda: scene.arrive("a"),
        lambda: scene.nominating.tried(scene.pods[1], NAMES),
    )
    assert set(scene.api.nominated) == {scene.pods[-1].name, "a"}


def test_a_nomination_that_is_refused_stops_no_other() -> None:
    scene = Scene(LEAD + 4)
    scene.api.refused = {scene.pods[-2].name}
    scene.ask(scene.pods[0], NAMES)
    assert set(scene.api.nominated) == {scene.pods[-3].name, scene.pods[-1].name}


def _goes(scene: Scene, pod: ClusterPod) -> None:
    scene.waiting.gone(pod.uid)


def _is_bound(scene: Scene, pod: ClusterPod) -> None:
    scene.waiting.put(replace(pod, node="n0"), need_of(pod))


def _is_nominated_by_others(scene: Scene, pod: ClusterPod) -> None:
    scene.waiting.put(replace(pod, nominated_node="n0"), need_of(pod))


def _is_tried(scene: Scene, pod: ClusterPod) -> None:
    scene.nominating.tried(pod, NAMES)


def _is_expected_elsewhere(scene: Scene, pod: ClusterPod) -> None:
    booking = scene.book.booking(pod.uid)
    assert booking is not None
    others = [name for name in NAMES if name != booking.node]
    scene.book.filter(need_of(pod), others, now=scene.now, version="2")


@pytest.mark.parametrize(
    "change", [_goes, _is_bound, _is_nominated_by_others, _is_tried, _is_expected_elsewhere]
)
def test_what_waits_for_a_connection_is_looked_at_again(
    change: Callable[[Scene, ClusterPod], None],
) -> None:
    scene = Scene(LEAD + 1 + 16 + 2)
    changed, other = scene.pods[-2:]
    scene.api.is_free.clear()

    def free() -> None:
        assert scene.book.booking(other.uid) is not None
        scene.api.is_free.set()

    scene.ask(scene.pods[0], NAMES, lambda: change(scene, changed), free)
    assert other.name in scene.api.nominated
    assert changed.name not in scene.api.nominated


def test_a_leader_that_ends_writes_no_nomination_that_waits() -> None:
    scene = Scene(LEAD + 1 + 16 + 2)
    scene.api.is_free.clear()

    def ends() -> None:
        scene.left_s = 0.0
        scene.api.is_free.set()

    scene.ask(scene.pods[0], NAMES, ends)
    assert len(scene.api.nominated) == 16


def test_where_a_policy_forbids_nominations_few_are_tried() -> None:
    scene = Scene(LEAD + 9)
    scene.api.status = 403
    scene.api.refused = {scene.pods[LEAD + 1].name}
    scene.ask(scene.pods[0], NAMES)
    scene.api.nominated.clear()
    late = [scene.arrive(f"late-{number}") for number in range(LEAD + 3)]
    scene.ask(late[0], NAMES)
    assert not scene.api.nominated
    scene.now += 300
    scene.ask(late[1], NAMES)
    assert scene.api.nominated


def test_a_nomination_without_a_binding_is_withdrawn_by_any_leader() -> None:
    """kube-scheduler may leave it: preemptionPolicy Never, or a quota that refuses the bind."""
    scene = Scene(5)
    shown = [replace(pod, tried_first="n0") for pod in scene.pods]
    for pod in shown:
        scene.waiting.put(pod, need_of(pod))
    waits, bound, cleared, preempts, again = shown
    scene.now += LATE_S - 1
    scene.waiting.put(replace(bound, node="n0"), need_of(bound))
    scene.waiting.put(replace(cleared, tried_first=""), need_of(cleared))
    scene.waiting.put(replace(again, version="9"), need_of(again))
    scene.preempting = {preempts.uid}
    asyncio.run(scene.nominating.withdraw())
    assert not scene.api.nominated
    scene.now += 1
    scene.left_s = 0
    asyncio.run(scene.nominating.withdraw())
    assert not scene.api.nominated, "another replica leads"
    scene.left_s = 1e9
    asyncio.run(scene.nominating.withdraw())
    assert scene.api.nominated == {waits.name: None, again.name: None}
    for pod in scene.pods:
        scene.waiting.put(pod, need_of(pod))
        assert scene.waiting.next() is None, "no pod is nominated twice"


def test_the_question_about_a_nominated_node_is_answered_by_what_is_expected() -> None:
    scene = Scene(LEAD + 2)
    scene.ask(scene.pods[0], NAMES)
    (name, where) = next(iter(scene.api.nominated.items()))
    pod = next(pod for pod in scene.pods if pod.name == name)
    need, expected = need_of(pod), scene.book.booking(pod.uid)
    choice = scene.book.filter(need, [str(where)], now=scene.now, version="8")
    assert choice.best == (where,)
    assert scene.book.booking(pod.uid) is expected
    others = [other for other in NAMES if other != where]
    assert scene.book.filter(need, others, now=scene.now, version="8").best[0] in others
    scene.book.node_dropped(others[0])
    assert not scene.book.filter(need, others[:1], now=scene.now, version="8").best

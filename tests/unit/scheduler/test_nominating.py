# SPDX-License-Identifier: Apache-2.0
"""Nominations run ahead of kube-scheduler, and its answer waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from scheduler_twin import book_of, cluster_pod, node

from allotment.dialects.own.registry import need_of
from allotment.kube.errors import ConflictError
from allotment.model.clusters import ClusterPod
from allotment.scheduler.core.reservations import ReservationState
from allotment.scheduler.core.waiting import WaitingPods
from allotment.scheduler.nominating import Nominating

NAMES = ["n0", "n1", "n2"]


class Api:
    def __init__(self) -> None:
        self.nominated: dict[str, str] = {}
        self.refuses = False

    async def nominate(self, pod: ClusterPod, node: str) -> None:
        await asyncio.sleep(0.001)
        if self.refuses:
            raise ConflictError("changed", status=409)
        self.nominated[pod.name] = node


class Scene:
    def __init__(self, pods: int, *, gpus: int = 8) -> None:
        self.api = Api()
        self.left_s = 1e9
        self.book = book_of([node(name, gpus) for name in NAMES], candidates=1)
        self.waiting = WaitingPods(clock=lambda: 10.0)
        self.nominating = Nominating(
            self.book, self.waiting, self.api, left_s=lambda: self.left_s, clock=lambda: 10.0
        )
        limits = {"allotment.dev/gpu": "1"}
        self.pods = [
            replace(cluster_pod(f"p{number}", limits=limits), constraints="any")
            for number in range(pods)
        ]
        for pod in self.pods:
            self.waiting.put(pod, need_of(pod))

    def run(self, what: Callable[[], Awaitable[None]]) -> None:
        async def all_of_it() -> None:
            task = asyncio.create_task(self.nominating.run())
            await what()
            task.cancel()

        asyncio.run(all_of_it())

    async def ask(self, pod: ClusterPod, names: list[str]) -> None:
        """kube-scheduler's question, until the answer goes out."""
        self.nominating.tried(pod, names)
        await self.nominating.hold()


def test_the_answer_waits_for_the_nominations_of_the_next_pods() -> None:
    scene = Scene(6)

    async def asked() -> None:
        await scene.ask(scene.pods[0], NAMES)
        assert set(scene.api.nominated) == {"p2", "p3", "p4", "p5"}, "p1 is tried next"

    scene.run(asked)
    for pod in scene.pods[2:]:
        assert scene.book.state(pod.uid) is ReservationState.EXPECTED
        booking = scene.book.booking(pod.uid)
        assert booking is not None
        assert booking.node == scene.api.nominated[pod.name]


def test_no_more_are_nominated_than_there_is_room_for() -> None:
    scene = Scene(9, gpus=1)

    async def asked() -> None:
        await scene.ask(scene.pods[0], NAMES)

    scene.run(asked)
    assert sorted(scene.api.nominated.values()) == NAMES


def test_a_replica_that_does_not_lead_nominates_nothing() -> None:
    scene = Scene(6)
    scene.left_s = 0.0

    async def asked() -> None:
        await scene.ask(scene.pods[0], NAMES)

    scene.run(asked)
    assert not scene.api.nominated


def test_a_question_about_the_nominated_node_does_not_wait() -> None:
    scene = Scene(6)

    async def asked() -> None:
        await scene.ask(scene.pods[0], NAMES)
        before = dict(scene.api.nominated)
        for number in range(6, 9):
            pod = replace(cluster_pod(f"p{number}", limits={"allotment.dev/gpu": "1"}))
            pod = replace(pod, constraints="any")
            scene.waiting.put(pod, need_of(pod))
        await scene.ask(replace(scene.pods[2], nominated_node="n0"), ["n0"])
        assert scene.api.nominated == before

    scene.run(asked)


def test_a_nomination_that_is_refused_stops_no_other() -> None:
    scene = Scene(6)
    scene.api.refuses = True

    async def asked() -> None:
        await scene.ask(scene.pods[0], NAMES)
        scene.api.refuses = False
        more = replace(cluster_pod("more", limits={"allotment.dev/gpu": "1"}), constraints="any")
        scene.waiting.put(more, need_of(more))
        await scene.ask(scene.pods[1], NAMES)

    scene.run(asked)
    assert set(scene.api.nominated) == {"more"}

# SPDX-License-Identifier: Apache-2.0
"""Bindings on an API server's bad days: known in the end, and never given up too early."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random

from scheduler_twin import Bindery, book_of, cluster_pod, node

from allotment.kube.backoff import Backoff
from allotment.kube.errors import ConflictError, DeniedError, UnreachableError
from allotment.model.clusters import PodNeed
from allotment.scheduler.binding import Binder
from allotment.scheduler.book import Book, State
from allotment.scheduler.needs import need_of

AWAY = UnreachableError("it did not answer")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 0.01
        return self.now


class Scene:
    def __init__(self, bindery: Bindery, *, late_s: float = 0.05) -> None:
        self.book: Book = book_of([node("a"), node("b")])
        self.pod = cluster_pod()
        bindery.add(self.pod)
        self.need: PodNeed = need_of(self.pod)
        self.leads = True
        self.binder = Binder(
            self.book,
            bindery,
            clock=Clock(),
            may_write=lambda: self.leads,
            backoff=lambda: Backoff(first_s=0.001, most_s=0.002, random=Random(1)),  # noqa: S311
            late_s=late_s,
        )

    async def bind(self, where: str = "a") -> str:
        outcome = await self.binder.bind(self.need, where, version=self.pod.version)
        return outcome.problem

    @property
    def state(self) -> State | None:
        return self.book.state(self.need.uid)


def test_a_binding_has_the_placement_and_the_version(bindery: Bindery) -> None:
    scene = Scene(bindery)
    assert asyncio.run(scene.bind()) == ""
    assert scene.state is State.BOUND
    [asked] = bindery.asked
    assert (asked.node, asked.uid, asked.version) == ("a", "uid-train", "7")
    assert bindery.pods[scene.pod.uid].booking is not None


def test_what_was_not_answered_and_done_is_found_out(bindery: Bindery) -> None:
    scene = Scene(bindery)
    bindery.answers.append(AWAY)
    bindery.does_silently = True
    assert asyncio.run(scene.bind()) == ""
    assert scene.state is State.BOUND
    assert len(bindery.asked) == 2  # the second one was refused, and the pod looked at
    assert bindery.asked[0] == bindery.asked[1]


def test_what_was_not_answered_and_not_done_is_asked_again(bindery: Bindery) -> None:
    scene = Scene(bindery)
    bindery.answers.extend([AWAY, AWAY, None])
    assert asyncio.run(scene.bind()) == ""
    assert len(bindery.asked) == 3
    assert scene.state is State.BOUND


def test_what_is_not_known_stays_reserved_though_the_next_request_is_refused(
    bindery: Bindery,
) -> None:
    """The first request may still arrive: a refusal of the second says nothing about it."""
    scene = Scene(bindery, late_s=1000.0)
    bindery.answers.extend([AWAY, *[DeniedError("no", status=403)] * 10_000])

    async def test() -> None:
        task = asyncio.create_task(scene.bind())
        await asyncio.sleep(0.05)
        assert not task.done()
        assert scene.state is State.UNKNOWN
        assert scene.book.booking(scene.need.uid) is not None
        bindery.answers.clear()
        assert await task == ""

    asyncio.run(test())


def test_a_refusal_gives_the_place_back(bindery: Bindery) -> None:
    scene = Scene(bindery)
    bindery.answers.append(DeniedError("the API server refused: quota", status=403))
    assert "quota" in asyncio.run(scene.bind())
    assert scene.state is State.SEEN
    assert scene.book.booking(scene.need.uid) is None
    assert scene.book.cluster.booking(scene.need.uid) is None


def test_a_pod_that_changed_without_asking_for_other_things_is_bound(bindery: Bindery) -> None:
    scene = Scene(bindery)
    bindery.add(replace(scene.pod, version="8"))
    assert asyncio.run(scene.bind()) == ""
    assert [each.version for each in bindery.asked] == ["7", "8"]


def test_a_pod_that_asks_for_other_things_now_is_not_bound(bindery: Bindery) -> None:
    scene = Scene(bindery)
    bindery.add(cluster_pod(version="8", annotations={"allotment.dev/class": "latency"}))
    assert "has changed" in asyncio.run(scene.bind())
    assert scene.state is State.SEEN


def test_a_pod_that_is_gone_leaves_nothing(bindery: Bindery) -> None:
    scene = Scene(bindery)
    bindery.pods.clear()
    assert "gone" in asyncio.run(scene.bind())
    assert scene.book.cluster.booking(scene.need.uid) is None


def test_a_pod_that_somebody_else_bound_is_as_it_is(bindery: Bindery) -> None:
    scene = Scene(bindery)
    other = scene.book.cluster.place(scene.need, "b")
    assert not hasattr(other, "reason")
    bindery.add(replace(scene.pod, node="b", booking=other, version=""))
    assert "somebody else" in asyncio.run(scene.bind())
    assert scene.state is State.BOUND
    assert scene.book.booking(scene.need.uid) == other


def test_a_pod_that_is_being_deleted_is_not_asked_about_for_ever(bindery: Bindery) -> None:
    scene = Scene(bindery)
    bindery.answers.extend([ConflictError("it is being deleted", status=409)] * 10_000)
    assert "being deleted" in asyncio.run(scene.bind())
    assert len(bindery.asked) < 10
    assert scene.state is State.SEEN


def test_two_calls_for_one_pod_are_one_binding(bindery: Bindery) -> None:
    scene = Scene(bindery)

    async def test() -> None:
        bindery.gate.clear()
        calls = [asyncio.create_task(scene.bind()) for _ in range(3)]
        await asyncio.sleep(0.01)
        bindery.gate.set()
        assert await asyncio.gather(*calls) == ["", "", ""]
        assert await scene.bind() == ""
        assert "to node a" in await scene.bind("b")

    asyncio.run(test())
    assert len(bindery.asked) == 1


def test_whoever_hangs_up_does_not_end_the_binding(bindery: Bindery) -> None:
    scene = Scene(bindery)

    async def test() -> None:
        bindery.gate.clear()
        call = asyncio.create_task(scene.bind())
        await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.sleep(0.01)
        assert scene.state is State.RESERVED
        bindery.gate.set()
        await scene.binder.drain(timeout_s=5)

    asyncio.run(test())
    assert scene.state is State.BOUND


def test_who_leads_no_more_asks_for_nothing_and_looks_what_became_of_it(bindery: Bindery) -> None:
    scene = Scene(bindery)
    bindery.answers.append(AWAY)

    async def test() -> None:
        task = asyncio.create_task(scene.bind())
        scene.leads = False
        await asyncio.sleep(0.05)
        assert len(bindery.asked) == 1
        assert scene.state is State.UNKNOWN
        bindery.add(replace(scene.pod, version="9"))  # changed: the first comes too late now
        assert "has changed" in await task

    asyncio.run(test())
    assert scene.state is State.SEEN

# SPDX-License-Identifier: Apache-2.0
"""Bindings on an API server's bad days: known in the end, and never given up too early."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from random import Random

import pytest
from scheduler_twin import Bindery, book_of, cluster_pod, node

from allotment.dialects.own.registry import need_of
from allotment.kube.bindings import MOST_WRITES
from allotment.kube.clients import Backoff
from allotment.kube.errors import ConflictError, DeniedError, UnreachableError
from allotment.model.clusters import ClusterPod, PodBooking, PodNeed
from allotment.model.structs import replace
from allotment.scheduler.core.book import BindOrder, Book
from allotment.scheduler.core.reservations import ReservationState
from allotment.scheduler.extender.binder import Binder

AWAY = UnreachableError("it did not answer")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 0.01
        return self.now


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(40):
        while not is_so():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)


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
            left_s=lambda: math.inf if self.leads else 0.0,
            backoff=lambda: Backoff(first_s=0.001, most_s=0.002, random=Random(1)),  # noqa: S311
            late_s=late_s,
        )

    async def bind(self, where: str = "a") -> str:
        outcome = await self.binder.bind(self.need, where, version=self.pod.version)
        return outcome.problem

    async def bind_again(self, version: str) -> str:
        return (await self.binder.bind(self.need, "a", version=version)).problem

    @property
    def state(self) -> ReservationState | None:
        return self.book.state(self.need.uid)


def test_a_binding_has_the_placement_and_the_version(bindery: Bindery) -> None:
    scene = Scene(bindery)
    assert asyncio.run(scene.bind()) == ""
    assert scene.state is ReservationState.BOUND
    [asked] = bindery.asked
    assert (asked.node, asked.uid, asked.version) == ("a", "uid-train", "7")
    assert bindery.pods[scene.pod.uid].booking is not None


def test_what_was_not_answered_and_done_is_found_out(bindery: Bindery) -> None:
    scene = Scene(bindery)
    bindery.answers.append(AWAY)
    bindery.does_silently = True
    assert asyncio.run(scene.bind()) == ""
    assert scene.state is ReservationState.BOUND
    assert len(bindery.asked) == 2  # the second one was refused, and the pod looked at
    assert bindery.asked[0] == bindery.asked[1]


def test_what_was_not_answered_and_not_done_is_asked_again(bindery: Bindery) -> None:
    scene = Scene(bindery)
    bindery.answers.extend([AWAY, AWAY, None])
    assert asyncio.run(scene.bind()) == ""
    assert len(bindery.asked) == 3
    assert scene.state is ReservationState.BOUND


def test_what_is_not_known_stays_reserved_though_the_next_request_is_refused(
    bindery: Bindery,
) -> None:
    """The first request may still arrive: a refusal of the second says nothing about it."""
    scene = Scene(bindery, late_s=1000.0)
    bindery.answers.extend([AWAY, *[DeniedError("no", status=403)] * 10_000])

    async def test() -> None:
        task = asyncio.create_task(scene.bind())
        await until(lambda: len(bindery.asked) > 3)
        await asyncio.sleep(0.05)
        assert not task.done()
        assert scene.state is ReservationState.UNKNOWN
        assert scene.book.booking(scene.need.uid) is not None
        bindery.answers.clear()
        assert await task == ""

    asyncio.run(test())


def test_a_refusal_gives_the_place_back(bindery: Bindery) -> None:
    scene = Scene(bindery)
    bindery.answers.append(DeniedError("the API server refused: quota", status=403))
    assert "quota" in asyncio.run(scene.bind())
    assert scene.state is ReservationState.SEEN
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
    assert scene.state is ReservationState.SEEN


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
    assert "by another scheduler or user" in asyncio.run(scene.bind())
    assert scene.state is ReservationState.BOUND
    assert scene.book.booking(scene.need.uid) == other


def test_a_pod_that_is_being_deleted_is_not_asked_about_for_ever(bindery: Bindery) -> None:
    scene = Scene(bindery)
    bindery.answers.extend([ConflictError("it is being deleted", status=409)] * 10_000)
    assert "being deleted" in asyncio.run(scene.bind())
    assert len(bindery.asked) < 10
    assert scene.state is ReservationState.SEEN


def test_two_calls_for_one_pod_are_one_binding(bindery: Bindery) -> None:
    scene = Scene(bindery)

    async def test() -> None:
        bindery.gate.clear()
        calls = [asyncio.create_task(scene.bind()) for _ in range(3)]
        await until(lambda: bool(bindery.asked))
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
        await until(lambda: bool(bindery.asked))
        call.cancel()
        await asyncio.sleep(0.01)
        assert scene.state is ReservationState.RESERVED
        bindery.gate.set()
        await scene.binder.drain(timeout_s=30)

    asyncio.run(test())
    assert scene.state is ReservationState.BOUND


def test_who_leads_no_more_asks_for_nothing_and_looks_what_became_of_it(bindery: Bindery) -> None:
    scene = Scene(bindery, late_s=1000.0)
    bindery.answers.append(AWAY)

    async def test() -> None:
        task = asyncio.create_task(scene.bind())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        scene.leads = False
        await until(lambda: scene.state is ReservationState.UNKNOWN)
        await asyncio.sleep(0.05)
        assert len(bindery.asked) == 1
        assert scene.state is ReservationState.UNKNOWN
        bindery.add(replace(scene.pod, version="9"))  # changed: the first comes too late now
        assert "has changed" in await task

    asyncio.run(test())
    assert scene.state is ReservationState.SEEN


def test_who_leads_no_more_when_it_comes_to_asking_does_not_ask(bindery: Bindery) -> None:
    """Between the question and the request lies what is read for other systems' tools."""
    scene = Scene(bindery)

    async def slow(need: PodNeed, booking: PodBooking) -> Mapping[str, str]:
        del need, booking
        scene.leads = False
        await asyncio.sleep(0)
        return {}

    scene.binder._results = slow  # noqa: SLF001 - as the constructor takes it
    assert "another replica" in asyncio.run(scene.bind())
    assert not bindery.asked
    assert scene.state is ReservationState.SEEN
    assert "another replica" in asyncio.run(scene.bind())


def test_a_request_under_way_is_broken_off_when_the_lease_ends(bindery: Bindery) -> None:
    scene = Scene(bindery, late_s=1000.0)
    bindery.gate.clear()

    async def test() -> None:
        looks = 0
        is_renewed = True

        def left_s() -> float:
            nonlocal looks
            looks += 1
            return 0.01 if is_renewed else 0.0

        scene.binder._left_s = left_s  # noqa: SLF001
        task = asyncio.create_task(scene.bind())
        await until(lambda: len(bindery.asked) == 1)
        asked = looks
        # Each time that the lease would have ended it has been renewed.
        await until(lambda: looks > asked + 3)
        assert bindery.broken_off == 0
        is_renewed = False
        await asyncio.wait_for(bindery.was_broken_off.wait(), 40)
        assert scene.state is ReservationState.UNKNOWN or scene.state is ReservationState.RESERVED
        bindery.gate.set()
        await asyncio.sleep(0.02)
        assert len(bindery.asked) == 1
        bindery.pods.clear()
        assert "gone" in await task

    asyncio.run(test())


def test_what_was_begun_before_another_one_led_is_not_repeated(bindery: Bindery) -> None:
    """The other one may have given the devices away by now."""
    scene = Scene(bindery, late_s=1000.0)
    bindery.answers.append(AWAY)

    async def test() -> None:
        task = asyncio.create_task(scene.bind())
        await until(lambda: scene.state is ReservationState.UNKNOWN)
        scene.leads = False
        scene.book.step_down(now=100.0)
        scene.leads = True
        await asyncio.sleep(0.02)
        assert len(bindery.asked) == 1
        assert scene.state is ReservationState.UNKNOWN  # the first request may still be carried out
        bindery.add(replace(scene.pod, version="8"))
        assert "has changed" in await task

    asyncio.run(test())
    assert len(bindery.asked) == 1


def test_who_leads_again_at_once_goes_on(bindery: Bindery) -> None:
    scene = Scene(bindery, late_s=1000.0)
    bindery.answers.append(AWAY)

    async def test() -> None:
        task = asyncio.create_task(scene.bind())
        await until(lambda: scene.state is ReservationState.UNKNOWN)
        scene.leads = False
        await asyncio.sleep(0.02)
        scene.leads = True
        assert await task == ""

    asyncio.run(test())


def whole(name: str) -> ClusterPod:
    """It wants the one GPU of `single` alone."""
    return cluster_pod(name, limits={"allotment.dev/gpu": "1"})


class Single(Scene):
    """One node with one GPU, and two pods that want it."""

    def __init__(self, bindery: Bindery) -> None:
        super().__init__(bindery, late_s=1000.0)
        self.book.node_put(node("a", 1))
        self.book.node_put(node("b", 1))
        self.pod, self.other = whole("train"), whole("other")
        self.need = need_of(self.pod)
        bindery.add(self.pod)
        bindery.add(self.other)

    async def bind_other(self, where: str = "a") -> str:
        need = need_of(self.other)
        return (await self.binder.bind(need, where, version=self.other.version)).problem

    def given(self, bindery: Bindery) -> list[str]:
        """The devices that bound pods have."""
        return [
            device.uuid
            for pod in bindery.pods.values()
            for container in (pod.booking.containers if pod.booking else ())
            for device in container.devices
        ]


def test_devices_of_an_unknown_binding_are_not_given_away_when_the_pod_changes(
    bindery: Bindery,
) -> None:
    """kube-scheduler gives up after 30 s and writes a condition: the binding goes on."""
    scene = Single(bindery)
    bindery.answers.append(AWAY)

    async def test() -> None:
        task = asyncio.create_task(scene.bind())
        await until(lambda: scene.state is ReservationState.UNKNOWN)
        changed = replace(scene.pod, version="8")
        bindery.add(changed)
        scene.book.pod_put(changed, now=101.0)
        assert scene.book.booking(scene.need.uid) is not None
        assert "have" in await scene.bind_other()
        assert await task == ""

    asyncio.run(test())
    assert scene.given(bindery) == ["GPU-a0"]


def test_a_binding_of_a_later_version_is_not_too_late_because_of_that_version(
    bindery: Bindery,
) -> None:
    """After a conflict the version that caused it is the one that is asked for."""
    scene = Single(bindery)
    changed = replace(scene.pod, version="8")
    bindery.add(changed)
    bindery.answers.extend([None, AWAY])  # a conflict; and the second goes astray
    bindery.hold_from = 3

    async def test() -> None:
        task = asyncio.create_task(scene.bind())
        await until(lambda: len(bindery.asked) == 2 and scene.state is ReservationState.UNKNOWN)
        scene.book.pod_put(changed, now=101.0)
        assert scene.book.booking(scene.need.uid) is not None
        assert "have" in await scene.bind_other()
        await bindery.carry_out(bindery.asked[1])  # it arrives after all
        assert await task == ""

    asyncio.run(test())
    assert scene.given(bindery) == ["GPU-a0"]


def test_a_binding_whose_devices_were_given_up_is_not_asked_for_again(bindery: Bindery) -> None:
    scene = Single(bindery)
    bindery.answers.append(AWAY)

    async def test() -> None:
        task = asyncio.create_task(scene.bind())
        await until(lambda: scene.state is ReservationState.UNKNOWN)
        scene.book.pod_gone(scene.need.uid)  # the watch says so; the API server is asked
        order = scene.book.begin_bind(need_of(scene.other), "a", now=1.0, version="7")
        assert isinstance(order, BindOrder)
        bindery.pods.pop(scene.pod.uid)
        assert "gone" in await task

    asyncio.run(test())
    assert len(bindery.asked) == 1


def test_a_new_place_waits_for_the_binding_to_the_old_one(bindery: Bindery) -> None:
    """Nobody is told that a pod is on one node while it is being bound to another."""
    scene = Single(bindery)
    bindery.answers.append(AWAY)

    async def test() -> None:
        task = asyncio.create_task(scene.bind())
        await until(lambda: scene.state is ReservationState.UNKNOWN)
        scene.book.pod_gone(scene.need.uid)
        assert "has not finished" in await scene.bind("b")
        assert scene.book.booking(scene.need.uid) is None
        bindery.pods.clear()
        await task

    asyncio.run(test())


def test_a_binding_that_broke_is_found_out_or_taken_up_again(bindery: Bindery) -> None:
    scene = Scene(bindery, late_s=1000.0)

    async def broken(need: PodNeed, booking: PodBooking) -> Mapping[str, str]:
        raise RuntimeError(f"{need} {booking}")

    async def test() -> None:
        kept = scene.binder._results  # noqa: SLF001 - as the constructor takes it
        scene.binder._results = broken  # noqa: SLF001
        with pytest.raises(RuntimeError):
            await scene.bind()
        assert scene.state is ReservationState.UNKNOWN
        scene.binder._results = kept  # noqa: SLF001
        # What it may have asked for is not over because the next request is refused.
        bindery.answers.append(DeniedError("no", status=403))
        assert await scene.bind() == ""

    asyncio.run(test())
    assert len(bindery.asked) == 2


def test_what_was_read_before_a_pod_was_bound_does_not_take_its_devices(bindery: Bindery) -> None:
    scene = Scene(bindery, late_s=1000.0)

    async def test() -> None:
        order = scene.book.begin_bind(scene.need, "a", now=1.0, version="7")
        assert isinstance(order, BindOrder)
        scene.book.unknown(order.booking, now=1.0)
        slow, quick = asyncio.Event(), bindery.reading
        bindery.reading = slow
        changed = replace(scene.pod, version="8")
        bindery.add(changed)
        read = asyncio.create_task(scene.binder.reread(scene.need.uid, "ml", "train"))
        await until(lambda: bindery.reads > 0)
        bindery.reading = quick
        assert await scene.bind_again("8") == ""
        slow.set()
        await read

    asyncio.run(test())
    assert scene.state is ReservationState.BOUND


def test_a_pod_that_was_doubted_and_has_changed_gives_its_place_back(bindery: Bindery) -> None:
    scene = Scene(bindery)
    order = scene.book.begin_bind(scene.need, "a", now=1.0, version="7")
    assert isinstance(order, BindOrder)
    scene.book.unknown(order.booking, now=1.0)
    asyncio.run(scene.binder.reread(scene.need.uid, "ml", "train"))
    # Of the same version: it may still be bound.
    assert scene.book.booking(scene.need.uid) is order.booking
    bindery.add(replace(scene.pod, version="8"))
    asyncio.run(scene.binder.reread(scene.need.uid, "ml", "train"))
    assert scene.state is ReservationState.SEEN


def test_no_more_are_asked_for_at_once_than_there_are_slots(bindery: Bindery) -> None:
    book = book_of([node(f"n{number}", 8) for number in range(30)], candidates=1)
    binder = Binder(book, bindery, clock=Clock())
    pods = [cluster_pod(f"p{number}") for number in range(MOST_WRITES + 20)]
    for each in pods:
        bindery.add(each)

    async def test() -> None:
        bindery.gate.clear()
        calls = [
            asyncio.create_task(binder.bind(need_of(each), f"n{place % 30}", version=each.version))
            for place, each in enumerate(pods)
        ]
        await until(lambda: len(bindery.asked) >= MOST_WRITES)
        await asyncio.sleep(0.05)
        assert len(bindery.asked) == MOST_WRITES
        bindery.gate.set()
        assert [each.problem for each in await asyncio.gather(*calls)] == [""] * len(pods)

    asyncio.run(test())


def test_no_binding_is_of_any_version(bindery: Bindery) -> None:
    scene = Scene(bindery)
    with pytest.raises(ValueError, match="version"):
        asyncio.run(scene.binder.bind(scene.need, "a", version=""))

# SPDX-License-Identifier: Apache-2.0
"""`Tenants` between twins: how shares end, what was missed, and an agent that is killed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from functools import partial

import pytest
from awaiting import until
from kubelet_twin import KubeletTwin, StoreTwin
from tenancy_scene import HASTE, INIT, Scene, part, scene, story, whole

from allotment.agent.protocols import CheckpointEntry
from allotment.model.errors import StateError
from allotment.model.shares import Injection, Share, ShareId


@story
async def test_shares_go_with_their_pods_and_not_before_their_processes(node: Scene) -> None:
    pod = node.admit("1", part())
    await node.start(pod)
    node.pods.hear(pod.uid, None)  # removed by force: its programs still run
    assert await node.tenants.look() <= HASTE.retry
    assert set(node.store.shares) == {node.share_of(pod)}
    node.kubelet.delete(pod)
    await node.tenants.look()
    assert not node.store.shares
    assert ("shares_ended", {"reason": "pod-gone"}) in node.reports.counts


@story
async def test_nothing_goes_while_it_is_not_known_which_pods_there_are(node: Scene) -> None:
    pod = node.admit("1", whole())  # no process is ever seen in it
    await node.start(pod)
    node.start_agent(is_synced=False)
    await node.tenants.adopt()
    node.store.clock += 10_000
    await node.tenants.look()
    assert set(node.store.shares) == {node.share_of(pod)}
    node.pods.is_synced = True  # and it is not among them
    await node.tenants.look()
    assert not node.store.shares


@story
async def test_a_lost_checkpoint_costs_nobody_their_share(node: Scene) -> None:
    pod = node.admit("1", whole())
    await node.start(pod)
    old = node.share_of(pod)
    node.kubelet.forget(node.tenants)
    await node.tenants.look()
    assert set(node.store.shares) == {old}
    node.kubelet.finish(pod, pod.containers[0], for_good=False)
    node.hear()
    assert await node.start(pod) == ""
    assert set(node.store.shares) == {node.share_of(pod)} != {old}


class Unwilling(StoreTwin):
    """Does not end what it is told to, once."""

    tries = 0

    def end(self, share: ShareId) -> None:
        self.tries += 1
        if self.tries == 1:
            raise StateError("the folder is read-only", hint="mount it writable")
        super().end(share)


def test_what_cannot_be_ended_is_told_and_tried_again() -> None:
    async def story() -> None:
        node = Scene()
        node.store = store = Unwilling(node.kubelet.uses)
        node.start_agent()
        pod = node.admit("1", part())
        await node.start(pod)
        node.kubelet.delete(pod)
        node.hear()
        assert await node.tenants.look() <= HASTE.retry
        assert ("node", "ShareStateFailed") in [each[:2] for each in node.reports.events]
        await node.tenants.look()
        assert not node.store.shares
        assert store.tries == 2
        await node.tenants.close()

    asyncio.run(story())


@story
async def test_the_loop_does_it_by_itself(node: Scene) -> None:
    loop = asyncio.create_task(node.tenants.run())
    pod = node.admit("1", part())
    await node.start(pod)
    node.kubelet.delete(pod)
    node.hear()
    await until(lambda: not node.store.shares)
    loop.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loop


# ---- what another plugin gave, and what is missing -----------------------------------------------


def test_the_loop_ends_whenever_it_is_told_to() -> None:
    """At each of the event loop's turns: Python 3.11's `wait_for` lost a cancellation at one."""

    async def story() -> None:
        for turns in range(120):
            async with scene() as node:
                node.admit("1", part())
                loop = asyncio.create_task(node.tenants.run())
                for turn in range(turns):
                    if turn % 3 == 2:
                        node.tenants._wake.set()  # noqa: SLF001 - news at all times
                    await asyncio.sleep(0)
                loop.cancel()
                done, _ = await asyncio.wait({loop}, timeout=40)
                assert done, f"it goes on after a cancellation at turn {turns}"

    asyncio.run(story())


@story
async def test_taking_over_from_another_plugin_disturbs_nobody(node: Scene) -> None:
    pod = node.admit("1", whole(), by_other=True)
    assert await node.start(pod) == ""
    await node.tenants.look()
    (share,) = node.store.shares.values()
    assert share.injection is Injection.NONE
    assert share.mode == "exclusive"
    assert node.reports.reasons("pod-1") == ["ShareTakenOver"]
    node.kubelet.finish(pod, pod.containers[0], for_good=False)
    node.start_agent(is_synced=False)
    await node.tenants.adopt()
    assert await node.start(pod) == ""  # with the API server away, too
    assert list(node.store.shares.values()) == [share]


@story
async def test_who_runs_without_a_share_is_booked_again(node: Scene) -> None:
    pod = node.admit("1", part())
    await node.start(pod)
    node.hear()
    node.store.shares.clear()  # somebody has emptied the folder
    node.start_agent()
    node.kubelet.tell(pod)
    node.hear()
    await node.tenants.adopt()
    await node.tenants.look()
    assert set(node.store.shares) == {node.share_of(pod)}
    assert node.reports.reasons("pod-1") == ["ShareMissing"]


class Unreadable(KubeletTwin):
    """A checkpoint that cannot be read."""

    is_bad = False

    def entries(self) -> tuple[CheckpointEntry, ...]:
        if self.is_bad:
            raise StateError("the checkpoint is of no known shape", hint="upgrade")
        return super().entries()


def test_an_unreadable_checkpoint_keeps_nobody_from_ending() -> None:
    async def story() -> None:
        node = Scene()
        node.kubelet = kubelet = Unreadable()
        node.store = StoreTwin(kubelet.uses)
        node.start_agent()
        gone, stays = node.admit("1", part()), node.admit("2", part())
        await node.start(gone)
        kubelet.is_bad = True
        kubelet.delete(gone)
        node.hear()
        for _ in range(2):
            assert await node.tenants.look() <= HASTE.retry
        assert not node.store.shares
        assert [each[1] for each in node.reports.events].count("ShareStateFailed") == 1
        assert await node.start(stays) == "the checkpoint is of no known shape"
        kubelet.is_bad = False
        assert await node.start(stays) == ""
        await node.tenants.close()

    asyncio.run(story())


def test_what_is_made_while_all_is_read_is_not_forgotten() -> None:
    class Slow(StoreTwin):
        reading = threading.Event()
        may_end = threading.Event()

        def owned(self) -> tuple[Share, ...]:
            found = super().owned()
            self.reading.set()
            self.may_end.wait(40)
            return found

    async def story() -> None:
        node = Scene()
        node.store = store = Slow(node.kubelet.uses)
        node.start_agent()
        pod = node.admit("1", part())
        adopting = asyncio.create_task(node.tenants.adopt())
        await asyncio.to_thread(store.reading.wait, 40)
        assert await node.start(pod) == ""
        store.may_end.set()
        await adopting
        assert [each.id for each in node.tenants.shares] == [node.share_of(pod)]
        await node.tenants.close()

    asyncio.run(story())


# ---- killed at any point -------------------------------------------------------------------------

POINTS = (
    "tenancy.claimed",
    "tenancy.decided",
    "tenancy.prepared",
    "tenancy.ending",
    "tenancy.ended",
)


class Killed(BaseException):
    """The agent's process is killed."""


class Mortal(Scene):
    """Its agent is killed when it gets to a point for the so-manieth time, and started anew."""

    def __init__(self, point: str, times: int) -> None:
        self.point = point
        self.left = times
        super().__init__()

    def start_agent(self, *, is_synced: bool = True) -> None:
        super().start_agent(is_synced=is_synced)
        self.tenants._step = self.step  # noqa: SLF001 - what ALLOTMENT_KILL_AT is to a process
        for each in self.kubelet.pods.values():
            self.kubelet.tell(each)
        self.hear()

    def step(self, name: str) -> None:
        self.left -= name == self.point
        if name == self.point and self.left == 0:
            raise Killed

    async def look(self) -> float:
        return await self.tenants.look()

    async def insist(self, call: Callable[[], Coroutine[object, object, object]]) -> None:
        """Repeats what the kubelet, or the loop, would repeat."""
        for _ in range(3):
            try:
                await call()
            except Killed:
                await self.tenants.close()
                self.start_agent()
                await self.tenants.adopt()


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("times", [1, 2])
def test_killed_at_any_step_the_next_agent_goes_on(point: str, times: int) -> None:
    async def story() -> None:
        node = Mortal(point, times)
        await node.tenants.adopt()
        pod = node.admit("1", part("init", INIT), part())
        for container in pod.containers:
            await node.insist(partial(node.start, pod, container.name))
            assert container.share == node.share_of(pod, container.name) is not None
            if container.kind is INIT:
                node.kubelet.finish(pod, container, for_good=True)
                node.hear()
        node.kubelet.delete(pod)
        node.hear()
        await node.insist(node.look)
        assert not node.store.shares
        assert node.left <= 0
        await node.tenants.close()

    asyncio.run(story())

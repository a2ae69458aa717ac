# SPDX-License-Identifier: Apache-2.0
"""`Tenants` between twins: one story each."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import pytest
from kubelet_twin import (
    NVIDIA_GPU,
    OFFER,
    ROOM,
    ContainerTwin,
    KubeletTwin,
    PodsTwin,
    PodTwin,
    ReportsTwin,
    State,
    StoreTwin,
    respond,
)

from allotment.agent.protocols import SHARE_ANNOTATION, CheckpointEntry
from allotment.agent.resources import GPU_SHARE
from allotment.agent.tenancy import Patience, ShareOrder, Tenants
from allotment.agent.tenancy.told import Told
from allotment.model.errors import StateError
from allotment.model.pods import ContainerKind, PodUid
from allotment.model.shares import Injection, Share, ShareId

INIT, SIDECAR, REGULAR = ContainerKind.INIT, ContainerKind.SIDECAR, ContainerKind.REGULAR
HASTE = Patience(deadline=5, pod=0.05, room=(0.0, 0.05), look=0.05, retry=0.02, pause=0.001)


class Scene:
    """A node on which everything is heard at once, unless the story says otherwise."""

    def __init__(self, patience: Patience = HASTE) -> None:
        self.kubelet = KubeletTwin()
        self.store = StoreTwin(self.kubelet.uses)
        self.patience = patience
        self.start_agent()

    def start_agent(self, *, is_synced: bool = True) -> None:
        self.pods = PodsTwin()
        self.pods.is_synced = is_synced
        self.reports = ReportsTwin()
        self.tenants = Tenants(
            checkpoint=self.kubelet,
            pods=self.pods,
            offer=lambda: OFFER,
            reports=self.reports,
            store=self.store,
            respond=respond,
            clock=lambda: self.store.clock,
            patience=self.patience,
        )

    def hear(self) -> None:
        while self.kubelet.news:
            self.pods.hear(*self.kubelet.news.popleft())

    def admit(self, uid: str, *containers: ContainerTwin, by_other: bool = False) -> PodTwin:
        pod = PodTwin(PodUid(uid), list(containers))
        assert self.kubelet.admit(pod, None if by_other else self.tenants)
        self.hear()
        return pod

    async def start(self, pod: PodTwin, name: str = "main") -> str:
        return await self.kubelet.start(
            pod, self.container(pod, name), self.tenants, self.store.shares.__contains__
        )

    async def lose(self, pod: PodTwin, name: str) -> None:
        """The share of a container that has ended is gone, as after somebody removed it."""
        del self.store.shares[ShareId(str(self.share_of(pod, name)))]
        await self.tenants.adopt()

    def container(self, pod: PodTwin, name: str) -> ContainerTwin:
        return next(each for each in pod.containers if each.name == name)

    def share_of(self, pod: PodTwin, name: str = "main") -> ShareId | None:
        return self.kubelet.entry(pod, self.container(pod, name)).share


def part(name: str = "main", kind: ContainerKind = REGULAR, *, memory: int = 4) -> ContainerTwin:
    return ContainerTwin(name, kind, resource=GPU_SHARE, memory=memory)


def whole(name: str = "main", kind: ContainerKind = REGULAR) -> ContainerTwin:
    return ContainerTwin(name, kind, resource=NVIDIA_GPU)


@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    """A node whose agent has just started."""
    made = Scene()
    await made.tenants.adopt()
    try:
        yield made
    finally:
        await made.tenants.close()


def story(tell: Callable[[Scene], Coroutine[object, object, None]]) -> Callable[[], None]:
    """Make a test of a story, which is told in a scene."""

    def test() -> None:
        async def main() -> None:
            async with scene() as node:
                await tell(node)

        asyncio.run(main())

    test.__name__, test.__doc__ = tell.__name__, tell.__doc__
    return test


# ---- a container starts --------------------------------------------------------------------------


def test_every_answer_has_a_name_of_its_own() -> None:
    made = Scene()
    answers = [made.tenants.answer(OFFER.resources[0], ["share::0"]) for _ in range(100)]
    names = {each.annotations[SHARE_ANNOTATION] for each in answers}
    assert len(names) == 100
    assert all(len(each) == 12 for each in names)


@story
async def test_a_container_gets_the_share_that_its_answer_named(node: Scene) -> None:
    pod = node.admit("1", part())
    assert await node.start(pod) == ""
    share = node.store.shares[ShareId(str(node.share_of(pod)))]
    assert str(share.owner) == "team/pod-1/main"
    assert node.reports.reasons("pod-1") == ["ShareReady"]
    assert ("shares_made", {"mode": "soft"}) in node.reports.counts


@story
async def test_a_restart_finds_everything_in_place_and_says_nothing(node: Scene) -> None:
    pod = node.admit("1", part())
    await node.start(pod)
    before = dict(node.store.shares)
    node.kubelet.finish(pod, pod.containers[0], for_good=False)
    node.hear()
    assert await node.start(pod) == ""
    assert node.store.shares == before
    assert node.reports.reasons("pod-1") == ["ShareReady"]


@story
async def test_a_restart_needs_no_api_server_and_no_valid_annotations(node: Scene) -> None:
    pod = node.admit("1", part())
    await node.start(pod)
    node.kubelet.finish(pod, pod.containers[0], for_good=False)
    node.start_agent(is_synced=False)
    await node.tenants.adopt()
    assert await node.start(pod) == ""
    pod.annotations["allotment.dev/compute"] = "nonsense"
    node.kubelet.finish(pod, pod.containers[0], for_good=False)
    node.hear()
    assert await node.start(pod) == ""


@story
async def test_a_pod_is_waited_for_and_not_for_ever(node: Scene) -> None:
    pod = PodTwin(PodUid("1"), [part()])
    node.kubelet.admit(pod, node.tenants)
    assert "the API server has not told of pod 1" in await node.start(pod)
    starting = asyncio.create_task(node.start(pod))
    await asyncio.sleep(0.005)
    node.hear()
    assert await starting == ""


@story
async def test_all_at_once_each_gets_its_own(node: Scene) -> None:
    pods = [node.admit(f"{number}", part(memory=1)) for number in range(12)]
    said = await asyncio.gather(*(node.start(pod) for pod in pods))
    assert said == [""] * 12
    assert len({pod.containers[0].share for pod in pods}) == 12


class SlowStore(StoreTwin):
    """Takes its time, and remembers how many are in it at once."""

    delay_s = 0.05

    def prepare(self, order: ShareOrder) -> Share:
        with self.guard:
            self.inside += 1
            self.most = max(self.most, self.inside)
        threading.Event().wait(self.delay_s)
        with self.guard:
            self.inside -= 1
        return super().prepare(order)

    guard = threading.Lock()
    inside = 0
    most = 0


def test_questions_about_the_same_ids_are_one() -> None:
    async def story() -> None:
        node = Scene()
        node.store = SlowStore(node.kubelet.uses)
        node.start_agent()
        pod = node.admit("1", part())
        ids = node.kubelet.table[0].ids
        await asyncio.gather(*(node.tenants.prepare(GPU_SHARE, ids) for _ in range(5)))
        assert node.store.prepared == [node.share_of(pod)]
        await node.tenants.close()

    asyncio.run(story())


def test_pods_do_not_wait_for_each_other() -> None:
    async def story() -> None:
        node = Scene()
        node.store = store = SlowStore(node.kubelet.uses)
        node.start_agent()
        pods = [node.admit(f"{number}", part(memory=1)) for number in range(3)]
        await asyncio.gather(*(node.start(pod) for pod in pods))
        assert store.most > 1
        await node.tenants.close()

    asyncio.run(story())


def test_who_waits_too_long_is_told_and_the_work_goes_on() -> None:
    async def story() -> None:
        node = Scene(replace(HASTE, deadline=0.02))
        node.store = SlowStore(node.kubelet.uses)
        node.start_agent()
        pod = node.admit("1", part())
        assert "is still being made" in await node.start(pod)
        await asyncio.sleep(0.2)
        assert await node.start(pod) in {
            "",
            "the share of share::0 is still being made after 0.02 s",
        }
        assert set(node.store.prepared) == {node.share_of(pod)}
        await asyncio.sleep(0.1)
        await node.tenants.close()

    asyncio.run(story())


# ---- refusals ------------------------------------------------------------------------------------


@story
async def test_a_refusal_is_told_once_and_its_end_too(node: Scene) -> None:
    first = [node.admit(f"{number}", part(memory=ROOM)) for number in range(2)]
    for pod in first:
        await node.start(pod)
    late = node.admit("late", part(memory=1))
    for _ in range(3):
        assert (await node.start(late)).startswith("need 1 of each")
    assert node.reports.reasons("pod-late") == ["ShareRefused"]
    assert node.reports.counts.count(("refusals", {"reason": "DoesNotFitError"})) == 3
    node.kubelet.delete(first[0])
    node.hear()
    # Nobody looked meanwhile: room is made when it is needed.
    assert await node.start(late) == ""
    assert node.reports.reasons("pod-late") == ["ShareRefused", "ShareReady"]


@story
async def test_a_refusal_is_told_once_more_when_its_figures_have_changed_for_a_while(
    node: Scene,
) -> None:
    late = node.admit("late", part(memory=ROOM))
    for number in range(2):
        await node.start(node.admit(f"there-{number}", part(memory=6)))
    for number in range(3):
        assert (await node.start(late)).startswith("need 10 of each")
        await node.start(node.admit(f"other-{number}", part(memory=1)))
    assert node.reports.reasons("pod-late") == ["ShareRefused"]
    node.store.clock += 700
    for number in range(2):
        await node.start(late)
        await node.start(node.admit(f"more-{number}", part(memory=1)))
    assert node.reports.reasons("pod-late") == ["ShareRefused"] * 2


@story
async def test_less_than_a_context_takes_is_warned_of(node: Scene) -> None:
    pod = node.admit("1", part(memory=1))
    await node.start(pod)
    (share,) = node.store.shares.values()
    reports = ReportsTwin()
    told = Told(reports)
    for mebibytes, said in ((256, ["ShareReady", "ShareSmall"]), (512, ["ShareReady"])):
        reports.events.clear()
        device = replace(share.devices[0], memory_bytes=mebibytes << 20)
        told.ready(replace(share, devices=(device,)))
        assert reports.reasons("pod-1") == said


@story
async def test_annotations_without_a_gpu_are_told_of_once(node: Scene) -> None:
    pod = PodTwin(PodUid("1"), [ContainerTwin("main", REGULAR)])
    pod.annotations["allotment.dev/compute"] = "30"
    node.kubelet.admit(pod, node.tenants)
    node.hear()
    for _ in range(2):
        await node.tenants.look()
    ((_, reason, message),) = node.reports.events
    assert reason == "ShareRefused"
    assert message.startswith("it starts without a GPU: pod team/pod-1: it has")


@story
async def test_what_cannot_be_meant_is_told_with_the_next_step(node: Scene) -> None:
    pod = node.admit("1", part())
    pod.annotations["allotment.dev/compute"] = "80:30"
    node.kubelet.tell(pod)
    node.hear()
    assert "did you mean 30:80?" in await node.start(pod)
    ((_, reason, message),) = node.reports.events
    assert reason == "ShareRefused"
    assert message.startswith("pod team/pod-1, container 'main': ")
    assert "hint: " in message


@story
async def test_quantities_without_a_gpu_are_told_of_once(node: Scene) -> None:
    """The kubelet asks no plugin for them, so that nothing refuses the pod."""
    pod = PodTwin(PodUid("1"), [ContainerTwin("main", REGULAR, memory=4)])
    node.kubelet.admit(pod, node.tenants)
    node.hear()
    for _ in range(2):
        await node.tenants.look()
    ((_, reason, message),) = node.reports.events
    assert reason == "ShareRefused"
    assert message.startswith("it starts without a GPU: pod team/pod-1, container 'main'")
    assert "add `allotment.dev/gpu: 1` to its limits" in message


# ---- init containers and sidecars ----------------------------------------------------------------


@story
async def test_init_containers_hand_their_ids_on(node: Scene) -> None:
    pod = node.admit("1", part("init", INIT, memory=2), part(memory=ROOM))
    ids = {each.ids for each in node.kubelet.table}
    assert len(ids) == 1
    assert await node.start(pod, "init") == ""
    assert len(node.store.shares) == 2
    # On one device: neither needs its place while the other runs.
    devices = {each.devices[0].uuid for each in node.store.shares.values()}
    assert len(devices) == 1
    node.kubelet.finish(pod, pod.containers[0], for_good=True)
    assert await node.start(pod) == ""
    assert pod.containers[1].share == node.share_of(pod)


@story
async def test_the_one_that_starts_is_prepared_last(node: Scene) -> None:
    pod = node.admit("1", part("init", INIT, memory=2), part(memory=4))
    await node.start(pod, "init")
    assert node.store.prepared[-1] == node.share_of(pod, "init")
    node.hear()  # it runs
    node.kubelet.finish(pod, pod.containers[0], for_good=True)
    assert await node.start(pod) == ""
    assert node.store.prepared[-1] == node.share_of(pod)


@story
async def test_what_was_left_to_an_init_container_comes_back_once_it_is_known_to_be_over(
    node: Scene,
) -> None:
    pod = node.admit("1", part("init", INIT, memory=4), part(memory=2))
    await node.start(pod, "init")
    node.kubelet.news.clear()  # nobody says that it runs, or has ended
    node.kubelet.finish(pod, pod.containers[0], for_good=True)
    node.kubelet.news.clear()
    assert await node.start(pod) == ""
    assert node.store.prepared[-1] == node.share_of(pod, "init")
    node.hear()
    await node.tenants.look()
    assert node.store.prepared[-1] == node.share_of(pod)


@story
async def test_a_new_sandbox_starts_init_containers_again(node: Scene) -> None:
    pod = node.admit("1", part("init", INIT), part())
    await node.start(pod, "init")
    node.kubelet.finish(pod, pod.containers[0], for_good=True)
    await node.start(pod)
    node.hear()
    node.store.clock += 600
    await node.tenants.look()
    # What an init container had stays its own for as long as the pod is there.
    assert set(node.store.shares) == {node.share_of(pod, "init"), node.share_of(pod)}
    node.kubelet.new_sandbox(pod)
    # The API server still has it as finished.
    assert await node.start(pod, "init") == ""
    assert pod.containers[0].state is State.RUNNING


@story
async def test_a_sidecar_restarts_on_a_full_node_whatever_its_init_container_had(
    node: Scene,
) -> None:
    """It is asked for with the ids of an init container that has ended, and needs no room."""
    pod = node.admit(
        "1", part("first", INIT, memory=5), part("sc", SIDECAR, memory=1), part(memory=1)
    )
    await node.start(pod, "first")
    node.kubelet.finish(pod, pod.containers[0], for_good=True)
    node.hear()
    assert await node.start(pod, "sc") == ""
    assert await node.start(pod) == ""
    node.hear()
    await node.lose(pod, "first")
    for number in range(2):
        filler = node.admit(f"full-{number}", part(memory=ROOM - 2 * (1 - number)))
        assert await node.start(filler) == ""
    for _ in range(4):
        node.kubelet.finish(pod, pod.containers[1], for_good=False)
        node.hear()
        assert await node.start(pod, "sc") == ""
        node.hear()
        node.store.clock += 15  # as in a crash loop
    # Nobody hears of its starts, nor a new agent of anything.
    for _ in range(4):
        node.kubelet.finish(pod, pod.containers[1], for_good=False)
        assert await node.start(pod, "sc") == ""
    assert node.store.prepared.count(ShareId(str(node.share_of(pod, "first")))) > 1
    node.start_agent(is_synced=False)
    await node.tenants.adopt()
    node.kubelet.finish(pod, pod.containers[1], for_good=False)
    assert await node.start(pod, "sc") == ""


@story
async def test_who_has_finished_is_not_prepared_anew_for_a_sidecar_that_crashes(
    node: Scene,
) -> None:
    pod = node.admit(
        "1", part("first", INIT, memory=5), part("sc", SIDECAR, memory=1), part(memory=1)
    )
    await node.start(pod, "first")
    node.hear()
    node.kubelet.finish(pod, pod.containers[0], for_good=True)
    node.hear()
    assert await node.start(pod, "sc") == ""
    assert await node.start(pod) == ""
    node.hear()
    await node.lose(pod, "first")
    told = list(node.reports.events)
    for _ in range(4):
        node.kubelet.finish(pod, pod.containers[1], for_good=False)
        node.hear()
        assert await node.start(pod, "sc") == ""
        node.hear()
        node.store.clock += 15
    assert node.share_of(pod, "first") not in node.store.shares
    assert node.reports.events == told


@story
async def test_no_room_for_what_comes_later_keeps_no_init_container_waiting(node: Scene) -> None:
    for number in range(2):
        await node.start(node.admit(f"full-{number}", part(memory=ROOM - 1)))
    pod = node.admit("1", part("init", INIT, memory=1), part(memory=2))
    for _ in range(2):  # it fails, and is started again
        assert await node.start(pod, "init") == ""
        node.kubelet.finish(pod, pod.containers[0], for_good=False)
        node.hear()
    assert await node.start(pod, "init") == ""
    node.kubelet.finish(pod, pod.containers[0], for_good=True)
    node.hear()
    assert (await node.start(pod)).startswith("need 2 of each")
    last = node.reports.events[-1]
    assert last[1] == "ShareRefused"
    assert last[2].startswith("container main: need 2")


@story
async def test_sidecars_keep_their_ids(node: Scene) -> None:
    pod = node.admit("1", part("side", SIDECAR, memory=2), part(memory=2))
    assert await node.start(pod, "side") == ""
    assert len(node.store.shares) == 1
    assert await node.start(pod) == ""
    assert len({each.share for each in pod.containers}) == 2


# ---- the end of shares ---------------------------------------------------------------------------


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
    for _ in range(2000):
        if not node.store.shares:
            break
        await asyncio.sleep(0.005)
    assert not node.store.shares
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
                done, _ = await asyncio.wait({loop}, timeout=5)
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
            self.may_end.wait(5)
            return found

    async def story() -> None:
        node = Scene()
        node.store = store = Slow(node.kubelet.uses)
        node.start_agent()
        pod = node.admit("1", part())
        adopting = asyncio.create_task(node.tenants.adopt())
        await asyncio.to_thread(store.reading.wait, 5)
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

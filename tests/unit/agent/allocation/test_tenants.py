# SPDX-License-Identifier: Apache-2.0
"""`Tenants` between twins: one story each of a container that starts, or is refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from awaiting import until
from kubelet_twin import ROOM, ContainerTwin, PodTwin, ReportsTwin, StoreTwin
from tenancy_scene import HASTE, REGULAR, Scene, part, story, whole

from allotment.agent.allocation.share_events import ShareEvents
from allotment.agent.resources import GPU_SHARE
from allotment.model.pods import PodUid
from allotment.model.shares import Share, ShareId
from allotment.model.structs import replace
from allotment.shares.placing import ShareOrder
from allotment.shares.pods import NodePolicy


@story
async def test_a_container_gets_the_share_that_its_answer_named(node: Scene) -> None:
    pod = node.admit("1", part())
    assert await node.start(pod) == ""
    share = node.store.shares[ShareId(str(node.share_of(pod)))]
    assert str(share.owner) == "team/pod-1/main"
    assert node.tenants.modes() == {share.devices[0].uuid: "soft"}
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
async def test_what_guards_a_share_not_is_told_with_it(node: Scene) -> None:
    pod = PodTwin(PodUid("1"), [part()])
    assert node.kubelet.admit(pod, node.tenants)
    (uid, seen) = node.kubelet.news.pop()
    assert seen is not None
    containers = tuple(replace(each, is_privileged=True) for each in seen.containers)
    node.pods.hear(uid, replace(seen, containers=containers, is_static=True, has_host_pids=True))
    await node.start(pod)
    told = [text for _, reason, text in node.reports.events if reason == "ShareUnguarded"]
    words = ("is privileged", "has hostPID", "is static")
    assert [word in text for word, text in zip(words, told, strict=True)] == [True] * 3
    other = node.admit("2", part())
    await node.start(other)
    assert node.reports.reasons("pod-2") == ["ShareReady"]


@story
async def test_a_removed_checkpoint_is_written_again(node: Scene) -> None:
    pod = node.admit("1", part())
    node.kubelet.is_checkpoint_removed = True
    assert await node.start(pod) == ""
    # And before the kubelet restarts, which would have forgotten the containers.
    node.kubelet.is_checkpoint_removed = True
    await node.tenants.look()
    assert not node.kubelet.is_checkpoint_removed
    assert node.kubelet.checkpoint_writes == 2


@story
async def test_a_checkpoint_that_stays_damaged_is_renewed_once(node: Scene) -> None:
    pod = node.admit("1", part())
    assert await node.start(pod) == ""
    node.kubelet.is_damaged = True
    for _ in range(3):
        await node.tenants.look()
    assert node.kubelet.checkpoint_writes == 1
    assert "no checkpoint" in await node.start(pod)
    assert node.kubelet.checkpoint_writes == 2
    node.kubelet.is_damaged = False
    await node.tenants.look()
    node.kubelet.is_checkpoint_removed = True
    await node.tenants.look()
    assert node.kubelet.checkpoint_writes == 3


@story
async def test_a_pod_is_waited_for_and_not_for_ever(node: Scene) -> None:
    pod = PodTwin(PodUid("1"), [part()])
    node.kubelet.admit(pod, node.tenants)
    assert "the API server has not reported pod 1" in await node.start(pod)
    node.patience = replace(HASTE, pod=40.0)
    node.start_agent()
    await node.tenants.adopt()
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
    """Takes its time, and as long as it is told to."""

    delay_s = 0.05

    def __init__(self, uses: Callable[[ShareId], bool]) -> None:
        super().__init__(uses)
        self.may_end = threading.Event()
        self.may_end.set()

    def prepare(self, order: ShareOrder, policy: NodePolicy) -> Share:
        threading.Event().wait(self.delay_s)
        assert self.may_end.wait(40), "nobody lets it end"
        return super().prepare(order, policy)


class MeetingStore(StoreTwin):
    """Ends no call before three have begun."""

    def __init__(self, uses: Callable[[ShareId], bool]) -> None:
        super().__init__(uses)
        self.together = threading.Barrier(3, timeout=40)

    def prepare(self, order: ShareOrder, policy: NodePolicy) -> Share:
        self.together.wait()
        return super().prepare(order, policy)


def test_questions_about_the_same_ids_are_one() -> None:
    async def story() -> None:
        node = Scene()
        node.store = SlowStore(node.kubelet.uses)
        node.start_agent()
        pod = node.admit("1", part())
        ids = node.kubelet.table[0].ids
        await asyncio.gather(*(node.tenants.pre_start(GPU_SHARE, ids) for _ in range(5)))
        assert node.store.prepared == [node.share_of(pod)]
        await node.tenants.close()

    asyncio.run(story())


def test_pods_do_not_wait_for_each_other() -> None:
    async def story() -> None:
        node = Scene()
        node.store = MeetingStore(node.kubelet.uses)
        node.start_agent()
        pods = [node.admit(f"{number}", part(memory=1)) for number in range(3)]
        assert await asyncio.gather(*(node.start(pod) for pod in pods)) == [""] * 3
        await node.tenants.close()

    asyncio.run(story())


def test_who_waits_too_long_is_told_and_the_work_goes_on() -> None:
    async def story() -> None:
        node = Scene(replace(HASTE, deadline=0.02))
        node.store = store = SlowStore(node.kubelet.uses)
        store.may_end.clear()
        node.start_agent()
        pod = node.admit("1", part())
        for _ in range(2):
            said = await node.start(pod)
            assert said == "the share of share::0 is not ready after 0.02 s"
        store.may_end.set()
        await until(lambda: node.share_of(pod) in store.shares)
        assert store.prepared == [node.share_of(pod)]
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
async def test_a_device_is_waited_for_whose_former_pod_the_kubelet_counts_no_longer(
    node: Scene,
) -> None:
    """The kubelet gives a pod's device to the next one before it reports the pod's end."""
    first, second = (node.admit(name, whole()) for name in ("first", "second"))
    await node.start(first)
    await node.start(second)
    node.hear()
    node.kubelet.delete(first)
    end_of_first = node.kubelet.news.popleft()
    late = node.admit("late", whole())
    asked = len(node.store.prepared)
    starting = asyncio.create_task(node.start(late))
    await until(lambda: len(node.store.prepared) > asked)
    await asyncio.sleep(sum(HASTE.room) * 3)
    assert not starting.done()
    node.pods.hear(*end_of_first)
    assert await starting == ""
    assert node.reports.reasons("pod-late") == ["ShareReady"]
    assert not [each for each, _ in node.reports.counts if each == "refusals"]


@story
async def test_a_share_that_ends_while_another_waits_makes_room_whoever_ends_it(
    node: Scene,
) -> None:
    there = [node.admit(f"{number}", part(memory=ROOM)) for number in range(2)]
    for pod in there:
        await node.start(pod)
    late = node.admit("late", part(memory=1))
    asked = len(node.store.prepared)
    starting = asyncio.create_task(node.start(late))
    await until(lambda: len(node.store.prepared) > asked)
    node.kubelet.delete(there[0])
    node.hear()
    await node.tenants.look()
    assert await starting == ""


def test_nothing_is_waited_for_while_the_kubelet_counts_all_pods() -> None:
    async def story() -> None:
        node = Scene(replace(HASTE, departure=(3600.0,)))
        for number in range(2):
            await node.start(node.admit(f"{number}", part(memory=ROOM)))
        assert (await node.start(node.admit("late", part(memory=1)))).startswith("need 1 of each")
        await node.tenants.close()

    asyncio.run(story())


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
    told = ShareEvents(reports)
    for mebibytes, said in ((256, ["ShareReady", "ShareSmall"]), (512, ["ShareReady"])):
        reports.events.clear()
        device = replace(share.devices[0], memory_bytes=mebibytes << 20)
        told.ready(replace(share, devices=(device,)), None)
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

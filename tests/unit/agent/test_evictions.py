# SPDX-License-Identifier: Apache-2.0
"""Pods that are placed again: after a change of their node, and of a sick GPU."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from kubelet_twin import OFFER, ROOM, SOFT_DEVICES, UNIT, PodsTwin, PodTwin, ReportsTwin
from pod_node import Node, order
from tenancy_scene import Scene, part, story

from allotment.agent.evictions import (
    EVICTED,
    KEPT,
    MISPLACED_S,
    NO_ROOM_S,
    Evictions,
    note_evicted,
)
from allotment.agent.resources import GPU_SHARE
from allotment.model.errors import StateError
from allotment.model.pods import Container, ContainerKind, Owner, Pod, PodUid
from allotment.model.structs import replace
from allotment.shares.record import read_events

OTHER_MODE = replace(
    OFFER,
    modes={**OFFER.modes, SOFT_DEVICES[0]: "exclusive"},
    shared={SOFT_DEVICES[1]: ("soft",)},
)
"""After a change of the configuration: the first GPU is whole."""


def placed(
    node: Scene, uid: str, *, has_controller: bool = True, pod: str | None = None
) -> PodTwin:
    """A pod that the scheduler placed on the first GPU."""
    placement = {
        "version": 1,
        "node": "node-1",
        "pod": uid if pod is None else pod,
        "containers": {"main": {"devices": [SOFT_DEVICES[0]], "memory": 4 * UNIT}},
    }
    made = PodTwin(PodUid(uid), [part()], has_controller=has_controller)
    made.annotations["allotment.dev/placement"] = json.dumps(placement)
    assert node.kubelet.admit(made, node.tenants)
    node.hear()
    return made


@story
async def test_a_pod_placed_before_a_change_of_its_gpu_is_placed_again(node: Scene) -> None:
    pod = placed(node, "1")
    node.offer = OTHER_MODE
    why = await node.start(pod)
    assert "whose mode is 'exclusive' and not 'soft'" in why
    assert node.pods.deleted == []  # the change may be taken back at once
    node.store.clock += MISPLACED_S
    await node.start(pod)
    assert node.pods.deleted == [PodUid("1")]
    assert node.reports.reasons("pod-1") == ["ShareRefused", EVICTED]
    assert "the node changed after its GPUs were chosen" in node.reports.events[-1][2]
    assert ("evictions", {}) in node.reports.counts
    await node.start(pod)  # while it ends
    assert node.pods.deleted == [PodUid("1")]


@story
async def test_a_change_that_is_taken_back_evicts_nothing(node: Scene) -> None:
    pod = placed(node, "1")
    node.offer = OTHER_MODE
    await node.start(pod)
    node.offer = OFFER
    assert await node.start(pod) == ""
    node.kubelet.finish(pod, pod.containers[0], for_good=False)
    await node.lose(pod, "main")
    node.offer = OTHER_MODE
    node.store.clock += MISPLACED_S
    await node.start(pod)  # the first refusal of a new series
    assert node.pods.deleted == []


@story
async def test_a_pod_without_a_controller_stays_and_its_event_says_what_helps(node: Scene) -> None:
    pod = placed(node, "1", has_controller=False)
    node.offer = OTHER_MODE
    for _ in range(3):
        await node.start(pod)
        node.store.clock += MISPLACED_S
    assert node.pods.deleted == []
    assert node.reports.reasons("pod-1") == ["ShareRefused", KEPT]
    assert "delete and create it" in node.reports.events[-1][2]


@story
async def test_a_placement_that_a_user_wrote_would_come_back(node: Scene) -> None:
    pod = placed(node, "1", pod="")
    pod.annotations["allotment.dev/placement"] = pod.annotations["allotment.dev/placement"].replace(
        '"pod": "", ', ""
    )
    node.kubelet.tell(pod)
    node.hear()
    node.offer = OTHER_MODE
    for _ in range(3):
        assert "whose mode is" in await node.start(pod)
        node.store.clock += MISPLACED_S
    assert node.pods.deleted == []


@story
async def test_a_chosen_gpu_without_room_for_long_is_chosen_again(node: Scene) -> None:
    """Shares that the scheduler did not know, or a GPU that became unhealthy since."""
    node.admit("2", part(memory=ROOM))
    other = node.kubelet.pods[PodUid("2")]
    other.annotations["allotment.dev/placement"] = json.dumps(
        {"version": 1, "containers": {"main": {"devices": [SOFT_DEVICES[0]]}}}
    )
    node.kubelet.tell(other)
    node.hear()
    assert await node.start(other) == ""
    pod = placed(node, "1")
    assert "need 4" in await node.start(pod)
    node.store.clock += MISPLACED_S
    await node.start(pod)
    assert node.pods.deleted == []  # a program may take long to end
    node.store.clock += NO_ROOM_S
    await node.start(pod)
    assert node.pods.deleted == [PodUid("1")]


@story
async def test_a_pod_that_no_scheduler_placed_waits_for_room(node: Scene) -> None:
    for uid in ("1", "2"):
        assert await node.start(node.admit(uid, part(memory=ROOM))) == ""
    pod = node.admit("3", part())
    pod.has_controller = True
    node.kubelet.tell(pod)
    node.hear()
    for _ in range(3):
        assert "need 4" in await node.start(pod)
        node.store.clock += NO_ROOM_S
    assert node.pods.deleted == []


@story
async def test_without_a_configuration_nothing_is_evicted(node: Scene) -> None:
    pod = placed(node, "1")
    node.offer = replace(OFFER, resources=(), modes={}, shared={})
    for _ in range(3):
        assert "no longer offers" in await node.start(pod)
        node.store.clock += MISPLACED_S
    assert node.pods.deleted == []


@story
async def test_ids_of_a_resource_that_is_gone_are_given_again(node: Scene) -> None:
    pod = node.admit("1", part())
    pod.has_controller = True
    node.kubelet.tell(pod)
    node.hear()
    whole = tuple(each for each in OFFER.resources if each.name != GPU_SHARE)
    node.offer = replace(OFFER, resources=whole)
    await node.start(pod)
    node.store.clock += MISPLACED_S
    await node.start(pod)
    assert node.pods.deleted == [PodUid("1")]


@pytest.mark.parametrize(
    ("kind", "is_evicted"),
    [(ContainerKind.REGULAR, False), (ContainerKind.SIDECAR, True)],
    ids=["container", "sidecar"],
)
@pytest.mark.parametrize("has_run", [False, True], ids=["before its start", "at a restart"])
@pytest.mark.parametrize("has_share", [False, True], ids=["no share", "a share"])
def test_a_pod_of_which_another_container_runs_stays(
    kind: ContainerKind, *, is_evicted: bool, has_run: bool, has_share: bool
) -> None:
    """It would lose its work. A sidecar only serves the container that cannot start."""

    @story
    async def tell(node: Scene) -> None:
        other = part("other", kind)
        if not has_share:
            other.resource = other.memory = None
        pod = node.admit("1", *sorted([part(), other], key=lambda each: each.kind is not kind))
        pod.has_controller = True
        assert await node.start(pod, "other") == ""
        if has_run:
            assert await node.start(pod) == ""
            node.kubelet.finish(pod, node.container(pod, "main"), for_good=False)
            await node.lose(pod, "main")
        node.hear()
        whole = tuple(each for each in OFFER.resources if each.name != GPU_SHARE)
        node.offer = replace(OFFER, resources=whole)
        for _ in range(3):
            assert "no longer offers" in await node.start(pod)
            node.store.clock += MISPLACED_S
        assert node.pods.deleted == ([PodUid("1")] if is_evicted else [])
        reason = EVICTED if is_evicted else KEPT
        assert node.reports.reasons("pod-1").count(reason) == 1
        if is_evicted:
            return
        assert "its container other runs, and would lose its work" in node.reports.events[-1][2]
        node.kubelet.finish(pod, node.container(pod, "other"), for_good=True)
        node.hear()
        node.store.clock += MISPLACED_S
        await node.start(pod)
        assert node.pods.deleted == [PodUid("1")]

    tell()


class Sick:
    """GPU-0 with a pod, and a clock."""

    def __init__(
        self,
        *,
        is_failing: bool = False,
        is_ending: bool = False,
        has_ended: bool = False,
        beside: str | None = None,
    ) -> None:
        """`beside`: the GPU of another container of the pod."""
        self.now = 0.0
        self.sick: dict[str, str] = {}
        self.evicted: list[tuple[PodUid, str]] = []
        self.pods = FailingPods() if is_failing else PodsTwin()
        pod = Pod(
            uid=PodUid("1"),
            namespace="n",
            name="pod-1",
            is_ending=is_ending,
            has_ended=has_ended,
            has_controller=True,
            containers=tuple(
                Container(name, ContainerKind.REGULAR, is_running=True)
                for name in (["main"] if beside is None else ["main", "side"])
            ),
        )
        self.pods.hear(pod.uid, pod)
        owner = Owner(
            uid=PodUid("1"),
            namespace="n",
            pod="pod-1",
            container="main",
            kind=ContainerKind.REGULAR,
            resource=GPU_SHARE,
        )
        self.reports = ReportsTwin()
        self.evictions = Evictions(
            pods=self.pods,
            reports=self.reports,
            sick=lambda: self.sick,
            after_s=lambda: 60.0,
            owners=lambda uuid: [
                *([owner] if uuid == "GPU-0" else []),
                *([replace(owner, container="side")] if uuid == beside else []),
            ],
            on_due=self._hear,
            on_evicted=lambda pod, why: self.evicted.append((pod, why)),
            clock=lambda: self.now,
        )

    def _hear(self, due: Collection[str]) -> None:
        self.due = due

    def look(self, *, after_s: float) -> list[PodUid]:
        self.now += after_s
        asyncio.run(self.evictions.look())
        return self.pods.deleted


class FailingPods(PodsTwin):
    """An API server that refuses deletions at first."""

    tries = 0
    refused = 2

    async def delete(self, pod: Pod) -> None:
        self.tries += 1
        if self.tries <= self.refused:
            raise StateError("no", hint="try again")
        await super().delete(pod)


def test_the_pods_of_a_sick_gpu_are_evicted_after_a_while() -> None:
    scene = Sick()
    assert scene.look(after_s=100) == []
    scene.sick = {"GPU-0": "it is lost", "GPU-1": "too"}
    assert scene.look(after_s=0) == []
    scene.sick = {}
    assert scene.look(after_s=59) == []  # it was back, and the time starts again
    scene.sick = {"GPU-0": "it is lost"}
    assert scene.look(after_s=1) == []
    assert scene.look(after_s=59) == []
    assert scene.look(after_s=1) == [PodUid("1")]
    assert scene.look(after_s=1) == [PodUid("1")]
    assert scene.reports.reasons("pod-1") == [EVICTED]
    assert "GPU GPU-0 of container main: it is lost" in scene.reports.events[0][2]
    assert scene.evicted == [("1", "GPU GPU-0 of container main: it is lost")]


def test_an_eviction_is_among_the_events_of_the_machine(tmp_path: Path) -> None:
    node = Node(tmp_path)
    share, _ = (node.prepare(order(number)) for number in (1, 2))
    assert share.owner is not None
    before = len(read_events(node.folder))
    note_evicted(node.folder, node.shares.owned(), share.owner.uid, "its GPU is lost")
    (event,) = read_events(node.folder)[before:]
    assert (event.kind, event.id, event.text) == ("evicted", share.id, "its GPU is lost")


def test_a_gpu_is_due_from_its_time_until_it_is_well() -> None:
    """For claims: the GPU's taint evicts their pods."""
    scene = Sick()
    scene.sick = {"GPU-0": "it is lost"}
    for after_s, due in ((0, set()), (59, set()), (1, {"GPU-0"}), (1, {"GPU-0"})):
        scene.look(after_s=after_s)
        assert scene.due == due
    scene.sick = {}
    scene.look(after_s=1)
    assert scene.due == set()


@pytest.mark.parametrize("fields", [{"is_ending": True}, {"has_ended": True}], ids=str)
def test_pods_that_end_are_not_evicted(fields: dict[str, Any]) -> None:
    scene = Sick(**fields)
    scene.sick = {"GPU-0": "it is lost"}
    scene.look(after_s=0)
    assert scene.look(after_s=60) == []
    assert scene.reports.events == []


def test_a_pod_with_a_program_on_a_healthy_gpu_stays_until_that_is_sick_too() -> None:
    scene = Sick(beside="GPU-1")
    scene.sick = {"GPU-0": "it is lost"}
    for after_s in (0, 60, 60):
        assert scene.look(after_s=after_s) == []
    assert scene.reports.reasons("pod-1") == [KEPT]
    assert "its container side runs" in scene.reports.events[0][2]
    scene.sick["GPU-1"] = "it is lost"
    scene.look(after_s=0)
    assert scene.look(after_s=60) == [PodUid("1")]


def test_a_refused_deletion_is_reported_once_and_repeated_now_and_then() -> None:
    scene = Sick(is_failing=True)
    assert isinstance(scene.pods, FailingPods)
    scene.sick = {"GPU-0": "it is lost"}
    scene.look(after_s=0)
    assert scene.look(after_s=60) == []
    assert "it is lost; no; hint: try again" in scene.reports.events[0][2]
    for _ in range(19):
        assert scene.look(after_s=1) == []
    assert scene.reports.reasons("pod-1") == [KEPT]
    assert scene.pods.tries == 2
    assert scene.look(after_s=1) == [PodUid("1")]
    assert scene.reports.reasons("pod-1") == [KEPT, EVICTED]

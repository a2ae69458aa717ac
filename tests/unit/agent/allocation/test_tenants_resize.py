# SPDX-License-Identifier: Apache-2.0
"""`Tenants` between twins: shares follow `allotment.dev/resize`, and what is reported of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kubelet_twin import SOFT_DEVICES, UNIT, PodTwin
from tenancy_scene import INIT, Scene, part, story

from allotment.agent.resources import GPU_COMPUTE, GPU_MEMORY


def placement(pod: PodTwin, memory: int, generation: int = 0, wish: str = "", **more: Any) -> str:  # noqa: ANN401
    resize = {"resize": {"wish": wish, "generation": generation}} if generation else {}
    parts = {"devices": [SOFT_DEVICES[0]], "memory": memory * UNIT, **more}
    document = {"version": 1, "node": "node-1", "pod": pod.uid, "containers": {"main": parts}}
    return json.dumps(document | resize)


def memory_of(node: Scene, pod: PodTwin, name: str = "main") -> int:
    share = node.share_of(pod, name)
    assert share is not None
    (device,) = node.store.shares[share].devices
    return device.memory_bytes // UNIT


@story
async def test_a_share_follows_what_the_scheduler_accepted(node: Scene) -> None:
    pod = node.admit("1", part())
    node.change(pod, placement=placement(pod, 4))
    await node.start(pod)
    node.change(pod, placement=placement(pod, 4), resize="memory:6Gi")
    await node.tenants.look()
    assert (memory_of(node, pod), node.resized) == (4, {})  # a wish is no decision
    node.change(pod, placement=placement(pod, 6, 1, "memory:6Gi,compute:30:80"), resize="any")
    await node.tenants.look()
    assert (memory_of(node, pod), node.resized) == (6, {pod.uid: 1})
    assert node.released == {GPU_MEMORY: -2 * UNIT, GPU_COMPUTE: -30}
    assert "Resized" in [reason for _, reason, _ in node.reports.events]
    # The placement has the larger of before and after, until the node reports.
    node.change(pod, placement=placement(pod, 6, 2, "memory:2Gi"))
    await node.tenants.look()
    assert (memory_of(node, pod), node.resized) == (2, {pod.uid: 2})
    assert node.released == {GPU_MEMORY: 2 * UNIT}
    node.change(pod, placement=placement(pod, 4, 3))
    await node.tenants.look()
    assert (memory_of(node, pod), node.resized, node.released) == (4, {pod.uid: 3}, {})


@story
async def test_what_is_refused_is_not_reported_as_in_force_and_tried_again(node: Scene) -> None:
    pod = node.admit("1", part())
    node.change(pod, placement=placement(pod, 4))
    await node.start(pod)
    share = node.share_of(pod)
    assert share is not None
    node.store.used[share] = 3 * UNIT
    node.change(pod, placement=placement(pod, 4, 1, "memory:2Gi"))
    for _ in range(3):
        assert await node.tenants.look() <= node.patience.retry
    assert (memory_of(node, pod), node.resized) == (4, {})
    refusals = [text for _, reason, text in node.reports.events if reason == "ResizeRefused"]
    (text,) = refusals
    assert "main: not resized to memory:2Gi: 3Gi (3221225472 bytes) in use, more than" in text
    node.store.used.clear()
    node.start_agent()  # the next agent finds it again
    await node.tenants.adopt()
    node.change(pod, placement=placement(pod, 4, 1, "memory:2Gi"))
    await node.tenants.look()
    assert (memory_of(node, pod), node.resized) == (2, {pod.uid: 1})


class Killed(BaseException):
    """The agent's process is killed."""


@story
async def test_an_agent_that_is_killed_has_not_reported_it(node: Scene) -> None:
    """Before or after it changed the share: the next one repeats it, and reports the same."""
    pod = node.admit("1", part())
    node.change(pod, placement=placement(pod, 4))
    await node.start(pod)
    for generation, point in enumerate(("tenancy.resizing", "tenancy.resized"), 1):

        def kill(reached: str, at: str = point) -> None:
            if reached == at:
                raise Killed

        wish = f"memory:{4 - generation}Gi"
        before = dict(node.resized)
        node.tenants._step = kill  # noqa: SLF001 - what ALLOTMENT_KILL_AT is to a process
        node.change(pod, placement=placement(pod, 4, generation, wish))
        with pytest.raises(Killed):
            await node.tenants.look()
        assert node.resized == before
        node.start_agent()
        await node.tenants.adopt()
        node.change(pod, placement=placement(pod, 4, generation, wish))
        await node.tenants.look()
        assert (memory_of(node, pod), node.resized) == (4 - generation, {pod.uid: generation})
        assert node.released == {GPU_MEMORY: generation * UNIT}


@story
async def test_a_pod_is_in_force_with_all_its_shares(node: Scene) -> None:
    """A container that has not started starts by the placement."""
    pod = node.admit("1", part("init", INIT), part())
    node.change(pod, placement=placement(pod, 4, 1, "main=memory:2Gi"))
    await node.tenants.look()
    assert node.resized == {pod.uid: 1}
    await node.start(pod, "init")
    node.kubelet.finish(pod, pod.containers[0], for_good=True)
    node.hear()
    await node.start(pod)
    assert memory_of(node, pod) == 2


@story
async def test_without_a_scheduler_the_annotation_counts(node: Scene) -> None:
    pod, other = node.admit("1", part()), node.admit("2", part(memory=5))
    await node.start(pod)
    await node.start(other)
    node.change(pod, resize="memory:7Gi")
    await node.tenants.look()
    assert memory_of(node, pod) == 4  # its request, which the quota counted
    assert "memory (need 7Gi, have 4Gi)" in node.reports.events[-1][2]
    node.change(pod, resize="memory:2Gi")
    await node.tenants.look()
    assert memory_of(node, pod) == 2
    node.change(pod, resize="memory:more")
    await node.tenants.look()
    assert memory_of(node, pod) == 2
    assert "'more' is not an amount" in node.reports.events[-1][2]
    node.change(pod)  # as it was created
    await node.tenants.look()
    assert (memory_of(node, pod), node.resized, node.released) == (4, {}, {})

# SPDX-License-Identifier: Apache-2.0
"""Pods with several containers: one slice for those that run in turn, and a slice beside a part."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from kubelet_twin import PodTwin
from mig_node import PROFILE, SMALL, Node, asking, tell

from allotment.model.pods import ContainerKind


@pytest.fixture
def node(tmp_path: Path, native_dir: Path) -> Node:
    assert native_dir.is_dir()
    return Node(tmp_path, "[{mode: mig, mig: {keep: 1s}}]")


def placed_together(node: Node, *names: str) -> dict[str, str]:
    """What the scheduler writes: the same slice for each of these containers."""
    place = {
        "mode": "mig",
        "devices": [node.uuids[1]],
        "slices": [[SMALL, 5]],
        "memory": 1,
    }
    return {
        **PROFILE,
        "allotment.dev/placement": json.dumps(
            {"version": 1, "containers": dict.fromkeys(names, place)}
        ),
    }


@pytest.mark.parametrize("inits", [1, 2])
def test_containers_have_the_slice_that_both_were_given(node: Node, inits: int) -> None:
    async def story() -> None:
        names = [f"init{number}" for number in range(inits)]
        before = [replace(asking(name), kind=ContainerKind.INIT) for name in names]
        pod = node.admit("1", *before, asking(), annotations=placed_together(node, *names, "main"))
        await run_through(node, pod)
        (there,) = node.look(1).instances
        assert node.look(0).instances == ()
        # The pod has another sandbox: all of its containers start again, in the same slice.
        node.kubelet.finish(pod, pod.containers[-1], for_good=False)
        await run_through(node, pod)
        assert node.look(1).instances == (there,)
        seen = await asyncio.to_thread(node.seen_inside, node.share_of(pod, inits))
        assert seen["visible"] == there.uuid
        node.remove(pod)
        await node.until(lambda: not node.tenants.shares, "the shares are gone")
        await node.until(lambda: not node.journal(1).read().records, "the slice is gone")
        assert node.look(1).instances == ()

    tell(node, story)


async def run_through(node: Node, pod: PodTwin) -> None:
    """Start a pod's containers, each when the one before it has ended."""
    for number, container in enumerate(pod.containers):
        assert await node.start(pod, number) == ""
        if container.kind is ContainerKind.INIT:
            seen = await asyncio.to_thread(node.seen_inside, node.share_of(pod, number))
            assert seen["visible"] == node.look(1).instances[0].uuid
            node.kubelet.finish(pod, container, for_good=True)
            node.hear()


def test_a_resize_is_done_where_another_container_has_a_slice(
    tmp_path: Path, native_dir: Path
) -> None:
    """The slice has more than its container asks for, and no annotation asks for a change."""
    assert native_dir.is_dir()
    node = Node(tmp_path, "[{modes: [soft, mig]}]")

    async def story() -> None:
        written = {"allotment.dev/mode": "cut=mig;main=soft"}
        cut, main = replace(asking("cut"), memory=8), replace(asking(), memory=6)
        pod = node.admit("1", cut, main, annotations=written)
        assert await node.start(pod, 0) == ""
        assert await node.start(pod, 1) == ""
        assert {each.mode for each in node.tenants.shares} == {"mig", "soft"}

        def resize(text: str) -> None:
            pod.annotations = {**written, "allotment.dev/resize": text}
            node.pods.hear(pod.uid, pod.seen())

        def refusals() -> list[str]:
            return [text for _, reason, text in node.reports.events if reason == "ResizeRefused"]

        def memory(name: str) -> int:
            owned = {each.owner.container: each for each in node.tenants.shares if each.owner}
            return owned[name].devices[0].memory_bytes

        slice_bytes = memory("cut")
        resize("main=memory:2Gi,class:latency")
        await node.until(lambda: memory("main") == 2 << 30, "the soft container is resized")
        await node.tenants.look()
        assert refusals() == []
        assert memory("cut") == slice_bytes > 8 << 30
        resize("cut=memory:4Gi;main=memory:2Gi")
        await node.until(refusals, "the refusal of the other container")
        assert "share team/pod-1/cut is of mode mig" in refusals()[0]

    tell(node, story)

# SPDX-License-Identifier: Apache-2.0
"""Slices for containers of pods, and what other managers of MIG do to them.

As in `test_mig_pods`, a container is a process here that has what its CDI spec says.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from mig_node import SMALL, Node, asking, at, by_hand, has_told, removing, soft_on, tell, told

from allotment.agent.inventory_publisher import build_inventory
from allotment.agent.mig import conflicts
from allotment.devices.mig_machine import MigDevice

PAUSE_S = 600.0


@pytest.fixture
def node(tmp_path: Path, native_dir: Path) -> Node:
    assert native_dir.is_dir()
    return Node(tmp_path)


def others_reset(node: Node) -> None:
    """Another manager of MIG: all instances away, and the mode off."""

    def reset(device: MigDevice) -> None:
        for each in device.driver.look().instances:
            device.driver.destroy_compute_instances(each.gpu_instance)
            device.driver.destroy_gpu_instance(each.gpu_instance)
        device.driver.set_mode(is_on=False)

    node.on(0, reset)


def test_what_others_cut_is_theirs(node: Node) -> None:
    theirs = node.on(0, by_hand)

    async def story() -> None:
        pods = [node.admit(str(n), asking()) for n in range(7)]
        assert await asyncio.gather(*map(node.start, pods)) == [""] * 7
        mine = {each.devices[0].uuid for each in node.tenants.shares}
        assert theirs not in mine
        await node.until(
            lambda: [each.hold.name for each in node.seen().slices].count("FOREIGN") == 1,
            "it is counted",
        )
        for each in pods:
            node.remove(each)
        await node.until(lambda: not node.tenants.shares, "all shares are gone")

    tell(node, story)
    assert theirs in {each.uuid for each in node.look().instances}


def test_a_slice_that_others_remove_is_told_and_not_made_again(
    tmp_path: Path, native_dir: Path
) -> None:
    assert native_dir.is_dir()
    node = Node(tmp_path, "[{mode: mig, mig: {keep: 1s}}]")

    async def story() -> None:
        pod = node.admit("1", asking(), annotations=at((node.uuids[0], SMALL, 3)))
        assert await node.start(pod) == ""
        await node.until(lambda: node.seen().slices, "it is seen")
        node.on(0, removing(3, is_off=True))
        await node.until(lambda: "SliceGone" in node.reports.reasons("pod-1"), "it is told")
        assert node.there() == []
        node.kubelet.finish(pod, pod.containers[0], for_good=False)
        assert "was removed by others" in await node.start(pod)
        assert node.there() == []
        # Who has lost its slice keeps nobody from the GPU.
        other = node.admit("2", asking(), annotations=at((node.uuids[0], SMALL, 3)))
        assert await node.start(other) == ""
        assert node.there() == [(SMALL, 3)]
        assert "was removed by others" in await node.start(pod)
        await asyncio.sleep(1.5)  # it is looked at again
        assert node.reports.reasons("pod-1").count("SliceGone") == 1
        node.remove(pod)
        await node.until(lambda: len(node.journal().read().records) == 1, "nothing is left of it")
        node.remove(other)
        await node.until(lambda: not node.look().is_enabled, "nothing is left")

    tell(node, story)


def test_a_pod_whose_slice_is_gone_never_has_anothers(tmp_path: Path, native_dir: Path) -> None:
    assert native_dir.is_dir()
    node = Node(tmp_path, "[{mode: mig, mig: {keep: 0s}}]", "h100-80gb")

    async def story() -> None:
        robbed, brief = (
            node.admit(str(slot), asking(), annotations=at((node.uuids[0], SMALL, slot)))
            for slot in (3, 5)
        )
        for each in (robbed, brief):
            assert await node.start(each) == ""
        node.on(0, removing(3))
        node.remove(brief)
        await node.until(lambda: node.there() == [], "the other one's slice is removed")
        # Its GPU is not switched off under it, and its record stays.
        assert node.look().is_enabled
        after = node.admit("6", asking(), annotations=at((node.uuids[0], SMALL, 3)))
        assert await node.start(after) == ""
        node.kubelet.finish(robbed, robbed.containers[0], for_good=False)
        assert "was removed by others" in await node.start(robbed)
        # Nobody has looked yet when the next agent is asked.
        node.start_agent()
        node.hear()
        node.kubelet.tell(robbed)
        node.kubelet.tell(after)
        node.hear()
        await node.tenants.adopt()
        assert "was removed by others" in await node.start(robbed)
        assert await node.start(after) == ""

    tell(node, story)


# ---- a manager that goes on ----------------------------------------------------------------------


def test_who_switches_mig_off_twice_has_it_off_for_a_while(
    tmp_path: Path, native_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert native_dir.is_dir()
    monkeypatch.setattr(conflicts, "FIRST_PAUSE_S", PAUSE_S)
    node = Node(tmp_path, "[{modes: [mig, soft]}]", "h100-80gb")
    uuid = node.uuids[0]

    async def story() -> None:
        for number, reason in enumerate(("MigSwitchedOff", "MigPaused")):
            pod = node.admit(f"{number}", asking())
            assert await node.start(pod) == ""
            await node.until(lambda: node.seen().is_enabled, "it is seen on")
            others_reset(node)
            await node.until(partial(has_told, node, reason), reason)
            assert "SliceGone" in node.reports.reasons(f"pod-{number}")
            assert not node.journal().is_switched, "what is off is not ours"
        (text,) = (each for _, reason, each in node.reports.events if reason == "MigPaused")
        assert "others have switched it off 2 times: it stays off until" in text
        assert node.reports.gauges["mig_paused", uuid] == 1
        assert [each for each in node.reports.counts if each[0] == "mig_switched_off"] == [
            ("mig_switched_off", {"device": uuid})
        ] * 2
        assert told(node).modes == ("soft",)
        assert "others have switched it off 2 times" in told(node).mig_off

        chosen = node.admit("3", asking(), annotations=at((uuid, SMALL, 3)))
        free = node.admit("4", asking())
        for pod in (chosen, free):
            refused = await node.start(pod)
            assert "MIG is off, and others have switched it off 2 times" in refused
        assert not node.look().is_enabled
        soft = node.admit("5", replace(asking(), memory=4), annotations=soft_on(uuid))
        assert await node.start(soft) == "", "in another mode it serves"
        node.remove(soft)
        # Time passes.
        node.slices._conflicts._clock = lambda: time.monotonic() + PAUSE_S  # noqa: SLF001
        await node.until(lambda: not node.state.mig_paused, "the pause is over")
        assert node.reports.gauges["mig_paused", uuid] == 0
        assert (told(node).modes, told(node).mig_off) == (("mig", "soft"), "")
        await node.until(lambda: len(node.tenants.shares) == 2, "the soft share is gone")
        assert await node.start(chosen) == ""

        others_reset(node)
        await node.until(lambda: node.state.mig_paused, "the next pause, at once")
        assert "switched it off 3 times" in node.state.mig_paused[uuid]

    tell(node, story)


def test_a_fight_that_goes_faster_than_anybody_looks_is_seen(
    tmp_path: Path, native_dir: Path
) -> None:
    assert native_dir.is_dir()
    node = Node(tmp_path, "[{mode: mig}]", "h100-80gb")
    uuid = node.uuids[0]

    async def looking(is_so: Callable[[], object], what: str) -> None:
        keeping = asyncio.create_task(node.slices.run())
        try:
            await node.until(is_so, what)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    async def story() -> None:
        assert await node.start(node.admit("0", asking())) == ""
        await looking(lambda: node.seen().is_enabled, "seen")
        for number in range(1, 4):
            others_reset(node)
            assert await node.start(node.admit(f"{number}", asking())) == ""
        await looking(lambda: node.state.mig_paused, "it is seen that it was off three times")
        assert "switched it off 3 times" in node.state.mig_paused[uuid]
        others_reset(node)
        refused = await node.start(node.admit("4", asking()))
        assert "others have switched it off 3 times" in refused
        assert not node.look().is_enabled

    tell(node, story, keeps=False)


def test_whose_only_mode_is_paused_says_so_to_schedulers(node: Node) -> None:
    async def story() -> None:
        await node.until(lambda: set(node.uuids) <= set(node.state.cut_gpus), "both are looked at")
        node.state.mig_paused = {node.uuids[0]: "others do this"}
        found = build_inventory(node.state, {}, taken={})
        assert found is not None
        assert [each.problem for each in found.devices] == ["MIG is off, and others do this", ""]

    tell(node, story)


def test_what_we_switch_off_ourselves_is_nobodys_fight(tmp_path: Path, native_dir: Path) -> None:
    assert native_dir.is_dir()
    node = Node(tmp_path, "[{mode: mig, mig: {keep: 0s}}]", "h100-80gb")

    async def story() -> None:
        for number in range(4):
            pod = node.admit(f"{number}", asking())
            assert await node.start(pod) == ""
            node.remove(pod)
            await node.until(lambda: not node.look().is_enabled, "off again")
        await asyncio.sleep(1.0)
        assert not {"MigSwitchedOff", "MigPaused"} & set(node.reports.reasons("node"))

    tell(node, story)

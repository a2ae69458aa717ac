# SPDX-License-Identifier: Apache-2.0
"""Warm slices of pods make way for shares of other modes, and for nothing else."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from mig_node import SMALL, UNKNOWN, Node, asking, at, by_hand, soft_on, tell, told_mig

from allotment.devices.faults import MigCall, MigFault, clear_faults, set_mig_fault
from allotment.kube.watching import Signal
from allotment.model.modes import MIG
from allotment.modes.mig.journal import Stage
from allotment.shares.mode_policy import ModePolicy, write_mode_policy


@pytest.fixture
def node(tmp_path: Path, native_dir: Path) -> Node:
    assert native_dir.is_dir()
    return Node(tmp_path)


def gone_warm(node: Node) -> bool:
    return all(not each.holder for each in node.journal().read().records)


def test_a_warm_slice_makes_way_for_who_was_sent_there(tmp_path: Path, native_dir: Path) -> None:
    assert native_dir.is_dir()
    node = Node(tmp_path, "[{modes: [soft, mig], mig: {keep: 1h}}]", "h100-80gb")
    uuid = node.uuids[0]

    async def story() -> None:
        first, second = (node.admit(each, asking()) for each in "12")
        assert await node.start(first) == ""
        assert await node.start(second) == ""
        await node.until(lambda: len(node.seen().slices) == 2, "they are seen")
        # A look in the middle of the second start does not know its share.
        await node.until(lambda: told_mig(node).is_enabled, "their shares are seen")
        soft = node.admit("3", replace(asking(), memory=4), annotations=soft_on(uuid))
        assert "MIG mode" in await node.start(soft), "two have a slice"
        node.remove(first)
        await node.until(lambda: len(node.tenants.shares) == 1, "one has gone")
        assert "MIG mode" in await node.start(soft), "one has a slice"
        assert len(node.there()) == 2, "nothing is removed for nothing"
        node.remove(second)
        await node.until(lambda: node.seen().gives_way, "both are warm")
        mig = told_mig(node)
        assert (mig.is_enabled, len(mig.slices)) == (False, 2)
        assert await node.start(soft) == ""
        assert not node.look().is_enabled
        assert node.journal().read().records == ()

    tell(node, story)


def test_an_inventory_that_is_behind_does_not_keep_it_waiting(
    tmp_path: Path, native_dir: Path
) -> None:
    assert native_dir.is_dir()
    node = Node(tmp_path, "[{modes: [soft, mig], mig: {keep: 1h}}]", "h100-80gb")
    uuid = node.uuids[0]

    async def story() -> None:
        pod = node.admit("1", asking())
        assert await node.start(pod) == ""
        behind = node.devices()
        node.remove(pod)
        await node.until(lambda: node.seen().gives_way, "it is warm")
        await node.slices.clear([uuid])
        assert behind[0].mig
        assert not node.slices.as_it_is(behind[0]).mig
        # Somebody switches it on: what is seen counts.
        node.on(0, by_hand)
        await node.until(lambda: node.seen().is_enabled, "it is seen")
        assert node.slices.as_it_is(behind[0]).mig

    tell(node, story)


def test_a_mode_that_is_others_makes_no_way(tmp_path: Path, native_dir: Path) -> None:
    assert native_dir.is_dir()
    node = Node(tmp_path, "[{modes: [soft, mig], mig: {keep: 1h}}]", "h100-80gb")
    uuid = node.uuids[0]
    node.on(0, lambda device: device.driver.set_mode(is_on=True))

    async def story() -> None:
        pod = node.admit("1", asking())
        assert await node.start(pod) == ""
        node.remove(pod)
        await node.until(lambda: gone_warm(node) and not node.tenants.shares, "it is warm")
        await node.until(lambda: node.seen().is_free, "it is seen")
        soft = node.admit("2", replace(asking(), memory=4), annotations=soft_on(uuid))
        assert "MIG mode" in await node.start(soft)
        assert len(node.there()) == 1

    tell(node, story)


class Heard(Signal):
    """Keeps what schedulers hear, each time that something changes."""

    def __init__(self, node: Node) -> None:
        super().__init__()
        self._node = node
        self.is_on: list[bool] = []

    def notify(self) -> None:
        self.is_on.append(told_mig(self._node).is_enabled)
        super().notify()


def test_a_slice_that_does_not_go_is_told_to_schedulers(tmp_path: Path, native_dir: Path) -> None:
    assert native_dir.is_dir()
    node = Node(tmp_path, "[{modes: [soft, mig], mig: {keep: 1h}}]", "h100-80gb")
    uuid = node.uuids[0]

    async def story() -> None:
        pod = node.admit("1", asking())
        assert await node.start(pod) == ""
        node.remove(pod)
        await node.until(lambda: node.seen().gives_way, "it is warm")
        set_mig_fault(node.machine, 0, MigCall.DESTROY_GPU, MigFault(error=UNKNOWN))
        soft = node.admit("2", replace(asking(), memory=4), annotations=soft_on(uuid))
        node.state.changed = heard = Heard(node)
        assert "MIG mode" in await node.start(soft)
        assert "SliceNotRemoved" in node.reports.reasons("node")
        assert heard.is_on[0]
        clear_faults(node.machine)
        # By then the agent may have removed the slice itself, and MIG is off.
        await node.until(lambda: not told_mig(node).is_enabled, "it makes way again")
        async with asyncio.timeout(60):
            while said := await node.start(soft):  # as the kubelet does
                assert "MIG mode" in said
        assert not node.look().is_enabled

    tell(node, story)


async def warm_on_all(node: Node) -> None:
    """Leaves one warm slice on each GPU, as the agent has seen."""
    for number, uuid in enumerate(node.uuids):
        pod = node.admit(f"w{number}", asking(), annotations=at((uuid, SMALL, 0)))
        assert await node.start(pod) == ""
        node.remove(pod)
    await node.until(
        lambda: all(each in node.state.cut_gpus for each in node.uuids) and not node.tenants.shares,
        "all are known",
    )


def test_gpus_that_hang_are_waited_for_side_by_side(tmp_path: Path, native_dir: Path) -> None:
    assert native_dir.is_dir()
    node = Node(tmp_path, "[{modes: [soft, mig], mig: {keep: 1h}}]")

    async def story() -> None:
        await warm_on_all(node)
        gpus = range(len(node.uuids))
        await node.until(lambda: all(node.seen(each).gives_way for each in gpus), "warm")
        for index in gpus:  # as long as the agent waits for it, or until both have begun
            set_mig_fault(node.machine, index, MigCall.DESTROY_GPU, MigFault(slow_us=9_000_000))
        clearing = asyncio.create_task(node.slices.clear(node.uuids))
        await node.until(
            lambda: (
                [each.stage for gpu in gpus for each in node.journal(gpu).read().records]
                == [Stage.LEAVING] * len(node.uuids)
            ),
            "all are being removed at once",
        )
        clear_faults(node.machine)
        await clearing
        assert not any(node.look(gpu).is_enabled for gpu in gpus)

    tell(node, story)


def test_a_gpu_for_mig_alone_makes_no_way_to_anybody(node: Node) -> None:
    async def story() -> None:
        node.configure("[{mode: mig, mig: {keep: 1h}}]")
        await warm_on_all(node)
        await node.until(
            lambda: [each.hold.name for each in node.seen().slices] == ["IDLE"],
            "it is warm",
        )
        assert not node.seen().gives_way
        assert told_mig(node).is_enabled

    tell(node, story)


def test_a_gpu_with_a_record_that_cannot_be_read_makes_no_way(
    tmp_path: Path, native_dir: Path
) -> None:
    assert native_dir.is_dir()
    node = Node(tmp_path, "[{modes: [soft, mig], mig: {keep: 1h}}]", "h100-80gb")
    uuid = node.uuids[0]

    async def story() -> None:
        await warm_on_all(node)
        await node.until(lambda: node.seen().gives_way, "it is warm")
        broken = node.journal().folder / "broken"
        broken.mkdir()
        (broken / "slice.json").write_bytes(b"{")
        await node.until(lambda: not node.seen().gives_way, "it is seen")
        (broken / "slice.json").unlink()
        await node.until(lambda: node.seen().gives_way, "it is whole again")
        with node.folder.locked():
            write_mode_policy(node.folder, uuid, ModePolicy((MIG,)))
        await node.until(lambda: not node.seen().gives_way, "it is for mig alone")

    tell(node, story)

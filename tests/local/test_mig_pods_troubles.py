# SPDX-License-Identifier: Apache-2.0
"""What goes wrong with slices of pods is told: drivers that fail or hang, slices that are gone."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest
from mig_node import SMALL, UNKNOWN, Node, asking, at, by_hand, has_told, removing, tell, told

from allotment.devices.faults import MigCall, MigFault, clear_faults, set_fault, set_mig_fault
from allotment.devices.topology import DeviceLinks


@pytest.fixture
def node(tmp_path: Path, native_dir: Path) -> Node:
    assert native_dir.is_dir()
    return Node(tmp_path)


def test_a_slice_that_cannot_be_removed_is_told_until_it_is_gone(
    tmp_path: Path, native_dir: Path
) -> None:
    assert native_dir.is_dir()
    node = Node(tmp_path, "[{mode: mig, mig: {keep: 0s}}]", "h100-80gb")
    uuid = node.uuids[0]

    def failures() -> int:
        return node.reports.counts.count(
            ("mig_failures", {"device": uuid, "reason": "SliceNotRemoved"})
        )

    def has_failed(least: int) -> bool:
        return failures() >= least

    async def story() -> None:
        for times in (1, 2):
            pod = node.admit(str(times), asking())
            assert await node.start(pod) == ""
            set_mig_fault(node.machine, 0, MigCall.DESTROY_COMPUTE, MigFault(error=UNKNOWN))
            least = failures() + 2
            node.remove(pod)
            await node.until(partial(has_failed, least), "it is tried again")
            assert node.reports.reasons("node").count("SliceNotRemoved") == times, "told once"
            clear_faults(node.machine)
            await node.until(lambda: not node.look().is_enabled, "it is gone")

    tell(node, story)


@pytest.mark.parametrize("call", [MigCall.CREATE_GPU, MigCall.CREATE_COMPUTE, MigCall.SET_MODE])
def test_a_call_that_fails_once_is_told_to_the_pod_and_leaves_nothing(
    tmp_path: Path, native_dir: Path, call: MigCall
) -> None:
    assert native_dir.is_dir()
    node = Node(tmp_path, "[{mode: mig}]", "h100-80gb")
    set_mig_fault(node.machine, 0, call, MigFault(error=UNKNOWN))

    async def story() -> None:
        pod = node.admit("1", asking())
        assert "Unknown Error" in await node.start(pod)
        assert node.reports.reasons("pod-1") == ["ShareRefused"]
        assert node.there() == []
        clear_faults(node.machine)
        assert await node.start(pod) == ""
        assert node.reports.reasons("pod-1") == ["ShareRefused", "ShareReady"]
        assert len(node.there()) == 1

    tell(node, story)


def test_a_gpu_that_does_not_tell_is_told_each_time_it_stops(node: Node) -> None:
    uuid = node.uuids[0]

    def has_foreign(number: int) -> bool:
        return node.reports.gauges.get(("mig_slices", uuid, "foreign")) == number

    async def story() -> None:
        for times in (1, 2):
            await node.until(lambda: uuid in node.state.cut_gpus, "it is known")
            set_fault(node.machine, 0, hang_us=60_000_000)
            await node.until(partial(has_told, node, "SlicesNotKnown", times), "it is told")
            clear_faults(node.machine)
            node.on(0, partial(by_hand, start=times))
            await node.until(partial(has_foreign, times), "it answers")

    tell(node, story)


def test_instances_of_others_are_counted_beside_ours(node: Node) -> None:
    uuid = node.uuids[0]
    node.on(0, by_hand)

    async def story() -> None:
        pod = node.admit("1", asking(), annotations=at((uuid, SMALL, 0)))
        assert await node.start(pod) == ""
        await node.until(
            lambda: (
                [node.reports.gauges.get(("mig_slices", uuid, each)) for each in HOLDS]
                == [1, 0, 1, 0]
            ),
            "one is ours, one theirs",
        )
        node.on(0, removing(0))
        await node.until(lambda: node.reports.gauges["mig_slices", uuid, "lost"] == 1, "lost")
        assert ("mig_losses", {"device": uuid}) in node.reports.counts

    tell(node, story)


HOLDS = ("used", "idle", "foreign", "lost")


def test_an_agent_that_comes_back_tells_whose_slice_has_gone(
    tmp_path: Path, native_dir: Path
) -> None:
    assert native_dir.is_dir()
    node = Node(tmp_path, "[{mode: mig}]", "h100-80gb")

    async def runs() -> None:
        pod = node.admit("1", asking(), annotations=at((node.uuids[0], SMALL, 3)))
        assert await node.start(pod) == ""

    tell(node, runs, keeps=False)
    node.on(0, removing(3))
    node.start_agent()

    async def later() -> None:
        # Its slices are looked at before anybody knows of shares.
        keeping = asyncio.create_task(node.slices.run())
        try:
            await node.until(lambda: "SliceGone" in node.reports.reasons("node"), "the node")
            assert node.reports.reasons("pod-1") == []
            await node.tenants.adopt()
            await node.until(lambda: "SliceGone" in node.reports.reasons("pod-1"), "and the pod")
            assert node.reports.reasons("node").count("SliceGone") == 1
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await node.tenants.close()

    asyncio.run(later())


def test_a_record_that_cannot_be_read_is_told(node: Node) -> None:
    async def story() -> None:
        pod = node.admit("1", asking(), annotations=at((node.uuids[0], SMALL, 3)))
        assert await node.start(pod) == ""
        (record,) = node.journal().read().records
        path = node.journal().folder / record.id / "slice.json"
        whole = path.read_bytes()
        path.write_bytes(b"{")
        await node.until(lambda: "SliceRecordDamaged" in node.reports.reasons("node"), "told")
        assert node.there() == [(SMALL, 3)], "it is left alone"
        path.write_bytes(whole)

    tell(node, story)


def test_who_lost_a_slice_keeps_joined_gpus_from_a_reset_and_is_told_so(
    tmp_path: Path, native_dir: Path
) -> None:
    assert native_dir.is_dir()
    node = Node(tmp_path, "[{mode: mig, mig: {reset: true}}]", "a100-40gb:2")
    one, other = node.uuids
    node.state.links = DeviceLinks(peers={one: frozenset({other}), other: frozenset({one})})
    small = {"allotment.dev/mig-profile": "1g.5gb"}

    async def story() -> None:
        pod = node.admit("1", asking(), annotations={**at((node.uuids[0], "1g.5gb", 3)), **small})
        assert await node.start(pod) == ""
        await node.until(lambda: node.seen().slices, "it is seen")
        node.on(0, removing(3))
        await node.until(lambda: "SliceGone" in node.reports.reasons("pod-1"), "it is told")
        text = next(
            each for name, _, each in node.reports.events if name == "pod-1" and "SliceG" in _
        )
        assert f"Until then GPU {node.uuids[1]}, which NVLink joins to it, cannot be reset" in text
        other = node.admit("2", asking(), annotations={**at((node.uuids[1], "1g.5gb", 0)), **small})
        assert "a reset would stop GPU" in await node.start(other)
        node.remove(pod)
        await node.until(lambda: not node.tenants.shares, "it is gone")
        assert await node.start(other) == ""

    tell(node, story)


def test_a_gpu_without_mig_is_told_of_and_serves_its_other_modes(
    tmp_path: Path, native_dir: Path
) -> None:
    assert native_dir.is_dir()
    node = Node(tmp_path, "[{modes: [soft, mig]}]", "t4")

    async def story() -> None:
        await node.until(lambda: "ConfigProblem" in node.reports.reasons("node"), "it is told")
        assert node.state.served_modes() == {node.uuids[0]: ("soft",)}
        assert told(node).modes == ("soft",)

    tell(node, story)

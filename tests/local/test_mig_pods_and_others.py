# SPDX-License-Identifier: Apache-2.0
"""Slices for containers of pods, and what others do to them: managers of MIG, drivers, neighbours.

As in `test_mig_pods`, a container is a process here that has what its CDI spec says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from mig_node import SMALL, SOFT, Node, asking, at, by_hand, removing, tell

from allotment.agent import mig_fights
from allotment.agent.announcing import announced
from allotment.devices.faults import MigCall, MigFault, clear_faults, set_fault, set_mig_fault
from allotment.devices.mig_machine import LOOK_S, MigDevice
from allotment.model.clusters import NodeDevice, NodeMig
from allotment.model.requests import MIG
from allotment.modes.mig.records import Stage
from allotment.shares.modes_of_gpus import Allowed, write_allowed

pytestmark = pytest.mark.timeout(180)


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


def told(node: Node) -> NodeDevice:
    """What schedulers hear of the first GPU."""
    devices = {each.uuid: each for each in node.devices()}
    cut, paused = node.slices.current, node.slices.paused
    found = announced(node.offer, devices, {}, taken={}, links={}, cut=cut, paused=paused)
    assert found is not None
    return found.devices[0]


def told_mig(node: Node) -> NodeMig:
    mig = told(node).mig
    assert mig is not None
    return mig


def has_told(node: Node, reason: str, times: int = 1) -> bool:
    return node.reports.reasons("node").count(reason) == times


def soft_on(uuid: str) -> dict[str, str]:
    place = f'{{"main": {{"mode": "soft", "devices": ["{uuid}"], "memory": {4 << 30}}}}}'
    return {**SOFT, "allotment.dev/placement": f'{{"version": 1, "containers": {place}}}'}


# ---- what others do ------------------------------------------------------------------------------


def test_what_others_cut_is_theirs(node: Node) -> None:
    theirs = node.on(0, by_hand)

    async def story() -> None:
        pods = [node.admit(str(n), asking()) for n in range(7)]
        assert await asyncio.gather(*map(node.start, pods)) == [""] * 7
        mine = {each.devices[0].uuid for each in node.tenants.shares}
        assert theirs not in mine
        await node.until(
            lambda: (
                [each.hold.name for each in node.slices.current[node.uuids[0]].slices].count(
                    "FOREIGN"
                )
                == 1
            ),
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
        await node.until(lambda: node.slices.current[node.uuids[0]].slices, "it is seen")
        node.on(0, removing(3, is_off=True))
        await node.until(lambda: "SliceGone" in node.reports.reasons("pod-1"), "it is told", 30)
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
    monkeypatch.setattr(mig_fights, "FIRST_PAUSE_S", 6.0)
    node = Node(tmp_path, "[{modes: [mig, soft]}]", "h100-80gb")
    uuid = node.uuids[0]

    async def story() -> None:
        for number, reason in enumerate(("MigSwitchedOff", "MigPaused")):
            pod = node.admit(f"{number}", asking())
            assert await node.start(pod) == ""
            await node.until(lambda: node.slices.current[uuid].is_enabled, "it is seen on")
            others_reset(node)
            await node.until(partial(has_told, node, reason), reason)
            assert "SliceGone" in node.reports.reasons(f"pod-{number}")
            assert not node.journal().is_switched, "what is off is not ours"
        (text,) = (each for _, reason, each in node.reports.events if reason == "MigPaused")
        assert "others have switched it off 2 times: it is not switched on before" in text
        assert node.reports.gauges["mig_paused", uuid] == 1
        assert [each for each in node.reports.counts if each[0] == "mig_switched_off"] == [
            ("mig_switched_off", {"device": uuid})
        ] * 2
        assert told(node).modes == ("soft",)

        chosen = node.admit("3", asking(), annotations=at((uuid, SMALL, 3)))
        free = node.admit("4", asking())
        for pod in (chosen, free):
            refused = await node.start(pod)
            assert "MIG is off, and others have switched it off 2 times" in refused
        assert not node.look().is_enabled
        soft = node.admit("5", replace(asking(), memory=4), annotations=soft_on(uuid))
        assert await node.start(soft) == "", "in another mode it serves"
        node.remove(soft)
        await node.until(lambda: not node.slices.paused, "the pause is over")
        assert node.reports.gauges["mig_paused", uuid] == 0
        assert told(node).modes == ("mig", "soft")
        await node.until(lambda: len(node.tenants.shares) == 2, "the soft share is gone")
        assert await node.start(chosen) == ""

        others_reset(node)
        await node.until(lambda: node.slices.paused, "the next pause, at once")
        assert "switched it off 3 times" in node.slices.paused[uuid]

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
            await node.until(is_so, what, 30)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    async def story() -> None:
        assert await node.start(node.admit("0", asking())) == ""
        await looking(
            lambda: uuid in node.slices.current and node.slices.current[uuid].is_enabled, "seen"
        )
        for number in range(1, 4):
            others_reset(node)
            assert await node.start(node.admit(f"{number}", asking())) == ""
        await looking(lambda: node.slices.paused, "it is seen that it was off three times")
        assert "switched it off 3 times" in node.slices.paused[uuid]
        others_reset(node)
        refused = await node.start(node.admit("4", asking()))
        assert "others have switched it off 3 times" in refused
        assert not node.look().is_enabled

    tell(node, story, keeps=False)


def test_whose_only_mode_is_paused_says_so_to_schedulers(node: Node) -> None:
    async def story() -> None:
        await node.until(lambda: node.uuids[0] in node.slices.current, "it is looked at")
        devices = {each.uuid: each for each in node.devices()}
        found = announced(
            node.offer,
            devices,
            {},
            taken={},
            links={},
            cut=node.slices.current,
            paused={node.uuids[0]: "others do this"},
        )
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


# ---- warm slices make way ------------------------------------------------------------------------


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
        await node.until(lambda: len(node.slices.current[uuid].slices) == 2, "they are seen")
        assert told_mig(node).is_enabled
        soft = node.admit("3", replace(asking(), memory=4), annotations=soft_on(uuid))
        assert "MIG mode" in await node.start(soft), "two have a slice"
        node.remove(first)
        await node.until(lambda: len(node.tenants.shares) == 1, "one has gone")
        assert "MIG mode" in await node.start(soft), "one has a slice"
        assert len(node.there()) == 2, "nothing is removed for nothing"
        node.remove(second)
        await node.until(lambda: node.slices.current[uuid].gives_way, "both are warm")
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
        await node.until(lambda: node.slices.current[uuid].gives_way, "it is warm")
        await node.slices.clear([uuid])
        assert behind[0].mig
        assert not node.slices.as_it_is(behind[0]).mig
        # Somebody switches it on: what is seen counts.
        node.on(0, by_hand)
        await node.until(lambda: node.slices.current[uuid].is_enabled, "it is seen")
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
        await node.until(lambda: node.slices.current[uuid].is_free, "it is seen")
        soft = node.admit("2", replace(asking(), memory=4), annotations=soft_on(uuid))
        assert "MIG mode" in await node.start(soft)
        assert len(node.there()) == 1

    tell(node, story)


def test_a_slice_that_does_not_go_is_told_to_schedulers(tmp_path: Path, native_dir: Path) -> None:
    assert native_dir.is_dir()
    node = Node(tmp_path, "[{modes: [soft, mig], mig: {keep: 1h}}]", "h100-80gb")
    uuid = node.uuids[0]

    async def story() -> None:
        pod = node.admit("1", asking())
        assert await node.start(pod) == ""
        node.remove(pod)
        await node.until(lambda: node.slices.current[uuid].gives_way, "it is warm")
        set_mig_fault(node.machine, 0, MigCall.DESTROY_GPU, MigFault(error=UNKNOWN))
        soft = node.admit("2", replace(asking(), memory=4), annotations=soft_on(uuid))
        assert "MIG mode" in await node.start(soft)
        assert "SliceNotRemoved" in node.reports.reasons("node")
        assert told_mig(node).is_enabled
        clear_faults(node.machine)
        await node.until(lambda: node.slices.current[uuid].gives_way, "it makes way again", 30)
        assert not told_mig(node).is_enabled
        assert await node.start(soft) == ""
        assert not node.look().is_enabled

    tell(node, story)


async def warm_on_all(node: Node) -> None:
    """Leaves one warm slice on each GPU, as the agent has seen."""
    for number, uuid in enumerate(node.uuids):
        pod = node.admit(f"w{number}", asking(), annotations=at((uuid, SMALL, 0)))
        assert await node.start(pod) == ""
        node.remove(pod)
    await node.until(
        lambda: all(each in node.slices.current for each in node.uuids) and not node.tenants.shares,
        "all are known",
    )


def test_gpus_that_hang_are_waited_for_side_by_side(tmp_path: Path, native_dir: Path) -> None:
    assert native_dir.is_dir()
    node = Node(tmp_path, "[{modes: [soft, mig], mig: {keep: 1h}}]")

    async def story() -> None:
        await warm_on_all(node)
        current = node.slices.current
        await node.until(lambda: all(current[each].gives_way for each in node.uuids), "warm")
        for index in range(len(node.uuids)):
            set_mig_fault(node.machine, index, MigCall.DESTROY_GPU, MigFault(slow_us=3_000_000))
        clearing = asyncio.create_task(node.slices.clear(node.uuids))
        await node.until(
            lambda: (
                [
                    each.stage
                    for gpu in range(len(node.uuids))
                    for each in node.journal(gpu).read().records
                ]
                == [Stage.LEAVING] * len(node.uuids)
            ),
            "all are being removed at once",
        )
        await clearing
        assert not any(node.look(gpu).is_enabled for gpu in range(len(node.uuids)))

    tell(node, story)


def test_a_gpu_for_mig_alone_makes_no_way_to_anybody(node: Node) -> None:
    async def story() -> None:
        node.configure("[{mode: mig, mig: {keep: 1h}}]")
        await warm_on_all(node)
        uuid = node.uuids[0]
        await node.until(
            lambda: [each.hold.name for each in node.slices.current[uuid].slices] == ["IDLE"],
            "it is warm",
        )
        assert not node.slices.current[uuid].gives_way
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
        await node.until(lambda: node.slices.current[uuid].gives_way, "it is warm")
        broken = node.journal().folder / "broken"
        broken.mkdir()
        (broken / "slice.json").write_bytes(b"{")
        await node.until(lambda: not node.slices.current[uuid].gives_way, "it is seen")
        (broken / "slice.json").unlink()
        await node.until(lambda: node.slices.current[uuid].gives_way, "it is whole again")
        with node.folder.locked():
            write_allowed(node.folder, uuid, Allowed((MIG,)))
        await node.until(lambda: not node.slices.current[uuid].gives_way, "it is for mig alone")

    tell(node, story)


# ---- what goes wrong is seen ---------------------------------------------------------------------

UNKNOWN = 999
"""NVML_ERROR_UNKNOWN."""


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
            await node.until(partial(has_failed, least), "it is tried again", 30)
            assert node.reports.reasons("node").count("SliceNotRemoved") == times, "told once"
            clear_faults(node.machine)
            await node.until(lambda: not node.look().is_enabled, "it is gone", 30)

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
        return node.reports.gauges["mig_slices", uuid, "foreign"] == number

    async def story() -> None:
        for times in (1, 2):
            await node.until(lambda: uuid in node.slices.current, "it is known")
            set_fault(node.machine, 0, hang_us=int((LOOK_S + 1) * 1e6))
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
        await node.until(lambda: node.reports.gauges["mig_slices", uuid, "lost"] == 1, "lost", 30)
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
        await node.until(lambda: "SliceRecordDamaged" in node.reports.reasons("node"), "told", 30)
        assert node.there() == [(SMALL, 3)], "it is left alone"
        path.write_bytes(whole)

    tell(node, story)


def test_who_lost_a_slice_keeps_joined_gpus_from_a_reset_and_is_told_so(
    tmp_path: Path, native_dir: Path
) -> None:
    assert native_dir.is_dir()
    node = Node(tmp_path, "[{mode: mig, mig: {reset: true}}]", "a100-40gb:2")
    node.links = {frozenset(node.uuids): 1200}
    small = {"allotment.dev/mig-profile": "1g.5gb"}

    async def story() -> None:
        pod = node.admit("1", asking(), annotations={**at((node.uuids[0], "1g.5gb", 3)), **small})
        assert await node.start(pod) == ""
        await node.until(lambda: node.slices.current[node.uuids[0]].slices, "it is seen")
        node.on(0, removing(3))
        await node.until(lambda: "SliceGone" in node.reports.reasons("pod-1"), "it is told", 30)
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
        assert node.slices.served(node.offer) == {node.uuids[0]: ("soft",)}
        assert told(node).modes == ("soft",)

    tell(node, story)

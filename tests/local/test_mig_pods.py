# SPDX-License-Identifier: Apache-2.0
"""Slices for containers of pods: the agent's own parts on simulated GPUs, with real programs.

A container is a process here that has what its CDI spec says: the shim, its share, the simulated
machine with the devices that its file names, the variables. `tests/cluster/test_dynamic_mig.py`
has the same on a kubelet.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from kubelet_twin import PodTwin
from mig_node import SMALL, SOFT, Node, asking, at, by_hand, tell

from allotment.agent.resources import plan
from allotment.devices.faults import MigCall, MigFault, clear_faults, set_fault, set_mig_fault
from allotment.devices.mig_machine import LOOK_S, MigMachine
from allotment.devices.topology import DeviceLinks
from allotment.devices.watching import Look, NvmlSession
from allotment.model.pods import ContainerKind
from allotment.model.shares import ShareId
from allotment.modes.mig.journal import without_own
from allotment.shares.mig import cut, inspect

WORKER = Path(__file__).with_name("mig_pod_worker.py")


@pytest.fixture
def node(tmp_path: Path, native_dir: Path) -> Node:
    assert native_dir.is_dir()
    return Node(tmp_path)


# ---- a pod has a slice ---------------------------------------------------------------------------


def test_a_pod_has_a_slice_that_goes_warm_and_then_away(tmp_path: Path, native_dir: Path) -> None:
    assert native_dir.is_dir()
    node = Node(tmp_path, "[{mode: mig, mig: {keep: 5s}}]")

    async def story() -> None:
        pod = node.admit("1", asking())
        assert await node.start(pod) == ""
        ((profile, start),) = node.there()
        assert profile == SMALL
        share = node.share_of(pod)
        seen = await asyncio.to_thread(node.seen_inside, share)
        (instance,) = node.look().instances
        assert (seen["cuda"]["count"], seen["nvml"]["count"]) == (1, 1)
        assert seen["nvml"]["uuid"] == seen["visible"] == instance.uuid
        (record,) = node.journal().read().records
        assert (record.holder, record.start) == (share, start)

        node.remove(pod)
        await node.until(lambda: not node.tenants.shares, "the share is gone")

        def is_warm() -> bool:
            found, records = node.there(), node.journal().read().records
            return found == [(SMALL, start)] and [each.holder for each in records] == [""]

        await node.until(is_warm, "the slice is warm")
        await node.until(lambda: not node.look().is_enabled, "the slice and the mode are gone")
        assert node.journal().read().records == ()
        assert not node.journal().is_switched

    tell(node, story)


def test_a_pod_has_the_slice_that_was_chosen(node: Node) -> None:
    async def story() -> None:
        pod = node.admit("1", asking(), annotations=at((node.uuids[1], SMALL, 5)))
        assert await node.start(pod) == ""
        assert (node.there(0), node.there(1)) == ([], [(SMALL, 5)])
        seen = await asyncio.to_thread(node.seen_inside, node.share_of(pod))
        assert seen["nvml"]["uuid"] == node.look(1).instances[0].uuid

    tell(node, story)


def test_several_slices_for_a_container(node: Node) -> None:
    async def story() -> None:
        pod = node.admit("1", asking(count=3))
        assert await node.start(pod) == ""
        assert len(node.there(0) + node.there(1)) == 3
        (share,) = node.tenants.shares
        seen = await asyncio.to_thread(node.seen_inside, share.id)
        assert seen["visible"].split(",") == [each.uuid for each in share.devices]
        # CUDA shows a process one MIG device, and NVML all that the container has.
        assert (seen["cuda"]["count"], seen["nvml"]["count"]) == (1, 3)

    tell(node, story)


def test_who_leaves_the_mode_open_has_it_as_the_node_prefers(
    tmp_path: Path, native_dir: Path
) -> None:
    assert native_dir.is_dir()
    node = Node(tmp_path, "[{modes: [mig, soft]}]")

    async def story() -> None:
        parts = [
            node.admit(str(number), replace(asking(), memory=60), annotations={"x/y": "z"})
            for number in range(2)
        ]
        for pod in parts:
            assert await node.start(pod) == ""
        assert {each.mode for each in node.tenants.shares} == {"mig"}
        assert (len(node.there(0)), len(node.there(1))) == (1, 1)
        third = node.admit("3", replace(asking(), memory=60), annotations={"x/y": "z"})
        refused = await node.start(third)
        assert refused.startswith("mode mig: no GPU here has room for a slice of 60Gi")
        assert "mode soft: " in refused

    tell(node, story)


def test_a_gpu_is_of_one_mode_at_a_time(tmp_path: Path, native_dir: Path) -> None:
    assert native_dir.is_dir()
    node = Node(tmp_path, "[{modes: [soft, mig], mig: {keep: 0s}}]", "h100-80gb")

    async def story() -> None:
        soft = node.admit(
            "1", replace(asking(), memory=4), annotations={"allotment.dev/mode": "soft"}
        )
        assert await node.start(soft) == ""
        cut = node.admit("2", asking())
        assert "cannot be switched on beside share team/pod-1/main" in await node.start(cut)
        node.remove(soft)
        await node.until(lambda: not node.tenants.shares, "the soft share is gone")
        assert await node.start(cut) == ""
        later = node.admit(
            "3", replace(asking(), memory=4), annotations={"allotment.dev/mode": "soft"}
        )
        assert await node.start(later) != ""
        node.remove(cut)
        await node.until(lambda: not node.look().is_enabled, "MIG is off again")
        assert await node.start(later) == ""

    tell(node, story)


def test_a_share_that_came_meanwhile_keeps_its_gpu_from_being_switched(
    tmp_path: Path, native_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert native_dir.is_dir()
    # As if it had come after the look.
    monkeypatch.setattr(inspect.Survey, "_why_off", lambda *_: "")
    monkeypatch.setattr(cut, "_TRIES", 3)
    node = Node(tmp_path, "[{modes: [soft, mig]}]", "h100-80gb")

    async def story() -> None:
        soft = node.admit("1", replace(asking(), memory=4), annotations=SOFT)
        assert await node.start(soft) == ""
        assert "has a share by now" in await node.start(node.admit("2", asking()))
        assert not node.look().is_enabled
        assert not node.journal().is_switched

    tell(node, story)


# ---- many at once --------------------------------------------------------------------------------


def test_of_eight_at_once_seven_run_and_the_eighth_later(tmp_path: Path, native_dir: Path) -> None:
    assert native_dir.is_dir()
    node = Node(tmp_path, "[{mode: mig, mig: {keep: 0s}}]", "h100-80gb")
    set_mig_fault(node.machine, 0, MigCall.CREATE_GPU, MigFault(slow_us=300_000))

    async def story() -> None:
        pods = [node.admit(str(number), asking()) for number in range(8)]
        answers = await asyncio.gather(*(node.start(each) for each in pods))
        assert answers.count("") == 7
        (refused,) = (each for each in answers if each)
        assert "has the most 1g.10gb or profiles with its engines that fit" in refused
        assert len(node.there()) == 7
        assert len({each.devices[0].uuid for each in node.tenants.shares}) == 7
        waiting = pods[answers.index(refused)]
        node.remove(next(each for each in pods if each is not waiting))
        await node.until(lambda: len(node.tenants.shares) == 6, "one has gone")
        assert await node.start(waiting) == ""
        assert len(node.there()) == 7

    tell(node, story)


def test_a_gpu_that_hangs_keeps_nobody_at_another(node: Node) -> None:
    set_mig_fault(node.machine, 0, MigCall.CREATE_GPU, MigFault(slow_us=50_000_000))

    async def story() -> None:
        hanging = [
            asyncio.create_task(
                node.start(node.admit(f"h{n}", asking(), annotations=at((node.uuids[0], SMALL, n))))
            )
            for n in range(6)
        ]
        await node.until(lambda: len(node.journal().read().records) == 6, "six are being made")
        others = [
            node.admit(f"o{n}", asking(), annotations=at((node.uuids[1], SMALL, n)))
            for n in range(3)
        ]
        assert await asyncio.gather(*map(node.start, others)) == ["", "", ""]
        assert not any(each.done() for each in hanging)
        assert node.journal().read().records[0].stage.value == "intended"
        clear_faults(node.machine)
        assert await asyncio.gather(*hanging) == [""] * 6

    tell(node, story)


@pytest.mark.measured
def test_a_gpu_that_answers_nothing_keeps_nobody_at_another(node: Node) -> None:
    set_fault(node.machine, 0, hang_us=60_000_000)

    async def story() -> None:
        placed = node.admit("1", asking(), annotations=at((node.uuids[1], SMALL, 5)))
        chosen = node.admit("2", asking())
        began = time.monotonic()
        assert await node.start(placed) == ""
        for_placed = time.monotonic() - began
        assert await node.start(chosen) == ""
        assert len(node.there(1)) == 2
        # It was not even asked where the place was chosen.
        assert for_placed < LOOK_S
        await node.until(lambda: node.uuids[1] in node.state.cut_gpus, "the second GPU")
        assert node.uuids[0] not in node.state.cut_gpus
        clear_faults(node.machine)

    tell(node, story)


def test_a_slice_that_came_too_late_is_nobodys(
    tmp_path: Path, native_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert native_dir.is_dir()
    monkeypatch.setattr(cut, "WORK_S", 3.0)
    node = Node(tmp_path, "[{mode: mig, mig: {keep: 0s}}]", "h100-80gb")
    set_mig_fault(node.machine, 0, MigCall.CREATE_GPU, MigFault(slow_us=60_000_000))

    async def story() -> None:
        pod = node.admit("1", asking())
        assert "has not answered within 3 s" in await node.start(pod)
        assert [each.holder for each in node.journal().read().records] == [node.share_of(pod)]
        clear_faults(node.machine)
        await node.until(lambda: not node.journal().read().records, "made, and removed again")
        monkeypatch.undo()
        assert await node.start(pod) == ""

    tell(node, story)


def test_a_warm_slice_that_has_just_gone_is_cut_again(node: Node) -> None:
    async def story() -> None:
        first = node.admit("1", asking(), annotations=at((node.uuids[0], SMALL, 2)))
        assert await node.start(first) == ""
        node.remove(first)
        await node.until(
            lambda: all(not each.holder for each in node.journal().read().records), "warm"
        )
        (warm,) = node.look().instances
        # A larger one takes its place, and goes; the scheduler counts on the warm one still.
        large = node.admit("2", asking(), annotations=at_large(node.uuids[0]))
        assert await node.start(large) == ""
        assert node.there() == [("2g.20gb", 2)]
        small = node.admit("3", asking(), annotations=at((node.uuids[0], SMALL, 2)))
        refused = await node.start(small)
        assert "slots 2 to 3 of share team/pod-2/main" in refused
        node.remove(large)
        await node.until(lambda: len(node.tenants.shares) == 0, "the large one is gone")
        assert await node.start(small) == ""
        assert node.there() == [(SMALL, 2)]
        assert node.look().instances[0].uuid != warm.uuid

    tell(node, story)


def test_a_slice_of_a_start_that_failed_is_had_by_the_next(
    tmp_path: Path, native_dir: Path
) -> None:
    assert native_dir.is_dir()
    node = Node(tmp_path, "[{mode: mig, mig: {keep: 60s}}]", "h100-80gb")

    async def story() -> None:
        specs = tmp_path / "cdi"
        if specs.exists():
            specs.rmdir()
        specs.write_text("in the way")
        pod = node.admit("1", asking())
        assert await node.start(pod) != ""
        (there,) = node.look().instances
        specs.unlink()
        assert await node.start(node.admit("2", asking())) == ""
        assert node.look().instances == (there,)
        assert await node.start(pod) == ""
        assert len(node.look().instances) == 2

    tell(node, story, keeps=False)


def at_large(uuid: str) -> dict[str, str]:
    return {**at((uuid, "2g.20gb", 2)), "allotment.dev/mig-profile": "2g.20gb"}


def test_a_containers_slice_is_its_init_containers_too(node: Node) -> None:
    async def story() -> None:
        init = replace(asking("init"), kind=ContainerKind.INIT)
        annotations = {"allotment.dev/mig-profile": "7g.80gb"}
        pod = node.admit("1", init, asking(), annotations=annotations)
        assert await node.start(pod, 0) == ""
        before = node.look(0).instances + node.look(1).instances
        assert len(before) == 1
        node.kubelet.finish(pod, pod.containers[0], for_good=True)
        node.hear()
        assert await node.start(pod, 1) == ""
        assert node.look(0).instances + node.look(1).instances == before

    tell(node, story)


@pytest.mark.parametrize("profiles", [(SMALL, "3g.40gb"), ("3g.40gb", SMALL)])
def test_containers_of_a_pod_never_take_each_others_slice(
    node: Node, profiles: tuple[str, str]
) -> None:
    async def story() -> None:
        init = replace(asking("init"), kind=ContainerKind.INIT)
        wish = "init={}, main={}".format(*profiles)
        pod = node.admit("1", init, asking(), annotations={"allotment.dev/mig-profile": wish})
        assert await node.start(pod, 0) == ""
        node.kubelet.finish(pod, pod.containers[0], for_good=True)
        node.hear()
        assert await node.start(pod, 1) == ""
        there = {name for gpu in (0, 1) for name, _ in node.there(gpu)}
        assert there == set(profiles)
        seen = await asyncio.to_thread(node.seen_inside, node.share_of(pod, 1))
        assert seen["cuda"]["count"] == 1
        # The pod has another sandbox: all of its containers start again.
        node.kubelet.finish(pod, pod.containers[1], for_good=False)
        assert await node.start(pod, 0) == ""
        assert await node.start(pod, 1) == ""

    tell(node, story)


def test_a_slice_in_the_way_is_left_to_the_pods_other_container(
    tmp_path: Path, native_dir: Path
) -> None:
    assert native_dir.is_dir()
    node = Node(tmp_path, "[{mode: mig}]", "h100-80gb")

    async def story() -> None:
        init = replace(asking("init"), kind=ContainerKind.INIT)
        annotations = {"allotment.dev/mig-profile": "init=7g.80gb, main=1g.10gb"}
        pod = node.admit("1", init, asking(), annotations=annotations)
        # Whichever is made first: which of them is starting is not known yet.
        assert "of share team/pod-1/main" in await node.start(pod, 0)
        (there,) = node.look().instances
        assert "of share team/pod-1/main" in await node.start(pod, 0)
        assert node.look().instances == (there,)

    tell(node, story)


# ---- crashes -------------------------------------------------------------------------------------

STEPS = [
    "prepare.begun",
    "mig.claimed",
    "mig.cut",
    "prepare.sliced",
    "create.drafted",
    "create.enforced",
    "create.filled",
    "create.recorded",
    "create.shown",
    "prepare.made",
    "publish.drafted",
    "publish.shown",
    "end.begun",
    "remove.unpublished",
    "remove.hidden",
    "mig.settled",
]


def killed(node: Node, share: ShareId, step: str = "") -> None:
    """An agent that makes and ends the share of this name, and is killed on the way."""
    done = subprocess.run(
        [sys.executable, WORKER, node.root, node.spec, share],
        env={**os.environ, "ALLOTMENT_KILL_AT": step},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


def the_next_agent_goes_on(node: Node, pod: PodTwin, *, theirs: str) -> None:
    node.start_agent()
    node.hear()
    node.kubelet.tell(pod)
    node.hear()

    async def story() -> None:
        # As the kubelet does with a start that is refused: what is cleared up is not free at once.
        while refusal := await node.start(pod):
            assert "is not free" in refusal
            await asyncio.sleep(0.2)
        assert node.there() == [(SMALL, 3), (SMALL, 6)]
        seen = await asyncio.to_thread(node.seen_inside, node.share_of(pod))
        assert seen["nvml"]["uuid"] != theirs
        node.remove(pod)
        await node.until(lambda: node.there() == [(SMALL, 6)], "only theirs is left")
        await node.until(lambda: not node.journal().read().records, "nothing is written of it")

    tell(node, story)
    seen = node.look()
    assert (seen.is_enabled, [each.uuid for each in seen.instances]) == (True, [theirs])


@pytest.mark.parametrize("step", STEPS)
def test_a_crash_at_any_step_costs_nothing(tmp_path: Path, native_dir: Path, step: str) -> None:
    assert native_dir.is_dir()
    node = Node(tmp_path, "[{mode: mig, mig: {keep: 0s}}]", "h100-80gb")
    is_off = step == "mig.claimed"
    theirs = "" if is_off else node.on(0, by_hand)
    pod = node.admit("1", asking(), annotations=at((node.uuids[0], SMALL, 3)))
    killed(node, node.share_of(pod), step)
    if is_off:
        assert node.journal().is_switched
        theirs = node.on(0, by_hand)
        node.journal().forget_switched()  # whoever cuts by hand has the mode
    the_next_agent_goes_on(node, pod, theirs=theirs)


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    "call",
    [
        MigCall.CREATE_GPU,
        MigCall.CREATE_COMPUTE,
        MigCall.DESTROY_COMPUTE,
        MigCall.DESTROY_GPU,
    ],
    ids=lambda call: call.name.lower(),
)
def test_a_crash_in_the_driver_costs_nothing(
    tmp_path: Path, native_dir: Path, call: MigCall, *, is_after: bool
) -> None:
    assert native_dir.is_dir()
    node = Node(tmp_path, "[{mode: mig, mig: {keep: 0s}}]", "h100-80gb")
    theirs = node.on(0, by_hand)
    pod = node.admit("1", asking(), annotations=at((node.uuids[0], SMALL, 3)))
    fault = MigFault(ends_before=not is_after, ends_after=is_after)
    set_mig_fault(node.machine, 0, call, fault)
    killed(node, node.share_of(pod))
    clear_faults(node.machine)
    the_next_agent_goes_on(node, pod, theirs=theirs)


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
def test_a_crash_while_the_mode_is_switched_costs_nothing(
    tmp_path: Path, native_dir: Path, *, is_after: bool
) -> None:
    assert native_dir.is_dir()
    node = Node(tmp_path, "[{mode: mig, mig: {keep: 0s}}]", "h100-80gb")
    pod = node.admit("1", asking(), annotations=at((node.uuids[0], SMALL, 3)))
    fault = MigFault(ends_before=not is_after, ends_after=is_after)
    set_mig_fault(node.machine, 0, MigCall.SET_MODE, fault)
    killed(node, node.share_of(pod))
    clear_faults(node.machine)
    node.start_agent()

    async def nothing_is_asked() -> None:
        await node.until(lambda: not node.journal().is_switched, "the claim is given up")
        assert not node.look().is_enabled

    tell(node, nothing_is_asked)


# ---- GPUs that take the mode with a reset --------------------------------------------------------


def test_an_ampere_gpu_is_reset_only_where_that_is_allowed(
    tmp_path: Path, native_dir: Path
) -> None:
    assert native_dir.is_dir()
    node = Node(tmp_path, "[{mode: mig, mig: {keep: 0s}}]", "a100-40gb")
    profile = {"allotment.dev/mig-profile": "1g.5gb"}

    async def story() -> None:
        pod = node.admit("1", asking(), annotations=profile)
        assert "needs a reset for it, which is not allowed here" in await node.start(pod)
        node.configure("[{mode: mig, mig: {keep: 0s, reset: true}}]")
        assert await node.start(pod) == ""
        assert node.look().is_enabled
        node.remove(pod)
        await node.until(lambda: not node.look().is_enabled, "the mode is off, by a reset too")
        assert not node.journal().is_switched

    tell(node, story)


def test_no_gpu_is_reset_under_another_that_nvlink_joins(tmp_path: Path, native_dir: Path) -> None:
    assert native_dir.is_dir()
    rules = "[{match: {index: [0]}, modes: [mig], mig: {reset: true}}, {mode: soft}]"
    node = Node(tmp_path, rules, "a100-40gb:2")
    one, other = node.uuids
    node.state.links = DeviceLinks(peers={one: frozenset({other}), other: frozenset({one})})

    async def story() -> None:
        soft = node.admit("1", replace(asking(), memory=4), annotations=SOFT)
        assert await node.start(soft) == ""
        profile = {"allotment.dev/mig-profile": "1g.5gb"}
        cut = node.admit("2", asking(), annotations=profile)
        refused = await node.start(cut)
        assert f"a reset would stop GPU {node.uuids[1]} as well" in refused
        assert "team/pod-1/main" in refused
        node.remove(soft)
        await node.until(lambda: not node.tenants.shares, "the soft share is gone")
        assert await node.start(cut) == ""

    tell(node, story)


def test_slices_of_others_and_of_ours_on_one_node_are_never_both(
    tmp_path: Path, native_dir: Path
) -> None:
    assert native_dir.is_dir()
    spec = "h100-80gb[mig=1g.10gb*3],h100-80gb"
    node = Node(tmp_path, "[{match: {index: [1]}, mode: mig}]", spec)

    async def story() -> None:
        pods = [node.admit(str(number), asking()) for number in range(7)]
        assert await asyncio.gather(*map(node.start, pods)) == [""] * 7
        mine = {each.devices[0].uuid for each in node.tenants.shares}
        with MigMachine(node.machine):
            session = NvmlSession(node.machine)
            session.open()
            looks = [session.look(index) for index in range(2)]
            session.close()
        slices = [each for look in looks if isinstance(look, Look) for each in look.slices]
        assert len(slices) == 10
        offered = without_own(node.folder.mig, slices)
        gpus = [look.device for look in looks if isinstance(look, Look)]
        offer = plan([*gpus, *offered], {}, node.config)
        static = offer.resource("nvidia.com/mig-1g.10gb")
        assert static is not None
        assert len(static.slots) == 3
        assert not {each.device for each in static.slots} & mine
        assert offer.in_mode("mig") == (node.uuids[1],)
        assert offer.problems == ()

    tell(node, story)

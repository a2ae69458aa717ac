# SPDX-License-Identifier: Apache-2.0
"""What is known of GPUs that are cut for who asks, and what of it schedulers are told."""

from __future__ import annotations

import pytest
from cut_nodes import pod_of
from gpus import gpu
from hypothesis import given
from hypothesis import strategies as st
from mig_twin import A100
from placing import place

from allotment.agent.config.overlay import load
from allotment.agent.inventory_publisher import build_inventory
from allotment.agent.mig.state import CutGpu, cut_gpu
from allotment.agent.node_state import NodeState
from allotment.agent.resources import plan
from allotment.kube.inventories import decode, encode
from allotment.model.clusters import NodeInventory, PodBooking
from allotment.model.mig import MigGpu, MigHold, MigInstance, MigPlace, MigSlice
from allotment.model.quantities import parse_memory
from allotment.model.requests import Request
from allotment.model.structs import replace
from allotment.modes.mig.journal import SliceRecord, Stage
from allotment.placement.nodes import Node

SMALL = next(each for each in A100 if each.name == "1g.5gb")
NAMES = {each.number: each.name for each in A100}
UUID = "GPU-0"


def instance(start: int, *, uuid: str = "", gpu_instance: int | None = None) -> MigInstance:
    return MigInstance(
        profile=SMALL.number,
        start=start,
        size=1,
        gpu_instance=start + 7 if gpu_instance is None else gpu_instance,
        compute_instance=0,
        uuid=uuid or f"MIG-{start}",
    )


def record(start: int, stage: Stage = Stage.READY, *, holder: str = "") -> SliceRecord:
    is_made = stage is not Stage.INTENDED
    return SliceRecord(
        id=f"r{start}",
        gpu=UUID,
        profile=SMALL.number,
        name=SMALL.name,
        start=start,
        size=1,
        stage=stage,
        holder=holder,
        gpu_instance=start + 7 if is_made else None,
        compute_instance=0 if stage in {Stage.READY, Stage.LEAVING} else None,
        uuid=f"MIG-{start}" if stage in {Stage.READY, Stage.LEAVING} else "",
    )


def gpu_of(*instances: MigInstance) -> MigGpu:
    return MigGpu(uuid=UUID, is_enabled=True, is_pending=True, profiles=A100, instances=instances)


def holds(found: CutGpu) -> dict[int, MigHold]:
    return {each.start: each.hold for each in found.slices}


def test_each_slice_is_somebodys_idle_or_foreign() -> None:
    records = (
        record(0, holder="share"),
        record(1),
        record(2, Stage.INTENDED, holder="coming"),
        record(3, Stage.LEAVING),
    )
    there = gpu_of(instance(0), instance(1), instance(3), instance(6, uuid="MIG-theirs"))
    found = cut_gpu(there, records, records)
    assert holds(found) == {
        0: MigHold.USED,
        1: MigHold.IDLE,
        2: MigHold.USED,
        3: MigHold.IDLE,
        6: MigHold.FOREIGN,
    }
    assert found.lost == ()


def test_what_others_removed_is_lost_and_no_place_is_taken() -> None:
    records = (record(0, holder="share"), record(1))
    found = cut_gpu(gpu_of(), records, records)
    assert (holds(found), found.lost) == ({}, (records[0],))
    # In its place is another of the same shape: that one is theirs.
    again = cut_gpu(gpu_of(instance(0, uuid="MIG-theirs")), records, records)
    assert (holds(again), again.lost) == ({0: MigHold.FOREIGN}, (records[0],))


@given(st.sets(st.integers(0, 6)), st.sets(st.integers(0, 6)), st.sets(st.integers(0, 6)))
def test_what_changes_while_a_gpu_is_looked_at_is_nobody_elses_doing(
    stays: set[int], comes: set[int], goes: set[int]
) -> None:
    """Ours that come or go between the journal and the driver are neither foreign nor lost."""
    comes, goes = comes - stays, goes - stays - comes
    before = tuple(record(each, holder="s") for each in sorted(stays | goes))
    after = tuple(record(each, holder="s") for each in sorted(stays | comes))
    for moment in (stays, stays | comes, stays | goes, stays | comes | goes):
        found = cut_gpu(gpu_of(*map(instance, sorted(moment))), before, after)
        assert MigHold.FOREIGN not in holds(found).values()
        assert found.lost == ()
        assert stays | comes <= holds(found).keys()


def told(cut: dict[str, CutGpu], *placed: tuple[str, MigPlace]) -> NodeInventory | None:
    devices = {UUID: gpu(0)}
    rules = "allotment: {devices: [{modes: [soft, mig]}]}"
    offer = plan(tuple(devices.values()), {}, load(rules, source="f"))
    state = NodeState(offer=offer, devices=devices, cut_gpus=cut)
    return build_inventory(state, {}, taken={}, placed=placed)


def test_schedulers_are_told_of_slices_for_which_no_placement_stands() -> None:
    records = (record(0, holder="by hand"), record(1), record(4, holder="placed"))
    cut = cut_gpu(gpu_of(instance(0), instance(1), instance(4)), records, records)
    inventory = told(
        {UUID: cut}, (UUID, MigPlace(SMALL.name, 4)), ("GPU-1", MigPlace(SMALL.name, 0))
    )
    assert inventory is not None
    (device,) = inventory.devices
    assert device.modes == ("soft", "mig")
    assert device.mig is not None
    assert device.mig.is_enabled
    assert [(each.start, each.hold) for each in device.mig.slices] == [
        (0, MigHold.USED),
        (1, MigHold.IDLE),
    ]
    assert decode("", encode(inventory)) == inventory


def test_a_gpu_of_which_nobody_knows_what_it_can_be_cut_into_is_not_offered_for_it() -> None:
    inventory = told({})
    assert inventory is not None
    (device,) = inventory.devices
    assert (device.modes, device.mig) == (("soft",), None)


@pytest.mark.parametrize(
    ("modes", "problem"), [("[soft, mig]", ""), ("[mig]", "MIG is off, and they fight")]
)
def test_schedulers_are_told_why_mig_is_left_off(modes: str, problem: str) -> None:
    devices = {UUID: gpu(0)}
    rules = load(f"allotment: {{devices: [{{modes: {modes}}}]}}", source="f")
    offer = plan(tuple(devices.values()), {}, rules)
    cut, paused = {UUID: CutGpu(profiles=A100, is_enabled=False)}, {UUID: "they fight"}
    state = NodeState(offer=offer, devices=devices, cut_gpus=cut, mig_paused=paused)
    inventory = build_inventory(state, {}, taken={})
    assert inventory is not None
    (device,) = inventory.devices
    assert "mig" not in device.modes
    assert (device.mig_off, device.problem) == ("MIG is off, and they fight", problem)
    assert decode("", encode(inventory)) == inventory


def test_a_gpu_in_mig_mode_has_its_memory_still() -> None:
    cut = {UUID: CutGpu(profiles=A100, is_enabled=True)}
    devices = {UUID: replace(gpu(0), mig=True)}
    offer = plan(
        tuple(devices.values()), {}, load("allotment: {devices: [{mode: mig}]}", source="f")
    )
    state = NodeState(offer=offer, devices=devices, cut_gpus=cut)
    inventory = build_inventory(state, {}, taken={})
    assert inventory is not None
    assert inventory.devices[0].memory_bytes == gpu(0).memory_bytes
    assert offer.quantities["allotment.dev/gpu-memory"] == gpu(0).memory_bytes


def test_to_schedulers_a_gpu_of_warm_slices_serves_its_other_modes_or_those_slices() -> None:
    records = (record(0), record(3))
    warm = cut_gpu(gpu_of(instance(0), instance(3)), records, records)
    for gives_way, modes in ((False, ["mig"]), (True, ["soft", "mig"])):
        inventory = told({UUID: replace(warm, gives_way=gives_way)})
        assert inventory is not None
        node = Node(replace(decode("n", encode(inventory)), name="n"))
        found = []
        for mode in ("soft", "mig"):
            request = Request(parse_memory("4Gi"), mode=mode)
            decision = place(node, pod_of(request))
            if isinstance(decision, PodBooking):
                found.append(mode)
                (device,) = decision.containers[0].devices
                assert mode == "soft" or (device.slice and device.slice.start in {0, 3})
        assert found == modes, gives_way


@given(
    st.lists(st.sampled_from(MigHold), max_size=7),
)
def test_a_gpu_is_free_iff_nobody_has_a_slice(holds: list[MigHold]) -> None:
    pieces = tuple(
        MigSlice(profile=SMALL.number, start=start, size=1, hold=hold)
        for start, hold in enumerate(holds)
    )
    found = CutGpu(profiles=A100, is_enabled=True, slices=pieces)
    assert found.is_free == (set(holds) <= {MigHold.IDLE})


def test_what_was_whole_proves_that_the_mode_was_on() -> None:
    records = (record(0, holder="share"), record(1, Stage.INTENDED, holder="coming"))
    assert cut_gpu(gpu_of(instance(0)), records, records).proofs == frozenset()
    off = replace(gpu_of(), is_enabled=False, is_pending=False)
    assert cut_gpu(off, records, records).proofs == {"r0"}
    assert cut_gpu(off, (), records).proofs == frozenset(), "it came meanwhile"

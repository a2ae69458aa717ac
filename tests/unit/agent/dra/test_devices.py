# SPDX-License-Identifier: Apache-2.0
"""A node's GPUs as devices: what excludes what, what is left, and the limits of the API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
from gpus import gpu
from hypothesis import given
from hypothesis import strategies as st
from mig_profiles import profiles as profiles_of

from allotment.agent.dra.devices import (
    MONITOR,
    TAKEN,
    UNUSABLE,
    GpuState,
    Pool,
    gpus_of,
    pool_of,
)
from allotment.agent.mig.state import CutGpu
from allotment.agent.node_state import NodeState
from allotment.devices.facts import DeviceFacts, NodeFacts
from allotment.dialects.foreign.nvidia_claims import DRIVER as NVIDIAS_DRIVER
from allotment.dialects.own.resource_claims import DRIVER, MEMORY_CAPACITY, part_named
from allotment.model.clusters import TakenPart
from allotment.model.compute import WHOLE
from allotment.model.mig import MigHold, MigLayout, MigPlace, MigRequest, MigSlice
from allotment.model.structs import replace
from allotment.placement.mig.choose import MigRefusal, choose
from allotment.shares.mode_policy import ModePolicy

GI = 1 << 30
A100_80 = profiles_of("A100-80GB")
H100_80 = profiles_of("H100-80GB")


def cut(profiles: Sequence[Any] = A100_80, **fields: Any) -> CutGpu:  # noqa: ANN401
    return CutGpu(profiles=tuple(profiles), is_enabled=True, **fields)


def taints(pool: Pool, name: str) -> list[str]:
    return [each["key"] for each in pool.devices[name].document.get("taints", ())]


def parts(pool: Pool) -> list[str]:
    """The devices that are given, in whole or in part."""
    return [name for name, each in pool.devices.items() if not each.part.is_monitor]


def counters(pool: Pool, name: str) -> Mapping[str, int]:
    ((only),) = pool.devices[name].document["consumesCounters"]
    return {key: int(each["value"]) for key, each in only["counters"].items()}


def named(uuid: str) -> str:
    return f"gpu-{uuid.removeprefix('GPU-').lower()[:8]}"


def test_a_gpu_is_offered_in_every_way() -> None:
    device = gpu(0)
    pool = pool_of([GpuState(device=device, cut=cut())], None)
    name = named(device.uuid)
    places = sum(len(each.starts) for each in A100_80)
    assert len(pool.devices) == 3 + places
    assert pool.devices[name].document["allowMultipleAllocations"] is True
    assert "allowMultipleAllocations" not in pool.devices[f"{name}-whole"].document
    slices = {each.part.slice for each in pool.devices.values() if each.part.slice}
    assert slices == {MigPlace(each.name, start) for each in A100_80 for start in each.starts}


def test_a_monitor_takes_no_counters_and_other_claims_never_get_it() -> None:
    device = gpu(0)
    pool = pool_of([GpuState(device=device, cut=cut(), problem="XID 79")], None)
    monitor = pool.devices[f"{named(device.uuid)}-monitor"]
    assert monitor.part.is_monitor
    assert not {"consumesCounters", "capacity"} & monitor.document.keys()
    assert taints(pool, monitor.name) == [MONITOR]


def test_the_ways_exclude_each_other_by_counters() -> None:
    device = gpu(0)
    pool = pool_of([GpuState(device=device, cut=cut())], None)
    name = named(device.uuid)
    (sets,) = (each for each in pool.slices if "sharedCounters" in each)
    (only,) = sets["sharedCounters"]
    have = {key: int(each["value"]) for key, each in only["counters"].items()}
    assert counters(pool, name) == counters(pool, f"{name}-whole") == have
    for each in parts(pool):
        assert counters(pool, each).items() <= have.items()


@given(st.data())
def test_slices_fit_together_by_counters_exactly_if_their_slots_do(data: st.DataObject) -> None:
    device = gpu(0)
    pool = pool_of([GpuState(device=device, cut=cut())], None)
    sizes = {each.name: each.size for each in A100_80}
    devices = [each for each in pool.devices.values() if each.part.slice]
    chosen = data.draw(st.lists(st.sampled_from(devices), max_size=7, unique_by=lambda e: e.name))
    wanted: dict[str, int] = {}
    for each in chosen:
        for key, amount in counters(pool, each.name).items():
            wanted[key] = wanted.get(key, 0) + amount
    fits = all(amount <= 1 for amount in wanted.values())
    spans = sorted(
        (place.start, place.start + sizes[place.profile])
        for each in chosen
        if (place := each.part.slice)
    )
    apart = all(one[1] <= other[0] for one, other in pairwise(spans))
    scarce = sum("+me" in each.part.slice.profile for each in chosen if each.part.slice)
    assert fits == (apart and scarce <= 1)


def test_what_others_have_is_taken_off() -> None:
    device = gpu(0)
    taken = TakenPart(4 * GI, 3000, 1, "soft")
    pool = pool_of([GpuState(device=device, cut=cut(), taken=taken)], None)
    name = named(device.uuid)
    capacity = pool.devices[name].document["capacity"]
    assert capacity["memory"]["value"] == f"{(device.allottable_bytes - 4 * GI) >> 30}Gi"
    assert capacity["compute"]["value"] == "70"
    assert taints(pool, name) == []
    assert taints(pool, f"{name}-whole") == [TAKEN]
    assert taints(pool, f"{name}-mig-1g-10gb-0") == [TAKEN]


def test_a_gpu_that_others_have_whole_takes_no_claim() -> None:
    device = gpu(0)
    taken = TakenPart(device.allottable_bytes, 0, 1, "exclusive")
    pool = pool_of([GpuState(device=device, taken=taken)], None)
    name = named(device.uuid)
    assert taints(pool, name) == taints(pool, f"{name}-whole") == [TAKEN]
    capacity = pool.devices[name].document["capacity"]
    assert capacity["memory"]["value"] == "80Gi", "the API has no capacity of nothing"


def test_a_gpu_whose_time_is_guaranteed_to_others_keeps_its_devices() -> None:
    """A claim may have a part of it, and be prepared again for its next pod."""
    device = gpu(0)
    taken = TakenPart(4 * GI, WHOLE, 1, "soft")
    pool = pool_of([GpuState(device=device, taken=taken)], None)
    assert taints(pool, named(device.uuid)) == [TAKEN]


@pytest.mark.parametrize(
    ("taken", "mode", "left"),
    [
        (TakenPart(), "", 63),
        (TakenPart(), "soft", 63),
        (TakenPart(GI, 0, 3, "soft"), "soft", 60),
        (TakenPart(), "mps", 48),
        (TakenPart(GI, 0, 3, "mps"), "mps", 45),
    ],
)
def test_each_claim_takes_one_of_the_seats_that_are_left(
    taken: TakenPart, mode: str, left: int
) -> None:
    device = gpu(0)
    pool = pool_of([GpuState(device=device, taken=taken, mode=mode)], None)
    seats = pool.devices[named(device.uuid)].document["capacity"]["seats"]
    assert seats["value"] == str(left)
    assert seats["requestPolicy"] == {"default": "1", "validValues": ["1"]}


def test_a_gpu_whose_seats_others_have_takes_no_claim() -> None:
    device = gpu(0)
    taken = TakenPart(63 << 20, 0, 63, "soft")
    pool = pool_of([GpuState(device=device, taken=taken, mode="soft")], None)
    assert taints(pool, named(device.uuid)) == [TAKEN]


def test_a_gpu_with_one_step_of_memory_left_takes_no_claim() -> None:
    """The API refuses the slice: `one step is larger than capacity value` (validation.go)."""
    device = gpu(0)
    taken = TakenPart(device.allottable_bytes - (1 << 20), 0, 1, "soft")
    pool = pool_of([GpuState(device=device, taken=taken)], None)
    assert taints(pool, named(device.uuid)) == [TAKEN]


@pytest.mark.parametrize("is_nvidias", [False, True])
def test_a_gpu_in_mig_mode_keeps_its_size(*, is_nvidias: bool) -> None:
    """The API server refuses all devices of a slice if one has a capacity of nothing."""
    device = gpu(0, mig=True)
    pool = pool_of([GpuState(device=device, cut=cut())], None, is_nvidias=is_nvidias)
    memory = pool.devices[named(device.uuid)].document["capacity"]["memory"]
    assert memory["value"] == memory["requestPolicy"]["default"] == "80Gi"


def test_a_gpu_that_is_kept_for_some_modes_is_given_in_those_alone() -> None:
    """`allot devices set-mode`."""
    device = gpu(0)
    name = named(device.uuid)
    ways = {"soft": name, "exclusive": f"{name}-whole", "mig": f"{name}-mig-1g-10gb-0"}
    for mode, open_one in ways.items():
        kept = GpuState(device=device, cut=cut(), allowed=ModePolicy((mode,)))
        pool = pool_of([kept], None)
        assert [taints(pool, each) for each in ways.values()] == [
            [] if each == open_one else [UNUSABLE] for each in ways.values()
        ]
        other = pool_of([kept], None, is_nvidias=True)
        assert taints(other, name) == ([UNUSABLE] if mode == "mig" else [])


def test_profiles_with_and_without_media_engines_are_devices_of_their_own() -> None:
    profiles = profiles_of("RTX PRO 6000")
    pool = pool_of([GpuState(device=gpu(0), cut=cut(profiles))], None)
    places = {each.part.slice for each in pool.devices.values() if each.part.slice}
    assert places == {MigPlace(each.name, start) for each in profiles for start in each.starts}


def test_texts_are_within_the_limit_of_the_api() -> None:
    device = gpu(0, name="NVIDIA " + "long " * 20)
    pool = pool_of([GpuState(device=device)], None)
    name = pool.devices[named(device.uuid)].document["attributes"]["productName"]["string"]
    assert len(name) == 64


def test_claims_are_kept_from_the_parts_of_a_gpu_in_mode_mps() -> None:
    """Most are shares of mode soft, which the node would refuse; those of mode mps tolerate it."""
    device = gpu(0)
    taken = TakenPart(4 * GI, 3000, 1, "mps")
    pool = pool_of([GpuState(device=device, taken=taken)], None)
    (taint,) = pool.devices[named(device.uuid)].document["taints"]
    assert (taint["key"], taint["value"]) == (TAKEN, "mps")


def test_a_sick_gpu_keeps_its_devices_with_a_taint() -> None:
    device = gpu(0)
    sick = pool_of([GpuState(device=device, cut=cut(), problem="XID 79: it is lost")], None)
    assert all(taints(sick, name) == [UNUSABLE] for name in parts(sick))
    well = pool_of([GpuState(device=device, cut=cut())], None)
    assert not any(taints(well, name) for name in parts(well))


def test_a_gpu_that_is_reserved_outside_takes_no_claim() -> None:
    """As for pods: another program has set its compute mode."""
    device = gpu(0)
    state = NodeState(devices={device.uuid: device}, reserved={device.uuid: "EXCLUSIVE_PROCESS"})
    pool = pool_of(gpus_of(state, [], None, driver="gpu.allotment.dev"), None)
    assert all(taints(pool, name) == [UNUSABLE] for name in parts(pool))


def test_a_gpu_that_is_lost_for_long_takes_its_pods_away() -> None:
    """Kubernetes evicts them, unless a claim tolerates it."""
    device = gpu(0)
    for is_evicted, effect in ((False, "NoSchedule"), (True, "NoExecute")):
        state = GpuState(device=device, cut=cut(), problem="XID 79", is_evicted=is_evicted)
        lost = pool_of([state], None)
        found = [each for name in parts(lost) for each in lost.devices[name].document["taints"]]
        assert {(each["key"], each["effect"]) for each in found} == {(UNUSABLE, effect)}
        (kept,) = lost.devices[f"{named(device.uuid)}-monitor"].document["taints"]
        assert kept["effect"] == "NoSchedule", "a monitor stays"


def test_a_slice_of_another_tool_closes_its_place_alone() -> None:
    device = gpu(0)
    number = next(each.number for each in A100_80 if each.name == "1g.10gb")
    theirs = MigSlice(profile=number, start=2, size=1, hold=MigHold.FOREIGN)
    pool = pool_of([GpuState(device=device, cut=cut(), slices=(theirs,))], None)
    name = named(device.uuid)
    assert taints(pool, name) == taints(pool, f"{name}-whole") == [TAKEN]
    assert taints(pool, f"{name}-mig-1g-10gb-2") == [TAKEN]
    assert taints(pool, f"{name}-mig-1g-10gb-3") == []
    assert taints(pool, f"{name}-mig-3g-40gb-0") == [TAKEN]
    assert taints(pool, f"{name}-mig-3g-40gb-4") == []


def test_places_are_in_the_order_in_which_the_planner_takes_them() -> None:
    """kube-scheduler takes the first that fits: a small slice must not be in a large one's way."""

    def order(name: str, *used: MigSlice) -> list[int]:
        pool = pool_of([GpuState(device=gpu(0), cut=cut(slices=used))], None)
        places = [each.part.slice for each in pool.devices.values() if each.part.slice]
        return [each.start for each in places if each.profile == name]

    numbers = {each.name: each.number for each in A100_80}
    used: list[MigSlice] = []
    layout = MigLayout(gpu="GPU-0", profiles=A100_80)
    for _ in range(7):
        chosen = choose([replace(layout, slices=tuple(used))], MigRequest(profile="1g.10gb"))
        assert not isinstance(chosen, MigRefusal)
        start = order("1g.10gb", *used)[0]
        assert start == chosen[0].start
        used.append(MigSlice(profile=numbers["1g.10gb"], start=start, size=1))
    assert order("1g.10gb")[0] != 0


def test_media_engines_of_others_close_the_places_that_need_them() -> None:
    (scarce,) = (each for each in A100_80 if each.has_media)
    theirs = MigSlice(profile=scarce.number, start=2, size=scarce.size, hold=MigHold.FOREIGN)
    pool = pool_of([GpuState(device=gpu(0), cut=cut(), slices=(theirs,))], None)
    closed = [each.name for each in pool.devices.values() if taints(pool, each.name) == [TAKEN]]
    places = [
        each
        for each in pool.devices.values()
        if each.part.slice and each.part.slice.profile == scarce.name
    ]
    assert {each.name for each in places} <= {*closed}


@pytest.mark.parametrize(("count", "profiles"), [(8, A100_80), (16, H100_80), (16, ())])
def test_a_pool_is_within_the_limits_of_the_api(count: int, profiles: Sequence[Any]) -> None:
    """The limits are those of resource.k8s.io/v1 (types.go, Kubernetes 1.36)."""
    gpus = [
        GpuState(device=gpu(number), cut=cut(profiles) if profiles else None, problem="XID 79")
        for number in range(count)
    ]
    pool = pool_of(gpus, None)
    names = [device["name"] for each in pool.slices for device in each.get("devices", ())]
    assert names == list(pool.devices)
    for each in pool.slices:
        assert ("devices" in each) != ("sharedCounters" in each)
        assert len(each.get("devices", ())) <= 64
        assert len(each.get("sharedCounters", ())) <= 8
        for found in each.get("sharedCounters", ()):
            assert len(found["counters"]) <= 32
        for device in each.get("devices", ()):
            assert len(device["name"]) <= 63
            assert len(device["attributes"]) + len(device.get("capacity", ())) <= 32
            assert len(device.get("consumesCounters", ())) <= 2
            texts = [value.get("string", "") for value in device["attributes"].values()]
            assert max(map(len, texts)) <= 64
    assert names[0] == named(gpus[0].device.uuid), "the order of the GPUs is that of the devices"


def test_the_fullest_gpu_comes_first() -> None:
    gpus = [
        GpuState(device=gpu(number), booked_bytes=booked * GI)
        for number, booked in enumerate((0, 5, 9, 5))
    ]
    pool = pool_of(gpus, None)
    order = list(dict.fromkeys(each.part.uuid for each in pool.devices.values()))
    assert order == [gpus[number].device.uuid for number in (2, 1, 3, 0)]


def test_a_gpu_in_mig_mode_that_is_left_to_others_is_given_neither_whole_nor_in_parts() -> None:
    """Its modes lack mig, or do since the configuration was changed: slices may be on it."""
    device = replace(gpu(0), mig=True)
    pool = pool_of([GpuState(device=device)], None)
    name = named(device.uuid)
    assert taints(pool, name) == taints(pool, f"{name}-whole") == [TAKEN]
    ours = pool_of([GpuState(device=device, cut=cut())], None)
    assert taints(ours, name) == taints(ours, f"{name}-whole") == []


def test_gpus_with_like_uuids_have_names_of_their_own() -> None:
    gpus = [gpu(number, uuid=f"GPU-4a0ae330-000{number}") for number in range(3)]
    pool = pool_of([GpuState(device=each) for each in gpus], None)
    assert len(pool.devices) == 9
    assert {each.part.uuid for each in pool.devices.values()} == {each.uuid for each in gpus}


# ---- in the place of NVIDIA's driver -------------------------------------------------------------


def test_nvidias_type_is_for_parts_and_for_the_whole() -> None:
    device = gpu(0)
    pool = pool_of([GpuState(device=device, cut=cut())], None, is_nvidias=True)
    name = named(device.uuid)
    types = {each.document["attributes"]["type"]["string"] for each in pool.devices.values()}
    assert types == {"gpu", "mig"}
    (only,) = (each for each in pool.devices.values() if each.part.slice is None)
    assert (only.name, only.document["allowMultipleAllocations"]) == (name, True)
    memory = only.document["capacity"]["memory"]
    assert memory["requestPolicy"]["default"] == memory["value"], "without an amount it is all"
    assert only.part_for([]).is_whole
    assert not only.part_for(["memory"]).is_whole
    assert not only.part_for(["compute"]).is_whole


def test_what_a_claim_does_not_name_takes_nothing_of_the_multiprocessors() -> None:
    """The API: a capacity without a policy is consumed in full by each claim."""
    device = gpu(0)
    pool = pool_of([GpuState(device=device)], None, is_nvidias=True)
    (only,) = pool.devices.values()
    policies = {key: each.get("requestPolicy") for key, each in only.document["capacity"].items()}
    assert all(policies.values())
    assert policies["multiprocessors"]["default"] == "0"


def test_in_nvidias_place_a_gpu_with_other_shares_keeps_its_size_and_takes_no_claim() -> None:
    device = gpu(0)
    free = pool_of([GpuState(device=device)], None, is_nvidias=True)
    taken = TakenPart(4 * GI, 3000, 1, "soft")
    pool = pool_of([GpuState(device=device, taken=taken)], None, is_nvidias=True)
    name = named(device.uuid)
    assert taints(pool, name) == [TAKEN]
    assert pool.devices[name].document["capacity"] == free.devices[name].document["capacity"]


def test_attributes_have_the_names_of_nvidias_driver() -> None:
    device = gpu(0)
    facts = DeviceFacts(
        uuid=device.uuid, name=device.name, memory_mib=1, brand="Nvidia", pcie_root="pci0000:3a"
    )
    node = NodeFacts(driver_version="580.95.05", cuda_version=(13, 0))
    for is_nvidias in (False, True):
        state = GpuState(device=device, facts=facts, cut=cut())
        pool = pool_of([state], node, is_nvidias=is_nvidias)
        found = pool.devices[named(device.uuid)].document["attributes"]
        assert found["brand"] == {"string": "Nvidia"}
        assert found["architecture"] == {"string": "Ampere"}
        assert found["driverVersion"] == {"version": "580.95.5"}
        assert found["cudaDriverVersion"] == {"version": "13.0.0"}
        assert found["resource.kubernetes.io/pcieRoot"] == {"string": "pci0000:3a"}
    unknown = pool_of([GpuState(device=device)], None)
    assert (
        not {"brand", "resource.kubernetes.io/pcieRoot"}
        & unknown.devices[named(device.uuid)].document["attributes"].keys()
    )


@pytest.mark.parametrize("driver", [DRIVER, NVIDIAS_DRIVER])
@pytest.mark.parametrize("amounts", [(), (MEMORY_CAPACITY,)])
def test_a_scheduler_reads_from_a_name_what_the_node_gives(
    driver: str, amounts: tuple[str, ...]
) -> None:
    uuids = ["GPU-4a0ae330-00aa", "GPU-4A0AE331-00aa", "GPU-77777777-00aa"]
    models = [
        (replace(gpu(place), uuid=uuid), kinds)
        for place, (uuid, kinds) in enumerate(zip(uuids, (A100_80, H100_80, ()), strict=True))
    ]
    pool = pool_of(
        [GpuState(device=each, cut=cut(kinds)) for each, kinds in models],
        None,
        is_nvidias=driver != DRIVER,
    )
    gpus = {each.uuid: kinds for each, kinds in models}
    assert pool.devices
    for name, device in pool.devices.items():
        found = part_named(name, gpus, driver=driver, amounts=amounts)
        assert found == device.part_for(amounts), name


@pytest.mark.parametrize("name", ["gpu-0", "gpu-ffffffff", "nic-4a0ae330", "gpu-0-mig-1g10gb-19-0"])
def test_devices_of_other_drivers_have_no_part(name: str) -> None:
    assert part_named(name, {"GPU-4a0ae330-00aa": (), "GPU-0": ()}, driver=NVIDIAS_DRIVER) is None

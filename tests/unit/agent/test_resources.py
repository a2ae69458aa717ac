# SPDX-License-Identifier: Apache-2.0
"""What a node offers: every GPU once, in one mode, with quantities that add up."""

from collections import Counter
from collections.abc import Mapping
from random import Random

import pytest
from gpus import gpu
from hypothesis import given
from hypothesis import strategies as st

from allotment.agent.config.checks import MigUse
from allotment.agent.config.overlay import load
from allotment.agent.resources import (
    GPU_COMPUTE,
    GPU_MEMORY,
    GPU_SHARE,
    Offer,
    as_whole,
    plan,
)
from allotment.model.devices import Device
from allotment.model.structs import replace

GI = 1 << 30
A100 = "NVIDIA A100-SXM4-80GB"
T4 = "Tesla T4"

TIMESLICED = "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n"
RENAMED = TIMESLICED.replace("resources:", "renameByDefault: true, resources:")
STRICT = TIMESLICED.replace("resources:", "failRequestsGreaterThanOne: true, resources:")


def uuid(index: int) -> str:
    return f"GPU-{index:08x}-0000-4000-8000-000000000000"


def device(
    index: int,
    *,
    name: str = A100,
    memory_gi: int = 80,
    numa_node: int | None = None,
    is_mig: bool = False,
) -> Device:
    return gpu(
        index,
        uuid=uuid(index),
        name=name,
        memory_bytes=memory_gi * GI,
        numa_node=numa_node,
        pci_bus_id=f"00000000:{index + 0x3B:02X}:00.0",
        mig=is_mig,
        reserved_bytes=GI,
    )


GPUS = tuple(device(index, numa_node=index % 2) for index in range(4))


def offered(
    text: str, devices: tuple[Device, ...] = GPUS, unhealthy: Mapping[str, str] | None = None
) -> Offer:
    return plan(devices, unhealthy or {}, load(text, source="f"))


def ids(offer: Offer, name: str) -> list[str]:
    resource = offer.resource(name)
    return [slot.id for slot in resource.slots] if resource else []


def counts(offer: Offer) -> dict[str, int]:
    return {each.name: len(each.slots) for each in offer.resources}


def test_gpus_are_exclusive_where_nothing_is_said() -> None:
    offer = offered("")
    assert counts(offer) == {"nvidia.com/gpu": 4}
    (resource,) = offer.resources
    assert (resource.mode, resource.replicas, resource.family) == ("exclusive", 1, "nvidia.com/gpu")
    assert [slot.id for slot in resource.slots] == [each.uuid for each in GPUS]
    assert [slot.numa_node for slot in resource.slots] == [0, 1, 0, 1]
    assert set(offer.modes.values()) == {"exclusive"}
    assert offer.quantities == {}
    assert offer.problems == ()


def test_a_node_without_gpus_offers_nothing_and_has_no_problem() -> None:
    text = TIMESLICED + "allotment: {devices: [{match: {index: [0]}, mode: soft}]}"
    assert offered(text, devices=()) == Offer()


def test_time_slicing_replicates() -> None:
    offer = offered(TIMESLICED)
    assert counts(offer) == {"nvidia.com/gpu": 16}
    (resource,) = offer.resources
    assert (resource.mode, resource.replicas, resource.fails_above_one) == ("timeslice", 4, False)
    assert [slot.id for slot in resource.slots[:5]] == [
        *(f"{uuid(0)}::{number}" for number in range(4)),
        f"{uuid(1)}::0",
    ]
    assert {slot.device for slot in resource.slots} == {each.uuid for each in GPUS}


def test_replicas_are_renamed_and_keep_their_family() -> None:
    (resource,) = offered(RENAMED).resources
    assert (resource.name, resource.family) == ("nvidia.com/gpu.shared", "nvidia.com/gpu")


def test_replicas_may_have_another_systems_name() -> None:
    text = TIMESLICED.replace("4}", "100, rename: deepomatic.com/shared-gpu}")
    offer = offered(text + "allotment: {honourResources: true}", GPUS[:1])
    assert counts(offer) == {"deepomatic.com/shared-gpu": 100}
    (resource,) = offer.resources
    assert (resource.mode, resource.family) == ("timeslice", "nvidia.com/gpu")
    assert offer.problems == ()


def test_requests_above_one_fail_where_asked() -> None:
    assert offered(STRICT).resources[0].fails_above_one
    whole = offered(STRICT + "allotment: {devices: [{mode: exclusive}]}")
    assert not whole.resources[0].fails_above_one


def test_unhealthy_gpus_keep_their_slots_and_count_in_no_quantity() -> None:
    rules = "allotment: {sharesPerDevice: 2, devices: [{match: {index: [2, 3]}, mode: soft}]}"
    offer = offered(rules, unhealthy={uuid(0): "XID 79", uuid(3): "lost"})
    assert [slot.is_healthy for slot in offer.resources[1].slots] == [False, True]
    assert [slot.is_healthy for slot in offer.resources[0].slots] == [True, True, False, False]
    assert offer.quantities == {GPU_MEMORY: 79 * GI, GPU_COMPUTE: 100}
    assert offer.modes == {
        uuid(0): "exclusive",
        uuid(1): "exclusive",
        uuid(2): "soft",
        uuid(3): "soft",
    }


def test_quantities_are_the_same_with_mig_on_and_off() -> None:
    """kube-scheduler's sums do not change with a mode of idle GPUs."""
    text = "allotment: {devices: [{modes: [soft, mig]}]}"
    h100 = gpu(0, name="NVIDIA H100 80GB HBM3", memory_bytes=81559 << 20, reserved_bytes=550 << 20)
    for each, most in ((device(0), 79 * GI), (h100, 81152 << 20)):  # an H100's 7g.80gb
        off, on = (offered(text, (replace(each, mig=mig),)) for mig in (False, True))
        assert off.quantities == on.quantities == {GPU_MEMORY: most, GPU_COMPUTE: 100}
        assert replace(each, mig=True).allottable_bytes == 0
        assert as_whole(replace(each, mig=True)) == each


def test_soft_gpus_are_shares_and_quantities() -> None:
    offer = offered("allotment: {devices: [{mode: soft}]}")
    assert counts(offer) == {GPU_SHARE: 64}
    (resource,) = offer.resources
    assert (resource.mode, resource.replicas) == ("soft", 1)
    assert ids(offer, GPU_SHARE)[:2] == ["share::0", "share::1"]
    assert {slot.device for slot in resource.slots} == {None}
    assert offer.quantities == {GPU_MEMORY: 4 * 79 * GI, GPU_COMPUTE: 400}


def test_soft_replicas_are_nvidias_and_no_shares_besides() -> None:
    offer = offered(RENAMED + "allotment: {devices: [{mode: soft}]}")
    assert counts(offer) == {"nvidia.com/gpu.shared": 16}
    assert (offer.resources[0].mode, offer.resources[0].replicas) == ("soft", 4)
    assert offer.quantities == {}


BY_MPS = TIMESLICED.replace("timeSlicing", "mps")


def test_mps_replicates() -> None:
    offer = offered(BY_MPS)
    (resource,) = offer.resources
    assert (resource.name, resource.mode, resource.replicas) == ("nvidia.com/gpu", "mps", 4)
    assert ids(offer, "nvidia.com/gpu")[:4] == [f"{uuid(0)}::{number}" for number in range(4)]
    assert set(offer.modes.values()) == {"mps"}
    assert resource.fails_above_one
    assert offer.problems == ()


@pytest.mark.parametrize(
    ("text", "devices", "words"),
    [
        (BY_MPS.replace("4}", "49}"), GPUS[:1], "maximum allowed replicas exceeded: 49 > 48"),
        (
            BY_MPS,
            (replace(GPUS[0], compute_capability=(6, 1)),),
            "MPS shares no GPU before Volta",
        ),
        (
            BY_MPS.replace("4}", "4, devices: [0]}") + "allotment: {honourResources: true}",
            GPUS[:2],
            "cannot be shared by MPS: nvidia.com/gpu has GPUs of other modes",
        ),
        (
            BY_MPS,
            (GPUS[0], replace(GPUS[1], compute_capability=(6, 1))),
            f"GPU 1 ({uuid(1)}) cannot be shared by MPS: MPS shares no GPU before Volta",
        ),
        (
            TIMESLICED.replace("4}", "49}") + "allotment: {devices: [{mode: mps}]}",
            GPUS[:1],
            "maximum allowed replicas exceeded: 49 > 48",
        ),
    ],
    ids=["many", "old", "some", "one is old", "by a rule"],
)
def test_what_mps_cannot_share_is_not_offered(
    text: str, devices: tuple[Device, ...], words: str
) -> None:
    """NVIDIA's plugin does not start: a whole GPU must not be given in place of a part."""
    offer = offered(text, devices)
    assert counts(offer) == {"nvidia.com/gpu": 0}
    assert offer.modes == {}
    (problem,) = offer.problems
    assert words in problem
    assert problem.endswith("until the configuration is corrected")


def test_a_rule_of_mode_mps_gives_no_whole_gpu_in_place_of_time_slices() -> None:
    rules = "allotment: {devices: [{%smode: mps}]}"
    offer = offered(TIMESLICED + rules % "")
    assert counts(offer) == {"nvidia.com/gpu": 16}
    assert set(offer.modes.values()) == {"mps"}
    offer = offered(TIMESLICED + rules % "match: {index: [0]}, ")
    assert counts(offer) == {"nvidia.com/gpu": 0}
    (problem,) = offer.problems
    assert "cannot be shared by MPS: nvidia.com/gpu has GPUs of other modes" in problem


def test_the_most_replicas_under_mps_follow_the_driver() -> None:
    newer = (replace(GPUS[0], mps_clients=60),)
    assert counts(offered(BY_MPS.replace("4}", "60}"), newer)) == {"nvidia.com/gpu": 60}
    (problem,) = offered(BY_MPS.replace("4}", "61}"), newer).problems
    assert "maximum allowed replicas exceeded: 61 > 60" in problem


def test_what_mps_cannot_share_takes_nothing_from_allotments_own_resources() -> None:
    text = BY_MPS.replace("4}", "49}") + "allotment: {devices: [{match: {index: [0]}, mode: soft}]}"
    # Replicas of GPU 0 are enforced by turns, and are not of one size with those of the others.
    offer = offered(text.replace("devices: [{", "sharesPerDevice: 8, devices: [{"))
    assert counts(offer) == {"nvidia.com/gpu": 0, GPU_SHARE: 8}
    assert offer.shared == {uuid(0): ("soft",)}


def test_a_gpu_that_a_rule_leaves_whole_need_not_be_shared_by_mps() -> None:
    old = replace(GPUS[0], compute_capability=(6, 1))
    text = BY_MPS.replace("mps: {", "mps: {renameByDefault: true, ")
    rule = "allotment: {devices: [{match: {index: [0]}, mode: exclusive}]}"
    offer = offered(text + rule, (old, GPUS[1]))
    assert counts(offer) == {"nvidia.com/gpu": 1, "nvidia.com/gpu.shared": 4}
    assert offer.problems == ()


def test_modes_are_by_gpu() -> None:
    offer = offered(
        RENAMED
        + """\
allotment:
  sharesPerDevice: 8
  devices:
  - {match: {pci: ["3b:00.0"]}, mode: exclusive}
  - {match: {uuid: [gpu-00000001]}, mode: timeslice, timeSlice: short}
  - {match: {model: [a100], index: [2, 7]}, mode: soft}
"""
    )
    assert offer.modes == {
        uuid(0): "exclusive",
        uuid(1): "timeslice",
        uuid(2): "soft",
        uuid(3): "timeslice",
    }
    # GPU 2 cannot be a replica like those of 1 and 3, which nothing enforces.
    assert counts(offer) == {GPU_SHARE: 8, "nvidia.com/gpu": 1, "nvidia.com/gpu.shared": 8}
    assert offer.time_slices == {uuid(1): "short"}
    (problem,) = offer.problems
    assert problem == (
        f"GPU 2 ({uuid(2)}) is shared as allotment.dev/gpu, not by replicas: nvidia.com/gpu.shared"
        " has GPUs of other modes"
    )


def test_the_first_rule_that_matches_counts() -> None:
    rules = (
        "[{match: {index: [0]}, mode: soft}, {mode: exclusive}, {match: {index: [1]}, mode: soft}]"
    )
    offer = offered(f"allotment: {{devices: {rules}}}")
    assert [offer.modes[uuid(index)] for index in range(4)] == ["soft", *["exclusive"] * 3]
    (problem,) = offer.problems
    assert problem.startswith(
        "allotment.devices[2] has no effect: earlier rules match all its GPUs"
    )


@pytest.mark.parametrize(
    ("match", "indices"),
    [
        ("{index: [1, 3]}", [1, 3]),
        ("{uuid: [GPU-00000002]}", [2]),
        ("{uuid: [GPU-0000]}", [0, 1, 2, 3]),
        ("{pci: ['0000:3c:00.0']}", [1]),
        ("{pci: ['00000000:3C:00']}", [1]),
        ("{pci: ['1:3c:00.0']}", []),
        ("{pci: ['3c:01.0']}", []),
        ("{model: [a100-80gb]}", [0, 1, 2, 3]),
        ("{model: [a10, t4]}", []),
        ("{model: [a100], index: [0]}", [0]),
        ("{model: [t4], index: [0]}", []),
    ],
)
def test_matching(match: str, indices: list[int]) -> None:
    offer = offered(f"allotment: {{devices: [{{match: {match}, mode: soft}}]}}")
    assert [each.index for each in GPUS if offer.modes[each.uuid] == "soft"] == indices
    assert bool(offer.problems) == (not indices)


HONOURED = """
sharing:
  timeSlicing:
    resources: [{name: gpu, replicas: 2, devices: %s, rename: %s}]
allotment: {honourResources: true}
"""


@pytest.mark.parametrize(
    ("devices", "replicated"),
    [("2", [0, 1]), ("[3, '0']", [0, 3]), (f"[{uuid(1)}]", [1]), ("all", [0, 1, 2, 3])],
)
def test_some_devices_are_replicated(devices: str, replicated: list[int]) -> None:
    offer = offered(HONOURED % (devices, "half"))
    halves = [f"{uuid(index)}::{number}" for index in replicated for number in range(2)]
    assert ids(offer, "nvidia.com/half") == halves
    assert ids(offer, "nvidia.com/gpu") == [
        each.uuid for each in GPUS if each.index not in replicated
    ]
    assert offer.problems == ()


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ("5", "requested 5 devices to be replicated, but only 4 devices available"),
        ("[4]", "no matching device at index: 4"),
        ("['0:1']", "no matching device at index: 0:1"),
        (f"[{uuid(9)}]", f"no matching device with UUID: {uuid(9)}"),
    ],
)
def test_devices_that_are_not_there_leave_the_others_whole(devices: str, words: str) -> None:
    offer = offered(HONOURED % (devices, "half"))
    assert counts(offer) == {"nvidia.com/gpu": 4}
    assert offer.problems == (f"sharing.timeSlicing.resources[0].devices has no effect: {words}",)


def test_whole_gpus_and_replicas_of_one_name_are_told() -> None:
    offer = offered(HONOURED % ("1", "gpu"))
    assert counts(offer) == {"nvidia.com/gpu": 5}
    assert offer.resources[0].mode == "timeslice"
    (problem,) = offer.problems
    assert problem.startswith("nvidia.com/gpu has 3 whole GPUs beside replicas")


def test_soft_replicas_of_one_name_are_of_one_size() -> None:
    offer = offered(
        """
        sharing:
          timeSlicing:
            resources:
            - {name: gpu, replicas: 2, devices: [0], rename: part}
            - {name: gpu, replicas: 4, devices: [1], rename: part}
        allotment: {honourResources: true, devices: [{mode: soft}]}
        """
    )
    assert counts(offer) == {GPU_SHARE: 64}
    assert len(offer.problems) == 2
    assert "GPUs of nvidia.com/part have other numbers of replicas" in offer.problems[0]


def test_a_time_slice_is_of_gpus_that_are_shared_by_time() -> None:
    offer = offered("allotment: {devices: [{mode: timeslice, timeSlice: long}]}")
    assert set(offer.modes.values()) == {"exclusive"}
    assert offer.time_slices == {}


def test_patterns_name_resources() -> None:
    devices = (device(0), device(1, name=T4), device(2, name="NVIDIA L4"))
    offer = offered(
        """
        resources: {gpus: [{pattern: "Tesla*", name: small}, {pattern: "*A100*", name: big}]}
        allotment: {honourResources: true}
        """,
        devices,
    )
    assert {each.name: [slot.device for slot in each.slots] for each in offer.resources} == {
        "nvidia.com/big": [uuid(0)],
        "nvidia.com/gpu": [uuid(2)],
        "nvidia.com/small": [uuid(1)],
    }


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("allotment: {devices: [{mode: timeslice}]}", "is exclusive, not timeslice"),
        (
            "sharing: {timeSlicing: {resources: [{name: mig-1g.5gb, replicas: 2}]}}",
            "sharing.timeSlicing: no GPU of this node is nvidia.com/mig-1g.5gb",
        ),
        (
            TIMESLICED.replace("}]", "}, {name: gpu, replicas: 2}]"),
            "resources[1] has no effect on GPU 0",
        ),
        (
            TIMESLICED.replace("4", "64") + "allotment: {devices: [{mode: soft}]}",
            "64 are more than the 63 that can take turns",
        ),
    ],
    ids=str,
)
def test_what_does_not_suit_the_devices_is_told(text: str, problem: str) -> None:
    assert problem in offered(text).problems[0]


def test_gpus_in_mig_mode_are_left_out() -> None:
    offer = offered("", (device(0), device(1, is_mig=True)))
    assert counts(offer) == {"nvidia.com/gpu": 1}
    assert uuid(1) not in offer.modes
    (problem,) = offer.problems
    assert problem.startswith(f"GPU 1 ({uuid(1)}) is in MIG mode and is not offered")


# ---- modes by turns ------------------------------------------------------------------------------


def test_a_gpu_of_several_modes_is_given_in_parts_whatever_mode_it_is_in() -> None:
    devices = (device(0), device(1, is_mig=True), device(2))
    text = """
allotment:
  devices:
  - {match: {index: [0, 1]}, modes: [soft, mig], mig: {keep: 1m30s, reset: true}}
  - {mode: mps}
"""
    offer = offered(text, devices)
    assert offer.shared == {
        uuid(0): ("soft", "mig"),
        uuid(1): ("soft", "mig"),
        uuid(2): ("mps",),
    }
    assert offer.mig_uses == dict.fromkeys([uuid(0), uuid(1)], MigUse(keep_s=90.0, may_reset=True))
    assert counts(offer) == {GPU_SHARE: 48}
    assert (offer.in_mode("mig"), offer.in_mode("mps")) == ((uuid(0), uuid(1)), (uuid(2),))
    assert offer.problems == ()


def test_a_gpu_of_several_modes_is_not_given_in_replicas() -> None:
    offer = offered(TIMESLICED + "allotment: {devices: [{mode: mig}]}", (device(0),))
    assert counts(offer) == {GPU_SHARE: 16}
    (problem,) = offer.problems
    assert "not by replicas: its rule has modes mig" in problem


# ---- whatever the configuration ------------------------------------------------------------------

DEVICES = st.lists(
    st.tuples(st.integers(0, 7), st.sampled_from([A100, T4]), st.booleans()),
    unique_by=lambda each: each[0],
    max_size=8,
).map(
    lambda drawn: tuple(
        device(index, name=name, is_mig=is_mig and index > 5) for index, name, is_mig in drawn
    )
)
INDICES = st.lists(st.integers(0, 8), min_size=1, max_size=3).map(str)
RULES = st.lists(
    st.tuples(
        st.sampled_from(
            [
                *("mode: exclusive", "mode: timeslice", "mode: soft", "mode: mig"),
                *("modes: [soft, mig]", "modes: [mig, exclusive]", "modes: [soft]"),
            ]
        ),
        st.none()
        | INDICES.map(lambda each: f"{{index: {each}}}")
        | st.sampled_from(["{model: [t4]}", "{uuid: [GPU-0000000]}"]),
    ),
    max_size=3,
)
SHARED = st.lists(
    st.tuples(
        st.sampled_from(["gpu", "big", "mig-1g.5gb"]),
        st.integers(2, 70),
        st.sampled_from(["all", "1", "3"]) | INDICES,
        st.sampled_from(["", "part", "gpu"]),
    ),
    max_size=3,
)


@st.composite
def configurations(draw: st.DrawFn) -> str:
    rules = ", ".join(
        f"{{{mode}{f', match: {match}' if match else ''}}}" for mode, match in draw(RULES)
    )
    entries = ", ".join(
        f"{{name: {name}, replicas: {replicas}, devices: {devices}"
        f"{f', rename: {rename}' if rename else ''}}}"
        for name, replicas, devices, rename in draw(SHARED)
    )
    flags = f"renameByDefault: {draw(st.booleans())}"
    name = draw(st.sampled_from(["big", "gpu"]))
    return "\n".join(
        [
            f"sharing: {{timeSlicing: {{{flags}, resources: [{entries}]}}}}" if entries else "",
            f"resources: {{gpus: [{{pattern: '*A100*', name: {name}}}]}}",
            f"allotment: {{devices: [{rules}], honourResources: {draw(st.booleans())}}}",
        ]
    )


@given(DEVICES, configurations(), st.sets(st.integers(0, 8)), st.randoms())
def test_every_gpu_is_offered_once_and_quantities_add_up(
    devices: tuple[Device, ...], text: str, sick: set[int], random: Random
) -> None:
    config = load(text, source="f")
    unhealthy = {uuid(index): "sick" for index in sick}
    offer = plan(devices, unhealthy, config)
    usable = [as_whole(each) for each in devices if not each.mig or each.uuid in offer.mig_uses]

    slots = [slot for each in offer.resources for slot in each.slots]
    assert max(Counter(slot.id for slot in slots).values(), default=1) == 1
    assert all(0 < len(slot.id) <= 63 for slot in slots)
    assert len({each.name for each in offer.resources}) == len(offer.resources)
    assert sorted(offer.modes) == sorted(each.uuid for each in usable)

    owners: dict[str, set[str]] = {}
    for resource in offer.resources:
        for slot in resource.slots:
            if slot.device is not None:
                owners.setdefault(slot.device, set()).add(resource.name)
                assert slot.is_healthy == (slot.device not in unhealthy)
    loose = [each for each in usable if each.uuid not in owners]
    assert all(len(names) == 1 for names in owners.values())
    assert sorted(offer.shared) == sorted(each.uuid for each in loose)
    assert all(offer.modes[each.uuid] == offer.shared[each.uuid][0] for each in loose)
    assert {uuid for uuid, modes in offer.shared.items() if "mig" in modes} == set(offer.mig_uses)
    healthy = [each for each in loose if each.uuid not in unhealthy]
    expected = {
        GPU_MEMORY: sum(each.allottable_bytes for each in healthy),
        GPU_COMPUTE: 100 * len(healthy),
    }
    assert offer.quantities == (expected if loose else {})
    shares = offer.resource(GPU_SHARE)
    assert (len(shares.slots) if shares else 0) == 16 * len(loose)
    if shares:
        assert sum(slot.is_healthy for slot in shares.slots) == 16 * len(healthy)

    for resource in offer.resources:
        if resource.mode == "soft" and resource.name != GPU_SHARE:
            parts = Counter(slot.device for slot in resource.slots)
            assert set(parts.values()) == {resource.replicas}
            assert all(offer.modes[each or ""] == "soft" for each in parts)
        elif resource.name != GPU_SHARE:
            assert not any(offer.modes[slot.device or ""] == "soft" for slot in resource.slots)

    shuffled = list(devices)
    random.shuffle(shuffled)
    assert plan(shuffled, unhealthy, config) == offer

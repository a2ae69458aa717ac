# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's MIG strategies: what a node's MIG devices are offered as, and when they are not."""

from __future__ import annotations

from collections import Counter

import pytest
from gpus import gpu, mig_slice
from hypothesis import given
from hypothesis import strategies as st

from allotment.agent.config.checks import selected
from allotment.agent.config.overlay import load
from allotment.agent.mig.strategy import inherited
from allotment.agent.resources import GPU_SHARE, Offer, plan
from allotment.model.devices import Device
from allotment.model.errors import UsageError

GPU = "nvidia.com/gpu"
H100 = "NVIDIA H100 80GB HBM3"


def node(*cuts: list[str] | None) -> tuple[Device, ...]:
    """A GPU for each: cut into these profiles, or (None) whole."""
    found = []
    for index, cut in enumerate(cuts):
        whole = gpu(index, name=H100, mig=cut is not None, numa_node=index)
        found.append(whole)
        found += [mig_slice(whole, number, profile) for number, profile in enumerate(cut or ())]
    return tuple(found)


def offered(strategy: str, devices: tuple[Device, ...], more: str = "") -> Offer:
    return plan(devices, {}, load(f"flags: {{migStrategy: {strategy}}}\n{more}", source="f"))


def ids(offer: Offer) -> dict[str, list[str]]:
    return {each.name: [slot.id for slot in each.slots] for each in offer.resources}


MANY = node(["1g.10gb", "1g.10gb+me", "3g.40gb"], None)
ALIKE = node(["1g.10gb"] * 2, ["1g.10gb"])


def test_none_leaves_out_what_mig_has_cut() -> None:
    offer = offered("none", MANY)
    assert ids(offer) == {GPU: ["GPU-1"]}
    assert offer.modes == {"GPU-1": "exclusive"}
    (problem,) = offer.problems
    assert problem.startswith("GPU 0 (GPU-0) is in MIG mode and is not offered")


def test_a_time_slice_is_left_out_with_its_gpu_where_single_refuses_the_node() -> None:
    more = """
sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}
allotment: {devices: [{mode: timeslice, timeSlice: short}]}
"""
    assert offered("mixed", MANY, more).time_slices == {"GPU-1": "short"}
    offer = offered("single", MANY, more)
    assert any("migStrategy single: " in text for text in offer.problems)
    assert offer.time_slices == {}


def test_mixed_offers_each_profile_by_its_name() -> None:
    offer = offered("mixed", MANY)
    assert ids(offer) == {
        GPU: ["GPU-1"],
        "nvidia.com/mig-1g.10gb": ["MIG-00"],
        "nvidia.com/mig-1g.10gb.me": ["MIG-01"],
        "nvidia.com/mig-3g.40gb": ["MIG-02"],
    }
    assert {each.family for each in offer.resources} == set(ids(offer))
    assert offer.modes == dict.fromkeys(["GPU-1", "MIG-00", "MIG-01", "MIG-02"], "exclusive")
    assert [slot.numa_node for each in offer.resources[1:] for slot in each.slots] == [0, 0, 0]
    assert offer.problems == ()


@pytest.mark.parametrize(
    ("profile", "name"),
    [
        ("1g.24gb+gfx", "mig-1g.24gb.gfx"),
        ("1g.24gb+me.all", "mig-1g.24gb.me.all"),
        ("1g.24gb-me", "mig-1g.24gb-me"),
    ],
)
def test_names_are_nvidias(profile: str, name: str) -> None:
    assert list(ids(offered("mixed", node([profile])))) == [f"nvidia.com/{name}"]


def test_mixed_has_no_name_for_a_part_of_an_instance() -> None:
    offer = offered("mixed", node(["1c.3g.40gb", "3g.40gb"]))
    assert ids(offer) == {"nvidia.com/mig-3g.40gb": ["MIG-01"]}
    (problem,) = offer.problems
    assert "MIG device 0:0 (MIG-00)" in problem
    assert "MIG profile '1c.3g.40gb' does not match any resource patterns" in problem
    named = "resources: {mig: [{pattern: '1c.*', name: third}]}\nallotment: {honourResources: true}"
    offer = offered("mixed", node(["1c.3g.40gb", "3g.40gb"]), named)
    assert ids(offer)["nvidia.com/third"] == ["MIG-00"]


def test_mixed_tells_of_a_gpu_that_is_cut_into_nothing() -> None:
    offer = offered("mixed", node([], None))
    assert ids(offer) == {GPU: ["GPU-1"]}
    assert offer.problems == ("GPU 0 (GPU-0) is in MIG mode and has no MIG devices configured",)


def test_single_offers_mig_devices_as_gpus() -> None:
    offer = offered("single", ALIKE)
    assert ids(offer) == {GPU: ["MIG-00", "MIG-01", "MIG-10"]}
    assert offer.problems == ()
    assert ids(offered("single", node(None, None))) == {GPU: ["GPU-0", "GPU-1"]}


@pytest.mark.parametrize(
    ("cuts", "words"),
    [
        ((["1g.10gb"], None), "must be configured with the same migEnabled value"),
        ((["1g.10gb"], []), "device 1 has no MIG devices configured"),
        ((["1g.10gb"], ["2g.20gb"]), "more than one MIG device type present on node"),
        ((["1g.10gb", "1g.10gb+me"],), "more than one MIG device type present on node"),
    ],
    ids=str,
)
def test_single_gives_out_nothing_of_gpus_that_differ(
    cuts: tuple[list[str] | None, ...], words: str
) -> None:
    offer = offered("single", node(*cuts))
    assert ids(offer) == {GPU: []}
    assert offer.modes == {}
    (problem,) = offer.problems
    assert words in problem


def test_soft_gpus_go_on_beside_what_single_cannot_serve() -> None:
    offer = offered("single", node(["1g.10gb"], None), "allotment: {devices: [{mode: soft}]}")
    assert {name: len(found) for name, found in ids(offer).items()} == {GPU: 0, GPU_SHARE: 16}
    assert offer.modes == {"GPU-1": "soft"}


def test_rules_are_for_whole_gpus() -> None:
    offer = offered("mixed", MANY, "allotment: {devices: [{mode: soft}]}")
    assert offer.modes["MIG-00"] == "exclusive"
    assert offer.parted == ("GPU-1",)
    assert offer.problems == ()
    offer = offered("mixed", MANY, "allotment: {devices: [{match: {index: [0]}, mode: soft}]}")
    (problem,) = offer.problems
    assert "allotment.devices[0] has no effect: the GPUs that it matches are in MIG" in problem


def test_mig_devices_are_time_sliced_where_their_resource_is_named() -> None:
    sharing = "sharing: {timeSlicing: {resources: [{name: mig-1g.10gb, replicas: 2%s}]}}\n"
    offer = offered("mixed", MANY, sharing % "")
    assert ids(offer)["nvidia.com/mig-1g.10gb"] == ["MIG-00::0", "MIG-00::1"]
    assert offer.modes["MIG-00"] == "timeslice"
    honoured = "allotment: {honourResources: true}"
    some = offered("mixed", node(["1g.10gb"] * 3), sharing % ", devices: ['0:1']" + honoured)
    assert ids(some)["nvidia.com/mig-1g.10gb"] == ["MIG-00", "MIG-01::0", "MIG-01::1", "MIG-02"]


BY_MPS = "sharing: {mps: {resources: [{name: %s, replicas: 2}]}}\n"


def test_mig_devices_are_not_shared_by_mps() -> None:
    with pytest.raises(UsageError, match="mixed is not supported with MPS"):
        offered("mixed", MANY, BY_MPS % "nvidia.com/mig-1g.10gb")
    offer = offered("single", ALIKE, BY_MPS % GPU)
    assert (ids(offer), offer.modes) == ({GPU: []}, {}), "a whole one is not given for a part"
    told = [each for each in offer.problems if "MIG-00" in each]
    assert len(told) == 1
    assert "sharing using MPS is not supported for MIG devices" in told[0]


@pytest.mark.parametrize("mode", ["soft", "mps", "timeslice", "mig"])
def test_a_rule_that_names_a_mig_device_is_told_of(mode: str) -> None:
    rules = f"allotment: {{devices: [{{match: {{uuid: [MIG-00]}}, mode: {mode}}}]}}"
    offer = offered("mixed", MANY, rules)
    assert offer.modes["MIG-00"] == "exclusive"
    assert any(
        "devices[0] has no effect: it matches MIG devices, and each of them" in each
        for each in offer.problems
    )


@pytest.mark.parametrize(("strategy", "kind"), [("mixed", "timeSlicing"), ("none", "mps")])
def test_slices_that_are_cut_for_who_asks_are_not_shared(strategy: str, kind: str) -> None:
    sharing = BY_MPS.replace("mps", kind) % "nvidia.com/mig-1g.10gb"
    offer = offered(strategy, node(None, None), sharing + DYNAMIC)
    (problem,) = offer.problems
    assert "no GPU of this node is nvidia.com/mig-1g.10gb; a slice that is cut for a" in problem
    assert offer.shared == {"GPU-1": ("mig",)}


@pytest.mark.parametrize("reference", ["0:1", "0:01", "MIG-01", "mig-01", "MIG-GPU-0/8/0"])
def test_mig_devices_are_named_in_all_of_nvidias_ways(reference: str) -> None:
    slices = [each for each in MANY if each.slice_of]
    assert [each.uuid for each in selected(slices, [reference])] == ["MIG-01"]


@pytest.mark.parametrize("reference", ["0", "0:7", "MIG-GPU-0/8/1"])
def test_what_names_no_mig_device_is_refused(reference: str) -> None:
    with pytest.raises(UsageError, match="no matching device"):
        selected([each for each in MANY if each.slice_of], [reference])


def test_a_mig_device_is_as_healthy_as_its_gpu() -> None:
    offer = plan(MANY, {"GPU-0": "XID 79"}, load("flags: {migStrategy: mixed}", source="f"))
    healthy = {slot.id: slot.is_healthy for each in offer.resources for slot in each.slots}
    assert healthy == {"GPU-1": True, "MIG-00": False, "MIG-01": False, "MIG-02": False}
    assert inherited({"GPU-1": "lost"}, MANY) == {"GPU-1": "lost"}


# ---- whatever a node has -------------------------------------------------------------------------

CUTS = st.lists(
    st.none() | st.lists(st.sampled_from(["1g.10gb", "1g.10gb+me", "2g.20gb", "1c.2g.20gb"])),
    max_size=4,
)


@given(
    CUTS,
    st.sampled_from(["none", "single", "mixed"]),
    st.sampled_from(["", "allotment: {devices: [{mode: soft}]}"]),
)
def test_every_device_is_offered_once_or_told_of(
    cuts: list[list[str] | None], strategy: str, more: str
) -> None:
    devices = node(*cuts)
    offer = offered(strategy, devices, more)
    assert offer == offered(strategy, devices[::-1], more)
    times = Counter(slot.device for each in offer.resources for slot in each.slots if slot.device)
    assert set(times.values()) <= {1}
    assert set(times) | set(offer.parted) == set(offer.modes)
    split = {each.uuid for each in devices if each.mig}
    assert not split & set(offer.modes)
    for each in devices:
        if each.mig or each.uuid in offer.modes:
            continue
        is_refused = any("migStrategy single: " in text for text in offer.problems)
        where = each.slice_of
        assert is_refused or any(
            each.uuid in text or (where and where.gpu in text) for text in offer.problems
        )
    for resource in offer.resources:
        profiles = {
            each.slice_of.profile
            for each in devices
            if each.slice_of and each.uuid in {slot.device for slot in resource.slots}
        }
        assert len(profiles) <= 1


DYNAMIC = "allotment: {devices: [{match: {index: [1]}, mode: mig}]}"
"""The second GPU is cut for who asks."""


@pytest.mark.parametrize("strategy", ["none", "single", "mixed"])
def test_a_gpu_that_is_cut_for_who_asks_is_no_concern_of_the_strategy(strategy: str) -> None:
    modes: tuple[list[str] | None, ...] = ([], None)
    for now in modes:  # whatever mode it is in at the moment
        offer = offered(strategy, node(["1g.10gb"] * 2, now), DYNAMIC)
        static = {"none": {}, "single": {GPU: ["MIG-00", "MIG-01"]}}.get(
            strategy, {"nvidia.com/mig-1g.10gb": ["MIG-00", "MIG-01"]}
        )
        shares = offer.resource("allotment.dev/gpu")
        assert shares is not None
        assert {**static, shares.name: [each.id for each in shares.slots]} == ids(offer)
        assert offer.shared == {"GPU-1": ("mig",)}
        assert not any("GPU-1" in each for each in offer.problems)


def test_what_others_cut_from_such_a_gpu_is_offered_as_ever() -> None:
    offer = offered("mixed", node(["1g.10gb"] * 2, ["3g.40gb"]), DYNAMIC)
    assert ids(offer)["nvidia.com/mig-3g.40gb"] == ["MIG-10"]
    assert offer.shared == {"GPU-1": ("mig",)}

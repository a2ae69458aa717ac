# SPDX-License-Identifier: Apache-2.0
"""Constraints, where one machine's devices are chosen: models, UUIDs, NUMA nodes, links."""

from collections.abc import Sequence

import pytest
from gpus import A100, gpu
from hypothesis import given
from hypothesis import strategies as st

from allotment.model.devices import Device
from allotment.model.placements import DeviceState, Judgement, Placement
from allotment.model.quantities import parse_memory
from allotment.model.requests import Constraints, ModelRule, Request
from allotment.model.structs import replace
from allotment.placement import choose, follow
from allotment.placement.constraints import matches_model
from allotment.placement.explain import explain

GI = 1 << 30


def device(index: int, *, name: str = A100, numa: int | None = None) -> Device:
    return gpu(index, name=name, numa_node=numa)


def chosen(
    devices: Sequence[Device],
    constraints: Constraints,
    *,
    count: int = 1,
    links: dict[tuple[str, str], int] | None = None,
) -> list[int] | str:
    request = Request(parse_memory("10Gi"), count=count, constraints=constraints)
    decision = choose([DeviceState(each) for each in devices], request, links=links or {})
    if isinstance(decision, Judgement):
        return explain(decision)
    return [each.device.index for each in decision.devices]


@pytest.mark.parametrize(
    ("name", "rule", "matches"),
    [
        ("NVIDIA A100-SXM4-80GB", ModelRule("a100"), True),
        ("NVIDIA A100-SXM4-80GB", ModelRule("A100_SXM4"), True),
        ("NVIDIA A100-SXM4-80GB", ModelRule("nvidia a100"), True),
        ("NVIDIA A100-SXM4-80GB", ModelRule("A10"), True),
        ("NVIDIA A10", ModelRule("A100"), False),
        ("Tesla T4", ModelRule("Tesla-T4", is_exact=True), True),
        ("Tesla T4", ModelRule("tesla_t4", is_exact=True), True),
        ("Tesla T4", ModelRule("T4", is_exact=True), False),
        ("Tesla T4", ModelRule(" T4 "), True),
    ],
)
def test_models(name: str, rule: ModelRule, *, matches: bool) -> None:
    assert matches_model(name, rule) is matches


def test_only_models_that_were_asked_for() -> None:
    mixed = [device(0), device(1, name="Tesla T4"), device(2, name="Tesla V100")]
    rules = (ModelRule("t4"), ModelRule("a100"))
    assert chosen(mixed, Constraints(models=rules), count=2) == [0, 1]
    assert chosen(mixed, Constraints(not_models=rules)) == [2]
    text = chosen(mixed, Constraints(models=rules, not_models=(ModelRule("tesla"),)), count=2)
    assert isinstance(text, str)
    assert text.splitlines()[1:] == [
        "  GPU-0 (NVIDIA A100-SXM4-80GB): fits, need 10Gi, have 80Gi",
        "  GPU-1 (Tesla T4): need t4 or a100 and no tesla, have Tesla T4",
        "  GPU-2 (Tesla V100): need t4 or a100 and no tesla, have Tesla V100",
    ]


def test_only_gpus_that_were_asked_for_and_whole_uuids() -> None:
    devices = [device(1), device(10), device(11)]
    assert chosen(devices, Constraints(uuids=("GPU-10", "GPU-11"))) == [10]
    assert chosen(devices, Constraints(not_uuids=("GPU-1", "GPU-10"))) == [11]
    text = chosen(devices, Constraints(uuids=("GPU-1",)), count=2)
    assert isinstance(text, str)
    assert "GPU-10 (NVIDIA A100-SXM4-80GB): not one of the requested GPUs" in text


def test_devices_of_one_numa_node() -> None:
    devices = [device(index, numa=numa) for index, numa in enumerate((0, 1, 0, 1, 1))]
    assert chosen(devices, Constraints(same_numa=True), count=2) == [0, 2]
    assert chosen(devices, Constraints(same_numa=True), count=3) == [1, 3, 4]
    text = chosen(devices, Constraints(same_numa=True), count=4)
    assert isinstance(text, str)
    assert text.startswith(
        "no room for 4 GPUs with 10Gi each on one NUMA node: 5 of 5 GPUs fit, but not on one"
        " NUMA node"
    )


def test_where_nobody_knows_of_numa_there_is_one_node() -> None:
    assert chosen([device(0), device(1)], Constraints(same_numa=True), count=2) == [0, 1]
    mixed = [device(0), device(1, numa=0)]
    assert isinstance(chosen(mixed, Constraints(same_numa=True), count=2), str)


def test_linked_devices() -> None:
    devices = [device(index) for index in range(4)]
    links = {("GPU-0", "GPU-1"): 60, ("GPU-1", "GPU-3"): 100, ("GPU-2", "GPU-3"): 1800}
    wanted = Constraints(needs_nvlink=True)
    assert chosen(devices, wanted, count=2, links=links) == [1, 3]
    text = chosen(devices, wanted, count=3, links=links)
    assert isinstance(text, str)
    assert "but not joined by NVLink" in text
    assert chosen(devices, wanted, count=1) == [0]


@given(st.integers(1, 5), st.sets(st.sampled_from([(0, 1), (0, 2), (1, 2), (1, 3), (2, 3)])))
def test_what_is_linked_is_found_iff_it_is_there(count: int, pairs: set[tuple[int, int]]) -> None:
    devices = [device(index) for index in range(4)]
    links = {(f"GPU-{one}", f"GPU-{other}"): 100 for one, other in pairs}
    answer = chosen(devices, Constraints(needs_nvlink=True), count=count, links=links)
    triangles = any({(a, b), (a, c), (b, c)} <= pairs for a, b, c in ((0, 1, 2), (1, 2, 3)))
    most = 3 if triangles else 2 if pairs else 1
    assert isinstance(answer, list) == (count <= most)
    if isinstance(answer, list):
        assert all((one, other) in pairs for one in answer for other in answer if one < other)


def test_who_wants_to_be_alone_is_told_who_is_there() -> None:
    state = DeviceState(device(0), 10 * GI, shares=1, mode="soft", sharers=("lab/one/train",))
    request = Request(parse_memory("10Gi"), constraints=Constraints(is_alone=True))
    decision = choose([state], request)
    assert isinstance(decision, Judgement)
    assert "need it alone, have 1 share on it (lab/one/train)" in explain(decision)
    assert isinstance(choose([DeviceState(device(0))], request), Placement)


def test_a_choice_of_somebody_else_is_followed_whoever_has_come_since() -> None:
    """Constraints were kept when it was chosen; not all that they are about is known here."""
    state = DeviceState(device(0), 10 * GI, shares=1, mode="soft")
    constraints = Constraints(is_alone=True, affinity="x", models=(ModelRule("t4"),))
    request = Request(parse_memory("10Gi"), constraints=constraints)
    assert isinstance(follow([state], request, ["GPU-0"]), Placement)
    large = replace(request, memory=parse_memory("71Gi"))
    assert isinstance(follow([state], large, ["GPU-0"]), Judgement)

# SPDX-License-Identifier: Apache-2.0
"""Placement: never overcommits, finds a place iff there is one, decides the same twice."""

from collections.abc import Sequence

import pytest
from gpus import A100, gpu
from hypothesis import given
from hypothesis import strategies as st

from allotment.model import modes
from allotment.model.compute import WHOLE, Compute, parse_compute
from allotment.model.devices import MPS_CLIENTS, Device
from allotment.model.modes import EXCLUSIVE, MPS, SOFT, TIMESLICE, Traits
from allotment.model.placements import MAX_SHARES, DeviceState, Judgement, Placement
from allotment.model.quantities import MemoryAmount, parse_memory
from allotment.model.requests import Request
from allotment.model.structs import replace
from allotment.placement import choose, is_selected, unknown_selectors
from allotment.placement.explain import explain
from allotment.placement.judge import open_modes

GI = 1 << 30


def device(index: int, *, memory: int = 80 * GI, name: str = A100) -> Device:
    return gpu(
        index,
        uuid=f"GPU-{index:08x}-0000-4000-8000-000000000000",
        name=name,
        memory_bytes=memory,
        pci_bus_id=f"0000:{index:02x}:00.0",
    )


def states(*allotted_gi: int) -> list[DeviceState]:
    return [DeviceState(device(index), each * GI) for index, each in enumerate(allotted_gi)]


def placed(decision: Placement | Judgement) -> list[int]:
    assert isinstance(decision, Placement)
    return [each.device.index for each in decision.devices]


def rejected(decision: Placement | Judgement) -> Judgement:
    assert isinstance(decision, Judgement)
    return decision


def request(memory: str, count: int = 1, *selectors: str, compute: str = "") -> Request:
    promised = parse_compute(compute) if compute else Compute()
    return Request(parse_memory(memory), count=count, selectors=selectors, compute=promised)


def bytes_request(need: int, count: int) -> Request:
    """Ask for so few bytes that a program could not: the arithmetic is what is looked at."""
    return Request(MemoryAmount(f"{need}", size_bytes=need), count=count)


def test_the_tightest_fit_is_taken() -> None:
    assert placed(choose(states(0, 60, 70, 40), request("20Gi"))) == [1]


def test_ties_go_to_the_lower_index() -> None:
    assert placed(choose(states(0, 0, 0), request("1Gi"))) == [0]


def test_several_devices_are_distinct_and_in_index_order() -> None:
    assert placed(choose(states(0, 60, 10, 70), request("10Gi", 3))) == [1, 2, 3]


def of_models(*rooms_gi: tuple[str, int]) -> list[DeviceState]:
    return [
        DeviceState(device(index, name=name, memory=room * GI))
        for index, (name, room) in enumerate(rooms_gi)
    ]


T4 = "Tesla T4"


@pytest.mark.parametrize(
    ("machine", "chosen"),
    [
        ([(A100, 80), (A100, 80), (T4, 16)], [0, 1]),
        ([(T4, 16), (A100, 80), (A100, 80)], [1, 2]),
        ([(A100, 80), (A100, 80), (T4, 16), (T4, 16)], [2, 3]),
        ([(A100, 80), (A100, 11), (T4, 16), (T4, 16)], [2, 3]),
        ([(A100, 80), (T4, 16)], [0, 1]),
        ([(A100, 80), (A100, 9), (T4, 16)], [0, 2]),
    ],
    ids=["t4-last", "t4-first", "tightest-pair", "tightest-sum", "only-mixed", "one-is-full"],
)
def test_several_devices_are_alike_if_they_can_be(
    machine: list[tuple[str, int]], chosen: list[int]
) -> None:
    assert placed(choose(of_models(*machine), request("10Gi", 2))) == chosen


def test_one_device_is_the_tightest_fit_of_any_model() -> None:
    assert placed(choose(of_models((A100, 80), (A100, 80), (T4, 16)), request("10Gi"))) == [2]


def test_alike_devices_do_not_cost_host_memory() -> None:
    machine = [
        replace(state, host_budget_bytes=90 * GI)
        for state in of_models((A100, 80), (T4, 16), (T4, 16))
    ]
    machine[2] = replace(machine[2], device=device(2, name=T4, memory=40 * GI))
    assert placed(choose(machine, oversubscribed("30Gi", 2))) == [0, 2]


def test_a_full_gpu_takes_no_more_and_the_last_byte_can_be_had() -> None:
    assert placed(choose(states(79), request("1Gi"))) == [0]
    rejected(choose([DeviceState(device(0), 79 * GI + 1)], request("1Gi")))


def test_a_device_with_a_problem_takes_nothing_and_says_why() -> None:
    broken = DeviceState(device(0), problem="the GPU is lost")
    assert placed(choose([broken, DeviceState(device(1))], request("1Gi"))) == [1]
    text = explain(rejected(choose([broken], request("1Gi"))))
    assert text.endswith("(NVIDIA A100-SXM4-80GB): the GPU is lost")


def test_a_part_is_of_what_programs_can_have() -> None:
    whole = device(0)
    small = DeviceState(replace(whole, reserved_bytes=GI))
    decision = choose([small], request("100%"))
    assert isinstance(decision, Placement)
    assert decision.devices[0].memory_bytes == 79 * GI


def test_a_rejection_has_need_and_have_per_gpu() -> None:
    text = explain(rejected(choose(states(70, 78), request("20Gi", 2))))
    model = "NVIDIA A100-SXM4-80GB"
    first, second = (device(index).uuid for index in range(2))
    assert text.splitlines() == [
        "no room for 2 GPUs with 20Gi each: 0 of 2 GPUs fit",
        f"  {first} ({model}): need 20Gi, have 10Gi (70Gi of 80Gi allotted)",
        f"  {second} ({model}): need 20Gi, have 2Gi (78Gi of 80Gi allotted)",
    ]


def test_a_part_is_shown_with_what_it_comes_to() -> None:
    for part, said in (("25%", "a GPU with 25 % of its memory (20Gi)"), ("100%", "a GPU with all")):
        text = explain(rejected(choose(states(70, 78), request(part))))
        assert text.startswith(f"no room for {said}")


def test_numbers_that_round_to_the_same_are_shown_in_bytes() -> None:
    text = explain(rejected(choose([DeviceState(device(0), 1)], request("80Gi"))))
    assert f"need {80 * GI}B, have {80 * GI - 1}B" in text


def test_guarantees_are_given_out_once() -> None:
    full = DeviceState(device(0), guaranteed=7000)
    assert placed(choose([full, DeviceState(device(1))], request("1Gi", compute="50"))) == [1]
    assert placed(choose([full], request("1Gi", compute="30:100"))) == [0]
    assert placed(choose([full], request("1Gi", compute="0:100"))) == [0]
    text = explain(rejected(choose([full], request("1Gi", compute="50:80"))))
    model = "NVIDIA A100-SXM4-80GB"
    assert text.splitlines() == [
        "no room for a GPU with 1Gi and 50 % of compute: 0 of 1 GPU fits",
        f"  {device(0).uuid} ({model}): need 50 % of compute, have 30 % (70 % guaranteed)",
    ]


def test_a_device_without_time_left_is_the_last_choice_of_a_share_without_compute() -> None:
    tight = DeviceState(device(0), 60 * GI, guaranteed=9600)
    assert placed(choose([tight, DeviceState(device(1))], request("1Gi"))) == [1]
    assert placed(choose([tight], request("1Gi"))) == [0]
    just = replace(tight, guaranteed=9500)
    assert placed(choose([just, DeviceState(device(1))], request("1Gi"))) == [0]
    for asked in ("0:100", "4"):
        wanted = request("1Gi", compute=asked)
        assert placed(choose([tight, DeviceState(device(1))], wanted)) == [0]
    assert placed(choose([tight, DeviceState(device(1))], replace(request("1Gi"), mode=MPS))) == [0]


def test_a_device_has_so_many_shares_and_no_more() -> None:
    crowded = DeviceState(device(0), shares=MAX_SHARES)
    assert placed(choose([crowded, DeviceState(device(1))], request("1Gi"))) == [1]
    text = explain(rejected(choose([crowded], request("1Gi"))))
    assert f"the device has the most shares it can take: {MAX_SHARES}" in text


def test_a_control_daemon_has_so_many_clients_and_no_more() -> None:
    part = replace(request("1Gi"), mode=MPS)
    nearly = DeviceState(device(0), shares=MPS_CLIENTS - 1, mode=MPS)
    assert placed(choose([nearly], part)) == [0]
    crowded = replace(nearly, shares=MPS_CLIENTS)
    assert placed(choose([crowded, DeviceState(device(1))], part)) == [1]
    text = explain(rejected(choose([crowded], part)))
    assert f"the device has the most shares it can take: {MPS_CLIENTS}" in text
    modes = frozenset({EXCLUSIVE, MPS, SOFT, TIMESLICE})
    assert open_modes(replace(nearly, modes=modes)) == {MPS}
    assert open_modes(replace(crowded, modes=modes)) == frozenset()
    newer = replace(crowded, device=replace(device(0), mps_clients=MPS_CLIENTS + 1))
    assert placed(choose([newer], part)) == [0]


def oversubscribed(memory: str, count: int = 1) -> Request:
    return Request(parse_memory(memory), count=count, may_oversubscribe=True)


def test_host_memory_stands_for_what_a_device_does_not_hold() -> None:
    state = DeviceState(device(0), 70 * GI, oversubscribed_bytes=70 * GI, host_budget_bytes=20 * GI)
    assert placed(choose([state], oversubscribed("30Gi"))) == [0]
    text = explain(rejected(choose([state], oversubscribed("31Gi"))))
    assert "need 31Gi, have 30Gi (70Gi of 80Gi allotted, 20Gi of host memory left)" in text


def test_the_fixed_limits_fit_in_the_device_whatever_the_host_has() -> None:
    state = DeviceState(device(0), 70 * GI, host_budget_bytes=900 * GI)
    assert placed(choose([state], oversubscribed("90Gi"))) == [0]
    text = explain(rejected(choose([state], request("11Gi"))))
    assert "need 11Gi, have 10Gi" in text


def test_devices_of_one_request_share_the_hosts_budget() -> None:
    both = [DeviceState(device(index), host_budget_bytes=10 * GI) for index in range(2)]
    assert placed(choose(both, oversubscribed("85Gi", 2))) == [0, 1]
    text = explain(rejected(choose(both, oversubscribed("86Gi", 2))))
    assert "too little host memory left, need 86Gi, have 84Gi" in text
    assert "1 of 2 GPUs fit" in text


def test_a_device_that_needs_no_host_memory_goes_first() -> None:
    tight = DeviceState(device(0), 70 * GI, host_budget_bytes=80 * GI)
    assert placed(choose([tight, DeviceState(device(1), 0)], oversubscribed("20Gi"))) == [1]


def test_what_was_not_selected_says_so() -> None:
    mixed = [DeviceState(device(0)), DeviceState(device(1, name="Tesla T4", memory=16 * GI))]
    text = explain(rejected(choose(mixed, request("20Gi", 1, "t4"))))
    assert "not selected" in text
    assert "need 20Gi, have 16Gi" in text


@pytest.mark.parametrize(
    ("name", "selector", "matches"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100", True),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB", True),
        ("NVIDIA A100-SXM4-80GB", "nvidia a100", True),
        ("NVIDIA A100-SXM4-80GB", "a100-40gb", False),
        ("NVIDIA A100-SXM4-80GB", "a10", False),
        ("NVIDIA A10", "a10", True),
        ("NVIDIA GeForce RTX 4090", "rtx4090", True),
        ("NVIDIA GeForce RTX 4090", "rtx-4090", True),
        ("Tesla T4", "t4", True),
        ("NVIDIA H100 80GB HBM3", "h100-80gb", True),
        ("NVIDIA H200", "h100", False),
        ("NVIDIA H200", "", False),
        ("NVIDIA H200", "gpu-0000", True),
        ("NVIDIA H200", "GPU-00000000-0000", True),
        ("NVIDIA H200", "GPU-", False),
        ("NVIDIA H200", "GPU-1", False),
        ("NVIDIA H200", "0", False),
    ],
)
def test_selectors(name: str, selector: str, *, matches: bool) -> None:
    assert is_selected(device(0, name=name), request("1Gi", 1, selector)) is matches


def test_selectors_that_name_nothing_are_found() -> None:
    wanted = request("1Gi", 1, "a100", "GPU-ffff", "h100")
    assert unknown_selectors([device(0)], wanted) == ["GPU-ffff", "h100"]


machines = st.lists(
    st.tuples(st.integers(1, 100), st.integers(0, 120)), min_size=0, max_size=8
).map(
    lambda pairs: [
        DeviceState(device(index, memory=total), allotted)
        for index, (total, allotted) in enumerate(pairs)
    ]
)


@given(machines, st.integers(1, 110), st.integers(1, 9))
def test_a_placement_exists_iff_enough_devices_have_room(
    machine: Sequence[DeviceState], need: int, count: int
) -> None:
    wanted = bytes_request(need, count)
    decision = choose(machine, wanted)
    able = [one for one in machine if one.allotted_bytes + need <= one.device.memory_bytes]
    assert isinstance(decision, Placement) == (len(able) >= count)
    if isinstance(decision, Placement):
        uuids = [each.device.uuid for each in decision.devices]
        assert len(set(uuids)) == count
        before = {one.device.uuid: one for one in machine}
        for each in decision.devices:
            state = before[each.device.uuid]
            assert state.allotted_bytes + each.memory_bytes <= state.device.memory_bytes
    else:
        assert len(decision.verdicts) == len(machine)
        assert decision.fitting == len(able)
        assert explain(decision)


@given(machines, st.integers(1, 110), st.integers(1, 4), st.randoms())
def test_the_decision_does_not_depend_on_the_order(
    machine: list[DeviceState], need: int, count: int, random: object
) -> None:
    wanted = bytes_request(need, count)
    shuffled = list(machine)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = choose(machine, wanted), choose(shuffled, wanted)
    if isinstance(one, Placement):
        assert one == other
    else:
        assert isinstance(other, Judgement)


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 3)), max_size=12),
    st.lists(st.integers(10, 100), min_size=1, max_size=4),
)
def test_no_sequence_of_placements_overcommits(
    asks: list[tuple[int, int]], totals: list[int]
) -> None:
    devices = [device(index, memory=total) for index, total in enumerate(totals)]
    booked = {each.uuid: 0 for each in devices}
    for need, count in asks:
        decision = choose(
            [DeviceState(each, booked[each.uuid]) for each in devices], bytes_request(need, count)
        )
        if isinstance(decision, Placement):
            for part in decision.devices:
                booked[part.device.uuid] += part.memory_bytes
    for each in devices:
        assert booked[each.uuid] <= each.memory_bytes


@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.integers(1, 3), st.integers(0, 6000), st.booleans()),
        max_size=12,
    ),
    st.lists(st.integers(10, 100), min_size=1, max_size=4),
    st.integers(0, 100),
)
def test_no_sequence_promises_more_than_there_is(
    asks: list[tuple[int, int, int, bool]], totals: list[int], budget: int
) -> None:
    """Fixed limits fit each device; all overflows together fit the host; guarantees fit 100 %."""
    devices = [device(index, memory=total) for index, total in enumerate(totals)]
    state = {each.uuid: DeviceState(each, host_budget_bytes=budget) for each in devices}
    for need, count, guarantee, may_oversubscribe in asks:
        wanted = replace(
            bytes_request(need, count),
            compute=Compute(guarantee),
            may_oversubscribe=may_oversubscribe,
        )
        decision = choose(state.values(), wanted)
        if isinstance(decision, Judgement):
            assert explain(decision)
            continue
        for part in decision.devices:
            before = state[part.device.uuid]
            more = part.memory_bytes if may_oversubscribe else 0
            state[part.device.uuid] = replace(
                before,
                allotted_bytes=before.allotted_bytes + part.memory_bytes,
                oversubscribed_bytes=before.oversubscribed_bytes + more,
                guaranteed=before.guaranteed + guarantee,
                shares=before.shares + 1,
            )
        promised = sum(
            max(0, one.allotted_bytes - one.device.memory_bytes) for one in state.values()
        )
        assert promised <= budget
        left = budget - promised
        state = {uuid: replace(one, host_budget_bytes=left) for uuid, one in state.items()}
    for one in state.values():
        assert one.allotted_bytes - one.oversubscribed_bytes <= one.device.memory_bytes
        assert one.guaranteed <= WHOLE


@pytest.mark.parametrize(
    ("traits", "most"),
    [
        (Traits(takes_turns=True), MAX_SHARES),
        (Traits(needs_daemon=True), MPS_CLIENTS),
        (Traits(is_exclusive=True), 1),
        (Traits(is_time_sliced=True), None),
    ],
    ids=["in turns", "by a daemon", "alone", "without a limit"],
)
def test_the_traits_of_a_new_mode_say_how_many_shares_fit(
    traits: Traits, most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(modes.TRAITS, "new", traits)
    new = frozenset({"new"})
    for shares in {1, MPS_CLIENTS - 1, MPS_CLIENTS, MAX_SHARES - 1, MAX_SHARES}:
        state = DeviceState(device(0), shares=shares, mode="new", modes=new)
        assert open_modes(state) == (new if most is None or shares < most else frozenset())

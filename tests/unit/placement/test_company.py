# SPDX-License-Identifier: Apache-2.0
"""Who can be on a device with whom, and choices that somebody else has made."""

from collections.abc import Sequence

import pytest
from gpus import gpu
from hypothesis import given
from hypothesis import strategies as st

from allotment.model.compute import WHOLE, Compute
from allotment.model.modes import EXCLUSIVE, SOFT, TIMESLICE
from allotment.model.placements import DeviceState, Judgement, Placement
from allotment.model.quantities import MemoryAmount
from allotment.model.requests import Request, replicas_of, whole_devices
from allotment.model.structs import replace
from allotment.placement import choose, follow
from allotment.placement.explain import explain

GI = 1 << 30
MODES = (SOFT, EXCLUSIVE, TIMESLICE)


def state(
    index: int, mode: str = "", sharers: Sequence[str] = (), allotted: int = 0
) -> DeviceState:
    return DeviceState(
        gpu(index, name="T4", memory_bytes=16 * GI),
        allotted_bytes=allotted,
        host_budget_bytes=0,
        shares=len(sharers),
        mode=mode if sharers else "",
        sharers=tuple(sharers),
    )


def request(mode: str) -> Request:
    return (
        Request(MemoryAmount("1Gi", size_bytes=GI)) if mode == SOFT else whole_devices(1, mode=mode)
    )


@pytest.mark.parametrize("there", MODES)
@pytest.mark.parametrize("wanted", MODES)
def test_a_device_has_shares_of_one_mode_and_one_exclusive_share(there: str, wanted: str) -> None:
    decision = choose([state(0, there, ["lab/one/train"])], request(wanted))
    fits = there == wanted != EXCLUSIVE
    assert isinstance(decision, Placement) == fits
    if isinstance(decision, Judgement):
        text = explain(decision)
        assert "lab/one/train" in text
        assert "need " in text
        assert "have " in text


@pytest.mark.parametrize("wanted", MODES)
def test_an_empty_device_takes_any(wanted: str) -> None:
    assert isinstance(choose([state(0)], request(wanted)), Placement)


def test_who_is_alone_on_a_device_has_all_of_it() -> None:
    for wanted in MODES:
        decision = choose([state(0)], replace(request(SOFT), mode=wanted))
        assert isinstance(decision, Placement)
        has_all = decision.devices[0].memory_bytes == state(0).device.allottable_bytes
        assert has_all == (wanted == EXCLUSIVE)


def test_a_crowd_is_counted() -> None:
    crowd = [f"lab/{number}/train" for number in range(9)]
    decision = choose([state(0, SOFT, crowd)], whole_devices(1, mode=EXCLUSIVE))
    assert isinstance(decision, Judgement)
    first, second = explain(decision).splitlines()
    assert first == "no room for a whole GPU: 0 of 1 GPU fits"
    assert second == (
        "  GPU-0 (T4): need it alone, have 9 shares on it"
        " (lab/0/train, lab/1/train, lab/2/train and 6 more)"
    )


def test_a_refusal_tells_what_would_fit() -> None:
    decision = choose([state(0), state(1, TIMESLICE, ["a"])], whole_devices(2, mode=EXCLUSIVE))
    assert isinstance(decision, Judgement)
    assert explain(decision).splitlines() == [
        "no room for 2 whole GPUs: 1 of 2 GPUs fit",
        "  GPU-0 (T4): fits, need it alone, have no other share on it",
        "  GPU-1 (T4): need it alone, have 1 share on it (a)",
    ]


def test_time_slices_have_no_end_of_seats() -> None:
    crowd = [str(number) for number in range(200)]
    assert isinstance(
        choose([state(0, TIMESLICE, crowd)], whole_devices(1, mode=TIMESLICE)), Placement
    )
    assert isinstance(choose([state(0, SOFT, crowd)], request(SOFT)), Judgement)


# ---- choices that are followed -------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 16), min_size=1, max_size=4),
    st.lists(st.integers(0, 3), min_size=1, max_size=8),
    st.integers(1, 6),
)
def test_what_was_chosen_is_what_is_given_or_nothing(
    allotted: list[int], chosen: list[int], gi: int
) -> None:
    chosen = [each for each in chosen if each < len(allotted)] or [0]
    states = [
        state(index, SOFT, ["other"] if each else [], each * GI)
        for index, each in enumerate(allotted)
    ]
    asked = Request(MemoryAmount(f"{gi}Gi", size_bytes=gi * GI))
    decision = follow(states, asked, [f"GPU-{each}" for each in chosen])
    fits = all(allotted[each] + gi * chosen.count(each) <= 16 for each in chosen)
    assert isinstance(decision, Placement) == fits
    if isinstance(decision, Placement):
        assert [each.device.index for each in decision.devices] == sorted(set(chosen))
        for each in decision.devices:
            assert each.memory_bytes == gi * GI * chosen.count(each.device.index)


@given(st.integers(1, 64), st.data())
def test_replicas_never_add_up_to_more_than_the_device(number: int, data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, number))
    asked = replicas_of(number).times(parts)
    whole = 16 * GI
    assert (
        asked.memory.of(whole) + replicas_of(number).times(number - parts or 1).memory.of(whole)
        <= whole
        or parts == number
    )
    assert asked.compute.guarantee <= WHOLE * parts // number
    assert asked.compute.ceiling == WHOLE


def test_amounts_are_multiplied_and_ceilings_end_at_the_device() -> None:
    asked = Request(
        MemoryAmount("2Gi", size_bytes=2 * GI), compute=Compute(3000, 4000, is_governed=True)
    )
    three = asked.times(3)
    assert (three.memory.size_bytes, str(three.memory)) == (6 * GI, "3 times 2Gi")
    assert (three.compute.guarantee, three.compute.ceiling) == (9000, 10_000)
    assert asked.times(1) is asked

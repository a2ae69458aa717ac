# SPDX-License-Identifier: Apache-2.0
"""What may be promised of devices beyond what they hold, and what never may."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from allotment.model.devices import Device
from allotment.model.placements import DeviceState
from allotment.placement.booking import (
    Promised,
    budget_left,
    host_part,
)
from allotment.placement.judge import memory_room

GIB = 1 << 30
SIZES = st.integers(0, 64)


def device_state(capacity: int, fixed: int, oversubscribed: int, left: int) -> DeviceState:
    device = Device("GPU-0", "T4", 0, capacity, 0, (0, 0), None, "", simulated=False, mig=False)
    return DeviceState(
        device,
        allotted_bytes=fixed + oversubscribed,
        oversubscribed_bytes=oversubscribed,
        host_budget_bytes=left,
    )


def room(capacity: int, fixed: int, oversubscribed: int, left: int) -> int:
    state = device_state(capacity, fixed, oversubscribed, left)
    return memory_room(state, may_oversubscribe=True)


def room_fixed(capacity: int, fixed: int, oversubscribed: int, left: int) -> int:
    state = device_state(capacity, fixed, oversubscribed, left)
    return memory_room(state, may_oversubscribe=False)


def test_within_the_device_nothing_is_taken_of_the_budget() -> None:
    assert host_part(80 * GIB, 30 * GIB, 50 * GIB) == 0
    assert room(80 * GIB, 30 * GIB, 20 * GIB, 0) == 30 * GIB


def test_beyond_the_device_the_budget_is_added() -> None:
    assert room(80 * GIB, 0, 76 * GIB, 100 * GIB) == 104 * GIB
    assert host_part(80 * GIB, 0, 152 * GIB) == 72 * GIB


def test_a_device_that_is_promised_twice_over_has_only_the_budget_left() -> None:
    # What stands for the excess already was subtracted from the budget by whoever knows all
    # devices.
    assert room(80 * GIB, 0, 160 * GIB, 5 * GIB) == 5 * GIB
    assert room(80 * GIB, 0, 160 * GIB, 0) == 0


def test_a_budget_that_was_made_smaller_leaves_nothing_and_is_told() -> None:
    assert budget_left(10 * GIB, [Promised(80 * GIB, 0, 100 * GIB)]) == -10 * GIB
    assert room(80 * GIB, 0, 100 * GIB, -10 * GIB) == 0
    assert room_fixed(80 * GIB, 0, 60 * GIB, -10 * GIB) == 20 * GIB


def test_a_share_that_is_not_oversubscribed_pushes_others_out_but_fits_the_device() -> None:
    assert room_fixed(80 * GIB, 30 * GIB, 40 * GIB, 100 * GIB) == 50 * GIB
    assert room_fixed(80 * GIB, 30 * GIB, 40 * GIB, 5 * GIB) == 15 * GIB
    assert room_fixed(80 * GIB, 90 * GIB, 0, 100 * GIB) == 0  # of a device that became smaller


@given(
    capacities=st.lists(SIZES, min_size=1, max_size=3),
    budget=SIZES,
    requests=st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(1, 64))),
)
def test_whatever_is_placed_stays_within_devices_and_budget(
    capacities: list[int], budget: int, requests: list[tuple[int, bool, int]]
) -> None:
    devices = [Promised(capacity, 0, 0) for capacity in capacities]
    for number, may, size in requests:
        index = number % len(devices)
        device = devices[index]
        left = budget_left(budget, devices)
        if size > (room if may else room_fixed)(*device, left):
            continue
        devices[index] = (
            device._replace(oversubscribed=device.oversubscribed + size)
            if may
            else device._replace(fixed=device.fixed + size)
        )
        assert budget_left(budget, devices) >= 0
        assert all(each.fixed <= each.capacity for each in devices)
    if not any(may for _, may, _ in requests):
        # Without the option nothing is ever oversubscribed.
        assert all(each.fixed + each.oversubscribed <= each.capacity for each in devices)


@given(SIZES, SIZES, SIZES, SIZES)
def test_exactly_the_room_fits(capacity: int, fixed: int, oversubscribed: int, budget: int) -> None:
    device = Promised(capacity, min(fixed, capacity), oversubscribed)
    left = budget_left(budget, [device])
    most = room(*device, left)
    fits = device._replace(oversubscribed=device.oversubscribed + most)
    over = device._replace(oversubscribed=device.oversubscribed + most + 1)
    if left >= 0:
        assert budget_left(budget, [fits]) >= 0
    assert budget_left(budget, [over]) < 0

# SPDX-License-Identifier: Apache-2.0
"""A program that waits for its results beside launches that cannot be taken back.

Each gap would lend the device to a launch of any length. By the pure core, in simulated time.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from lease_simulator import MS, US, Device, Program, S, always
from lease_states import WHOLE, Kind, PlaceIs, terms

SPLITS = ((7500, 2500), (5000, 5000), (1000, 9000), (9900, 100))
LAUNCHES = (200 * US, 5 * MS, 50 * MS)
QUEUE_NS = 500 * US
"""What the shim queues beside a share that may be back at any moment."""
FIRST, LAST = S, 6 * S


def bursts(work_ns: int, gap_ns: int) -> Program:
    """Kernels of a millisecond, and a wait for the last of them."""
    while True:
        for _ in range(work_ns // MS):
            yield MS
        yield -gap_ns


def parts(split: tuple[int, int], program: Program, launch_ns: int) -> tuple[float, float, float]:
    """What the program and its neighbour get, and how long the device is idle, in points."""
    device = Device()
    waits = device.add(terms(split[0]), program)
    wants = device.add(
        terms(split[1]), always(launch_ns), queue_ns=QUEUE_NS if launch_ns < QUEUE_NS else 0
    )
    device.run(LAST)
    had, others = (each.part_of(FIRST, LAST) for each in (waits, wants))
    return had, others, 100 - had - others


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(
    ("work_ns", "gap_ns"), [(MS, 10 * US), (MS, 30 * US), (20 * MS, 100 * US), (20 * MS, 600 * US)]
)
def test_a_guarantee_holds_over_short_gaps(
    split: tuple[int, int], work_ns: int, gap_ns: int
) -> None:
    alone = 100 * work_ns / (work_ns + gap_ns)
    for launch_ns in LAUNCHES:
        had, others, idle = parts(split, bursts(work_ns, gap_ns), launch_ns)
        assert had >= min(split[0] / 100, alone) - 3, launch_ns
        assert others >= split[1] / 100 - 3, launch_ns
        assert idle <= 5, launch_ns


@pytest.mark.parametrize(
    ("work_ns", "gap_ns", "launch_ns"), [(20 * MS, MS, 10 * MS), (10 * MS, 500 * US, 5 * MS)]
)
def test_a_launch_that_costs_a_little_in_each_gap_waits_too(
    work_ns: int, gap_ns: int, launch_ns: int
) -> None:
    """In each gap it would leave two thirds."""
    had, others, idle = parts((7500, 2500), bursts(work_ns, gap_ns), launch_ns)
    assert had >= 71.5
    assert others >= 22
    assert idle <= 5


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(
    ("work_ns", "gap_ns"), [(MS, 80 * US), (MS, 100 * US), (MS, 200 * US), (20 * MS, 4 * MS)]
)
def test_what_gaps_take_is_shared_in_proportion(
    split: tuple[int, int], work_ns: int, gap_ns: int
) -> None:
    """Where no launch fits into the gaps, they are in the time of the share that leaves them."""
    alone = work_ns / (work_ns + gap_ns)
    owed, others_owed = (part / WHOLE for part in split)
    whole = owed + alone * others_owed
    for launch_ns in LAUNCHES:
        had, others, idle = parts(split, bursts(work_ns, gap_ns), launch_ns)
        assert had >= 100 * alone * owed / whole - 3, launch_ns
        assert others >= 100 * alone * others_owed / whole - 2, launch_ns
        assert idle <= 100 * (1 - alone) * owed / whole + 1.5, launch_ns


@pytest.mark.parametrize(
    ("launch_ns", "least"), [(5 * MS, (36, 29, 9, 42)), (50 * MS, (28, 19, 1, 37))]
)
def test_gaps_as_long_as_bursts_are_kept_as_far_as_the_allowance_goes(
    launch_ns: int, least: tuple[int, ...]
) -> None:
    """The neighbour's launch in each gap would leave 16.7 beside 5 ms, and 2.0 beside 50 ms."""
    for split, expected in zip(SPLITS, least, strict=True):
        had, _, idle = parts(split, bursts(MS, 660 * US), launch_ns)
        assert had >= expected, split
        assert idle <= max(split[0] / 400, 5) + 0.5, split


@pytest.mark.parametrize("split", SPLITS)
def test_nothing_is_kept_for_a_program_that_is_mostly_away(split: tuple[int, int]) -> None:
    for gap_ns, launch_ns in product((2 * MS, 5 * MS, 20 * MS), LAUNCHES):
        _, _, idle = parts(split, bursts(MS, gap_ns), launch_ns)
        assert idle <= 0.5, (gap_ns, launch_ns)


@pytest.mark.parametrize("split", SPLITS)
def test_launches_that_fit_into_gaps_run_there(split: tuple[int, int]) -> None:
    for work_ns, gap_ns in ((MS, MS), (20 * MS, 5 * MS), (20 * MS, 20 * MS)):
        alone = 100 * work_ns / (work_ns + gap_ns)
        had, others, idle = parts(split, bursts(work_ns, gap_ns), MS)
        assert had >= min(split[0] / 100, alone) - 3
        assert others >= split[1] / 100 - 3
        assert idle <= 0.5


def test_a_wait_is_repaid_and_a_gap_is_not() -> None:
    """What a share waited for while another's launch ran is repaid over its next gaps."""
    device = Device()
    waits = device.add(terms(7500), bursts(MS, 50 * US))
    device.add(terms(2500), always(50 * MS))
    device.run(2 * S)
    longest = max(
        device.core.state.seats[1].virtual_ns - device.core.state.seats[0].virtual_ns
        for _ in _steps(device, 2 * S, 3 * S)
    )
    # A launch of the neighbour is 200 ms of its virtual time.
    assert 150 * MS < longest <= 2 * 200 * MS
    assert waits.part_of(2 * S, 3 * S) >= 70


def _steps(device: Device, start: int, end: int) -> Iterator[int]:
    for until in range(start, end, 5 * MS):
        device.run(until)
        yield until


def test_a_share_that_may_be_back_at_any_moment_is_seen() -> None:
    device = Device()
    core = device.core
    for seat in range(2):
        core.take_seat(seat, terms(5000))
        core.decide(Kind.JOIN, S, place=seat, seat=seat)
    core.decide(Kind.WANT, S, place=0, launch_ns=MS)
    assert core.state.is_lent == 0
    core.decide(Kind.RELEASE, S + MS, place=0, used_ns=MS)
    core.decide(Kind.WANT, S + MS, place=1, launch_ns=MS)
    core.decide(Kind.CHARGE, S + 5 * MS, place=1, used_ns=4 * MS)
    assert core.state.is_lent == 1
    core.decide(Kind.CHARGE, S + 30 * MS, place=1, used_ns=25 * MS)
    assert core.state.is_lent == 0  # it is gone


def test_nothing_counts_as_kept_before_the_lease_was_given() -> None:
    """Another share may have given it since this one's last event."""
    core = Device().core
    for seat in range(2):
        core.take_seat(seat, terms(5000))
        core.decide(Kind.JOIN, S, place=seat, seat=seat)
    core.decide(Kind.WANT, S, place=0, launch_ns=50 * MS)
    core.decide(Kind.WANT, S, place=1, launch_ns=MS)
    core.state.places[0].state, core.state.places[1].state = PlaceIs.WAITING, PlaceIs.HOLDING
    core.state.holder, core.state.next = 1, 0
    core.state.granted_ns = S + 9 * MS
    before = core.state.seats[1].grace_ns
    core.decide(Kind.LOOK, S + 10 * MS)
    assert core.state.seats[1].grace_ns > before

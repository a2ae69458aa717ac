# SPDX-License-Identifier: Apache-2.0
"""What shares get of a device over time, by the pure core alone (tools/lease_simulator.py)."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lease_simulator import MS, US, Device, Program, Runner, S, always, jain
from lease_states import BEST_EFFORT, LATENCY, NORMAL, QUANTUM_NS, WHOLE, terms

WINDOW = 2 * S
POINTS = 2.0
"""How far from what was promised a share may be, in percent of the device."""


def kernels(seed: int, shortest: int, longest: int) -> Program:
    """Always hungry, with kernels of all lengths."""
    rng = random.Random(seed)  # noqa: S311 - repeatable programs
    while True:
        yield rng.randint(shortest, longest)


def naps(seed: int, longest_kernel: int, longest_nap: int) -> Program:
    """Hungry for a while, then away for a while."""
    rng = random.Random(seed)  # noqa: S311 - repeatable programs
    while True:
        for _ in range(rng.randint(1, 100)):
            yield rng.randint(50 * US, longest_kernel)
        yield -rng.randint(10 * US, longest_nap)


def waits_for_each(kernel_ns: int, gap_ns: int) -> Program:
    """A kernel, and a little thought about its result."""
    while True:
        yield kernel_ns
        yield -gap_ns


def after(delay_ns: int, program: Program) -> Program:
    """The same, later."""
    yield -delay_ns
    yield from program


def least(device: Device, runner: Runner, start: int, end: int, window: int = WINDOW) -> float:
    return min(runner.part_of(*ends) for ends in device.windows(start, end, window))


def most(device: Device, runner: Runner, start: int, end: int, window: int = WINDOW) -> float:
    return max(runner.part_of(*ends) for ends in device.windows(start, end, window))


def busy(device: Device, start: int, end: int) -> float:
    return sum(runner.part_of(start, end) for runner in device.runners)


# ---- what is promised ----


@dataclass(frozen=True, slots=True)
class Plan:
    """One share of a random device."""

    guarantee: int
    ceiling: int
    weight: int
    share_class: int
    is_hungry: bool
    longest_kernel: int
    longest_nap: int
    seed: int

    @property
    def terms(self) -> int:
        return terms(self.guarantee, self.ceiling, weight=self.weight, share_class=self.share_class)

    @property
    def program(self) -> Program:
        if self.is_hungry:
            return kernels(self.seed, self.longest_kernel // 20, self.longest_kernel)
        return naps(self.seed, self.longest_kernel, self.longest_nap)


@st.composite
def plans(draw: st.DrawFn, *, hungry: bool | None = None, most_shares: int = 5) -> list[Plan]:
    """Shares that fit together; at least one is always hungry."""
    left, found = WHOLE, []
    for index in range(draw(st.integers(1, most_shares))):
        guarantee = draw(st.sampled_from([0, 500, 1000, 2000, 3000, 5000, 7000]))
        guarantee = min(guarantee, left)
        left -= guarantee
        extra = draw(st.sampled_from([0, 1000, WHOLE, WHOLE, WHOLE]))
        found.append(
            Plan(
                guarantee=guarantee,
                ceiling=max(500, min(guarantee + extra, WHOLE)),
                weight=draw(st.sampled_from([50, 100, 100, 300])),
                share_class=draw(st.sampled_from([LATENCY, NORMAL, NORMAL, BEST_EFFORT])),
                is_hungry=index == 0 or (draw(st.booleans()) if hungry is None else hungry),
                longest_kernel=draw(st.sampled_from([200 * US, MS, 5 * MS, 20 * MS])),
                longest_nap=draw(st.sampled_from([100 * US, 5 * MS, 30 * MS, 300 * MS])),
                seed=draw(st.integers(0, 1000)),
            )
        )
    return found


@given(shares=plans())
def test_guarantees_and_ceilings_hold_in_every_window(shares: list[Plan]) -> None:
    device = Device()
    runners = [device.add(share.terms, share.program) for share in shares]
    device.run(4 * S)
    for share, runner in zip(shares, runners, strict=True):
        if share.is_hungry:
            assert least(device, runner, S, 4 * S) >= share.guarantee / 100 - POINTS
        assert most(device, runner, S, 4 * S) <= share.ceiling / 100 + POINTS


def fair_parts(shares: list[Plan]) -> list[float]:
    """What hungry shares are owed, in points: guarantees, then weights up to ceilings."""
    parts = [float(share.guarantee) for share in shares]
    for best_effort in (False, True):
        while True:
            rest = WHOLE - sum(parts)
            open_ones = [
                index
                for index, share in enumerate(shares)
                if (share.share_class == BEST_EFFORT) == best_effort
                and parts[index] < share.ceiling - 1e-6
            ]
            weights = sum(shares[index].weight for index in open_ones)
            if rest < 1e-6 or not open_ones:
                break
            for index in open_ones:
                room = shares[index].ceiling - parts[index]
                parts[index] += min(rest * shares[index].weight / weights, room)
    return [part / 100 for part in parts]


@given(shares=plans(hungry=True))
def test_what_is_left_is_divided_by_weight(shares: list[Plan]) -> None:
    device = Device()
    runners = [device.add(share.terms, share.program) for share in shares]
    device.run(5 * S)
    expected = fair_parts(shares)
    for runner, part in zip(runners, expected, strict=True):
        assert runner.part_of(S, 5 * S) == pytest.approx(part, abs=POINTS)
    assert busy(device, S, 5 * S) >= sum(expected) - 1


@given(shares=plans(), seed=st.integers(0, 1000))
def test_what_is_idle_is_lent(shares: list[Plan], seed: int) -> None:
    device = Device()
    for share in shares:
        device.add(share.terms, share.program)
    device.add(terms(share_class=BEST_EFFORT), kernels(seed, 50 * US, 2 * MS))
    device.run(2 * S)
    assert busy(device, 0, 2 * S) >= 99


@given(count=st.integers(2, 6), longest=st.sampled_from([200 * US, 2 * MS, 10 * MS]))
def test_equal_shares_are_equal(count: int, longest: int) -> None:
    device = Device()
    word = terms(WHOLE // count)
    runners = [device.add(word, kernels(i, longest // 10, longest)) for i in range(count)]
    device.run(6 * S)
    assert jain([runner.part_of(S, 6 * S) for runner in runners]) >= 0.995


# ---- who comes and goes ----


@pytest.mark.parametrize("kernel_ns", [100 * US, MS, 5 * MS])
def test_a_share_that_wakes_has_its_guarantee_at_once(kernel_ns: int) -> None:
    device = Device()
    sleeper = device.add(terms(7000), after(3 * S, always(kernel_ns)))
    borrower = device.add(terms(3000), always(kernel_ns))
    device.run(6 * S)
    assert borrower.part_of(S, 3 * S) >= 99
    assert sleeper.part_of(3 * S, 3 * S + 200 * MS) >= 70 - 2 * POINTS
    assert most(device, borrower, 3 * S + 200 * MS, 6 * S, 500 * MS) <= 30 + POINTS


def test_time_that_was_not_asked_for_is_not_saved_up() -> None:
    """A share that did little for long, without ever being away for long, is owed nothing."""

    def little_then_much() -> Program:
        for _ in range(400):
            yield MS
            yield -9 * MS
        yield from always(MS)

    device = Device()
    device.add(terms(7000), little_then_much())
    neighbour = device.add(terms(3000), always(200 * US))
    device.run(10 * S)
    assert least(device, neighbour, S, 10 * S, S) >= 30 - POINTS


def test_a_ceiling_that_is_raised_pays_nothing_back() -> None:
    device = Device()
    runner = device.add(terms(1000, 1000), always(3 * MS))
    neighbour = device.add(terms(5000), always(2 * MS))
    device.at(5 * S, lambda: setattr(device.core.contract.seats[0], "terms", terms(1000)))
    device.run(9 * S)
    assert runner.part_of(S, 5 * S) == pytest.approx(10, abs=POINTS)
    assert least(device, neighbour, S, 9 * S) >= 50 - POINTS
    assert runner.part_of(6 * S, 9 * S) == pytest.approx(30, abs=POINTS)


def test_terms_are_in_force_at_once() -> None:
    device = Device()
    runners = [device.add(terms(3000, 3000), always(MS)), device.add(terms(7000), always(MS))]
    device.at(2 * S, lambda: setattr(device.core.contract.seats[0], "terms", terms(3000)))
    device.at(2 * S, lambda: setattr(device.core.contract.seats[1], "terms", terms(1000, 1000)))
    device.run(4 * S)
    assert runners[0].part_of(S, 2 * S) == pytest.approx(30, abs=POINTS)
    assert runners[0].part_of(2 * S + 100 * MS, 4 * S) == pytest.approx(90, abs=POINTS)


def test_a_long_kernel_is_paid_back() -> None:
    def with_a_long_one() -> Program:
        for _ in range(1000):
            yield MS
        yield 500 * MS
        yield from always(MS)

    device = Device()
    debtor = device.add(terms(5000), with_a_long_one())
    other = device.add(terms(5000), always(MS))
    device.run(6 * S)
    assert debtor.part_of(0, 6 * S) == pytest.approx(50, abs=0.5)
    # All of it, before it is given anything again.
    assert most(device, other, 2 * S, 4 * S, 400 * MS) >= 99
    assert least(device, other, 4 * S, 6 * S, S) >= 50 - POINTS


def test_the_debt_of_a_ceiling_is_paid_back() -> None:
    def with_a_long_one() -> Program:
        yield 500 * MS
        yield from always(MS)

    device = Device()
    runner = device.add(terms(2000, 2000), with_a_long_one())
    device.run(6 * S)
    assert runner.time_in(0, 2450 * MS) <= 510 * MS
    assert runner.part_of(0, 6 * S) == pytest.approx(20, abs=0.6)


# ---- programs that wait for their results ----


@pytest.mark.parametrize(
    ("kernel_ns", "gap_ns"), [(MS, 50 * US), (500 * US, 20 * US), (5 * MS, 200 * US)]
)
def test_short_gaps_do_not_cost_a_guarantee(kernel_ns: int, gap_ns: int) -> None:
    """It gives the lease back at each gap, and has it again when it should."""
    device = Device()
    waiter = device.add(terms(7000), waits_for_each(kernel_ns, gap_ns))
    device.add(terms(3000), always(100 * US))
    device.run(4 * S)
    assert least(device, waiter, S, 4 * S) >= 70 - POINTS


def test_programs_that_wait_for_their_results_share_as_promised() -> None:
    device = Device()
    runners = [
        device.add(terms(part), waits_for_each(300 * US, 30 * US)) for part in (6000, 3000, 1000)
    ]
    device.run(4 * S)
    assert busy(device, S, 4 * S) >= 97  # some gaps of the one that is owed most are kept for it
    assert runners[0].part_of(S, 4 * S) >= 60 - POINTS
    assert runners[1].part_of(S, 4 * S) > 25
    assert runners[2].part_of(S, 4 * S) >= 10 - POINTS


# ---- classes ----


@pytest.mark.parametrize("neighbour_class", [NORMAL, BEST_EFFORT])
@pytest.mark.parametrize("kernel_ns", [100 * US, 2 * MS])
def test_a_latency_share_waits_for_one_kernel(neighbour_class: int, kernel_ns: int) -> None:
    device = Device()
    service = device.add(
        terms(1000, share_class=LATENCY), waits_for_each(MS, 50 * MS - MS + 300 * US)
    )
    job = device.add(terms(share_class=neighbour_class), always(kernel_ns))
    device.run(4 * S)
    assert max(service.waits) <= kernel_ns
    assert job.part_of(S, 4 * S) >= 97


def test_a_greedy_latency_share_gets_what_it_is_owed() -> None:
    device = Device()
    service = device.add(terms(2000, share_class=LATENCY), always(MS))
    job = device.add(terms(6000), always(MS))
    device.run(4 * S)
    assert service.part_of(S, 4 * S) == pytest.approx(30, abs=POINTS)
    assert least(device, job, S, 4 * S) >= 70 - POINTS


def test_a_latency_share_that_is_owed_nothing_waits() -> None:
    device = Device()
    service = device.add(terms(0, 500, share_class=LATENCY), always(200 * US))
    promised = [device.add(terms(part, part), always(200 * US)) for part in (3000, 7000)]
    device.run(4 * S)
    assert least(device, promised[0], S, 4 * S) >= 30 - POINTS
    assert least(device, promised[1], S, 4 * S) >= 70 - POINTS
    assert service.part_of(S, 4 * S) <= POINTS


def test_best_effort_has_what_others_leave() -> None:
    device = Device()
    device.add(terms(2000), naps(1, 2 * MS, 50 * MS))
    hungry = device.add(terms(1000, 3000), always(MS))
    efforts = [
        device.add(terms(weight=weight, share_class=BEST_EFFORT), always(MS))
        for weight in (100, 300)
    ]
    device.run(6 * S)
    assert busy(device, S, 6 * S) >= 99
    assert hungry.part_of(S, 6 * S) == pytest.approx(30, abs=POINTS)
    small, large = (effort.part_of(S, 6 * S) for effort in efforts)
    assert large / small == pytest.approx(3, rel=0.25)


def test_best_effort_waits_while_others_want_all() -> None:
    device = Device()
    device.add(terms(), always(MS))
    effort = device.add(terms(share_class=BEST_EFFORT), always(MS))
    device.run(3 * S)
    assert effort.time_in(S, 3 * S) == 0


# ---- leases ----


def test_nobody_waits_while_the_lease_is_long() -> None:
    device = Device()
    runner = device.add(terms(), always(MS))
    device.run(S)
    assert device.core.state.epoch == 1
    assert not device.core.must_yield(device.now)
    assert sum(runner.waits) == 0


def test_a_lease_among_equals_is_a_quantum() -> None:
    device = Device()
    for _ in range(2):
        device.add(terms(5000), always(100 * US))
    device.run(2 * S)
    assert device.core.state.epoch == pytest.approx(2 * S / QUANTUM_NS, rel=0.1)


def test_many_equals_have_their_turns_soon() -> None:
    device = Device()
    runners = [device.add(terms(1000), always(200 * US)) for _ in range(8)]
    device.run(2 * S)
    assert max(max(runner.waits) for runner in runners) <= 50 * MS
    assert busy(device, S, 2 * S) >= 99


@given(
    count=st.integers(4, 12),
    longest=st.sampled_from([100 * US, 200 * US, 500 * US]),
    seed=st.integers(0, 1000),
)
def test_equals_have_their_turns_in_order(count: int, longest: int, seed: int) -> None:
    """Leases never end to the nanosecond: nobody waits for two turns of the others for that."""
    device = Device()
    word = terms(WHOLE // count)
    runners = [
        device.add(word, kernels(seed + index, longest // 2, longest)) for index in range(count)
    ]
    device.run(S // 5)
    for runner in runners:  # until all were there, leases were longer
        runner.waits.clear()
    device.run(2 * S)
    turn = max(32 * MS // count, 3 * MS) + longest
    assert max(max(runner.waits) for runner in runners) <= count * turn


@pytest.mark.parametrize(("work", "nap"), [(500 * US, 50 * MS), (2 * MS, 30 * MS)])
def test_a_share_that_wakes_beside_many_is_next(work: int, nap: int) -> None:
    """Those that are level go by how long they wait: who has just come does not go after them."""
    device = Device()
    sleeper = device.add(terms(2000), waits_for_each(work, nap))
    runners = [device.add(terms(1600), kernels(index, 100 * US, 200 * US)) for index in range(5)]
    device.run(10 * S)
    assert sum(sleeper.waits) / len(sleeper.waits) <= 3 * MS
    assert max(sleeper.waits[1:]) <= 8 * MS  # one lease of another, and a kernel
    for runner in runners:
        assert max(runner.waits[1:]) <= 50 * MS


def test_two_change_no_more_often_than_their_parts_need() -> None:
    """Going by how long each waits costs changes of the lease, and brings two of them nothing."""
    device = Device()
    for part in (3000, 7000):
        device.add(terms(part), kernels(part, 150 * US, 300 * US))
    device.run(10 * S)
    assert device.core.state.epoch <= 65 * 10


def test_leases_grow_with_what_moving_costs() -> None:
    """An oversubscribed share moves its memory in for at most a twentieth of its time."""
    device = Device()
    for _ in range(2):
        device.add(terms(5000), always(MS))
    core = device.core
    holder = core.state.holder
    core.decide(3, device.now, place=holder, move_ns=50 * MS)
    assert core.state.expires_ns - core.state.granted_ns == 1000 * MS
    device.run(3 * S)
    assert core.state.expires_ns - core.state.granted_ns == QUANTUM_NS

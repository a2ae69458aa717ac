# SPDX-License-Identifier: Apache-2.0
"""Random events, in any order, about a device's leases: what each decision must keep."""

from __future__ import annotations

import ctypes
import random
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import lease_states
from lease_simulator import MS, S
from lease_states import (
    BEST_EFFORT,
    BURST_NS,
    GOVERNED,
    LATENCY,
    NORMAL,
    PLACES,
    QUANTUM_NS,
    ROUND_NS,
    SEATS,
    SHORTEST_NS,
    SUSPENDED,
    TAKEN,
    WHOLE,
    Core,
    Kind,
    LeaseState,
    PlaceIs,
    ceiling_of,
    guarantee_of,
)

#: Of many: enough to meet each other often.
SEAT = st.integers(0, 4)
PLACE = st.integers(0, 9)
#: Kernels of a lease, much longer ones, and none.
USED = st.one_of(st.just(0), st.integers(1, 3 * MS), st.integers(1, 10 * S))
MOVED = st.one_of(st.just(0), st.just(0), st.integers(1, 3 * S))
COUNTERS = ("used_ns", "borrowed_ns", "lent_ns", "leases", "evictions")


@st.composite
def any_terms(draw: st.DrawFn) -> int:
    ceiling = draw(st.sampled_from([WHOLE, WHOLE, WHOLE, 5000, 3000, 100, 1]))
    return lease_states.terms(
        draw(st.integers(0, min(ceiling, 4000))),
        ceiling,
        weight=draw(st.sampled_from([1, 100, 300, WHOLE])),
        share_class=draw(st.sampled_from([LATENCY, NORMAL, NORMAL, BEST_EFFORT])),
        flags=TAKEN | GOVERNED | draw(st.sampled_from([0, 0, 0, SUSPENDED])),
    )


@dataclass(frozen=True, slots=True)
class Before:
    """What a decision is compared with."""

    holder: int
    epoch: int
    counters: dict[int, tuple[int, ...]]


class Leases(RuleBasedStateMachine):
    """One device, its agent, and processes that may do anything at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.core = Core()
        self.now = 100 * S
        self.used: dict[int, int] = {}
        """GPU time charged in each seat's current hands."""

    @initialize(words=st.lists(any_terms(), min_size=4, max_size=4))
    def begin(self, words: list[int]) -> None:
        """Four shares of two processes each: chance alone would seldom come so far."""
        for seat, word in enumerate(words):
            self.take_seat(seat, word)
        for place in range(8):
            self.join(place, place % 4)

    # ---- the agent ----

    def promised(self, apart_from: int) -> int:
        return sum(
            guarantee_of(self.core.contract.seats[seat].terms)
            for seat in range(SEATS)
            if seat != apart_from
        )

    @rule(seat=SEAT, word=any_terms())
    def take_seat(self, seat: int, word: int) -> None:
        if self.promised(seat) + guarantee_of(word) <= WHOLE:
            self.core.take_seat(seat, word)
            self.used[seat] = 0

    @rule(seat=SEAT, word=any_terms())
    def change_terms(self, seat: int, word: int) -> None:
        if not self.core.contract.seats[seat].terms & TAKEN:
            return
        if self.promised(seat) + guarantee_of(word) <= WHOLE:
            self.core.contract.seats[seat].terms = word

    @rule(seat=SEAT)
    def suspend_or_resume(self, seat: int) -> None:
        if self.core.contract.seats[seat].terms & TAKEN:
            self.core.contract.seats[seat].terms ^= SUSPENDED

    @rule(seat=SEAT)
    def free_seat(self, seat: int) -> None:
        self.core.contract.seats[seat].terms = 0

    # ---- the clock ----

    @rule(ns=st.one_of(st.integers(0, 2 * MS), st.integers(0, 50 * MS), st.integers(0, 100 * S)))
    def let_time_pass(self, ns: int) -> None:
        self.now += ns

    @rule(ns=st.integers(0, 900 * MS))
    def come_late(self, ns: int) -> None:
        """An event that is older than the newest."""
        self.decide(Kind.LOOK, now=max(1, self.now - ns))

    # ---- processes ----

    @rule(place=PLACE, seat=SEAT)
    def join(self, place: int, seat: int) -> None:
        self.decide(Kind.JOIN, place=place, seat=seat)
        one = self.core.state.places[place]
        assert (one.seat, one.state) == (seat, PlaceIs.IDLE)

    @rule(place=PLACE)
    def leave(self, place: int) -> None:
        self.decide(Kind.LEAVE, place=place)
        assert self.core.state.places[place].state == PlaceIs.FREE

    @rule(place=PLACE)
    def want(self, place: int) -> None:
        was = self.core.state.places[place].state
        self.decide(Kind.WANT, place=place)
        becomes = self.core.state.places[place].state
        assert (becomes == PlaceIs.FREE) == (was == PlaceIs.FREE)
        assert becomes != PlaceIs.IDLE

    @rule(place=PLACE, used_ns=USED, move_ns=MOVED)
    def charge(self, place: int, used_ns: int, move_ns: int) -> None:
        self.count(place, used_ns)
        self.decide(Kind.CHARGE, place=place, used_ns=used_ns, move_ns=move_ns)

    @precondition(lambda self: self.core.state.holder != -1)
    @rule(used_ns=USED)
    def charge_the_holder(self, used_ns: int) -> None:
        self.now += used_ns
        self.charge(self.core.state.holder, used_ns, 0)

    @rule(place=PLACE, used_ns=USED, wants_more=st.booleans())
    def release(self, *, place: int, used_ns: int, wants_more: bool) -> None:
        self.count(place, used_ns)
        self.decide(Kind.RELEASE, place=place, used_ns=used_ns)
        if wants_more:
            self.decide(Kind.WANT, place=place)

    @rule()
    def all_want(self) -> None:
        for place in range(8):
            self.decide(Kind.WANT, place=place)

    @precondition(lambda self: self.core.state.holder != -1)
    @rule()
    def end_the_holder(self) -> None:
        self.leave(self.core.state.holder)

    @precondition(lambda self: self.core.state.holder != -1)
    @rule(wants_more=st.booleans())
    def release_the_holder(self, *, wants_more: bool) -> None:
        self.release(place=self.core.state.holder, used_ns=0, wants_more=wants_more)

    @rule(place=PLACE)
    def evict(self, place: int) -> None:
        self.decide(Kind.EVICT, place=place)
        assert self.core.state.holder != place or self.core.state.places[place].state == 3

    @precondition(lambda self: self.core.state.holder != -1)
    @rule()
    def evict_the_holder(self) -> None:
        holder = self.core.state.holder
        self.decide(Kind.EVICT, place=holder)
        assert self.core.state.holder != holder

    @precondition(lambda self: self.core.state.holder != -1)
    @rule()
    def evict_from_a_lease_that_is_over(self) -> None:
        holder, epoch = self.core.state.holder, self.core.state.epoch
        self.core.decide(Kind.EVICT, self.now, place=holder, epoch=epoch - 1)
        assert (self.core.state.holder, self.core.state.epoch) == (holder, epoch)

    @rule()
    def look(self) -> None:
        self.decide(Kind.LOOK)

    # ---- what must hold ----

    def count(self, place: int, used_ns: int) -> None:
        one = self.core.state.places[place]
        if one.state != PlaceIs.FREE and self.core.is_current(place):
            self.used[one.seat] += used_ns

    def before(self) -> Before:
        state = self.core.state
        counters = {
            state.seats[seat].serial: tuple(getattr(state.seats[seat], name) for name in COUNTERS)
            for seat in range(SEATS)
        }
        return Before(state.holder, state.epoch, counters)

    def decide(
        self,
        kind: Kind,
        *,
        now: int = 0,
        place: int = -1,
        seat: int = -1,
        used_ns: int = 0,
        move_ns: int = 0,
    ) -> None:
        """Apply the event and check all that each decision must keep."""
        before = self.before()
        self.core.decide(
            kind, now or self.now, place=place, seat=seat, used_ns=used_ns, move_ns=move_ns
        )
        assert self.core.problems() == []
        self.check_lease(before, kind, place)
        self.check_accounts(before)
        self.check_next()
        self.check_fractions()

    def check_lease(self, before: Before, kind: Kind, place: int) -> None:
        state, contract = self.core.state, self.core.contract
        granted = state.epoch - before.epoch
        assert granted in {0, 1}
        assert granted or state.holder in {before.holder, -1}
        ended = before.holder != -1 and (granted or state.holder == -1)
        by_its_own = kind in {Kind.JOIN, Kind.LEAVE, Kind.RELEASE, Kind.EVICT}
        assert not ended or (by_its_own and place == before.holder), "it lost its lease"
        if granted:
            seat = state.places[state.holder].seat
            word = contract.seats[seat].terms
            assert word & TAKEN
            assert not word & SUSPENDED
            assert self.core.is_current(state.holder)
            assert ceiling_of(word) == WHOLE or state.seats[seat].budget_ns > 0
            assert state.granted_ns == state.now_ns
        if state.holder != -1:
            must_yield = self.core.must_yield(state.now_ns)
            seat = state.places[state.holder].seat
            word = contract.seats[seat].terms
            may_go_on = (
                self.core.is_current(state.holder)
                and not word & SUSPENDED
                and not state.seats[seat].blocked
            )
            over = state.next != -1 and state.now_ns >= state.expires_ns
            assert must_yield == (not may_go_on or over)

    def check_accounts(self, before: Before) -> None:
        state, contract = self.core.state, self.core.contract
        for seat, used in self.used.items():
            own = state.seats[seat]
            if not contract.seats[seat].terms & TAKEN:
                continue
            assert own.serial == contract.seats[seat].serial
            assert own.used_ns == used
            assert own.borrowed_ns <= own.used_ns
            counters = tuple(getattr(own, name) for name in COUNTERS)
            former = before.counters.get(own.serial, (0,) * len(COUNTERS))
            assert all(new >= old for new, old in zip(counters, former, strict=True))

    def check_next(self) -> None:
        """Nobody who goes by virtual time is overtaken but among many, by half a turn of either."""
        core, state = self.core, self.core.state
        if state.next == -1:
            return
        seat = state.places[state.next].seat
        turn = min(QUANTUM_NS, max(ROUND_NS // max(1, len(self.wanting())), SHORTEST_NS))
        allowed = turn // 2 if turn < QUANTUM_NS else 0

        def is_latency(seat: int) -> bool:
            return core.contract.seats[seat].terms >> 42 & 3 == LATENCY

        for place in range(10):
            other = state.places[place].seat
            if other == seat or is_latency(seat) or is_latency(other) or not core.may_run(place):
                continue
            owed, owed_other = (core.fraction(one, state.now_ns) for one in (seat, other))
            if (owed > 0) == (owed_other > 0):
                ahead = state.seats[seat].virtual_ns - state.seats[other].virtual_ns
                assert ahead <= (allowed * WHOLE // max(owed, owed_other) if owed > 0 else 0)
            else:
                assert owed > 0

    def wanting(self) -> set[int]:
        """Seats that have work to run, and may have it run."""
        core, state = self.core, self.core.state
        return {
            state.places[place].seat
            for place in range(10)
            if state.places[place].state >= PlaceIs.WAITING
            and core.is_current(place)
            and not core.contract.seats[state.places[place].seat].terms & SUSPENDED
        }

    def check_fractions(self) -> None:
        core, state = self.core, self.core.state
        words = {seat: core.contract.seats[seat].terms for seat in range(6)}
        fractions = {seat: core.fraction(seat, state.now_ns) for seat in words}
        wanting = self.wanting()
        assert sum(fractions.values()) <= WHOLE
        for seat, owed in fractions.items():
            assert owed <= ceiling_of(words[seat])
            if seat in wanting:
                assert owed >= guarantee_of(words[seat])
        if any(fractions[seat] < ceiling_of(words[seat]) for seat in wanting):
            # Each rounding leaves less than a basis point.
            assert sum(fractions.values()) > WHOLE - len(words)


Leases.TestCase.settings = settings(max_examples=examples(4), stateful_step_count=40)
TestLeases = Leases.TestCase


# ---- memory that others can write ----


def as_bytes(structure: ctypes.Structure) -> memoryview:
    return memoryview(structure).cast("B")


def spoil(rng: random.Random, structure: ctypes.Structure, runs: int) -> None:
    """Overwrite some words with what is likely to matter."""
    view = as_bytes(structure)
    for _ in range(runs):
        at = rng.randrange(0, len(view) // 8) * 8
        value = rng.choice([0, 1, 2, 63, 64, 255, 256, 1 << 31, 1 << 62, 1 << 63, (1 << 64) - 1])
        view[at : at + 8] = rng.choice([value, rng.getrandbits(64)]).to_bytes(8, "little")


@given(seed=st.integers(0, 2**32), everything=st.booleans())
def test_whatever_lies_in_the_file_becomes_a_state(*, seed: int, everything: bool) -> None:
    rng = random.Random(seed)  # noqa: S311 - repeatable garbage
    core = Core()
    for seat in range(6):
        core.take_seat(seat, lease_states.terms(1000, rng.choice([WHOLE, 3000])))
    now = 50 * S
    for place in range(10):
        core.decide(Kind.JOIN, now, place=place, seat=place % 6)
        core.decide(Kind.WANT, now, place=place)
    if everything:
        as_bytes(core.state)[:] = rng.randbytes(ctypes.sizeof(LeaseState))
        for place in range(PLACES):
            core.state.places[place].state = rng.randrange(5)
            core.state.places[place].seat = rng.randrange(70)
    for _ in range(20):
        spoil(rng, core.state, rng.randrange(40))
        now += rng.randrange(5 * MS)
        kind = rng.choice([*Kind, 7, -1])
        core.decide(
            kind,
            rng.choice([now, now, rng.getrandbits(64)]),
            place=rng.choice([rng.randrange(10), -1, PLACES, 2**31 - 1, -(2**31)]),
            seat=rng.choice([rng.randrange(6), -1, SEATS, 2**31 - 1]),
            used_ns=rng.choice([0, MS, rng.getrandbits(64)]),
            move_ns=rng.choice([0, MS, rng.getrandbits(64)]),
        )
        assert core.problems() == []


@given(seed=st.integers(0, 2**32))
def test_a_damaged_state_soon_serves_everybody_again(seed: int) -> None:
    """Nobody is locked out for ever, whatever a process wrote over the numbers."""
    rng = random.Random(seed)  # noqa: S311 - repeatable garbage
    core = Core()
    now = 50 * S
    for seat in range(3):
        core.take_seat(seat, lease_states.terms(2000, rng.choice([WHOLE, 3000])))
        core.decide(Kind.JOIN, now, place=seat, seat=seat)
        core.decide(Kind.WANT, now, place=seat)
    spoil(rng, core.state, 300)
    core.decide(Kind.LOOK, now)
    used = [0, 0, 0]
    for _ in range(9000):
        for place in range(3):
            # As a process does that finds its place taken from it.
            if core.state.places[place].state == PlaceIs.FREE or not core.is_current(place):
                core.decide(Kind.JOIN, now, place=place, seat=place)
            core.decide(Kind.WANT, now, place=place)
        holder = core.state.holder
        now += S
        if 0 <= holder < 3:
            used[holder] += 1
            core.decide(Kind.RELEASE, now, place=holder, used_ns=S)
        else:
            core.decide(Kind.EVICT, now, place=holder)
    assert all(used), used


# ---- the clock ----


@pytest.mark.parametrize("uptime", [10 * S, 86_400 * S, 300 * 86_400 * S])
def test_a_machine_that_was_started_again(uptime: int) -> None:
    """The clock begins anew, and the file may be on a disk: those before had later times."""
    core = Core()
    core.take_seat(0, lease_states.terms(1000, 1000))
    core.take_seat(1, lease_states.terms(3000))
    for place in range(2):
        core.decide(Kind.JOIN, uptime, place=place, seat=place)
        core.decide(Kind.WANT, uptime, place=place)
    core.decide(Kind.CHARGE, uptime, place=core.state.holder, used_ns=2 * S)
    now = 5 * S
    for place in range(2):
        core.decide(Kind.LEAVE, now, place=place)
        core.decide(Kind.JOIN, now, place=place, seat=place)
        core.decide(Kind.WANT, now, place=place)
    used = [0, 0]
    for _ in range(40_000):
        holder = core.state.holder
        assert holder != -1
        now += MS
        used[holder] += 1
        core.decide(Kind.CHARGE, now, place=holder, used_ns=MS)
        if core.must_yield(now):
            core.decide(Kind.RELEASE, now, place=holder)
            core.decide(Kind.WANT, now, place=holder)
    assert used[0] / 40_000 == pytest.approx(0.1, abs=0.08)


def test_a_budget_is_never_more_than_a_burst() -> None:
    core = Core()
    core.take_seat(0, lease_states.terms(100, 100))
    for now in (S, 2 * S, 900 * S, 5 * S, 900 * S, 10**18):
        core.decide(Kind.LOOK, now)
        assert core.state.seats[0].budget_ns <= BURST_NS


def test_a_holder_that_idles_saves_no_more_than_a_burst() -> None:
    core = Core()
    core.take_seat(0, lease_states.terms(1000, 1000))
    core.decide(Kind.JOIN, S, place=0, seat=0)
    core.decide(Kind.WANT, S, place=0)
    core.decide(Kind.CHARGE, 100 * S, place=0, used_ns=S)
    assert core.state.seats[0].budget_ns <= BURST_NS - S + S // 10


# ---- the header ----


def test_the_structures_are_the_headers(
    root: Path, cc: list[str], tmp_path: Path, native_dir: Path
) -> None:
    assert native_dir.exists()
    lines = ["#include <stddef.h>", "#include <stdio.h>", '#include "lease.h"', "int main(void) {"]
    expected = []
    for name, structure in lease_states.STRUCTURES.items():
        lines.append(f'  printf("{name} %zu\\n", sizeof({name}));')
        expected.append(f"{name} {ctypes.sizeof(structure)}")
        for field in (entry[0] for entry in structure._fields_):
            lines.append(f'  printf("{name}.{field} %zu\\n", offsetof({name}, {field}));')
            expected.append(f"{name}.{field} {getattr(structure, field).offset}")
    for name, value in (
        ("ALLOT_SEATS", SEATS),
        ("ALLOT_PLACES", PLACES),
        ("ALLOT_WHOLE", WHOLE),
        ("ALLOT_PLACE_HOLDING", PlaceIs.HOLDING),
        ("ALLOT_EVENT_LOOK", Kind.LOOK),
        ("ALLOT_TERMS(3, 7, 5, 2, ALLOT_TERMS_TAKEN)", 0),
    ):
        word = value or lease_states.terms(3, 7, weight=5, share_class=2, flags=TAKEN)
        lines.append(f'  printf("%s %llu\\n", "{name}", (unsigned long long)({name}));')
        expected.append(f"{name} {int(word)}")
    source, program = tmp_path / "layout.c", tmp_path / "layout"
    source.write_text("\n".join([*lines, "}"]))
    subprocess.run([*cc, f"-I{root / 'native'}", str(source), "-o", str(program)], check=True)
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == expected

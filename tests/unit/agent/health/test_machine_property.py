# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to a GPU in whatever order, its record makes sense, and it is back in time."""

from __future__ import annotations

from gpus import gpu
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from allotment.agent.health.machine import (
    Event,
    Probed,
    PutBack,
    TakeOut,
    XidSeen,
    step,
)
from allotment.agent.health.records import HealthState, Need, Record, Rules
from allotment.agent.health.xids import Action, Effect
from allotment.agent.inventory import Gone, Hidden, Silent
from allotment.devices.watching import Look, ReadFailure, Vitals

COUNTS = st.none() | st.integers(0, 5)
VITALS = st.builds(
    Vitals,
    ecc_corrected=COUNTS,
    ecc_uncorrected=COUNTS,
    is_repair_pending=st.none() | st.booleans(),
    is_repair_failed=st.sampled_from([None, False, False, True]),
    recovery_action=st.sampled_from([None, 0, 0, 1, 2, 3]),
    energy_mj=COUNTS,
)
EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(XidSeen, st.integers(1, 200), st.sampled_from(Action)),
    st.builds(Look, st.just(gpu()), VITALS),
    st.builds(Silent, st.floats(0, 60)),
    st.builds(
        ReadFailure,
        message=st.just("NVML: an error"),
        is_lost=st.booleans(),
        needs_reset=st.booleans(),
        is_driver=st.booleans(),
    ),
    st.just(Gone()),
    st.just(Hidden()),
    st.builds(Probed, st.sampled_from([None, None, "it failed"])),
)


class Life(RuleBasedStateMachine):
    """One GPU. Beside its record only what an outsider sees is kept: what it was told to do."""

    @initialize(recovers=st.booleans(), tests=st.integers(1, 4))
    def begin(self, *, recovers: bool, tests: int) -> None:
        self.by = Rules(recovers=recovers, tests_to_pass=tests)
        self.record = Record()
        self.now = 0.0
        self.is_offered = True
        self.passed_since_out = 0

    def take(self, event: Event) -> None:
        before = self.record
        done = step(before, event, now=self.now, rules=self.by)
        self.record = done.record
        if isinstance(event, Probed):
            passed = event.complaint is None and not before.is_offered
            self.passed_since_out = self.passed_since_out + 1 if passed else 0
        for decision in done.decisions:
            if isinstance(decision, TakeOut):
                self.is_offered = False
            if isinstance(decision, PutBack):
                self.is_offered = True
                assert self.passed_since_out >= self.by.tests_to_pass
                assert self.by.recovers
        if (
            not self.is_offered
            and self.record.state is HealthState.UNHEALTHY
            and event != Probed(None)
        ):
            self.passed_since_out = 0
        bad = isinstance(event, XidSeen) and event.action.effect is Effect.WAIT_FOR_RESET
        assert not bad or self.record.need is Need.RESET
        if isinstance(event, Probed):
            assert self.record.test_at is None or self.record.test_at > self.now

    @rule(event=EVENTS, seconds=st.floats(0, 120))
    def happens(self, event: Event, seconds: float) -> None:
        self.now += seconds
        self.take(event)

    @precondition(lambda self: self.record.test_at is not None)
    @rule(complaint=st.sampled_from([None, None, None, "it failed"]))
    def tested_when_due(self, complaint: str | None) -> None:
        assert self.record.test_at is not None
        self.now = max(self.now, self.record.test_at)
        self.take(Probed(complaint))

    @rule()
    def gets_well(self) -> None:
        """Nothing is wrong with it any more, and it was reset: it comes back, if it may."""
        if not self.by.recovers:
            return
        fine = Vitals()
        self.now += 1
        self.take(Gone())
        self.take(Look(gpu(), fine))
        for _ in range(200):
            if self.record.state is HealthState.HEALTHY:
                break
            assert self.record.test_at is not None, self.record
            self.now = max(self.now, self.record.test_at)
            self.take(Probed(None))
            self.take(Look(gpu(), fine))
        assert self.record.state is HealthState.HEALTHY, self.record

    @invariant()
    def makes_sense(self) -> None:
        if hasattr(self, "record"):
            self.record.check_invariants()
            assert self.record.is_offered == self.is_offered, "what was said is not what is"


TestLife = Life.TestCase

# SPDX-License-Identifier: Apache-2.0
"""`allotment.agent.health.machine`: what a GPU's health becomes, event by event."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from gpus import gpu as gpu_device

from allotment.agent.health.machine import (
    Decision,
    Event,
    Note,
    Probed,
    PutBack,
    TakeOut,
    XidSeen,
    complaint_of,
    step,
    was_reset,
)
from allotment.agent.health.records import HealthState, Need, Record, Rules
from allotment.agent.health.xids import Action
from allotment.agent.inventory import Gone, Hidden, Silent
from allotment.devices.watching import Look, ReadFailure, Vitals
from allotment.model.structs import replace

FINE = Vitals(ecc_corrected=0, ecc_uncorrected=0, is_repair_pending=False, is_repair_failed=False)
PAGE_FAULT = XidSeen(31, Action.RESTART_APP)
UNCONTAINED = XidSeen(95, Action.RESET_GPU)
LOST = ReadFailure(message="NVML: GPU is lost", is_lost=True)


def alive(vitals: Vitals) -> Look:
    return Look(gpu_device(), vitals)


@dataclass
class Gpu:
    """A GPU that things happen to, and what followed."""

    record: Record = field(default_factory=Record)
    now: float = 100.0
    rules: Rules = field(default_factory=Rules)
    decisions: list[Decision] = field(default_factory=list)

    def meets(self, *events: Event) -> Gpu:
        for event in events:
            done = step(self.record, event, now=self.now, rules=self.rules)
            self.record = done.record
            self.decisions.extend(done.decisions)
            self.record.check_invariants()
        return self

    def after(self, seconds: float) -> Gpu:
        self.now += seconds
        return self

    def passes_tests(self, count: int) -> Gpu:
        for _ in range(count):
            assert self.record.test_at is not None, self.record
            self.now = max(self.now, self.record.test_at)
            self.meets(Probed(None))
        return self

    def state(self) -> HealthState:
        return self.record.state

    def need(self) -> Need:
        return self.record.need


@pytest.fixture
def gpu() -> Gpu:
    return Gpu().meets(alive(FINE))


def test_what_is_ignored_changes_nothing(gpu: Gpu) -> None:
    before = gpu.record
    assert gpu.meets(XidSeen(43, Action.IGNORE)).record == before
    assert gpu.decisions == []


def test_a_programs_error_leaves_the_gpu_in_service_and_has_it_tested_at_once(gpu: Gpu) -> None:
    gpu.meets(PAGE_FAULT)
    assert (gpu.state(), gpu.record.is_offered, gpu.record.test_at) == (
        HealthState.SUSPECT,
        True,
        100.0,
    )
    assert gpu.decisions == [
        Note(
            "XID 31 (GPU memory page fault): restart the program that met it",
            xid=31,
            is_programs=True,
        )
    ]
    gpu.passes_tests(1)
    assert gpu.state() is HealthState.HEALTHY
    assert len(gpu.decisions) == 1, "it never left service, so nothing is said of its return"


def test_a_failed_test_takes_it_out_until_tests_pass(gpu: Gpu) -> None:
    gpu.meets(PAGE_FAULT, Probed("no memory can be had"))
    assert (gpu.state(), gpu.need()) == (HealthState.UNHEALTHY, Need.TESTS)
    assert "no memory can be had" in gpu.record.reason
    gpu.passes_tests(1)
    assert gpu.state() is HealthState.RECOVERING
    gpu.passes_tests(1)
    assert gpu.state() is HealthState.HEALTHY
    assert isinstance(gpu.decisions[-1], PutBack)


def test_each_failed_test_doubles_the_pause_up_to_the_longest(gpu: Gpu) -> None:
    gpu.meets(PAGE_FAULT, Probed("bad"))
    pauses = []
    for _ in range(10):
        assert gpu.record.test_at is not None
        pauses.append(gpu.record.test_at - gpu.now)
        gpu.now = gpu.record.test_at
        gpu.meets(Probed("bad"))
    assert pauses == [5, 10, 20, 40, 80, 160, 320, 600, 600, 600]


def test_an_error_that_needs_a_reset_is_not_healed_by_time_answers_or_tests(gpu: Gpu) -> None:
    gpu.meets(UNCONTAINED)
    assert gpu.decisions == [TakeOut("XID 95 (uncontained memory error): reset the GPU")]
    for _ in range(100):
        gpu.after(60).meets(alive(FINE), Probed(None))
    assert (gpu.state(), gpu.need()) == (HealthState.UNHEALTHY, Need.RESET)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(Vitals(energy_mj=900), Vitals(energy_mj=3), id="its meter starts anew"),
        pytest.param(
            Vitals(ecc_uncorrected=2), Vitals(ecc_uncorrected=0), id="its counts start anew"
        ),
        pytest.param(Vitals(ecc_corrected=2), Vitals(ecc_corrected=1), id="so do corrected ones"),
        pytest.param(
            Vitals(is_repair_pending=True), Vitals(is_repair_pending=False), id="it is repaired"
        ),
        pytest.param(Vitals(recovery_action=1), Vitals(recovery_action=0), id="the driver says so"),
    ],
)
def test_a_reset_is_seen_and_then_tested(before: Vitals, after: Vitals) -> None:
    gpu = Gpu().meets(UNCONTAINED, alive(before))
    gpu.after(5).meets(alive(after))
    assert gpu.state() is HealthState.RECOVERING
    gpu.passes_tests(2)
    assert gpu.state() is HealthState.HEALTHY


def test_more_of_everything_is_no_reset() -> None:
    before = Vitals(ecc_corrected=1, ecc_uncorrected=1, energy_mj=5, recovery_action=0)
    after = Vitals(ecc_corrected=2, ecc_uncorrected=1, energy_mj=9, recovery_action=0)
    assert not was_reset(before, after)
    assert not was_reset(before, Vitals())
    assert not was_reset(None, after)


def test_the_drivers_word_that_nothing_is_needed_counts_once_it_lasts(gpu: Gpu) -> None:
    calm = replace(FINE, recovery_action=0)
    gpu.meets(UNCONTAINED, alive(calm))
    assert gpu.state() is HealthState.UNHEALTHY, "it may not have made up its mind yet"
    gpu.after(5).meets(alive(calm))
    assert gpu.state() is HealthState.UNHEALTHY
    gpu.after(5).meets(alive(calm))
    assert gpu.state() is HealthState.RECOVERING


def test_its_word_counts_for_nothing_where_it_is_not_asked(gpu: Gpu) -> None:
    calm = replace(FINE, recovery_action=0)
    gpu.meets(XidSeen(119, Action.RESET_GPU))  # it says nothing about these
    for _ in range(10):
        gpu.after(60).meets(alive(calm))
    assert gpu.need() is Need.RESET


def test_one_that_refuses_to_work_before_a_reset_was_reset_when_it_works(gpu: Gpu) -> None:
    gpu.meets(ReadFailure(message="NVML: GPU requires restart", needs_reset=True))
    assert gpu.need() is Need.RESET
    gpu.after(5).meets(alive(FINE))
    assert gpu.state() is HealthState.RECOVERING


def test_the_drivers_word_that_a_reset_is_needed_is_enough(gpu: Gpu) -> None:
    gpu.meets(alive(replace(FINE, recovery_action=1)))
    assert gpu.need() is Need.RESET
    assert gpu.record.reason == "the driver says that the GPU needs a reset: reset the GPU"
    gpu.after(5).meets(alive(replace(FINE, recovery_action=0)))
    assert gpu.state() is HealthState.RECOVERING


def test_lost_and_found_is_tested_before_it_is_used(gpu: Gpu) -> None:
    gpu.meets(LOST)
    assert (gpu.state(), gpu.need()) == (HealthState.UNHEALTHY, Need.ANSWER)
    gpu.after(300).meets(LOST, alive(FINE))
    assert gpu.state() is HealthState.RECOVERING
    gpu.passes_tests(2)
    assert gpu.state() is HealthState.HEALTHY
    kinds = [type(each) for each in gpu.decisions]
    assert kinds == [TakeOut, Note, PutBack]


@pytest.mark.parametrize(
    ("sight", "is_lost"),
    [
        (LOST, True),
        (Gone(), True),
        # They go on with a GPU that only the agent cannot see.
        (Hidden(), False),
        # Programs go on with the driver that they have.
        (ReadFailure(message="version mismatch", is_driver=True), False),
        (ReadFailure(message="reset required", needs_reset=True), False),
        (Silent(60.0), False),
    ],
    ids=str,
)
def test_lost_is_what_no_program_can_use(gpu: Gpu, sight: Event, *, is_lost: bool) -> None:
    gpu.meets(XidSeen(79, Action.RESTART_NODE), sight)
    assert gpu.record.is_lost == is_lost
    gpu.after(60).meets(alive(FINE))
    assert not gpu.record.is_lost


def test_a_hidden_gpu_is_not_offered_and_was_not_reset(gpu: Gpu) -> None:
    gpu.meets(Hidden())
    assert (gpu.state(), gpu.record.is_hidden) == (HealthState.UNHEALTHY, True)
    gpu.after(60).meets(alive(FINE))
    assert (gpu.state(), gpu.record.is_hidden) == (HealthState.RECOVERING, False)
    gpu.meets(XidSeen(95, Action.RESET_GPU), Hidden()).after(60).meets(alive(FINE))
    assert gpu.need() is Need.RESET


def test_what_nvml_called_lost_stays_lost_though_the_kernel_lists_it(gpu: Gpu) -> None:
    gpu.meets(LOST, Hidden())
    assert (gpu.record.is_lost, gpu.record.is_hidden) == (True, False)


def test_to_have_been_away_is_to_have_been_reset(gpu: Gpu) -> None:
    gpu.meets(XidSeen(79, Action.RESTART_NODE), LOST).after(60).meets(alive(FINE))
    assert gpu.state() is HealthState.RECOVERING


def test_the_xid_of_a_lost_gpu_may_come_after_it_was_found_lost(gpu: Gpu) -> None:
    gpu.meets(LOST, XidSeen(79, Action.RESTART_NODE))
    assert gpu.need() is Need.RESET
    gpu.after(60).meets(LOST).after(5).meets(alive(FINE))
    assert gpu.state() is HealthState.RECOVERING


def test_one_missed_answer_makes_suspect_and_silence_unhealthy(gpu: Gpu) -> None:
    gpu.meets(Silent(1.5))
    assert (gpu.state(), gpu.record.is_offered) == (HealthState.SUSPECT, True)
    gpu.after(10).meets(Silent(11.5))
    assert (gpu.state(), gpu.need()) == (HealthState.UNHEALTHY, Need.ANSWER)
    assert "12 s (it may take 10 s)" in gpu.record.reason
    gpu.after(60).meets(alive(FINE))
    assert gpu.state() is HealthState.RECOVERING


def test_errors_twice_in_a_row_take_it_out(gpu: Gpu) -> None:
    gpu.meets(ReadFailure(message="NVML: Unknown Error"))
    assert gpu.state() is HealthState.SUSPECT
    gpu.after(5).meets(ReadFailure(message="NVML: Unknown Error"))
    assert (gpu.state(), gpu.need()) == (HealthState.UNHEALTHY, Need.ANSWER)


def test_counts_of_uncorrected_errors_speak_where_no_xid_did(gpu: Gpu) -> None:
    gpu.after(5).meets(alive(replace(FINE, ecc_uncorrected=3)))
    assert gpu.need() is Need.RESET
    assert gpu.record.reason == "3 new uncorrected memory errors: reset the GPU"


def test_counts_that_an_xid_announced_are_that_xids(gpu: Gpu) -> None:
    gpu.meets(XidSeen(94, Action.RESTART_APP), Probed(None))
    gpu.after(5).meets(alive(replace(FINE, ecc_uncorrected=1)))
    assert gpu.state() is HealthState.HEALTHY


def test_counts_from_before_the_start_are_old_news() -> None:
    assert Gpu().meets(alive(replace(FINE, ecc_uncorrected=7))).state() is HealthState.HEALTHY


def test_a_gpu_that_keeps_failing_has_to_pass_more_tests(gpu: Gpu) -> None:
    needed = []
    for _ in range(7):
        gpu.meets(LOST).after(5).meets(alive(FINE))
        count = 0
        while gpu.state() is HealthState.RECOVERING:
            gpu.passes_tests(1)
            count += 1
        needed.append(count)
    assert needed == [2, 4, 8, 16, 32, 64, 64]
    gpu.after(gpu.rules.memory_s + 1).meets(LOST).after(5).meets(alive(FINE)).passes_tests(2)
    assert gpu.state() is HealthState.HEALTHY, "what was long ago does not count"


def test_a_failure_while_recovering_starts_it_over(gpu: Gpu) -> None:
    gpu.meets(LOST).after(5).meets(alive(FINE)).passes_tests(1).meets(Probed("bad"))
    assert (gpu.state(), gpu.need()) == (HealthState.UNHEALTHY, Need.TESTS)
    gpu.passes_tests(1)
    gpu.meets(PAGE_FAULT)
    assert (gpu.state(), gpu.record.passed) == (HealthState.RECOVERING, 0)


def test_without_recovery_it_stays_out() -> None:
    gpu = Gpu(rules=Rules(recovers=False)).meets(alive(FINE), LOST)
    for _ in range(20):
        gpu.after(600).meets(alive(FINE), Probed(None))
    assert gpu.state() is HealthState.UNHEALTHY
    gpu = Gpu(rules=Rules(recovers=False)).meets(XidSeen(31, Action.TAKE_OUT)).passes_tests(100)
    assert gpu.state() is HealthState.UNHEALTHY
    suspect = Gpu(rules=Rules(recovers=False)).meets(alive(FINE), PAGE_FAULT, Probed(None))
    assert suspect.state() is HealthState.HEALTHY, "a suspect never left service"


def test_a_worse_need_takes_over_and_a_lesser_one_does_not(gpu: Gpu) -> None:
    gpu.meets(XidSeen(31, Action.TAKE_OUT))
    assert gpu.need() is Need.TESTS
    gpu.meets(UNCONTAINED)
    assert gpu.need() is Need.RESET
    reason = gpu.record.reason
    gpu.meets(XidSeen(119, Action.RESET_GPU), LOST, Silent(60))
    assert (gpu.need(), gpu.record.reason) == (Need.RESET, reason)


def test_repairs_that_failed_are_a_complaint_unless_their_xid_is_made_light_of() -> None:
    broken = replace(FINE, is_repair_failed=True)
    assert complaint_of(broken, Rules()) is not None
    assert complaint_of(broken, Rules(failed_repairs=Action.IGNORE)) is None
    assert complaint_of(replace(FINE, is_repair_pending=True), Rules()) is None
    assert complaint_of(replace(FINE, recovery_action=9), Rules()) == (
        "the driver asks for recovery action 9",
        Action.RESET_GPU,
    )
    word = replace(FINE, recovery_action=2)
    assert complaint_of(word, Rules(drivers_word=Action.IGNORE)) is None


def test_one_that_is_not_listed_is_away(gpu: Gpu) -> None:
    gpu.meets(Gone())
    assert (gpu.need(), gpu.record.was_away) == (Need.ANSWER, True)

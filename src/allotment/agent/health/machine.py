# SPDX-License-Identifier: Apache-2.0
"""One GPU's health as a state machine: what was seen goes in, what follows comes out. Pure.

                     error that a program may have made; one missed answer
        HEALTHY ────────────────────────────────────────────────► SUSPECT
           ▲  ◄──────────────────────────────────────────────────    │
           │                         test passed                     │ test failed
           │                                                         ▼
           │ enough tests passed      what it needs was seen     UNHEALTHY ◄── error that needs a
        RECOVERING ◄─────────────────────────────────────────────    │         reset; lost; silent
           └─────────────────────────────────────────────────────►   │
                                     any failure

HEALTHY and SUSPECT GPUs are offered, the others are not. What an UNHEALTHY one needs before it is
tested again is its `need`: an answer, a reset, or just tests. A reset is never made here, only
seen: by counters that start anew, by the GPU going away and coming back, or by the driver's own
word. The more often a GPU was taken out of late, the more tests it has to pass, and each failed
test makes the next one wait longer.
"""

from dataclasses import dataclass, replace
from typing import assert_never

from allotment.agent.health.actions import Action, Effect, describe_xid
from allotment.agent.health.records import Need, Record, Rules, State
from allotment.agent.health.vitals import (
    MEMORY_XID,
    MEMORY_XIDS,
    complaint_of,
    new_errors,
    was_reset,
)
from allotment.agent.health.xids import LINKED
from allotment.devices.watching import Vitals

__all__ = [
    "Absent",
    "Alive",
    "Broken",
    "Decision",
    "Event",
    "Note",
    "Probed",
    "PutBack",
    "Quiet",
    "Step",
    "TakeOut",
    "XidSeen",
    "step",
]


# ---- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class XidSeen:
    """An XID, and what the policy says about it."""

    xid: int
    action: Action


@dataclass(frozen=True, slots=True)
class Alive:
    """It answered, as it does every few seconds."""

    vitals: Vitals


@dataclass(frozen=True, slots=True)
class Quiet:
    """It was asked `for_s` seconds ago and has not answered."""

    for_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """An error in place of an answer."""

    message: str
    is_lost: bool = False
    needs_reset: bool = False
    is_driver: bool = False


@dataclass(frozen=True, slots=True)
class Absent:
    """The driver does not list it."""


@dataclass(frozen=True, slots=True)
class Probed:
    """The test that was due has been made: None, or what failed."""

    complaint: str | None


Event = XidSeen | Alive | Quiet | Broken | Absent | Probed


# ---- decisions -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TakeOut:
    """It is not to be offered from now on; the same reason is told while it lasts."""

    reason: str


@dataclass(frozen=True, slots=True)
class PutBack:
    """It is offered again."""

    reason: str


@dataclass(frozen=True, slots=True)
class Note:
    """Worth telling; whether the GPU is offered stays as it is."""

    reason: str
    xid: int | None = None
    is_programs: bool = False
    """The owners of its programs should hear of it."""


Decision = TakeOut | PutBack | Note


@dataclass(frozen=True, slots=True)
class Step:
    """What became of it."""

    record: Record
    decisions: tuple[Decision, ...] = ()


def step(record: Record, event: Event, *, now: float, rules: Rules) -> Step:
    """Take one event in."""
    match event:
        case XidSeen():
            return _on_xid(record, event, now, rules)
        case Alive():
            return _on_alive(record, event.vitals, now, rules)
        case Quiet():
            return _on_quiet(record, event.for_s, now, rules)
        case Broken():
            return _on_broken(record, event, now, rules)
        case Absent():
            return _on_away(record, "the driver does not list it any more", now, rules)
        case Probed():
            return _on_probed(record, event.complaint, now, rules)
        case _:
            assert_never(event)


# ---- changes of state ----------------------------------------------------------------------------


def _take_out(
    record: Record, reason: str, need: Need, *, now: float, rules: Rules, action: Action | None
) -> Step:
    """Make it unhealthy, or an unhealthy one's case worse; a lesser one changes nothing."""
    if record.state is State.UNHEALTHY and not _is_worse(need, record.need):
        return Step(record)
    recent = tuple(at for at in record.taken_out if now - at < rules.memory_s)
    made = replace(
        record,
        state=State.UNHEALTHY,
        need=need,
        reason=reason,
        action=action,
        since=now if record.is_offered else record.since,
        test_at=now + rules.test_pause_s if need is Need.TESTS else None,
        passed=0,
        was_away=False,
        calm_since=None,
        failed=0 if record.is_offered else record.failed,
        taken_out=(*recent, now) if record.is_offered else recent,
    )
    return Step(made, (TakeOut(reason),))


def _is_worse(need: Need, than: Need) -> bool:
    order = list(Need)
    return order.index(need) > order.index(than)


def _suspect(record: Record, reason: str, *, test_at: float, now: float) -> Record:
    """Have it tested. One that is suspect already keeps its reason, and the sooner test counts."""
    if record.state is State.SUSPECT:
        due = test_at if record.test_at is None else min(test_at, record.test_at)
        return replace(record, test_at=due)
    return replace(record, state=State.SUSPECT, reason=reason, since=now, test_at=test_at)


def _healthy(record: Record, *, now: float) -> Record:
    return Record(
        since=now,
        vitals=record.vitals,
        memory_xid_at=record.memory_xid_at,
        taken_out=record.taken_out,
    )


def _recovering(record: Record, *, now: float) -> Step:
    made = replace(
        record, state=State.RECOVERING, need=Need.NOTHING, since=now, test_at=now, passed=0
    )
    return Step(made, (Note(f"{record.reason}: it answers again, and is tested"),))


def _tests_needed(record: Record, rules: Rules) -> int:
    """Twice as many for each time it was taken out of late."""
    times = max(0, len(record.taken_out) - 1)
    return min(rules.tests_to_pass << min(times, 16), rules.most_tests)


def _pause_s(record: Record, rules: Rules) -> float:
    return min(rules.test_pause_s * (1 << min(record.failed, 16)), rules.longest_pause_s)


# ---- events, one by one --------------------------------------------------------------------------


def _on_xid(record: Record, seen: XidSeen, now: float, rules: Rules) -> Step:
    effect = seen.action.effect
    if effect is Effect.NOTHING:
        return Step(record)
    text = f"{describe_xid(seen.xid)}: {seen.action.words}"
    record = replace(
        record,
        xid=seen.xid if record.is_offered or record.xid is None else record.xid,
        memory_xid_at=now if seen.xid in MEMORY_XIDS else record.memory_xid_at,
    )
    if effect is Effect.REPORT:
        return Step(record, (Note(text, xid=seen.xid),))
    if effect is Effect.TEST:
        return _on_mild_xid(record, Note(text, xid=seen.xid, is_programs=True), now, rules)
    need = Need.RESET if effect is Effect.WAIT_FOR_RESET else Need.TESTS
    return _take_out(record, text, need, now=now, rules=rules, action=seen.action)


def _on_mild_xid(record: Record, note: Note, now: float, rules: Rules) -> Step:
    match record.state:
        case State.HEALTHY | State.SUSPECT:
            return Step(_suspect(record, note.reason, test_at=now, now=now), (note,))
        case State.RECOVERING:
            return Step(replace(record, passed=0, test_at=now + rules.test_pause_s), (note,))
        case State.UNHEALTHY:
            return Step(record, (note,))
        case _:
            assert_never(record.state)


def _on_alive(record: Record, vitals: Vitals, now: float, rules: Rules) -> Step:
    before = record.vitals
    record = replace(record, vitals=vitals, calm_since=_calm_since(record, vitals, now))
    if found := complaint_of(vitals, rules):
        text, action = found
        text = f"{text}: {action.words}"
        return _take_out(record, text, Need.RESET, now=now, rules=rules, action=action)
    if count := _unannounced_errors(record, before, now, rules):
        action = rules.memory_errors
        need = Need.RESET if action.effect is Effect.WAIT_FOR_RESET else Need.TESTS
        text = f"{count} new uncorrected memory errors: {action.words}"
        record = replace(record, xid=MEMORY_XID)
        return _take_out(record, text, need, now=now, rules=rules, action=action)
    if record.state is not State.UNHEALTHY or not rules.recovers:
        return Step(record)
    is_reset = record.was_away or was_reset(before, vitals) or _is_calm(record, now, rules)
    if record.need is Need.ANSWER or (record.need is Need.RESET and is_reset):
        return _recovering(record, now=now)
    return Step(record)


def _unannounced_errors(record: Record, before: Vitals | None, now: float, rules: Rules) -> int:
    if rules.memory_errors.effect not in {Effect.TAKE_OUT, Effect.WAIT_FOR_RESET}:
        return 0
    announced = record.memory_xid_at is not None and now - record.memory_xid_at < rules.sympathy_s
    if announced or record.vitals is None or record.state is State.UNHEALTHY:
        return 0
    return new_errors(before, record.vitals)


def _calm_since(record: Record, vitals: Vitals, now: float) -> float | None:
    if vitals.recovery_action != 0:
        return None
    return now if record.calm_since is None else record.calm_since


def _is_calm(record: Record, now: float, rules: Rules) -> bool:
    """Tell whether the driver, asked about such a case, says that nothing has to be done."""
    if rules.drivers_word is Action.IGNORE or record.calm_since is None:
        return False
    if record.xid not in LINKED:
        return False
    return now - record.calm_since >= rules.calm_s


def _on_quiet(record: Record, for_s: float, now: float, rules: Rules) -> Step:
    text = (
        f"it has not answered for {for_s:.0f} s (it may take {rules.silence_s:.0f} s):"
        " see the kernel's log; it may need a reset"
    )
    if for_s >= rules.silence_s:
        action = Action.RESET_GPU
        return _take_out(record, text, Need.ANSWER, now=now, rules=rules, action=action)
    if record.state in {State.HEALTHY, State.SUSPECT}:
        return Step(_suspect(record, text, test_at=now + rules.test_pause_s, now=now))
    return Step(record)


def _on_broken(record: Record, broken: Broken, now: float, rules: Rules) -> Step:
    if broken.is_lost or broken.is_driver:
        return _on_away(record, broken.message, now, rules)
    if broken.needs_reset:
        action = Action.RESET_GPU
        text = f"{broken.message}: {action.words}"
        done = _take_out(record, text, Need.RESET, now=now, rules=rules, action=action)
        # It answers again only after that reset.
        return Step(replace(done.record, was_away=True), done.decisions)
    if record.state is State.HEALTHY:
        due = now + rules.test_pause_s
        return Step(_suspect(record, broken.message, test_at=due, now=now))
    return _take_out(record, broken.message, Need.ANSWER, now=now, rules=rules, action=None)


def _on_away(record: Record, text: str, now: float, rules: Rules) -> Step:
    action = Action.RESTART_NODE
    text = f"{text}: it is tested when it is back; if it does not come back, {action.words}"
    done = _take_out(record, text, Need.ANSWER, now=now, rules=rules, action=action)
    return Step(replace(done.record, was_away=True), done.decisions)


def _on_probed(record: Record, complaint: str | None, now: float, rules: Rules) -> Step:
    if record.state is State.HEALTHY or record.need in {Need.ANSWER, Need.RESET}:
        return Step(record)
    if complaint is not None:
        return _on_failed_test(record, complaint, now, rules)
    if record.state is State.SUSPECT:
        return Step(_healthy(record, now=now))
    if not rules.recovers:
        return Step(replace(record, test_at=now + rules.test_pause_s))
    passed = record.passed + 1
    needed = _tests_needed(record, rules)
    if passed >= needed:
        text = f"{passed} tests passed; it was out of service for: {record.reason}"
        return Step(_healthy(record, now=now), (PutBack(text),))
    return Step(
        replace(
            record,
            state=State.RECOVERING,
            need=Need.NOTHING,
            passed=passed,
            test_at=now + rules.test_pause_s,
        )
    )


def _on_failed_test(record: Record, complaint: str, now: float, rules: Rules) -> Step:
    if record.is_offered:
        text = f"{record.reason}; its test failed: {complaint}"
        return _take_out(
            record, text, Need.TESTS, now=now, rules=rules, action=record.action or Action.TEST
        )
    worse = replace(record, failed=record.failed + 1)
    made = replace(
        worse,
        state=State.UNHEALTHY,
        need=Need.TESTS,
        passed=0,
        test_at=now + _pause_s(worse, rules),
    )
    return Step(made)

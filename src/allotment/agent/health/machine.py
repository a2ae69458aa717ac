# SPDX-License-Identifier: Apache-2.0
"""One GPU's health as a state machine: events in, decisions out. Pure.

                     error that a program may have made; one missed answer
        HEALTHY ────────────────────────────────────────────────► SUSPECT
           ▲  ◄──────────────────────────────────────────────────    │
           │                         test passed                     │ test failed
           │                                                         ▼
           │ enough tests passed      what it needs was seen     UNHEALTHY ◄── error that needs a
        RECOVERING ◄─────────────────────────────────────────────    │         reset; lost; silent
           └─────────────────────────────────────────────────────►   │
                                     any failure

HEALTHY and SUSPECT GPUs are offered, the others are not. `need` is the condition for the tests of
an UNHEALTHY GPU: an answer, a reset, or none. Resets are only detected: counters start anew, the
GPU goes away and comes back, or the driver reports it. Each recent failure doubles the number of
tests to pass, and each failed test the pause.
"""

from typing import Final, assert_never

import msgspec

from allotment.agent.health.records import HealthState, Need, Record, Rules
from allotment.agent.health.xids import LINKED, Action, Effect, describe_xid
from allotment.agent.inventory import Gone, Hidden, Silent
from allotment.devices.watching import Look, ReadFailure, Vitals
from allotment.model.structs import replace

# ---- events --------------------------------------------------------------------------------------


class XidSeen(msgspec.Struct, frozen=True):
    """An XID, and the policy's action."""

    xid: int
    action: Action


class Probed(msgspec.Struct, frozen=True):
    """The result of a test: None, or the failure."""

    complaint: str | None


Event = XidSeen | Look | Silent | ReadFailure | Gone | Hidden | Probed


# ---- decisions -----------------------------------------------------------------------------------


class TakeOut(msgspec.Struct, frozen=True):
    """The GPU is no longer offered."""

    reason: str


class PutBack(msgspec.Struct, frozen=True):
    """The GPU is offered again."""

    reason: str


class Note(msgspec.Struct, frozen=True):
    """An event that does not change whether the GPU is offered."""

    reason: str
    xid: int | None = None
    is_programs: bool = False
    """The owners of its programs are informed."""


Decision = TakeOut | PutBack | Note


class HealthStep(msgspec.Struct, frozen=True):
    """A GPU's new record, and the decisions."""

    record: Record
    decisions: tuple[Decision, ...] = ()


def step(record: Record, event: Event, *, now: float, rules: Rules) -> HealthStep:
    match event:
        case XidSeen():
            return _on_xid(record, event, now, rules)
        case Look():
            return _on_alive(record, event.vitals, now, rules)
        case Silent():
            return _on_quiet(record, event.for_s, now, rules)
        case ReadFailure():
            return _on_broken(record, event, now, rules)
        case Gone() | Hidden():
            return _on_missing(record, event, now, rules)
        case Probed():
            return _on_probed(record, event.complaint, now, rules)
        case _:
            assert_never(event)


# ---- changes of state ----------------------------------------------------------------------------


def _take_out(
    record: Record, reason: str, need: Need, *, now: float, rules: Rules, action: Action | None
) -> HealthStep:
    """Make the GPU unhealthy; an unhealthy one changes only if it needs more than before."""
    if record.state is HealthState.UNHEALTHY and not _is_worse(need, record.need):
        return HealthStep(record)
    recent = tuple(at for at in record.taken_out if now - at < rules.memory_s)
    made = replace(
        record,
        state=HealthState.UNHEALTHY,
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
    return HealthStep(made, (TakeOut(reason),))


def _is_worse(need: Need, than: Need) -> bool:
    order = list(Need)
    return order.index(need) > order.index(than)


def _suspect(record: Record, reason: str, *, test_at: float, now: float) -> Record:
    """Schedule a test. A suspect GPU keeps its reason and the earlier time."""
    if record.state is HealthState.SUSPECT:
        due = test_at if record.test_at is None else min(test_at, record.test_at)
        return replace(record, test_at=due)
    return replace(record, state=HealthState.SUSPECT, reason=reason, since=now, test_at=test_at)


def _healthy(record: Record, *, now: float) -> Record:
    return Record(
        since=now,
        vitals=record.vitals,
        memory_xid_at=record.memory_xid_at,
        taken_out=record.taken_out,
    )


def _recovering(record: Record, *, now: float) -> HealthStep:
    made = replace(
        record, state=HealthState.RECOVERING, need=Need.NOTHING, since=now, test_at=now, passed=0
    )
    return HealthStep(made, (Note(f"{record.reason}: it answers again, and is tested"),))


def _tests_needed(record: Record, rules: Rules) -> int:
    """Twice as many for each recent failure."""
    times = max(0, len(record.taken_out) - 1)
    return min(rules.tests_to_pass << min(times, 16), rules.most_tests)


def _pause_s(record: Record, rules: Rules) -> float:
    return min(rules.test_pause_s * (1 << min(record.failed, 16)), rules.longest_pause_s)


# ---- events, one by one --------------------------------------------------------------------------


def _on_xid(record: Record, seen: XidSeen, now: float, rules: Rules) -> HealthStep:
    effect = seen.action.effect
    if effect is Effect.NOTHING:
        return HealthStep(record)
    text = f"{describe_xid(seen.xid)}: {seen.action.words}"
    record = replace(
        record,
        xid=seen.xid if record.is_offered or record.xid is None else record.xid,
        memory_xid_at=now if seen.xid in MEMORY_XIDS else record.memory_xid_at,
    )
    if effect is Effect.REPORT:
        return HealthStep(record, (Note(text, xid=seen.xid),))
    if effect is Effect.TEST:
        return _on_mild_xid(record, Note(text, xid=seen.xid, is_programs=True), now, rules)
    need = Need.RESET if effect is Effect.WAIT_FOR_RESET else Need.TESTS
    return _take_out(record, text, need, now=now, rules=rules, action=seen.action)


def _on_mild_xid(record: Record, note: Note, now: float, rules: Rules) -> HealthStep:
    match record.state:
        case HealthState.HEALTHY | HealthState.SUSPECT:
            return HealthStep(_suspect(record, note.reason, test_at=now, now=now), (note,))
        case HealthState.RECOVERING:
            return HealthStep(replace(record, passed=0, test_at=now + rules.test_pause_s), (note,))
        case HealthState.UNHEALTHY:
            return HealthStep(record, (note,))
        case _:
            assert_never(record.state)


def _on_alive(record: Record, vitals: Vitals, now: float, rules: Rules) -> HealthStep:
    before = record.vitals
    calm_since = _calm_since(record, vitals, now)
    record = replace(record, vitals=vitals, calm_since=calm_since)
    record = replace(record, is_lost=False, is_hidden=False)
    if complaint := complaint_of(vitals, rules):
        text, action = complaint
        text = f"{text}: {action.words}"
        return _take_out(record, text, Need.RESET, now=now, rules=rules, action=action)
    if count := _unannounced_errors(record, before, now, rules):
        action = rules.memory_errors
        need = Need.RESET if action.effect is Effect.WAIT_FOR_RESET else Need.TESTS
        text = f"{count} new uncorrected memory errors: {action.words}"
        record = replace(record, xid=MEMORY_XID)
        return _take_out(record, text, need, now=now, rules=rules, action=action)
    if record.state is not HealthState.UNHEALTHY or not rules.recovers:
        return HealthStep(record)
    is_reset = record.was_away or was_reset(before, vitals) or _is_calm(record, now, rules)
    if record.need is Need.ANSWER or (record.need is Need.RESET and is_reset):
        return _recovering(record, now=now)
    return HealthStep(record)


def _unannounced_errors(record: Record, before: Vitals | None, now: float, rules: Rules) -> int:
    if rules.memory_errors.effect not in {Effect.TAKE_OUT, Effect.WAIT_FOR_RESET}:
        return 0
    announced = record.memory_xid_at is not None and now - record.memory_xid_at < rules.sympathy_s
    if announced or record.vitals is None or record.state is HealthState.UNHEALTHY:
        return 0
    return new_errors(before, record.vitals)


def _calm_since(record: Record, vitals: Vitals, now: float) -> float | None:
    if vitals.recovery_action != 0:
        return None
    return now if record.calm_since is None else record.calm_since


def _is_calm(record: Record, now: float, rules: Rules) -> bool:
    """Return whether the driver reports no action for an XID that changes this report."""
    if rules.drivers_word is Action.IGNORE or record.calm_since is None:
        return False
    if record.xid not in LINKED:
        return False
    return now - record.calm_since >= rules.calm_s


def _on_quiet(record: Record, for_s: float, now: float, rules: Rules) -> HealthStep:
    text = (
        f"it has not answered for {for_s:.0f} s (it may take {rules.silence_s:.0f} s):"
        " see the kernel's log; it may need a reset"
    )
    if for_s >= rules.silence_s:
        action = Action.RESET_GPU
        return _take_out(record, text, Need.ANSWER, now=now, rules=rules, action=action)
    if record.state in {HealthState.HEALTHY, HealthState.SUSPECT}:
        return HealthStep(_suspect(record, text, test_at=now + rules.test_pause_s, now=now))
    return HealthStep(record)


def _on_broken(record: Record, broken: ReadFailure, now: float, rules: Rules) -> HealthStep:
    if broken.is_lost or broken.is_driver:
        # A library that does not match the driver disturbs no program that runs.
        return _on_away(record, broken.message, now, rules, is_lost=broken.is_lost)
    if broken.needs_reset:
        action = Action.RESET_GPU
        text = f"{broken.message}: {action.words}"
        done = _take_out(record, text, Need.RESET, now=now, rules=rules, action=action)
        # It answers only after the reset.
        return HealthStep(replace(done.record, was_away=True), done.decisions)
    if record.state is HealthState.HEALTHY:
        due = now + rules.test_pause_s
        return HealthStep(_suspect(record, broken.message, test_at=due, now=now))
    return _take_out(record, broken.message, Need.ANSWER, now=now, rules=rules, action=None)


def _on_away(record: Record, text: str, now: float, rules: Rules, *, is_lost: bool) -> HealthStep:
    action = Action.RESTART_NODE
    text = f"{text}: it is tested when it is back; if it does not come back, {action.words}"
    done = _take_out(record, text, Need.ANSWER, now=now, rules=rules, action=action)
    away = replace(done.record, was_away=True, is_lost=record.is_lost or is_lost, is_hidden=False)
    return HealthStep(away, done.decisions)


def _on_missing(record: Record, event: Gone | Hidden, now: float, rules: Rules) -> HealthStep:
    """Offer the GPU to no new container. A hidden one that NVML reported as lost stays lost."""
    if isinstance(event, Gone):
        return _on_away(record, event.reason, now, rules, is_lost=True)
    done = _take_out(record, event.reason, Need.ANSWER, now=now, rules=rules, action=None)
    return HealthStep(replace(done.record, is_hidden=not record.is_lost), done.decisions)


def _on_probed(record: Record, complaint: str | None, now: float, rules: Rules) -> HealthStep:
    if record.state is HealthState.HEALTHY or record.need in {Need.ANSWER, Need.RESET}:
        return HealthStep(record)
    if complaint is not None:
        return _on_failed_test(record, complaint, now, rules)
    if record.state is HealthState.SUSPECT:
        return HealthStep(_healthy(record, now=now))
    if not rules.recovers:
        return HealthStep(replace(record, test_at=now + rules.test_pause_s))
    passed = record.passed + 1
    needed = _tests_needed(record, rules)
    if passed >= needed:
        text = f"{passed} tests passed; it was out of service for: {record.reason}"
        return HealthStep(_healthy(record, now=now), (PutBack(text),))
    return HealthStep(
        replace(
            record,
            state=HealthState.RECOVERING,
            need=Need.NOTHING,
            passed=passed,
            test_at=now + rules.test_pause_s,
        )
    )


def _on_failed_test(record: Record, complaint: str, now: float, rules: Rules) -> HealthStep:
    if record.is_offered:
        text = f"{record.reason}; its test failed: {complaint}"
        return _take_out(
            record, text, Need.TESTS, now=now, rules=rules, action=record.action or Action.TEST
        )
    worse = replace(record, failed=record.failed + 1)
    made = replace(
        worse,
        state=HealthState.UNHEALTHY,
        need=Need.TESTS,
        passed=0,
        test_at=now + _pause_s(worse, rules),
    )
    return HealthStep(made)


_DRIVER_ACTIONS: Final = {
    1: ("the driver says that the GPU needs a reset", Action.RESET_GPU),
    2: ("the driver says that the node needs a restart", Action.RESTART_NODE),
    3: ("the driver says that traffic between GPUs has to be drained", Action.RESET_GPU),
    4: ("the driver says that the GPU has to be drained and reset", Action.RESET_GPU),
    5: ("the driver says that its IMEX domain has to be recovered", Action.CONTACT_SUPPORT),
    6: ("the driver says that the GPU's bus needs a reset", Action.RESET_GPU),
    7: ("the driver says that the node needs a restart", Action.RESTART_NODE),
}

# The XID that stands for a higher count of uncorrected memory errors.
MEMORY_XID: Final = 48
# XIDs that announce uncorrected errors, which the count then repeats.
MEMORY_XIDS: Final = frozenset({48, 63, 64, 94, 95, 140, 171, 172})


def complaint_of(vitals: Vitals, rules: Rules) -> tuple[str, Action] | None:
    """Return the problem that a GPU's vitals show, and the action; None: none."""
    if rules.drivers_word is not Action.IGNORE and vitals.recovery_action:
        return _DRIVER_ACTIONS.get(
            vitals.recovery_action,
            (f"the driver asks for recovery action {vitals.recovery_action}", Action.RESET_GPU),
        )
    if vitals.is_repair_failed and rules.failed_repairs.effect is Effect.WAIT_FOR_RESET:
        return "rows of its memory could not be repaired: no spare ones are left", (
            Action.CONTACT_SUPPORT
        )
    return None


def was_reset(before: Vitals | None, after: Vitals) -> bool:
    """Return whether the GPU was initialised between two looks: a counter went down."""
    if before is None:
        return False
    if before.recovery_action and after.recovery_action == 0:
        return True
    if before.is_repair_pending and after.is_repair_pending is False:
        return True
    counts = (
        (before.energy_mj, after.energy_mj),
        (before.ecc_uncorrected, after.ecc_uncorrected),
        (before.ecc_corrected, after.ecc_corrected),
    )
    return any(old is not None and new is not None and new < old for old, new in counts)


def new_errors(before: Vitals | None, after: Vitals) -> int:
    """Return the number of new uncorrected memory errors."""
    if before is None or before.ecc_uncorrected is None or after.ecc_uncorrected is None:
        return 0
    return max(0, after.ecc_uncorrected - before.ecc_uncorrected)

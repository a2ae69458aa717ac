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
from enum import StrEnum
from typing import Final, assert_never

from allotment.agent.health.actions import Action, Effect, describe_xid
from allotment.agent.health.xids import LINKED
from allotment.devices.watching import Vitals

__all__ = [
    "Absent",
    "Alive",
    "Broken",
    "Decision",
    "Event",
    "Need",
    "Note",
    "Probed",
    "PutBack",
    "Quiet",
    "Record",
    "Rules",
    "State",
    "Step",
    "TakeOut",
    "XidSeen",
    "complaint_of",
    "step",
    "was_reset",
]


class State(StrEnum):
    """Where a GPU stands."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    UNHEALTHY = "unhealthy"
    RECOVERING = "recovering"


class Need(StrEnum):
    """What has to be seen before an unhealthy GPU is tested."""

    NOTHING = "nothing"
    TESTS = "tests"
    ANSWER = "an answer"
    RESET = "a reset"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How patient one is; times in seconds."""

    silence_s: float = 10.0
    """So long a GPU may not answer before it is unhealthy."""
    test_pause_s: float = 5.0
    """Between tests, and after the first failed one."""
    longest_pause_s: float = 600.0
    tests_to_pass: int = 2
    most_tests: int = 64
    memory_s: float = 3600.0
    """So long it counts against a GPU that it was taken out."""
    calm_s: float = 10.0
    """So long the driver has to say that nothing has to be done, to be believed."""
    sympathy_s: float = 60.0
    """So long after an XID about memory errors, counts of them are taken for its own."""
    recovers: bool = True
    """False: what is unhealthy stays so until the agent starts anew."""
    memory_errors: Action = Action.RESET_GPU
    """What uncorrected memory errors mean that no XID announced: the policy's for XID 48."""
    failed_repairs: Action = Action.RESET_GPU
    """What rows that cannot be remapped mean: the policy's for XID 64."""
    drivers_word: Action = Action.TEST
    """What the driver's recovery action means: the policy's for XID 154. IGNORE: nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """All that is remembered of one GPU. Times are of one clock that only goes forward."""

    state: State = State.HEALTHY
    need: Need = Need.NOTHING
    reason: str = ""
    """What is wrong, for people; empty while nothing is."""
    action: Action | None = None
    """What people have to do about it."""
    xid: int | None = None
    since: float = 0.0
    """When it came into this state."""
    test_at: float | None = None
    """When the next test is due."""
    passed: int = 0
    """Tests passed in a row."""
    failed: int = 0
    """Tests failed since it was taken out."""
    was_away: bool = False
    """Since it was taken out it was lost or gone, or the driver was."""
    calm_since: float | None = None
    """Since when the driver has said that nothing has to be done."""
    vitals: Vitals | None = None
    """The last ones it told."""
    memory_xid_at: float | None = None
    """When an XID about memory errors was last seen."""
    taken_out: tuple[float, ...] = ()
    """When it was, as far as that counts against it."""

    @property
    def is_offered(self) -> bool:
        """Whether containers may get it."""
        return self.state in {State.HEALTHY, State.SUSPECT}

    def check_invariants(self) -> None:
        """Raise `AssertionError` for a record that cannot be."""
        healthy = self.state is State.HEALTHY
        assert healthy == (self.reason == ""), self  # noqa: S101 - what the name says
        assert (self.need is not Need.NOTHING) == (self.state is State.UNHEALTHY), self  # noqa: S101
        testing = self.state in {State.SUSPECT, State.RECOVERING}
        assert not testing or self.test_at is not None, self  # noqa: S101
        assert not healthy or self.test_at is None, self  # noqa: S101
        assert self.need is not Need.TESTS or self.test_at is not None, self  # noqa: S101
        assert self.state is State.RECOVERING or self.passed == 0, self  # noqa: S101


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


# ---- what vitals say -----------------------------------------------------------------------------

_DRIVER_ACTIONS: Final = {
    1: ("the driver says that the GPU needs a reset", Action.RESET_GPU),
    2: ("the driver says that the node needs a restart", Action.RESTART_NODE),
    3: ("the driver says that traffic between GPUs has to be drained", Action.RESET_GPU),
    4: ("the driver says that the GPU has to be drained and reset", Action.RESET_GPU),
    5: ("the driver says that its IMEX domain has to be recovered", Action.CONTACT_SUPPORT),
    6: ("the driver says that the GPU's bus needs a reset", Action.RESET_GPU),
    7: ("the driver says that the node needs a restart", Action.RESTART_NODE),
}

# What counts of uncorrected memory errors stand for.
_MEMORY_XID: Final = 48
# XIDs that come with a count of uncorrected errors: those speak for it.
_MEMORY_XIDS: Final = frozenset({48, 63, 64, 94, 95, 140, 171, 172})


def complaint_of(vitals: Vitals, rules: Rules) -> tuple[str, Action] | None:
    """Return what a GPU's vitals say against using it, and what has to be done."""
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
    """Tell whether the GPU was initialised between two looks: what only grows became less."""
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


def _new_errors(before: Vitals | None, after: Vitals) -> int:
    """Return how many uncorrected memory errors came between two looks."""
    if before is None or before.ecc_uncorrected is None or after.ecc_uncorrected is None:
        return 0
    return max(0, after.ecc_uncorrected - before.ecc_uncorrected)


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
        memory_xid_at=now if seen.xid in _MEMORY_XIDS else record.memory_xid_at,
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
        record = replace(record, xid=_MEMORY_XID)
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
    return _new_errors(before, record.vitals)


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

# SPDX-License-Identifier: Apache-2.0
"""Slices, while their makers die at any step and others make and remove instances beside.

Whatever happens: nothing of others is touched, nothing of ours is lost.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from mig_twin import A100, Crash, MigTwin, Twin

from allotment.model.errors import AllotError
from allotment.modes.mig.journal import Journal, SliceRecord, Stage, foreign
from allotment.modes.mig.slices import FreedSlices, Slices

PROFILES = st.sampled_from(A100)
STEPS = st.none() | st.integers(0, 9)
FAILURES = st.sets(
    st.sampled_from(
        [
            "create_gpu_instance",
            "create_compute_instance",
            "destroy_compute_instances",
            "destroy_gpu_instance",
        ]
    ),
    max_size=2,
)


class Beside(RuleBasedStateMachine):
    """Ours and others on one GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="mig-journal-"))
        self.journal = Journal(self.root / "mig" / "GPU-0")
        self.driver = MigTwin()
        self.now = 1000.0
        self.slices = Slices(self.driver, self.journal, clock=lambda: self.now)
        self.holders: set[str] = set()
        self.made = 0

    def teardown(self) -> None:
        """Nobody holds anything, nothing fails any more: what is left is others'."""
        self.driver.failing = set()
        self.driver.steps_left = None
        for twin in self.driver.there.values():
            twin.users.clear()
        settled = self.slices.free_orphans(lambda _: False, keep_s=0)
        assert not settled.stuck
        assert not self.driver.touched
        assert all(twin.owner == "foreign" for twin in self.driver.there.values())
        assert self.journal.read().records == ()
        assert [each.name for each in self.journal.folder.iterdir()] == ["lock"]
        shutil.rmtree(self.root)

    def attempt(self, steps: int | None, failing: set[str]) -> None:
        self.driver.steps_left, self.driver.failing = steps, failing

    def over(self) -> None:
        self.driver.steps_left, self.driver.failing = None, set()

    # ---- ours ------------------------------------------------------------------------------------

    @rule(profile=PROFILES, at=st.integers(0, 6), steps=STEPS, failing=FAILURES)
    def cut(self, profile: object, at: int, steps: int | None, failing: set[str]) -> None:
        chosen = next(each for each in A100 if each is profile)
        start = chosen.starts[at % len(chosen.starts)]
        self.made += 1
        holder = f"share-{self.made}"
        self.attempt(steps, failing)
        try:
            with self.slices.cut(chosen.name, start, holder=holder) as work:
                record = work.record
                assert record.stage is Stage.READY
                assert self.driver.there[record.gpu_instance or 0].uuid == record.uuid
                self.holders.add(holder)
        except (Crash, AllotError):
            pass
        finally:
            self.over()

    @rule(pick=st.integers(0, 7), steps=STEPS)
    def bind(self, pick: int, steps: int | None) -> None:
        records = self.journal.read().records
        if not records:
            return
        self.made += 1
        self.attempt(steps, set())
        try:
            name = records[pick % len(records)].id
            with self.slices.bind(name, f"share-{self.made}"):
                self.holders.add(f"share-{self.made}")
        except (Crash, AllotError):
            pass
        finally:
            self.over()

    @rule(pick=st.integers(0, 7))
    def end_a_holder(self, pick: int) -> None:
        if self.holders:
            self.holders.discard(sorted(self.holders)[pick % len(self.holders)])

    @rule(pick=st.integers(0, 7), steps=STEPS, failing=FAILURES)
    def remove(self, pick: int, steps: int | None, failing: set[str]) -> None:
        idle = [each for each in self.journal.read().records if each.holder not in self.holders]
        if not idle:
            return
        self.attempt(steps, failing)
        try:
            self.slices.remove(idle[pick % len(idle)].id)
        except (Crash, AllotError):
            pass
        finally:
            self.over()

    @rule(keep_s=st.sampled_from([0.0, 5.0, 50.0]), steps=STEPS, failing=FAILURES)
    def settle(self, keep_s: float, steps: int | None, failing: set[str]) -> None:
        self.attempt(steps, failing)
        try:
            settled = self.slices.free_orphans(self.holders.__contains__, keep_s=keep_s)
        except Crash:
            return
        finally:
            self.over()
        self.judge(settled)

    def judge(self, settled: FreedSlices) -> None:
        """Every instance is accounted for, and nothing that is held has gone."""
        records, instances = self.journal.read().records, self.driver.look().instances
        others = {each.gpu_instance for each in foreign(records, instances)}
        assert others == {n for n, twin in self.driver.there.items() if twin.owner == "foreign"}
        stuck = {record.id for record, _ in settled.stuck}
        assert stuck or all(record.stage is Stage.READY for record in self.journal.read().records)
        assert not any(record.holder in self.holders for record in settled.removed)

    # ---- time and programs -----------------------------------------------------------------------

    @rule(seconds=st.floats(0, 30))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(pick=st.integers(0, 7))
    def a_program_begins(self, pick: int) -> None:
        """In what has been given to somebody: ours that is held, or others'."""
        held = {each.uuid for each in self.journal.read().records if each.holder in self.holders}
        usable = [
            twin
            for twin in self.driver.there.values()
            if twin.uuid in held or (twin.owner == "foreign" and twin.uuid)
        ]
        if usable:
            usable[pick % len(usable)].users.add(4711)

    @rule()
    def programs_end(self) -> None:
        for twin in self.driver.there.values():
            twin.users.clear()

    # ---- others ----------------------------------------------------------------------------------

    @rule(profile=PROFILES, at=st.integers(0, 6), is_whole=st.booleans())
    def others_make(self, profile: object, at: int, is_whole: bool) -> None:  # noqa: FBT001
        chosen = next(each for each in A100 if each is profile)
        start = chosen.starts[at % len(chosen.starts)]
        places = {(each.profile, each.start) for each in self.half()}
        if not is_whole and (chosen.number, start) in places:
            return  # the one case that nobody can tell apart: `judging` says so
        with self.driver.foreign():
            try:
                made = self.driver.create_gpu_instance(chosen, start)
            except AllotError:
                return
            if is_whole:
                self.driver.create_compute_instance(made, chosen)

    @precondition(lambda self: self.half())
    @rule(pick=st.integers(0, 7))
    def others_make_what_ours_did_not(self, pick: int) -> None:
        """A whole one, in the place that a dead process intended."""
        half = self.half()
        with self.driver.foreign():
            record = half[pick % len(half)]
            chosen = next(each for each in A100 if each.number == record.profile)
            try:
                made = self.driver.create_gpu_instance(chosen, record.start)
            except AllotError:
                return
            self.driver.create_compute_instance(made, chosen)

    @rule(pick=st.integers(0, 7))
    def others_finish(self, pick: int) -> None:
        half = self.of_others(is_whole=False)
        if half:
            with self.driver.foreign():
                number, twin = half[pick % len(half)]
                self.driver.create_compute_instance(number, twin.profile)

    @rule(pick=st.integers(0, 7))
    def others_remove_theirs(self, pick: int) -> None:
        theirs = [each for each in self.of_others(is_whole=True) if not each[1].users]
        if theirs:
            with self.driver.foreign():
                number, _ = theirs[pick % len(theirs)]
                self.driver.destroy_compute_instances(number)
                self.driver.destroy_gpu_instance(number)

    @precondition(lambda self: any(twin.owner == "ours" for twin in self.driver.there.values()))
    @rule(pick=st.integers(0, 7), again=st.booleans())
    def others_fight(self, pick: int, again: bool) -> None:  # noqa: FBT001
        """A manager removes a whole one of ours, and perhaps makes its own in its place."""
        ready = {each.uuid for each in self.journal.read().records if each.stage is Stage.READY}
        ours = [
            (number, twin)
            for number, twin in sorted(self.driver.there.items())
            if twin.uuid in ready and not twin.users
        ]
        if not ours:
            return
        number, twin = ours[pick % len(ours)]
        del self.driver.there[number]
        if again:
            with self.driver.foreign():
                made = self.driver.create_gpu_instance(twin.profile, twin.start)
                self.driver.create_compute_instance(made, twin.profile)

    def half(self) -> list[SliceRecord]:
        return [each for each in self.journal.read().records if each.stage is not Stage.READY]

    def of_others(self, *, is_whole: bool) -> list[tuple[int, Twin]]:
        return [
            (number, twin)
            for number, twin in sorted(self.driver.there.items())
            if twin.owner == "foreign" and (twin.compute is not None) is is_whole
        ]

    # ---- always ----------------------------------------------------------------------------------

    @invariant()
    def nothing_of_others_is_touched(self) -> None:
        assert not self.driver.touched

    @invariant()
    def all_of_ours_is_written_down(self) -> None:
        records = self.journal.read().records
        places = {(each.profile, each.start) for each in records}
        ours = {
            (twin.profile.number, twin.start)
            for twin in self.driver.there.values()
            if twin.owner == "ours"
        }
        assert ours <= places


TestBeside = Beside.TestCase
TestBeside.settings = settings(stateful_step_count=40)

# SPDX-License-Identifier: Apache-2.0
"""Slices of one GPU, and their records."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from mig_twin import Crash, MigTwin

from allotment.model.errors import (
    AllotError,
    BusyError,
    DoesNotFitError,
    NotFoundError,
    StateError,
    UsageError,
)
from allotment.model.mig import MigGpu, MigInstance, MigProfile
from allotment.model.structs import replace
from allotment.modes.mig.journal import (
    Journal,
    RecordVerdict,
    SliceRecord,
    Stage,
    decode,
    encode,
    foreign,
    judge,
    stands_for,
)
from allotment.modes.mig.slices import ModeChangedError, Slices

RECORD = SliceRecord(
    id="a", gpu="GPU-0", profile=19, name="1g.5gb", start=6, size=1, stage=Stage.INTENDED
)
HALF = MigInstance(profile=19, start=6, size=1, gpu_instance=13)
WHOLE = replace(HALF, compute_instance=0, uuid="MIG-1")


@pytest.fixture
def driver() -> MigTwin:
    return MigTwin()


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "mig" / "GPU-0")


@pytest.fixture
def slices(driver: MigTwin, journal: Journal) -> Slices:
    return Slices(driver, journal, clock=lambda: 1000.0)


def cut(
    slices: Slices,
    name: str = "1g.5gb",
    start: int = 6,
    holder: str = "",
    *,
    switches: bool = False,
) -> SliceRecord:
    with slices.cut(name, start, holder=holder, switches=switches) as work:
        return work.record


# ---- judging -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "there", "verdict"),
    [
        pytest.param(Stage.INTENDED, None, RecordVerdict.FORGET, id="intended, never made"),
        pytest.param(Stage.INTENDED, HALF, RecordVerdict.REMOVE, id="intended, made, unknown"),
        pytest.param(
            Stage.INTENDED, WHOLE, RecordVerdict.FORGET, id="intended, others came between"
        ),
        pytest.param(Stage.CUT, None, RecordVerdict.FORGET, id="cut, removed by others"),
        pytest.param(Stage.CUT, HALF, RecordVerdict.REMOVE, id="cut, without compute instance"),
        pytest.param(Stage.CUT, WHOLE, RecordVerdict.REMOVE, id="cut, whole, UUID unknown"),
        pytest.param(
            Stage.CUT, replace(WHOLE, gpu_instance=4), RecordVerdict.FORGET, id="cut, another's id"
        ),
        pytest.param(Stage.READY, WHOLE, RecordVerdict.KEEP, id="ready"),
        pytest.param(Stage.READY, HALF, RecordVerdict.FORGET, id="ready, others took it apart"),
        pytest.param(
            Stage.READY, replace(WHOLE, uuid="MIG-2"), RecordVerdict.FORGET, id="ready, made anew"
        ),
        pytest.param(Stage.LEAVING, None, RecordVerdict.FORGET, id="leaving, gone"),
        pytest.param(Stage.LEAVING, HALF, RecordVerdict.REMOVE, id="leaving, half gone"),
        pytest.param(Stage.LEAVING, WHOLE, RecordVerdict.REMOVE, id="leaving, not begun"),
        pytest.param(
            Stage.LEAVING,
            replace(WHOLE, uuid="MIG-2"),
            RecordVerdict.FORGET,
            id="leaving, made anew",
        ),
    ],
)
def test_what_a_record_stands_for(
    stage: Stage, there: MigInstance | None, verdict: RecordVerdict
) -> None:
    known = None if stage is Stage.INTENDED else 13
    uuid = "MIG-1" if stage in {Stage.READY, Stage.LEAVING} else ""
    record = replace(RECORD, stage=stage, uuid=uuid, gpu_instance=known)
    found = stands_for(record, () if there is None else (there,))
    assert judge(record, found, is_used=False) is verdict
    others = foreign((record,), () if there is None else (there,))
    assert bool(others) is (there is not None and found is None)


def test_what_is_used_before_it_was_given_to_anybody_is_not_ours() -> None:
    record = replace(RECORD, stage=Stage.CUT, gpu_instance=13)
    assert judge(record, WHOLE, is_used=True) is RecordVerdict.FORGET


# ---- making and removing -------------------------------------------------------------------------


def test_a_slice_is_made_held_kept_warm_and_removed(
    slices: Slices, driver: MigTwin, journal: Journal
) -> None:
    record = cut(slices, holder="share-1")
    assert (record.stage, record.holder, record.start) == (Stage.READY, "share-1", 6)
    assert journal.read().records == (record,)
    assert slices.free_orphans(lambda holder: holder == "share-1", keep_s=0).kept == [record]
    (warm,) = slices.free_orphans(lambda _: False, keep_s=60).kept
    assert (warm.holder, warm.idle_since) == ("", 1000.0)
    with slices.bind(record.id, "share-2") as work:
        assert work.record == replace(record, holder="share-2")
    assert slices.free_orphans(lambda _: False, keep_s=60).kept[0].idle_since == 1000.0
    assert [each.id for each in slices.free_orphans(lambda _: False, keep_s=0).removed] == [
        record.id
    ]
    assert driver.there == {}
    assert journal.read().records == ()


def test_what_others_remove_is_known_for_as_long_as_its_holder_is_there(
    slices: Slices, driver: MigTwin, journal: Journal
) -> None:
    record = cut(slices, holder="share-1")
    with driver.foreign():
        driver.destroy_compute_instances(record.gpu_instance or 0)
        driver.destroy_gpu_instance(record.gpu_instance or 0)
    settled = slices.free_orphans(lambda _: True, keep_s=0)
    assert (settled.lost, settled.forgotten) == ([record], [])
    # Its slots are free meanwhile; and who is there by then is another's.
    later = cut(slices, holder="share-2")
    assert later.uuid != record.uuid
    settled = slices.free_orphans(lambda _: True, keep_s=0)
    assert (settled.kept, settled.lost) == ([later], [record])
    assert slices.free_orphans(lambda holder: holder == "share-2", keep_s=0).forgotten == [record]
    assert journal.read().records == (later,)


def test_nobody_settles_what_somebody_works_on(
    slices: Slices, driver: MigTwin, journal: Journal
) -> None:
    with slices.cut("3g.20gb", 4, holder="not there yet") as work:
        settled = slices.free_orphans(lambda _: False, keep_s=0)
        assert (settled.removed, settled.forgotten) == ([], [])
        assert foreign(journal.read().records, driver.look().instances) == ()
        with pytest.raises(BusyError, match="being made or removed"):
            slices.remove(work.record.id)
    assert len(slices.free_orphans(lambda _: False, keep_s=0).removed) == 1
    assert journal.read().records == ()


def test_slots_are_taken_from_the_intention_on(driver: MigTwin, journal: Journal) -> None:
    """A second maker does not wait for the first one's driver, and does not take its place."""
    second = Slices(driver, journal)

    class Slow(MigTwin):
        def create_gpu_instance(self, profile: MigProfile, start: int) -> int:
            with pytest.raises(DoesNotFitError, match="slots 6 to 6"):
                second.cut("1g.5gb", 6)
            assert cut(second, start=5).start == 5
            return driver.create_gpu_instance(profile, start)

    slow = Slow()
    slow.there = driver.there
    assert cut(Slices(slow, journal), start=6).start == 6
    assert [each.start for each in journal.read().records] == [5, 6]


def test_eight_at_once_are_seven_and_a_refusal(journal: Journal) -> None:
    """Seven are in their driver calls at the same time; the eighth is refused, waiting for none."""
    inside = threading.Barrier(7, timeout=30)

    class Met(MigTwin):
        def create_gpu_instance(self, profile: MigProfile, start: int) -> int:
            inside.wait()
            return super().create_gpu_instance(profile, start)

    driver = Met()

    def one(number: int) -> SliceRecord | None:
        with suppress(DoesNotFitError):
            return cut(Slices(driver, journal), start=number % 7, holder=f"pod-{number}")
        return None

    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(one, range(8)))
    assert sum(each is None for each in made) == 1
    assert sorted(each.start for each in made if each) == list(range(7))
    assert len({each.uuid for each in made if each}) == 7


def test_a_slice_that_is_ready_just_after_the_look_is_in_the_way(journal: Journal) -> None:
    begun, looked = threading.Event(), threading.Event()

    class Slow(MigTwin):
        def create_gpu_instance(self, profile: MigProfile, start: int) -> int:
            begun.set()
            assert looked.wait(30)
            return super().create_gpu_instance(profile, start)

        def look(self) -> MigGpu:
            seen = super().look()
            if begun.is_set():
                looked.set()
                first.result(30)
            return seen

    driver = Slow()
    with ThreadPoolExecutor(1) as other:
        first = other.submit(cut, Slices(driver, journal))
        assert begun.wait(30)
        with pytest.raises(DoesNotFitError, match="in the way"):
            cut(Slices(driver, journal))


@pytest.mark.parametrize(
    ("failing", "left"),
    [
        ({"create_gpu_instance"}, 0),
        ({"create_compute_instance"}, 0),
        ({"create_compute_instance", "destroy_gpu_instance"}, 1),
    ],
    ids=["GPU instance", "compute instance", "and the roll-back"],
)
def test_a_failure_leaves_nothing_or_a_record_of_it(
    slices: Slices, driver: MigTwin, journal: Journal, failing: set[str], left: int
) -> None:
    driver.failing = failing
    with pytest.raises(AllotError, match="was made to fail"):
        slices.cut("2g.10gb", 4)
    assert len(driver.there) == len(journal.read().records) == left
    settled = slices.free_orphans(lambda _: True, keep_s=60)
    assert len(settled.stuck) == left
    driver.failing = set()
    slices.free_orphans(lambda _: True, keep_s=60)
    assert (driver.there, journal.read().records) == ({}, ())


def test_a_slice_in_use_stays(slices: Slices, driver: MigTwin) -> None:
    record = cut(slices)
    driver.there[6].users.add(4711)
    settled = slices.free_orphans(lambda _: False, keep_s=0)
    assert [each.id for each in settled.kept] == [record.id]
    assert settled.stuck == []
    with pytest.raises(BusyError, match="in use by processes 4711"):
        slices.remove(record.id)


def test_what_is_given_away_is_the_machines(
    slices: Slices, driver: MigTwin, journal: Journal
) -> None:
    record = cut(slices)
    slices.give_away(record.id)
    slices.free_orphans(lambda _: False, keep_s=0)
    (left,) = foreign(journal.read().records, driver.look().instances)
    assert left.uuid == record.uuid
    assert len(driver.there) == 1


@pytest.mark.parametrize(
    ("name", "start", "message"),
    [
        ("1g.6gb", 0, r"has no MIG profile '1g.6gb'"),
        ("3g.20gb", 1, r"3g.20gb cannot begin at slot 1"),
    ],
)
def test_what_the_gpu_does_not_have(slices: Slices, name: str, start: int, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        slices.cut(name, start)
    assert caught.value.hint


def test_mode_is_off(slices: Slices, driver: MigTwin) -> None:
    driver.is_enabled = False
    with pytest.raises(ModeChangedError, match="not in MIG mode"):
        slices.cut("1g.5gb", 0)


def test_a_warm_slice_is_bound_once(slices: Slices) -> None:
    record = cut(slices)
    with slices.bind(record.id, "one"):
        pass
    with pytest.raises(BusyError, match="not free"):
        slices.bind(record.id, "two")
    with pytest.raises(NotFoundError):
        slices.bind("nobody", "two")


# ---- how long, and the GPU's mode ---------------------------------------------------------------


def test_a_slice_is_kept_as_long_as_its_last_holder_wants(
    driver: MigTwin, journal: Journal
) -> None:
    now = 1000.0
    slices = Slices(driver, journal, clock=lambda: now)
    with slices.cut("1g.5gb", 6, holder="one", keep_s=60) as work:
        name = work.record.id
    assert not slices.free_orphans(lambda _: False, keep_s=0).removed
    now = 1059.0
    assert not slices.free_orphans(lambda _: False, keep_s=0).removed
    with slices.bind(name, "two", keep_s=5):
        pass
    assert not slices.free_orphans(lambda _: False, keep_s=0).removed
    now = 1065.0
    assert [each.id for each in slices.free_orphans(lambda _: False, keep_s=0).removed] == [name]


def test_a_mode_that_we_switched_goes_with_the_last_slice(
    driver: MigTwin, slices: Slices, journal: Journal
) -> None:
    driver.is_enabled = False
    journal.note_switched()
    assert (driver.is_enabled, journal.is_switched) == (False, True)
    record = cut(slices, switches=True)
    assert (driver.is_enabled, journal.is_switched) == (True, True)
    assert not slices.switch_off()
    slices.remove(record.id)
    with driver.foreign():
        theirs = driver.create_gpu_instance(driver.profiles[0], 0)
    assert not slices.switch_off(), "somebody else has a slice there"
    assert driver.is_enabled
    with driver.foreign():
        driver.destroy_gpu_instance(theirs)
    assert slices.switch_off()
    assert (driver.is_enabled, journal.is_switched) == (False, False)


def test_each_time_that_others_had_switched_a_mode_off_is_counted_under_one_claim(
    driver: MigTwin, slices: Slices, journal: Journal
) -> None:
    driver.is_enabled = False
    journal.note_switched()
    claim = journal.claim
    for times in range(3):
        assert (journal.times_switched, journal.claim) == (times, claim)
        driver.is_enabled = False
        assert slices.switch_on()
        assert not slices.switch_on(), "it is on"
    journal.note_switched()
    assert journal.times_switched == 0
    assert journal.claim != claim


def test_a_mode_of_others_stays(driver: MigTwin, slices: Slices, journal: Journal) -> None:
    slices.remove(cut(slices, switches=True).id)  # it is on already
    assert not journal.is_switched
    assert not slices.switch_off()
    assert driver.is_enabled


@pytest.mark.parametrize("steps", range(4))
def test_a_crash_while_switching_is_put_right(
    driver: MigTwin, slices: Slices, journal: Journal, steps: int
) -> None:
    driver.is_enabled = False
    driver.steps_left = steps
    journal.note_switched()
    with pytest.raises(Crash):
        cut(slices, switches=True)
    driver.steps_left = None
    assert driver.is_enabled <= journal.is_switched, "a mode that is ours is written down"
    slices.free_orphans(lambda _: False, keep_s=0)
    slices.switch_off()
    assert (driver.is_enabled, journal.is_switched) == (False, False)


def test_a_mode_that_the_driver_refuses_is_not_ours(
    driver: MigTwin, slices: Slices, journal: Journal
) -> None:
    driver.is_enabled = False
    driver.failing = {"set_mode"}
    journal.note_switched()
    with pytest.raises(AllotError):
        cut(slices, switches=True)
    assert not journal.is_switched
    with pytest.raises(ModeChangedError):
        cut(slices, switches=True)  # others may have the GPU by now
    assert (driver.is_enabled, journal.read().records) == (False, ())


# ---- records -------------------------------------------------------------------------------------


def test_a_record_is_read_as_it_was_written() -> None:
    record = replace(
        RECORD, holder="share", idle_since=1.5, keep_s=2.5, gpu_instance=0, compute_instance=0
    )
    assert decode(encode(record), source="x") == record
    newer = encode(record).replace(b'{"version"', b'{"new": [1], "version"')
    assert decode(newer, source="x") == record


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data.replace(b'"version":1', b'"version":2'),
        lambda data: data.replace(b'"start":6', b'"start":"6"'),
        lambda _: b"",
    ],
    ids=["truncated", "newer", "changed", "empty"],
)
def test_a_damaged_record_is_named_and_hinders_nothing(
    slices: Slices, driver: MigTwin, journal: Journal, damage: Callable[[bytes], bytes]
) -> None:
    record = cut(slices)
    path = journal.folder / record.id / "slice.json"
    path.write_bytes(damage(path.read_bytes()))
    other = cut(slices, start=5)
    settled = slices.free_orphans(lambda _: True, keep_s=60)
    assert [each.id for each in settled.kept] == [other.id]
    others = foreign(journal.read().records, driver.look().instances)
    assert [each.uuid for each in others] == [record.uuid]
    assert [str(path) in each.message for each in settled.problems] == [True]


def test_what_a_crash_left_of_writing_is_swept(slices: Slices, journal: Journal) -> None:
    cut(slices)
    (journal.folder / ".new-0123").mkdir()
    (journal.folder / "4567").mkdir()
    (journal.folder / "89ab").mkdir()
    (journal.folder / "89ab" / ".slice.json").write_bytes(b"{")
    slices.free_orphans(lambda _: True, keep_s=60)
    assert len(list(journal.folder.iterdir())) == 2  # the lock and the slice


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: gives a folder to another user")
def test_another_users_folder_is_refused(slices: Slices, journal: Journal) -> None:
    journal.folder.mkdir(parents=True)
    os.chown(journal.folder, 12345, 12345)
    with pytest.raises(StateError, match="belongs to another user"):
        slices.cut("1g.5gb", 0)

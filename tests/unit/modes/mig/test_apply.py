# SPDX-License-Identifier: Apache-2.0
"""What is done for a GPU to be as a configuration says: what differs, and nothing else."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from mig_twin import A100, Crash, MigTwin

from allotment.model.errors import (
    AllotError,
    BusyError,
    NotFoundError,
    PrerequisiteError,
    UsageError,
)
from allotment.modes.mig.apply import (
    Changer,
    GpuChange,
    Occupied,
    counts_of,
    has_what_is_wanted,
    occupied_by,
    plan,
)
from allotment.modes.mig.files import ConfigEntry
from allotment.modes.mig.journal import Journal
from allotment.modes.mig.slices import Slices

OFF = ConfigEntry(devices="all", mig_enabled=False)
NAMES = st.sampled_from([each.name for each in A100])
WANTED = st.dictionaries(NAMES, st.integers(1, 7), max_size=3)


def wants(**counts: int) -> ConfigEntry:
    names = {name.replace("_", "."): count for name, count in counts.items()}
    return ConfigEntry(devices="all", mig_enabled=True, mig_devices=names)


def on(driver: MigTwin, *places: tuple[str, int]) -> None:
    """Lets others make these."""
    with driver.foreign():
        for name, start in places:
            profile = next(each for each in A100 if each.name == name)
            driver.create_compute_instance(driver.create_gpu_instance(profile, start), profile)


def planned(driver: MigTwin, entry: ConfigEntry) -> GpuChange:
    gpu = driver.look()
    occupied = occupied_by(driver, gpu, Journal(Path("/nowhere")), shares={})
    return plan(gpu, entry, occupied, uuid=driver.uuid)


@pytest.fixture
def driver() -> MigTwin:
    return MigTwin()


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "mig" / "GPU-0")


def changer(driver: MigTwin, journal: Journal) -> Changer:
    return Changer(driver, journal, reset=lambda: None)


def test_what_is_as_wanted_is_left_alone(driver: MigTwin) -> None:
    on(driver, ("1g.5gb", 0), ("3g.20gb", 4))
    assert planned(driver, wants(**{"1g_5gb": 1, "3g_20gb": 1})).is_empty


def test_only_what_differs_is_touched(driver: MigTwin, journal: Journal) -> None:
    on(driver, ("1g.5gb", 0), ("1g.5gb", 1), ("3g.20gb", 4))
    uuids = {each.start: each.uuid for each in driver.look().instances}
    entry = wants(**{"1g_5gb": 1, "2g_10gb": 1, "3g_20gb": 1})
    change = planned(driver, entry)
    assert len(change.keep) == 2
    assert [name for name, _ in change.make] == ["2g.10gb"]
    changer(driver, journal).carry_out(change, entry)
    gpu = driver.look()
    assert has_what_is_wanted(gpu, entry)
    kept = {each.start: each.uuid for each in gpu.instances if each.uuid in uuids.values()}
    assert kept.items() <= uuids.items()
    assert len(kept) == 2
    assert journal.read().records == ()


def test_what_is_used_stays_where_it_is_wanted(driver: MigTwin) -> None:
    on(driver, ("1g.5gb", 0), ("1g.5gb", 3))
    driver.there[3].users.add(4711)
    change = planned(driver, wants(**{"1g_5gb": 1, "3g_20gb": 1}))
    assert [each.start for each in change.keep] == [3]
    assert [each.start for each in change.remove] == [0]
    assert change.make == (("3g.20gb", 4),)


def test_what_is_used_and_not_wanted_is_refused_with_who_uses_it(driver: MigTwin) -> None:
    on(driver, ("1g.5gb", 3))
    driver.there[3].users.add(4711)
    with pytest.raises(BusyError, match=r"1g.5gb at slot 3 by process 4711"):
        planned(driver, wants(**{"7g_40gb": 1}))
    with pytest.raises(BusyError, match=r"switched off while.*process 4711"):
        planned(driver, OFF)


def test_processes_are_named_by_whose_they_are(driver: MigTwin) -> None:
    on(driver, ("1g.5gb", 3), ("1g.5gb", 4), ("1g.5gb", 5))
    driver.there[3].users.update({11, 12, 13})
    driver.there[4].users.add(14)
    gpu = driver.look()
    owners = {11: "share default/train/main", 12: "share default/train/main", 14: None}
    occupied = occupied_by(
        driver,
        gpu,
        Journal(Path("/nowhere")),
        shares={},
        of_devices={gpu.instances[2].uuid: ["held"]},
        owners=lambda pids: {pid: who for pid, who in owners.items() if pid in pids},
    )
    ids = [each.gpu_instance for each in gpu.instances]
    assert [occupied.of(each) for each in ids] == [
        ("share default/train/main (process 11, process 12)", "process 13"),
        (),  # one that nobody is in who would be in the way
        ("share held",),
    ]


def test_a_shares_slice_is_in_use_without_a_process(driver: MigTwin, journal: Journal) -> None:
    slices = Slices(driver, journal)
    with slices.cut("1g.5gb", 6, holder="a1"):
        pass
    gpu = driver.look()
    occupied = occupied_by(driver, gpu, journal, shares={"a1": "train"})
    with pytest.raises(BusyError, match=r"1g.5gb at slot 6 by share train"):
        plan(gpu, wants(**{"2g_10gb": 1}), occupied, uuid="GPU-0")
    slices.free_orphans(lambda _: False, keep_s=60)
    ended = occupied_by(driver, gpu, journal, shares={})
    change = plan(gpu, wants(**{"2g_10gb": 1}), ended, uuid="GPU-0")
    changer(driver, journal).carry_out(change, wants(**{"2g_10gb": 1}))
    assert journal.read().records == ()
    assert counts_of(driver.look()) == {"2g.10gb": 1}


def test_what_a_share_has_is_in_use_whoever_made_it(driver: MigTwin, journal: Journal) -> None:
    on(driver, ("1g.5gb", 6))
    gpu = driver.look()
    of_devices = {gpu.instances[0].uuid: ("lab/one/main",), "GPU-0": ("train",)}
    occupied = occupied_by(driver, gpu, journal, shares={}, of_devices=of_devices)
    assert occupied.whole == ("share train",)
    with pytest.raises(BusyError, match=r"1g.5gb at slot 6 by share lab/one/main"):
        plan(gpu, wants(**{"2g_10gb": 1}), occupied, uuid="GPU-0")


def test_what_is_being_made_is_left_to_its_maker(driver: MigTwin, journal: Journal) -> None:
    with Slices(driver, journal).cut("1g.5gb", 6):
        occupied = occupied_by(driver, driver.look(), journal, shares={})
        with pytest.raises(BusyError, match="another process of Allotment"):
            plan(driver.look(), wants(**{"3g_20gb": 2}), occupied, uuid="GPU-0")
    assert occupied_by(driver, driver.look(), journal, shares={}).of(6) == ()


def test_a_slice_that_somebody_has_taken_meanwhile_is_not_removed(
    driver: MigTwin, journal: Journal
) -> None:
    slices = Slices(driver, journal)
    with slices.cut("1g.5gb", 6) as work:
        made = work.record
    entry = wants(**{"3g_20gb": 2})
    change = planned(driver, entry)
    with slices.bind(made.id, "a share that came between"):
        pass
    with pytest.raises(BusyError, match="held by a share that came between"):
        changer(driver, journal).carry_out(change, entry)
    assert driver.look().instances[0].uuid == made.uuid


def test_a_warm_slice_that_is_wanted_becomes_the_machines(
    driver: MigTwin, journal: Journal
) -> None:
    slices = Slices(driver, journal)
    with slices.cut("1g.5gb", 6):
        pass
    entry = wants(**{"1g_5gb": 1, "3g_20gb": 1})
    changer(driver, journal).carry_out(planned(driver, entry), entry)
    assert journal.read().records == ()
    assert slices.free_orphans(lambda _: False, keep_s=0).removed == []
    assert counts_of(driver.look()) == {"1g.5gb": 1, "3g.20gb": 1}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (wants(**{"1g_6gb": 1}), "no profile 1g.6gb"),
        (wants(**{"3g_20gb": 2, "1g_5gb": 1}), "no slots for"),
        (wants(**{"1g_5gb": 8}), "can have 7"),
    ],
)
def test_what_a_gpu_cannot_have(driver: MigTwin, entry: ConfigEntry, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        planned(driver, entry)


def test_a_half_made_instance_is_not_what_is_wanted(driver: MigTwin, journal: Journal) -> None:
    with driver.foreign():
        driver.create_gpu_instance(A100[0], 6)
    entry = wants(**{"1g_5gb": 1})
    assert not has_what_is_wanted(driver.look(), entry)
    changer(driver, journal).carry_out(planned(driver, entry), entry)
    assert has_what_is_wanted(driver.look(), entry)


def test_mode_is_switched(driver: MigTwin, journal: Journal) -> None:
    driver.is_enabled = False
    entry = wants(**{"3g_20gb": 2})
    change = planned(driver, entry)
    assert change.switch is True
    changer(driver, journal).carry_out(change, entry)
    assert has_what_is_wanted(driver.look(), entry)
    change = planned(driver, OFF)
    assert (change.switch, len(change.remove)) == (False, 2)
    changer(driver, journal).carry_out(change, OFF)
    assert has_what_is_wanted(driver.look(), OFF)


def test_mode_is_not_switched_under_anybody(driver: MigTwin) -> None:
    driver.is_enabled = False
    gpu = driver.look()
    with pytest.raises(BusyError, match="switched on while it is in use by share x"):
        plan(gpu, wants(**{"1g_5gb": 7}), Occupied(whole=("share x",)), uuid="GPU-0")


class Ampere(MigTwin):
    """Takes a mode with its reset."""

    def set_mode(self, *, is_on: bool) -> bool:
        return self.is_enabled is is_on

    def reset(self) -> None:
        self.is_enabled = not self.is_enabled


def test_a_pending_mode_is_put_in_force_by_a_reset(journal: Journal) -> None:
    driver = Ampere()
    driver.is_enabled = False
    entry = wants(**{"3g_20gb": 2})
    Changer(driver, journal, reset=driver.reset).carry_out(planned(driver, entry), entry)
    assert has_what_is_wanted(driver.look(), entry)


def test_a_reset_that_fails_or_does_nothing_is_told(journal: Journal) -> None:
    driver = Ampere()
    driver.is_enabled = False
    entry = wants(**{"3g_20gb": 2})

    def refused() -> None:
        raise PrerequisiteError("in use by another client")

    with pytest.raises(PrerequisiteError, match="in use by another client") as caught:
        Changer(driver, journal, reset=refused).carry_out(planned(driver, entry), entry)
    assert "nvidia-smi --gpu-reset -i GPU-0" in (caught.value.hint or "")
    with pytest.raises(PrerequisiteError, match="after its reset"):
        Changer(driver, journal, reset=lambda: None).carry_out(planned(driver, entry), entry)


def test_a_gpu_without_mig() -> None:
    assert has_what_is_wanted(None, OFF)
    assert has_what_is_wanted(None, wants(**{"1g_5gb": 1}))  # all GPUs that can
    named = ConfigEntry(devices=[0], mig_enabled=True, mig_devices={"1g.5gb": 1})
    assert not has_what_is_wanted(None, named)
    with pytest.raises(UsageError, match="has no MIG"):
        plan(None, named, Occupied(), uuid="GPU-0")


@settings(max_examples=examples(2))
@given(
    places=st.lists(st.tuples(NAMES, st.integers(0, 6), st.booleans()), max_size=6),
    wanted=WANTED,
    steps=st.integers(0, 40),
)
def test_whatever_was_there_and_wherever_it_crashes_the_next_run_ends_it(
    tmp_path_factory: pytest.TempPathFactory,
    places: list[tuple[str, int, bool]],
    wanted: dict[str, int],
    steps: int,
) -> None:
    """Used instances survive all of it; a refusal changes nothing."""
    driver = MigTwin()
    journal = Journal(tmp_path_factory.mktemp("state") / "mig" / "GPU-0")
    for name, start, is_used in places:
        try:
            on(driver, (name, start))
        except (AllotError, AssertionError):
            continue
        if is_used:
            next(each for each in driver.there.values() if each.start == start).users.add(1)
    used = {each.uuid for each in driver.there.values() if each.users}
    entry = ConfigEntry(devices="all", mig_enabled=True, mig_devices=wanted)
    before = driver.look()
    try:
        change = planned(driver, entry)
    except (BusyError, UsageError):
        assert driver.look() == before
        return
    driver.steps_left = steps
    with suppress(Crash, NotFoundError):
        changer(driver, journal).carry_out(change, entry)
    driver.steps_left = None
    Slices(driver, journal).free_orphans(lambda _: False, keep_s=float("inf"))
    changer(driver, journal).carry_out(planned(driver, entry), entry)
    after = driver.look()
    assert has_what_is_wanted(after, entry)
    assert used <= {each.uuid for each in after.instances}
    Slices(driver, journal).free_orphans(lambda _: False, keep_s=0)
    assert has_what_is_wanted(driver.look(), entry)

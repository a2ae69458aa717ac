# SPDX-License-Identifier: Apache-2.0
"""`allot mig apply` and the journal, in real processes that end at any step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mig_hands import look, made_by_hand, on_first

from allotment.devices import layout
from allotment.devices.mig_machine import MigMachine
from allotment.devices.simulated import machine_path
from allotment.model.errors import BusyError
from allotment.modes.mig.apply import counts_of
from allotment.modes.mig.journal import Journal, foreign
from allotment.modes.mig.slices import FreedSlices, Slices

Allot = Any  # tests/conftest.py: CommandLine
WORKER = Path(__file__).with_name("mig_worker.py")

# native/simulated/machine.h, ALLOT_MIG_*
CALLS = {
    "set mode": 0,
    "create GPU instance": 1,
    "create compute instance": 2,
    "destroy GPU instance": 3,
    "destroy compute instance": 4,
}


def end_callers(machine: Path, *, before: int = 0, after: int = 0) -> None:
    """Lets the simulated driver of the first GPU kill whoever makes these calls (a bit each)."""
    base = layout.FAULTS_AT + layout.FAULTS_FIELDS["gpus"][0]
    with machine.open("r+b") as opened:
        for name, bits in (("mig_ends_before", before), ("mig_ends_after", after)):
            opened.seek(base + layout.GPU_FAULTS_FIELDS[name][0])
            opened.write(bits.to_bytes(4, "little"))


WHEN = pytest.mark.parametrize("when", ["before", "after"])


@WHEN
@pytest.mark.parametrize("call", CALLS)
def test_apply_goes_on_where_it_was_ended(
    allot: Allot, mig_file: Path, call: str, when: str
) -> None:
    spec = "h100-80gb"
    machine = machine_path(allot.state, spec)
    if call != "set mode":  # from there to here, with something to remove
        assert made_by_hand(machine, "2g.20gb", 0)
    words = ("-f", mig_file, "-c", "all-3g.40gb", "--simulated", spec)
    end_callers(machine, **{when: 1 << CALLS[call]})
    assert allot("mig", "apply", *words).returncode == -signal.SIGKILL
    end_callers(machine)
    done = allot("mig", "apply", *words)
    assert done.returncode == 0, done.stderr
    assert counts_of(look(machine)) == {"3g.40gb": 2}
    assert Journal(allot.state / "mig" / look(machine).uuid).read().records == ()


@WHEN
@pytest.mark.parametrize("call", [name for name in CALLS if name != "set mode"])
def test_a_process_that_ends_costs_no_slice_and_touches_no_others(
    machine: Callable[[str], Path], tmp_path: Path, call: str, when: str
) -> None:
    path = machine("h100-80gb")
    by_hand = made_by_hand(path, "1g.10gb", 0)
    journal = tmp_path / "mig" / "GPU"

    def work(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(WORKER), str(path), str(journal), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)

    def settle(*held: str) -> FreedSlices:
        return on_first(
            path,
            lambda device: Slices(device.driver, Journal(journal)).free_orphans(
                held.__contains__, keep_s=0
            ),
        )

    words = ["cut", "3g.40gb", "4", "share-1"]
    if call.startswith("destroy"):
        made = work(*words)
        assert made.returncode == 0, made.stderr
        words = ["remove", made.stdout.strip()]
    end_callers(path, **{when: 1 << CALLS[call]})
    assert work(*words).returncode == -signal.SIGKILL
    end_callers(path)
    assert len(Journal(journal).read().records) == 1, "it was written down before"
    settle("share-1")
    assert [each.uuid for each in look(path).instances] == [by_hand]
    assert Journal(journal).read().records == ()


def test_one_that_is_being_made_is_left_alone(
    machine: Callable[[str], Path], tmp_path: Path
) -> None:
    """Another process holds what it works on, and gives it back by ending, however it ends."""
    path = machine("h100-80gb")
    made_by_hand(path, "1g.10gb", 0)
    journal = Journal(tmp_path / "mig" / "GPU")
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with MigMachine(path) as gpus:
                gpus.ask(
                    lambda device: Slices(device.driver, journal).cut("1g.10gb", 6, holder="x"),
                    patience_s=30,
                )
                os.write(there, b"made")
                signal.pause()
        finally:
            os._exit(1)
    assert os.read(here, 4) == b"made"

    def settle() -> FreedSlices:
        return on_first(
            path,
            lambda device: Slices(device.driver, journal).free_orphans(lambda _: False, keep_s=0),
        )

    try:
        assert settle().removed == []
        assert len(foreign(journal.read().records, look(path).instances)) == 1
        [record] = journal.read().records
        with pytest.raises(BusyError):
            on_first(path, lambda device: Slices(device.driver, journal).remove(record.id))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert [each.id for each in settle().removed] == [record.id]

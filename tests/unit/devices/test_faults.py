# SPDX-License-Identifier: Apache-2.0
"""Faults are written where both libraries look for them, and can be taken back."""

from __future__ import annotations

from pathlib import Path

import pytest

from allotment.devices.faults import clear_faults, read_faults, set_driver_fault, set_fault
from allotment.devices.packing import read_machine
from allotment.devices.simulated import machine_path
from allotment.model.errors import StateError, UsageError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return machine_path(tmp_path, "a100-80gb:2,t4")


def test_a_new_machine_has_no_faults(path: Path) -> None:
    for faults in read_faults(path):
        assert not faults.lost
        assert faults.hang_us == 0
        assert faults.xids == ()
        assert set(faults.counters.values()) == {0}


def test_a_fault_is_one_gpus_own(path: Path) -> None:
    set_fault(path, 1, lost=True, hang_us=250, counters={"ecc_volatile_corrected": 7})
    before, broken, after = read_faults(path)
    assert broken.lost
    assert broken.hang_us == 250
    assert broken.counters["ecc_volatile_corrected"] == 7
    assert before == after == read_faults(machine_path(path.parent, "a100-80gb:2,t4"))[0]


def test_a_fault_keeps_what_it_does_not_name(path: Path) -> None:
    set_fault(path, 0, hang_us=9)
    set_fault(path, 0, xid=31)
    set_fault(path, 0, counters={"retired_pages_dbe": 2})
    (faults, *_) = read_faults(path)
    assert (faults.hang_us, faults.xids, faults.counters["retired_pages_dbe"]) == (9, (31,), 2)


def test_what_a_real_driver_logs_is_logged(path: Path) -> None:
    set_fault(path, 0, lost=True)
    set_fault(path, 0, lost=True)
    set_fault(path, 1, counters={"ecc_volatile_uncorrected": 1})
    set_fault(path, 1, counters={"ecc_volatile_uncorrected": 1})
    lost, broken, _ = read_faults(path)
    assert lost.xids == (79,)
    assert broken.xids == (48,)


def test_the_ring_keeps_the_last_ones(path: Path) -> None:
    for xid in range(1, 101):
        set_fault(path, 2, xid=xid)
    assert read_faults(path)[2].xids == tuple(range(37, 101))


def test_faults_are_cleared(path: Path) -> None:
    set_fault(path, 0, lost=True, hang_us=1, counters={"remapped_rows_correctable": 3})
    set_driver_fault(path, nvml_not_loaded=True, cuda_init_error=999)
    clear_faults(path)
    (faults, *_) = read_faults(path)
    assert (faults.lost, faults.hang_us, set(faults.counters.values())) == (False, 0, {0})
    assert faults.xids == ()
    set_fault(path, 0, xid=31)
    assert read_faults(path)[0].xids == (31,)


def test_faults_leave_the_description_alone(path: Path) -> None:
    before = read_machine(path)
    set_fault(path, 2, lost=True, hang_us=2**32 - 1, xid=2**32 - 1)
    set_driver_fault(path, nvml_not_loaded=True, cuda_init_error=100)
    assert read_machine(path) == before


@pytest.mark.parametrize("gpu", [-1, 3, 16])
def test_a_gpu_that_is_not_there(path: Path, gpu: int) -> None:
    with pytest.raises(UsageError, match="GPUs 0 to 2"):
        set_fault(path, gpu, lost=True)


@pytest.mark.parametrize("xid", [0, -1, 2**32])
def test_what_is_no_xid(path: Path, xid: int) -> None:
    with pytest.raises(UsageError, match="not an XID"):
        set_fault(path, 0, xid=xid)


def test_a_counter_that_is_not_there(path: Path) -> None:
    with pytest.raises(UsageError, match="unknown counter"):
        set_fault(path, 0, counters={"bad": 1})


def test_a_file_that_is_no_machine_is_never_written(tmp_path: Path) -> None:
    file = tmp_path / "letter"
    file.write_bytes(b"dear reader" * 5000)
    with pytest.raises(StateError):
        set_fault(file, 0, lost=True)
    assert file.read_bytes() == b"dear reader" * 5000

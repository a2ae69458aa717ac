# SPDX-License-Identifier: Apache-2.0
"""The driver's checkpoint calls, asked of a child process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from allotment.devices import checkpoints
from allotment.devices.checkpoints import Checkpoints, DriverRefusal, ProcessState
from allotment.libraries import SIMULATED_CUDA, library_path

HOLDER = Path(__file__).parents[2] / "native" / "cuda_holder.py"
MachineMaker = Callable[[str], Path]


def refusal_of(machine: Path | None, pid: int) -> DriverRefusal:
    with Checkpoints(machine=machine) as driver, pytest.raises(DriverRefusal) as caught:
        driver.state(pid)
    return caught.value


def test_a_process_goes_to_the_host_and_back(machine: MachineMaker) -> None:
    path = machine("t4")
    environment = {
        **os.environ,
        "ALLOTMENT_SIMULATED_MACHINE": str(path),
        "LD_LIBRARY_PATH": str(library_path(SIMULATED_CUDA).parent),
    }
    with subprocess.Popen(
        [sys.executable, HOLDER, "0", "1000000"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
    ) as holder:  # fmt: skip
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"ready\n"
        with Checkpoints(machine=path) as driver:
            assert driver.state(holder.pid) is ProcessState.RUNNING
            with pytest.raises(
                DriverRefusal, match=r"restore of process \d+: CUDA_ERROR_\w+ \("
            ) as no:
                driver.restore(holder.pid)
            assert not no.value.is_unsupported
            driver.lock(holder.pid, timeout_ms=5000)
            driver.checkpoint(holder.pid)
            assert driver.state(holder.pid) is ProcessState.CHECKPOINTED
        # What another one did is known to the driver alone.
        with Checkpoints(machine=path) as driver:
            driver.restore(holder.pid)
            assert driver.state(holder.pid) is ProcessState.LOCKED
            driver.unlock(holder.pid)
            assert driver.state(holder.pid) is ProcessState.RUNNING
        holder.communicate()
        assert holder.returncode == 0


def test_a_process_that_uses_no_gpu_is_refused(machine: MachineMaker) -> None:
    assert not refusal_of(machine("t4"), os.getpid()).is_unsupported


def test_older_drivers_have_none(machine: MachineMaker, tmp_path: Path) -> None:
    old = tmp_path / "old.yaml"
    old.write_text("cuda: 12.4\ngpus: [t4]\n")
    refusal = refusal_of(machine(str(old)), os.getpid())
    assert refusal.is_unsupported, refusal


def test_without_a_driver_there_are_none(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", checkpoints.__name__, str(tmp_path / "libcuda.so.1")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.communicate("state 1 0\n")[0] == "-1 no-driver 0\n"


def test_a_library_that_ends_its_process_is_a_refusal(machine: MachineMaker) -> None:
    with Checkpoints(machine=machine("t4").with_name("nothing")) as driver:
        with pytest.raises(DriverRefusal):
            driver.state(1)
        with pytest.raises(DriverRefusal):
            driver.state(1)

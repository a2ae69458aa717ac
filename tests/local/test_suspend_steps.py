# SPDX-License-Identifier: Apache-2.0
"""Shares that are suspended and resumed by a driver that stands in, whose steps fail on demand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import wait_until
from suspended_shares import (
    GI,
    HOLDER,
    KILLED,
    SPEC,
    FakeDriver,
    Holders,
    OldDriver,
    devices_of,
    is_stopped,
    no_readings,
    ps,
    suspension,
)

from allotment.devices.checkpoints import DriverRefusal, ProcessState
from allotment.model.errors import BusyError, DoesNotFitError, NotFoundError, PrerequisiteError
from allotment.shares.folders import StateFolder
from allotment.shares.lifecycle import find
from allotment.shares.resume import resume
from allotment.shares.suspend import suspend

Allot = Any  # tests/conftest.py: CommandLine


@pytest.fixture
def folder(allot: Allot) -> StateFolder:
    return StateFolder(allot.state)


@pytest.fixture
def begin(allot: Allot) -> Iterator[Holders]:
    with Holders(allot) as made:
        yield made


def test_programs_may_end_as_soon_as_they_go_on(
    allot: Allot, folder: StateFolder, tmp_path: Path
) -> None:
    command = allot.command(
        "run", *SPEC, "--name", "job", "--memory", "8Gi", "--inject", "environment",
        "--", sys.executable, HOLDER, "0", str(GI), "busy",
    )  # fmt: skip

    class Slow(FakeDriver):
        def unlock(self, pid: int) -> None:
            wait_until(lambda: not list(folder.shares.glob("[!.]*")))
            super().unlock(pid)

    slow = Slow(tmp_path / "driver")
    for by_command in (True, False):
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=allot.environment(), start_new_session=True,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            if by_command:
                assert allot("suspend", "job").returncode == 0
                process.terminate()
                done = allot("resume", "job")
                assert (done.returncode, done.stderr) == (0, "")
                # It may be too soon to tell that they have.
                assert done.stdout.startswith("job: resumed")
            else:
                suspend(folder, "job", no_readings, patience_s=5, drivers=slow.of)
                devices = devices_of(folder, "job")
                process.terminate()
                outcome = resume(folder, "job", no_readings, devices, drivers=slow.of)
                assert (outcome.name, outcome.programs, outcome.has_ended) == ("job", 0, True)
            process.wait()
            assert process.returncode == -signal.SIGTERM


def test_a_share_that_ends_while_it_is_suspended_is_named(
    allot: Allot, folder: StateFolder, tmp_path: Path
) -> None:
    command = allot.command(
        "run", *SPEC, "--name", "job", "--memory", "8Gi", "--inject", "environment",
        "--", sys.executable, HOLDER, "0", str(GI),
    )  # fmt: skip

    class Slow(FakeDriver):
        def lock(self, pid: int, *, timeout_ms: int) -> None:
            process.kill()
            os.kill(pid, signal.SIGKILL)
            process.wait()
            wait_until(lambda: ps(allot) == [])
            super().lock(pid, timeout_ms=timeout_ms)

    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=allot.environment()
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        with pytest.raises(NotFoundError, match="share job has ended meanwhile"):
            suspend(folder, "job", no_readings, patience_s=5, drivers=Slow(tmp_path / "driver").of)


def test_a_suspended_share_is_stopped_and_booked_by_nobody(
    begin: Holders, folder: StateFolder, allot: Allot, tmp_path: Path
) -> None:
    driver = FakeDriver(tmp_path / "driver")
    pids = begin("job", "60Gi", 2)
    taken = allot("cdi", "create", *SPEC, "--memory", "40Gi", "--cdi-dir", tmp_path / "cdi")
    assert taken.returncode == 3, taken.stderr

    done = suspend(folder, "job", no_readings, patience_s=5, drivers=driver.of)
    assert done.programs >= 2
    assert driver.states() == {ProcessState.CHECKPOINTED}
    wait_until(lambda: all(map(is_stopped, pids)))
    (terms,) = find(folder, "job").terms.values()
    assert terms.is_suspended

    other = ("--name", "other", "--cdi-dir", tmp_path / "cdi")
    taken = allot("cdi", "create", *SPEC, "--memory", "40Gi", *other)
    assert taken.returncode == 0, taken.stderr
    with pytest.raises(DoesNotFitError, match=r"need 60Gi, have .*Gi") as refusal:
        resume(folder, "job", no_readings, devices_of(folder, "job"), drivers=driver.of)
    assert "allot resume job" in (refusal.value.hint or "")
    assert all(map(is_stopped, pids))

    assert allot("rm", "other").returncode == 0
    resume(folder, "job", no_readings, devices_of(folder, "job"), drivers=driver.of)
    assert driver.states() == {ProcessState.RUNNING}
    wait_until(lambda: not any(map(is_stopped, pids)))
    assert suspension(folder, "job") is None
    (terms,) = find(folder, "job").terms.values()
    assert not terms.is_suspended
    taken = allot("cdi", "create", *SPEC, "--memory", "40Gi", "--cdi-dir", tmp_path / "cdi")
    assert taken.returncode == 3, "what is resumed is booked again"


def test_all_processes_are_suspended_or_none(
    begin: Holders, folder: StateFolder, tmp_path: Path
) -> None:
    pids = begin("job", "8Gi", 2)
    for step, call in enumerate(("lock", "lock", "checkpoint", "checkpoint")):
        path = tmp_path / f"driver-{step}"
        driver = FakeDriver(path, failing_step=step, code=1)
        with pytest.raises(BusyError, match=rf"refused the {call} of process \d+: .*\(1\)"):
            suspend(folder, "job", no_readings, patience_s=5, drivers=driver.of)
        assert driver.states() <= {ProcessState.RUNNING}
        assert suspension(folder, "job") is None
        assert not any(map(is_stopped, pids))
        (terms,) = find(folder, "job").terms.values()
        assert not terms.is_suspended


def test_what_cannot_be_put_right_is_left_to_resume(
    begin: Holders, folder: StateFolder, tmp_path: Path
) -> None:
    pids = begin("job", "8Gi", 2)

    class Stubborn(FakeDriver):
        def restore(self, pid: int) -> None:
            raise DriverRefusal("restore", pid, 999, "CUDA_ERROR_UNKNOWN")

    path = tmp_path / "driver"
    stubborn = Stubborn(path, failing_step=3, code=1)
    with pytest.raises(BusyError, match="refused the checkpoint"):
        suspend(folder, "job", no_readings, patience_s=5, drivers=stubborn.of)
    left = suspension(folder, "job")
    assert left is not None
    assert not left.is_complete
    assert find(folder, "job").booked_memory() == find(folder, "job").limits()
    driver = FakeDriver(path)
    resume(folder, "job", no_readings, devices_of(folder, "job"), drivers=driver.of)
    assert driver.states() == {ProcessState.RUNNING}
    assert not any(map(is_stopped, pids))


@pytest.mark.parametrize("then", ["suspend", "resume"])
def test_who_dies_in_the_midst_is_finished_by_the_next(
    begin: Holders, folder: StateFolder, tmp_path: Path, then: str
) -> None:
    pids = begin("job", "8Gi", 2)
    for step in range(5):
        driver = FakeDriver(tmp_path / f"driver-{step}", failing_step=step)
        child = os.fork()
        if child == 0:
            try:
                suspend(folder, "job", no_readings, patience_s=5, drivers=driver.of)
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == (KILLED if step < 4 else 0)
        driver = FakeDriver(driver.path)
        if then == "suspend" and step < 4:
            suspend(folder, "job", no_readings, patience_s=5, drivers=driver.of)
            assert driver.states() == {ProcessState.CHECKPOINTED}
            wait_until(lambda: all(map(is_stopped, pids)))
        resume(folder, "job", no_readings, devices_of(folder, "job"), drivers=driver.of)
        assert driver.states() <= {ProcessState.RUNNING}
        assert suspension(folder, "job") is None
        wait_until(lambda: not any(map(is_stopped, pids)))


def test_who_dies_while_resuming_is_finished_by_the_next(
    begin: Holders, folder: StateFolder, tmp_path: Path
) -> None:
    pids = begin("job", "8Gi", 2)
    for step in range(4):
        path = tmp_path / f"driver-{step}"
        suspend(folder, "job", no_readings, patience_s=5, drivers=FakeDriver(path).of)
        FakeDriver(path).restart()
        child = os.fork()
        if child == 0:
            dying = FakeDriver(path, failing_step=step)
            try:
                resume(folder, "job", no_readings, devices_of(folder, "job"), drivers=dying.of)
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == KILLED
        left = suspension(folder, "job")
        assert left is not None
        assert not left.is_complete, "it is booked while it is on its way back"
        driver = FakeDriver(path)
        resume(folder, "job", no_readings, devices_of(folder, "job"), drivers=driver.of)
        assert driver.states() == {ProcessState.RUNNING}
        wait_until(lambda: not any(map(is_stopped, pids)))


def test_a_restore_that_fails_leaves_it_suspended(
    begin: Holders, folder: StateFolder, tmp_path: Path
) -> None:
    pids = begin("job", "8Gi", 2)
    path = tmp_path / "driver"
    suspend(folder, "job", no_readings, patience_s=5, drivers=FakeDriver(path).of)
    FakeDriver(path).restart()
    devices = devices_of(folder, "job")
    full = FakeDriver(path, failing_step=1, code=2)
    with pytest.raises(DoesNotFitError, match="stays suspended"):
        resume(folder, "job", no_readings, devices, drivers=full.of)
    left = suspension(folder, "job")
    assert left is not None
    assert left.is_complete
    wait_until(lambda: all(map(is_stopped, pids)))
    FakeDriver(path).restart()
    resume(folder, "job", no_readings, devices, drivers=FakeDriver(path).of)
    assert FakeDriver(path).states() == {ProcessState.RUNNING}


def test_without_checkpoints_it_says_why_and_what_to_do(
    begin: Holders, folder: StateFolder, tmp_path: Path
) -> None:
    (pid,) = begin("job", "8Gi")
    with pytest.raises(PrerequisiteError, match="may not live on the host") as refusal:
        suspend(folder, "job", no_readings, patience_s=5, drivers=OldDriver(tmp_path / "driver").of)
    assert "--oversubscribe" in (refusal.value.hint or "")
    assert suspension(folder, "job") is None
    assert not is_stopped(pid)


def test_only_a_suspended_share_is_resumed(
    begin: Holders, folder: StateFolder, allot: Allot
) -> None:
    begin("job", "8Gi")
    with pytest.raises(BusyError, match="is not suspended"):
        resume(folder, "job", no_readings, ())
    done = allot("resume", "job")
    assert (done.returncode, done.stdout) == (7, "")
    assert "allot suspend job" in done.stderr
    assert allot("suspend", "nobody").returncode == 4

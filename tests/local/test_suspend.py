# SPDX-License-Identifier: Apache-2.0
"""Shares that are suspended and resumed, with programs in them that use simulated GPUs.

Where a step has to fail, or `allot` has to die in it, a driver stands in that keeps the states of
processes in a file, as the real one keeps them in itself.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from allotment.devices.checkpoints import DriverRefusal, ProcessState
from allotment.devices.simulated import SimulatedMachine, gpu_times
from allotment.model.devices import Device
from allotment.model.errors import BusyError, DoesNotFitError, NotFoundError, PrerequisiteError
from allotment.model.formats import format_bytes
from allotment.model.shares import Suspension
from allotment.shares.folders import StateFolder
from allotment.shares.lives import find, look
from allotment.shares.namespaces import can_unshare
from allotment.shares.resuming import resume
from allotment.shares.stopping import members
from allotment.shares.suspending import suspend

Allot = Any  # tests/conftest.py: CommandLine
Begin = Callable[..., list[int]]
GI = 1 << 30
SPEC = ("--simulated", "a100-80gb")
HOLDER = Path(__file__).parents[1] / "native" / "cuda_holder.py"
KILLED = 9


@dataclass(frozen=True)
class FakeDriver:
    """Keeps states in a file. The step of that number is refused with `code`, or ends `allot`."""

    path: Path
    failing_step: int = -1
    code: int | None = None

    def _read(self) -> dict[str, Any]:
        if not self.path.exists():
            return {"steps": 0, "states": {}}
        found: dict[str, Any] = json.loads(self.path.read_text())
        return found

    def _step(self, call: str, pid: int, allowed: ProcessState, then: ProcessState) -> None:
        known = self._read()
        fails = known["steps"] == self.failing_step
        if fails and self.code is None:
            os._exit(KILLED)
        assert self.state(pid) is allowed, call
        known["steps"] += 1
        if not fails:
            known["states"][str(pid)] = then
        self.path.write_text(json.dumps(known))
        if fails:
            raise DriverRefusal(call, pid, self.code or 0, "CUDA_ERROR_OF_A_TEST")

    def states(self) -> set[ProcessState]:
        return {ProcessState(state) for state in self._read()["states"].values()}

    def restart(self) -> None:
        """Counts steps from the beginning again."""
        self.path.write_text(json.dumps({**self._read(), "steps": 0}))

    def state(self, pid: int) -> ProcessState:
        return ProcessState(self._read()["states"].get(str(pid), ProcessState.RUNNING))

    def lock(self, pid: int, *, timeout_ms: int) -> None:
        assert timeout_ms > 0
        self._step("lock", pid, ProcessState.RUNNING, ProcessState.LOCKED)

    def checkpoint(self, pid: int) -> None:
        self._step("checkpoint", pid, ProcessState.LOCKED, ProcessState.CHECKPOINTED)

    def restore(self, pid: int) -> None:
        self._step("restore", pid, ProcessState.CHECKPOINTED, ProcessState.LOCKED)

    def unlock(self, pid: int) -> None:
        self._step("unlock", pid, ProcessState.LOCKED, ProcessState.RUNNING)

    def of(self, machine: Path | None) -> AbstractContextManager["FakeDriver"]:
        assert machine is not None
        return nullcontext(self)


class OldDriver(FakeDriver):
    """Has no checkpoints."""

    def state(self, pid: int) -> ProcessState:
        raise DriverRefusal("state", pid, 801, "CUDA_ERROR_NOT_SUPPORTED")


def no_readings(machine: Path | None) -> dict[str, Any]:
    del machine
    return {}


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def wait_until(condition: Callable[[], object], timeout_s: float = 25) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)


@pytest.fixture
def folder(allot: Allot) -> StateFolder:
    return StateFolder(allot.state)


@pytest.fixture
def begin(allot: Allot, folder: StateFolder) -> Iterator[Begin]:
    """Runs holders of GPU memory in a share, `begin("job", "30Gi", 2)`; returns their numbers."""
    started: list[subprocess.Popen[str]] = []

    def start(
        name: str, memory: str, programs: int = 1, *options: str, spec: tuple[str, ...] = SPEC
    ) -> list[int]:
        one = f"{sys.executable} {HOLDER} 0 {GI} busy & "
        script = f"exec 3<&0; {one.replace(' &', ' <&3 &') * programs} wait"
        process = subprocess.Popen(
            allot.command(
                "run", *spec, "--name", name, "--memory", memory, "--inject", "environment",
                *options, "--", "sh", "-c", script,
            ),
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env=allot.environment(), start_new_session=True,
        )  # fmt: skip
        started.append(process)

        def ready() -> list[int]:
            assert process.poll() is None, process.communicate()[1]
            there = [each for each in look(folder) if each.name == name and each.ledger]
            users = there[0].ledger.processes if there and there[0].ledger else ()
            return [user.pid for user in users if user.used[0] >= GI]

        wait_until(lambda: len(ready()) == programs)
        return ready()

    yield start
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)  # stopped or not
        process.communicate()


def devices_of(folder: StateFolder, name: str) -> tuple[Device, ...]:
    share = find(folder, name).share
    assert share is not None
    return SimulatedMachine(Path(share.machine or "")).devices()


def suspension(folder: StateFolder, name: str) -> Suspension | None:
    share = find(folder, name).share
    assert share is not None
    return share.suspension


def ps(allot: Allot) -> list[dict[str, Any]]:
    """The shares, as `allot ps` has them."""
    done = allot("ps", "-o", "json")
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)["shares"]
    return found


def used_bytes(allot: Allot) -> int:
    """What the driver says of the only GPU."""
    done = allot("devices", "-o", "json")
    assert done.returncode == 0, done.stderr
    return int(json.loads(done.stdout)["devices"][0]["memory_used_bytes"])


# ---- with the simulated driver ----


def test_the_gpu_is_free_for_others_meanwhile(begin: Begin, allot: Allot) -> None:
    pids = begin("job", "60Gi", 2)
    before = used_bytes(allot)
    assert before > 2 * GI
    done = allot("suspend", "job")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("job: suspended, ")
    assert "booked" not in done.stdout
    assert used_bytes(allot) == 0
    (share,) = json.loads(allot("ps", "-o", "json").stdout)["shares"]
    assert share["state"] == "suspended"
    assert share["suspended"]
    (device,) = share["devices"]
    assert device["memory_host_bytes"] == device["memory_used_bytes"] == before
    assert done.stdout.endswith(f" stopped; {format_bytes(before)} moved from GPU to host\n")
    heading, row = allot("ps").stdout.splitlines()[:2]
    column = heading.index(" HOST") + 5
    assert row[:column].endswith(f" {format_bytes(before)}")
    whole = allot(
        "run", *SPEC, "--memory", "75Gi", "--inject", "environment",
        "--", sys.executable, "-m", "allotment", "burn", "--memory", "70Gi", "--seconds", "0.2",
    )  # fmt: skip
    assert whole.returncode == 0, whole.stderr
    done = allot("resume", "job")
    assert done.returncode == 0, done.stderr
    assert used_bytes(allot) == before
    ran = {pid: gpu_ns(allot, pid) for pid in pids}
    wait_until(lambda: all(gpu_ns(allot, pid) > ran[pid] for pid in pids))


@pytest.mark.skipif(not can_unshare(), reason="a pid namespace of its own needs CAP_SYS_ADMIN")
def test_programs_in_a_pid_namespace_are_found_and_checkpointed(allot: Allot) -> None:
    command = allot.command(
        "run", *SPEC, "--name", "job", "--memory", "8Gi", "--",
        "unshare", "--pid", "--fork", "--mount-proc", "--kill-child",
        sys.executable, HOLDER, "0", str(GI), "busy",
    )  # fmt: skip
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=allot.environment()
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        seen = json.loads(allot("ps", "-o", "json").stdout)
        assert seen["outside"] == []
        (share,) = seen["shares"]
        (holder,) = share["processes"]
        assert (holder["pid_inside"], holder["enforced"]) == (1, True)
        assert str(HOLDER) in Path(f"/proc/{holder['pid']}/cmdline").read_text()
        before = used_bytes(allot)
        assert [each["memory_used_bytes"] for each in share["devices"]] == [before]
        assert allot("suspend", "job").returncode == 0
        assert used_bytes(allot) == 0
        assert allot("resume", "job").returncode == 0
        assert used_bytes(allot) == before
        process.communicate()
        assert process.returncode == 0


def test_it_is_not_removed_under_its_programs(begin: Begin, allot: Allot) -> None:
    (pid,) = begin("job", "8Gi")
    assert allot("suspend", "job").returncode == 0
    for words in (("rm", "job"), ("rm", "job", "--force"), ("cdi", "rm", "job", "--force")):
        done = allot(*words)
        assert (done.returncode, done.stdout) == (7, ""), done.stderr
        assert "allot resume job" in done.stderr
    assert [each["state"] for each in ps(allot)] == ["suspended"]
    assert allot("resume", "job").returncode == 0
    ran = gpu_ns(allot, pid)
    wait_until(lambda: gpu_ns(allot, pid) > ran)
    assert allot("rm", "job", "--force").returncode == 0


def test_it_can_be_removed_when_its_programs_were_killed(
    begin: Begin, folder: StateFolder, allot: Allot
) -> None:
    begin("job", "8Gi")
    assert allot("suspend", "job").returncode == 0
    found = find(folder, "job")
    share = found.share
    assert share is not None
    assert share.runner is not None
    runner = share.runner.pid
    os.kill(runner, signal.SIGSTOP)  # it does not end the share then
    try:
        wait_until(lambda: is_stopped(runner))
        for pid in members(found, share):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not members(found, share))
        done = allot("rm", "job", "--force")
        assert done.returncode == 0, done.stderr
    finally:
        os.kill(runner, signal.SIGCONT)


def test_what_was_stopped_before_stays_so(
    begin: Begin, folder: StateFolder, allot: Allot, tmp_path: Path
) -> None:
    first, second = begin("job", "8Gi", 2)
    os.kill(first, signal.SIGSTOP)
    wait_until(lambda: is_stopped(first))
    refusing = FakeDriver(tmp_path / "driver", failing_step=2, code=1)
    with pytest.raises(BusyError, match="refused the checkpoint"):
        suspend(folder, "job", no_readings, patience_s=5, drivers=refusing.of)
    wait_until(lambda: is_stopped(first))
    assert not is_stopped(second)
    for _ in range(2):
        assert allot("suspend", "job").returncode == 0
        wait_until(lambda: is_stopped(second))
        done = allot("resume", "job")
        assert done.returncode == 0, done.stderr
        wait_until(lambda: is_stopped(first))
        assert not is_stopped(second)
    os.kill(first, signal.SIGCONT)
    ran = gpu_ns(allot, first)
    wait_until(lambda: gpu_ns(allot, first) > ran)


def test_one_without_programs_says_so(allot: Allot, tmp_path: Path) -> None:
    made = allot("cdi", "create", *SPEC, "--memory", "40Gi", "--name", "job",
                 "--cdi-dir", tmp_path / "cdi")  # fmt: skip
    assert made.returncode == 0, made.stderr
    done = allot("suspend", "job")
    assert done.returncode == 0, done.stderr
    assert "hint: no program runs in job" in done.stderr
    done = allot("resume", "job")
    assert done.returncode == 0, done.stderr
    assert "ended" not in done.stdout


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
                assert done.stdout == "job: resumed; its programs have ended\n"
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
            assert ps(allot) == []
            super().lock(pid, timeout_ms=timeout_ms)

    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=allot.environment()
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        with pytest.raises(NotFoundError, match="share job has ended meanwhile"):
            suspend(folder, "job", no_readings, patience_s=5, drivers=Slow(tmp_path / "driver").of)


def gpu_ns(allot: Allot, pid: int) -> int:
    """For how long a process has computed, by the machine's own account."""
    (machine,) = {found.share.machine for found in look(StateFolder(allot.state)) if found.share}
    (times,) = gpu_times(Path(machine or "")).values()
    return sum(each.busy_ns for each in times.processes if each.pid == pid)


def test_without_checkpoints_the_shim_moves_what_can_move(
    begin: Begin, allot: Allot, tmp_path: Path
) -> None:
    old = tmp_path / "old.yaml"
    old.write_text("cuda: 12.4\ngpus: [a100-80gb]\n")
    (pid,) = begin("job", "60Gi", 1, "--oversubscribe", spec=("--simulated", str(old)))
    begin("kept", "60Gi", 1, "--oversubscribe", spec=("--simulated", str(old)))
    done = allot("suspend", "job")
    assert done.returncode == 0, done.stderr
    assert "its memory stays booked" in done.stdout
    assert is_stopped(pid)
    again = allot("suspend", "job")
    assert (again.returncode, "is suspended already" in again.stderr) == (7, True)
    wait_until(lambda: used_bytes(allot) < 2 * GI)  # two contexts, and what the other has
    shares = {each["name"]: each for each in json.loads(allot("ps", "-o", "json").stdout)["shares"]}
    assert (shares["job"]["state"], shares["kept"]["state"]) == ("suspended", "running")
    assert shares["job"]["devices"][0]["memory_host_bytes"] == GI
    assert find(StateFolder(allot.state), "job").booked_memory().popitem()[1] == 60 * GI
    assert allot("resume", "job").returncode == 0
    wait_until(lambda: used_bytes(allot) > 2 * GI)
    assert not is_stopped(pid)


def test_a_program_without_the_shim_is_checkpointed_too(allot: Allot, folder: StateFolder) -> None:
    holder = f"unset LD_PRELOAD; exec {sys.executable} {HOLDER} 0 {GI} busy"
    command = allot.command(
        "run", *SPEC, "--name", "job", "--memory", "8Gi", "--inject", "environment",
        "--", "sh", "-c", holder,
    )  # fmt: skip
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=allot.environment()
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        before = used_bytes(allot)
        assert before > GI
        done = allot("suspend", "job")
        told = re.fullmatch(
            r"job: suspended, 1 process stopped; (.*) moved from GPU to host\n", done.stdout
        )
        assert told, done.stderr
        assert told[1] == format_bytes(before)
        assert used_bytes(allot) == 0
        assert find(folder, "job").booked_memory().popitem()[1] == 0
        done = allot("resume", "job")
        assert done.stdout == "job: resumed, 1 process goes on\n", done.stderr
        assert "is in use by 1 process (" in allot("rm", "job").stderr
        assert used_bytes(allot) == before
        process.communicate()
        assert process.returncode == 0


def test_nothing_is_restored_where_outsiders_have_the_room(begin: Begin, allot: Allot) -> None:
    (pid,) = begin("job", "60Gi")
    inside = Path(f"/proc/{pid}/environ").read_text().split("\0")
    outside = dict(each.split("=", 1) for each in inside if "=" in each)
    del outside["ALLOTMENT_SHARE"], outside["LD_PRELOAD"]
    assert allot("suspend", "job").returncode == 0
    with subprocess.Popen(
        [sys.executable, HOLDER, "0", str(78 * GI)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=outside,
    ) as stranger:  # fmt: skip
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "ready\n"
        done = allot("resume", "job")
        assert done.returncode == 3, done.stderr
        assert "programs outside of shares have 78" in done.stderr
        assert is_stopped(pid)
        stranger.communicate()
    done = allot("resume", "job")
    assert done.returncode == 0, done.stderr
    assert not is_stopped(pid)


@pytest.mark.parametrize("may_move", [False, True])
def test_managed_memory_is_not_checkpointed(allot: Allot, *, may_move: bool) -> None:
    command = allot.command(
        "run", *SPEC, "--name", "job", "--memory", "8Gi", "--inject", "environment",
        *(["--oversubscribe"] if may_move else []),
        "--", sys.executable, "-m", "allotment", "burn", "--api", "managed", "--memory", "1Gi",
        "--seconds", "60",
    )  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=allot.environment()) as process:
        wait_until(lambda: "job" in allot("ps").stdout and used_bytes(allot) > GI)
        done = allot("suspend", "job")
        if may_move:
            assert done.returncode == 0, done.stderr
            wait_until(lambda: used_bytes(allot) < GI)
            assert allot("resume", "job").returncode == 0
            wait_until(lambda: used_bytes(allot) > GI)
        else:
            assert done.returncode == 8, done.stderr
            assert "has managed memory" in done.stderr
        process.terminate()


# ---- with a driver that stands in ----


def test_a_suspended_share_is_stopped_and_booked_by_nobody(
    begin: Begin, folder: StateFolder, allot: Allot, tmp_path: Path
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
    begin: Begin, folder: StateFolder, tmp_path: Path
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
    begin: Begin, folder: StateFolder, tmp_path: Path
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
    begin: Begin, folder: StateFolder, tmp_path: Path, then: str
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
    begin: Begin, folder: StateFolder, tmp_path: Path
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
    begin: Begin, folder: StateFolder, tmp_path: Path
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
    begin: Begin, folder: StateFolder, tmp_path: Path
) -> None:
    (pid,) = begin("job", "8Gi")
    with pytest.raises(PrerequisiteError, match="may not live on the host") as refusal:
        suspend(folder, "job", no_readings, patience_s=5, drivers=OldDriver(tmp_path / "driver").of)
    assert "--oversubscribe" in (refusal.value.hint or "")
    assert suspension(folder, "job") is None
    assert not is_stopped(pid)


def test_only_a_suspended_share_is_resumed(begin: Begin, folder: StateFolder, allot: Allot) -> None:
    begin("job", "8Gi")
    with pytest.raises(BusyError, match="is not suspended"):
        resume(folder, "job", no_readings, ())
    done = allot("resume", "job")
    assert (done.returncode, done.stdout) == (7, "")
    assert "allot suspend job" in done.stderr
    assert allot("suspend", "nobody").returncode == 4

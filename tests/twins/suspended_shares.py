# SPDX-License-Identifier: Apache-2.0
"""Shares whose programs hold memory of a simulated GPU, and drivers that stand in to suspend them.

Where a step has to fail, or `allot` has to die in it, a driver stands in that keeps the states of
processes in a file, as the real one keeps them in itself.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from patience import wait_until

from allotment.devices.checkpoints import Checkpoints, DriverRefusal, ProcessState
from allotment.devices.simulated import SimulatedMachine, gpu_times
from allotment.model.devices import Device
from allotment.model.shares import Suspension
from allotment.shares.folders import StateFolder
from allotment.shares.lifecycle import find
from allotment.shares.recovery import list_shares

Allot = Any  # tests/conftest.py: CommandLine
GI = 1 << 30
SPEC = ("--simulated", "a100-80gb")
HOLDER = Path(__file__).parents[1] / "native" / "cuda_holder.py"
KILLED = 9


@dataclass(frozen=True)
class FakeDriver(Checkpoints):
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

    def of(self, machine: Path | None) -> AbstractContextManager[FakeDriver]:
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


class Holders:
    """Programs that hold GPU memory, in shares of their own; they end with it."""

    def __init__(self, allot: Allot) -> None:
        self._allot = allot
        self._folder = StateFolder(allot.state)
        self._started: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            os.killpg(process.pid, signal.SIGKILL)  # stopped or not
            process.communicate()

    def __call__(
        self,
        name: str,
        memory: str,
        programs: int = 1,
        *options: str,
        spec: tuple[str, ...] = SPEC,
    ) -> list[int]:
        """Run so many in a share, `begin("job", "30Gi", 2)`; return their numbers."""
        one = f"{sys.executable} {HOLDER} 0 {GI} busy & "
        script = f"exec 3<&0; {one.replace(' &', ' <&3 &') * programs} wait"
        process = subprocess.Popen(
            self._allot.command(
                "run", *spec, "--name", name, "--memory", memory, "--inject", "environment",
                *options, "--", "sh", "-c", script,
            ),
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env=self._allot.environment(), start_new_session=True,
        )  # fmt: skip
        self._started.append(process)

        def ready() -> list[int]:
            assert process.poll() is None, process.communicate()[1]
            there = [
                each for each in list_shares(self._folder) if each.name == name and each.ledger
            ]
            users = there[0].ledger.processes if there and there[0].ledger else ()
            return [user.pid for user in users if user.used[0] >= GI]

        wait_until(lambda: len(ready()) == programs)
        return ready()


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


def gpu_ns(allot: Allot, pid: int) -> int:
    """For how long a process has computed, by the machine's own account."""
    (machine,) = {
        found.share.machine for found in list_shares(StateFolder(allot.state)) if found.share
    }
    (times,) = gpu_times(Path(machine or "")).values()
    return sum(each.busy_ns for each in times.processes if each.pid == pid)

# SPDX-License-Identifier: Apache-2.0
"""A machine of simulated GPUs whose shares run by MPS: real control daemons and real programs."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from allotment.devices.compute_modes import ComputeMode, GpuSettings
from allotment.devices.simulated import SimulatedMachine, machine_path
from allotment.modes.mps.state import MpsPlace, MpsStatus

Allot = Any  # tests/conftest.py: CommandLine
CLIENT = Path(__file__).parents[1] / "local" / "mps_client.py"
SPEC = "a100-80gb:2"


class Machine:
    """Two simulated GPUs, and the daemons on them."""

    def __init__(self, allot: Allot, spec: str = SPEC) -> None:
        self.allot = allot
        self.spec = spec
        self.file = machine_path(allot.state, spec)
        self.uuids = [each.uuid for each in SimulatedMachine(self.file).devices()]
        self._programs: list[subprocess.Popen[str]] = []

    def place(self, gpu: int = 0) -> MpsPlace:
        return MpsPlace(self.allot.state / "mps" / self.uuids[gpu])

    def status(self, gpu: int = 0) -> MpsStatus:
        return self.place(gpu).status()

    def mode(self, gpu: int = 0) -> ComputeMode:
        return GpuSettings(self.uuids[gpu], machine=self.file).compute_mode()

    def start(
        self, *words: str, options: tuple[str, ...] = (), compute: str = "50", gpu: int = 0
    ) -> subprocess.Popen[str]:
        return self.run(
            "--compute", compute, "--gpu", self.uuids[gpu], *options,
            "--", sys.executable, str(CLIENT), *words,
        )  # fmt: skip

    def run(self, *words: str) -> subprocess.Popen[str]:
        program = subprocess.Popen(
            self.allot.command(
                "run", "--simulated", self.spec, "--mode", "mps", "--memory", "4Gi", *words
            ),
            env=self.allot.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._programs.append(program)
        return program

    def keep(self, name: str) -> subprocess.Popen[str]:
        """Starts a share whose command goes on when the program in it has ended."""
        text = f"trap 'exit' TERM; {sys.executable} {CLIENT} hold; while :; do sleep 0.1; done"
        return self.script("--name", name, text=text)

    def script(self, *options: str, text: str) -> subprocess.Popen[str]:
        return self.run("--gpu", self.uuids[0], *options, "--", "sh", "-c", text)

    def shares(self) -> list[dict[str, Any]]:
        shown = json.loads(self.allot("ps", "-o", "json").stdout)
        found: list[dict[str, Any]] = shown["shares"]
        return found

    def close(self) -> None:
        for program in self._programs:
            if program.poll() is None:
                program.terminate()
            if program.stdout is not None and not program.stdout.closed:
                program.communicate(timeout=60)
        for gpu in range(len(self.uuids)):
            status = self.status(gpu)
            for pid in (status.supervisor, status.daemon):
                if pid is not None:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


def lines(program: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """All that a client said, once it has ended."""
    out, errors = program.communicate(timeout=120)
    assert out or not errors, errors
    return [json.loads(line) for line in out.splitlines()]


def first_line(program: subprocess.Popen[str]) -> dict[str, Any]:
    assert program.stdout is not None
    line = program.stdout.readline()
    assert line, program.communicate()[1]
    said: dict[str, Any] = json.loads(line)
    return said

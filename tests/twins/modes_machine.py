# SPDX-License-Identifier: Apache-2.0
"""Simulated GPUs whose modes `allot devices set-mode` says, and real programs on them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Any, Self, TypeVar

from allotment.devices.mig_machine import MigDevice, MigMachine
from allotment.devices.simulated import SimulatedMachine, machine_path
from allotment.shares.folders import StateFolder

Allot = Any  # tests/conftest.py: CommandLine
T = TypeVar("T")
SPEC = "h100-80gb:2"


class Machine:
    """Simulated GPUs, and the programs that were started beside each other; they end with it."""

    def __init__(self, allot: Allot, spec: str = SPEC) -> None:
        self.allot = allot
        self.spec = spec
        self.file = machine_path(allot.state, spec)
        self.uuids = [each.uuid for each in SimulatedMachine(self.file).devices()]
        self.folder = StateFolder(allot.state)
        self._programs: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for program in self._programs:
            if program.poll() is None:
                program.kill()
            program.communicate(timeout=60)

    # ---- programs --------------------------------------------------------------------------------

    def start(self, *words: str) -> subprocess.Popen[str]:
        program = subprocess.Popen(
            self.allot.command(*words),
            env=self.allot.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._programs.append(program)
        return program

    def share(self, *options: str, gpu: int = 0) -> subprocess.Popen[str]:
        """A share whose program waits for the end of its input; it is there when this returns."""
        words = ("run", "--simulated", self.spec, "--gpu", self.uuids[gpu], *options)
        program = self.start(*words, "--", "sh", "-c", "echo here; cat")
        assert program.stdout is not None
        assert program.stdout.readline() == "here\n", program.communicate()[1]
        return program

    def run(self, *options: str, gpu: int = 0) -> subprocess.CompletedProcess[str]:
        words = ("run", "--simulated", self.spec, "--gpu", self.uuids[gpu], *options)
        done: subprocess.CompletedProcess[str] = self.allot(*words, "--", "true")
        return done

    def words(self, modes: str, *options: str, gpu: int = 0) -> list[str]:
        where = ["--simulated", self.spec]
        return ["devices", "set-mode", *where, self.uuids[gpu], modes, *options]

    def set(self, modes: str, *options: str, gpu: int = 0) -> subprocess.CompletedProcess[str]:
        done: subprocess.CompletedProcess[str] = self.allot(*self.words(modes, *options, gpu=gpu))
        return done

    def drain(self, modes: str, *options: str) -> subprocess.Popen[str]:
        """A `set-mode --drain` that waits: it has said for whom when this returns."""
        program = self.start(*self.words(modes, "--drain", *options))
        assert program.stderr is not None
        assert program.stderr.readline().startswith("waiting for share ")
        return program

    # ---- what there is ---------------------------------------------------------------------------

    def device(self, gpu: int = 0) -> dict[str, Any]:
        done = self.allot("devices", "--simulated", self.spec, "-o", "json")
        found: dict[str, Any] = json.loads(done.stdout)["devices"][gpu]
        return found

    def said(self, gpu: int = 0) -> tuple[str | None, list[str] | None, bool]:
        """The mode that the GPU is in, those that it is for, whether it drains."""
        found = self.device(gpu)
        return found["mode"], found["allowed_modes"], found["draining"]

    def on(self, question: Callable[[MigDevice], T], gpu: int = 0) -> T:
        with MigMachine(self.file) as gpus:
            return gpus.ask_one(gpu, question, patience_s=30)

    def mig(self, gpu: int = 0) -> tuple[bool, int]:
        """Whether MIG is on, and how many instances there are."""
        seen = self.on(lambda device: device.driver.look(), gpu)
        return seen.is_enabled, len(seen.instances)


def end(program: subprocess.Popen[str]) -> None:
    _, errors = program.communicate("", timeout=120)
    assert (program.returncode, errors) == (0, "")


def finished(program: subprocess.Popen[str]) -> tuple[int, str, str]:
    output, errors = program.communicate(timeout=120)
    return program.returncode, output, errors

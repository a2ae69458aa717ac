# SPDX-License-Identifier: Apache-2.0
"""Shares of one GPU come and go, are killed and stopped, while eight others take their turns.

The whole path, as users have it: `allot run --compute` places and makes each share, the shim takes
turns for it, and nobody but the kernel tells the others when one of them ends.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

import build_native
from allotment.devices.simulated import machine_path

Allot = Any  # tests/conftest.py: CommandLine
Stop = Callable[[Path, int], None]
SPEC: Final = ("--simulated", "a100-80gb:1")
STEADY: Final = 8
AT_ONCE: Final = 3
STARTS: Final = int(os.environ.get("ALLOTMENT_TEST_STARTS", "24"))
"""How many shares start and stop; 200 take minutes on a small machine."""
FOREVER: Final = 0
PATIENCE_S: Final = 90.0
"""Of a loaded machine. What is lost is lost for ever."""


class Board:
    """What the programs tell: their pids, and how far they are."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(bytes(4096))

    def read(self, index: int) -> tuple[int, int]:
        """The pid of a program, 0 before it runs, and how many rounds it has done."""
        with self.path.open("rb") as file:
            file.seek(16 * index)
            pid, rounds = struct.unpack("<QQ", file.read(16))
        return pid, rounds

    def clear(self, index: int) -> None:
        """Make room for another program."""
        with self.path.open("r+b") as file:
            file.seek(16 * index)
            file.write(bytes(16))

    def wait_for(self, index: int, rounds: int) -> int:
        """Its pid, once it has done so many rounds."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            pid, done = self.read(index)
            if pid and done >= rounds:
                return pid
            assert time.monotonic() < deadline, f"program {index} is at {done} of {rounds} rounds"
            time.sleep(0.005)


@pytest.fixture
def turns(cc: list[str], native_dir: Path, tmp_path: Path) -> Path:
    """The compiled native/tests/lease/host_turns.c."""
    program = tmp_path / "turns"
    command = [*cc, "-std=c11", "-D_GNU_SOURCE", "-O1", "-I.", "-Iinclude"]
    command += ["tests/lease/host_turns.c", f"-L{native_dir / 'simulated'}", "-l:libcuda.so.1"]
    done = subprocess.run(
        [*command, "-o", str(program)],
        cwd=build_native.NATIVE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return program


class Storm:
    """The programs of a test, each in a share of its own."""

    def __init__(self, allot: Allot, turns: Path, board: Board, stop: Stop) -> None:
        self.allot = allot
        self.stop = stop
        self.turns = turns
        self.board = board
        self.rng = random.Random(4)  # noqa: S311 - the same storm each time
        self.programs: dict[int, subprocess.Popen[str]] = {}

    def start(self, index: int, compute: str, rounds: int) -> None:
        """Run a program in a new share."""
        self.board.clear(index)
        run = self.allot.command("run", *SPEC, "--memory", "1Gi", "--compute", compute, "--")
        self.programs[index] = subprocess.Popen(
            [*run, str(self.turns), str(self.board.path), str(index), str(rounds)],
            env=self.allot.environment(),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self, index: int, how: str) -> None:
        """Wait for the end of a program, or bring it about."""
        program = self.programs[index]
        if how != "ends":
            pid = self.board.wait_for(index, self.rng.randint(0, 3))
            if how == "stopped":
                os.kill(pid, signal.SIGSTOP)
                time.sleep(0.05)
            os.kill(pid, signal.SIGKILL)
        _, errors = program.communicate(timeout=PATIENCE_S)
        assert how != "ends" or program.returncode == 0, errors
        del self.programs[index]

    def pass_by(self, indices: range) -> None:
        """Have some start and end at once, while one of the others is stopped."""
        ways = {index: self.rng.choice(["ends", "killed", "stopped"]) for index in indices}
        for index, how in ways.items():
            rounds = self.rng.randint(1, 20) if how == "ends" else FOREVER
            self.start(index, self.rng.choice(["0:100", "3:50", "2"]), rounds)
        napping, _ = self.board.read(self.rng.randrange(STEADY))
        self.stop(machine_path(self.allot.state, SPEC[1]), napping)
        for index, how in ways.items():
            self.end(index, how)
        os.kill(napping, signal.SIGCONT)

    def clear_up(self) -> None:
        """Leave nothing behind, whatever happened."""
        for index, program in self.programs.items():
            pid, _ = self.board.read(index)
            if pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            program.kill()
            program.communicate()


@pytest.fixture
def storm(allot: Allot, turns: Path, tmp_path: Path, stop: Stop) -> Iterator[Storm]:
    """No program yet."""
    made = Storm(allot, turns, Board(tmp_path / "board"), stop)
    yield made
    made.clear_up()


@pytest.mark.timeout(240 + 5 * STARTS)
def test_shares_that_come_and_go_cost_nobody_a_lease(storm: Storm, allot: Allot) -> None:
    board = storm.board
    for index in range(STEADY):
        storm.start(index, "10:100", FOREVER)
    for index in range(STEADY):
        board.wait_for(index, 1)
    for _ in range(-(-STARTS // AT_ONCE)):
        before = [board.read(index)[1] for index in range(STEADY)]
        storm.pass_by(range(STEADY, STEADY + AT_ONCE))
        # Every one of the eight has gone on, the one that was stopped as well.
        for index, rounds in enumerate(before):
            board.wait_for(index, rounds + 1)
    for index in range(STEADY):
        board.wait_for(index, board.read(index)[1] + 5)
    for index in range(STEADY):
        storm.end(index, "killed")
    # Nothing of what all those were promised is still promised.
    done = allot("run", *SPEC, "--memory", "1Gi", "--compute", "100", "--", "true")
    assert done.returncode == 0, done.stderr

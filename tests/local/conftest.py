# SPDX-License-Identifier: Apache-2.0
"""Tests here start a dozen programs each: they have more time than others."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from mig_hands import CONFIGURATIONS
from warm_commands import WarmCommands, can_be_warm

import build_native

if TYPE_CHECKING:
    from tests.conftest import CommandLine

# A command takes half a second alone, and ten times that on a machine that does other things.
TIMEOUT_S = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives tests here that time, unless they say themselves how much they need."""
    for item in items:
        is_here = item.path.is_relative_to(Path(__file__).parent)
        if is_here and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture
def stop(cc: list[str], tmp_path: Path) -> Callable[[Path, int], None]:
    """Stops a process where its simulated GPU goes on: `stop(machine's file, pid)`."""
    program = tmp_path / "stop"
    command = [*cc, "-std=c11", "-D_GNU_SOURCE", "-O1", "-I.", "-Iinclude"]
    command += ["tests/simulated/host_stop.c", "-o", str(program)]
    subprocess.run(command, cwd=build_native.NATIVE, check=True)

    def stop_it(machine: Path, pid: int) -> None:
        subprocess.run([program, machine, str(pid)], check=True)

    return stop_it


@pytest.fixture
def mig_file(tmp_path: Path) -> Path:
    """A file with configurations of MIG, for `allot mig`."""
    path = tmp_path / "config.yaml"
    path.write_text(CONFIGURATIONS, "utf-8")
    return path


class WarmCommandLine:
    """`allot` of tests/conftest.py, whose calls are forks of a process that has it loaded."""

    def __init__(self, cold: CommandLine, commands: WarmCommands) -> None:
        self.cold = cold
        self.state: Path = cold.state
        self.environment = cold.environment
        self.command = cold.command
        self._commands = commands

    def __call__(
        self, *arguments: str | Path, stdin: str = "", timeout_s: float = 50, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs to the end; the caller looks at `returncode`, `stdout` and `stderr`."""
        environment = self.environment(**variables)
        if not can_be_warm(environment):
            return self.cold(*arguments, stdin=stdin, timeout_s=timeout_s, **variables)
        words = [str(each) for each in arguments]
        return self._commands.run(words, env=environment, stdin=stdin, timeout_s=timeout_s)


@pytest.fixture(scope="session")
def warm_commands() -> Iterator[WarmCommands]:
    """The process that has the commands loaded; it starts with the first of them."""
    with WarmCommands() as commands:
        yield commands


@pytest.fixture
def allot(allot: CommandLine, warm_commands: WarmCommands) -> CommandLine | WarmCommandLine:
    """The command line on a fresh state folder. COLD_COMMANDS=1: a new interpreter for each."""
    if os.environ.get("COLD_COMMANDS"):
        return allot
    return WarmCommandLine(allot, warm_commands)

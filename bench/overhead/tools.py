# SPDX-License-Identifier: Apache-2.0
"""The processor time of the commands that users wait for, with no share and with hundreds.

Processor time, and the least of many runs: on a machine with other work the wall clock measures
that work.
"""

from __future__ import annotations

import os
import pty
import select
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Final

from allotment.devices.simulated import SimulatedMachine, machine_path
from allotment.model.quantities import parse_memory
from allotment.model.requests import Request
from allotment.model.shares import Injection
from allotment.shares.booking import Bookings
from allotment.shares.folders import StateFolder
from allotment.shares.lifecycle import FrontDoor, create
from allotment.shares.placing import ShareOrder
from allotment.shares.process_tree import named
from bench.harness.options import Options
from bench.harness.programs import command_environment
from bench.harness.quantiles import summarize
from bench.harness.results import Result
from bench.overhead.rig import ShareRig

_MACHINE: Final = "a100-80gb:8"
_TICKS: Final = os.sysconf("SC_CLK_TCK")


def tools(_rig: ShareRig, options: Options) -> Iterator[Result]:
    """Measure `allot run`, `ps` and `top`, and how long many shares take to make."""
    allot = shutil.which("allot", path=str(Path(sys.executable).parent))
    command = [allot] if allot is not None else [sys.executable, "-m", "allotment"]
    runs, shares = options.pick(20, 2), options.pick(300, 4)
    python = least_ms([sys.executable, "-c", "pass"], os.environ, runs)
    with tempfile.TemporaryDirectory(prefix="allotment-bench-") as work:
        environment = command_environment(work)
        in_share = [*command, "run", "--simulated", _MACHINE, "--memory", "1Gi", "--", "true"]
        yield _result("`allot run -- true`", in_share, environment, python, target=80, runs=runs)
        folder = StateFolder(Path(work))
        begun = time.monotonic()
        with _shares(folder, shares):
            taken_s = time.monotonic() - begun
            shown = [*command, "ps"]
            name = f"`allot ps`, {shares} shares"
            yield _result(name, shown, environment, python, target=200, runs=runs)
            percent = _live([*command, "top"], environment, options.pick(20, 1))
    yield Result(
        name=f"{shares} shares made by one process",
        topic="many",
        unit="s",
        value=taken_s,
        target=10.0,
        method="start to end, with a runner and its command for each share",
    )
    yield Result(
        name=f"`allot top`, {shares} shares, a reading a second",
        topic="live",
        unit="% of a processor",
        value=percent,
        target=3.0,
        method="processor time of the live screen, 160 by 50 cells, after its first readings",
    )


def _result(
    name: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    python: Sequence[float],
    *,
    target: float,
    runs: int,
) -> Result:
    times = least_ms(command, environment, runs)
    return Result(
        name=name,
        topic="commands",
        unit="ms",
        value=min(times),
        target=target,
        samples=runs,
        method="user and system time of the process and its children, the least of all runs;"
        " beside it `python -c pass`",
        base=summarize(python),
        summary=summarize(times),
    )


def least_ms(command: Sequence[str], environment: Mapping[str, str], runs: int) -> list[float]:
    """Return the processor time of each run, in ms; the first, which fills caches, is left out."""
    return [_processor_ms(command, environment) for _ in range(runs + 1)][1:]


def _processor_ms(command: Sequence[str], environment: Mapping[str, str]) -> float:
    silent = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    pid = os.posix_spawn(command[0], list(command), environment, file_actions=silent)
    _, status, usage = os.wait4(pid, 0)
    if status != 0:
        raise RuntimeError(command)
    return (usage.ru_utime + usage.ru_stime) * 1000


@contextmanager
def _shares(folder: StateFolder, count: int) -> Iterator[None]:
    """Make shares, each with a runner and its command, both asleep."""
    folder.prepare()
    machine = machine_path(folder.root, _MACHINE)
    devices = SimulatedMachine(machine).devices()
    door = FrontDoor(locked=folder.locked, known_shares=Bookings(folder).read)
    with ExitStack() as stack:
        for number in range(count):
            runner = Popen(["/bin/sh", "-c", "cat; exit"], stdin=PIPE, stdout=DEVNULL)
            stack.enter_context(runner)
            order = ShareOrder(
                request=Request(parse_memory("1Gi")),
                injection=Injection.ENVIRONMENT,
                name=f"share-{number}",
                machine=machine,
                runner=named(runner.pid),
                command=("cat",),
            )
            create(folder, order, devices, door=door)
        yield


def _live(command: Sequence[str], environment: Mapping[str, str], seconds: int) -> float:
    """Return the processor time of a live screen in percent."""
    pid, terminal = pty.fork()
    if pid == 0:
        size = {"COLUMNS": "160", "LINES": "50"}
        os.execve(command[0], list(command), {**environment, **size, "TERM": "xterm-256color"})
    try:
        _drain(terminal, 3.0)
        before, begun = _used_s(pid), time.monotonic()
        _drain(terminal, seconds)
        used, took = _used_s(pid) - before, time.monotonic() - begun
        os.write(terminal, b"q")
        _drain(terminal, 5.0)
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)
    return 100 * used / took


def _drain(terminal: int, seconds: float) -> None:
    """Read what a program draws, for a time or until it ends."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if select.select([terminal], [], [], left)[0]:
            try:
                os.read(terminal, 1 << 16)
            except OSError:  # it has ended
                return


def _used_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS

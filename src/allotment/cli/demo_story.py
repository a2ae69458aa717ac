# SPDX-License-Identifier: Apache-2.0
"""The story of `allot demo`: two programs in their shares, and the checks of the result.

The programs are real processes: `allot run ... -- allot burn ...`. Results come from their reports
and from their ledgers, which stay open so that the last figures outlive the shares.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import click
import msgspec

from allotment.cli.groups import wants_colour
from allotment.ledger import Ledger, read
from allotment.model.errors import AllotError
from allotment.model.formats import format_bytes
from allotment.shares.folders import StateFolder
from allotment.shares.recovery import list_shares
from allotment.shares.run.command import refuse_nesting

_GI = 1 << 30
_PACE_S = 1.0
_START_S = 30.0
_TRIES = 3
_CHUNK = 64 << 20
"""Allocation size: the driver must refuse within this distance of the limit."""


class _Program(msgspec.Struct, eq=False):
    """One run of a program in its share, and its result."""

    name: str
    limit: int
    wants: int
    share: str
    process: "subprocess.Popen[str]"
    output: IO[str]
    complaints: IO[str]
    ledger: Path | None = None
    """Folder of links to the open files of its ledger."""
    descriptors: list[int] = msgspec.field(default_factory=list)
    report: dict[str, Any] = msgspec.field(default_factory=dict)
    last: Ledger | None = None

    @property
    def total(self) -> int:
        """Total memory of the GPU as reported to the program."""
        return int(self._first("device").get("total_bytes") or 0)

    @property
    def got(self) -> int:
        """Memory that the driver granted, without the context."""
        return int(self.report.get("got_bytes") or 0)

    @property
    def errors(self) -> list[str]:
        """Names of the CUDA errors."""
        processes = self.report.get("processes") or []
        return [str(error["name"]) for process in processes for error in process["errors"]]

    @property
    def highest(self) -> int:
        """Peak use of the share by the ledger, with contexts."""
        return self.last.devices[0].peak if self.last else 0

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def _first(self, key: str) -> dict[str, Any]:
        processes = self.report.get("processes") or [{}]
        return processes[0].get(key) or {}


class Story:
    """One run of the demo; `spec` None uses a real GPU."""

    def __init__(self, *, spec: str | None, seconds: float, state: Path | None) -> None:
        self._spec = spec
        self._seconds = seconds
        self._folder = StateFolder.at(state)
        self._began = time.monotonic()
        self._programs: list[_Program] = []
        self._shown_at = 0.0

    def play(self) -> int:
        """Run the programs, print their use, and return the exit code."""
        refuse_nesting()
        what = "a GPU of this machine" if self._spec is None else f"one simulated {self._spec}"
        click.echo(f"Two programs share {what}; neither sees the other.\n")
        with tempfile.TemporaryDirectory(prefix="allot-demo-") as folder:
            try:
                self._run_programs(Path(folder))
            finally:
                for program in self._programs:
                    self._end(program)
        return self._verdict()

    def _run_programs(self, folder: Path) -> None:
        """Run `steady`, and start `greedy` beside it a few times."""
        self._announce("steady", 4 * _GI, 3 * _GI)
        self._announce("greedy", 2 * _GI, 6 * _GI)
        click.echo()
        self._began = time.monotonic()
        steady = self._start("steady", 4 * _GI, 3 * _GI, self._seconds)
        self._watch(folder, lambda: steady.has_ended() or _use(steady) >= steady.wants)
        for attempt in range(_TRIES):
            greedy = self._start("greedy", 2 * _GI, 6 * _GI, self._seconds)
            self._watch(folder, greedy.has_ended)
            self._finish(greedy)
            error = greedy.errors[0] if greedy.errors else "no error"
            self._print(f"greedy got {format_bytes(greedy.got)}, then {error}")
            next_try = self._began + self._seconds * (attempt + 1) / _TRIES
            self._watch(folder, lambda at=next_try: steady.has_ended() or time.monotonic() > at)  # type: ignore[misc]
        self._watch(folder, steady.has_ended)
        self._finish(steady)

    def _announce(self, name: str, limit: int, wants: int) -> None:
        click.echo(
            f"  {name} has a limit of {format_bytes(limit)} and requests {format_bytes(wants)}:"
        )
        command = " ".join(self._command(name, limit, wants))
        click.echo(click.style(f"    $ {command}", dim=True), color=wants_colour())

    def _command(self, name: str, limit: int, wants: int) -> list[str]:
        machine = ["--simulated", self._spec] if self._spec else []
        run = ["allot", "run", *machine, "--memory", format_bytes(limit), "--name", name]
        return [*run, "--", "allot", "burn", "--memory", format_bytes(wants)]

    def _start(self, name: str, limit: int, wants: int, seconds: float) -> _Program:
        taken = {loaded.name for loaded in list_shares(self._folder)}
        share = f"{name}-{os.getpid()}" if name in taken else name
        ours = [sys.executable, "-m", "allotment"]
        words = [*self._command(share, limit, wants), "--seconds", str(seconds), "-o", "json"]
        environment = {**os.environ, "ALLOTMENT_STATE": str(self._folder.root)}
        if self._spec is None:
            environment.pop("ALLOTMENT_SIMULATED", None)
        output, complaints = _scratch(), _scratch()
        process = subprocess.Popen(
            [part for word in words for part in (ours if word == "allot" else [word])],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=complaints,
            text=True,
            env=environment,
        )
        program = _Program(name, limit, wants, share, process, output, complaints)
        self._programs.append(program)
        return program

    def _watch(self, folder: Path, until: Callable[[], bool]) -> None:
        """Open new ledgers and print the use about once a second, until `until` returns True."""
        deadline = time.monotonic() + self._seconds + _START_S
        while not until():
            if time.monotonic() > deadline:
                raise AllotError("the programs did not end in time", hint="see `allot ps`")
            for program in self._programs:
                if program.ledger is None and not program.has_ended():
                    self._open_ledger(program, folder)
            if time.monotonic() - self._shown_at >= _PACE_S:
                parts = [_now(program) for program in self._programs if not program.has_ended()]
                if any(parts):
                    self._print("   ".join(part for part in parts if part))
            time.sleep(0.02)

    def _open_ledger(self, program: _Program, folder: Path) -> None:
        for share in list_shares(self._folder):
            if share.name != program.share:
                continue
            try:
                files = [share.directory / "policy", share.directory / "usage"]
                program.descriptors = [os.open(file, os.O_RDONLY | os.O_CLOEXEC) for file in files]
            except FileNotFoundError:
                return
            program.ledger = folder / f"{len(os.listdir(folder))}"  # noqa: PTH208 - a count
            program.ledger.mkdir()

    def _print(self, text: str) -> None:
        self._shown_at = time.monotonic()
        click.echo(f"  {self._shown_at - self._began:4.1f} s   {text}")

    def _finish(self, program: _Program) -> None:
        """Read the report of an ended program, and the last figures of its ledger."""
        program.process.wait()
        for file in (program.output, program.complaints):
            file.seek(0)
        try:
            program.report = json.loads(program.output.read())
        except ValueError:
            raise _could_not_run(program) from None
        if program.ledger is not None:
            program.last = _read(program, program.ledger)

    @staticmethod
    def _end(program: _Program) -> None:
        if not program.has_ended():
            program.process.terminate()
        program.process.wait()
        program.output.close()
        program.complaints.close()
        for descriptor in program.descriptors:
            os.close(descriptor)

    def _verdict(self) -> int:
        """Print the checks; return 0 if all passed."""
        click.echo("\nChecks:")
        is_right = True
        for passed, text in self._findings():
            word = click.style("yes", fg="green") if passed else click.style("NO ", fg="red")
            click.echo(f"  {word}  {text}", color=wants_colour())
            is_right = is_right and passed
        if not is_right:
            click.echo("\nA check failed.", err=True)
        return 0 if is_right else 1

    def _findings(self) -> Iterator[tuple[bool, str]]:
        steady, *greedy = self._programs
        for name, programs in (("steady", [steady]), ("greedy", greedy)):
            total = " and ".join(sorted({format_bytes(program.total) for program in programs}))
            is_right = all(program.total == program.limit for program in programs)
            yield is_right, f"{name} saw a GPU with {total}"
        refused = sum(program.errors == ["CUDA_ERROR_OUT_OF_MEMORY"] for program in greedy)
        times = f"{len(greedy)} times, and got CUDA_ERROR_OUT_OF_MEMORY {refused} times"
        yield refused == len(greedy) > 0, f"greedy requested more than its limit {times}"
        highest = max(program.highest for program in greedy)
        is_exact = all(
            program.limit - _CHUNK < program.highest <= program.limit for program in greedy
        )
        most = f"{format_bytes(highest)} at most ({highest} bytes, with its context)"
        yield is_exact, f"greedy used {most}, never more than its limit"
        kernels = int(steady.report.get("kernels") or 0)
        is_right = steady.process.returncode == 0 and steady.got == steady.wants and kernels > 0
        met = f"ran {kernels} kernels with {len(steady.errors)} errors"
        yield is_right, f"steady got its {format_bytes(steady.got)}, {met}"


def _scratch() -> IO[str]:
    return tempfile.TemporaryFile("w+", encoding="utf-8")


def _use(program: _Program) -> int:
    return 0 if program.ledger is None else _read(program, program.ledger).devices[0].used


def _read(program: _Program, ledger: Path) -> Ledger:
    """Read a copy of the ledger, which outlives the share: its files are open."""
    for name, descriptor in zip(("policy", "usage"), program.descriptors, strict=True):
        content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        (ledger / name).write_bytes(content)
    return read(ledger)


def _now(program: _Program) -> str:
    """Describe the current use of a share; empty if it uses nothing."""
    if program.ledger is None:
        return ""
    ledger = _read(program, program.ledger)
    used, limit = ledger.devices[0].used, ledger.policy.devices[0].memory_limit
    return f"{program.name} uses {format_bytes(used)} of {format_bytes(limit)}" if used else ""


def _could_not_run(program: _Program) -> AllotError:
    lines = [line for line in program.complaints.read().splitlines() if line]
    ended = f"it ended with {program.process.returncode}"
    message = lines[0].removeprefix("error: ") if lines else ended
    hints = [line.removeprefix("hint: ") for line in lines if line.startswith("hint: ")]
    return AllotError(
        f"{program.name} could not run: {message}",
        hint=hints[0] if hints else "see `allot doctor`",
    )

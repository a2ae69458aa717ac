# SPDX-License-Identifier: Apache-2.0
"""The story of `allot demo`: two programs, their shares, and what has to be seen of them.

The programs are real processes that know nothing of the story: `allot run ... -- allot burn ...`.
What happened is taken from two sides: what the programs report, and what their ledgers say, of
which the story keeps hold so that their last figures can be read when the shares are gone.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import click

from allotment.ledger import Ledger, read
from allotment.model.errors import AllotError
from allotment.model.formats import format_bytes
from allotment.shares.folders import StateFolder
from allotment.shares.lives import look
from allotment.shares.sessions import refuse_nesting

__all__ = ["Story"]

_GI = 1 << 30
_PACE_S = 1.0
_START_S = 30.0
_TRIES = 3
_CHUNK = 64 << 20
"""What the programs allocate at a time: a refusal has to come within this much of the limit."""


@dataclass(slots=True, eq=False)
class _Program:
    """One run of a program in its share, and what became of it."""

    name: str
    limit: int
    wants: int
    share: str
    process: "subprocess.Popen[str]"
    output: IO[str]
    complaints: IO[str]
    ledger: Path | None = None
    """A folder of links to the open files of its ledger."""
    descriptors: list[int] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)
    last: Ledger | None = None

    @property
    def told(self) -> int:
        """What the program was told that its GPU has."""
        return int(self._first("device").get("total_bytes") or 0)

    @property
    def got(self) -> int:
        """What the driver granted it, its context not included."""
        return int(self.report.get("got_bytes") or 0)

    @property
    def errors(self) -> list[str]:
        """The names of the errors that the driver gave it."""
        processes = self.report.get("processes") or []
        return [str(error["name"]) for process in processes for error in process["errors"]]

    @property
    def highest(self) -> int:
        """The most that its share ever used, by the ledger, contexts included."""
        return self.last.devices[0].peak if self.last else 0

    def has_ended(self) -> bool:
        """Tell whether it has."""
        return self.process.poll() is not None

    def _first(self, key: str) -> dict[str, Any]:
        processes = self.report.get("processes") or [{}]
        return processes[0].get(key) or {}


class Story:
    """One telling. `spec` None: on a real GPU."""

    def __init__(self, *, spec: str | None, seconds: float, state: Path | None) -> None:
        self._spec = spec
        self._seconds = seconds
        self._folder = StateFolder.at(state)
        self._began = time.monotonic()
        self._programs: list[_Program] = []
        self._shown_at = 0.0

    def tell(self) -> int:
        """Let it happen, show it, and return the exit code."""
        refuse_nesting()
        what = "a GPU of this machine" if self._spec is None else f"one simulated {self._spec}"
        click.echo(f"Two programs share {what}, and neither knows of the other.\n")
        with tempfile.TemporaryDirectory(prefix="allot-demo-") as folder:
            try:
                self._play(Path(folder))
            finally:
                for program in self._programs:
                    self._end(program)
        return self._verdict()

    def _play(self, folder: Path) -> None:
        """Let `steady` work, and `greedy` try its luck beside it a few times."""
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
            self._say(f"greedy got {format_bytes(greedy.got)}, then {error}")
            next_try = self._began + self._seconds * (attempt + 1) / _TRIES
            self._watch(folder, lambda at=next_try: steady.has_ended() or time.monotonic() > at)  # type: ignore[misc]
        self._watch(folder, steady.has_ended)
        self._finish(steady)

    def _announce(self, name: str, limit: int, wants: int) -> None:
        click.echo(f"  {name} may use {format_bytes(limit)} and wants {format_bytes(wants)}:")
        command = " ".join(self._command(name, limit, wants))
        click.echo(click.style(f"    $ {command}", dim=True), color=_colour())

    def _command(self, name: str, limit: int, wants: int) -> list[str]:
        machine = ["--simulated", self._spec] if self._spec else []
        run = ["allot", "run", *machine, "--memory", format_bytes(limit), "--name", name]
        return [*run, "--", "allot", "burn", "--memory", format_bytes(wants)]

    def _start(self, name: str, limit: int, wants: int, seconds: float) -> _Program:
        taken = {each.name for each in look(self._folder)}
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
        """Take hold of new ledgers and show the use now and then, until something is so."""
        deadline = time.monotonic() + self._seconds + _START_S
        while not until():
            if time.monotonic() > deadline:
                raise AllotError("the programs take too long", hint="see `allot ps`")
            for program in self._programs:
                if program.ledger is None and not program.has_ended():
                    self._take_hold(program, folder)
            if time.monotonic() - self._shown_at >= _PACE_S:
                parts = [_now(each) for each in self._programs if not each.has_ended()]
                if any(parts):
                    self._say("   ".join(part for part in parts if part))
            time.sleep(0.02)

    def _take_hold(self, program: _Program, folder: Path) -> None:
        """Open the ledger of a program's share as soon as it is there."""
        for found in look(self._folder):
            if found.name != program.share:
                continue
            try:
                files = [found.directory / "policy", found.directory / "usage"]
                program.descriptors = [os.open(file, os.O_RDONLY | os.O_CLOEXEC) for file in files]
            except FileNotFoundError:
                return
            links = folder / f"{len(os.listdir(folder))}"  # noqa: PTH208 - a count
            links.mkdir()
            for file, descriptor in zip(files, program.descriptors, strict=True):
                (links / file.name).symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
            program.ledger = links

    def _say(self, text: str) -> None:
        self._shown_at = time.monotonic()
        click.echo(f"  {self._shown_at - self._began:4.1f} s   {text}")

    def _finish(self, program: _Program) -> None:
        """Take the report of a program that has ended, and the last figures of its ledger."""
        program.process.wait()
        for file in (program.output, program.complaints):
            file.seek(0)
        try:
            program.report = json.loads(program.output.read())
        except ValueError:
            raise _could_not_run(program) from None
        if program.ledger is not None:
            program.last = read(program.ledger)

    @staticmethod
    def _end(program: _Program) -> None:
        """Leave nothing behind: no process, no open file."""
        if not program.has_ended():
            program.process.terminate()
        program.process.wait()
        program.output.close()
        program.complaints.close()
        for descriptor in program.descriptors:
            os.close(descriptor)

    def _verdict(self) -> int:
        """Say what was seen; return 0 when all of it is as it should be."""
        click.echo("\nWhat was seen:")
        is_right = True
        for is_so, text in self._findings():
            word = click.style("yes", fg="green") if is_so else click.style("NO ", fg="red")
            click.echo(f"  {word}  {text}", color=_colour())
            is_right = is_right and is_so
        if not is_right:
            click.echo("\nSomething was not as it should be.", err=True)
        return 0 if is_right else 1

    def _findings(self) -> Iterator[tuple[bool, str]]:
        steady, *greedy = self._programs
        for name, programs in (("steady", [steady]), ("greedy", greedy)):
            told = " and ".join(sorted({format_bytes(each.told) for each in programs}))
            is_right = all(each.told == each.limit for each in programs)
            yield is_right, f"{name} was told that its GPU has {told}"
        refused = sum(each.errors == ["CUDA_ERROR_OUT_OF_MEMORY"] for each in greedy)
        times = f"{len(greedy)} times, and {refused} times got CUDA_ERROR_OUT_OF_MEMORY"
        yield refused == len(greedy) > 0, f"greedy wanted more {times}"
        highest = max(each.highest for each in greedy)
        is_exact = all(each.limit - _CHUNK < each.highest <= each.limit for each in greedy)
        most = f"{format_bytes(highest)} at most ({highest} bytes, its context included)"
        yield is_exact, f"greedy used {most}, never more than its limit"
        kernels = int(steady.report.get("kernels") or 0)
        is_right = steady.process.returncode == 0 and steady.got == steady.wants and kernels > 0
        met = f"ran {kernels} kernels and met {len(steady.errors)} errors"
        yield is_right, f"steady got its {format_bytes(steady.got)}, {met}"


def _scratch() -> IO[str]:
    return tempfile.TemporaryFile("w+", encoding="utf-8")


def _use(program: _Program) -> int:
    return 0 if program.ledger is None else read(program.ledger).devices[0].used


def _now(program: _Program) -> str:
    """Describe what a program's share uses at the moment, or nothing when that is nothing."""
    if program.ledger is None:
        return ""
    ledger = read(program.ledger)
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


def _colour() -> bool | None:
    return False if os.environ.get("NO_COLOR") else None

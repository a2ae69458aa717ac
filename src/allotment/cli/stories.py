# SPDX-License-Identifier: Apache-2.0
"""The story of `allot demo`: two programs, their shares, and what has to be seen of them.

The programs are real processes that know nothing of the story: `allot run ... -- allot burn ...`.
What happened is taken from two sides: what the programs report, and what the ledger says meanwhile.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import click

from allotment.model.errors import AllotError
from allotment.model.formats import format_bytes
from allotment.shares.folders import StateFolder
from allotment.shares.lives import Found, look
from allotment.shares.sessions import refuse_nesting

__all__ = ["Story"]

_GI = 1 << 30
_PACE_S = 0.5
_START_S = 20.0
_GRANULE = 64 << 20
"""What the programs allocate at a time: a refusal has to come within this much of the limit."""


@dataclass(slots=True)
class _Actor:
    """One program: its share, what it wants, and what became of it."""

    name: str
    limit: int
    wants: int
    share: str = ""
    process: "subprocess.Popen[str] | None" = None
    output: "IO[str] | None" = None
    report: dict[str, Any] = field(default_factory=dict)
    status: int | None = None
    highest: int = 0
    """The most that the ledger said it used, and whether it was ever over the limit."""
    was_over: bool = False

    @property
    def told(self) -> int:
        """What the program was told that its GPU has."""
        device = next(iter(self.report.get("processes") or [{}])).get("device") or {}
        return int(device.get("total_bytes") or 0)

    @property
    def errors(self) -> list[str]:
        """The names of the errors that the driver gave it."""
        processes = self.report.get("processes") or []
        return [str(error["name"]) for process in processes for error in process["errors"]]


class Story:
    """One telling. `spec` None: on a real GPU."""

    def __init__(self, *, spec: str | None, seconds: float, state: Path | None) -> None:
        self._spec = spec
        self._seconds = seconds
        self._folder = StateFolder.at(state)
        self._steady = _Actor("steady", limit=4 * _GI, wants=3 * _GI)
        self._greedy = _Actor("greedy", limit=2 * _GI, wants=6 * _GI)
        self._began = 0.0

    def tell(self) -> int:
        """Let it happen, show it, and return the exit code."""
        refuse_nesting()
        taken = {each.name for each in look(self._folder)} if self._folder.exists() else set()
        actors = (self._steady, self._greedy)
        for actor in actors:
            actor.share = actor.name if actor.name not in taken else f"{actor.name}-{os.getpid()}"
        what = "a GPU of this machine" if self._spec is None else f"one simulated {self._spec}"
        click.echo(f"Two programs share {what}, and neither knows of the other.\n")
        for actor in actors:
            click.echo(
                f"  {actor.name}: may use {format_bytes(actor.limit)}, wants"
                f" {format_bytes(actor.wants)}"
            )
            click.echo(click.style(f"          $ {' '.join(self._shown(actor))}", dim=True))
        click.echo()
        self._began = time.monotonic()
        try:
            self._play(actors)
        except BaseException:
            for actor in actors:
                if actor.process is not None and actor.process.poll() is None:
                    actor.process.terminate()
            raise
        finally:
            for actor in actors:
                self._finish(actor)
        return self._verdict()

    def _play(self, actors: Sequence[_Actor]) -> None:
        steady, greedy = actors
        self._start(steady, self._seconds)
        self._watch(until=lambda: steady.highest >= steady.wants, at_most_s=_START_S)
        self._start(greedy, self._seconds / 2)
        self._watch(
            until=lambda: all(_has_ended(actor) for actor in actors),
            at_most_s=self._seconds + 2 * _START_S,
        )

    def _shown(self, actor: _Actor) -> list[str]:
        machine = ["--simulated", self._spec] if self._spec else []
        run = ["allot", "run", *machine, "--memory", format_bytes(actor.limit)]
        return [
            *run,
            "--name",
            actor.share,
            "--",
            "allot",
            "burn",
            "--memory",
            format_bytes(actor.wants),
        ]

    def _start(self, actor: _Actor, seconds: float) -> None:
        ours = [sys.executable, "-m", "allotment"]
        arguments = [*self._shown(actor), "--seconds", str(seconds), "-o", "json"]
        command = [part for word in arguments for part in (ours if word == "allot" else [word])]
        environment = {**os.environ, "ALLOTMENT_STATE": str(self._folder.root)}
        if self._spec is None:
            environment.pop("ALLOTMENT_SIMULATED", None)
        import tempfile

        actor.output = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - read at the end
        actor.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=actor.output,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def _watch(self, *, until: Callable[[], bool], at_most_s: float) -> None:
        """Show the shares now and then, until something is so or a program ends early."""
        deadline = time.monotonic() + at_most_s
        shown = 0.0
        last = ""
        while not until() and time.monotonic() < deadline:
            line = self._line()
            if line and line != last and time.monotonic() - shown >= _PACE_S:
                click.echo(f"  {time.monotonic() - self._began:4.1f} s   {line}")
                shown, last = time.monotonic(), line
            if _has_ended(self._steady) and (
                self._greedy.process is None or _has_ended(self._greedy)
            ):
                return
            time.sleep(0.05)

    def _line(self) -> str:
        """Look at the ledgers, keep the extremes, and describe the moment."""
        found = {each.name: each for each in look(self._folder)} if self._folder.exists() else {}
        parts = []
        for actor in (self._steady, self._greedy):
            share = found.get(actor.share)
            if share is not None:
                parts.append(f"{actor.name} {self._seen(actor, share):<28}")
        return "  ".join(parts).rstrip()

    def _seen(self, actor: _Actor, share: Found) -> str:
        if share.ledger is None:
            return "?"
        device, use = share.ledger.policy.devices[0], share.ledger.devices[0]
        actor.highest = max(actor.highest, use.used, use.peak)
        actor.was_over = actor.was_over or max(use.used, use.peak) > device.memory_limit
        text = f"{format_bytes(use.used)} of {format_bytes(device.memory_limit)}"
        return f"{text}, refused {use.refusals}x" if use.refusals else text

    def _finish(self, actor: _Actor) -> None:
        """Wait for a program's end and take its report."""
        if actor.process is None or actor.output is None:
            return
        _, complaints = actor.process.communicate()
        actor.status = actor.process.returncode
        actor.output.seek(0)
        text = actor.output.read()
        actor.output.close()
        try:
            actor.report = json.loads(text) if text.strip() else {}
        except ValueError as error:
            raise AllotError(f"{actor.name} did not report: {text[:200]!r}") from error
        if not actor.report:
            raise _ended_early(actor, complaints)

    def _verdict(self) -> int:
        """Say what was seen; return 0 when all of it is as it should be."""
        click.echo("\nWhat was seen:")
        seen = list(self._findings())
        for is_so, text in seen:
            word = (
                click.style("yes", fg="green") if is_so else click.style("NO ", fg="red", bold=True)
            )
            click.echo(f"  {word} {text}", color=False if os.environ.get("NO_COLOR") else None)
        if all(is_so for is_so, _ in seen):
            return 0
        click.echo("\nSomething was not as it should be.", err=True)
        return 1

    def _findings(self) -> Iterator[tuple[bool, str]]:
        steady, greedy = self._steady, self._greedy
        for actor in (steady, greedy):
            told = f"{actor.name} was told that its GPU has {format_bytes(actor.told)}"
            yield actor.told == actor.limit, told
        got = format_bytes(int(greedy.report.get("got_bytes") or 0))
        error = greedy.errors[0] if greedy.errors else "no error"
        refused = f"greedy wanted {format_bytes(greedy.wants)}, got {got}, and then {error}"
        yield greedy.errors == ["CUDA_ERROR_OUT_OF_MEMORY"], refused
        highest = f"{format_bytes(greedy.highest)} ({greedy.highest} bytes, its context included)"
        within = not greedy.was_over and greedy.limit - _GRANULE < greedy.highest <= greedy.limit
        yield within, f"greedy used up to {highest}, never more than its limit"
        kernels = int(steady.report.get("kernels") or 0)
        got = format_bytes(int(steady.report.get("got_bytes") or 0))
        undisturbed = steady.status == 0 and not steady.errors and not steady.was_over
        ran = f"steady got its {got}, ran {kernels} kernels, and met {len(steady.errors)} errors"
        yield undisturbed and kernels > 0, ran


def _has_ended(actor: _Actor) -> bool:
    return actor.process is not None and actor.process.poll() is not None


def _ended_early(actor: _Actor, complaints: str) -> AllotError:
    lines = [line for line in complaints.strip().splitlines() if line]
    message = lines[0].removeprefix("error: ") if lines else f"it ended with {actor.status}"
    hints = [line.removeprefix("hint: ") for line in lines if line.startswith("hint: ")]
    return AllotError(
        f"{actor.name} could not run: {message}",
        hint=hints[0] if hints else "see `allot doctor`",
    )

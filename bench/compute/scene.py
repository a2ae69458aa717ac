# SPDX-License-Identifier: Apache-2.0
"""Scenes: programs that run together on a rig while the truth is sampled, and what was seen.

The truth is the simulator's own account of who computed when (programs/sampler.c). It comes from
the other side of the driver and shares nothing with what the shim measures.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.compute.rig import ALLOT, Rig, Terms

SECOND: Final = 1_000_000_000
_PATIENCE_SECONDS: Final = 60.0
# Several processes in one share; a background job of a shell would have no stdin.
_SEVERAL: Final = 'exec 3<&0; n=$1; shift; while [ $n -gt 0 ]; do "$@" <&3 & n=$((n-1)); done; wait'


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One program of a scene: where it runs, and under which terms (None: outside of any share)."""

    command: Sequence[str]
    gpu: int = 0
    terms: Terms | None = None
    processes: int = 1
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What came of a scene. Times are CLOCK_MONOTONIC nanoseconds."""

    parts: tuple[Part, ...]
    answers: tuple[list[dict[str, Any]], ...]
    """Of each part, its processes' answers."""
    samples: list[dict[str, Any]] = field(repr=False)

    @property
    def begun_ns(self) -> int:
        """When the last of the programs began."""
        return max(int(answer["begun_ns"]) for part in self.answers for answer in part)

    @property
    def ended_ns(self) -> int:
        """When the first of the programs ended, by its own report."""
        return min(int(answer["ended_ns"]) for part in self.answers for answer in part)

    def work_ns(self, part: int) -> int:
        """Add up the durations of all kernels that a part ran."""
        return sum(int(answer["work_ns"]) for answer in self.answers[part])

    def true_ns(self, part: int) -> int:
        """Return how long the GPU computed for a part, from its start to its end."""
        return self._track(part)[-1][1]

    def windows(
        self, part: int, *, length_ns: int, from_ns: int, to_ns: int
    ) -> list[tuple[int, float]]:
        """Return the part's percent of the device in each window of that length, by its start."""
        return list(_windows(self._track(part), length_ns, from_ns, to_ns))

    def percent(self, part: int, *, from_ns: int, to_ns: int) -> float:
        """Return the part's percent of the device over that time."""
        return _between(self._track(part), from_ns, to_ns)

    def idle_percent(self, gpu: int, *, from_ns: int, to_ns: int) -> float:
        """Return how much of the time a GPU computed nothing."""
        seen = [sample["gpus"][gpu] for sample in self.samples]
        track = [(int(each["time_ns"]), int(each["busy_ns"])) for each in seen]
        return 100.0 - _between(track, from_ns, to_ns)

    def handovers_per_second(self, gpu: int, *, from_ns: int, to_ns: int) -> float:
        """Return how often the lease of a GPU changed hands."""
        every = [sample["gpus"][gpu] for sample in self.samples]
        seen = [
            (int(each["time_ns"]), int(each["epoch"]))
            for each in every
            if from_ns <= int(each["time_ns"]) <= to_ns
        ]
        if len(seen) < 2 or seen[-1][0] == seen[0][0]:
            return 0.0
        return (seen[-1][1] - seen[0][1]) / ((seen[-1][0] - seen[0][0]) / SECOND)

    def _track(self, part: int) -> list[tuple[int, int]]:
        pids = {str(answer["pid"]) for answer in self.answers[part]}
        last: dict[str, int] = {}
        track = []
        for sample in self.samples:
            gpu = sample["gpus"][self.parts[part].gpu]
            seen = gpu["processes"]
            last.update({pid: int(seen[pid]) for pid in pids & seen.keys()})
            track.append((int(gpu["time_ns"]), sum(last.values())))
        return track


@dataclass(slots=True)
class Stage:
    """The programs of a scene while they run."""

    rig: Rig
    programs: list[subprocess.Popen[str]]

    def allot(self, *words: str) -> None:
        """Run an `allot` command on the scene's shares; RuntimeError when it fails."""
        done = subprocess.run(
            [*ALLOT, *words], env=self.rig.outside(), capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            message = f"allot {' '.join(words)} ended with {done.returncode}: {done.stderr.strip()}"
            raise RuntimeError(message)


def play(
    rig: Rig,
    parts: Sequence[Part],
    *,
    period_ms: int = 50,
    is_sampled: bool = True,
    meanwhile: Callable[[Stage], None] | None = None,
) -> Recording:
    """Start all parts at one instant, sample until the last has ended, and collect.

    `meanwhile` is called once they run. Real GPUs keep no accounts to sample. RuntimeError when a
    program fails or does not end.
    """
    with contextlib.ExitStack() as stack:
        sampler = stack.enter_context(_sampling(rig, period_ms)) if is_sampled else None
        programs = stack.enter_context(_started(rig, parts))
        for program in programs:
            _close(program)
        if meanwhile is not None:
            meanwhile(Stage(rig, programs))
        answers = tuple(_answers(program) for program in programs)
        samples = []
        if sampler is not None:
            _close(sampler)
            samples = _answers(sampler)[0]["samples"]
    recording = Recording(parts=tuple(parts), answers=answers, samples=samples)
    if is_sampled:
        _compare_with_ledger(rig, recording)
    return recording


@contextlib.contextmanager
def _sampling(rig: Rig, period_ms: int) -> Iterator[subprocess.Popen[str]]:
    devices = str(rig.state / "devices")
    sampler = _start(rig.program("sampler", period_ms, devices), rig.bare())
    try:
        _expect_ready(sampler, 1)
        yield sampler
    finally:
        _stop([sampler])


def _compare_with_ledger(rig: Rig, recording: Recording) -> None:
    for number, part in enumerate(recording.parts):
        charged = max(int(each.get("charged_ns", 0)) for each in recording.answers[number])
        truth = recording.true_ns(number)
        if part.terms is not None and charged > 0 and truth > 0:
            rig.errors.append((part.name, (charged / truth - 1) * 100))


@contextlib.contextmanager
def _started(rig: Rig, parts: Sequence[Part]) -> Iterator[list[subprocess.Popen[str]]]:
    programs = []
    try:
        for number, part in enumerate(parts):
            command, environment = list(part.command), rig.bare(part.gpu)
            if part.processes > 1:
                command = ["sh", "-c", _SEVERAL, "sh", str(part.processes), *command]
            if part.terms is not None:
                name = part.name or f"part-{number}"
                command = [*rig.shared(part.terms, part.gpu, name), *command]
                environment = rig.outside()
            programs.append(_start(command, environment))
        for program, part in zip(programs, parts, strict=True):
            _expect_ready(program, part.processes)
        yield programs
    finally:
        _stop(programs)


def _start(command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def _expect_ready(program: subprocess.Popen[str], times: int) -> None:
    for _ in range(times):
        line = "" if program.stdout is None else program.stdout.readline().rstrip("\n")
        if line != "ready":
            message = f"{program.args!r} said {line!r} and not that it is ready"
            raise RuntimeError(message)


def _close(program: subprocess.Popen[str]) -> None:
    if program.stdin is not None:
        program.stdin.close()
        program.stdin = None


def _answers(program: subprocess.Popen[str]) -> list[dict[str, Any]]:
    output, _ = program.communicate(timeout=_PATIENCE_SECONDS)
    if program.returncode != 0:
        message = f"{program.args!r} ended with {program.returncode}"
        raise RuntimeError(message)
    return [json.loads(line) for line in output.splitlines() if line != "ready"]


def _stop(programs: Collection[subprocess.Popen[str]]) -> None:
    """End what still runs; `allot run` hands SIGTERM on to its command, SIGKILL it cannot."""
    for program in programs:
        _close(program)
        if program.poll() is None:
            program.terminate()
    deadline = time.monotonic() + 3
    for program in programs:
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(max(0.0, deadline - time.monotonic()))
        if program.poll() is None:
            kill_below(program.pid)
            program.kill()
            program.wait()
        if program.stdout is not None:
            program.stdout.close()


def kill_below(pid: int) -> None:
    """Kill the descendants of a process, which `allot run` does not when it is killed itself."""
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        for child in map(int, children.split()):
            kill_below(child)
            os.kill(child, signal.SIGKILL)


def _between(track: Sequence[tuple[int, int]], from_ns: int, to_ns: int) -> float:
    times = [each for each, _ in track]
    first = min(bisect_left(times, from_ns), len(track) - 1)
    last = bisect_right(times, to_ns) - 1
    if last <= first:
        return float("nan")
    return (track[last][1] - track[first][1]) / (track[last][0] - track[first][0]) * 100


def _windows(
    track: Sequence[tuple[int, int]], length_ns: int, from_ns: int, to_ns: int
) -> Iterator[tuple[int, float]]:
    times = [each for each, _ in track]
    for first in range(bisect_left(times, from_ns), len(track)):
        last = bisect_left(times, times[first] + length_ns)
        if last >= len(track) or times[last] > to_ns:
            return
        part = (track[last][1] - track[first][1]) / (times[last] - times[first])
        yield times[first], part * 100

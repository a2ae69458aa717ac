# SPDX-License-Identifier: Apache-2.0
"""Do running shares notice that others start and stop beside them?"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator

from bench.compute.diagnostics import show
from bench.compute.rig import Rig, Terms
from bench.compute.scene import Part, Recording, Stage, kill_below, play
from bench.compute.sizes import Sizes, kernel_words
from bench.harness.options import Options
from bench.harness.results import Result

_RUNNING = 8
_AT_ONCE = 2
_LONGEST_SECONDS = 150.0
_PERIOD_MS = 10


def churn(rig: Rig, options: Options) -> Iterator[Result]:
    """Measure the longest stall of eight shares while many others start and stop."""
    sizes = Sizes.of(options)
    calm = _play(rig, starts=0, seconds=2.0 if sizes.quick else 5.0)
    started: list[int] = []
    busy = _play(rig, starts=sizes.starts, seconds=_LONGEST_SECONDS, started=started)
    yield Result(
        topic="starts and stops",
        name=f"{sum(started)} starts and stops beside {_RUNNING} running shares: "
        "longest time in which none of them computed",
        beside=f"{_standstill_ms(busy, range(_RUNNING, 2 * _RUNNING)):.0f} ms",
        seen=f"{_standstill_ms(busy, range(_RUNNING)):.0f} ms "
        f"(calm {_standstill_ms(calm, range(_RUNNING)):.0f} ms)",
        value=_standstill_ms(busy, range(_RUNNING)),
        unit="ms",
        target=50.0,
        samples=sum(started),
        method="eight shares of 10:100 that always want more, and the same programs outside of any "
        "share on another GPU; beside the shares others of 0:100 start, compute for 50 ms and "
        "stop, two at a time, every fourth time by SIGKILL; samples of the simulator's account "
        f"every {_PERIOD_MS} ms, the others' turns included; calm: without starts",
    )
    stalls = [answer[0]["gap_ns"]["max"] / 1e6 for answer in busy.answers]
    inside, outside = max(stalls[:_RUNNING]), max(stalls[_RUNNING:])
    before = [answer[0]["gap_ns"]["max"] / 1e6 for answer in calm.answers]
    went_on = sum(answer[0]["kernels"] > 0 for answer in busy.answers[:_RUNNING])
    yield Result(
        topic="stalls",
        name="the same: longest wait of one of them, its turns' distance included",
        beside=f"{outside:.1f} ms (calm {max(before[_RUNNING:]):.1f} ms)",
        seen=f"{inside:.1f} ms (calm {max(before[:_RUNNING]):.1f} ms)",
        value=inside,
        unit="ms",
        target=50.0,
        samples=sum(started),
        method="the longest time between two ends of about 1 ms of a program's work, of what "
        "began after its first second",
    )
    yield Result(
        topic="leases lost",
        name="running shares that did not go on",
        seen=f"{went_on} of {_RUNNING} went on",
        value=_RUNNING - went_on,
        unit="shares",
        target=0.0,
        samples=_RUNNING,
        method="shares that ended no work, or not properly, in the scene above",
    )
    yield from rig.ledger_error()


def _play(rig: Rig, *, starts: int, seconds: float, started: list[int] | None = None) -> Recording:
    command = rig.program("load", *kernel_words("200us"), "--seconds", seconds)
    parts = [
        Part(command=command, gpu=0, terms=Terms(compute="10:100"), name=f"steady-{number}")
        for number in range(_RUNNING)
    ]
    parts += [Part(command=command, gpu=1, name=f"bare-{number}") for number in range(_RUNNING)]

    def start_and_stop(stage: Stage) -> None:
        if started is None:
            return
        deadline = time.monotonic() + _LONGEST_SECONDS - 10
        rounds = -(-starts // _AT_ONCE)
        for number in range(rounds):
            if time.monotonic() > deadline:
                break
            started.append(_start_and_stop(rig, number))
        for program in stage.programs:
            program.send_signal(signal.SIGTERM)

    recording = play(rig, parts, period_ms=_PERIOD_MS, meanwhile=start_and_stop)
    show(rig, recording, recording.begun_ns, recording.ended_ns)
    return recording


def _standstill_ms(recording: Recording, parts: range) -> float:
    """Return the longest time in which all the parts together left their GPU idle."""
    first, last = recording.begun_ns, recording.ended_ns
    tracks = [recording.windows(part, length_ns=1, from_ns=first, to_ns=last) for part in parts]
    longest, since = 0, first
    for row in zip(*tracks, strict=True):
        at = row[0][0]
        if any(percent > 0 for _, percent in row):
            since = at
        longest = max(longest, at - since)
    return longest / 1e6


def _start_and_stop(rig: Rig, number: int) -> int:
    """Start and stop a few shares at once; how many."""
    killed = number % 4 == 3
    seconds = 5.0 if killed else 0.05
    load = rig.program("load", *kernel_words("200us"), "--seconds", seconds)
    terms = Terms(compute="0:100")
    programs = [
        subprocess.Popen(
            [*rig.shared(terms, 0, f"passing-{number}-{each}"), *load],
            env=rig.outside(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        for each in range(_AT_ONCE)
    ]
    for program in programs:
        if killed:
            if program.stdout is not None:
                program.stdout.readline()
            time.sleep(0.05)
            kill_below(program.pid)
        program.communicate(timeout=60)
    return len(programs)

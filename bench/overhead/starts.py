# SPDX-License-Identifier: Apache-2.0
"""What a share adds to the start of programs.

Bare and shared programs alternate, so that whatever else the machine does meets both alike.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench.harness.options import Options
from bench.harness.programs import begin, command_environment, running
from bench.harness.quantiles import summarize
from bench.harness.results import Result
from bench.overhead.calls import pair_result
from bench.overhead.rig import ShareRig
from bench.overhead.sizes import Sizes


def init(rig: ShareRig, options: Options) -> Iterator[Result]:
    """Measure cuInit, alone and of many processes that start together."""
    sizes = Sizes(quick=options.is_quick)
    share = rig.make_share("init", rig.device.allottable_bytes)
    for processes, rounds in ((1, sizes.single_rounds), (sizes.starters, sizes.crowd_rounds)):
        times: dict[str, list[float]] = {"bare": [], "share": []}
        differences = []
        for number in range(rounds):
            medians = {}
            for side in _alternate(number):
                environment = rig.bare() if side == "bare" else rig.inside(share)
                with running([rig.program("initialise")] * processes, environment) as programs:
                    answers = begin(programs)
                # The loading is counted too: a share could do its work there.
                taken = [(answer["load"] + answer["initialise"]) / 1e6 for (answer,) in answers]
                times[side] += taken
                medians[side] = statistics.median(taken)
            differences.append(medians["share"] - medians["bare"])
        together = "1 process" if processes == 1 else f"{processes} processes together"
        yield Result(
            name=f"load the driver and cuInit, {together}",
            unit="ms",
            value=statistics.median(differences),
            target=5.0,
            samples=processes * rounds * 2,
            method="rounds of bare and shared processes alternate, each round released at one "
            "instant; median over the rounds of the difference of their medians",
            base=summarize(times["bare"]),
            summary=summarize(times["share"]),
        )


def start(rig: ShareRig, options: Options) -> Iterator[Result]:
    """Measure the life of a program that never touches a GPU."""
    sizes = Sizes(quick=options.is_quick)
    share = rig.make_share("start", rig.device.allottable_bytes)
    variables = ["PATH=/usr/bin:/bin"]
    variables += [f"{name}={value}" for name, value in rig.added(share).items()]
    command = rig.program("start", sizes.life_pairs, str(rig.programs / "nothing"), *variables)
    answer = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    yield pair_result(
        [answer],
        name="a program that never touches a GPU, start to end",
        target=1.0,
        unit="ms",
        factor=1e-6,
        method="posix_spawn to waitpid of an empty C program; bare and shared alternate; "
        "median of the differences",
    )


def run(rig: ShareRig, options: Options) -> Iterator[Result]:
    """Measure what `allot run` adds to a command."""
    sizes = Sizes(quick=options.is_quick)
    allot = shutil.which("allot", path=str(Path(sys.executable).parent))
    command = [allot] if allot is not None else [sys.executable, "-m", "allotment"]
    spec = ["--simulated", rig.spec] if rig.spec else []
    with tempfile.TemporaryDirectory(prefix="allotment-bench-") as state:
        environment = command_environment(state)
        in_share = [*command, "run", "--memory", "1Gi", *spec, "--", "true"]
        _seconds(in_share, environment)  # makes the simulated machine, and fills the disk's cache
        times: dict[str, list[float]] = {"bare": [], "share": []}
        for number in range(sizes.commands):
            for side in _alternate(number):
                taken = _seconds(["true"] if side == "bare" else in_share, environment)
                times[side].append(taken * 1000)
    yield Result(
        name="`allot run -- true`",
        unit="ms",
        value=statistics.median(
            share - bare for bare, share in zip(times["bare"], times["share"], strict=True)
        ),
        target=150.0,
        samples=sizes.commands,
        method="start to end, beside `true` alone, alternating",
        base=summarize(times["bare"]),
        summary=summarize(times["share"]),
    )


def _seconds(command: Sequence[str], environment: Mapping[str, str]) -> float:
    started = time.monotonic()
    subprocess.run(command, env=dict(environment), check=True)
    return time.monotonic() - started


def _alternate(number: int) -> tuple[str, str]:
    return ("bare", "share") if number % 2 else ("share", "bare")

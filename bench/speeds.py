# SPDX-License-Identifier: Apache-2.0
"""The questions of speed: what a share adds to calls, to starts and to commands.

Bare and shared samples always alternate, so that whatever else the machine does meets both alike;
what a share adds is the median of the differences within pairs, never the difference of two runs.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from amounts import Sizes
from places import Place
from programs import begin, expect, running
from rows import Quantiles, Row

_CROWD: Final = 8

_PAIRED: Final = "bare and wrapped calls alternate in one process; median of the differences"


def _quantiles(values: Sequence[float]) -> Quantiles:
    ordered = sorted(values)
    return Quantiles(
        p50=ordered[round(0.5 * (len(ordered) - 1))], p99=ordered[round(0.99 * (len(ordered) - 1))]
    )


def _median_quantiles(answers: Sequence[Mapping[str, float]]) -> Quantiles:
    """Combine what several processes measured at the same time: the median one of each figure."""
    return Quantiles(
        p50=statistics.median(answer["p50"] for answer in answers),
        p99=statistics.median(answer["p99"] for answer in answers),
    )


def _pair_row(
    answers: Sequence[Mapping[str, Any]],
    *,
    name: str,
    limit: float | None,
    unit: str = "ns",
    factor: float = 1.0,
    method: str = _PAIRED,
) -> Row:
    added = _median_quantiles([answer["added"] for answer in answers]).scaled(factor)
    return Row(
        name=name,
        unit=unit,
        added=added.p50,
        limit=limit,
        samples=sum(answer["samples"] for answer in answers),
        method=method,
        bare=_median_quantiles([answer["bare"] for answer in answers]).scaled(factor),
        share=_median_quantiles([answer["wrapped"] for answer in answers]).scaled(factor),
    )


def calls(place: Place, sizes: Sizes) -> Iterator[Row]:
    """Measure single calls, of one process alone."""
    share = place.make_share("calls", place.device.allottable_bytes)
    command = place.program("calls", sizes.pairs, sizes.pairs_ms, "allocate", "launch", "query")
    with running([command], place.inside(share)) as programs:
        (answers,) = begin(programs)
    limits = {
        "allocate 64 MiB": 2000.0,
        "allocate 4 KiB": 2000.0,
        "free 64 MiB": 1000.0,
        "free 4 KiB": 1000.0,
        "launch": 60.0,
        "launch a graph": 60.0,
        "cuMemGetInfo": None,
    }
    for answer in answers:
        operation = answer["operation"]
        if operation.startswith("unwrapped call"):
            yield _unwrapped(answer)
        else:
            yield _pair_row([answer], name=operation, limit=limits[operation])


def _unwrapped(answer: Mapping[str, Any]) -> Row:
    row = _pair_row([answer], name="a call that is not wrapped", limit=0.0)
    if answer["operation"] != "unwrapped call, same address":
        return row
    return Row(
        name=row.name,
        unit=row.unit,
        added=0.0,
        limit=0.0,
        samples=row.samples,
        method="dlsym and cuGetProcAddress give the driver's own address, so nothing can be added; "
        "times as above",
        bare=row.bare,
        share=row.share,
    )


def crowded_calls(place: Place, sizes: Sizes) -> Iterator[Row]:
    """Measure allocations while eight processes make them at once."""
    share = place.make_share("crowded", place.device.allottable_bytes)
    command = place.program("calls", sizes.crowd_pairs, sizes.crowd_ms, "allocate")
    with running([command] * _CROWD, place.inside(share)) as programs:
        answers = begin(programs)
    for index, (name, limit) in enumerate(
        [
            ("allocate 64 MiB", 2000.0),
            ("free 64 MiB", 1000.0),
            ("allocate 4 KiB", 2000.0),
            ("free 4 KiB", 1000.0),
        ]
    ):
        expect(answers[0][index]["operation"], name)
        yield _pair_row(
            [answer[index] for answer in answers],
            name=f"{name}, {_CROWD} processes at once",
            limit=limit,
            method=f"as above in {_CROWD} processes of one share at once; median process",
        )


def initialising(place: Place, sizes: Sizes) -> Iterator[Row]:
    """Measure cuInit, alone and of many processes that start together."""
    share = place.make_share("initialising", place.device.allottable_bytes)
    for processes, rounds in ((1, sizes.single_rounds), (sizes.starters, sizes.crowd_rounds)):
        times: dict[str, list[float]] = {"bare": [], "share": []}
        differences = []
        for number in range(rounds):
            medians = {}
            for side in _alternate(number):
                environment = place.bare() if side == "bare" else place.inside(share)
                with running([place.program("initialise")] * processes, environment) as programs:
                    answers = begin(programs)
                # The loading is counted too: a share could do its work there.
                taken = [(answer["load"] + answer["initialise"]) / 1e6 for (answer,) in answers]
                times[side] += taken
                medians[side] = statistics.median(taken)
            differences.append(medians["share"] - medians["bare"])
        together = "1 process" if processes == 1 else f"{processes} processes together"
        yield Row(
            name=f"load the driver and cuInit, {together}",
            unit="ms",
            added=statistics.median(differences),
            limit=5.0,
            samples=processes * rounds * 2,
            method="rounds of bare and shared processes alternate, each round released at one "
            "instant; median over the rounds of the difference of their medians",
            bare=_quantiles(times["bare"]),
            share=_quantiles(times["share"]),
        )


def starting(place: Place, sizes: Sizes) -> Iterator[Row]:
    """Measure the life of a program that never touches a GPU."""
    share = place.make_share("starting", place.device.allottable_bytes)
    variables = ["PATH=/usr/bin:/bin"]
    variables += [f"{name}={value}" for name, value in place.added(share).items()]
    command = place.program("start", sizes.life_pairs, str(place.programs / "nothing"), *variables)
    answer = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    yield _pair_row(
        [answer],
        name="a program that never touches a GPU, start to end",
        limit=1.0,
        unit="ms",
        factor=1e-6,
        method="posix_spawn to waitpid of an empty C program; bare and shared alternate; "
        "median of the differences",
    )


def commands(place: Place, sizes: Sizes) -> Iterator[Row]:
    """Measure what `allot run` adds to a command."""
    allot = shutil.which("allot", path=str(Path(sys.executable).parent))
    command = [allot] if allot is not None else [sys.executable, "-m", "allotment"]
    spec = ["--simulated", place.spec] if place.spec else []
    with tempfile.TemporaryDirectory(prefix="allotment-bench-") as state:
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("ALLOTMENT_")
        } | {"ALLOTMENT_STATE": state}
        run = [*command, "run", "--memory", "1Gi", *spec, "--", "true"]
        _seconds(run, environment)  # makes the simulated machine, and fills the disk's cache
        times: dict[str, list[float]] = {"bare": [], "share": []}
        for number in range(sizes.commands):
            for side in _alternate(number):
                taken = _seconds(["true"] if side == "bare" else run, environment)
                times[side].append(taken * 1000)
    yield Row(
        name="`allot run -- true`",
        unit="ms",
        added=statistics.median(
            share - bare for bare, share in zip(times["bare"], times["share"], strict=True)
        ),
        limit=150.0,
        samples=sizes.commands,
        method="start to end, beside `true` alone, alternating",
        bare=_quantiles(times["bare"]),
        share=_quantiles(times["share"]),
    )


def _seconds(command: Sequence[str], environment: Mapping[str, str]) -> float:
    started = time.monotonic()
    subprocess.run(command, env=dict(environment), check=True)
    return time.monotonic() - started


def _alternate(number: int) -> tuple[str, str]:
    return ("bare", "share") if number % 2 else ("share", "bare")

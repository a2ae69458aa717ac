# SPDX-License-Identifier: Apache-2.0
"""What the bench measures: each function makes the rows of one question.

Bare and shared samples always alternate, so that whatever else the machine does meets both alike;
what a share adds is the median of the differences within pairs, never the difference of two runs.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from programs import begin, expect, line_of, running
from rows import Quantiles, Row

from allotment import ledger

if TYPE_CHECKING:
    from places import Place

GRANULE: Final = 2 << 20
MIB: Final = 1 << 20
GIB: Final = 1 << 30
_CROWD: Final = 8
_STARTERS: Final = 64
_KILLED: Final = 100

_PAIRED: Final = "bare and wrapped calls alternate in one process; median of the differences"


class Sizes:
    """How much to measure: all of it, or enough to see that it works."""

    def __init__(self, *, quick: bool) -> None:
        """Choose sample counts."""
        self.pairs = 2000 if quick else 50_000
        self.pairs_ms = 200 if quick else 2000
        self.crowd_pairs = 20_000 if quick else 400_000
        self.crowd_ms = 200 if quick else 2000
        self.single_rounds = 5 if quick else 40
        self.crowd_rounds = 1 if quick else 6
        self.starters = 8 if quick else _STARTERS
        self.life_pairs = 30 if quick else 400
        self.commands = 2 if quick else 15
        self.storm_ms = 500 if quick else 3000
        self.kill_rounds = 1 if quick else 3
        self.killed = 10 if quick else _KILLED


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


def filling(place: Place, _sizes: Sizes) -> Iterator[Row]:
    """Measure how much of a limit can be used."""
    limit = 4 * GIB + 12345
    share = place.make_share("filling", limit)
    answer = json.loads(
        subprocess.run(
            place.program("fill"), env=place.inside(share), check=True, capture_output=True
        ).stdout
    )
    expect(str(answer["limit"]), str(limit))
    # All of the limit is used, or less than one granule is left of it.
    used = limit - answer["before"] + answer["got"]
    yield Row(
        name="left unusable of a limit",
        unit="bytes",
        added=limit - used,
        limit=GRANULE,
        samples=answer["got"] // GRANULE,
        method=f"2 MiB allocations until refused, in a share of {limit} bytes; the context counts",
    )


def storming(place: Place, sizes: Sizes) -> Iterator[Row]:
    """Look for bytes over the limit while processes and threads allocate and free at random."""
    processes, threads = 6, 3
    limit = 6 * place.device.context_bytes + 3 * GIB if place.device.context_bytes else 6 * GIB
    share = place.make_share("storming", limit)
    storm = place.program("storm", processes, threads, sizes.storm_ms)
    with (
        running([place.program("watch")], place.bare()) as watching,
        running([storm], place.inside(share), ready=processes) as storming_now,
    ):
        ((answer,),) = begin(storming_now)
        ((seen,),) = begin(watching)
    ledger.reap(share)
    use = ledger.read(share).devices[0]
    expect(str(answer["left"]), "0")
    highest = max(answer["highest"], seen["highest"], use.peak)
    yield Row(
        name="bytes over the limit, ever",
        unit="bytes",
        added=max(0, highest - limit),
        limit=0.0,
        samples=answer["granted"] + answer["refused"],
        method=f"{processes} processes of {threads} threads allocate and free at random near the "
        f"limit for {sizes.storm_ms / 1000:.1f} s ({answer['refused']} refusals); highest of what "
        f"they held by their own count, of what the driver's NVML showed outside the share "
        f"({seen['samples']} looks), and of the ledger's peak",
    )
    yield Row(
        name="bytes charged after all of them have ended",
        unit="bytes",
        added=use.used,
        limit=0.0,
        samples=1,
        method="the ledger, after the storm above",
    )


def killing(place: Place, sizes: Sizes) -> Iterator[Row]:
    """Measure how soon a share's usage is right after many of its processes were killed."""
    by_ledger, by_survivor = [], []
    # Real GPUs have room for fewer contexts.
    room = place.device.allottable_bytes // (place.device.context_bytes or GIB)
    killed = min(sizes.killed, room - 8)
    for number in range(sizes.kill_rounds):
        share = place.make_share(f"killing-{number}", place.device.allottable_bytes)
        environment = place.inside(share)
        with running([place.program("hold", 0, "watch")], environment) as (survivor,):
            alone = ledger.read(share).devices[0].used
            half = killed // 2
            commands = [place.program("hold", 16 * MIB, "busy")] * half
            commands += [place.program("hold", 16 * MIB)] * (killed - half)
            with running(commands, environment) as victims:
                started = time.monotonic()
                for victim in victims:
                    victim.send_signal(signal.SIGKILL)
                _ask(survivor)
                _wait_for_use(share, alone)
                by_ledger.append((time.monotonic() - started) * 1000)
                answer = json.loads(line_of(survivor))
                expect(str(answer["free"]), str(answer["expected"]))
                by_survivor.append(answer["nanoseconds"] / 1e6)
    for name, times in (
        ("usage is right, read from outside", by_ledger),
        ("cuMemGetInfo is right in a survivor", by_survivor),
    ):
        yield Row(
            name=f"after kill -9 of {killed} processes: {name}",
            unit="ms",
            added=max(times),
            limit=100.0,
            samples=len(times),
            method="half of them in the middle of allocating; from before the first kill; "
            "the longest of the rounds",
        )


def _ask(program: subprocess.Popen[str]) -> None:
    if program.stdin is not None:
        program.stdin.write("now\n")
        program.stdin.flush()


def _wait_for_use(share: Path, wanted: int, *, seconds: float = 10.0) -> None:
    """Read the share's usage as `allot ps` does, until it is `wanted` bytes."""
    deadline = time.monotonic() + seconds
    while True:
        ledger.reap(share)
        used = ledger.read(share).devices[0].used
        if used == wanted:
            return
        if time.monotonic() > deadline:
            message = f"{share}: {used} bytes are used after {seconds} s, not {wanted}"
            raise RuntimeError(message)


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


def sizes_on_disk(place: Place, sizes: Sizes) -> Iterator[Row]:
    """Measure the folder of a share that had many processes."""
    share = place.make_share("size", place.device.allottable_bytes)
    with running([place.program("hold", MIB)] * min(sizes.killed, 50), place.inside(share)):
        files = list(share.iterdir())
        occupied = sum(path.stat().st_blocks * 512 for path in files)
        apparent = sum(path.stat().st_size for path in files)
    method = f"{len(files)} files, {min(sizes.killed, 50)} processes in the share"
    yield Row(
        name="a share's folder, space it takes",
        unit="KiB",
        added=occupied / 1024,
        limit=1024.0,
        samples=1,
        method=f"du; {method}",
    )
    yield Row(
        name="a share's folder, sum of its files' sizes",
        unit="KiB",
        added=apparent / 1024,
        limit=None,
        samples=1,
        method=f"du --apparent-size; {method}",
    )


def _alternate(number: int) -> tuple[str, str]:
    return ("bare", "share") if number % 2 else ("share", "bare")


QUESTIONS: Final[dict[str, Callable[[Place, Sizes], Iterator[Row]]]] = {
    "calls": calls,
    "crowded": crowded_calls,
    "init": initialising,
    "start": starting,
    "storm": storming,
    "fill": filling,
    "kill": killing,
    "run": commands,
    "size": sizes_on_disk,
}

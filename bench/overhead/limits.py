# SPDX-License-Identifier: Apache-2.0
"""How exact limits are: their last byte, usage after kill -9, and what a share takes on disk."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from allotment import ledger
from bench.harness.options import Options
from bench.harness.programs import begin, expect, line_of, running
from bench.harness.results import Result
from bench.overhead.rig import ShareRig
from bench.overhead.sizes import GIB, GRANULE, MIB, Sizes


def fill(rig: ShareRig, _options: Options) -> Iterator[Result]:
    """Measure how much of a limit can be used."""
    limit = 4 * GIB + 12345
    share = rig.make_share("filling", limit)
    answer = json.loads(
        subprocess.run(
            rig.program("fill"), env=rig.inside(share), check=True, capture_output=True
        ).stdout
    )
    expect(str(answer["limit"]), str(limit))
    # All of the limit is used, or less than one granule is left of it.
    used = limit - answer["before"] + answer["got"]
    yield Result(
        name="left unusable of a limit",
        unit="bytes",
        value=limit - used,
        target=float(GRANULE),
        is_required=True,
        samples=answer["got"] // GRANULE,
        method=f"2 MiB allocations until refused, in a share of {limit} bytes; the context counts",
    )


def storm(rig: ShareRig, options: Options) -> Iterator[Result]:
    """Look for bytes over the limit while processes and threads allocate and free at random."""
    sizes, processes, threads = Sizes(quick=options.is_quick), 6, 3
    limit = 6 * rig.device.context_bytes + 3 * GIB if rig.device.context_bytes else 6 * GIB
    share = rig.make_share("storming", limit)
    command = rig.program("storm", processes, threads, sizes.storm_ms)
    with (
        running([rig.program("watch")], rig.bare()) as watching,
        running([command], rig.inside(share), ready=processes) as storming_now,
    ):
        ((answer,),) = begin(storming_now)
        ((seen,),) = begin(watching)
    ledger.reap(share)
    ledger.reap(share, asked_ns=time.clock_gettime_ns(time.CLOCK_BOOTTIME))
    use = ledger.read(share).devices[0]
    expect(str(answer["left"]), "0")
    highest = max(answer["highest"], seen["highest"], use.peak)
    yield Result(
        name="bytes over the limit, ever",
        unit="bytes",
        value=max(0, highest - limit),
        target=0.0,
        is_required=True,
        samples=answer["granted"] + answer["refused"],
        method=f"{processes} processes of {threads} threads allocate and free at random near the "
        f"limit for {sizes.storm_ms / 1000:.1f} s ({answer['refused']} refusals); highest of what "
        f"they held by their own count, of what the driver's NVML showed outside the share "
        f"({seen['samples']} looks), and of the ledger's peak",
    )
    yield Result(
        name="bytes charged after all of them have ended",
        unit="bytes",
        value=use.used,
        target=0.0,
        is_required=True,
        samples=1,
        method="the ledger, after the storm above",
    )


def kill(rig: ShareRig, options: Options) -> Iterator[Result]:
    """Measure how soon a share's usage is right after many of its processes were killed."""
    sizes = Sizes(quick=options.is_quick)
    by_ledger, by_survivor = [], []
    # Real GPUs have room for fewer contexts.
    room = rig.device.allottable_bytes // (rig.device.context_bytes or GIB)
    killed = min(sizes.killed, room - 8)
    for number in range(sizes.kill_rounds):
        share = rig.make_share(f"killing-{number}", rig.device.allottable_bytes)
        environment = rig.inside(share)
        with running([rig.program("hold", 0, "watch")], environment) as (survivor,):
            alone = ledger.read(share).devices[0].used
            half = killed // 2
            commands = [rig.program("hold", 16 * MIB, "busy")] * half
            commands += [rig.program("hold", 16 * MIB)] * (killed - half)
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
        yield Result(
            name=f"after kill -9 of {killed} processes: {name}",
            unit="ms",
            value=max(times),
            target=100.0,
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
        ledger.reap(share, asked_ns=time.clock_gettime_ns(time.CLOCK_BOOTTIME))
        used = ledger.read(share).devices[0].used
        if used == wanted:
            return
        if time.monotonic() > deadline:
            message = f"{share}: {used} bytes are used after {seconds} s, not {wanted}"
            raise RuntimeError(message)


def size(rig: ShareRig, options: Options) -> Iterator[Result]:
    """Measure the folder of a share with many processes."""
    sizes = Sizes(quick=options.is_quick)
    share = rig.make_share("size", rig.device.allottable_bytes)
    with running([rig.program("hold", MIB)] * min(sizes.killed, 50), rig.inside(share)):
        files = list(share.iterdir())
        occupied = sum(path.stat().st_blocks * 512 for path in files)
        apparent = sum(path.stat().st_size for path in files)
    method = f"{len(files)} files, {min(sizes.killed, 50)} processes in the share"
    yield Result(
        name="a share's folder, space it takes",
        unit="KiB",
        value=occupied / 1024,
        target=1024.0,
        samples=1,
        method=f"du; {method}",
    )
    yield Result(
        name="a share's folder, sum of its files' sizes",
        unit="KiB",
        value=apparent / 1024,
        target=None,
        samples=1,
        method=f"du --apparent-size; {method}",
    )

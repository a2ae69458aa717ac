# SPDX-License-Identifier: Apache-2.0
"""A program that is killed and started again at once, on a driver that frees its memory late."""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Iterator

from allotment.devices.faults import set_driver_fault
from bench.harness.options import Options
from bench.harness.programs import running
from bench.harness.results import Result
from bench.overhead.rig import ShareRig
from bench.overhead.sizes import GRANULE

_RELEASE_MS = 300


def kill_restart(rig: ShareRig, options: Options) -> Iterator[Result]:
    """Kill a program that has all of half a GPU, and start it again, beside a full other half."""
    rounds = 3 if options.is_quick else 20
    half = rig.device.allottable_bytes // 2 // GRANULE * GRANULE
    one, other = (rig.make_share(name, half) for name in ("restarted", "neighbour"))
    if rig.machine is not None:
        set_driver_fault(rig.machine, release_us=_RELEASE_MS * 1000)
    most = (half - rig.device.context_bytes) // GRANULE * GRANULE
    hold, inside = rig.program("hold", most), rig.inside(one)
    over, missing, waits = 0, 0, []
    pids: list[int] = []
    for _ in range(rounds):
        started = time.monotonic()
        with (
            running([hold], inside) as (program,),
            subprocess.Popen(
                rig.program("fill"), env=rig.inside(other), stdout=subprocess.PIPE, text=True
            ) as neighbour,
        ):
            waits.append((time.monotonic() - started) * 1000)
            pids.append(program.pid)
            over = max(over, sum(rig.used_by(pid) or 0 for pid in pids) - half)
            answer = json.loads(neighbour.communicate()[0])
            left = half - answer["before"] - answer["got"]
            missing += left >= GRANULE
    delay = f"the driver frees a program's memory {_RELEASE_MS} ms after its end"
    yield Result(
        name="refusals of a neighbour inside its own limit",
        unit="refusals",
        value=missing,
        target=0.0,
        is_required=True,
        samples=rounds,
        method=f"a program with all of half the GPU is killed and started again at once, {rounds}"
        f" times, while its neighbour fills the other half; {delay}",
    )
    yield Result(
        name="bytes over the restarted share's limit, by the driver",
        unit="bytes",
        value=max(0, over),
        target=0.0,
        is_required=True,
        samples=rounds,
        method=f"NVML's figures of the living and the dead program together; {delay}",
    )
    yield Result(
        name="from the start until the restarted program has its memory",
        unit="ms",
        value=statistics.median(waits[1:]),
        target=None,
        samples=rounds - 1,
        method=f"median; {delay}, from the first look on",
    )

# SPDX-License-Identifier: Apache-2.0
"""How soon an MPS daemon that was killed under load is replaced."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Iterator
from typing import Final

from bench.harness.options import Options
from bench.harness.quantiles import summarize
from bench.harness.results import Result
from bench.mps.stage import BLOCKS, PATIENCE_S, Stage, begin

_TARGET_S: Final = 2.0


def mps_restart(stage: Stage, options: Options) -> Iterator[Result]:
    """Kill the daemon under load, and see when it serves again, and what the other GPU noticed."""
    rounds = 1 if options.is_quick else 5
    waits, named = [], 0
    other = stage.share("mps", "200", str(BLOCKS), "600", gpu=1)
    begin([other])
    for _ in range(rounds):
        loads = [stage.share("mps", "200", str(BLOCKS), "600") for _ in range(2)]
        begin(loads)
        time.sleep(0.3)
        before = stage.status()
        if before.daemon is None:
            message = "there is no daemon to kill"
            raise RuntimeError(message)
        began = time.monotonic()
        os.kill(before.daemon, signal.SIGKILL)
        while stage.status().restarts == before.restarts:
            if time.monotonic() - began > PATIENCE_S:
                message = "the daemon does not come back"
                raise RuntimeError(message)
            time.sleep(0.005)
        waits.append(time.monotonic() - began)
        named += len(stage.status().losses[-1].shares) == len(loads)
        for each in loads:
            each.communicate()
    undisturbed = other.poll() is None
    other.terminate()
    other.communicate()
    yield Result(
        topic="kills",
        name="daemon killed under load: ready for clients again",
        seen=f"p50 {statistics.median(waits):.2f} s",
        value=max(waits),
        summary=summarize(waits),
        unit="s",
        target=_TARGET_S,
        samples=rounds,
        method="SIGKILL with two shares computing; until the status says that a server is"
        f" active; both shares named in {named} of {rounds}; the program on the other GPU"
        f" {'ran on' if undisturbed else 'WAS DISTURBED'}",
    )

# SPDX-License-Identifier: Apache-2.0
"""The processor time of `allot simulate` for one replay of a generated trace."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator

from bench.harness.options import Options
from bench.harness.programs import command_environment
from bench.harness.quantiles import summarize
from bench.harness.results import Result
from bench.harness.runner import NoRig
from bench.overhead.tools import least_ms


def replay_time(_rig: NoRig, options: Options) -> Iterator[Result]:
    """Generate and replay a trace of 1,213 nodes; a tenth of it with --quick."""
    scale = str(options.pick(100, 10) / 100)
    command = [sys.executable, "-m", "allotment", "simulate", "--generate", "--scale", scale]
    with tempfile.TemporaryDirectory(prefix="allotment-bench-") as work:
        environment = command_environment(work)
        times = least_ms([*command, "-o", "json"], environment, options.pick(5, 1))
    yield Result(
        name=f"`allot simulate --generate --scale {scale}`",
        unit="ms",
        value=min(times),
        target=1000,
        samples=len(times),
        method="user and system time of the process, the least of all runs; the policy is"
        " `fragmentation`",
        summary=summarize(times),
    )

# SPDX-License-Identifier: Apache-2.0
"""The questions of the room overhead, on the GPU under test."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Final

from bench.gpu.rig import GpuRig
from bench.harness.options import Options
from bench.harness.results import Result
from bench.overhead import calls, limits, starts

_QUESTIONS: Final = (
    *(calls.allocate, calls.launch, calls.query, calls.crowd),
    *(starts.init, starts.start, starts.run),
    *(limits.storm, limits.fill, limits.kill, limits.size),
)


def gpu_overhead(rig: GpuRig, options: Options) -> Iterator[Result]:
    """Ask all of them; one that fails takes its own results away and no others."""
    for question in _QUESTIONS:
        print(f"measuring: {question.__name__}", file=sys.stderr)
        try:
            yield from question(rig.shares, options)
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            yield Result(
                name=question.__name__, topic="failures", unit="", value=None, seen=str(error)
            )

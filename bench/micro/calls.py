# SPDX-License-Identifier: Apache-2.0
"""Small Python calls. pyperf starts several processes, and in each calls in a loop.

That answers how a call's time changes with a commit. It does not fit what other rooms measure:
pairs of calls within one process, long-lived pairs of programs, and calls on a state that changes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pyperf

from bench.harness.machine import ROOT
from bench.harness.options import Options
from bench.harness.quantiles import summarize
from bench.harness.results import Result
from bench.harness.runner import NoRig

_QUICK: Final = ("--processes", "2", "--values", "2", "--warmups", "1", "--min-time", "0.01")
_WHAT: Final = {
    "parse": "parse_memory('3500Mi')",
    "read-request": "a pod's request for GPUs, from kube-scheduler's bytes",
    "choose": "a GPU of eight for a share",
    "choose-slice": "a place for a slice on eight GPUs",
    "read-ledger": "a share's ledger",
}


def parse(_rig: NoRig, options: Options) -> Iterator[Result]:
    """Parse an amount of memory."""
    yield _measure("parse", options)


def read_request(_rig: NoRig, options: Options) -> Iterator[Result]:
    """Read what a pod asks for."""
    yield _measure("read-request", options)


def choose(_rig: NoRig, options: Options) -> Iterator[Result]:
    """Choose a GPU."""
    yield _measure("choose", options)


def choose_slice(_rig: NoRig, options: Options) -> Iterator[Result]:
    """Choose a place for a slice."""
    yield _measure("choose-slice", options)


def read_ledger(_rig: NoRig, options: Options) -> Iterator[Result]:
    """Read a ledger."""
    yield _measure("read-ledger", options)


def _measure(name: str, options: Options) -> Result:
    with tempfile.TemporaryDirectory(prefix="allotment-bench-") as folder:
        path = Path(folder) / "values.json"
        command = [
            sys.executable,
            "-m",
            "bench.micro.worker",
            name,
            "--quiet",
            "--output",
            str(path),
        ]
        command += _QUICK if options.is_quick else ()
        subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
        measured = pyperf.Benchmark.load(str(path))
    summary = summarize([1e6 * value for value in measured.get_values()])
    return Result(
        name=_WHAT[name],
        topic="pyperf",
        unit="us",
        value=summary.p50,
        summary=summary,
        samples=len(measured.get_values()),
        method="pyperf: values of several processes, each a mean over many calls in a loop;"
        " p50 / p99 of the values; the figure is the median",
    )

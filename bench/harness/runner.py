# SPDX-License-Identifier: Apache-2.0
"""Runs benches, room by room, and reports each as it ends.

A bench that fails takes its own results away and no others: a long run, or a run on a borrowed GPU,
is not repeated lightly.
"""

from __future__ import annotations

import datetime as dt
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby

from testbed.waiting import TestbedError

from allotment.model.errors import AllotError
from bench.harness.machine import Processors, commit, facts
from bench.harness.options import Options
from bench.harness.registry import Bench, Rig, open_rig
from bench.harness.results import Provenance, Record, Result, record

_FAILURES = (
    AllotError,
    AssertionError,
    OSError,
    RuntimeError,
    TestbedError,
    subprocess.SubprocessError,
)


@dataclass(frozen=True, slots=True)
class NoRig:
    """For benches that need nothing in common."""

    facts: dict[str, str] = field(default_factory=dict)


@contextmanager
def no_rig(_options: Options) -> Iterator[NoRig]:
    """Yield it."""
    yield NoRig()


@dataclass(slots=True)
class Run:
    """What came of a run."""

    records: list[Record] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    """By bench: why it ended early."""
    skipped: dict[str, str] = field(default_factory=dict)
    """By bench: what is missing here."""


Report = Callable[[Bench, Sequence[Record]], None]


def run(benches: Sequence[Bench], options: Options, *, command: str, report: Report) -> Run:
    """Run the benches; `report` is called after each, with what it found."""
    made = Run()
    head = commit()
    for room, some in groupby(benches, key=lambda each: each.room):
        able = [each for each in some if _has_needs(each, options, made)]
        if not able:
            continue
        with open_rig(room, options) as rig:
            for bench in able:
                found, before = [], Processors.now()
                try:
                    found.extend(_measure(bench, rig, options))
                except _Stopped as stopped:
                    # What is stored shows the gap, too.
                    gap = Result(name="the rest", unit="", value=None, seen=stopped.reason)
                    found.extend([*stopped.results, gap])
                    made.failures[bench.name] = stopped.reason
                machine = facts() | rig.facts
                machine["processors"] = Processors.now().use_since(before)
                date = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
                provenance = Provenance(commit=head, date=date, command=command, machine=machine)
                records = [
                    record(
                        each,
                        bench=bench.name,
                        room=bench.room,
                        question=bench.question,
                        base=bench.base,
                        provenance=provenance,
                    )
                    for each in found
                ]
                made.records += records
                report(bench, records)
    return made


class _Stopped(Exception):  # noqa: N818 - no error of its own
    """A bench that failed, with what it found before."""

    def __init__(self, results: list[Result], reason: str) -> None:
        self.results = results
        self.reason = reason
        super().__init__(reason)


def _measure(bench: Bench, rig: Rig, options: Options) -> list[Result]:
    found: list[Result] = []
    started = time.monotonic()
    print(f"measuring: {bench.name}", file=sys.stderr, flush=True)
    try:
        for result in bench.results(rig, options):
            found.append(result)
            if options.is_verbose:
                print(f"  {result.name}: {result.seen or result.value}", file=sys.stderr)
    except _FAILURES as error:
        if options.is_verbose:
            traceback.print_exc()
        reason = str(error).partition("\n")[0] or type(error).__name__
        if isinstance(error, AllotError) and error.hint:
            reason += f" (hint: {error.hint})"
        raise _Stopped(found, reason) from error
    except Exception as error:
        # gRPC is needed only by the benches of the node, and its errors are no OSError.
        if type(error).__module__.partition(".")[0] != "grpc":
            raise
        raise _Stopped(found, str(error).partition("\n")[0]) from error
    finally:
        print(f"  {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return found


def _has_needs(bench: Bench, options: Options, made: Run) -> bool:
    missing = [reason for need in bench.needs if (reason := need.missing(options))]
    if missing:
        made.skipped[bench.name] = "; ".join(missing)
    return not missing

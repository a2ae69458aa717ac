# SPDX-License-Identifier: Apache-2.0
"""Run benches by name, and store what they found.

Targets are shown, and a missed one changes the exit status only with --strict: the machine that
measures is often busy with other things. A result that is wrong always does.
"""

from __future__ import annotations

import datetime as dt
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from allotment.model.errors import AllotError
from bench.harness import tables
from bench.harness.machine import commit
from bench.harness.options import options_of, parser, results_folder
from bench.harness.registry import BENCHES, Bench, select
from bench.harness.results import Record, to_line, write_records
from bench.harness.runner import Run, run

_FILE_COLUMNS: Final = 180


def main(words: Sequence[str]) -> int:
    """Measure and report. 1: a bench failed, or a result is wrong, or missed under --strict."""
    made = parser()
    chosen = made.parse_args(words)
    console = Console(width=None if sys.stdout.isatty() else _FILE_COLUMNS)
    if chosen.list:
        show_list(console, BENCHES)
        return 0
    try:
        benches = select(chosen.names)
    except ValueError as error:
        made.error(str(error))
    command = f"python -m bench {shlex.join(words)}".rstrip()
    folder = results_folder(chosen)
    if folder is not None:
        folder /= f"{dt.datetime.now(dt.UTC):%Y-%m-%d}-{commit()}"
        prepare(folder)

    def report(bench: Bench, records: Sequence[Record]) -> None:
        if folder is not None:
            write_records(folder, records)
        write(console, bench, records, output=chosen.output)

    try:
        done = run(benches, options_of(chosen), command=command, report=report)
    except AllotError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"\nhint: {error.hint}", file=sys.stderr)
        return error.exit_code
    return conclude(done, folder, is_strict=chosen.strict)


def prepare(folder: Path) -> None:
    """Make the folder before anything is measured: that takes minutes."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"error: cannot create {folder}: {error.strerror}", file=sys.stderr)
        print("\nhint: name another folder with --results", file=sys.stderr)
        sys.exit(2)


def write(console: Console, bench: Bench, records: Sequence[Record], *, output: str) -> None:
    """Write what a bench found to stdout."""
    results = [each.result() for each in records]
    if output == "json":
        for each in records:
            print(to_line(each), flush=True)
    elif output == "markdown":
        lines = [f"### {bench.name}", "", bench.question, ""]
        print("\n".join([*lines, *tables.markdown(results, base=bench.base), ""]), flush=True)
    else:
        console.rule(f"{bench.name}: {bench.question}", align="left")
        tables.show(console, results, base=bench.base)
        console.print()


def conclude(done: Run, folder: Path | None, *, is_strict: bool) -> int:
    """Report on stderr what was not measured and where results are; return the exit status."""
    for name, why in done.skipped.items():
        print(f"{name}: skipped: {why}", file=sys.stderr)
    for name, why in done.failures.items():
        print(f"{name}: FAILED: {why}", file=sys.stderr)
    missed = [each for each in done.records if each.met is False]
    for each in missed:
        word = "WRONG" if each.is_required else "missed"
        print(f"{each.bench}: {word}: {each.name}", file=sys.stderr)
    if folder is not None and done.records:
        print(f"stored: {folder}", file=sys.stderr)
    is_wrong = any(each.is_required for each in missed)
    has_failed = done.failures or is_wrong or (is_strict and missed) or not done.records
    return 1 if has_failed else 0


def show_list(console: Console, benches: Sequence[Bench]) -> None:
    """Write each bench: its question, how long it takes, what it needs."""
    shown = Table(box=None, pad_edge=False, highlight=False)
    for name in ("room", "name", "question", "takes", "needs"):
        shown.add_column(name, no_wrap=name in {"room", "name", "takes"})
    for each in benches:
        needs = ", ".join(need.value for need in each.needs)
        mark = "*" if each.is_default else ""
        shown.add_row(each.room, each.name + mark, each.question, f"{each.seconds} s", needs)
    console.print(shown)
    console.print(r"* runs by default (`make bench`)")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

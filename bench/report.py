# SPDX-License-Identifier: Apache-2.0
"""Write stored results into the pages that show them: of each bench, its newest results.

    python -m bench.report                        from bench/results into docs/performance*.md
    python -m bench.report PAGE.md --results DIR

A page marks where: `<!-- bench: NAME... -->...<!-- /bench -->` becomes the tables of benches or
rooms, and `<!-- figure: BENCH: RESULT -->...<!-- /figure -->` one figure. What has no stored
results stays as it is. A commit that the repository does not have is an error, and so is a
modified working tree.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from bench.harness import tables
from bench.harness.machine import DIRTY, ROOT, has_commit
from bench.harness.registry import BENCHES
from bench.harness.results import RESULTS, SCHEMA, Record, read_records

PAGES: Final = (ROOT / "docs" / "performance.md", ROOT / "docs" / "performance-details.md")
_BLOCK: Final = re.compile(
    r"(?P<begin><!-- bench: (?P<names>[\w -]+?) -->\n).*?(?P<end><!-- /bench -->)", re.DOTALL
)
_FIGURE: Final = re.compile(
    r"(?P<begin><!-- figure: (?P<bench>[\w-]+): (?P<name>.+?) -->)[^\n]*?(?P<end><!-- /figure -->)"
)


class NoSuchFigureError(Exception):
    """A page asks for a figure that no stored result has."""


def newest(folder: Path) -> list[list[Record]]:
    """Return the newest results of each bench below a folder, in the registry's order."""
    found: dict[str, list[Record]] = {}
    for path in sorted(folder.rglob("*.jsonl")):
        records = read_records(path)
        name = path.stem
        if records and (name not in found or records[0].date > found[name][0].date):
            found[name] = records
    order = [each.name for each in BENCHES]
    return [found[name] for name in sorted(found, key=lambda name: _place(name, order))]


def _place(name: str, order: Sequence[str]) -> int:
    return order.index(name) if name in order else len(order)


def problems(
    benches: Sequence[Sequence[Record]], *, exists: Callable[[str], bool] = has_commit
) -> Iterator[str]:
    """Report results that cannot be published."""
    for commit in sorted({each.commit for records in benches for each in records}):
        if commit.endswith(DIRTY):
            yield f"{commit}: measured in a modified working tree"
        elif not exists(commit):
            yield f"{commit}: the repository has no such commit"
    for records in benches:
        if any(each.schema != SCHEMA for each in records):
            yield f"{records[0].bench}: schema {records[0].schema}, not {SCHEMA}"


def fill(page: str, benches: Sequence[Sequence[Record]]) -> str:
    """Return a page with the results at its marks; NoSuchFigureError."""
    figures = {(each.bench, each.name): each for records in benches for each in records}

    def block(mark: re.Match[str]) -> str:
        names = mark["names"].split()
        some = [each for each in benches if each[0].bench in names or each[0].room in names]
        if not some:
            return mark[0]
        lines = [line for records in some for line in _section(records)]
        return "\n".join([mark["begin"], *lines, mark["end"]])

    def figure(mark: re.Match[str]) -> str:
        found = figures.get((mark["bench"], mark["name"]))
        if found is None:
            raise NoSuchFigureError(f"no stored result {mark['name']!r} of {mark['bench']}")
        return f"{mark['begin']}{tables.figure(found.result())}{mark['end']}"

    return _FIGURE.sub(figure, _BLOCK.sub(block, page))


def _section(records: Sequence[Record]) -> Iterator[str]:
    first = records[0]
    base = next((each.base.name for each in records if each.base is not None), "")
    yield from (f"### {first.bench}", "", first.question, "")
    yield from tables.markdown([each.result() for each in records], base=base)
    machine = "; ".join(f"{name}: {value}" for name, value in first.machine.items())
    yield from (f"- measured: {first.date}, commit {first.commit}; {machine}.", "")


def main(words: Sequence[str]) -> int:
    """Fill the pages; 1: there is nothing to write, or something that cannot be published."""
    made = argparse.ArgumentParser(
        prog="python -m bench.report", description=(__doc__ or "").partition("\n")[0]
    )
    made.add_argument("pages", nargs="*", type=Path, metavar="PAGE", default=PAGES)
    made.add_argument("--results", type=Path, metavar="DIR", default=RESULTS)
    chosen = made.parse_args(words)
    try:
        benches = newest(chosen.results)
        wrong = [*problems(benches)] if benches else [f"no results below {chosen.results}"]
        pages = (
            {} if wrong else {each: fill(each.read_text("utf-8"), benches) for each in chosen.pages}
        )
    except (OSError, msgspec.DecodeError, NoSuchFigureError) as error:
        wrong, pages = [str(error)], {}
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    for path, page in pages.items():
        path.write_text(page, encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

# SPDX-License-Identifier: Apache-2.0
"""Results as tables: one writer for the terminal and one for Markdown, with the same cells."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from rich.console import Console
from rich.table import Table

from bench.harness.quantiles import Summary
from bench.harness.results import CHECK, Result

Cells = Sequence[str]
_HEAD: Final = ("what", "{base}", "seen", "figure", "ratio", "target", "verdict")
_ALWAYS: Final = {"what", "figure"}


def number(value: float) -> str:
    """Write a number with the digits that mean something."""
    if value == int(value) or abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.3g}"


def both(summary: Summary, unit: str) -> str:
    """Write the median and the 99th percentile."""
    return f"{number(summary.p50)} / {number(summary.p99)} {unit}".rstrip()


def table(results: Sequence[Result], *, base: str) -> tuple[Cells, list[Cells]]:
    """Return a head and the rows of cells; a column that is empty in every row is left out."""
    head = [each.format(base=base or "beside") for each in _HEAD]
    rows = [_cells(result) for result in results]
    used = [
        column
        for column, name in enumerate(_HEAD)
        if name in _ALWAYS or any(row[column] for row in rows)
    ]
    return [head[column] for column in used], [[row[column] for column in used] for row in rows]


def show(console: Console, results: Sequence[Result], *, base: str) -> None:
    """Write the table and the methods for a terminal."""
    head, rows = table(results, base=base)
    shown = Table(box=None, pad_edge=False, highlight=False)
    for name in head:
        shown.add_column(name, overflow="fold")
    for row in rows:
        shown.add_row(*(_escaped(cell) for cell in row))
    console.print(shown)
    for line in methods(results):
        console.print(f"- {_escaped(line)}")


def markdown(results: Sequence[Result], *, base: str) -> list[str]:
    """Return the lines of the same table, and of the methods, for a page."""
    head, rows = table(results, base=base)
    lines = [_line(head), _line(["---"] * len(head)), *map(_line, rows)]
    return [*lines, "", *(f"- {_sentences(line)}." for line in methods(results))]


def methods(results: Sequence[Result]) -> Iterator[str]:
    """Yield how each topic was measured, once."""
    names: dict[str, list[str]] = {}
    for result in results:
        if result.method:
            names.setdefault(result.method, []).append(result.topic or result.name)
    for method, topics in names.items():
        label = f"{topics[0]}: " if len(set(topics)) == 1 else ""
        yield f"{label}{method}"


def _cells(result: Result) -> Cells:
    seen = result.seen or ("" if result.summary is None else both(result.summary, result.unit))
    beside = result.beside or ("" if result.base is None else both(result.base, result.unit))
    return (
        result.name,
        beside,
        seen,
        figure(result),
        "" if result.ratio is None else f"{result.ratio:.2f}",
        _target(result),
        _verdict(result),
    )


def figure(result: Result) -> str:
    """Write the figure that the target is for."""
    if result.unit == CHECK:
        return ""
    if result.value is None:
        return "not measured"
    return f"{number(result.value)} {result.unit}".rstrip()


def _target(result: Result) -> str:
    if result.target is None or result.unit == CHECK:
        return ""
    sign = "≥" if result.at_least else "≤"
    return f"{sign} {number(result.target)} {result.unit}".rstrip()


def _verdict(result: Result) -> str:
    if result.unit == CHECK:
        return {True: "right", False: "WRONG", None: "not tried"}[result.is_met]
    if result.is_met is False:
        return "WRONG" if result.is_required else "MISSED"
    return "met" if result.is_met else ""


def _sentences(text: str) -> str:
    """A page's lines have room; a method of one sentence is hard to read."""
    return re.sub(r"; (\w)", lambda found: f". {found[1].upper()}", text)


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")


def _line(cells: Cells) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"

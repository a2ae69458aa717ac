# SPDX-License-Identifier: Apache-2.0
"""Plain tables: aligned columns, nothing drawn. Loads nothing, so that `allot ps` starts at once.

Colour says nothing that the words do not. A table is cut to the terminal's width; into a pipe it
goes whole.
"""

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from allotment.model.compute import Compute

__all__ = ["OUTSIDE", "Column", "described", "print_table", "short_uuid"]

OUTSIDE = "(outside any share)"
"""Stands where a share's name would."""

_GAP = "  "


@dataclass(frozen=True, slots=True)
class Column:
    """A column's heading, and whether it holds numbers (aligned to the right)."""

    heading: str
    is_number: bool = False


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; a cell that is `no` in a column ENFORCED stands out."""
    shown = [[_printable(cell) for cell in row] for row in rows]
    headings = [column.heading for column in columns]
    widths = [max(map(len, column)) for column in zip(headings, *shown, strict=True)]
    limit = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    colour = False if os.environ.get("NO_COLOR") else None
    head = _line(headings, columns, widths, limit)
    click.echo(click.style(head, bold=True), color=colour)
    for row in shown:
        line = _line(row, columns, widths, limit)
        alarm = ("ENFORCED", "no") in zip(headings, row, strict=True)
        click.echo(click.style(line, fg="red") if alarm else line, color=colour)


def short_uuid(uuid: str) -> str:
    """Return the start of a UUID, enough to tell a machine's GPUs apart: `GPU-4f6e21b0`."""
    return uuid[:12]


def described(compute: "Compute | None") -> str:
    """Return compute in one word or two: `30:80`, `0:100 latency`, or `-` where none was asked."""
    if compute is None or not compute.is_governed:
        return "-"
    return str(compute) if compute.kind == "normal" else f"{compute} {compute.kind}"


def _printable(cell: str) -> str:
    """Keep a command line's control characters from the terminal."""
    return "".join(each if each.isprintable() else " " for each in cell)


def _line(
    cells: Sequence[str], columns: Sequence[Column], widths: Sequence[int], limit: int | None
) -> str:
    text = _GAP.join(
        cell.rjust(width) if column.is_number else cell.ljust(width)
        for cell, column, width in zip(cells, columns, widths, strict=True)
    ).rstrip()
    return text if limit is None or len(text) <= limit else text[: max(1, limit - 1)] + "…"

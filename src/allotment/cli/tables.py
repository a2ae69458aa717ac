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

import click

__all__ = ["Column", "print_table", "short_uuid"]

_GAP = "  "


@dataclass(frozen=True, slots=True)
class Column:
    """A column's heading, and whether it holds numbers (aligned to the right)."""

    heading: str
    is_number: bool = False


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; a cell that is `no` in a column ENFORCED stands out."""
    shown = [[_printable(cell) for cell in row] for row in rows]
    widths = [
        max(len(column.heading), *(len(row[index]) for row in shown), 0)
        for index, column in enumerate(columns)
    ]
    limit = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    head = _line([column.heading for column in columns], columns, widths, limit)
    colour = False if os.environ.get("NO_COLOR") else None
    click.echo(click.style(head, bold=True), color=colour)
    for row in shown:
        line = _line(row, columns, widths, limit)
        enforced = [
            cell for column, cell in zip(columns, row, strict=True) if column.heading == "ENFORCED"
        ]
        click.echo(click.style(line, fg="red") if "no" in enforced else line, color=colour)


def short_uuid(uuid: str) -> str:
    """Return the start of a UUID, long enough to tell the GPUs of a machine apart: `GPU-4f6e21b0`."""
    return uuid[:12]


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

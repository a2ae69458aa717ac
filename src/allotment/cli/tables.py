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
    from allotment.shares.views import DeviceView, ShareView

__all__ = [
    "OUTSIDE",
    "Column",
    "command_of",
    "described",
    "has_host",
    "host_of",
    "limit_of",
    "print_table",
    "short_uuid",
    "shortened",
]

OUTSIDE = "(outside any share)"
"""Stands where a share's name would."""

_GAP = "  "
_LEAST_LAST = 12  # cells of the last column, mostly a command, that are worth showing


@dataclass(frozen=True, slots=True)
class Column:
    """A column's heading, and whether it holds numbers (aligned to the right)."""

    heading: str
    is_number: bool = False
    is_optional: bool = False
    """Left out, the last such column first, where the terminal is too narrow for the table."""


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; a cell that is `no` in a column ENFORCED stands out."""
    shown = [[_printable(cell) for cell in row] for row in rows]
    headings = [column.heading for column in columns]
    widths = [max(map(_cells, column)) for column in zip(headings, *shown, strict=True)]
    limit = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    kept = _kept(columns, widths, limit)
    columns, headings = [columns[i] for i in kept], [headings[i] for i in kept]
    widths = [widths[i] for i in kept]
    shown = [[row[i] for i in kept] for row in shown]
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


def described(compute: "Compute | None", *, takes_turns: bool = False) -> str:
    """Return compute in some words: `30:80`, `0:100 latency weight 300`, or `-` for none.

    Who did not ask for compute has some all the same where it `takes_turns` with others.
    """
    from allotment.model.compute import DEFAULT_WEIGHT

    if compute is None or not (compute.is_governed or takes_turns):
        return "-"
    words = [str(compute)]
    if compute.kind != "normal":
        words.append(str(compute.kind))
    if compute.weight != DEFAULT_WEIGHT:
        words.append(f"weight {compute.weight}")
    return " ".join(words)


def limit_of(device: "DeviceView") -> str:
    """Return the limit of a share's device: `4Gi`, or `4Gi+host` where it may be on the host."""
    from allotment.model.formats import format_bytes

    return format_bytes(device.limit) + ("+host" if device.is_oversubscribed else "")


def command_of(view: "ShareView") -> str:
    """Return what runs in a share; `-` for a pod's in which nothing does, or nobody can tell."""
    if view.share is None:
        return f"({view.state})"
    return view.command or ("-" if view.share.owner else "")


def host_of(device: "DeviceView") -> str:
    """Return what of a share's use may be on the host, or `-` where none can be."""
    from allotment.model.formats import format_bytes

    return format_bytes(device.host_bytes) if has_host(device) else "-"


def has_host(device: "DeviceView") -> bool:
    """Tell whether something of a share's memory may be on the host."""
    return device.is_oversubscribed or device.host_bytes > 0


def shortened(text: str, most: int) -> str:
    """Return a text of at most so many cells; what was cut off leaves `…`."""
    shown = _printable(text)
    if _cells(shown) <= most:
        return shown
    while shown and _cells(shown) >= most:
        shown = shown[:-1]
    return shown + "…"


def _printable(cell: str) -> str:
    """Keep a command line's control characters from the terminal."""
    return "".join(each if each.isprintable() else " " for each in cell)


def _kept(columns: Sequence[Column], widths: Sequence[int], limit: int | None) -> list[int]:
    """Return the columns that there is room for; what the last one has may be cut."""
    kept = list(range(len(columns)))
    optional = [index for index in kept if columns[index].is_optional]
    while limit is not None and optional:
        needed = sum(widths[index] + len(_GAP) for index in kept[:-1]) + _LEAST_LAST
        if needed <= limit:
            break
        kept.remove(optional.pop())
    return kept


def _cells(text: str) -> int:
    """Return how many cells of a terminal a text takes: some characters take two, some none."""
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width

    return sum(
        0 if combining(each) else 2 if east_asian_width(each) in {"W", "F"} else 1 for each in text
    )


def _line(
    cells: Sequence[str], columns: Sequence[Column], widths: Sequence[int], limit: int | None
) -> str:
    text = _GAP.join(
        _padded(cell, width, is_number=column.is_number)
        for cell, column, width in zip(cells, columns, widths, strict=True)
    ).rstrip()
    return text if limit is None else shortened(text, limit)


def _padded(cell: str, width: int, *, is_number: bool) -> str:
    blanks = " " * (width - _cells(cell))
    return blanks + cell if is_number else cell + blanks

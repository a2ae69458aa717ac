# SPDX-License-Identifier: Apache-2.0
"""Plain tables of aligned columns. Imports little, so that `allot ps` starts fast.

Colour carries no meaning of its own. A table is cut to the width of a terminal, never in a pipe.
"""

import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from allotment.cli.groups import wants_colour

if TYPE_CHECKING:
    from allotment.model.compute import Compute
    from allotment.shares.status import DeviceView, ShareView

OUTSIDE = "(outside any share)"
"""Shown in place of a share's name."""

_GAP = "  "
_LEAST_LAST = 12  # cells: minimum of the last column, mostly a command


@dataclass(frozen=True, slots=True)
class Column:
    """A column; numbers are aligned to the right."""

    heading: str
    is_number: bool = False
    is_optional: bool = False
    """Left out on a narrow terminal, the last such column first."""


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; a row with `no` in column ENFORCED is red."""
    shown = [[_printable(cell) for cell in row] for row in rows]
    headings = [column.heading for column in columns]
    widths = [max(map(_cells, column)) for column in zip(headings, *shown, strict=True)]
    limit = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    kept = _kept(columns, widths, limit)
    columns, headings = [columns[i] for i in kept], [headings[i] for i in kept]
    widths = [widths[i] for i in kept]
    shown = [[row[i] for i in kept] for row in shown]
    colour = wants_colour()
    head = _line(headings, columns, widths, limit)
    click.echo(click.style(head, bold=True), color=colour)
    for row in shown:
        line = _line(row, columns, widths, limit)
        alarm = ("ENFORCED", "no") in zip(headings, row, strict=True)
        click.echo(click.style(line, fg="red") if alarm else line, color=colour)


def cells_of(columns: Sequence[Column], rows: Iterable[Mapping[str, str]]) -> list[tuple[str, ...]]:
    """Order the cells of rows, given by heading, like the columns; a missing cell is empty."""
    return [tuple(row.get(column.heading, "") for column in columns) for row in rows]


def short_uuid(uuid: str) -> str:
    """Return the start of a UUID, unique on one machine: `GPU-4f6e21b0`."""
    return uuid[:12]


def described(compute: "Compute | None", *, takes_turns: bool = False) -> str:
    """Format compute as `30:80`, `0:100 latency weight 300`, or `-` for none.

    With `takes_turns`, a share without --compute is shown with its default compute.
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
    """Format the limit of a device: `4Gi`, or `4Gi+host` if oversubscribed."""
    from allotment.model.formats import format_bytes

    return format_bytes(device.limit) + ("+host" if device.is_oversubscribed else "")


def command_of(view: "ShareView") -> str:
    """Return the command of a share; `-` for a pod's share without a known one."""
    if view.share is None:
        return f"({view.state})"
    return view.command or ("-" if view.share.owner else "")


def host_of(device: "DeviceView") -> str:
    from allotment.model.formats import format_bytes

    return format_bytes(device.host_bytes) if has_host(device) else "-"


def has_host(device: "DeviceView") -> bool:
    return device.is_oversubscribed or device.host_bytes > 0


def shortened(text: str, most: int) -> str:
    """Cut a text to at most `most` cells, with `…` at the end."""
    shown = _printable(text)
    if _cells(shown) <= most:
        return shown
    while shown and _cells(shown) >= most:
        shown = shown[:-1]
    return shown + "…"


def _printable(cell: str) -> str:
    """Replace control characters, which could change the terminal."""
    return "".join(character if character.isprintable() else " " for character in cell)


def _kept(columns: Sequence[Column], widths: Sequence[int], limit: int | None) -> list[int]:
    """Return the columns that fit; the last one may be cut."""
    kept = list(range(len(columns)))
    optional = [index for index in kept if columns[index].is_optional]
    while limit is not None and optional:
        needed = sum(widths[index] + len(_GAP) for index in kept[:-1]) + _LEAST_LAST
        if needed <= limit:
            break
        kept.remove(optional.pop())
    return kept


def _cells(text: str) -> int:
    """Return the width of a text in terminal cells: a character takes 0 to 2."""
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width

    return sum(
        0 if combining(character) else 2 if east_asian_width(character) in {"W", "F"} else 1
        for character in text
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

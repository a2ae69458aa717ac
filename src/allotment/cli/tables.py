# SPDX-License-Identifier: Apache-2.0
"""Plain tables of aligned columns. Imports little, so that `allot ps` starts fast.

Colour carries no meaning of its own. A table fits the width of a terminal; in a pipe it is whole.
"""

import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import click
import msgspec

from allotment.cli.groups import wants_colour
from allotment.model.formats import printable

if TYPE_CHECKING:
    from allotment.model.compute import Compute
    from allotment.shares.status import DeviceView, ShareView

OUTSIDE = "(outside any share)"
"""Shown in place of a share's name."""

_GAP = "  "
COMMAND_CELLS: Final = 12
"""A command is not cut to fewer cells."""
NAME_CELLS: Final = 24
"""Neither is a share's name."""


class Column(msgspec.Struct, frozen=True):
    """A column, and its behaviour when space is short; numbers are aligned to the right."""

    heading: str
    rank: int = 0
    """On a narrow terminal the highest rank is left out first; 0: never."""
    is_number: bool = False
    least: int | None = None
    """Cells to which it may be cut before a column is left out."""
    most: int | None = None
    """Longer cells are always cut."""
    is_note: bool = False
    """The last column: where it does not fit, each cell is whole on a line of its own."""


def print_table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], *, is_wide: bool = False
) -> None:
    """Print a table; a row with `no` in column ENFORCED is red.

    `is_wide`: nothing is left out or cut, whatever the terminal.
    """
    shown = [[printable(cell) for cell in row] for row in rows]
    headings = [column.heading for column in columns]
    limit = shutil.get_terminal_size().columns if sys.stdout.isatty() and not is_wide else None
    widths = _fitted(columns, [headings, *shown], limit)
    colour = wants_colour()
    click.echo(click.style(_line(headings, columns, widths), bold=True), color=colour)
    for row in shown:
        alarm = ("ENFORCED", "no") in zip(headings, row, strict=True)
        lines = [_line(row, columns, widths)]
        if row[-1] and columns[-1].is_note and widths[-1] is None:
            lines.append(f"{_GAP}{row[-1]}")
        for line in lines:
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
    return base_names(view.command) or ("-" if view.share.owner else "")


def base_names(command: str) -> str:
    """Shorten the path of a command's program, and of the script that Python runs."""
    program, *words = command.split(" ")
    program = program.rpartition("/")[2] or program
    if program.startswith("python") and words and not words[0].startswith("-"):
        words[0] = words[0].rpartition("/")[2] or words[0]
    return " ".join((program, *words))


def host_of(device: "DeviceView") -> str:
    from allotment.model.formats import format_bytes

    return format_bytes(device.host_bytes) if has_host(device) else "-"


def has_host(device: "DeviceView") -> bool:
    return device.is_oversubscribed or device.host_bytes > 0


def shortened(text: str, most: int) -> str:
    """Cut a text to at most `most` cells, with `…` at the end."""
    shown = printable(text)
    if _cells(shown) <= most:
        return shown
    while shown and _cells(shown) >= most:
        shown = shown[:-1]
    return shown + "…"


def kept_columns(columns: Sequence[Column], widths: Sequence[int], limit: int) -> list[int]:
    """Return the columns that fit, if those that may be cut are."""
    needs = [
        width if column.least is None else min(width, max(column.least, _cells(column.heading)))
        for column, width in zip(columns, widths, strict=True)
    ]
    kept = list(range(len(columns)))
    while sum(needs[index] + len(_GAP) for index in kept) - len(_GAP) > limit:
        first = max(kept, key=lambda index: columns[index].rank)
        if columns[first].rank == 0:
            break
        kept.remove(first)
    return kept


def _fitted(
    columns: Sequence[Column], lines: Sequence[Sequence[str]], limit: int | None
) -> list[int | None]:
    """Return the width of each column; None: it is left out."""
    widths = [max(map(_cells, column)) for column in zip(*lines, strict=True)]
    widths = [
        width if column.most is None else min(width, column.most)
        for column, width in zip(columns, widths, strict=True)
    ]
    if limit is None:
        return list(widths)
    kept = kept_columns(columns, widths, limit)
    over = sum(widths[index] + len(_GAP) for index in kept) - len(_GAP) - limit
    if over > 0 and columns[-1].is_note:
        return [*_fitted(columns[:-1], [line[:-1] for line in lines], limit), None]
    for index in reversed(kept):
        least = columns[index].least
        if over > 0 and least is not None:
            cut = max(least, _cells(columns[index].heading), widths[index] - over)
            over -= max(0, widths[index] - cut)
            widths[index] = min(widths[index], cut)
    return [width if index in kept else None for index, width in enumerate(widths)]


def _cells(text: str) -> int:
    """Return the width of a text in terminal cells: a character takes 0 to 2."""
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width

    return sum(
        0 if combining(character) else 2 if east_asian_width(character) in {"W", "F"} else 1
        for character in text
    )


def _line(cells: Sequence[str], columns: Sequence[Column], widths: Sequence[int | None]) -> str:
    return _GAP.join(
        _padded(shortened(cell, width), width, is_number=column.is_number)
        for cell, column, width in zip(cells, columns, widths, strict=True)
        if width is not None
    ).rstrip()


def _padded(cell: str, width: int, *, is_number: bool) -> str:
    blanks = " " * (width - _cells(cell))
    return blanks + cell if is_number else cell + blanks


def print_lines(lines: Iterator[str]) -> None:
    """Print lines, wrapped on a terminal with their indentation."""
    import textwrap

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        shown = [line]
        if 0 < width < len(line) and len(indent) < width // 2:
            shown = textwrap.wrap(
                line,
                width,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
        for part in shown:
            click.echo(part)


_NAMED: Final = 3


def named_nodes(nodes: Sequence[str]) -> str:
    """Return the name of one node, or the number of several with some of their names."""
    names = ", ".join(nodes[:_NAMED])
    if len(nodes) == 1:
        return names
    more = ", ..." if len(nodes) > _NAMED else ""
    return f"{len(nodes)} nodes ({names}{more})"

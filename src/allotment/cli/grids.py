# SPDX-License-Identifier: Apache-2.0
"""Tables and screens that fit a terminal: columns and lines that do not fit are left out whole."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from allotment.cli.tables import Column, kept_columns
from allotment.model.formats import printable

_GAP = 2

Cell = str | Text


class Grid(msgspec.Struct):
    """Rows below headings; every row takes one line."""

    columns: Sequence[Column]
    rows: list[Mapping[str, Cell]] = msgspec.field(default_factory=list)

    def add(self, cells: Mapping[str, Cell]) -> None:
        """Add a row, by heading. A missing cell is empty; one without a column is left out."""
        self.rows.append({heading: _shown(cell) for heading, cell in cells.items()})

    def drawn(self, width: int) -> list[Text]:
        """Return a line for the headings and one for each row.

        Not by rich's table, which measures and wraps every cell: a screen is drawn every second.
        """
        widths = [self._width(column) for column in self.columns]
        kept = kept_columns(self.columns, widths, width)
        over = sum(widths[index] + _GAP for index in kept) - _GAP - width
        for index in reversed(kept):
            least = self.columns[index].least
            if over > 0 and least is not None:
                cut = max(least, cell_len(self.columns[index].heading), widths[index] - over)
                over -= max(0, widths[index] - cut)
                widths[index] = min(widths[index], cut)
        shown = [(self.columns[index], widths[index]) for index in kept]
        headings = {column.heading: Text(column.heading, style="bold") for column, _ in shown}
        return [_line(row, shown) for row in (headings, *self.rows)]

    def _width(self, column: Column) -> int:
        cells = (row.get(column.heading, "") for row in self.rows)
        widest = max(map(_cell_len, cells), default=0)
        return max(
            widest if column.most is None else min(widest, column.most), cell_len(column.heading)
        )


Part = Grid | Text
"""An element of a screen."""


def lines_of(parts: Iterable[Part]) -> int:
    """Count the lines of the parts; a text is one line."""
    return sum(len(part.rows) + 1 if isinstance(part, Grid) else 1 for part in parts)


def one_line(text: str, style: str = "") -> Text:
    """Return a text cut at the edge of the terminal, without control characters."""
    return Text(printable(text), style=style, no_wrap=True, overflow="ellipsis")


def wrapped(text: str, style: str = "") -> Text:
    """Return a text that may wrap, without control characters."""
    return Text(printable(text), style=style)


class Pinned(msgspec.Struct, frozen=True):
    """A screen of `height` lines with a foot at its bottom."""

    body: Sequence[RenderableType]
    foot: Sequence[RenderableType]
    height: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the body and the foot; a last line counts the lines left out."""
        free = options.reset_height()
        foot = console.render_lines(Group(*self.foot), free, pad=False)
        room = max(0, self.height - len(foot))
        lines = console.render_lines(Group(*self.body), free, pad=False)
        if len(lines) > room:
            hidden = one_line(f"↓ {len(lines) - room + 1} more lines", "dim")
            lines = lines[: max(0, room - 1)]
            if room:
                lines += console.render_lines(hidden, free, pad=False)
        lines += [[] for _ in range(room - len(lines))]
        for number, line in enumerate([*lines, *foot][: self.height]):
            if number:
                yield Text()
            yield from line


def _line(row: Mapping[str, Cell], columns: Sequence[tuple[Column, int]]) -> Text:
    line = one_line("")
    for number, (column, width) in enumerate(columns):
        cell = _text(row.get(column.heading, ""))
        if cell.cell_len > width:
            cell = cell.copy()
            cell.truncate(width, overflow="ellipsis")
        blanks = " " * (width - cell.cell_len)
        line.append(" " * _GAP if number else "")
        if column.is_number:
            line.append(blanks).append_text(cell)
        else:
            line.append_text(cell).append(blanks)
    return line


def _cell_len(cell: Cell) -> int:
    return cell.cell_len if isinstance(cell, Text) else cell_len(cell)


def _shown(cell: Cell) -> Cell:
    if isinstance(cell, str):
        return printable(cell)
    if not cell.plain.isprintable():
        cell.plain = printable(cell.plain)
    return cell


def _text(cell: Cell) -> Text:
    return cell if isinstance(cell, Text) else Text(cell)

# SPDX-License-Identifier: Apache-2.0
"""Tables and screens that fit a terminal: columns and lines that do not fit are left out whole."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from allotment.cli.tables import Column, kept_columns

_GAP = 2

Cell = str | Text


@dataclass(slots=True)
class Grid:
    """Rows below headings; every row takes one line."""

    columns: Sequence[Column]
    rows: list[Mapping[str, Cell]] = field(default_factory=list)

    def add(self, cells: Mapping[str, Cell]) -> None:
        """Add a row, by heading. A missing cell is empty; one without a column is left out."""
        self.rows.append(cells)

    def drawn(self, width: int) -> Table:
        kept = kept_columns(self.columns, [self._width(column) for column in self.columns], width)
        table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold")
        for column in (self.columns[index] for index in kept):
            table.add_column(
                column.heading,
                justify="right" if column.is_number else "left",
                no_wrap=column.least is None,
                overflow="ellipsis",
                max_width=column.most,
            )
        for row in self.rows:
            table.add_row(*(_text(row.get(self.columns[index].heading, "")) for index in kept))
        return table

    def _width(self, column: Column) -> int:
        cells = (_text(row.get(column.heading, "")).cell_len for row in self.rows)
        widest = max(cells, default=0)
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
    shown = "".join(character if character.isprintable() else " " for character in text)
    return Text(shown, style=style, no_wrap=True, overflow="ellipsis")


@dataclass(frozen=True, slots=True)
class Pinned:
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


def _text(cell: Cell) -> Text:
    return cell if isinstance(cell, Text) else Text(cell)

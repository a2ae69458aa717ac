# SPDX-License-Identifier: Apache-2.0
"""Tables and screens that fit: columns and lines are left out whole, nothing is cut in two.

Drawn with rich; how much there is room for is known before anything is drawn.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

__all__ = ["Grid", "GridColumn", "Part", "Pinned", "lines_of", "one_line"]

_GAP = 2

Cell = str | Text


@dataclass(frozen=True, slots=True)
class GridColumn:
    """A column of a grid: its heading, and what becomes of it where there is little room."""

    heading: str
    rank: int = 0
    """Left out, the highest first, where the terminal is too narrow for all; 0: never."""
    is_number: bool = False
    least: int | None = None
    """It may be cut to so many cells before it is left out."""
    most: int | None = None
    """What is longer is cut in any case."""


@dataclass(slots=True)
class Grid:
    """Rows under headings. No row takes more than one line."""

    columns: Sequence[GridColumn]
    rows: list[Sequence[Cell]] = field(default_factory=list)

    def add(self, *cells: Cell) -> None:
        """Add a row: a cell for every column, left out or not."""
        if len(cells) != len(self.columns):
            raise ValueError((len(cells), len(self.columns)))
        self.rows.append(cells)

    def drawn(self, width: int) -> Table:
        """Draw what there is room for."""
        kept = self._kept(width)
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
            table.add_row(*(_single(row[index]) for index in kept))
        return table

    def _kept(self, width: int) -> list[int]:
        needs = [self._need(index) for index in range(len(self.columns))]
        kept = list(range(len(self.columns)))
        while sum(needs[index] + _GAP for index in kept) - _GAP > width:
            first = max(kept, key=lambda index: self.columns[index].rank)
            if self.columns[first].rank == 0:
                break
            kept.remove(first)
        return kept

    def _need(self, index: int) -> int:
        column = self.columns[index]
        cells = max((_cells(row[index]) for row in self.rows), default=0)
        for limit in (column.least, column.most):
            cells = cells if limit is None else min(cells, limit)
        return max(cells, cell_len(column.heading))


Part = Grid | Text
"""What a screen is made of, from top to bottom."""


def lines_of(parts: Iterable[Part]) -> int:
    """Return how many lines parts take, each text being one."""
    return sum(len(part.rows) + 1 if isinstance(part, Grid) else 1 for part in parts)


def one_line(text: str, style: str = "") -> Text:
    """Return a text that is cut where the terminal ends; control characters are kept from it."""
    shown = "".join(each if each.isprintable() else " " for each in text)
    return Text(shown, style=style, no_wrap=True, overflow="ellipsis")


@dataclass(frozen=True, slots=True)
class Pinned:
    """A screen of so many lines with a foot that stays at its bottom, whatever is above it."""

    body: Sequence[RenderableType]
    foot: Sequence[RenderableType]
    height: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the body and the foot; where lines have no room, say how many."""
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


def _cells(cell: Cell) -> int:
    return cell_len(cell.plain if isinstance(cell, Text) else cell)


def _single(cell: Cell) -> Text:
    return cell if isinstance(cell, Text) else Text(cell)

# SPDX-License-Identifier: Apache-2.0
"""The bench's results as text, and as a table between two markers of a Markdown page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

    from rows import Bench, Quantiles, Row

_HEAD: Final = ("what", "bare p50 / p99", "in a share p50 / p99", "added p50", "ratio", "target")


def render_text(bench: Bench) -> str:
    """Write the facts, the table and how each row was measured, for a terminal."""
    lines = [f"{name:<9}{value}" for name, value in bench.facts.items()]
    cells = [_HEAD, *(_cells(row) for row in bench.rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEAD))]
    lines.append("")
    lines += [
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]
    lines.append("")
    lines += [f"{row.name}: {row.method}; {row.samples} samples" for row in bench.rows]
    lines += [f"{name}: NOT MEASURED: {why}" for name, why in bench.failures.items()]
    return "\n".join(lines)


def render_markdown(bench: Bench, *, command: str) -> str:
    """Write the same for a page of the documentation, with the command that makes it."""
    lines = [f"Made by `{command}` on:", ""]
    lines += [f"- {name}: {value}" for name, value in bench.facts.items()]
    lines += ["", _markdown_line(_HEAD), _markdown_line(("---",) * len(_HEAD))]
    lines += [_markdown_line(_cells(row)) for row in bench.rows]
    lines += ["", "How each row is measured:", ""]
    lines += [f"- **{row.name}**: {row.method} ({row.samples} samples)." for row in bench.rows]
    lines += [f"- **{name}**: not measured: {why}." for name, why in bench.failures.items()]
    return "\n".join(lines)


def put_between_markers(path: Path, *, name: str, title: str, body: str) -> None:
    """Replace what stands between the markers `name` in a page, or append a section for it."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    block = f"{begin}\n{body}\n{end}"
    page = path.read_text() if path.exists() else ""
    before, found, rest = page.partition(begin)
    if found:
        _, closed, after = rest.partition(end)
        if not closed:
            message = f"{path}: {begin} is never closed by {end}"
            raise ValueError(message)
        page = before + block + after
    else:
        page = f"{page.rstrip()}\n\n## {title}\n\n{block}\n".lstrip()
    path.write_text(page)


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.name,
        _quantiles(row.bare, row.unit),
        _quantiles(row.share, row.unit),
        _number(row.added, row.unit),
        "" if row.ratio is None else f"{row.ratio:.2f}",
        _target(row),
    )


def _target(row: Row) -> str:
    if row.limit is None:
        return ""
    verdict = "met" if row.is_met else "MISSED"
    return f"≤ {_number(row.limit, row.unit)} {verdict}"


def _quantiles(quantiles: Quantiles | None, unit: str) -> str:
    if quantiles is None:
        return ""
    return f"{_plain(quantiles.p50)} / {_number(quantiles.p99, unit)}"


def _number(value: float, unit: str) -> str:
    return f"{_plain(value)} {unit}"


def _plain(value: float) -> str:
    if value == int(value) or abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.3g}"


def _markdown_line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"

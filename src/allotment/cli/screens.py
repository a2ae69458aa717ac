# SPDX-License-Identifier: Apache-2.0
"""What `allot top` shows, drawn with rich from values: no I/O here, any width will do.

Bars are of block characters that every terminal font has; what they say stands beside them in
numbers, and what colour says stands there in words.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from allotment.cli.machines import DeviceRow
from allotment.cli.tables import short_uuid
from allotment.model.formats import format_bytes
from allotment.shares.views import DeviceView, ShareView

__all__ = ["SORTS", "Frame", "bar", "draw"]

_EIGHTHS: Final = " ▏▎▍▌▋▊▉█"
_WIDE: Final = 100
_MEDIUM: Final = 72
_ALARM: Final = 0.9


@dataclass(frozen=True, slots=True)
class Frame:
    """One moment: the GPUs, the shares on them, and how they are to be shown."""

    devices: Sequence[DeviceRow]
    shares: Sequence[ShareView]
    clock: str
    sort: str = "used"
    is_live: bool = False
    first: int = 0
    """How many shares are scrolled away."""


def _used(view: ShareView) -> int:
    return sum(device.used for device in view.devices)


def _limit(view: ShareView) -> int:
    return sum(device.limit for device in view.devices)


SORTS: Final[dict[str, Callable[[ShareView], tuple[object, ...]]]] = {
    "used": lambda view: (-_used(view), view.name),
    "limit": lambda view: (-_limit(view), view.name),
    "name": lambda view: (view.name,),
    "age": lambda view: (view.share.created if view.share else 0.0, view.name),
}
"""The orders that `s` goes through."""


def bar(part: int, whole: int, width: int) -> Text:
    """Draw a bar of `width` cells, to an eighth of a cell; what is over the whole is full."""
    ratio = min(1.0, part / whole) if whole > 0 else 0.0
    eighths = round(ratio * width * 8)
    full, rest = divmod(eighths, 8)
    cells = ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(width)
    colour = "red" if ratio >= 1 else "yellow" if ratio >= _ALARM else "green"
    return Text(cells, style=f"{colour} on grey23")


def draw(frame: Frame, width: int) -> RenderableType:
    """Draw a frame for a terminal of so many columns."""
    parts: list[RenderableType] = [_heading(frame), Text(), _devices(frame, width), Text()]
    parts.append(_shares(frame, width) if frame.shares else Text("No shares.", style="dim"))
    problems = [view for view in frame.shares if view.problem]
    parts += [Text(f"! {view.name}: {view.problem}", style="red") for view in problems]
    if frame.is_live:
        parts += [Text(), Text("q quit   s sort   ↑↓ scroll   +/- pace", style="dim")]
    return Group(*parts)


def _heading(frame: Frame) -> Text:
    text = Text()
    text.append("allot top", style="bold")
    text.append(f"   {_count(len(frame.devices), 'GPU')}, {_count(len(frame.shares), 'share')}")
    text.append(f"   by {frame.sort}   {frame.clock}", style="dim")
    return text


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _bar_width(width: int) -> int:
    return max(6, min(28, (width - 50) // 2))


def _table(*columns: tuple[str, str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for name, justify in columns:
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    return table


def _devices(frame: Frame, width: int) -> Table:
    wide = width >= _MEDIUM
    table = _table(
        ("GPU", "left"),
        *([("MODEL", "left")] if wide else []),
        ("ALLOTTED", "left"),
        ("", "right"),
        ("USED", "right"),
        ("BUSY", "right"),
    )
    for row in frame.devices:
        whole = row.device.allottable_bytes
        reading = row.reading
        busy = "-" if reading is None or reading.gpu_percent is None else f"{reading.gpu_percent}%"
        used = format_bytes(reading.used_bytes) if reading else row.problem or "?"
        cells: list[RenderableType] = [short_uuid(row.device.uuid)]
        if wide:
            name = row.device.name + (" (simulated)" if row.device.simulated else "")
            cells.append(name if width >= _WIDE else row.device.name)
        cells += [
            bar(row.allotted, whole, _bar_width(width)),
            f"{format_bytes(row.allotted)} of {format_bytes(whole)}",
            used,
            busy,
        ]
        table.add_row(*cells)
    return table


def _shares(frame: Frame, width: int) -> Table:
    wide = width >= _WIDE
    table = _table(
        ("SHARE", "left"),
        ("GPU", "left"),
        ("USED OF LIMIT", "left"),
        ("", "right"),
        ("PEAK", "right"),
        ("REFUSED", "right"),
        ("ENFORCED", "left"),
        *([("COMMAND", "left")] if wide else []),
    )
    if wide:
        table.columns[-1].overflow = "ellipsis"
    ordered = sorted(frame.shares, key=SORTS[frame.sort])
    for view in ordered[frame.first :]:
        for index, device in enumerate(view.devices):
            table.add_row(*_share_row(view, device, index, width, wide=wide))
        for process in view.processes:
            pid = process.pid if process.pid is not None else process.pid_inside
            used = Text(format_bytes(sum(process.used)), style="dim")
            word = Text("yes", style="dim") if process.is_enforced else Text("no", style="bold red")
            peak = Text(format_bytes(sum(process.peak)), style="dim")
            refused = Text(str(process.refusals), style="dim")
            row: list[RenderableType] = [
                Text(f"  {pid}", style="dim"),
                "",
                "",
                used,
                peak,
                refused,
                word,
            ]
            table.add_row(*row, *([Text(process.command, style="dim")] if wide else []))
    return table


def _share_row(
    view: ShareView, device: DeviceView, index: int, width: int, *, wide: bool
) -> list[RenderableType]:
    enforced = Text("yes", style="green") if view.is_enforced else Text("no", style="bold red")
    command = " ".join(view.share.command) if view.share else f"({view.state})"
    cells: list[RenderableType] = [
        Text(view.name if index == 0 else "", style="bold"),
        short_uuid(device.uuid),
        bar(device.used, device.limit, _bar_width(width)),
        f"{format_bytes(device.used)} of {format_bytes(device.limit)}",
        format_bytes(device.peak),
        Text(str(device.refusals), style="yellow" if device.refusals else ""),
        enforced if index == 0 else "",
    ]
    return [*cells, *([Text(command if index == 0 else "")] if wide else [])]

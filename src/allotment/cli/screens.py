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
from allotment.cli.tables import OUTSIDE, described, short_uuid
from allotment.model.formats import format_bytes, format_duration
from allotment.shares.views import (
    ComputeView,
    DeviceView,
    OutsideView,
    ProcessView,
    ShareView,
)

__all__ = ["SORTS", "Frame", "bar", "draw"]

_EIGHTHS: Final = " ▏▎▍▌▋▊▉█"
_WIDE: Final = 96
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
    outside: Sequence[OutsideView] = ()
    """Who uses GPUs and is in no share."""
    is_inside: bool = False
    """It is drawn inside of a share, from where no shares can be seen."""
    has_bars: bool = True
    pace_s: float = 1.0
    """Seconds between two looks."""


def _used(view: ShareView) -> int:
    return sum(device.used for device in view.devices)


def _limit(view: ShareView) -> int:
    return sum(device.limit for device in view.devices)


def _gpu(view: ShareView) -> float:
    parts = [device.compute.rates for device in view.devices if device.compute]
    return sum(rates.gpu for rates in parts if rates)


SORTS: Final[dict[str, Callable[[ShareView], tuple[object, ...]]]] = {
    "used": lambda view: (-_used(view), view.name),
    "limit": lambda view: (-_limit(view), view.name),
    "gpu": lambda view: (-_gpu(view), view.name),
    "name": lambda view: (view.name,),
    "age": lambda view: (view.share.created if view.share else 0.0, view.name),
}
"""The orders that `s` goes through."""


def bar(part: int, whole: int, width: int, *, colour: str = "") -> Text:
    """Draw a bar of `width` cells, to an eighth of a cell; what is over the whole is full."""
    ratio = min(1.0, part / whole) if whole > 0 else 0.0
    eighths = round(ratio * width * 8)
    full, rest = divmod(eighths, 8)
    cells = ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(width)
    colour = colour or ("red" if ratio >= 1 else "yellow" if ratio >= _ALARM else "green")
    return Text(cells, style=f"{colour} on grey23")


def draw(frame: Frame, width: int) -> RenderableType:
    """Draw a frame for a terminal of so many columns."""
    parts: list[RenderableType] = [_heading(frame), Text(), _devices(frame, width), Text()]
    parts.append(_shares(frame, width) if frame.shares else _no_shares(frame))
    turns = [
        (view, index, compute)
        for view in _ordered(frame)
        for index, device in enumerate(view.devices)
        if (compute := device.compute) and (compute.is_measured or compute.promised.is_governed)
    ]
    if turns:
        parts += [Text(), _compute(turns, width, has_bars=frame.has_bars), Text()]
    parts += [_outside(each) for each in frame.outside]
    problems = [view for view in frame.shares if view.problem]
    parts += [Text(f"! {view.name}: {view.problem}", style="red") for view in problems]
    if frame.is_live:
        parts += [Text(), _keys(frame)]
    return Group(*parts)


def _keys(frame: Frame) -> Text:
    pace = format_duration(frame.pace_s * 1e9)
    return Text(
        f"q quit   s sort (by {frame.sort})   ↑↓ scroll   +/- faster, slower (every {pace})",
        style="dim",
    )


def _no_shares(frame: Frame) -> Text:
    where = " can be seen from inside of one" if frame.is_inside else ""
    return Text(f"No shares{where}.", style="dim")


def _outside(user: OutsideView) -> Text:
    used = "?" if user.used is None else format_bytes(user.used)
    text = f"{OUTSIDE} {short_uuid(user.uuid)} {used}, {user.pid} {user.command}"
    return _command(text, "red")


def _heading(frame: Frame) -> Text:
    text = Text()
    text.append("allot top", style="bold")
    text.append(f"   {_count(len(frame.devices), 'GPU')}, {_count(len(frame.shares), 'share')}")
    text.append(f"   by {frame.sort}   {frame.clock}", style="dim")
    return text


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _bar_width(width: int) -> int:
    return max(6, min(28, width // 6))


def _table(*columns: tuple[str, str]) -> Table:
    """Make a table whose columns keep their width; a last one, COMMAND, has what is left."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for name, justify in columns:
        table.add_column(name, justify=justify, no_wrap=name != "COMMAND")  # type: ignore[arg-type]
    return table


def _command(text: str, style: str = "") -> Text:
    """A command in one line, cut where the terminal ends."""
    shown = "".join(each if each.isprintable() else " " for each in text)
    return Text(shown, style=style, no_wrap=True, overflow="ellipsis")


def _devices(frame: Frame, width: int) -> Table:
    has_model = width >= _WIDE
    table = _table(
        ("GPU", "left"),
        *([("MODEL", "left")] if has_model else []),
        *([("ALLOTTED", "left"), ("", "right")] if frame.has_bars else [("ALLOTTED", "right")]),
        ("USED", "right"),
        ("BUSY", "right"),
    )
    for row in frame.devices:
        whole = row.device.allottable_bytes
        reading = row.reading
        busy = "-" if reading is None or reading.gpu_percent is None else f"{reading.gpu_percent}%"
        used = format_bytes(reading.used_bytes) if reading else row.problem or "?"
        kind = " (simulated)" if row.device.simulated else ""
        table.add_row(
            short_uuid(row.device.uuid),
            *([row.device.name + kind] if has_model else []),
            *([bar(row.allotted, whole, _bar_width(width))] if frame.has_bars else []),
            f"{format_bytes(row.allotted)} of {format_bytes(whole)}",
            used,
            busy,
        )
    return table


def _shares(frame: Frame, width: int) -> Table:
    columns = _Columns(
        has_device=width >= _MEDIUM, has_more=width >= _WIDE, has_bars=frame.has_bars
    )
    table = _table(*columns.headings())
    for view in _ordered(frame):
        for index, device in enumerate(view.devices):
            table.add_row(*columns.share_row(view, device, index, _bar_width(width)))
        for process in view.processes:
            table.add_row(*columns.process_row(process))
    return table


def _ordered(frame: Frame) -> list[ShareView]:
    """Return the shares that are not scrolled away."""
    return sorted(frame.shares, key=SORTS[frame.sort])[frame.first :]


def _compute(
    turns: Sequence[tuple[ShareView, int, ComputeView]], width: int, *, has_bars: bool
) -> Table:
    """Draw what shares have of the GPUs' time, beside what they are promised."""
    has_device, has_more = width >= _MEDIUM, width >= _WIDE
    table = _table(
        ("SHARE", "left"),
        *([("GPU", "left")] if has_device else []),
        ("COMPUTE", "left"),
        *([("GPU TIME", "left"), ("", "right")] if has_bars else [("GPU TIME", "right")]),
        *([("NVML", "right")] if has_device else []),
        *([("BORROWED", "right"), ("LENT", "right"), ("HELD BACK", "right")] if has_more else []),
        ("STATE", "left"),
    )
    for view, index, compute in turns:
        rates, driver = compute.rates, compute.driver_percent
        table.add_row(
            Text(view.name if index == 0 else "", style="bold"),
            *([short_uuid(view.devices[index].uuid)] if has_device else []),
            described(compute.promised),
            *([_rate_bar(compute, _bar_width(width) // 2)] if has_bars else []),
            _percent(rates.gpu if rates else None),
            *(["-" if driver is None else f"{driver}%"] if has_device else []),
            *(
                [
                    _percent(rates.borrowed if rates else None),
                    _percent(rates.lent if rates else None),
                    _percent(rates.held if rates else None),
                ]
                if has_more
                else []
            ),
            Text(compute.state, style="yellow" if compute.state == "waiting" else ""),
        )
    return table


def _rate_bar(compute: ComputeView, width: int) -> Text:
    """Draw the part of the device's time that a share had; no part of it is an alarm."""
    return bar(round(compute.rates.gpu * 1000) if compute.rates else 0, 1000, width, colour="cyan")


def _percent(part: float | None) -> str:
    return "-" if part is None else f"{part * 100:.1f}%"


@dataclass(frozen=True, slots=True)
class _Columns:
    """Which columns of the table of shares there is room for."""

    has_device: bool
    has_more: bool
    has_bars: bool

    def headings(self) -> list[tuple[str, str]]:
        return [
            ("SHARE", "left"),
            *([("GPU", "left")] if self.has_device else []),
            *(
                [("USED OF LIMIT", "left"), ("", "right")]
                if self.has_bars
                else [("USED OF LIMIT", "right")]
            ),
            *([("PEAK", "right")] if self.has_device else []),
            *([("REFUSED", "right")] if self.has_more else []),
            ("ENFORCED", "left"),
            *([("COMMAND", "left")] if self.has_more else []),
        ]

    def share_row(
        self, view: ShareView, device: DeviceView, index: int, bar_width: int
    ) -> list[RenderableType]:
        is_first = index == 0
        refused = Text(str(device.refusals), style="yellow" if device.refusals else "")
        command = " ".join(view.share.command) if view.share else f"({view.state})"
        return [
            Text(view.name if is_first else "", style="bold"),
            *([short_uuid(device.uuid)] if self.has_device else []),
            *([bar(device.used, device.limit, bar_width)] if self.has_bars else []),
            f"{format_bytes(device.used)} of {format_bytes(device.limit)}",
            *([format_bytes(device.peak)] if self.has_device else []),
            *([refused] if self.has_more else []),
            _enforced(is_enforced=view.is_enforced) if is_first else "",
            *([_command(command if is_first else "")] if self.has_more else []),
        ]

    def process_row(self, process: ProcessView) -> list[RenderableType]:
        pid = process.pid if process.pid is not None else process.pid_inside
        cells = [
            f"  {pid}",
            *([""] if self.has_device else []),
            *([""] if self.has_bars else []),
            format_bytes(sum(process.used)),
            *([format_bytes(sum(process.peak))] if self.has_device else []),
            *([str(process.refusals)] if self.has_more else []),
        ]
        return [
            *(Text(cell, style="dim") for cell in cells),
            _enforced(is_enforced=process.is_enforced),
            *([_command(process.command, "dim")] if self.has_more else []),
        ]


def _enforced(*, is_enforced: bool) -> Text:
    return Text("yes", style="green") if is_enforced else Text("no", style="bold red")

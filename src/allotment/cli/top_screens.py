# SPDX-License-Identifier: Apache-2.0
"""The screen of `allot top`, drawn with rich from values: no I/O, any size.

Bars use block characters that every terminal font has. Numbers and words beside them repeat the
meaning of bars and colours.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Final, TypeGuard

import msgspec
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.text import Text

from allotment.cli.grids import Cell, Grid, Part, Pinned, lines_of, one_line, wrapped
from allotment.cli.machines import DeviceRow
from allotment.cli.tables import (
    COMMAND_CELLS,
    NAME_CELLS,
    OUTSIDE,
    Column,
    base_names,
    command_of,
    described,
    has_host,
    host_of,
    limit_of,
    short_uuid,
)
from allotment.model.formats import format_bytes, format_count, format_duration
from allotment.model.structs import replace
from allotment.shares.compute_view import ComputeView
from allotment.shares.status import LiveState, OutsideView, ProcessView, ShareView

_BAR: Final = ""  # a column of bars has no heading
_EIGHTHS: Final = " ▏▎▍▌▋▊▉█"
_ALARM: Final = 0.9
_MOST_LINES: Final = 3  # of the notes beside the tables, on a small terminal


class Frame(msgspec.Struct, frozen=True):
    """One reading, and how to show it."""

    devices: Sequence[DeviceRow]
    shares: Sequence[ShareView]
    clock: str
    sort: str = "used"
    is_live: bool = False
    first: int = 0
    """Number of shares scrolled away."""
    outside: Sequence[OutsideView] = ()
    """Processes that use GPUs outside any share."""
    is_inside: bool = False
    """Whether `allot top` runs inside a share, where no shares are visible."""
    why_no_devices: str = ""
    """Empty: there are some."""
    has_bars: bool = True
    pace_s: float = 1.0
    """Seconds between two readings."""


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
"""The orders that key `s` cycles through."""


def bar(part: int, whole: int, width: int, *, colour: str = "") -> Text:
    """Draw a bar of `width` cells, to an eighth of a cell; more than the whole is full."""
    ratio = min(1.0, part / whole) if whole > 0 else 0.0
    eighths = round(ratio * width * 8)
    full, rest = divmod(eighths, 8)
    cells = ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(width)
    colour = colour or ("red" if ratio >= 1 else "yellow" if ratio >= _ALARM else "green")
    return Text(cells, style=f"{colour} on grey23")


class _Plan(msgspec.Struct, frozen=True):
    """The part of a frame that is shown."""

    shares: int
    """Number of shares, from the first one on the screen."""
    has_processes: bool = True
    """If False, only processes that are not enforced."""
    has_blanks: bool = True
    most_devices: int | None = None
    most_lines: int | None = None


def draw(frame: Frame, width: int, height: int | None = None) -> RenderableType:
    """Draw a frame for a terminal of this size; without `height`, all of it.

    If lines are short, processes are left out first, then empty lines, then the last shares. Both
    tables show the same shares.
    """
    ordered = sorted(frame.shares, key=SORTS[frame.sort])[frame.first :]
    if height is None:
        parts = _body(frame, ordered, width, _Plan(len(ordered)))
        if frame.is_live:
            parts += [Text(), _keys(frame, width)]
        return Group(*_drawn(parts, width))
    plan, parts = _fitted(frame, ordered, width, height)
    foot = _foot(frame, ordered, width, plan)
    return Pinned(list(_drawn(parts, width)), foot, height)


def _drawn(parts: Sequence[Part], width: int) -> Iterator[RenderableType]:
    for part in parts:
        if isinstance(part, Grid):
            yield from part.drawn(width)
        else:
            yield part


def _fitted(
    frame: Frame, ordered: Sequence[ShareView], width: int, height: int
) -> tuple[_Plan, list[Part]]:
    every = len(ordered)
    lines = list(accumulate(map(_least_lines, ordered)))
    most = bisect_right(lines, height)  # no more shares can fit, however they are shown

    def attempt(plan: _Plan) -> tuple[int, list[Part]]:
        parts = _body(frame, ordered, width, plan)
        return height - lines_of(parts) - len(_foot(frame, ordered, width, plan)), parts

    whole = _Plan(every)
    few = replace(
        whole, has_processes=False, most_devices=max(1, height // 3), most_lines=_MOST_LINES
    )
    bare = replace(few, has_blanks=False)
    for plan in (whole, few, bare) if most == every else ():
        free, parts = attempt(plan)
        if free >= 0:
            return plan, parts
    # A first guess: no more than what the rest of the screen leaves free.
    free, parts = attempt(replace(bare, shares=0))
    count = max(min(1, every), bisect_right(lines, free))
    while True:
        plan = replace(bare, shares=count)
        free, parts = attempt(plan)
        if free >= 0 or count <= 1:
            return plan, parts
        count -= 1


def _least_lines(view: ShareView) -> int:
    """Return the lines that a share takes on the smallest screen."""
    measured = sum(_has_rates(device.compute) for device in view.devices)
    return len(view.devices) + measured + sum(_is_alarm(view, each) for each in view.processes)


def _has_rates(compute: ComputeView | None) -> TypeGuard[ComputeView]:
    """Return whether a share's device has a line in the table of compute."""
    return compute is not None and (compute.is_measured or compute.promised.is_governed)


def _is_alarm(view: ShareView, process: ProcessView) -> bool:
    """Return whether a process is shown wherever there is a line for it."""
    return not (process.is_enforced or view.remark)


def _body(frame: Frame, ordered: Sequence[ShareView], width: int, plan: _Plan) -> list[Part]:
    blank = [Text()] if plan.has_blanks else []
    shown = ordered[: plan.shares]
    parts: list[Part] = [_heading(frame), *blank, *_devices(frame, width, plan), *blank]
    if frame.shares:
        parts.append(_shares(shown, width, plan, has_bars=frame.has_bars))
    else:
        parts.append(_no_shares(frame))
    measured = [
        (view, index, compute)
        for view in shown
        for index, device in enumerate(view.devices)
        if _has_rates(compute := device.compute)
    ]
    if measured:
        parts += [*blank, _compute(measured, width, has_bars=frame.has_bars)]
    outside = [_outside(user) for user in frame.outside]
    # The live screen cuts a problem to one line; elsewhere it may wrap.
    problems = [
        one_line(f"! {view.name}: {view.problem}", "red")
        if plan.most_lines or frame.is_live
        else wrapped(f"! {view.name}: {view.problem}", "red")
        for view in frame.shares
        if view.problem
    ]
    if outside or problems:
        parts += blank
    parts += _first(outside, plan.most_lines, "process outside", "processes outside")
    parts += _first(problems, plan.most_lines, "damaged share", "damaged shares")
    return parts


def _first(lines: list[Text], most: int | None, word: str, words: str) -> list[Text]:
    """Return the first lines, and a line that counts the others."""
    if most is None or len(lines) <= most:
        return lines
    more = format_count(len(lines) - most + 1, f"more {word}", f"more {words}")
    return [*lines[: most - 1], one_line(f"{more} (see `allot ps`)", "red")]


def _foot(frame: Frame, ordered: Sequence[ShareView], width: int, plan: _Plan) -> list[Text]:
    """Return the lines at the bottom: what is hidden, and the keys."""
    notes = []
    if frame.first:
        notes.append(f"↑ {frame.first} more")
    if hidden := len(ordered) - plan.shares:
        notes.append(f"↓ {hidden} more")
    if not plan.has_processes and any(
        process.is_enforced for view in ordered[: plan.shares] for process in view.processes
    ):
        notes.append("processes hidden")
    note = [one_line("  ".join(notes), "bold")] if notes else [Text()] if plan.has_blanks else []
    return [*note, _keys(frame, width)]


def _keys(frame: Frame, width: int) -> Text:
    pace = format_duration(frame.pace_s * 1e9)
    text = f"q quit   s sort (by {frame.sort})   ↑↓ scroll   +/- faster, slower (every {pace})"
    if cell_len(text) > width:
        text = "q quit  s sort  ↑↓ scroll  +/- pace"
    return one_line(text, "dim")


def _no_shares(frame: Frame) -> Text:
    where = " are visible from inside a share" if frame.is_inside else ""
    reason = f": {frame.why_no_devices}" if frame.why_no_devices else "."
    return Text(f"No shares{where}{reason}", style="dim")


def _outside(user: OutsideView) -> Text:
    used = "?" if user.used is None else format_bytes(user.used)
    text = f"{OUTSIDE} {short_uuid(user.uuid)} {used}, {user.pid} {base_names(user.command)}"
    return one_line(text, "red")


def _heading(frame: Frame) -> Text:
    text = one_line("")
    text.append("allot top", style="bold")
    devices, shares = len(frame.devices), len(frame.shares)
    text.append(f"   {format_count(devices, 'GPU')}, {format_count(shares, 'share')}")
    text.append(f"   by {frame.sort}   {frame.clock}", style="dim")
    return text


def _bar_width(width: int) -> int:
    return max(6, min(28, width // 6))


def _devices(frame: Frame, width: int, plan: _Plan) -> list[Part]:
    grid = Grid(
        (
            Column("GPU"),
            Column("MODEL", rank=4),
            *_bar_column(rank=3, has_bars=frame.has_bars),
            Column("ALLOTTED", is_number=True),
            Column("USED", rank=1, is_number=True, most=NAME_CELLS),
            Column("BUSY", rank=2, is_number=True),
        )
    )
    for row in frame.devices[: plan.most_devices]:
        whole = row.device.allottable_bytes
        reading = row.reading
        busy = "-" if reading is None or reading.gpu_percent is None else f"{reading.gpu_percent}%"
        grid.add(
            {
                "GPU": short_uuid(row.device.uuid),
                "MODEL": row.device.name + (" (simulated)" if row.device.simulated else ""),
                _BAR: bar(row.allotted, whole, _bar_width(width)),
                "ALLOTTED": f"{format_bytes(row.allotted)} of {format_bytes(whole)}",
                "USED": format_bytes(reading.used_bytes) if reading else row.problem or "?",
                "BUSY": busy,
            }
        )
    hidden = len(frame.devices) - len(grid.rows)
    more = format_count(hidden, "more GPU", "more GPUs")
    return [grid, one_line(f"{more} (see `allot devices`)", "bold")] if hidden else [grid]


def _bar_column(*, rank: int, has_bars: bool) -> list[Column]:
    """Return the column of bars, if bars are shown; the next column has the figures."""
    return [Column(_BAR, rank=rank)] if has_bars else []


def _shares(shown: Sequence[ShareView], width: int, plan: _Plan, *, has_bars: bool) -> Grid:
    uses_host = any(has_host(device) for view in shown for device in view.devices)
    grid = Grid(
        (
            Column("SHARE", most=NAME_CELLS),
            *([Column("STATE")] if any(_is_suspended(view) for view in shown) else []),
            Column("GPU", rank=2),
            *_bar_column(rank=3, has_bars=has_bars),
            Column("USED OF LIMIT", is_number=True),
            *([Column("HOST", rank=5, is_number=True)] if uses_host else []),
            Column("PEAK", rank=4, is_number=True),
            Column("REFUSED", rank=6, is_number=True),
            Column("ENFORCED", rank=1),
            Column("COMMAND", rank=7, least=COMMAND_CELLS),
        )
    )
    for view in shown:
        of_share: dict[str, Cell] = {
            "SHARE": Text(view.name, style="bold"),
            "STATE": Text(view.state, style="yellow" if _is_suspended(view) else ""),
            "ENFORCED": _enforced(view.enforcement),
            "COMMAND": one_line(command_of(view)),
        }
        for index, device in enumerate(view.devices):
            grid.add(
                (of_share if index == 0 else {})
                | {
                    "GPU": short_uuid(device.uuid),
                    _BAR: bar(device.used, device.limit, _bar_width(width)),
                    "USED OF LIMIT": f"{format_bytes(device.used)} of {limit_of(device)}",
                    "HOST": host_of(device),
                    "PEAK": format_bytes(device.peak),
                    "REFUSED": Text(
                        str(device.refusals), style="yellow" if device.refusals else ""
                    ),
                }
            )
        for process in view.processes:
            if plan.has_processes or _is_alarm(view, process):
                grid.add(_process_cells(view, process))
    return grid


def _is_suspended(view: ShareView) -> bool:
    return view.state is LiveState.SUSPENDED


def _process_cells(view: ShareView, process: ProcessView) -> dict[str, Cell]:
    pid = process.pid if process.pid is not None else process.pid_inside
    figures = {
        "SHARE": f"  {pid}",
        "USED OF LIMIT": format_bytes(sum(process.used)),
        "PEAK": format_bytes(sum(process.peak)),
        "REFUSED": str(process.refusals),
    }
    return {
        **{heading: Text(figure, style="dim") for heading, figure in figures.items()},
        "ENFORCED": _enforced("-" if view.remark else "yes" if process.is_enforced else "no"),
        "COMMAND": one_line(base_names(process.command), "dim"),
    }


def _compute(
    measured: Sequence[tuple[ShareView, int, ComputeView]], width: int, *, has_bars: bool
) -> Grid:
    grid = Grid(
        (
            Column("SHARE", most=NAME_CELLS),
            Column("GPU", rank=3),
            Column("COMPUTE", rank=1),
            *_bar_column(rank=4, has_bars=has_bars),
            Column("GPU TIME", is_number=True),
            Column("NVML", rank=5, is_number=True),
            Column("BORROWED", rank=6, is_number=True),
            Column("LENT", rank=7, is_number=True),
            Column("HELD BACK", rank=8, is_number=True),
            Column("STATE", rank=2),
        )
    )
    for view, index, compute in measured:
        rates, driver = compute.rates, compute.driver_percent
        state_style = "yellow" if compute.state == "waiting" else ""
        grid.add(
            {
                "SHARE": Text(view.name if index == 0 else "", style="bold"),
                "GPU": short_uuid(view.devices[index].uuid),
                "COMPUTE": described(compute.promised, takes_turns=compute.is_measured),
                _BAR: _rate_bar(compute, _bar_width(width) // 2),
                "GPU TIME": _percent(rates.gpu if rates else None),
                "NVML": "-" if driver is None else f"{driver}%",
                "BORROWED": _percent(rates.borrowed if rates else None),
                "LENT": _percent(rates.lent if rates else None),
                "HELD BACK": f"{rates.held:.2f}x" if rates else "-",
                "STATE": Text(compute.state or "-", style=state_style),
            }
        )
    return grid


def _rate_bar(compute: ComputeView, width: int) -> Text:
    """Draw the share's part of GPU time; no value is an alarm."""
    return bar(round(compute.rates.gpu * 1000) if compute.rates else 0, 1000, width, colour="cyan")


def _percent(part: float | None) -> str:
    return "-" if part is None else f"{part * 100:.1f}%"


def _enforced(word: str) -> Text:
    return Text(word, style={"yes": "green", "no": "bold red"}.get(word, ""))

# SPDX-License-Identifier: Apache-2.0
"""The heat map as shapes: a square for each GPU of the fleet, and the parts of one GPU.

The page's policy forbids inline styles, so sizes are SVG attributes and colours are classes.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from allotment.web.fleet import FleetGpu, FleetNode

WIDTH: Final = 100.0
"""Of a GPU's bar."""
STEPS: Final = 10
"""Colours between nothing and all."""
_SIDE: Final = 7
_STEP: Final = 8
_GAP: Final = 6
_MOST_IN_A_ROW: Final = 150
_HUES: Final = 6


def _time(gpu: FleetGpu) -> float | None:
    return gpu.utilization


MEASURES: Final[Mapping[str, tuple[str, Callable[[FleetGpu], float | None]]]] = {
    "memory": ("memory used", lambda gpu: gpu.used_part),
    "time": ("time used", _time),
    "allocated": ("memory allocated", lambda gpu: gpu.allocated_part),
}
"""What a colour can show, with its title."""


_SHADES: Final = tuple(f"u{step}" for step in range(STEPS + 1))


def shade(part: float | None) -> str:
    """Return the class of a colour: `u0` to `u10`, or `unknown`."""
    if part is None:
        return "unknown"
    return _SHADES[min(STEPS, max(0, round(part * STEPS)))]


class Segment(msgspec.Struct, frozen=True):
    """A share's part of a GPU's bar, and its used part. In units of `WIDTH`."""

    x: float
    width: float
    used: float
    hue: str


def segments(gpu: FleetGpu) -> list[Segment]:
    """Return the parts of a GPU: its shares in order, then what others have that are not seen."""
    if not gpu.memory_total:
        return []
    promised = [share.memory_limit for share in gpu.shares]
    unpromised = promised.count(0)
    if unpromised:  # modes without promises: what is left, in equal parts
        left = max(0, gpu.memory_total - sum(promised)) // unpromised
        promised = [size or left for size in promised]
    others = max(0, gpu.memory_allocated - sum(promised))
    whole = max(gpu.memory_total, sum(promised) + others)
    found = []
    x = 0.0
    for place, (share, size) in enumerate(zip(gpu.shares, promised, strict=True)):
        width = WIDTH * size / whole
        used = min(1.0, (share.memory_used or 0) / size) if size else 0.0
        found.append(Segment(round(x, 1), round(width, 1), round(width * used, 1), _hue(place)))
        x += width
    if others:
        found.append(Segment(round(x, 1), round(WIDTH * others / whole, 1), 0.0, "others"))
    return found


def _hue(place: int) -> str:
    return f"h{place % _HUES}"


def bar(gpu: FleetGpu) -> str:
    """Return a GPU's parts as SVG. It contains no user text.

    The fleet has hundreds of them, which a template would take long for.
    """
    shapes = []
    for part in segments(gpu):
        size = f'x="{part.x}" width="{part.width}" height="10"'
        shapes.append(f'<rect class="part {part.hue}" {size}/>')
        if part.used:
            size = f'x="{part.x}" y="2.5" width="{part.used}" height="5"'
            shapes.append(f'<rect class="use {part.hue}" {size}/>')
    view = f'viewBox="0 0 {WIDTH:g} 10" preserveAspectRatio="none" aria-hidden="true"'
    return f'<svg class="bar" {view}>{"".join(shapes)}</svg>'


class Overview(msgspec.Struct, frozen=True):
    """All GPUs of a fleet as one picture: each node a column, many nodes in a row."""

    width: int
    height: int
    paths: tuple[tuple[str, str], ...]
    """The class of a colour, and the squares of that colour."""
    nodes: tuple[str, ...]
    in_a_row: int
    row_height: int
    step: int = _STEP


def overview(nodes: Sequence[FleetNode], measure: str) -> Overview:
    value = MEASURES[measure][1]
    most = max((len(node.gpus) for node in nodes), default=1) or 1
    row_height = most * _STEP + _GAP
    rows = -(-len(nodes) // _MOST_IN_A_ROW)
    ends = [
        [f" {row * row_height + place * _STEP}h{_SIDE}v{_SIDE}h-{_SIDE}z" for place in range(most)]
        for row in range(rows)
    ]
    squares: defaultdict[str, list[str]] = defaultdict(list)
    for number, node in enumerate(nodes):
        row, column = divmod(number, _MOST_IN_A_ROW)
        begin = f"M{column * _STEP}"
        for gpu, end in zip(node.gpus, ends[row], strict=False):
            colour = "problem" if gpu.problem else shade(value(gpu))
            squares[colour].append(begin + end)
    return Overview(
        width=min(len(nodes), _MOST_IN_A_ROW) * _STEP,
        height=max(1, rows * row_height - _GAP),
        paths=tuple((colour, "".join(shapes)) for colour, shapes in sorted(squares.items())),
        nodes=tuple(node.name for node in nodes),
        in_a_row=_MOST_IN_A_ROW,
        row_height=row_height,
    )

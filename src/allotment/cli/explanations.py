# SPDX-License-Identifier: Apache-2.0
"""What `allot explain` has found out, as text: what matters first, as wide as the terminal is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from allotment.scheduler.explaining_answers import Asked, Explanation, Group, Part

__all__ = ["print_explanation"]

_NAMED: Final = 3
"""So many nodes alike are named."""


def print_explanation(explanation: Explanation) -> None:
    """Print in the order of what matters: what it has, or what keeps it; then the nodes."""
    is_waiting = explanation.standing == "pending"
    _tell(_lines(explanation))
    if not is_waiting:
        _print_parts("It has:", explanation.containers)
    _tell(_obstacles(explanation))
    _tell(_nodes(explanation))
    if is_waiting:
        title = "But for that, it would get:" if explanation.obstacles else "It would get:"
        _print_parts(title, explanation.proposal)
    _tell(_said(explanation))


def _tell(lines: Iterator[str]) -> None:
    """Print lines, on a terminal broken between words, so that what is indented stays so."""
    import shutil
    import sys
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
        for each in shown:
            click.echo(each)


def _lines(explanation: Explanation) -> Iterator[str]:
    where = f" on node {explanation.node}" if explanation.node else ""
    words = {"placed": "is placed", "bound": "is bound", "pending": "waits", "ended": "has ended"}
    name = f"{explanation.namespace}/{explanation.name}"
    yield f"Pod {name} {words[explanation.standing]}{where}{_why(explanation)}"
    for each in explanation.containers:
        yield f"  container {each.name} asks for {each.text}"
    if explanation.title:
        yield f"  written in {explanation.title} words"
    yield f"  scheduler: {explanation.scheduler or '-'}"
    if explanation.policies:
        whose = " (the pod's own)" if explanation.is_own_policy else ""
        yield f"  policy: {', '.join(explanation.policies)}{whose}"
    if not (explanation.containers or explanation.obstacles) and explanation.standing != "ended":
        what = (
            f"; {', '.join(explanation.others)} is not placed by it" if explanation.others else ""
        )
        yield f"It asks for no part of a GPU by Allotment{what}."


def _why(explanation: Explanation) -> str:
    """Say in the first line what it comes to."""
    if _is_kept_out(explanation):
        return ", and does not start: it is refused there"
    if explanation.standing != "pending" or explanation.obstacles or not explanation.containers:
        return ""
    if explanation.fitting:
        return "; there is room for it"
    if explanation.beyond is None:
        return ": no node has room for it"
    if explanation.beyond.reason == "gpu-memory":
        return ": no GPU here is that large, even when empty"
    return ": no node here would do, even when empty"


def _is_kept_out(explanation: Explanation) -> bool:
    """Is it on a node that cannot make sense of it, so that its containers wait there for ever?"""
    is_refused = any(each.kind == "refused" for each in explanation.obstacles)
    return explanation.standing == "bound" and is_refused and not explanation.has_started


def _print_parts(title: str, asked: Sequence[Asked]) -> None:
    if not any(each.parts for each in asked):
        return
    from allotment.cli.tables import Column, print_table, short_uuid
    from allotment.model.formats import format_bytes, format_percent

    # Modes are told where they tell anything, and so are slices.
    modes = {each.mode for each in asked if each.parts}
    has_modes = modes != {"soft"}
    has_slices = any(part.slice is not None for each in asked for part in each.parts)
    columns = (
        Column("CONTAINER"),
        Column("GPU"),
        Column("INDEX", is_number=True),
        Column("MODEL"),
        Column("MEMORY", is_number=True),
        Column("OF", is_number=True),
        Column("COMPUTE", is_number=True),
        *((Column("MODE"),) if has_modes else ()),
        *((Column("SLICE"),) if has_slices else ()),
    )
    rows = [
        (
            each.name,
            short_uuid(part.uuid),
            "?" if part.index is None else str(part.index),
            part.model or "?",
            format_bytes(part.memory),
            "?" if part.memory_total is None else format_bytes(part.memory_total),
            f"{format_percent(part.guarantee)} %" if part.guarantee else "-",
            *((each.mode,) if has_modes else ()),
            *((_slice(part),) if has_slices else ()),
        )
        for each in asked
        for part in each.parts
    ]
    click.echo(f"\n{title}")
    print_table(columns, rows)


def _slice(part: Part) -> str:
    return "-" if part.slice is None else f"{part.slice.profile} at {part.slice.start}"


def _obstacles(explanation: Explanation) -> Iterator[str]:
    if not explanation.obstacles:
        return
    yield ""
    if explanation.standing == "pending":
        yield "What keeps it, whatever GPUs there are:"
    else:
        yield "Why:" if _is_kept_out(explanation) else "To be told of it:"
    for each in explanation.obstacles:
        yield f"  {each.text}"
        if each.hint:
            yield f"    hint: {each.hint}"


def _nodes(explanation: Explanation) -> Iterator[str]:
    """Yield which nodes do, and why the others do not."""
    if not explanation.containers or explanation.standing == "ended":
        return
    yield ""
    yield _room(explanation)
    for group in explanation.refused:
        yield f"  {_whose(group)}: {group.text}"
        if group.note:
            yield f"    {group.note}"
    if explanation.beyond is not None:
        yield f"  If all of them were empty and well: {explanation.beyond.text}"


def _said(explanation: Explanation) -> Iterator[str]:
    """Yield what its scheduler has written."""
    condition = explanation.condition
    if condition is not None and (condition.message or condition.reason):
        since = f" since {condition.last_transition_time}" if condition.last_transition_time else ""
        yield ""
        yield f"Its scheduler says ({condition.reason or condition.type}{since}):"
        yield f"  {' '.join(condition.message.split())}"


def _room(explanation: Explanation) -> str:
    from allotment.model.formats import format_count

    number, of = len(explanation.fitting), format_count(explanation.nodes, "node")
    by = ", ".join(explanation.policies)
    if explanation.standing == "pending":
        if not number:
            return (
                f"It has room on none of {of}:"
                if explanation.nodes
                else "There is no node that can be read."
            )
        return f"It has room on {number} of {of} now; by {by} the best is {explanation.fitting[0]}."
    if explanation.rank is None:
        return f"Without it there would be room on {number} of {of} now, and its own is not one:"
    place = "the best" if explanation.rank == 1 else f"number {explanation.rank}"
    return (
        f"Without it there would be room on {number} of {of} now; by {by} its own is {place}"
        " of them."
    )


def _whose(group: Group) -> str:
    from allotment.model.formats import format_count

    names = ", ".join(group.nodes[:_NAMED])
    if len(group.nodes) == 1:
        return names
    more = ", ..." if len(group.nodes) > _NAMED else ""
    return f"{format_count(len(group.nodes), 'node')} ({names}{more})"

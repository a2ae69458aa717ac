# SPDX-License-Identifier: Apache-2.0
"""What `allot simulate` prints: a line for each policy, or everything as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from allotment.simulate.running import Results

__all__ = ["print_results"]


def print_results(results: Results, settings: dict[str, Any], output: str) -> None:
    """Print what came out, and with what settings."""
    from allotment.simulate.outcomes import document_of, summaries_of

    if results.was_interrupted:
        click.echo(f"interrupted: {len(results.outcomes)} replays are done", err=True)
    summaries = summaries_of(results.outcomes)
    if output == "json":
        from allotment.cli.documents import print_document

        runs = [document_of(outcome) for outcome in results.outcomes]
        document = {
            "settings": settings,
            "interrupted": results.was_interrupted,
            "runs": runs,
            "summary": summaries,
        }
        print_document(document, "json")
    elif summaries:
        columns = _DEPARTURE_COLUMNS if settings.get("departures") else _ARRIVAL_COLUMNS
        _print_table(summaries, _LIVE_COLUMNS if settings.get("from_cluster") else columns)


def _print_table(summaries: Sequence[dict[str, Any]], columns: Sequence[_Cell]) -> None:
    from allotment.cli.tables import Column, print_table

    rows = [
        [str(each["policy"]), str(len(each["seeds"])), *(read(each) for _, read in columns)]
        for each in summaries
    ]
    headings = ("SEEDS", *(heading for heading, _ in columns))
    numbers = [Column(each, is_number=True, is_optional=each in _OPTIONAL) for each in headings]
    print_table([Column("POLICY"), *numbers], rows)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}%"


def _decision(each: dict[str, Any]) -> str:
    times = each["decision_ms"]
    return f"{times['p50']:.2f} / {times['p99']:.2f} ms"


_OPTIONAL: Final = frozenset({"SEEDS", "PODS", "PLACED", "IMPOSSIBLE"})
_Cell = tuple[str, "Callable[[dict[str, Any]], str]"]

_ARRIVAL_COLUMNS: Final[Sequence[_Cell]] = (
    ("ALLOCATED @95", lambda each: _percent(each["allocated_pct"]["95"])),
    ("@100", lambda each: _percent(each["allocated_pct"]["100"])),
    ("@130", lambda each: _percent(each["allocated_pct"]["130"])),
    ("FRAGMENTED", lambda each: _percent(each["fragmented_pct"]["100"])),
    ("PODS", lambda each: f"{each['pods']:.0f}"),
    ("PLACED", lambda each: f"{each['placed']:.0f}"),
    ("DECISION", _decision),
)
_DEPARTURE_COLUMNS: Final[Sequence[_Cell]] = (
    ("ASKED", lambda each: _percent(each["asked_pct"]["late"])),
    ("ALLOCATED", lambda each: _percent(each["allocated_pct"]["late"])),
    ("FRAGMENTED", lambda each: _percent(each["fragmented_pct"]["late"])),
    ("PODS", lambda each: f"{each['pods']:.0f}"),
    ("WAITED", lambda each: f"{each['waited']:.0f}"),
    ("STILL", lambda each: f"{each['still_waiting']:.0f}"),
    ("IMPOSSIBLE", lambda each: f"{each['impossible']:.0f}"),
    ("WAIT", lambda each: f"{each['wait_s']['p50']:.0f} / {each['wait_s']['p99']:.0f} s"),
    ("DECISION", _decision),
)
_LIVE_COLUMNS: Final[Sequence[_Cell]] = (
    ("PODS", lambda each: f"{each['pods']:.0f}"),
    ("PLACED", lambda each: f"{each['placed']:.1f}"),
    ("IMPOSSIBLE", lambda each: f"{each['impossible']:.0f}"),
    ("TIME", lambda each: _change(each["allocated_pct"], _percent)),
    ("MEMORY", lambda each: _change(each["allocated_memory_pct"], _percent)),
    ("IDLE GPUS", lambda each: _change(each["idle_gpus"], lambda number: f"{number:.1f}")),
    ("DECISION", _decision),
)


def _change(values: dict[str, float], shown: Callable[[float], str]) -> str:
    return f"{shown(values['before'])} -> {shown(values['after'])}"

# SPDX-License-Identifier: Apache-2.0
"""The output of `allot simulate`: a row per policy, or one JSON document."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from allotment.simulate.tasks import Results


def print_results(results: Results, settings: dict[str, Any], output: str) -> None:
    from allotment.simulate.outcomes import beside_claims, document_of, summaries_of

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
            "beside_claims": beside_claims(summaries),
        }
        print_document(document, "json")
    elif summaries:
        columns = _DEPARTURE_COLUMNS if settings.get("departures") else _ARRIVAL_COLUMNS
        _print_table(summaries, _LIVE_COLUMNS if settings.get("from_cluster") else columns)
        for each in beside_claims(summaries):
            click.echo(_comparison(each))


def _print_table(summaries: Sequence[dict[str, Any]], columns: Sequence[_Cell]) -> None:
    from allotment.cli.tables import Column, print_table

    rows = [
        [
            str(summary["policy"]),
            str(len(summary["seeds"])),
            *(read(summary) for _, read in columns),
        ]
        for summary in summaries
    ]
    headings = ("SEEDS", *(heading for heading, _ in columns))
    numbers = [
        Column(heading, is_number=True, rank=int(heading in _OPTIONAL)) for heading in headings
    ]
    print_table([Column("POLICY"), *numbers], rows)


def _comparison(differences: dict[str, Any]) -> str:
    parts = [
        f"{value:+.2f} % {word}" if name.endswith("_pct") else f"{value:+.1f} {word}"
        for name, word in _WORDS.items()
        if (value := differences.get(name)) is not None
    ]
    return f"{differences['policy']} beside claims: {', '.join(parts)}"


_WORDS: Final = {
    "placed": "pods placed",
    "still_waiting": "pods still waiting",
    "allocated_pct": "of the GPUs allocated",
    "allocated_memory_pct": "of their memory",
    "fragmented_pct": "free but unusable",
    "idle_gpus": "idle GPUs",
}


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}%"


def _decision(summary: dict[str, Any]) -> str:
    times = summary["decision_ms"]
    return f"{times['p50']:.2f} / {times['p99']:.2f} ms"


_OPTIONAL: Final = frozenset({"SEEDS", "PODS", "PLACED", "IMPOSSIBLE"})
_Cell = tuple[str, "Callable[[dict[str, Any]], str]"]

_ARRIVAL_COLUMNS: Final[Sequence[_Cell]] = (
    ("ALLOCATED @95", lambda summary: _percent(summary["allocated_pct"]["95"])),
    ("@100", lambda summary: _percent(summary["allocated_pct"]["100"])),
    ("@130", lambda summary: _percent(summary["allocated_pct"]["130"])),
    ("FRAGMENTED", lambda summary: _percent(summary["fragmented_pct"]["100"])),
    ("PODS", lambda summary: f"{summary['pods']:.0f}"),
    ("PLACED", lambda summary: f"{summary['placed']:.0f}"),
    ("DECISION", _decision),
)
_DEPARTURE_COLUMNS: Final[Sequence[_Cell]] = (
    ("ASKED", lambda summary: _percent(summary["asked_pct"]["late"])),
    ("ALLOCATED", lambda summary: _percent(summary["allocated_pct"]["late"])),
    ("FRAGMENTED", lambda summary: _percent(summary["fragmented_pct"]["late"])),
    ("PODS", lambda summary: f"{summary['pods']:.0f}"),
    ("WAITED", lambda summary: f"{summary['waited']:.0f}"),
    ("STILL", lambda summary: f"{summary['still_waiting']:.0f}"),
    ("IMPOSSIBLE", lambda summary: f"{summary['impossible']:.0f}"),
    ("WAIT", lambda summary: f"{summary['wait_s']['p50']:.0f} / {summary['wait_s']['p99']:.0f} s"),
    ("DECISION", _decision),
)
_LIVE_COLUMNS: Final[Sequence[_Cell]] = (
    ("PODS", lambda summary: f"{summary['pods']:.0f}"),
    ("PLACED", lambda summary: f"{summary['placed']:.1f}"),
    ("IMPOSSIBLE", lambda summary: f"{summary['impossible']:.0f}"),
    ("TIME", lambda summary: _change(summary["allocated_pct"], _percent)),
    ("MEMORY", lambda summary: _change(summary["allocated_memory_pct"], _percent)),
    ("IDLE GPUS", lambda summary: _change(summary["idle_gpus"], lambda number: f"{number:.1f}")),
    ("DECISION", _decision),
)


def _change(values: dict[str, float], shown: Callable[[float], str]) -> str:
    return f"{shown(values['before'])} -> {shown(values['after'])}"

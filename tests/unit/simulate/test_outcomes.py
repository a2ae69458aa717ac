# SPDX-License-Identifier: Apache-2.0
"""Figures of replays: as JSON has them, and their means."""

import pytest

from allotment.simulate.outcomes import (
    Arrivals,
    Decisions,
    Point,
    ReplayOutcome,
    decisions_of,
    document_of,
    percentile,
    summaries_of,
)


def outcome(policy: str, seed: int, allocated: float, *, last: float = 130) -> ReplayOutcome:
    points = tuple(
        Point(arrived, allocated, 100 - allocated)
        for arrived in (50.0, 95.1, 100.0, 130.2)
        if arrived <= last + 1
    )
    return ReplayOutcome(
        policy=policy,
        seed=seed,
        pods=10,
        placed=8,
        impossible=1,
        story=Arrivals(points=points),
        decisions=Decisions(10, 0.25, seed),
        seconds=1.234,
    )


def test_a_replay_as_json() -> None:
    document = document_of(outcome("a", 1, 90))
    assert document["allocated_pct"] == {"95": 90, "100": 90, "130": 90}
    assert document["fragmented_pct"] == {"95": 10, "100": 10, "130": 10}
    assert document["decision_ms"] == {"p50": 0.25, "p99": 1}
    assert document["curve"]["arrived_pct"] == [50, 95.1, 100, 130.2]


def test_what_never_arrived_is_null() -> None:
    document = document_of(outcome("a", 1, 90, last=100))
    assert document["allocated_pct"] == {"95": 90, "100": 90, "130": None}
    (summary,) = summaries_of([outcome("a", 1, 90, last=100)])
    assert summary["allocated_pct"] == {"95": 90, "100": 90, "130": None}
    assert summary["allocated_pct_stdev"] == {"95": None, "100": None, "130": None}


def test_means_are_by_policy() -> None:
    some = [outcome("b", 1, 90), outcome("a", 1, 50), outcome("b", 2, 91), outcome("b", 3, 95)]
    first, second = summaries_of(some)
    assert (first["policy"], first["seeds"]) == ("b", [1, 2, 3])
    assert first["allocated_pct"]["100"] == 92
    assert first["allocated_pct_stdev"]["100"] == pytest.approx(2.6458)
    assert first["decision_ms"] == {"p50": 0.25, "p99": 3}
    assert first["placed"] == 8
    assert second["allocated_pct"]["100"] == 50


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([], 50, 0), ([7], 99, 7), (range(1, 101), 50, 50), (range(1, 101), 99, 99), ([1, 2], 99, 2)],
)
def test_percentiles(values: list[float], percent: int, expected: float) -> None:
    assert percentile(values, percent) == expected


def test_decisions_are_in_milliseconds() -> None:
    assert decisions_of([3_000_000, 1_000_000, 2_000_000]) == Decisions(3, 2.0, 3.0)

# SPDX-License-Identifier: Apache-2.0
"""What came out of replays: figures of one, and means over several. Parts are percent of all GPUs.

`fragmented` is what of the GPUs is free and cannot be used by the pods that come, as a mean over
their mix: the definition of Weng et al., "Beware of Fragmentation", USENIX ATC 2023.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Final

__all__ = [
    "MARKS",
    "Arrivals",
    "Decisions",
    "Departures",
    "Moment",
    "Outcome",
    "Point",
    "Refit",
    "Story",
    "Unplaced",
    "decisions_of",
    "document_of",
    "mean",
    "percentile",
    "summaries_of",
]

MARKS: Final = (95, 100, 130)
"""What has been asked for when one looks, in percent of all GPUs."""

_DIGITS = 4
_MEANS: Final[tuple[str, ...]] = (
    "pods",
    "placed",
    "impossible",
    "asked_pct",
    "allocated_pct",
    "allocated_memory_pct",
    "fragmented_pct",
    "idle_gpus",
    "waited",
    "still_waiting",
    "wait_s",
)
"""Figures of a replay of which there is a mean over seeds."""


@dataclass(frozen=True, slots=True)
class Point:
    """A moment: so much had been asked for when so much was given."""

    arrived_pct: float
    allocated_pct: float
    fragmented_pct: float


@dataclass(frozen=True, slots=True)
class Decisions:
    """How long it took to decide where one pod goes, found or not."""

    count: int
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """Pods came and stayed."""

    points: tuple[Point, ...]
    """At each 5 % that arrived, by the pod that reached it; the last pod's is the last."""

    def at(self, mark: int) -> Point | None:
        """Return the moment at which so much had been asked for; None: it never was."""
        return next((each for each in self.points if each.arrived_pct >= mark), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Departures:
    """Pods came, waited, and left. From the first arrival to the last; means are over time.

    "Late" is the second half of that time: in the first a cluster that was empty fills up.
    """

    asked_pct: float
    """What pods that had come asked for, late, had none of them waited."""
    allocated_pct: float
    allocated_late_pct: float
    allocated_most_pct: float
    fragmented_pct: float
    """Late."""
    waited: int
    """Pods that had no room when they came."""
    still_waiting: int
    """Of them, those that never had until the last pod came."""
    wait_s: Mapping[str, float]
    """Of those that waited, with what they had waited at the end: mean, p50, p99."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """How a live cluster stands: what of its GPUs' time and memory is promised."""

    allocated_pct: float
    allocated_memory_pct: float
    fragmented_pct: float
    idle_gpus: int
    """Those that have no share, and could."""


@dataclass(frozen=True, slots=True)
class Unplaced:
    """A pod for which there was no room."""

    pod: str
    reasons: Mapping[str, int]
    """How many nodes refused it for what, the most frequent first."""
    example: str
    """What one of these nodes said: need and have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refit:
    """Pods of a live cluster were placed anew."""

    before: Moment
    """As it runs."""
    after: Moment
    unplaced: tuple[Unplaced, ...]


Story = Arrivals | Departures | Refit


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One replay."""

    policy: str
    seed: int
    pods: int
    placed: int
    impossible: int
    """Of those that were not, pods that fit on no node even when nothing else is there."""
    story: Story
    decisions: Decisions
    seconds: float
    """How long the replay took."""


def decisions_of(times_ns: Sequence[int]) -> Decisions:
    """Return the quantiles of times."""
    ordered = sorted(times_ns)
    return Decisions(len(ordered), percentile(ordered, 50) / 1e6, percentile(ordered, 99) / 1e6)


def percentile(ordered: Sequence[float], percent: int) -> float:
    """Return the least value that so many percent are not above; 0 of nothing."""
    if not ordered:
        return 0.0
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of those that are known; None: none is."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def document_of(outcome: Outcome) -> dict[str, Any]:
    """Return one replay as JSON has it."""
    story = outcome.story
    match story:
        case Arrivals():
            told = _arrivals(story)
        case Departures():
            told = _departures(story)
        case Refit():
            told = _refit(story)
    return {
        "policy": outcome.policy,
        "seed": outcome.seed,
        "pods": outcome.pods,
        "placed": outcome.placed,
        "impossible": outcome.impossible,
        **told,
        "decision_ms": {
            "p50": round(outcome.decisions.p50_ms, _DIGITS),
            "p99": round(outcome.decisions.p99_ms, _DIGITS),
        },
        "seconds": round(outcome.seconds, 2),
    }


def summaries_of(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return the means of each policy over its replays, policies in the order in which they come.

    Of the times of decisions the median of the p50 and the worst p99 say more than means would.
    """
    by_policy: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_policy.setdefault(outcome.policy, []).append(outcome)
    return [_summary(policy, some) for policy, some in by_policy.items()]


def _summary(policy: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    documents = [document_of(outcome) for outcome in outcomes]
    means: dict[str, Any] = {
        name: _mean_of([document[name] for document in documents])
        for name in _MEANS
        if name in documents[0]
    }
    spread = _spread_of([document["allocated_pct"] for document in documents])
    return {
        "policy": policy,
        "seeds": [outcome.seed for outcome in outcomes],
        **means,
        "allocated_pct_stdev": spread,
        "decision_ms": {
            "p50": percentile(sorted(each["decision_ms"]["p50"] for each in documents), 50),
            "p99": max(each["decision_ms"]["p99"] for each in documents),
        },
    }


def _mean_of(values: Sequence[Any]) -> Any:  # noqa: ANN401 - a number, or numbers by name
    if isinstance(values[0], Mapping):
        return {key: _mean_of([value[key] for value in values]) for key in values[0]}
    found = mean(values)
    return None if found is None else round(found, _DIGITS)


def _spread_of(values: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    spread: dict[str, float | None] = {}
    for key in values[0]:
        known = [number for value in values if (number := value[key]) is not None]
        spread[key] = round(stdev(known), _DIGITS) if len(known) > 1 else None
    return spread


def _arrivals(story: Arrivals) -> dict[str, Any]:
    marks = {mark: story.at(mark) for mark in MARKS}
    return {
        "allocated_pct": {
            str(mark): None if point is None else round(point.allocated_pct, _DIGITS)
            for mark, point in marks.items()
        },
        "fragmented_pct": {
            str(mark): None if point is None else round(point.fragmented_pct, _DIGITS)
            for mark, point in marks.items()
        },
        "curve": {
            "arrived_pct": [round(each.arrived_pct, _DIGITS) for each in story.points],
            "allocated_pct": [round(each.allocated_pct, _DIGITS) for each in story.points],
            "fragmented_pct": [round(each.fragmented_pct, _DIGITS) for each in story.points],
        },
    }


def _departures(story: Departures) -> dict[str, Any]:
    return {
        "asked_pct": {"late": round(story.asked_pct, _DIGITS)},
        "allocated_pct": {
            "mean": round(story.allocated_pct, _DIGITS),
            "late": round(story.allocated_late_pct, _DIGITS),
            "most": round(story.allocated_most_pct, _DIGITS),
        },
        "fragmented_pct": {"late": round(story.fragmented_pct, _DIGITS)},
        "waited": story.waited,
        "still_waiting": story.still_waiting,
        "wait_s": {name: round(value, 2) for name, value in story.wait_s.items()},
    }


def _refit(story: Refit) -> dict[str, Any]:
    names = ("allocated_pct", "allocated_memory_pct", "fragmented_pct", "idle_gpus")
    moments = {"before": story.before, "after": story.after}
    return {
        **{
            name: {when: round(getattr(moment, name), _DIGITS) for when, moment in moments.items()}
            for name in names
        },
        "unplaced": [
            {"pod": each.pod, "reasons": dict(each.reasons), "example": each.example}
            for each in story.unplaced
        ],
    }

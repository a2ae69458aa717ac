# SPDX-License-Identifier: Apache-2.0
"""Results of replays: the figures of each, and means over seeds, in percent of all GPUs.

`fragmented` is the free part of the GPUs that arriving pods cannot use, as a mean over their mix:
the definition of Weng et al., "Beware of Fragmentation", USENIX ATC 2023.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, Final

import msgspec

CLAIMS: Final = "claims"
"""In the place of a policy: pods as claims, on kube-scheduler without an extender."""
MARKS: Final = (95, 100, 130)
"""Requested parts, in percent of all GPUs, at which figures are reported."""

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
"""Figures with a mean over seeds."""


class Point(msgspec.Struct, frozen=True):
    """Requested, allocated and fragmented parts at one moment."""

    arrived_pct: float
    allocated_pct: float
    fragmented_pct: float


class Decisions(msgspec.Struct, frozen=True):
    """Time to decide where one pod goes, placed or not."""

    count: int
    p50_ms: float
    p99_ms: float


class Arrivals(msgspec.Struct, frozen=True, kw_only=True):
    """A replay in which pods arrive and stay."""

    points: tuple[Point, ...]
    """At each 5 % that arrived, after the pod that reached it; the last after the last pod."""

    def at(self, mark: int) -> Point | None:
        """Return the first point with this requested part; None: never reached."""
        return next((point for point in self.points if point.arrived_pct >= mark), None)


class Departures(msgspec.Struct, frozen=True, kw_only=True):
    """A replay in which pods arrive, wait and leave. Means are over time, until the last arrival.

    "Late" is the second half of the time: in the first half an empty cluster fills up.
    """

    asked_pct: float
    """Late requests of arrived pods, as if none had waited."""
    allocated_pct: float
    allocated_late_pct: float
    allocated_most_pct: float
    fragmented_pct: float
    """Late."""
    waited: int
    """Pods that did not fit when they arrived."""
    still_waiting: int
    """Pods of them that still waited when the last pod arrived."""
    wait_s: Mapping[str, float]
    """Waiting times of them, until placed or until the end: mean, p50, p99."""


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """A live cluster at one moment: the promised parts of GPU time and memory."""

    allocated_pct: float
    allocated_memory_pct: float
    fragmented_pct: float
    idle_gpus: int
    """Usable GPUs without a share."""


class UnplacedPod(msgspec.Struct, frozen=True):
    """A pod that did not fit."""

    pod: str
    reasons: Mapping[str, int]
    """Number of nodes by reason of refusal, the most frequent first."""
    example: str
    """The refusal of one of these nodes: need and have."""


class Refit(msgspec.Struct, frozen=True, kw_only=True):
    """A replay in which pods of a live cluster were placed again."""

    before: Moment
    """The running cluster."""
    after: Moment
    unplaced: tuple[UnplacedPod, ...]


Course = Arrivals | Departures | Refit


class ReplayOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one replay."""

    policy: str
    seed: int
    pods: int
    placed: int
    impossible: int
    """Unplaced pods that fit on no node, even when empty."""
    story: Course
    decisions: Decisions
    seconds: float
    """Duration of the replay."""


def decisions_of(times_ns: Sequence[int]) -> Decisions:
    ordered = sorted(times_ns)
    return Decisions(len(ordered), percentile(ordered, 50) / 1e6, percentile(ordered, 99) / 1e6)


def percentile(ordered: Sequence[float], percent: int) -> float:
    """Return the nearest-rank percentile of sorted values; 0 without values."""
    if not ordered:
        return 0.0
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if numbers else None


def document_of(outcome: ReplayOutcome) -> dict[str, Any]:
    story = outcome.story
    match story:
        case Arrivals():
            figures = _arrivals(story)
        case Departures():
            figures = _departures(story)
        case Refit():
            figures = _refit(story)
    return {
        "policy": outcome.policy,
        "seed": outcome.seed,
        "pods": outcome.pods,
        "placed": outcome.placed,
        "impossible": outcome.impossible,
        **_rounded(figures),
        "decision_ms": _rounded({"p50": outcome.decisions.p50_ms, "p99": outcome.decisions.p99_ms}),
        "seconds": round(outcome.seconds, 2),
    }


def summaries_of(outcomes: Sequence[ReplayOutcome]) -> list[dict[str, Any]]:
    """Return the means of each policy over its replays, in the order of the policies.

    Decision times get the median of the p50 and the worst p99, which say more than means.
    """
    by_policy: dict[str, list[ReplayOutcome]] = {}
    for outcome in outcomes:
        by_policy.setdefault(outcome.policy, []).append(outcome)
    return [_summary(policy, some) for policy, some in by_policy.items()]


def _summary(policy: str, outcomes: Sequence[ReplayOutcome]) -> dict[str, Any]:
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
            "p50": percentile(sorted(document["decision_ms"]["p50"] for document in documents), 50),
            "p99": max(document["decision_ms"]["p99"] for document in documents),
        },
    }


def beside_claims(summaries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return each policy's figures less those of claims: what the scheduler's extender would save.

    At 100 % requested; with departures in the second half of the time; of a live cluster after the
    replay.
    """
    found = {str(summary["policy"]): summary for summary in summaries}
    claims = found.pop(CLAIMS, None)
    if claims is None:
        return []
    return [
        {
            "policy": policy,
            **{
                name: _less(summary[name], claims[name])
                for name in _COMPARED
                if name in summary and name in claims
            },
        }
        for policy, summary in found.items()
    ]


_COMPARED: Final = (
    "placed",
    "still_waiting",
    "allocated_pct",
    "allocated_memory_pct",
    "fragmented_pct",
    "idle_gpus",
)
_MOMENTS: Final = ("100", "late", "after")
"""The figures that are compared, of those at several moments."""


def _less(one: Any, other: Any) -> float | None:  # noqa: ANN401 - as in a summary
    if isinstance(one, Mapping):
        moment = next(each for each in _MOMENTS if each in one)
        one, other = one[moment], other[moment]
    return None if one is None or other is None else round(one - other, _DIGITS)


def _mean_of(values: Sequence[Any]) -> Any:  # noqa: ANN401 - a number, or numbers by name
    if isinstance(values[0], Mapping):
        return {key: _mean_of([value[key] for value in values]) for key in values[0]}
    average = mean(values)
    return None if average is None else round(average, _DIGITS)


def _spread_of(values: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    spread: dict[str, float | None] = {}
    for key in values[0]:
        numbers = [number for value in values if (number := value[key]) is not None]
        spread[key] = round(stdev(numbers), _DIGITS) if len(numbers) > 1 else None
    return spread


def _arrivals(story: Arrivals) -> dict[str, Any]:
    marks = {str(mark): story.at(mark) for mark in MARKS}
    return {
        **{
            name: {mark: getattr(point, name, None) for mark, point in marks.items()}
            for name in ("allocated_pct", "fragmented_pct")
        },
        "curve": {
            name: [getattr(point, name) for point in story.points]
            for name in ("arrived_pct", "allocated_pct", "fragmented_pct")
        },
    }


def _departures(story: Departures) -> dict[str, Any]:
    return {
        "asked_pct": {"late": story.asked_pct},
        "allocated_pct": {
            "mean": story.allocated_pct,
            "late": story.allocated_late_pct,
            "most": story.allocated_most_pct,
        },
        "fragmented_pct": {"late": story.fragmented_pct},
        "waited": story.waited,
        "still_waiting": story.still_waiting,
        "wait_s": {name: round(value, 2) for name, value in story.wait_s.items()},
    }


def _refit(story: Refit) -> dict[str, Any]:
    names = ("allocated_pct", "allocated_memory_pct", "fragmented_pct", "idle_gpus")
    return {
        **{
            name: {"before": getattr(story.before, name), "after": getattr(story.after, name)}
            for name in names
        },
        "unplaced": [
            {"pod": pod.pod, "reasons": dict(pod.reasons), "example": pod.example}
            for pod in story.unplaced
        ],
    }


def _rounded(value: Any) -> Any:  # noqa: ANN401 - a document, or a part of one
    match value:
        case float():
            return round(value, _DIGITS)
        case dict():
            return {key: _rounded(item) for key, item in value.items()}
        case list():
            return [_rounded(item) for item in value]
        case _:
            return value

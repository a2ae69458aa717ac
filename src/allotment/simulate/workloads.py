# SPDX-License-Identifier: Apache-2.0
"""Which pods come, and in what order: drawn from a trace's list, the same for the same seed.

As the literature does it: the list sorted by name; pods drawn from it, with repetition, until they
ask for so many times what the cluster's GPUs are; then shuffled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from allotment.model.errors import UsageError
from allotment.simulate.traces import TracePod

__all__ = ["Visit", "as_listed", "drawn", "late", "timed"]

_TURNOVER = 3
"""How many times over pods with departures ask for what they are tuned to: they come and go."""
_STEPS = 60  # of a bisection: more than a float has bits
_NEVER = 1e12


@dataclass(frozen=True, slots=True)
class Visit:
    """A pod that comes, and goes so long after it was placed. Seconds."""

    pod: TracePod
    at_s: float
    duration_s: float


def as_listed(pods: Sequence[TracePod], *, seed: int) -> list[TracePod]:
    """Return every pod once, shuffled."""
    chosen = _sorted(pods)
    _dice(seed).shuffle(chosen)
    return chosen


def drawn(
    pods: Sequence[TracePod], *, capacity_milli: int, tune: float, seed: int
) -> list[TracePod]:
    """Return pods that ask for `tune` times the capacity together; raise `UsageError`."""
    dice = _dice(seed)
    chosen = _draw(pods, milli=tune * capacity_milli, dice=dice)
    dice.shuffle(chosen)
    return chosen


def timed(
    pods: Sequence[TracePod], *, capacity_milli: int, tune: float | None, seed: int
) -> list[Visit]:
    """Return pods by when they come, each for as long as it ran; raise `UsageError`.

    With `tune`, pods are drawn, and come in the order of their times but at random moments, so many
    in a stretch of time that what is asked for at once is on average `tune` times the capacity in
    the second half of the time. (In the first the cluster fills up; and at their own times the pods
    of a trace may ask for hardly anything at once, since many run for minutes.)
    None leaves the trace as it is: every pod once, at its time.
    """
    _check_times(pods)
    dice = _dice(seed)
    chosen = _sorted(pods)
    if tune is not None:
        chosen = _draw(pods, milli=tune * capacity_milli * _TURNOVER, dice=dice)
    # A stable sort: those that come at once do so in the order in which they were drawn.
    chosen.sort(key=lambda pod: pod.created_s or 0.0)
    if tune is None:
        return [Visit(pod, pod.created_s or 0.0, pod.duration_s or 0.0) for pod in chosen]
    moments = list(accumulate((dice.expovariate(1) for _ in chosen[1:]), initial=0.0))
    factor = _pace(chosen, moments, milli=tune * capacity_milli)
    return [
        Visit(pod, moment * factor, pod.duration_s or 0.0)
        for pod, moment in zip(chosen, moments, strict=True)
    ]


def _draw(pods: Sequence[TracePod], *, milli: float, dice: Random) -> list[TracePod]:
    ordered = _sorted(pods)
    if not any(pod.shape.size_milli for pod in ordered):
        raise UsageError(
            "none of the pods asks for a GPU, so that no number of them asks for what there is",
            hint="replay the pods as they are: --tune 0",
        )
    chosen: list[TracePod] = []
    reached = 0
    while reached < milli:
        pod = dice.choice(ordered)
        chosen.append(pod)
        reached += pod.shape.size_milli
    return chosen


def _sorted(pods: Sequence[TracePod]) -> list[TracePod]:
    return sorted(pods, key=lambda pod: pod.name)


def _dice(seed: int) -> Random:
    return Random(seed)  # noqa: S311 - a sample, no secret


def _check_times(pods: Sequence[TracePod]) -> None:
    for pod in pods:
        if pod.created_s is None or pod.duration_s is None:
            where = f"line {pod.line}: " if pod.line else ""
            raise UsageError(
                f"{where}pod {pod.name!r} does not say when it came and went",
                hint="departures need the columns creation_time and deletion_time",
            )


def _pace(pods: Sequence[TracePod], moments: Sequence[float], *, milli: float) -> float:
    """Return by what to multiply the moments for the mean demand to be `milli`."""
    low, high = 0.0, 1.0
    while _demand(pods, moments, high) > milli and high < _NEVER:
        low, high = high, high * 2
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if _demand(pods, moments, middle) > milli else (low, middle)
    return high


def _demand(pods: Sequence[TracePod], moments: Sequence[float], factor: float) -> float:
    """Return the mean of what is asked for at a time."""
    end = moments[-1] * factor
    if end <= 0:
        return float("inf")
    asked = sum(
        pod.shape.size_milli * late(moment * factor, pod.duration_s or 0.0, begin=0.0, end=end)
        for pod, moment in zip(pods, moments, strict=True)
    )
    return asked / (end / 2)


def late(at_s: float, duration_s: float, *, begin: float, end: float) -> float:
    """Return for how long of the second half of the time something is there."""
    middle = (begin + end) / 2
    return max(0.0, min(at_s + duration_s, end) - max(at_s, middle))

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allotment.burn.reports import Latencies

DURATIONS = st.lists(st.integers(1, 10**13), min_size=1, max_size=200)


def histogram(durations: list[int]) -> Latencies:
    latencies = Latencies()
    for duration in durations:
        latencies.add(duration)
    return latencies


def test_no_samples_have_no_quantile() -> None:
    assert Latencies().quantile_ns(0.5) is None


@given(DURATIONS, st.sampled_from([0.0, 0.01, 0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_is_within_six_per_mille(durations: list[int], fraction: float) -> None:
    rank = max(1, math.ceil(fraction * len(durations)))
    exact = sorted(durations)[rank - 1]
    # Half a bucket, and the rounding to whole nanoseconds.
    error = exact * (2 ** (1 / 128) - 1) + 0.5
    assert histogram(durations).quantile_ns(fraction) == pytest.approx(exact, rel=0, abs=error)


@given(DURATIONS, DURATIONS)
def test_merging_is_counting_together(one: list[int], other: list[int]) -> None:
    merged = histogram(one)
    merged.merge(histogram(other))
    assert merged == histogram(one + other)


def test_a_duration_below_a_nanosecond_counts_as_one() -> None:
    assert histogram([0, -5]).quantile_ns(1.0) == 1

# SPDX-License-Identifier: Apache-2.0
"""Workloads: drawn as the literature draws them, the same for the same seed."""

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allotment.model.errors import UsageError
from allotment.simulate.csv_files import TracePod, TraceShape
from allotment.simulate.workloads import as_listed, drawn, timed


def pod(
    name: str, *, milli: int = 500, created: float | None = 0, duration: float | None = 60
) -> TracePod:
    shape = TraceShape(cpu_milli=1000, gpus=1 if milli else 0, gpu_milli=milli)
    return TracePod(name=name, shape=shape, memory_mib=1, created_s=created, duration_s=duration)


PODS = [pod(f"p-{number}", milli=100 * (number % 10)) for number in range(50)]


def test_they_are_drawn_by_the_recipe() -> None:
    """Sorted by name, drawn with repetition until there is enough, then shuffled."""
    dice = Random(42)  # noqa: S311 - a sample
    by_name = sorted(PODS, key=lambda each: each.name)
    expected: list[TracePod] = []
    while sum(each.shape.size_milli for each in expected) < 13_000:
        expected.append(dice.choice(by_name))
    dice.shuffle(expected)
    assert drawn(PODS, capacity_milli=10_000, tune=1.3, seed=42) == expected
    assert drawn(PODS[::-1], capacity_milli=10_000, tune=1.3, seed=42) == expected
    assert drawn(PODS, capacity_milli=10_000, tune=1.3, seed=43) != expected


@given(
    capacity=st.integers(1, 50_000),
    tune=st.floats(0, 3),
    seed=st.integers(0, 10),
)
def test_they_ask_for_what_they_are_tuned_to(capacity: int, tune: float, seed: int) -> None:
    sizes = [
        each.shape.size_milli for each in drawn(PODS, capacity_milli=capacity, tune=tune, seed=seed)
    ]
    assert sum(sizes) >= tune * capacity
    assert sum(sizes) < tune * capacity + 900 or not sizes


def test_as_they_are_each_comes_once() -> None:
    listed = as_listed(PODS, seed=1)
    assert sorted(each.name for each in listed) == sorted(each.name for each in PODS)
    assert listed != PODS
    assert listed == as_listed(PODS[::-1], seed=1)


def test_pods_without_gpus_cannot_be_tuned() -> None:
    with pytest.raises(UsageError, match="no pod requests a GPU"):
        drawn([pod("a", milli=0)], capacity_milli=1000, tune=1.0, seed=1)


def test_with_times_they_come_as_the_trace_has_it() -> None:
    pods = [pod("a", created=30, duration=5), pod("b", created=10), pod("c", created=30)]
    visits = timed(pods, capacity_milli=1000, tune=None, seed=1)
    assert [(each.pod.name, each.at_s, each.duration_s) for each in visits] == [
        ("b", 10, 60),
        ("a", 30, 5),
        ("c", 30, 60),
    ]


@pytest.mark.parametrize("tune", [0.3, 1.0, 1.3])
def test_with_times_they_ask_for_what_they_are_tuned_to(tune: float) -> None:
    pods = [pod(f"{n}", created=n * n, duration=1 + n % 7 * 1000) for n in range(100)]
    capacity = 100_000
    visits = timed(pods, capacity_milli=capacity, tune=tune, seed=3)
    assert all(before.at_s <= after.at_s for before, after in pairwise(visits))
    created = [each.pod.created_s or 0 for each in visits]
    assert created == sorted(created)
    end = visits[-1].at_s
    steps = [end / 2 + end * (step + 0.5) / 4000 for step in range(2000)]
    asked = [
        sum(
            each.pod.shape.size_milli
            for each in visits
            if each.at_s <= moment < each.at_s + each.duration_s
        )
        for moment in steps
    ]
    assert sum(asked) / len(asked) == pytest.approx(tune * capacity, rel=0.01)


@pytest.mark.parametrize("untimed", [pod("x", created=None), pod("x", duration=None)])
def test_without_times_nothing_can_leave(untimed: TracePod) -> None:
    with pytest.raises(UsageError, match="pod 'x' has no creation or deletion time"):
        timed([pod("a"), untimed], capacity_milli=1000, tune=1.0, seed=1)

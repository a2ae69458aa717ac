# SPDX-License-Identifier: Apache-2.0
"""Pods that come and stay: what is told of them, and that it is the same each time."""

from itertools import pairwise

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from allotment.placement.policies import POLICIES, make
from allotment.simulate.csv_files import TraceNode, TracePod, TraceShape
from allotment.simulate.outcomes import Arrivals, ReplayOutcome
from allotment.simulate.placers import ArrayPlacer
from allotment.simulate.replay import replay
from allotment.simulate.scenes import TraceScene
from allotment.simulate.workloads import generate

TRACE = generate(seed=2, scale=0.01)


def nobody(part: float) -> None:
    """Hear nothing."""
    del part


def pod(name: str, *, gpus: int = 1, milli: int = 500, models: tuple[str, ...] = ()) -> TracePod:
    shape = TraceShape(cpu_milli=1000, gpus=gpus, gpu_milli=milli, models=models)
    return TracePod(name=name, shape=shape, memory_mib=1)


def test_what_is_told_by_hand() -> None:
    """One node, two GPUs: 500, 600 and 600 go in; 500 does not fit with 400 and 400 left."""
    nodes = [TraceNode(name="n", cpu_milli=10_000, memory_mib=10, gpus=2, model="T4")]
    pods = [
        pod("a"),
        pod("b", milli=600),
        pod("c", milli=600),
        pod("d", gpus=3),
        pod("e", milli=300),
    ]
    placer = ArrayPlacer(nodes, make("first-fit"), pods=[pod("a")])
    story, counts = replay(placer, pods, capacity_milli=2000, progress=nobody)
    # b does not fit beside a, c fits beside neither.
    assert [
        (each.arrived_pct, each.allocated_pct, each.fragmented_pct) for each in story.points
    ] == [
        (25, 25, 0),
        (55, 55, 20),
        (85, 55, 20),
        (160, 55, 20),
        (175, 70, 30),
    ]
    assert (counts.placed, counts.impossible, len(counts.decided_ns)) == (3, 1, 5)
    ninety = story.at(90)
    assert ninety is not None
    assert ninety.arrived_pct == 160
    assert story.at(176) is None


def played(policy: str, seed: int) -> ReplayOutcome:
    return TraceScene(trace=TRACE).run(policy, seed, nobody)


@settings(max_examples=examples(1 / 4))
@given(policy=st.sampled_from(sorted(POLICIES)), seed=st.integers(0, 5))
def test_no_more_is_given_than_there_is_and_came(policy: str, seed: int) -> None:
    outcome = played(policy, seed)
    assert isinstance(outcome.story, Arrivals)
    points = outcome.story.points
    assert points[-1].arrived_pct >= 130
    for point in points:
        assert 0 <= point.fragmented_pct <= 100 - point.allocated_pct + 1e-9
        assert point.allocated_pct <= min(100, point.arrived_pct)
    for before, after in pairwise(points):
        assert before.arrived_pct < after.arrived_pct
        assert before.allocated_pct <= after.allocated_pct
    assert 0 < outcome.placed < outcome.pods


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_same_seed_gives_the_same(policy: str) -> None:
    one, other = played(policy, 7), played(policy, 7)
    assert one.story == other.story
    assert one.placed == other.placed
    assert played(policy, 8).story != one.story


def test_progress_is_told() -> None:
    heard: list[float] = []
    TraceScene(trace=generate(seed=2, scale=0.03)).run("first-fit", 1, heard.append)
    assert len(heard) >= 2
    assert heard == sorted(heard)
    assert 0 < heard[0] < heard[-1] <= 1

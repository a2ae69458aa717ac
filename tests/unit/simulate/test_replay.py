# SPDX-License-Identifier: Apache-2.0
"""Pods that come, wait and leave."""

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from allotment.placement.policies import POLICIES, make
from allotment.simulate.csv_files import TraceNode, TracePod, TraceShape
from allotment.simulate.outcomes import Departures
from allotment.simulate.placers import ArrayPlacer
from allotment.simulate.replay import Counts, replay_visits
from allotment.simulate.scenes import TraceScene
from allotment.simulate.workloads import Visit, generate

NODES = [TraceNode(name="n", cpu_milli=10_000, memory_mib=10, gpus=1, model="T4")]


def nobody(part: float) -> None:
    """Hear nothing."""
    del part


def visit(at_s: float, duration_s: float, *, milli: int = 1000, gpus: int = 1) -> Visit:
    shape = TraceShape(cpu_milli=1000, gpus=gpus, gpu_milli=milli)
    return Visit(TracePod(name=f"at {at_s}", shape=shape, memory_mib=1), at_s, duration_s)


def played(*visits: Visit) -> tuple[Departures, Counts]:
    placer = ArrayPlacer(NODES, make("first-fit"), pods=[each.pod for each in visits])
    told = replay_visits(placer, visits, capacity_milli=1000, progress=nobody)
    placer.check_invariants()
    return told


def test_who_leaves_makes_room() -> None:
    story, counts = played(visit(0, 10), visit(10, 10), visit(40, 0))
    assert (counts.placed, story.waited) == (3, 0)
    assert story.allocated_pct == pytest.approx(50)
    assert story.allocated_late_pct == 0
    assert story.allocated_most_pct == 100
    # Late is from 20 on.
    assert story.asked_pct == 0


def test_who_has_no_room_waits_for_it() -> None:
    story, counts = played(visit(0, 30), visit(10, 10), visit(40, 1))
    assert counts.placed == 3
    # From 10 to 30; at 40 the second has just left, and nobody is in the way.
    assert (story.waited, story.still_waiting) == (1, 0)
    assert story.wait_s == {"mean": 20, "p50": 20, "p99": 20}
    assert story.allocated_pct == pytest.approx(100)
    # Had nobody waited, from 20 on: the first until 30.
    assert story.asked_pct == pytest.approx(50)


def test_the_small_do_not_wait_for_the_large() -> None:
    story, counts = played(
        visit(0, 100, milli=600), visit(1, 5), visit(2, 20, milli=400), visit(50, 1, milli=300)
    )
    assert counts.placed == 3
    assert (story.waited, story.still_waiting) == (1, 1)
    assert story.wait_s["mean"] == 49


def test_who_waited_longest_goes_first() -> None:
    story, counts = played(visit(0, 10), visit(1, 100), visit(2, 100), visit(20, 1))
    assert (counts.placed, story.waited, story.still_waiting) == (2, 3, 2)
    assert story.wait_s["p50"] == 9


def test_who_waited_longest_goes_first_of_any_kind() -> None:
    first, second = visit(1, 100, milli=900), visit(2, 100, milli=800)
    for one, other in ((first, second), (Visit(second.pod, 1, 100), Visit(first.pod, 2, 100))):
        story, counts = played(visit(0, 10), one, other, visit(20, 1))
        assert (counts.placed, story.still_waiting) == (2, 2)
        assert story.allocated_most_pct == 100
        assert story.allocated_late_pct == one.pod.shape.size_milli / 10


def test_who_can_never_fit_does_not_wait() -> None:
    story, counts = played(visit(0, 10), visit(1, 10, gpus=2), visit(20, 1))
    assert (counts.placed, counts.impossible, story.waited) == (2, 1, 0)


def test_all_at_one_time() -> None:
    story, counts = played(visit(5, 10), visit(5, 10))
    assert (counts.placed, story.waited, story.still_waiting) == (1, 1, 1)


def test_no_time_at_all_is_enough_for_a_pod_of_no_duration() -> None:
    story, counts = played(visit(0, 0), visit(0, 0), visit(1, 0))
    assert (counts.placed, story.waited) == (3, 0)


@settings(max_examples=examples(1 / 4))
@given(
    policy=st.sampled_from(sorted(POLICIES)),
    seed=st.integers(0, 3),
    tune=st.sampled_from([0.5, 1.0, 1.5]),
)
def test_figures_hold_together(policy: str, seed: int, tune: float) -> None:
    scene = TraceScene(trace=generate(seed=4, scale=0.005), tune=tune, has_departures=True)
    outcome = scene.run(policy, seed, nobody)
    story = outcome.story
    assert isinstance(story, Departures)
    assert story.asked_pct == pytest.approx(100 * tune, rel=0.01)
    assert 0 < story.allocated_pct <= story.allocated_late_pct
    assert story.allocated_late_pct <= story.allocated_most_pct <= 100
    assert 0 <= story.fragmented_pct <= 100
    assert story.still_waiting <= story.waited
    assert outcome.placed == outcome.pods - story.still_waiting - outcome.impossible
    assert scene.run(policy, seed, nobody).story == story

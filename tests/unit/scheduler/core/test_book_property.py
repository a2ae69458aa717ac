# SPDX-License-Identifier: Apache-2.0
"""Nothing is given twice, whatever the API server, kube-scheduler and people do, and in any order.

First by chance; then, each time, the ways in which it was once. The steps are the same:
`scheduler_twin_steps`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from examples import examples
from hypothesis import settings
from scheduler_twin_steps import SchedulerSteps

from allotment.model.pods import PodUid

pytestmark = pytest.mark.timeout(600)

TestSchedulers = SchedulerSteps.TestCase
TestSchedulers.settings = settings(
    TestSchedulers.settings,
    max_examples=examples(2),
    stateful_step_count=30,
    deadline=None,
)


@pytest.fixture
def story() -> Iterator[SchedulerSteps]:
    """Three pods that want a GPU alone; the first one's is that of node a."""
    machine = SchedulerSteps()
    machine.begin(asked=[("100%", 0)] * 3)
    yield machine
    machine.teardown()


def schedule(story: SchedulerSteps, place: int, **steps: Any) -> None:  # noqa: ANN401 - as it takes them
    calm = {"between": "", "heard": "before", "fates": ["answer"], "after": "", "part": "100%"}
    story.schedule(place=place, **{**calm, **steps})
    judge(story)


def be_calm(story: SchedulerSteps) -> None:
    for _ in range(3):
        story.be_calm(seconds=8.0)
        judge(story)


def judge(story: SchedulerSteps) -> None:
    story.nothing_is_given_twice()
    story.everybody_has_what_it_asked_for()
    story.no_namespace_has_more_than_it_may()
    story.the_books_are_right()
    story.who_is_bound_has_a_booking()


def test_a_pod_changes_while_nobody_knows_whether_it_was_bound(story: SchedulerSteps) -> None:
    schedule(story, 0, fates=["lose"], after="touch", heard="after")
    schedule(story, 1)
    be_calm(story)


def test_a_pod_is_placed_anew_while_its_old_binding_goes_on(story: SchedulerSteps) -> None:
    schedule(story, 0, fates=["lose"], after="touch", heard="after")
    schedule(story, 1)
    schedule(story, 0)
    be_calm(story)
    pod = story.server.pods[PodUid("pod-0")]
    booking = story.world.leader.book.booking(PodUid("pod-0"))
    assert booking is not None
    assert booking.node == pod["spec"].get("nodeName")


def test_the_version_that_a_conflict_made_known_is_the_one_that_arrives_late(
    story: SchedulerSteps,
) -> None:
    schedule(story, 0, between="touch", heard="after", fates=["answer", "lose"])
    schedule(story, 1)
    be_calm(story)


@pytest.mark.parametrize("heard", ["before", "between", "after"])
def test_a_pod_asks_for_more_once_it_was_filtered(story: SchedulerSteps, heard: str) -> None:
    story._write(PodUid("pod-0"), "edit", "12.5%")  # noqa: SLF001 - a step of it
    schedule(story, 0, between="edit", heard=heard)
    be_calm(story)


@pytest.mark.parametrize("version", ["", "1", "999999"])
def test_somebody_pretends_that_a_pod_asks_for_less(story: SchedulerSteps, version: str) -> None:
    story.world.leader.hear()
    story.world.filter(story.server.remembered[PodUid("pod-0")], ["a"])
    story.ask(place=0, names=["a"], late="", what="pretend", pretended=("12.5%", version))
    story.ask(place=0, names=["a"], late="", what="bind", pretended=("", ""))
    be_calm(story)
    assert story.server.pods[PodUid("pod-0")]["spec"]["nodeName"] == "a"


def test_a_leader_that_has_lost_its_lease_has_a_binding_to_repeat(story: SchedulerSteps) -> None:
    schedule(story, 0, fates=["lose"], after="cut off")
    schedule(story, 1)
    be_calm(story)


def test_a_leader_has_a_binding_to_repeat_when_it_leads_again(story: SchedulerSteps) -> None:
    schedule(story, 0, fates=["lose"], after="cut off")
    schedule(story, 1)
    story.change_leader(how="cut off", seed=0)
    be_calm(story)


def test_a_leader_loses_its_lease_while_a_binding_is_under_way(story: SchedulerSteps) -> None:
    schedule(story, 0, fates=["wait"], after="cut off")
    schedule(story, 1)
    be_calm(story)


def test_a_pod_is_deleted_while_it_is_being_bound(story: SchedulerSteps) -> None:
    schedule(story, 0, fates=["wait"], after="delete", heard="after")
    be_calm(story)


def test_a_pod_that_is_gone_is_bound_late(story: SchedulerSteps) -> None:
    schedule(story, 0, between="delete", heard="after")
    be_calm(story)

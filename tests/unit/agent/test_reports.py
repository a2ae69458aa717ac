# SPDX-License-Identifier: Apache-2.0
"""What is amiss is told at once; that all is well with many pods is told in turn."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from awaiting import until

from allotment.agent.reports import AgentReports
from allotment.kube.events import Events, Reference
from allotment.metrics.agent import AgentMetrics
from allotment.model.pods import Pod, PodUid


@dataclass(frozen=True)
class Told:
    """One event."""

    name: str
    is_warning: bool
    at: float | None


@dataclass
class EventsTwin(Events):
    """Events that are made at once."""

    told: list[Told] = field(default_factory=list)

    def tell(
        self,
        about: Reference,
        *,
        reason: str,
        message: str,
        is_warning: bool,
        at: float | None = None,
    ) -> None:
        del reason, message
        self.told.append(Told(about.name, is_warning, at))


class World:
    """Reports, what became of them, and a clock."""

    def __init__(self) -> None:
        self.events = EventsTwin()
        self.now = 1000.0
        self.reports = AgentReports(
            node="n1", metrics=AgentMetrics(), events=self.events, clock=lambda: self.now
        )

    def ready(self, name: str) -> None:
        pod = Pod(uid=PodUid(name), namespace="ml", name=name)
        self.reports.pod(pod, "ShareReady", "it has it", is_warning=False)

    def refused(self, name: str) -> None:
        pod = Pod(uid=PodUid(name), namespace="ml", name=name)
        self.reports.pod(pod, "ShareRefused", "it has it not", is_warning=True)

    def names(self) -> list[str]:
        return [each.name for each in self.events.told]


def test_a_few_are_told_at_once_and_many_in_turn_with_their_own_times() -> None:
    world = World()

    async def story() -> None:
        for number in range(7):
            world.now += 1
            world.ready(f"p{number}")
        assert world.names() == ["p0", "p1", "p2", "p3", "p4"]
        world.now += 100
        await until(lambda: len(world.names()) == 7)

    asyncio.run(story())
    assert world.names() == [f"p{number}" for number in range(7)]
    assert [each.at for each in world.events.told] == [1001.0 + number for number in range(7)]


def test_what_is_amiss_waits_for_nothing() -> None:
    world = World()

    async def story() -> None:
        for number in range(50):
            world.ready(f"p{number}")
        world.refused("q")
        world.reports.node("NoCdi", "there is none", is_warning=True)

    asyncio.run(story())
    assert world.names()[-2:] == ["q", "n1"]
    assert len(world.names()) == 7


def test_nothing_is_lost_at_the_end() -> None:
    world = World()

    async def story() -> None:
        for number in range(50):
            world.ready(f"p{number}")
        world.reports.send_all()

    asyncio.run(story())
    assert world.names() == [f"p{number}" for number in range(50)]


def test_not_more_is_held_than_there_is_room_for() -> None:
    world = World()

    async def story() -> None:
        for number in range(1000):
            world.ready(f"p{number}")
        # Before the loop turns once more: on a busy machine another one's turn has come by then.
        assert len(world.names()) == 1000 - 512

    asyncio.run(story())

# SPDX-License-Identifier: Apache-2.0
"""The Service leads to whoever leads, whoever wrote before and whatever fails in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from awaiting import until

from allotment.kube.errors import ConflictError, UnreachableError
from allotment.kube.leases import Endpoint
from allotment.scheduler.leader import LeaderAddress

ONE, TWO = (Endpoint(f"198.51.100.{number}", 9447, "extender") for number in (1, 2))


@dataclass
class Slice:
    """An EndpointSlice as the API server keeps it."""

    endpoint: Endpoint | None = None
    version: int = 1
    failures: list[Exception] = field(default_factory=list)
    on_read: Callable[[], None] = lambda: None

    async def read(self) -> tuple[str, Endpoint | None]:
        await asyncio.sleep(0)
        if self.failures:
            raise self.failures.pop()
        found = str(self.version), self.endpoint
        self.on_read()
        return found

    async def write(self, endpoint: Endpoint, *, version: str) -> None:
        await asyncio.sleep(0)
        if version != str(self.version):
            raise ConflictError("changed meanwhile")
        self.version += 1
        self.endpoint = endpoint


@dataclass
class Replica:
    leads: bool
    endpoint: Endpoint


def keeping(there: Slice, replica: Replica) -> LeaderAddress:
    return LeaderAddress(
        there, lambda: replica.endpoint, leads=lambda: replica.leads, look_s=0.02, step_s=0.001
    )


def run(there: Slice, act: Callable[[Replica, Replica], object], *, leads: bool = True) -> Slice:
    """Two replicas for as long as `act` lasts."""

    async def work() -> None:
        one, two = Replica(leads, ONE), Replica(False, TWO)
        tasks = [asyncio.create_task(keeping(there, each).run()) for each in (one, two)]
        await act(one, two)  # type: ignore[misc]
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(work())
    return there


def test_it_follows_the_leader_also_when_the_one_before_is_dead() -> None:
    async def act(one: Replica, two: Replica) -> None:
        await until(lambda: there.endpoint == ONE)
        one.leads, two.leads = False, True
        await until(lambda: there.endpoint == TWO)
        # What somebody else wrote is put right.
        there.endpoint = None
        there.version += 1
        await until(lambda: there.endpoint == TWO)

    there = Slice()
    run(there, act)


def test_who_follows_writes_nothing() -> None:
    async def act(one: Replica, two: Replica) -> None:
        del one, two
        await asyncio.sleep(0.1)

    assert run(Slice(), act, leads=False).endpoint is None


def test_who_lost_the_lead_while_it_looked_does_not_write() -> None:
    async def act(one: Replica, two: Replica) -> None:
        del two
        replicas.append(one)
        await asyncio.sleep(0.1)

    replicas: list[Replica] = []

    def lose() -> None:
        for each in replicas:
            each.leads = False

    there = Slice(on_read=lose)
    run(there, act)
    assert there.version == 1


def test_an_api_server_that_is_away_is_asked_again() -> None:
    async def act(one: Replica, two: Replica) -> None:
        del one, two
        await until(lambda: there.endpoint == ONE)

    there = Slice(failures=[UnreachableError("cannot get endpoint slice")])
    run(there, act)

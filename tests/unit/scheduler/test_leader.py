# SPDX-License-Identifier: Apache-2.0
"""Who answers: it leads, and has led ever since it made sure that it knows everything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from allotment.kube.leases import LeaseCandidate, LeaseRecord, LeaseTimes
from allotment.kube.watching import Signal
from allotment.scheduler.leader import Duty, Leadership


class Feed:
    """Knows everything, and counts how often it made sure of that."""

    is_synced = True

    def __init__(self) -> None:
        self.looks = 0

    async def wait_synced(self) -> None:
        pass

    async def look(self) -> None:
        self.looks += 1
        await asyncio.sleep(0)


class Election:
    """A candidate whose clock stands still, and nobody behind it."""

    def __init__(self) -> None:
        self.candidate = LeaseCandidate("one", LeaseTimes())
        self.signal = Signal()

    def left_s(self) -> float:
        return self.candidate.left_s(now=0.0)

    def leads(self, record: LeaseRecord) -> None:
        self.candidate.written(record, began=0.0)
        self.signal.notify()


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(40):
        while not is_so():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)


@pytest.mark.parametrize("transitions", [4, 6])
def test_who_led_before_looks_again_if_somebody_else_may_have_led_since(transitions: int) -> None:
    """Its renewals were late, and by the next one another one has come, and gone."""
    feed, election, ended = Feed(), Election(), []
    leading = Leadership(feed, election, on_end=lambda: ended.append(1))  # type: ignore[arg-type]

    async def test() -> None:
        running = asyncio.create_task(leading.run())
        election.leads(LeaseRecord(holder="one", lease_s=3, transitions=4, version="1"))
        await until(lambda: leading.leads)
        election.leads(LeaseRecord(holder="one", lease_s=3, transitions=transitions, version="9"))
        is_new = transitions != 4
        # In that very moment, before anybody was told of it.
        assert leading.duty is (Duty.LOOKING if is_new else Duty.LEADING)
        assert bool(leading.left_s()) is not is_new
        await until(lambda: leading.leads)
        for _ in range(5):
            await asyncio.sleep(0)
        assert (feed.looks, len(ended)) == ((2, 1) if is_new else (1, 0))
        running.cancel()

    asyncio.run(test())

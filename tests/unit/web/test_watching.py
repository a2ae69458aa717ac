# SPDX-License-Identifier: Apache-2.0
"""Readings at a pace, and the hour of figures that is kept."""

import asyncio

from fleet_twin import FleetTwin, fleet

from allotment.model.errors import BusyError
from allotment.model.structs import replace
from allotment.web.fleet import Fleet
from allotment.web.watching import History, Watch, gpu_key, share_key


def at(moment: float, number: int = 1) -> Fleet:
    return replace(fleet(number), read_at=moment)


KEY = gpu_key("GPU-node-0000-1", "memory")
LATER = gpu_key("GPU-node-0002-0", "memory")


def test_the_history_has_each_reading_once() -> None:
    history = History()
    for moment in (10.0, 20.0, 30.0):
        history.add(at(moment))
    assert history.read([KEY]).times == [10.0, 20.0, 30.0]
    assert history.read([KEY], since=20.0).times == [30.0]
    assert history.read([KEY], since=30.0).values == [[]]


def test_what_comes_and_goes_has_no_values_before_and_after() -> None:
    history = History()
    history.add(at(10.0, 1))
    history.add(at(20.0, 3))
    history.add(at(30.0, 1))
    first, later, unknown = history.read([KEY, LATER, share_key("x", "y", "time")]).values
    assert None not in first
    assert [value is None for value in later] == [True, False, True]
    assert unknown == [None, None, None]


def test_only_the_last_hour_is_kept() -> None:
    history = History()
    history.add(at(1.0, 3))
    for minute in range(1, 100):
        history.add(at(1.0 + 60.0 * minute))
    series = history.read([KEY, LATER])
    assert len(series.times) == 60
    assert series.times[-1] == 1.0 + 60.0 * 99
    assert None not in series.values[0]
    assert set(series.values[1]) == {None}
    assert len(history._series) < len(list(fleet(3).shares())) * 2  # noqa: SLF001 - it is bounded


def test_a_share_that_comes_back_keeps_its_gap() -> None:
    history = History()
    for minute in range(50):
        history.add(at(1.0 + 60.0 * minute, 3 if minute % 20 == 0 else 1))
    values = history.read([LATER]).values[0]
    assert [place for place, value in enumerate(values) if value is not None] == [0, 20, 40]


def test_a_failed_reading_leaves_the_last_fleet_and_says_why() -> None:
    async def run() -> None:
        twin = FleetTwin(lambda _: fleet())
        watch = Watch(twin)
        await watch.step()
        twin.problem = BusyError("GPU 0 does not answer")
        with watch.subscribed() as news:
            await watch.step()
            assert news.is_set()
        assert watch.problem == "GPU 0 does not answer"
        assert len(watch.fleet.nodes) == 3
        twin.problem = None
        await watch.step()
        assert (watch.problem, watch.subscribers, watch.number) == ("", 0, 3)

    asyncio.run(run())


def test_the_first_reading_is_the_first_that_succeeds() -> None:
    async def run() -> None:
        twin = FleetTwin(lambda _: fleet())
        watch = Watch(twin)
        twin.problem = BusyError("the API server does not answer")
        first = asyncio.create_task(watch.first_reading())
        for _ in range(2):
            await asyncio.sleep(0)
            assert watch.subscribers == 1
            await watch.step()
        twin.problem = None
        await watch.step()
        await first
        assert (watch.number, watch.subscribers) == (3, 0)

    asyncio.run(run())

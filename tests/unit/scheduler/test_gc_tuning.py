# SPDX-License-Identifier: Apache-2.0
"""What is there for good is not looked through for garbage, and what comes later neither."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable, Iterator

import pytest
from awaiting import until

from allotment.scheduler.supervise import freeze_periodically


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    before = gc.get_threshold()
    gc.unfreeze()  # what other tests of this process froze
    yield
    gc.enable()
    gc.unfreeze()
    gc.set_threshold(*before)


def frozen_when(
    holds: Callable[[int], bool],
    *,
    is_quiet: Callable[[], bool] = lambda: True,
    every_s: float = 60.0,
    start_s: float = 60.0,
    is_loaded: bool = True,
) -> tuple[list[bool], int]:
    """Whether garbage was collected once loading had begun, and at the end; what is frozen.

    The end is when something holds of how much has been frozen since the loading.
    """
    collects = []
    later: list[list[object]] = []

    async def loaded() -> None:
        collects.append(gc.isenabled())
        if not is_loaded:
            await asyncio.Event().wait()

    async def work() -> None:
        task = asyncio.create_task(
            freeze_periodically(loaded, is_quiet, every_s=every_s, look_s=0.001, start_s=start_s)
        )
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        first = gc.get_freeze_count()
        later.extend([] for _ in range(10_000))
        await until(lambda: holds(gc.get_freeze_count() - first))
        collects.append(gc.isenabled())
        later.extend([[first]])
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(work())
    first = later[-1][0]
    assert isinstance(first, int)
    return collects, gc.get_freeze_count() - first


def has_grown(grown: int) -> bool:
    return grown > 9000


def test_what_is_loaded_is_frozen_and_then_garbage_is_collected() -> None:
    assert gc.get_freeze_count() == 0
    collects, _ = frozen_when(lambda _: gc.isenabled())
    assert collects == [False, True]
    assert gc.get_freeze_count() > 1000


def test_what_came_later_is_frozen_too() -> None:
    frozen_when(has_grown, every_s=0.01)


def test_it_is_waited_for_a_quiet_moment_but_not_for_ever() -> None:
    answers = [True, False, False]
    frozen_when(
        lambda grown: has_grown(grown) and not answers,
        every_s=0.05,
        is_quiet=lambda: bool(answers) and answers.pop(),
    )
    gc.unfreeze()
    frozen_when(has_grown, every_s=0.01, is_quiet=lambda: False)


def test_where_nothing_can_be_loaded_garbage_is_collected_all_the_same() -> None:
    collects, _ = frozen_when(lambda _: gc.isenabled(), start_s=0.001, is_loaded=False)
    assert collects == [False, True, True]
    assert gc.get_freeze_count() == 0

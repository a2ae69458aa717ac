# SPDX-License-Identifier: Apache-2.0
"""Background tasks: restarts failed ones, and keeps long-lived objects out of garbage collection.

Only critical tasks (feed, leader election) end the process. Others restart with backoff: exiting
would crash-loop every replica and stop all scheduling.
"""

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Final, NoReturn

import structlog

from allotment.kube.clients import Backoff

_STEADY_S: Final = 60.0
"""A task that ran for so long restarts at once."""
_log = structlog.get_logger(__name__)


async def restart_on_failure(
    part: Callable[[], Awaitable[object]],
    name: str,
    *,
    on_failure: Callable[[str], None],
    backoff: Backoff | None = None,
) -> NoReturn:
    """Run a task until it is cancelled: log each failure and restart it.

    `on_failure` gets the task's name.
    """
    loop = asyncio.get_running_loop()
    waits = backoff or Backoff(first_s=0.5, most_s=30.0)
    while True:
        began = loop.time()
        try:
            await part()
            raise AssertionError("it never ends")  # noqa: TRY301 - a failure like any other
        except Exception:  # noqa: BLE001 - whatever it is
            _log.exception("a task of the scheduler failed; restarting it", part=name)
            on_failure(name)
        if loop.time() - began >= _STEADY_S:
            waits.reset()
        await asyncio.sleep(waits.next())


_EVERY_S: Final = 3600.0
_LOOK_S: Final = 0.5
_START_S: Final = 60.0
_THRESHOLDS: Final = (50_000, 20, 100)


def freeze_objects() -> None:
    """Collect garbage once, and exclude the remaining objects from later collections."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


async def freeze_periodically(
    loaded: Callable[[], Awaitable[None]],
    is_quiet: Callable[[], bool],
    *,
    every_s: float = _EVERY_S,
    look_s: float = _LOOK_S,
    start_s: float = _START_S,
) -> NoReturn:
    """Freeze objects once all is loaded, then periodically.

    Waits for a quiet moment, for at most one more period.

    Until all is loaded nothing is collected, but for no longer than `start_s`: failed connections
    to the API server leave garbage.
    """
    gc.disable()
    try:
        async with asyncio.timeout(start_s):
            await loaded()
    except TimeoutError:
        gc.enable()
        await loaded()
    finally:
        gc.set_threshold(*_THRESHOLDS)
        gc.enable()
    freeze_objects()
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(every_s)
        latest = loop.time() + every_s
        # Quiet means the absence of events: no event to wait for.
        while not is_quiet() and loop.time() < latest:  # noqa: ASYNC110
            await asyncio.sleep(look_s)
        freeze_objects()

# SPDX-License-Identifier: Apache-2.0
"""Keeps what is there for good out of the garbage collector's sight.

A full collection over 30,000 pods takes a tenth of a second, in which nobody is answered. What has
been frozen is not looked at; what comes later is, and there is more of it with every hour. So it
is frozen anew from time to time, when nobody asks for anything.
"""

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Final, NoReturn

__all__ = ["keep_settled", "settle"]

_EVERY_S: Final = 3600.0
_LOOK_S: Final = 0.5
_START_S: Final = 60.0
_THRESHOLDS: Final = (50_000, 20, 100)


def settle() -> None:
    """Collect everything once, and look at what is left no more."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


async def keep_settled(
    loaded: Callable[[], Awaitable[None]],
    is_quiet: Callable[[], bool],
    *,
    every_s: float = _EVERY_S,
    look_s: float = _LOOK_S,
    start_s: float = _START_S,
) -> NoReturn:
    """Settle once all is loaded, and then every so often.

    It is done at a quiet moment or, where none comes for as long again, all the same.

    Until all is loaded nothing is collected, but for no longer than `start_s`: where the API server
    is away, the attempts to reach it leave garbage.
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
    settle()
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(every_s)
        latest = loop.time() + every_s
        # Quiet is that nothing happens: nobody can tell of it.
        while not is_quiet() and loop.time() < latest:  # noqa: ASYNC110
            await asyncio.sleep(look_s)
        settle()

# SPDX-License-Identifier: Apache-2.0
"""Waiting in an event loop for what tells nobody that it has come: twins, files, other tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(holds: Callable[[], object], *, within_s: float = 40.0) -> None:
    """Return when it holds; raise `TimeoutError` when it does not in so many seconds.

    What comes soon costs nothing, so that `within_s` is for the slowest of machines.
    """
    async with asyncio.timeout(within_s):
        while not holds():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)

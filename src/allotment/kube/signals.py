# SPDX-License-Identifier: Apache-2.0
"""Waking whoever waits for a change, once for any number of changes, and without a queue to fill.

What is told is only *that* something changed: whoever wakes reads the present state. So nobody who
is slow can be late by more than one look, and nothing is kept for them meanwhile.
"""

import asyncio
from collections.abc import AsyncIterator

__all__ = ["Signal"]


class Signal:
    """Something that changes. For one event loop."""

    def __init__(self) -> None:
        """Begin with nobody waiting."""
        self._listeners: set[asyncio.Event] = set()

    def notify(self) -> None:
        """Wake everyone."""
        for each in self._listeners:
            each.set()

    async def changes(self) -> AsyncIterator[None]:
        """Yield at once, and then after each change; several changes at once."""
        event = asyncio.Event()
        event.set()
        self._listeners.add(event)
        try:
            while True:
                await event.wait()
                event.clear()
                yield
        finally:
            self._listeners.discard(event)

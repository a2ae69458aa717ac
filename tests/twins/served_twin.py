# SPDX-License-Identifier: Apache-2.0
"""An application that is served by HTTP in a thread with a loop of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from aiohttp import web

from allotment.scheduler.serving import Web

T = TypeVar("T")


class Thread:
    """Where it is served."""

    def __init__(self, port: int, loop: asyncio.AbstractEventLoop) -> None:
        self.port = port
        self._loop = loop

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def do(self, what: Callable[[], T]) -> T:
        """Have something done between two answers, and return what came of it."""

        async def work() -> T:
            return what()

        return asyncio.run_coroutine_threadsafe(work(), self._loop).result(30)


@contextmanager
def in_a_thread(make: Callable[[], web.Application]) -> Iterator[Thread]:
    """Serve what is made there, until the end of the `with`."""
    ready = threading.Event()
    found: list[tuple[int, asyncio.AbstractEventLoop]] = []
    ended = asyncio.Event()

    async def serve() -> None:
        served = Web(make())
        port = await served.start(("127.0.0.1", 0))
        found.append((port, asyncio.get_running_loop()))
        ready.set()
        try:
            await ended.wait()
        finally:
            await served.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(30)
    [(port, loop)] = found
    try:
        yield Thread(port, loop)
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(30)

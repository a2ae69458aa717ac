# SPDX-License-Identifier: Apache-2.0
"""This node's object (`kube.nodes.OwnNode`) for who follows it, and their loop beside a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from allotment.kube.nodes import NodeFields


class OwnNodeTwin:
    """Says what a test lets it say, and remembers what is written into it."""

    def __init__(self, *, is_known: bool = True) -> None:
        self.current: NodeFields | None = NodeFields(name="n1", uid="u") if is_known else None
        self.written: list[tuple[str, str | None]] = []
        self._changed = asyncio.Event()

    def say(self, annotations: Mapping[str, str]) -> None:
        self.current = NodeFields(name="n1", uid="u", annotations=annotations)
        self._changed.set()

    async def changes(self) -> AsyncIterator[None]:
        while True:
            yield
            await self._changed.wait()
            self._changed.clear()

    def set_annotation(self, key: str, text: str | None) -> None:
        self.written.append((key, text))


def beside(loop: Callable[[], Awaitable[object]], test: Awaitable[None]) -> None:
    """Run a test while a loop runs, in an event loop of their own."""

    async def main() -> None:
        task = asyncio.ensure_future(loop())
        try:
            async with asyncio.timeout(40):
                await test
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.01)

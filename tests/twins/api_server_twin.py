# SPDX-License-Identifier: Apache-2.0
"""A scripted API server: it answers what the test says, and remembers what it was asked.

What the real one does is tested in tests/cluster; here is what it does only on a bad day.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from inspect import isawaitable
from random import Random
from typing import Any

from allotment.kube.clients import Api, Backoff, HttpRequest

SERVER = "https://server"


@dataclass
class Reply:
    """An answer, whole or as it comes."""

    status: int
    body: bytes | AsyncIterator[bytes]
    retry_after: str | None = None

    async def read(self) -> bytes:
        return b"".join([chunk async for chunk in self.chunks()])

    async def chunks(self) -> AsyncIterator[bytes]:
        if isinstance(self.body, bytes):
            yield self.body
        else:
            async for chunk in self.body:
                yield chunk


def answered(item: object, status: int = 200) -> Reply:
    """An answer that is an object."""
    return Reply(status, json.dumps(item).encode())


class TransportTwin:
    """A transport without a network: a function answers."""

    def __init__(self, answer: Callable[[HttpRequest], Reply | Awaitable[Reply]]) -> None:
        self._answer = answer

    @asynccontextmanager
    async def open(self, request: HttpRequest) -> AsyncIterator[Reply]:
        reply = self._answer(request)
        yield await reply if isawaitable(reply) else reply

    async def aclose(self) -> None:
        pass


def api_of(
    answer: Callable[[HttpRequest], Reply | Awaitable[Reply]], *, namespace: str = "default"
) -> Api:
    """A connection to a server that is a function."""
    return Api(TransportTwin(answer), server=SERVER, namespace=namespace)


class Watch:
    """One watch's stream: lines that the test puts in, until it ends it."""

    def __init__(self, *lines: object) -> None:
        self._chunks: asyncio.Queue[bytes | None] = asyncio.Queue()
        for line in lines:
            self.send(line)

    def send(self, line: object) -> None:
        self.send_bytes(json.dumps(line, ensure_ascii=False).encode() + b"\n")

    def send_bytes(self, chunk: bytes) -> None:
        self._chunks.put_nowait(chunk)

    def end(self) -> None:
        self._chunks.put_nowait(None)

    async def stream(self) -> AsyncIterator[bytes]:
        while (chunk := await self._chunks.get()) is not None:
            yield chunk


class Server:
    """Answers by kind of request, each with the next that is prepared; the last one for ever."""

    def __init__(self) -> None:
        self.requests: list[HttpRequest] = []
        self.lists: deque[Reply | OSError] = deque()
        self.watches: deque[Reply | OSError | Watch] = deque()
        self.writes: deque[Reply | OSError] = deque()

    def new_watch(self, *lines: object) -> Watch:
        """Prepare a watch."""
        watch = Watch(*lines)
        self.watches.append(watch)
        return watch

    def client(self) -> Api:
        return api_of(self._answer, namespace="here")

    def asked(self, kind: str) -> list[HttpRequest]:
        """All requests of a kind: lists, watches or writes."""
        return [each for each in self.requests if _kind(each) == kind]

    def bodies(self) -> list[Any]:
        """What was written."""
        return [json.loads(each.body or b"") for each in self.asked("writes")]

    async def _answer(self, request: HttpRequest) -> Reply:
        self.requests.append(request)
        await asyncio.sleep(0)  # as over a network: others come to run meanwhile
        waiting: deque[Reply | OSError | Watch] = getattr(self, _kind(request))
        answer = waiting[0] if len(waiting) == 1 else waiting.popleft()
        if isinstance(answer, Watch):
            return Reply(200, answer.stream())
        if isinstance(answer, OSError):
            raise answer
        return answer


def _kind(request: HttpRequest) -> str:
    if request.method != "GET":
        return "writes"
    return "watches" if "watch" in request.params else "lists"


def impatient() -> Backoff:
    """Pauses that tests can afford."""
    return Backoff(first_s=0.001, most_s=0.01, random=Random(1))  # noqa: S311 - the same each time


def listed(*items: object, version: str = "1", next_page: str = "") -> Reply:
    """A list of objects, as of a version."""
    metadata = {"resourceVersion": version, "continue": next_page}
    return answered({"metadata": metadata, "items": list(items)})


def refused(code: int, message: str = "no", **details: object) -> Reply:
    """A Status object."""
    status = {"kind": "Status", "code": code, "message": message, "details": details or None}
    return answered(status, code)


def pod(name: str = "train", *, version: str = "1", **changes: dict[str, Any]) -> dict[str, Any]:
    """A pod's object."""
    return {
        "metadata": {
            "name": name,
            "namespace": "ml",
            "uid": f"uid-{name}",
            "resourceVersion": version,
            "labels": None,
            **changes.pop("metadata", {}),
        },
        "spec": {"nodeName": "n1", "containers": [{"name": "main"}], **changes.pop("spec", {})},
        "status": {"phase": "Pending", **changes.pop("status", {})},
    }


def run(endless: Awaitable[object], test: Awaitable[None]) -> None:
    """Run something that never ends beside a test, bounded in time."""

    async def main() -> None:
        beside = asyncio.ensure_future(endless)
        try:
            async with asyncio.timeout(40):
                await test
        finally:
            beside.cancel()
            await asyncio.gather(beside, return_exceptions=True)
        if not beside.cancelled():
            beside.result()

    asyncio.run(main())


async def until(condition: Callable[[], object]) -> None:
    """Wait for something to become true."""
    while not condition():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.001)

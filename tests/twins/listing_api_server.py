# SPDX-License-Identifier: Apache-2.0
"""As much of an API server as a scheduler needs that binds nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from aiohttp import web


class ListingApiServer:
    """Lists, by path, and one Secret."""

    def __init__(
        self, *, forbidden: str = "", items: Mapping[str, Sequence[object]] | None = None
    ) -> None:
        self.forbidden = forbidden
        self._items = items or {}
        self.listed: set[str] = set()
        self._data: dict[str, str] = {}
        self._version = 1
        self._ended = asyncio.Event()

    def end_watches(self) -> None:
        """Every watch that is open."""
        self._ended.set()
        self._ended = asyncio.Event()

    @asynccontextmanager
    async def running(self, port: int) -> AsyncIterator[None]:
        app = web.Application()
        app.router.add_get("/api/v1/{kind}", self._list)
        app.router.add_get("/apis/policy/v1/{kind}", self._list)
        secret = "/api/v1/namespaces/allotment-system/secrets/allotment-webhook"  # noqa: S105
        app.router.add_get(secret, self._secret)
        app.router.add_patch(secret, self._secret)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            yield
        finally:
            self.end_watches()
            await runner.cleanup()

    async def _list(self, request: web.Request) -> web.StreamResponse:
        if request.path == self.forbidden:
            refusal = {"kind": "Status", "code": 403, "message": "it is forbidden"}
            return web.json_response(refusal, status=403)
        if "watch" not in request.query:
            self.listed.add(request.path)
            items = self._items.get(request.path, ())
            return web.json_response({"metadata": {"resourceVersion": "1"}, "items": [*items]})
        answer = web.StreamResponse()
        await answer.prepare(request)
        await self._ended.wait()
        return answer

    async def _secret(self, request: web.Request) -> web.Response:
        if request.method == "PATCH":
            change = json.loads(await request.read())
            self._version += 1
            self._data = {**self._data, **change["data"]}
        metadata = {
            "name": "allotment-webhook",
            "uid": "s",
            "resourceVersion": str(self._version),
        }
        return web.json_response({"metadata": metadata, "data": self._data})

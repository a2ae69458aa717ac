# SPDX-License-Identifier: Apache-2.0
"""A proxy to the API server that holds each binding for a while, and everything else not at all.

python slow_proxy.py SERVER FOLDER PORT SECONDS
"""

from __future__ import annotations

import asyncio
import ssl
import sys
from pathlib import Path

from aiohttp import ClientSession, ClientTimeout, TCPConnector, web


async def main(server: str, folder: Path, port: int, delay_s: float) -> None:
    """Serve without end."""
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    connector = TCPConnector(ssl=context, limit=0)
    timeout = ClientTimeout(total=None)
    async with ClientSession(
        connector=connector, timeout=timeout, auto_decompress=False
    ) as session:

        async def forward(request: web.Request) -> web.StreamResponse:
            if request.method == "POST" and request.path.endswith("/binding"):
                await asyncio.sleep(delay_s)
            body = await request.read()
            headers = {
                key: value
                for key, value in request.headers.items()
                if key.lower() not in {"host", "content-length", "connection"}
            }
            async with session.request(
                request.method, server + request.path_qs, data=body or None, headers=headers
            ) as answer:
                found = web.StreamResponse(status=answer.status)
                for name in ("Content-Type", "Content-Encoding"):
                    if name in answer.headers:
                        found.headers[name] = answer.headers[name]
                await found.prepare(request)
                async for chunk in answer.content.iter_any():
                    await found.write(chunk)
                await found.write_eof()
                return found

        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", forward)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "0.0.0.0", port).start()  # noqa: S104 - inside a sandbox
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))

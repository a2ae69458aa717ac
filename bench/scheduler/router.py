# SPDX-License-Identifier: Apache-2.0
"""In place of a Service: each connection goes to the replica that reports ready.

python router.py PORT REPLICA...
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence

_LOOK_S = 0.05


class Router:
    """Finds the ready replica and closes connections to others, as kube-proxy would."""

    def __init__(self, ports: Sequence[int]) -> None:
        self._ports = ports
        self._ready: int | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def look(self) -> None:
        """Look without end."""
        while True:
            found = None
            for port in self._ports:
                if await self._is_ready(port):
                    found = port
            if found != self._ready:
                self._ready = found
                for writer in list(self._open):
                    writer.close()
            await asyncio.sleep(_LOOK_S)

    async def _is_ready(self, port: int) -> bool:
        try:
            async with asyncio.timeout(1.0):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"GET /leading HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                line = await reader.readline()
                writer.close()
        except (OSError, TimeoutError):
            return False
        return b" 200 " in line

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection."""
        if self._ready is None:
            writer.close()
            return
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._ready)
        except OSError:
            writer.close()
            return
        self._open |= {writer, back}
        async with asyncio.TaskGroup() as group:
            group.create_task(_pump(reader, back))
            group.create_task(_pump(there, writer))
        self._open -= {writer, back}


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(1 << 16):
            target.write(data)
            await target.drain()
    target.close()


async def main(port: int, replicas: Sequence[int]) -> None:
    """Serve without end."""
    router = Router(replicas)
    server = await asyncio.start_server(router.serve, "0.0.0.0", port)  # noqa: S104 - in a sandbox
    async with server:
        await router.look()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), [int(each) for each in sys.argv[2:]]))

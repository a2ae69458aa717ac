# SPDX-License-Identifier: Apache-2.0
"""Ports that are known before anybody listens on them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_port() -> Iterator[int]:
    """Yield a port of 127.0.0.1 that nobody is given until the end of the `with`.

    A server that sets SO_REUSEADDR, as asyncio's do, can listen on it meanwhile.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])

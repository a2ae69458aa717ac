# SPDX-License-Identifier: Apache-2.0
"""Addresses to listen at, as options give them."""

from allotment.model.errors import UsageError

_MAX_PORT = 65535


def parse_address(text: str) -> tuple[str, int]:
    """Split `host:port`, `[v6]:port` or `:port` (all addresses); raise `UsageError`."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not port.isdecimal() or int(port) > _MAX_PORT:
        raise UsageError(
            f"{text!r} is not an address HOST:PORT", hint="for example 127.0.0.1:9446 or :9446"
        )
    return host, int(port)

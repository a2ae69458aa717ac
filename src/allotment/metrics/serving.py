# SPDX-License-Identifier: Apache-2.0
"""`/metrics`, `/healthz` and `/readyz` over HTTP, for Prometheus and the kubelet's probes.

In threads of its own: a probe has to be answered also, and above all, when the event loop hangs.
"""

import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from allotment.model.errors import PrerequisiteError, UsageError

__all__ = ["Probes", "Server", "parse_address"]

_CLIENT_S = 10.0  # a client that says nothing for so long is sent away
_MAX_PORT = 65535

Check = Callable[[], Sequence[str]]
"""Says what is amiss, each a sentence; nothing: all is well. Called in another thread, quickly."""


def _nothing() -> Sequence[str]:
    return ()


@dataclass(frozen=True, slots=True)
class Probes:
    """What the two probes ask."""

    is_healthy: Check = _nothing
    """What is amiss here makes the kubelet restart the agent."""
    is_ready: Check = _nothing
    """What is amiss here is shown, and passes."""


def parse_address(text: str) -> tuple[str, int]:
    """Take `host:port`, `[v6]:port` or `:port` (all addresses) apart; raise `UsageError`."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not port.isdecimal() or int(port) > _MAX_PORT:
        raise UsageError(
            f"{text!r} is not an address to listen at", hint="write HOST:PORT or :PORT, like :9446"
        )
    return host, int(port)


class Server:
    """Listens from its construction to `close`. Raises `PrerequisiteError` where it cannot."""

    def __init__(self, address: str, registry: CollectorRegistry, probes: Probes) -> None:
        """Listen at `address` (see `parse_address`); port 0 takes a free one."""
        host, port = parse_address(address)
        try:
            self._http = _Http((host, port), _handler(registry, probes))
        except OSError as error:
            raise PrerequisiteError(
                f"cannot listen at {address}: {error.strerror or error}",
                hint="another program has it, perhaps another agent; --metrics-address names"
                " another",
            ) from error
        self._thread = threading.Thread(
            target=self._http.serve_forever, name="metrics", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._http.server_address[1])

    def close(self) -> None:
        """Stop listening. May be called again."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(timeout=5)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a client that hangs must not keep the agent from ending
    request_queue_size = 32

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, handler)


def _handler(registry: CollectorRegistry, probes: Probes) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _CLIENT_S
        server_version = "allotment"
        sys_version = ""

        def do_GET(self) -> None:  # its name
            path = self.path.partition("?")[0]
            if path == "/metrics":
                encode, content_type = choose_encoder(self.headers.get("Accept", ""))
                self._answer(HTTPStatus.OK, encode(registry), content_type)
            elif path == "/healthz":
                self._probe(probes.is_healthy)
            elif path == "/readyz":
                self._probe(probes.is_ready)
            else:
                self._answer(HTTPStatus.NOT_FOUND, b"/metrics, /healthz, /readyz\n")

        do_HEAD = do_GET  # noqa: N815 - likewise

        def _probe(self, check: Check) -> None:
            amiss = check()
            status = HTTPStatus.SERVICE_UNAVAILABLE if amiss else HTTPStatus.OK
            self._answer(status, "".join(f"{each}\n" for each in amiss or ("ok",)).encode())

        def _answer(
            self, status: HTTPStatus, body: bytes, content_type: str = "text/plain; charset=utf-8"
        ) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name
            """Say nothing: each probe would be a line."""

    return Handler

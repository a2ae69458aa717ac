# SPDX-License-Identifier: Apache-2.0
"""`/metrics`, `/healthz` and `/readyz` over HTTP, for Prometheus and the kubelet's probes.

In threads of its own: a probe has to be answered also, and above all, when the event loop hangs.
Every pod of the cluster can come here: whoever dawdles is sent away, at once when others wait.
"""

import contextlib
import io
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from allotment.model.errors import PrerequisiteError, UsageError

__all__ = ["Check", "Probes", "Server", "parse_address"]

_WHOLE_S = 10.0  # for one request and its answer, whatever the client does
_MOMENT_S = 0.2  # for the end of one who was sent away
_MAX_CLIENTS = 16
_MAX_HEAD = 16 << 10  # bytes of a request: it has no body
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
    is_leading: Check | None = None
    """Why this replica is not the one that leads, for `/leading`; None: there is no such thing."""


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
        self._places = threading.BoundedSemaphore(_MAX_CLIENTS)
        self._began: dict[socket.socket, float] = {}
        """When each client that is served came, oldest first."""
        self._lock = threading.Lock()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - its types
        """Serve in a thread; where there are too many, in place of who has been here longest."""
        if not self._places.acquire(blocking=False):
            self._send_away(came_before=time.monotonic(), most=1)
            if not self._places.acquire(timeout=_MOMENT_S):
                self.shutdown_request(request)
                return
        with self._lock:
            self._began[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # there is no thread to be had
            self._leave(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - likewise
        """Serve, and make room for the next."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._leave(request)

    def service_actions(self) -> None:
        """Twice a second: send those away whose time is up."""
        self._send_away(came_before=time.monotonic() - _WHOLE_S)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - likewise
        """Say nothing of clients that went: they would fill the log."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def _leave(self, request: socket.socket) -> None:
        with self._lock:
            self._began.pop(request, None)
        self._places.release()

    def _send_away(self, *, came_before: float, most: int = _MAX_CLIENTS) -> None:
        with self._lock:
            late = [each for each, began in self._began.items() if began < came_before][:most]
            for each in late:
                del self._began[each]
                # Whoever reads from it or writes to it is woken by that. It may be closed already.
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)


class _Head(io.RawIOBase):
    """What a client sends, up to a limit; then it seems to have ended."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._left = _MAX_HEAD

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 - any that can be written to
        count = self._connection.recv_into(memoryview(buffer)[: self._left])
        self._left -= count
        return count


def _handler(registry: CollectorRegistry, probes: Probes) -> type[BaseHTTPRequestHandler]:
    checks = {
        "/healthz": probes.is_healthy,
        "/readyz": probes.is_ready,
        "/leading": probes.is_leading,
    }

    class Handler(BaseHTTPRequestHandler):
        timeout = _WHOLE_S
        server_version = "allotment"
        sys_version = ""

        def setup(self) -> None:
            super().setup()
            self.rfile.close()
            self.rfile = io.BufferedReader(_Head(self.connection))

        def do_GET(self) -> None:  # its name
            path = self.path.partition("?")[0]
            if path == "/metrics":
                encode, content_type = choose_encoder(self.headers.get("Accept", ""))
                self._answer(HTTPStatus.OK, encode(registry), content_type)
            elif (check := checks.get(path)) is not None:
                self._probe(check)
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

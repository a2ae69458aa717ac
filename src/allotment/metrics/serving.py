# SPDX-License-Identifier: Apache-2.0
"""`/metrics`, `/healthz` and `/readyz` over HTTP, for Prometheus and the probes of the kubelet.

Runs in separate threads, so that probes are answered even when the event loop hangs. Any pod of
the cluster may connect: a slow client is disconnected, at once if others wait.
"""

import contextlib
import io
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST

from allotment.model.addresses import parse_address
from allotment.model.errors import PrerequisiteError

_WHOLE_S = 10.0  # limit for one request and its answer
_MOMENT_S = 0.2  # for a disconnected client to end
_MAX_CLIENTS = 16
_MAX_HEAD = 16 << 10  # bytes of a request, which has no body

Check = Callable[[], Sequence[str]]
"""Returns problems as sentences; empty: none. Called from another thread; must be fast."""


More = Callable[[bool], bytes]
"""Returns further metrics in Prometheus' format, or in that of OpenMetrics."""

_OPENMETRICS = CONTENT_TYPE_LATEST.partition(";")[0]
_END = b"# EOF\n"
"""Of a text in OpenMetrics."""


def no_more(is_open: bool) -> bytes:  # noqa: FBT001 - as `More` has it
    return _END if is_open else b""


def metrics_page(registry: CollectorRegistry, more: More, accept: str) -> tuple[bytes, str]:
    """Return the text of `/metrics` and its content type, by the header `Accept`."""
    encode, content_type = choose_encoder(accept)
    text = encode(registry).removesuffix(_END)
    return text + more(content_type.startswith(_OPENMETRICS)), content_type


def _nothing() -> Sequence[str]:
    return ()


class Probes(msgspec.Struct, frozen=True):
    """The checks behind the probes."""

    is_healthy: Check = _nothing
    """A problem here makes the kubelet restart the container."""
    is_ready: Check = _nothing
    """A problem here makes the pod unready until it passes."""
    is_leading: Check | None = None
    """Why this replica is not the leader, for `/leading`; None: no such path."""


class Server:
    """An HTTP server from its construction to `close`. Raises `PrerequisiteError`."""

    def __init__(
        self,
        address: str,
        registry: CollectorRegistry,
        probes: Probes,
        more: More = no_more,
    ) -> None:
        """`address` is as in `parse_address`; port 0 selects a free port."""
        host, port = parse_address(address)
        try:
            self._http = _Http((host, port), _handler(registry, probes, more))
        except OSError as error:
            raise PrerequisiteError(
                f"cannot listen at {address}: {error.strerror or error}",
                hint="another program, perhaps another agent, uses the address; choose another one"
                " by --metrics-address",
            ) from error
        self._thread = threading.Thread(
            target=self._http.serve_forever, name="metrics", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._http.server_address[1])

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(timeout=5)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a hanging client must not delay the end of the agent
    request_queue_size = 32

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self._places = threading.BoundedSemaphore(_MAX_CLIENTS)
        self._began: dict[socket.socket, float] = {}
        """Start time of each connection, oldest first."""
        self._lock = threading.Lock()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - its types
        """Serve in a thread; if there are too many, disconnect the oldest client."""
        if not self._places.acquire(blocking=False):
            self._disconnect(began_before=time.monotonic(), most=1)
            if not self._places.acquire(timeout=_MOMENT_S):
                self.shutdown_request(request)
                return
        with self._lock:
            self._began[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread available
            self._leave(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - likewise
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._leave(request)

    def service_actions(self) -> None:
        """Disconnect clients whose time is over; called twice a second."""
        self._disconnect(began_before=time.monotonic() - _WHOLE_S)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - likewise
        """Do not log clients that disconnect: they would fill the log."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def _leave(self, request: socket.socket) -> None:
        with self._lock:
            self._began.pop(request, None)
        self._places.release()

    def _disconnect(self, *, began_before: float, most: int = _MAX_CLIENTS) -> None:
        with self._lock:
            late = [client for client, began in self._began.items() if began < began_before][:most]
            for connection in late:
                del self._began[connection]
                # This wakes the thread that reads or writes it. It may be closed already.
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


class _Head(io.RawIOBase):
    """The request of a client up to a limit; then it appears to end."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._left = _MAX_HEAD

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 - any that can be written to
        count = self._connection.recv_into(memoryview(buffer)[: self._left])
        self._left -= count
        return count


def _handler(
    registry: CollectorRegistry, probes: Probes, more: More
) -> type[BaseHTTPRequestHandler]:
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
                accept = self.headers.get("Accept", "")
                self._answer(HTTPStatus.OK, *metrics_page(registry, more, accept))
            elif (check := checks.get(path)) is not None:
                self._probe(check)
            else:
                self._answer(HTTPStatus.NOT_FOUND, b"/metrics, /healthz, /readyz\n")

        do_HEAD = do_GET  # noqa: N815 - likewise

        def _probe(self, check: Check) -> None:
            problems = check()
            status = HTTPStatus.SERVICE_UNAVAILABLE if problems else HTTPStatus.OK
            self._answer(
                status, "".join(f"{problem}\n" for problem in problems or ("ok",)).encode()
            )

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
            """Log nothing: each probe would be a line."""

    return Handler

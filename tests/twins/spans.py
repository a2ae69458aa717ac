# SPDX-License-Identifier: Apache-2.0
"""Traces as OpenTelemetry's real SDK records them, in memory or received over HTTP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from allotment.metrics.tracing import PodTraces


class RecordedTraces:
    """The traces of one process, in memory."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.traces = PodTraces(SimpleSpanProcessor(self._exporter), service="allotment-test")

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.spans]

    def span(self, name: str) -> ReadableSpan:
        (found,) = (span for span in self.spans if span.name == name)
        return found

    def times(self, name: str) -> tuple[int | None, int | None]:
        span = self.span(name)
        return span.start_time, span.end_time


class Collector:
    """An OTLP/HTTP collector."""

    def __init__(self, address: str, port: int) -> None:
        self.endpoint = f"http://{address}:{port}"
        self.requests: list[tuple[str, ExportTraceServiceRequest]] = []
        """The path and the content of each request."""

    @property
    def spans(self) -> dict[str, Any]:
        """The received spans, by service and name."""
        found = {}
        for _, request in self.requests:
            for group in request.resource_spans:
                about = {each.key: each.value.string_value for each in group.resource.attributes}
                for scope in group.scope_spans:
                    for span in scope.spans:
                        found[f"{about['service.name']}: {span.name}"] = span
        return found


def attributes(span: ReadableSpan) -> Mapping[str, Any]:
    return dict(span.attributes or {})


@contextmanager
def collector(*, address: str = "127.0.0.1", status: int = 200) -> Iterator[Collector]:
    """Receive spans until the block ends, and answer each request with a status."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.requests.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer((address, 0), Handler)
    received = Collector(address, server.server_port)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

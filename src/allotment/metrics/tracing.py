# SPDX-License-Identifier: Apache-2.0
"""Traces of pods' starts, by OpenTelemetry: one trace for each pod, over several processes.

Each process computes a trace's ids from the pod's UID, so nothing is written or sent for them. The
SDK is an extra, imported by `open_traces` alone. Spans are exported by a thread of the SDK, from a
bounded queue: no pod waits for a collector.
"""

import asyncio
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import urlsplit

import structlog

from allotment.model.errors import PrerequisiteError, UsageError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span

OPTION: Final = "--otlp-endpoint"
ENDPOINT: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
WHOLE: Final = "pod start"
"""The name of a trace's first span."""

Attributes = Mapping[str, str | int | float | bool]
Ended = Callable[[str], None]
"""Gets the problem of what was measured; empty: none."""

_TRACES_ENDPOINT: Final = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_PATH: Final = "/v1/traces"
_LIBRARY: Final = "opentelemetry"
_CLOSE_S: Final = 2.0
_AGAIN_S: Final = 3600.0
"""Before a problem of the export is logged once more."""

_log = structlog.get_logger(__name__)


class Traced(Protocol):
    """A pod, by any of its structs."""

    @property
    def uid(self) -> str: ...
    @property
    def namespace(self) -> str: ...
    @property
    def name(self) -> str: ...


def traces_endpoint(option: str | None, environment: Mapping[str, str]) -> str | None:
    """Return the URL for spans, by the option or by OpenTelemetry's variables; None: no traces.

    Raises `UsageError` for a URL or a protocol that cannot be used.
    """

    def value(name: str) -> str:
        return environment.get(name, "").strip()

    if value("OTEL_SDK_DISABLED").lower() == "true" or value("OTEL_TRACES_EXPORTER") == "none":
        return None
    for name, written in ((OPTION, option), (_TRACES_ENDPOINT, None), (ENDPOINT, None)):
        text = written or (value(name) if name != OPTION else "")
        if not text:
            continue
        _check(name, text)
        for kind in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
            if value(kind) not in {"", "http/protobuf"}:
                raise UsageError(
                    f"{kind} is {value(kind)!r}: traces are sent by http/protobuf alone",
                    hint="remove the variable, and name the collector's port for HTTP: 4318",
                )
        return text if name == _TRACES_ENDPOINT else text.rstrip("/") + _PATH
    return None


def _check(name: str, text: str) -> None:
    try:
        url = urlsplit(text)
        is_usable = url.scheme in {"http", "https"} and bool(url.hostname) and url.port != 0
    except ValueError:
        is_usable = False
    if not is_usable:
        raise UsageError(
            f"{name} is {text!r}, which is not the URL of a collector",
            hint="write its address for OTLP over HTTP: http://collector.monitoring:4318",
        )


def trace_ids(uid: str) -> tuple[int, int]:
    """Return the id of a pod's trace and of its first span.

    Not the UID itself: a UUID has fixed bits, by which a sampler of ratios would choose all or
    none.
    """
    digest = hashlib.sha256(uid.encode()).digest()
    return int.from_bytes(digest[:16]), int.from_bytes(digest[16:24])


class PodTraces:
    """Records the spans of pods' traces, from the event loop's thread."""

    def __init__(
        self, processor: "SpanProcessor", *, service: str, attributes: Attributes | None = None
    ) -> None:
        """`service` and `attributes` of the resource yield to OpenTelemetry's variables."""
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

        class Ids(RandomIdGenerator):
            """Random ids, and for the first span of a pod's trace those of the pod."""

            pod: tuple[int, int] | None = None

            def generate_trace_id(self) -> int:
                return self.pod[0] if self.pod else super().generate_trace_id()

            def generate_span_id(self) -> int:
                return self.pod[1] if self.pod else super().generate_span_id()

        self._ids = Ids()
        resource = Resource.create({"service.name": service, **(attributes or {})})
        self._provider: TracerProvider = TracerProvider(
            resource=resource.merge(OTELResourceDetector().detect()),
            id_generator=self._ids,
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("allotment")

    def record(
        self,
        name: str,
        pod: Traced,
        *,
        began_ns: int,
        ended_ns: int,
        attributes: Attributes | None = None,
        problem: str = "",
    ) -> None:
        """Record what was measured. Times are nanoseconds after the epoch."""
        span = self._tracer.start_span(
            name,
            self._context(pod.uid),
            start_time=began_ns,
            attributes={**_named(pod), **(attributes or {})},
        )
        _set_problem(span, problem)
        span.end(max(began_ns, ended_ns))

    def record_whole(
        self, pod: Traced, *, began_ns: int, ended_ns: int, attributes: Attributes | None = None
    ) -> None:
        """Record the first span of a pod's trace, to which all others belong. Once."""
        from opentelemetry.context import Context

        self._ids.pod = trace_ids(pod.uid)
        try:
            span = self._tracer.start_span(
                WHOLE,
                Context(),
                start_time=began_ns,
                attributes={**_named(pod), **(attributes or {})},
            )
        finally:
            self._ids.pod = None
        span.end(max(began_ns, ended_ns))

    @contextmanager
    def measure(
        self, name: str, pod: Traced | None = None, attributes: Attributes | None = None
    ) -> Iterator[Ended]:
        """Measure a block. Without a pod it is a part of the block that is measured around it."""
        with self._tracer.start_as_current_span(
            name,
            None if pod is None else self._context(pod.uid),
            attributes={**({} if pod is None else _named(pod)), **(attributes or {})},
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            said = ""

            def ended(problem: str) -> None:
                nonlocal said
                said = problem

            try:
                yield ended
            except BaseException as error:
                said = said or type(error).__name__
                raise
            finally:
                _set_problem(span, said)

    async def close(self) -> None:
        """Export what is left, for a moment at most."""
        # The SDK's own limit does not hold for a request in progress.
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        await asyncio.to_thread(thread.join, _CLOSE_S)

    def _context(self, uid: str) -> "Context":
        """Return the first span of a pod's trace as the parent, sampled as in all processes."""
        from opentelemetry.context import Context
        from opentelemetry.sdk.trace.sampling import Decision
        from opentelemetry.trace import (
            NonRecordingSpan,
            SpanContext,
            TraceFlags,
            set_span_in_context,
        )

        trace, span = trace_ids(uid)
        decision = self._provider.sampler.should_sample(None, trace, WHOLE).decision
        is_sampled = decision is Decision.RECORD_AND_SAMPLE
        flags = TraceFlags(TraceFlags.SAMPLED if is_sampled else TraceFlags.DEFAULT)
        parent = SpanContext(trace, span, is_remote=True, trace_flags=flags)
        return set_span_in_context(NonRecordingSpan(parent), Context())


def _named(pod: Traced) -> dict[str, str]:
    return {
        "k8s.pod.uid": pod.uid,
        "k8s.pod.name": pod.name,
        "k8s.namespace.name": pod.namespace,
    }


def _set_problem(span: "Span", problem: str) -> None:
    if problem:
        from opentelemetry.trace import Status, StatusCode

        span.set_status(Status(StatusCode.ERROR, problem))


class _Complaints(logging.Handler):
    """Passes the SDK's warnings on to our log: each logger's first one, and again after an hour."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._last: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        if now - self._last.get(record.name, -_AGAIN_S) < _AGAIN_S:
            return
        self._last[record.name] = now
        _log.warning("traces: pods go on without them", why=record.getMessage(), logger=record.name)


def open_traces(
    option: str | None,
    environment: Mapping[str, str],
    *,
    service: str,
    attributes: Attributes | None = None,
) -> PodTraces | None:
    """Return the traces, if an endpoint is configured; the SDK reads its other variables itself.

    Raises `UsageError` for a wrong setting, `PrerequisiteError` without the SDK. A collector that
    does not answer is logged later, once.
    """
    endpoint = traces_endpoint(option, environment)
    if endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise PrerequisiteError(
            f"traces for {endpoint} need {error.name}, which is not installed",
            hint="install Allotment with it, from its wheel: pip install"
            f" 'WHEEL[kubernetes,tracing]'; or remove {OPTION} and {ENDPOINT}",
        ) from error
    logger = logging.getLogger(_LIBRARY)
    logger.propagate = False
    logger.handlers = [_Complaints()]
    try:
        processor = BatchSpanProcessor(OTLPSpanExporter(endpoint))
        traces = PodTraces(processor, service=service, attributes=attributes)
    except ValueError as error:
        raise UsageError(
            f"traces for {endpoint}: {error}", hint="look at the variables OTEL_..."
        ) from error
    _log.info("tracing the start of pods", endpoint=endpoint)
    return traces

# SPDX-License-Identifier: Apache-2.0
"""Queries to Prometheus, or to what answers like it (Thanos, Mimir, VictoriaMetrics).

Every wait and every answer is bounded. Values that are no numbers are left out.
"""

import asyncio
import math
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit, urlunsplit

import aiohttp
import msgspec

from allotment.kube.errors import reason_of
from allotment.model.errors import AllotError, UsageError
from allotment.model.formats import shortened
from allotment.model.structs import prepared

_WAIT: Final = aiohttp.ClientTimeout(total=120.0, sock_connect=5.0)
_MOST_BYTES: Final = 256 << 20
"""Of an answer: a day of 10,000 GPUs has 40 MiB."""
_MOST_QUERIES: Final = 4
"""At a time: others ask the same Prometheus."""
_LONGEST_ERROR: Final = 300
_HINT: Final = "write its address, like http://127.0.0.1:9090"


class PrometheusError(AllotError):
    """Prometheus does not answer, or not this query."""


class TimeSeries(msgspec.Struct, frozen=True):
    """A series of an answer: numbers by time, in seconds after the epoch."""

    labels: Mapping[str, str]
    points: tuple[tuple[float, float], ...]

    def label(self, name: str) -> str:
        """Return a label of the metric; empty: it has none.

        Where a target has a label of this name itself, Prometheus has renamed that of the metric.
        """
        return self.labels.get(f"exported_{name}") or self.labels.get(name, "")


class _Found(msgspec.Struct, frozen=True):
    metric: dict[str, str]
    value: tuple[float, str] | None = None
    values: list[tuple[float, str]] = []


class _Data(msgspec.Struct, frozen=True):
    result: list[_Found]


class _Answer(msgspec.Struct, frozen=True):
    status: str
    data: _Data | None = None
    error: str = ""
    warnings: list[str] = []


class Prometheus:
    """A client, made by `connect`. Queries may run in parallel."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url
        self._at_once = asyncio.Semaphore(_MOST_QUERIES)
        self.warnings: list[str] = []
        """Of its answers: parts that it could not read."""

    async def instant(self, query: str, at: float) -> list[TimeSeries]:
        """Return one point for each series. Raises `PrometheusError`."""
        return await self._ask("query", {"query": query, "time": f"{at:.3f}"})

    async def over(
        self, query: str, *, start: float, end: float, step_s: float
    ) -> list[TimeSeries]:
        """Return points from start to end, both included. Raises `PrometheusError`."""
        times = {"start": f"{start:.3f}", "end": f"{end:.3f}", "step": f"{step_s:.0f}"}
        return await self._ask("query_range", {"query": query, **times})

    async def _ask(self, what: str, form: Mapping[str, str]) -> list[TimeSeries]:
        url = f"{self._url}/api/v1/{what}"
        try:
            async with self._at_once, self._session.post(url, data=form) as response:
                status, body = response.status, await _body(response)
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is one
            raise self._away(error) from error
        try:
            answer = msgspec.json.decode(body, type=prepared(_Answer))
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise self._no_prometheus(status) from error
        if answer.data is None or answer.status != "success":
            text = shortened(answer.error or f"status {status}", _LONGEST_ERROR)
            raise PrometheusError(f"Prometheus at {shown(self._url)} refuses a query: {text}")
        self.warnings += [each for each in answer.warnings if each not in self.warnings]
        return [
            TimeSeries(found.metric, points)
            for found in answer.data.result
            if (points := tuple(_points(found)))
        ]

    def _away(self, error: Exception) -> PrometheusError:
        if isinstance(error, TimeoutError):
            what = f"does not answer within {_WAIT.total:.0f} s"
        elif isinstance(error, ssl.SSLError | aiohttp.ClientSSLError):
            what = f"has no certificate that is trusted here: {error}"
        elif isinstance(error, aiohttp.ClientConnectorError):
            what = f"cannot be reached: {reason_of(error.os_error)}"
        else:
            what = f"closes the connection: {str(error) or type(error).__name__}"
        return PrometheusError(
            f"Prometheus at {shown(self._url)} {what}",
            hint="give the address that serves its page /graph; in a cluster, for example after:"
            " kubectl port-forward -n monitoring svc/prometheus 9090",
        )

    def _no_prometheus(self, status: int) -> PrometheusError:
        hint = "give the address that serves its page /graph"
        if status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
            hint = "give user and password in the address, or an address behind the proxy"
        return PrometheusError(
            f"{shown(self._url)} does not answer as Prometheus does (HTTP status {status})",
            hint=hint,
        )


async def _body(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > _MOST_BYTES:
            raise PrometheusError(
                f"an answer of Prometheus has more than {_MOST_BYTES >> 20} MiB",
                hint="give --namespace or fewer --days",
            )
    return bytes(body)


def _points(found: _Found) -> "list[tuple[float, float]]":
    values = found.values if found.value is None else [found.value]
    points = []
    for time, text in values:
        try:
            number = float(text)
        except ValueError:
            continue
        if math.isfinite(number):
            points.append((time, number))
    return points


@asynccontextmanager
async def connect(url: str) -> AsyncIterator[Prometheus]:
    """Connect by an address; nothing is sent yet. Raises `UsageError`."""
    base = parsed(url)
    async with aiohttp.ClientSession(timeout=_WAIT) as session:
        yield Prometheus(session, base)


def parsed(url: str) -> str:
    """Check an address. Raises `UsageError`."""
    base = url.rstrip("/")
    try:
        parts = urlsplit(base)
    except ValueError as error:
        raise UsageError(f"the address of Prometheus is none: {error}", hint=_HINT) from error
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query:
        raise UsageError(f"{shown(url)!r} is no address of Prometheus", hint=_HINT)
    return base


def shown(url: str) -> str:
    """Return an address without its user and password."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))

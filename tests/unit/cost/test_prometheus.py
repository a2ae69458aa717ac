# SPDX-License-Identifier: Apache-2.0
"""The client of Prometheus: what is no answer is named, with the next step."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from allotment.cost.history import Span, past_bill
from allotment.cost.prices import Prices
from allotment.cost.prometheus import PrometheusError, TimeSeries, connect, shown
from allotment.model.errors import NotFoundError, UsageError

OK = '{"status":"success","data":{"resultType":"vector","result":[%s]}%s}'


@contextmanager
def serving(body: str, status: int = 200) -> Iterator[str]:
    """The address of a server that gives every query this answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def asked(url: str) -> tuple[list[TimeSeries], list[str]]:
    async def ask() -> tuple[list[TimeSeries], list[str]]:
        async with connect(url) as prometheus:
            return await prometheus.instant("up", 0), prometheus.warnings

    return asyncio.run(ask())


def test_values_that_are_no_numbers_are_left_out() -> None:
    one = '{"metric":{"share":"a","namespace":"agents","exported_namespace":"ml"},"value":[1,"2"]}'
    others = [f'{{"metric":{{}},"value":[1,"{text}"]}}' for text in ("NaN", "+Inf", "x")]
    with serving(OK % (",".join([one, *others]), ',"warnings":["a store is away"]')) as url:
        (series,), warnings = asked(f"{url}/")
    assert series.points == ((1.0, 2.0),)
    # A target's own label goes before the metric's in Prometheus, which renames that.
    assert (series.label("namespace"), series.label("pod")) == ("ml", "")
    assert warnings == ["a store is away"]


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ('{"status":"error","error":"parse error: x"}', 400, "refuses a query: parse error: x"),
        ("<html>", 200, "does not answer as Prometheus does"),
        ("<html>", 401, r"status 401"),
        ('{"status":"success"}', 200, "refuses a query: status 200"),
    ],
)
def test_what_is_no_answer(body: str, status: int, says: str) -> None:
    with serving(body, status) as url, pytest.raises(PrometheusError, match=says):
        asked(url)


def test_a_password_is_in_no_error() -> None:
    with pytest.raises(PrometheusError, match="Connection refused") as error:
        asked("http://me:secret@127.0.0.1:1")
    assert "secret" not in str(error.value)
    for url in ("prometheus:9090", "ftp://a", "http://", "http://a?x=1", "http://[::1"):
        with pytest.raises(UsageError, match="address of Prometheus"):
            asked(url)
    assert shown("https://me:secret@host:1/p") == "https://host:1/p"


def test_a_prometheus_without_our_metrics() -> None:
    async def read(url: str) -> None:
        async with connect(url) as prometheus:
            await past_bill(prometheus, Span(1e9, 2), Prices())

    with serving(OK % ("", "")) as url, pytest.raises(NotFoundError, match="the last 2 days"):
        asyncio.run(read(url))


def test_a_span_has_the_same_instants_in_each_hour() -> None:
    first, last = Span(1_000_000_250.0, 2).ends()
    assert last == 999_999_899 + 300
    assert last - first == 86400
    assert (last + 1) % 300 == 0

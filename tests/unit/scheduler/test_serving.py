# SPDX-License-Identifier: Apache-2.0
"""The scheduler over HTTP, held to its own description by schemathesis, and on bad requests."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from scheduler_twin import Bindery, Told, book_of, node
from schemathesis.specs.openapi.checks import negative_data_rejection

from allotment.kube.cluster_feed import ClusterPod
from allotment.metrics.scheduler import SchedulerMetrics
from allotment.metrics.serving import Probes
from allotment.scheduler import serving
from allotment.scheduler.binding import Binder
from allotment.scheduler.extender import Extender
from allotment.scheduler.nominations import NominatedCluster
from allotment.scheduler.preempting import Preemption
from allotment.scheduler.serving import Web, application

DOCUMENT = Path(__file__).parents[3] / "docs" / "reference" / "extender-openapi.yaml"
LIMIT = 1 << 20
NO_PODS: dict[str, ClusterPod] = {}

schema = schemathesis.openapi.from_path(DOCUMENT)


@dataclass
class Duty:
    leads: bool = True


@dataclass(frozen=True)
class Served:
    port: int
    duty: Duty
    metrics: SchedulerMetrics


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """The real application, in a thread with a loop of its own."""
    duty, metrics = Duty(), SchedulerMetrics()
    ready: list[int] = []
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        book = book_of([node("a"), node("b")])
        binder = Binder(book, Bindery(), clock=time.monotonic)
        extender = Extender(book, binder, told=Told(), pods=NO_PODS.get, leads=lambda: duty.leads)
        app = application(
            {
                "filter": extender.filter,
                "prioritize": extender.prioritize,
                "bind": extender.bind,
                "preempt": Preemption(
                    NominatedCluster(), pods=NO_PODS.get, leads=lambda: duty.leads, echo_s=0.0
                ).preempt,
            },
            probes=Probes(is_leading=lambda: [] if duty.leads else ["another replica leads"]),
            registry=metrics.registry,
            on_answer=lambda verb, seconds, _: metrics.observe("request_seconds", seconds, verb),
            max_body_bytes=LIMIT,
        )
        web = Web(app)
        ready.append(await web.start(("127.0.0.1", 0)))
        try:
            await asyncio.Event().wait()
        finally:
            await web.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(_until_stopped(serve())))
    thread.start()
    while not ready:
        time.sleep(0.01)
    yield Served(ready[0], duty, metrics)
    loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
    thread.join(10)
    loop.close()


async def _until_stopped(work: object) -> None:
    try:
        await work  # type: ignore[misc]
    except asyncio.CancelledError:
        return


@schema.parametrize()
@settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
def test_everything_is_as_described(case: schemathesis.Case[Any], served: Served) -> None:
    served.duty.leads = True
    case.call_and_validate(
        base_url=f"http://127.0.0.1:{served.port}",
        # What is not looked at is passed over, as everywhere where Go's JSON is spoken.
        excluded_checks=[negative_data_rejection],
    )


def ask(served: Served, method: str, path: str, body: bytes | None = None) -> tuple[int, str, str]:
    connection = HTTPConnection("127.0.0.1", served.port, timeout=10)
    try:
        connection.request(method, path, body=body)
        answer = connection.getresponse()
        return answer.status, answer.headers.get("Content-Type", ""), answer.read().decode()
    finally:
        connection.close()


@pytest.mark.parametrize("verb", ["filter", "prioritize", "bind", "preempt"])
def test_what_is_no_question_is_refused_with_the_next_step(served: Served, verb: str) -> None:
    served.duty.leads = True
    for body in (b"", b"{", b"[]", b'{"Pod": 3}', b"\xff" * 50, b"[" * 100_000):
        status, kind, text = ask(served, "POST", f"/{verb}", body)
        assert status == 400, (body[:10], text)
        assert kind.startswith("application/json")
        assert "Pod" in text


def test_a_body_beyond_the_limit_is_refused(served: Served) -> None:
    assert ask(served, "POST", "/filter", b" " * (LIMIT + 1))[0] == 413


def test_who_follows_says_so(served: Served) -> None:
    served.duty.leads = False
    assert ask(served, "GET", "/leading")[0] == 503
    assert ask(served, "GET", "/readyz")[0] == 200
    assert ask(served, "GET", "/healthz")[0] == 200
    status, _, text = ask(served, "POST", "/filter", b"{}")
    assert status == 503
    assert "another replica" in text


@pytest.mark.parametrize("leads", [True, False])
def test_only_who_leads_keeps_a_connection(served: Served, leads: bool) -> None:  # noqa: FBT001
    """Who keeps one to a replica that follows would ask it for ever."""
    served.duty.leads = leads
    connection = HTTPConnection("127.0.0.1", served.port, timeout=10)
    try:
        connection.request("POST", "/filter", body=b'{"Pod": {"metadata": {"uid": "u"}}}')
        answer = connection.getresponse()
        answer.read()
        assert answer.will_close is not leads
    finally:
        connection.close()


def test_calls_are_counted(served: Served) -> None:
    served.duty.leads = True
    ask(served, "POST", "/filter", b"{}")
    _, kind, text = ask(served, "GET", "/metrics")
    assert kind.startswith("text/plain")
    assert 'allotment_scheduler_request_seconds_count{verb="filter"}' in text


@pytest.mark.parametrize(("method", "path"), [("GET", "/filter"), ("POST", "/"), ("GET", "/x")])
def test_other_paths_and_methods_are_not_there(served: Served, method: str, path: str) -> None:
    assert ask(served, method, path)[0] in {404, 405}


def test_a_body_that_does_not_end_is_not_waited_for(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "_READ_S", 0.1)
    connection = HTTPConnection("127.0.0.1", served.port, timeout=10)
    try:
        connection.putrequest("POST", "/filter")
        connection.putheader("Content-Length", "10")
        connection.endheaders(b"{")
        assert connection.getresponse().status == 408
    finally:
        connection.close()

# SPDX-License-Identifier: Apache-2.0
"""Traces of pods by the real SDK: ids, settings, and OTLP over HTTP."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import msgspec
import pytest
import structlog
from spans import RecordedTraces, attributes, collector

from allotment.metrics.tracing import open_traces, trace_ids, traces_endpoint
from allotment.model.errors import UsageError

URL = "http://collector:4318"


class Pod(msgspec.Struct, frozen=True):
    uid: str = "3c5b6a2e-9d0f-4a2e-8b1c-0a1b2c3d4e5f"
    namespace: str = "ml"
    name: str = "train"


def test_processes_record_one_trace_without_having_met() -> None:
    scheduler, agent = RecordedTraces(), RecordedTraces()
    scheduler.traces.record("filter", Pod(), began_ns=5, ended_ns=7, attributes={"nodes": 3})
    agent.traces.record("Allocate", Pod(), began_ns=8, ended_ns=9, problem="no room")
    agent.traces.record_whole(Pod(), began_ns=1, ended_ns=10)
    spans = [scheduler.span("filter"), agent.span("Allocate"), agent.span("pod start")]
    assert {span.context.trace_id for span in spans} == {trace_ids(Pod().uid)[0]}
    chosen, allocated, whole = spans
    assert whole.parent is None
    assert whole.context.span_id == trace_ids(Pod().uid)[1]
    for part in (chosen, allocated):
        assert part.parent is not None
        assert part.parent.span_id == whole.context.span_id
    assert (chosen.start_time, chosen.end_time) == (5, 7)
    assert attributes(chosen) == {
        "k8s.pod.uid": Pod().uid,
        "k8s.pod.name": "train",
        "k8s.namespace.name": "ml",
        "nodes": 3,
    }
    assert allocated.status.description == "no room"
    assert agent.span("Allocate").resource.attributes["service.name"] == "allotment-test"


def test_a_part_belongs_to_what_is_measured_around_it_also_in_a_task() -> None:
    recorded = RecordedTraces()

    async def request() -> None:
        with recorded.traces.measure("request") as ended:
            ended("conflict")

    async def bind() -> None:
        with recorded.traces.measure("bind", Pod()):
            await asyncio.create_task(request())

    asyncio.run(bind())
    assert recorded.span("request").parent == recorded.span("bind").context
    assert recorded.span("request").status.description == "conflict"
    assert recorded.span("bind").context.trace_id == trace_ids(Pod().uid)[0]


def test_all_processes_sample_the_same_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    first, second = RecordedTraces(), RecordedTraces()
    pods = [
        Pod(uid=f"0000000{number:x}-0000-4000-8000-00000000000{number:x}") for number in range(16)
    ]
    for pod in pods:
        first.traces.record("filter", pod, began_ns=1, ended_ns=2)
        second.traces.record_whole(pod, began_ns=1, ended_ns=2)
    chosen = [{attributes(span)["k8s.pod.uid"] for span in each.spans} for each in (first, second)]
    assert chosen[0] == chosen[1]
    assert 2 < len(chosen[0]) < 14  # the fixed bits of the UIDs would choose all or none


@pytest.mark.parametrize(
    ("option", "environment", "endpoint"),
    [
        pytest.param(None, {}, None, id="off"),
        pytest.param(None, {"OTEL_EXPORTER_OTLP_ENDPOINT": " "}, None, id="empty is unset"),
        pytest.param(f"{URL}/", {}, f"{URL}/v1/traces", id="option"),
        pytest.param(None, {"OTEL_EXPORTER_OTLP_ENDPOINT": URL}, f"{URL}/v1/traces", id="variable"),
        pytest.param(
            None,
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": URL,
                "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t/x",
            },
            "http://t/x",
            id="variable of traces is the whole URL",
        ),
        pytest.param(URL, {"OTEL_SDK_DISABLED": "true"}, None, id="disabled"),
        pytest.param(URL, {"OTEL_TRACES_EXPORTER": "none"}, None, id="no exporter"),
    ],
)
def test_the_endpoint_follows_the_option_and_the_standard_variables(
    option: str | None, environment: dict[str, str], endpoint: str | None
) -> None:
    assert traces_endpoint(option, environment) == endpoint


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4318"}, "OTEL_EXPORTER_OTLP_ENDPOINT is"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://"}, "not the URL of a collector"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:port"}, "not the URL of a collector"),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": URL, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc'",
        ),
    ],
)
def test_a_wrong_setting_is_refused_at_the_start(environment: dict[str, str], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        open_traces(None, environment, service="allotment-test")


def test_spans_arrive_over_http_with_the_names_of_the_standard_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "gpus")
    with collector() as received:
        traces = open_traces(received.endpoint, {}, service="allotment-test")
        assert traces is not None
        traces.record("filter", Pod(), began_ns=10**18, ended_ns=10**18 + 1)
        asyncio.run(traces.close())
    assert [path for path, _ in received.requests] == ["/v1/traces"]
    span = received.spans["gpus: filter"]
    assert int.from_bytes(span.trace_id) == trace_ids(Pod().uid)[0]


def test_a_collector_that_refuses_is_logged_once_and_holds_up_nothing() -> None:
    with collector(status=400) as received, structlog.testing.capture_logs() as lines:
        traces = open_traces(received.endpoint, {}, service="allotment-test")
        assert traces is not None
        for _ in range(3):
            traces.record("filter", Pod(), began_ns=1, ended_ns=2)
            traces._provider.force_flush()  # noqa: SLF001 - in place of waiting
        asyncio.run(traces.close())
    assert len(received.requests) == 3
    warnings = [line for line in lines if line["log_level"] == "warning"]
    assert [line["event"] for line in warnings] == ["traces: pods go on without them"]
    assert "400" in warnings[0]["why"]


def test_nothing_of_it_is_loaded_without_an_endpoint() -> None:
    program = (
        "import sys, allotment.agent.running, allotment.scheduler.running as s;"
        "assert s.open_traces(None, {}, service='') is None;"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert done.stdout == "[]\n"

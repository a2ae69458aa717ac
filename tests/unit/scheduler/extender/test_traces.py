# SPDX-License-Identifier: Apache-2.0
"""The scheduler's spans of a pod: webhook, filter, waits, bind."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from pod_reviews import admitted, container, pod
from scheduler_twin import Bindery, Told, book_of, cluster_pod_of, node, pod_json
from spans import RecordedTraces, attributes

from allotment.kube.errors import UnreachableError
from allotment.model.clusters import ClusterPod
from allotment.scheduler.admission.webhook import (
    REVIEWED,
    PodWebhook,
    WebhookSettings,
    review_times,
)
from allotment.scheduler.extender.binder import Binder, TracedBindings
from allotment.scheduler.extender.extender import Extender
from allotment.scheduler.reports import SchedulingTraces

LARGE = {"allotment.dev/gpu": "1", "allotment.dev/gpu-memory": "60Gi"}


class Scene:
    """Two nodes of one GPU each, and a traced scheduler."""

    def __init__(self) -> None:
        self.recorded = RecordedTraces()
        traces = self.recorded.traces
        self.bindery = Bindery()
        self.book = book_of([node("a", 1), node("b", 1)])
        self.pods: dict[str, ClusterPod] = {}
        self.extender = Extender(
            self.book,
            Binder(
                self.book,
                TracedBindings(self.bindery, traces.measure),
                clock=lambda: 1.0,
            ),
            observer=Told(),
            pods=self.pods.get,
            traces=SchedulingTraces(traces),
        )

    def filter(
        self,
        name: str = "train",
        *names: str,
        is_heard: bool = True,
        **fields: Any,  # noqa: ANN401 - of `pod_json`
    ) -> list[str]:
        written = pod_json(name, **fields)
        if is_heard:
            heard = cluster_pod_of(written)
            self.pods[heard.uid] = heard
            self.bindery.add(heard)
        body = {"Pod": written, "Nodes": None, "NodeNames": list(names or ("a", "b"))}
        answer = json.loads(self.extender.filter(json.dumps(body).encode()))
        return list(answer["NodeNames"] or ())

    def bind(self, name: str, where: str) -> str:
        body = {"PodName": name, "PodNamespace": "ml", "PodUID": f"uid-{name}", "Node": where}
        answer = asyncio.run(self.extender.bind(json.dumps(body).encode()))
        return str(json.loads(answer)["Error"])


def test_a_pod_that_fits_has_filter_wait_and_bind_with_its_request() -> None:
    scene = Scene()
    (chosen, *_) = scene.filter()
    assert scene.bind("train", chosen) == ""
    recorded = scene.recorded
    assert recorded.names == [
        "filter",
        "wait for bind",
        "bind: request to the API server",
        "bind",
    ]
    assert attributes(recorded.span("filter")) == {
        "k8s.pod.uid": "uid-train",
        "k8s.pod.name": "train",
        "k8s.namespace.name": "ml",
        "allotment.nodes": 2,
        "allotment.nodes_returned": 2,
        "allotment.requests": 1,
    }
    assert recorded.times("wait for bind")[0] == recorded.times("filter")[1]
    assert recorded.span("bind: request to the API server").parent == recorded.span("bind").context
    assert attributes(recorded.span("bind"))["k8s.node.name"] == chosen


def test_a_pod_that_waits_has_its_first_refusal_and_the_answer_that_fits() -> None:
    scene = Scene()
    assert scene.filter("first", limits=LARGE, annotations={}) != []
    assert scene.bind("first", "a") == ""
    before = len(scene.recorded.spans)
    for _ in range(3):
        assert scene.filter("second", "a", limits=LARGE) == []
    assert scene.filter("second", "a", "b", limits=LARGE) == ["b"]
    refused, waited, fitted = scene.recorded.spans[before:]
    assert (refused.name, waited.name, fitted.name) == ("filter", "wait for room", "filter")
    assert "need a GPU with 60Gi, have" in str(refused.status.description)
    assert (waited.start_time, waited.end_time) == (refused.end_time, fitted.start_time)
    assert attributes(fitted)["allotment.requests"] == 4


def test_a_bind_without_an_answer_shows_each_request() -> None:
    scene = Scene()
    scene.bindery.answers.append(UnreachableError("no answer"))
    (chosen, *_) = scene.filter()
    assert scene.bind("train", chosen) == ""
    failed, done = (
        span for span in scene.recorded.spans if span.name == "bind: request to the API server"
    )
    assert failed.status.description == "no answer"
    assert done.status.description is None


def test_pods_that_the_watch_has_not_reported_leave_no_traces() -> None:
    scene = Scene()
    assert scene.filter(is_heard=False) != []
    assert scene.recorded.spans == ()


def test_the_webhook_notes_its_times_only_with_traces() -> None:
    asked = pod(container(gpu="1", memory="4Gi"))
    began = time.time_ns()
    traced = PodWebhook((), settings=WebhookSettings(notes_times=True))
    plain = PodWebhook(())
    assert REVIEWED not in admitted(plain, asked)["metadata"].get("annotations", {})
    written = admitted(traced, asked)["metadata"]["annotations"][REVIEWED]
    times = review_times(written)
    assert times is not None
    assert began - 1000 <= times[0] <= times[1] <= time.time_ns()


def test_the_review_is_a_span_of_the_pod_that_was_made_of_it() -> None:
    scene = Scene()
    scene.filter(annotations={REVIEWED: "1000-1234"})
    assert scene.recorded.times("webhook") == (1_000_000, 1_234_000)


def test_times_that_no_webhook_wrote_count_for_nothing() -> None:
    late = str(time.time_ns())[:16]
    for text in ("", "7", "9-5", "-", "a-b", "1-2-3", f"5-{'9' * 17}", f"{late}-{late[:-1]}9" * 2):
        scene = Scene()
        scene.filter(annotations={REVIEWED: text})
        assert scene.recorded.names == ["filter"], text

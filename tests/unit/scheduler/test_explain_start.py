# SPDX-License-Identifier: Apache-2.0
"""Where the start of a pod went, by the API server's times."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from api_server_twin import Reply, answered, api_of

from allotment.cli.why import start_lines
from allotment.kube.clients import HttpRequest
from allotment.scheduler.explain_evidence import AskedPod
from allotment.scheduler.explain_start import PodStart, read_start

Json = dict[str, Any]


def at(second: int) -> str:
    return f"2026-01-01T00:00:{second:02}Z"


def pod(*, node: str = "a", restarts: int = 0, started: int = 9) -> Json:
    conditions = {"PodScheduled": 1, "PodReadyToStartContainers": 3, "Ready": 9}
    return {
        "metadata": {"name": "it", "namespace": "ml", "uid": "u", "creationTimestamp": at(0)},
        "spec": {"nodeName": node, "containers": [{"name": "main"}]},
        "status": {
            "conditions": [
                {"type": kind, "status": "True", "lastTransitionTime": at(second)}
                for kind, second in conditions.items()
            ],
            "containerStatuses": [
                {
                    "name": "main",
                    "restartCount": restarts,
                    "state": {"running": {"startedAt": at(started)}},
                }
            ],
        },
    }


def event(reason: str, second: int) -> Json:
    return {"metadata": {}, "reason": reason, "firstTimestamp": at(second)}


EVENTS = [event("ShareReady", 8), event("Pulled", 7), event("Scheduled", 1), event("Pulled", 5)]


def start_of(document: Json, events: list[Json] | None) -> PodStart:
    def answer(request: HttpRequest) -> Reply:
        assert request.path == "/api/v1/namespaces/ml/events"
        assert request.params == {"fieldSelector": "involvedObject.uid=u"}
        if events is None:
            return answered({"kind": "Status", "code": 403, "message": "no"}, 403)
        return answered({"metadata": {}, "items": events})

    async def read() -> PodStart:
        async with api_of(answer) as api:
            return await read_start(api, msgspec.convert(document, AskedPod))

    return asyncio.run(read())


def test_the_steps_of_a_start_follow_one_another() -> None:
    start = start_of(pod(), EVENTS)
    assert [(step.text, step.seconds) for step in start.steps] == [
        ("a node was chosen", 1),
        ("volumes and network were ready", 2),
        ("its images were there", 4),
        ("its share was made", 1),
        ("its containers had started", 1),
    ]
    assert (start.seconds, start.notes) == (9, ())
    assert list(start_lines(start))[:2] == [
        "  its start took 9 s, in whole seconds:",
        "       1 s  until a node was chosen",
    ]


def test_a_restart_hides_the_first_start_and_says_so() -> None:
    start = start_of(pod(restarts=1, started=50), EVENTS)
    assert [step.text for step in start.steps][-1] == "volumes and network were ready"
    assert "a container has restarted" in start.notes[0]


def test_without_events_their_steps_are_left_out() -> None:
    denied, old = start_of(pod(), None), start_of(pod(), [event("Scheduled", 1)])
    for start in (denied, old):
        assert [step.text for step in start.steps] == [
            "a node was chosen",
            "volumes and network were ready",
            "its containers had started",
        ]
    assert denied.notes == ("its events cannot be read",)
    assert "its share has no event" in old.notes[0]


def test_a_waiting_pod_has_no_start() -> None:
    assert start_of(pod(node=""), None) == PodStart()

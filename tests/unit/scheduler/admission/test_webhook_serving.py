# SPDX-License-Identifier: Apache-2.0
"""The webhook by HTTP: whatever is sent gets an answer, and the next one gets its own."""

from __future__ import annotations

import asyncio
import io
import json
import time

import pytest
from aiohttp.test_utils import TestClient, TestServer

from allotment.scheduler.admission.review import MAX_REVIEW_BYTES, Reply
from allotment.scheduler.admission.webhook import PATH, PodWebhook
from allotment.scheduler.serving import webhook_application

REVIEW = {
    "apiVersion": "admission.k8s.io/v1",
    "kind": "AdmissionReview",
    "request": {
        "uid": "1",
        "operation": "CREATE",
        "resource": {"version": "v1", "resource": "pods"},
        "object": {"spec": {"containers": [{"name": "a"}]}},
    },
}


def asked(method: str, path: str, body: bytes = b"") -> tuple[int, str, bytes, list[int]]:
    """Status, type and body of an answer, and the statuses that were observed."""
    observed: list[int] = []

    async def ask() -> tuple[int, str, bytes]:
        app = webhook_application(
            PodWebhook(()), on_answer=lambda _, status: observed.append(status)
        )
        async with TestClient(TestServer(app)) as client:
            answer = await client.request(method, path, data=io.BytesIO(body))
            return answer.status, answer.content_type, await answer.read()

    return *asyncio.run(ask()), observed


def test_a_review_is_answered() -> None:
    status, kind, body, observed = asked("POST", PATH, json.dumps(REVIEW).encode())
    assert (status, kind, observed) == (200, "application/json", [200])
    assert json.loads(body)["response"] == {"uid": "1", "allowed": True}


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", PATH, b"{", 400),
        ("POST", PATH, b"x" * (MAX_REVIEW_BYTES + 1), 413),
        ("GET", PATH, b"", 405),
        ("POST", "/", b"", 404),
        ("GET", "/healthz", b"", 200),
    ],
    ids=["malformed", "huge", "get", "elsewhere", "health"],
)
def test_whatever_else_is_asked_has_its_status(
    method: str, path: str, body: bytes, status: int
) -> None:
    assert asked(method, path, body)[0] == status


def test_a_defect_is_an_error_and_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RecursionError

    monkeypatch.setattr(PodWebhook, "review", fail)
    status, _, body, observed = asked("POST", PATH, json.dumps(REVIEW).encode())
    assert (status, observed) == (500, [500])
    assert b"see the scheduler's log" in body


def test_reviews_that_take_long_leave_others_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def mutate(_: PodWebhook, body: bytes) -> Reply:
        del body
        time.sleep(0.03)
        return Reply(200, b"{}")

    monkeypatch.setattr(PodWebhook, "mutate", mutate)

    async def test() -> tuple[int, float]:
        turns = 0
        async with TestClient(TestServer(webhook_application(PodWebhook(())))) as client:
            asked = [asyncio.create_task(client.post(PATH, data=b"{}")) for _ in range(10)]
            began = time.monotonic()
            while not all(each.done() for each in asked):
                await asyncio.sleep(0.001)
                turns += 1
            assert {each.result().status for each in asked} == {200}
        return turns, time.monotonic() - began

    turns, took_s = asyncio.run(test())
    assert took_s >= 10 * 0.03 * 1.8
    # One in each pause is certain, however slow the machine.
    assert turns >= 9

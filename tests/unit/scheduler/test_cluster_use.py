# SPDX-License-Identifier: Apache-2.0
"""The use of shares, asked of each node's agent through the API server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from api_server_twin import Reply, answered, api_of
from served_cluster import agent_pod

from allotment.kube.clients import HttpRequest
from allotment.kube.errors import DeniedError
from allotment.scheduler.cluster_use import NodeUse, read_cluster_use

PODS = "/api/v1/namespaces/allotment-system/pods"
PAGE = (
    b'allotment_use_read{what="shares"} 1\n'
    b'allotment_share_memory_used_bytes{gpu="GPU-a",node="a",share="s",pod="p"} 5\n'
)


def served(*pods: Any, pages: dict[str, Any], **options: Any) -> dict[str, NodeUse]:  # noqa: ANN401 - JSON
    asked = []

    async def answer(request: HttpRequest) -> Reply:
        if request.path == PODS:
            assert request.params["labelSelector"] == (
                "app.kubernetes.io/name=allotment,app.kubernetes.io/component=agent"
            )
            return answered({"metadata": {}, "items": list(pods)})
        asked.append(request.path)
        page = pages[request.path.removeprefix(PODS + "/").removesuffix("/proxy/metrics")]
        if page is None:
            await asyncio.Event().wait()
        return Reply(200, page) if isinstance(page, bytes) else answered(page, page["code"])

    async def read() -> dict[str, NodeUse]:
        async with api_of(answer) as api:
            found = await read_cluster_use(api, **options)
            return {each.node: each for each in found}

    found = asyncio.run(read())
    assert len(asked) == len(set(asked))
    return found


def test_each_agent_is_asked_and_missing_ones_are_named() -> None:
    pods = (
        agent_pod("a"),
        agent_pod("b", port=9999),
        agent_pod("c", is_ready=False, waiting="ImagePullBackOff"),
        agent_pod("d"),
        agent_pod("e"),
    )
    broken = {"kind": "Status", "code": 503, "message": "error trying to reach service: refused"}
    pages = {
        "agent-a:9446": PAGE,
        "agent-b:9999": PAGE,
        "agent-c:9446": broken,
        "agent-d:9446": b"<html>",
        "agent-e:9446": None,
    }
    found = served(*pods, pages=pages, nodes=("a", "b", "c", "d", "e", "f"), agent_s=0.05)
    assert [each.memory_used for name in "ab" if (one := found[name].use) for each in one.shares]
    assert {name: each.problem for name, each in found.items()} == {
        "a": "",
        "b": "",
        "c": "container agent: ImagePullBackOff",
        "d": "the answer of pod allotment-system/agent-d has no metrics of use",
        "e": "no answer within 0.05 s",
        "f": "it has no agent",
    }


def test_all_of_it_ends_in_time() -> None:
    found = served(
        agent_pod("a"), agent_pod("b"), pages=dict.fromkeys(("agent-a:9446", "agent-b:9446")),
        most_at_once=1, agent_s=60, all_s=0.05,
    )  # fmt: skip
    assert {each.problem for each in found.values()} == {"no answer within 0.05 s"}


def test_a_reader_without_the_right_is_refused_once() -> None:
    refusal = {"kind": "Status", "code": 403, "message": "cannot get pods/proxy"}
    pods = (agent_pod("a"), agent_pod("b"))
    found = served(*pods, pages={"agent-a:9446": refusal}, most_at_once=1)
    assert all(each.is_denied and "pods/proxy" in each.problem for each in found.values())


def test_agents_that_cannot_be_listed_are_an_error() -> None:
    async def read() -> None:
        def answer(_: HttpRequest) -> Reply:
            return answered({"kind": "Status", "code": 403, "message": "no"}, 403)

        async with api_of(answer) as api:
            await read_cluster_use(api)

    with pytest.raises(DeniedError, match="list pods in namespace allotment-system"):
        asyncio.run(read())


def test_of_two_agents_of_a_node_the_ready_one_is_asked() -> None:
    old = agent_pod("a", name="old")
    new = agent_pod("a", name="new", is_ready=False, created="2026-02-01T00:00:00Z")
    assert served(old, new, pages={"old:9446": PAGE})["a"].use is not None

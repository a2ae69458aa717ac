# SPDX-License-Identifier: Apache-2.0
"""A node's pods, on a server's bad days: nothing is lost, nothing is made up."""

from __future__ import annotations

import asyncio

import pytest
from api_server_twin import Reply, Server, impatient, listed, pod, refused, run, until

from allotment.kube import nodes as pods_module
from allotment.kube import watching
from allotment.kube.nodes import NodePods
from allotment.model.pods import PodUid

OURS = {"allotment.dev/class": "latency"}


def names(pods: NodePods) -> set[str]:
    return {each.name for each in pods.all()}


def event(kind: str, item: object) -> dict[str, object]:
    return {"type": kind, "object": item}


@pytest.fixture
def pods(server: Server) -> NodePods:
    return NodePods(server.client(), node="n1", backoff=impatient())


def test_it_lists_then_hears_of_changes_and_asks_for_this_node_alone(
    pods: NodePods,
    server: Server,
) -> None:
    server.lists.append(listed(pod("a"), pod("b"), version="7"))
    watch = server.new_watch()

    async def test() -> None:
        await until(lambda: pods.is_synced)
        assert names(pods) == {"a", "b"}
        watch.send(event("ADDED", pod("c", version="8")))
        watch.send(event("DELETED", pod("a", version="9")))
        watch.send(event("MODIFIED", pod("b", version="10", status={"phase": "Failed"})))
        await until(lambda: names(pods) == {"b", "c"})
        await until(lambda: pods.get(PodUid("uid-b")).has_ended)  # type: ignore[union-attr]

    run(pods.run(), test())
    assert {each.params["fieldSelector"] for each in server.requests} == {"spec.nodeName=n1"}
    assert "resourceVersion" not in server.requests[0].params  # as new as the request
    assert server.asked("watches")[0].params["resourceVersion"] == "7"
    assert server.asked("watches")[0].params["allowWatchBookmarks"] == "true"


def test_a_watch_goes_on_where_the_last_one_ended(
    pods: NodePods,
    server: Server,
) -> None:
    server.lists.append(listed(version="7"))
    server.new_watch(event("ADDED", pod("a", version="12"))).end()
    server.new_watch(event("BOOKMARK", pod("", version="30"))).end()
    server.new_watch()

    async def test() -> None:
        await until(lambda: len(server.asked("watches")) == 3)

    run(pods.run(), test())
    versions = [each.params["resourceVersion"] for each in server.asked("watches")]
    assert versions == ["7", "12", "30"]
    assert len(server.asked("lists")) == 1
    assert names(pods) == {"a"}


def test_a_list_comes_in_pages_and_counts_when_it_is_whole(
    pods: NodePods,
    server: Server,
) -> None:
    server.lists.extend(
        [
            listed(pod("a"), version="7", next_page="p2"),
            refused(410),  # it took too long: from the start
            listed(pod("b"), version="8", next_page="p2"),
            listed(pod("c"), version="8", next_page="p3"),
            listed(pod("d"), version="8"),
        ]
    )
    server.new_watch()

    async def test() -> None:
        async for _ in pods.changes():
            assert not pods.all() or names(pods) == {"b", "c", "d"}
            if pods.is_synced:
                break
        await until(lambda: server.asked("watches"))

    run(pods.run(), test())
    asked = [each.params.get("continue") for each in server.asked("lists")]
    assert asked == [None, "p2", None, "p2", "p3"]
    assert {each.params["fieldSelector"] for each in server.requests} == {"spec.nodeName=n1"}
    assert {each.params["limit"] for each in server.asked("lists")} == {"50"}
    assert server.asked("watches")[0].params["resourceVersion"] == "8"


@pytest.mark.parametrize("is_inside", [True, False], ids=["in the stream", "as the answer"])
def test_what_lies_too_far_back_is_listed_anew_and_what_differs_is_a_change(
    pods: NodePods,
    server: Server,
    *,
    is_inside: bool,
) -> None:
    server.lists.extend(
        [listed(pod("a"), pod("b")), listed(pod("b"), pod("c"), version="50"), listed()]
    )
    if is_inside:
        server.new_watch(event("ERROR", {"kind": "Status", "code": 410}))
    else:
        server.watches.append(refused(410))
    server.new_watch()

    async def test() -> None:
        heard = 0
        async for _ in pods.changes():
            heard += 1
            if names(pods) == {"b", "c"}:
                break
        assert heard <= 3  # the start, the first list, the second

    run(pods.run(), test())
    assert server.asked("watches")[-1].params["resourceVersion"] == "50"
    assert pods.problem is None


def test_while_the_server_is_away_it_keeps_what_it_knows_and_says_so(
    pods: NodePods,
    server: Server,
) -> None:
    server.lists.append(listed(pod("a")))
    first = server.new_watch()
    away = ConnectionRefusedError("Connection refused")
    server.watches.extend([away, away, away, away])
    back = server.new_watch()

    async def test() -> None:
        await until(lambda: server.asked("watches"))
        first.end()
        await until(lambda: pods.problem is not None)
        assert names(pods) == {"a"}
        assert pods.is_synced
        await until(lambda: pods.problem is None)  # before anything is told
        back.send(event("ADDED", pod("b", version="3")))
        await until(lambda: names(pods) == {"a", "b"})

    run(pods.run(), test())
    assert len(server.asked("lists")) == 1


def test_a_refusal_says_which_right_is_missing(pods: NodePods, server: Server) -> None:
    server.lists.append(refused(403, 'pods is forbidden: User "agent" cannot list resource "pods"'))

    async def test() -> None:
        await until(lambda: pods.problem is not None)
        assert not pods.is_synced
        await until(lambda: len(server.asked("lists")) > 2)  # someone may give the right meanwhile

    run(pods.run(), test())
    problem = pods.problem
    assert problem is not None
    assert 'cannot list resource "pods"' in problem.message
    assert problem.hint is not None
    assert "list pods of node n1" in problem.hint


def test_a_line_is_a_line_whatever_characters_are_in_it(
    pods: NodePods,
    server: Server,
) -> None:
    server.lists.append(listed())
    watch = server.new_watch()
    odd = "next\u0085line\u2028and\x1cmore"

    async def test() -> None:
        watch.send(event("ADDED", pod("a", metadata={"annotations": {"note": odd}})))
        await until(pods.all)
        for piece in (
            b'{"type":"DEL',
            b'ETED","object":{"metadata":{"uid":"uid-a"},"spec":{}}',
            b"}\n",
        ):
            watch.send_bytes(piece)
        await until(lambda: not pods.all())

    run(pods.run(), test())
    assert len(server.asked("watches")) == 1


def test_what_is_not_understood_is_a_problem_and_not_the_end(
    pods: NodePods,
    server: Server,
) -> None:
    server.lists.extend([Reply(200, b"<html>log in here</html>")] * 4 + [listed()])
    server.new_watch()

    async def test() -> None:
        await until(lambda: pods.problem is not None)
        await until(lambda: pods.is_synced)

    run(pods.run(), test())
    assert pods.problem is None


def test_changes_that_do_not_concern_us_wake_nobody(
    pods: NodePods,
    server: Server,
) -> None:
    server.lists.append(listed(pod("a")))
    watch = server.new_watch()
    woken = 0

    async def count() -> None:
        nonlocal woken
        async for _ in pods.changes():
            woken += 1

    async def test() -> None:
        await until(lambda: server.asked("watches"))
        counting = asyncio.create_task(count())
        await until(lambda: woken == 1)
        for version in "23456789":
            item = pod("a", version=version, status={"podIP": f"10.0.0.{version}"})
            watch.send(event("MODIFIED", item))
            await asyncio.sleep(0.005)  # so that each is heard by itself
        watch.send(event("MODIFIED", pod("a", version="10", metadata={"annotations": OURS})))
        await until(lambda: pods.all()[0].annotations)
        await until(lambda: woken == 2)
        counting.cancel()

    run(pods.run(), test())
    assert woken == 2


def test_it_waits_for_a_pod_and_does_not_trust_a_silent_connection(
    pods: NodePods,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pods_module, "_DOUBT_S", 0.02)
    monkeypatch.setattr(watching, "_RECHECK_S", 0.0)
    server.lists.extend([listed(), listed(pod("a"), version="5"), listed(pod("a"), version="5")])
    server.new_watch()  # dead: nothing will ever come
    server.new_watch()

    async def test() -> None:
        await until(lambda: server.asked("watches"))
        found = await pods.wait_for(PodUid("uid-a"), timeout_s=40)
        assert found is not None
        assert str(found) == "ml/a"
        assert await pods.wait_for(PodUid("uid-b"), timeout_s=0.05) is None

    run(pods.run(), test())


def test_a_pod_that_has_a_uid_goes_before_one_that_only_says_so(
    pods: NodePods,
    server: Server,
) -> None:
    lie = {"annotations": {"kubernetes.io/config.mirror": "uid-victim"}}
    server.lists.append(listed(pod("liar", metadata=lie), pod("victim")))
    server.new_watch()

    async def test() -> None:
        await until(lambda: pods.is_synced)
        found = pods.get(PodUid("uid-victim"))
        assert found is not None
        assert found.name == "victim"

    run(pods.run(), test())

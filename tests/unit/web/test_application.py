# SPDX-License-Identifier: Apache-2.0
"""The routes: who gets in, what each page has, what a browser is told to allow."""

from __future__ import annotations

import asyncio
import csv
import io
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import CookieJar, web
from aiohttp.test_utils import TestClient, TestServer
from fleet_twin import FleetTwin, fleet

from allotment.model.errors import StateError
from allotment.web.application import Pages
from allotment.web.fleet import Sight
from allotment.web.guarding import POLICY, LinkGuard, RateLimit, Viewer
from allotment.web.watching import Watch

Client = TestClient[web.Request, web.Application]
PATHS = ("/", "/gpus", "/shares", "/events", "/nodes/node-0001", "/gpus/GPU-node-0001-1")


class Known(LinkGuard):
    """A guard that knows everybody, with a sight that the test sets."""

    sight = Sight()

    async def viewer(self, request: object) -> Viewer:
        del request
        return Viewer("anne", self.sight)


def with_pages(
    test: Callable[[Client, LinkGuard], Awaitable[None]],
    *,
    guard: type[LinkGuard] = Known,
    limit: RateLimit | None = None,
) -> None:
    """Run a test with a client of pages that have been read once."""

    async def run() -> None:
        watch = Watch(FleetTwin(lambda tick: fleet(tick=tick), pace_s=1000))
        pages = Pages(watch, title="test")
        made = guard(pages.refusal)
        await watch.step()
        server = TestServer(pages.application(made, limit))
        async with TestClient(server, cookie_jar=CookieJar(unsafe=True)) as client:
            await test(client, made)

    asyncio.run(run())


def test_without_its_key_there_is_nothing_to_see() -> None:
    async def test(client: Client, guard: LinkGuard) -> None:
        for path in (*PATHS, "/live", "/history?gpu=GPU-node-0001-1", "/?key=wrong", "/none"):
            answer = await client.get(path)
            assert answer.status == 401
            assert "node-" not in await answer.text()
        answer = await client.get("/shares?q=ml&key=" + guard.key, allow_redirects=False)
        assert (answer.status, answer.headers["Location"]) == (303, "/shares?q=ml")
        cookie = answer.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert guard.key not in cookie
        assert (await client.get("/shares")).status == 200

    with_pages(test, guard=LinkGuard)


def test_every_answer_has_the_policy_and_is_not_stored() -> None:
    async def test(client: Client, _: LinkGuard) -> None:
        for path in (*PATHS, "/none", "/gpus/none", "/?sort=none", "/healthz"):
            answer = await client.get(path)
            assert answer.headers["Content-Security-Policy"] == POLICY, path
            assert answer.headers["Cache-Control"] == "no-store"
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert "unsafe" not in POLICY

    with_pages(test)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/none", 404),
        ("/gpus/none", 404),
        ("/nodes/none", 404),
        ("/shares/none", 404),
        ("/history?share=none", 200),
        ("/history?gpu=none", 404),
        ("/history?figure=none&gpu=GPU-node-0001-1", 400),
        ("/history", 400),
        ("/history?node=node-0001&since=x", 400),
        ("/?sort=none", 400),
        ("/?by=none", 400),
        ("/gpus?format=none", 400),
        ("/gpus?page=-1&sort=none", 200),
        ("/?page=99999999999", 200),
        ("/static/0/page.js", 404),
        ("/static/../application.py", 404),
    ],
)
def test_a_wrong_address_is_refused_and_no_defect(path: str, status: int) -> None:
    async def test(client: Client, _: LinkGuard) -> None:
        assert (await client.get(path)).status == status

    with_pages(test)


def test_texts_of_others_are_no_markup() -> None:
    async def test(client: Client, _: LinkGuard) -> None:
        text = await (await client.get("/events")).text()
        assert "&lt;b&gt;no room" in text
        assert "<b>no room" not in text
        text = await (await client.get("/?q=%3Cscript%3E")).text()
        assert "<script>" not in text

    with_pages(test)


def test_a_table_is_saved_whole_as_it_is_filtered() -> None:
    async def test(client: Client, _: LinkGuard) -> None:
        answer = await client.get("/shares?q=web&sort=-memory_used_bytes&format=csv")
        rows = list(csv.DictReader(io.StringIO(await answer.text())))
        used = [int(row["memory_used_bytes"]) for row in rows]
        assert used == sorted(used, reverse=True)
        assert {row["namespace"] for row in rows} == {"web"}
        same = (await (await client.get("/shares?q=web&format=json")).json())["shares"]
        assert len(same) == len(rows)
        events = await (await client.get("/events?format=csv")).text()
        assert "'=cmd()" in events

    with_pages(test)


def test_a_viewer_finds_nothing_of_others_by_any_address() -> None:
    class Narrow(Known):
        none = frozenset({"none"})
        sight = Sight(sees_nodes=False, namespaces=none, quotas=none, events=none)

    async def test(client: Client, _: LinkGuard) -> None:
        for path in ("/", "/gpus?format=json", "/shares?format=csv", "/events"):
            answer = await client.get(path)
            assert answer.status == 200
            text = await answer.text()
            assert "node-0" not in text
            assert "train" not in text
        for path in ("/nodes/node-0001", "/gpus/GPU-node-0001-1", "/shares/share-10"):
            assert (await client.get(path)).status == 404
        for query in ("node=node-0001", "gpu=GPU-node-0001-1"):
            assert (await client.get(f"/history?{query}")).status == 404
        assert (await (await client.get("/history?share=share-10")).json())["names"] == []

    with_pages(test, guard=Narrow)


def test_the_live_part_is_the_page_without_its_frame() -> None:
    async def test(client: Client, _: LinkGuard) -> None:
        whole = await (await client.get("/nodes/node-0001")).text()
        part = await (await client.get("/nodes/node-0001", headers={"X-Part": "live"})).text()
        assert "<html" not in part
        assert part.strip() in whole

    with_pages(test)


@pytest.mark.parametrize("path", ["/", "/gpus", "/shares", "/events"])
def test_a_page_that_was_never_read_has_no_figures(path: str) -> None:
    async def run() -> None:
        source = FleetTwin(lambda tick: fleet(tick=tick), pace_s=1000)
        source.problem = StateError("no answer")
        watch = Watch(source)
        pages = Pages(watch, title="test")
        async with TestClient(TestServer(pages.application(Known(pages.refusal)))) as client:
            await watch.step()
            for headers in ({}, {"X-Part": "live"}):
                text = await (await client.get(path, headers=headers)).text()
                assert "cannot read: no answer" in text
                assert "Nothing has been read yet." in text
                assert "<h1>" not in text

    asyncio.run(run())


def test_each_reading_is_announced() -> None:
    async def run() -> None:
        watch = Watch(FleetTwin(lambda tick: fleet(tick=tick), pace_s=0.01))
        pages = Pages(watch, title="test")
        async with TestClient(TestServer(pages.application(Known(pages.refusal)))) as client:
            answer = await client.get("/live")
            assert answer.content_type == "text/event-stream"
            seen = [await answer.content.readline() for _ in range(8)]
            assert seen.count(b"event: reading\n") == 2
            answer.close()
            history = await (await client.get("/history?node=node-0001&figure=time")).json()
            assert history["names"] == ["GPU 0", "GPU 1"]
            assert len(history["times"]) == len(history["values"][0])

    asyncio.run(run())


def test_a_reading_that_ended_before_the_stream_began_is_announced() -> None:
    async def test(client: Client, _: LinkGuard) -> None:
        text = await (await client.get("/")).text()
        number = text.partition('data-number="')[2].partition('"')[0]
        for query, headers in (("?seen=0", {}), (f"?seen={number}", {"Last-Event-ID": "0"})):
            answer = await client.get(f"/live{query}", headers=headers)
            async with asyncio.timeout(10):
                assert await answer.content.readline() == f"id: {number}\n".encode()
            answer.close()
        answer = await client.get(f"/live?seen={number}")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await answer.content.readline()
        answer.close()

    with_pages(test)


def test_too_many_requests_of_a_client_are_refused_for_a_while() -> None:
    now = 0.0
    limit = RateLimit(burst=3, per_s=1, clock=lambda: now)

    async def test(client: Client, _: LinkGuard) -> None:
        nonlocal now
        assert [(await client.get("/")).status for _ in range(4)] == [200, 200, 200, 429]
        now = 1.0
        assert [(await client.get("/")).status for _ in range(2)] == [200, 429]

    with_pages(test, limit=limit)


def test_the_clients_that_are_counted_are_bounded() -> None:
    limit = RateLimit()
    assert all(limit.takes(f"client-{number}") for number in range(3000))
    assert len(limit._left) == 1024  # noqa: SLF001 - it is bounded

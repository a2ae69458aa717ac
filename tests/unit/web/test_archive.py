# SPDX-License-Identifier: Apache-2.0
"""What the page shows of Prometheus' past: longer charts, bills; and what it says without it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import CookieJar, web
from aiohttp.test_utils import TestClient, TestServer
from fleet_twin import GI, FleetTwin, OneBill, fleet

from allotment.cost.prices import Prices, prices_of
from allotment.cost.splitting import OUTSIDE
from allotment.web.application import Pages
from allotment.web.archive import Archive, Costs
from allotment.web.fleet import EVERYTHING, Sight
from allotment.web.guarding import LinkGuard, Viewer
from allotment.web.watching import Watch

Client = TestClient[web.Request, web.Application]
NOW = 1.7e9
WEB = frozenset({"web"})
NARROW = Sight(sees_nodes=False, namespaces=WEB, quotas=WEB, events=WEB)
SHARE = {"gpu": "GPU-node-0001-0", "namespace": "ml", "pod": "train-20", "container": "main"}


class PrometheusTwin:
    """Answers each range query with two series; keeps what it was asked."""

    def __init__(self) -> None:
        self.queries: list[str] = []
        self.is_hung = False
        self.ended = asyncio.Event()

    async def answer(self, request: web.Request) -> web.Response:
        form = await request.post()
        self.queries.append(str(form["query"]))
        if self.is_hung:
            await self.ended.wait()
        metric = {"gpu": SHARE["gpu"]} if "allotment_gpu_" in str(form["query"]) else SHARE
        value = 30 * GI if "memory" in str(form["query"]) else 0.25
        found = [
            {"metric": metric, "values": [[float(str(form["end"])), str(value)]]},
            {"metric": {**metric, "gpu": "GPU-other"}, "values": [[1.0, "9"]]},
        ]
        return web.json_response({"status": "success", "data": {"result": found}})


def with_pages(
    test: Callable[[Client, PrometheusTwin], Awaitable[None]],
    *,
    sight: Sight = EVERYTHING,
    costs: Costs | None = None,
    address: str | None = "",
    prices: Prices = Prices(),  # noqa: B008
    patience_s: float = 20.0,
) -> None:
    """`address`: of Prometheus; None: none is given; empty: that of a twin."""

    class Known(LinkGuard):
        async def viewer(self, request: object) -> Viewer:
            del request
            return Viewer("anne", sight)

    async def run() -> None:
        twin, app = PrometheusTwin(), web.Application()
        app.router.add_post("/api/v1/query_range", twin.answer)
        async with TestServer(app) as prometheus:
            url = address or str(prometheus.make_url("")).rstrip("/")
            archive = None
            if address is not None:
                archive = Archive(url, prices, clock=lambda: NOW, patience_s=patience_s)
            watch = Watch(FleetTwin(lambda tick: fleet(tick=tick), pace_s=1000))
            pages = Pages(watch, title="test", archive=archive, costs=costs)
            await watch.step()
            served = TestServer(pages.application(Known(pages.refusal)))
            async with TestClient(served, cookie_jar=CookieJar(unsafe=True)) as client:
                await test(client, twin)
            twin.ended.set()

    asyncio.run(run())


def test_a_longer_range_is_prometheus_and_has_an_address() -> None:
    async def test(client: Client, twin: PrometheusTwin) -> None:
        text = await (await client.get("/gpus/GPU-node-0001-0?range=1d")).text()
        assert "Last 1d" in text
        assert "/history?figure=memory&amp;gpu=GPU-node-0001-0&amp;range=1d" in text
        assert '<td class="number">30Gi</td>' in text  # without scripts, too
        asked = len(twin.queries)
        assert all('{gpu=~"GPU\\\\-node\\\\-0001\\\\-0"}' in each for each in twin.queries)
        query = "/history?gpu=GPU-node-0001-0&range=1d"
        memory = await (await client.get(f"{query}&figure=memory")).json()
        time = await (await client.get(f"{query}&figure=time")).json()
        assert len(twin.queries) == asked  # what the page asked is not asked again
        assert (memory["names"][0], time["names"][0]) == ("GPU", "GPU")
        assert len(memory["times"]) == 241
        assert memory["times"][-1] - memory["times"][0] == 86400
        assert memory["values"][0][-1] == 30 * GI
        of_share = memory["names"].index("train-20")
        assert time["values"][of_share][-1] == 0.25

    with_pages(test)


def test_without_prometheus_there_is_one_hour() -> None:
    async def test(client: Client, _: PrometheusTwin) -> None:
        assert "range=1d" not in await (await client.get("/gpus/GPU-node-0001-0")).text()
        text = await (await client.get("/gpus/GPU-node-0001-0?range=1d")).text()
        assert "only the last hour is known: start `allot web` with --prometheus URL" in text
        assert (await client.get("/history?gpu=GPU-node-0001-0&range=1d")).status == 400
        assert "with --prometheus URL" in await (await client.get("/cost")).text()

    with_pages(test, address=None)


@pytest.mark.parametrize("path", ["/gpus/GPU-node-0001-0?range=2d", "/cost?days=3"])
def test_a_range_that_is_not_offered_is_refused(path: str) -> None:
    async def test(client: Client, twin: PrometheusTwin) -> None:
        assert (await client.get(path)).status == 400
        assert twin.queries == []

    with_pages(test)


def test_a_prometheus_that_is_away_is_named_without_its_password() -> None:
    async def test(client: Client, _: PrometheusTwin) -> None:
        for path in ("/gpus/GPU-node-0001-0?range=1d", "/cost"):
            answer = await client.get(path)
            text = await answer.text()
            assert answer.status == 200
            assert "Prometheus at http://127.0.0.1:1 cannot be reached" in text
            assert "secret" not in text
        for path in ("/history?gpu=GPU-node-0001-0&range=1d", "/cost?format=csv"):
            assert (await client.get(path)).status == 503

    with_pages(test, address="http://me:secret@127.0.0.1:1")


def test_a_prometheus_that_hangs_does_not_hold_the_page() -> None:
    async def test(client: Client, twin: PrometheusTwin) -> None:
        twin.is_hung = True
        for path in ("/gpus/GPU-node-0001-0?range=1d", "/cost"):
            text = await (await client.get(path)).text()
            assert "Prometheus has not answered" in text

    with_pages(test, patience_s=0.05)


def test_a_bill_is_that_of_allot_cost() -> None:
    async def test(client: Client, _: PrometheusTwin) -> None:
        text = await (await client.get("/cost")).text()
        assert "1 GPU of this machine: an hour as it is now, in EUR" in text
        rows = (await (await client.get("/cost?format=json")).json())["cost"]
        paid = {row["namespace"]: row["paid"] for row in rows}
        assert paid == {
            OUTSIDE: 0.25, "ml": 1.0, "web": 0.5, "(unallocated)": 0.25, "total": 2.0,
        }  # fmt: skip

    with_pages(test, costs=OneBill(), address=None)


def test_a_viewer_sees_the_cost_of_their_namespaces_alone() -> None:
    async def test(client: Client, _: PrometheusTwin) -> None:
        (row,) = (await (await client.get("/cost?format=json")).json())["cost"]
        assert (row["namespace"], row["paid"]) == ("web", 0.5)
        text = await (await client.get("/cost")).text()
        for hidden in (">ml<", "1 GPU", "Idle", "outside any share", "2.00"):
            assert hidden not in text, hidden

    with_pages(test, costs=OneBill(), address=None, sight=NARROW)


def test_a_viewer_gets_no_sums_of_a_gpu_from_its_charts() -> None:
    async def test(client: Client, twin: PrometheusTwin) -> None:
        for more in ("", "&range=6h"):
            of_gpu = await (await client.get(f"/history?gpu=GPU-node-0001-1{more}")).json()
            assert of_gpu["names"] == ["train-31"], more
            of_node = await (await client.get(f"/history?node=node-0001{more}")).json()
            assert of_node["names"] == ["train-31"]
        assert twin.queries

    with_pages(test, sight=NARROW)


def test_bills_of_one_moment_are_computed_once_and_failed_ones_again() -> None:
    async def run() -> None:
        archive = Archive("http://127.0.0.1:1", prices_of({}), clock=lambda: NOW)
        for _ in range(2):
            with pytest.raises(Exception, match="cannot be reached"):
                await archive.bill(7)
        done = asyncio.create_task(OneBill().bill(7))
        archive._bills = {(7, int(NOW) // 300): done}  # noqa: SLF001 - a bill that is computed
        assert (await archive.bill(7)).currency == "EUR"

    asyncio.run(run())

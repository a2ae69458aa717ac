# SPDX-License-Identifier: Apache-2.0
"""The cluster as a fleet, why a pod waits, what must leave; by a scripted API server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import permutations

import pytest
from aiohttp import CookieJar, web
from aiohttp.test_utils import TestClient, TestServer
from api_server_twin import api_of
from cluster_page_twin import ANNE, NONE, PODS, ROOT, Json, ServerTwin
from explained_twin import GI
from fleet_twin import OneBill

from allotment.cost.splitting import OUTSIDE
from allotment.metrics.use import GpuUse, ShareUse, Use
from allotment.model.errors import UsageError
from allotment.scheduler.cluster_use import NodeUse
from allotment.scheduler.explain import explained
from allotment.scheduler.explain_evidence import read_evidence
from allotment.scheduler.extender.preemption import Preemption
from allotment.scheduler.holdings import cluster_holdings
from allotment.web.archive import Costs
from allotment.web.cluster import ClusterSource, fleet_of
from allotment.web.cluster_pages import ClusterPages
from allotment.web.rights import Rights
from allotment.web.watching import Watch
from allotment.web.why import AskedFor, PodAnswer, Questions

Client = TestClient[web.Request, web.Application]


def with_pages(
    test: Callable[[Client, ServerTwin], Awaitable[None]],
    *denied: str,
    token: str = ROOT,
    pods: Sequence[Json] = PODS,
    costs: Costs | None = None,
) -> None:
    """Run a test with a client of the cluster's pages, logged in by a token."""

    async def run() -> None:
        server = ServerTwin(*denied, pods=pods)
        async with api_of(server) as api:
            source = ClusterSource(api)
            watch = Watch(source)
            pages = ClusterPages(watch, source, title="test", has_login=True)
            pages._costs = costs  # noqa: SLF001 - without a Prometheus
            assert pages.guard is not None
            await watch.step()
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            served = TestServer(pages.application(pages.guard))
            jar = CookieJar(unsafe=True)
            async with TestClient(served, headers=headers, cookie_jar=jar) as client:
                await test(client, server)

    asyncio.run(run())


def test_the_use_of_shares_is_joined_with_who_has_them() -> None:
    async def run() -> None:
        async with api_of(ServerTwin()) as api:
            source = ClusterSource(api)
            await source.read()
        share = ShareUse(
            namespace="ml",
            pod="one",
            container="main",
            share="s1",
            gpu="GPU-a-0",
            device="GPU-a-0",
            memory_used=5 * GI,
            memory_limit=20 * GI,
        )
        gpu = GpuUse(
            uuid="GPU-a-0", index=0, model="A100", pci_bus_id="", memory_total=40 * GI,
            memory_used=7 * GI, utilization=0.5,
        )  # fmt: skip
        use = Use(node="a", gpus=(gpu,), shares=(share,), are_shares_read=True)
        fleet = fleet_of(
            cluster_holdings(source.live),
            [NodeUse(node="a", use=use), NodeUse(node="b", problem="it has no agent")],
            {("ml", "one", "main", "GPU-a-0"): 0.25},
        )
        first, second = fleet.nodes[0].gpus[0].shares
        assert (first.name, first.memory_used, first.gpu_time) == ("one/main", 5 * GI, 0.25)
        assert (second.name, second.memory_used, second.memory_limit) == ("two/main", None, 20 * GI)
        assert fleet.nodes[0].gpus[0].memory_used == 7 * GI
        assert fleet.nodes[0].gpus[0].memory_allocated == 40 * GI
        assert fleet.nodes[1].problem == "it has no agent"
        assert [waiting.name for waiting in fleet.waiting] == ["it"]

    asyncio.run(run())


def test_the_pages_of_a_cluster_have_its_objects() -> None:
    async def test(client: Client, _: ServerTwin) -> None:
        expected = {
            "/": "GPU-b-1",
            "/shares": "one/main",
            "/waiting": "2 GPUs with 30Gi and 25 % of compute each",
            "/quotas": "100Gi",
            "/events": "share of 20Gi",
            "/nodes/a": "uid-one.main",
            "/pods/ml/one": "GPU-a-0",
        }
        for path, text in expected.items():
            answer = await client.get(path)
            assert answer.status == 200, await answer.text()
            assert text in await answer.text(), path

    with_pages(test)


def test_a_started_pod_shows_where_its_start_went() -> None:
    async def test(client: Client, _: ServerTwin) -> None:
        text = await (await client.get("/pods/ml/one")).text()
        assert "4 s from its creation" in text
        assert "<td>its share was made</td>" in text
        assert "Where its start went" not in await (await client.get("/pods/ml/it")).text()

    with_pages(test)


def test_a_waiting_pod_is_explained_with_need_and_have() -> None:
    async def test(client: Client, _: ServerTwin) -> None:
        text = await (await client.get("/pods/ml/it")).text()
        assert "It fits on 0 of 2 nodes" in text
        assert "0/2 nodes are available" in text
        assert "No pod of lower priority" in text
        assert (await client.get("/pods/ml/none")).status == 404

    with_pages(test)


def test_what_if_names_the_gpu_or_the_pods_that_must_leave() -> None:
    async def test(client: Client, server: ServerTwin) -> None:
        text = await (await client.get("/what-if?gpus=1&memory=10Gi")).text()
        assert "It would get" in text
        assert "GPU-" in text
        text = await (await client.get("/what-if?gpus=2&memory=40Gi&priority=100")).text()
        assert "These pods of lower priority" in text
        assert "/pods/web/other" in text
        text = await (await client.get("/what-if?gpus=2&memory=40Gi&priority=0")).text()
        assert "No pod of lower priority" in text
        text = await (await client.get("/what-if?gpus=1&memory=90Gi&priority=9")).text()
        assert "Even if all nodes were empty" in text
        assert [each for each in server.reviews if each["kind"] == "Pod"] == []

    with_pages(test)


def test_questions_about_one_reading_do_not_change_one_another_s_answers() -> None:
    """They share the scheduler's cluster, filled once; a pod with a node does not use it."""
    asked: list[Callable[[Questions], Awaitable[PodAnswer]]] = [
        lambda some: some.what_if(AskedFor(gpus=2, memory="40Gi", priority=100)),
        lambda some: some.why("ml", "it"),
        lambda some: some.why("ml", "one"),
        lambda some: some.what_if(AskedFor(gpus=1, memory="10Gi")),
        lambda some: some.what_if(AskedFor(gpus=1, memory="90Gi", priority=9)),
    ]

    async def run() -> None:
        async with api_of(ServerTwin()) as api:
            source = ClusterSource(api)
            await source.read()
            alone = [await each(Questions(api, source.live)) for each in asked]
            evidence = await read_evidence(api, "ml", "one", cluster=source.live)
            assert alone[2].explanation == explained(evidence)
            for order in permutations(range(len(asked)), 3):
                questions = Questions(api, source.live)
                for number in order:
                    assert await asked[number](questions) == alone[number], order

    asyncio.run(run())


def test_a_question_that_fails_leaves_no_reservation(monkeypatch: pytest.MonkeyPatch) -> None:
    preempt = Preemption.preempt

    async def fail(self: Preemption, body: bytes) -> bytes:
        await preempt(self, body)
        raise UsageError("afterwards")

    async def run() -> None:
        async with api_of(ServerTwin()) as api:
            source = ClusterSource(api)
            await source.read()
            alone = await Questions(api, source.live).why("ml", "it")
            questions = Questions(api, source.live)
            asked = AskedFor(gpus=2, memory="40Gi", priority=100)
            with monkeypatch.context() as patch:
                patch.setattr(Preemption, "preempt", fail)
                with pytest.raises(UsageError, match="afterwards"):
                    await questions.what_if(asked)
            assert await questions.why("ml", "it") == alone

    asyncio.run(run())


def test_an_answer_is_shared_until_the_next_reading() -> None:
    async def test(client: Client, server: ServerTwin) -> None:
        while 'data-number="2"' not in await (await client.get("/")).text():
            pass  # the application reads once more as it starts
        for path in ("/what-if?gpus=1&memory=10Gi", "/pods/ml/it"):
            server.denied = ("-",)
            text = await (await client.get(path)).text()
            server.denied = ("/resourcequotas",)  # what is asked for each answer
            assert await (await client.get(path)).text() == text
        assert (await client.get("/what-if?gpus=1&memory=11Gi")).status == 503

    with_pages(test)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/what-if?gpus=x", 400),
        ("/what-if?gpus=1&memory=lots", 400),
        ("/what-if?gpus=1&compute=500", 400),
        ("/what-if?gpus=1&namespace=..%2F..%2Fsecrets", 400),
        ("/what-if?gpus=1&models=" + 300 * "a", 400),
        ("/pods/ml/..%2F..%2Fsecrets", 400),
        ("/pods/ML/it", 400),
    ],
)
def test_a_wrong_question_is_refused_and_reaches_no_server(path: str, status: int) -> None:
    async def test(client: Client, _: ServerTwin) -> None:
        assert (await client.get(path)).status == status

    with_pages(test)


def test_without_rights_to_quotas_and_events_the_rest_is_shown() -> None:
    async def test(client: Client, _: ServerTwin) -> None:
        text = await (await client.get("/")).text()
        assert "GPU-b-1" in text
        assert "Left out: quotas" in text
        assert "Left out: use: no node agent in namespace allotment-system" in text
        assert "Left out: events" in text

    with_pages(test, "/api/v1/resourcequotas", "/api/v1/events")


# ---- what Kubernetes lets a viewer see -----------------------------------------------------------


def test_a_viewer_sees_their_namespaces_and_no_more() -> None:
    async def test(client: Client, server: ServerTwin) -> None:
        text = await (await client.get("/shares")).text()
        assert "other/main" in text
        answer = await client.get("/pods/web/one")  # a pod of this name is in another namespace
        assert answer.status == 404
        assert "ml/one" not in await answer.text()
        for path in ("/", "/shares", "/gpus", "/waiting", "/events", "/quotas", "/nodes/a"):
            text = await (await client.get(path)).text()
            for hidden in ("one/main", "two/main", "uid-one", "ml/", "share of 20Gi", "100Gi"):
                assert hidden not in text, path
        for path in ("/pods/ml/it", "/pods/ml/one", "/shares/uid-one.main", "/what-if?gpus=1"):
            assert (await client.get(path)).status == 404, path
        count = len(server.reviews)
        await client.get("/shares")
        assert len(server.reviews) == count  # answers are kept for a minute

    with_pages(test, token=ANNE)


def test_rights_to_a_namespace_that_is_new_count_at_once() -> None:
    async def run() -> None:
        server, names = ServerTwin(), set[str]()
        async with api_of(server) as api:
            rights = Rights(api, lambda: names)
            anne = await rights.person(ANNE)
            assert anne is not None
            assert (await rights.sight(anne)).namespaces == frozenset()
            names.update(("web", "ml"))
            sight = await rights.sight(anne)
            assert (sight.namespaces, sight.sees_nodes) == (frozenset({"web"}), True)
            count = len(server.reviews)
            assert await rights.sight(anne) == sight
            assert len(server.reviews) == count

    asyncio.run(run())


@pytest.mark.parametrize(
    ("token", "names"),
    [(ANNE, ["web"]), (NONE, []), (ROOT, [OUTSIDE, "ml", "web", "(unallocated)", "total"])],
    ids=["web", "none", "all"],
)
def test_a_bill_has_namespaces_that_have_no_pods_now(token: str, names: list[str]) -> None:
    async def test(client: Client, _: ServerTwin) -> None:
        rows = (await (await client.get("/cost?format=json")).json())["cost"]
        assert [row["namespace"] for row in rows] == names

    with_pages(test, token=token, pods=(), costs=OneBill())


def test_a_viewer_without_any_right_sees_nothing() -> None:
    async def test(client: Client, _: ServerTwin) -> None:
        for path in ("/", "/shares?format=json", "/gpus?format=csv", "/waiting", "/events"):
            answer = await client.get(path)
            assert answer.status == 200
            text = await answer.text()
            for hidden in ("GPU-a", "GPU-b", "one/main", "20Gi"):
                assert hidden not in text.partition("<main")[2], path

    with_pages(test, token=NONE)


def test_a_login_gives_a_session_without_the_token() -> None:
    async def test(client: Client, _: ServerTwin) -> None:
        origin = {"Origin": str(client.make_url("/")).rstrip("/")}
        answer = await client.get("/shares?q=x", allow_redirects=False)
        assert answer.headers["Location"] == "/login?next=%2Fshares%3Fq%3Dx"
        assert (await client.get("/live")).status == 401

        async def login(token: str, target: str, **headers: str) -> tuple[int, str]:
            form = {"token": token, "next": target}
            answer = await client.post("/login", data=form, headers=headers, allow_redirects=False)
            assert not token or token not in str(answer.headers)
            return answer.status, answer.headers.get("Location", "")

        assert await login("token-of-root", "/shares", Origin="https://elsewhere") == (403, "")
        assert await login("token-of-root", "/shares") == (403, "")
        assert await login("wrong", "/shares", **origin) == (200, "")
        assert await login("", "/shares", **origin) == (200, "")
        assert (await client.get("/shares", allow_redirects=False)).status == 303
        assert await login("token-of-root", "//elsewhere/", **origin) == (303, "/")
        assert (await client.get("/shares")).status == 200
        await client.post("/logout", headers=origin)
        assert (await client.get("/shares", allow_redirects=False)).status == 303

    with_pages(test, token="")


def test_logins_are_slowed_down() -> None:
    async def test(client: Client, _: ServerTwin) -> None:
        statuses = [
            (
                await client.get(
                    "/", headers={"Authorization": f"Bearer wrong-{number}"}, allow_redirects=False
                )
            ).status
            for number in range(30)
        ]
        assert set(statuses[:20]) == {303}
        assert 503 in statuses[20:]

    with_pages(test, token="")

# SPDX-License-Identifier: Apache-2.0
"""The scheduler's parts know of each other what they have to. No API server is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import pytest
from aiohttp import ClientConnectionError, ClientSession, web
from aiohttp.test_utils import TestClient, TestServer
from awaiting import until
from foreign_pods import load_settings
from held_ports import held_port
from listing_api_server import ListingApiServer
from preemption_twin import WHOLE
from prometheus_client.exposition import generate_latest
from scheduler_twin import book_of, cluster_pod_of, node, pod_json

from allotment.dialects.own.placement import PLACEMENT, write_booking
from allotment.dialects.own.registry import need_of
from allotment.kube.clients import connect
from allotment.kube.events import Events
from allotment.kube.inventories import DEVICES, encode
from allotment.model.clusters import NamespaceQuota, PodBooking
from allotment.scheduler.admission.webhook import PATH
from allotment.scheduler.extender.preemption import Preemption
from allotment.scheduler.feed import QuotaFeed
from allotment.scheduler.running import Scheduler
from allotment.scheduler.serving import ListenSettings
from allotment.scheduler.settings import SchedulerSettings
from allotment.scheduler.sharepods import SharePodKeeper

KUBECONFIG = """\
apiVersion: v1
kind: Config
clusters: [{{name: c, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
users: [{{name: u, user: {{token: t}}}}]
contexts: [{{name: c, context: {{cluster: c, user: u}}}}]
current-context: c
"""

Act = Callable[[Scheduler], Awaitable[None]]


@pytest.fixture
def api_port() -> Iterator[int]:
    """Where the API server is, once a test runs it."""
    with held_port() as port:
        yield port


@pytest.fixture
def extender_port() -> Iterator[int]:
    with held_port() as port:
        yield port


@pytest.fixture
def with_scheduler(tmp_path: Path, api_port: int) -> Callable[[SchedulerSettings, Act], None]:
    path = tmp_path / "kubeconfig"
    path.write_text(KUBECONFIG.format(port=api_port), "utf-8")

    def run(settings: SchedulerSettings, act: Act) -> None:
        async def work() -> None:
            async with connect(path) as api:
                await act(Scheduler(settings, api, None))

        asyncio.run(work())

    return run


def test_quotas_count_in_the_units_of_the_clusters_dialects(
    with_scheduler: Callable[[SchedulerSettings, Act], None],
) -> None:
    async def act(scheduler: Scheduler) -> None:
        scheduler.quotas.set_quotas(
            [NamespaceQuota(namespace="ml", name="q", hard={"limits.nvidia.com/gpumem": "3"})]
        )
        (limit,) = scheduler.quotas.usage("ml")
        assert limit.hard == 3 * 10 << 20

    with_scheduler(SchedulerSettings(dialects=load_settings("hami: {memoryFactor: 10}")), act)


def test_who_has_no_certificate_for_the_webhook_is_not_ready(
    with_scheduler: Callable[[SchedulerSettings, Act], None],
) -> None:
    async def with_one(scheduler: Scheduler) -> None:
        assert "the webhook has no certificate yet" in scheduler.probes().is_ready()

    async def without(scheduler: Scheduler) -> None:
        amiss = scheduler.probes().is_ready()
        assert len(amiss) == 1
        assert "webhook" not in amiss[0]

    with_scheduler(SchedulerSettings(webhook=ListenSettings()), with_one)
    with_scheduler(SchedulerSettings(), without)


def test_until_quotas_are_known_nobody_is_answered_and_readiness_says_why(
    with_scheduler: Callable[[SchedulerSettings, Act], None],
    api_port: int,
) -> None:
    """A book that was told of no quota lets everything pass."""

    async def act(scheduler: Scheduler) -> None:
        server = ListingApiServer(forbidden="/api/v1/resourcequotas")
        async with server.running(api_port):
            task = asyncio.create_task(scheduler.run())
            try:
                await until(lambda: any("forbidden" in each for each in amiss(scheduler)))
                assert server.listed >= {"/api/v1/pods", "/api/v1/nodes"}
                assert "api_synced 0.0" in figures(scheduler)
                assert not listens(scheduler)
                server.forbidden = ""
                await until(lambda: not amiss(scheduler))
                assert listens(scheduler)
                await until(lambda: "api_synced 1.0" in figures(scheduler))
                # What is known is good to go on with.
                server.forbidden = "/api/v1/resourcequotas"
                server.end_watches()
                await until(lambda: "api_synced 0.0" in figures(scheduler))
                assert not amiss(scheduler)
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await scheduler.end()

    with_scheduler(
        SchedulerSettings(
            listen="127.0.0.1:0",
            webhook=ListenSettings(listen="127.0.0.1:0", configuration=None),
        ),
        act,
    )


def test_who_ends_is_not_ready_and_answers_the_api_server_once_more_on_each_connection(
    with_scheduler: Callable[[SchedulerSettings, Act], None],
) -> None:
    async def act(scheduler: Scheduler) -> None:
        assert scheduler.webhook is not None
        async with TestClient(TestServer(scheduler.webhook.app)) as client:
            kept = await client.post(PATH, data=b"{")
            assert "Connection" not in kept.headers
            await scheduler.end()
            assert amiss(scheduler) == ["shutting down"]
            ended = await client.post(PATH, data=b"{")
            assert ended.status == kept.status
            assert ended.headers["Connection"] == "close"

    with_scheduler(SchedulerSettings(webhook=ListenSettings()), act)


def amiss(scheduler: Scheduler) -> Sequence[str]:
    return scheduler.probes().is_ready()


def listens(scheduler: Scheduler) -> bool:
    return scheduler.webhook is not None and scheduler.webhook.port is not None


def figures(scheduler: Scheduler) -> str:
    return generate_latest(scheduler.metrics.registry).decode()


def test_the_webhooks_answers_are_counted_by_status(
    with_scheduler: Callable[[SchedulerSettings, Act], None],
) -> None:
    async def act(scheduler: Scheduler) -> None:
        assert scheduler.webhook is not None
        async with TestClient(TestServer(scheduler.webhook.app)) as client:
            answer = await client.post(PATH, data=b"{")
            assert answer.status == 400
        text = generate_latest(scheduler.metrics.registry).decode()
        assert 'allotment_scheduler_webhook_seconds_count{status="400"} 1.0' in text
        assert 'allotment_scheduler_webhook_seconds_count{status="200"} 0.0' in text

    with_scheduler(SchedulerSettings(webhook=ListenSettings()), act)


def test_what_one_part_fails_of_ends_no_other(
    with_scheduler: Callable[[SchedulerSettings, Act], None],
    api_port: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fail(_: object) -> None:
        raise RecursionError("a defect")

    for part in (Events, SharePodKeeper, QuotaFeed):
        monkeypatch.setattr(part, "run", fail)
    monkeypatch.setattr(Preemption, "tick", fail)

    async def act(scheduler: Scheduler) -> None:
        async with ListingApiServer().running(api_port):
            task = asyncio.create_task(scheduler.run())
            try:
                names = ("events", "nominations", "quota_book", "sharepods")
                told = [f'parts_begun_anew_total{{part="{each}"}}' for each in names]
                await until(lambda: task.done() or all(each in figures(scheduler) for each in told))
                assert not task.done(), task.exception()
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await scheduler.end()

    settings = SchedulerSettings(
        listen="127.0.0.1:0", webhook=ListenSettings(listen="127.0.0.1:0", configuration=None)
    )
    with_scheduler(settings, act)


def test_whom_a_budget_of_the_cluster_protects_is_not_ended(
    with_scheduler: Callable[[SchedulerSettings, Act], None],
    api_port: int,
    extender_port: int,
) -> None:
    """From the API server's lists of budgets, pods and their labels to kube-scheduler's answer."""
    inventory = node("a", 2)
    annotated = {"name": "a", "uid": "uid-a", "annotations": {DEVICES: encode(inventory)}}
    amounts = {"allocatable": {"cpu": "64", "memory": "512Gi"}}
    book, pods = book_of([inventory]), []
    for place, name in enumerate(("protected", "free")):
        annotations = {"allotment.dev/uuids": f"GPU-a{place}"}
        pod = pod_json(name, limits=WHOLE, annotations=annotations, priority=1)
        placed = book.cluster.place(need_of(cluster_pod_of(pod)), "a")
        assert isinstance(placed, PodBooking)
        pod["spec"]["nodeName"] = "a"
        pod["metadata"]["annotations"][PLACEMENT] = write_booking(placed)
        pod["metadata"]["labels"] = {"app": name}
        pods.append(pod)
    budget = {
        "metadata": {"name": "b", "namespace": "ml", "uid": "uid-b"},
        "spec": {"selector": {"matchLabels": {"app": "protected"}}},
        "status": {"disruptionsAllowed": 0},
    }
    wants = pod_json("wants", limits=WHOLE, priority=100)
    server = ListingApiServer(
        items={
            "/api/v1/nodes": [{"metadata": annotated, "status": amounts}],
            "/api/v1/pods": [*pods, wants],
            "/apis/policy/v1/poddisruptionbudgets": [budget],
        }
    )
    chosen = {"Pods": [{"UID": "uid-protected"}], "NumPDBViolations": 1}
    asked = {"Pod": wants, "NodeNameToMetaVictims": {"a": chosen}}
    expected = {"a": {"Pods": [{"UID": "uid-free"}], "NumPDBViolations": 0}}

    async def act(scheduler: Scheduler) -> None:
        async with server.running(api_port), ClientSession() as client:
            task = asyncio.create_task(scheduler.run())
            try:
                async with asyncio.timeout(30):
                    answer = None
                    # Budgets are not waited for: they may be heard of after the first question.
                    while answer != expected:
                        await asyncio.sleep(0.05)
                        assert not task.done(), task.exception()
                        answer = await ask(client)
                        print(answer)  # noqa: T201 - the last one, if it is another
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await scheduler.end()

    async def ask(client: ClientSession) -> object:
        try:
            async with client.post(
                f"http://127.0.0.1:{extender_port}/preempt", json=asked
            ) as answer:
                found = await answer.json() if answer.status == web.HTTPOk.status_code else {}
                return found.get("NodeNameToMetaVictims")
        except ClientConnectionError:
            return None  # it does not listen yet

    with_scheduler(SchedulerSettings(listen=f"127.0.0.1:{extender_port}"), act)

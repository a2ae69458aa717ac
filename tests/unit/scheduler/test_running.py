# SPDX-License-Identifier: Apache-2.0
"""The scheduler's parts know of each other what they have to. No API server is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.exposition import generate_latest

from allotment.dialects.systems import load_settings
from allotment.kube.clients import connect
from allotment.kube.quotas import NamespaceQuota
from allotment.scheduler.running import Scheduler
from allotment.scheduler.settings import SchedulerSettings
from allotment.scheduler.webhook import PATH
from allotment.scheduler.webhook_serving import ListenSettings

KUBECONFIG = """\
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "http://127.0.0.1:1"}}]
users: [{name: u, user: {token: t}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
current-context: c
"""

Act = Callable[[Scheduler], Awaitable[None]]


@pytest.fixture
def with_scheduler(tmp_path: Path) -> Callable[[SchedulerSettings, Act], None]:
    path = tmp_path / "kubeconfig"
    path.write_text(KUBECONFIG, "utf-8")

    def run(settings: SchedulerSettings, act: Act) -> None:
        async def work() -> None:
            async with connect(path) as api:
                await act(Scheduler(settings, api, api, None))

        asyncio.run(work())

    return run


def test_quotas_count_in_the_units_of_the_clusters_dialects(
    with_scheduler: Callable[[SchedulerSettings, Act], None],
) -> None:
    async def act(scheduler: Scheduler) -> None:
        scheduler.quotas.set_quotas(
            [NamespaceQuota(namespace="ml", name="q", hard={"limits.nvidia.com/gpumem": "3"})]
        )
        ((_, hard),) = scheduler.quotas.usage("ml").values()
        assert hard == 3 * 10 << 20

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

# SPDX-License-Identifier: Apache-2.0
"""The page of a made-up cluster of 1,200 nodes with 8 GPUs each.

The server's time is that of a page as it is rendered, by the processor, after each reading: nothing
of the one before is kept. The first paint is Chromium's own figure of a browser that has nothing of
the page, on this machine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from typing import Final

from aiohttp import ClientSession, web
from aiohttp.test_utils import BaseTestServer, TestServer
from api_server_twin import api_of
from cluster_page_twin import ServerTwin, large
from fleet_twin import FleetTwin, fleet
from playwright.async_api import async_playwright

from allotment.web.application import Pages
from allotment.web.cluster import ClusterSource
from allotment.web.cluster_pages import ClusterPages
from allotment.web.guarding import RateLimit, Viewer
from allotment.web.watching import Watch
from bench.harness.options import Options
from bench.harness.quantiles import summarize
from bench.harness.results import Result
from bench.harness.runner import NoRig

_NODES: Final = 1200
_GPUS: Final = 8
_PAINT_MS: Final = 1000.0
_UPDATE_MS: Final = 100.0
_CHROMIUM: Final = "/usr/bin/chromium"
_ARGUMENTS: Final = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
_PAINT: Final = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
_FLEET: Final = {
    "the fleet": "/",
    "a node": "/nodes/node-0003",
    "the table of shares": "/shares",
    "shares as CSV": "/shares?format=csv",
}
_CLUSTER: Final = {
    "waiting pods": "/waiting",
    "why a pod waits": "/pods/ml/waits-7",
    "what if": "/what-if?gpus=8&memory=40Gi&priority=100",
}
_METHOD: Final = (
    "processor time of the process that serves and asks, from the request to the last byte;"
    " p50 / p99, `figure` is the p99"
)

Times = Mapping[str, list[float]]


class _Everybody:
    """Lets everybody see all."""

    async def viewer(self, request: web.Request) -> Viewer:
        del request
        return Viewer("")

    def stranger(self, request: web.Request) -> web.StreamResponse:
        del request
        raise web.HTTPNotFound


def page(_rig: NoRig, options: Options) -> Iterator[Result]:
    """Ask for each page, and paint the first one."""
    nodes, runs = options.pick(_NODES, 20), options.pick(30, 3)
    served, paints = asyncio.run(_measured(nodes, runs))
    for name, times in served.items():
        summary = summarize(times)
        yield Result(
            name=name,
            topic="server",
            unit="ms",
            value=summary.p99,
            seen=f"{summary.p50:.1f} / {summary.p99:.1f} ms",
            summary=summary,
            samples=len(times),
            target=_UPDATE_MS if name.startswith("update") else None,
            method=_METHOD,
        )
    for scheme, times in paints.items():
        summary = summarize(times)
        yield Result(
            name=f"first paint, {scheme}",
            topic="browser",
            unit="ms",
            value=summary.p50,
            seen=f"{summary.p50:.0f} ms, at most {summary.max:.0f} ms",
            summary=summary,
            samples=len(times),
            target=_PAINT_MS,
            method="headless Chromium, first contentful paint of the fleet; an empty cache"
            " each time; `figure` is the median",
        )


async def _measured(nodes: int, runs: int) -> tuple[Times, Times]:
    served: dict[str, list[float]] = {}
    paints: dict[str, list[float]] = {}
    limit = RateLimit(burst=1e9)
    guard = _Everybody()
    watch = Watch(FleetTwin(lambda tick: fleet(nodes, _GPUS, tick=tick), pace_s=1e6))
    pages = Pages(watch, title="a made-up fleet")
    async with TestServer(pages.application(guard, limit)) as server:
        await _times(watch, server, _FLEET, runs, served)
        await _painted(str(server.make_url("/")), max(3, runs // 3), paints)
    made, pods = large(nodes, _GPUS)
    source = ClusterSource(api_of(ServerTwin(nodes=made, pods=pods)))
    cluster_watch = Watch(source)
    cluster = ClusterPages(cluster_watch, source, title="a made-up cluster")
    began = time.process_time()
    await source.read()
    served["reading the cluster"] = [1000 * (time.process_time() - began)]
    async with TestServer(cluster.application(guard, limit)) as server:
        await _times(cluster_watch, server, _CLUSTER, max(3, runs // 6), served)
    return served, paints


async def _times(
    watch: Watch,
    server: BaseTestServer,
    addresses: Mapping[str, str],
    runs: int,
    found: dict[str, list[float]],
) -> None:
    """Ask for pages, and for their updates after a reading."""
    origin = str(server.make_url("")).rstrip("/")
    async with ClientSession() as client:
        for name, address in addresses.items():
            for kind, headers in (("", {}), ("update of ", {"X-Part": "live"})):
                if kind and "format" in address:
                    continue
                for _ in range(runs):
                    await watch.step()
                    began = time.process_time()
                    async with client.get(f"{origin}{address}", headers=headers) as answer:
                        await answer.read()
                        answer.raise_for_status()
                    found.setdefault(kind + name, []).append(1000 * (time.process_time() - began))


async def _painted(address: str, runs: int, found: dict[str, list[float]]) -> None:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=_CHROMIUM, args=[*_ARGUMENTS])
        for _ in range(runs):
            for scheme in ("light", "dark"):
                context = await browser.new_context(color_scheme=scheme)
                tab = await context.new_page()
                await tab.goto(address)
                await tab.wait_for_selector(".heat tbody tr")
                found.setdefault(scheme, []).append(await tab.evaluate(_PAINT))
                await context.close()
        await browser.close()

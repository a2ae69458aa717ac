# SPDX-License-Identifier: Apache-2.0
"""The page of a made-up cluster of 1,200 nodes with 8 GPUs each.

A page's cost is the processor time of the process that serves and asks. Questions about pods are
asked anew after each reading; the first of them fills the scheduler's cluster, which the others
use. What a browser shows is Chromium's own figure.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from aiohttp import ClientSession, web
from aiohttp.test_utils import BaseTestServer, TestServer
from api_server_twin import api_of
from cluster_page_twin import Agents, ServerTwin, large, name_of
from fleet_twin import FleetTwin, fleet
from playwright.async_api import Page, async_playwright

from allotment.model.structs import replace
from allotment.scheduler.supervise import freeze_periodically
from allotment.web.application import Pages
from allotment.web.cluster import ClusterSource
from allotment.web.cluster_pages import ClusterPages
from allotment.web.fleet import EVERYTHING, Fleet, Sight
from allotment.web.guarding import RateLimit, Viewer
from allotment.web.watching import KEPT_S, Watch
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
_SENT: Final = """
    ['navigation', 'resource'].flatMap((kind) => performance.getEntriesByType(kind))
        .reduce((sum, entry) => sum + entry.transferSize, 0)"""
_LISTEN: Final = """() => {
    const live = document.getElementById('live');
    window.shown = new Promise((done) => new MutationObserver(
        () => requestAnimationFrame(() => setTimeout(done))
    ).observe(live, { attributeFilter: ['data-updates'] }));
}"""
_PAGES: Final = {
    "the fleet": "/",
    "a node": "/nodes/node-0003",
    "the table of shares": "/shares",
    "shares as CSV": "/shares?format=csv",
}
_CLUSTER_PAGES: Final = {
    "waiting pods": "/waiting",
    "why a pod waits": "/pods/ml/waits-7",
    "what if": "/what-if?gpus=8&memory=40Gi&priority=100",
}
_KINDS: Final = ("", "update of ")
_NARROW: Final = Sight(sees_nodes=True, namespaces=frozenset({"ml"}))
_MIB: Final = 1 << 20

Times = dict[str, list[float]]


class _Guard:
    """Lets everybody see what `sight` says."""

    def __init__(self) -> None:
        self.sight = EVERYTHING

    async def viewer(self, request: web.Request) -> Viewer:
        del request
        return Viewer("", self.sight)

    def stranger(self, request: web.Request) -> web.StreamResponse:
        del request
        raise web.HTTPNotFound


def page(_rig: NoRig, options: Options) -> Iterator[Result]:
    """Ask for each page, paint the first one, and read a cluster."""
    nodes, runs = options.pick(_NODES, 20), options.pick(20, 3)
    yield from asyncio.run(_of_a_fleet(nodes, runs))
    yield from asyncio.run(_of_a_cluster(nodes, max(3, runs // 5)))


async def _of_a_fleet(nodes: int, runs: int) -> list[Result]:
    readings = [fleet(nodes, _GPUS, tick=tick) for tick in range(2)]
    watch = Watch(FleetTwin(lambda tick: readings[tick % 2], pace_s=1e6))
    guard, served, sizes = _Guard(), Times(), Times()
    application = _application(Pages(watch, title="made up"), guard)
    async with TestServer(application) as server, _frozen(watch.first_reading):
        await _ask(server, _PAGES, runs, served, sizes)
        guard.sight = _NARROW
        for _ in range(runs):  # what a viewer sees is kept until the next reading
            await watch.step()
            await _ask(server, {"the fleet, of one namespace": "/"}, 1, served, sizes)
        guard.sight = EVERYTHING
        painted = await _painted(str(server.make_url("/")), watch, max(3, runs // 2))
    return [*_served(served, sizes), *painted]


async def _of_a_cluster(nodes: int, runs: int) -> list[Result]:
    made, pods = large(nodes, _GPUS)
    agents = Agents(ServerTwin(nodes=made, pods=pods), [name_of(each) for each in made], _GPUS)
    source = ClusterSource(api_of(agents))
    gc.collect()
    before = _resident()
    read, pauses = [], []
    served, sizes = Times(), Times()
    async with _frozen(source.read):
        for _ in range(3):
            began = time.process_time()
            found, pause = await _read(source)
            read.append(time.process_time() - began)
            pauses.append(pause)
        watch = Watch(FleetTwin(lambda _: found, pace_s=1e6))
        for number in range(round(KEPT_S / source.pace_s)):
            watch.history.add(replace(found, read_at=found.read_at + number * source.pace_s))
        grown = _resident() - before
        if found.problems or not found.nodes[1].gpus[0].shares[0].memory_used:
            raise RuntimeError(f"the cluster was not read: {', '.join(found.problems)}")
        pages = ClusterPages(watch, source, title="made up")
        async with TestServer(_application(pages, _Guard())) as server:
            await watch.first_reading()
            for _ in range(runs):  # an answer is kept until the next reading
                for kind in _KINDS:
                    await source.read()
                    await watch.step()
                    await _ask(server, _CLUSTER_PAGES, 1, served, sizes, kinds=(kind,))
    part = 100 * min(read) / source.pace_s
    return [
        *_served(served, sizes),
        Result(
            name="reading the cluster",
            topic="the cluster",
            unit="% of a core",
            value=part,
            seen=f"{min(read):.2f} s every {source.pace_s:.0f} s",
            samples=len(read),
            method="processor time of a reading, with the metrics of all agents; the least",
        ),
        Result(
            name="longest pause of all pages in a reading",
            topic="pauses",
            unit="ms",
            value=min(pauses),
            samples=len(pauses),
            method="the longest time in which the event loop does nothing else; the least of the"
            " readings, by the wall clock",
        ),
        Result(
            name="memory of the server",
            topic="memory",
            unit="MiB",
            value=grown / _MIB,
            method="growth of the resident memory: the cluster as last read, what remains of a"
            " reading, and an hour of figures; without the program itself",
        ),
    ]


def _application(pages: Pages, guard: _Guard) -> web.Application:
    return pages.application(guard, RateLimit(burst=1e9))


@asynccontextmanager
async def _frozen(load: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    """Load, and from then on collect garbage as `allot web --cluster` does; undo it."""
    thresholds, is_loaded = gc.get_threshold(), asyncio.Event()

    async def loaded() -> None:
        await load()
        is_loaded.set()

    freezing = asyncio.create_task(freeze_periodically(loaded, lambda: True))
    await is_loaded.wait()
    try:
        yield
    finally:
        freezing.cancel()
        gc.set_threshold(*thresholds)
        gc.unfreeze()


async def _ask(
    server: BaseTestServer,
    addresses: Mapping[str, str],
    runs: int,
    served: Times,
    sizes: Times,
    *,
    kinds: Sequence[str] = _KINDS,
) -> None:
    """Ask for pages, and for their updates."""
    origin = str(server.make_url("")).rstrip("/")
    async with ClientSession(auto_decompress=False) as client:
        for name, address in addresses.items():
            for kind in kinds:
                if kind and "format" in address:
                    continue
                headers = {"X-Part": "live"} if kind else {}
                for _ in range(runs):
                    began = time.process_time()
                    async with client.get(f"{origin}{address}", headers=headers) as answer:
                        body = await answer.read()
                        answer.raise_for_status()
                    took = time.process_time() - began
                    served.setdefault(kind + name, []).append(1000 * took)
                    sizes.setdefault(kind + name, []).append(len(body) / 1000)


def _served(served: Times, sizes: Times) -> Iterator[Result]:
    for name, times in served.items():
        summary = summarize(times)
        yield Result(
            name=name,
            topic="server",
            unit="ms",
            value=summary.p99,
            seen=f"{summary.p50:.1f} / {summary.p99:.1f} ms, {max(sizes[name]):.0f} kB sent",
            summary=summary,
            samples=len(times),
            target=_UPDATE_MS if name.startswith("update") else None,
            method="processor time of the process that serves and asks, from the request to the"
            " last byte; p50 / p99, `figure` is the p99; bytes as they are sent, compressed",
        )


async def _painted(address: str, watch: Watch, runs: int) -> list[Result]:
    found = []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=_CHROMIUM, args=[*_ARGUMENTS])
        for scheme in ("light", "dark"):
            paints, updates, sent = [], [], 0.0
            for _ in range(runs):
                context = await browser.new_context(color_scheme=scheme)
                tab = await context.new_page()
                await tab.goto(address)
                await tab.wait_for_selector(".heat tbody tr")
                paints.append(float(await tab.evaluate(_PAINT)))
                sent = float(await tab.evaluate(_SENT))
                updates.append(await _update(tab, watch))
                await context.close()
            found.append(
                _seen_by_browser(
                    f"first paint, {scheme}",
                    paints,
                    target=_PAINT_MS,
                    more=f", {sent / 1000:.0f} kB sent",
                    method="headless Chromium, first contentful paint of the fleet; an empty cache"
                    " each time; p50 / p99, `figure` is the median; bytes of the page and all that"
                    " it loads",
                )
            )
            found.append(
                _seen_by_browser(
                    f"an update shown, {scheme}",
                    updates,
                    method="from the end of a reading until Chromium has drawn the fleet anew, by"
                    " the wall clock; p50 / p99, `figure` is the median",
                )
            )
        await browser.close()
    return found


async def _update(tab: Page, watch: Watch) -> float:
    await tab.locator("#connection").get_by_text("live", exact=True).wait_for()
    await tab.evaluate(_LISTEN)
    await watch.step()
    began = time.perf_counter()
    await tab.evaluate("window.shown")
    return 1000 * (time.perf_counter() - began)


def _seen_by_browser(
    name: str,
    times: Sequence[float],
    *,
    method: str,
    target: float | None = None,
    more: str = "",
) -> Result:
    summary = summarize(times)
    return Result(
        name=name,
        topic=name.partition(",")[0],
        unit="ms",
        value=summary.p50,
        seen=f"{summary.p50:.0f} / {summary.p99:.0f} ms{more}",
        summary=summary,
        samples=len(times),
        target=target,
        method=method,
    )


async def _read(source: ClusterSource) -> tuple[Fleet, float]:
    """Read, and return the longest time in milliseconds in which no other task ran, too."""
    reading = asyncio.create_task(source.read())
    longest, before = 0.0, time.perf_counter()
    while not reading.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        longest, before = max(longest, now - before), now
    return reading.result(), 1000 * longest


def _resident() -> int:
    """Return the resident memory of this process in bytes."""
    pages = Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")

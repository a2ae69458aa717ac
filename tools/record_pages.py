# SPDX-License-Identifier: Apache-2.0
"""Make the pictures of the page: `allot web` of made-up fleets, in Debian's Chromium.

Usage: PYTHONPATH=tests/twins python tools/record_pages.py docs/images
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from aiohttp import web
from api_server_twin import api_of
from cluster_page_twin import ServerTwin
from fleet_twin import FleetTwin, OneBill, fleet
from playwright.sync_api import Browser, expect, sync_playwright
from served_twin import in_a_thread

from allotment.model.structs import replace
from allotment.web.application import Pages
from allotment.web.cluster import ClusterSource
from allotment.web.cluster_pages import ClusterPages
from allotment.web.fleet import Fleet, FleetGpu, FleetShare
from allotment.web.guarding import LinkGuard
from allotment.web.watching import KEPT_S, Watch

CHROMIUM: Final = "/usr/bin/chromium"
ARGUMENTS: Final = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
WIDTH: Final = 1200
NOW: Final = 1_796_000_400.0
"""The time of all pictures, in seconds after the epoch."""
STEP_S: Final = 15
GPU: Final = "GPU-node-0002-1"


def _fleet(moment: float) -> Fleet:
    """Return the fleet of the tests, with figures that rise and fall."""

    def share(each: FleetShare) -> FleetShare:
        phase = int(each.id.rpartition("-")[2])
        part = 0.55 + 0.4 * math.sin(moment / (300 + 40 * (phase % 7)) + phase)
        return replace(each, memory_used=int(each.memory_limit * part), gpu_time=part / 3)

    def gpu(each: FleetGpu) -> FleetGpu:
        shares = tuple(map(share, each.shares))
        used = sum(share.memory_used or 0 for share in shares)
        busy = sum(share.gpu_time or 0 for share in shares)
        return replace(each, shares=shares, memory_used=used, utilization=busy)

    made = fleet(6, 8)
    nodes = tuple(replace(node, gpus=tuple(map(gpu, node.gpus))) for node in made.nodes)
    return replace(made, nodes=nodes, read_at=moment)


def _machine() -> Pages:
    watch = Watch(FleetTwin(lambda _: _fleet(NOW), pace_s=1e6), clock=lambda: NOW)
    for moment in range(int(NOW - KEPT_S) + STEP_S, int(NOW), STEP_S):
        watch.history.add(_fleet(moment))
    return Pages(watch, title="a made-up fleet", costs=OneBill())


def _cluster() -> Pages:
    source = ClusterSource(api_of(ServerTwin()))
    return ClusterPages(Watch(source, clock=lambda: NOW), source, title="a made-up cluster")


PICTURES: Final[dict[Callable[[], Pages], dict[str, tuple[str, str]]]] = {
    _machine: {
        "web-fleet": ("/", "light"),
        "web-gpu": (f"/gpus/{GPU}", "dark"),
        "web-cost": ("/cost", "light"),
    },
    _cluster: {"web-why": ("/pods/ml/it", "light")},
}
"""By what is served, the pictures: an address and the colours."""


def _record(browser: Browser, make: Callable[[], Pages], folder: Path) -> None:
    guards: list[LinkGuard] = []

    def application() -> web.Application:
        pages = make()
        guards.append(LinkGuard(pages.refusal))
        return pages.application(guards[0])

    with in_a_thread(application) as served:
        for name, (path, scheme) in PICTURES[make].items():
            context = browser.new_context(
                color_scheme="dark" if scheme == "dark" else "light",
                timezone_id="UTC",
                viewport={"width": WIDTH, "height": 400},
            )
            tab = context.new_page()
            tab.goto(f"{served.url}/?key={guards[0].key}")
            expect(tab.locator(".status")).not_to_contain_text("Read -")
            tab.goto(served.url + path)
            expect(tab.locator("#connection")).to_have_text("live")
            for chart in tab.locator(".chart").all():
                expect(chart.locator("canvas")).to_be_visible()
            tab.screenshot(path=folder / f"{name}.png", full_page=True)
            context.close()


def main() -> int:
    """Write all pictures into the folder that the only argument names."""
    if len(sys.argv) != 2:  # noqa: PLR2004 - one argument
        print(__doc__, file=sys.stderr)
        return 2
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=[*ARGUMENTS])
        for make in PICTURES:
            _record(browser, make, Path(sys.argv[1]))
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

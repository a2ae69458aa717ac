# SPDX-License-Identifier: Apache-2.0
"""`allot web` in a real Chromium: of this machine, and of a made-up fleet of 1,200 nodes."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from api_server_twin import api_of
from axe_playwright_python.sync_playwright import Axe
from cluster_page_twin import ServerTwin, large
from fleet_twin import FleetTwin, OneBill, fleet
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright
from served_twin import in_a_thread

from allotment.model.structs import replace
from allotment.web.application import Pages
from allotment.web.cluster import ClusterSource
from allotment.web.cluster_pages import ClusterPages
from allotment.web.fleet import Fleet
from allotment.web.guarding import LinkGuard
from allotment.web.watching import Watch

Allot = Any  # tests/conftest.py: CommandLine

CHROMIUM = "/usr/bin/chromium"  # Debian's package
PATIENCE_MS = 60_000
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not Path(CHROMIUM).exists():
        pytest.skip("no chromium (Debian: apt-get install chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=[*ARGUMENTS])
        yield browser
        browser.close()


@dataclass
class Tab:
    """A page, and what its console complained of."""

    page: Page
    complaints: list[str] = field(default_factory=list)

    def goes_to(self, address: str) -> None:
        self.page.goto(address)
        self.is_live()

    def is_live(self) -> None:
        """Waits until the script of the page runs: before that there are no keys."""
        expect(self.page.locator("#connection")).to_have_text("live")


Serve = Callable[..., tuple[str, FleetTwin]]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serves a made-up fleet: `serve(make)` is its address with a key, and its source."""
    with ExitStack() as stack:

        def start(make: Callable[[int], Fleet], *, pace_s: float = 0.5) -> tuple[str, FleetTwin]:
            twin = FleetTwin(make, pace_s=pace_s)
            guards: list[LinkGuard] = []

            def application() -> web.Application:
                pages = Pages(Watch(twin), title="made up", costs=OneBill())
                guards.append(LinkGuard(pages.refusal))
                return pages.application(guards[0])

            thread = stack.enter_context(in_a_thread(application))
            return f"{thread.url}/?key={guards[0].key}", twin

        yield start


@pytest.fixture
def serve_cluster() -> Iterator[Callable[..., str]]:
    """Serves a made-up cluster of an API server: `serve_cluster(**objects)` is its address."""
    with ExitStack() as stack:

        def start(**objects: Any) -> str:  # noqa: ANN401 - the twin's
            guards: list[LinkGuard] = []

            def application() -> web.Application:
                source = ClusterSource(api_of(ServerTwin(**objects)))
                source.pace_s = 2.0
                pages = ClusterPages(Watch(source), source, title="a made-up cluster")
                guards.append(LinkGuard(pages.refusal))
                return pages.application(guards[0])

            thread = stack.enter_context(in_a_thread(application))
            return f"{thread.url}/?key={guards[0].key}"

        yield start


@pytest.fixture
def tab(browser: Browser, serve: Serve, serve_cluster: object) -> Iterator[Callable[..., Tab]]:
    """Opens pages in contexts of their own; at the end no page may have complained.

    They close before what serves them: it would be missed.
    """
    del serve, serve_cluster
    opened: list[tuple[BrowserContext, Tab]] = []

    def open_tab(**options: Any) -> Tab:  # noqa: ANN401 - playwright's
        context = browser.new_context(**options)
        context.set_default_timeout(PATIENCE_MS)
        tab = Tab(context.new_page())
        tab.page.on(
            "console",
            lambda message: (
                tab.complaints.append(message.text)
                if message.type in {"error", "warning"}
                else None
            ),
        )
        tab.page.on("pageerror", lambda error: tab.complaints.append(str(error)))
        opened.append((context, tab))
        return tab

    expect.set_options(timeout=PATIENCE_MS)
    yield open_tab
    for context, tab in opened:
        context.close()
        assert tab.complaints == []


def base_of(address: str) -> str:
    return address.partition("/?")[0]


@pytest.fixture
def machine_page(allot: Allot) -> Iterator[str]:
    """`allot web` on a machine with one share, whose program uses a GiB."""
    made = allot("cdi", "create", "--simulated", "t4", "--memory", "4Gi", "--name", "kept",
                 "--cdi-dir", allot.state / "cdi")  # fmt: skip
    assert made.returncode == 0, made.stderr
    run = ("run", "--simulated", "t4", "--memory", "6Gi", "--compute", "40", "--name", "train")
    program = ("--", *allot.command("burn", "--memory", "1Gi", "--seconds", "600"))
    environment = allot.environment()
    with (
        subprocess.Popen(allot.command(*run, *program), env=environment) as burning,
        subprocess.Popen(
            allot.command("web", "--listen", "127.0.0.1:0"),
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        ) as serving,
    ):
        assert serving.stdout is not None
        yield serving.stdout.readline().strip()
        for each in (serving, burning):
            each.terminate()
            each.wait(30)


def test_a_machine_from_its_fleet_to_a_share(
    machine_page: str, tab: Callable[..., Tab], allot: Allot
) -> None:
    first = tab()
    page = first.page
    first.goes_to(machine_page)
    assert "key=" not in page.url
    expect(page.locator("a.gpu")).to_have_count(1)
    page.locator("a.gpu").first.click()
    expect(page.locator("h1")).to_contain_text("GPU 0")
    row = page.locator("#live .list tbody tr").filter(has_text="train")
    expect(row).to_contain_text("1Gi")
    row.get_by_role("link", name="train").click()
    expect(page.locator("h1")).to_have_text("Share train")
    expect(page.locator(".chart canvas")).to_have_count(2)
    expect(page.locator("#live .list tbody tr").filter(has_text="created")).to_have_count(1)

    page.goto(base_of(machine_page) + "/shares")
    expect(page.locator("#live .list tbody tr")).to_have_count(2)
    made = allot("cdi", "create", "--simulated", "t4", "--memory", "1Gi", "--name", "later",
                 "--cdi-dir", allot.state / "cdi")  # fmt: skip
    assert made.returncode == 0, made.stderr
    expect(page.locator("#live .list tbody tr").filter(has_text="later")).to_have_count(
        1
    )  # without a reload
    with page.expect_download() as download:
        page.get_by_role("link", name="CSV").click()
    saved = Path(download.value.path()).read_text("utf-8")
    assert re.findall(r"^(\w+),", saved, re.MULTILINE) == ["name", "kept", "train", "later"]


def test_a_stranger_sees_nothing_of_a_machine(machine_page: str, tab: Callable[..., Tab]) -> None:
    stranger = tab()
    answer = stranger.page.goto(base_of(machine_page) + "/shares")
    assert answer is not None
    assert answer.status == 401
    assert "train" not in stranger.page.content()
    stranger.complaints.clear()  # the browser reports the status


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_are_accessible(tab: Callable[..., Tab], serve: Serve, scheme: str) -> None:
    address, _ = serve(lambda tick: fleet(6, 4, tick=tick))
    each = tab(color_scheme=scheme)
    each.goes_to(address)
    for path in (
        "/",
        "/nodes/node-0003",
        "/gpus/GPU-node-0001-1",
        "/shares",
        "/shares/share-60",
        "/cost",
    ):
        each.page.goto(base_of(address) + path)
        expect(each.page.locator("#connection")).to_have_text("live")
        found = Axe().run(each.page)
        assert found.violations_count == 0, found.generate_report()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_gpu_of_any_shade_is_legible(tab: Callable[..., Tab], serve: Serve, scheme: str) -> None:
    made = fleet(1, 11)
    gpus = tuple(
        replace(each, memory_allocated=each.memory_total * step // 10)
        for step, each in enumerate(made.nodes[0].gpus)
    )
    shaded = replace(made, nodes=(replace(made.nodes[0], gpus=gpus),))
    address, _ = serve(lambda _: shaded)
    each = tab(color_scheme=scheme)
    each.goes_to(address)
    each.page.goto(base_of(address) + "/?by=allocated")
    expect(each.page.locator("#connection")).to_have_text("live")
    for step in range(11):
        expect(each.page.locator(f"a.gpu.u{step}")).to_have_count(1)
    found = Axe().run(each.page)
    assert found.violations_count == 0, found.generate_report()


def test_everything_is_reached_by_keys(tab: Callable[..., Tab], serve: Serve) -> None:
    address, _ = serve(lambda tick: fleet(6, 4, tick=tick))
    first = tab()
    page = first.page
    first.goes_to(address)
    page.keyboard.press("/")
    page.keyboard.type("node-0003")
    page.keyboard.press("Enter")
    expect(page.locator(".heat tbody tr")).to_have_count(1)
    assert "q=node-0003" in page.url
    first.is_live()
    page.keyboard.press("g")
    page.keyboard.press("f")
    expect(page.locator(".heat tbody tr")).to_have_count(6)
    first.is_live()
    page.locator("a.gpu").first.focus()
    for key in ("ArrowDown", "ArrowRight", "ArrowRight", "ArrowUp", "Enter"):
        page.keyboard.press(key)
    expect(page.locator("h1")).to_contain_text("GPU 2 of node-0000")
    first.is_live()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()


def test_what_is_typed_stays_while_readings_arrive(tab: Callable[..., Tab], serve: Serve) -> None:
    problems = [(), ("node-0001: no answer",), ()]

    def make(tick: int) -> Fleet:
        return replace(fleet(6, 4, tick=tick), problems=problems[tick % 3])

    address, _ = serve(make, pace_s=1)
    first = tab()
    page = first.page
    first.goes_to(address)
    page.keyboard.press("/")
    page.keyboard.type("node-0003")
    for updates in (r"[1-9]\d*", r"[4-9]|\d\d+"):
        expect(page.locator("#live")).to_have_attribute(
            "data-updates", re.compile(f"^({updates})$")
        )
        expect(page.locator('input[type="search"]')).to_have_value("node-0003")
        expect(page.locator('input[type="search"]')).to_be_focused()


def test_1200_nodes_on_a_slow_network(tab: Callable[..., Tab], serve: Serve) -> None:
    address, _ = serve(lambda tick: fleet(1200, 8, tick=tick), pace_s=3)
    first = tab()
    page = first.page
    session = page.context.new_cdp_session(page)
    session.send("Network.enable")
    session.send(
        "Network.emulateNetworkConditions",
        {
            "offline": False,
            "latency": 300,
            "downloadThroughput": 100_000,
            "uploadThroughput": 50_000,
        },
    )
    first.goes_to(address)
    expect(page.locator(".heat tbody tr")).to_have_count(60)
    squares = page.eval_on_selector_all(
        "#overview path", "paths => paths.map(p => p.getAttribute('d').split('M').length - 1)"
    )
    assert sum(squares) == 9600
    before = page.locator("#live").get_attribute("data-updates")
    expect(page.locator("#live")).not_to_have_attribute("data-updates", before or "")
    page.locator("#overview").click(position={"x": 4, "y": 4})
    expect(page.locator("h1")).to_have_text("Node node-0000")


def read(page: Page) -> None:
    """Wait until the cluster has been read."""
    expect(page.locator(".status")).not_to_contain_text("Read -")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_of_a_cluster_are_accessible(
    tab: Callable[..., Tab], serve_cluster: Callable[..., str], scheme: str
) -> None:
    address = serve_cluster()
    each = tab(color_scheme=scheme)
    each.goes_to(address)
    read(each.page)
    for path, text in {
        "/": "Waiting pods",
        "/waiting": "ml",
        "/pods/ml/it": "What would have to leave",
        "/pods/ml/one": "Its GPUs",
        "/what-if?gpus=2&memory=40Gi&priority=100": "These pods of lower priority",
        "/quotas": "100Gi",
        "/events": "share of 20Gi",
        "/cost": "--prometheus URL",
    }.items():
        each.page.goto(base_of(address) + path)
        expect(each.page.locator("#connection")).to_have_text("live")
        expect(each.page.locator("main")).to_contain_text(text)
        found = Axe().run(each.page)
        assert found.violations_count == 0, (path, found.generate_report())


def test_why_a_pod_waits_and_what_if_are_reached_by_keys(
    tab: Callable[..., Tab], serve_cluster: Callable[..., str]
) -> None:
    first = tab()
    page = first.page
    first.goes_to(serve_cluster())
    read(page)
    page.keyboard.press("g")
    page.keyboard.press("w")
    page.get_by_role("link", name="it", exact=True).focus()
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("Pod ml/it: waits")
    expect(page.locator("main")).to_contain_text("It fits on 0 of 2 nodes now")
    page.keyboard.press("g")
    page.keyboard.press("i")
    page.get_by_label("Memory of each").focus()
    page.keyboard.type("10Gi")
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_contain_text("It would get")
    assert "memory=10Gi" in page.url  # an address to share
    expect(page.get_by_label("Memory of each")).to_have_value("10Gi")


def test_a_pod_is_explained_among_1200_nodes(
    tab: Callable[..., Tab], serve_cluster: Callable[..., str]
) -> None:
    nodes, pods = large(1200)
    address = serve_cluster(nodes=nodes, pods=pods)
    first = tab()
    page = first.page
    first.goes_to(address)
    read(page)
    page.goto(base_of(address) + "/waiting")
    page.get_by_role("link", name="waits-7", exact=True).click()
    expect(page.locator("h1")).to_have_text("Pod ml/waits-7: waits")
    expect(page.locator("main")).to_contain_text("of 1200 nodes now")
    page.goto(base_of(address) + "/what-if?gpus=8&memory=40Gi&priority=100")
    expect(page.locator("main")).to_contain_text("These pods of lower priority")

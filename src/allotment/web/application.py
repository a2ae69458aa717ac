# SPDX-License-Identifier: Apache-2.0
"""The routes and pages, as an application of aiohttp.

A page is rendered whole. After each reading the browser asks for the same address again, and gets
the part that changes: so what is live and what is not are one template, and one address.
"""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Final
from urllib.parse import urlencode

import jinja2
from aiohttp import web

from allotment import __version__
from allotment.cost.splitting import OUTSIDE
from allotment.model.errors import AllotError, NotFoundError, UsageError
from allotment.model.formats import UNKNOWN, format_bytes, format_part
from allotment.model.structs import replace
from allotment.web.archive import RANGES, Archive, ChartLine, Costs
from allotment.web.drawing import MEASURES, bar, overview, shade
from allotment.web.fleet import (
    SORTS,
    Fleet,
    FleetGpu,
    FleetNode,
    Sight,
    matching,
    totals_of,
    visible,
)
from allotment.web.guarding import (
    STATIC,
    VIEWER,
    Guard,
    RateLimit,
    middlewares,
)
from allotment.web.tables import (
    CellKind,
    PageTable,
    Value,
    arranged,
    cost_table,
    csv_of,
    events_table,
    gpus_table,
    json_of,
    shares_table,
)
from allotment.web.watching import HistoryLines, Watch

_ROOT: Final = Path(__file__).parent
NODES_OF_A_PAGE: Final = 60
_MOST_STREAMS: Final = 64
_MOST_SEEN: Final = 16
_BEAT_S: Final = 15.0
_MOST_LINES: Final = 12
"""Of one chart."""
_FIGURES: Final[Mapping[str, str]] = {"memory": "Memory used", "time": "Time used"}
_SUBJECTS: Final = ("node", "gpu", "share")
_DAYS: Final = 7
"""Of a bill, where the address does not say."""
_NO_COSTS: Final = (
    "the cost of a cluster is computed from what Prometheus has: start `allot web` with"
    " --prometheus URL"
)
_WORTH_PACKING: Final = 4096
"""Bytes of a page."""


class Pages:
    """The pages of one fleet."""

    navigation: ClassVar[tuple[tuple[str, str, str], ...]] = (
        ("/", "Fleet", "f"),
        ("/gpus", "GPUs", "u"),
        ("/shares", "Shares", "s"),
        ("/events", "Events", "e"),
        ("/cost", "Cost", "c"),
    )
    """Address, title and key of the pages in the head."""

    def __init__(
        self,
        watch: Watch,
        *,
        title: str,
        archive: Archive | None = None,
        costs: Costs | None = None,
    ) -> None:
        """`archive`: figures of more than an hour. `costs`: bills; None: those of the archive."""
        self._watch = watch
        self._archive = archive
        self._costs = costs if archive is None else archive
        self._seen: dict[Sight, Fleet] = {}
        """What viewers saw of reading `_seen_number`."""
        self._seen_number = 0
        self._static = {
            path.name: (path, hashlib.sha256(path.read_bytes()).hexdigest()[:12])
            for path in sorted((_ROOT / "static").iterdir())
        }
        self._templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(_ROOT / "templates"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        self._templates.filters |= {
            "bytes": format_bytes,
            "percent": format_part,
            "clock": _clock,
            "cell": _cell,
        }
        self._templates.globals |= {
            "static": self._static_address,
            "bar": bar,
            "shade": shade,
            "version": __version__,
            "site": title,
            "navigation": self.navigation,
        }

    def application(self, guard: Guard, limit: RateLimit | None = None) -> web.Application:
        """Return the application; its start and end are those of the watch."""
        chain = middlewares(guard, self.refusal, limit or RateLimit())
        app = web.Application(client_max_size=64 << 10, middlewares=chain)
        app.router.add_get("/", self.fleet)
        app.router.add_get("/nodes/{name}", self.node)
        app.router.add_get("/gpus", self.gpus)
        app.router.add_get("/gpus/{uuid}", self.gpu)
        app.router.add_get("/shares", self.shares)
        app.router.add_get("/shares/{id}", self.share)
        app.router.add_get("/events", self.events)
        app.router.add_get("/cost", self.cost)
        app.router.add_get("/history", self.history)
        app.router.add_get("/live", self.live)
        app.router.add_get("/healthz", _healthz)
        app.router.add_get(STATIC + "{digest}/{name}", self.static)
        self.add_routes(app)
        app.cleanup_ctx.append(self._watching)
        app.on_shutdown.append(self._closing)
        return app

    def add_routes(self, app: web.Application) -> None:
        """Add further pages."""

    async def _watching(self, app: web.Application) -> AsyncIterator[None]:
        del app
        task = asyncio.create_task(self._watch.run())
        yield
        task.cancel()
        await asyncio.wait([task])
        if self._archive is not None:
            await self._archive.close()

    async def _closing(self, app: web.Application) -> None:
        """End the streams: the server waits for its requests."""
        del app
        self._watch.close()

    # ---- pages

    async def fleet(self, request: web.Request) -> web.Response:
        fleet = self.seen()
        query, sort = request.query.get("q", ""), request.query.get("sort", "name")
        by = request.query.get("by", "memory")
        if sort not in SORTS or by not in MEASURES:
            raise UsageError(
                "this address has an unknown order or colour",
                hint=f"sort: {', '.join(SORTS)}; by: {', '.join(MEASURES)}",
            )
        nodes = sorted(matching(fleet, query), key=SORTS[sort])
        pages = max(1, -(-len(nodes) // NODES_OF_A_PAGE))
        page = min(pages, _number(request, "page", 1))
        begin = (page - 1) * NODES_OF_A_PAGE
        return self.rendered(
            request,
            "fleet.html",
            totals=totals_of(fleet),
            fleet=fleet,
            nodes=nodes[begin : begin + NODES_OF_A_PAGE],
            found=len(nodes),
            picture=overview(nodes, by) if pages > 1 else None,
            value=MEASURES[by][1],
            measures={name: title for name, (title, _) in MEASURES.items()},
            sorts=tuple(SORTS),
            by=by,
            sort=sort,
            query=query,
            page=page,
            pages=pages,
            most=max((len(node.gpus) for node in nodes), default=0),
        )

    async def node(self, request: web.Request) -> web.Response:
        node = self._node(request.match_info["name"])
        fleet = Fleet(nodes=(node,))
        return self.rendered(
            request,
            "node.html",
            node=node,
            totals=totals_of(fleet),
            gpus=_whole(gpus_table(fleet)),
            shares=_whole(shares_table(fleet)),
            **await self._charts(request, "node", node.name),
        )

    async def gpu(self, request: web.Request) -> web.Response:
        node, gpu = self._gpu(request.match_info["uuid"])
        fleet = Fleet(nodes=(FleetNode(name=node.name, gpus=(gpu,)),))
        return self.rendered(
            request,
            "gpu.html",
            node=node,
            gpu=gpu,
            shares=_whole(shares_table(fleet)),
            **await self._charts(request, "gpu", gpu.uuid),
        )

    async def share(self, request: web.Request) -> web.Response:
        fleet = self.seen()
        wanted = request.match_info["id"]
        parts = [(node, gpu, share) for node, gpu, share in fleet.shares() if share.id == wanted]
        events = tuple(event for event in fleet.events if event.share == wanted)
        if not parts and not events:
            raise NotFoundError(
                f"there is no share {wanted}", hint="it has ended, or you may not see it"
            )
        only = Fleet(
            nodes=tuple(
                FleetNode(name=node.name, gpus=(replace(gpu, shares=(share,)),))
                for node, gpu, share in parts
            ),
            events=events,
        )
        return self.rendered(
            request,
            "share.html",
            name=parts[0][2].name if parts else wanted,
            parts=parts,
            shares=_whole(shares_table(only)),
            events=_whole(events_table(only)),
            **await self._charts(request, "share", wanted),
        )

    async def gpus(self, request: web.Request) -> web.Response:
        return self.as_table(request, gpus_table(self.seen()))

    async def shares(self, request: web.Request) -> web.Response:
        return self.as_table(request, shares_table(self.seen()))

    async def events(self, request: web.Request) -> web.Response:
        return self.as_table(request, events_table(self.seen()))

    async def cost(self, request: web.Request) -> web.Response:
        """Show the bill of `allot cost`: all of it, or the viewer's namespaces."""
        ranges = self._costs.days if self._costs else ()
        days = _number(request, "days", _DAYS)
        if ranges and days not in ranges:
            raise UsageError(f"no cost of {days} days", hint=f"days: {', '.join(map(str, ranges))}")
        bill, problem = None, _NO_COSTS
        if self._costs is not None:
            try:
                bill = await self._costs.bill(days)
            except AllotError as error:
                if request.query.get("format", "html") != "html":
                    raise
                problem = ": ".join(filter(None, (error.message, error.hint)))
        names, is_whole = None, True
        if bill is not None:
            viewer = VIEWER.get()
            is_whole = viewer.sight.sees_nodes and viewer.sight.namespaces is None
            # A namespace of the past may have nothing now, and be in no sight.
            named = frozenset(bill.namespaces) - {"", OUTSIDE}
            names = None if is_whole else await viewer.seen_of(named)
        return self.as_table(
            request,
            cost_table(bill, names),
            template="cost.html",
            bill=bill,
            is_whole=is_whole,
            problem_of_cost=problem,
            ranges=ranges,
            days=days,
        )

    # ---- what pages ask for

    async def history(self, request: web.Request) -> web.Response:
        """Return times and values: of a share, a GPU with its shares, or a node's GPUs."""
        figure = request.query.get("figure", "memory")
        subject = next((name for name in _SUBJECTS if name in request.query), "")
        if figure not in _FIGURES or not subject:
            raise UsageError(
                "this address names no chart", hint="?figure=memory&gpu=UUID, node=NAME or share=ID"
            )
        lines = self._lines(subject, request.query[subject])
        series = await self._series(lines, figure, _range(request), _seconds(request, "since"))
        return web.json_response(
            {"names": [each.name for each in lines], "times": series.times, "values": series.values}
        )

    def _lines(self, subject: str, name: str) -> list[ChartLine]:
        """Return the lines of a chart; raise `NotFoundError` for what the viewer does not see.

        Figures of a whole GPU are those of all its shares: only for those who may list nodes.
        """
        sees_nodes = VIEWER.get().sight.sees_nodes
        if subject == "node":
            node = self._node(name)
            if sees_nodes:
                return [ChartLine(f"GPU {gpu.index}", gpu) for gpu in node.gpus]
            shares = [
                ChartLine(share.name, gpu, share) for gpu in node.gpus for share in gpu.shares
            ]
            return shares[:_MOST_LINES]
        if subject == "gpu":
            gpu = self._gpu(name)[1]
            whole = [ChartLine("GPU", gpu)] if sees_nodes else []
            return [*whole, *(ChartLine(each.name, gpu, each) for each in gpu.shares)][:_MOST_LINES]
        return [
            ChartLine(f"GPU {gpu.index}", gpu, share)
            for _, gpu, share in self.seen().shares()
            if share.id == name
        ]

    async def _series(
        self, lines: list[ChartLine], figure: str, chosen: str, since: float = 0.0
    ) -> HistoryLines:
        if not chosen:
            return self._watch.history.read([line.key(figure) for line in lines], since=since)
        if self._archive is None:
            raise UsageError(
                "only the last hour is known", hint="start `allot web` with --prometheus URL"
            )
        return await self._archive.lines(lines, figure, RANGES[chosen])

    async def live(self, request: web.Request) -> web.StreamResponse:
        """Send the number of each reading, until the browser leaves.

        Also of one that ended after the page was made (`seen`), or while the connection was lost.
        """
        if self._watch.subscribers >= _MOST_STREAMS:
            return self.refusal(503, "too many open pages", "close some")
        answer = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        )
        seen = request.headers.get("Last-Event-ID", "") or request.query.get("seen", "")
        with suppress(ConnectionError), self._watch.subscribed() as news:  # the browser has left
            await answer.prepare(request)
            if seen and seen != str(self._watch.number):
                await answer.write(self._news())
            while not self._watch.is_closed:
                news.clear()
                try:
                    async with asyncio.timeout(_BEAT_S):
                        await news.wait()
                    text = self._news()
                except TimeoutError:
                    text = b": nothing new\n\n"
                await answer.write(text)
        return answer

    def _news(self) -> bytes:
        number = self._watch.number
        return f"id: {number}\nevent: reading\ndata: {number}\n\n".encode()

    async def static(self, request: web.Request) -> web.StreamResponse:
        path, digest = self._static.get(request.match_info["name"], (None, ""))
        if path is None or digest != request.match_info["digest"]:
            raise web.HTTPNotFound
        return web.FileResponse(
            path, headers={"Cache-Control": "public, max-age=31536000, immutable"}
        )

    # ---- inside

    def seen(self) -> Fleet:
        """Return what the viewer may see of the fleet; kept for a few viewers until it changes."""
        if self._seen_number != self._watch.number or len(self._seen) >= _MOST_SEEN:
            self._seen_number = self._watch.number
            self._seen.clear()
        sight = VIEWER.get().sight
        if sight not in self._seen:
            self._seen[sight] = visible(self._watch.fleet, sight)
        return self._seen[sight]

    def _node(self, name: str) -> FleetNode:
        for node in self.seen().nodes:
            if node.name == name:
                return node
        raise NotFoundError(f"there is no node {name}", hint="or you may not see it")

    def _gpu(self, uuid: str) -> tuple[FleetNode, FleetGpu]:
        for node, gpu in self.seen().gpus():
            if gpu.uuid == uuid:
                return node, gpu
        raise NotFoundError(f"there is no GPU {uuid}", hint="or you may not see it")

    async def _charts(self, request: web.Request, subject: str, name: str) -> dict[str, Any]:
        """Describe the charts, with the least, mean and most of each line in the range."""
        chosen = _range(request)
        found = []
        for figure, title in _FIGURES.items() if not _is_part(request) else ():
            lines = self._lines(subject, name)
            problem, rows = "", []
            try:
                series = await self._series(lines, figure, chosen)
            except AllotError as error:
                problem = ": ".join(filter(None, (error.message, error.hint)))
            else:
                for line, values in zip(lines, series.values, strict=True):
                    known = [value for value in values if value is not None]
                    if known:
                        rows.append((line.name, min(known), sum(known) / len(known), max(known)))
            query = urlencode({"figure": figure, subject: name, **_kept(range=chosen)})
            found.append(
                {
                    "figure": figure,
                    "title": title,
                    "rows": rows,
                    "address": f"/history?{query}",
                    "problem": problem,
                }
            )
        ranges = {"": "1h", **{each: each for each in RANGES}} if self._archive else {}
        return {"charts": found, "ranges": ranges, "chosen": chosen}

    def as_table(
        self,
        request: web.Request,
        table: PageTable,
        *,
        template: str = "table.html",
        **values: Any,  # noqa: ANN401 - a template's
    ) -> web.Response:
        """Answer with a table, as `format` asks: html, csv or json."""
        table = arranged(
            table,
            query=request.query.get("q", ""),
            sort=request.query.get("sort", ""),
            page=_number(request, "page", 1),
        )
        kind = request.query.get("format", "html")
        name = f'attachment; filename="{table.name}.{kind}"'
        if kind == "csv":
            return web.Response(
                text=csv_of(table), content_type="text/csv", headers={"Content-Disposition": name}
            )
        if kind == "json":
            return web.Response(text=json_of(table), content_type="application/json")
        if kind != "html":
            raise UsageError(f"unknown format {kind!r}", hint="html, csv or json")
        return self.rendered(request, template, table=table, **values)

    def rendered(self, request: web.Request, template: str, **values: Any) -> web.Response:  # noqa: ANN401 - a template's
        began = time.perf_counter()
        text = self._templates.get_template(template).render(
            layout="part.html" if _is_part(request) else "base.html",
            path=request.path,
            read_at=self._watch.fleet.read_at,
            pace_s=self._watch.pace_s,
            number=self._watch.number,
            problem=self._watch.problem,
            problems=self.seen().problems,
            viewer=VIEWER.get().name,
            address=_addresses(request),
            **values,
        )
        took_ms = (time.perf_counter() - began) * 1000
        answer = web.Response(text=text, content_type="text/html")
        answer.headers["Server-Timing"] = f"render;dur={took_ms:.1f}"
        answer.headers["Vary"] = "X-Part"
        if len(text) > _WORTH_PACKING:
            answer.enable_compression()
        return answer

    def login_form(self, values: Mapping[str, str]) -> web.Response:
        text = self._templates.get_template("login.html").render(**values)
        return web.Response(text=text, content_type="text/html")

    def refusal(self, status: int, message: str, hint: str | None) -> web.Response:
        text = self._templates.get_template("error.html").render(
            status=status, message=message, hint=hint or ""
        )
        return web.Response(status=status, text=text, content_type="text/html")

    def _static_address(self, name: str) -> str:
        return f"{STATIC}{self._static[name][1]}/{name}"


def _whole(table: PageTable) -> PageTable:
    return arranged(table, query="", sort="", page=1)


def _addresses(request: web.Request) -> Callable[..., str]:
    """Return a function that makes this page's address with other parameters."""

    def address(**changes: object) -> str:
        query = {**request.query, **{name: str(value) for name, value in changes.items()}}
        kept = _kept(**query)
        return request.path + (f"?{urlencode(kept)}" if kept else "")

    return address


def _kept(**query: str) -> dict[str, str]:
    return {name: value for name, value in query.items() if value}


def _is_part(request: web.Request) -> bool:
    """Tell whether the browser asks for the part of a page that changes."""
    return request.headers.get("X-Part") == "live"


def _range(request: web.Request) -> str:
    """Return the range of charts; empty: the last hour. Raises `UsageError`."""
    text = request.query.get("range", "")
    if text and text not in RANGES:
        raise UsageError("this address has an unknown range", hint=f"range: {', '.join(RANGES)}")
    return text


def _number(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() and 0 < len(text) < 7 else default  # noqa: PLR2004


def _seconds(request: web.Request, name: str) -> float:
    try:
        return float(request.query.get(name, "0"))
    except ValueError as error:
        raise UsageError(f"{name} is not a time", hint="seconds after the epoch") from error


# ---- filters of templates ------------------------------------------------------------------------


def _clock(seconds: float) -> str:
    if not seconds:
        return UNKNOWN
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


_FORMATS: Final[Mapping[CellKind, Callable[[Any], str]]] = {
    CellKind.BYTES: format_bytes,
    CellKind.PART: format_part,
    CellKind.TIME: _clock,
    CellKind.AMOUNT: "{:,.2f}".format,
}


def _cell(value: Value, kind: CellKind) -> str:
    if value is None:
        return UNKNOWN
    return _FORMATS.get(kind, str)(value)


async def _healthz(request: web.Request) -> web.Response:
    del request
    return web.Response(text="ok\n")

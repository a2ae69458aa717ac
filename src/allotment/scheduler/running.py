# SPDX-License-Identifier: Apache-2.0
"""Connects the scheduler's parts and runs them until a signal.

No state survives a restart: nodes report their GPUs, and pods their placements.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Final, NoReturn

import structlog
from prometheus_client import disable_created_metrics

from allotment import __version__
from allotment.dialects.foreign.base import ForeignDialect
from allotment.dialects.foreign.settings import foreign_dialects, memory_unit
from allotment.dialects.own.registry import need_settings
from allotment.kube.bindings import Bindings
from allotment.kube.clients import Api, connect
from allotment.kube.cluster_feed import ClusterFeed
from allotment.kube.errors import KubeError
from allotment.kube.events import Events
from allotment.kube.leases import Endpoint, LeaseCandidate, LeaseElection, ServiceEndpoint
from allotment.kube.quotas import FollowedBudgets, FollowedQuotas
from allotment.kube.sharepods import SharePods
from allotment.metrics import start_log
from allotment.metrics.scheduler import SchedulerMetrics
from allotment.metrics.serving import Probes, Server
from allotment.metrics.tracing import PodTraces, open_traces
from allotment.model.addresses import parse_address
from allotment.model.clusters import ClusterPod, PodBooking, PodNeed
from allotment.model.errors import AllotError
from allotment.model.structs import replace
from allotment.scheduler.core.book import Book
from allotment.scheduler.core.cluster_events import (
    Adoption,
    ClusterEventHandler,
    TranslationWarnings,
)
from allotment.scheduler.core.nominations import NominatedCluster
from allotment.scheduler.core.quota import QuotaBook, units_of
from allotment.scheduler.core.waiting import WaitingPods
from allotment.scheduler.extender.binder import (
    ApiBindings,
    Binder,
    TimedBindings,
    TracedBindings,
)
from allotment.scheduler.extender.compat_annotations import ResultAnnotations
from allotment.scheduler.extender.extender import Extender
from allotment.scheduler.extender.preemption import Preemption
from allotment.scheduler.feed import PodRefresh, QuotaFeed
from allotment.scheduler.figures import Books, ClusterFigures
from allotment.scheduler.gpushare import GpuShareInspection
from allotment.scheduler.leader import LeaderAddress, Leadership
from allotment.scheduler.nominating import Nominating
from allotment.scheduler.reports import SchedulerReports, SchedulingTraces
from allotment.scheduler.resizing import Resizing
from allotment.scheduler.serving import RequestHandler, Web, WebhookService, application
from allotment.scheduler.settings import SchedulerSettings
from allotment.scheduler.sharepods import SharePodKeeper
from allotment.scheduler.supervise import freeze_periodically, restart_on_failure
from allotment.scheduler.tls.context import CertificateFiles

EXTENDER_PORT: Final = "extender"
"""The port's name in the Service that routes to the leader."""

_log = structlog.get_logger("allotment.scheduler")

_TICK_S: Final = 0.5
_BEAT_S: Final = 1.0
_HANGS_S: Final = 30.0
_GOODBYE_S: Final = 5.0
_QUIET_S: Final = 1.0
_LINGER_S: Final = 5.0
"""So long requests may still arrive at a replica that is shutting down (kube-proxy)."""


def run(settings: SchedulerSettings) -> None:
    """Run until SIGTERM or SIGINT. Raises `AllotError` if it cannot start."""
    parse_address(settings.listen)
    if settings.metrics_listen is not None:
        parse_address(settings.metrics_listen)
    if settings.webhook is not None:
        parse_address(settings.webhook.listen)
    start_log(as_json=settings.log_format == "json", is_verbose=settings.verbose)
    disable_created_metrics()  # type: ignore[no-untyped-call]
    try:
        asyncio.run(_main(settings))
    except* AllotError as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


async def _main(settings: SchedulerSettings) -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    files = CertificateFiles.of(settings.tls_certificate, settings.tls_key)
    traces = open_traces(
        settings.otlp_endpoint,
        os.environ,
        service="allotment-scheduler",
        attributes={"service.instance.id": settings.identity},
    )
    async with connect(settings.kubeconfig) as api:
        scheduler = Scheduler(settings, api, files, traces)
        task = asyncio.create_task(scheduler.run())
        waiting = asyncio.create_task(ended.wait())
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not task.done():
            _log.info("ending")
            await scheduler.end()
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


class Scheduler:
    """The parts and their connections."""

    def __init__(
        self,
        settings: SchedulerSettings,
        api: Api,
        files: CertificateFiles | None,
        traces: PodTraces | None = None,
    ) -> None:
        self._settings = settings
        self._traces = traces
        self._files = files
        self.metrics = SchedulerMetrics()
        self._events = Events(
            api,
            component="allotment-scheduler",
            node=settings.identity,
            on_drop=partial(self.metrics.count, "events_dropped"),
        )
        cluster = NominatedCluster(
            node_policies=settings.node_policies, device_policies=settings.device_policies
        )
        dialects = foreign_dialects(settings.dialects)
        self.quotas = QuotaBook(units=units_of(settings.dialects))
        self._followed_quotas = FollowedQuotas(api)
        self._quota_feed = QuotaFeed(self._followed_quotas, self.quotas)
        needs = need_settings(settings.modes, settings.dialects, floor=settings.compute_floor)
        limits = replace(settings.book, needs=needs)
        self._book = Book(cluster, settings=limits, quotas=self.quotas)
        reports = SchedulerReports(self.metrics, self._events)
        self._take_over = Adoption(
            dialects,
            node=cluster.node,
            systems=settings.take_over,
            on_unread=reports.not_taken_over,
        )
        self._budgets = FollowedBudgets(api)
        self._preemption = Preemption(
            cluster,
            pods=self._reported,
            quotas=self.quotas,
            budgets=self._budgets,
            leads=self._may_write,
            needs=self._book.needs,
        )
        waiting = WaitingPods(clock=time.monotonic, leads=self._may_write)
        self._keeper = ClusterEventHandler(
            self._book,
            self.quotas,
            take_over=self._take_over,
            nominations=self._preemption.nominations,
            waiting=waiting,
            warnings=TranslationWarnings(report=reports.passed_over, leads=self._may_write),
        )
        self._feed = ClusterFeed(api, self._keeper, claims=self._keeper.claim_changed)
        self._election = _election(settings, api)
        self._leading = Leadership(
            self._feed, self._election, others=[self._quota_feed], on_end=self._rest
        )
        bindings = Bindings(api, complete=self._take_over.completed)
        self._resizing = Resizing(
            self._book,
            bindings,
            left_s=self._leading.left_s,
            clock=time.monotonic,
            refused=reports.resize_refused,
        )
        self._nominating = Nominating(
            self._book,
            waiting,
            bindings,
            left_s=self._leading.left_s,
            clock=time.monotonic,
            is_preempting=self._preemption.nominations.__contains__,
        )
        api_bindings: ApiBindings = bindings
        if traces is not None:
            api_bindings = TracedBindings(bindings, traces.measure)
        self._binder = Binder(
            self._book,
            TimedBindings(
                api_bindings,
                on_answer=partial(self.metrics.observe, "binding_seconds"),
            ),
            clock=time.monotonic,
            left_s=self._leading.left_s,
            results=self._result_annotations,
        )
        self._results = ResultAnnotations(dialects, node=cluster.node, read=partial(_read_pod, api))
        self._extender = Extender(
            self._book,
            self._binder,
            observer=reports,
            pods=self._reported,
            leads=self._may_write,
            results=self._results,
            tried=self._nominating.tried,
            claims=self._keeper.claims.wanted,
            waits=self._keeper.waits,
            traces=SchedulingTraces(traces) if traces is not None else None,
        )
        self.webhook = self._webhook(api, dialects, reports)
        self._sharepods = self._sharepod_keeper(api)
        self._rereading = PodRefresh(self._binder.reread)
        self._address = self._leader_address(api)
        self._port: int | None = None
        self._electing: asyncio.Task[NoReturn] | None = None
        self._is_ending = False
        self._beat_at = self._asked_at = time.monotonic()
        books = Books(self._book, self.quotas, self._keeper.claims, self._keeper.waits)
        self.figures = ClusterFigures(books.snapshot, leads=self._may_write)
        handlers: dict[str, RequestHandler] = {
            "filter": self._extender.filter,
            "prioritize": self._extender.prioritize,
            "bind": self._extender.bind,
            "preempt": self._preemption.preempt,
        }
        inspection = GpuShareInspection(
            self._book, unit=memory_unit(settings.dialects), claim=self._keeper.claims.get
        )
        self._web = Web(
            application(
                handlers,
                probes=self.probes(),
                registry=self.metrics.registry,
                more=self.figures.text,
                on_answer=self._answered,
                inspect=inspection.answer,
            )
        )

    def _webhook(
        self, api: Api, dialects: Sequence[ForeignDialect], reports: SchedulerReports
    ) -> WebhookService | None:
        if self._settings.webhook is None:
            return None
        listening = self._settings.webhook
        reviewing = replace(listening.webhook, notes_times=self._traces is not None)
        return WebhookService(
            api,
            replace(listening, webhook=reviewing),
            dialects=dialects,
            quotas=self.quotas,
            known=self._leading.wait_synced,
            on_answer=self._reviewed,
            observer=reports,
            leads=self._may_write,
            resizes=self._book.plan_resize,
        )

    def _sharepod_keeper(self, api: Api) -> SharePodKeeper | None:
        settings = self._settings
        if settings.webhook is None or "kubeshare" in settings.dialects.disabled:
            return None
        return SharePodKeeper(
            SharePods(api),
            leads=self._may_write,
            events=self._events,
            ignored_namespaces=settings.webhook.webhook.ignored_namespaces,
        )

    async def run(self) -> NoReturn:
        settings = self._settings
        self.figures.start()
        with contextlib.ExitStack() as stack:
            if settings.metrics_listen is not None:
                address, registry = settings.metrics_listen, self.metrics.registry
                stack.enter_context(Server(address, registry, self.probes(), self.figures.text))
            async with asyncio.TaskGroup() as group:
                for name, part in self._parts().items():
                    group.create_task(restart_on_failure(part, name, on_failure=self._failed))
                group.create_task(self._listen())
                group.create_task(self._feed.run())
                group.create_task(self._leading.run())
                group.create_task(self._beat())
                group.create_task(freeze_periodically(self._feed.wait_synced, self._is_quiet))
                if self.webhook is not None:
                    group.create_task(self.webhook.run())
                if self._election is not None:
                    self._electing = group.create_task(self._election.run())
        raise AssertionError("none of them ends")

    def _parts(self) -> Mapping[str, Callable[[], Awaitable[object]]]:
        parts: dict[str, Callable[[], Awaitable[object]]] = {
            "events": self._events.run,
            "tick": self._tick,
            "nominations": self._nominate,
            "nominating": self._nominating.run,
            "resizes": self._resizing.run,
            "quotas": self._followed_quotas.run,
            "budgets": self._budgets.run,
            "quota_book": self._quota_feed.run,
        }
        if self._sharepods is not None:
            parts["sharepods"] = self._sharepods.run
        if self._address is not None:
            parts["address"] = self._address.run
        if self._files is not None:
            parts["certificate"] = self._files.run
        return parts

    def _failed(self, part: str) -> None:
        self.metrics.count("parts_begun_anew", part)

    async def _listen(self) -> None:
        tls = self._files.context if self._files is not None else None
        guarded = self._settings.webhook
        if self.webhook is not None and guarded is not None and guarded.guard is not None:
            while not self.webhook.keeper.extender.serves:  # noqa: ASYNC110 - once, at the start
                await asyncio.sleep(0.05)
            tls = self.webhook.keeper.extender.context
        self._port = await self._web.start(parse_address(self._settings.listen), tls)
        _log.info("listening", version=__version__, port=self._port, tls=tls is not None)

    async def end(self) -> None:
        """Finish binds, hand over leadership, and stop answering.

        Reviews are answered for some more seconds, because the API server learns late of the
        shutdown and a review without an answer is a refused pod. kube-scheduler's connections are
        closed.
        """
        self._is_ending = True
        self._leading.resign()
        self._rereading.close()
        if self.webhook is not None:
            self.webhook.leave()
        await self._binder.drain(timeout_s=_GOODBYE_S)
        if self._election is not None:
            if self._electing is not None:
                self._electing.cancel()  # otherwise it would lead again
            with contextlib.suppress(KubeError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._election.resign()
            if self.webhook is not None:
                await asyncio.sleep(_LINGER_S)
        await self._web.close()
        if self.webhook is not None:
            await self.webhook.close()
        await self._events.flush(timeout_s=1.0)
        if self._traces is not None:
            await self._traces.close()

    def _reported(self, uid: str) -> ClusterPod | None:
        return self._feed.pods.get(uid)

    async def _result_annotations(self, need: PodNeed, booking: PodBooking) -> Mapping[str, str]:
        pod = self._feed.pods.get(need.uid)
        return await self._results.of(need, booking, pod.dialect if pod is not None else "")

    def _may_write(self) -> bool:
        return self._leading.leads

    def _rest(self) -> None:
        self._book.step_down(now=time.monotonic())

    async def _tick(self) -> NoReturn:
        while True:
            now = time.monotonic()
            self._rereading.want(self._book.tick(now), now=now)
            for state, number in self._book.counts().items():
                self.metrics.set("pods", number, state.value)
            self.metrics.set("leading", self._leading.leads)
            self.metrics.set("api_synced", self._leading.is_synced and not self._feed_problems())
            is_kept = self.webhook is None or self.webhook.keeper.problem is None
            self.metrics.set("webhook_certificate_kept", is_kept)
            self.metrics.set("nominations", len(self._preemption.nominations))
            self.metrics.set("pods_without_placement", len(self._keeper.unplaced))
            self.metrics.set("pods_taken_over", len(self._take_over.taken))
            self.metrics.set("pods_not_taken_over", len(self._take_over.unread))
            self.metrics.set("objects_left_out", len(self._feed.left_out))
            self.metrics.set("devices_told_twice", len(self._book.cluster.reported_twice()))
            await asyncio.sleep(_TICK_S)

    async def _nominate(self) -> NoReturn:
        await self._feed.wait_synced()
        while True:
            await self._preemption.tick()
            await self._nominating.withdraw()
            await asyncio.sleep(_TICK_S)

    async def _beat(self) -> NoReturn:
        while True:
            self._beat_at = time.monotonic()
            await asyncio.sleep(_BEAT_S)

    def _is_quiet(self) -> bool:
        return time.monotonic() - self._asked_at > _QUIET_S

    def probes(self) -> Probes:
        return Probes(
            is_healthy=self._not_healthy,
            is_ready=self._not_ready,
            is_leading=self._leading.problems,
        )

    def _not_healthy(self) -> Sequence[str]:
        silent_s = time.monotonic() - self._beat_at
        return [f"no event loop turn for {silent_s:.0f} s"] if silent_s > _HANGS_S else []

    def _not_ready(self) -> Sequence[str]:
        """Return why this replica cannot answer the API server, whether or not it leads.

        Problems that hit all replicas at once and pass do not count: a Service without a ready
        replica helps no caller, and the loaded data is good enough to go on.
        """
        if self._is_ending:
            return ["shutting down"]
        problems = list(self.webhook.problems()) if self.webhook is not None else []
        if not self._leading.is_synced:
            why = "".join(f": {error.message}" for error in self._feed_problems()[:1])
            problems.append(f"still loading pods, nodes and quotas{why}")
        return problems

    def _feed_problems(self) -> Sequence[KubeError]:
        quotas = self._quota_feed.problem
        return (*self._feed.problems, *([quotas] if quotas is not None else []))

    def _leader_address(self, api: Api) -> LeaderAddress | None:
        reached = self._settings.reached
        if reached is None:
            return None
        store = ServiceEndpoint(
            api,
            namespace=reached.namespace,
            service=reached.service,
            is_ipv6=":" in reached.address,
        )

        def own() -> Endpoint | None:
            return Endpoint(reached.address, self._port, EXTENDER_PORT) if self._port else None

        return LeaderAddress(store, own, leads=self._may_write)

    def _reviewed(self, seconds: float, status: int) -> None:
        self.metrics.observe("webhook_seconds", seconds, str(status))

    def _answered(self, verb: str, seconds: float, is_good: bool) -> None:  # noqa: FBT001 - a callback
        self._asked_at = time.monotonic()
        self.metrics.observe("request_seconds", seconds, verb)
        if not is_good:
            self.metrics.count("requests_failed", verb)


async def _read_pod(api: Api, namespace: str, name: str) -> bytes:
    path = f"/api/v1/namespaces/{namespace}/pods/{name}"
    return await api.get(path, asked=f"get pod {namespace}/{name}")


def _election(settings: SchedulerSettings, api: Api) -> LeaseElection | None:
    lease = settings.lease
    if lease is None:
        return None
    return LeaseElection(
        api,
        namespace=lease.namespace,
        name=lease.name,
        candidate=LeaseCandidate.of_process(settings.identity, settings.lease_times),
    )

# SPDX-License-Identifier: Apache-2.0
"""Puts the scheduler together, and runs it until it is told to end.

Nothing is kept that another start would not find again: nodes say what they have, and pods what
they were given.
"""

import asyncio
import contextlib
import signal
import ssl
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final, NoReturn

import structlog
from prometheus_client import disable_created_metrics

from allotment import __version__
from allotment.dialects.systems import foreign_dialects
from allotment.kube.bindings import Bindings, Exchange, LightApi
from allotment.kube.clients import Api, configuration, connect
from allotment.kube.cluster_feed import ClusterFeed
from allotment.kube.errors import KubeError
from allotment.kube.events import Events
from allotment.kube.leases import Candidate, LeaseElection
from allotment.kube.quotas import FollowedQuotas
from allotment.metrics.logs import start_log
from allotment.metrics.scheduler import SchedulerMetrics
from allotment.metrics.serving import Probes, Server, parse_address
from allotment.model.clusters import PodBooking, PodNeed
from allotment.model.compute import WHOLE
from allotment.model.errors import AllotError, UsageError
from allotment.placement.cluster import Cluster
from allotment.scheduler.binding import Binder
from allotment.scheduler.book import Book
from allotment.scheduler.extender import Extender
from allotment.scheduler.keeping import BookKeeper, DialectQuotas
from allotment.scheduler.leading import Leading
from allotment.scheduler.memory import keep_settled
from allotment.scheduler.quota import QuotaBook
from allotment.scheduler.quota_following import follow_quotas
from allotment.scheduler.quota_units import units_of
from allotment.scheduler.receipts import Receipts
from allotment.scheduler.reports import Reports
from allotment.scheduler.serving import Web, application
from allotment.scheduler.settings import SchedulerSettings
from allotment.scheduler.taking_over import TakeOver
from allotment.scheduler.webhook_serving import WebhookService

__all__ = ["Scheduler", "run"]

_log = structlog.get_logger("allotment.scheduler")

_TICK_S: Final = 0.5
_BEAT_S: Final = 1.0
_HANGS_S: Final = 30.0
_GOODBYE_S: Final = 5.0
_CERTIFICATE_S: Final = 2.0
_QUIET_S: Final = 1.0


def run(settings: SchedulerSettings) -> None:
    """Run until SIGTERM or SIGINT. Raises `AllotError` where it cannot start."""
    parse_address(settings.listen)
    if settings.metrics_listen is not None:
        parse_address(settings.metrics_listen)
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
    tls = _tls(settings)
    config = configuration(settings.kubeconfig)
    async with contextlib.AsyncExitStack() as stack:
        api = await stack.enter_async_context(connect(settings.kubeconfig))
        light: Exchange = api
        if LightApi.suits(config):
            light = LightApi(config)
            stack.push_async_callback(light.aclose)
        scheduler = Scheduler(settings, api, light, tls)
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


def _tls(settings: SchedulerSettings) -> ssl.SSLContext | None:
    """Raises `UsageError`."""
    certificate, key = settings.tls_certificate, settings.tls_key
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise UsageError(
            "a certificate and its key belong together",
            hint="give both, --tls-cert-file and --tls-key-file, or neither",
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(
            f"{certificate} and {key} are no certificate and key: {error}",
            hint="both are PEM files; the certificate comes first in its own",
        ) from error
    return context


class Scheduler:
    """The parts, each given what it needs of the others."""

    def __init__(
        self,
        settings: SchedulerSettings,
        api: Api,
        light: Exchange,
        tls: ssl.SSLContext | None,
    ) -> None:
        """Put it together; nothing is asked or opened yet."""
        self._settings = settings
        self._tls = tls
        self.metrics = SchedulerMetrics()
        self._events = Events(
            api,
            component="allotment-scheduler",
            node=settings.identity,
            on_drop=partial(self.metrics.count, "events_dropped"),
        )
        cluster = Cluster(
            node_policies=settings.node_policies, device_policies=settings.device_policies
        )
        dialects = foreign_dialects(settings.dialects)
        quotas = DialectQuotas(QuotaBook(units=units_of(settings.dialects)))
        self._followed_quotas = FollowedQuotas(api)
        self.quotas = quotas.quotas
        self._book = Book(cluster, settings=settings.book, quotas=quotas)
        reports = Reports(self.metrics, self._events)
        self._take_over = TakeOver(dialects, node=cluster.node, on_unread=reports.not_taken_over)
        self._keeper = BookKeeper(self._book, quotas, take_over=self._take_over)
        self._feed = ClusterFeed(api, self._keeper)
        self._election = _election(settings, api)
        self._leading = Leading(self._feed, self._election, on_end=self._rest)
        self._binder = Binder(
            self._book,
            Bindings(light, complete=self._take_over.completed),
            clock=time.monotonic,
            may_write=self._may_write,
            receipt=self._receipt,
        )
        self._receipts = Receipts(dialects, node=cluster.node, read=partial(_read_pod, light))
        self._extender = Extender(
            self._book,
            self._binder,
            told=reports,
            pods=self._feed.pods.get,
            leads=self._may_write,
            receipts=self._receipts,
        )
        self.webhook: WebhookService | None = None
        if settings.webhook is not None:
            self.webhook = WebhookService(
                api,
                settings.webhook,
                dialects=dialects,
                quotas=self.quotas,
                on_answer=self._reviewed,
            )
        self._beat_at = self._asked_at = time.monotonic()
        self.metrics.watch_models(self._totals)
        self._web = Web(
            application(
                {
                    "filter": self._extender.filter,
                    "prioritize": self._extender.prioritize,
                    "bind": self._extender.bind,
                    "preempt": self._extender.preempt,
                },
                probes=self.probes(),
                registry=self.metrics.registry,
                on_answer=self._answered,
            )
        )

    async def run(self) -> NoReturn:
        """Run for ever."""
        settings = self._settings
        port = await self._web.start(parse_address(settings.listen), self._tls)
        _log.info("listening", version=__version__, port=port, tls=self._tls is not None)
        with contextlib.ExitStack() as stack:
            if settings.metrics_listen is not None:
                address, registry = settings.metrics_listen, self.metrics.registry
                stack.enter_context(Server(address, registry, self.probes()))
            async with asyncio.TaskGroup() as group:
                group.create_task(self._feed.run())
                group.create_task(self._leading.run())
                group.create_task(self._events.run())
                group.create_task(self._tick())
                group.create_task(self._beat())
                group.create_task(keep_settled(self._feed.wait_synced, self._is_quiet))
                group.create_task(self._followed_quotas.run())
                group.create_task(follow_quotas(self._followed_quotas, self.quotas))
                if self.webhook is not None:
                    group.create_task(self.webhook.run())
                if self._election is not None:
                    group.create_task(self._election.run())
                if self._tls is not None:
                    group.create_task(self._renew_certificate(self._tls))
        raise AssertionError("none of them ends")

    async def end(self) -> None:
        """Stop answering, finish what is begun, and let another replica lead."""
        self._leading.resign()
        await self._web.close()
        if self.webhook is not None:
            await self.webhook.close()
        await self._binder.drain(timeout_s=_GOODBYE_S)
        if self._election is not None:
            with contextlib.suppress(KubeError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._election.resign()
        await self._events.flush(timeout_s=1.0)

    async def _receipt(self, need: PodNeed, booking: PodBooking) -> Mapping[str, str]:
        pod = self._feed.pods.get(need.uid)
        return await self._receipts.of(need, booking, pod.dialect if pod is not None else "")

    def _may_write(self) -> bool:
        return self._leading.leads

    def _rest(self) -> None:
        self._book.rest(now=time.monotonic())

    async def _tick(self) -> NoReturn:
        while True:
            for each in self._book.tick(time.monotonic()):
                with contextlib.suppress(KubeError):  # it is asked for again
                    await self._binder.reread(each.uid, each.namespace, each.name)
            for state, number in self._book.counts().items():
                self.metrics.set("pods", number, state.value)
            self.metrics.set("leading", self._leading.leads)
            self.metrics.set("api_synced", not self._feed.problems)
            self.metrics.set("pods_without_placement", len(self._keeper.strangers))
            self.metrics.set("pods_taken_over", len(self._take_over.taken))
            self.metrics.set("pods_not_taken_over", len(self._take_over.unread))
            await asyncio.sleep(_TICK_S)

    async def _beat(self) -> NoReturn:
        while True:
            self._beat_at = time.monotonic()
            await asyncio.sleep(_BEAT_S)

    def _is_quiet(self) -> bool:
        return time.monotonic() - self._asked_at > _QUIET_S

    async def _renew_certificate(self, context: ssl.SSLContext) -> NoReturn:
        """Serve a new certificate as soon as its files have changed."""
        settings = self._settings
        assert settings.tls_certificate is not None  # noqa: S101 - there is a context
        assert settings.tls_key is not None  # noqa: S101 - likewise
        known = _stamp(settings)
        while True:
            await asyncio.sleep(_CERTIFICATE_S)
            stamp = _stamp(settings)
            if stamp == known or stamp is None:
                continue
            try:
                context.load_cert_chain(settings.tls_certificate, settings.tls_key)
            except (OSError, ssl.SSLError) as error:
                _log.warning(
                    "the certificate cannot be read; the old one is served", why=str(error)
                )
                continue
            known = stamp
            _log.info("a new certificate is served")

    def probes(self) -> Probes:
        """Return what tells whether it lives, and whether it is of use."""
        return Probes(is_healthy=self._unhealthy, is_ready=self._amiss)

    def _unhealthy(self) -> Sequence[str]:
        silent_s = time.monotonic() - self._beat_at
        return [f"nothing has happened for {silent_s:.0f} s"] if silent_s > _HANGS_S else []

    def _amiss(self) -> Sequence[str]:
        webhook = self.webhook.amiss() if self.webhook is not None else ()
        return [*self._leading.amiss(), *webhook]

    def _reviewed(self, seconds: float, status: int) -> None:
        self.metrics.observe("webhook_seconds", seconds, str(status))

    def _answered(self, verb: str, seconds: float, is_good: bool) -> None:  # noqa: FBT001 - a callback
        self._asked_at = time.monotonic()
        self.metrics.observe("request_seconds", seconds, verb)
        if not is_good:
            self.metrics.count("requests_failed", verb)

    def _totals(self) -> Mapping[str, Mapping[str, float]]:
        return {
            model: {
                "devices": each.devices,
                "memory_bytes": each.memory,
                "memory_allocated_bytes": each.memory_allocated,
                "memory_fragmented_bytes": each.memory_fragmented,
                "compute": each.guarantee / WHOLE,
                "compute_allocated": each.guarantee_allocated / WHOLE,
                "compute_fragmented": each.guarantee_fragmented / WHOLE,
            }
            for model, each in self._book.cluster.totals().items()
        }


async def _read_pod(api: Exchange, namespace: str, name: str) -> bytes:
    path = f"/api/v1/namespaces/{namespace}/pods/{name}"
    return await api.get(path, asked=f"get pod {namespace}/{name}")


def _stamp(settings: SchedulerSettings) -> tuple[float, ...] | None:
    """Return when both files were written; None: they are being replaced."""
    paths = [each for each in (settings.tls_certificate, settings.tls_key) if each is not None]
    try:
        return tuple(each.stat().st_mtime for each in paths)
    except OSError:
        return None


def _election(settings: SchedulerSettings, api: Api) -> LeaseElection | None:
    lease = settings.lease
    if lease is None:
        return None
    return LeaseElection(
        api,
        namespace=lease.namespace,
        name=lease.name,
        candidate=Candidate(settings.identity, settings.lease_times),
    )

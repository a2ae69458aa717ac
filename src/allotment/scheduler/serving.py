# SPDX-License-Identifier: Apache-2.0
"""HTTP for kube-scheduler and the API server: `aiohttp` around handlers without HTTP.

Any client may connect: bodies and times are limited, errors are one line of JSON, and no request
ends the process. `--metrics-listen` serves probes and metrics in separate threads. A follower
closes each connection: kube-scheduler would otherwise reuse it and never reach the leader.
"""

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Final, NoReturn

import msgspec
import structlog
from aiohttp import web
from prometheus_client import CollectorRegistry

from allotment.dialects.foreign.base import ForeignDialect
from allotment.kube.clients import Api
from allotment.kube.webhooks import Secret, WebhookConfiguration
from allotment.metrics.serving import More, Probes, metrics_page, no_more
from allotment.model.addresses import parse_address
from allotment.model.clusters import ClusterPod
from allotment.model.errors import AllotError, PrerequisiteError, UsageError
from allotment.scheduler.admission import claims
from allotment.scheduler.admission.review import MAX_REVIEW_BYTES, AdmissionHandler, Reply
from allotment.scheduler.admission.rules import CLAIMS, PODS, all_keys, webhook_condition
from allotment.scheduler.admission.webhook import PodWebhook, WebhookSettings, routes
from allotment.scheduler.core.quota import QuotaBook
from allotment.scheduler.extender.extender import NotLeadingError
from allotment.scheduler.tls.authority import Lives
from allotment.scheduler.tls.rotation import (
    CertificateKeeper,
    KeepingSettings,
    RotationObserver,
    service_names,
)

MAX_BODY_BYTES: Final = 256 << 20
"""5,000 whole nodes are 90 MB, if kube-scheduler is configured to send them."""
INSPECT: Final = "/gpushare-scheduler/inspect"
"""As in Aliyun's gpushare-scheduler-extender (pkg/routes/routes.go)."""
_JSON: Final = "application/json"
_CLOSE_S: Final = 5.0
_READ_S: Final = 30.0
"""Limit for reading a body; kube-scheduler waits as long for an answer (`httpTimeout`)."""

RequestHandler = Callable[[bytes], bytes | Awaitable[bytes]]
Verb = str

_log = structlog.get_logger(__name__)


def application(
    handlers: Mapping[Verb, RequestHandler],
    *,
    probes: Probes,
    registry: CollectorRegistry | None = None,
    more: More = no_more,
    on_answer: Callable[[Verb, float, bool], None] | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    inspect: Callable[[str], Awaitable[bytes]] | None = None,
) -> web.Application:
    """Return an application with `POST /VERB` for each handler, and the probes.

    `inspect` answers gpushare's clients: it gets a node's name, or an empty text for all nodes.

    `/leading` is for load balancers that look for the leader; `/readyz` is true on every replica.
    If this port requires a client certificate, use `--metrics-listen`. `more` adds metrics to the
    registry's, from a thread. `on_answer` gets each call's verb, seconds and success.
    """
    app = web.Application(client_max_size=max_body_bytes)
    for verb, handler in handlers.items():
        app.router.add_post(f"/{verb}", _serve(verb, handler, on_answer))
    app.router.add_get("/healthz", _probe(probes.is_healthy))
    app.router.add_get("/readyz", _probe(probes.is_ready))
    if probes.is_leading is not None:
        app.router.add_get("/leading", _probe(probes.is_leading))
    if registry is not None:
        app.router.add_get("/metrics", _figures(registry, more))
    if inspect is not None:
        app.router.add_get(INSPECT, _inspection(inspect))
        app.router.add_get(f"{INSPECT}/{{node}}", _inspection(inspect))
    return app


def _inspection(
    inspect: Callable[[str], Awaitable[bytes]],
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def serve(request: web.Request) -> web.Response:
        content = await inspect(request.match_info.get("node", ""))
        return web.Response(body=content, content_type=_JSON)

    return serve


def _serve(
    verb: Verb, handler: RequestHandler, on_answer: Callable[[Verb, float, bool], None] | None
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def serve(request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(_READ_S):
                body = await request.read()
        except TimeoutError:
            refusal = _refusal(408, f"no complete body within {_READ_S:.0f} s", "retry")
            refusal.force_close()
            return refusal
        began = time.perf_counter()
        is_good = False
        try:
            answer = handler(body)
            content = answer if isinstance(answer, bytes) else await answer
            is_good = True
        except UsageError as error:
            return _refusal(400, error.message, error.hint)
        except NotLeadingError:
            refusal = _refusal(
                503, "another replica leads", "send requests to the leader: see /leading"
            )
            refusal.force_close()
            return refusal
        except asyncio.CancelledError:
            raise
        except Exception:  # noqa: BLE001 - a defect in one call must not stop the next
            _log.exception("a request failed", verb=verb)
            return _refusal(500, "this is a defect: see the scheduler's log", None)
        finally:
            if on_answer is not None:
                on_answer(verb, time.perf_counter() - began, is_good)
        return web.Response(body=content, content_type=_JSON)

    return serve


def _refusal(status: int, message: str, hint: str | None) -> web.Response:
    return web.json_response({"error": message, "hint": hint or ""}, status=status)


def _probe(
    check: Callable[[], Sequence[str]],
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def probe(request: web.Request) -> web.Response:
        del request
        problems = check()
        text = "".join(f"{problem}\n" for problem in problems or ("ok",))
        return web.Response(text=text, status=503 if problems else 200)

    return probe


def _figures(
    registry: CollectorRegistry, more: More
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def figures(request: web.Request) -> web.Response:
        accept = request.headers.get("Accept", "")
        text, content_type = await asyncio.to_thread(metrics_page, registry, more, accept)
        return web.Response(body=text, headers={"Content-Type": content_type})

    return figures


class Web:
    """An HTTP server, from `start` to `close`."""

    def __init__(self, app: web.Application, *, option: str = "--listen") -> None:
        """`option` sets the address."""
        self._runner = web.AppRunner(
            app, access_log=None, handle_signals=False, shutdown_timeout=_CLOSE_S
        )
        self._option = option
        self._is_set_up = False

    async def start(self, address: tuple[str, int], tls: ssl.SSLContext | None = None) -> int:
        """Listen and return the port. Raises `PrerequisiteError` if it cannot."""
        if not self._is_set_up:
            await self._runner.setup()
            self._is_set_up = True
        host, port = address
        site = web.TCPSite(self._runner, host or None, port, ssl_context=tls)
        try:
            await site.start()
        except OSError as error:
            raise PrerequisiteError(
                f"cannot listen at {host}:{port}: {error.strerror or error}",
                hint="another program uses it, perhaps another scheduler; choose one with"
                f" {self._option}",
            ) from error
        return int(self._runner.addresses[-1][1])

    async def close(self) -> None:
        await self._runner.cleanup()


_ADMISSION_READ_S: Final = 10.0
"""Limit for reading a body: the API server does not wait longer for an answer."""

_LONG_S: Final = 0.01
"""A usual review takes a tenth of this."""

Observer = Callable[[float, int], None]
"""Gets each answer's seconds and HTTP status."""


async def _at_once() -> None: ...


class GuardSettings(msgspec.Struct, frozen=True, kw_only=True):
    """TLS of the extender: only kube-scheduler may connect."""

    secret: str = "allotment-kube-scheduler"  # noqa: S105 - its name
    """The Secret of kube-scheduler's certificate, in the webhook's namespace."""
    names: tuple[str, ...] = ()
    """The extender's host names in the serving certificate."""


class ListenSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The webhook's address and certificates."""

    listen: str = ":9443"
    namespace: str = "allotment-system"
    service: str = "allotment-webhook"
    """The webhook's Service, whose name is in the certificate."""
    secret: str = "allotment-webhook"  # noqa: S105 - its name
    configuration: str | None = "allotment-scheduler"
    """The MutatingWebhookConfiguration; None: another program writes its caBundle."""
    names: tuple[str, ...] = ()
    """Additional names and addresses for the certificate."""
    lives: Lives = msgspec.field(default=Lives())
    client_authority: Path | None = None
    """The CA of the API server's client certificate, in PEM; None: any client may connect."""
    guard: GuardSettings | None = None
    """None: the extender answers any client, or uses certificates from files."""
    look_s: float = 30.0
    webhook: WebhookSettings = msgspec.field(default=WebhookSettings())


class WebhookService:
    """The webhook of one replica: `start`, then `run` beside the rest, then `close`."""

    def __init__(
        self,
        api: Api,
        settings: ListenSettings,
        *,
        dialects: Sequence[ForeignDialect],
        quotas: QuotaBook | None = None,
        known: Callable[[], Awaitable[None]] = _at_once,
        on_answer: Observer | None = None,
        observer: RotationObserver | None = None,
        leads: Callable[[], bool] = lambda: True,
        resizes: Callable[[ClusterPod], object] = lambda _: None,
    ) -> None:
        """Connect the parts; sends no request and opens no port.

        `known` returns when all pods and quotas are loaded: only then it listens. `leads`: as
        `CertificateKeeper`'s. `resizes`: as `PodWebhook`'s.
        """
        self._settings = settings
        self._known = known
        self.port: int | None = None
        """None until it listens."""
        self._is_leaving = False
        keys = all_keys(dialects)
        keeping = KeepingSettings(
            names=(
                *service_names(settings.service, settings.namespace),
                *(settings.guard.names if settings.guard is not None else ()),
                *settings.names,
            ),
            lives=settings.lives,
            conditions={PODS: webhook_condition(keys), CLAIMS: claims.CONDITION},
            look_s=settings.look_s,
            client_authority=settings.client_authority,
        )
        name = settings.configuration
        self.keeper: Final = CertificateKeeper(
            Secret(api, namespace=settings.namespace, name=settings.secret),
            WebhookConfiguration(api, name=name) if name is not None else None,
            keeping,
            clients=Secret(api, namespace=settings.namespace, name=settings.guard.secret)
            if settings.guard is not None
            else None,
            observer=observer,
            leads=leads,
        )
        webhook = PodWebhook(
            dialects, settings=settings.webhook, quotas=quotas, keys=keys, resizes=resizes
        )
        self.app: Final = webhook_application(webhook, on_answer=on_answer)
        self.app.on_response_prepare.append(self._send_away)
        self._web = Web(self.app, option="--webhook-listen")

    async def run(self) -> NoReturn:
        """Renew certificates and serve until cancelled.

        Raises `PrerequisiteError` if it cannot listen.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self.keeper.run())
            group.create_task(self._serve())
        raise AssertionError("servers never end")

    async def _serve(self) -> None:
        await self._known()
        while not self.keeper.webhook.serves:  # noqa: ASYNC110 - once, at the start
            await asyncio.sleep(0.05)
        address = parse_address(self._settings.listen)
        self.port = await self._web.start(address, self.keeper.webhook.context)
        _log.info("the webhook listens", port=self.port)

    def leave(self) -> None:
        """Keep answering, but close each connection: the next request goes elsewhere."""
        self._is_leaving = True

    def problems(self) -> Sequence[str]:
        """Return why the API server gets no trusted answer: for `/readyz`."""
        if self.keeper.is_ready:
            return () if self.port is not None else ("the webhook does not listen yet",)
        problem = self.keeper.problem
        if problem is None:
            return ("the webhook has no certificate yet",)
        text = problem.message if isinstance(problem, AllotError) else repr(problem)
        return (f"the webhook's certificates: {text}",)

    async def close(self) -> None:
        await self._web.close()

    async def _send_away(self, request: web.Request, response: web.StreamResponse) -> None:
        del request
        if self._is_leaving:
            response.force_close()
            # aiohttp has built the headers already.
            response.headers["Connection"] = "close"


def webhook_application(
    webhook: PodWebhook, *, on_answer: Observer | None = None
) -> web.Application:
    app = web.Application(client_max_size=MAX_REVIEW_BYTES)
    for path, handler in routes(webhook).items():
        app.router.add_post(path, _serve_admission(handler, on_answer))
    app.router.add_get("/healthz", _healthz)
    return app


def _serve_admission(
    handler: AdmissionHandler, on_answer: Observer | None
) -> Callable[[web.Request], Awaitable[web.Response]]:
    # Any client may send slow reviews, any number of them: binds and the Lease get at least as
    # much time of the event loop as long reviews.
    turn = asyncio.Lock()

    async def answer(body: bytes) -> Reply:
        async with turn:
            began = perf_counter()
            try:
                return handler(body)
            finally:
                took_s = perf_counter() - began
                if took_s > _LONG_S:
                    await asyncio.sleep(took_s)

    async def serve(request: web.Request) -> web.Response:
        async with asyncio.timeout(_ADMISSION_READ_S):
            body = await request.read()
        began = perf_counter()
        status = web.HTTPInternalServerError.status_code
        try:
            reply = await answer(body)
            status = reply.status
        except Exception:  # noqa: BLE001 - a defect in one review must not stop the next
            # The API server then refuses the pod, as without an answer.
            _log.exception("a review failed")
            return web.Response(status=status, text="this is a defect: see the scheduler's log")
        finally:
            if on_answer is not None:
                on_answer(perf_counter() - began, status)
        return web.Response(
            status=reply.status, body=reply.body, headers={"Content-Type": reply.content_type}
        )

    return serve


async def _healthz(request: web.Request) -> web.Response:
    del request
    return web.Response(text="ok\n")

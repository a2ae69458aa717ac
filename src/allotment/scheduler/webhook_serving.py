# SPDX-License-Identifier: Apache-2.0
"""The webhook, listening: HTTPS with certificates of its own, for the API server.

For it alone where it shows a certificate and its authority is known (`client_authority`); else
whoever reaches the port is answered: what he is told changes nothing, and takes time.

A port of its own, apart from the extender's: the API server is answered by every replica, whoever
leads, and trusts no certificate that others have to be told of. Put together here, so that whoever
starts the scheduler starts this and asks it how it is.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Final, NoReturn

import structlog
from aiohttp import web

from allotment.dialects.foreign import ForeignDialect
from allotment.kube.clients import Api
from allotment.kube.webhooks import Secret, WebhookConfiguration
from allotment.metrics.serving import parse_address
from allotment.model.errors import AllotError, PrerequisiteError
from allotment.scheduler.admission import MAX_BODY_BYTES
from allotment.scheduler.admission_keys import all_keys
from allotment.scheduler.admission_rules import webhook_condition
from allotment.scheduler.certificates import Lives
from allotment.scheduler.certificates_keeping import (
    CertificateKeeper,
    KeepingSettings,
    Told,
    service_names,
)
from allotment.scheduler.webhook import Handler, PodWebhook, Quotas, Reply, WebhookSettings, routes

__all__ = ["GuardSettings", "ListenSettings", "WebhookService", "webhook_application"]

_CLOSE_S: Final = 5.0
_READ_S: Final = 10.0
"""For a body to arrive: the API server waits for an answer no longer."""

_LONG_S: Final = 0.01
"""A review of a pod takes a tenth of it."""

Observer = Callable[[float, int], None]
"""Told of each answer: its seconds and its HTTP status."""

_log = structlog.get_logger(__name__)


async def _at_once() -> None:
    """Wait for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardSettings:
    """How the extender is served to kube-scheduler alone, by the webhook's authority."""

    secret: str = "allotment-kube-scheduler"  # noqa: S105 - its name
    """Where kube-scheduler's certificate is kept, in the webhook's namespace."""
    names: tuple[str, ...] = ()
    """By which kube-scheduler reaches the extender: for the serving certificate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenSettings:
    """Where the webhook listens and keeps its certificates."""

    listen: str = ":9443"
    namespace: str = "allotment-system"
    service: str = "allotment-webhook"
    """The Service by which the API server reaches it, which the certificate names."""
    secret: str = "allotment-webhook"  # noqa: S105 - its name
    configuration: str | None = "allotment-scheduler"
    """The MutatingWebhookConfiguration; None: somebody else writes whom to trust."""
    names: tuple[str, ...] = ()
    """More names and addresses for the certificate."""
    lives: Lives = field(default=Lives())
    client_authority: Path | None = None
    """Of the API server's certificate, in PEM; None: whoever asks is answered."""
    guard: GuardSettings | None = None
    """None: the extender is served to whoever asks, or with certificates of somebody else."""
    look_s: float = 30.0
    webhook: WebhookSettings = field(default=WebhookSettings())


class WebhookService:
    """The webhook of one replica: `start`, then `run` beside the rest, then `close`."""

    def __init__(
        self,
        api: Api,
        settings: ListenSettings,
        *,
        dialects: Sequence[ForeignDialect],
        quotas: Quotas | None = None,
        known: Callable[[], Awaitable[None]] = _at_once,
        on_answer: Observer | None = None,
        told: Told | None = None,
        leads: Callable[[], bool] = lambda: True,
    ) -> None:
        """Put it together; nothing is asked or opened yet.

        `known` returns when all is known that an answer depends on: the pods and quotas of the
        cluster. Before, it does not listen. `leads`: as the keeper's.
        """
        self._settings = settings
        self._known = known
        self._is_leaving = False
        keys = all_keys(dialects)
        keeping = KeepingSettings(
            names=(
                *service_names(settings.service, settings.namespace),
                *(settings.guard.names if settings.guard is not None else ()),
                *settings.names,
            ),
            lives=settings.lives,
            condition=webhook_condition(keys),
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
            told=told,
            leads=leads,
        )
        webhook = PodWebhook(dialects, settings=settings.webhook, quotas=quotas, keys=keys)
        self.app: Final = webhook_application(webhook, on_answer=on_answer)
        self.app.on_response_prepare.append(self._send_away)
        self._runner = web.AppRunner(
            self.app, access_log=None, handle_signals=False, shutdown_timeout=_CLOSE_S
        )

    async def run(self) -> NoReturn:
        """Make or fetch the certificates, listen, and keep both. Only cancelling ends it.

        Raises `PrerequisiteError`: it cannot listen.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self.keeper.run())
            group.create_task(self._serve())
        raise AssertionError("they do not end")

    async def _serve(self) -> None:
        await self._known()
        while not self.keeper.webhook.serves:  # noqa: ASYNC110 - once, at the start
            await asyncio.sleep(0.05)
        port = await self._listen()
        _log.info("the webhook listens", port=port)

    def leave(self) -> None:
        """Answer on, and end each connection with its answer: the next call goes elsewhere."""
        self._is_leaving = True

    def amiss(self) -> Sequence[str]:
        """Say why the API server gets no answer, or may not trust it: for `/readyz`."""
        if self.keeper.is_ready:
            return () if self.port is not None else ("the webhook does not listen yet",)
        problem = self.keeper.problem
        if problem is None:
            return ("the webhook has no certificate yet",)
        text = problem.message if isinstance(problem, AllotError) else repr(problem)
        return (f"the webhook's certificates: {text}",)

    @property
    def port(self) -> int | None:
        """Where it listens; None: not yet."""
        addresses = self._runner.addresses
        return int(addresses[0][1]) if addresses else None

    async def close(self) -> None:
        """Answer what is being asked, and stop."""
        await self._runner.cleanup()

    async def _send_away(self, request: web.Request, response: web.StreamResponse) -> None:
        del request
        if self._is_leaving:
            response.force_close()
            # Its headers are made by now.
            response.headers["Connection"] = "close"

    async def _listen(self) -> int:
        host, port = parse_address(self._settings.listen)
        await self._runner.setup()
        site = web.TCPSite(
            self._runner, host or None, port, ssl_context=self.keeper.webhook.context
        )
        try:
            await site.start()
        except OSError as error:
            raise PrerequisiteError(
                f"the webhook cannot listen at {host}:{port}: {error.strerror or error}",
                hint="another program has it, perhaps another scheduler",
            ) from error
        return self.port or port


def webhook_application(
    webhook: PodWebhook, *, on_answer: Observer | None = None
) -> web.Application:
    """Return what serves the webhook's paths, and `/healthz` for whoever looks at its port."""
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    for path, handler in routes(webhook).items():
        app.router.add_post(path, _serve(handler, on_answer))
    app.router.add_get("/healthz", _healthz)
    return app


def _serve(
    handler: Handler, on_answer: Observer | None
) -> Callable[[web.Request], Awaitable[web.Response]]:
    # Whoever reaches the port may send what takes long, and as often as he likes: what else the
    # loop does, bindings and the Lease, has as much time as the reviews that are no trifle.
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
        async with asyncio.timeout(_READ_S):
            body = await request.read()
        began = perf_counter()
        status = web.HTTPInternalServerError.status_code
        try:
            reply = await answer(body)
            status = reply.status
        except Exception:  # noqa: BLE001 - whatever it is, the next pod is answered
            # The API server refuses the pod then, as for no answer at all.
            _log.exception("a review was not answered")
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

# SPDX-License-Identifier: Apache-2.0
"""HTTP for kube-scheduler: `aiohttp` around handlers that know nothing of it.

Whoever reaches the port may send anything: bodies have a limit, a request has its time, an error is
one line of JSON, and nothing that is sent ends the process. Probes and figures are on the same
port; `--metrics-listen` has them on another one, in threads of their own, where they are answered
also while this loop is busy.

A replica that does not lead refuses and ends the connection: kube-scheduler keeps those that it
has, and would ask this one for ever, wherever its Service leads by now.
"""

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import structlog
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from allotment.metrics.serving import Probes
from allotment.model.errors import PrerequisiteError, UsageError
from allotment.scheduler.extender import NotLeadingError

__all__ = ["MAX_BODY_BYTES", "Handler", "Verb", "Web", "application"]

MAX_BODY_BYTES: Final = 256 << 20
"""5,000 whole nodes are 90 MB, where kube-scheduler has been told to send them."""
_JSON: Final = "application/json"
_CLOSE_S: Final = 5.0
_READ_S: Final = 30.0
"""For a body to arrive: kube-scheduler waits for an answer as long (`httpTimeout`)."""

Handler = Callable[[bytes], bytes | Awaitable[bytes]]
Verb = str

_log = structlog.get_logger(__name__)


def application(
    handlers: Mapping[Verb, Handler],
    *,
    probes: Probes,
    registry: CollectorRegistry | None = None,
    on_answer: Callable[[Verb, float, bool], None] | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> web.Application:
    """Return what serves `POST /VERB` for each handler, and the probes.

    `/leading` is for a load balancer that has to find the one that leads: `/readyz` is of every
    replica. Where this port asks for a certificate, it is to be had at `--metrics-listen`.
    `on_answer` is told of each call: its verb, its seconds, and whether it was answered.
    """
    app = web.Application(client_max_size=max_body_bytes)
    for verb, handler in handlers.items():
        app.router.add_post(f"/{verb}", _serve(verb, handler, on_answer))
    app.router.add_get("/healthz", _probe(probes.is_healthy))
    app.router.add_get("/readyz", _probe(probes.is_ready))
    if probes.is_leading is not None:
        app.router.add_get("/leading", _probe(probes.is_leading))
    if registry is not None:
        app.router.add_get("/metrics", _figures(registry))
    return app


def _serve(
    verb: Verb, handler: Handler, on_answer: Callable[[Verb, float, bool], None] | None
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def serve(request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(_READ_S):
                body = await request.read()
        except TimeoutError:
            refusal = _refusal(408, f"the body has not come within {_READ_S:.0f} s", "ask again")
            refusal.force_close()
            return refusal
        began = time.perf_counter()
        is_good = False
        try:
            answer = handler(body)
            found = answer if isinstance(answer, bytes) else await answer
            is_good = True
        except UsageError as error:
            return _refusal(400, error.message, error.hint)
        except NotLeadingError:
            refusal = _refusal(503, "another replica leads", "ask the one that does: /leading")
            refusal.force_close()
            return refusal
        except asyncio.CancelledError:
            raise
        except Exception:  # noqa: BLE001 - whatever it is, the next call is answered
            _log.exception("a request was not answered", verb=verb)
            return _refusal(500, "this is a defect: see the scheduler's log", None)
        finally:
            if on_answer is not None:
                on_answer(verb, time.perf_counter() - began, is_good)
        return web.Response(body=found, content_type=_JSON)

    return serve


def _refusal(status: int, message: str, hint: str | None) -> web.Response:
    return web.json_response({"error": message, "hint": hint or ""}, status=status)


def _probe(
    check: Callable[[], Sequence[str]],
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def probe(request: web.Request) -> web.Response:
        del request
        amiss = check()
        text = "".join(f"{each}\n" for each in amiss or ("ok",))
        return web.Response(text=text, status=503 if amiss else 200)

    return probe


def _figures(registry: CollectorRegistry) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def figures(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(registry), headers={"Content-Type": content_type})

    return figures


class Web:
    """Listens, from `start` to `close`."""

    def __init__(self, app: web.Application) -> None:
        """Take what is to be served."""
        self._runner = web.AppRunner(
            app, access_log=None, handle_signals=False, shutdown_timeout=_CLOSE_S
        )
        self._is_set_up = False

    async def start(self, address: tuple[str, int], tls: ssl.SSLContext | None = None) -> int:
        """Listen there, and return the port. Raises `PrerequisiteError` where it cannot."""
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
                hint="another program has it, perhaps another scheduler; --listen names another",
            ) from error
        return int(self._runner.addresses[-1][1])

    async def close(self) -> None:
        """Answer what is being asked, and stop."""
        await self._runner.cleanup()

# SPDX-License-Identifier: Apache-2.0
"""Who may see what, and how a browser is kept in bounds: headers, sessions, rate limits.

The page is read-only, so there is nothing to forge; what must not leak is its content. No script or
style inside a page runs, no other site may frame it, and nothing is stored by the browser.
"""

import hmac
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextvars import ContextVar
from typing import Final, Protocol

import msgspec
from aiohttp import typedefs, web

from allotment.model.errors import AllotError
from allotment.web.fleet import EVERYTHING, Sight

OPEN: Final = frozenset({"/healthz", "/login", "/logout"})
"""Paths that need no session; and those of static files."""
STATIC: Final = "/static/"

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
    " form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Server": "allotment",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
_MOST_CLIENTS: Final = 1024
_BURST: Final = 120.0
_PER_S: Final = 20.0

ErrorPage = Callable[[int, str, str | None], web.Response]
"""Returns a page with a status, a message and a hint."""

_log = logging.getLogger(__name__)


class Viewer(msgspec.Struct, frozen=True):
    """Who looks, and what they may see."""

    name: str
    sight: Sight = EVERYTHING
    ask: Callable[[Collection[str]], Awaitable[frozenset[str]]] | None = None
    """Finds out which of other namespaces they may see; None: `sight` says it of all."""

    async def seen_of(self, namespaces: Collection[str]) -> frozenset[str]:
        """Return those that they may see. Raises `AllotError` if that cannot be found out."""
        if self.ask is None:
            return frozenset(filter(self.sight.sees, namespaces))
        return await self.ask(namespaces)


VIEWER: Final[ContextVar[Viewer]] = ContextVar("viewer")
"""Who looks at the page that is being made."""


class Guard(Protocol):
    """Finds out who looks."""

    async def viewer(self, request: web.Request) -> Viewer | None:
        """Return the viewer; None: unknown. Raises `AllotError` if that cannot be found out."""
        ...

    def stranger(self, request: web.Request) -> web.StreamResponse:
        """Return the answer to an unknown viewer."""
        ...


class RateLimit:
    """So many requests of each client at once, and so many more each second."""

    def __init__(
        self,
        *,
        burst: float = _BURST,
        per_s: float = _PER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._burst, self._per_s, self._clock = burst, per_s, clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """By client: the requests left, and when that was counted. The last seen comes last."""

    def takes(self, client: str) -> bool:
        """Count a request; False: it is one too many."""
        now = self._clock()
        left, since = self._left.pop(client, (self._burst, now))
        left = min(self._burst, left + (now - since) * self._per_s)
        is_taken = left >= 1
        self._left[client] = (left - 1 if is_taken else left, now)
        while len(self._left) > _MOST_CLIENTS:
            self._left.popitem(last=False)
        return is_taken


class LinkGuard:
    """For one person: the printed address has a key, which a cookie replaces.

    Other users of the machine can connect to its ports, and know no key.
    """

    def __init__(self, refusal: ErrorPage) -> None:
        self.key: Final = secrets.token_urlsafe(24)
        self._session: Final = secrets.token_urlsafe(24)
        self._refusal = refusal
        self.cookie = "allotment"
        """The cookie's name. Cookies are not apart by port, so it has the port in it."""

    async def viewer(self, request: web.Request) -> Viewer | None:
        given = request.cookies.get(self.cookie, "")
        return Viewer("") if _are_equal(given, self._session) else None

    def stranger(self, request: web.Request) -> web.StreamResponse:
        if not _are_equal(request.query.get("key", ""), self.key):
            hint = "open the address that `allot web` printed; it has a key"
            return self._refusal(401, "this page needs its key", hint)
        query = {name: value for name, value in request.query.items() if name != "key"}
        answer = web.Response(
            status=303, headers={"Location": str(request.rel_url.with_query(query))}
        )
        answer.set_cookie(self.cookie, self._session, httponly=True, samesite="Strict", path="/")
        return answer


def _are_equal(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(), wanted.encode())


def middlewares(guard: Guard, refusal: ErrorPage, limit: RateLimit) -> list[typedefs.Middleware]:
    """Return the middlewares, outermost first: headers and errors, rate limit, viewer."""
    return [_secured(refusal), _limited(refusal, limit), _known(guard)]


def _secured(refusal: ErrorPage) -> typedefs.Middleware:
    @web.middleware
    async def secured(request: web.Request, handler: typedefs.Handler) -> web.StreamResponse:
        try:
            answer = await handler(request)
        except web.HTTPException as error:
            answer = refusal(error.status, error.reason.lower(), None)
        except AllotError as error:
            answer = refusal(_status(error), error.message, error.hint)
        except ConnectionError:
            raise
        except Exception:  # noqa: BLE001 - a defect in one page must not stop the next
            _log.exception("page %s failed", request.path)
            answer = refusal(500, "this is a defect of the page", "see the log of `allot web`")
        if not answer.prepared:
            answer.headers.update(HEADERS)
            answer.headers.setdefault("Cache-Control", "no-store")
        return answer

    return secured


def _limited(refusal: ErrorPage, limit: RateLimit) -> typedefs.Middleware:
    @web.middleware
    async def limited(request: web.Request, handler: typedefs.Handler) -> web.StreamResponse:
        if not limit.takes(request.remote or ""):
            answer = refusal(429, "too many requests", "wait a second")
            answer.headers["Retry-After"] = "1"
            return answer
        return await handler(request)

    return limited


def _known(guard: Guard) -> typedefs.Middleware:
    @web.middleware
    async def known(request: web.Request, handler: typedefs.Handler) -> web.StreamResponse:
        if request.path not in OPEN and not request.path.startswith(STATIC):
            viewer = await guard.viewer(request)
            if viewer is None:
                return guard.stranger(request)
            VIEWER.set(viewer)
        return await handler(request)

    return known


def _status(error: AllotError) -> int:
    return {2: 400, 4: 404}.get(error.exit_code, 503)

# SPDX-License-Identifier: Apache-2.0
"""What Kubernetes lets a viewer see: a login by token, and the viewer's rights.

The API server says whose a token is (TokenReview) and what they may list (SubjectAccessReview). The
token itself is not kept: a session has the user's name and groups, for an hour at most.
"""

import asyncio
import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Final
from urllib.parse import urlencode

import msgspec
from aiohttp import web

from allotment.kube.clients import Api, decoded
from allotment.model.errors import AllotError, BusyError
from allotment.web.fleet import Sight
from allotment.web.guarding import ErrorPage, RateLimit, Viewer

COOKIE: Final = "allotment-login"
_SESSION_S: Final = 3600.0
_RIGHTS_S: Final = 60.0
_MOST_SESSIONS: Final = 1000
_MOST_NAMESPACES: Final = 500
_MOST_ANSWERS: Final = 50_000
_AT_ONCE: Final = 16
_REVIEWS: Final = "/apis/authentication.k8s.io/v1/tokenreviews"
_ACCESS: Final = "/apis/authorization.k8s.io/v1/subjectaccessreviews"


_Question = tuple[bytes, str, str]
"""The person as JSON, the resource, the namespace (empty: all)."""


class Person(msgspec.Struct, frozen=True, rename="camel"):
    """A user as the API server names them."""

    username: str = ""
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: dict[str, list[str]] = msgspec.field(default_factory=dict)


class _TokenStatus(msgspec.Struct):
    authenticated: bool = False
    user: Person = msgspec.field(default=Person())


class _TokenReview(msgspec.Struct):
    status: _TokenStatus = msgspec.field(default_factory=_TokenStatus)


class _AccessStatus(msgspec.Struct):
    allowed: bool = False


class _AccessReview(msgspec.Struct):
    status: _AccessStatus = msgspec.field(default_factory=_AccessStatus)


_token_review: Final = msgspec.json.Decoder(_TokenReview)
_access_review: Final = msgspec.json.Decoder(_AccessReview)


class Rights:
    """Asks the API server about persons, and remembers its answers for a minute."""

    def __init__(
        self,
        api: Api,
        namespaces: Callable[[], Collection[str]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`namespaces` returns those that a page may show."""
        self._api = api
        self._namespaces = namespaces
        self._clock = clock
        self._answers: OrderedDict[_Question, tuple[float, bool]] = OrderedDict()
        """With the time of each; the oldest first."""
        self._turns = asyncio.Semaphore(_AT_ONCE)

    async def person(self, token: str) -> Person | None:
        """Return whose token it is; None: of no user. Raises `KubeError`."""
        review = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token},
        }
        body = await self._api.create(_REVIEWS, review, asked="create tokenreviews")
        status = decoded(_token_review, body, asked="create tokenreviews").status
        return status.user if status.authenticated and status.user.username else None

    async def sight(self, person: Person) -> Sight:
        """Return what a person may list. Raises `KubeError`."""
        names = self._namespaces()
        sees_nodes, pods, quotas, events = await asyncio.gather(
            self._may(person, "nodes", ""),
            self._where(person, "pods", names),
            self._where(person, "resourcequotas", names),
            self._where(person, "events", names),
        )
        return Sight(sees_nodes=sees_nodes, namespaces=pods, quotas=quotas, events=events)

    async def seen_of(self, person: Person, namespaces: Collection[str]) -> frozenset[str]:
        """Return those in which a person may list pods. Raises `KubeError`."""
        allowed = await self._where(person, "pods", namespaces)
        return frozenset(namespaces) if allowed is None else allowed

    async def _where(
        self, person: Person, resource: str, namespaces: Collection[str]
    ) -> frozenset[str] | None:
        """Return the namespaces in which a person may list a resource; None: in all."""
        if await self._may(person, resource, ""):
            return None
        names = sorted(namespaces)[:_MOST_NAMESPACES]
        allowed = await asyncio.gather(*(self._may(person, resource, name) for name in names))
        return frozenset(name for name, may in zip(names, allowed, strict=True) if may)

    async def _may(self, person: Person, resource: str, namespace: str) -> bool:
        question = (msgspec.json.encode(person), resource, namespace)
        known = self._answers.get(question)
        if known is not None and self._clock() - known[0] < _RIGHTS_S:
            return known[1]
        allowed = await self._ask(person, resource, namespace)
        self._answers.pop(question, None)
        self._answers[question] = (self._clock(), allowed)
        while len(self._answers) > _MOST_ANSWERS:
            self._answers.popitem(last=False)
        return allowed

    async def _ask(self, person: Person, resource: str, namespace: str) -> bool:
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": person.username,
                "uid": person.uid,
                "groups": person.groups,
                "extra": person.extra,
                "resourceAttributes": {
                    "verb": "list",
                    "resource": resource,
                    "namespace": namespace,
                },
            },
        }
        async with self._turns:
            asked = "create subjectaccessreviews"
            body = await self._api.create(_ACCESS, review, asked=asked)
        return decoded(_access_review, body, asked=asked).status.allowed


class _Session(msgspec.Struct, frozen=True):
    person: Person
    until: float


class LoginGuard:
    """For all users of a cluster: a token of Kubernetes, by a form or by `Authorization`."""

    def __init__(
        self,
        rights: Rights,
        refusal: ErrorPage,
        *,
        is_encrypted: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_encrypted`: the page is served by TLS."""
        self._rights = rights
        self._refusal = refusal
        self._is_encrypted = is_encrypted
        self._clock = clock
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        """By the cookie, and by the digest of a token in a header."""
        self._reviews = RateLimit(burst=20, per_s=5, clock=clock)

    async def viewer(self, request: web.Request) -> Viewer | None:
        kind, _, token = request.headers.get("Authorization", "").partition(" ")
        key = request.cookies.get(COOKIE, "")
        if kind.casefold() == "bearer" and token:
            key = hashlib.sha256(token.encode()).hexdigest()
            if self._session(key) is None:
                person = await self._review(token)
                if person is None:
                    return None
                self._keep(key, person, _RIGHTS_S)
        session = self._session(key)
        if session is None:
            return None
        person = session.person
        sight = await self._rights.sight(person)
        return Viewer(person.username, sight, partial(self._rights.seen_of, person))

    def stranger(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/live" or "X-Part" in request.headers:
            return self._refusal(401, "the session has ended", "load the page again")
        target = urlencode({"next": str(request.rel_url)})
        return web.Response(status=303, headers={"Location": f"/login?{target}"})

    async def login(self, token: str) -> str | None:
        """Return the cookie of a new session; None: the token is of no user."""
        person = await self._review(token)
        if person is None:
            return None
        key = secrets.token_urlsafe(32)
        self._keep(key, person, _SESSION_S)
        return key

    def logout(self, key: str) -> None:
        self._sessions.pop(key, None)

    def set_cookie(self, answer: web.Response, key: str) -> None:
        answer.set_cookie(
            COOKIE,
            key,
            max_age=int(_SESSION_S),
            httponly=True,
            samesite="Strict",
            secure=self._is_encrypted,
            path="/",
        )

    async def _review(self, token: str) -> Person | None:
        if not token:
            return None
        if not self._reviews.takes(""):
            raise BusyError("too many logins at once", hint="wait some seconds")
        return await self._rights.person(token)

    def _session(self, key: str) -> _Session | None:
        session = self._sessions.get(key)
        if session is not None and session.until <= self._clock():
            del self._sessions[key]
            return None
        return session

    def _keep(self, key: str, person: Person, seconds: float) -> None:
        self._sessions[key] = _Session(person, self._clock() + seconds)
        while len(self._sessions) > _MOST_SESSIONS:
            self._sessions.popitem(last=False)


class Logins:
    """The form of the login, and its two requests."""

    def __init__(
        self, guard: LoginGuard, page: Callable[[Mapping[str, str]], web.Response]
    ) -> None:
        self._guard = guard
        self._page = page

    def add_routes(self, app: web.Application) -> None:
        app.router.add_get("/login", self.form)
        app.router.add_post("/login", self.login)
        app.router.add_post("/logout", self.logout)

    async def form(self, request: web.Request) -> web.Response:
        return self._page({"next": _inside(request.query.get("next", "")), "problem": ""})

    async def login(self, request: web.Request) -> web.Response:
        _check_origin(request)
        form = await request.post()
        target = _inside(str(form.get("next", "")))
        try:
            key = await self._guard.login(str(form.get("token", "")).strip())
        except AllotError as error:
            return self._page({"next": target, "problem": error.message})
        if key is None:
            return self._page({"next": target, "problem": "the API server does not accept it"})
        answer = web.Response(status=303, headers={"Location": target})
        self._guard.set_cookie(answer, key)
        return answer

    async def logout(self, request: web.Request) -> web.Response:
        _check_origin(request)
        self._guard.logout(request.cookies.get(COOKIE, ""))
        answer = web.Response(status=303, headers={"Location": "/login"})
        answer.del_cookie(COOKIE, path="/")
        return answer


def _inside(target: str) -> str:
    """Return a path of this page: no form leads elsewhere."""
    is_inside = target.startswith("/") and not target.startswith(("//", "/\\"))
    return target if is_inside and target.isprintable() else "/"


def _check_origin(request: web.Request) -> None:
    """Refuse a form of another site."""
    origin = request.headers.get("Origin", "")
    if origin.partition("://")[2] != request.host:
        raise web.HTTPForbidden

# SPDX-License-Identifier: Apache-2.0
"""HTTP to the API server (docs/designs/api-client.md gives the reasons).

Bytes in, bytes out; callers decode. Every wait is bounded, and every failure is a `KubeError` with
the next step.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from enum import StrEnum
from http import HTTPStatus
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any, Final, Protocol, Self, TypeVar

import aiohttp
import msgspec

from allotment.kube.credentials import SERVICE_ACCOUNT, ApiServer, find_api_server
from allotment.kube.errors import (
    ConflictError,
    DeniedError,
    KubeError,
    ObjectMissingError,
    explain_failure,
    explain_refusal,
)

_CONNECT_S: Final = 5.0
_READ: Final = aiohttp.ClientTimeout(total=30.0, sock_connect=_CONNECT_S, sock_read=15.0)
_WRITE: Final = aiohttp.ClientTimeout(total=15.0, sock_connect=_CONNECT_S)
"""After this time without an answer, the outcome of a write is unknown."""
_CLOSING_S: Final = 0.25
"""What aiohttp's documentation recommends to wait for TLS connections that close."""
_MOST_CONNECTIONS: Final = 256
_MOST_READS: Final = 64
"""At a time, so that reads leave connections for writes."""
_REPEATS: Final = 3
"""Of a read and a write, if others write in between."""
_UNCHECKED: Final = {"fieldValidation": "Ignore"}
"""The API server's warnings about unknown fields are not read, and the check costs it time."""
_MAX_LINE: Final = 32 << 20  # etcd's largest object is 1.5 MiB; far more than that is no API server


class PatchKind(StrEnum):
    """The type of a patch."""

    MERGE = "application/merge-patch+json"
    """Keys replace keys; null removes a key; lists are replaced as a whole."""
    STRATEGIC = "application/strategic-merge-patch+json"
    """The same, but lists of named entries (conditions) are merged by name. No custom resources.
    Applying it costs the API server half as much: no object is written as JSON and read again
    (apiserver pkg/endpoints/handlers/patch.go, `smpPatcher`)."""


class HttpRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request."""

    method: str
    path: str
    params: Mapping[str, str] = msgspec.field(default_factory=dict)
    body: bytes | None = None
    content_type: str = "application/json"
    idle_s: float | None = None
    """For a streamed answer: the longest silence."""

    @property
    def timeout(self) -> aiohttp.ClientTimeout:
        if self.idle_s is not None:
            return aiohttp.ClientTimeout(sock_connect=_CONNECT_S, sock_read=self.idle_s)
        return _READ if self.method == "GET" else _WRITE


class HttpAnswer(Protocol):
    """An answer; reading it may raise `aiohttp.ClientError` and `OSError`."""

    status: int
    retry_after: str | None
    """The header `Retry-After`."""

    async def read(self) -> bytes: ...

    def chunks(self) -> AsyncIterator[bytes]: ...


class Transport(Protocol):
    """Sends requests. tests/twins/api_server_twin.py has a simulated one."""

    def open(self, request: HttpRequest) -> AbstractAsyncContextManager[HttpAnswer]:
        """Send a request; inside the `with`, its answer can be read.

        Raises `KubeError` for credentials, `aiohttp.ClientError` or `OSError` for no answer.
        """

    async def aclose(self) -> None: ...


class Api:
    """A client of one API server. Requests may run in parallel. Closed by `aclose`."""

    def __init__(self, transport: Transport, *, server: str, namespace: str = "default") -> None:
        """`server` is its URL, for errors."""
        self._transport = transport
        self._reads = asyncio.Semaphore(_MOST_READS)
        self.server = server
        self.namespace = namespace
        """The namespace of the service account or the kubeconfig."""
        self.is_away = False
        """It is unreachable, and that was logged: one log line for all followers."""

    async def get(self, path: str, *, asked: str, params: Mapping[str, str] | None = None) -> bytes:
        """Read an object or a list. `asked` names the request in errors: `list pods`.

        Raises `KubeError`.
        """
        async with self._reads:
            return await self._request(
                HttpRequest(method="GET", path=path, params=dict(params or {})), asked=asked
            )

    async def patch(
        self,
        path: str,
        change: object,
        *,
        asked: str,
        kind: PatchKind = PatchKind.MERGE,
        manager: str | None = None,
    ) -> bytes:
        """Change an object and return the result; raise `KubeError`.

        `manager`: the writer's name in `managedFields`, in place of the client's.
        """
        request = HttpRequest(
            method="PATCH",
            path=path,
            params={**_UNCHECKED, **({"fieldManager": manager} if manager is not None else {})},
            body=msgspec.json.encode(change),
            content_type=kind,
        )
        return await self._request(request, asked=asked)

    async def create(self, path: str, item: object, *, asked: str) -> bytes:
        """Create an object and return it; raise `KubeError`."""
        body = msgspec.json.encode(item)
        return await self._request(HttpRequest(method="POST", path=path, body=body), asked=asked)

    async def delete(self, path: str, *, uid: str, asked: str) -> None:
        """Delete the object with this uid; raise `KubeError`."""
        body = msgspec.json.encode({"preconditions": {"uid": uid}})
        await self._request(HttpRequest(method="DELETE", path=path, body=body), asked=asked)

    async def lines(
        self,
        path: str,
        *,
        asked: str,
        params: Mapping[str, str],
        idle_s: float,
        on_open: Callable[[], None],
    ) -> AsyncGenerator[bytes, None]:
        """Yield a watch's lines until the server ends the answer.

        `on_open` is called when the server accepts, which may be long before the first line.

        Raises `KubeError`, also after a silence of `idle_s` seconds.
        """
        request = HttpRequest(method="GET", path=path, params=params, idle_s=idle_s)
        rest = bytearray()
        try:
            async with self._transport.open(request) as answer:
                if answer.status >= HTTPStatus.BAD_REQUEST:
                    raise _refusal(answer, await answer.read(), asked)
                on_open()
                async for chunk in answer.chunks():
                    rest += chunk
                    if b"\n" not in chunk:
                        if len(rest) > _MAX_LINE:
                            raise KubeError(f"cannot {asked}: the answer has a line without an end")
                        continue
                    *whole, tail = bytes(rest).split(b"\n")
                    rest = bytearray(tail)
                    for line in whole:
                        if line:
                            yield line
        except (aiohttp.ClientError, OSError) as error:
            raise explain_failure(error, asked=asked, server=self.server) from error

    async def aclose(self) -> None:
        await self._transport.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def _request(self, request: HttpRequest, *, asked: str) -> bytes:
        try:
            async with self._transport.open(request) as answer:
                content = await answer.read()
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is one
            raise explain_failure(error, asked=asked, server=self.server) from error
        if answer.status >= HTTPStatus.BAD_REQUEST:
            raise _refusal(answer, content, asked)
        return content


def _refusal(answer: HttpAnswer, body: bytes, asked: str) -> KubeError:
    return explain_refusal(body, asked=asked, status=answer.status, retry_after=answer.retry_after)


class HttpTransport:
    """A `Transport` over the network."""

    def __init__(self, server: ApiServer) -> None:
        self._server = server
        self._session: aiohttp.ClientSession | None = None
        self._is_closing_one = False
        """A request was cut off, and its connection may still be closing."""

    @asynccontextmanager
    async def open(self, request: HttpRequest) -> AsyncIterator[HttpAnswer]:
        """Send a request; after a 401, send it again if there are newer credentials."""
        credentials = self._server.credentials
        authorization = await credentials.authorization()
        response = await self._send(request, authorization)
        if response.status == HTTPStatus.UNAUTHORIZED:
            credentials.refused(authorization)
            try:
                newer = await credentials.authorization()
            except BaseException:
                response.close()
                raise
            if newer != authorization:
                response.release()
                response = await self._send(request, newer)
        async with response:
            try:
                yield _NetworkAnswer(response)
            finally:
                # A watch that is left early: TLS would wait up to 30 s for the server to close.
                connection = response.connection
                if connection is not None and connection.transport is not None:
                    connection.transport.abort()

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()
            if self._is_closing_one:  # TLS waits for the server's close_notify
                await asyncio.sleep(_CLOSING_S)

    async def _send(
        self, request: HttpRequest, authorization: str | None
    ) -> aiohttp.ClientResponse:
        headers = {"Accept": "application/json"}
        if request.body is not None:
            headers["Content-Type"] = request.content_type
        if authorization is not None:
            headers["Authorization"] = authorization
        if self._session is None:
            self._session = self._opened()
        try:
            return await self._session.request(
                request.method,
                self._server.url + request.path,
                params=request.params or None,
                data=request.body,
                headers=headers,
                timeout=request.timeout,
                server_hostname=self._server.tls_server_name,
                allow_redirects=False,
            )
        except BaseException:
            self._is_closing_one = True
            raise

    def _opened(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(ssl=self._server.tls, limit=_MOST_CONNECTIONS)
        # The environment's proxies are for the internet, not for the API server.
        return aiohttp.ClientSession(
            connector=connector, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False
        )


class _NetworkAnswer:
    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.retry_after = response.headers.get("Retry-After")

    async def read(self) -> bytes:
        return await self._response.read()

    def chunks(self) -> AsyncIterator[bytes]:
        return self._response.content.iter_any()


def connect(
    kubeconfig: Path | None = None,
    *,
    context: str | None = None,
    service_account: Path = SERVICE_ACCOUNT,
) -> Api:
    """Connect by a kubeconfig, else as this pod, else by `KUBECONFIG`.

    `context`: of the kubeconfig; None: its current one. Sends nothing yet. Raises `KubeError` if
    none of them is usable.
    """
    server = find_api_server(kubeconfig, context=context, service_account=service_account)
    return Api(HttpTransport(server), server=server.url, namespace=server.namespace)


class Backoff(msgspec.Struct):
    """Waits that double from `first_s` to `most_s`, each a random part of at least half."""

    first_s: float = 0.2
    most_s: float = 10.0
    random: Random = msgspec.field(default_factory=Random)
    _failures: int = 0

    def next(self, *, at_least_s: float | None = None) -> float:
        """Return the seconds to wait after another failure.

        `at_least_s`: the server's Retry-After; at most a minute of it is honoured.
        """
        longest = min(self.most_s, self.first_s * float(1 << min(self._failures, 30)))
        self._failures += 1
        wait = longest * self.random.uniform(0.5, 1.0)
        return max(wait, min(at_least_s or 0.0, 60.0))

    def reset(self) -> None:
        self._failures = 0


MOST_LEVELS: Final = 200
"""Kubernetes' own objects have a tenth of this depth."""

# Skips strings whole, with their brackets; a string without an end is the rest of the text.
_MARKS: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]|[\]}]', re.DOTALL)
_OPENING: Final = (b"[", b"{")
_CLOSING: Final = (b"]", b"}")


def shallow(data: bytes, *, levels: int = MOST_LEVELS) -> bytes:
    """Return the text with `null` in place of each list and map that is more than `levels` deep.

    Takes time in proportion to the text. The parts removed are not checked to be JSON.
    """
    if data.count(b"[") + data.count(b"{") <= levels:
        return data
    kept: list[bytes] = []
    depth = begins = ends = 0
    for mark in _MARKS.finditer(data):
        text = mark[0]
        if text in _OPENING:
            depth += 1
            if depth == levels + 1:
                begins = mark.start()
        elif text in _CLOSING:
            depth -= 1
            if depth == levels:
                kept += (data[ends:begins], b"null")
                ends = mark.end()
    return b"".join((*kept, data[ends:])) if kept else data


T = TypeVar("T")


def decoded(decoder: "msgspec.json.Decoder[T]", data: bytes | msgspec.Raw, *, asked: str) -> T:
    """Decode an answer of the API server. Raises `KubeError`.

    Parts that are nested deeper than the decoder allows become null.
    """
    try:
        try:
            return decoder.decode(data)
        except RecursionError:
            return decoder.decode(shallow(bytes(data)))
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise KubeError(
            f"cannot parse the API server's answer to {asked}: {error}",
            hint="check that the address is the API server's, not a proxy's",
        ) from error


async def read(
    api: Api,
    path: str,
    decoder: "msgspec.json.Decoder[T]",
    *,
    asked: str,
    params: Mapping[str, str] | None = None,
) -> T:
    """Read an object or a list. Raises `KubeError`."""
    return decoded(decoder, await api.get(path, asked=asked, params=params), asked=asked)


async def read_and_write(change: Callable[[], Awaitable[T]]) -> T:
    """Return what a change returns that reads an object and writes at the version read.

    Repeats it a few times if others write in between. Raises its `KubeError`.
    """
    for _ in range(_REPEATS):
        with suppress(ConflictError):
            return await change()
    return await change()


async def find(api: Api, path: str, decoder: "msgspec.json.Decoder[T]", *, asked: str) -> T | None:
    """Read an object; None if it does not exist. Raises `KubeError`."""
    try:
        return await read(api, path, decoder, asked=asked)
    except ObjectMissingError:
        return None


_ABSENT_S: Final = 300.0
"""Between two looks for an API that the server lacks."""
_ANY: Final = msgspec.json.Decoder(dict[str, Any])


async def until_served(api: Api, path: str, *, on_absent: Callable[[], None]) -> None:
    """Return once the server has an API: it may be upgraded.

    `on_absent` is called when it lacks it, or does not say.
    """
    backoff = Backoff()
    while True:
        try:
            if await find(api, path, _ANY, asked=f"look for {path}") is not None:
                return
            on_absent()
            wait_s = _ABSENT_S
        except KubeError as error:
            if isinstance(error, DeniedError):
                on_absent()
            wait_s = backoff.next(at_least_s=error.retry_after_s)
        await asyncio.sleep(wait_s)

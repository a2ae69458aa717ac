# SPDX-License-Identifier: Apache-2.0
"""Follows a list of objects, like client-go's reflector.

Lists once, then watches, and resumes each watch where it ended. Lists again only if the server has
dropped that version; differences then count as changes. While the server is away, values stay as
they were: see `problem`.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import Generic, NoReturn, Protocol, TypeVar

import msgspec
import structlog

from allotment.kube.clients import Api, Backoff, decoded, read
from allotment.kube.errors import GoneError, KubeError, UnreachableError, explain_refusal
from allotment.kube.objects import Metadata, ObjectList, WatchEvent

_IDLE_S = 150.0
"""After this silence the connection counts as dead: the server sends a bookmark each minute
(apiserver pkg/storage/cacher, bookmarkFrequency)."""
_PAGE = 50
"""The most undecoded objects in memory: up to 1.5 MiB each."""
_STEADY_S = 5.0  # a watch of this length has worked
_RECHECK_S = 5.0  # the shortest time between two lists

_log = structlog.get_logger(__name__)


class _HasMetadata(Protocol):
    @property
    def metadata(self) -> Metadata: ...


ItemT = TypeVar("ItemT", bound=_HasMetadata)
ValueT = TypeVar("ValueT")
DecodedT = TypeVar("DecodedT")


class _Bookmark(msgspec.Struct):
    """An object of which only the version is read."""

    metadata: Metadata


_BOOKMARK = msgspec.json.Decoder(_Bookmark)


class Subject(msgspec.Struct, Generic[ItemT, ValueT], frozen=True):
    """The followed objects, and their conversion."""

    name: str
    """For errors: `pods of node n1`."""
    path: str
    item: type[ItemT]
    convert: Callable[[ItemT], ValueT]
    fields: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The field selector."""
    labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The label selector."""
    page: int = _PAGE
    """The page size of lists."""


class Following(Generic[ItemT, ValueT]):
    """The objects of a subject, by uid, as last reported."""

    def __init__(
        self,
        api: Api,
        subject: Subject[ItemT, ValueT],
        *,
        backoff: Backoff | None = None,
        on_change: Callable[[str, ValueT | None], None] | None = None,
    ) -> None:
        """Needs `run` running.

        `on_change` gets the uid of each object that was added, changed or deleted (None), for
        callers that keep more than the values.
        """
        self._api = api
        self._subject = subject
        self._backoff = backoff or Backoff()
        self._items = decoder_of_lists(subject.item)
        self._item = msgspec.json.Decoder(subject.item)
        self._event = msgspec.json.Decoder(WatchEvent)
        self._version: str | None = None
        self._on_change = on_change
        self._watching: asyncio.Timeout | None = None
        self._hurry = asyncio.Event()
        self._listed_at = float("-inf")
        self._lists_begun = 0
        self._lists_done = 0
        self._lists_needed = 1
        """The number of the first list that is new enough for all callers."""
        self.values: dict[str, ValueT] = {}
        """By the object's uid. Read-only."""
        self.unread: dict[str, str] = {}
        """By uid, objects that `convert` fails for, and why: they keep their last valid value.
        Read-only."""
        self.is_synced = False
        """The objects have been listed once."""
        self.problem: KubeError | None = None
        """Why the server cannot be followed at present."""
        self.signal = Signal()
        """Notified after every change of these."""

    async def run(self) -> NoReturn:
        while True:
            began = _now()
            try:
                while self._version is None or self._lists_done < self._lists_needed:
                    self._version = await self._list()
                await self._watch(self._version)
            except GoneError:
                self._version = None
            except KubeError as error:
                self._tell(error)
            if _now() - began >= _STEADY_S:
                self._backoff.reset()
            await self._pause()

    @property
    def version(self) -> str:
        """The version up to which all changes are known; empty before the first list."""
        return self._version or ""

    def recheck(self) -> None:
        """List again or retry at once: something seems to be missing.

        For a connection that died unnoticed. Frequent calls are harmless: lists are at least 5 s
        apart.
        """
        self._hurry.set()
        if self._watching is not None and _now() - self._listed_at >= _RECHECK_S:
            self._watching.reschedule(_now())

    async def list_anew(self) -> None:
        """Return when a list that began after this call is complete.

        Waits while the server is away.

        For callers that must be certain; `recheck` is for doubt.
        """
        number = self._lists_needed = self._lists_begun + 1
        self._hurry.set()
        if self._watching is not None:
            self._watching.reschedule(_now())
        async for _ in self.signal.changes():
            if self._lists_done >= number:
                return

    async def _pause(self) -> None:
        wait_s = self._backoff.next(at_least_s=self.problem.retry_after_s if self.problem else None)
        with suppress(TimeoutError):  # a pause usually ends so
            async with asyncio.timeout(wait_s):
                await self._hurry.wait()
        self._hurry.clear()

    async def _list(self) -> str:
        """List everything; return its version.

        The request names no version, so the answer is as new as the request even from a cache: an
        older list could miss a running pod.
        """
        subject = self._subject
        self._lists_begun += 1
        number = self._lists_begun
        values: dict[str, ValueT] = {}
        unread: dict[str, str] = {}
        version = ""
        params = {**_selected(subject), "limit": str(subject.page)}
        asked = f"list {subject.name}"
        async for page in pages(self._api, subject.path, self._items, asked=asked, params=params):
            version = page.metadata.resource_version
            for item in page.items or ():
                self._read(item, values, unread)
        self._listed_at = _now()
        before, self.values, self.unread = self.values, values, unread
        self._tell_differences(before)
        self.is_synced = True
        self._lists_done = number
        self._heard()
        self.signal.notify()
        return version

    async def _watch(self, version: str) -> None:
        lasting_s = random.uniform(300, 600)  # noqa: S311 - to spread nodes' requests
        lines = self._api.lines(
            self._subject.path,
            asked=f"watch {self._subject.name}",
            params={
                "watch": "true",
                "allowWatchBookmarks": "true",
                **_selected(self._subject),
                "resourceVersion": version,
                "timeoutSeconds": str(int(lasting_s)),
            },
            idle_s=_IDLE_S,
            on_open=self._heard,
        )
        try:
            async with asyncio.timeout(None) as self._watching:
                await self._hear(lines)
        except TimeoutError:
            self._version = None  # a recheck was requested
        finally:
            self._watching = None
            await lines.aclose()

    async def _hear(self, lines: AsyncIterator[bytes]) -> None:
        async for line in lines:
            event = self._decoded(self._event, line)
            if event.type == "ERROR":
                raise explain_refusal(bytes(event.object), asked=f"watch {self._subject.name}")
            if event.type == "BOOKMARK":
                self._version = self._decoded(_BOOKMARK, event.object).metadata.resource_version
                continue
            self._take(event)

    def _take(self, event: WatchEvent) -> None:
        item = self._decoded(self._item, event.object)
        uid = item.metadata.uid
        before = self.values.get(uid)
        if event.type == "DELETED":
            self.values.pop(uid, None)
            self.unread.pop(uid, None)
        else:
            self._read(item, self.values, self.unread)
        value = self.values.get(uid)
        self._version = item.metadata.resource_version
        if value != before:
            self._changed(uid, value)
            self.signal.notify()

    def _read(self, item: ItemT, values: dict[str, ValueT], unread: dict[str, str]) -> None:
        """Put an object into `values`; if its conversion fails, keep its last valid value.

        Any author may have caused the failure, so it must not stop the others.
        """
        uid = item.metadata.uid
        try:
            values[uid] = self._subject.convert(item)
        except Exception as error:  # noqa: BLE001 - for that reason
            if uid not in self.unread:
                name = f"{item.metadata.namespace}/{item.metadata.name}"
                _log.exception("cannot be parsed", object=name, subject=self._subject.name)
            unread[uid] = f"{type(error).__name__}: {error}"
            if uid in self.values:
                values[uid] = self.values[uid]
        else:
            unread.pop(uid, None)

    def _tell_differences(self, before: Mapping[str, ValueT]) -> None:
        """Report the changes of a new list: deletions first, as they make room."""
        if self._on_change is None:
            return
        for uid in before.keys() - self.values.keys():
            self._changed(uid, None)
        for uid, value in self.values.items():
            if before.get(uid) != value:
                self._changed(uid, value)

    def _changed(self, uid: str, value: ValueT | None) -> None:
        """Report one object; a failure does not stop the others."""
        if self._on_change is None:
            return
        try:
            self._on_change(uid, value)
        except Exception:  # noqa: BLE001 - for that reason
            _log.exception(
                "event handler failed; event ignored", uid=uid, subject=self._subject.name
            )

    def _decoded(
        self, decoder: "msgspec.json.Decoder[DecodedT]", data: bytes | msgspec.Raw
    ) -> DecodedT:
        try:
            return decoded(decoder, data, asked=f"watch {self._subject.name}")
        except KubeError:
            # Resuming would deliver it again: list again.
            self._version = None
            raise

    def _heard(self) -> None:
        if self.problem is not None:
            self._api.is_away = False
            _log.info("API server is back", subject=self._subject.name)
            self.problem = None
            self.signal.notify()

    def _tell(self, problem: KubeError) -> None:
        """Record the problem; log once for each kind."""
        if self.problem is None or self.problem.status != problem.status:
            is_away = isinstance(problem, UnreachableError)
            tell = _log.debug if is_away and self._api.is_away else _log.warning
            tell(problem.message, subject=self._subject.name, hint=problem.hint)
            self._api.is_away = self._api.is_away or is_away
            self.problem = problem
            self.signal.notify()
        self.problem = problem


class Followed(Generic[ItemT, ValueT]):
    """Objects of one kind that are followed, for subclasses with queries.

    Needs `run` running; no other method sends a request.
    """

    def __init__(
        self, api: Api, subject: Subject[ItemT, ValueT], *, backoff: Backoff | None = None
    ) -> None:
        self._following = Following(api, subject, backoff=backoff)

    async def run(self) -> NoReturn:
        await self._following.run()

    @property
    def is_synced(self) -> bool:
        return self._following.is_synced

    @property
    def problem(self) -> KubeError | None:
        return self._following.problem

    def changes(self) -> AsyncIterator[None]:
        """Yield at once, and after changes; several changes are merged."""
        return self._following.signal.changes()


def _selected(subject: Subject[ItemT, ValueT]) -> dict[str, str]:
    """Return the selectors' parameters; none select everything."""
    selectors = {"fieldSelector": subject.fields, "labelSelector": subject.labels}
    return {
        name: ",".join(f"{key}={value}" for key, value in selector.items())
        for name, selector in selectors.items()
        if selector
    }


def _now() -> float:
    return asyncio.get_running_loop().time()


_ItemT = TypeVar("_ItemT")


def decoder_of_lists(item: type[_ItemT]) -> "msgspec.json.Decoder[ObjectList[_ItemT]]":
    return msgspec.json.Decoder(ObjectList[item])  # type: ignore[valid-type]


async def pages(
    api: Api,
    path: str,
    decoder: "msgspec.json.Decoder[ObjectList[_ItemT]]",
    *,
    asked: str,
    params: Mapping[str, str],
) -> AsyncIterator[ObjectList[_ItemT]]:
    """Yield a list's pages; `params` has the page size (`limit`).

    All pages have the version of the first. Raises `KubeError`; `GoneError` if the server dropped
    that version between two pages.
    """
    asking = dict(params)
    while True:
        page = await read(api, path, decoder, asked=asked, params=asking)
        yield page
        next_page = page.metadata.next_page
        if not next_page or next_page == asking.get("continue"):
            return
        asking["continue"] = next_page


class Signal:
    """A change that tasks can wait for. For one event loop."""

    def __init__(self) -> None:
        self._listeners: set[asyncio.Event] = set()

    def notify(self) -> None:
        for listener in self._listeners:
            listener.set()

    async def changes(self) -> AsyncIterator[None]:
        """Yield at once, and after each change; several changes are merged."""
        event = asyncio.Event()
        event.set()
        self._listeners.add(event)
        try:
            while True:
                await event.wait()
                event.clear()
                yield
        finally:
            self._listeners.discard(event)

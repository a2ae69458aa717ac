# SPDX-License-Identifier: Apache-2.0
"""Following a list of objects: what client-go calls a reflector, for a few objects or for all.

A list, then a watch from there on. The watch is renewed from where it ended; a new list is made
only when the server has forgotten that far back, and then what differs counts as changed. While the
server is away, what is known stays known: whoever needs to be sure looks at `problem`.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, NoReturn, Protocol, TypeVar

import msgspec
import structlog

from allotment.kube.backoff import Backoff
from allotment.kube.clients import Api
from allotment.kube.errors import GoneError, KubeError, UnreachableError, explain_refusal
from allotment.kube.listing import decoded, pages
from allotment.kube.objects import Metadata, ObjectList, WatchEvent
from allotment.kube.signals import Signal

__all__ = ["Followed", "Following", "Subject"]

_IDLE_S = 150.0
"""Without a line for so long, the connection counts as dead: the server sends a bookmark each
minute (apiserver pkg/storage/cacher, bookmarkFrequency)."""
_PAGE = 50
"""As many objects are in memory as they were written, at most: up to 1.5 MiB each."""
_STEADY_S = 5.0  # a watch that lived for so long has worked
_RECHECK_S = 5.0  # nobody can make us list more often

_log = structlog.get_logger(__name__)


class _HasMetadata(Protocol):
    @property
    def metadata(self) -> Metadata: ...


ItemT = TypeVar("ItemT", bound=_HasMetadata)
ValueT = TypeVar("ValueT")
DecodedT = TypeVar("DecodedT")


class _Bookmark(msgspec.Struct):
    """An object of which the version alone counts."""

    metadata: Metadata


_BOOKMARK = msgspec.json.Decoder(_Bookmark)


@dataclass(frozen=True, slots=True)
class Subject(Generic[ItemT, ValueT]):
    """What is followed, and what of it is kept."""

    name: str
    """In words, for errors: `pods of node n1`."""
    path: str
    fields: Mapping[str, str]
    """The field selector."""
    item: type[ItemT]
    items: type[ObjectList[ItemT]]
    convert: Callable[[ItemT], ValueT]
    page: int = _PAGE
    """As many objects are listed at once."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """The label selector."""


class Following(Generic[ItemT, ValueT]):
    """The objects of a subject, by uid, as far as they have been heard of."""

    def __init__(
        self,
        api: Api,
        subject: Subject[ItemT, ValueT],
        *,
        backoff: Backoff | None = None,
        on_change: Callable[[str, ValueT | None], None] | None = None,
    ) -> None:
        """Know nothing yet; `run` has to be running.

        `on_change` is called for each object that came, changed or went (None), by its uid: for
        whoever keeps more than is here, and cannot look at everything each time.
        """
        self._api = api
        self._subject = subject
        self._backoff = backoff or Backoff()
        self._items = msgspec.json.Decoder(subject.items)
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
        """The number of the first list that does for everybody who asked."""
        self.values: dict[str, ValueT] = {}
        """By the object's uid. To be read only."""
        self.unread: dict[str, str] = {}
        """Objects that `convert` fails for, and why: they stay as they were known. By uid; to be
        read only."""
        self.is_synced = False
        """It has been listed once."""
        self.problem: KubeError | None = None
        """Why nothing is heard at present."""
        self.signal = Signal()
        """Of every change of the three."""

    async def run(self) -> NoReturn:
        """Follow for ever. Only cancelling ends it."""
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
        """As of which version everything has been heard; empty: nothing has."""
        return self._version or ""

    def recheck(self) -> None:
        """List again, or ask again at once where it is waiting to: something seems to be missing.

        For the case of a connection that is dead without anybody having been told. Asking often
        is harmless: lists are at least 5 s apart.
        """
        self._hurry.set()
        if self._watching is not None and _now() - self._listed_at >= _RECHECK_S:
            self._watching.reschedule(_now())

    async def list_anew(self) -> None:
        """Return when a list that began after this call is known. Waits while the server is away.

        For whoever has to be sure that nothing is missing; `recheck` is for doubt.
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
        with suppress(TimeoutError):  # the usual end of a pause
            async with asyncio.timeout(wait_s):
                await self._hurry.wait()
        self._hurry.clear()

    async def _list(self) -> str:
        """List everything; return the version that it is of.

        Without a version in the request: the answer is as new as the request, also where an API
        server answers from its cache. A list from the past could miss a pod that runs.
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
        """Hear of changes until the server, a recheck or an error ends it."""
        lasting_s = random.uniform(300, 600)  # noqa: S311 - so that nodes do not come together
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
            self._version = None  # someone misses something
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
        """Put an object into `values`; where it cannot be converted, as it was known.

        Anybody may have written what makes that fail, and all others are to be followed on.
        """
        uid = item.metadata.uid
        try:
            values[uid] = self._subject.convert(item)
        except Exception as error:  # noqa: BLE001 - for that reason
            if uid not in self.unread:
                name = f"{item.metadata.namespace}/{item.metadata.name}"
                _log.exception("not understood", object=name, subject=self._subject.name)
            unread[uid] = f"{type(error).__name__}: {error}"
            if uid in self.values:
                values[uid] = self.values[uid]
        else:
            unread.pop(uid, None)

    def _tell_differences(self, before: Mapping[str, ValueT]) -> None:
        """Tell what another list has changed: first what went, which makes room."""
        if self._on_change is None:
            return
        for uid in before.keys() - self.values.keys():
            self._changed(uid, None)
        for uid, value in self.values.items():
            if before.get(uid) != value:
                self._changed(uid, value)

    def _changed(self, uid: str, value: ValueT | None) -> None:
        """Tell of one object: whoever is told and fails of it is told of all others."""
        if self._on_change is None:
            return
        try:
            self._on_change(uid, value)
        except Exception:  # noqa: BLE001 - for that reason
            _log.exception("not taken note of", uid=uid, subject=self._subject.name)

    def _decoded(
        self, decoder: "msgspec.json.Decoder[DecodedT]", data: bytes | msgspec.Raw
    ) -> DecodedT:
        try:
            return decoded(decoder, data, asked=f"watch {self._subject.name}")
        except KubeError:
            # From where it was, it would come again: list anew.
            self._version = None
            raise

    def _heard(self) -> None:
        if self.problem is not None:
            self._api.is_away = False
            _log.info("API server is back", subject=self._subject.name)
            self.problem = None
            self.signal.notify()

    def _tell(self, problem: KubeError) -> None:
        """Note why nothing is heard; in the log once for each kind of trouble."""
        if self.problem is None or self.problem.status != problem.status:
            is_away = isinstance(problem, UnreachableError)
            tell = _log.debug if is_away and self._api.is_away else _log.warning
            tell(problem.message, subject=self._subject.name, hint=problem.hint)
            self._api.is_away = self._api.is_away or is_away
            self.problem = problem
            self.signal.notify()
        self.problem = problem


class Followed(Generic[ItemT, ValueT]):
    """Objects that are followed, of one kind, with questions of their own.

    `run` has to be running; nothing else here asks the server.
    """

    def __init__(
        self, api: Api, subject: Subject[ItemT, ValueT], *, backoff: Backoff | None = None
    ) -> None:
        """Know nothing yet."""
        self._following = Following(api, subject, backoff=backoff)

    async def run(self) -> NoReturn:
        """Follow for ever."""
        await self._following.run()

    @property
    def is_synced(self) -> bool:
        """All of them have been listed once since the start."""
        return self._following.is_synced

    @property
    def problem(self) -> KubeError | None:
        """Why nothing is heard of them at present."""
        return self._following.problem

    def changes(self) -> AsyncIterator[None]:
        """Yield at once, and when any came, changed or went; several changes at once."""
        return self._following.signal.changes()


def _selected(subject: Subject[ItemT, ValueT]) -> dict[str, str]:
    """Return the parameters that select; without fields and labels none: everything."""
    selectors = {"fieldSelector": subject.fields, "labelSelector": subject.labels}
    return {
        name: ",".join(f"{key}={value}" for key, value in selector.items())
        for name, selector in selectors.items()
        if selector
    }


def _now() -> float:
    return asyncio.get_running_loop().time()

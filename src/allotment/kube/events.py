# SPDX-License-Identifier: Apache-2.0
"""Events for `kubectl describe` on pods and nodes. Never blocks, never fails.

Core v1, not events.k8s.io/v1: both share one storage, but only the former shows a repetition's last
time. A repetition within ten minutes raises the count. Events beyond an object's rate limit are
dropped and counted.
"""

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import NoReturn

import msgspec
import structlog

from allotment.kube.clients import Api, Backoff
from allotment.kube.errors import KubeError, ObjectMissingError
from allotment.model.formats import shortened
from allotment.model.structs import replace

_SAME_S = 600.0
"""A repetition within this time raises the count of the same event."""
_MOST_WAITING = 512
_MOST_KNOWN = 2048
_BURST = 25
_REFILL_S = 30.0
"""An object has `_BURST` events free, and one more per period."""
_MOST_MESSAGE = 1024
"""The limit of events.k8s.io/v1; core v1 allows more."""
_MOST_REASON = 128
_MOST_NAME = 253 - 17

_log = structlog.get_logger(__name__)


class Reference(msgspec.Struct, frozen=True):
    """An event's object."""

    kind: str
    """For example Pod or Node."""
    name: str
    uid: str
    namespace: str = ""
    """Empty for a node: its events are in `default`."""
    api_version: str = "v1"


class Happening(msgspec.Struct, frozen=True):
    """An event's content: the same content twice is one event with a count of two."""

    about: Reference
    reason: str
    message: str
    is_warning: bool


class EventEntry(msgspec.Struct, frozen=True):
    """An event at the server, or on its way there."""

    name: str
    """Its name at the server; empty: not created yet."""
    count: int
    first: float
    """Seconds since the epoch."""
    last: float


class EventBook:
    """Sent and waiting events. No I/O; time is an argument (seconds)."""

    def __init__(
        self, *, most_waiting: int = _MOST_WAITING, burst: int = _BURST, refill_s: float = _REFILL_S
    ) -> None:
        self._most_waiting = most_waiting
        self._burst = burst
        self._refill_s = refill_s
        self._sent: OrderedDict[Happening, EventEntry] = OrderedDict()
        self._waiting: OrderedDict[Happening, EventEntry] = OrderedDict()
        self._allowances: OrderedDict[Reference, tuple[float, float]] = OrderedDict()

    def add(self, happening: Happening, *, now: float) -> bool:
        """Queue an event. False: dropped, because there are too many."""
        waiting = self._waiting.get(happening)
        if waiting is not None:
            self._waiting[happening] = replace(waiting, count=waiting.count + 1, last=now)
            return True
        if len(self._waiting) >= self._most_waiting or not self._allow(happening.about, now):
            return False
        sent = self._sent.get(happening)
        if sent is None or now - sent.last > _SAME_S:
            self._waiting[happening] = EventEntry("", 1, now, now)
        else:
            self._waiting[happening] = replace(sent, count=sent.count + 1, last=now)
        return True

    def next(self) -> tuple[Happening, EventEntry] | None:
        """Return the oldest waiting event; it stays in the queue."""
        return next(iter(self._waiting.items()), None)

    def sent(self, happening: Happening, entry: EventEntry) -> None:
        """Record that this was sent, as `entry`. A repetition meanwhile still waits."""
        waiting = self._waiting.get(happening)
        if waiting is not None and waiting.count == entry.count:
            del self._waiting[happening]
        elif waiting is not None:
            self._waiting[happening] = replace(waiting, name=entry.name)
            self._waiting.move_to_end(happening)
        self._sent[happening] = entry
        self._sent.move_to_end(happening)
        while len(self._sent) > _MOST_KNOWN:
            self._sent.popitem(last=False)

    def lost(self, happening: Happening) -> None:
        """Record that the server has dropped the event: it will be created again."""
        self._sent.pop(happening, None)
        waiting = self._waiting.get(happening)
        if waiting is not None:
            self._waiting[happening] = replace(waiting, name="")

    def drop(self, happening: Happening) -> None:
        self._waiting.pop(happening, None)

    def _allow(self, about: Reference, now: float) -> bool:
        left, at = self._allowances.get(about, (float(self._burst), now))
        left = min(float(self._burst), left + max(0.0, now - at) / self._refill_s)
        is_allowed = left >= 1
        self._allowances[about] = (left - 1 if is_allowed else left, now)
        self._allowances.move_to_end(about)
        while len(self._allowances) > _MOST_KNOWN:
            self._allowances.popitem(last=False)
        return is_allowed


class Events:
    """Sends events to the API server. Events before `run` wait for it."""

    def __init__(
        self,
        api: Api,
        *,
        component: str,
        node: str,
        on_drop: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
        backoff: Backoff | None = None,
    ) -> None:
        """`component` and `node` name the sender. `on_drop` is called per dropped event."""
        self._api = api
        self._component = component
        self._node = node
        self._on_drop = on_drop
        self._clock = clock
        self._book = EventBook()
        self._more = asyncio.Event()
        self._backoff = backoff or Backoff(first_s=0.5, most_s=30.0)

    def tell(
        self,
        about: Reference,
        *,
        reason: str,
        message: str,
        is_warning: bool,
        at: float | None = None,
    ) -> None:
        """Create an event, eventually. Call it in the event loop's thread.

        `at`: when it happened, in seconds since the epoch, if not now.
        """
        happening = Happening(
            about, reason[:_MOST_REASON], shortened(message, _MOST_MESSAGE), is_warning
        )
        if self._book.add(happening, now=self._clock() if at is None else at):
            self._more.set()
        else:
            self._on_drop()

    async def run(self) -> NoReturn:
        while True:
            following = self._book.next()
            if following is None:
                self._more.clear()
                await self._more.wait()
                continue
            await self._tell(*following)

    async def flush(self, *, timeout_s: float) -> None:
        """Send the waiting events in place of `run`, at the end of a program."""
        with suppress(TimeoutError):  # the program ends all the same
            async with asyncio.timeout(timeout_s):
                while (following := self._book.next()) is not None:
                    await self._tell(*following)

    async def _tell(self, happening: Happening, entry: EventEntry) -> None:
        is_repeated = bool(entry.name)
        if not is_repeated:
            entry = replace(entry, name=_name(happening.about))
        try:
            await (self._repeat if is_repeated else self._make)(happening, entry)
        except KubeError as error:
            if is_repeated and isinstance(error, ObjectMissingError):
                self._book.lost(happening)  # the server forgets events after an hour
            elif error.is_passing:
                await asyncio.sleep(self._backoff.next(at_least_s=error.retry_after_s))
            else:
                # Its namespace is being deleted, or a right is missing: a retry is useless.
                _log.warning(error.message, hint=error.hint, text=happening.message)
                self._book.drop(happening)
                self._on_drop()
        else:
            self._backoff.reset()
            self._book.sent(happening, entry)

    async def _make(self, happening: Happening, entry: EventEntry) -> None:
        about = happening.about
        namespace = about.namespace or "default"
        await self._api.create(
            f"/api/v1/namespaces/{namespace}/events",
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"name": entry.name, "namespace": namespace},
                "involvedObject": {
                    "apiVersion": about.api_version,
                    "kind": about.kind,
                    "name": about.name,
                    "uid": about.uid,
                    **({"namespace": about.namespace} if about.namespace else {}),
                },
                "reason": happening.reason,
                "message": happening.message,
                "type": "Warning" if happening.is_warning else "Normal",
                "source": {"component": self._component, "host": self._node},
                "reportingComponent": self._component,
                "reportingInstance": self._node,
                "firstTimestamp": _time(entry.first),
                "lastTimestamp": _time(entry.last),
                "count": entry.count,
            },
            asked="create events",
        )

    async def _repeat(self, happening: Happening, entry: EventEntry) -> None:
        namespace = happening.about.namespace or "default"
        await self._api.patch(
            f"/api/v1/namespaces/{namespace}/events/{entry.name}",
            {"count": entry.count, "lastTimestamp": _time(entry.last)},
            asked="patch events",
        )


def _name(about: Reference) -> str:
    return f"{about.name[:_MOST_NAME]}.{secrets.token_hex(8)}"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

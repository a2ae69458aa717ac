# SPDX-License-Identifier: Apache-2.0
"""Writes the placements of bound pods whose `allotment.dev/resize` asks for other amounts.

    annotation ──► book ──► placement ──► node resizes, reports ──► placement ──► book
                 (what grows)                                                  (what shrinks)

The book decides (`Book.plan_resize`). All state is in pods and nodes, so any leader goes on.
"""

import asyncio
import math
from collections.abc import Callable
from typing import Final, NoReturn, Protocol

import structlog

from allotment.dialects.own.placement import write_booking
from allotment.kube.errors import ConflictError, KubeError, ObjectMissingError
from allotment.model.clusters import ClusterPod
from allotment.model.pods import PodUid
from allotment.placement.explain import Refusal
from allotment.scheduler.core.book import Book

_TICK_S: Final = 0.5
_PAUSE_S: Final = 5.0
"""After a failed request."""
_MOST_AT_ONCE: Final = 8
_log = structlog.get_logger(__name__)


class ApiPlacements(Protocol):
    """The API server's side: `kube.bindings.Bindings`."""

    async def read(self, *, uid: PodUid, namespace: str, name: str) -> ClusterPod | None: ...

    async def place_again(self, pod: ClusterPod, placement: str, *, version: str) -> None:
        """Raises `KubeError`."""


class Resizing:
    """Resizes bound pods. Needs `run` running; only the leader writes."""

    def __init__(
        self,
        book: Book,
        api: ApiPlacements,
        *,
        left_s: Callable[[], float],
        clock: Callable[[], float],
        refused: Callable[[ClusterPod, Refusal], None],
    ) -> None:
        """`left_s`: seconds for which this process certainly leads; 0 if it does not."""
        self._book = book
        self._api = api
        self._left_s = left_s
        self._clock = clock
        self._refused = refused
        self._paused: dict[PodUid, float] = {}
        """Until when, by pod."""

    async def run(self) -> NoReturn:
        while True:
            if self._left_s():
                await self.tick()
            await asyncio.sleep(_TICK_S)

    async def tick(self) -> None:
        """Take the next step of each pod that waits for one."""
        now = self._clock()
        self._paused = {uid: until for uid, until in self._paused.items() if until > now}
        due = []
        for uid, pod in list(self._book.resizes.items()):
            planned = self._book.plan_resize(pod)
            if isinstance(planned, Refusal):
                self._refused(pod, planned)
            is_open = self._book.is_growing(uid) or not (
                planned is None or isinstance(planned, Refusal)
            )
            if is_open and uid not in self._paused:
                due.append(pod)
        slots = asyncio.Semaphore(_MOST_AT_ONCE)

        async def step(pod: ClusterPod) -> None:
            async with slots:
                await self._step(pod)

        await asyncio.gather(*map(step, due))

    async def _step(self, pod: ClusterPod) -> None:
        try:
            current = await self._api.read(uid=pod.uid, namespace=pod.namespace, name=pod.name)
            if current is None or not self._left_s():
                return  # gone, as the watch reports; or another replica leads
            order = self._book.begin_resize(current, now=self._clock())
            if order is None or isinstance(order, Refusal):
                return  # the next tick reports a refusal
            text = write_booking(order.booking)
            left_s = self._left_s()
            async with asyncio.timeout(left_s if left_s < math.inf else None):
                await self._api.place_again(current, text, version=order.version)
        except (ConflictError, ObjectMissingError):
            return  # the pod has changed: the next tick reads it again
        except (KubeError, TimeoutError) as error:
            # What grows stays booked until the outcome is known.
            self._paused[pod.uid] = self._clock() + _PAUSE_S
            _log.warning("a resize was not written; retrying", pod=str(pod), why=str(error))

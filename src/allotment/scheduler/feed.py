# SPDX-License-Identifier: Apache-2.0
"""Reads quotas and unconfirmed pods from the API server.

A few pods at a time, each with growing pauses.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Final, NoReturn

import structlog

from allotment.kube.errors import KubeError
from allotment.kube.quotas import FollowedQuotas
from allotment.model.pods import PodUid
from allotment.scheduler.core.quota import QuotaBook
from allotment.scheduler.core.reservations import Reread

_MOST_AT_ONCE: Final = 8
_FIRST_S: Final = 0.5
_MOST_S: Final = 15.0


class PodRefresh:
    """Reads pods as long as they are unconfirmed. For one event loop."""

    def __init__(
        self,
        read: Callable[[PodUid, str, str], Awaitable[object]],
        *,
        most_at_once: int = _MOST_AT_ONCE,
    ) -> None:
        """`read` reads a pod by uid, namespace and name; it may raise `KubeError`."""
        self._read = read
        self._most = most_at_once
        self._tasks: dict[PodUid, asyncio.Task[None]] = {}
        self._pauses: dict[PodUid, tuple[float, float]] = {}
        """By pod: the length of its last pause, and its end."""

    def want(self, pods: Iterable[Reread], *, now: float) -> None:
        """Replace the pods to read. Returns at once."""
        wanted = {pod.uid: pod for pod in pods}
        for uid in self._pauses.keys() - wanted.keys():
            del self._pauses[uid]
        # The longest waiting first, so that none starves.
        due = sorted(wanted, key=lambda uid: self._pauses.get(uid, (0.0, float("-inf")))[1])
        for uid in due:
            if len(self._tasks) >= self._most:
                return
            pause_s, ends = self._pauses.get(uid, (_FIRST_S / 2, now))
            if uid in self._tasks or ends > now:
                continue
            pause_s = min(_MOST_S, pause_s * 2)
            # Jitter, so that pods are not all read at the same moment.
            self._pauses[uid] = (pause_s, now + pause_s * random.uniform(0.8, 1.2))  # noqa: S311 - no secret
            task = asyncio.create_task(self._reread(wanted[uid]))
            self._tasks[uid] = task
            task.add_done_callback(partial(self._done, uid))

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    def _done(self, uid: PodUid, task: asyncio.Task[None]) -> None:
        del task
        self._tasks.pop(uid, None)

    async def _reread(self, pod: Reread) -> None:
        with suppress(KubeError):  # the next round retries
            await self._read(pod.uid, pod.namespace, pod.name)


_log = structlog.get_logger(__name__)


class QuotaFeed:
    """Passes every change of a quota to the book. Needs `run` and `followed.run` running."""

    def __init__(self, followed: FollowedQuotas, book: QuotaBook) -> None:
        self._followed = followed
        self._book = book
        self.is_synced = False
        """The book has received all quotas once."""

    @property
    def problem(self) -> KubeError | None:
        """Why quotas cannot be read at present: the last ones stay in force."""
        return self._followed.problem

    async def wait_synced(self) -> None:
        async for _ in self._followed.changes():
            # In the same step, whichever of the two tasks wakes first.
            if self._followed.is_synced:
                self._hand_over()
                return

    async def run(self) -> NoReturn:
        """Follow forever. A quota that cannot be enforced is logged once."""
        logged: tuple[str, ...] = ()
        async for _ in self._followed.changes():
            if not self._followed.is_synced:
                continue
            self._hand_over()
            for problem in self._book.problems:
                if problem not in logged:
                    _log.warning("a quota is not enforced as written", why=problem)
            logged = self._book.problems
        raise AssertionError("changes never end")

    def _hand_over(self) -> None:
        self._book.set_quotas(self._followed.all())
        self.is_synced = True

# SPDX-License-Identifier: Apache-2.0
"""Reading doubtful pods again, beside everything else: nobody waits for an API server that is slow.

A few at a time, and each pod less and less often while that does not help.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Final, Protocol

from allotment.kube.errors import KubeError
from allotment.model.pods import PodUid

__all__ = ["Doubtful", "Rereading"]

_MOST_AT_ONCE: Final = 8
_FIRST_S: Final = 0.5
_MOST_S: Final = 15.0


class Doubtful(Protocol):
    """A pod of which something is not known."""

    @property
    def uid(self) -> PodUid:
        """The API server's."""
        ...

    @property
    def namespace(self) -> str:
        """Where it is."""
        ...

    @property
    def name(self) -> str:
        """What it is called there."""
        ...


class Rereading:
    """Reads pods for as long as they are asked for. For one event loop."""

    def __init__(
        self,
        read: Callable[[PodUid, str, str], Awaitable[object]],
        *,
        most_at_once: int = _MOST_AT_ONCE,
    ) -> None:
        """Take what reads one, by uid, namespace and name; it may raise `KubeError`."""
        self._read = read
        self._most = most_at_once
        self._tasks: dict[PodUid, asyncio.Task[None]] = {}
        self._pauses: dict[PodUid, tuple[float, float]] = {}
        """By pod: how long the last pause was, and when it ends."""

    def want(self, pods: Iterable[Doubtful], *, now: float) -> None:
        """Have all pods that are doubtful now read, some time soon. Returns at once."""
        wanted = {each.uid: each for each in pods}
        for uid in self._pauses.keys() - wanted.keys():
            del self._pauses[uid]
        # Those that have waited longest come first: nobody waits for ever.
        due = sorted(wanted, key=lambda uid: self._pauses.get(uid, (0.0, float("-inf")))[1])
        for uid in due:
            if len(self._tasks) >= self._most:
                return
            pause_s, ends = self._pauses.get(uid, (_FIRST_S / 2, now))
            if uid in self._tasks or ends > now:
                continue
            pause_s = min(_MOST_S, pause_s * 2)
            # Not all again at the same moment.
            self._pauses[uid] = (pause_s, now + pause_s * random.uniform(0.8, 1.2))  # noqa: S311 - no secret
            task = asyncio.create_task(self._reread(wanted[uid]))
            self._tasks[uid] = task
            task.add_done_callback(partial(self._done, uid))

    def close(self) -> None:
        """Read nothing more."""
        for each in self._tasks.values():
            each.cancel()

    def _done(self, uid: PodUid, task: asyncio.Task[None]) -> None:
        del task
        self._tasks.pop(uid, None)

    async def _reread(self, pod: Doubtful) -> None:
        with suppress(KubeError):  # it is asked for again
            await self._read(pod.uid, pod.namespace, pod.name)

# SPDX-License-Identifier: Apache-2.0
"""One thing at a time for each pod, different pods in parallel."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from allotment.model.pods import PodUid

__all__ = ["PodLocks"]


class PodLocks:
    """A lock for each pod that anybody holds or waits for, and none for the others."""

    def __init__(self) -> None:
        self._locks: dict[PodUid, asyncio.Lock] = {}
        self._users: dict[PodUid, int] = {}

    def is_held(self, uid: PodUid) -> bool:
        """Is something being done for the pod, or about to be?"""
        return uid in self._users

    @asynccontextmanager
    async def hold(self, uid: PodUid) -> AsyncIterator[None]:
        """Wait until nothing else is being done for the pod."""
        lock = self._locks.setdefault(uid, asyncio.Lock())
        self._users[uid] = self._users.get(uid, 0) + 1
        try:
            async with lock:
                yield
        finally:
            self._users[uid] -= 1
            if not self._users[uid]:
                del self._users[uid], self._locks[uid]

# SPDX-License-Identifier: Apache-2.0
"""What the work for a container waits for: times, and the other work for its pod."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from allotment.model.pods import PodUid


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """Timeouts and pauses, in seconds."""

    deadline: float = 24.0
    """For a share. The kubelet waits for 30 s, and the device plugin for 25."""
    pod: float = 15.0
    """For the API server to report a pod that the kubelet knows."""
    room: tuple[float, ...] = (0.0, 0.3, 0.7)
    """Before each further attempt to find room: the scheduler may bind a pod to devices whose
    former pod is gone for the API server, but not yet for this node."""
    departure: tuple[float, ...] = (1.0,) * 10
    """After those, while a share is there whose pod the kubelet's checkpoint no longer lists: the
    kubelet gives a pod's devices to the next one before it reports the end of its containers."""
    look: float = 30.0
    """Between comparisons without news."""
    pause: float = 0.1
    """Between comparisons with news; it joins news that come at the same time."""
    retry: float = 5.0
    """Before another attempt to end a share."""
    checkpoint: tuple[float, ...] = (0.2, 0.5, 1.0)
    """Before each further attempt to find a container in the kubelet's checkpoint."""
    repeat: float = 120.0
    """How long a call counts as repeated: longer than between the kubelet's retries."""


class PodLocks:
    """A lock for each pod with work in progress or waiting."""

    def __init__(self) -> None:
        self._locks: dict[PodUid, asyncio.Lock] = {}
        self._users: dict[PodUid, int] = {}

    def is_held(self, uid: PodUid) -> bool:
        """Return whether work for the pod is in progress or waiting."""
        return uid in self._users

    @asynccontextmanager
    async def hold(self, uid: PodUid) -> AsyncIterator[None]:
        """Wait until no other work for the pod is in progress."""
        lock = self._locks.setdefault(uid, asyncio.Lock())
        self._users[uid] = self._users.get(uid, 0) + 1
        try:
            async with lock:
                yield
        finally:
            self._users[uid] -= 1
            if not self._users[uid]:
                del self._users[uid], self._locks[uid]

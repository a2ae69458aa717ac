# SPDX-License-Identifier: Apache-2.0
"""Nominates nodes for pods that kube-scheduler will try next.

kube-scheduler tries a pod's `status.nominatedNodeName` before all other nodes, and no other node if
the pod fits there (pkg/scheduler/schedule_one.go, `findNodesThatFitPod`). Other programs may write
it (KEP-5278). So with pods in its queue it looks at one node for each, in place of all. Where the
nominated node does not pass its filters, it looks at all nodes, as without a nomination.
"""

import asyncio
from collections.abc import Callable, Collection
from typing import Final, NoReturn, Protocol

import structlog

from allotment.kube.errors import KubeError
from allotment.model.clusters import ClusterPod
from allotment.model.errors import UsageError
from allotment.scheduler.core.book import Book
from allotment.scheduler.core.waiting import WaitingPods

HOLD_S: Final = 0.1
"""The longest delay of an answer."""
_MOST_AT_ONCE: Final = 32
_log = structlog.get_logger(__name__)


class ApiNominations(Protocol):
    """The API server's side: `kube.bindings.Bindings`."""

    async def nominate(self, pod: ClusterPod, node: str) -> None:
        """Raises `KubeError`."""


class Nominating:
    """Needs `run` running; only the leader writes."""

    def __init__(
        self,
        book: Book,
        waiting: WaitingPods,
        api: ApiNominations,
        *,
        left_s: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        """`left_s`: seconds for which this process certainly leads; 0 if it does not."""
        self._book = book
        self._waiting = waiting
        self._api = api
        self._left_s = left_s
        self._clock = clock
        self._is_wide = False
        """The last question was about all nodes."""
        self._asked = asyncio.Event()
        self._slots = asyncio.Semaphore(_MOST_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()

    def tried(self, pod: ClusterPod, names: Collection[str]) -> None:
        """kube-scheduler asks about a pod on these nodes: soon it asks about the next."""
        self._is_wide = self._waiting.tried(pod, names)
        self._asked.set()

    async def hold(self) -> None:
        """Wait, before the answer to a question about all nodes, until the next pods are nominated.

        kube-scheduler tries them as soon as it has the answer, about as fast as it takes to write a
        nomination. Without this it would look at all nodes again.
        """
        if not self._is_wide:
            return
        self._is_wide = False
        until = self._clock() + HOLD_S
        await asyncio.sleep(0)
        while self._tasks and (left := until - self._clock()) > 0:
            await asyncio.wait(set(self._tasks), timeout=left)
            await asyncio.sleep(0)

    async def run(self) -> NoReturn:
        while True:
            await self._asked.wait()
            self._asked.clear()
            while self._left_s() and (found := self._waiting.next()) is not None:
                await self._slots.acquire()
                node = self._expect(found.pod, found.allowed)
                if not node:
                    # The cluster may be full: one fruitless search for each question.
                    self._slots.release()
                    break
                task = asyncio.create_task(self._write(found.pod, node))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                await asyncio.sleep(0)

    def _expect(self, pod: ClusterPod, names: Collection[str]) -> str:
        """Choose a pod's node and devices, as for kube-scheduler's question; empty: none fits."""
        try:
            need = self._book.needs.of(pod)
        except UsageError:
            return ""
        choice = self._book.filter(need, names, now=self._clock(), version=pod.version)
        return choice.best[0] if choice.best else ""

    async def _write(self, pod: ClusterPod, node: str) -> None:
        try:
            await self._api.nominate(pod, node)
        except KubeError as error:
            # The pod has changed, is bound or gone; or kube-scheduler looks at all nodes.
            _log.debug("no nomination", pod=str(pod), why=error.message)
        finally:
            self._slots.release()

# SPDX-License-Identifier: Apache-2.0
"""Nominates nodes for pods that kube-scheduler will try soon.

kube-scheduler tries a pod's `status.nominatedNodeName` before all other nodes, and no other node if
the pod fits there (pkg/scheduler/schedule_one.go, `findNodesThatFitPod`). Other programs may write
it (KEP-5278). So with pods in its queue it looks at one node for each, in place of all. Where the
nominated node does not pass, it looks at all nodes, as without a nomination.
"""

import asyncio
import math
from collections.abc import Callable, Collection
from http import HTTPStatus
from typing import Final, NoReturn, Protocol

import structlog

from allotment.kube.errors import KubeError
from allotment.model.clusters import ClusterPod
from allotment.model.errors import UsageError
from allotment.model.pods import PodUid
from allotment.scheduler.core.book import Book
from allotment.scheduler.core.waiting import NextPod, WaitingPods

FEWEST_NODES: Final = 1000
"""kube-scheduler saves some 5 us a node. On fewer nodes that is less than a nomination costs it,
the API server and this process together."""
_MOST_AT_ONCE: Final = 16
"""Requests; they share connections with binds."""
_FORBIDDEN_S: Final = 300.0
"""Pause after a refusal by policy or RBAC: each attempt costs the API server a write."""
_log = structlog.get_logger(__name__)


class ApiNominations(Protocol):
    """The API server's side: `kube.bindings.Bindings`."""

    async def nominate(self, pod: ClusterPod, node: str | None) -> None:
        """None: withdraw the nomination. Raises `KubeError`."""


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
        is_preempting: Callable[[PodUid], bool] = lambda _: False,
        fewest_nodes: int = FEWEST_NODES,
    ) -> None:
        """`left_s`: seconds for which this process certainly leads; 0 if it does not.

        `is_preempting`: whether pods end for this pod, on the node where it is nominated.
        """
        self._book = book
        self._waiting = waiting
        self._api = api
        self._left_s = left_s
        self._clock = clock
        self._is_preempting = is_preempting
        self._fewest_nodes = fewest_nodes
        self._asked = asyncio.Event()
        self._forbidden_until = -math.inf

    def tried(self, pod: ClusterPod, names: Collection[str]) -> None:
        """kube-scheduler asks about a pod on these nodes: soon it asks about others."""
        is_large = len(self._book.cluster.nodes) >= self._fewest_nodes
        if is_large and self._clock() >= self._forbidden_until:
            self._waiting.tried(pod, names)
            self._asked.set()

    async def run(self) -> NoReturn:
        slots = asyncio.Semaphore(_MOST_AT_ONCE)

        async def write(pod: ClusterPod, node: str) -> None:
            async with slots:
                if self._is_still_for(pod, node):
                    await self._write(pod, node)

        async with asyncio.TaskGroup() as group:
            while True:
                await self._asked.wait()
                self._asked.clear()
                while self._left_s() and (found := self._waiting.next()) is not None:
                    node = self._expect(found)
                    if not node:
                        # The cluster may be full: one fruitless search for each question.
                        break
                    group.create_task(write(found.pod, node))
                    # Choosing takes a millisecond: questions and binds have their turn.
                    await asyncio.sleep(0)
        raise AssertionError("it never ends")

    async def withdraw(self) -> None:
        """End nominations that led to no binding, also those of earlier leaders."""
        for pod in self._waiting.late():
            if not self._left_s():
                return
            if not self._is_preempting(pod.uid):
                await self._write(pod, None)

    def _expect(self, found: NextPod) -> str:
        """Choose a pod's node and devices as for a question; empty: none is free."""
        pod = found.pod
        try:
            need = self._book.needs.of(pod)
        except UsageError:
            return ""
        self._book.filter(need, found.allowed, now=self._clock(), version=pod.version)
        # Its choice may be a node where other pods are expected on all devices: not nominated.
        booking = self._book.booking(pod.uid)
        return booking.node if booking is not None else ""

    def _is_still_for(self, pod: ClusterPod, node: str) -> bool:
        """Whether a nomination is of use after its wait for a connection."""
        booking = self._book.booking(pod.uid)
        return (
            self._left_s() > 0
            and self._clock() >= self._forbidden_until
            and self._waiting.is_ahead(pod.uid)
            and booking is not None
            and booking.node == node
        )

    async def _write(self, pod: ClusterPod, node: str | None) -> None:
        try:
            await self._api.nominate(pod, node)
        except KubeError as error:
            # The pod has changed, is bound or gone; or kube-scheduler looks at all nodes.
            _log.debug("no nomination", pod=str(pod), why=error.message)
            if error.status == HTTPStatus.FORBIDDEN:
                if self._forbidden_until == -math.inf:
                    hint = "apply the scheduler's manifest of this version"
                    _log.warning("may not nominate nodes", why=error.message, hint=hint)
                self._forbidden_until = self._clock() + _FORBIDDEN_S

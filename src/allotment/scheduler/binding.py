# SPDX-License-Identifier: Apache-2.0
"""Carries bindings out: each until it is known what became of it, whoever still waits for it.

A request that was not answered may have bound the pod, or may yet. So it is made again, the same to
the letter: the first of them that arrives binds, and the others are refused. Nothing of it is given
up before the pod has been seen bound, gone, or changed in a way that makes all of them too late.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import structlog

from allotment.dialects.decisions import write_booking
from allotment.dialects.placements import PLACEMENT
from allotment.kube.backoff import Backoff
from allotment.kube.bindings import Binding
from allotment.kube.cluster_feed import ClusterPod
from allotment.kube.errors import ConflictError, KubeError, ObjectMissingError
from allotment.model.clusters import NodeRejection, PodBooking, PodNeed
from allotment.model.errors import UsageError
from allotment.model.pods import PodUid
from allotment.scheduler.book import Book, Order, Settled, Turned, is_later
from allotment.scheduler.needs import need_of

__all__ = ["Binder", "Outcome"]

_MOST_CONFLICTS = 3
_LATE_S = 60.0
"""A request that was not answered is over after so long: the API server itself gives each no more
(apiserver pkg/server/config.go, RequestTimeout)."""
_log = structlog.get_logger(__name__)


class ApiBindings(Protocol):
    """Who binds: `kube.bindings.Bindings`."""

    async def bind(self, binding: Binding) -> None:
        """Bind, or raise `KubeError`."""

    async def read(self, *, uid: PodUid, namespace: str, name: str) -> ClusterPod | None:
        """Read a pod; None: there is none of this uid. Raises `KubeError`."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a binding."""

    problem: str = ""
    """Why the pod is not bound; empty: it is."""
    rejection: NodeRejection | None = None
    """The node had no place for it."""


async def _no_receipt(need: PodNeed, booking: PodBooking) -> Mapping[str, str]:
    del need, booking
    return {}


class Binder:
    """Binds pods as the book says, any number at once."""

    def __init__(
        self,
        book: Book,
        api: ApiBindings,
        *,
        clock: Callable[[], float],
        may_write: Callable[[], bool] = lambda: True,
        receipt: Callable[[PodNeed, PodBooking], Awaitable[Mapping[str, str]]] = _no_receipt,
        backoff: Callable[[], Backoff] = lambda: Backoff(first_s=0.2, most_s=5.0),
        late_s: float = _LATE_S,
    ) -> None:
        """`may_write`: this process leads. `receipt`: what else is written on a pod."""
        self._book = book
        self._api = api
        self._clock = clock
        self._may_write = may_write
        self._receipt = receipt
        self._backoff = backoff
        self._late_s = late_s
        self._tasks: dict[PodUid, asyncio.Task[Outcome]] = {}

    @property
    def under_way(self) -> int:
        """How many bindings are being carried out."""
        return len(self._tasks)

    async def bind(self, need: PodNeed, node: str, *, version: str = "") -> Outcome:
        """Bind a pod to a node; return what became of it. Cancelling ends the waiting alone."""
        order = self._book.begin_bind(need, node, now=self._clock(), version=version)
        if isinstance(order, Settled):
            return Outcome()
        if isinstance(order, Turned):
            return Outcome(order.rejection.text, order.rejection)
        task = self._tasks.get(need.uid)
        if task is None:
            task = asyncio.create_task(self._carry_out(order))
            self._tasks[need.uid] = task
            task.add_done_callback(lambda _: self._tasks.pop(need.uid, None))
        return await asyncio.shield(task)

    async def reread(self, uid: PodUid, namespace: str, name: str) -> None:
        """Read a pod that nobody has heard of, and tell the book. Raises `KubeError`."""
        if uid not in self._tasks:
            pod = await self._api.read(uid=uid, namespace=namespace, name=name)
            self._book.reread(uid, pod, now=self._clock())

    async def drain(self, *, timeout_s: float) -> None:
        """Wait for what is under way, at the end of a program."""
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=timeout_s)

    async def _carry_out(self, order: Order) -> Outcome:
        uid = order.booking.uid
        try:
            outcome = await self._until_known(order)
        except BaseException:
            # Cancelled, or broken: what has been asked for may still happen.
            self._book.unknown(uid, now=self._clock())
            raise
        if outcome.problem:
            self._book.refused(uid, now=self._clock())
        else:
            self._book.bound(uid, now=self._clock())
        return outcome

    async def _until_known(self, order: Order) -> Outcome:
        binding = await self._binding(order)
        backoff = self._backoff()
        conflicts = 0
        late_until = float("-inf")
        while True:
            began = self._clock()
            try:
                await self._api.bind(binding)
                return Outcome()
            except (ConflictError, ObjectMissingError) as error:
                conflicts += 1
                outcome = await self._after_conflict(binding)
                if isinstance(outcome, Outcome):
                    return outcome
                binding = outcome
                if conflicts > _MOST_CONFLICTS:
                    if self._clock() >= late_until:
                        return Outcome(error.message)
                    await asyncio.sleep(backoff.next())
            except KubeError as error:
                # Refused for good; but an earlier request of this binding may still be on its way.
                if not error.is_passing and self._clock() >= late_until:
                    return Outcome(error.message)
                if error.is_passing:
                    late_until = began + self._late_s
                self._book.unknown(binding.uid, now=self._clock())
                _log.warning(error.message, pod=f"{binding.namespace}/{binding.name}")
                await asyncio.sleep(backoff.next(at_least_s=error.retry_after_s))
            settled = await self._until_leading(binding, backoff)
            if settled is not None:
                return settled

    async def _until_leading(self, binding: Binding, backoff: Backoff) -> Outcome | None:
        """Ask for nothing while another process leads: look what becomes of what was asked for."""
        while not self._may_write():
            await asyncio.sleep(backoff.next())
            settled = self._settled(binding, await self._read(binding, backoff))
            if settled is not None:
                return settled
        return None

    async def _after_conflict(self, binding: Binding) -> Outcome | Binding:
        """Look at what kept the pod from being bound."""
        pod = await self._read(binding, self._backoff())
        settled = self._settled(binding, pod)
        if settled is not None:
            return settled
        assert pod is not None  # noqa: S101 - it is settled that it is gone
        # It has been written to meanwhile. What it asks for does not change with that, but for its
        # annotations: kube-scheduler tries again with those that it has then.
        if pod.asks is None or self._asks_differently(pod):
            return Outcome("the pod has changed since its node was chosen; it is tried again")
        return replace(binding, version=pod.version)

    def _asks_differently(self, pod: ClusterPod) -> bool:
        known = self._book.need(pod.uid)
        try:
            return known is None or need_of(pod) != known[0]
        except UsageError:
            return True

    def _settled(self, binding: Binding, pod: ClusterPod | None) -> Outcome | None:
        if pod is None:
            return Outcome("the pod is gone")
        if pod.node:
            booked = self._book.booking(binding.uid)
            self._book.reread(binding.uid, pod, now=self._clock())
            if booked is not None and pod.booking is not None:
                ours = (booked.node, booked.containers)
                if ours == (pod.booking.node, pod.booking.containers):
                    return Outcome()
            return Outcome(f"the pod has been bound to node {pod.node} by somebody else")
        if binding.version and is_later(pod.version, binding.version) and not self._may_write():
            return Outcome("the pod has changed since its node was chosen")
        return None

    async def _read(self, binding: Binding, backoff: Backoff) -> ClusterPod | None:
        """Read the pod, however long that takes."""
        while True:
            try:
                return await self._api.read(
                    uid=binding.uid, namespace=binding.namespace, name=binding.name
                )
            except KubeError as error:
                self._book.unknown(binding.uid, now=self._clock())
                await asyncio.sleep(backoff.next(at_least_s=error.retry_after_s))

    async def _binding(self, order: Order) -> Binding:
        need, booking = order.need, order.booking
        return Binding(
            uid=need.uid,
            namespace=need.namespace,
            name=need.name,
            node=booking.node,
            version=order.version,
            annotations={
                **(await self._receipt(need, booking)),
                PLACEMENT: write_booking(booking),
            },
        )

# SPDX-License-Identifier: Apache-2.0
"""Carries bindings out: each until it is known what became of it, whoever still waits for it.

A request that was not answered may have bound the pod, or may yet. So it is made again, the same to
the letter: the first of them that arrives binds, and the others are refused. Nothing of it is given
up before the pod has been seen bound, gone, or changed in a way that makes all of them too late.

Right before each request it is asked whether the devices are still reserved for this very binding,
and whether this process leads; a request that is under way when it leads no more is broken off. For
that no request waits in anybody else's queue: there are fewer slots here than connections.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final, Protocol

import structlog

from allotment.dialects.decisions import write_booking
from allotment.dialects.placements import PLACEMENT
from allotment.kube.backoff import Backoff
from allotment.kube.bindings import MOST_WRITES, Binding
from allotment.kube.cluster_feed import ClusterPod
from allotment.kube.errors import ConflictError, KubeError, ObjectMissingError, UnreachableError
from allotment.kube.versions import is_later
from allotment.model.clusters import NodeRejection, PodBooking, PodNeed
from allotment.model.errors import UsageError
from allotment.model.pods import PodUid
from allotment.scheduler.book import Book, Order, Settled, Turned
from allotment.scheduler.holdings import HELD
from allotment.scheduler.needs import need_of

__all__ = ["CHANGED", "Binder", "Outcome"]

CHANGED: Final = "the pod has changed since its node was chosen; it is tried again"
_NOT_LEADING: Final = "another replica answers now; it is tried again"
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


@dataclass(slots=True)
class _Attempt:
    """A binding that is being carried out."""

    order: Order
    binding: Binding
    """As it is asked for next."""
    late_until: float = -math.inf
    """Until then, a request of this version that was not answered may still be carried out."""
    conflicts: int = 0


class _NotAllowedError(Exception):
    """Nothing was sent: this binding may not be asked for any more, or not by this process."""


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
        left_s: Callable[[], float] = lambda: math.inf,
        receipt: Callable[[PodNeed, PodBooking], Awaitable[Mapping[str, str]]] = _no_receipt,
        backoff: Callable[[], Backoff] = lambda: Backoff(first_s=0.2, most_s=5.0),
        late_s: float = _LATE_S,
    ) -> None:
        """`left_s`: for how long this process leads as far as it knows now, 0 where it does not.

        `receipt`: what else is written on a pod.
        """
        self._book = book
        self._api = api
        self._clock = clock
        self._left_s = left_s
        self._receipt = receipt
        self._backoff = backoff
        self._late_s = late_s
        self._slots = asyncio.Semaphore(MOST_WRITES)
        self._tasks: dict[PodUid, asyncio.Task[Outcome]] = {}
        """One for each pod whose devices are reserved and that is not known to be bound. Where a
        pod has gone meanwhile, it may be there for a moment longer."""

    @property
    def under_way(self) -> int:
        """How many bindings are being carried out."""
        return len(self._tasks)

    async def bind(self, need: PodNeed, node: str, *, version: str) -> Outcome:
        """Bind a pod to a node; return what became of it. Cancelling ends the waiting alone.

        `version` is that of the pod that asks for `need`: only this one is bound so.
        """
        if not version:
            # A binding of any version could not be told to be too late.
            raise ValueError(f"pod {need} has no version")
        if not self._left_s():
            return Outcome(_NOT_LEADING)
        task = self._tasks.get(need.uid)
        if task is not None and self._book.state(need.uid) not in HELD:
            return Outcome("an earlier binding of it is not over yet; it is tried again")
        order = self._book.begin_bind(need, node, now=self._clock(), version=version)
        if isinstance(order, Settled):
            return Outcome()
        if isinstance(order, Turned):
            return Outcome(order.rejection.text, order.rejection)
        if task is None:
            task = asyncio.create_task(self._carry_out(order))
            self._tasks[need.uid] = task
        return await asyncio.shield(task)

    async def bind_plain(self, pod: ClusterPod, node: str) -> Outcome:
        """Bind a pod that asks for no GPU of ours as kube-scheduler itself does: one request."""
        binding = Binding(uid=pod.uid, namespace=pod.namespace, name=pod.name, node=node)
        try:
            async with self._slots:
                await self._api.bind(binding)
        except KubeError as error:
            return Outcome(error.message)
        return Outcome()

    async def read(self, *, uid: PodUid, namespace: str, name: str) -> ClusterPod | None:
        """Read a pod that the watch has not told of; None: there is none. Raises `KubeError`."""
        return await self._api.read(uid=uid, namespace=namespace, name=name)

    async def reread(self, uid: PodUid, namespace: str, name: str) -> None:
        """Read a pod that nobody has heard of, and tell the book. Raises `KubeError`."""
        if uid in self._tasks:
            return
        step = self._book.step(uid)
        pod = await self._api.read(uid=uid, namespace=namespace, name=name)
        if uid not in self._tasks:
            self._book.reread(uid, pod, step=step, now=self._clock())

    async def drain(self, *, timeout_s: float) -> None:
        """Wait for what is under way, at the end of a program."""
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=timeout_s)

    async def _carry_out(self, order: Order) -> Outcome:
        try:
            outcome = await self._until_known(order)
        except BaseException:
            # Cancelled, or broken: what has been asked for may still happen.
            self._book.unknown(order.booking, now=self._clock())
            raise
        else:
            if outcome.problem:
                self._book.refused(order.booking, now=self._clock())
            else:
                self._book.bound(order.booking, now=self._clock())
            return outcome
        finally:
            # With the reservation and not a turn of the loop later: the next one finds neither.
            del self._tasks[order.booking.uid]

    async def _until_known(self, order: Order) -> Outcome:
        attempt = _Attempt(order, await self._binding(order))
        if order.is_begun:
            # What was asked for by a task that has not lived to see the answer may still come.
            attempt.late_until = self._clock() + self._late_s
        backoff = self._backoff()
        while True:
            wait_s = None
            try:
                await self._send(attempt)
                return Outcome()
            except _NotAllowedError:
                outcome = await self._without_asking(attempt)
            except (ConflictError, ObjectMissingError) as error:
                outcome = await self._after_conflict(attempt, error)
            except KubeError as error:
                outcome = self._after_error(attempt, error)
                wait_s = error.retry_after_s
            if outcome is not None:
                return outcome
            await asyncio.sleep(backoff.next(at_least_s=wait_s))

    async def _send(self, attempt: _Attempt) -> None:
        """Ask for a binding, if it may be. Raises `_NotAllowedError`, and `KubeError`."""
        binding = attempt.binding
        async with self._slots:
            is_held = self._left_s() and self._book.renew(attempt.order.booking, binding.version)
            if not is_held:
                raise _NotAllowedError
            try:
                async with self._while_leading():
                    await self._api.bind(binding)
            except TimeoutError as error:
                raise UnreachableError(
                    f"broke off to bind pod {binding.namespace}/{binding.name}: this replica does"
                    " not lead any more"
                ) from error

    @asynccontextmanager
    async def _while_leading(self) -> AsyncIterator[None]:
        """Break off what is done in here once this process leads no more: by `TimeoutError`."""
        loop = asyncio.get_running_loop()
        waiting: asyncio.TimerHandle | None = None

        def look() -> None:
            nonlocal waiting
            left_s = self._left_s()
            if left_s == math.inf:
                return
            if left_s:
                waiting = loop.call_later(left_s, look)
            else:
                limit.reschedule(loop.time())

        async with asyncio.timeout(None) as limit:
            look()
            try:
                yield
            finally:
                if waiting is not None:
                    waiting.cancel()

    def _after_error(self, attempt: _Attempt, error: KubeError) -> Outcome | None:
        """Say whether the binding is over; None: nobody knows, or it has not been made."""
        now = self._clock()
        if error.is_passing:
            attempt.late_until = now + self._late_s
        elif now >= attempt.late_until:
            # Refused for good, and no earlier request of this binding is still on its way.
            return Outcome(error.message)
        self._book.unknown(attempt.order.booking, now=now)
        _log.warning(error.message, pod=f"{attempt.binding.namespace}/{attempt.binding.name}")
        return None

    async def _without_asking(self, attempt: _Attempt) -> Outcome | None:
        """See what has become of what was asked for, where no more may be; None: not known yet."""
        if self._clock() >= attempt.late_until:
            return Outcome(_NOT_LEADING)
        pod = await self._read(attempt.order)
        settled = self._settled(attempt.order, pod)
        if settled is None and pod is not None and is_later(pod.version, attempt.binding.version):
            return Outcome(CHANGED)
        return settled

    async def _after_conflict(self, attempt: _Attempt, error: KubeError) -> Outcome | None:
        """Look at what kept the pod from being bound; None: it may be asked for once more."""
        pod = await self._read(attempt.order)
        settled = self._settled(attempt.order, pod)
        if settled is not None:
            return settled
        assert pod is not None  # noqa: S101 - it is settled that it is gone
        # It has been written to meanwhile. What it asks for does not change with that, but for its
        # annotations: kube-scheduler tries again with those that it has then.
        if pod.asks is None or self._asks_differently(pod, attempt.order.need):
            return Outcome(CHANGED)
        if is_later(pod.version, attempt.binding.version):
            attempt.late_until = -math.inf  # what was asked for before comes too late
        attempt.conflicts += 1
        if attempt.conflicts > _MOST_CONFLICTS and self._clock() >= attempt.late_until:
            return Outcome(error.message)
        attempt.binding = replace(attempt.binding, version=pod.version)
        return None

    def _settled(self, order: Order, pod: ClusterPod | None) -> Outcome | None:
        """Say what a pod that was read makes known; None: it waits as before, maybe changed."""
        if pod is None:
            self._book.pod_gone(order.booking.uid)
            return Outcome("the pod is gone")
        if not pod.node:
            return None
        self._book.pod_put(pod, now=self._clock())
        if pod.booking is not None:
            ours = (order.booking.node, order.booking.containers)
            if ours == (pod.booking.node, pod.booking.containers):
                return Outcome()
        return Outcome(f"the pod has been bound to node {pod.node} by somebody else")

    async def _read(self, order: Order) -> ClusterPod | None:
        """Read the pod, however long that takes."""
        need, backoff = order.need, self._backoff()
        while True:
            try:
                return await self._api.read(uid=need.uid, namespace=need.namespace, name=need.name)
            except KubeError as error:
                self._book.unknown(order.booking, now=self._clock())
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

    def _asks_differently(self, pod: ClusterPod, need: PodNeed) -> bool:
        try:
            return need_of(pod, self._book.settings.needs) != need
        except UsageError:
            return True

# SPDX-License-Identifier: Apache-2.0
"""Executes binds and retries each until its outcome is known, even if the caller has gone.

A request without an answer may still bind the pod, so the same request is repeated: the first to
arrive binds, the API server refuses the others. Before each request, reservation and leadership are
checked. A request is cancelled when leadership ends.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Final, Protocol

import msgspec
import structlog

from allotment.dialects.own.placement import PLACEMENT, write_booking
from allotment.kube.bindings import MOST_WRITES, Binding
from allotment.kube.clients import Backoff
from allotment.kube.errors import ConflictError, KubeError, ObjectMissingError, UnreachableError
from allotment.model.clusters import ClusterPod, PodBooking, PodNeed, is_later
from allotment.model.errors import UsageError
from allotment.model.pods import PodUid
from allotment.model.structs import replace
from allotment.placement.explain import Refusal
from allotment.scheduler.core.book import AlreadyBound, BindOrder, Book
from allotment.scheduler.core.reservations import HELD

CHANGED: Final = "the pod has changed since its node was chosen; retrying"
_NOT_LEADING: Final = "another replica leads; retrying"
_MOST_CONFLICTS = 3
_LATE_S = 60.0
"""A request without an answer has ended after this time: the API server's own limit (apiserver
pkg/server/config.go, RequestTimeout)."""
_log = structlog.get_logger(__name__)


class ApiBindings(Protocol):
    """The API server's side: `kube.bindings.Bindings`."""

    async def bind(self, binding: Binding) -> None:
        """Raises `KubeError`."""

    async def read(self, *, uid: PodUid, namespace: str, name: str) -> ClusterPod | None: ...


class BindOutcome(msgspec.Struct, frozen=True):
    """The outcome of a bind."""

    problem: str = ""
    """Why the pod is not bound; empty if it is bound."""
    reason: str = ""
    """The reason of the node's refusal, if the pod did not fit."""


class _Attempt(msgspec.Struct):
    """A bind in progress."""

    order: BindOrder
    binding: Binding
    """The next request."""
    late_until: float = -math.inf
    """Until then, an unanswered request of this version may still take effect."""
    conflicts: int = 0


class _NotAllowedError(Exception):
    """Nothing was sent: the reservation is gone, or another replica leads."""


async def _no_results(need: PodNeed, booking: PodBooking) -> Mapping[str, str]:
    del need, booking
    return {}


class Binder:
    """Binds pods as the book decides, many at once."""

    def __init__(
        self,
        book: Book,
        api: ApiBindings,
        *,
        clock: Callable[[], float],
        left_s: Callable[[], float] = lambda: math.inf,
        results: Callable[[PodNeed, PodBooking], Awaitable[Mapping[str, str]]] = _no_results,
        backoff: Callable[[], Backoff] = lambda: Backoff(first_s=0.2, most_s=5.0),
        late_s: float = _LATE_S,
    ) -> None:
        """`left_s`: seconds for which this process certainly leads; 0 if it does not.

        `results`: further annotations for the pod.
        """
        self._book = book
        self._api = api
        self._clock = clock
        self._left_s = left_s
        self._results = results
        self._backoff = backoff
        self._late_s = late_s
        self._slots = asyncio.Semaphore(MOST_WRITES)
        self._tasks: dict[PodUid, asyncio.Task[BindOutcome]] = {}
        """One per reserved pod whose outcome is unknown. It may outlive a deleted pod for a
        moment."""

    async def bind(self, need: PodNeed, node: str, *, version: str) -> BindOutcome:
        """Bind a pod to a node and return the outcome. Cancelling only stops waiting.

        `version` is the resource version of the pod with this `need`: only that version is bound.
        """
        if not version:
            # A bind without a version could never be recognised as too late.
            raise ValueError(f"pod {need} has no version")
        if not self._left_s():
            return BindOutcome(_NOT_LEADING)
        task = self._tasks.get(need.uid)
        if task is not None and self._book.state(need.uid) not in HELD:
            return BindOutcome("an earlier bind of the pod has not finished; retrying")
        order = self._book.begin_bind(need, node, now=self._clock(), version=version)
        if isinstance(order, AlreadyBound):
            return BindOutcome()
        if isinstance(order, Refusal):
            return BindOutcome(order.text, order.reason)
        if task is None:
            task = asyncio.create_task(self._carry_out(order))
            self._tasks[need.uid] = task
        return await asyncio.shield(task)

    async def bind_plain(self, pod: ClusterPod, node: str) -> BindOutcome:
        """Bind a pod without GPUs with one request, as kube-scheduler itself does."""
        binding = Binding(uid=pod.uid, namespace=pod.namespace, name=pod.name, node=node)
        try:
            async with self._slots:
                await self._api.bind(binding)
        except KubeError as error:
            return BindOutcome(error.message)
        return BindOutcome()

    async def read(self, *, uid: PodUid, namespace: str, name: str) -> ClusterPod | None:
        """Read a pod that the watch has not reported; None if it is gone. Raises `KubeError`."""
        return await self._api.read(uid=uid, namespace=namespace, name=name)

    async def reread(self, uid: PodUid, namespace: str, name: str) -> None:
        """Read a pod whose outcome is unknown, and update the book. Raises `KubeError`."""
        if uid in self._tasks:
            return
        step = self._book.step(uid)
        pod = await self._api.read(uid=uid, namespace=namespace, name=name)
        if uid not in self._tasks:
            self._book.reread(uid, pod, step=step, now=self._clock())

    async def drain(self, *, timeout_s: float) -> None:
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=timeout_s)

    async def _carry_out(self, order: BindOrder) -> BindOutcome:
        try:
            outcome = await self._until_known(order)
        except BaseException:
            # Cancelled or failed: the request may still take effect.
            self._book.unknown(order.booking, now=self._clock())
            raise
        else:
            if outcome.problem:
                self._book.refused(order.booking, now=self._clock())
            else:
                self._book.bound(order.booking, now=self._clock())
            return outcome
        finally:
            # In the same loop turn as the reservation, so that the next bind sees neither.
            del self._tasks[order.booking.uid]

    async def _until_known(self, order: BindOrder) -> BindOutcome:
        attempt = _Attempt(order, await self._binding(order))
        if order.is_begun:
            # The request of an earlier, cancelled task may still take effect.
            attempt.late_until = self._clock() + self._late_s
        backoff = self._backoff()
        while True:
            wait_s = None
            try:
                await self._send(attempt)
                return BindOutcome()
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
        """Send the bind request, if allowed. Raises `_NotAllowedError`, `KubeError`."""
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
                    f"stopped binding pod {binding.namespace}/{binding.name}: this replica"
                    " is not the leader any more"
                ) from error

    @asynccontextmanager
    async def _while_leading(self) -> AsyncIterator[None]:
        """Cancel the block by `TimeoutError` when this process stops leading."""
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

    def _after_error(self, attempt: _Attempt, error: KubeError) -> BindOutcome | None:
        """Return the outcome if the bind is over; None if it is unknown or retried."""
        now = self._clock()
        if error.is_passing:
            attempt.late_until = now + self._late_s
        elif now >= attempt.late_until:
            # Refused for good, and no earlier request can still take effect.
            return BindOutcome(error.message)
        self._book.unknown(attempt.order.booking, now=now)
        _log.warning(error.message, pod=f"{attempt.binding.namespace}/{attempt.binding.name}")
        return None

    async def _without_asking(self, attempt: _Attempt) -> BindOutcome | None:
        """Find out the outcome when no request may be sent; None if still unknown."""
        if self._clock() >= attempt.late_until:
            return BindOutcome(_NOT_LEADING)
        pod = await self._read(attempt.order)
        settled = self._settled(attempt.order, pod)
        if settled is None and pod is not None and is_later(pod.version, attempt.binding.version):
            return BindOutcome(CHANGED)
        return settled

    async def _after_conflict(self, attempt: _Attempt, error: KubeError) -> BindOutcome | None:
        """Read why the pod was not bound; None: the bind may be requested again."""
        pod = await self._read(attempt.order)
        settled = self._settled(attempt.order, pod)
        if settled is not None:
            return settled
        assert pod is not None  # noqa: S101 - a missing pod has an outcome
        # The pod was changed. Only annotations can change its request: kube-scheduler then
        # retries with the new ones.
        if pod.asks is None or self._asks_differently(pod, attempt.order.need):
            return BindOutcome(CHANGED)
        if is_later(pod.version, attempt.binding.version):
            attempt.late_until = -math.inf  # earlier requests cannot bind it any more
        attempt.conflicts += 1
        if attempt.conflicts > _MOST_CONFLICTS and self._clock() >= attempt.late_until:
            return BindOutcome(error.message)
        attempt.binding = replace(attempt.binding, version=pod.version)
        return None

    def _settled(self, order: BindOrder, pod: ClusterPod | None) -> BindOutcome | None:
        """Return the outcome that a read pod shows; None if it still waits."""
        if pod is None:
            self._book.pod_gone(order.booking.uid)
            return BindOutcome("the pod is gone")
        if not pod.node:
            return None
        self._book.pod_put(pod, now=self._clock())
        if pod.booking is not None:
            ours = (order.booking.node, order.booking.containers)
            if ours == (pod.booking.node, pod.booking.containers):
                return BindOutcome()
        return BindOutcome(
            f"the pod has been bound to node {pod.node} by another scheduler or user"
        )

    async def _read(self, order: BindOrder) -> ClusterPod | None:
        need, backoff = order.need, self._backoff()
        while True:
            try:
                return await self._api.read(uid=need.uid, namespace=need.namespace, name=need.name)
            except KubeError as error:
                self._book.unknown(order.booking, now=self._clock())
                await asyncio.sleep(backoff.next(at_least_s=error.retry_after_s))

    async def _binding(self, order: BindOrder) -> Binding:
        need, booking = order.need, order.booking
        return Binding(
            uid=need.uid,
            namespace=need.namespace,
            name=need.name,
            node=booking.node,
            version=order.version,
            annotations={
                **(await self._results(need, booking)),
                PLACEMENT: write_booking(booking),
            },
        )

    def _asks_differently(self, pod: ClusterPod, need: PodNeed) -> bool:
        try:
            return self._book.needs.of(pod) != need
        except UsageError:
            return True


class TracedBindings:
    """Passes binds on, and measures each request as a part of its pod's trace."""

    def __init__(
        self,
        api: ApiBindings,
        measure: Callable[[str], AbstractContextManager[Callable[[str], None]]],
    ) -> None:
        """`measure` gets the span's name."""
        self._api = api
        self._measure = measure

    async def bind(self, binding: Binding) -> None:
        """Raises `KubeError`."""
        with self._measure("bind: request to the API server") as ended:
            try:
                await self._api.bind(binding)
            except KubeError as error:
                ended(error.message)
                raise

    async def read(self, *, uid: PodUid, namespace: str, name: str) -> ClusterPod | None:
        return await self._api.read(uid=uid, namespace=namespace, name=name)


class TimedBindings:
    """Passes binds on, and reports how long each answer took."""

    def __init__(self, api: ApiBindings, *, on_answer: Callable[[float], None]) -> None:
        """`on_answer` gets the seconds of each answer, including refusals."""
        self._api = api
        self._on_answer = on_answer

    async def bind(self, binding: Binding) -> None:
        """Raises `KubeError`. A request without an answer has no time."""
        began = time.perf_counter()
        try:
            await self._api.bind(binding)
        except UnreachableError:
            raise
        except KubeError:
            self._on_answer(time.perf_counter() - began)
            raise
        self._on_answer(time.perf_counter() - began)

    async def read(self, *, uid: PodUid, namespace: str, name: str) -> ClusterPod | None:
        return await self._api.read(uid=uid, namespace=namespace, name=name)

# SPDX-License-Identifier: Apache-2.0
"""`Tenants`: makes a share before its container starts, and removes it when it is not needed.

The truth is in the shares' folders and the kubelet's checkpoint; what is in memory only saves
reading them. Every step may be the last before a crash. The next caller repeats it: the kubelet
asks again, and the loop compares everything again.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import TypeVar

from allotment.agent.allocation.claims import (
    ClaimWork,
    Starts,
    claimants,
    is_past_init,
    needs_pod,
    starts_of,
    work_for,
)
from allotment.agent.allocation.orders import (
    again,
    is_room_coming,
    nearest_first,
    order_for,
    request_of_share,
    share_of,
)
from allotment.agent.allocation.reconcile import (
    Due,
    Findings,
    Why,
    reconcile,
    released,
    resized_pods,
    served,
)
from allotment.agent.allocation.share_events import ShareEvents
from allotment.agent.allocation.waiting import Patience, PodLocks
from allotment.agent.evictions import Evictions
from allotment.agent.protocols import Checkpoint, CheckpointEntry, Pods, Reports, ShareStore
from allotment.agent.resources import Offer
from allotment.dialects import never_asked
from allotment.dialects.own.placement import accepted_resize
from allotment.model.errors import AllotError, BusyError, DoesNotFitError, StateError
from allotment.model.pods import ContainerKind, Pod, PodUid
from allotment.model.requests import Request
from allotment.model.shares import Share, ShareId
from allotment.modes import traits_of
from allotment.shares.failpoints import failpoint
from allotment.shares.placing import ModeAttempts, ShareOrder
from allotment.shares.pods import NodePolicy

_T = TypeVar("_T")

Ready = Callable[[Share], Awaitable[None]]
"""Returns when the share's programs can start (`mps_keeping`). Raises `AllotError`: the container
waits, and the share stays."""

Clear = Callable[[Collection[str]], Awaitable[None]]
"""Removes idle MIG slices from GPUs, by UUID, which a scheduler chose for a share of another mode.
If slices remain, the share is refused."""

_THREADS = 4
_SLICE_THREADS = 64
"""As many as eight GPUs have slices. Each waits for a driver, and must not delay the others."""


class Tenants:
    """Answers `PreStartContainer`, and runs the loop that ends and repairs shares."""

    def __init__(
        self,
        *,
        checkpoint: Checkpoint,
        pods: Pods,
        offer: Callable[[], Offer],
        reports: Reports,
        store: ShareStore,
        policy: Callable[[ShareOrder], NodePolicy],
        evictions: Evictions,
        ready: Ready | None = None,
        clear: Clear | None = None,
        on_resized: Callable[[Mapping[PodUid, int], Mapping[str, int]], None] | None = None,
        renew: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
        patience: Patience | None = None,
        step: Callable[[str], None] = failpoint,
    ) -> None:
        """Connect the parts.

        `policy` returns what is in force for an order; it is called in threads. `on_resized` gets
        the generation in force of each resized pod, and what is released, by resource. `clock`
        returns seconds after the epoch. `renew` lets the kubelet write its checkpoint again. `step`
        is called at every fault point.
        """
        self._checkpoint = checkpoint
        self._pods = pods
        self._offer = offer
        self._reports = reports
        self._store = store
        self._policy = policy
        self._ready = ready
        self._clear = clear
        self._on_resized = on_resized
        self._renew = renew
        self._evictions = evictions
        self._clock = clock
        self._patience = patience or Patience()
        self._step = step
        self._events = ShareEvents(reports, clock)
        self._shares: dict[ShareId, Share] = {}
        self._changed: dict[ShareId, Share | None] = {}
        self._running: dict[tuple[str, frozenset[str]], asyncio.Task[None]] = {}
        self._asked: dict[tuple[str, frozenset[str]], tuple[float, Starts]] = {}
        self._locks = PodLocks()
        self._unsettled: set[PodUid] = set()
        self._resized: dict[PodUid, int] = {}
        """The generation in force of each resized pod."""
        self._requests: dict[ShareId, Request] = {}
        """What resized shares have: their requests as they were carried out."""
        self._refused: dict[ShareId, tuple[Request, float]] = {}
        """The last refused request of a share, and when."""
        self._wake = asyncio.Event()
        self._looked = -math.inf
        self._is_renewed = False
        """The kubelet was asked to write a removed or damaged checkpoint again."""
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tenancy")
        self._slice_threads = ThreadPoolExecutor(_SLICE_THREADS, thread_name_prefix="tenancy-mig")

    @property
    def shares(self) -> tuple[Share, ...]:
        """The shares of containers, as they were read last."""
        return tuple(self._shares.values())

    def modes(self) -> Mapping[str, str]:
        """Return the mode of the shares on each device that has some, by its UUID."""
        return {
            device.uuid: share.mode for share in self._shares.values() for device in share.devices
        }

    async def pre_start(self, resource: str, ids: frozenset[str]) -> None:
        """Make the shares of the containers that hold these ids (`PreStartContainer`).

        Calls for the same ids at the same time wait for one task. Raises `AllotError`.
        """
        key = (resource, ids)
        task = self._running.get(key)
        if task is None:
            task = asyncio.create_task(self._start(resource, ids))
            self._running[key] = task
            task.add_done_callback(partial(self._forget, key))
        done, _ = await asyncio.wait({task}, timeout=self._patience.deadline)
        if not done:
            raise StateError(
                f"the share of {', '.join(sorted(ids))} is not ready after"
                f" {self._patience.deadline:g} s",
                hint="the kubelet asks again by itself; if it goes on, see the agent's log",
            )
        await task

    async def prepare_claim(self, uid: PodUid, orders: Sequence[ShareOrder]) -> tuple[Share, ...]:
        """Make or find the shares of a claim's requests. Raises `AllotError`, and ends new ones."""
        async with self._locks.hold(uid):
            made, before = list[Share](), set(self._shares)
            try:
                for order in orders:
                    share = await self._place(order)
                    self._step("tenancy.prepared")
                    self._note(share.id, share)
                    made.append(share)
                    if self._ready is not None:
                        await self._ready(share)
            except AllotError as error:
                for share in (each for each in made if each.id not in before):
                    with suppress(AllotError):  # its release ends it
                        await self._end(share.id, Why.CLAIM_RELEASED)
                self._reports.count("refusals", reason=type(error).__name__)
                raise
        for share in (each for each in made if each.id not in before):
            self._events.ready(share, None)
        return tuple(made)

    async def release_claim(self, uid: PodUid) -> None:
        """End a claim's shares, all that can be. Raises `BusyError` while one has processes."""
        async with self._locks.hold(uid), AsyncExitStack() as ends:  # tries all of them
            for share in self.shares:
                if share.owner is not None and share.owner.uid == uid:
                    ends.push_async_callback(self._end, share.id, Why.CLAIM_RELEASED)

    async def adopt(self) -> None:
        """Read the present shares, before the first call. Raises `StateError`."""
        await self._refresh()
        self._step("tenancy.adopted")

    async def run(self) -> None:
        """End shares that are not needed, and make missing ones, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._listen())
            group.create_task(self._keep_looking())

    async def close(self) -> None:
        """Cancel the calls in progress; the kubelet repeats them at the next agent."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for threads in (self._threads, self._slice_threads):
            threads.shutdown(wait=False, cancel_futures=True)

    # -- PreStartContainer

    def _forget(self, key: tuple[str, frozenset[str]], task: asyncio.Task[None]) -> None:
        self._running.pop(key, None)
        if not task.cancelled():
            task.exception()  # the caller may be gone

    async def _start(self, resource: str, ids: frozenset[str]) -> None:
        try:
            claims = await self._claims(resource, ids)
        except AllotError as error:
            self._reports.count("refusals", reason=type(error).__name__)
            raise
        self._step("tenancy.claimed")
        async with self._locks.hold(claims[0].pod):
            pod = self._pods.get(claims[0].pod)
            if all(entry.share is None for entry in claims):
                # Another plugin's answer is complete: nothing here may delay the container.
                for entry in claims:
                    await self._adopt(entry)
                return
            if pod is None and needs_pod(claims, self._shares):
                pod = await self._pods.wait_for(claims[0].pod, timeout_s=self._patience.pod)
            starts = starts_of(pod, claims)
            is_repeated = self._is_recent(resource, ids) and self._asked[resource, ids][1] == starts
            waiting = claims
            try:
                work = work_for(pod, claims, self._offer(), self._shares, is_repeated=is_repeated)
                waiting = tuple(entry for entry in claims if share_of(entry) == work.starting)
                failed = await self._make(work)
            except AllotError as error:
                await self._refuse(pod, waiting, error)
                raise
            if is_repeated:
                # One of these may be the starting container, whose name the runtime cannot resolve.
                for entry in claims:
                    if share_of(entry) in failed:
                        await self._refuse(pod, (entry,), failed[share_of(entry)])
            if not failed:
                self._evictions.served(claims[0].pod)
        self._asked[resource, ids] = (self._clock(), starts)

    async def _claims(self, resource: str, ids: frozenset[str]) -> tuple[CheckpointEntry, ...]:
        """Return the containers that hold these ids; a removed or damaged checkpoint is renewed."""
        for attempt, wait_s in enumerate(self._patience.checkpoint):
            try:
                return claimants(await self._in_thread(self._checkpoint.entries), resource, ids)
            except StateError:
                if attempt == 0:
                    self._renew()
                await asyncio.sleep(wait_s)
        return claimants(await self._in_thread(self._checkpoint.entries), resource, ids)

    async def _refuse(
        self, pod: Pod | None, claims: Sequence[CheckpointEntry], error: AllotError
    ) -> None:
        """Report a refusal; the pod is evicted if no program of it can run for long."""
        self._events.refused(pod, claims, error)
        # Without an offer the configuration is unknown or invalid, and may be as before.
        if pod is not None and self._offer().resources:
            await self._evictions.refused(pod, {each.container for each in claims}, error)

    def _is_recent(self, resource: str, ids: frozenset[str]) -> bool:
        asked = self._asked.get((resource, ids))
        return asked is not None and 0 <= self._clock() - asked[0] < self._patience.repeat

    async def _make(self, work: ClaimWork) -> dict[ShareId, AllotError]:
        """Make the shares; return the failures that keep no container from starting."""
        for stale in work.end:
            # A busy share stays for now, and must not delay its successor.
            with suppress(BusyError):
                await self._end(stale, Why.SUPERSEDED)
        made: list[Share] = []
        failed = dict(work.failed)
        for order in work.make:
            try:
                self._step("tenancy.decided")
                # A container that most likely does not start must not delay the others.
                share = await self._place(order, is_patient=order.id == work.starting)
                self._step("tenancy.prepared")
                self._note(share.id, share)
                if self._ready is not None:
                    await self._ready(share)
                if order.id not in work.keep:
                    pod = self._pods.get(share.owner.uid) if share.owner else None
                    self._events.ready(share, pod)
                made.append(share)
            except AllotError as error:
                if order.id not in work.optional:
                    raise
                failed[order.id] = error
        likely = [share for share in made if share.id == work.starting]
        likely = likely or [share for share in made if share.id in work.alternatives]
        if not likely:
            raise failed[work.starting]
        starting = likely[-1]
        if len(made) > 1 and starting.owner is not None:
            # Init containers and their successors have the same guarantee in turn: the last share
            # that is prepared has it. Which container needs it is only certain later.
            self._unsettled.add(starting.owner.uid)
            if starting is not made[-1]:
                await self._prepare(again(starting, starting.owner))
        return failed

    async def _place(self, order: ShareOrder, *, is_patient: bool = True) -> Share:
        """Make a share in the first mode that has room.

        Tries again only if another share ended, at most once for each wait. Raises the last
        `DoesNotFitError`.
        """
        attempts = ModeAttempts(order)
        room_s = iter(self._patience.room if is_patient else self._patience.room[:1])
        departure_s = iter(self._patience.departure if is_patient else ())
        before: set[ShareId] | None = None
        while True:
            if before is None or not before <= set(self._shares):
                before = set(self._shares)
                share = await self._attempt(attempts)
                if share is not None:
                    return share
            wait_s = next(room_s, None)
            if wait_s is None and await self._is_room_coming(order):
                wait_s = next(departure_s, None)
            if wait_s is None:
                raise attempts.refusal()
            if before <= set(self._shares):
                await asyncio.sleep(wait_s)
                for due in self._findings(None).due:
                    await self._end_due(due)

    async def _attempt(self, attempts: ModeAttempts) -> Share | None:
        for in_mode in attempts.orders:
            for variant in nearest_first(in_mode, self.shares):
                try:
                    return await self._prepare(variant)
                except DoesNotFitError as error:
                    attempts.add(variant, error)
        return None

    async def _is_room_coming(self, order: ShareOrder) -> bool:
        with suppress(StateError):
            entries = await self._in_thread(self._checkpoint.entries)
            return is_room_coming(order, self.shares, entries)
        return False

    async def _prepare(self, order: ShareOrder) -> Share:
        """Let the store make the share. Waiting for a driver takes no thread from other shares."""
        existing = self._shares.get(order.id)
        is_slice = traits_of(existing.mode if existing else order.request.mode).is_slice
        if existing is None and not is_slice and order.devices and self._clear is not None:
            await self._clear(order.devices)
        return await self._in_thread(
            lambda: self._store.prepare(order, self._policy(order)),
            threads=self._slice_threads if is_slice else self._threads,
        )

    # -- the loop

    async def _listen(self) -> None:
        async for _ in self._pods.changes():
            self._wake.set()

    async def _keep_looking(self) -> None:
        while True:
            wait_s = await self.look()
            # Not `wait_for`: Python 3.11's swallows a cancellation that meets with news.
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            await asyncio.sleep(self._patience.pause)
            self._wake.clear()

    async def look(self) -> float:
        """Compare shares, pods and checkpoint once; return the seconds until the next time."""
        now = time.monotonic()
        entries: tuple[CheckpointEntry, ...] | None = None
        is_retried = False
        try:
            if now - self._looked >= self._patience.look:
                await self._refresh()
                self._looked = now
            entries = await self._in_thread(self._checkpoint.entries)
        except StateError as error:
            is_retried = True  # shares that are not needed are ended all the same
            self._events.failed(error)
        else:
            self._events.works()
        is_lost = not entries and (entries is None or bool(self._shares))
        if is_lost and not self._is_renewed:
            self._renew()  # a kubelet that restarts must find it
        self._is_renewed = is_lost
        findings = self._findings(entries)
        for due in findings.due:
            is_retried |= not await self._end_due(due)
        await self._settle_all()
        is_retried |= not await self._resize_all()
        for entry in findings.missing:
            if not self._locks.is_held(entry.pod):
                async with self._locks.hold(entry.pod):
                    await self._adopt(entry)
        names = {resource.name for resource in self._offer().resources}
        pods = self._pods.all()
        for pod in pods:
            problem = None if pod.has_ended else never_asked(pod, nvidia=names)
            if problem is not None:
                self._events.never_asked(pod, problem)
        uids = {pod.uid for pod in pods}
        self._events.keep(uids)
        self._evictions.keep(uids)
        self._asked = {key: when for key, when in self._asked.items() if self._is_recent(*key)}
        next_s = self._patience.look if findings.next_in_s is None else findings.next_in_s
        return min(next_s, self._patience.retry) if is_retried else next_s

    def _findings(self, entries: Sequence[CheckpointEntry] | None) -> Findings:
        # `get` prefers the uid that a mirror pod itself names.
        pods = {pod.uid: self._pods.get(pod.uid) or pod for pod in self._pods.all()}
        return reconcile(
            self._shares,
            pods,
            is_synced=self._pods.is_synced,
            entries=entries,
            offer=self._offer(),
            now=self._clock(),
        )

    async def _end_due(self, due: Due) -> bool:
        """End a share unless its state has changed; return False if it must be tried again."""
        owner = due.share.owner
        if owner is None:
            return True
        if self._locks.is_held(owner.uid):
            return False  # a share of that pod is being prepared
        async with self._locks.hold(owner.uid):
            pod = self._pods.get(owner.uid)
            why = served(due.share, pod, is_synced=self._pods.is_synced)
            if due.why is not Why.SUPERSEDED and why is None:
                return True
            try:
                await self._end(due.share.id, due.why)
            except BusyError:
                return False
            except AllotError as error:
                self._events.failed(error)
                return False
            if due.why is Why.CONTAINER_FINISHED:
                await self._settle(owner.uid)
        return True

    async def _settle_all(self) -> None:
        """Settle the pods for which the starting container was uncertain."""
        for uid in list(self._unsettled):
            pod = self._pods.get(uid)
            if pod is None or pod.has_ended:
                self._unsettled.discard(uid)
            elif is_past_init(pod) and not self._locks.is_held(uid):
                async with self._locks.hold(uid):
                    await self._settle(uid)

    async def _resize_all(self) -> bool:
        """Let shares follow `allotment.dev/resize`; return False if some must be tried again."""
        pods = {pod.uid: pod for pod in self._pods.all()}
        resized = resized_pods(self.shares, pods)
        is_done = True
        for uid in [pod.uid for pod in resized]:
            if self._locks.is_held(uid):
                is_done = False
                continue
            async with self._locks.hold(uid):
                # A share that is made later is made by this pod, or a later state of it.
                pod = self._pods.get(uid)
                if pod is None:
                    continue
                generation = accepted_resize(pod).generation
                shares = [each for each in self.shares if each.owner and each.owner.uid == uid]
                if all([await self._resize(pod, share) for share in shares]):
                    self._resized[uid] = generation
                else:
                    is_done = False
        self._resized = {pod.uid: self._resized.get(pod.uid, 0) for pod in resized}
        present = {share.id for share in self.shares}
        self._requests = {key: each for key, each in self._requests.items() if key in present}
        self._refused = {key: each for key, each in self._refused.items() if key in present}
        if self._on_resized is not None:
            placed = {uid: generation for uid, generation in self._resized.items() if generation}
            self._on_resized(placed, released(self.shares, resized))
        return is_done

    async def _resize(self, pod: Pod, share: Share) -> bool:
        """Give a share what its container asks for; return whether it has that.

        The caller holds the pod's lock.
        """
        owner = share.owner
        try:
            request = request_of_share(pod, share, self._offer())
            if owner is None or request is None or self._requests.get(share.id) == request:
                return True
            refused, when = self._refused.get(share.id, (None, 0.0))
            if refused == request and 0 <= self._clock() - when < self._patience.retry:
                return False
            self._refused[share.id] = request, self._clock()
            order = again(share, owner)
            self._step("tenancy.resizing")
            changed = await self._in_thread(
                lambda: self._store.resize(share.id, request, self._policy(order))
            )
            self._step("tenancy.resized")
        except AllotError as error:
            self._events.resize_refused(pod, share, accepted_resize(pod).wish, error)
            return False
        self._refused.pop(share.id, None)
        self._requests[share.id] = request
        self._note(share.id, changed)
        if changed.devices != share.devices:
            self._events.resized(changed)
        return True

    async def _settle(self, uid: PodUid) -> None:
        """Give a pod's regular containers the guarantees that its init containers used."""
        pod = self._pods.get(uid)
        if pod is None or not is_past_init(pod):
            return
        for share in list(self._shares.values()):
            owner = share.owner
            if owner is not None and owner.uid == uid and owner.kind is ContainerKind.REGULAR:
                # On failure it keeps the smaller guarantee until its container restarts.
                with suppress(AllotError):
                    await self._prepare(again(share, owner))
        self._unsettled.discard(uid)

    async def _adopt(self, entry: CheckpointEntry) -> None:
        """Book what a container uses without a share. The caller holds the pod's lock."""
        pod = self._pods.get(entry.pod)
        if pod is None or pod.has_ended or share_of(entry) in self._shares:
            return
        try:
            order = order_for(pod, entry, self._offer())
            self._step("tenancy.adopting")
            share = await self._in_thread(lambda: self._store.prepare(order, self._policy(order)))
        except AllotError as error:
            self._events.missing(pod, entry, error)
            return
        self._note(share.id, share)
        self._events.adopted(share, entry)

    # -- the shares

    async def _end(self, share: ShareId, why: Why) -> None:
        self._step("tenancy.ending")
        await self._in_thread(lambda: self._store.end(share))
        self._step("tenancy.ended")
        self._note(share, None)
        self._reports.count("shares_ended", reason=why)

    async def _refresh(self) -> None:
        self._changed = {}
        shares = {share.id: share for share in await self._in_thread(self._store.owned)}
        # What was read may be older than what was made or ended meanwhile.
        for share_id, share in self._changed.items():
            if share is None:
                shares.pop(share_id, None)
            else:
                shares[share_id] = share
        self._shares = shares

    def _note(self, share_id: ShareId, share: Share | None) -> None:
        self._changed[share_id] = share
        if share is None:
            self._shares.pop(share_id, None)
        else:
            self._shares[share_id] = share

    async def _in_thread(
        self, function: Callable[[], _T], *, threads: ThreadPoolExecutor | None = None
    ) -> _T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(threads or self._threads, function)

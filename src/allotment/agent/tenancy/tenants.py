# SPDX-License-Identifier: Apache-2.0
"""`Tenants`: who has what on this node.

Nothing is kept here that is not in the share directories or the kubelet's checkpoint: what is in
memory only saves reading them. Every step may be the last before a crash, and is repeated by
whoever comes next: the kubelet asks again, and the loop looks at everything again.
"""

import asyncio
import math
import os
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from allotment.agent.protocols import Answer, Checkpoint, CheckpointEntry, Pods, Reports
from allotment.agent.resources import Offer, Resource
from allotment.agent.tenancy.claims import (
    Starts,
    Work,
    claimants,
    is_past_init,
    needs_pod,
    starts_of,
    work_for,
)
from allotment.agent.tenancy.locks import PodLocks
from allotment.agent.tenancy.orders import ShareOrder, again, order_for, share_of
from allotment.agent.tenancy.reconciling import Due, Findings, Why, reconcile, served
from allotment.agent.tenancy.stores import ShareStore
from allotment.agent.tenancy.told import Told
from allotment.dialects import never_asked
from allotment.model.errors import AllotError, BusyError, DoesNotFitError, StateError
from allotment.model.pods import ContainerKind, PodUid
from allotment.model.requests import MIG
from allotment.model.shares import Share, ShareId
from allotment.shares.steps import step

__all__ = ["Clear", "Patience", "Ready", "Respond", "Tenants"]

_T = TypeVar("_T")

Respond = Callable[[Resource, Sequence[str], ShareId], Answer]
"""Answers `Allocate` for a share that will have that id (`device_plugin.answers`)."""

Ready = Callable[[Share], Awaitable[None]]
"""Returns when what a share's programs need besides is there (`mps_keeping`). Raises `AllotError`:
the container waits, and the share stays."""

Clear = Callable[[Collection[str]], Awaitable[None]]
"""Has the warm slices of GPUs go, by UUID, that somebody chose for a share of another mode than
mig. Where they do not, the share is refused as it would be without."""

_THREADS = 4
_CUTTERS = 64
"""Slices that are waited for at once: as many as eight GPUs have, since each may take as long as
its driver, and none is to wait for another's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long is waited for what; in seconds."""

    deadline: float = 24.0
    """For a share. The kubelet waits for 30 s, and the device plugin for 25."""
    pod: float = 15.0
    """For a pod that the kubelet knows to be heard of."""
    room: tuple[float, ...] = (0.0, 0.3, 0.7)
    """Before each further try to find room: a pod may be bound to what is free for the API server,
    and about to be free here."""
    look: float = 30.0
    """Between looks at everything, without news."""
    pause: float = 0.1
    """Between looks at everything, with news: those of a moment count as one."""
    retry: float = 5.0
    """Before what could not be ended is tried again."""
    repeat: float = 120.0
    """How long a question counts as repeated: longer than between the kubelet's retries."""


class Tenants:
    """The device plugin's two questions, and the loop that puts things right."""

    def __init__(
        self,
        *,
        checkpoint: Checkpoint,
        pods: Pods,
        offer: Callable[[], Offer],
        reports: Reports,
        store: ShareStore,
        respond: Respond,
        ready: Ready | None = None,
        clear: Clear | None = None,
        clock: Callable[[], float] = time.time,
        patience: Patience | None = None,
        step: Callable[[str], None] = step,
    ) -> None:
        """Take what it works with.

        `ready` is waited for before a share's container starts, `clear` before one is made on GPUs
        that somebody chose. `clock` gives seconds after the
        epoch; `step` is told of every fault point.
        """
        self._checkpoint = checkpoint
        self._pods = pods
        self._offer = offer
        self._reports = reports
        self._store = store
        self._respond = respond
        self._ready = ready
        self._clear = clear
        self._clock = clock
        self._patience = patience or Patience()
        self._step = step
        self._told = Told(reports, clock)
        self._shares: dict[ShareId, Share] = {}
        self._changed: dict[ShareId, Share | None] = {}
        self._running: dict[tuple[str, frozenset[str]], asyncio.Task[None]] = {}
        self._asked: dict[tuple[str, frozenset[str]], tuple[float, Starts]] = {}
        self._locks = PodLocks()
        self._unsettled: set[PodUid] = set()
        self._wake = asyncio.Event()
        self._looked = -math.inf
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tenancy")
        self._cutters = ThreadPoolExecutor(_CUTTERS, thread_name_prefix="tenancy-mig")

    @property
    def shares(self) -> tuple[Share, ...]:
        """The shares of containers, as they were seen last."""
        return tuple(self._shares.values())

    def answer(self, resource: Resource, ids: Sequence[str]) -> Answer:
        """Answer `Allocate` with a name that was never used, and never will be for anything else.

        Raises `AllotError` where these ids cannot be had together.
        """
        return self._respond(resource, ids, ShareId(os.urandom(6).hex()))

    async def prepare(self, resource: str, ids: frozenset[str]) -> None:
        """Make the shares of whoever holds these ids (`PreStartContainer`).

        Who asks while that is still being done waits for the same. Raises `AllotError`.
        """
        key = (resource, ids)
        task = self._running.get(key)
        if task is None:
            task = asyncio.create_task(self._prepare(resource, ids))
            self._running[key] = task
            task.add_done_callback(partial(self._forget, key))
        done, _ = await asyncio.wait({task}, timeout=self._patience.deadline)
        if not done:
            raise StateError(
                f"the share of {', '.join(sorted(ids))} is still being made after"
                f" {self._patience.deadline:g} s",
                hint="the kubelet asks again by itself; if it goes on, see the agent's log",
            )
        await task

    async def adopt(self) -> None:
        """Learn what shares there are, before the first question. Raises `StateError`."""
        await self._refresh()
        self._step("tenancy.adopted")

    async def run(self) -> None:
        """End what has served its time, and make what is missing; until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._listen())
            group.create_task(self._keep_looking())

    async def close(self) -> None:
        """Let go of what is being made; the kubelet will ask the next agent for it."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for each in (self._threads, self._cutters):
            each.shutdown(wait=False, cancel_futures=True)

    # -- one question

    def _forget(self, key: tuple[str, frozenset[str]], task: asyncio.Task[None]) -> None:
        self._running.pop(key, None)
        if not task.cancelled():
            task.exception()  # whoever asked may be gone

    async def _prepare(self, resource: str, ids: frozenset[str]) -> None:
        try:
            entries = await self._in_thread(self._checkpoint.entries)
            claims = claimants(entries, resource, ids)
        except AllotError as error:
            self._reports.count("refusals", reason=type(error).__name__)
            raise
        self._step("tenancy.claimed")
        async with self._locks.hold(claims[0].pod):
            pod = self._pods.get(claims[0].pod)
            if all(each.share is None for each in claims):
                # Another plugin answered, and all is in its answer: nothing here may keep it.
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
                waiting = tuple(each for each in claims if share_of(each) == work.starting)
                failed = await self._make(work)
            except AllotError as error:
                self._told.refused(pod, waiting, error)
                raise
            if is_repeated:
                # It may be one of these that is starting, and the runtime does not know its name.
                for entry in claims:
                    if share_of(entry) in failed:
                        self._told.refused(pod, (entry,), failed[share_of(entry)])
        self._asked[resource, ids] = (self._clock(), starts)

    def _is_recent(self, resource: str, ids: frozenset[str]) -> bool:
        asked = self._asked.get((resource, ids))
        return asked is not None and 0 <= self._clock() - asked[0] < self._patience.repeat

    async def _make(self, work: Work) -> dict[ShareId, AllotError]:
        """Make what has to be; return what could not be, and keeps nobody from starting."""
        for stale in work.end:
            # What is busy has to wait: its successor must not.
            with suppress(BusyError):
                await self._end(stale, Why.SUPERSEDED)
        made: list[Share] = []
        failed = dict(work.failed)
        for order in work.make:
            try:
                made.append(await self._carry_out(order, work))
            except AllotError as error:
                if order.id not in work.may_fail:
                    raise
                failed[order.id] = error
        instead = [each for each in made if each.id in work.instead]
        if work.starting in failed and not instead:
            raise failed[work.starting]
        await self._put_in_force(work, made, instead)
        return failed

    async def _put_in_force(self, work: Work, made: list[Share], instead: list[Share]) -> None:
        likely = [each for each in made if each.id == work.starting] or instead
        starting = likely[-1]
        if len(made) == 1 or starting.owner is None:
            return
        # Init containers and their successors have the same guarantee in turn: the last one that
        # is prepared has it. Which that has to be is only certain later.
        self._unsettled.add(starting.owner.uid)
        if starting is not made[-1]:
            await self._prepared(again(starting, starting.owner))

    async def _carry_out(self, order: ShareOrder, work: Work) -> Share:
        self._step("tenancy.decided")
        # Who most likely does not start keeps nobody waiting.
        waits = self._patience.room[: None if order.id == work.starting else 1]
        share = await self._with_room(order, waits)
        self._step("tenancy.prepared")
        self._note(share.id, share)
        if self._ready is not None:
            await self._ready(share)
        if order.id not in work.keep:
            self._told.ready(share)
        return share

    async def _with_room(self, order: ShareOrder, waits: Sequence[float]) -> Share:
        """Make a share; where there is no room, once more when others' time turns out to be up."""
        refusal: DoesNotFitError | None = None
        for wait in (None, *waits):
            if wait is not None:
                await asyncio.sleep(wait)
                if not await self._make_room():
                    continue
            try:
                return await self._placed(order)
            except DoesNotFitError as error:
                refusal = error
        if refusal is None:
            raise AssertionError(order)
        raise refusal

    async def _placed(self, order: ShareOrder) -> Share:
        """Make a share in the first of its modes that has room. Raises `DoesNotFitError`."""
        refusals: list[tuple[str, DoesNotFitError]] = []
        for each in (order, *order.otherwise):
            try:
                return await self._placed_in_mode(each)
            except DoesNotFitError as error:
                refusals.append((each.request.mode, error))
        if len(refusals) == 1:
            raise refusals[0][1]
        text = "\n".join(f"in mode {mode}: {error.message}" for mode, error in refusals)
        raise DoesNotFitError(text, hint=refusals[0][1].hint)

    async def _placed_in_mode(self, order: ShareOrder) -> Share:
        near = self._near(order)
        if near:
            with suppress(DoesNotFitError):
                return await self._prepared(replace(order, candidates=near))
        return await self._prepared(order)

    async def _prepared(self, order: ShareOrder) -> Share:
        """Have the store make it; what waits for a GPU's driver keeps no thread from others."""
        there = self._shares.get(order.id)
        is_cut = (order.request.mode if there is None else there.mode) == MIG
        if there is None and not is_cut and order.devices and self._clear is not None:
            await self._clear(order.devices)
        return await self._in_thread(
            self._store.prepare, order, threads=self._cutters if is_cut else None
        )

    def _near(self, order: ShareOrder) -> tuple[str, ...]:
        """Return the devices of a share of the same pod that runs before or after this one.

        Kubernetes counts the greater of both: on the same devices they take no more than that.
        """
        if order.devices or order.request.mode == MIG:  # a slice of one may be the other's
            return ()
        is_init = order.owner.kind is ContainerKind.INIT
        for share in self._shares.values():
            owner = share.owner
            if owner is None or owner.uid != order.owner.uid or share.id == order.id:
                continue
            uuids = tuple(each.uuid for each in share.devices)
            fits = len(uuids) == order.request.count and set(uuids) <= set(order.candidates)
            if fits and (is_init or owner.kind is ContainerKind.INIT):
                return uuids
        return ()

    async def _make_room(self) -> bool:
        """End what is due; return whether anything went."""
        before = set(self._shares)
        findings = self._findings(None)
        for due in findings.due:
            await self._end_due(due)
        return not before <= set(self._shares)

    # -- the loop

    async def _listen(self) -> None:
        async for _ in self._pods.changes():
            self._wake.set()

    async def _keep_looking(self) -> None:
        while True:
            wait = await self.look()
            # Not `wait_for`: Python 3.11's swallows a cancellation that meets with news.
            with suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._wake.wait()
            await asyncio.sleep(self._patience.pause)
            self._wake.clear()

    async def look(self) -> float:
        """Compare what is there with what is known, once; return when to look again, in seconds."""
        now = time.monotonic()
        entries: tuple[CheckpointEntry, ...] | None = None
        failed = False
        try:
            if now - self._looked >= self._patience.look:
                await self._refresh()
                self._looked = now
            entries = await self._in_thread(self._checkpoint.entries)
        except StateError as error:
            failed = True  # what has served its time is ended all the same
            self._told.failed(error)
        else:
            self._told.works()
        findings = self._findings(entries)
        waits = [self._patience.retry] if failed else []
        waits += [self._patience.look if findings.next_in_s is None else findings.next_in_s]
        ended = [await self._end_due(due) for due in findings.due]
        waits += [self._patience.retry] * (not all(ended))
        await self._settle_all()
        for entry in findings.missing:
            await self._make_missing(entry)
        names = {each.name for each in self._offer().resources}
        for pod in self._pods.all():
            wrong = None if pod.has_ended else never_asked(pod, nvidia=names)
            if wrong is not None:
                self._told.never_asked(pod, wrong)
        self._told.keep({each.uid for each in self._pods.all()})
        self._asked = {key: when for key, when in self._asked.items() if self._is_recent(*key)}
        return min(waits)

    def _findings(self, entries: Sequence[CheckpointEntry] | None) -> Findings:
        # By uid, as whoever asks for one finds it: a mirror pod says itself what its uid is.
        known = {each.uid: self._pods.get(each.uid) or each for each in self._pods.all()}
        return reconcile(
            self._shares,
            known,
            is_synced=self._pods.is_synced,
            entries=entries,
            offer=self._offer(),
            now=self._clock(),
        )

    async def _end_due(self, due: Due) -> bool:
        """End a share whose time has come, unless that has changed; return whether it is gone."""
        share = due.share
        if share.owner is None:
            return True
        if self._locks.is_held(share.owner.uid):
            return False  # something of that pod is being prepared
        async with self._locks.hold(share.owner.uid):
            pod = self._pods.get(share.owner.uid)
            why = served(share, pod, is_synced=self._pods.is_synced)
            if due.why is not Why.SUPERSEDED and why is None:
                return True
            try:
                await self._end(share.id, due.why)
            except BusyError:
                return False
            except AllotError as error:
                self._told.failed(error)
                return False
            if due.why is Why.CONTAINER_FINISHED:
                await self._settle(share.owner.uid)
        return True

    async def _settle_all(self) -> None:
        """Look after pods of which it was not certain which of their containers was starting."""
        for uid in list(self._unsettled):
            pod = self._pods.get(uid)
            if pod is None or pod.has_ended:
                self._unsettled.discard(uid)
            elif is_past_init(pod) and not self._locks.is_held(uid):
                async with self._locks.hold(uid):
                    await self._settle(uid)

    async def _settle(self, uid: PodUid) -> None:
        """Give the containers after a pod's init containers what they had left to these."""
        pod = self._pods.get(uid)
        if pod is None or not is_past_init(pod):
            return
        for share in list(self._shares.values()):
            owner = share.owner
            if owner is not None and owner.uid == uid and owner.kind is ContainerKind.REGULAR:
                # Where it fails it goes on with less, and is asked for again when it restarts.
                with suppress(AllotError):
                    await self._prepared(again(share, owner))
        self._unsettled.discard(uid)

    async def _make_missing(self, entry: CheckpointEntry) -> None:
        """Book what runs without a share."""
        if self._locks.is_held(entry.pod):
            return
        async with self._locks.hold(entry.pod):
            await self._adopt(entry)

    async def _adopt(self, entry: CheckpointEntry) -> None:
        """Book what a container has, for which nobody asked. The caller holds the pod's lock."""
        pod = self._pods.get(entry.pod)
        if pod is None or pod.has_ended or share_of(entry) in self._shares:
            return
        try:
            order = order_for(pod, entry, self._offer())
            self._step("tenancy.adopting")
            share = await self._in_thread(self._store.prepare, order)
        except AllotError as error:
            self._told.missing(pod, entry, error)
            return
        self._note(share.id, share)
        self._told.adopted(share, entry)

    # -- what both need

    async def _end(self, share: ShareId, why: Why) -> None:
        self._step("tenancy.ending")
        await self._in_thread(self._store.end, share)
        self._step("tenancy.ended")
        self._note(share, None)
        self._reports.count("shares_ended", reason=why)

    async def _refresh(self) -> None:
        self._changed = {}
        found = {each.id: each for each in await self._in_thread(self._store.owned)}
        # What was made or ended meanwhile may or may not be in what was read.
        for share_id, share in self._changed.items():
            if share is None:
                found.pop(share_id, None)
            else:
                found[share_id] = share
        self._shares = found

    def _note(self, share_id: ShareId, share: Share | None) -> None:
        self._changed[share_id] = share
        if share is None:
            self._shares.pop(share_id, None)
        else:
            self._shares[share_id] = share

    async def _in_thread(
        self,
        function: Callable[..., _T],
        *arguments: object,
        threads: ThreadPoolExecutor | None = None,
    ) -> _T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(threads or self._threads, partial(function, *arguments))

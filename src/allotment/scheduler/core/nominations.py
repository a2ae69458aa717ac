# SPDX-License-Identifier: Apache-2.0
"""Devices reserved for nominated pods, so that pods of lower priority do not take them.

Victims end over their grace periods. kube-scheduler counts a nominated pod in its node's sums
(pkg/scheduler/framework/runtime, `addGENominatedPods`), not on a GPU. Here it is booked on its
exact devices, beside the victims. Pods of higher priority ignore that. Nothing is ever given twice.
"""

from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import msgspec
import structlog

from allotment.model.clusters import ClusterPod, PodBooking, PodNeed
from allotment.model.pods import PodUid
from allotment.model.structs import replace
from allotment.placement.cluster.cluster import Cluster
from allotment.placement.cluster.ranker import Ranking
from allotment.placement.explain import Refusal
from allotment.placement.selections import Effort

CONFIRMED_S = 10.0
"""kube-scheduler writes the nomination onto the pod within a second of our answer, unless it chose
another node."""
FORGOTTEN_S = 600.0
"""kube-scheduler retries each waiting pod within five minutes. A pod without a retry for this time
will not be bound."""

_log = structlog.get_logger(__name__)


# ---- which devices -------------------------------------------------------------------------------


class _Kept(msgspec.Struct):
    need: PodNeed
    booking: PodBooking
    """Under its own uid: a booking of the pod itself is separate."""
    is_in: bool = False
    """It is booked at present."""
    is_asked: bool = False
    """A place was searched since the last `was_asked`."""


class NominatedCluster(Cluster):
    """A cluster that reserves devices for pods. Free of cost while it reserves none."""

    def __init__(self, **policies: Sequence[str]) -> None:
        super().__init__(**policies)
        self._kept: dict[PodUid, _Kept] = {}

    def keep(self, need: PodNeed, booking: PodBooking) -> None:
        self.keep_no_more(need.uid)
        # kube-scheduler reserves CPU and memory of the host.
        uid = PodUid(f"{need.uid} (nominated)")
        alone = replace(booking, uid=uid, cpu_milli=0, memory_bytes=0)
        self._kept[need.uid] = kept = _Kept(need, alone)
        self._resume(kept)

    def keep_no_more(self, uid: PodUid) -> None:
        kept = self._kept.pop(uid, None)
        if kept is not None:
            self._pause(kept)

    def kept(self, uid: PodUid) -> PodBooking | None:
        kept = self._kept.get(uid)
        return None if kept is None else replace(kept.booking, uid=uid)

    def was_asked(self, uid: PodUid) -> bool:
        """Return whether a place for this pod was searched since the last call."""
        kept = self._kept.get(uid)
        if kept is None or not kept.is_asked:
            return False
        kept.is_asked = False
        return True

    def on(self, node: str) -> dict[PodUid, PodBooking]:
        exact = self.nodes.get(node)
        if exact is None:
            return {}
        virtual = {each.booking.uid for each in self._kept.values()}
        return {uid: each for uid, each in exact.bookings.items() if uid not in virtual}

    # ---- Cluster's methods -----------------------------------------------------------------------

    def book(self, booking: PodBooking) -> None:
        """Book a pod in place of its earlier booking and of its reservation."""
        super().book(booking)
        if self._kept and (kept := self._kept.get(booking.uid)) is not None:
            self._pause(kept)

    def release(self, uid: PodUid) -> None:
        """Drop a pod's booking. Its reservation counts again."""
        super().release(uid)
        if self._kept and (kept := self._kept.get(uid)) is not None:
            self._resume(kept)

    def rank(
        self,
        need: PodNeed,
        names: Collection[str] | None = None,
        *,
        most: int | None = None,
        effort: Effort | None = None,
    ) -> Ranking:
        """Like `Cluster.rank`, respecting reservations against this pod."""
        if not self._kept:
            return super().rank(need, names, most=most, effort=effort)
        if (kept := self._kept.get(need.uid)) is not None:
            kept.is_asked = True
        with self._aside(need):
            return super().rank(need, names, most=most, effort=effort)

    def place(
        self,
        need: PodNeed,
        node: str,
        *,
        without: Collection[PodUid] = (),
        effort: Effort | None = None,
    ) -> PodBooking | Refusal:
        """Like `Cluster.place`, respecting reservations against this pod.

        An expected pod with a reservation is not displaced by a pod of the same or lower priority.
        """
        if not self._kept:
            return super().place(need, node, without=without, effort=effort)
        firm = [uid for uid in without if self._is_kept_from(uid, need)]
        gone = [uid for uid in without if uid not in firm] if firm else without
        with self._aside(need, node):
            return super().place(need, node, without=gone, effort=effort)

    # ---- inside ----------------------------------------------------------------------------------

    def _is_kept_from(self, uid: PodUid, need: PodNeed) -> bool:
        kept = self._kept.get(uid)
        return kept is not None and uid != need.uid and kept.need.priority >= need.priority

    @contextmanager
    def _aside(self, need: PodNeed, node: str = "") -> Iterator[None]:
        """Pause all reservations that do not hold against this pod."""
        moved = [
            kept
            for kept in self._kept.values()
            if kept.is_in
            and node in {"", kept.booking.node}
            and not self._is_kept_from(kept.need.uid, need)
        ]
        for each in moved:
            self._pause(each)
        try:
            yield
        finally:
            for each in moved:
                self._resume(each)

    def _pause(self, kept: _Kept) -> None:
        if kept.is_in:
            kept.is_in = False
            super().release(kept.booking.uid)

    def _resume(self, kept: _Kept) -> None:
        if not kept.is_in and kept.need.uid not in self.homes:
            kept.is_in = True
            super().book(kept.booking)
            self.changed(kept.booking.node)


# ---- nominated pods, and for how long ------------------------------------------------------------

Choose = Callable[[PodNeed, str], Awaitable[PodBooking | None]]


class _Nomination(msgspec.Struct):
    need: PodNeed
    node: str
    since: float
    """When it was made or last used."""
    is_confirmed: bool = False
    """The pod's status shows it."""
    has_failed: bool = False
    """A failed search for devices was logged."""


def without_host(need: PodNeed) -> PodNeed:
    """Return a pod's request for devices: kube-scheduler counts CPU and memory."""
    return replace(need, cpu_milli=0, memory_bytes=0)


class Nominations:
    """Nominated pods: by our own answers to preemption, and by the pods' status.

    The status has priority. A nomination ends when the pod is bound, is gone, loses or changes its
    nomination, never shows it, or is not asked about any more.
    """

    def __init__(self, cluster: NominatedCluster, *, clock: Callable[[], float]) -> None:
        self._cluster = cluster
        self._clock = clock
        self._nominations: dict[PodUid, _Nomination] = {}

    def __len__(self) -> int:
        return len(self._nominations)

    def __contains__(self, uid: object) -> bool:
        return uid in self._nominations

    def made(self, need: PodNeed, booking: PodBooking) -> None:
        """Reserve these devices: pods on them are about to be evicted for this one."""
        self._nominations[need.uid] = _Nomination(need, booking.node, self._clock())
        self._cluster.keep(need, booking)

    def pod_put(self, pod: ClusterPod, need: PodNeed | None) -> None:
        """A pod came or changed; `need` is None for no request or an invalid one."""
        known = self._nominations.get(pod.uid)
        if known is None and not pod.nominated_node:
            return
        if pod.node or need is None:
            self.gone(pod.uid)
        elif known is not None and known.node in {pod.nominated_node, pod.tried_first}:
            known.is_confirmed = True
            if known.need != need:
                known.need = need
                self._cluster.keep_no_more(pod.uid)
        elif pod.nominated_node:
            # By an earlier leader or another program: `tick` chooses devices.
            self.gone(pod.uid)
            nomination = _Nomination(need, pod.nominated_node, self._clock(), is_confirmed=True)
            self._nominations[pod.uid] = nomination
        elif known is not None and known.is_confirmed:
            self.gone(pod.uid)

    def gone(self, uid: PodUid) -> None:
        if self._nominations.pop(uid, None) is not None:
            self._cluster.keep_no_more(uid)

    async def tick(self, choose: Choose) -> None:
        """Drop expired nominations, and choose devices for those that need others.

        `choose` returns the pod's devices on a node; None if it cannot fit. A failure for one
        nomination does not stop the others.
        """
        for uid, each in list(self._nominations.items()):
            if self._is_over(uid, each):
                self.gone(uid)
                continue
            try:
                await self._renew(uid, each, choose)
            except Exception:  # noqa: BLE001 - the pod stays nominated; the next tick retries
                if not each.has_failed:
                    each.has_failed = True
                    _log.exception("defect: a nominated pod has no reserved devices", pod=uid)

    async def _renew(self, uid: PodUid, nomination: _Nomination, choose: Choose) -> None:
        """Reserve devices if none are reserved, or if other devices are free."""
        need, node = nomination.need, nomination.node
        if self._cluster.booking(uid) is not None:
            return  # it is expected or bound
        kept = self._cluster.kept(uid)
        found = self._cluster.place(without_host(need), node)
        booking = found if isinstance(found, PodBooking) else None
        if booking is None and kept is None:
            booking = await choose(need, node)
            if self._nominations.get(uid) is not nomination:
                return
        if booking is not None and (kept is None or kept.containers != booking.containers):
            # The request may have changed during the search.
            self._cluster.keep(nomination.need, booking)

    def _is_over(self, uid: PodUid, nomination: _Nomination) -> bool:
        now = self._clock()
        if self._cluster.was_asked(uid):
            nomination.since = now
        most = FORGOTTEN_S if nomination.is_confirmed else CONFIRMED_S
        return now - nomination.since >= most

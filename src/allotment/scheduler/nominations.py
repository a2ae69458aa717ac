# SPDX-License-Identifier: Apache-2.0
"""What is kept for pods that others are being ended for, so that nobody of a lower rank gets it.

Victims end one by one, over their grace periods. kube-scheduler counts a nominated pod in the sums
of its node until it is bound (pkg/scheduler/framework/runtime, `addGENominatedPods`), which says
nothing about which GPU. Here the very devices are kept: the nominated pod is booked on them as if
it had them already, beside those that still do. So they look full, to `filter`, to `bind` and to
the next preemption alike, until the pod comes. As in kube-scheduler, pods of its own priority and
of lower ones see it; those of a higher one do not, nor does the pod itself.

It takes room away and gives none: whatever is kept, nothing is given twice.
"""

from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import structlog

from allotment.kube.cluster_feed import ClusterPod
from allotment.model.clusters import NodeRejection, PodBooking, PodNeed
from allotment.model.pods import PodUid
from allotment.placement.cluster import Cluster, Ranking
from allotment.placement.selections import Effort

__all__ = ["CONFIRMED_S", "FORGOTTEN_S", "NominatedCluster", "Nominations", "without_host"]

CONFIRMED_S = 10.0
"""kube-scheduler writes the nomination onto the pod within a second of our answer, unless it has
chosen otherwise."""
FORGOTTEN_S = 600.0
"""kube-scheduler tries each pod that waits again within five minutes: one that it has not asked
about for so long, nobody is going to bind."""

_log = structlog.get_logger(__name__)


# ---- which devices -------------------------------------------------------------------------------


@dataclass(slots=True)
class _Kept:
    need: PodNeed
    booking: PodBooking
    """Under a uid of its own: what the pod is given comes beside it."""
    is_in: bool = False
    """It counts at present."""
    is_asked: bool = False
    """A place has been looked for since somebody asked whether one has."""


class NominatedCluster(Cluster):
    """A cluster that keeps devices for pods. Costs nothing while it keeps none."""

    def __init__(
        self,
        *,
        node_policies: Sequence[str] = ("fragmentation",),
        device_policies: Sequence[str] = ("fragmentation",),
    ) -> None:
        """Begin empty, and keep nothing. Raises `UsageError` for a policy that is not there."""
        super().__init__(node_policies=node_policies, device_policies=device_policies)
        self._kept: dict[PodUid, _Kept] = {}

    def keep(self, need: PodNeed, booking: PodBooking) -> None:
        """Keep these devices for a pod, in place of what was kept for it before."""
        self.keep_no_more(need.uid)
        # CPU and memory of the host are kube-scheduler's to keep.
        uid = PodUid(f"{need.uid} (nominated)")
        alone = replace(booking, uid=uid, cpu_milli=0, memory_bytes=0)
        self._kept[need.uid] = kept = _Kept(need, alone)
        self._resume(kept)

    def keep_no_more(self, uid: PodUid) -> None:
        """Keep nothing for this pod."""
        kept = self._kept.pop(uid, None)
        if kept is not None:
            self._pause(kept)

    def kept(self, uid: PodUid) -> PodBooking | None:
        """Return what is kept for a pod; None: nothing is."""
        kept = self._kept.get(uid)
        return None if kept is None else replace(kept.booking, uid=uid)

    def was_asked(self, uid: PodUid) -> bool:
        """Tell whether a place for this pod was looked for since this was asked last."""
        kept = self._kept.get(uid)
        if kept is None or not kept.is_asked:
            return False
        kept.is_asked = False
        return True

    def on(self, node: str) -> dict[PodUid, PodBooking]:
        """Return who is booked on a node, but for what is kept."""
        there = self._nodes.get(node)
        if there is None:
            return {}
        virtual = {each.booking.uid for each in self._kept.values()}
        return {uid: each for uid, each in there.bookings.items() if uid not in virtual}

    # ---- as Cluster has them ---------------------------------------------------------------------

    def book(self, booking: PodBooking) -> None:
        """Book a pod, in place of what it had before and of what was kept for it."""
        super().book(booking)
        if self._kept and (kept := self._kept.get(booking.uid)) is not None:
            self._pause(kept)

    def release(self, uid: PodUid) -> None:
        """Forget what a pod has. What is kept for it is kept again."""
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
        """Return the nodes where a pod can be, as `Cluster`, without what is kept from it."""
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
    ) -> PodBooking | NodeRejection:
        """Decide on which of a node's devices a pod goes, as `Cluster`, or say why on none.

        Whoever is nominated, and expected here, does not give way to a pod of no higher priority.
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
        """Count nothing that is kept from lower pods than this one, or for itself."""
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
        if not kept.is_in and kept.need.uid not in self._homes:
            kept.is_in = True
            super().book(kept.booking)


# ---- for whom, and how long ----------------------------------------------------------------------

Choose = Callable[[PodNeed, str], Awaitable[PodBooking | None]]


@dataclass(slots=True)
class _Nomination:
    need: PodNeed
    node: str
    since: float
    """When it was made, or of use last."""
    is_confirmed: bool = False
    """The pod says so."""
    has_failed: bool = False
    """It was logged that no devices could be looked for."""


def without_host(need: PodNeed) -> PodNeed:
    """Return what a pod asks for of devices: CPU and memory are kube-scheduler's to count."""
    return replace(need, cpu_milli=0, memory_bytes=0)


class Nominations:
    """Who is nominated: by our own answer to a preemption, and by what pods say of themselves.

    What a pod says goes first. Ends when the pod is bound, gone, nominated elsewhere or no more,
    when it never says so, and when nobody asks about it any longer.
    """

    def __init__(self, cluster: NominatedCluster, *, clock: Callable[[], float]) -> None:
        """Begin without any."""
        self._cluster = cluster
        self._clock = clock
        self._nominations: dict[PodUid, _Nomination] = {}

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._nominations)

    def made(self, need: PodNeed, booking: PodBooking) -> None:
        """Keep these devices: pods are about to be ended on them for this one."""
        self._nominations[need.uid] = _Nomination(need, booking.node, self._clock())
        self._cluster.keep(need, booking)

    def heard(self, pod: ClusterPod, need: PodNeed | None) -> None:
        """A pod came or changed; None: it asks for nothing, or for what cannot be meant."""
        known = self._nominations.get(pod.uid)
        if known is None and not pod.nominated_node:
            return
        if pod.node or need is None:
            self.gone(pod.uid)
        elif known is not None and known.node == pod.nominated_node:
            known.is_confirmed = True
            if known.need != need:
                known.need = need
                self._cluster.keep_no_more(pod.uid)
        elif pod.nominated_node:
            # By a leader before this one, or by somebody else: devices are chosen in `tick`.
            self.gone(pod.uid)
            nomination = _Nomination(need, pod.nominated_node, self._clock(), is_confirmed=True)
            self._nominations[pod.uid] = nomination
        elif known is not None and known.is_confirmed:
            self.gone(pod.uid)

    def gone(self, uid: PodUid) -> None:
        """A pod is nominated no more."""
        if self._nominations.pop(uid, None) is not None:
            self._cluster.keep_no_more(uid)

    async def tick(self, choose: Choose) -> None:
        """Let lapse what is over, and choose devices where none are kept, or others are free now.

        `choose` says which devices of a node a pod is to get; None: it does not fit there at all.
        What fails of one keeps no other waiting.
        """
        for uid, each in list(self._nominations.items()):
            if self._is_over(uid, each):
                self.gone(uid)
                continue
            try:
                await self._renew(uid, each, choose)
            except Exception:  # noqa: BLE001 - the pod stays nominated, and this is tried again
                if not each.has_failed:
                    each.has_failed = True
                    _log.exception("a nominated pod has no devices kept: a defect", pod=uid)

    async def _renew(self, uid: PodUid, nomination: _Nomination, choose: Choose) -> None:
        """Keep devices where none are kept, or others are free now."""
        need, node = nomination.need, nomination.node
        if self._cluster.booking(uid) is not None:
            return  # it is on its way
        kept = self._cluster.kept(uid)
        found = self._cluster.place(without_host(need), node)
        booking = found if isinstance(found, PodBooking) else None
        if booking is None and kept is None:
            booking = await choose(need, node)
            if self._nominations.get(uid) is not nomination:
                return
        if booking is not None and (kept is None or kept.containers != booking.containers):
            # What it needs may have changed meanwhile.
            self._cluster.keep(nomination.need, booking)

    def _is_over(self, uid: PodUid, nomination: _Nomination) -> bool:
        now = self._clock()
        if self._cluster.was_asked(uid):
            nomination.since = now
        most = FORGOTTEN_S if nomination.is_confirmed else CONFIRMED_S
        return now - nomination.since >= most

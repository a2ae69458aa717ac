# SPDX-License-Identifier: Apache-2.0
"""From what is heard of pods and nodes to the books: that of devices, and that of quotas.

What a pod asks for is worked out once, and kept as long as the pod is there.
"""

import time
from collections.abc import Callable, Collection

import structlog

from allotment.kube.cluster_feed import ClusterPod
from allotment.model.clusters import NodeInventory, PodBooking, PodNeed
from allotment.model.errors import UsageError
from allotment.model.pods import Pod, PodUid
from allotment.scheduler.book import Book
from allotment.scheduler.holdings import HELD
from allotment.scheduler.needs import need_of
from allotment.scheduler.nominations import Nominations
from allotment.scheduler.quota import QuotaBook, QuotaRejection
from allotment.scheduler.taking_over import TakeOver

__all__ = ["BookKeeper", "DialectQuotas"]

_MOST_TOLD = 20
"""By name; how many there are, a figure says."""
_log = structlog.get_logger(__name__)


class DialectQuotas:
    """The quotas as `Book` asks about them, which knows of no dialect.

    A pod counts for as long as it is there: `BookKeeper` says since when and until when. What the
    book says of one that is not there any more, late, counts until it takes that back.
    """

    def __init__(self, quotas: QuotaBook) -> None:
        """Take the book of quotas."""
        self.quotas = quotas
        self._there: dict[PodUid, tuple[PodNeed, str]] = {}
        """What a pod asks for, and whose syntax it was written in."""

    def put(self, need: PodNeed, *, booking: PodBooking | None, dialect: str) -> None:
        """Count a pod that is there, as bound where it has a booking; again: in its place."""
        self._there[need.uid] = (need, dialect)
        self.quotas.add(need, booking=booking, dialect=dialect)

    def gone(self, uid: PodUid) -> None:
        """Count a pod no more."""
        if self._there.pop(uid, None) is not None:
            self.quotas.remove(uid)

    def is_limited(self, namespace: str) -> bool:
        """Tell whether a namespace has any quota."""
        return self.quotas.is_limited(namespace)

    def check(
        self,
        need: PodNeed,
        *,
        booking: PodBooking | None = None,
        without: Collection[PodUid] = (),
    ) -> QuotaRejection | None:
        """Return why a pod may not have what it is to have; None: it may.

        `without`: as if these pods were gone.
        """
        dialect = self._dialect(need.uid)
        return self.quotas.check(need, booking=booking, dialect=dialect, without=without)

    def reserve(self, need: PodNeed, booking: PodBooking) -> None:
        """Count a pod as bound: it is about to be."""
        self.quotas.add(need, booking=booking, dialect=self._dialect(need.uid))

    def release(self, uid: PodUid) -> None:
        """Count a pod that is not bound after all as one that waits, if it is there."""
        there = self._there.get(uid)
        if there is None:
            self.quotas.remove(uid)
        else:
            self.quotas.add(there[0], dialect=there[1])

    def _dialect(self, uid: PodUid) -> str:
        there = self._there.get(uid)
        return there[1] if there is not None else ""


class BookKeeper:
    """Hands what is heard to the books. A `cluster_feed.Listener`."""

    def __init__(
        self,
        book: Book,
        quotas: DialectQuotas,
        *,
        take_over: TakeOver | None = None,
        nominations: Nominations | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with what the books hold. Without `take_over` no other system's pods count."""
        self._book = book
        self._quotas = quotas
        self._take_over = take_over or TakeOver((), node=book.cluster.node)
        self._nominations = nominations
        self._clock = clock
        self._needs: dict[PodUid, tuple[Pod, PodNeed | None]] = {}
        self.strangers: set[PodUid] = set()
        """Pods that ask for GPUs and were bound without a placement that counts."""
        self._told_twice: frozenset[str] = frozenset()

    def pod_put(self, pod: ClusterPod) -> None:
        """A pod came or changed."""
        self._watch_stranger(pod)
        self._book.pod_put(self._take_over.put(pod), now=self._clock())
        if pod.asks is None:
            self._forget(pod.uid)
            self._nominate(pod, None)
            return
        known = self._needs.get(pod.uid)
        if known is not None and known[0] == pod.asks:
            need = known[1]
        else:
            need = self._need(pod)
            self._needs[pod.uid] = (pod.asks, need)
            if known is None and need is not None:
                self._book.arrived(need)
        if need is not None:
            booking = pod.booking
            if booking is None and self._book.state(pod.uid) in HELD:
                booking = self._book.booking(pod.uid)
            self._quotas.put(need, booking=booking, dialect=pod.dialect)
        self._nominate(pod, need)

    def pod_gone(self, uid: PodUid) -> None:
        """A pod is gone."""
        if self._nominations is not None:
            self._nominations.gone(uid)
        self.strangers.discard(uid)
        self._take_over.gone(uid)
        self._forget(uid)
        self._book.pod_gone(uid)

    def node_put(self, node: NodeInventory) -> None:
        """A node came or changed."""
        self._book.node_put(node)
        for pod in self._take_over.on(node.name):
            self._book.pod_put(pod, now=self._clock())
        twice = self._book.cluster.told_twice()
        for uuid in sorted(twice.keys() - self._told_twice)[:_MOST_TOLD]:
            _log.warning("two nodes tell of one GPU", uuid=uuid, nodes=sorted(twice[uuid]))
        self._told_twice = frozenset(twice)

    def node_dropped(self, name: str) -> None:
        """A node is gone, or has no devices."""
        self._book.node_dropped(name)

    def _nominate(self, pod: ClusterPod, need: PodNeed | None) -> None:
        if self._nominations is not None:
            self._nominations.heard(pod, need)

    def _forget(self, uid: PodUid) -> None:
        if self._needs.pop(uid, None) is not None:
            self._quotas.gone(uid)

    def _need(self, pod: ClusterPod) -> PodNeed | None:
        try:
            return need_of(pod, self._book.settings.needs)
        except UsageError:
            # It is told when kube-scheduler asks about the pod.
            return None

    def _watch_stranger(self, pod: ClusterPod) -> None:
        if not pod.problem:
            self.strangers.discard(pod.uid)
        elif pod.uid not in self.strangers:
            self.strangers.add(pod.uid)
            if len(self.strangers) <= _MOST_TOLD:
                _log.warning("a pod's GPUs are not counted", pod=str(pod), why=pod.problem)

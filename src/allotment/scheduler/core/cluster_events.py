# SPDX-License-Identifier: Apache-2.0
"""Passes changes of pods, claims and nodes to the books of devices and of quotas.

A pod's request is computed once and kept while the pod exists. Pods that another system bound are
booked by its records (`Adoption`), claims by their allocation (`KnownClaims`). Ignored parts of
a translated pod become one event (`TranslationWarnings`).
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence

import structlog

from allotment.dialects.foreign.adoption import adopted_usage
from allotment.dialects.foreign.base import ForeignDialect
from allotment.dialects.foreign.claim_bookings import claim_booking, wanted_containers
from allotment.dialects.own.resource_claims import ResourceClaim
from allotment.model.clusters import ClusterPod, NodeInventory, PodBooking, PodNeed, WantedContainer
from allotment.model.errors import UsageError
from allotment.model.pods import PodUid
from allotment.model.reported import Reported
from allotment.model.structs import replace
from allotment.scheduler.core.book import Book
from allotment.scheduler.core.nominations import Nominations
from allotment.scheduler.core.quota import QuotaBook
from allotment.scheduler.core.reservations import HELD
from allotment.scheduler.core.wait_reasons import WaitReasons
from allotment.scheduler.core.waiting import WaitingPods


class Adoption:
    """Reads other systems' records on running pods. Not thread-safe, like the book."""

    def __init__(
        self,
        dialects: Sequence[ForeignDialect],
        *,
        node: Callable[[str], NodeInventory | None],
        systems: Collection[str] = (),
        on_unread: Callable[[ClusterPod, str], None] = lambda _pod, _why: None,
    ) -> None:
        """`node` returns a node's devices; pods of the dialects in `systems` are counted.

        `on_unread` is called once per pod and reason.
        """
        self._dialects = dialects
        self._systems = frozenset(systems)
        self._node = node
        self._on_unread = on_unread
        self._pods: dict[PodUid, ClusterPod] = {}
        """Pods that may have GPUs of another system."""
        self._by_node: dict[str, dict[PodUid, None]] = {}
        self.taken: set[PodUid] = set()
        """Pods whose GPUs are booked."""
        self.unread: dict[PodUid, str] = {}
        """Pods whose GPUs of another system are not counted, with the reason."""

    def put(self, pod: ClusterPod) -> ClusterPod:
        """Record a new or changed pod; return it with its adopted devices."""
        if pod.foreign is None or pod.booking is None:
            self.gone(pod.uid)
            return pod
        self._pods[pod.uid] = pod
        self._by_node.setdefault(pod.node, {})[pod.uid] = None
        found, problem = self._read(pod)
        if found is pod:
            self.taken.discard(pod.uid)
        else:
            self.taken.add(pod.uid)
        if not problem:
            self.unread.pop(pod.uid, None)
        elif self.unread.get(pod.uid) != problem:
            self.unread[pod.uid] = problem
            self._on_unread(pod, problem)
        return found

    def gone(self, uid: PodUid) -> None:
        pod = self._pods.pop(uid, None)
        if pod is None:
            return
        self.taken.discard(uid)
        self.unread.pop(uid, None)
        node_pods = self._by_node[pod.node]
        del node_pods[uid]
        if not node_pods:
            del self._by_node[pod.node]

    def on(self, node: str) -> Iterator[ClusterPod]:
        for uid in list(self._by_node.get(node, ())):
            yield self.put(self._pods[uid])

    def completed(self, pod: ClusterPod) -> ClusterPod:
        """Return a pod with its adopted devices; records and reports nothing."""
        return self._read(pod)[0]

    def _read(self, pod: ClusterPod) -> tuple[ClusterPod, str]:
        if pod.foreign is None or pod.booking is None:
            return pod, ""
        node = self._node(pod.node)
        if node is None:
            return pod, ""
        try:
            found = adopted_usage(
                pod.foreign, node, self._dialects, uid=pod.uid, systems=self._systems
            )
        except UsageError as error:
            return pod, error.one_line()
        if found is None or not found.containers:
            return pod, ""
        return replace(pod, booking=replace(pod.booking, containers=found.containers)), ""


class KnownClaims:
    """The claims that wait or are allocated, and what each takes that its node does not count."""

    def __init__(self) -> None:
        self._claims: dict[PodUid, ResourceClaim] = {}
        self._by_node: dict[str, dict[PodUid, None]] = {}
        self._by_name: dict[tuple[str, str], PodUid] = {}

    def put(self, uid: PodUid, claim: ResourceClaim) -> str:
        """Keep a claim; return its node's name, empty while it waits."""
        self.gone(uid)
        self._claims[uid] = claim
        self._by_name[claim.namespace, claim.name] = uid
        node = _node_of(claim)
        if node:
            self._by_node.setdefault(node, {})[uid] = None
        return node

    def gone(self, uid: PodUid) -> None:
        claim = self._claims.pop(uid, None)
        if claim is None:
            return
        name = claim.namespace, claim.name
        if self._by_name.get(name) == uid:  # another one may have its name by now
            del self._by_name[name]
        node = _node_of(claim)
        if node:
            claims = self._by_node[node]
            del claims[uid]
            if not claims:
                del self._by_node[node]

    def on(self, node: NodeInventory) -> Iterator[tuple[PodUid, PodBooking | None]]:
        for uid in self._by_node.get(node.name, ()):
            yield uid, claim_booking(self._claims[uid], node)

    def counts(self) -> tuple[int, dict[str, int]]:
        """Return how many claims wait, and how many are allocated by node."""
        by_node = {name: len(claims) for name, claims in self._by_node.items()}
        return len(self._claims) - sum(by_node.values()), by_node

    def get(self, uid: PodUid) -> ResourceClaim | None:
        return self._claims.get(uid)

    def wanted(self, namespace: str, names: Collection[str]) -> tuple[WantedContainer, ...]:
        """Return what a pod with these claims will take; empty: unknown, or decided already."""
        uids = [self._by_name.get((namespace, name)) for name in names]
        claims = [self._claims[uid] for uid in uids if uid is not None]
        if len(claims) < len(uids) or any(each.devices for each in claims):
            return ()
        return wanted_containers(claims)


def _node_of(claim: ResourceClaim) -> str:
    return claim.devices[0].pool if claim.devices else ""  # a pool has its node's name


_MOST_LOGGED = 20
"""Logged by name; a metric has the number of all."""
_log = structlog.get_logger(__name__)


class TranslationWarnings:
    """Reports each pod's ignored requests once. Only the leader reports."""

    def __init__(
        self, *, report: Callable[[ClusterPod, str], None], leads: Callable[[], bool]
    ) -> None:
        self._report = report
        self._leads = leads
        self._reported = Reported[PodUid]()

    def put(self, pod: ClusterPod) -> None:
        """A pod that changed without a leader is reported at its next change."""
        if pod.passed_over and self._leads() and self._reported.is_new(pod.uid):
            self._report(pod, pod.passed_over)

    def gone(self, uid: PodUid) -> None:
        self._reported.over(uid)


class ClusterEventHandler:
    """Passes events to the books. A `cluster_feed.Listener`."""

    def __init__(
        self,
        book: Book,
        quotas: QuotaBook,
        *,
        take_over: Adoption | None = None,
        nominations: Nominations | None = None,
        waiting: WaitingPods | None = None,
        warnings: TranslationWarnings | None = None,
        waits: WaitReasons | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without `take_over`, pods of other systems do not count."""
        self._book = book
        self._quotas = quotas
        self._take_over = take_over or Adoption((), node=book.cluster.node)
        self._nominations = nominations
        self._waiting = waiting
        self._warnings = warnings
        self.waits = waits or WaitReasons()
        self._clock = clock
        self.claims = KnownClaims()
        self.unplaced: set[PodUid] = set()
        """Pods that ask for GPUs and were bound without a valid placement."""
        self._reported_twice = Reported[str]()

    def pod_put(self, pod: ClusterPod) -> None:
        if self._warnings is not None:
            self._warnings.put(pod)
        self._watch_unplaced(pod)
        self.waits.put(pod)
        self._book.pod_put(self._take_over.put(pod), now=self._clock())
        if pod.asks is None:
            self._forget(pod.uid)
            self._nominate(pod, None)
            return
        is_new = pod.uid not in self._book.needs
        need = self._book.needs.put(pod)
        if need is not None:
            if is_new:
                self._book.arrived(need)
            # The book's, as it may have more: a bind or a resize that is being written.
            is_held = self._book.state(pod.uid) in HELD
            booking = self._book.booking(pod.uid) if is_held else pod.booking
            self._quotas.add(need, booking=booking, dialect=pod.dialect)
        self._book.watch_resize(pod)
        self._nominate(pod, need)

    def pod_gone(self, uid: PodUid) -> None:
        if self._warnings is not None:
            self._warnings.gone(uid)
        if self._nominations is not None:
            self._nominations.gone(uid)
        if self._waiting is not None:
            self._waiting.gone(uid)
        self.unplaced.discard(uid)
        self.waits.gone(uid)
        self._take_over.gone(uid)
        self._forget(uid)
        self._book.pod_gone(uid)

    def claim_changed(self, uid: PodUid, claim: ResourceClaim | None) -> None:
        """A `cluster_feed.ClaimListener`."""
        node = None
        if claim is None:
            self.claims.gone(uid)
        else:
            node = self._book.cluster.node(self.claims.put(uid, claim))
        booking = None if claim is None or node is None else claim_booking(claim, node)
        self._claim_booked(uid, booking)

    def _claim_booked(self, uid: PodUid, booking: PodBooking | None) -> None:
        if booking is None:
            self._book.claim_gone(uid)
        else:
            self._book.claim_put(booking)

    def node_put(self, node: NodeInventory) -> None:
        self._book.node_put(node)
        for uid, booking in self.claims.on(node):
            self._claim_booked(uid, booking)
        for pod in self._take_over.on(node.name):
            self._book.pod_put(pod, now=self._clock())
        twice = self._book.cluster.reported_twice()
        for uuid in self._reported_twice.new_of(sorted(twice))[:_MOST_LOGGED]:
            _log.warning("GPU reported by two nodes", uuid=uuid, nodes=sorted(twice[uuid]))

    def node_dropped(self, name: str) -> None:
        self._book.node_dropped(name)

    def _nominate(self, pod: ClusterPod, need: PodNeed | None) -> None:
        if self._nominations is not None:
            self._nominations.pod_put(pod, need)
        if self._waiting is not None:
            self._waiting.put(pod, need)

    def _forget(self, uid: PodUid) -> None:
        self._book.needs.gone(uid)
        self._quotas.remove(uid)

    def _watch_unplaced(self, pod: ClusterPod) -> None:
        if not pod.problem:
            self.unplaced.discard(pod.uid)
        elif pod.uid not in self.unplaced:
            self.unplaced.add(pod.uid)
            if len(self.unplaced) <= _MOST_LOGGED:
                _log.warning("a pod's GPUs are not counted", pod=str(pod), why=pod.problem)

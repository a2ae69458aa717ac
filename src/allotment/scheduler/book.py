# SPDX-License-Identifier: Apache-2.0
"""The book: who has what, and who is about to. Events in, answers out; no I/O, time is an argument.

    seen ──filter──► expected ──bind──► reserved ──► bound
      ▲                 │ lapses           │  └────► unknown ──read again──► bound, or seen
      └─────────────────┴──────────────────┘ refused

A pod that is *expected* somewhere has been shown its node and not come to be bound yet: kube-
scheduler chooses for the next pod meanwhile, and that one is steered away from what this one will
take. It is no promise: it lapses after seconds, and whoever comes to be bound goes before it. A
*reservation* is one: from choosing the devices until the API server has said what became of the
binding. While that is not known, it stays. What is *bound* is as the pods say: a pod that has been
bound has its devices until it has ended or is gone, whoever forgot what in between.

Whatever comes twice, late or out of order: each event looks at the state that it finds, and what
does not fit to it changes nothing.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

from allotment.kube.cluster_feed import ClusterPod
from allotment.model.clusters import NodeInventory, NodeRejection, PodBooking, PodNeed
from allotment.model.pods import PodUid
from allotment.placement.cluster import Cluster, Ranking

__all__ = [
    "BINDING",
    "Book",
    "BookSettings",
    "Choice",
    "Order",
    "Quotas",
    "Reread",
    "Settled",
    "State",
    "Turned",
    "is_later",
]

BINDING = "being bound"
"""The reason of a rejection: it is on its way to another node, or there already."""
QUOTA = "quota"


class State(Enum):
    """What the book knows of a pod that asks for GPUs."""

    SEEN = "seen"
    EXPECTED = "expected"
    RESERVED = "reserved"
    UNKNOWN = "unknown"
    BOUND = "bound"


_HELD = (State.RESERVED, State.UNKNOWN, State.BOUND)


@dataclass(frozen=True, slots=True, kw_only=True)
class BookSettings:
    """How long things are waited for, in seconds, and how many nodes are answered."""

    candidates: int = 1
    """Nodes in the answer of filter, the best ones."""
    expected_s: float = 5.0
    """From filter to bind it takes milliseconds, but where a plugin waits for something."""
    repeated_s: float = 0.5
    """Filtered again so soon, the call is the same once more: kube-scheduler lets a pod that it
    could not bind wait for a second at least."""
    avoided_s: float = 60.0
    """A node on which a pod was expected and never bound is its last choice for so long."""
    forgotten_s: float = 600.0
    """A pod that was filtered and never heard of again."""
    confirmed_s: float = 5.0
    """The watch tells of a binding within milliseconds: then the pod is asked for by itself."""


class Quotas(Protocol):
    """What a namespace may have. Its own book, told of the same pods."""

    def check(self, need: PodNeed, *, booking: PodBooking | None = None) -> object | None:
        """Return why a pod may not have what it is to have, as it is told; None: it may."""

    def add(self, need: PodNeed, *, booking: PodBooking | None = None) -> None:
        """Count a pod, as bound where it has a booking; again: in its place."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Filter's answer: the best nodes, best first; or why there is none."""

    best: tuple[str, ...]
    refused: Mapping[str, NodeRejection] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Order:
    """Write this binding: the pod has its reservation."""

    booking: PodBooking
    need: PodNeed
    version: str
    """Of the pod that this was decided for; empty: not known."""
    is_begun: bool = False
    """Somebody is at it already: wait for the outcome with them."""


@dataclass(frozen=True, slots=True)
class Settled:
    """The pod is bound to that node already."""

    node: str


@dataclass(frozen=True, slots=True)
class Turned:
    """The pod is not bound, and why."""

    rejection: NodeRejection


@dataclass(frozen=True, slots=True)
class Reread:
    """A pod of which is to be read what became of it."""

    uid: PodUid
    namespace: str
    name: str


@dataclass(slots=True)
class _Entry:
    need: PodNeed
    state: State = State.SEEN
    version: str = ""
    booking: PodBooking | None = None
    since: float = 0.0
    """Of the state."""
    seen_at: int = -1
    """The version of its node as it was with the booking."""
    is_confirmed: bool = False
    """Bound, and the watch has said so."""
    order: dict[str, int] = field(default_factory=dict)
    """The nodes of the last answer, by rank."""
    avoided: dict[str, float] = field(default_factory=dict)
    """Nodes that it was expected on and not bound to, with when that was."""


class Book:
    """All pods and nodes of a cluster. For one thread."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        settings: BookSettings = BookSettings(),
        quotas: Quotas | None = None,
    ) -> None:
        """Begin with an empty cluster, which nobody else writes to."""
        self.cluster = cluster
        self.settings = settings
        self._quotas = quotas
        self._entries: dict[PodUid, _Entry] = {}
        self._plain: set[PodUid] = set()
        """Bound pods that have no devices: CPU and memory alone."""
        self._expected: dict[PodUid, str] = {}
        """Their nodes."""
        self._open: dict[PodUid, None] = {}
        """All but those that are bound for certain, of which time changes nothing; and some that
        have come to that since the last tick."""

    # ---- what kube-scheduler asks ----------------------------------------------------------------

    def filter(
        self, need: PodNeed, names: Collection[str], *, now: float, version: str = ""
    ) -> Choice:
        """Choose the best of these nodes, and expect the pod on the first of them."""
        entry = self._known(need)
        if entry is not None and entry.state in _HELD:
            return self._held(entry, names)
        if entry is None:
            entry = self._entries[need.uid] = _Entry(need, since=now)
            self._open[need.uid] = None
        self._leave(entry, now=now)
        entry.need, entry.version, entry.since = need, version or entry.version, now
        choice = self._chosen(entry, names)
        entry.order = {name: rank for rank, name in enumerate(choice.best)}
        self._expect(entry, choice.best, now=now)
        return choice

    def prioritize(self, need: PodNeed, names: Sequence[str], *, now: float) -> list[str]:
        """Return these nodes, best first."""
        entry = self._known(need)
        if entry is not None and entry.state in _HELD:
            held = entry.booking.node if entry.booking else ""
            return sorted(names, key=lambda name: (name != held, name))
        if entry is None or not entry.order.keys() >= set(names):
            self.filter(need, names, now=now)
            entry = self._entries[need.uid]
        order, last = entry.order, len(entry.order)
        ranked = sorted(names, key=lambda name: (order.get(name, last), name))
        if ranked and (entry.booking is None or entry.booking.node != ranked[0]):
            self._drop_expectation(entry)
            self._expect(entry, [each for each in ranked if each in order], now=now)
        return ranked

    def begin_bind(
        self, need: PodNeed, node: str, *, now: float, version: str = ""
    ) -> Order | Settled | Turned:
        """Choose the devices and reserve them. An `Order` has to be followed by its outcome."""
        entry = self._known(need)
        if entry is not None and entry.state in _HELD and entry.booking is not None:
            if entry.booking.node != node:
                return Turned(_on_its_way(node, entry))
            if entry.state is State.BOUND:
                return Settled(node)
            return Order(entry.booking, entry.need, entry.version, is_begun=True)
        if entry is None:
            entry = self._entries[need.uid] = _Entry(need, since=now)
            self._open[need.uid] = None
        expected = self._as_expected(entry, need, node)
        entry.need, entry.version = need, version or entry.version
        placed = self._placed_anew(entry, node) if expected is None else expected
        if isinstance(placed, NodeRejection):
            return Turned(placed)
        over = self._quotas.check(need, booking=placed) if self._quotas is not None else None
        if over is not None:
            self._drop_expectation(entry)
            self.cluster.release(need.uid)
            return Turned(NodeRejection(node, QUOTA, str(over)))
        self._hold(entry, placed, State.RESERVED, now=now)
        return Order(placed, need, entry.version)

    def arrived(self, need: PodNeed) -> None:
        """Take note of what kind of pods come, once for each: placement learns from it."""
        if need.containers:
            self.cluster.arrived(need)

    def preempt(
        self, need: PodNeed, node: str, victims: Collection[PodUid]
    ) -> PodBooking | NodeRejection:
        """Say whether the pod fits on a node once these pods are gone. Changes nothing."""
        return self._place(need, node, without=victims)

    # ---- what becomes of a binding ---------------------------------------------------------------

    def bound(self, uid: PodUid, *, now: float) -> None:
        """The API server has bound the pod as it was ordered."""
        entry = self._entries.get(uid)
        if entry is not None and entry.state in {State.RESERVED, State.UNKNOWN}:
            entry.state, entry.since = State.BOUND, now

    def refused(self, uid: PodUid, *, now: float) -> None:
        """The API server has not bound the pod, and will not: that binding is over."""
        entry = self._entries.get(uid)
        if entry is not None and entry.state in {State.RESERVED, State.UNKNOWN}:
            self._release(entry, now=now)

    def unknown(self, uid: PodUid, *, now: float) -> None:
        """Nobody can say whether the pod has been bound: it keeps what it was to have."""
        entry = self._entries.get(uid)
        if entry is not None and entry.state is State.RESERVED:
            entry.state, entry.since = State.UNKNOWN, now

    def reread(self, uid: PodUid, pod: ClusterPod | None, *, now: float) -> None:
        """A pod has been read by itself; None: there is none of this uid."""
        if pod is None:
            self.pod_gone(uid)
            return
        entry = self._entries.get(uid)
        is_doubted = entry is not None and entry.state is State.BOUND and not entry.is_confirmed
        if entry is not None and is_doubted and not pod.node:
            # Bound, and not bound: somebody has set the API server's store back.
            self._release(entry, now=now)
            return
        self.pod_put(pod, now=now)

    # ---- what pods and nodes say -----------------------------------------------------------------

    def pod_put(self, pod: ClusterPod, *, now: float) -> None:
        """A pod came or changed."""
        if not pod.node:
            self._unbound(pod, now=now)
        elif pod.booking is None:
            self.pod_gone(pod.uid)
        else:
            self._bound(pod, pod.booking, now=now)

    def pod_gone(self, uid: PodUid) -> None:
        """A pod has ended, or is not there any more."""
        entry = self._entries.pop(uid, None)
        self._expected.pop(uid, None)
        if uid in self._plain:
            self._plain.discard(uid)
            self.cluster.release(uid)
        elif entry is not None and entry.booking is not None:
            self.cluster.release(uid)

    def node_put(self, node: NodeInventory) -> None:
        """A node came or changed. Who is booked on it stays booked."""
        self.cluster.put(node)

    def node_dropped(self, name: str) -> None:
        """A node is gone, or has no devices. Who is booked on it stays booked, should it return."""
        self.cluster.drop(name)

    # ---- time and rank ---------------------------------------------------------------------------

    def tick(self, now: float) -> list[Reread]:
        """Let lapse what is over; return which pods are to be read to know what became of them."""
        settings = self.settings
        for uid in list(self._expected):
            if now - self._entries[uid].since >= settings.expected_s:
                self._leave(self._entries[uid], now=now)
        doubtful = []
        for uid in list(self._open):
            entry = self._entries.get(uid)
            if entry is None or (entry.state is State.BOUND and entry.is_confirmed):
                del self._open[uid]
                continue
            age = now - entry.since
            if entry.state is State.SEEN and age >= settings.forgotten_s:
                del self._entries[uid], self._open[uid]
            elif age >= settings.confirmed_s and (
                entry.state is State.UNKNOWN
                or (entry.state is State.BOUND and not entry.is_confirmed)
            ):
                doubtful.append(Reread(uid, entry.need.namespace, entry.need.name))
        return doubtful

    def rest(self, *, now: float) -> None:
        """Another replica leads: nobody is expected here. What is being bound keeps its outcome."""
        for uid in list(self._expected):
            self._leave(self._entries[uid], now=now)

    # ---- looking in ------------------------------------------------------------------------------

    def state(self, uid: PodUid) -> State | None:
        """Return how a pod stands; None: nothing is known of it, or it asks for no GPU."""
        entry = self._entries.get(uid)
        return entry.state if entry is not None else None

    def booking(self, uid: PodUid) -> PodBooking | None:
        """Return what a pod has, or is to have."""
        entry = self._entries.get(uid)
        return entry.booking if entry is not None else None

    def need(self, uid: PodUid) -> tuple[PodNeed, str] | None:
        """Return what a pod asked for when it was filtered last, and the version that it had."""
        entry = self._entries.get(uid)
        return None if entry is None else (entry.need, entry.version)

    def by_node(self) -> dict[str, list[PodUid]]:
        """Return the pods that have devices, or are to have them, by node."""
        found: dict[str, list[PodUid]] = {}
        for uid, entry in self._entries.items():
            if entry.booking is not None:
                found.setdefault(entry.booking.node, []).append(uid)
        return found

    def counts(self) -> dict[State, int]:
        """Return how many pods are in each state."""
        there = [uid for uid in self._open if uid in self._entries]
        counts = Counter(self._entries[uid].state.value for uid in there)
        counts[State.BOUND.value] += len(self._entries) - len(there)
        return {state: counts[state.value] for state in State}

    # ---- inside ----------------------------------------------------------------------------------

    def _known(self, need: PodNeed) -> _Entry | None:
        """Return what is known of a pod, also of one that was bound without any device."""
        entry = self._entries.get(need.uid)
        if entry is None and need.uid in self._plain:
            booking = self.cluster.booking(need.uid)
            return _Entry(need, State.BOUND, booking=booking, is_confirmed=True)
        return entry

    def _held(self, entry: _Entry, names: Collection[str]) -> Choice:
        """Answer for a pod that has its place: that one, or none."""
        node = entry.booking.node if entry.booking else ""
        if node in names:
            return Choice((node,))
        return Choice((), {name: _on_its_way(name, entry) for name in names})

    def _chosen(self, entry: _Entry, names: Collection[str]) -> Choice:
        """Rank; where nothing fits, see whether that is for the sake of pods that may not come."""
        need = entry.need
        most = self.settings.candidates + len(entry.avoided)
        ranking = self.cluster.rank(need, names, most=most)
        if not ranking.best and self._expected:
            with_them, ranking = ranking, self._rank_without_expected(need, names, most)
            ranking = ranking if ranking.best else with_them
        if not ranking.best:
            # kube-scheduler has found CPU and memory on these nodes, and hears of pods that end
            # in its own time.
            light = self.cluster.rank(_without_cpu(need), names, most=most)
            ranking = light if light.best else ranking
        best = sorted(ranking.best, key=lambda name: entry.avoided.get(name, float("-inf")))
        return Choice(tuple(best[: self.settings.candidates]), {} if best else ranking.refused)

    def _rank_without_expected(self, need: PodNeed, names: Collection[str], most: int) -> Ranking:
        kept = [self._booking_of(uid) for uid in self._expected]
        for each in kept:
            self.cluster.release(each.uid)
        try:
            return self.cluster.rank(need, names, most=most)
        finally:
            for each in kept:
                self.cluster.book(each)

    def _expect(self, entry: _Entry, names: Iterable[str], *, now: float) -> None:
        """Expect a pod on the first of these nodes that has room beside those expected before."""
        for name in names:
            placed = self._place(entry.need, name)
            if isinstance(placed, PodBooking):
                self._hold(entry, placed, State.EXPECTED, now=now)
                self._expected[entry.need.uid] = name
            return

    def _place(
        self, need: PodNeed, node: str, *, without: Collection[PodUid] = ()
    ) -> PodBooking | NodeRejection:
        placed = self.cluster.place(need, node, without=without)
        if isinstance(placed, PodBooking):
            return placed
        light = self.cluster.place(_without_cpu(need), node, without=without)
        if isinstance(light, NodeRejection):
            return placed
        return replace(light, cpu_milli=need.cpu_milli, memory_bytes=need.memory_bytes)

    def _as_expected(self, entry: _Entry, need: PodNeed, node: str) -> PodBooking | None:
        """Return what a pod was expected to take, if nothing on that node has changed since.

        To choose once more would give the same, and takes as long as to choose a node.
        """
        booking = entry.booking
        is_same = (
            entry.state is State.EXPECTED
            and booking is not None
            and booking.node == node
            and entry.need == need
            and entry.seen_at == self.cluster.version(node)
        )
        return booking if is_same else None

    def _placed_anew(self, entry: _Entry, node: str) -> PodBooking | NodeRejection:
        self._drop_expectation(entry)
        if not node:
            return NodeRejection(node, BINDING, "no node named")
        placed = self._place(entry.need, node)
        if isinstance(placed, NodeRejection):
            placed = self._place_before_expected(entry.need, node, placed)
        return placed

    def _place_before_expected(
        self, need: PodNeed, node: str, rejection: NodeRejection
    ) -> PodBooking | NodeRejection:
        """Place a pod that is being bound before those that are only expected on its node."""
        others = [uid for uid, name in self._expected.items() if name == node]
        if not others:
            return rejection
        placed = self._place(need, node, without=others)
        if isinstance(placed, NodeRejection):
            return placed
        for uid in others:
            self._drop_expectation(self._entries[uid])
        self.cluster.book(placed)
        for uid in others:
            self._expect(self._entries[uid], (node,), now=self._entries[uid].since)
        return placed

    def _hold(self, entry: _Entry, booking: PodBooking, state: State, *, now: float) -> None:
        if entry.booking is not booking:
            self.cluster.book(booking)
        self._expected.pop(entry.need.uid, None)
        self._open[entry.need.uid] = None
        entry.booking, entry.state, entry.since = booking, state, now
        entry.seen_at = self.cluster.version(booking.node)
        entry.is_confirmed = False
        if self._quotas is not None and state is State.RESERVED:
            # Who is being bound counts: as many may be at once as a quota has room for.
            self._quotas.add(entry.need, booking=booking)

    def _release(self, entry: _Entry, *, now: float) -> None:
        if entry.booking is not None:
            self.cluster.release(entry.need.uid)
            if self._quotas is not None and entry.state is not State.EXPECTED:
                self._quotas.add(entry.need)
        self._expected.pop(entry.need.uid, None)
        entry.booking, entry.state, entry.since = None, State.SEEN, now

    def _drop_expectation(self, entry: _Entry) -> None:
        if entry.state is State.EXPECTED:
            self._release(entry, now=entry.since)

    def _leave(self, entry: _Entry, *, now: float) -> None:
        """End an expectation; where it has been waited for, its node is avoided the next time."""
        if entry.state is not State.EXPECTED or entry.booking is None:
            return
        settings = self.settings
        entry.avoided = {
            node: at for node, at in entry.avoided.items() if now - at < settings.avoided_s
        }
        if now - entry.since >= settings.repeated_s:
            entry.avoided[entry.booking.node] = now
        self._release(entry, now=now)

    def _unbound(self, pod: ClusterPod, *, now: float) -> None:
        entry = self._entries.get(pod.uid)
        if entry is None:
            return
        if entry.state is State.UNKNOWN and is_later(pod.version, entry.version):
            # It has changed since, and is not bound: a binding of the version before comes too
            # late, whenever it comes.
            self._release(entry, now=now)
        if entry.state not in _HELD and is_later(pod.version, entry.version):
            entry.version = pod.version

    def _bound(self, pod: ClusterPod, booking: PodBooking, *, now: float) -> None:
        entry = self._entries.get(pod.uid)
        if entry is None and not booking.containers:
            self._plain.add(pod.uid)
            self.cluster.book(booking)
            return
        if entry is None:
            need = PodNeed(uid=pod.uid, namespace=pod.namespace, name=pod.name)
            entry = self._entries[pod.uid] = _Entry(need)
        self._expected.pop(pod.uid, None)
        if entry.booking != booking:
            self._plain.discard(pod.uid)
            self.cluster.book(booking)
        entry.booking, entry.state, entry.since = booking, State.BOUND, now
        entry.is_confirmed = True
        entry.order, entry.avoided = {}, {}

    def _booking_of(self, uid: PodUid) -> PodBooking:
        booking = self._entries[uid].booking
        assert booking is not None, uid  # noqa: S101 - who is expected is booked
        return booking


def is_later(version: str, than: str) -> bool:
    """Compare resource versions: numbers, and comparable by contract since Kubernetes 1.35."""
    if not (version.isdecimal() and than.isdecimal()):
        return bool(version) and not than
    return int(version) > int(than)


def _without_cpu(need: PodNeed) -> PodNeed:
    return replace(need, cpu_milli=0, memory_bytes=0)


def _on_its_way(name: str, entry: _Entry) -> NodeRejection:
    node = entry.booking.node if entry.booking else "another one"
    how = "is bound" if entry.state is State.BOUND else "is being bound"
    return NodeRejection(name, BINDING, f"the pod {how} to node {node}")

# SPDX-License-Identifier: Apache-2.0
"""What each pod has, or is about to have. Events in; no I/O, time is an argument.

    seen ──filter──► expected ──bind──► reserved ──► bound
      ▲                 │ lapses           │  └────► unknown ──found out──► bound, or seen
      └─────────────────┴──────────────────┘ refused

A pod that is *expected* somewhere has been shown its node and not come to be bound yet: kube-
scheduler chooses for the next pod meanwhile, and that one is steered away from what this one will
take. It is no promise: it lapses after seconds, and whoever comes to be bound goes before it. A
*reservation* is one: from choosing the devices until whoever carries the binding out has found out
what became of it. The watch alone ends none: that a pod has changed says that the requests made so
far come too late, and not that no other will be made. What is *bound* is as the pods say: a pod
that has been bound has its devices until it has ended or is gone, whoever forgot what in between.

Whatever comes twice, late or out of order: each event looks at the state that it finds, and what
does not fit to it changes nothing.
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from typing import Protocol

from allotment.kube.cluster_feed import ClusterPod
from allotment.kube.versions import is_later
from allotment.model.clusters import NodeInventory, PodBooking, PodNeed
from allotment.model.pods import PodUid
from allotment.placement.cluster import Cluster
from allotment.scheduler.needs import NeedSettings

__all__ = ["HELD", "BookSettings", "Entry", "Holdings", "Quotas", "Reread", "State"]


class State(Enum):
    """What is known of a pod that asks for GPUs."""

    SEEN = "seen"
    EXPECTED = "expected"
    RESERVED = "reserved"
    UNKNOWN = "unknown"
    BOUND = "bound"


HELD = frozenset({State.RESERVED, State.UNKNOWN, State.BOUND})
"""It has its devices, and nobody else gets them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BookSettings:
    """How long things are waited for, in seconds, how many nodes are answered, and by what."""

    candidates: int = 1
    """Nodes in the answer of filter, the best ones."""
    needs: NeedSettings = field(default=NeedSettings())
    """Of what pods do not say themselves."""
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

    def is_limited(self, namespace: str) -> bool:
        """Tell whether a namespace has any quota: without, nothing is to be checked."""

    def check(self, need: PodNeed, *, booking: PodBooking | None = None) -> object | None:
        """Return why a pod may not have what it is to have, as it is told; None: it may."""

    def reserve(self, need: PodNeed, booking: PodBooking) -> None:
        """Count a pod as bound: it is about to be."""

    def release(self, uid: PodUid) -> None:
        """A pod is not about to be bound any more: count it as what it is, if it is there."""


@dataclass(frozen=True, slots=True)
class Reread:
    """A pod of which is to be read what became of it."""

    uid: PodUid
    namespace: str
    name: str


@dataclass(slots=True)
class Entry:
    """How a pod stands."""

    need: PodNeed
    state: State = State.SEEN
    version: str = ""
    """Of the pod: the one that was looked at; once devices are reserved, the latest with which
    a binding has been asked for."""
    booking: PodBooking | None = None
    since: float = 0.0
    """Of the state."""
    step: int = 0
    """Another one each time that the state was entered."""
    term: int = 0
    """In which the devices were reserved."""
    seen_at: int = -1
    """The version of its node as it was with the booking."""
    is_confirmed: bool = False
    """Bound, and the watch has said so."""
    order: dict[str, int] = field(default_factory=dict)
    """The nodes of the last answer, by rank."""
    avoided: dict[str, float] = field(default_factory=dict)
    """Nodes that it was expected on and not bound to, with when that was."""


class Holdings:
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
        self._entries: dict[PodUid, Entry] = {}
        self._plain: set[PodUid] = set()
        """Bound pods that have no devices: CPU and memory alone."""
        self._expected: dict[PodUid, str] = {}
        """Their nodes."""
        self._open: dict[PodUid, None] = {}
        """All but those that are bound for certain, of which time changes nothing; and some that
        have come to that since the last tick."""
        self._term = 0
        self._steps = count(1)

    # ---- what becomes of a binding ---------------------------------------------------------------

    def renew(self, booking: PodBooking, version: str) -> bool:
        """Say whether this binding may still be asked for; if so, note of which version it is.

        To be asked right before each request. It may not once the devices are not reserved for it
        any more, or were reserved before another replica led: that one may have given them away.
        """
        entry = self._being_bound(booking)
        if entry is None or entry.term != self._term:
            return False
        entry.version = version
        return True

    def bound(self, booking: PodBooking, *, now: float) -> None:
        """The API server has bound the pod as it was ordered."""
        entry = self._being_bound(booking)
        if entry is not None:
            self._enter(entry, State.BOUND, now=now)

    def refused(self, booking: PodBooking, *, now: float) -> None:
        """The API server has not bound the pod, and will not: that binding is over."""
        entry = self._being_bound(booking)
        if entry is not None:
            self._release(entry, now=now)

    def unknown(self, booking: PodBooking, *, now: float) -> None:
        """Nobody can say whether the pod has been bound: it keeps what it was to have."""
        entry = self._being_bound(booking)
        if entry is not None and entry.state is State.RESERVED:
            self._enter(entry, State.UNKNOWN, now=now)

    def step(self, uid: PodUid) -> int:
        """Return a number that is another one once a pod has gone on to another state."""
        entry = self._entries.get(uid)
        return entry.step if entry is not None else 0

    def reread(self, uid: PodUid, pod: ClusterPod | None, *, step: int, now: float) -> None:
        """A pod that nobody is binding has been read by itself; None: there is none of this uid.

        One that is found unbound was so at some time after it was asked about: that counts if it
        is still at the step at which it was then.
        """
        entry = self._entries.get(uid)
        if pod is None:
            self.pod_gone(uid)
        elif pod.node:
            self.pod_put(pod, now=now)
        elif entry is not None and entry.step == step:
            is_set_back = entry.state is State.BOUND and not entry.is_confirmed
            # It has changed since, and is not bound: what was asked for comes too late.
            is_over = entry.state is State.UNKNOWN and is_later(pod.version, entry.version)
            if is_set_back or is_over:
                self._release(entry, now=now)

    # ---- what pods and nodes say -----------------------------------------------------------------

    def pod_put(self, pod: ClusterPod, *, now: float) -> None:
        """A pod came or changed. One that is not bound changes nothing here: who asks will say."""
        if not pod.node:
            return
        if pod.booking is None:
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
            if self._quotas is not None and entry.state in HELD:
                self._quotas.release(uid)

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
        """Another replica may lead: nobody is expected here, and what was begun is not repeated.

        What is being bound keeps its devices until its outcome is known.
        """
        self._term += 1
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

    def need(self, uid: PodUid) -> PodNeed | None:
        """Return what a pod asked for when it was last looked at; None: it never was."""
        entry = self._entries.get(uid)
        return entry.need if entry is not None else None

    def counts(self) -> dict[State, int]:
        """Return how many pods are in each state."""
        there = [uid for uid in self._open if uid in self._entries]
        counts = Counter(self._entries[uid].state.value for uid in there)
        counts[State.BOUND.value] += len(self._entries) - len(there)
        return {state: counts[state.value] for state in State}

    # ---- inside ----------------------------------------------------------------------------------

    def _being_bound(self, booking: PodBooking) -> Entry | None:
        """Return the pod's entry if these very devices are reserved for it, and not yet bound."""
        entry = self._entries.get(booking.uid)
        if entry is None or entry.booking is not booking:
            return None
        return entry if entry.state in {State.RESERVED, State.UNKNOWN} else None

    def _begun(self, need: PodNeed, *, now: float) -> Entry:
        entry = self._entries.get(need.uid)
        if entry is None:
            entry = self._entries[need.uid] = Entry(need, since=now, step=next(self._steps))
            self._open[need.uid] = None
        return entry

    def _enter(self, entry: Entry, state: State, *, now: float) -> None:
        entry.state, entry.since, entry.step = state, now, next(self._steps)

    def _hold(self, entry: Entry, booking: PodBooking, state: State, *, now: float) -> None:
        uid = booking.uid
        if entry.booking is not booking:
            self.cluster.book(booking)
        self._open[uid] = None
        entry.booking, entry.term = booking, self._term
        entry.seen_at = self.cluster.version(booking.node)
        entry.is_confirmed = False
        self._enter(entry, state, now=now)
        if state is State.EXPECTED:
            self._expected[uid] = booking.node
            return
        self._expected.pop(uid, None)
        if self._quotas is not None:
            # Who is being bound counts: as many may be at once as a quota has room for.
            self._quotas.reserve(entry.need, booking)

    def _release(self, entry: Entry, *, now: float) -> None:
        uid = entry.need.uid
        if entry.booking is not None:
            self.cluster.release(uid)
            if self._quotas is not None and entry.state in HELD:
                self._quotas.release(uid)
        self._expected.pop(uid, None)
        entry.booking = None
        self._enter(entry, State.SEEN, now=now)

    def _drop_expectation(self, entry: Entry) -> None:
        if entry.state is State.EXPECTED:
            self._release(entry, now=entry.since)

    def _leave(self, entry: Entry, *, now: float) -> None:
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

    def _bound(self, pod: ClusterPod, booking: PodBooking, *, now: float) -> None:
        entry = self._entries.get(pod.uid)
        if entry is None and not booking.containers:
            self._plain.add(pod.uid)
            self.cluster.book(booking)
            return
        if entry is None:
            need = PodNeed(uid=pod.uid, namespace=pod.namespace, name=pod.name)
            entry = self._entries[pod.uid] = Entry(need)
        self._expected.pop(pod.uid, None)
        if entry.booking != booking:
            self._plain.discard(pod.uid)
            self.cluster.book(booking)
        entry.booking = booking
        self._enter(entry, State.BOUND, now=now)
        entry.is_confirmed = True
        entry.order, entry.avoided = {}, {}

    def _booking_of(self, uid: PodUid) -> PodBooking:
        booking = self._entries[uid].booking
        assert booking is not None, uid  # noqa: S101 - who is expected is booked
        return booking

# SPDX-License-Identifier: Apache-2.0
"""The state of each pod: what it has or will get. Events in; no I/O, time is an argument.

    seen ──filter──► expected ──bind──► reserved ──► bound
      ▲                 │ expires          │  └────► unknown ──read──► bound, or seen
      └─────────────────┴──────────────────┘ refused

Expected entries are soft: they time out, and a bind may displace them. Reserved entries are hard
until the bind's outcome is known. Events may repeat, come late or out of order.
"""

from collections import Counter
from enum import Enum
from itertools import count
from typing import Final

import msgspec

from allotment.dialects.own.registry import NeedSettings, need_of
from allotment.model.clusters import ClusterPod, NodeInventory, PodBooking, PodNeed, is_later
from allotment.model.errors import UsageError
from allotment.model.pods import PodUid
from allotment.model.structs import replace
from allotment.placement.booking import larger_of
from allotment.placement.cluster.cluster import Cluster
from allotment.scheduler.core.quota import QuotaBook


class ReservationState(Enum):
    """The state of a pod that asks for GPUs."""

    SEEN = "seen"
    EXPECTED = "expected"
    RESERVED = "reserved"
    UNKNOWN = "unknown"
    BOUND = "bound"


HELD = frozenset({ReservationState.RESERVED, ReservationState.UNKNOWN, ReservationState.BOUND})
"""States with devices of its own."""


class BookSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Time limits in seconds, the number of nodes in an answer, and default requests."""

    candidates: int = 1
    """Nodes in filter's answer."""
    needs: NeedSettings = msgspec.field(default=NeedSettings())
    """Defaults for what pods do not set."""
    expected_s: float = 5.0
    """From filter to bind takes milliseconds, unless a plugin waits."""
    repeated_s: float = 0.5
    """A repeated filter within this time is the same call: kube-scheduler backs off at least a
    second before it retries a pod."""
    avoided_s: float = 60.0
    """So long, a node where an expected pod was never bound is its last choice."""
    forgotten_s: float = 600.0
    """After filter, without any event of the pod."""
    confirmed_s: float = 5.0
    """The watch reports a bind within milliseconds. After this time the pod is read by itself."""


class Reread(msgspec.Struct, frozen=True):
    """A pod to read, to find out the outcome of its bind."""

    uid: PodUid
    namespace: str
    name: str


class ResizeOrder(msgspec.Struct, frozen=True):
    """Write this placement of a bound pod; what grows is booked already."""

    booking: PodBooking
    version: str
    """The pod's resource version when this was decided: only that version is changed."""


class PodEntry(msgspec.Struct):
    """A pod's state and devices."""

    need: PodNeed
    state: ReservationState = ReservationState.SEEN
    version: str = ""
    """The pod's resource version: at filter; with reserved devices, of the latest bind request."""
    booking: PodBooking | None = None
    since: float = 0.0
    """When the state was entered."""
    step: int = 0
    """A new number for each change of state."""
    term: int = 0
    """The term of leadership in which the devices were reserved."""
    placed_at: int = -1
    """The node's version at the booking (`Cluster.version`)."""
    is_confirmed: bool = False
    """Bound, and confirmed by the watch."""
    order: dict[str, int] = msgspec.field(default_factory=dict)
    """Nodes of the last answer, with their ranks."""
    avoided: dict[str, float] = msgspec.field(default_factory=dict)
    """Nodes where it was expected and not bound, with the time."""
    growing: ResizeOrder | None = None
    """Booked in addition, until the watch reports it or the pod has changed without it."""


class PodNeeds:
    """The pods' requests: each is parsed once, and kept while the pod exists."""

    def __init__(self, settings: NeedSettings = NeedSettings()) -> None:  # noqa: B008 - frozen
        self._settings = settings
        self._parsed: dict[PodUid, tuple[ClusterPod, PodNeed | None]] = {}
        """Pods as last reported, each with its request; None: it is invalid."""

    def __contains__(self, uid: PodUid) -> bool:
        return uid in self._parsed

    def put(self, pod: ClusterPod) -> PodNeed | None:
        """Keep the request of a new or changed pod; None: it is invalid."""
        before = self._parsed.get(pod.uid)
        if before is not None and _request_of(before[0]) == _request_of(pod):
            need = before[1]
        else:
            try:
                need = need_of(pod, self._settings)
            except UsageError:
                need = None  # the pod's author gets this error when kube-scheduler filters nodes
        self._parsed[pod.uid] = pod, need
        return need

    def of(self, pod: ClusterPod) -> PodNeed:
        """Return a pod's request. Raises `UsageError`."""
        parsed = self._parsed.get(pod.uid)
        if parsed is not None and parsed[0] is pod and parsed[1] is not None:
            return parsed[1]
        return need_of(pod, self._settings)

    def gone(self, uid: PodUid) -> None:
        self._parsed.pop(uid, None)


def _request_of(pod: ClusterPod) -> tuple[object, ...]:
    return pod.asks, pod.dialect, pod.cpu_milli, pod.memory_bytes, pod.priority


_DEFAULTS: Final = BookSettings()


class Reservations:
    """All pods and nodes of a cluster. Not thread-safe."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        settings: BookSettings = _DEFAULTS,
        quotas: QuotaBook | None = None,
    ) -> None:
        """`cluster` is empty, and only this object writes to it."""
        self.cluster = cluster
        self.settings = settings
        self.needs = PodNeeds(settings.needs)
        self._quotas = quotas
        self._entries: dict[PodUid, PodEntry] = {}
        self._plain: set[PodUid] = set()
        """Bound pods without devices: they use CPU and memory only."""
        self._expected: dict[PodUid, str] = {}
        """Expected pods and their nodes."""
        self._open: dict[PodUid, None] = {}
        """All pods but the confirmed ones, which time does not change. May contain some that were
        confirmed since the last tick."""
        self.resizes: dict[PodUid, ClusterPod] = {}
        """Bound pods whose `allotment.dev/resize` is not in force yet."""
        self._term = 0
        self._steps = count(1)

    # ---- outcomes of binds -----------------------------------------------------------------------

    def renew(self, booking: PodBooking, version: str) -> bool:
        """Return whether this bind may still be requested; if so, record the pod's version.

        Call it right before each request. False if the devices are not reserved for it any more, or
        were reserved in an earlier term: another leader may have given them away.
        """
        entry = self._being_bound(booking)
        if entry is None or entry.term != self._term:
            return False
        entry.version = version
        return True

    def bound(self, booking: PodBooking, *, now: float) -> None:
        """The API server bound the pod as ordered."""
        entry = self._being_bound(booking)
        if entry is not None:
            self._enter(entry, ReservationState.BOUND, now=now)

    def refused(self, booking: PodBooking, *, now: float) -> None:
        entry = self._being_bound(booking)
        if entry is not None:
            self._release(entry, now=now)

    def unknown(self, booking: PodBooking, *, now: float) -> None:
        """The outcome is unknown: the pod keeps its devices."""
        entry = self._being_bound(booking)
        if entry is not None and entry.state is ReservationState.RESERVED:
            self._enter(entry, ReservationState.UNKNOWN, now=now)

    def step(self, uid: PodUid) -> int:
        """Return a number that changes with each change of the pod's state."""
        entry = self._entries.get(uid)
        return entry.step if entry is not None else 0

    def reread(self, uid: PodUid, pod: ClusterPod | None, *, step: int, now: float) -> None:
        """Apply a single read of a pod; None if no pod has this uid.

        An unbound pod counts only if `step` has not changed since the read began.
        """
        entry = self._entries.get(uid)
        if pod is None:
            self.pod_gone(uid)
        elif pod.node:
            self.pod_put(pod, now=now)
        elif entry is not None and entry.step == step:
            is_set_back = entry.state is ReservationState.BOUND and not entry.is_confirmed
            # The pod has changed since and is not bound: the old request cannot bind it any more.
            is_over = entry.state is ReservationState.UNKNOWN and is_later(
                pod.version, entry.version
            )
            if is_set_back or is_over:
                self._release(entry, now=now)

    # ---- pods and nodes --------------------------------------------------------------------------

    def pod_put(self, pod: ClusterPod, *, now: float) -> None:
        """A pod came or changed. Unbound pods are recorded by filter and bind."""
        if not pod.node:
            return
        if pod.booking is None:
            self.pod_gone(pod.uid)
        else:
            self._bound(pod, pod.booking, now=now)

    def pod_gone(self, uid: PodUid) -> None:
        entry = self._entries.pop(uid, None)
        self._expected.pop(uid, None)
        self.resizes.pop(uid, None)
        if uid in self._plain:
            self._plain.discard(uid)
            self.cluster.release(uid)
        elif entry is not None and entry.booking is not None:
            self.cluster.release(uid)
            if self._quotas is not None and entry.state in HELD:
                self._quotas.release(uid)

    def claim_put(self, booking: PodBooking) -> None:
        """A claim takes this beyond what its node's inventory counts."""
        if self.cluster.booking(booking.uid) != booking:
            self.cluster.book(booking)
            self.cluster.changed(booking.node)

    def claim_gone(self, uid: PodUid) -> None:
        """A claim has ended, or its node's inventory counts all that it has."""
        self.cluster.release(uid)

    def node_put(self, node: NodeInventory) -> None:
        self.cluster.put(node)

    def node_dropped(self, name: str) -> None:
        """A node is gone or has no devices. Its pods stay booked, should it return."""
        self.cluster.drop(name)

    # ---- time and leadership ---------------------------------------------------------------------

    def tick(self, now: float) -> list[Reread]:
        """Drop expired entries; return the pods to read because their outcome is unknown."""
        settings = self.settings
        for uid in list(self._expected):
            if now - self._entries[uid].since >= settings.expected_s:
                self._leave(self._entries[uid], now=now)
        doubtful = []
        for uid in list(self._open):
            entry = self._entries.get(uid)
            if entry is None or (entry.state is ReservationState.BOUND and entry.is_confirmed):
                del self._open[uid]
                continue
            age = now - entry.since
            if entry.state is ReservationState.SEEN and age >= settings.forgotten_s:
                del self._entries[uid], self._open[uid]
            elif age >= settings.confirmed_s and (
                entry.state is ReservationState.UNKNOWN
                or (entry.state is ReservationState.BOUND and not entry.is_confirmed)
            ):
                doubtful.append(Reread(uid, entry.need.namespace, entry.need.name))
        return doubtful

    def step_down(self, *, now: float) -> None:
        """Another replica may lead: drop expected entries, and repeat no bind of this term.

        Reserved devices stay reserved until the outcome is known.
        """
        self._term += 1
        for uid in list(self._expected):
            self._leave(self._entries[uid], now=now)

    # ---- queries ---------------------------------------------------------------------------------

    def state(self, uid: PodUid) -> ReservationState | None:
        """Return a pod's state; None if it is unknown or asks for no GPU."""
        entry = self._entries.get(uid)
        return entry.state if entry is not None else None

    def booking(self, uid: PodUid) -> PodBooking | None:
        entry = self._entries.get(uid)
        return entry.booking if entry is not None else None

    def need(self, uid: PodUid) -> PodNeed | None:
        """Return a pod's request at its last filter or bind; None before the first."""
        entry = self._entries.get(uid)
        return entry.need if entry is not None else None

    def counts(self) -> dict[ReservationState, int]:
        unconfirmed = [uid for uid in self._open if uid in self._entries]
        counts = Counter(self._entries[uid].state.value for uid in unconfirmed)
        counts[ReservationState.BOUND.value] += len(self._entries) - len(unconfirmed)
        return {state: counts[state.value] for state in ReservationState}

    # ---- inside ----------------------------------------------------------------------------------

    def _being_bound(self, booking: PodBooking) -> PodEntry | None:
        """Return the entry if exactly this booking is reserved and not yet bound."""
        entry = self._entries.get(booking.uid)
        if entry is None or entry.booking is not booking:
            return None
        return (
            entry if entry.state in {ReservationState.RESERVED, ReservationState.UNKNOWN} else None
        )

    def _begun(self, need: PodNeed, *, now: float) -> PodEntry:
        entry = self._entries.get(need.uid)
        if entry is None:
            entry = self._entries[need.uid] = PodEntry(need, since=now, step=next(self._steps))
            self._open[need.uid] = None
        return entry

    def _enter(self, entry: PodEntry, state: ReservationState, *, now: float) -> None:
        entry.state, entry.since, entry.step = state, now, next(self._steps)

    def _hold(
        self, entry: PodEntry, booking: PodBooking, state: ReservationState, *, now: float
    ) -> None:
        uid = booking.uid
        if entry.booking is not booking:
            self.cluster.book(booking)
        self._open[uid] = None
        entry.booking, entry.term = booking, self._term
        entry.placed_at = self.cluster.version(booking.node)
        entry.is_confirmed = False
        self._enter(entry, state, now=now)
        if state is ReservationState.EXPECTED:
            self._expected[uid] = booking.node
            return
        self._expected.pop(uid, None)
        if self._quotas is not None:
            self._quotas.reserve(entry.need, booking)

    def _release(self, entry: PodEntry, *, now: float) -> None:
        uid = entry.need.uid
        if entry.booking is not None:
            self.cluster.release(uid)
            if self._quotas is not None and entry.state in HELD:
                self._quotas.release(uid)
        self._expected.pop(uid, None)
        entry.booking = None
        self._enter(entry, ReservationState.SEEN, now=now)

    def _drop_expectation(self, entry: PodEntry) -> None:
        if entry.state is ReservationState.EXPECTED:
            self._release(entry, now=entry.since)

    def _leave(self, entry: PodEntry, *, now: float) -> None:
        """End an expectation; if it lasted, avoid its node the next time."""
        if entry.booking is None:
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
            entry = self._entries[pod.uid] = PodEntry(need)
        self._expected.pop(pod.uid, None)
        order = entry.growing
        if order is not None and booking.resize.generation < order.booking.resize.generation:
            larger = larger_of(booking.containers, order.booking.containers)
            booking = replace(booking, containers=larger)
        else:
            entry.growing = None
        if entry.booking != booking:
            self._plain.discard(pod.uid)
            self.cluster.book(booking)
            self.cluster.changed(booking.node)
        entry.booking = booking
        self._enter(entry, ReservationState.BOUND, now=now)
        entry.is_confirmed = True
        entry.order, entry.avoided = {}, {}

    def _booking_of(self, uid: PodUid) -> PodBooking:
        booking = self._entries[uid].booking
        assert booking is not None, uid  # noqa: S101 - expected pods are booked
        return booking

# SPDX-License-Identifier: Apache-2.0
"""The book: what kube-scheduler is answered, out of what each pod has (`holdings`).

Events in, answers out; no I/O, time is an argument.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from allotment.model.clusters import NodeRejection, PodBooking, PodNeed
from allotment.model.pods import PodUid
from allotment.placement.cluster import Ranking
from allotment.placement.open_modes import in_later_modes, is_open
from allotment.placement.searches import MOST_EFFORT
from allotment.placement.selections import Effort
from allotment.scheduler.holdings import (
    HELD,
    BookSettings,
    Entry,
    Holdings,
    Quotas,
    Reread,
    State,
)

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
]

BINDING = "being bound"
"""The reason of a rejection: it is on its way to another node, or there already."""
QUOTA = "quota"


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
    """Of the pod that this was decided for."""
    is_begun: bool = False
    """It has been asked for before: wait with who is at it, or find out what became of that."""


@dataclass(frozen=True, slots=True)
class Settled:
    """The pod is bound to that node already."""

    node: str


@dataclass(frozen=True, slots=True)
class Turned:
    """The pod is not bound, and why."""

    rejection: NodeRejection


class Book(Holdings):
    """What each pod of a cluster has, and what the next one is to have. For one thread."""

    # ---- what kube-scheduler asks ----------------------------------------------------------------

    def filter(self, need: PodNeed, names: Collection[str], *, now: float, version: str) -> Choice:
        """Choose the best of these nodes, and expect the pod on the first of them."""
        entry = self._known(need)
        if entry is not None and entry.state in HELD:
            return self._held(entry, names)
        entry = self._begun(need, now=now)
        self._leave(entry, now=now)
        entry.need, entry.version, entry.since = need, version, now
        choice = self._chosen(entry, names)
        entry.order = {name: rank for rank, name in enumerate(choice.best)}
        if choice.best:
            self._expect(entry, choice.best[0], now=now)
        return choice

    def rank(self, need: PodNeed, names: Collection[str]) -> Choice:
        """Choose as `filter` does, and note nothing: for a pod that nobody else has told of."""
        entry = self._known(need)
        if entry is not None and entry.state in HELD:
            return self._held(entry, names)
        return self._chosen(Entry(need), names)

    def prioritize(
        self, need: PodNeed, names: Sequence[str], *, now: float, version: str
    ) -> list[str]:
        """Return these nodes, best first."""
        entry = self._known(need)
        if entry is not None and entry.state in HELD:
            held = entry.booking.node if entry.booking else ""
            return sorted(names, key=lambda name: (name != held, name))
        if entry is None or not entry.order.keys() >= set(names):
            self.filter(need, names, now=now, version=version)
            entry = self._entries[need.uid]
        order, last = entry.order, len(entry.order)
        ranked = sorted(names, key=lambda name: (order.get(name, last), name))
        if ranked and (entry.booking is None or entry.booking.node != ranked[0]):
            self._drop_expectation(entry)
            if ranked[0] in order:
                self._expect(entry, ranked[0], now=now)
        return ranked

    def begin_bind(
        self, need: PodNeed, node: str, *, now: float, version: str
    ) -> Order | Settled | Turned:
        """Choose the devices and reserve them. An `Order` has to be followed by its outcome."""
        entry = self._known(need)
        if entry is not None and entry.state in HELD and entry.booking is not None:
            if entry.booking.node != node:
                return Turned(_on_its_way(node, entry))
            if entry.state is State.BOUND:
                return Settled(node)
            return Order(entry.booking, entry.need, entry.version, is_begun=True)
        entry = self._begun(need, now=now)
        expected = self._as_expected(entry, need, node)
        entry.need, entry.version = need, version
        placed = self._placed_anew(entry, node) if expected is None else expected
        if isinstance(placed, NodeRejection):
            return Turned(placed)
        over = self._over(need, placed)
        if over:
            self._drop_expectation(entry)
            self.cluster.release(need.uid)
            within = self._within_quota(need, placed)
            if within is None:
                return Turned(NodeRejection(node, QUOTA, over))
            placed = within
        self._hold(entry, placed, State.RESERVED, now=now)
        return Order(placed, need, version)

    def arrived(self, need: PodNeed) -> None:
        """Take note of what kind of pods come, once for each: placement learns from it."""
        if need.containers:
            self.cluster.arrived(need)

    # ---- inside ----------------------------------------------------------------------------------

    def _over(self, need: PodNeed, booking: PodBooking) -> str:
        """Say why a pod may not have this in its namespace; empty: it may."""
        over = self._quotas.check(need, booking=booking) if self._quotas is not None else None
        return "" if over is None else str(over)

    def _within_quota(self, need: PodNeed, placed: PodBooking) -> PodBooking | None:
        """Place a pod where it was placed, in modes that it likes less and its quota allows.

        A slice has more than was asked for. What was placed is not booked any more.
        """
        later = in_later_modes(need, placed)
        while later is not None:
            found = self._place(later, placed.node)
            if isinstance(found, NodeRejection):
                return None
            if not self._over(need, found):
                return found
            later = in_later_modes(later, found)
        return None

    def _known(self, need: PodNeed) -> Entry | None:
        """Return what is known of a pod, also of one that was bound without any device."""
        entry = self._entries.get(need.uid)
        if entry is None and need.uid in self._plain:
            booking = self.cluster.booking(need.uid)
            return Entry(need, State.BOUND, booking=booking, is_confirmed=True)
        return entry

    def _held(self, entry: Entry, names: Collection[str]) -> Choice:
        """Answer for a pod that has its place: that one, or none."""
        node = entry.booking.node if entry.booking else ""
        if node in names:
            return Choice((node,))
        return Choice((), {name: _on_its_way(name, entry) for name in names})

    def _chosen(self, entry: Entry, names: Collection[str]) -> Choice:
        """Rank; in modes that a pod likes less where the others are more than its quota allows.

        Where no mode is within the quota, as if there were none: binding says why.
        """
        choice = self._ranked(entry, entry.need, names)
        left = entry.need if self._is_open_and_limited(entry.need) else None
        within = choice
        while left is not None and within.best:
            placed = self._as_ranked(left, within.best[0])
            if placed is None or not self._over(left, placed):
                return within
            left = in_later_modes(left, placed)
            if left is not None:
                within = self._ranked(entry, left, names)
        return choice

    def _is_open_and_limited(self, need: PodNeed) -> bool:
        if self._quotas is None or not self._quotas.is_limited(need.namespace):
            return False
        return any(is_open(each.request) for each in need.containers)

    def _as_ranked(self, need: PodNeed, node: str) -> PodBooking | None:
        """Return what a pod would have on a node, before those that are only expected if need be.

        None: nobody knows any more.
        """
        placed = self._place(need, node)
        if isinstance(placed, NodeRejection):
            placed = self._place(need, node, without=tuple(self._expected))
        return placed if isinstance(placed, PodBooking) else None

    def _ranked(self, entry: Entry, need: PodNeed, names: Collection[str]) -> Choice:
        """Rank; where nothing fits, see whether that is for the sake of pods that may not come."""
        most = self.settings.candidates + len(entry.avoided)
        effort = Effort(MOST_EFFORT)
        ranking = self.cluster.rank(need, names, most=most, effort=effort)
        if not ranking.best and self._expected:
            with_them, ranking = ranking, self._rank_without_expected(need, names, most, effort)
            ranking = ranking if ranking.best else with_them
        if not ranking.best:
            # kube-scheduler has found CPU and memory on these nodes, and hears of pods that end
            # in its own time.
            light = self.cluster.rank(_without_cpu(need), names, most=most, effort=effort)
            ranking = light if light.best else ranking
        best = sorted(ranking.best, key=lambda name: entry.avoided.get(name, float("-inf")))
        return Choice(tuple(best[: self.settings.candidates]), {} if best else ranking.refused)

    def _rank_without_expected(
        self, need: PodNeed, names: Collection[str], most: int, effort: Effort
    ) -> Ranking:
        kept = [self._booking_of(uid) for uid in self._expected]
        for each in kept:
            self.cluster.release(each.uid)
        try:
            return self.cluster.rank(need, names, most=most, effort=effort)
        finally:
            for each in kept:
                self.cluster.book(each)

    def _expect(self, entry: Entry, node: str, *, now: float) -> None:
        """Expect a pod on a node, if that has room for it beside those expected before."""
        placed = self._place(entry.need, node)
        if isinstance(placed, PodBooking):
            self._hold(entry, placed, State.EXPECTED, now=now)

    def _place(
        self, need: PodNeed, node: str, *, without: Collection[PodUid] = ()
    ) -> PodBooking | NodeRejection:
        effort = Effort(MOST_EFFORT)
        placed = self.cluster.place(need, node, without=without, effort=effort)
        if isinstance(placed, PodBooking):
            return placed
        light = self.cluster.place(_without_cpu(need), node, without=without, effort=effort)
        if isinstance(light, NodeRejection):
            return placed
        return replace(light, cpu_milli=need.cpu_milli, memory_bytes=need.memory_bytes)

    def _as_expected(self, entry: Entry, need: PodNeed, node: str) -> PodBooking | None:
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

    def _placed_anew(self, entry: Entry, node: str) -> PodBooking | NodeRejection:
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
            self._expect(self._entries[uid], node, now=self._entries[uid].since)
        return placed


def _without_cpu(need: PodNeed) -> PodNeed:
    return replace(need, cpu_milli=0, memory_bytes=0)


def _on_its_way(name: str, entry: Entry) -> NodeRejection:
    node = entry.booking.node if entry.booking else "another one"
    how = "is bound" if entry.state is State.BOUND else "is being bound"
    return NodeRejection(name, BINDING, f"the pod {how} to node {node}")

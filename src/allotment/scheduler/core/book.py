# SPDX-License-Identifier: Apache-2.0
"""The book: answers kube-scheduler's questions from what each pod has (`reservations`).

Events in, decisions out. No I/O; time is an argument.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from allotment.dialects.own.placement import RESIZE
from allotment.dialects.own.protocol import in_modes, unresizable
from allotment.dialects.own.registry import need_of
from allotment.model.clusters import (
    AcceptedResize,
    ClusterPod,
    PlacedContainer,
    PodBooking,
    PodNeed,
    is_later,
)
from allotment.model.errors import UsageError
from allotment.model.modes import traits_of
from allotment.model.pods import PodUid
from allotment.model.structs import replace
from allotment.placement.booking import larger_of
from allotment.placement.cluster.ranker import Ranking
from allotment.placement.explain import Reason, Refusal, refuse
from allotment.placement.judge import in_later_modes
from allotment.placement.search import MOST_EFFORT
from allotment.placement.selections import Effort
from allotment.scheduler.core.quota import points_of
from allotment.scheduler.core.reservations import (
    HELD,
    PodEntry,
    Reservations,
    ReservationState,
    ResizeOrder,
)


class NodeChoice(msgspec.Struct, frozen=True):
    """Filter's answer: nodes, best first; or why no node fits."""

    best: tuple[str, ...]
    refused: Mapping[str, Refusal] = msgspec.field(default_factory=dict)


class BindOrder(msgspec.Struct, frozen=True):
    """Write this binding: the devices are reserved."""

    booking: PodBooking
    need: PodNeed
    version: str
    """The pod's resource version when this was decided."""
    is_begun: bool = False
    """True for a repeated bind: wait for the earlier attempt or find out its outcome."""


class AlreadyBound(msgspec.Struct, frozen=True):
    """The pod is already bound to that node."""

    node: str


class Book(Reservations):
    """Devices of each pod in a cluster, and the choice for the next pod. Not thread-safe."""

    # ---- kube-scheduler's questions --------------------------------------------------------------

    def filter(
        self, need: PodNeed, names: Collection[str], *, now: float, version: str
    ) -> NodeChoice:
        """Choose the best of these nodes, and expect the pod on the first."""
        entry = self._known(need)
        if entry is not None and entry.state in HELD:
            return self._held(entry, names)
        entry = self._begun(need, now=now)
        if entry.state is ReservationState.EXPECTED:
            if self._is_nominated(entry, need, names):
                entry.version = version
                return NodeChoice(tuple(names))
            self._leave(entry, now=now)
        entry.need, entry.version, entry.since = need, version, now
        choice = self._chosen(entry, names)
        entry.order = {name: rank for rank, name in enumerate(choice.best)}
        if choice.best:
            self._expect(entry, choice.best[0], now=now)
        return choice

    def rank(self, need: PodNeed, names: Collection[str]) -> NodeChoice:
        """Choose as `filter` does without a record: for pods that the watch has not reported."""
        entry = self._known(need)
        if entry is not None and entry.state in HELD:
            return self._held(entry, names)
        return self._chosen(PodEntry(need), names)

    def prioritize(
        self, need: PodNeed, names: Sequence[str], *, now: float, version: str
    ) -> list[str]:
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
    ) -> BindOrder | AlreadyBound | Refusal:
        """Choose the devices and reserve them.

        Every `BindOrder` must be followed by its outcome: `bound`, `refused` or `unknown`.
        """
        entry = self._known(need)
        if entry is not None and entry.state in HELD and entry.booking is not None:
            if entry.booking.node != node:
                return _on_its_way(entry)
            if entry.state is ReservationState.BOUND:
                return AlreadyBound(node)
            return BindOrder(entry.booking, entry.need, entry.version, is_begun=True)
        entry = self._begun(need, now=now)
        expected = self._as_expected(entry, need, node)
        entry.need, entry.version = need, version
        placed = self._placed_anew(entry, node) if expected is None else expected
        if isinstance(placed, Refusal):
            return placed
        over = self._over(need, placed)
        if over:
            self._drop_expectation(entry)
            self.cluster.release(need.uid)
            within = self._within_quota(need, placed)
            if within is None:
                return over
            placed = within
        self._hold(entry, placed, ReservationState.RESERVED, now=now)
        return BindOrder(placed, need, version)

    def arrived(self, need: PodNeed) -> None:
        """Count the pod's shape, once per pod: fragmentation policies weigh GPUs by it."""
        if need.containers:
            self.cluster.arrived(need)

    # ---- resizes of bound pods -------------------------------------------------------------------

    def watch_resize(self, pod: ClusterPod) -> None:
        """Remember whether a pod's `allotment.dev/resize` is not in force yet."""
        self.resizes.pop(pod.uid, None)
        if pod.booking is None or pod.is_ending or not pod.booking.containers:
            return
        if (_wish_of(pod) or pod.booking.resize.generation) and not self._is_settled(pod):
            self.resizes[pod.uid] = pod

    def plan_resize(self, pod: ClusterPod) -> PodBooking | Refusal | None:
        """Return the placement to write next, or why a pod cannot have what it wishes.

        None: nothing is to be written, at least until its node has the last resize in force. A
        pod keeps the larger amounts of before and after until then.
        """
        entry, node = self._entries.get(pod.uid), self.cluster.node(pod.node)
        if entry is None or entry.booking is None or pod.booking is None or node is None:
            return None
        wish, accepted = _wish_of(pod), pod.booking.resize
        try:
            need = need_of(pod, self.settings.needs, resize=wish)
        except UsageError as error:
            return refuse(Reason.RESIZE, error.message, hint=error.hint or "")
        target = self._resized(pod, need)
        if isinstance(target, Refusal):
            return target
        if wish == accepted.wish:
            is_in_force = node.resized.get(pod.uid) == accepted.generation
            is_over = is_in_force and target != pod.booking.containers
            return replace(pod.booking, containers=target) if is_over else None
        before = larger_of(pod.booking.containers, entry.booking.containers)
        both = larger_of(_with_parts(before, need_of(pod, self.settings.needs)), target)
        order = replace(
            pod.booking,
            containers=both,
            resize=AcceptedResize(wish, accepted.generation + 1),
        )
        if both != entry.booking.containers:
            refusal = self.cluster.nodes[pod.node].lacks_to_grow(order) or self._over(need, order)
            if refusal is not None:
                return refusal
        return order

    def is_growing(self, uid: PodUid) -> bool:
        """Whether a placement with larger amounts was requested, and its outcome is unknown."""
        entry = self._entries.get(uid)
        return entry is not None and entry.growing is not None

    def begin_resize(self, pod: ClusterPod, *, now: float) -> ResizeOrder | Refusal | None:
        """Decide by a pod that was just read, and book what grows.

        An order is followed by the same order as long as the pod has the same version: a request
        without an answer may still be carried out.
        """
        entry = self._entries.get(pod.uid)
        if entry is None or entry.state is not ReservationState.BOUND or not pod.node:
            return None
        if (begun := entry.growing) is not None:
            if pod.version == begun.version:
                return begun
            if pod.booking is None or pod.booking.resize == begun.booking.resize:
                return None  # carried out; the watch reports it
            if not is_later(pod.version, begun.version):
                return None
            self._grow(entry, pod, None, now=now)
            self.watch_resize(pod)
        placed = self.plan_resize(pod)
        if placed is None or isinstance(placed, Refusal):
            return placed
        order = ResizeOrder(placed, pod.version)
        if pod.booking is not None and placed.resize != pod.booking.resize:
            self._grow(entry, pod, order, now=now)
        return order

    def _grow(
        self, entry: PodEntry, pod: ClusterPod, order: ResizeOrder | None, *, now: float
    ) -> None:
        """Book what an order adds to a pod; None: only what its placement has."""
        assert pod.booking is not None, pod  # noqa: S101 - it is bound
        entry.growing = order
        self._bound(pod, pod.booking, now=now)
        if self._quotas is not None and entry.booking is not None:
            self._quotas.reserve(need_of(pod, self.settings.needs), entry.booking)

    def _is_settled(self, pod: ClusterPod) -> bool:
        """Whether a pod's placement is what it wishes, and no more."""
        entry = self._entries.get(pod.uid)
        if entry is None or entry.growing is not None or pod.booking is None:
            return False
        if pod.booking.resize.wish != _wish_of(pod) or self.cluster.node(pod.node) is None:
            return False
        try:
            need = need_of(pod, self.settings.needs, resize=_wish_of(pod))
        except UsageError:
            return False
        return self._resized(pod, need) == pod.booking.containers

    def _resized(self, pod: ClusterPod, need: PodNeed) -> tuple[PlacedContainer, ...] | Refusal:
        """Return a pod's containers with the amounts of a request, on the same devices."""
        inventory = self.cluster.node(pod.node)
        sizes = {each.uuid: each.memory_bytes for each in inventory.devices} if inventory else {}
        before = need_of(pod, self.settings.needs)
        own = {each.name: each.request for each in before.containers}
        asked = {each.name: each.request for each in need.containers}
        found = []
        for container in pod.booking.containers if pod.booking else ():
            request = asked.get(container.name)
            if request is None:
                return refuse(Reason.RESIZE, f"container {container.name!r} asks for no GPU")
            request = in_modes(request, (container.mode,))
            devices = []
            for device in container.devices:
                size = sizes.get(device.uuid)
                if size is None:
                    return refuse(Reason.RESIZE, f"{device.uuid} is not on node {pod.node}")
                why = unresizable(own[container.name], request, container.mode, size)
                if why:
                    hint = "create the pod again with other amounts"
                    text = f"container {container.name!r} has mode {container.mode}: {why}"
                    return refuse(Reason.RESIZE, text, hint=hint)
                if traits_of(container.mode).fixed_because:
                    devices.append(device)
                    continue
                guarantee = request.compute.guarantee
                memory = request.memory.of(size)
                devices.append(replace(device, memory=memory, guarantee=guarantee))
            floor = request.floor if traits_of(container.mode).takes_turns else 0
            points = points_of(request.memory)
            part = points if points or points_of(own[container.name].memory) else None
            found.append(replace(container, devices=tuple(devices), floor=floor, part=part))
        return tuple(found)

    # ---- inside ----------------------------------------------------------------------------------

    def _over(self, need: PodNeed, booking: PodBooking) -> Refusal | None:
        """Return why the namespace's quota forbids this; None if it allows it."""
        return None if self._quotas is None else self._quotas.check(need, booking=booking)

    def _within_quota(self, need: PodNeed, placed: PodBooking) -> PodBooking | None:
        """Place a pod on the same node in its next preferred mode that the quota allows.

        A slice may be larger than the request. The first placement must not be booked any more.
        """
        later = in_later_modes(need, placed)
        while later is not None:
            found = self._place(later, placed.node)
            if isinstance(found, Refusal):
                return None
            if not self._over(need, found):
                return found
            later = in_later_modes(later, found)
        return None

    def _known(self, need: PodNeed) -> PodEntry | None:
        """Return the entry of a pod, also of one that was bound without any device."""
        entry = self._entries.get(need.uid)
        if entry is None and need.uid in self._plain:
            booking = self.cluster.booking(need.uid)
            return PodEntry(need, ReservationState.BOUND, booking=booking, is_confirmed=True)
        return entry

    def _held(self, entry: PodEntry, names: Collection[str]) -> NodeChoice:
        """Answer for a pod whose node is decided: that node, or none."""
        node = entry.booking.node if entry.booking else ""
        if node in names:
            return NodeChoice((node,))
        return NodeChoice((), dict.fromkeys(names, _on_its_way(entry)))

    def _chosen(self, entry: PodEntry, names: Collection[str]) -> NodeChoice:
        """Rank nodes; if the quota forbids the preferred mode, rank for the next mode.

        If no mode is within the quota, ignore it: bind then reports the quota.
        """
        choice = self._ranked(entry, entry.need, names)
        limited = self._quotas is not None and self._quotas.is_limited(entry.need.namespace)
        has_modes = any(each.request.other_modes for each in entry.need.containers)
        left = entry.need if limited and has_modes else None
        within = choice
        while left is not None and within.best:
            placed = self._as_ranked(left, within.best[0])
            if placed is None or not self._over(left, placed):
                return within
            left = in_later_modes(left, placed)
            if left is not None:
                within = self._ranked(entry, left, names)
        return choice

    def _as_ranked(self, need: PodNeed, node: str) -> PodBooking | None:
        """Return the pod's devices on a node, if needed by displacing expected pods.

        None if it does not fit any more.
        """
        placed = self._place(need, node)
        if isinstance(placed, Refusal):
            placed = self._place(need, node, without=tuple(self._expected))
        return placed if isinstance(placed, PodBooking) else None

    def _ranked(self, entry: PodEntry, need: PodNeed, names: Collection[str]) -> NodeChoice:
        """Rank nodes; if none fits, ignore expected pods, then CPU and memory."""
        most = self.settings.candidates + len(entry.avoided)
        effort = Effort(MOST_EFFORT)
        ranking = self.cluster.rank(need, names, most=most, effort=effort)
        if not ranking.best:
            without = self._rank_without_expected(need, names, most, effort)
            ranking = without if without is not None and without.best else ranking
        if not ranking.best:
            # kube-scheduler has checked CPU and memory of these nodes, and learns of ended pods at
            # another time than we do.
            light = self.cluster.rank(_without_cpu(need), names, most=most, effort=effort)
            ranking = light if light.best else ranking
        best = sorted(ranking.best, key=lambda name: entry.avoided.get(name, float("-inf")))
        return NodeChoice(tuple(best[: self.settings.candidates]), {} if best else ranking.refused)

    def _rank_without_expected(
        self, need: PodNeed, names: Collection[str], most: int, effort: Effort
    ) -> Ranking | None:
        """None: no pod is expected on these nodes."""
        kept = [self._booking_of(uid) for uid, node in self._expected.items() if node in names]
        if not kept:
            return None
        for each in kept:
            self.cluster.release(each.uid)
        try:
            return self.cluster.rank(need, names, most=most, effort=effort)
        finally:
            for each in kept:
                self.cluster.book(each)

    def _expect(self, entry: PodEntry, node: str, *, now: float) -> None:
        placed = self._place(entry.need, node)
        if isinstance(placed, PodBooking):
            self._hold(entry, placed, ReservationState.EXPECTED, now=now)

    def _place(
        self, need: PodNeed, node: str, *, without: Collection[PodUid] = ()
    ) -> PodBooking | Refusal:
        effort = Effort(MOST_EFFORT)
        placed = self.cluster.place(need, node, without=without, effort=effort)
        if isinstance(placed, PodBooking):
            return placed
        light = self.cluster.place(_without_cpu(need), node, without=without, effort=effort)
        if isinstance(light, Refusal):
            return placed
        return replace(light, cpu_milli=need.cpu_milli, memory_bytes=need.memory_bytes)

    def _as_expected(self, entry: PodEntry, need: PodNeed, node: str) -> PodBooking | None:
        """Return the expected booking if its devices are certainly still free for it.

        They are booked since, so no other pod was placed there. A new search takes almost as long
        as choosing a node, and pods that are expected beside this one do not call for it.
        """
        booking = entry.booking
        is_same = (
            entry.state is ReservationState.EXPECTED
            and booking is not None
            and booking.node == node
            and entry.need == need
            and entry.placed_at == self.cluster.version(node)
        )
        return booking if is_same else None

    def _is_nominated(self, entry: PodEntry, need: PodNeed, names: Collection[str]) -> bool:
        """Whether only the node is asked about where the pod is expected: it was nominated there.

        Its devices are booked; bind looks at changes of the node.
        """
        booking = entry.booking
        if booking is None or entry.need != need or booking.node not in names:
            return False
        return len(names) == 1 and self.cluster.node(booking.node) is not None

    def _placed_anew(self, entry: PodEntry, node: str) -> PodBooking | Refusal:
        self._drop_expectation(entry)
        if not node:
            return refuse(Reason.BINDING, "no node named")
        placed = self._place(entry.need, node)
        if isinstance(placed, Refusal):
            placed = self._place_before_expected(entry.need, node, placed)
        return placed

    def _place_before_expected(
        self, need: PodNeed, node: str, refusal: Refusal
    ) -> PodBooking | Refusal:
        others = [uid for uid, name in self._expected.items() if name == node]
        if not others:
            return refusal
        placed = self._place(need, node, without=others)
        if isinstance(placed, Refusal):
            return placed
        for uid in others:
            self._drop_expectation(self._entries[uid])
        self.cluster.book(placed)
        for uid in others:
            self._expect(self._entries[uid], node, now=self._entries[uid].since)
        return placed


def _wish_of(pod: ClusterPod) -> str:
    return pod.asks.annotations.get(RESIZE, "") if pod.asks is not None else ""


def _with_parts(
    containers: Iterable[PlacedContainer], need: PodNeed
) -> tuple[PlacedContainer, ...]:
    """Write down the parts of GPUs' memory that a pod's own request counts for quotas."""
    own = {each.name: points_of(each.request.memory) for each in need.containers}
    return tuple(
        replace(each, part=own[each.name]) if each.part is None and own.get(each.name) else each
        for each in containers
    )


def _without_cpu(need: PodNeed) -> PodNeed:
    return replace(need, cpu_milli=0, memory_bytes=0)


def _on_its_way(entry: PodEntry) -> Refusal:
    node = entry.booking.node if entry.booking else "another one"
    how = "is bound" if entry.state is ReservationState.BOUND else "is being bound"
    return refuse(Reason.BINDING, f"the pod {how} to node {node}")

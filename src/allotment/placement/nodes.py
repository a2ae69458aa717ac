# SPDX-License-Identifier: Apache-2.0
"""A node's devices and the pods' parts of them; cached results of searches.

Use is kept as sums by device, so adding or removing a pod has constant cost.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from allotment.model.accounting import DeviceAmount
from allotment.model.clusters import NodeInventory, PodBooking, PodNeed
from allotment.model.modes import traits_of
from allotment.model.pods import PodUid
from allotment.model.structs import replace
from allotment.placement.booking import Footprint, Load, base_load, footprint
from allotment.placement.explain import (
    Reason,
    Refusal,
    lacks_host,
    lacks_on_device,
    refusal_of,
    refuse,
    undecided,
)
from allotment.placement.judge import judge, memory_room, open_modes, overflow
from allotment.placement.ordering import DeviceChain
from allotment.placement.search import MOST_EFFORT, Search
from allotment.placement.selections import Effort
from allotment.placement.views import DeviceRoom, Hardware, View

if TYPE_CHECKING:  # a node by itself takes no numpy
    from allotment.placement.cluster.arrays import Arrays

_Found = TypeVar("_Found")

_MOST_KEPT = 200_000
"""Cached results over all needs: some 20 MB."""


class SearchResult(NamedTuple):
    """Whether a pod fits a node, and its distance from its affinity tag."""

    fits: bool
    untagged: int = 0
    """Number of devices without a share of the pod's affinity tag."""
    is_near: bool = False
    """Some device has such a share."""
    refusal: Refusal | None = None
    """The reason, if a search found one."""
    is_final: bool = True
    """A repeated search would find the same. False: the effort was too small."""


class SearchCache(Generic[_Found]):
    """Results by request and node."""

    def __init__(
        self, arrays: Arrays, *, is_final: Callable[[_Found], bool] = lambda _: True
    ) -> None:
        self._arrays = arrays
        self._is_final = is_final
        self._needs: OrderedDict[Hashable, dict[int, tuple[int, _Found]]] = OrderedDict()
        self._kept = 0

    def of(self, need: PodNeed) -> Callable[[int, Callable[[], _Found]], _Found]:
        """A lookup for pods with this request: by row, or by search."""
        key = need.cpu_milli, need.memory_bytes, need.containers
        known = self._needs.setdefault(key, {})
        self._needs.move_to_end(key)
        versions = self._arrays.version

        def answer(row: int, ask: Callable[[], _Found]) -> _Found:
            version = int(versions[row])
            before = known.get(row)
            if before is not None and before[0] == version:
                return before[1]
            now = ask()
            if self._is_final(now):
                self._kept += before is None
                known[row] = version, now
            return now

        return answer

    def trim(self) -> None:
        """Drop the least recently used results above the limit."""
        while self._kept > _MOST_KEPT and len(self._needs) > 1:
            _, oldest = self._needs.popitem(last=False)
            self._kept -= len(oldest)


_MOST_FOR_WORDS = 100
"""Bound on sets of devices, for one container on one node."""


class Node:
    """A node with its devices and booked pods."""

    def __init__(self, inventory: NodeInventory) -> None:
        self.bookings: dict[PodUid, PodBooking] = {}
        self._prints: dict[PodUid, dict[str, Footprint]] = {}
        self.put(inventory)

    def put(self, inventory: NodeInventory) -> None:
        self.inventory = inventory
        self.hardware = Hardware(inventory)
        self.loads = [base_load(device) for device in inventory.devices]
        for prints in self._prints.values():
            self._add(self.loads, prints)
        self._view: View | None = None
        bookings = self.bookings.values()
        self.cpu_free = inventory.cpu_milli - sum(each.cpu_milli for each in bookings)
        self.memory_free = inventory.memory_bytes - sum(each.memory_bytes for each in bookings)

    def book(self, booking: PodBooking) -> set[int]:
        """Book a pod that has no booking here; return the columns of changed devices."""
        prints = footprint(booking.containers) if booking.containers else {}
        self.bookings[booking.uid] = booking
        self._prints[booking.uid] = prints
        self.cpu_free -= booking.cpu_milli
        self.memory_free -= booking.memory_bytes
        self._view = None if prints else self._view
        return self._add(self.loads, prints)

    def footprint(self, uid: PodUid) -> Mapping[str, Footprint]:
        """What a booked pod has of each device, by UUID."""
        return self._prints[uid]

    def release(self, uid: PodUid) -> set[int]:
        booking = self.bookings.pop(uid, None)
        if booking is None:
            return set()
        self.cpu_free += booking.cpu_milli
        self.memory_free += booking.memory_bytes
        prints = self._prints.pop(uid)
        self._view = None if prints else self._view
        return self._add(self.loads, prints, sign=-1)

    def _add(
        self, loads: Sequence[Load], prints: dict[str, Footprint], *, sign: int = 1
    ) -> set[int]:
        """Add one pod to the loads of its devices here; return their columns."""
        columns = self.hardware.columns
        used = {columns[uuid]: print_ for uuid, print_ in prints.items() if uuid in columns}
        for column, print_ in used.items():
            loads[column].add(print_, sign=sign)
        return set(used)

    @property
    def view(self) -> View:
        """The devices for a pod without a booking here."""
        if self._view is None:
            self._view = View(self.hardware, self.loads)
        return self._view

    def room(self, column: int) -> DeviceRoom:
        state = self.view.state(column)
        device = self.inventory.devices[column]
        is_whole = traits_of(state.mode).is_exclusive
        return DeviceRoom(
            model=device.model,
            memory=device.memory_bytes,
            free=0 if is_whole else state.free_guarantee,
            kept=0 if is_whole else state.unguaranteed - state.free_guarantee,
            free_memory=0 if is_whole else memory_room(state, may_oversubscribe=False),
            shares=state.shares,
            modes=open_modes(state),
            numa_node=device.numa_node,
            layout=state.layout,
        )

    def place(
        self,
        need: PodNeed,
        chains: Sequence[DeviceChain],
        *,
        without: Collection[PodUid] = (),
        effort: Effort | None = None,
    ) -> PodBooking | Refusal:
        """Find devices for a whole pod, or explain the refusal.

        `without`: as if these pods were gone. The pod's own booking is ignored. `effort`: the
        remaining bound of a larger question.
        """
        gone = [self.bookings[uid] for uid in {*without, need.uid} if uid in self.bookings]
        cpu = self.cpu_free + sum(each.cpu_milli for each in gone)
        memory = self.memory_free + sum(each.memory_bytes for each in gone)
        lacking = lacks_host(need, cpu_free=cpu, memory_free=memory)
        if lacking is not None:
            return lacking
        effort = Effort(MOST_EFFORT) if effort is None else effort
        if effort.is_spent:
            return undecided(need)
        with effort.part(MOST_EFFORT) as lent:
            search = Search(self._without(gone), need, chains, effort=lent)
            placed = search.place()
        if placed is None:
            return refusal_of(need, search.dead_end)
        return PodBooking(
            uid=need.uid,
            node=self.inventory.name,
            cpu_milli=need.cpu_milli,
            memory_bytes=need.memory_bytes,
            containers=tuple(sorted(placed, key=lambda each: (each.place, each.name))),
        )

    def lacks_to_grow(self, booking: PodBooking) -> Refusal | None:
        """Why a booked pod cannot have these amounts on its devices; None: it can.

        Amounts that do not grow are not checked.
        """
        before = self._prints[booking.uid]
        view = self._without([self.bookings[booking.uid]])
        promised = 0  # host memory for the devices so far
        for uuid, after in footprint(booking.containers).items():
            was = before.get(uuid) or Footprint(DeviceAmount(), ())
            column = self.hardware.columns.get(uuid)
            if column is None:
                return refuse(Reason.PROBLEM, f"need {uuid}, have no such GPU on its node")
            state = view.state(column)
            left = max(0, state.host_budget_bytes - promised)
            state = replace(state, host_budget_bytes=left)
            promised += overflow(state, after.part.memory)
            lacking = lacks_on_device(state, was, after)
            if lacking is not None:
                return lacking
        return None

    def answer(self, need: PodNeed, *, effort: Effort) -> SearchResult:
        quick = self._quick_answer(need)
        if quick is not None:
            return quick
        decision = self.place(need, [DeviceChain()] * len(need.containers), effort=effort)
        if isinstance(decision, Refusal):
            return SearchResult(fits=False, refusal=decision)
        used = {
            (device.uuid, container.affinity)
            for container in decision.containers
            for device in container.devices
        }
        untagged = sum(
            bool(tag) and tag not in self.loads[self.hardware.columns[uuid]].affinities
            for uuid, tag in used
        )
        return SearchResult(fits=True, untagged=untagged, is_near=untagged < len(used))

    def lacks_for(self, need: PodNeed, number: int) -> Refusal | None:
        """Why this container, by index, finds no place here alone.

        None: it finds one. An index below 0 checks CPU and memory only. This is no search, so it is
        cheap for texts about many nodes.
        """
        lacking = lacks_host(need, cpu_free=self.cpu_free, memory_free=self.memory_free)
        if lacking is not None or number < 0:
            return lacking
        alone = replace(need, containers=(need.containers[number],))
        search = Search(self.view, alone, [DeviceChain()], effort=Effort(_MOST_FOR_WORDS))
        return refusal_of(need, search.dead_end) if search.place() is None else None

    def _quick_answer(self, need: PodNeed) -> SearchResult | None:
        """The result by number of fitting devices, if that suffices."""
        request = need.containers[0].request if len(need.containers) == 1 else None
        if request is None or request.may_oversubscribe or self.view.may_overflow:
            return None
        if traits_of(request.mode).is_slice or request.other_modes:
            return None
        wanted = request.constraints
        has_pairs = request.count > 1 and (wanted.same_numa or wanted.needs_nvlink)
        if has_pairs or need.uid in self.bookings:
            return None
        if lacks_host(need, cpu_free=self.cpu_free, memory_free=self.memory_free) is not None:
            return SearchResult(fits=False)
        states = [state for state in self.view.states({}) if judge(state, request).fits]
        if len(states) < request.count:
            return SearchResult(fits=False)
        tagged = sum(wanted.affinity in state.affinities for state in states)
        untagged = max(0, request.count - tagged) if wanted.affinity else 0
        return SearchResult(fits=True, untagged=untagged, is_near=untagged < request.count)

    def _without(self, gone: Collection[PodBooking]) -> View:
        if not any(each.containers for each in gone):
            return self.view
        loads = [load.copy() for load in self.loads]
        for each in gone:
            self._add(loads, self._prints[each.uid], sign=-1)
        return View(self.hardware, loads)

    def check_invariants(self) -> None:
        loads = [base_load(device) for device in self.inventory.devices]
        for booking in self.bookings.values():
            self._add(loads, footprint(booking.containers))
        if loads != self.loads:
            raise AssertionError(self.inventory.name, loads, self.loads)

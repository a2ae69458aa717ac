# SPDX-License-Identifier: Apache-2.0
"""One node: what is on its devices, and whether a whole pod goes there.

What pods have is kept as sums by device, so that one more pod or one less costs the same however
many there are.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from allotment.model.clusters import NodeInventory, NodeRejection, PodBooking, PodNeed
from allotment.model.pods import PodUid
from allotment.model.requests import EXCLUSIVE, MIG
from allotment.placement.answers import Answer
from allotment.placement.arrays import DeviceRoom
from allotment.placement.booking import Footprint, Load, base_load, footprint
from allotment.placement.fit import judge, memory_room, open_modes
from allotment.placement.ordering import DeviceChain
from allotment.placement.refusals import lacks_host, refused, undecided
from allotment.placement.searches import MOST_EFFORT, Search
from allotment.placement.selections import Effort
from allotment.placement.views import Hardware, View

__all__ = ["Node"]

_MOST_FOR_WORDS = 100
"""Sets of devices, for one container on one node."""


class Node:
    """A node with its devices and the pods that are booked on it."""

    def __init__(self, inventory: NodeInventory) -> None:
        self.bookings: dict[PodUid, PodBooking] = {}
        self._prints: dict[PodUid, dict[str, Footprint]] = {}
        self.cpu_used = 0
        self.memory_used = 0
        self.put(inventory)

    def put(self, inventory: NodeInventory) -> None:
        """Take the node as it is told to be; what is booked on it stays booked."""
        self.inventory = inventory
        self.hardware = Hardware(inventory)
        self.loads = [base_load(each) for each in inventory.devices]
        for prints in self._prints.values():
            self._add(self.loads, prints)
        self._view: View | None = None

    def book(self, booking: PodBooking) -> set[int]:
        """Book a pod in place of what it had before; return the columns of devices that changed."""
        changed = self.release(booking.uid)
        prints = footprint(booking.containers) if booking.containers else {}
        self.bookings[booking.uid] = booking
        self._prints[booking.uid] = prints
        self.cpu_used += booking.cpu_milli
        self.memory_used += booking.memory_bytes
        return changed | self._change(prints, sign=1)

    def release(self, uid: PodUid) -> set[int]:
        """Forget a pod, booked or not; return the columns of devices that changed."""
        booking = self.bookings.pop(uid, None)
        if booking is None:
            return set()
        self.cpu_used -= booking.cpu_milli
        self.memory_used -= booking.memory_bytes
        return self._change(self._prints.pop(uid), sign=-1)

    def _change(self, prints: dict[str, Footprint], *, sign: int) -> set[int]:
        if prints:
            self._view = None
        self._add(self.loads, prints, sign=sign)
        return {self.hardware.columns[uuid] for uuid in prints if uuid in self.hardware.columns}

    def _add(self, loads: Sequence[Load], prints: dict[str, Footprint], *, sign: int = 1) -> None:
        for uuid, there in prints.items():
            column = self.hardware.columns.get(uuid)
            if column is not None:
                loads[column].add(there, sign=sign)

    @property
    def view(self) -> View:
        """The devices as a pod sees them that has nothing here."""
        if self._view is None:
            self._view = View(self.hardware, self.loads)
        return self._view

    @property
    def cpu_free(self) -> int:
        """Thousandths of a core; negative where more is promised than there is."""
        return self.inventory.cpu_milli - self.cpu_used

    @property
    def memory_free(self) -> int:
        """Bytes, likewise."""
        return self.inventory.memory_bytes - self.memory_used

    def room(self, column: int) -> DeviceRoom:
        """Return what one more share of a pod that has nothing here can have of a device."""
        state = self.view.state(column)
        there = self.inventory.devices[column]
        is_whole = state.mode == EXCLUSIVE
        return DeviceRoom(
            model=there.model,
            memory=there.memory_bytes,
            free=0 if is_whole else state.free_guarantee,
            free_memory=0 if is_whole else memory_room(state, may_oversubscribe=False),
            shares=state.shares,
            modes=open_modes(state),
            numa_node=there.numa_node,
            layout=state.layout,
        )

    def place(
        self,
        need: PodNeed,
        chains: Sequence[DeviceChain],
        *,
        without: Collection[PodUid] = (),
        effort: Effort | None = None,
    ) -> PodBooking | NodeRejection:
        """Find devices for all of a pod, or say why there are none.

        `without`: as if these pods were not there. What the pod itself has does not stand in its
        way. `effort`: what is left of that for a question of which this is a part.
        """
        gone = [self.bookings[uid] for uid in {*without, need.uid} if uid in self.bookings]
        cpu = self.cpu_free + sum(each.cpu_milli for each in gone)
        memory = self.memory_free + sum(each.memory_bytes for each in gone)
        lacking = lacks_host(need, self.inventory.name, cpu_free=cpu, memory_free=memory)
        if lacking is not None:
            return lacking
        effort = Effort(MOST_EFFORT) if effort is None else effort
        if effort.is_spent:
            return undecided(self.inventory.name, need)
        with effort.part(MOST_EFFORT) as lent:
            search = Search(self._without(gone), need, chains, effort=lent)
            placed = search.run()
        if placed is None:
            return refused(self.inventory.name, need, search.refusal)
        return PodBooking(
            uid=need.uid,
            node=self.inventory.name,
            cpu_milli=need.cpu_milli,
            memory_bytes=need.memory_bytes,
            containers=tuple(sorted(placed, key=lambda each: (each.place, each.name))),
        )

    def answer(self, need: PodNeed, *, effort: Effort) -> Answer:
        """Say whether a pod has a place here, and how near that is to its affinity tag."""
        quick = self._quick_answer(need)
        if quick is not None:
            return quick
        decision = self.place(need, [DeviceChain()] * len(need.containers), effort=effort)
        if isinstance(decision, NodeRejection):
            return Answer(fits=False, refusal=decision)
        used = {
            (each.uuid, container.affinity)
            for container in decision.containers
            for each in container.devices
        }
        untagged = sum(
            bool(tag) and tag not in self.loads[self.hardware.columns[uuid]].affinities
            for uuid, tag in used
        )
        return Answer(fits=True, untagged=untagged, is_near=untagged < len(used))

    def lacks_for(self, need: PodNeed, number: int) -> NodeRejection | None:
        """Say why this container of a pod, by its place among all, finds no place here by itself.

        None: it finds one. Below 0: there is no such container, and CPU or memory may be lacking.
        A look at the devices, and hardly a search: for words about many nodes at once.
        """
        name, cpu, memory = self.inventory.name, self.cpu_free, self.memory_free
        lacking = lacks_host(need, name, cpu_free=cpu, memory_free=memory)
        if lacking is not None or number < 0:
            return lacking
        alone = replace(need, containers=(need.containers[number],))
        search = Search(self.view, alone, [DeviceChain()], effort=Effort(_MOST_FOR_WORDS))
        return refused(name, need, search.refusal) if search.run() is None else None

    def _quick_answer(self, need: PodNeed) -> Answer | None:
        """Answer by the number of devices that fit, where that is all there is to it."""
        request = need.containers[0].request if len(need.containers) == 1 else None
        if request is None or request.may_oversubscribe or self.view.may_overflow:
            return None
        if request.mode == MIG or request.other_modes:
            return None
        wanted = request.constraints
        has_pairs = request.count > 1 and (wanted.same_numa or wanted.needs_nvlink)
        if has_pairs or need.uid in self.bookings:
            return None
        name, cpu, memory = self.inventory.name, self.cpu_free, self.memory_free
        if lacks_host(need, name, cpu_free=cpu, memory_free=memory) is not None:
            return Answer(fits=False)
        states = [state for state in self.view.states({}) if judge(state, request).fits]
        if len(states) < request.count:
            return Answer(fits=False)
        tagged = sum(wanted.affinity in state.affinities for state in states)
        untagged = max(0, request.count - tagged) if wanted.affinity else 0
        return Answer(fits=True, untagged=untagged, is_near=untagged < request.count)

    def _without(self, gone: Collection[PodBooking]) -> View:
        if not any(each.containers for each in gone):
            return self.view
        loads = [load.copy() for load in self.loads]
        for each in gone:
            self._add(loads, self._prints[each.uid], sign=-1)
        return View(self.hardware, loads)

    def check_invariants(self) -> None:
        """Raise AssertionError unless the sums are those of what is booked."""
        loads = [base_load(each) for each in self.inventory.devices]
        for booking in self.bookings.values():
            self._add(loads, footprint(booking.containers))
        if loads != self.loads:
            raise AssertionError(self.inventory.name, loads, self.loads)

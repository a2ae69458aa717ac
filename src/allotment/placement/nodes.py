# SPDX-License-Identifier: Apache-2.0
"""One node: what is on its devices, and whether a whole pod goes there.

Each container is judged exactly as the node's agent will judge it when it starts (`fit.judge`, of
the devices as that container sees them), so what is placed here is not refused there. Containers
that run for long come first, the largest of them before the others; init containers after them, so
that they go into room that is booked for these anyway. Each takes the set of devices that its chain
of policies likes best, and where that leaves none for a later one, the next sets are tried: a pod
is refused only if no choice at all would do.

That search is bounded: after `MOST_EFFORT` sets, whole and begun, it gives up and says so. Devices
that are alike are tried once, and what was found hopeless is not tried again, so pods that people
write take some hundred at most.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace

from allotment.model.clusters import (
    NodeInventory,
    NodeRejection,
    PlacedContainer,
    PlacedDevice,
    PodBooking,
    PodNeed,
    WantedContainer,
)
from allotment.model.devices import Device
from allotment.model.placements import DeviceState, Verdict
from allotment.model.pods import ContainerKind, PodUid
from allotment.model.requests import EXCLUSIVE, Request
from allotment.placement.arrays import DeviceRoom
from allotment.placement.booking import Footprint, Load, Seen, base_load, footprint, seen
from allotment.placement.constraints import link_score, unsuited
from allotment.placement.fit import judge, memory_room, open_modes, overflow
from allotment.placement.host_memory import host_part
from allotment.placement.ordering import DeviceChain, device_key, set_key
from allotment.placement.refusals import Refusal, lacks_host, refused
from allotment.placement.select import is_selected
from allotment.placement.selections import Candidate, Effort, selections

__all__ = ["MOST_EFFORT", "Chains", "Node"]

MOST_EFFORT = 20_000
"""Sets of devices, whole and begun, that are looked at for one pod on one node."""
_MOST_COMPARED = 500
"""Sets that are compared for how near their devices are; beyond that, the best of so many."""

Chains = Sequence[DeviceChain]
"""One for each container of a need, in the same order."""


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
        self.devices = tuple(
            _device_of(inventory, place) for place in range(len(inventory.devices))
        )
        self._columns = {each.uuid: place for place, each in enumerate(self.devices)}
        self.twins = _twins(inventory)
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
        return {self._columns[uuid] for uuid in prints if uuid in self._columns}

    def _add(self, loads: Sequence[Load], prints: dict[str, Footprint], *, sign: int = 1) -> None:
        for uuid, there in prints.items():
            column = self._columns.get(uuid)
            if column is not None:
                loads[column].add(there, sign=sign)

    def column(self, uuid: str) -> int:
        """Return the place of a device that is there."""
        return self._columns[uuid]

    @property
    def view(self) -> "View":
        """The devices as a pod sees them that has nothing here."""
        if self._view is None:
            self._view = View(self, self.loads)
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
        )

    def place(
        self, need: PodNeed, chains: Chains, *, without: Collection[PodUid] = ()
    ) -> PodBooking | NodeRejection:
        """Find devices for all of a pod, or say why there are none.

        `without`: as if these pods were not there. What the pod itself has does not stand in its
        way.
        """
        gone = [self.bookings[uid] for uid in {*without, need.uid} if uid in self.bookings]
        cpu = self.cpu_free + sum(each.cpu_milli for each in gone)
        memory = self.memory_free + sum(each.memory_bytes for each in gone)
        lacking = lacks_host(need, self.inventory.name, cpu_free=cpu, memory_free=memory)
        if lacking is not None:
            return lacking
        search = _Search(self._without(gone), need, chains)
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

    def _without(self, gone: Collection[PodBooking]) -> "View":
        if not any(each.containers for each in gone):
            return self.view
        loads = [load.copy() for load in self.loads]
        for each in gone:
            self._add(loads, self._prints[each.uid], sign=-1)
        return View(self, loads)

    def check_invariants(self) -> None:
        """Raise AssertionError unless the sums are those of what is booked."""
        loads = [base_load(each) for each in self.inventory.devices]
        for booking in self.bookings.values():
            self._add(loads, footprint(booking.containers))
        if loads != self.loads:
            raise AssertionError(self.inventory.name, loads, self.loads)


def _device_of(inventory: NodeInventory, place: int) -> Device:
    """Return what the rules for one machine look at."""
    there = inventory.devices[place]
    return Device(
        uuid=there.uuid,
        name=there.model,
        index=there.index,
        memory_bytes=there.memory_bytes,
        sm_count=0,
        compute_capability=(0, 0),
        numa_node=there.numa_node,
        pci_bus_id="",
        simulated=False,
        mig=False,
    )


def _twins(inventory: NodeInventory) -> list[int]:
    """Say which devices are each as good as another wherever they are free: equal numbers.

    They are of one make, and have the same links to all others.
    """
    devices, links = inventory.devices, inventory.links
    makes = [
        (each.model, each.memory_bytes, each.numa_node, each.modes, each.max_shares, each.guarantee)
        for each in devices
    ]
    numbers: list[int] = []
    for place, each in enumerate(devices):
        number = place
        for other in range(place):
            if numbers[other] == other and makes[other] == makes[place]:
                rest = (one.uuid for at, one in enumerate(devices) if at not in {place, other})
                first = devices[other].uuid
                if all(
                    link_score(links, each.uuid, uuid) == link_score(links, first, uuid)
                    for uuid in rest
                ):
                    number = other
                    break
        numbers.append(number)
    return numbers


class View:
    """The node's devices under some load, for one pod of which some containers are placed."""

    def __init__(self, node: Node, loads: Sequence[Load]) -> None:
        self.node = node
        self.inventory = node.inventory
        self._loads = loads
        self._base: list[DeviceState | None] = [None] * len(loads)
        self.may_overflow = any(load.oversubscribed for load in loads)
        promised = sum(
            load.on_host(device.memory_bytes)
            for load, device in zip(loads, self.inventory.devices, strict=True)
        )
        # A budget that was made smaller than what is booked leaves none, and takes none back.
        self._budget = max(self.inventory.host_budget_bytes, promised)
        self._promised = promised
        self.host_left = self._budget - promised

    def states(self, own: dict[str, Seen], *, outside: int = 0) -> list[DeviceState]:
        """Return each device as a container sees it that has `own` of its pod beside it.

        `outside` is how much more host memory stands for the pod than without it.
        """
        left = self.host_left - outside
        return [
            self._state(column, own.get(device.uuid), left)
            if outside or device.uuid in own
            else self.state(column)
            for column, device in enumerate(self.node.devices)
        ]

    def state(self, column: int) -> DeviceState:
        """Return one device as a pod sees it that has nothing here."""
        known = self._base[column]
        if known is None:
            known = self._base[column] = self._state(column, None, self.host_left)
        return known

    def _state(self, column: int, own: Seen | None, left: int) -> DeviceState:
        load, device = self._loads[column], self.node.devices[column]
        there = self.inventory.devices[column]
        kept = reusable = 0
        if own is not None:
            capacity = there.memory_bytes
            others = load
            load = load.copy()
            load.add(Footprint(own.part, own.shares))
            kept, reusable = own.kept, own.reusable
            # Promised for containers that are not in use with this one, on the same device.
            whole = host_part(
                capacity,
                others.fixed + own.whole.fixed,
                others.oversubscribed + own.whole.oversubscribed,
            )
            left += whole - load.on_host(capacity)
        return DeviceState(
            device,
            allotted_bytes=load.fixed + load.oversubscribed,
            problem=there.problem,
            oversubscribed_bytes=load.oversubscribed,
            host_budget_bytes=left,
            guaranteed=load.guarantee,
            shares=load.shares,
            mode=load.mode,
            reusable_bytes=reusable,
            most_shares=there.max_shares,
            seats_kept=kept,
            guaranteeable=there.guarantee,
            modes=frozenset(there.modes),
            affinities=frozenset(load.affinities),
            anti_affinities=frozenset(load.anti_affinities),
            exclusions=frozenset(load.exclusions),
        )

    def on_host(self, placed: Sequence[PlacedContainer]) -> int:
        """Return how much more host memory stands for devices with these than without."""
        more = 0
        for uuid, there in footprint(placed).items():
            column = self.node.column(uuid)
            load, capacity = self._loads[column], self.inventory.devices[column].memory_bytes
            after = load.copy()
            after.add(there)
            more += after.on_host(capacity) - load.on_host(capacity)
        return more


_ANY = Device(
    uuid="",
    name="",
    index=0,
    memory_bytes=0,
    sm_count=0,
    compute_capability=(0, 0),
    numa_node=None,
    pci_bus_id="",
    simulated=False,
    mig=False,
)


class _Search:
    """Backtracking over the containers of one pod."""

    def __init__(self, view: View, need: PodNeed, chains: Chains) -> None:
        self._view = view
        self._steps = sorted(
            zip(need.containers, chains, strict=True), key=lambda step: self._hardness(step[0])
        )
        self._effort = Effort(MOST_EFFORT)
        self._classes: list[Hashable] | None = None
        self._hopeless: set[Hashable] = set()
        self.refusal = Refusal()
        """Why: of the container that came furthest."""

    def run(self) -> list[PlacedContainer] | None:
        """Return where the containers go; None: nowhere."""
        return self._place(())

    def _hardness(self, wanted: WantedContainer) -> tuple[bool, int, int, int, int]:
        request = wanted.request
        largest = max((each.memory_bytes for each in self._view.inventory.devices), default=0)
        return (
            wanted.kind is ContainerKind.INIT,
            -request.count,
            -request.memory.of(largest),
            -request.compute.guarantee,
            wanted.place,
        )

    def _place(self, placed: tuple[PlacedContainer, ...]) -> list[PlacedContainer] | None:
        number = len(placed)
        if number == len(self._steps):
            return list(placed)
        signature = self._signature(placed) if number else None
        if signature in self._hopeless:
            return None
        wanted, chain = self._steps[number]
        outside = self._view.on_host(placed) if placed else 0
        states = self._view.states(seen(placed, wanted) if placed else {}, outside=outside)
        verdicts = [judge(state, wanted.request) for state in states]
        left = self._view.host_left - outside
        for chosen in self._choices(wanted.request, chain, verdicts, placed, host_left=left):
            after = (*placed, _placed(wanted, chosen))
            if self._has_host_memory(after):
                found = self._place(after)
                if found is not None:
                    return found
            if self._effort.is_spent:
                break
        if number >= self.refusal.depth:
            self.refusal = Refusal(
                number, wanted, tuple(verdicts), is_unfinished=self._effort.is_spent
            )
        if signature is not None:
            self._hopeless.add(signature)
        return None

    def _has_host_memory(self, placed: Sequence[PlacedContainer]) -> bool:
        # Also a pod without memory of its own on the host can push others' there.
        may_need = self._view.may_overflow or any(each.may_oversubscribe for each in placed)
        return not may_need or self._view.on_host(placed) <= self._view.host_left

    def _choices(
        self,
        request: Request,
        chain: DeviceChain,
        verdicts: Sequence[Verdict],
        placed: Sequence[PlacedContainer],
        *,
        host_left: int,
    ) -> Iterator[tuple[Candidate, ...]]:
        """Yield sets of devices, the ones that are liked best first."""
        fitting = [
            Candidate(
                verdict,
                # What the device's own containers have promised already, they can use in turn.
                max(
                    0,
                    overflow(verdict.state, verdict.need_bytes)
                    - (verdict.state.host_budget_bytes - host_left),
                ),
                self._alike(column, placed),
            )
            for column, verdict in enumerate(verdicts)
            if verdict.fits
        ]
        if len(fitting) < request.count:
            return
        keys = {
            each.uuid: (*device_key(each, request, chain, others=fitting), each.uuid)
            for each in fitting
        }
        fitting.sort(key=lambda each: keys[each.uuid])
        links = self._view.inventory.links
        if chain.wants_near(request):
            near = Effort(_MOST_COMPARED)
            sets = selections(fitting, request, host_budget=host_left, effort=near, links=links)
            yield from sorted(sets, key=lambda chosen: set_key(chosen, request, chain, links))
        yield from selections(
            fitting, request, host_budget=host_left, effort=self._effort, links=links
        )

    def _alike(self, column: int, placed: Sequence[PlacedContainer]) -> Hashable:
        """Return what two devices have the same of if it does not matter which of them is taken."""
        if len(self._steps) == 1 and self._steps[0][0].request.count == 1:
            return None
        uuid = self._view.node.devices[column].uuid
        here = tuple(
            number
            for number, each in enumerate(placed)
            if any(device.uuid == uuid for device in each.devices)
        )
        return self._class(column), here

    def _class(self, column: int) -> Hashable:
        if self._classes is None:
            self._classes = [
                (
                    self._view.node.twins[number],
                    replace(state, device=_ANY),
                    tuple(_admits(wanted.request, state.device) for wanted, _ in self._steps),
                )
                for number, state in enumerate(self._view.states({}))
            ]
        return self._classes[column]

    def _signature(self, placed: Sequence[PlacedContainer]) -> Hashable:
        """Return what two beginnings have the same of if the rest has the same chances."""
        used = {device.uuid for each in placed for device in each.devices}
        here = (self._alike(self._view.node.column(uuid), placed) for uuid in used)
        return len(placed), frozenset(Counter(here).items())


def _admits(request: Request, device: Device) -> bool:
    return is_selected(device, request) and not unsuited(device, request.constraints)


def _placed(wanted: WantedContainer, chosen: Iterable[Candidate]) -> PlacedContainer:
    request = wanted.request
    constraints = request.constraints
    verdicts = sorted(
        (each.verdict for each in chosen),
        key=lambda each: (each.state.device.index, each.state.device.uuid),
    )
    return PlacedContainer(
        name=wanted.name,
        devices=tuple(
            PlacedDevice(each.state.device.uuid, each.need_bytes, request.compute.guarantee)
            for each in verdicts
        ),
        kind=wanted.kind,
        place=wanted.place,
        mode=request.mode,
        affinity=constraints.affinity,
        anti_affinity=constraints.anti_affinity,
        exclusion=constraints.exclusion,
        may_oversubscribe=request.may_oversubscribe,
    )

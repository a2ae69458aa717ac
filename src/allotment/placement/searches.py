# SPDX-License-Identifier: Apache-2.0
"""Where on one node all containers of a pod go: a search that finds a place wherever there is one.

Each container is judged exactly as the node's agent will judge it when it starts (`fit.judge`, of
the devices as that container sees them), so what is placed here is not refused there. Containers
that run for long come first, the largest of them before the others; init containers after them, so
that they go into room that is booked for these anyway. Each takes the set of devices that its chain
of policies likes best, in the first of its modes in which there is one, and where that leaves none
for a later one, the next sets are tried: a pod is refused only if no choice at all would do. Slices
are chosen as one machine chooses them (`placement.mig`), whatever the policies.

The search is bounded by an `Effort`, at most `MOST_EFFORT`: then it gives up and says so. Devices
that are alike are tried once, and what was found hopeless is not tried again, so for pods that
people write it takes a hundredth of that.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace

from allotment.model.clusters import (
    NodeMig,
    PlacedContainer,
    PlacedDevice,
    PodNeed,
    WantedContainer,
)
from allotment.model.compute import WHOLE
from allotment.model.devices import Device
from allotment.model.mig import MigLayout, MigPlace, MigProfile
from allotment.model.phases import overlap
from allotment.model.placements import Verdict
from allotment.model.pods import ContainerKind
from allotment.model.requests import MIG, Request
from allotment.placement.booking import seen
from allotment.placement.constraints import are_linked, unsuited
from allotment.placement.fit import judge, overflow
from allotment.placement.layouts import handed_on, slices_of
from allotment.placement.open_modes import in_each_mode
from allotment.placement.ordering import DeviceChain, device_key, set_key
from allotment.placement.refusals import Attempt, Refusal
from allotment.placement.select import is_selected
from allotment.placement.selections import Candidate, Effort, selections
from allotment.placement.slices import Cut, Site, slice_sets
from allotment.placement.views import View

__all__ = ["MOST_EFFORT", "Search"]

MOST_EFFORT = 20_000
"""Sets of devices, whole and begun, that are looked at for one question, be it about one node or
about all of them: some 0.2 s. By count and not by the clock, so that the same is answered again."""
_EFFORT_OF_A_CONTAINER = 50
"""What it takes to judge all devices of a node anew, in sets."""
_MOST_COMPARED = 500
"""Sets that are compared for how near their devices are; beyond that, the best of so many."""

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


class Search:
    """Backtracking over the containers of one pod."""

    def __init__(
        self, view: View, need: PodNeed, chains: Sequence[DeviceChain], *, effort: Effort
    ) -> None:
        """`effort`: what it may take, and takes; that of whoever asks about several nodes."""
        self._view = view
        self._steps = list(zip(need.containers, chains, strict=True))
        if len(self._steps) > 1:
            self._steps.sort(key=lambda step: self._hardness(step[0]))
        self._requests = [in_each_mode(wanted.request) for wanted, _ in self._steps]
        self._effort = effort
        self._began = effort.left
        self._classes: list[Hashable] | None = None
        self._hopeless: set[Hashable] = set()
        self._is_over: bool | None = None
        """A container has no place even by itself; None: that was not looked at yet."""
        self.refusal = Refusal()
        """Why: of the container that came furthest."""

    def run(self) -> list[PlacedContainer] | None:
        """Return where the containers go; None: nowhere."""
        return self._place(())

    def _hardness(self, wanted: WantedContainer) -> tuple[bool, int, int, int, int]:
        request = wanted.request
        largest = max(
            (each.memory_bytes for each in self._view.hardware.inventory.devices), default=0
        )
        return (
            wanted.kind is ContainerKind.INIT,
            -request.count,
            -(self._size_of(request.mig_profile) or request.memory.of(largest)),
            -request.compute.guarantee,
            wanted.place,
        )

    def _size_of(self, profile: str) -> int:
        """Return the bytes of a profile that is named; 0: none is, or there is no such profile."""
        devices = self._view.hardware.inventory.devices if profile else ()
        return max(
            (
                each.memory_bytes
                for device in devices
                if device.mig
                for each in device.mig.profiles
                if each.name == profile
            ),
            default=0,
        )

    def _place(self, placed: tuple[PlacedContainer, ...]) -> list[PlacedContainer] | None:
        number = len(placed)
        if number == len(self._steps):
            return list(placed)
        signature = self._signature(placed) if number else None
        if signature in self._hopeless:
            return None
        if number:
            # The first is judged once: that is no choice.
            self._effort.left -= _EFFORT_OF_A_CONTAINER
        wanted = self._steps[number][0]
        outside = self._view.on_host(placed) if placed else 0
        states = self._view.states(seen(placed, wanted) if placed else {}, outside=outside)
        attempts = []
        for request in self._requests[number]:
            attempt = Attempt(request, tuple(judge(state, request) for state in states))
            attempts.append(attempt)
            left = self._view.host_left - outside
            found = self._beyond(placed, self._ways(number, attempt, placed, host_left=left))
            if found is not None:
                return found
            if self._effort.is_spent or self._is_over:
                break
        if self._is_over is None and self._spent >= _EFFORT_OF_A_CONTAINER * len(self._steps):
            self._is_over = self._has_hopeless()
        if number >= self.refusal.depth and not self._is_over:
            self.refusal = Refusal(
                number, wanted, tuple(attempts), is_unfinished=self._effort.is_spent
            )
        if signature is not None:
            self._hopeless.add(signature)
        return None

    @property
    def _spent(self) -> int:
        return self._began - self._effort.left

    def _has_hopeless(self) -> bool:
        """Tell whether a container has no place even by itself: beside others it has none either.

        It would else be found out once for each way to place those before it. Looked at when as
        much was spent already as that takes, so that it is not taken off the effort.
        """
        states = self._view.states({})
        for (wanted, _), requests in zip(self._steps, self._requests, strict=True):
            attempts = tuple(
                Attempt(request, tuple(judge(state, request) for state in states))
                for request in requests
            )
            if not any(each.has_enough for each in attempts):
                self.refusal = Refusal(0, wanted, attempts)
                return True
        return False

    def _beyond(
        self, placed: tuple[PlacedContainer, ...], ways: Iterable[PlacedContainer]
    ) -> list[PlacedContainer] | None:
        """Place one more container in one of these ways, and all that follow."""
        for one in ways:
            after = (*placed, one)
            if self._has_host_memory(after):
                found = self._place(after)
                if found is not None:
                    return found
            if self._effort.is_spent or self._is_over:
                break
        return None

    def _has_host_memory(self, placed: Sequence[PlacedContainer]) -> bool:
        # Also a pod without memory of its own on the host can push others' there.
        may_need = self._view.may_overflow or any(each.may_oversubscribe for each in placed)
        return not may_need or self._view.on_host(placed) <= self._view.host_left

    def _ways(
        self,
        number: int,
        attempt: Attempt,
        placed: Sequence[PlacedContainer],
        *,
        host_left: int,
    ) -> Iterator[PlacedContainer]:
        """Yield what a step's container may have in one mode, what is liked best first."""
        wanted, chain = self._steps[number]
        request, verdicts = attempt.request, attempt.verdicts
        if request.mode == MIG:
            for cuts in self._cuts(number, request, verdicts, placed):
                yield self._sliced(wanted, request, cuts)
            return
        chain = chain.others.get(request.mode, chain)
        for chosen in self._choices(request, chain, verdicts, placed, host_left=host_left):
            yield _placed(wanted, request, chosen)

    def _cuts(
        self,
        number: int,
        request: Request,
        verdicts: Sequence[Verdict],
        placed: Sequence[PlacedContainer],
    ) -> Iterator[tuple[Cut, ...]]:
        sites = [
            Site(
                column,
                layout,
                self._alike(column, placed),
                tuple(handed_on(layout, verdict.state.own_slices, slices_of(request))),
            )
            for column, verdict in enumerate(verdicts)
            if verdict.fits and (layout := verdict.state.layout) is not None
        ]
        wanted, later = self._steps[number][0], [each for each, _ in self._steps[number + 1 :]]
        # What containers beside it ask for as well has to be there too: no search is needed.
        alike = [each.request for each in later if each.kind is not ContainerKind.INIT].count(
            wanted.request
        )
        together = request.count * (1 + alike if len(self._requests[number]) == 1 else 1)
        if sum(each.slices for each in verdicts if each.fits) < together:
            return
        yield from slice_sets(
            self._groups(sites, request, verdicts),
            slices_of(request),
            effort=self._effort,
            may_join=self._may_join(request),
            # Who comes later can have it as well, if it is large enough.
            tries_larger=any(
                not overlap(wanted, each) and MIG in {each.request.mode, *each.request.other_modes}
                for each in later
            ),
        )

    def _groups(
        self, sites: Sequence[Site], request: Request, verdicts: Sequence[Verdict]
    ) -> list[Sequence[Site]]:
        """Return GPUs to choose from together: those with the tag, those of a NUMA node, all."""
        groups: list[Sequence[Site]] = []
        tag = request.constraints.affinity
        if tag:
            tagged = [each for each in sites if tag in verdicts[each.column].state.affinities]
            groups += [tagged] if tagged else []
        if request.count > 1 and request.constraints.same_numa:
            by_node: dict[int | None, list[Site]] = {}
            for each in sites:
                there = self._view.hardware.devices[each.column].numa_node
                by_node.setdefault(there, []).append(each)
            groups += by_node.values()
        return [*groups, sites]

    def _may_join(self, request: Request) -> Callable[[int, int], bool]:
        """Return what says of two GPUs whether one container may have slices of both."""
        devices = self._view.hardware.devices
        links = self._view.hardware.inventory.links
        constraints = request.constraints

        def may_join(one: int, other: int) -> bool:
            first, second = devices[one], devices[other]
            if one == other:
                return True
            if constraints.same_numa and first.numa_node != second.numa_node:
                return False
            return not constraints.needs_nvlink or are_linked(links, first.uuid, second.uuid)

        return may_join

    def _sliced(
        self, wanted: WantedContainer, request: Request, cuts: Iterable[Cut]
    ) -> PlacedContainer:
        devices = self._view.hardware.inventory.devices
        there = sorted(cuts, key=lambda each: (devices[each.column].index, each.column, each.start))
        return _container(
            wanted,
            request,
            tuple(
                PlacedDevice(
                    devices[each.column].uuid,
                    each.profile.memory_bytes,
                    _part(each.profile, devices[each.column].mig),
                    MigPlace(each.profile.name, each.start),
                )
                for each in there
            ),
        )

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
        links = self._view.hardware.inventory.links
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
        uuid = self._view.hardware.devices[column].uuid
        here = [
            (self._first_such(number) if each.mode == MIG else number, each.mode, device.slice)
            for number, each in enumerate(placed)
            for device in each.devices
            if device.uuid == uuid
        ]
        # Who of several that ask for the same has which slice makes no difference.
        return self._class(column), tuple(sorted(here, key=repr)) if len(here) > 1 else tuple(here)

    def _first_such(self, number: int) -> int:
        """Return the first step whose container differs from this one's by its name alone."""
        wanted = self._steps[number][0]
        if wanted.kind is not ContainerKind.REGULAR:
            return number
        return next(
            at
            for at, (each, _) in enumerate(self._steps)
            if (each.kind, each.request) == (wanted.kind, wanted.request)
        )

    def _class(self, column: int) -> Hashable:
        if self._classes is None:
            wishes = [wanted.request for wanted, _ in self._steps]
            policies = {name for _, chain in self._steps for name in chain.policies}
            twins = self._view.hardware.twins(
                by_numa="numa" in policies or any(each.constraints.same_numa for each in wishes),
                by_links="topology" in policies
                or any(each.constraints.needs_nvlink for each in wishes),
            )
            self._classes = [
                (
                    twins[number],
                    replace(state, device=_ANY, layout=None, mig_off=""),
                    _cut_alike(state.layout),
                    tuple(_admits(each, state.device) for each in wishes),
                )
                for number, state in enumerate(self._view.states({}))
            ]
        return self._classes[column]

    def _signature(self, placed: Sequence[PlacedContainer]) -> Hashable:
        """Return what two beginnings have the same of if the rest has the same chances."""
        used = {device.uuid for each in placed for device in each.devices}
        here = (self._alike(self._view.hardware.columns[uuid], placed) for uuid in used)
        return len(placed), frozenset(Counter(here).items())


def _admits(request: Request, device: Device) -> bool:
    return is_selected(device, request) and not unsuited(device, request.constraints)


def _cut_alike(layout: MigLayout | None) -> Hashable:
    """Return what two GPUs have the same of if the same can be cut from both."""
    if layout is None:
        return None
    slices = frozenset((each.profile, each.start, each.hold) for each in layout.slices)
    return id(layout.profiles), layout.is_enabled, slices


def _part(profile: MigProfile, mig: NodeMig | None) -> int:
    """Return how much of its GPU's time a slice has, by multiprocessors, in basis points."""
    most = max((each.multiprocessors for each in mig.profiles), default=0) if mig else 0
    return WHOLE * profile.multiprocessors // max(1, most)


def _placed(
    wanted: WantedContainer, request: Request, chosen: Iterable[Candidate]
) -> PlacedContainer:
    verdicts = sorted(
        (each.verdict for each in chosen),
        key=lambda each: (each.state.device.index, each.state.device.uuid),
    )
    return _container(
        wanted,
        request,
        tuple(
            PlacedDevice(each.state.device.uuid, each.need_bytes, request.compute.guarantee)
            for each in verdicts
        ),
    )


def _container(
    wanted: WantedContainer, request: Request, devices: tuple[PlacedDevice, ...]
) -> PlacedContainer:
    constraints = request.constraints
    return PlacedContainer(
        name=wanted.name,
        devices=devices,
        kind=wanted.kind,
        place=wanted.place,
        mode=request.mode,
        affinity=constraints.affinity,
        anti_affinity=constraints.anti_affinity,
        exclusion=constraints.exclusion,
        # A slice's memory is the hardware's.
        may_oversubscribe=request.may_oversubscribe and request.mode != MIG,
    )

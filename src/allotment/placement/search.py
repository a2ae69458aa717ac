# SPDX-License-Identifier: Apache-2.0
"""Places all containers of a pod on one node: a bounded search that finds any existing place.

Containers are judged as the node's agent will judge them. Long-running containers come first,
largest first, then init containers, which reuse booked room. Each takes the set that its policies
prefer, with backtracking, within `MOST_EFFORT`. Slices follow `placement.mig`.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

from allotment.model.accounting import overlap
from allotment.model.clusters import (
    NodeDevice,
    NodeMig,
    PlacedContainer,
    PlacedDevice,
    PodNeed,
    WantedContainer,
)
from allotment.model.compute import WHOLE
from allotment.model.devices import Device
from allotment.model.mig import MigLayout, MigPlace, MigProfile
from allotment.model.modes import has_slices, traits_of
from allotment.model.placements import Judgement, Verdict
from allotment.model.pods import ContainerKind
from allotment.model.requests import Request
from allotment.model.structs import replace
from allotment.placement.booking import seen
from allotment.placement.constraints import may_join, unsuited
from allotment.placement.explain import DeadEnd
from allotment.placement.judge import given_bytes, in_each_mode, is_selected, judge, overflow
from allotment.placement.ordering import DeviceChain, Proximity, device_key, models, set_key
from allotment.placement.selections import Candidate, CutSite, Effort, Site, selections, slice_sets
from allotment.placement.views import View, described_device, handed_on, slices_of

MOST_EFFORT = 20_000
"""Sets of devices, whole and partial, examined for one question about one or all nodes: some 0.2 s.
A count, not a time, so that results repeat."""
_EFFORT_OF_A_CONTAINER = 50
"""Cost of judging all devices of a node again, in sets."""
_MOST_COMPARED = 500
"""Sets compared for one container, for their models and proximity; beyond that, the best of
these."""
_MOST_COMPARED_IN_ALL = 2_000
"""The same for one search; beyond that, the sets follow the order of single devices."""

_ANY = described_device(NodeDevice(uuid="", model="", memory_bytes=0))


class Search:
    """Backtracking over the containers of one pod."""

    def __init__(
        self, view: View, need: PodNeed, chains: Sequence[DeviceChain], *, effort: Effort
    ) -> None:
        self._view = view
        self._steps = list(zip(need.containers, chains, strict=True))
        if len(self._steps) > 1:
            self._steps.sort(key=lambda step: self._hardness(step[0]))
        self._requests = [in_each_mode(wanted.request) for wanted, _ in self._steps]
        self._effort = effort
        self._began = effort.left
        self._compared = Effort(_MOST_COMPARED_IN_ALL)
        self._classes: list[Hashable] | None = None
        self._hopeless: set[Hashable] = set()
        self._is_over: bool | None = None
        """A container has no place even by itself; None: that was not looked at yet."""
        self.dead_end = DeadEnd()
        """The container that came furthest."""

    def _hardness(self, wanted: WantedContainer) -> tuple[bool, int, int, int, int]:
        request = wanted.request
        largest = max(
            (device.memory_bytes for device in self._view.hardware.inventory.devices), default=0
        )
        return (
            wanted.kind is ContainerKind.INIT,
            -request.count,
            -(self._size_of(request.mig_profile) or request.memory.of(largest)),
            -request.compute.guarantee,
            wanted.place,
        )

    def _size_of(self, profile: str) -> int:
        """Bytes of a named profile; 0: no name, or unknown."""
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

    def place(self, placed: tuple[PlacedContainer, ...] = ()) -> list[PlacedContainer] | None:
        """Place all containers after those that are placed; None: they do not fit."""
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
        judgements = []
        for request in self._requests[number]:
            judgement = Judgement(request, tuple(judge(state, request) for state in states))
            judgements.append(judgement)
            left = self._view.host_left - outside
            found = self._beyond(placed, self._ways(number, judgement, placed, host_left=left))
            if found is not None:
                return found
            if self._effort.is_spent or self._is_over:
                break
        if self._is_over is None and self._spent >= _EFFORT_OF_A_CONTAINER * len(self._steps):
            self._is_over = self._has_hopeless()
        if number >= self.dead_end.depth and not self._is_over:
            self.dead_end = DeadEnd(
                number, wanted.name, tuple(judgements), is_unfinished=self._effort.is_spent
            )
        if signature is not None:
            self._hopeless.add(signature)
        return None

    @property
    def _spent(self) -> int:
        return self._began - self._effort.left

    def _has_hopeless(self) -> bool:
        """True if a container has no place even alone, so that it has none beside others.

        Else each placement of earlier containers would repeat that failure. Checked once as much
        effort was spent as the check costs; it does not count.
        """
        states = self._view.states({})
        for (wanted, _), requests in zip(self._steps, self._requests, strict=True):
            judgements = tuple(
                Judgement(request, tuple(judge(state, request) for state in states))
                for request in requests
            )
            if not any(each.parts >= each.request.count for each in judgements):
                self.dead_end = DeadEnd(0, wanted.name, judgements)
                return True
        return False

    def _beyond(
        self, placed: tuple[PlacedContainer, ...], ways: Iterable[PlacedContainer]
    ) -> list[PlacedContainer] | None:
        for one in ways:
            after = (*placed, one)
            # Even a pod without memory on the host can push others' memory there.
            may_need = self._view.may_overflow or any(each.may_oversubscribe for each in after)
            if not may_need or self._view.on_host(after) <= self._view.host_left:
                found = self.place(after)
                if found is not None:
                    return found
            if self._effort.is_spent or self._is_over:
                break
        return None

    def _ways(
        self,
        number: int,
        judgement: Judgement,
        placed: Sequence[PlacedContainer],
        *,
        host_left: int,
    ) -> Iterator[PlacedContainer]:
        wanted, chain = self._steps[number]
        request, verdicts = judgement.request, judgement.verdicts
        if traits_of(request.mode).is_slice:
            for cuts in self._cuts(number, request, verdicts, placed):
                yield self._sliced(wanted, request, cuts)
            return
        chain = chain.others.get(request.mode, chain)
        for chosen in self._choices(request, chain, verdicts, placed, host_left=host_left):
            ordered = sorted(
                (each.verdict for each in chosen),
                key=lambda each: (each.state.device.index, each.state.device.uuid),
            )
            devices = tuple(_placed_device(request, each) for each in ordered)
            yield placed_container(wanted, request, devices)

    def _cuts(
        self,
        number: int,
        request: Request,
        verdicts: Sequence[Verdict],
        placed: Sequence[PlacedContainer],
    ) -> Iterator[tuple[CutSite, ...]]:
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
        # Parallel containers with the same request need a place too: no search is needed.
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
            # Later containers can reuse it, if it is large enough.
            tries_larger=any(
                not overlap(wanted, each) and has_slices(each.request.modes) for each in later
            ),
        )

    def _groups(
        self, sites: Sequence[Site], request: Request, verdicts: Sequence[Verdict]
    ) -> list[Sequence[Site]]:
        """Groups of GPUs to choose from: with the tag, of a NUMA node, all."""
        groups: list[Sequence[Site]] = []
        tag = request.constraints.affinity
        if tag:
            tagged = [site for site in sites if tag in verdicts[site.column].state.affinities]
            groups += [tagged] if tagged else []
        if request.count > 1 and request.constraints.same_numa:
            by_node: dict[int | None, list[Site]] = {}
            for site in sites:
                there = self._view.hardware.devices[site.column].numa_node
                by_node.setdefault(there, []).append(site)
            groups += by_node.values()
        return [*groups, sites]

    def _may_join(self, request: Request) -> Callable[[int, int], bool]:
        """A predicate: whether one container may have slices of both GPUs."""
        devices = self._view.hardware.devices
        links = self._view.hardware.inventory.links
        return lambda one, other: (
            one == other or may_join(request.constraints, links, devices[one], devices[other])
        )

    def _sliced(
        self, wanted: WantedContainer, request: Request, cuts: Iterable[CutSite]
    ) -> PlacedContainer:
        devices = self._view.hardware.inventory.devices
        there = sorted(cuts, key=lambda each: (devices[each.column].index, each.column, each.start))
        return placed_container(
            wanted,
            request,
            tuple(
                PlacedDevice(
                    devices[each.column].uuid,
                    each.profile.memory_bytes,
                    slice_guarantee(each.profile, devices[each.column].mig),
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
        fitting = [
            Candidate(
                verdict,
                # Promises to the pod's own containers can be used in turn.
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
        links = self._view.hardware.inventory.links
        proximity = Proximity(fitting, links) if links else None
        keys = {
            each.uuid: (
                *device_key(each, request, chain, others=fitting, proximity=proximity),
                each.uuid,
            )
            for each in fitting
        }
        fitting.sort(key=lambda each: keys[each.uuid])
        is_compared = 1 < request.count < len(fitting) and (
            bool(links) or chain.wants_near or len(models(fitting)) > 1
        )
        if is_compared and not self._compared.is_spent:
            with self._compared.part(_MOST_COMPARED) as effort:
                sets = list(
                    selections(
                        self._told_apart(fitting, chain),
                        request,
                        host_budget=host_left,
                        effort=effort,
                        links=links,
                    )
                )
            yield from self._best_of_each(
                sorted(
                    sets, key=lambda chosen: set_key(chosen, request, chain, proximity=proximity)
                ),
                placed,
            )
            if not effort.is_spent:
                return
        yield from selections(
            fitting, request, host_budget=host_left, effort=self._effort, links=links
        )

    def _told_apart(self, candidates: Sequence[Candidate], chain: DeviceChain) -> list[Candidate]:
        """The candidates; alike are only those that the choice cannot tell apart either."""
        hardware = self._view.hardware
        twins = hardware.twins(
            by_numa="numa" in chain.policies, by_links=bool(hardware.inventory.links)
        )
        return [
            replace(each, alike=(each.alike, twins[hardware.columns[each.uuid]]))
            for each in candidates
        ]

    def _best_of_each(
        self, sets: Iterable[tuple[Candidate, ...]], placed: Sequence[PlacedContainer]
    ) -> Iterator[tuple[Candidate, ...]]:
        """Yield only the first of the sets that leave the same options to other containers."""
        known: set[Hashable] = set()
        columns = self._view.hardware.columns
        for chosen in sets:
            likeness = frozenset(
                Counter(self._alike(columns[each.uuid], placed) for each in chosen).items()
            )
            if likeness not in known:
                known.add(likeness)
                yield chosen

    def _alike(self, column: int, placed: Sequence[PlacedContainer]) -> Hashable:
        """Key under which two devices are interchangeable."""
        if len(self._steps) == 1 and self._steps[0][0].request.count == 1:
            return None
        uuid = self._view.hardware.devices[column].uuid
        here = [
            (self._first_such(number) if device.slice else number, each.mode, device.slice)
            for number, each in enumerate(placed)
            for device in each.devices
            if device.uuid == uuid
        ]
        # Among equal requests, the assignment of slices does not matter.
        return self._class(column), tuple(sorted(here, key=repr)) if len(here) > 1 else tuple(here)

    def _first_such(self, number: int) -> int:
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
            requests = [wanted.request for wanted, _ in self._steps]
            twins = self._view.hardware.twins(
                by_numa=any(request.constraints.same_numa for request in requests),
                by_links=any(request.constraints.needs_nvlink for request in requests),
            )
            self._classes = [
                (
                    twins[number],
                    replace(state, device=_ANY, layout=None, mig_off=""),
                    _cut_alike(state.layout),
                    tuple(_admits(request, state.device) for request in requests),
                )
                for number, state in enumerate(self._view.states({}))
            ]
        return self._classes[column]

    def _signature(self, placed: Sequence[PlacedContainer]) -> Hashable:
        """Key of partial placements with the same options for the rest."""
        used = {device.uuid for each in placed for device in each.devices}
        here = (self._alike(self._view.hardware.columns[uuid], placed) for uuid in used)
        return len(placed), frozenset(Counter(here).items())


def _placed_device(request: Request, verdict: Verdict) -> PlacedDevice:
    is_whole = traits_of(request.mode).is_exclusive
    guarantee = WHOLE if is_whole else request.compute.guarantee
    return PlacedDevice(verdict.state.device.uuid, given_bytes(verdict, request), guarantee)


def _admits(request: Request, device: Device) -> bool:
    return is_selected(device, request) and not unsuited(device, request.constraints)


def _cut_alike(layout: MigLayout | None) -> Hashable:
    """Key of GPUs from which the same slices can be cut."""
    if layout is None:
        return None
    slices = frozenset((slice_.profile, slice_.start, slice_.hold) for slice_ in layout.slices)
    return id(layout.profiles), layout.is_enabled, slices


def slice_guarantee(profile: MigProfile, mig: NodeMig | None) -> int:
    """A slice's part of its GPU's time, by multiprocessors, in basis points."""
    most = max((each.multiprocessors for each in mig.profiles), default=0) if mig else 0
    return WHOLE * profile.multiprocessors // max(1, most)


def placed_container(
    wanted: WantedContainer, request: Request, devices: tuple[PlacedDevice, ...]
) -> PlacedContainer:
    """Return a container with these devices, as its request has them counted."""
    constraints, traits = request.constraints, traits_of(request.mode)
    return PlacedContainer(
        name=wanted.name,
        devices=devices,
        kind=wanted.kind,
        place=wanted.place,
        mode=request.mode,
        affinity=constraints.affinity,
        anti_affinity=constraints.anti_affinity,
        exclusion=constraints.exclusion,
        # A slice's memory is fixed hardware.
        may_oversubscribe=request.may_oversubscribe and not traits.is_slice,
        floor=request.floor if traits.takes_turns else 0,
    )

# SPDX-License-Identifier: Apache-2.0
"""Where on one node all containers of a pod go: a search that finds a place wherever there is one.

Each container is judged exactly as the node's agent will judge it when it starts (`fit.judge`, of
the devices as that container sees them), so what is placed here is not refused there. Containers
that run for long come first, the largest of them before the others; init containers after them, so
that they go into room that is booked for these anyway. Each takes the set of devices that its chain
of policies likes best, and where that leaves none for a later one, the next sets are tried: a pod
is refused only if no choice at all would do.

The search is bounded by an `Effort`, at most `MOST_EFFORT`: then it gives up and says so. Devices
that are alike are tried once, and what was found hopeless is not tried again, so for pods that
people write it takes a hundredth of that.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace

from allotment.model.clusters import PlacedContainer, PlacedDevice, PodNeed, WantedContainer
from allotment.model.devices import Device
from allotment.model.placements import Verdict
from allotment.model.pods import ContainerKind
from allotment.model.requests import Request
from allotment.placement.booking import seen
from allotment.placement.constraints import unsuited
from allotment.placement.fit import judge, overflow
from allotment.placement.ordering import DeviceChain, device_key, set_key
from allotment.placement.refusals import Refusal
from allotment.placement.select import is_selected
from allotment.placement.selections import Candidate, Effort, selections
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
        self._steps = sorted(
            zip(need.containers, chains, strict=True), key=lambda step: self._hardness(step[0])
        )
        self._effort = effort
        self._classes: list[Hashable] | None = None
        self._hopeless: set[Hashable] = set()
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
        if number:
            # The first is judged once: that is no choice.
            self._effort.left -= _EFFORT_OF_A_CONTAINER
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
        here = tuple(
            number
            for number, each in enumerate(placed)
            if any(device.uuid == uuid for device in each.devices)
        )
        return self._class(column), here

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
                    replace(state, device=_ANY),
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

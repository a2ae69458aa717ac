# SPDX-License-Identifier: Apache-2.0
"""Pods as claims: the devices that kube-scheduler alone would give them.

Devices, counters and capacity are those of the node agent's pools (`agent/dra/devices.py`), read as
documents. `claim_placers` chooses the node.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from allotment.agent.dra.devices import DeviceType, GpuState, Pool, PoolDevice, filling_key, pool_of
from allotment.agent.mig.state import CutGpu
from allotment.dialects.own.resource_claims import (
    COMPUTE_CAPACITY,
    MEMORY_CAPACITY,
    Capacity,
    Consumption,
    DevicePart,
)
from allotment.model.clusters import (
    NodeDevice,
    NodeInventory,
    NodeMig,
    PodNeed,
    TakenPart,
)
from allotment.model.compute import WHOLE
from allotment.model.devices import Device
from allotment.model.mig import MigHold, MigPlace, MigSlice
from allotment.model.modes import has_slices, traits_of
from allotment.model.quantities import MemoryAmount
from allotment.model.requests import Constraints, Request
from allotment.model.structs import prepared, replace
from allotment.placement.booking import Load, base_load
from allotment.placement.constraints import unsuited
from allotment.placement.views import described_device

PERCENT: Final = WHOLE // 100
"""Basis points."""
_HOLDER: Final = "claim"
_MOST_TRIES: Final = 20_000
"""Devices tried for one pod on one node. kube-scheduler gives up after a time."""


class ClaimRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a claim selects, and what it consumes of each device."""

    type: DeviceType
    count: int = 1
    """Distinct GPUs, or slices."""
    memory: MemoryAmount | None = None
    """Of a slice: at least."""
    compute: int | None = None
    """Percent; None: the device's default."""
    profile: str = ""
    constraints: Constraints = Constraints()
    mode: str = ""
    """The mode that it stands for."""


Claims = tuple[tuple[ClaimRequest, ...], ...]
"""A pod's claims, one for each container: its alternatives, the best first (`firstAvailable`)."""


def claims_of(need: PodNeed) -> Claims:
    """Return the claims that ask for the same as a pod's containers."""
    return tuple(
        tuple(_claim(each.request, mode) for mode in each.request.modes) for each in need.containers
    )


def _claim(request: Request, mode: str) -> ClaimRequest:
    traits = traits_of(mode)
    common = ClaimRequest(
        type=DeviceType.GPU, count=request.count, constraints=request.constraints, mode=mode
    )
    if traits.is_exclusive or traits.is_time_sliced:
        return common
    if traits.is_slice:
        memory = None if request.mig_profile else request.memory
        return replace(common, type=DeviceType.MIG, memory=memory, profile=request.mig_profile)
    compute = -(-request.compute.guarantee // PERCENT) if request.asks_compute else None
    return replace(common, type=DeviceType.SHARE, memory=request.memory, compute=compute)


class Allocated(msgspec.Struct, frozen=True):
    """One device for one claim."""

    claim: int
    """Its place among the pod's claims."""
    request: ClaimRequest
    device: PoolDevice
    consumed: Mapping[str, int]
    """By capacity, as rounded by the device's request policy."""


class _Offer(msgspec.Struct):
    """A device of a pool, and what is left of it."""

    device: PoolDevice
    gpu: Device
    type: DeviceType
    profile: str
    counters: Sequence[tuple[str, str, int]]
    """Set, name and amount."""
    is_shared: bool
    rules: Mapping[str, Consumption]
    """By capacity."""
    left: dict[str, int]
    users: int = 0


class _Search(msgspec.Struct):
    """A search for the devices of one pod."""

    claims: Claims
    found: list[tuple[_Offer, Allocated]] = msgspec.field(default_factory=list)
    tries: int = 0

    def is_over(self) -> bool:
        self.tries += 1
        return self.tries > _MOST_TRIES


class NodeClaims:
    """One node's pool and what claims have of it."""

    def __init__(self, node: NodeInventory, gpus: Sequence[GpuState]) -> None:
        """All of the pool is free; `gpus` have what others hold."""
        self.node = node
        self._gpus = {gpu.device.uuid: gpu for gpu in gpus}
        pool = pool_of(gpus, None)
        self._counters = {
            (each["name"], name): int(counter["value"])
            for content in pool.slices
            for each in content.get("sharedCounters", ())
            for name, counter in each["counters"].items()
        }
        self._offers = [
            _offer(each, self._gpus[each.part.uuid].device) for each in pool.devices.values()
        ]
        self._ranks = _ranks(pool)
        self._by_type: Mapping[DeviceType, Sequence[_Offer]] = {}
        self._sort()

    def find(self, claims: Claims) -> tuple[Allocated, ...] | None:
        """Return the first devices that serve all claims, in the pool's order; None: none do.

        The search tries all combinations, as kube-scheduler's does. The devices of one request
        differ: a claim for several has the constraint `distinctAttribute`.
        """
        search = _Search(claims)
        if not self._serve(search, 0):
            return None
        for offer, each in search.found:
            self._count(offer, each.consumed, -1)
        return tuple(each for _, each in search.found)

    def take(self, allocated: Sequence[Allocated]) -> None:
        self._change(allocated, 1)

    def give_back(self, allocated: Sequence[Allocated]) -> None:
        self._change(allocated, -1)

    def check_invariants(self) -> None:
        """Raise `AssertionError` if a device or a counter has less than nothing left."""
        if min(self._counters.values(), default=0) < 0:
            raise AssertionError(self._counters)
        for offer in self._offers:
            if min(offer.left.values(), default=0) < 0 or (offer.users > 1 and not offer.is_shared):
                raise AssertionError(offer)

    def _serve(self, search: _Search, number: int) -> bool:
        """Serve the claims from `number` on; what they consume is counted."""
        if number == len(search.claims):
            return True
        return any(
            self._serve_one(search, number, each, begin=0, missing=each.count)
            for each in search.claims[number]
        )

    def _serve_one(
        self, search: _Search, number: int, request: ClaimRequest, *, begin: int, missing: int
    ) -> bool:
        if not missing:
            return self._serve(search, number + 1)
        offers = self._by_type.get(request.type, ())
        for place in range(begin, len(offers) - missing + 1):
            if search.is_over():
                return False
            offer = offers[place]
            consumed = self._consumed(offer, request)
            if consumed is None:
                continue
            self._count(offer, consumed, 1)
            search.found.append((offer, Allocated(number, request, offer.device, consumed)))
            if self._serve_one(search, number, request, begin=place + 1, missing=missing - 1):
                return True
            search.found.pop()
            self._count(offer, consumed, -1)
        return False

    def _consumed(self, offer: _Offer, request: ClaimRequest) -> Mapping[str, int] | None:
        """Return what a claim consumes of a device; None: it does not serve the claim."""
        memory = None if request.memory is None else request.memory.of(offer.gpu.memory_bytes)
        if not self._is_open(offer) or not _is_selected(offer, request, memory):
            return None
        if not offer.is_shared:
            return _NOTHING
        asked = {MEMORY_CAPACITY: memory, COMPUTE_CAPACITY: request.compute}
        consumed = {}
        for name, rule in offer.rules.items():
            amount = rule.of(asked.get(name))
            if amount is None or amount > offer.left[name]:
                return None
            consumed[name] = amount
        return consumed

    def _is_open(self, offer: _Offer) -> bool:
        if offer.users:
            return offer.is_shared
        return all(self._counters[place, name] >= amount for place, name, amount in offer.counters)

    def _count(self, offer: _Offer, consumed: Mapping[str, int], sign: int) -> None:
        """Add or remove a claim. The first of a device takes its counters, for all of them."""
        before = offer.users
        offer.users += sign
        for name, amount in consumed.items():
            offer.left[name] -= sign * amount
        if before == 0 or offer.users == 0:
            for place, name, amount in offer.counters:
                self._counters[place, name] -= sign * amount

    def _change(self, allocated: Sequence[Allocated], sign: int) -> None:
        by_name = {offer.device.name: offer for offer in self._offers}
        for each in allocated:
            offer = by_name[each.device.name]
            self._count(offer, each.consumed, sign)
            gpu = self._gpus[offer.gpu.uuid]
            booked = gpu.booked_bytes + sign * booked_bytes(each, gpu)
            gpu = replace(gpu, booked_bytes=booked)
            place = each.device.part.slice
            if place is not None and gpu.cut is not None:
                gpu = replace(gpu, cut=_recut(gpu.cut, place, sign))
                self._ranks |= _ranks(pool_of([gpu], None))
            self._gpus[offer.gpu.uuid] = gpu
        self._sort()

    def _sort(self) -> None:
        """Order the devices as the agent does once it has the claims' shares."""
        self._offers.sort(
            key=lambda offer: (
                filling_key(self._gpus[offer.gpu.uuid]),
                self._ranks[offer.device.part],
            )
        )
        by_type: dict[DeviceType, list[_Offer]] = {}
        for offer in self._offers:
            if not offer.device.document.get("taints"):  # claims tolerate none
                by_type.setdefault(offer.type, []).append(offer)
        self._by_type = by_type


_NOTHING: Final[Mapping[str, int]] = {}


def _ranks(pool: Pool) -> dict[DevicePart, int]:
    """Return the places of the devices in a pool."""
    return {each.part: rank for rank, each in enumerate(pool.devices.values())}


def _recut(cut: CutGpu, place: MigPlace, sign: int) -> CutGpu:
    """Return a GPU's slices after a claim's slice came or went."""
    (slice_,) = (
        MigSlice(profile=each.number, start=place.start, size=each.size, holder=_HOLDER)
        for each in cut.profiles
        if each.name == place.profile
    )
    others = tuple(each for each in cut.slices if each != slice_)
    return replace(cut, slices=(*others, slice_) if sign > 0 else others)


def _is_selected(offer: _Offer, request: ClaimRequest, memory: int | None) -> bool:
    """Return whether the claim's selectors choose a device."""
    if request.profile and offer.profile != request.profile:
        return False
    if not offer.is_shared and memory is not None and offer.left[MEMORY_CAPACITY] < memory:
        return False
    return not unsuited(offer.gpu, request.constraints)


def _offer(device: PoolDevice, gpu: Device) -> _Offer:
    document = device.document
    attributes = document["attributes"]
    capacities = msgspec.convert(document.get("capacity", {}), prepared(dict[str, Capacity]))
    rules = {name: each.consumption() for name, each in capacities.items()}
    return _Offer(
        device=device,
        gpu=gpu,
        type=DeviceType(attributes["type"]["string"]),
        profile=attributes.get("profile", {}).get("string", ""),
        counters=[
            (each["counterSet"], name, int(counter["value"]))
            for each in document.get("consumesCounters", ())
            for name, counter in each["counters"].items()
        ],
        is_shared=document.get("allowMultipleAllocations", False),
        rules=rules,
        left={name: rule.total for name, rule in rules.items()},
    )


def booked_bytes(allocated: Allocated, gpu: GpuState) -> int:
    """Return the memory of the share that the agent makes for it."""
    part = allocated.device.part
    if part.slice is not None:
        return sum(
            each.memory_bytes
            for each in (gpu.cut.profiles if gpu.cut else ())
            if each.name == part.slice.profile
        )
    if part.is_whole:
        return gpu.device.memory_bytes
    return allocated.consumed[MEMORY_CAPACITY]


def gpu_state(device: NodeDevice, load: Load | None = None) -> GpuState:
    """Return a GPU as its node's agent knows it, from what the agent publishes.

    `load`: of pods that stay, which are no claims; None: none but what the agent reports.
    """
    mig = device.mig if has_slices(device.modes) else None
    load = load or base_load(device)
    undivided = load.shares - sum(load.slices.values())
    memory = load.fixed + load.oversubscribed
    return GpuState(
        device=replace(described_device(device), numa_node=device.numa_node),
        cut=CutGpu(profiles=mig.profiles, is_enabled=mig.is_enabled, slices=_slices(mig, load))
        if mig
        else None,
        taken=TakenPart(memory, load.guarantee, load.shares, load.mode)
        if undivided
        else TakenPart(),
        slices=_slices(mig, load) if mig else (),
        problem=device.problem,
        booked_bytes=memory,
    )


def _slices(mig: NodeMig, load: Load) -> tuple[MigSlice, ...]:
    """Return the slices that no claim has."""
    there = [each for each in mig.slices if each.hold is not MigHold.IDLE]
    ours = [
        MigSlice(profile=each.number, start=place.start, size=each.size)
        for place in load.slices
        for each in mig.profiles
        if each.name == place.profile
    ]
    return (*there, *ours)

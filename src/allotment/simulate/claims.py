# SPDX-License-Identifier: Apache-2.0
"""Pods as claims: the devices that kube-scheduler alone would give them.

Devices, counters and capacity are those of the node agent's pools (`agent/dra/devices.py`), read as
documents. The node is chosen by kube-scheduler's default scores of CPU and memory: it has none for
devices. Not modelled: other filters and scores, and a pool that is late.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from random import Random
from time import perf_counter_ns
from typing import Any, Final

import msgspec
import numpy as np

from allotment.agent.dra.devices import DeviceType, GpuState, PoolDevice, filling_key, pool_of
from allotment.agent.mig.state import CutGpu
from allotment.dialects.own.resource_claims import COMPUTE_CAPACITY, MEMORY_CAPACITY
from allotment.model.clusters import (
    NodeDevice,
    NodeInventory,
    NodeMig,
    PlacedContainer,
    PlacedDevice,
    PodBooking,
    PodNeed,
    TakenPart,
)
from allotment.model.compute import WHOLE
from allotment.model.devices import Device
from allotment.model.mig import MigHold, MigSlice
from allotment.model.modes import has_slices, traits_of
from allotment.model.quantities import MemoryAmount, parse_whole
from allotment.model.requests import Constraints, ModelRule, Request
from allotment.model.structs import replace
from allotment.placement.booking import Load, base_load
from allotment.placement.cluster.arrays import BoolArray, IntArray
from allotment.placement.cluster.cluster import Cluster
from allotment.placement.constraints import unsuited
from allotment.placement.policies import make
from allotment.placement.search import part_of_time
from allotment.simulate.csv_files import MILLI, TraceNode, TracePod
from allotment.simulate.outcomes import UnplacedPod
from allotment.simulate.placers import MIB, ArrayPlacer, Spot, inventory_of
from allotment.simulate.replay import Counts

_PERCENT: Final = WHOLE // 100
_MOST_TRIES: Final = 20_000
"""Devices tried for one pod on one node. kube-scheduler gives up after a time."""
_ALL_NODES: Final = 100
"""kube-scheduler looks for this many nodes that fit, or for a percentage of all (schedule_one.go,
`numFeasibleNodesToFind`)."""
_MOST_SCORE: Final = 100


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
    compute = -(-request.compute.guarantee // _PERCENT) if request.asks_compute else None
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
    capacity: Mapping[str, Any]
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
        for name, capacity in offer.capacity.items():
            amount = _rounded(asked.get(name), capacity["requestPolicy"])
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
            self._gpus[offer.gpu.uuid] = replace(gpu, booked_bytes=booked)
        self._sort()

    def _sort(self) -> None:
        """Order the devices as the agent does once it has the claims' shares."""
        self._offers.sort(key=lambda offer: filling_key(self._gpus[offer.gpu.uuid]))
        by_type: dict[DeviceType, list[_Offer]] = {}
        for offer in self._offers:
            if not offer.device.document.get("taints"):  # claims tolerate none
                by_type.setdefault(offer.type, []).append(offer)
        self._by_type = by_type


_NOTHING: Final[Mapping[str, int]] = {}


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
    capacity = document.get("capacity", {})
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
        capacity={name: _policy(each) for name, each in capacity.items()},
        left={name: parse_whole(each["value"]) for name, each in capacity.items()},
    )


def _policy(capacity: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a capacity with the numbers of its request policy."""
    policy = capacity.get("requestPolicy")
    if policy is None:
        return capacity
    between = {name: parse_whole(text) for name, text in policy["validRange"].items()}
    return {"requestPolicy": {"default": parse_whole(policy["default"]), **between}}


def _rounded(asked: int | None, policy: Mapping[str, int]) -> int | None:
    """Return what is consumed, as the API defines it; None: no valid amount."""
    if asked is None:
        return policy["default"]
    least, step = policy["min"], policy["step"]
    amount = least + max(0, -(-(asked - least) // step)) * step
    return amount if amount <= policy["max"] else None


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
        device=Device(
            uuid=device.uuid,
            name=device.model,
            index=device.index,
            memory_bytes=device.memory_bytes,
            sm_count=0,
            compute_capability=(0, 0),
            numa_node=device.numa_node,
            pci_bus_id="",
            simulated=True,
            mig=False,
        ),
        cut=CutGpu(profiles=mig.profiles, is_enabled=mig.is_enabled) if mig else None,
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


class ClaimPod(msgspec.Struct, frozen=True, kw_only=True):
    """What a pod asks kube-scheduler for."""

    cpu_milli: int = 0
    memory_bytes: int = 0
    claims: Claims = ()


class StockScheduler:
    """kube-scheduler without an extender, for pods with claims.

    Node scores: `NodeResourcesFit` (LeastAllocated) and `NodeResourcesBalancedAllocation`, of CPU
    and memory, each of weight 1; among equal ones a random node. In a large cluster it scores some
    of the nodes that fit, as kube-scheduler does.
    """

    def __init__(
        self, nodes: Sequence[NodeClaims], *, free: Sequence[tuple[int, int]], seed: int
    ) -> None:
        """`free`: CPU and memory of each node that no pod has, as in `ClaimPod`."""
        self.nodes = nodes
        self._dice = Random(seed)  # noqa: S311 - no secret
        self._all = np.array([[each.node.cpu_milli, each.node.memory_bytes] for each in nodes])
        self._free = np.array(free)
        self._first = 0
        """The node that is looked at first: another one for each pod."""
        self._fits: dict[Claims, tuple[int, BoolArray]] = {}
        """By claims: the changes that are seen already, and which nodes' pools serve them."""
        self._changes: list[tuple[int, bool]] = []
        """Each node that changed, and whether it got room."""

    def reserve(self, row: int, pod: ClaimPod, allocated: Sequence[Allocated]) -> None:
        self._change(row, pod, -1)
        self.nodes[row].take(allocated)
        self._changes.append((row, False))

    def release(self, row: int, pod: ClaimPod, allocated: Sequence[Allocated]) -> None:
        self._change(row, pod, 1)
        self.nodes[row].give_back(allocated)
        self._changes.append((row, True))

    def choose(self, pod: ClaimPod) -> int | None:
        """Return the number of the best node; None: the pod fits on none."""
        asked = np.array([pod.cpu_milli, pod.memory_bytes])
        is_fitting = self._serving(pod.claims) & (self._free >= asked).all(axis=1)
        rows = np.flatnonzero(is_fitting)
        if not rows.size:
            return None
        rows = self._sample(rows)
        scores = _scores(self._all[rows], self._free[rows] - asked)
        return int(self._dice.choice(rows[scores == scores.max()].tolist()))

    def has_host(self, row: int, pod: ClaimPod) -> bool:
        """Return whether a node has the CPU and memory."""
        return bool((self._free[row] >= (pod.cpu_milli, pod.memory_bytes)).all())

    def _change(self, row: int, pod: ClaimPod, sign: int) -> None:
        self._free[row] += sign * np.array([pod.cpu_milli, pod.memory_bytes])

    def _sample(self, rows: IntArray) -> IntArray:
        """Return the nodes that are scored, of those that fit: the next ones after the last."""
        number = len(self.nodes)
        wanted = number
        if number >= _ALL_NODES:
            wanted = max(_ALL_NODES, number * max(5, 50 - number // 125) // 100)
        ordered = np.roll(rows, -int(np.searchsorted(rows, self._first)))[:wanted]
        is_cut = rows.size > wanted
        if is_cut:
            self._first = (int(ordered[-1]) + 1) % number
        return ordered

    def _serving(self, claims: Claims) -> BoolArray:
        """Return which nodes' pools serve the claims."""
        if claims not in self._fits:
            fits = np.array([each.find(claims) is not None for each in self.nodes], dtype=bool)
        else:
            seen, fits = self._fits[claims]
            for row, has_more in dict(self._latest(seen)).items():
                if fits[row] or has_more:
                    fits[row] = self.nodes[row].find(claims) is not None
        self._fits[claims] = len(self._changes), fits
        return fits

    def _latest(self, seen: int) -> Iterator[tuple[int, bool]]:
        grown = {row for row, has_more in self._changes[seen:] if has_more}
        for row, _ in self._changes[seen:]:
            yield row, row in grown


def _scores(whole: IntArray, left: IntArray) -> IntArray:
    """Return the sum of both scores of each node; `left` is without the pod's own requests."""
    is_there = whole > 0
    size = np.maximum(whole, 1)
    numbers = np.maximum(is_there.sum(axis=1), 1)
    least = np.where(is_there, left * _MOST_SCORE // size, 0).sum(axis=1) // numbers
    used = np.where(is_there, 1 - left / size, 0)
    apart = np.where(is_there.all(axis=1), np.abs(used[:, 0] - used[:, 1]) / 2, 0)
    scores: IntArray = least + ((1 - apart) * _MOST_SCORE).astype(np.int64)
    return scores


class ClaimPlacer(ArrayPlacer):
    """Places the pods of a trace as claims. The books of its base class check it.

    A part of a GPU is a claim of type `share`, all of its time one of type `gpu`.
    """

    def __init__(self, nodes: Sequence[TraceNode], *, pods: Sequence[TracePod], seed: int) -> None:
        super().__init__(nodes, make(_ANY_POLICY), pods=pods)
        inventories = [inventory_of(each) for each in nodes]
        self._stock = StockScheduler(
            [NodeClaims(each, [gpu_state(gpu) for gpu in each.devices]) for each in inventories],
            free=[(each.cpu_milli, each.memory_bytes) for each in inventories],
            seed=seed,
        )
        self._columns = {
            gpu.uuid: column for each in inventories for column, gpu in enumerate(each.devices)
        }
        self._asked: dict[tuple[object, int], ClaimPod] = {}
        self._held: dict[Spot, tuple[Allocated, ...]] = {}
        """Equal spots have equal devices."""

    def place(self, pod: TracePod, node: int | None = None) -> Spot | None:
        asked = self._ask(pod)
        if node is None:
            node = self._stock.choose(asked)
        elif not self._stock.has_host(node, asked):
            return None
        found = None if node is None else self._stock.nodes[node].find(asked.claims)
        if node is None or found is None:
            return None
        spot = Spot(pod, node, tuple(self._columns[each.device.part.uuid] for each in found))
        self._held[spot] = found
        return spot

    def book(self, spot: Spot) -> None:
        super().book(spot)
        self._stock.reserve(spot.node, self._ask(spot.pod), self._held[spot])

    def release(self, spot: Spot) -> None:
        super().release(spot)
        self._stock.release(spot.node, self._ask(spot.pod), self._held[spot])

    def check_invariants(self) -> None:
        super().check_invariants()
        for each in self._stock.nodes:
            each.check_invariants()

    def _ask(self, pod: TracePod) -> ClaimPod:
        key = (pod.shape, pod.memory_mib)
        asked = self._asked.get(key)
        if asked is None:
            asked = self._asked[key] = _asked(pod)
        return asked


_ANY_POLICY: Final = "first-fit"
"""For books alone."""


def _asked(pod: TracePod) -> ClaimPod:
    shape = pod.shape
    host = ClaimPod(cpu_milli=shape.cpu_milli, memory_bytes=pod.memory_mib * MIB)
    if not shape.gpus:
        return host
    models = tuple(ModelRule(each, is_exact=True) for each in shape.models)
    claim = ClaimRequest(
        type=DeviceType.GPU, count=shape.gpus, constraints=Constraints(models=models)
    )
    if shape.gpu_milli < MILLI:
        part = Fraction(shape.gpu_milli, MILLI)
        memory = shape.gpu_memory_mib
        claim = replace(
            claim,
            type=DeviceType.SHARE,
            memory=MemoryAmount(f"{float(part):%}", part=part)
            if memory is None
            else MemoryAmount(f"{memory}Mi", size_bytes=memory * MIB),
            compute=math.ceil(part * 100),
        )
    return replace(host, claims=((claim,),))


class LiveClaims:
    """Places the pods of a live cluster as claims, and books them in `cluster`."""

    def __init__(self, cluster: Cluster, *, seed: int) -> None:
        """Pods that are booked already stay: they are no claims."""
        self._cluster = cluster
        nodes = list(cluster.nodes.values())
        self._stock = StockScheduler(
            [
                NodeClaims(each.inventory, list(map(gpu_state, each.inventory.devices, each.loads)))
                for each in nodes
            ],
            free=[(each.cpu_free, each.memory_free) for each in nodes],
            seed=seed,
        )

    def fits(self, need: PodNeed) -> bool:
        return self._stock.choose(_live(need)) is not None

    def place(self, need: PodNeed, counts: Counts) -> UnplacedPod | None:
        """Place and book one pod; return why it fits nowhere."""
        asked = _live(need)
        begun = perf_counter_ns()
        row = self._stock.choose(asked)
        found = None if row is None else self._stock.nodes[row].find(asked.claims)
        counts.decided_ns.append(perf_counter_ns() - begun)
        if row is None or found is None:
            return self._refused(need, asked)
        self._stock.reserve(row, asked, found)
        self._cluster.book(_booking(need, self._stock.nodes[row].node, found))
        counts.placed += 1
        return None

    def _refused(self, need: PodNeed, asked: ClaimPod) -> UnplacedPod:
        reasons = {
            each.node.name: _NO_DEVICES if self._stock.has_host(row, asked) else _NO_HOST
            for row, each in enumerate(self._stock.nodes)
        }
        most = Counter(reasons.values()).most_common()
        example = next((name for name, why in reasons.items() if why == most[0][0]), "")
        return UnplacedPod(str(need), dict(most), f"{example}: {most[0][0]}" if most else "")


_NO_HOST: Final = "too little CPU or memory left"
_NO_DEVICES: Final = "no devices of its pool serve the claims"


def _live(need: PodNeed) -> ClaimPod:
    return ClaimPod(
        cpu_milli=need.cpu_milli, memory_bytes=need.memory_bytes, claims=claims_of(need)
    )


def _booking(need: PodNeed, node: NodeInventory, found: Sequence[Allocated]) -> PodBooking:
    """Return what the shares of a pod's claims use.

    A claim is held as long as its pod: all containers count at once.
    """
    devices = {each.uuid: each for each in node.devices}
    containers = []
    for number, wanted in enumerate(need.containers):
        its = [each for each in found if each.claim == number]
        parts = tuple(_part(each, devices[each.device.part.uuid]) for each in its)
        containers.append(
            PlacedContainer(
                name=wanted.name, devices=parts, place=wanted.place, mode=its[0].request.mode
            )
        )
    return PodBooking(
        uid=need.uid,
        node=node.name,
        cpu_milli=need.cpu_milli,
        memory_bytes=need.memory_bytes,
        containers=tuple(containers),
    )


def _part(allocated: Allocated, device: NodeDevice) -> PlacedDevice:
    memory = booked_bytes(allocated, gpu_state(device))
    place = allocated.device.part.slice
    guarantee = 0
    if place is not None:
        profiles = device.mig.profiles if device.mig else ()
        guarantee = sum(
            part_of_time(each, device.mig) for each in profiles if each.name == place.profile
        )
    elif allocated.request.compute is not None:
        guarantee = allocated.consumed[COMPUTE_CAPACITY] * _PERCENT
    return PlacedDevice(device.uuid, memory, guarantee, place)

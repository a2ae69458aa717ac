# SPDX-License-Identifier: Apache-2.0
"""kube-scheduler without an extender: places pods of traces and live clusters as claims.

The node is chosen by kube-scheduler's default scores of CPU and memory: it has none for devices.
Not modelled: other filters and scores, and a pool that is late.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from random import Random
from time import perf_counter_ns
from typing import Final

import msgspec
import numpy as np

from allotment.agent.dra.devices import DeviceType
from allotment.dialects.own.resource_claims import COMPUTE_CAPACITY
from allotment.model.clusters import (
    NodeDevice,
    NodeInventory,
    PlacedContainer,
    PlacedDevice,
    PodBooking,
    PodNeed,
)
from allotment.model.quantities import MemoryAmount
from allotment.model.requests import Constraints, ModelRule
from allotment.model.structs import replace
from allotment.placement.cluster.arrays import BoolArray, IntArray
from allotment.placement.cluster.cluster import Cluster
from allotment.placement.policies import make
from allotment.placement.search import slice_guarantee
from allotment.simulate.claims import (
    PERCENT,
    Allocated,
    ClaimRequest,
    Claims,
    NodeClaims,
    booked_bytes,
    claims_of,
    gpu_state,
)
from allotment.simulate.csv_files import MILLI, TraceNode, TracePod
from allotment.simulate.outcomes import UnplacedPod
from allotment.simulate.placers import MIB, ArrayPlacer, Spot, inventory_of
from allotment.simulate.replay import Counts

_ALL_NODES: Final = 100
"""kube-scheduler looks for this many nodes that fit, or for a percentage of all (schedule_one.go,
`numFeasibleNodesToFind`)."""
_MOST_SCORE: Final = 100


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
            slice_guarantee(each, device.mig) for each in profiles if each.name == place.profile
        )
    elif allocated.request.compute is not None:
        guarantee = allocated.consumed[COMPUTE_CAPACITY] * PERCENT
    return PlacedDevice(device.uuid, memory, guarantee, place)

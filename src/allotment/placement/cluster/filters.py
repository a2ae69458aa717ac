# SPDX-License-Identifier: Apache-2.0
"""Nodes that a search may find room on, for pods with constraints beyond the arrays.

The filter is a necessary condition: an excluded node has no room, but an included one may have none
either.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from allotment.model.clusters import NodeDevice, NodeInventory, PodBooking, PodNeed, WantedContainer
from allotment.model.compute import WHOLE
from allotment.model.mig import MigRequest
from allotment.model.modes import traits_of
from allotment.model.pods import ContainerKind
from allotment.model.requests import Constraints, Request
from allotment.placement.cluster.arrays import Arrays, BoolArray, IntArray, PodShape
from allotment.placement.constraints import unsuited
from allotment.placement.judge import in_each_mode, is_selected
from allotment.placement.views import described_device, one_slice_of

_MOST_KEPT = 4096


def is_plain(need: PodNeed) -> bool:
    """True if the arrays cover the whole request."""
    if not need.containers:
        return True
    if len(need.containers) > 1:
        return False
    request = need.containers[0].request
    wanted = request.constraints
    return not (
        request.may_oversubscribe
        or request.other_modes
        or request.selectors
        or wanted.uuids
        or wanted.not_uuids
        or wanted.affinity
        or wanted.anti_affinity
        or wanted.exclusion
        or wanted.is_alone
        or (request.count > 1 and (wanted.same_numa or wanted.needs_nvlink))
    )


def largest(need: PodNeed) -> WantedContainer | None:
    """The container that represents the pod; None: it asks for no device."""
    return max(need.containers, key=_size, default=None)


def _size(wanted: WantedContainer) -> tuple[float, float, int]:
    request = wanted.request
    memory = request.memory
    part = float(memory.part) if memory.part is not None else 0.0
    # Parts count as parts of a device, bytes as bytes: a mix of both is rare.
    return (
        request.count * max(request.compute.guarantee / WHOLE, part),
        request.count * (memory.size_bytes or 0),
        -wanted.place,
    )


class PodShapes:
    """Makes `PodShape`s, with the cluster's model names."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays
        self._models: dict[tuple[Constraints, tuple[str, ...]], tuple[int, frozenset[str]]] = {}

    def of(self, need: PodNeed, request: Request | None = None) -> PodShape:
        """The shape of one container's request; None: of the largest container's."""
        if request is None:
            wanted = largest(need)
            if wanted is None:
                return PodShape(cpu_milli=need.cpu_milli, memory_bytes=need.memory_bytes)
            request = wanted.request
        traits = traits_of(request.mode)
        return PodShape(
            cpu_milli=need.cpu_milli,
            memory_bytes=need.memory_bytes,
            count=request.count,
            guarantee=request.compute.guarantee,
            device_memory_bytes=request.memory.size_bytes or 0,
            device_memory_part=request.memory.part,
            floor=request.floor if traits.takes_turns else 0,
            models=self._names(request),
            mode=request.mode,
            slice=one_slice_of(request) if traits.is_slice else MigRequest(),
        )

    def _names(self, request: Request) -> frozenset[str] | None:
        wanted = request.constraints
        if not (wanted.models or wanted.not_models or request.selectors):
            return None
        names = self._arrays.model_names
        # Only constraints on models count here, so the cache stays small.
        rules = Constraints(models=wanted.models, not_models=wanted.not_models)
        selectors = tuple(selector for selector in request.selectors if not _is_uuid(selector))
        if len(selectors) < len(request.selectors):
            selectors = ()  # a UUID beside them may be of any model
        key = rules, selectors
        known = self._models.get(key)
        version = self._arrays.names_version
        if known is None or known[0] != version:
            if len(self._models) >= _MOST_KEPT:
                self._models.clear()
            known = version, _matching(names, rules, selectors, request)
            self._models[key] = known
        return known[1]


def _is_uuid(selector: str) -> bool:
    return selector.strip().lower().startswith(("gpu-", "mig-"))


def _matching(
    names: Sequence[str], rules: Constraints, selectors: tuple[str, ...], request: Request
) -> frozenset[str]:
    asked = Request(request.memory, selectors=selectors)
    devices = (described_device(NodeDevice(uuid="", model=name, memory_bytes=0)) for name in names)
    return frozenset(
        device.name
        for device in devices
        if not unsuited(device, rules) and is_selected(device, asked)
    )


_NOWHERE: frozenset[str] = frozenset()


class Short(NamedTuple):
    """Rows with too few places for shares, and of which size."""

    least: IntArray
    """By row: index of the smallest container with too few places; -1: enough places."""
    need_have: IntArray
    """Needed and existing places of its size, by row."""


class Filter:
    """Index of tags and devices by node."""

    def __init__(self, arrays: Arrays, kinds: PodShapes) -> None:
        self._arrays = arrays
        self._kinds = kinds
        self._homes: dict[str, frozenset[str]] = {}
        """The nodes of each device: one, unless two nodes report the same device."""
        self._reported_twice: set[str] = set()
        self._tagged: dict[tuple[str, str], Counter[str]] = {}
        """By tag, what tag it is first, how many containers with it are on each node."""

    def put(self, node: NodeInventory) -> None:
        for device in node.devices:
            self._move(device.uuid, self._homes.get(device.uuid, _NOWHERE) | {node.name})

    def drop(self, node: NodeInventory) -> None:
        for device in node.devices:
            self._move(device.uuid, self._homes.get(device.uuid, _NOWHERE) - {node.name})

    def reported_twice(self) -> dict[str, frozenset[str]]:
        return {uuid: self._homes[uuid] for uuid in self._reported_twice}

    def _move(self, uuid: str, nodes: frozenset[str]) -> None:
        if nodes:
            self._homes[uuid] = nodes
        else:
            self._homes.pop(uuid, None)
        if len(nodes) > 1:
            self._reported_twice.add(uuid)
        else:
            self._reported_twice.discard(uuid)

    def tag(self, booking: PodBooking, *, sign: int) -> None:
        for container in booking.containers:
            for key in _tags(container.affinity, container.exclusion):
                counts = self._tagged.setdefault(key, Counter())
                counts[booking.node] += sign
                if not counts[booking.node]:
                    del counts[booking.node]
                    if not counts:
                        del self._tagged[key]

    def nodes_with(self, affinity: str) -> Counter[str]:
        return self._tagged.get(("affinity", affinity), Counter())

    def may_fit(self, need: PodNeed, rows: IntArray) -> BoolArray:
        """True for rows that a search may find room on."""
        arrays = self._arrays
        fits: BoolArray = (arrays.cpu_free[rows] >= need.cpu_milli) & (
            arrays.memory_free[rows] >= need.memory_bytes
        )
        return fits & (self.lacking(need, rows) < 0) & (self.short(need, rows).least < 0)

    def lacking(self, need: PodNeed, rows: IntArray) -> IntArray:
        """Index of the first container that finds no room; -1: none.

        Equal containers are checked once.
        """
        arrays = self._arrays
        lacking = np.full(len(rows), -1, dtype=np.int64)
        looked: set[Request] = set()
        for number, wanted in enumerate(need.containers):
            request = wanted.request
            if request in looked:
                continue
            looked.add(request)
            enough = np.zeros(len(rows), dtype=np.bool_)
            for each in in_each_mode(request):
                there = self._able(need, each, rows)
                enough |= _enough(there, arrays.numa[rows], each)
            lacking[(lacking < 0) & ~enough] = number
        return lacking

    def _able(self, need: PodNeed, request: Request, rows: IntArray) -> IntArray:
        """Number of parts of a request that each device may serve, by row and column."""
        arrays = self._arrays
        kind = self._kinds.of(need, request)
        suits = self._suits(request, rows)
        if traits_of(request.mode).is_slice:
            return np.where(suits, arrays.slices(kind, rows), 0)
        able = arrays.matching(kind, rows) & (arrays.free[rows] >= kind.guarantee)
        able &= arrays.unguaranteed[rows] >= kind.floor
        if not request.may_oversubscribe:
            able &= arrays.free_memory[rows] >= arrays.memory_need(kind, rows)
        return (able & suits).astype(np.int64)

    def short(self, need: PodNeed, rows: IntArray) -> Short:
        """Rows with too little room for all shares that are in use at the same time.

        Each share takes at least one place of its size, so the number of places bounds the shares.
        This needs no search.
        """
        arrays = self._arrays
        short = Short(np.full(len(rows), -1, dtype=np.int64), np.zeros((2, len(rows)), np.int64))
        numbers = [
            number
            for number, each in enumerate(need.containers)
            if each.kind is not ContainerKind.INIT
            and traits_of(each.request.mode).takes_turns
            and not each.request.other_modes
            and not each.request.may_oversubscribe
        ]
        together = Counter(need.containers[number].request for number in numbers)
        if len(numbers) < 2:  # noqa: PLR2004 - one, and another one
            return short
        firsts = {need.containers[number].request: number for number in reversed(numbers)}
        for least, number in firsts.items():
            larger = [each for each in together if _is_as_large(each, least)]
            most = sum(together[each] for each in larger)
            kind = self._kinds.of(need, least)
            places = np.where(arrays.gpu_there[rows], most, 0)
            for free, wanted in (
                (arrays.free_memory[rows], arrays.memory_need(kind, rows)),
                (arrays.free[rows], np.full(places.shape, float(kind.guarantee))),
            ):
                parts = free.astype(np.int64) // np.maximum(1, wanted.astype(np.int64))
                places = np.minimum(places, np.where(wanted > 0, parts, most))
            there = places.sum(axis=1)
            wanted_there = sum(each.count * together[each] for each in larger)
            lacks = (short.least < 0) & (there < wanted_there)
            short.least[lacks] = number
            short.need_have[0, lacks] = wanted_there
            short.need_have[1, lacks] = there[lacks]
        return short

    def _suits(self, request: Request, rows: IntArray) -> BoolArray:
        wanted = request.constraints
        idle = self._arrays.idle[rows]
        suits = np.ones_like(idle)
        if wanted.is_alone or traits_of(request.mode).is_exclusive:
            suits &= idle
        for key in _tags(wanted.affinity, wanted.exclusion):
            suits &= idle | self._on(self._tagged.get(key, ()), rows)
        if wanted.uuids:
            homes = (self._homes.get(uuid, _NOWHERE) for uuid in wanted.uuids)
            suits &= self._on(_NOWHERE.union(*homes), rows)
        return suits

    def _on(self, names: Iterable[str], rows: IntArray) -> BoolArray:
        row = self._arrays.row
        there = np.zeros(len(self._arrays), dtype=np.bool_)
        there[[row[name] for name in names if name in row]] = True
        on: BoolArray = there[rows][:, None]
        return on


def _is_as_large(one: Request, other: Request) -> bool:
    """True if it takes at least as much memory and time of any device."""
    mine, others = one.memory, other.memory
    if (mine.part is None) != (others.part is None):
        return False
    is_large = (mine.size_bytes or 0) >= (others.size_bytes or 0)
    if mine.part is not None and others.part is not None:
        is_large = mine.part >= others.part
    return is_large and one.compute.guarantee >= other.compute.guarantee


def _tags(affinity: str, exclusion: str | None) -> list[tuple[str, str]]:
    """Tags of which a device has all, unless it is idle."""
    both = (("affinity", affinity), ("exclusion", exclusion))
    return [(name, tag) for name, tag in both if tag]


def _enough(able: IntArray, numa: NDArray[np.int16], request: Request) -> BoolArray:
    enough: BoolArray = able.sum(axis=1) >= request.count
    if request.count == 1 or not request.constraints.same_numa:
        return enough
    together = np.zeros_like(enough)
    for node in np.unique(numa):
        together |= np.where(numa == node, able, 0).sum(axis=1) >= request.count
    return enough & together

# SPDX-License-Identifier: Apache-2.0
"""Which nodes a search may find room on, for pods with wishes that arrays alone do not know.

Necessary and never more: a node that is left out here has no room for the pod, and one that is left
in may have none either.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from allotment.model.clusters import NodeInventory, PodBooking, PodNeed
from allotment.model.pods import ContainerKind
from allotment.model.requests import EXCLUSIVE, MIG, SOFT, Request
from allotment.placement.arrays import Arrays, BoolArray, IntArray
from allotment.placement.constraints import exclusion_of
from allotment.placement.kinds import Kinds
from allotment.placement.open_modes import in_each_mode

__all__ = ["Filter", "Short"]

_NOWHERE: frozenset[str] = frozenset()


class Short(NamedTuple):
    """Of which rows are short of places for shares, and of what size."""

    least: IntArray
    """By row: the smallest of the containers for which there are too few, by its place among all;
    -1: there are enough."""
    need_have: IntArray
    """How many places of its size are needed, and how many there are, by row."""


class Filter:
    """Knows on which nodes which tags and devices are."""

    def __init__(self, arrays: Arrays, kinds: Kinds) -> None:
        self._arrays = arrays
        self._kinds = kinds
        self._homes: dict[str, frozenset[str]] = {}
        """On which nodes each device is: on one, unless two nodes tell of the same."""
        self._told_twice: set[str] = set()
        self._tagged: dict[tuple[str, str], Counter[str]] = {}
        """By tag, what tag it is first, how many containers with it are on each node."""

    def put(self, node: NodeInventory) -> None:
        """Hear of a node's devices."""
        for device in node.devices:
            self._move(device.uuid, self._homes.get(device.uuid, _NOWHERE) | {node.name})

    def drop(self, node: NodeInventory) -> None:
        """Hear that a node's devices are gone."""
        for device in node.devices:
            self._move(device.uuid, self._homes.get(device.uuid, _NOWHERE) - {node.name})

    def told_twice(self) -> dict[str, frozenset[str]]:
        """Return the devices of which more than one node tells, by UUID, and these nodes."""
        return {uuid: self._homes[uuid] for uuid in self._told_twice}

    def _move(self, uuid: str, nodes: frozenset[str]) -> None:
        if nodes:
            self._homes[uuid] = nodes
        else:
            self._homes.pop(uuid, None)
        if len(nodes) > 1:
            self._told_twice.add(uuid)
        else:
            self._told_twice.discard(uuid)

    def tag(self, booking: PodBooking, *, sign: int) -> None:
        """Count a pod's tags; `sign` -1: no longer."""
        for container in booking.containers:
            for key in _tags(container.affinity, container.exclusion):
                counts = self._tagged.setdefault(key, Counter())
                counts[booking.node] += sign
                if not counts[booking.node]:
                    del counts[booking.node]
                    if not counts:
                        del self._tagged[key]

    def nodes_with(self, affinity: str) -> Counter[str]:
        """Return the nodes with containers of an affinity tag."""
        return self._tagged.get(("affinity", affinity), Counter())

    def may_fit(self, need: PodNeed, rows: IntArray) -> BoolArray:
        """Say which rows a search may find room on."""
        arrays = self._arrays
        fits: BoolArray = (arrays.cpu_free[rows] >= need.cpu_milli) & (
            arrays.memory_free[rows] >= need.memory_bytes
        )
        return fits & (self.lacking(need, rows) < 0) & (self.short(need, rows).least < 0)

    def lacking(self, need: PodNeed, rows: IntArray) -> IntArray:
        """Say which container, by its place among all, is the first to find no room; -1: none.

        Containers that ask for the same are looked at once.
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
        """Return how many parts of a request each device may serve, by row and column."""
        arrays = self._arrays
        kind = self._kinds.of_request(need, request)
        suits = self._suits(request, rows)
        if request.mode == MIG:
            return np.where(suits, arrays.slices(kind, rows), 0)
        able = arrays.matching(kind, rows) & (arrays.free[rows] >= kind.guarantee)
        if not request.may_oversubscribe:
            able &= arrays.free_memory[rows] >= arrays.memory_need(kind, rows)
        return (able & suits).astype(np.int64)

    def short(self, need: PodNeed, rows: IntArray) -> Short:
        """Say which rows have too little room for all shares that are in use at the same time.

        Of those that are at least as large as one of them, each takes a place of its size at least:
        of such places there have to be as many. No search is needed to see that.
        """
        arrays = self._arrays
        short = Short(np.full(len(rows), -1, dtype=np.int64), np.zeros((2, len(rows)), np.int64))
        numbers = [
            number
            for number, each in enumerate(need.containers)
            if each.kind is not ContainerKind.INIT
            and each.request.mode == SOFT
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
            kind = self._kinds.of_request(need, least)
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
        """Say which devices may be right for a request's wishes, by row and column."""
        wanted = request.constraints
        idle = self._arrays.idle[rows]
        suits = np.ones_like(idle)
        if wanted.is_alone or request.mode == EXCLUSIVE:
            suits &= idle
        for key in _tags(wanted.affinity, wanted.exclusion):
            suits &= idle | self._on(self._tagged.get(key, ()), rows)
        if wanted.uuids:
            homes = (self._homes.get(uuid, _NOWHERE) for uuid in wanted.uuids)
            suits &= self._on(_NOWHERE.union(*homes), rows)
        return suits

    def _on(self, names: Iterable[str], rows: IntArray) -> BoolArray:
        """Say which rows are of these nodes, as one column."""
        row = self._arrays.row
        there = np.zeros(len(self._arrays), dtype=np.bool_)
        there[[row[name] for name in names if name in row]] = True
        on: BoolArray = there[rows][:, None]
        return on


def _is_as_large(one: Request, other: Request) -> bool:
    """Does it take as much of any device, of its memory and of its time?"""
    mine, others = one.memory, other.memory
    if (mine.part is None) != (others.part is None):
        return False
    is_large = (mine.size_bytes or 0) >= (others.size_bytes or 0)
    if mine.part is not None and others.part is not None:
        is_large = mine.part >= others.part
    return is_large and one.compute.guarantee >= other.compute.guarantee


def _tags(affinity: str, exclusion: str | None) -> list[tuple[str, str]]:
    """Return the tags by which a device is either idle or has them."""
    both = (("affinity", affinity), ("exclusion", exclusion_of(exclusion)))
    return [(name, tag) for name, tag in both if tag]


def _enough(able: IntArray, numa: NDArray[np.int16], request: Request) -> BoolArray:
    """Say on which rows there are as many devices, or slices of them, as are asked for."""
    enough: BoolArray = able.sum(axis=1) >= request.count
    if request.count == 1 or not request.constraints.same_numa:
        return enough
    together = np.zeros_like(enough)
    for node in np.unique(numa):
        together |= np.where(numa == node, able, 0).sum(axis=1) >= request.count
    return enough & together

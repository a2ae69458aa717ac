# SPDX-License-Identifier: Apache-2.0
"""A cluster's nodes, pods and totals by model: the one place that changes them.

Events may arrive in any order and lead to the same state. `Node` has exact free room and `Arrays` a
copy of it for all nodes. `rank` uses the arrays to filter and order, `place` asks the node; a
property test holds both to equal answers.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np

from allotment.model.clusters import NodeDevice, NodeInventory, PodBooking, PodNeed
from allotment.model.mig import MigLayout
from allotment.model.modes import has_slices, traits_of
from allotment.model.pods import PodUid
from allotment.placement.booking import Load
from allotment.placement.cluster.arrays import IntArray, LinkArray
from allotment.placement.cluster.ranker import ClusterIndex, Ranker, Ranking
from allotment.placement.constraints import link_score
from allotment.placement.mig.cuts import NOTHING
from allotment.placement.nodes import Node
from allotment.placement.selections import Effort


class ModelTotals(NamedTuple):
    """Sums over the devices of one model. Bytes; basis points of their time."""

    devices: int = 0
    memory: int = 0
    memory_allocated: int = 0
    memory_fragmented: int = 0
    """Rest on devices in partial use, or devices that take no share: no whole one is available."""
    guarantee: int = 0
    guarantee_allocated: int = 0
    guarantee_fragmented: int = 0
    idle: int = 0
    """Healthy devices without a share."""
    whole: int = 0
    """Devices that one share has alone."""
    shares: int = 0
    slices: int = 0
    """MIG slices of pods."""


class NodeTotals(NamedTuple):
    """The same by node, in one step: `sums` has a row for each of `names`."""

    names: list[str]
    sums: IntArray


class Totals:
    """Sums over all nodes, updated with each change, so reading them is cheap."""

    def __init__(self) -> None:
        self._models: defaultdict[str, IntArray] = defaultdict(_no_totals)
        """By model, the sums in the order of `ModelTotals`."""
        self._counted: dict[str, IntArray] = {}
        """By node, what each of its devices adds to the sums."""

    def by_model(self) -> dict[str, ModelTotals]:
        return {model: ModelTotals(*sums.tolist()) for model, sums in sorted(self._models.items())}

    def by_node(self) -> NodeTotals:
        names, counted = list(self._counted), list(self._counted.values())
        ends = np.cumsum([len(each) for each in counted], dtype=np.int64)
        until = np.vstack([_no_totals(1), np.cumsum(np.concatenate(counted or [_no_totals(0)]), 0)])
        sums: IntArray = until[ends] - until[np.concatenate([[0], ends[:-1]]).astype(np.int64)]
        return NodeTotals(names, sums)

    def put(self, node: Node) -> None:
        self._counted[node.inventory.name] = _no_totals(len(node.inventory.devices))
        self.update(node, range(len(node.inventory.devices)))

    def update(self, node: Node, columns: Iterable[int]) -> None:
        counted = self._counted[node.inventory.name]
        for column in columns:
            device = node.inventory.devices[column]
            totals = np.array(_totals_of(device, node.loads[column]))
            self._models[device.model] += totals - counted[column]
            counted[column] = totals

    def drop(self, node: Node) -> None:
        devices = node.inventory.devices
        for device, each in zip(devices, self._counted.pop(node.inventory.name), strict=True):
            sums = self._models[device.model]
            sums -= each
            if not sums[0]:
                del self._models[device.model]


def _no_totals(*rows: int) -> IntArray:
    return np.zeros((*rows, len(ModelTotals._fields)), dtype=np.int64)


def _totals_of(device: NodeDevice, load: Load) -> ModelTotals:
    whole = traits_of(load.mode).is_exclusive
    allotted = load.fixed + load.oversubscribed
    memory = device.memory_bytes if whole else min(allotted, device.memory_bytes)
    guaranteed = device.guarantee if whole else min(load.guarantee, device.guarantee)
    is_broken = load.shares > 0 or bool(device.problem)
    return ModelTotals(
        devices=1,
        memory=device.memory_bytes,
        memory_allocated=memory,
        memory_fragmented=device.memory_bytes - memory if is_broken else 0,
        guarantee=device.guarantee,
        guarantee_allocated=guaranteed,
        guarantee_fragmented=device.guarantee - guaranteed if is_broken else 0,
        idle=not is_broken,
        whole=whole and load.shares > 0,
        shares=load.shares,
        slices=sum(load.slices.values()),
    )


class Cluster(ClusterIndex):
    """All nodes with devices, and their bookings; this class changes them.

    Not thread-safe. Raises `UsageError` for an unknown policy.
    """

    def __init__(
        self,
        *,
        node_policies: Sequence[str] = ("fragmentation",),
        device_policies: Sequence[str] = ("fragmentation",),
    ) -> None:
        super().__init__(node_policies=node_policies, device_policies=device_policies)
        self._homeless: dict[str, dict[PodUid, PodBooking]] = {}
        """Bookings on nodes that are not there."""
        self._changes = count(1)
        self._versions: dict[str, int] = {}
        self._totals = Totals()
        self._ranker = Ranker(self)

    # ---- events ----------------------------------------------------------------------------------

    def put(self, node: NodeInventory) -> None:
        """Add or update a node; its bookings stay."""
        known = self.nodes.get(node.name)
        if known is None:
            known = self.nodes[node.name] = Node(node)
            for booking in self._homeless.pop(node.name, {}).values():
                known.book(booking)
        elif known.inventory == node:
            return
        else:
            self._forget(known)
            known.put(node)
        self.changed(node.name)
        self._totals.put(known)
        self.filter.put(node)
        self.arrays.put(
            node.name,
            [known.room(column) for column in range(len(node.devices))],
            cpu_free=known.cpu_free,
            memory_free=known.memory_free,
            links=_links(node),
        )

    def drop(self, name: str) -> None:
        """Remove a node; its bookings are kept in case it returns."""
        node = self.nodes.pop(name, None)
        if node is None:
            return
        if node.bookings:
            self._homeless[name] = dict(node.bookings)
        del self._versions[name]
        self._forget(node)
        self.arrays.drop(name)

    def book(self, booking: PodBooking) -> None:
        if booking.uid in self.homes:
            self.release(booking.uid)
        self.homes[booking.uid] = booking.node
        self.filter.tag(booking, sign=1)
        node = self.nodes.get(booking.node)
        if node is None:
            self._homeless.setdefault(booking.node, {})[booking.uid] = booking
        else:
            self._write(node, node.book(booking))

    def release(self, uid: PodUid) -> None:
        home = self.homes.pop(uid, None)
        if home is None:
            return
        node = self.nodes.get(home)
        if node is None:
            homeless = self._homeless[home]
            self.filter.tag(homeless.pop(uid), sign=-1)
            if not homeless:
                del self._homeless[home]
            return
        self.filter.tag(node.bookings[uid], sign=-1)
        self._write(node, node.release(uid))

    def changed(self, name: str) -> None:
        """Devices of a node changed, or were booked without a search for free ones."""
        if name in self.nodes:
            self._versions[name] = next(self._changes)

    def arrived(self, need: PodNeed) -> None:
        """Report one more pod to policies that learn the mix, once for each pod."""
        kind = self.shapes.of(need)
        if traits_of(kind.mode).is_slice:
            return  # the value of slices does not depend on the mix
        for policy in self.policies.values():
            policy.arrived(kind)

    # ---- questions -------------------------------------------------------------------------------

    def rank(
        self,
        need: PodNeed,
        names: Collection[str] | None = None,
        *,
        most: int | None = None,
        effort: Effort | None = None,
    ) -> Ranking:
        """The nodes that fit a pod, best first, at most `most`; and the refusals of the others.

        `names`: only these nodes. `effort`: the bound of searches on all nodes together; once
        spent, a node is refused as undecided.
        """
        return self._ranker.rank(need, names, most=most, effort=effort)

    def totals(self) -> dict[str, ModelTotals]:
        return self._totals.by_model()

    def totals_by_node(self) -> NodeTotals:
        return self._totals.by_node()

    def reported_twice(self) -> dict[str, frozenset[str]]:
        """Devices reported by several nodes, by UUID, with these nodes.

        One report is wrong or under an old name of the machine. The right one is unknown, so each
        node counts with the device.
        """
        return self.filter.reported_twice()

    def booking(self, uid: PodUid) -> PodBooking | None:
        home = self.homes.get(uid)
        if home is None:
            return None
        node = self.nodes.get(home)
        return node.bookings[uid] if node else self._homeless[home][uid]

    def version(self, name: str) -> int:
        """A number that changes when the bookings of this node may not fit any more.

        It stays the same when a pod is booked on devices that `place` found, or released: neither
        takes room from another pod that is booked. -1: unknown node.
        """
        return self._versions.get(name, -1)

    def node(self, name: str) -> NodeInventory | None:
        exact = self.nodes.get(name)
        return exact.inventory if exact else None

    def check_invariants(self) -> None:
        self.arrays.check_invariants()
        numbers: Counter[int] = Counter()
        layouts: dict[int, MigLayout] = {}
        for name, node in self.nodes.items():
            node.check_invariants()
            row = self.arrays.row[name]
            for column in range(len(node.hardware.devices)):
                room = node.room(column)
                written = (
                    self.arrays.free[row, column],
                    self.arrays.unguaranteed[row, column],
                    self.arrays.free_memory[row, column],
                )
                if written != (max(0, room.free), room.free + room.kept, max(0, room.free_memory)):
                    raise AssertionError(name, column, written, room)
                number = int(self.arrays.cut[row, column])
                is_open = room.layout is not None and has_slices(room.modes)
                if (number != NOTHING) != is_open:
                    raise AssertionError(name, column, number, room)
                if room.layout is not None and is_open:
                    numbers[number] += 1
                    layouts[number] = room.layout
        self.arrays.cuts.check_invariants(numbers, layouts)

    # ---- inside ----------------------------------------------------------------------------------

    def _forget(self, node: Node) -> None:
        self._totals.drop(node)
        self.filter.drop(node.inventory)

    def _write(self, node: Node, columns: Collection[int]) -> None:
        row = self.arrays.row[node.inventory.name]
        if columns and node.view.may_overflow:
            # Host memory is one budget for all of them.
            columns = range(len(node.hardware.devices))
        rooms = {column: node.room(column) for column in columns}
        self.arrays.update(row, rooms, cpu_free=node.cpu_free, memory_free=node.memory_free)
        if columns:
            self._totals.update(node, columns)


def _links(node: NodeInventory) -> LinkArray | None:
    if not node.links:
        return None
    uuids = [device.uuid for device in node.devices]
    return np.array(
        [
            [0 if one == other else link_score(node.links, one, other) for other in uuids]
            for one in uuids
        ],
        dtype=np.float32,
    )

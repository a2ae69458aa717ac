# SPDX-License-Identifier: Apache-2.0
"""The cluster: nodes, what pods have on them, and where one more pod goes.

One object, changed by single events (a node came or changed, a pod was booked or released) that may
come in any order: what is booked on a node or device of which nothing is known is remembered until
it comes, and what is known at the end does not depend on the order. Everything else only reads:
`ranker`, which nodes do, and `refusing`, why others do not.

Two things know what is free: `Node`, exactly, and `Arrays`, for all nodes at once, written from it.
`rank` asks the arrays wherever they know all that a pod asks for, and else lets them leave out
nodes and say which ones to look at first; `place` always asks the node. Both give the same answers
(a property test holds them to it).
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from allotment.model.clusters import NodeInventory, NodeRejection, PodBooking, PodNeed
from allotment.model.mig import MigLayout
from allotment.model.pods import PodUid
from allotment.model.requests import MIG, Request
from allotment.placement.arrays import Arrays, FloatArray, Kind, LinkArray
from allotment.placement.constraints import link_score
from allotment.placement.cuts import NOTHING
from allotment.placement.filters import Filter
from allotment.placement.kinds import Kinds, largest
from allotment.placement.nodes import Node
from allotment.placement.open_modes import in_each_mode, is_open
from allotment.placement.ordering import DeviceChain
from allotment.placement.policies import Policy, make
from allotment.placement.ranker import Ranker
from allotment.placement.rankings import Ranking, Refusals
from allotment.placement.refusals import unknown_node
from allotment.placement.selections import Effort
from allotment.placement.there import There
from allotment.placement.totals import ModelTotals, Totals

__all__ = ["Cluster", "ModelTotals", "Ranking", "Refusals"]


class Cluster:
    """All nodes with devices, and what is booked on them.

    Not for several threads at a time. Raises `UsageError` for a policy that is not there.
    """

    def __init__(
        self,
        *,
        node_policies: Sequence[str] = ("fragmentation",),
        device_policies: Sequence[str] = ("fragmentation",),
    ) -> None:
        self.arrays = Arrays()
        self._policies: dict[str, Policy] = {}
        self._node_policies = tuple(node_policies)
        self._device_policies = tuple(device_policies)
        for name in (*node_policies, *device_policies):
            self._policy(name)
        self._kinds = Kinds(self.arrays)
        self._nodes: dict[str, Node] = {}
        self._homes: dict[PodUid, str] = {}
        self._homeless: dict[str, dict[PodUid, PodBooking]] = {}
        """Of nodes that are not there."""
        self._filter = Filter(self.arrays, self._kinds)
        self._totals = Totals()
        there = There(
            nodes=self._nodes,
            arrays=self.arrays,
            kinds=self._kinds,
            filter=self._filter,
            homes=self._homes,
        )
        self._ranker = Ranker(
            there,
            costs=self._costs,
            place=lambda need, node, effort: self.place(need, node, effort=effort),
        )

    # ---- events ----------------------------------------------------------------------------------

    def put(self, node: NodeInventory) -> None:
        """Take a node that is new, or is now like this; what is booked on it stays booked."""
        known = self._nodes.get(node.name)
        if known is None:
            known = self._nodes[node.name] = Node(node)
            for booking in self._homeless.pop(node.name, {}).values():
                known.book(booking)
        elif known.inventory == node:
            return
        else:
            self._forget(known)
            known.put(node)
        self._totals.put(known)
        self._filter.put(node)
        self.arrays.put(
            node.name,
            [known.room(column) for column in range(len(node.devices))],
            cpu_free=known.cpu_free,
            memory_free=known.memory_free,
            links=_links(node),
        )

    def drop(self, name: str) -> None:
        """Forget a node; what is booked there is remembered, should it come back."""
        node = self._nodes.pop(name, None)
        if node is None:
            return
        if node.bookings:
            self._homeless[name] = dict(node.bookings)
        self._forget(node)
        self.arrays.drop(name)

    def book(self, booking: PodBooking) -> None:
        """Book a pod, in place of what it had before."""
        self.release(booking.uid)
        self._homes[booking.uid] = booking.node
        self._filter.tag(booking, sign=1)
        node = self._nodes.get(booking.node)
        if node is None:
            self._homeless.setdefault(booking.node, {})[booking.uid] = booking
        else:
            self._write(node, node.book(booking))

    def release(self, uid: PodUid) -> None:
        """Forget a pod; one that is not booked is let be."""
        home = self._homes.pop(uid, None)
        if home is None:
            return
        node = self._nodes.get(home)
        if node is None:
            there = self._homeless[home]
            self._filter.tag(there.pop(uid), sign=-1)
            if not there:
                del self._homeless[home]
            return
        self._filter.tag(node.bookings[uid], sign=-1)
        self._write(node, node.release(uid))

    def arrived(self, need: PodNeed) -> None:
        """Tell policies that learn who comes of one more pod, once for each."""
        kind = self._kinds.of(need)
        if kind.mode == MIG:
            return  # what slices are worth is no matter of who comes
        for policy in self._policies.values():
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
        """Return the nodes where a pod can be, best first, at most so many; and who refuses it.

        `names`: of these nodes alone. `effort`: for searches on all nodes together, and for those
        of other questions that this is a part of; where it is spent, a node is refused as
        undecided.
        """
        return self._ranker.rank(need, names, most=most, effort=effort)

    def place(
        self,
        need: PodNeed,
        node: str,
        *,
        without: Collection[PodUid] = (),
        effort: Effort | None = None,
    ) -> PodBooking | NodeRejection:
        """Decide on which of a node's devices a pod goes, or say why on none.

        `without`: as if these pods were gone. What the pod itself has already is not in its way.
        `effort`: what is left of that for a question of which this is a part.
        """
        there = self._nodes.get(node)
        if there is None:
            return unknown_node(node)
        is_as_arrays = need.uid not in there.bookings and not any(
            uid in there.bookings for uid in without
        )
        chains = [
            self._chain(need, wanted.request, node, is_as_arrays=is_as_arrays)
            for wanted in need.containers
        ]
        return there.place(need, chains, without=without, effort=effort)

    def explain(
        self, need: PodNeed, names: Collection[str] | None = None
    ) -> list[NodeRejection | PodBooking]:
        """Return for each node where on it the pod would go, or why nowhere, by name."""
        return [self.place(need, name) for name in sorted(self._nodes if names is None else names)]

    def totals(self) -> dict[str, ModelTotals]:
        """Return what there is of each model, and what of it is given away."""
        return self._totals.by_model()

    def told_twice(self) -> dict[str, frozenset[str]]:
        """Return the devices of which more than one node tells, by UUID, and these nodes.

        One of them is wrong, or an older name of the same machine. Nobody can know which, so that
        each counts as a node with this device.
        """
        return self._filter.told_twice()

    def booking(self, uid: PodUid) -> PodBooking | None:
        """Return what a pod has; None: nothing."""
        home = self._homes.get(uid)
        if home is None:
            return None
        node = self._nodes.get(home)
        return node.bookings[uid] if node else self._homeless[home][uid]

    def version(self, name: str) -> int:
        """Return a number that is another one once anything on this node has changed; -1: none."""
        row = self.arrays.row.get(name)
        return -1 if row is None else int(self.arrays.version[row])

    def node(self, name: str) -> NodeInventory | None:
        """Return a node as it was put; None: it is not there."""
        there = self._nodes.get(name)
        return there.inventory if there else None

    def check_invariants(self) -> None:
        """Raise AssertionError unless all sums are right and the arrays say the same."""
        numbers: Counter[int] = Counter()
        layouts: dict[int, MigLayout] = {}
        for name, node in self._nodes.items():
            node.check_invariants()
            row = self.arrays.row[name]
            for column in range(len(node.hardware.devices)):
                room = node.room(column)
                written = (self.arrays.free[row, column], self.arrays.free_memory[row, column])
                if written != (max(0, room.free), max(0, room.free_memory)):
                    raise AssertionError(name, column, written, room)
                number = int(self.arrays.cut[row, column])
                is_open = room.layout is not None and MIG in room.modes
                if (number != NOTHING) != is_open:
                    raise AssertionError(name, column, number, room)
                if room.layout is not None and is_open:
                    numbers[number] += 1
                    layouts[number] = room.layout
        self.arrays.cuts.check_invariants(numbers, layouts)

    # ---- inside ----------------------------------------------------------------------------------

    def _policy(self, name: str) -> Policy:
        policy = self._policies.get(name)
        if policy is None:
            policy = self._policies[name] = make(name)
        return policy

    def _forget(self, node: Node) -> None:
        """Take a node out of what is kept by node, as it is before it changes or goes."""
        self._totals.drop(node)
        self._filter.drop(node.inventory)

    def _write(self, node: Node, columns: Collection[int]) -> None:
        row = self.arrays.row[node.inventory.name]
        if columns and node.view.may_overflow:
            # Host memory is one budget for all of them.
            columns = range(len(node.hardware.devices))
        for column in columns:
            self.arrays.set_device(row, column, node.room(column))
        if columns:
            self._totals.update(node, columns)
        self.arrays.set_host(row, cpu_free=node.cpu_free, memory_free=node.memory_free)

    def _costs(self, need: PodNeed, kind: Kind) -> list[FloatArray]:
        """Return the costs of all rows, by each policy of the chain."""
        wanted = largest(need)
        chosen = wanted.request.preferences.node_policies if wanted else ()
        if kind.mode == MIG and not chosen:
            return [self.arrays.slice_costs(kind)]
        return [
            self._policy(name).costs(self.arrays, kind) for name in chosen or self._node_policies
        ]

    def _chain(
        self, need: PodNeed, request: Request, node: str, *, is_as_arrays: bool
    ) -> DeviceChain:
        wishes = request.preferences
        policies = wishes.device_policies or self._device_policies
        ranks: dict[str, Mapping[str, int]] = {}
        if request.other_modes and is_open(request):
            chains = {
                each.mode: self._chain(need, each, node, is_as_arrays=is_as_arrays)
                for each in in_each_mode(request)
            }
            return replace(chains[request.mode], others=chains)
        if is_as_arrays and request.mode != MIG:
            kind = self._kinds.of_request(need, request)
            row = self.arrays.row[node]
            devices = self._nodes[node].hardware.devices
            for name in policies:
                if name in _BY_THEMSELVES and (wishes.weights or len(policies) > 1):
                    continue
                order = self._policy(name).device_order(self.arrays, kind, row)
                ranks[name] = {devices[column].uuid: at for at, column in enumerate(order)}
        return DeviceChain(policies=policies, weights=wishes.weights, ranks=ranks)


_BY_THEMSELVES = frozenset({"binpack", "spread", "numa", "topology"})
"""Policies for devices that `ordering` knows without the arrays."""


def _links(node: NodeInventory) -> LinkArray | None:
    if not node.links:
        return None
    uuids = [each.uuid for each in node.devices]
    return np.array(
        [
            [0 if one == other else link_score(node.links, one, other) for other in uuids]
            for one in uuids
        ],
        dtype=np.float32,
    )

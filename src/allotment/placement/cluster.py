# SPDX-License-Identifier: Apache-2.0
"""The cluster: nodes, what pods have on them, and where one more pod goes.

One object, changed by single events (a node came or changed, a pod was booked or released) that may
come in any order: what is booked on a node or device of which nothing is known is remembered until
it comes, and what is known at the end does not depend on the order. Everything else only reads.

Two things know what is free: `Node`, exactly, and `Arrays`, for all nodes at once, written from it.
`rank` asks the arrays wherever they know all that a pod asks for, and else lets them leave out
nodes and say which ones to look at first; `place` always asks the node. Both give the same answers
(a property test holds them to it).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from types import MappingProxyType

import numpy as np

from allotment.model.clusters import NodeInventory, NodeRejection, PodBooking, PodNeed
from allotment.model.pods import PodUid
from allotment.model.requests import Request
from allotment.placement.answers import Answer, Answers
from allotment.placement.arrays import Arrays, BoolArray, FloatArray, IntArray, Kind, LinkArray
from allotment.placement.constraints import link_score
from allotment.placement.filters import Filter
from allotment.placement.kinds import Kinds, is_plain, largest
from allotment.placement.nodes import Node
from allotment.placement.ordering import DeviceChain
from allotment.placement.policies import Policy, make
from allotment.placement.rankings import Ranking, Refusals, Why
from allotment.placement.refusals import Reason, lacks_together, unknown_node
from allotment.placement.refusals_at_once import refusals_at
from allotment.placement.searches import MOST_EFFORT
from allotment.placement.selections import Effort
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
        self._answers: Answers[Answer] = Answers(self.arrays, is_final=lambda each: each.is_final)
        self._refusals: Answers[NodeRejection] = Answers(self.arrays)

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
        effort = Effort(MOST_EFFORT) if effort is None else effort
        kind = self._kinds.of(need)
        everywhere = self._costs(need, kind)
        # The arrays do not know that a pod's own booking is not in its way.
        plain = is_plain(need) and need.uid not in self._homes
        if plain and most is not None and (names is None or isinstance(names, AbstractSet)):
            few = self._first(everywhere, kind, names, most)
            if few is not None:
                return Ranking(few, Refusals(self._unfit(names, everywhere), self._why(need, kind)))
        rows, unknown = self._rows(names)
        costs = [each[rows] for each in everywhere]
        fits = np.isfinite(costs[0]) if plain else self._may_fit(need, rows)
        order = self._in_order(rows, costs, fits)
        refused = [self.arrays.names[row] for row in rows[~fits]]
        others: Mapping[str, NodeRejection | None]
        if plain:
            best, others = self._checked(need, order, kind, most=most, effort=effort)
        else:
            best, others = self._searched(need, order, most=most, effort=effort)
        why = self._why(need, kind if plain else None, said=others)
        return Ranking(best, Refusals([*refused, *others, *unknown], why))

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
        for name, node in self._nodes.items():
            node.check_invariants()
            row = self.arrays.row[name]
            for column in range(len(node.hardware.devices)):
                room = node.room(column)
                written = (self.arrays.free[row, column], self.arrays.free_memory[row, column])
                if written != (max(0, room.free), max(0, room.free_memory)):
                    raise AssertionError(name, column, written, room)

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

    def _rows(self, names: Collection[str] | None) -> tuple[IntArray, list[str]]:
        """Return the rows of these nodes, and the names that are not known."""
        if names is None:
            return self.arrays.rows, []
        row = self.arrays.row
        rows = [row[name] for name in names if name in row]
        return np.array(rows, dtype=np.int64), [name for name in names if name not in row]

    def _costs(self, need: PodNeed, kind: Kind) -> list[FloatArray]:
        """Return the costs of all rows, by each policy of the chain."""
        wanted = largest(need)
        chosen = wanted.request.preferences.node_policies if wanted else ()
        return [
            self._policy(name).costs(self.arrays, kind) for name in chosen or self._node_policies
        ]

    def _first(
        self, costs: Sequence[FloatArray], kind: Kind, names: AbstractSet[str] | None, most: int
    ) -> list[str] | None:
        """Return the best nodes of these, where they are found without looking at all of them.

        That is so when few are wanted and most are asked about. None: they are to be sorted.
        """
        arrays = self.arrays
        if len(costs) != 1 or not 0 < most <= _FEW or not len(arrays):
            return None
        left = costs[0].copy()
        found: list[str] = []
        for _ in range(_TRIED):
            lowest = left.min()
            if lowest == np.inf:
                return None
            tied = (left == lowest).nonzero()[0]
            row = int(tied[arrays.order[tied].argmin()] if len(tied) > 1 else tied[0])
            name = arrays.names[row]
            if name and (names is None or name in names):
                if kind.count > 1 and self._nodes[name].view.may_overflow:
                    return None
                found.append(name)
                if len(found) == most:
                    return found
            left[row] = np.inf
        return None

    def _unfit(
        self, names: AbstractSet[str] | None, costs: Sequence[FloatArray]
    ) -> Callable[[], list[str]]:
        """Return what names the nodes that do not do, of these."""

        def find() -> list[str]:
            rows, unknown = self._rows(names)
            known = rows[rows < len(costs[0])]
            return [*(self.arrays.names[row] for row in known[costs[0][known] == np.inf]), *unknown]

        return find

    def _may_fit(self, need: PodNeed, rows: IntArray) -> BoolArray:
        fits = self._filter.may_fit(need, rows)
        home = self.arrays.row.get(self._homes.get(need.uid, ""))
        return fits if home is None else fits | (rows == home)

    def _in_order(self, rows: IntArray, costs: Sequence[FloatArray], fits: BoolArray) -> IntArray:
        """Return the rows that fit, the cheapest first; ties by name."""
        some = rows[fits]
        keys = [self.arrays.order[some], *(each[fits] for each in reversed(costs))]
        ordered: IntArray = some[np.lexsort(keys)]
        return ordered

    def _checked(
        self, need: PodNeed, order: IntArray, kind: Kind, *, most: int | None, effort: Effort
    ) -> tuple[list[str], dict[str, NodeRejection]]:
        """Return the names of rows that fit as the arrays say, and of those where they err, why."""
        found: list[str] = []
        others: dict[str, NodeRejection] = {}
        for row in order:
            if most is not None and len(found) >= most:
                break
            name = self.arrays.names[row]
            # Nor that devices of one request share what there is of the host's memory.
            is_doubtful = kind.count > 1 and self._nodes[name].view.may_overflow
            decision = self.place(need, name, effort=effort) if is_doubtful else None
            if isinstance(decision, NodeRejection):
                others[name] = decision
            else:
                found.append(name)
        return found, others

    def _searched(
        self, need: PodNeed, order: IntArray, *, most: int | None, effort: Effort
    ) -> tuple[list[str], dict[str, NodeRejection | None]]:
        """Look at the nodes in this order until there are enough that do; say why others do not.

        Each node is searched with a part of the effort that is left, so that the best have the
        most of it, and those after them something.

        Nodes where a device has the pod's affinity tag, and has room for it, come before all
        others: as KubeShare has it, an idle device is taken only where there is none.
        """
        rows = order.tolist()
        answer = self._answer_for(need, effort)
        wanted = largest(need)
        tagged = self._filter.nodes_with(wanted.request.constraints.affinity) if wanted else ()
        looked = {row: answer(row) for row in rows if self.arrays.names[row] in tagged}
        near = sorted(
            (row for row, each in looked.items() if each.is_near),
            key=lambda row: looked[row].untagged,
        )
        found = dict.fromkeys(near)
        for row in rows:
            if most is not None and len(found) >= most:
                break
            if row not in looked:
                looked[row] = answer(row)
            if looked[row].fits:
                found[row] = None
        self._answers.trim()
        names = self.arrays.names
        others = {names[row]: each.refusal for row, each in looked.items() if not each.fits}
        return [names[row] for row in found][:most], others

    def _answer_for(self, need: PodNeed, effort: Effort) -> Callable[[int], Answer]:
        """Return what says of a row whether the pod has a place there."""
        known = self._answers.of(need)

        def ask(row: int) -> Answer:
            most = max(_LEAST_EFFORT, effort.left // _PART_OF_EFFORT)
            with effort.part(most) as lent:
                found = self._nodes[self.arrays.names[row]].answer(need, effort=lent)
                is_cut = lent.is_spent and most <= _LEAST_EFFORT
            return found._replace(is_final=found.fits or not is_cut)

        if need.uid in self._homes:
            return ask  # another pod that asks for the same finds less room where this one is
        return lambda row: known(row, lambda: ask(row))

    def _chain(
        self, need: PodNeed, request: Request, node: str, *, is_as_arrays: bool
    ) -> DeviceChain:
        wishes = request.preferences
        policies = wishes.device_policies or self._device_policies
        ranks: dict[str, Mapping[str, int]] = {}
        if is_as_arrays:
            kind = self._kinds.of_request(need, request)
            row = self.arrays.row[node]
            devices = self._nodes[node].hardware.devices
            for name in policies:
                if name in _BY_THEMSELVES and (wishes.weights or len(policies) > 1):
                    continue
                order = self._policy(name).device_order(self.arrays, kind, row)
                ranks[name] = {devices[column].uuid: at for at, column in enumerate(order)}
        return DeviceChain(policies=policies, weights=wishes.weights, ranks=ranks)

    def _refusal(self, need: PodNeed, name: str) -> NodeRejection:
        row = self.arrays.row.get(name)
        if row is None:
            return unknown_node(name)
        only = np.array([row])
        number = int(self._filter.lacking(need, only)[0])
        short = self._filter.short(need, only)
        decision = self._nodes[name].lacks_for(need, -1)
        if decision is None and number < 0 <= short.least[0]:
            wanted = need.containers[int(short.least[0])]
            places, have = short.need_have[:, 0].tolist()
            decision = lacks_together(name, wanted, places, have)
        elif decision is None and need.containers:
            decision = self._nodes[name].lacks_for(need, max(0, number))
        if isinstance(decision, NodeRejection):
            return decision
        return NodeRejection(name, Reason.CHANGED, "had no room, and has changed since")

    def _why(
        self,
        need: PodNeed,
        kind: Kind | None = None,
        *,
        said: Mapping[str, NodeRejection | None] = MappingProxyType({}),
    ) -> Why:
        """Return what says why nodes do not do for a pod; `kind` if it is no more than that.

        `said`: what searches have said already. Nothing is searched for words.
        """

        def why(names: Collection[str]) -> Mapping[str, NodeRejection]:
            found = {name: each for name, each in said.items() if each is not None}
            if kind is not None:
                rows = np.array(
                    [self.arrays.row[name] for name in names if name in self.arrays.row],
                    dtype=np.int64,
                )
                found.update(refusals_at(self.arrays, need, kind, rows))
            known = self._refusals.of(need)
            for name in names:
                if name not in found:
                    row = self.arrays.row.get(name)
                    if row is None or need.uid in self._homes:
                        found[name] = self._refusal(need, name)
                    else:
                        found[name] = known(row, partial(self._refusal, need, name))
            self._refusals.trim()
            return found

        return why


_PART_OF_EFFORT = 4
"""One node may take one part in so many of what is left."""
_LEAST_EFFORT = 500
"""Enough for two containers of a GPU each on a node with eight; a search that has had no more than
that, and was not finished, is made again with the next question."""
_FEW = 8
"""More nodes than that are found by sorting all of them."""
_TRIED = 24
"""So many of the best are looked for among those that are asked about, before all are sorted."""
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

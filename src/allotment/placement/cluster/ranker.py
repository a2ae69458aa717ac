# SPDX-License-Identifier: Apache-2.0
"""Ranks the nodes that fit a pod, best first, and explains why the others do not.

The arrays decide if they cover the whole request. Otherwise they filter and order the nodes, and
each remaining node is searched within a bound of effort.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property, partial

import msgspec
import numpy as np

from allotment.model.clusters import PodBooking, PodNeed
from allotment.model.modes import traits_of
from allotment.model.pods import PodUid
from allotment.model.requests import Request
from allotment.model.structs import replace
from allotment.placement.cluster.arrays import Arrays, BoolArray, FloatArray, IntArray, PodShape
from allotment.placement.cluster.filters import Filter, PodShapes, is_plain, largest
from allotment.placement.cluster.refusals import refusals_at
from allotment.placement.explain import (
    CHANGED,
    UNKNOWN_NODE,
    Refusal,
    in_all_modes,
    lacks_together,
)
from allotment.placement.judge import in_each_mode
from allotment.placement.nodes import Node, SearchCache, SearchResult
from allotment.placement.ordering import DeviceChain
from allotment.placement.policies import Policy, make
from allotment.placement.policies.fragmentation import Fragmentation, PackingValues
from allotment.placement.search import MOST_EFFORT
from allotment.placement.selections import Effort


class _Policies(dict[str, Policy]):
    """Policies by name, made on first use. Raises `UsageError` for an unknown one."""

    def __missing__(self, name: str) -> Policy:
        policy = self[name] = make(name)
        return policy


_BY_THEMSELVES = frozenset({"binpack", "spread", "numa", "topology"})
"""Policies for devices that `ordering` evaluates without the arrays."""


_BY_COST = frozenset({"fragmentation", "binpack", "spread"})
"""Policies for which devices with equal room are a tie."""


def _ranked(order: Sequence[int], rooms: Sequence[int] | IntArray) -> Iterator[tuple[int, int]]:
    """Yield each column with its rank; neighbours with equal room have the same."""
    rank = 0
    for at, column in enumerate(order):
        if at and rooms[column] != rooms[order[at - 1]]:
            rank = at
        yield column, rank


class ClusterIndex:
    """The nodes, in each form of lookup, and the policies that compare them."""

    def __init__(self, *, node_policies: Sequence[str], device_policies: Sequence[str]) -> None:
        self.nodes: dict[str, Node] = {}
        """Exact nodes, by name."""
        self.arrays = Arrays()
        """All nodes as arrays."""
        self.shapes = PodShapes(self.arrays)
        self.filter = Filter(self.arrays, self.shapes)
        self.homes: dict[PodUid, str] = {}
        """The node of each booked pod, also of unknown nodes."""
        self.policies = _Policies()
        self._node_policies = tuple(node_policies)
        self._device_policies = tuple(device_policies)
        for name in (*node_policies, *device_policies):
            self.policies[name]

    def place(
        self,
        need: PodNeed,
        node: str,
        *,
        without: Collection[PodUid] = (),
        effort: Effort | None = None,
    ) -> PodBooking | Refusal:
        """Choose devices on a node, or give the reason for refusal.

        `without`: as if these pods were gone. The pod's own booking is ignored. `effort`: the
        remaining bound of a larger question.
        """
        exact = self.nodes.get(node)
        if exact is None:
            return UNKNOWN_NODE
        is_as_arrays = exact.bookings.keys().isdisjoint((need.uid, *without))
        chains = [
            self._chain(need, wanted.request, node, is_as_arrays=is_as_arrays)
            for wanted in need.containers
        ]
        return exact.place(need, chains, without=without, effort=effort)

    def costs(self, need: PodNeed, kind: PodShape) -> list[FloatArray]:
        """The cost of each row, by each policy of the pod, or else of the cluster."""
        wanted = largest(need)
        chosen = wanted.request.preferences.node_policies if wanted else ()
        if traits_of(kind.mode).is_slice and not chosen:
            return [self.arrays.slice_costs(kind)]
        return [
            self.policies[name].costs(self.arrays, kind) for name in chosen or self._node_policies
        ]

    def standing(self) -> PackingValues | None:
        """What is free, as `fragmentation` values it; None: nodes are not chosen by that policy."""
        policy = self.policies.get(Fragmentation.name)
        if not isinstance(policy, Fragmentation) or policy.name not in self._node_policies:
            return None
        return policy.standing(self.arrays)

    def _chain(
        self, need: PodNeed, request: Request, node: str, *, is_as_arrays: bool
    ) -> DeviceChain:
        preferences = request.preferences
        policies = preferences.device_policies or self._device_policies
        ranks: dict[str, Mapping[str, int]] = {}
        requests = in_each_mode(request)
        if len(requests) > 1:
            chains = {
                each.mode: self._chain(need, each, node, is_as_arrays=is_as_arrays)
                for each in requests
            }
            return replace(chains[request.mode], others=chains)
        if is_as_arrays and not traits_of(request.mode).is_slice:
            kind = self.shapes.of(need, request)
            row = self.arrays.row[node]
            devices = self.nodes[node].hardware.devices
            for name in policies:
                if name in _BY_THEMSELVES and (preferences.weights or len(policies) > 1):
                    continue
                order = self.policies[name].device_order(self.arrays, kind, row)
                rooms = self.arrays.room[row] if name in _BY_COST else range(len(devices))
                ranks[name] = {devices[column].uuid: rank for column, rank in _ranked(order, rooms)}
        return DeviceChain(policies=policies, weights=preferences.weights, ranks=ranks)


FindRefusals = Callable[[Collection[str]], Mapping[str, Refusal]]
"""Explains refusals."""


class Refusals(Mapping[str, Refusal]):
    """Refusals by node name, computed for all of them on first access.

    `names` is a function if they are costly to find.
    """

    def __init__(
        self, names: Iterable[str] | Callable[[], Iterable[str]], why: FindRefusals
    ) -> None:
        self._find_names = names
        self._why = why

    @cached_property
    def _names(self) -> dict[str, None]:
        return dict.fromkeys(self._find_names() if callable(self._find_names) else self._find_names)

    @cached_property
    def _refusals(self) -> Mapping[str, Refusal]:
        return self._why(self._names)

    def __getitem__(self, name: str) -> Refusal:
        return self._refusals[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def reasons(self) -> Counter[str]:
        return Counter(each.reason for each in self.values())


class Ranking(msgspec.Struct, frozen=True):
    """The nodes that fit a pod, and the refusals."""

    best: list[str]
    """Fitting nodes, best first; at most as many as requested."""
    refused: Refusals
    """Refusals of the nodes examined; valid until the cluster changes."""


_PART_OF_EFFORT = 4
"""One node may use one part in this many of the remaining effort."""
_LEAST_EFFORT = 500
"""Enough for two one-GPU containers on a node with eight; a search that ran out with less is
repeated with the next question."""
_FEW = 8
"""For more nodes than this, all are sorted."""
_TRIED = 24
"""Number of best nodes tried among the requested names before all are sorted."""


class Ranker:
    """Ranks nodes; cached searches on a node hold until it changes."""

    def __init__(self, index: ClusterIndex) -> None:
        self._index = index
        self._arrays = index.arrays
        self._refusals: SearchCache[Refusal] = SearchCache(index.arrays)
        self._answers: SearchCache[SearchResult] = SearchCache(
            index.arrays, is_final=lambda answer: answer.is_final
        )

    def rank(
        self,
        need: PodNeed,
        names: Collection[str] | None = None,
        *,
        most: int | None,
        effort: Effort | None,
    ) -> Ranking:
        effort = Effort(MOST_EFFORT) if effort is None else effort
        modes = _in_each_mode(need)
        if len(modes) > 1 and len(need.containers) == 1:
            return self._by_modes(modes, names, most=most, effort=effort)
        kind = self._index.shapes.of(modes[0])
        # For a pod with several containers: if none fits in the largest one's first mode, its next
        # mode orders the nodes.
        index = self._index
        everywhere = [costs for mode in modes for costs in index.costs(mode, index.shapes.of(mode))]
        # The arrays include the pod's own booking.
        plain = is_plain(need) and need.uid not in self._index.homes
        if plain and most is not None and (names is None or isinstance(names, AbstractSet)):
            few = self._first(everywhere, kind, names, most)
            if few is not None:
                unfit = partial(self._unfit, names, everywhere[0])
                return Ranking(few, Refusals(unfit, partial(self._explained, need, kind, {})))
        rows, unknown = self._rows(names)
        costs = [each[rows] for each in everywhere]
        fits = np.isfinite(costs[0]) if plain else self._may_fit(need, rows)
        order = self._in_order(rows, costs, fits)
        refused = [self._arrays.names[row] for row in rows[~fits]]
        others: Mapping[str, Refusal | None]
        if plain:
            best, others = self._checked(need, order, kind, most=most, effort=effort)
        else:
            best, others = self._searched(need, order, most=most, effort=effort)
        why = partial(self._explained, need, kind if plain else None, others)
        return Ranking(best, Refusals([*refused, *others, *unknown], why))

    def _by_modes(
        self,
        modes: Sequence[PodNeed],
        names: Collection[str] | None,
        *,
        most: int | None,
        effort: Effort,
    ) -> Ranking:
        """Rank for a pod with several modes for its one container.

        Nodes that fit a more preferred mode come first.
        """
        found: dict[str, None] = {}
        rankings: list[Ranking] = []

        def next_ranking() -> Ranking:
            more = None if most is None else most + len(found)
            each = modes[len(rankings)]
            rankings.append(self.rank(each, names, most=more, effort=effort))
            return rankings[-1]

        while len(rankings) < len(modes) and (most is None or len(found) < most):
            found.update(dict.fromkeys(next_ranking().best))

        def refused() -> list[str]:
            while len(rankings) < len(modes):
                next_ranking()
            refusing = [frozenset(ranking.refused) for ranking in rankings]
            nowhere = refusing[0].intersection(*refusing[1:])
            return [name for name in rankings[0].refused if name in nowhere]

        def why(asked: Collection[str]) -> Mapping[str, Refusal]:
            return {
                name: in_all_modes(
                    {
                        each.containers[0].request.mode: ranking.refused[name]
                        for each, ranking in zip(modes, rankings, strict=True)
                    }
                )
                for name in asked
            }

        best = list(found)
        return Ranking(best if most is None else best[:most], Refusals(refused, why))

    def _rows(self, names: Collection[str] | None) -> tuple[IntArray, list[str]]:
        if names is None:
            return self._arrays.rows, []
        row = self._arrays.row
        rows = [row[name] for name in names if name in row]
        return np.array(rows, dtype=np.int64), [name for name in names if name not in row]

    def _first(
        self, costs: Sequence[FloatArray], kind: PodShape, names: AbstractSet[str] | None, most: int
    ) -> list[str] | None:
        """The best of these nodes, if they are found without examining all of them.

        This works if few are wanted and most are asked about. None: sort them all.
        """
        arrays = self._arrays
        if len(costs) != 1 or not 0 < most <= _FEW or not arrays.names:
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
                if kind.count > 1 and self._index.nodes[name].view.may_overflow:
                    return None
                found.append(name)
                if len(found) == most:
                    return found
            left[row] = np.inf
        return None

    def _unfit(self, names: AbstractSet[str] | None, costs: FloatArray) -> list[str]:
        rows, unknown = self._rows(names)
        known = rows[rows < len(costs)]
        return [*(self._arrays.names[row] for row in known[costs[known] == np.inf]), *unknown]

    def _may_fit(self, need: PodNeed, rows: IntArray) -> BoolArray:
        fits = self._index.filter.may_fit(need, rows)
        home = self._arrays.row.get(self._index.homes.get(need.uid, ""))
        return fits if home is None else fits | (rows == home)

    def _in_order(self, rows: IntArray, costs: Sequence[FloatArray], fits: BoolArray) -> IntArray:
        some = rows[fits]
        keys = [self._arrays.order[some], *(cost[fits] for cost in reversed(costs))]
        ordered: IntArray = some[np.lexsort(keys)]
        return ordered

    def _checked(
        self, need: PodNeed, order: IntArray, kind: PodShape, *, most: int | None, effort: Effort
    ) -> tuple[list[str], dict[str, Refusal]]:
        """Names of rows that really fit, and the refusals of rows where the arrays err."""
        found: list[str] = []
        others: dict[str, Refusal] = {}
        for row in order:
            if most is not None and len(found) >= most:
                break
            name = self._arrays.names[row]
            # The arrays also ignore that devices of one request share host memory.
            is_doubtful = kind.count > 1 and self._index.nodes[name].view.may_overflow
            decision = self._index.place(need, name, effort=effort) if is_doubtful else None
            if isinstance(decision, Refusal):
                others[name] = decision
            else:
                found.append(name)
        return found, others

    def _searched(
        self, need: PodNeed, order: IntArray, *, most: int | None, effort: Effort
    ) -> tuple[list[str], dict[str, Refusal | None]]:
        """Search the nodes in this order until enough fit; give the refusals of the others.

        Each node gets a part of the remaining effort, so the best nodes get most. Nodes with room
        on a device with the pod's affinity tag come first: as in KubeShare, an idle device is used
        only if there is none.
        """
        rows = order.tolist()
        answer = self._answer_for(need, effort)
        wanted = largest(need)
        tagged = (
            self._index.filter.nodes_with(wanted.request.constraints.affinity) if wanted else ()
        )
        looked = {row: answer(row) for row in rows if self._arrays.names[row] in tagged}
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
        names = self._arrays.names
        others = {names[row]: each.refusal for row, each in looked.items() if not each.fits}
        return [names[row] for row in found][:most], others

    def _answer_for(self, need: PodNeed, effort: Effort) -> Callable[[int], SearchResult]:
        known = self._answers.of(need)

        def ask(row: int) -> SearchResult:
            most = max(_LEAST_EFFORT, effort.left // _PART_OF_EFFORT)
            with effort.part(most) as lent:
                found = self._index.nodes[self._arrays.names[row]].answer(need, effort=lent)
                is_cut = lent.is_spent and most <= _LEAST_EFFORT
            return found._replace(is_final=found.fits or not is_cut)

        if need.uid in self._index.homes:
            return ask  # another pod with the same request finds less room where this one is
        return lambda row: known(row, lambda: ask(row))

    def _explained(
        self,
        need: PodNeed,
        kind: PodShape | None,
        searched: Mapping[str, Refusal | None],
        names: Collection[str],
    ) -> Mapping[str, Refusal]:
        """The refusals of a pod by these nodes; `kind` if the arrays cover the request.

        `searched`: results of earlier searches. No search is made only for the text.
        """
        index = self._index
        refusals = {name: refusal for name, refusal in searched.items() if refusal is not None}
        if kind is not None:
            refusals.update(refusals_at(index.arrays, need, kind, self._rows(names)[0]))
        cached = self._refusals.of(need)
        for name in names:
            if name not in refusals:
                row = index.arrays.row.get(name)
                if row is None or need.uid in index.homes:
                    refusals[name] = self._refusal(need, name)
                else:
                    refusals[name] = cached(row, partial(self._refusal, need, name))
        self._refusals.trim()
        return refusals

    def _refusal(self, need: PodNeed, name: str) -> Refusal:
        index = self._index
        row = index.arrays.row.get(name)
        if row is None:
            return UNKNOWN_NODE
        only = np.array([row])
        number = int(index.filter.lacking(need, only)[0])
        short = index.filter.short(need, only)
        decision = index.nodes[name].lacks_for(need, -1)
        if decision is None and number < 0 <= short.least[0]:
            wanted = need.containers[int(short.least[0])]
            places, have = short.need_have[:, 0].tolist()
            decision = lacks_together(wanted, places, have)
        elif decision is None and need.containers:
            decision = index.nodes[name].lacks_for(need, max(0, number))
        return CHANGED if decision is None else decision


def _in_each_mode(need: PodNeed) -> list[PodNeed]:
    """The pod with its largest container in each of its modes; others keep their modes."""
    if not any(container.request.other_modes for container in need.containers):
        return [need]
    wanted = largest(need)
    if wanted is None or not wanted.request.other_modes:
        return [need]
    return [
        replace(
            need,
            containers=tuple(
                replace(container, request=request) if container is wanted else container
                for container in need.containers
            ),
        )
        for request in in_each_mode(wanted.request)
    ]

# SPDX-License-Identifier: Apache-2.0
"""Which nodes do for a pod, the best first, as far as one has to look to know.

The arrays are asked wherever they know all that a pod asks for. For any other pod they leave out
nodes and say which ones to look at first, and each of those is searched, within a bound of effort.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

import numpy as np

from allotment.model.clusters import NodeRejection, PodBooking, PodNeed
from allotment.placement.answers import Answer, Answers
from allotment.placement.arrays import BoolArray, FloatArray, IntArray, Kind
from allotment.placement.kinds import is_plain, largest
from allotment.placement.open_modes import in_each_mode
from allotment.placement.rankings import Ranking, Refusals
from allotment.placement.refusals import in_all_modes
from allotment.placement.refusing import Refuser
from allotment.placement.searches import MOST_EFFORT
from allotment.placement.selections import Effort
from allotment.placement.there import There

__all__ = ["Costs", "Place", "Ranker"]

_PART_OF_EFFORT = 4
"""One node may take one part in so many of what is left."""
_LEAST_EFFORT = 500
"""Enough for two containers of a GPU each on a node with eight; a search that has had no more than
that, and was not finished, is made again with the next question."""
_FEW = 8
"""More nodes than that are found by sorting all of them."""
_TRIED = 24
"""So many of the best are looked for among those that are asked about, before all are sorted."""

Costs = Callable[[PodNeed, Kind], Sequence[FloatArray]]
"""What each row costs, by each policy that the pod or the cluster names."""
Place = Callable[[PodNeed, str, Effort], PodBooking | NodeRejection]
"""Decides on which of a node's devices a pod goes."""


class Ranker:
    """Ranks nodes; what searches have found out on a node holds until it changes."""

    def __init__(self, there: There, *, costs: Costs, place: Place) -> None:
        self._there = there
        self._arrays = there.arrays
        self._costs = costs
        self._place = place
        self._refuser = Refuser(there)
        self._answers: Answers[Answer] = Answers(there.arrays, is_final=lambda each: each.is_final)

    def rank(
        self,
        need: PodNeed,
        names: Collection[str] | None = None,
        *,
        most: int | None,
        effort: Effort | None,
    ) -> Ranking:
        """Answer `Cluster.rank`."""
        effort = Effort(MOST_EFFORT) if effort is None else effort
        modes = _in_each_mode(need)
        if len(modes) > 1 and len(need.containers) == 1:
            return self._by_modes(modes, names, most=most, effort=effort)
        kind = self._there.kinds.of(modes[0])
        # Of a pod with several containers: where none of them fits in the first mode of the largest
        # by itself, nodes are told apart by the next one.
        everywhere = [
            costs for each in modes for costs in self._costs(each, self._there.kinds.of(each))
        ]
        # The arrays do not know that a pod's own booking is not in its way.
        plain = is_plain(need) and need.uid not in self._there.homes
        if plain and most is not None and (names is None or isinstance(names, AbstractSet)):
            few = self._first(everywhere, kind, names, most)
            if few is not None:
                return Ranking(
                    few, Refusals(self._unfit(names, everywhere), self._refuser.why(need, kind))
                )
        rows, unknown = self._rows(names)
        costs = [each[rows] for each in everywhere]
        fits = np.isfinite(costs[0]) if plain else self._may_fit(need, rows)
        order = self._in_order(rows, costs, fits)
        refused = [self._arrays.names[row] for row in rows[~fits]]
        others: Mapping[str, NodeRejection | None]
        if plain:
            best, others = self._checked(need, order, kind, most=most, effort=effort)
        else:
            best, others = self._searched(need, order, most=most, effort=effort)
        why = self._refuser.why(need, kind if plain else None, said=others)
        return Ranking(best, Refusals([*refused, *others, *unknown], why))

    def _by_modes(
        self,
        modes: Sequence[PodNeed],
        names: Collection[str] | None,
        *,
        most: int | None,
        effort: Effort,
    ) -> Ranking:
        """Rank for a pod whose one container may have several modes.

        Nodes where a mode fits that is liked better come before all others.
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
            refusing = [frozenset(each.refused) for each in rankings]
            nowhere = refusing[0].intersection(*refusing[1:])
            return [name for name in rankings[0].refused if name in nowhere]

        def why(asked: Collection[str]) -> Mapping[str, NodeRejection]:
            return {
                name: in_all_modes(
                    [
                        (each.containers[0].request.mode, ranking.refused[name])
                        for each, ranking in zip(modes, rankings, strict=True)
                    ]
                )
                for name in asked
            }

        best = list(found)
        return Ranking(best if most is None else best[:most], Refusals(refused, why))

    def _rows(self, names: Collection[str] | None) -> tuple[IntArray, list[str]]:
        """Return the rows of these nodes, and the names that are not known."""
        if names is None:
            return self._arrays.rows, []
        row = self._arrays.row
        rows = [row[name] for name in names if name in row]
        return np.array(rows, dtype=np.int64), [name for name in names if name not in row]

    def _first(
        self, costs: Sequence[FloatArray], kind: Kind, names: AbstractSet[str] | None, most: int
    ) -> list[str] | None:
        """Return the best nodes of these, where they are found without looking at all of them.

        That is so when few are wanted and most are asked about. None: they are to be sorted.
        """
        arrays = self._arrays
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
                if kind.count > 1 and self._there.nodes[name].view.may_overflow:
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
            return [
                *(self._arrays.names[row] for row in known[costs[0][known] == np.inf]),
                *unknown,
            ]

        return find

    def _may_fit(self, need: PodNeed, rows: IntArray) -> BoolArray:
        fits = self._there.filter.may_fit(need, rows)
        home = self._arrays.row.get(self._there.homes.get(need.uid, ""))
        return fits if home is None else fits | (rows == home)

    def _in_order(self, rows: IntArray, costs: Sequence[FloatArray], fits: BoolArray) -> IntArray:
        """Return the rows that fit, the cheapest first; ties by name."""
        some = rows[fits]
        keys = [self._arrays.order[some], *(each[fits] for each in reversed(costs))]
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
            name = self._arrays.names[row]
            # Nor that devices of one request share what there is of the host's memory.
            is_doubtful = kind.count > 1 and self._there.nodes[name].view.may_overflow
            decision = self._place(need, name, effort) if is_doubtful else None
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
        tagged = (
            self._there.filter.nodes_with(wanted.request.constraints.affinity) if wanted else ()
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

    def _answer_for(self, need: PodNeed, effort: Effort) -> Callable[[int], Answer]:
        """Return what says of a row whether the pod has a place there."""
        known = self._answers.of(need)

        def ask(row: int) -> Answer:
            most = max(_LEAST_EFFORT, effort.left // _PART_OF_EFFORT)
            with effort.part(most) as lent:
                found = self._there.nodes[self._arrays.names[row]].answer(need, effort=lent)
                is_cut = lent.is_spent and most <= _LEAST_EFFORT
            return found._replace(is_final=found.fits or not is_cut)

        if need.uid in self._there.homes:
            return ask  # another pod that asks for the same finds less room where this one is
        return lambda row: known(row, lambda: ask(row))


def _in_each_mode(need: PodNeed) -> list[PodNeed]:
    """Return a pod as it is with its largest container in each of the modes that would do for it.

    Others keep theirs open.
    """
    if not any(each.request.other_modes for each in need.containers):
        return [need]
    wanted = largest(need)
    if wanted is None or not wanted.request.other_modes:
        return [need]
    return [
        replace(
            need,
            containers=tuple(
                replace(each, request=request) if each is wanted else each
                for each in need.containers
            ),
        )
        for request in in_each_mode(wanted.request)
    ]

# SPDX-License-Identifier: Apache-2.0
"""Why nodes do not do for a pod, in words: worked out when somebody asks, for any number of them.

Nothing is searched for words: they are of what a node lacks by itself, and of what searches have
said already.
"""

from collections.abc import Collection, Mapping
from functools import partial
from types import MappingProxyType

import numpy as np

from allotment.model.clusters import NodeRejection, PodNeed
from allotment.placement.answers import Answers
from allotment.placement.arrays import Kind
from allotment.placement.rankings import Why
from allotment.placement.refusals import Reason, lacks_together, unknown_node
from allotment.placement.refusals_at_once import refusals_at
from allotment.placement.there import There

__all__ = ["Refuser"]


class Refuser:
    """Says why, and remembers it until the node changes."""

    def __init__(self, there: There) -> None:
        self._there = there
        self._known: Answers[NodeRejection] = Answers(there.arrays)

    def why(
        self,
        need: PodNeed,
        kind: Kind | None = None,
        *,
        said: Mapping[str, NodeRejection | None] = MappingProxyType({}),
    ) -> Why:
        """Return what says why nodes do not do for a pod; `kind` if it is no more than that.

        `said`: what searches have said already. Nothing is searched for words.
        """
        there = self._there

        def why(names: Collection[str]) -> Mapping[str, NodeRejection]:
            found = {name: each for name, each in said.items() if each is not None}
            if kind is not None:
                rows = np.array(
                    [there.arrays.row[name] for name in names if name in there.arrays.row],
                    dtype=np.int64,
                )
                found.update(refusals_at(there.arrays, need, kind, rows))
            known = self._known.of(need)
            for name in names:
                if name not in found:
                    row = there.arrays.row.get(name)
                    if row is None or need.uid in there.homes:
                        found[name] = self._refusal(need, name)
                    else:
                        found[name] = known(row, partial(self._refusal, need, name))
            self._known.trim()
            return found

        return why

    def _refusal(self, need: PodNeed, name: str) -> NodeRejection:
        there = self._there
        row = there.arrays.row.get(name)
        if row is None:
            return unknown_node(name)
        only = np.array([row])
        number = int(there.filter.lacking(need, only)[0])
        short = there.filter.short(need, only)
        decision = there.nodes[name].lacks_for(need, -1)
        if decision is None and number < 0 <= short.least[0]:
            wanted = need.containers[int(short.least[0])]
            places, have = short.need_have[:, 0].tolist()
            decision = lacks_together(name, wanted, places, have)
        elif decision is None and need.containers:
            decision = there.nodes[name].lacks_for(need, max(0, number))
        if isinstance(decision, NodeRejection):
            return decision
        return NodeRejection(name, Reason.CHANGED, "had no room, and has changed since")

# SPDX-License-Identifier: Apache-2.0
"""What a policy is: an opinion on which of the places that fit should be taken.

A policy sees arrays and kinds, and answers with a cost for each node and an order of devices. It
changes nothing and refuses nothing of its own: what fits is decided once, by `Arrays` for many
nodes at a time and by the exact search on one.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from allotment.placement.arrays import Arrays, FloatArray, IntArray, Kind

__all__ = ["Choice", "Kind", "Policy", "best", "choose_on"]


class Policy(Protocol):
    """One way of choosing. The same calls in the same order give the same answers."""

    @property
    def name(self) -> str:
        """Return the name by which people choose it."""
        ...

    def costs(self, arrays: Arrays, kind: Kind, rows: IntArray | None = None) -> FloatArray:
        """Return the cost of the best choice of devices on each of these rows; None: on all rows.

        Lower is better, `inf` where the kind does not fit. Equal costs are told apart by
        `arrays.order`.
        """
        ...

    def device_order(self, arrays: Arrays, kind: Kind, row: int) -> list[int]:
        """Return the row's devices that fit, best first: the first `kind.count` are the choice."""
        ...

    def arrived(self, kind: Kind) -> None:
        """Hear that one more pod of this kind has come, placed or not; before it is placed."""
        ...

    def expect(self, mix: Mapping[Kind, float]) -> None:
        """Hear how often each kind comes, where that is known beforehand: it is not learnt then."""
        ...


class Choice(NamedTuple):
    """A node's row and the columns of the devices there."""

    row: int
    columns: tuple[int, ...]


def best(policy: Policy, arrays: Arrays, kind: Kind) -> Choice | None:
    """Return where the policy puts one pod of this kind; None where it fits nowhere."""
    costs = policy.costs(arrays, kind)
    if not len(costs):
        return None
    lowest = costs.min()
    if lowest == float("inf"):
        return None
    tied = (costs == lowest).nonzero()[0]
    row = int(tied[arrays.order[tied].argmin()])
    return Choice(row, choose_on(policy, arrays, kind, row))


def choose_on(policy: Policy, arrays: Arrays, kind: Kind, row: int) -> tuple[int, ...]:
    """Return the columns that the policy takes on a row where the kind fits, in index order."""
    if not kind.count:
        return ()
    return tuple(sorted(policy.device_order(arrays, kind, row)[: kind.count]))

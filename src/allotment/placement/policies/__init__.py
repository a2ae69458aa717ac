# SPDX-License-Identifier: Apache-2.0
"""Placement policies by name, which choose among fitting places.

A file of its own each, all of them pure; `fragmentation` is the default, and docs/concepts has a
page that says which is for what. A policy sees arrays and kinds, and answers with a cost for each
node and an order of devices. It changes and refuses nothing: `Arrays` and the exact search decide
what fits.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

from allotment.model.errors import UsageError
from allotment.placement.cluster.arrays import Arrays, FloatArray, IntArray, PodShape
from allotment.placement.policies.fgd import Fgd
from allotment.placement.policies.fragmentation import Fragmentation
from allotment.placement.policies.simple import (
    Binpack,
    FirstFit,
    Numa,
    RandomChoice,
    Spread,
    Topology,
)

__all__ = ["POLICIES", "Choice", "Policy", "best", "choose_on", "make"]


class Policy(Protocol):
    """One way of choosing. The same calls in the same order give the same answers."""

    @property
    def name(self) -> str:
        """The name in options."""
        ...

    def costs(self, arrays: Arrays, kind: PodShape, rows: IntArray | None = None) -> FloatArray:
        """Return the cost of the best choice of devices on each of these rows; None: on all rows.

        Lower is better, `inf` where the kind does not fit. Equal costs are ordered by
        `arrays.order`.
        """
        ...

    def device_order(self, arrays: Arrays, kind: PodShape, row: int) -> list[int]:
        """Return the row's devices that fit, best first: the first `kind.count` are the choice."""
        ...

    def arrived(self, kind: PodShape) -> None:
        """Count one more pod of this kind, placed or not; called before it is placed."""
        ...

    def expect(self, mix: Mapping[PodShape, float]) -> None:
        """Take the frequency of each kind as given, in place of learning it."""
        ...


class Choice(NamedTuple):
    """A node's row and the columns of the devices there."""

    row: int
    columns: tuple[int, ...]


def best(policy: Policy, arrays: Arrays, kind: PodShape) -> Choice | None:
    """Return where the policy puts one pod of this kind; None where it fits nowhere."""
    costs = policy.costs(arrays, kind)
    if not len(costs):
        return None
    lowest = costs.min()
    if lowest == float("inf"):
        return None
    tied = (costs == lowest).nonzero()[0]
    row = int(tied[0] if len(tied) == 1 else tied[arrays.order[tied].argmin()])
    return Choice(row, choose_on(policy, arrays, kind, row))


def choose_on(policy: Policy, arrays: Arrays, kind: PodShape, row: int) -> tuple[int, ...]:
    """Return the columns that the policy takes on a row where the kind fits, in index order."""
    if not kind.count:
        return ()
    return tuple(sorted(policy.device_order(arrays, kind, row)[: kind.count]))


POLICIES: Mapping[str, Callable[[], Policy]] = MappingProxyType(
    {
        "binpack": Binpack,
        "fgd": Fgd,
        "first-fit": FirstFit,
        "fragmentation": Fragmentation,
        "numa": Numa,
        "random": RandomChoice,
        "spread": Spread,
        "topology": Topology,
    }
)
"""By name: creates a policy without history."""


def make(name: str, *, seed: int = 0) -> Policy:
    """The seed is for `random` only. Raises `UsageError`."""
    if name == RandomChoice.name:
        return RandomChoice(seed)
    if name not in POLICIES:
        known = ", ".join(sorted(POLICIES))
        raise UsageError(f"unknown policy {name!r}", hint=f"policies: {known}")
    return POLICIES[name]()

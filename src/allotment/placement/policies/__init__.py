# SPDX-License-Identifier: Apache-2.0
"""Policies by name: which of the places that fit is taken.

A file of its own each, all of them pure; `fragmentation` is the default, and docs/concepts has a
page that says which is for what.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from allotment.model.errors import UsageError
from allotment.placement.policies.fgd import Fgd
from allotment.placement.policies.fragmentation import Fragmentation
from allotment.placement.policies.near import Numa, Topology
from allotment.placement.policies.protocol import Choice, Policy, best, choose_on
from allotment.placement.policies.simple import Binpack, FirstFit, RandomChoice, Spread

__all__ = ["POLICIES", "Choice", "Policy", "best", "choose_on", "make"]

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
"""By name: makes a policy that has learnt nothing yet."""


def make(name: str, *, seed: int = 0) -> Policy:
    """Make a policy by its name; the seed is for `random` alone. Raises `UsageError`."""
    if name == RandomChoice.name:
        return RandomChoice(seed)
    if name not in POLICIES:
        known = ", ".join(sorted(POLICIES))
        raise UsageError(f"there is no policy {name!r}", hint=f"there are {known}")
    return POLICIES[name]()

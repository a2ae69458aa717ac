# SPDX-License-Identifier: Apache-2.0
"""Which devices of a node are taken first.

A chain of policies says it, each deciding among what the one before it holds for equal.

Whatever the chain says, these come first, because nothing else is right: a device with the
request's affinity tag, then one that needs least of the host's memory, then one where the pod has
room booked already for a container that is not in use at the same time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from allotment.model.placements import DeviceState, Verdict
from allotment.model.requests import DeviceWeights, Request
from allotment.placement.constraints import Links, link_score
from allotment.placement.selections import Candidate

__all__ = ["NEAR_POLICIES", "DeviceChain", "device_key", "set_key"]

Key = tuple[float, ...]

NEAR_POLICIES = frozenset({"numa", "topology"})
"""Those that compare sets of devices, and not one device with another."""

_PLAIN = DeviceWeights(shares=0)
"""Without weights of a request's own, what is left of time and memory counts alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceChain:
    """How devices of one node are compared for one request."""

    policies: tuple[str, ...] = ("binpack",)
    weights: DeviceWeights | None = None
    ranks: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """The order of devices by a policy that looks at the whole cluster: places by UUID, by policy.
    A policy that is neither here nor known by itself packs."""
    others: Mapping[str, "DeviceChain"] = field(default_factory=dict)
    """How they are compared in modes in which they are not compared so, by mode."""

    def wants_near(self, request: Request) -> bool:
        """Do sets of devices have to be compared?"""
        return request.count > 1 and any(
            name in NEAR_POLICIES and name not in self.ranks for name in self.policies
        )


def device_key(
    each: Candidate, request: Request, chain: DeviceChain, *, others: Sequence[Candidate]
) -> Key:
    """Return what one device is compared by, lower first. `others` are all that fit."""
    state = each.verdict.state
    tag = request.constraints.affinity
    return (
        bool(tag) and tag not in state.affinities,
        each.on_host,
        -min(each.verdict.need_bytes, state.reusable_bytes),
        *(_by(name, each.verdict, chain, others) for name in chain.policies),
        state.device.index,
    )


def set_key(chosen: Sequence[Candidate], request: Request, chain: DeviceChain, links: Links) -> Key:
    """Return what a set of devices is compared by, lower first."""
    tag = request.constraints.affinity
    states = [each.verdict.state for each in chosen]
    return (
        sum(bool(tag) and tag not in state.affinities for state in states),
        sum(each.on_host for each in chosen),
        -sum(min(each.verdict.need_bytes, each.verdict.state.reusable_bytes) for each in chosen),
        *(_of_set(name, chosen, states, chain, links) for name in chain.policies),
    )


def _of_set(
    name: str,
    chosen: Sequence[Candidate],
    states: Sequence[DeviceState],
    chain: DeviceChain,
    links: Links,
) -> float:
    if name not in chain.ranks and name == "numa":
        # Those of which it is not known count as one each, as in the policy over arrays.
        nodes = [state.device.numa_node for state in states]
        return len({node for node in nodes if node is not None}) + nodes.count(None)
    if name not in chain.ranks and name == "topology":
        pairs = combinations([state.device.uuid for state in states], 2)
        return -sum(link_score(links, one, other) for one, other in pairs)
    return sum(_by(name, each.verdict, chain, chosen) for each in chosen)


def _by(name: str, verdict: Verdict, chain: DeviceChain, others: Sequence[Candidate]) -> float:
    state = verdict.state
    ranks = chain.ranks.get(name)
    if ranks is not None:
        return ranks.get(state.device.uuid, len(ranks))
    if name == "spread":
        return _use(verdict, chain.weights or _PLAIN)
    if name in NEAR_POLICIES:
        # One by one: the NUMA node with the fewest devices that fit, so that others stay whole.
        node = state.device.numa_node
        return sum(each.verdict.state.device.numa_node == node for each in others)
    return -_use(verdict, chain.weights or _PLAIN)


def _use(verdict: Verdict, weights: DeviceWeights) -> float:
    """Return how much of a device is given away, a sum of parts of the whole by their weights."""
    state = verdict.state
    device = state.device
    return (
        weights.shares * state.shares / max(1, state.most_shares)
        + weights.compute * state.guaranteed / max(1, state.guaranteeable)
        + weights.memory * state.allotted_bytes / max(1, device.allottable_bytes)
    )

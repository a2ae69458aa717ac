# SPDX-License-Identifier: Apache-2.0
"""Which devices are used first: by default the fullest that fit, so that others stay whole.

A chain of policies decides, each among the ties of the one before. Always first: a device with the
request's affinity tag, then the least host memory, then room already booked for a container of the
pod that never runs at the same time. Of several devices, one model comes next. Links break ties.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, groupby, islice
from types import MappingProxyType

import msgspec

from allotment.model.compute import DEFAULT_FLOOR
from allotment.model.modes import traits_of
from allotment.model.placements import DeviceState, Judgement, Placed, Placement, Verdict
from allotment.model.requests import Constraints, DeviceWeights, Request
from allotment.model.structs import replace
from allotment.placement.constraints import Links, link_score
from allotment.placement.judge import TOO_LITTLE_HOST_MEMORY, given_bytes, judge, overflow
from allotment.placement.selections import Candidate, Effort, selections

Key = tuple[float, ...]

NEAR_POLICIES = frozenset({"numa", "topology"})
"""Policies that compare sets of devices."""

_PLAIN = DeviceWeights(shares=0)
"""Default weights: time and memory left count equally."""


class DeviceChain(msgspec.Struct, frozen=True, kw_only=True):
    """How devices of one node are compared for one request."""

    policies: tuple[str, ...] = ("binpack",)
    weights: DeviceWeights | None = None
    ranks: Mapping[str, Mapping[str, int]] = msgspec.field(default_factory=dict)
    """Ranks by UUID from policies over the whole cluster, by policy; devices of equal cost have
    equal ranks. A policy neither here nor built in packs."""
    others: Mapping[str, "DeviceChain"] = msgspec.field(default_factory=dict)
    """Different chains for some modes."""

    @property
    def wants_near(self) -> bool:
        return any(name in NEAR_POLICIES and name not in self.ranks for name in self.policies)


class Proximity:
    """How sets of candidates are linked, and what they leave."""

    def __init__(self, candidates: Sequence[Candidate], links: Links) -> None:
        self._links = links
        idle = [each.uuid for each in candidates if not each.verdict.state.shares]
        self._idle = frozenset(idle)
        self._to_idle = {
            each.uuid: sum(link_score(links, each.uuid, uuid) for uuid in idle)
            for each in candidates
        }

    def key(self, chosen: Sequence[Candidate]) -> Key:
        """Lower for better links within the set, then for worse links to other idle devices."""
        uuids = [each.uuid for each in chosen]
        within = 0
        cut = sum(self._to_idle[uuid] for uuid in uuids)
        for one, other in combinations(uuids, 2):
            score = link_score(self._links, one, other)
            within += score
            cut -= score * ((one in self._idle) + (other in self._idle))
        return -within, cut


def device_key(
    each: Candidate,
    request: Request,
    chain: DeviceChain,
    *,
    others: Sequence[Candidate],
    proximity: Proximity | None = None,
) -> Key:
    state = each.verdict.state
    tag = request.constraints.affinity
    near = proximity.key([each]) if proximity else ()
    return (
        bool(tag) and tag not in state.affinities,
        each.on_host,
        -min(each.verdict.need_bytes, state.reusable_bytes),
        *(_of_device(name, each, chain, others, near) for name in chain.policies),
        *near,
        state.device.index,
    )


def set_key(
    chosen: Sequence[Candidate],
    request: Request,
    chain: DeviceChain,
    *,
    proximity: Proximity | None = None,
) -> Key:
    tag = request.constraints.affinity
    states = [each.verdict.state for each in chosen]
    near = proximity.key(chosen) if proximity else ()
    return (
        sum(bool(tag) and tag not in state.affinities for state in states),
        sum(each.on_host for each in chosen),
        -sum(min(each.verdict.need_bytes, each.verdict.state.reusable_bytes) for each in chosen),
        len(models(chosen)),
        *(_of_set(name, chosen, chain, near) for name in chain.policies),
        *near,
    )


def models(candidates: Iterable[Candidate]) -> frozenset[str]:
    return frozenset(map(_model, candidates))


def _of_set(name: str, chosen: Sequence[Candidate], chain: DeviceChain, near: Key) -> float:
    if name not in chain.ranks and name == "numa":
        # Devices with unknown NUMA node count as one node each, as in the policy over arrays.
        nodes = [each.verdict.state.device.numa_node for each in chosen]
        return len({node for node in nodes if node is not None}) + nodes.count(None)
    if name not in chain.ranks and name == "topology":
        return near[0] if near else 0
    return sum(_by(name, each.verdict, chain) for each in chosen)


def _of_device(
    name: str, each: Candidate, chain: DeviceChain, others: Sequence[Candidate], near: Key
) -> float:
    if name not in chain.ranks and name == "numa":
        # Prefer the NUMA node with the fewest fitting devices.
        node = each.verdict.state.device.numa_node
        return sum(other.verdict.state.device.numa_node == node for other in others)
    if name not in chain.ranks and name == "topology":
        return near[1] if near else 0
    return _by(name, each.verdict, chain)


def _by(name: str, verdict: Verdict, chain: DeviceChain) -> float:
    ranks = chain.ranks.get(name)
    if ranks is not None:
        return ranks.get(verdict.state.device.uuid, len(ranks))
    use = _use(verdict, chain.weights or _PLAIN)
    return use if name == "spread" else -use


def _use(verdict: Verdict, weights: DeviceWeights) -> float:
    """The used part of a device, as a weighted sum."""
    state = verdict.state
    device = state.device
    return (
        weights.shares * state.shares / max(1, state.most_shares)
        + weights.compute * state.guaranteed / max(1, state.guaranteeable)
        + weights.memory * state.allotted_bytes / max(1, device.allottable_bytes)
    )


NO_LINKS: Links = MappingProxyType({})


def choose(
    states: Iterable[DeviceState], request: Request, *, links: Links = NO_LINKS
) -> Placement | Judgement:
    """Choose `request.count` distinct devices, of one model if possible, the fullest first.

    Devices that need host memory come last; room booked for the same pod comes first. A request
    without compute takes a device whose time is all guaranteed only if there is no other. Ties go
    to the lower index, then the lower UUID, so results repeat. Devices of a placement are in index
    order, like the driver's. `links`: NVLink scores, for requests with that constraint.
    """
    verdicts = [judge(state, request) for state in states]
    fitting = [
        Candidate(verdict, overflow(verdict.state, verdict.need_bytes))
        for verdict in sorted(verdicts, key=lambda verdict: _leaves(verdict, request))
        if verdict.fits
    ]
    sets = _first_sets(fitting, request, links)
    chosen = min(sets, key=lambda each: _set_leaves(each, request), default=None)
    if chosen is None:
        return _rejection(request, verdicts, fitting)
    ordered = sorted((each.verdict for each in chosen), key=_order)
    placed = (Placed(one.state.device, given_bytes(one, request)) for one in ordered)
    return Placement(request, tuple(placed))


def _first_sets(
    fitting: Sequence[Candidate], request: Request, links: Links
) -> Iterator[tuple[Candidate, ...]]:
    """Yield the first set of each model's devices, then the first of all devices."""
    budget = max((each.verdict.state.host_budget_bytes for each in fitting), default=0)
    groups = [fitting]
    if request.count > 1 and len(models(fitting)) > 1:
        by_model = groupby(sorted(fitting, key=_model), key=_model)
        groups = [*(list(alike) for _, alike in by_model), fitting]
    for group in groups:
        # Unbounded: these are the devices of one machine, and `links` leave few sets.
        effort = Effort(left=sys.maxsize)
        sets = selections(group, request, host_budget=budget, effort=effort, links=links)
        yield from islice(sets, 1)


def _model(each: Candidate) -> str:
    return each.verdict.state.device.name


def _set_leaves(chosen: Sequence[Candidate], request: Request) -> tuple[int, ...]:
    """Key like `_leaves`, for sets: fewer models come before tighter fits."""
    more, new, starved, left, index, _ = zip(
        *(_leaves(each.verdict, request) for each in chosen), strict=True
    )
    return sum(more), sum(new), sum(starved), len(models(chosen)), sum(left), min(index)


def _rejection(
    request: Request, verdicts: Sequence[Verdict], fitting: Sequence[Candidate]
) -> Judgement:
    promised = 0
    lacking: dict[str, Verdict] = {}
    # Devices with the least host memory come first: if these need too much, so do all others.
    for each in fitting[: request.count]:
        budget = each.verdict.state.host_budget_bytes
        if promised + each.on_host > budget:
            have = each.verdict.have_bytes - promised
            lacking[each.uuid] = replace(
                each.verdict, have_bytes=have, reason=TOO_LITTLE_HOST_MEMORY
            )
        else:
            promised += each.on_host
    after = tuple(lacking.get(verdict.state.device.uuid, verdict) for verdict in verdicts)
    is_apart = len(fitting) >= request.count and not lacking
    return Judgement(request, after, together=_together(request) if is_apart else "")


def _together(request: Request) -> str:
    wanted = request.constraints
    parts = ["on one NUMA node"] * wanted.same_numa + ["joined by NVLink"] * wanted.needs_nvlink
    return " and ".join(parts)


def follow(
    states: Iterable[DeviceState], request: Request, devices: Sequence[str]
) -> Placement | Judgement:
    """Place a request on devices chosen elsewhere, by UUID.

    A device named several times gives that many parts. The caller refuses unknown devices.
    Constraints are ignored: the choice was made under an earlier state.
    """
    request = replace(request, constraints=Constraints())
    parts = Counter(devices)
    verdicts = [
        judge(state, request.times(parts[state.device.uuid]))
        for state in states
        if state.device.uuid in parts
    ]
    promised = 0
    for number, verdict in enumerate(verdicts):
        more = overflow(verdict.state, verdict.need_bytes)
        if verdict.fits and promised + more > verdict.state.host_budget_bytes:
            have = max(0, verdict.have_bytes - promised)
            verdicts[number] = replace(verdict, have_bytes=have, reason=TOO_LITTLE_HOST_MEMORY)
        promised += more
    if not all(verdict.fits for verdict in verdicts):
        return Judgement(request, tuple(verdicts))
    placed = (
        Placed(
            one.state.device,
            given_bytes(one, request),
            compute=request.times(parts[one.state.device.uuid]).compute,
        )
        for one in sorted(verdicts, key=_order)
    )
    return Placement(request, tuple(placed))


_Leaves = tuple[int, int, bool, int, int, str]


def _leaves(verdict: Verdict, request: Request) -> _Leaves:
    state = verdict.state
    more = overflow(state, verdict.need_bytes)
    new = -min(verdict.need_bytes, state.reusable_bytes)
    # Other shares may use all of its time.
    is_starved = (
        traits_of(request.mode).takes_turns
        and not request.asks_compute
        and state.unguaranteed < DEFAULT_FLOOR
    )
    return (more, new, is_starved, verdict.have_bytes - verdict.need_bytes, *_order(verdict))


def _order(verdict: Verdict) -> tuple[int, str]:
    return (verdict.state.device.index, verdict.state.device.uuid)

# SPDX-License-Identifier: Apache-2.0
"""The input of a replay: a trace, or the nodes and pods of a live cluster."""

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from random import Random
from time import perf_counter, perf_counter_ns
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from allotment.model.clusters import PodNeed
from allotment.model.errors import UsageError
from allotment.model.modes import traits_of
from allotment.model.structs import replace
from allotment.placement.cluster.arrays import PodShape
from allotment.placement.cluster.cluster import Cluster
from allotment.placement.cluster.filters import PodShapes
from allotment.placement.cluster.ranker import Refusals
from allotment.placement.explain import Refusal
from allotment.placement.policies import POLICIES, Policy, make
from allotment.placement.policies.fgd import fragmentation
from allotment.simulate import replay
from allotment.simulate.csv_files import Trace, TracePod, capacity_milli
from allotment.simulate.outcomes import (
    CLAIMS,
    Arrivals,
    Departures,
    Moment,
    Refit,
    ReplayOutcome,
    UnplacedPod,
    decisions_of,
)
from allotment.simulate.placers import ArrayPlacer, mix_of
from allotment.simulate.replay import Counts, Progress
from allotment.simulate.workloads import Visit, as_listed, drawn, timed

if TYPE_CHECKING:  # the replay of a trace takes none of the API server's client
    from allotment.kube.live import LiveCluster, LivePod

_FOR_BOOKS: Final = "first-fit"
_KNOWS_THE_MIX: Final = frozenset({"fgd"})
"""Policies that receive the mix of pods by default, as in their publication."""


class Scene(Protocol):
    """The input of a replay; it can be pickled."""

    def run(self, policy: str, seed: int, progress: Progress) -> ReplayOutcome:
        """Replay once. The same arguments give the same outcome, except for times."""
        ...


class TraceScene(msgspec.Struct, frozen=True, kw_only=True):
    """A trace, and how its pods arrive."""

    trace: Trace
    tune: float | None = 1.3
    """Requests in total (with departures: on average at a time), relative to all GPUs; None: every
    pod of the trace arrives once."""
    has_departures: bool = False
    is_mix_known: bool | None = None
    """Whether policies receive the mix of pods; None: each as published."""

    def __post_init__(self) -> None:
        if not capacity_milli(self.trace.nodes):
            raise UsageError(
                "the nodes have no GPU", hint="column gpu is the number of GPUs of each node"
            )

    def run(self, policy: str, seed: int, progress: Progress) -> ReplayOutcome:
        begun = perf_counter()
        placer = self._placer(policy, seed)
        number, story, counts = self._replay(placer, seed, progress)
        return ReplayOutcome(
            policy=policy,
            seed=seed,
            pods=number,
            placed=counts.placed,
            impossible=counts.impossible,
            story=story,
            decisions=decisions_of(counts.decided_ns),
            seconds=perf_counter() - begun,
        )

    def _placer(self, policy: str, seed: int) -> ArrayPlacer:
        nodes, pods = self.trace.nodes, self.trace.pods
        if policy == CLAIMS:
            from allotment.simulate.claim_placers import ClaimPlacer

            return ClaimPlacer(nodes, pods=pods, seed=seed)
        return ArrayPlacer(nodes, self._policy(policy, seed), pods=pods)

    def _replay(
        self, placer: ArrayPlacer, seed: int, progress: Progress
    ) -> tuple[int, Arrivals | Departures, Counts]:
        capacity = capacity_milli(self.trace.nodes)
        if self.has_departures:
            visits = self.visits(seed)
            return len(visits), *replay.replay_visits(
                placer, visits, capacity_milli=capacity, progress=progress
            )
        pods = self.pods(seed)
        return len(pods), *replay.replay(placer, pods, capacity_milli=capacity, progress=progress)

    def pods(self, seed: int) -> Sequence[TracePod]:
        if self.tune is None:
            return as_listed(self.trace.pods, seed=seed)
        capacity = capacity_milli(self.trace.nodes)
        return drawn(self.trace.pods, capacity_milli=capacity, tune=self.tune, seed=seed)

    def visits(self, seed: int) -> Sequence[Visit]:
        capacity = capacity_milli(self.trace.nodes)
        return timed(self.trace.pods, capacity_milli=capacity, tune=self.tune, seed=seed)

    def _policy(self, name: str, seed: int) -> Policy:
        policy = make(name, seed=seed)
        is_known = name in _KNOWS_THE_MIX if self.is_mix_known is None else self.is_mix_known
        if is_known:
            policy.expect(mix_of(self.trace.pods))
        return policy


def check_policies(names: Sequence[str]) -> None:
    for name in names:
        if name not in POLICIES:
            make(name)


class Replayed(StrEnum):
    """The pods to place again."""

    ALL = "all"
    """Running and pending pods, on an empty cluster, in random order."""
    PENDING = "pending"
    """Pending pods; running pods stay."""


class LiveScene(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster as read from the API server."""

    cluster: "LiveCluster"
    replayed: Replayed = Replayed.ALL

    def __post_init__(self) -> None:
        if not any(node.devices for node in self.cluster.nodes):
            raise UsageError(
                "no node of the cluster publishes GPUs to share",
                hint="check that `allot agent` runs: it writes the annotation"
                " allotment.dev/devices",
            )

    @property
    def movable(self) -> "Sequence[LivePod]":
        return [pod for pod in self.cluster.pods if self._moves(pod)]

    def run(self, policy: str, seed: int, progress: Progress) -> ReplayOutcome:
        begun = perf_counter()
        movable = list(self.movable)
        if self.replayed is Replayed.ALL:
            Random(seed).shuffle(movable)  # noqa: S311 - a sample, no secret
        cluster = self._cluster(policy, [pod for pod in self.cluster.pods if not self._moves(pod)])
        mix = self._mix(cluster)
        counts = Counts()
        placing, empty = self._placing(policy, cluster, seed)
        unplaced = []
        for number, pod in enumerate(movable):
            refused = placing.place(pod.need, counts)
            if refused is not None:
                unplaced.append(refused)
                counts.impossible += not empty.fits(pod.need)
            progress((number + 1) / len(movable))
        before = self._cluster(policy, self.cluster.pods)
        return ReplayOutcome(
            policy=policy,
            seed=seed,
            pods=len(movable),
            placed=counts.placed,
            impossible=counts.impossible,
            story=Refit(
                before=_moment(before, mix), after=_moment(cluster, mix), unplaced=tuple(unplaced)
            ),
            decisions=decisions_of(counts.decided_ns),
            seconds=perf_counter() - begun,
        )

    def _placing(self, policy: str, cluster: Cluster, seed: int) -> "tuple[_Placing, _Placing]":
        """Return what places pods in the cluster, and in an empty one."""
        empty = self._cluster(policy, ())
        if policy == CLAIMS:
            from allotment.simulate.claim_placers import LiveClaims

            return LiveClaims(cluster, seed=seed), LiveClaims(empty, seed=seed)
        return _Extender(cluster), _Extender(empty)

    def _moves(self, pod: "LivePod") -> bool:
        if self.replayed is Replayed.PENDING and pod.booking is not None:
            return False
        return pod.can_move

    def _cluster(self, policy: str, staying: "Sequence[LivePod]") -> Cluster:
        name = _FOR_BOOKS if policy == CLAIMS else policy
        cluster = Cluster(node_policies=(name,), device_policies=(name,))
        for node in self.cluster.nodes:
            cluster.put(node)
        for claim in self.cluster.claims:
            cluster.book(claim)
        for pod in staying:
            if pod.booking is not None:
                cluster.book(pod.booking)
        return cluster

    def _mix(self, cluster: Cluster) -> Mapping[PodShape, float]:
        kinds = PodShapes(cluster.arrays)
        asking = [pod.need for pod in self.cluster.pods if pod.need.containers]
        # Fragmentation is measured on parts of devices; slices are not parts.
        return Counter(
            replace(kind, memory_bytes=0)
            for kind in map(kinds.of, asking)
            if not traits_of(kind.mode).is_slice
        )


class _Placing(Protocol):
    """Places the pods of a live cluster."""

    def place(self, need: PodNeed, counts: Counts) -> UnplacedPod | None:
        """Place and book one pod; return why it fits nowhere."""
        ...

    def fits(self, need: PodNeed) -> bool: ...


class _Extender:
    """Places by a policy, as the scheduler's extender does."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def fits(self, need: PodNeed) -> bool:
        return bool(self._cluster.rank(need, most=1).best)

    def place(self, need: PodNeed, counts: Counts) -> UnplacedPod | None:
        cluster = self._cluster
        cluster.arrived(need)
        begun = perf_counter_ns()
        ranking = cluster.rank(need, most=1)
        decision = cluster.place(need, ranking.best[0]) if ranking.best else None
        counts.decided_ns.append(perf_counter_ns() - begun)
        if decision is None:
            return _unplaced_pod(need, ranking.refused)
        if isinstance(decision, Refusal):
            # `rank` has just found that it fits.
            raise ValueError(decision)  # noqa: TRY004 - not about types
        cluster.book(decision)
        counts.placed += 1
        return None


def _unplaced_pod(need: PodNeed, refused: Refusals) -> UnplacedPod:
    reasons = refused.reasons()
    most = reasons.most_common(1)
    text = next(
        (
            f"{node}: {refusal.text}"
            for node, refusal in refused.items()
            if refusal.reason == most[0][0]
        ),
        "",
    )
    return UnplacedPod(str(need), dict(reasons.most_common()), text)


def _moment(cluster: Cluster, mix: Mapping[PodShape, float]) -> Moment:
    totals = cluster.totals().values()
    guarantee = sum(total.guarantee for total in totals) or 1
    memory = sum(total.memory for total in totals) or 1
    arrays = cluster.arrays
    return Moment(
        allocated_pct=100 * sum(total.guarantee_allocated for total in totals) / guarantee,
        allocated_memory_pct=100 * sum(total.memory_allocated for total in totals) / memory,
        fragmented_pct=100 * float(fragmentation(arrays, mix).sum()) / guarantee if mix else 0.0,
        idle_gpus=int((arrays.idle & arrays.usable).sum()),
    )

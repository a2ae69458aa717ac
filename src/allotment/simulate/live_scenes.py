# SPDX-License-Identifier: Apache-2.0
"""A live cluster's pods placed again by another policy: what would fit, and what would be left?

The scheduler's whole way decides, since pods of a cluster are of any form. What kube-scheduler
checks besides (selectors, affinity to nodes, taints) is not looked at.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random
from time import perf_counter, perf_counter_ns

from allotment.kube.live import LiveCluster, LivePod
from allotment.model.clusters import NodeRejection, PodNeed
from allotment.model.errors import UsageError
from allotment.model.requests import MIG
from allotment.placement.arrays import Kind
from allotment.placement.cluster import Cluster, Refusals
from allotment.placement.kinds import Kinds
from allotment.placement.policies.fgd import fragmentation
from allotment.simulate.arriving import Counts, Progress
from allotment.simulate.outcomes import Moment, Outcome, Refit, Unplaced, decisions_of

__all__ = ["LiveScene", "Replayed"]


class Replayed(StrEnum):
    """Which pods are placed anew."""

    ALL = "all"
    """Those that run, too: as if the cluster were empty, in an order drawn by the seed."""
    PENDING = "pending"
    """Those that wait; what runs stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveScene:
    """A cluster as it was read."""

    cluster: LiveCluster
    replayed: Replayed = Replayed.ALL

    def __post_init__(self) -> None:
        """Refuse what nothing could be said about."""
        if not any(node.devices for node in self.cluster.nodes):
            raise UsageError(
                "no node of the cluster says that it has GPUs to share",
                hint="does `allot agent` run there? It writes the annotation allotment.dev/devices",
            )

    @property
    def movable(self) -> Sequence[LivePod]:
        """The pods that are placed anew."""
        return [pod for pod in self.cluster.pods if self._moves(pod)]

    def run(self, policy: str, seed: int, progress: Progress) -> Outcome:
        """Place the pods that can move, one after the other."""
        begun = perf_counter()
        movable = list(self.movable)
        if self.replayed is Replayed.ALL:
            Random(seed).shuffle(movable)  # noqa: S311 - a sample, no secret
        cluster = self._cluster(policy, [pod for pod in self.cluster.pods if not self._moves(pod)])
        mix = self._mix(cluster)
        counts = Counts()
        empty = self._cluster(policy, ())
        unplaced = []
        for number, pod in enumerate(movable):
            refused = _place(cluster, pod.need, counts)
            if refused is not None:
                unplaced.append(_told(pod.need, refused))
                counts.impossible += not empty.rank(pod.need, most=1).best
            progress((number + 1) / len(movable))
        before = self._cluster(policy, self.cluster.pods)
        return Outcome(
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

    def _moves(self, pod: LivePod) -> bool:
        if self.replayed is Replayed.PENDING and pod.booking is not None:
            return False
        return pod.can_move

    def _cluster(self, policy: str, staying: Sequence[LivePod]) -> Cluster:
        cluster = Cluster(node_policies=(policy,), device_policies=(policy,))
        for node in self.cluster.nodes:
            cluster.put(node)
        for pod in staying:
            if pod.booking is not None:
                cluster.book(pod.booking)
        return cluster

    def _mix(self, cluster: Cluster) -> Mapping[Kind, float]:
        kinds = Kinds(cluster.arrays)
        asking = [pod.need for pod in self.cluster.pods if pod.need.containers]
        # Fragmentation is measured by parts of devices, and slices are none.
        return Counter(
            replace(kind, memory_bytes=0) for kind in map(kinds.of, asking) if kind.mode != MIG
        )


def _place(cluster: Cluster, need: PodNeed, counts: Counts) -> Refusals | None:
    """Place and book one pod; return who refused it if nobody takes it."""
    cluster.arrived(need)
    begun = perf_counter_ns()
    ranking = cluster.rank(need, most=1)
    decision = cluster.place(need, ranking.best[0]) if ranking.best else None
    counts.decided_ns.append(perf_counter_ns() - begun)
    if decision is None:
        return ranking.refused
    if isinstance(decision, NodeRejection):
        # `rank` has just said that it fits.
        raise ValueError(decision)  # noqa: TRY004 - no matter of types
    cluster.book(decision)
    counts.placed += 1
    return None


def _told(need: PodNeed, refused: Refusals) -> Unplaced:
    reasons = refused.reasons()
    most = reasons.most_common(1)
    example = next((each for name in refused if (each := refused[name]).reason == most[0][0]), None)
    text = f"{example.node}: {example.text}" if example else ""
    return Unplaced(str(need), dict(reasons.most_common()), text)


def _moment(cluster: Cluster, mix: Mapping[Kind, float]) -> Moment:
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

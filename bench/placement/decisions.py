# SPDX-License-Identifier: Apache-2.0
"""How long decisions take on a large cluster: ranking, placing, booking, releasing; one process.

The cluster is made up: the sizes and models of a production cluster of 1,213 nodes and 6,212 GPUs,
or so many nodes of eight GPUs each, filled by half, at random, with pods of a hundred kinds. Then
pods come and go, one booked for each released; each is ranked over all nodes, placed and booked. A
"new" kind is one that nobody has asked for before, a "repeated" one has been asked for, and nodes
have changed since.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Sequence
from random import Random

from allotment.model.clusters import (
    NodeDevice,
    NodeInventory,
    PodBooking,
    PodNeed,
    WantedContainer,
)
from allotment.model.compute import Compute
from allotment.model.pods import PodUid
from allotment.model.quantities import MemoryAmount
from allotment.model.requests import Constraints, ModelRule, Request
from allotment.model.structs import replace
from allotment.placement.cluster.cluster import Cluster
from allotment.placement.explain import Refusal
from bench.harness.options import Options
from bench.harness.results import Result
from bench.harness.runner import NoRig
from bench.harness.stopwatch import Stopwatch, without_gc

GI = 1 << 30
SIZES = (*(8,) * 617, *(4,) * 54, *(2,) * 518, 1, *(1,) * 23)
MODELS = (("A100-SXM4-80GB", 80, 70), ("Tesla-T4", 16, 20), ("V100-SXM2-32GB", 32, 10))


def nodes(count: int, random: Random) -> Iterator[NodeInventory]:
    """Make up the cluster."""
    sizes: Sequence[int] = SIZES if count == len(SIZES) else (8,) * count
    weights = [weight for *_, weight in MODELS]
    for number, size in enumerate(sizes):
        model, memory, _ = random.choices(MODELS, weights)[0]
        yield NodeInventory(
            name=f"node-{number:05}",
            cpu_milli=12_000 * size,
            memory_bytes=96 * GI * size,
            devices=tuple(
                NodeDevice(
                    uuid=f"GPU-{number:05}-{index}",
                    model=model,
                    memory_bytes=memory * GI,
                    index=index,
                    numa_node=2 * index // size,
                )
                for index in range(size)
            ),
        )


def kind(random: Random) -> PodNeed:
    """Make up what a pod asks for: shares mostly, as many whole GPUs, few of several."""
    count = random.choices((1, 2, 4, 8), (96, 2, 1, 1))[0]
    is_whole = count > 1 or random.random() < 0.5
    guarantee = 10_000 if is_whole else random.randrange(500, 9_000, 500)
    memory = random.choice((15, 15, 30, 70)) if is_whole else random.choice((2, 4, 6, 8, 12))
    constraints = Constraints()
    if random.random() < 0.2:
        constraints = Constraints(models=(ModelRule(random.choice(MODELS)[0], is_exact=True),))
    return PodNeed(
        uid=PodUid(""),
        cpu_milli=random.randrange(500, 8_000, 500) * count,
        memory_bytes=random.randrange(1, 32) * GI,
        containers=(
            WantedContainer(
                name="main",
                request=Request(
                    MemoryAmount(f"{memory}Gi", size_bytes=memory * GI),
                    count=count,
                    compute=Compute(guarantee),
                    constraints=constraints,
                ),
            ),
        ),
    )


def fancy(need: PodNeed) -> PodNeed:
    """Ask for what arrays do not know."""
    wanted = need.containers[0]
    constraints = replace(wanted.request.constraints, exclusion="team")
    request = replace(wanted.request, constraints=constraints)
    return replace(need, containers=(replace(wanted, request=request),))


class Run:
    """One cluster under load."""

    def __init__(self, options: Options, *, node_count: int) -> None:
        self.random = Random(1 if options.seed is None else options.seed)  # noqa: S311 - a made-up load, no secret
        self.cluster = Cluster(node_policies=[options.policy], device_policies=[options.policy])
        self.watch = Stopwatch()
        self.most: int | None = options.most
        self.kinds = [kind(self.random) for _ in range(100)]
        self.booked: list[PodUid] = []
        self.number = 0
        for node in nodes(node_count, self.random):
            self.cluster.put(node)
        self.names = list(self.cluster.arrays.row)

    def fill(self, part: float) -> None:
        """Fill the cluster to this part of its time, on nodes at random: no two are left alike."""
        while self.full() < part:
            for _ in range(100):
                self.number += 1
                uid = PodUid(f"pod-{self.number}")
                need = replace(self.random.choice(self.kinds), uid=uid)
                self.cluster.arrived(need)
                booking = self.cluster.place(need, self.random.choice(self.names))
                if isinstance(booking, PodBooking):
                    self.cluster.book(booking)
                    self.booked.append(uid)

    def full(self) -> float:
        """Return which part of all time is given away."""
        totals = self.cluster.totals().values()
        return sum(each.guarantee_allocated for each in totals) / sum(
            each.guarantee for each in totals
        )

    def one(self, need: PodNeed, what: str) -> None:
        """Let one pod come."""
        self.number += 1
        need = replace(need, uid=PodUid(f"pod-{self.number}"))
        self.watch.of("arrived", lambda: self.cluster.arrived(need))
        ranking = self.watch.of(
            f"rank, {what}", lambda: self.cluster.rank(need, self.names, most=self.most)
        )
        if not ranking.best:
            return
        booking = self.watch.of(f"place, {what}", lambda: self.cluster.place(need, ranking.best[0]))
        assert isinstance(booking, PodBooking), booking
        self.watch.of("book", lambda: self.cluster.book(booking))
        self.booked.append(need.uid)

    def leave(self) -> None:
        """Let one pod go, any of them."""
        at = self.random.randrange(len(self.booked))
        self.booked[at], self.booked[-1] = self.booked[-1], self.booked[at]
        uid = self.booked.pop()
        self.watch.of("release", lambda: self.cluster.release(uid))

    def refuse(self) -> None:
        """Ask for what is nowhere, and why."""
        need = kind(self.random)
        wanted = need.containers[0]
        memory = MemoryAmount("99Gi", size_bytes=99 * GI)
        request = replace(wanted.request, memory=memory)
        need = replace(need, containers=(replace(wanted, request=request),))
        ranking = self.cluster.rank(need, self.names)
        assert not ranking.best
        found = self.watch.of("refusals, all nodes", lambda: list(ranking.refused.values()))
        assert all(isinstance(each, Refusal) for each in found)


def decisions(_rig: NoRig, options: Options) -> Iterator[Result]:
    """Fill a cluster by half, and let pods come and go."""
    pods = options.pods or options.pick(1500, 40)
    with without_gc():
        run = Run(options, node_count=options.nodes or options.pick(len(SIZES), 100))
        began = time.perf_counter()
        run.fill(0.5)
        took = time.perf_counter() - began
        run.watch.clear()
        for _ in range(pods):
            run.leave()
            run.one(run.random.choice(run.kinds), "repeated kind")
        for _ in range(pods // 4):
            run.leave()
            run.one(kind(run.random), "new kind")
        for _ in range(pods // 10):
            run.leave()
            run.one(fancy(run.random.choice(run.kinds)), "with tags")
        for _ in range(10):
            run.refuse()
        run.cluster.check_invariants()
    yield from run.watch.results()
    yield Result(
        name=f"filling half of {len(run.names):,} nodes",
        topic="filling",
        unit="s",
        value=took,
        method="pods of a hundred kinds on nodes at random, by the wall clock",
    )
    yield Result(
        name=f"memory of this process, {len(run.names):,} nodes, policy {options.policy}",
        topic="memory",
        unit="MiB",
        value=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        method=f"the most so far; {len(run.booked):,} pods, {100 * run.full():.0f} % full",
    )

# SPDX-License-Identifier: Apache-2.0
"""How long decisions about slices take on a large cluster: ranking, placing, booking; one process.

The cluster is made up: nodes of eight H100s that can be cut, filled with slices at random until two
of three slots are taken, so that GPUs are cut in all ways that there are. Then pods come and go,
one booked for each that goes; each is ranked over all nodes, placed and booked. "Either" asks for
a slice or else for a soft share, and "two" has two containers with a slice each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from random import Random

from cut_nodes import cut_device, node_of, pod_of, slices
from mig_profiles import profiles

from allotment.model.clusters import PodBooking, PodNeed
from allotment.model.modes import MIG, SOFT
from allotment.model.pods import PodUid
from allotment.model.structs import replace
from allotment.placement.cluster.cluster import Cluster
from allotment.placement.explain import Refusal
from bench.harness.options import Options
from bench.harness.results import Result
from bench.harness.runner import NoRig
from bench.harness.stopwatch import Stopwatch, without_gc

MODEL = "H100-80GB"
MIX = (("1g.10gb", 40), ("1g.20gb", 10), ("2g.20gb", 20), ("3g.40gb", 18), ("4g.40gb", 6))
"""Of slices, percent: those of issue 7 without the whole GPU, which none has room for."""
SLOTS = {each.name: each.size for each in profiles(MODEL)}


class Run:
    """One cluster under load."""

    def __init__(self, nodes: int, seed: int) -> None:
        self.random = Random(seed)  # noqa: S311 - a made-up load, no secret
        self.cluster = Cluster()
        self.watch = Stopwatch()
        self.booked: list[PodBooking] = []
        self.number = 0
        for number in range(nodes):
            name = f"node-{number:05}"
            gpus = (cut_device(f"{name}-{index}", model=MODEL) for index in range(8))
            self.cluster.put(node_of(*gpus, name=name))
        self.names = list(self.cluster.arrays.row)

    def pod(self, containers: int = 1, modes: tuple[str, ...] = (MIG,)) -> PodNeed:
        """One more pod."""
        self.number += 1
        names, weights = [name for name, _ in MIX], [weight for _, weight in MIX]
        asked = self.random.choices(names, weights, k=containers)
        requests = (slices(each, modes=modes, gib=1) for each in asked)
        return pod_of(*requests, uid=f"pod-{self.number}", cpu=10)

    def fill(self, part: float) -> None:
        """Fill this part of all slots, on nodes at random."""
        slots = 0
        while slots < part * 8 * 8 * len(self.names):
            booking = self.cluster.place(self.pod(), self.random.choice(self.names))
            if isinstance(booking, PodBooking):
                self.keep(booking)
                slots += sum(
                    SLOTS[each.slice.profile]
                    for each in booking.containers[0].devices
                    if each.slice
                )

    def keep(self, booking: PodBooking) -> None:
        """Book a pod."""
        self.cluster.book(booking)
        self.booked.append(booking)

    def one(self, need: PodNeed, what: str, most: int | None) -> None:
        """Let one pod go, and one come."""
        at = self.random.randrange(len(self.booked))
        self.booked[at], self.booked[-1] = self.booked[-1], self.booked[at]
        uid = self.booked.pop().uid
        self.watch.of("release", lambda: self.cluster.release(uid))
        ranking = self.watch.of(
            f"rank, {what}", lambda: self.cluster.rank(need, frozenset(self.names), most=most)
        )
        if ranking.best:
            node = ranking.best[0]
            booking = self.watch.of(f"place, {what}", lambda: self.cluster.place(need, node))
            assert isinstance(booking, PodBooking), booking
            self.watch.of("book", lambda: self.keep(booking))

    def refuse(self) -> None:
        """Ask for what is nowhere, and why."""
        need = self.pod()
        wanted = need.containers[0]
        request = replace(wanted.request, mig_profile="7g.80gb", count=9)
        need = replace(need, uid=PodUid("large"), containers=(replace(wanted, request=request),))
        ranking = self.cluster.rank(need, self.names)
        assert not ranking.best
        found = self.watch.of("why not, all nodes", lambda: list(ranking.refused.values()))
        assert all(isinstance(each, Refusal) for each in found)


def slice_decisions(_rig: NoRig, options: Options) -> Iterator[Result]:
    """Fill two of three slots, and let pods come and go."""
    nodes = options.nodes or options.pick(1000, 40)
    pods = options.pods or options.pick(2000, 40)
    with without_gc():
        run = Run(nodes, 1 if options.seed is None else options.seed)
        run.fill(0.66)
        run.watch.clear()
        for _ in range(pods):
            run.one(run.pod(), "the best node", 1)
        for _ in range(pods // 4):
            run.one(run.pod(), "all nodes", None)
        for _ in range(pods // 10):
            run.one(run.pod(modes=(MIG, SOFT)), "either, all nodes", None)
        for _ in range(pods // 40):
            run.one(run.pod(containers=2), "two, all nodes", None)
        for _ in range(10):
            run.refuse()
        run.cluster.check_invariants()
    for result in run.watch.results():
        yield dataclasses.replace(result, name=f"{result.name}, {nodes:,} nodes")

# SPDX-License-Identifier: Apache-2.0
"""How long decisions about slices take on a large cluster: ranking, placing, booking; one process.

    .venv/bin/python bench/mig_cluster.py [--nodes 1000] [--pods 2000] [--markdown]

The cluster is made up: nodes of eight H100s that can be cut, filled with slices at random until two
of three slots are taken, so that GPUs are cut in all ways that there are. Then pods come and go,
one booked for each that goes; each is ranked over all nodes, placed and booked. "Either" asks for
a slice or else for a soft share, and "two" has two containers with a slice each.
"""

import argparse
import gc
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "twins"))

from cut_nodes import cut_device, node_of, pod_of, slices
from mig_profiles import profiles
from placement import Stopwatch
from places import ROOT, facts
from tables import put_between_markers

from allotment.model.clusters import NodeRejection, PodBooking, PodNeed
from allotment.model.pods import PodUid
from allotment.model.requests import MIG, SOFT
from allotment.placement.cluster import Cluster

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
        assert all(isinstance(each, NodeRejection) for each in found)


def rows(watch: Stopwatch) -> list[str]:
    """Return the table's lines: milliseconds of the processor."""
    lines = ["| decision | p50 | p99 | calls |", "| --- | --- | --- | --- |"]
    for name, times in watch.times.items():
        ordered = sorted(cpu for _, cpu in times)
        p50, p99 = (1000 * ordered[int(len(ordered) * part)] for part in (0.5, 0.99))
        lines.append(f"| {name} | {p50:.2f} ms | {p99:.2f} ms | {len(times):,} |")
    return lines


def main() -> None:
    """Measure and tell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--pods", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--markdown", action="store_true", help="also into docs/performance.md")
    args = parser.parse_args()
    gc.disable()
    run = Run(args.nodes, args.seed)
    start = time.perf_counter()
    run.fill(0.66)
    print(f"{len(run.booked):,} slices in {time.perf_counter() - start:.1f} s", file=sys.stderr)
    run.watch.times.clear()
    for _ in range(args.pods):
        run.one(run.pod(), "the best node", 1)
    for _ in range(args.pods // 4):
        run.one(run.pod(), "all nodes", None)
    for _ in range(args.pods // 10):
        run.one(run.pod(modes=(MIG, SOFT)), "either, all nodes", None)
    for _ in range(args.pods // 40):
        run.one(run.pod(containers=2), "two, all nodes", None)
    for _ in range(10):
        run.refuse()
    run.cluster.check_invariants()
    there = {name: value for name, value in facts("none").items() if name != "driver"}
    there["processors"] = f"load average {os.getloadavg()[1]:.0f}, other programs included"
    body = "\n".join(
        [
            f"Made by `{' '.join(['python bench/mig_cluster.py', *sys.argv[1:]])}` on:",
            "",
            *(f"- {name}: {value}" for name, value in there.items()),
            "",
            f"{args.nodes:,} nodes of eight {MODEL}, two of three slots taken; processor time:",
            "",
            *rows(run.watch),
        ]
    )
    print(body)
    if args.markdown:
        page = Path(ROOT) / "docs" / "performance.md"
        put_between_markers(page, name="mig-cluster", title="Slices in a cluster", body=body)


if __name__ == "__main__":
    main()

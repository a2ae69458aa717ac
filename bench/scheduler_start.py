# SPDX-License-Identifier: Apache-2.0
"""5,000 nodes and 30,000 pods: from start to ready, and how much memory that takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from scheduler_figures import Figure, Scale, Spec, nodes
from scheduler_ground import gpu_body, ground, scheduling


def starts(scale: Scale) -> Iterator[Figure]:
    """Pods of both kinds are there, bound by hand: what is measured is reading them."""
    inventories = nodes(scale.of(5000))
    pods = scale.of(30_000)
    with ground(inventories) as made:
        namespace = made.namespace()
        made.cluster.stop("kube-scheduler")
        bodies = []
        for number in range(pods):
            body = gpu_body(f"s-{number}", Spec(1, 10, 12, 100))
            body["spec"]["nodeName"] = inventories[number % len(inventories)].name
            bodies.append(body)
        made.create(namespace, bodies)
        began = time.monotonic()
        with scheduling(made, scale) as scheduler:
            ready_s = time.monotonic() - began
            status = Path(f"/proc/{scheduler.process.pid}/status").read_text("ascii")
            kib = next(int(line.split()[1]) for line in status.splitlines() if "VmRSS" in line)
            most = next(int(line.split()[1]) for line in status.splitlines() if "VmHWM" in line)
        what = f"{len(inventories):,} nodes, {pods:,} pods"
        yield Figure(name=f"{what}: start to ready", value=ready_s, unit="s", target="30 s")
        yield Figure(name=f"{what}: memory", value=kib / 1024, unit="MiB", target="700 MiB")
        yield Figure(name=f"{what}: most memory", value=most / 1024, unit="MiB")

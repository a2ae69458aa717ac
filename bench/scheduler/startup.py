# SPDX-License-Identifier: Apache-2.0
"""5,000 nodes and 30,000 pods: from start to ready, and how much memory that takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from bench.harness.options import Options
from bench.harness.results import Result
from bench.harness.runner import NoRig
from bench.scheduler.cluster_shape import Scale, Spec, nodes
from bench.scheduler.control_plane import control_plane, gpu_body, scheduling


def startup(_rig: NoRig, options: Options) -> Iterator[Result]:
    """Pods of both kinds are there, bound by hand: what is measured is reading them."""
    scale = Scale.chosen(options)
    inventories = nodes(scale.of(5000))
    pods = scale.of(30_000)
    with control_plane(inventories) as plane:
        namespace = plane.namespace()
        plane.cluster.stop("kube-scheduler")
        bodies = []
        for number in range(pods):
            body = gpu_body(f"s-{number}", Spec(1, 10, 12, 100))
            body["spec"]["nodeName"] = inventories[number % len(inventories)].name
            bodies.append(body)
        plane.create(namespace, bodies)
        began = time.monotonic()
        with scheduling(plane, scale) as scheduler:
            ready_s = time.monotonic() - began
            status = Path(f"/proc/{scheduler.process.pid}/status").read_text("ascii")
            kib = next(int(line.split()[1]) for line in status.splitlines() if "VmRSS" in line)
            most = next(int(line.split()[1]) for line in status.splitlines() if "VmHWM" in line)
        what = f"{len(inventories):,} nodes, {pods:,} pods"
        yield Result(name=f"{what}: start to ready", value=ready_s, unit="s", target=30.0)
        yield Result(name=f"{what}: memory", value=kib / 1024, unit="MiB", target=700.0)
        yield Result(name=f"{what}: most memory", value=most / 1024, unit="MiB")

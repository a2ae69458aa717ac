# SPDX-License-Identifier: Apache-2.0
"""What binding a pod costs each process of the control plane, in processor time.

How many pods a second is as much a figure of the machine as of the programs; on one that has other
things to do it says nothing. Processor time does, if both kinds of pods are measured in one run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Final

from scheduling import Scheduler
from testbed.api import Json

from bench.harness.machine import cpu_seconds
from bench.harness.options import Options
from bench.harness.results import Result
from bench.harness.runner import NoRig
from bench.scheduler.cluster_shape import Scale, nodes, specs
from bench.scheduler.control_plane import (
    ControlPlane,
    control_plane,
    gpu_body,
    gpu_body_in_percent,
    plain_body,
    scheduling,
)

_PODS = 1000
_OURS: Final = "allot scheduler"
_KUBE_SCHEDULER: Final = "kube-scheduler"
_KEPT: Final = ("etcd", "kube-apiserver")
_BENCH: Final = "this bench"


def cost(_rig: NoRig, options: Options) -> Iterator[Result]:
    """Kinds of pods in turn, on the same empty cluster of 1,213 nodes."""
    scale = Scale.chosen(options)
    number = scale.of(_PODS)
    with control_plane(nodes()) as plane, scheduling(plane, scale) as ours:
        start = _start_of_kube_scheduler(plane)
        wanted = [spec for spec, _ in zip(specs(2), range(number), strict=False)]
        kinds: dict[str, Sequence[Json]] = {
            "only CPU": [plain_body(f"p-{each}") for each in range(number)],
            "GPUs": [gpu_body(f"g-{each}", spec) for each, spec in enumerate(wanted)],
            "GPUs, memory in percent": [
                gpu_body_in_percent(f"h-{each}", spec) for each, spec in enumerate(wanted)
            ],
        }
        sums = {}
        for kind, bodies in kinds.items():
            spent = _spent(plane, ours, bodies)
            spent[_KUBE_SCHEDULER] = max(0.0, spent[_KUBE_SCHEDULER] - start)
            sums[kind] = sum(spent.values())
            for process, seconds in spent.items():
                value = 1000 * seconds / number
                yield Result(name=f"a pod that asks {kind}: {process}", value=value, unit="ms")
        for kind in list(kinds)[1:]:
            ratio = sums["only CPU"] / sums[kind]
            yield Result(name=f"processor time, only CPU over {kind}", value=ratio, unit="")


def _spent(plane: ControlPlane, ours: Scheduler, bodies: Sequence[Json]) -> dict[str, float]:
    """Bind pods that wait; return the seconds of each process from there on."""
    namespace = plane.namespace()
    with plane.cluster.without(_KUBE_SCHEDULER):
        plane.create(namespace, bodies)
        before = _used(plane, ours)
    plane.bound_at(namespace, len(bodies), timeout_s=600)
    spent = {name: used - before[name] for name, used in _used(plane, ours).items()}
    spent[_KUBE_SCHEDULER] = cpu_seconds(plane.cluster.components[_KUBE_SCHEDULER].process.pid)
    return spent


def _start_of_kube_scheduler(plane: ControlPlane) -> float:
    """Return what it takes to start where nothing waits."""
    with plane.cluster.without(_KUBE_SCHEDULER):
        pass
    plane.bound_at(_one(plane), 1, timeout_s=60)
    return cpu_seconds(plane.cluster.components[_KUBE_SCHEDULER].process.pid)


def _one(plane: ControlPlane) -> str:
    namespace = plane.namespace()
    plane.create(namespace, [plain_body("first")])
    return namespace


def _used(plane: ControlPlane, ours: Scheduler) -> dict[str, float]:
    """Return what each has used, but kube-scheduler, which is not always there."""
    there = {name: plane.cluster.components[name].process.pid for name in _KEPT}
    return {
        name: cpu_seconds(pid)
        for name, pid in {**there, _OURS: ours.process.pid, _BENCH: os.getpid()}.items()
    }

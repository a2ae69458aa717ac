# SPDX-License-Identifier: Apache-2.0
"""What binding a pod costs each process of the control plane, in processor time.

How many pods a second is as much a figure of the machine as of the programs; on one that has other
things to do it says nothing. Processor time does, if both kinds of pods are measured in one run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from scheduler_figures import Figure, Scale, nodes, specs
from scheduler_ground import (
    Ground,
    gpu_body,
    gpu_body_in_percent,
    ground,
    plain_body,
    scheduling,
)
from scheduling import Scheduler
from testbed.api import Json

_PODS = 1000
_OURS: Final = "allot scheduler"
_KUBE_SCHEDULER: Final = "kube-scheduler"
_KEPT: Final = ("etcd", "kube-apiserver")
_BENCH: Final = "this bench"


def costs(scale: Scale) -> Iterator[Figure]:
    """Kinds of pods in turn, on the same empty cluster of 1,213 nodes."""
    number = scale.of(_PODS)
    with ground(nodes()) as made, scheduling(made, scale) as ours:
        start = _start_of_kube_scheduler(made)
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
            spent = _spent(made, ours, bodies)
            spent[_KUBE_SCHEDULER] = max(0.0, spent[_KUBE_SCHEDULER] - start)
            sums[kind] = sum(spent.values())
            for process, seconds in spent.items():
                value = 1000 * seconds / number
                yield Figure(name=f"a pod that asks {kind}: {process}", value=value, unit="ms")
        for kind in list(kinds)[1:]:
            ratio = sums["only CPU"] / sums[kind]
            yield Figure(name=f"processor time, only CPU over {kind}", value=ratio, unit="")


def _spent(made: Ground, ours: Scheduler, bodies: Sequence[Json]) -> dict[str, float]:
    """Bind pods that wait; return the seconds of each process from there on."""
    namespace = made.namespace()
    with made.cluster.without(_KUBE_SCHEDULER):
        made.create(namespace, bodies)
        before = _used(made, ours)
    made.bound_at(namespace, len(bodies), timeout_s=600)
    spent = {name: used - before[name] for name, used in _used(made, ours).items()}
    spent[_KUBE_SCHEDULER] = _used_by(made.cluster.components[_KUBE_SCHEDULER].process.pid)
    return spent


def _start_of_kube_scheduler(made: Ground) -> float:
    """Return what it takes to start where nothing waits."""
    with made.cluster.without(_KUBE_SCHEDULER):
        pass
    made.bound_at(_one(made), 1, timeout_s=60)
    return _used_by(made.cluster.components[_KUBE_SCHEDULER].process.pid)


def _one(made: Ground) -> str:
    namespace = made.namespace()
    made.create(namespace, [plain_body("first")])
    return namespace


def _used(made: Ground, ours: Scheduler) -> dict[str, float]:
    """Return what each has used, but kube-scheduler, which is not always there."""
    there = {name: made.cluster.components[name].process.pid for name in _KEPT}
    return {
        name: _used_by(pid)
        for name, pid in {**there, _OURS: ours.process.pid, _BENCH: os.getpid()}.items()
    }


def _used_by(pid: int) -> float:
    """Return the user and system time of a process, in seconds."""
    # "pid (name) state ...", and a name may hold anything.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

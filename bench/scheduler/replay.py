# SPDX-License-Identifier: Apache-2.0
"""A trace through the real kube-scheduler, beside the same one through `allot simulate`.

The same nodes, the same pods in the same order, the same policy. "Allocated" is the same sum in
both: what the pods that have a place ask for of their GPUs' time, of those that have come so far,
over all that there is. As in `simulate`, none leaves, and one that is refused is gone: kept, it
would find no place later either, and kube-scheduler would try thousands of them again and again.

Pods come one after the other, so that no more than a few wait at a time: kube-scheduler takes them
in the order in which it hears of them. In `simulate` the policy has a say in where pods without
GPUs go; so it has here, by a second extender in kube-scheduler's configuration that is asked about
all pods. `--policy` is of both.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from testbed.api import Json
from testbed.pods import container, pod
from testbed.waiting import wait_until

from allotment.dialects.own import annotations as keys
from allotment.dialects.own.allotment import GPU, GPU_COMPUTE
from allotment.dialects.own.annotations import written_part, written_rules
from allotment.model.formats import format_percent
from allotment.simulate.csv_files import Trace, TracePod, capacity_milli, read_nodes, read_pods
from allotment.simulate.outcomes import Arrivals
from allotment.simulate.placers import inventory_of, without_gpu_memory
from allotment.simulate.scenes import TraceScene
from allotment.simulate.workloads import generate
from bench.harness.options import Options
from bench.harness.results import Result
from bench.harness.runner import NoRig
from bench.scheduler.cluster_shape import Scale
from bench.scheduler.control_plane import SHARES, ControlPlane, control_plane, scheduling
from bench.scheduler.trace_needs import need_of

_MARKS: Final = (95, 100, 130)
_MOST_WAITING: Final = 60
"""Pods that kube-scheduler has not tried yet. More are no harm but to the API server."""
_QUICK_SCALE: Final = 0.05
_TARGET: Final = 0.3


def replay(_rig: NoRig, options: Options) -> Iterator[Result]:
    """Replay the trace: made up, or that of `--nodes` and `--pods`."""
    scale = Scale.chosen(options)
    scene = TraceScene(trace=without_gpu_memory(_trace(scale)), tune=scale.tune)
    trace = scene.trace
    pods = scene.pods(scale.seed)
    capacity = capacity_milli(trace.nodes)
    nodes = [inventory_of(node) for node in trace.nodes]
    begun = time.monotonic()
    with (
        control_plane(nodes, hears_all=True, ranks_all=scale.ranks_all) as plane,
        scheduling(plane, scale),
    ):
        placed = _placed(plane, pods)
    took = time.monotonic() - begun
    yield Result(name=f"replaying {len(pods):,} pods, {len(nodes):,} nodes", value=took, unit="s")
    story = scene.run(scale.policy, scale.seed, lambda _: None).story
    assert isinstance(story, Arrivals)
    for mark in _MARKS:
        real = _allocated(pods, placed, mark=mark, capacity=capacity)
        point = story.at(mark)
        simulated = 0.0 if point is None else point.allocated_pct
        where = f"allocated, {mark} % asked for"
        yield Result(name=f"{where}: real kube-scheduler", value=real, unit="%")
        yield Result(name=f"{where}: allot simulate", value=simulated, unit="%")
        yield Result(
            name=f"{where}: apart",
            value=abs(real - simulated),
            unit="points",
            target=_TARGET,
        )
    lost = sum(
        pod.shape.gpus == 0 and name not in placed
        for pod, name in zip(pods, _names(pods), strict=True)
    )
    yield Result(name="pods without GPUs that found no place", value=lost, unit="")


def _trace(scale: Scale) -> Trace:
    if scale.trace is None:
        return generate(seed=scale.seed, scale=_QUICK_SCALE if scale.is_quick else 1.0)
    nodes, pods = scale.trace
    return Trace(read_nodes(nodes), read_pods(pods))


def _allocated(
    pods: Sequence[TracePod], placed: Mapping[str, str], *, mark: int, capacity: int
) -> float:
    """Return the percentage allocated to the pods up to this mark of what was asked for."""
    arrived = allocated = 0
    for each, name in zip(pods, _names(pods), strict=True):
        arrived += each.shape.size_milli
        allocated += each.shape.size_milli * (name in placed)
        if arrived * 100 >= mark * capacity:
            break
    return 100 * allocated / capacity


def _names(pods: Sequence[TracePod]) -> list[str]:
    return [f"pod-{number:05}" for number in range(len(pods))]


def _placed(plane: ControlPlane, pods: Sequence[TracePod]) -> dict[str, str]:
    """Let them come; return the nodes of those that found a place, by name."""
    namespace = plane.namespace()
    path = f"/api/v1/namespaces/{namespace}/pods"
    for number, (name, each) in enumerate(zip(_names(pods), pods, strict=True)):
        plane.cluster.api.post(path, body_of(name, each))
        if number - plane.watcher.tried(namespace) > _MOST_WAITING:
            _wait_tried(plane, namespace, number - _MOST_WAITING // 2)
        for where, refused in plane.watcher.refused():
            plane.cluster.api.delete(
                f"/api/v1/namespaces/{where}/pods/{refused}", gracePeriodSeconds="0"
            )
    _wait_tried(plane, namespace, len(pods))
    found = {}
    for item in plane.items(namespace):
        if node := item["spec"].get("nodeName"):
            found[item["metadata"]["name"]] = node
    return found


def _wait_tried(plane: ControlPlane, namespace: str, number: int) -> None:
    wait_until(
        lambda: plane.watcher.tried(namespace) >= number,
        f"{number} pods that have been tried",
        timeout_s=300,
        every_s=0.02,
        explain=lambda: f"{plane.watcher.tried(namespace)} are",
    )


def body_of(name: str, each: TracePod) -> Json:
    """Write a pod of a trace as people would: parts of GPUs in percent, no other unit fits all."""
    need = need_of(each, uid=name)
    limits: dict[str, str | int] = {"cpu": f"{need.cpu_milli}m", "memory": need.memory_bytes}
    notes = {}
    for wanted in need.containers:
        request = wanted.request
        points = request.count * request.compute.guarantee
        limits |= {GPU: request.count, GPU_COMPUTE: -(-points // 100)}
        if points % 100:
            notes[keys.COMPUTE] = format_percent(request.compute.guarantee)
        assert request.memory.part is not None
        notes[keys.MEMORY] = written_part(request.memory.part)
        if request.constraints.models:
            notes[keys.MODELS] = written_rules(request.constraints.models)
    # In one profile, so that as many nodes are examined for each: those without GPUs, too.
    return pod(name, container(["sleep"], limits=limits), annotations=notes, schedulerName=SHARES)

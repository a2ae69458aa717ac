# SPDX-License-Identifier: Apache-2.0
"""Several schedulers behind one service, each for a part of the nodes: simulated.

A trace is placed by one scheduler, and by several with a part of the nodes each. A pod goes to one
of them, and on to the next while they refuse it. What is lost is packing: each scheduler sees its
own nodes only. What is gained is time: it searches fewer nodes, and they work at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import thread_time
from typing import Final
from zlib import crc32

from allotment.placement.policies import make
from allotment.simulate.csv_files import (
    Trace,
    TraceNode,
    TracePod,
    capacity_milli,
    read_nodes,
    read_pods,
)
from allotment.simulate.placers import ArrayPlacer, without_gpu_memory
from allotment.simulate.scenes import TraceScene
from allotment.simulate.workloads import generate
from bench.harness.options import Options
from bench.harness.results import Result
from bench.harness.runner import NoRig
from bench.scheduler.cluster_shape import Scale

_NUMBERS: Final = (2, 4, 8)
_MARKS: Final = (95, 100, 130)
_MAIN: Final = 100
_QUICK_SCALE: Final = 0.1
_FEWEST: Final = 8
"""A part of the nodes has at least so many: GPU models with fewer join others."""

Groups = Sequence[Sequence[TraceNode]]
Order = Sequence[int]
"""The groups that a pod is offered to, in turn."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How nodes are divided, and where a pod goes first."""

    name: str
    groups: Groups
    order: Callable[[str, TracePod], Order]


@dataclass(slots=True)
class Outcome:
    """What a replay came to."""

    allocated: dict[int, float] = field(default_factory=dict)
    """Percent of all GPUs, by percent asked for."""
    busy_s: list[float] = field(default_factory=list)
    """Processor time of each scheduler's choices."""
    offers: int = 0


def shards(_rig: NoRig, options: Options) -> Iterator[Result]:
    """Replay the trace: made up, or that of `--trace-nodes` and `--trace-pods`."""
    scale = Scale.chosen(options)
    scene = TraceScene(trace=without_gpu_memory(_trace(scale)), tune=scale.tune)
    pods = scene.pods(scale.seed)
    nodes = scene.trace.nodes
    run = partial(_replayed, scene.trace, pods, scale)
    single = run(by_hash(nodes, 1))
    for mark, value in single.allocated.items():
        yield Result(name=f"one scheduler: allocated, {mark} % asked for", value=value, unit="%")
    for number in _NUMBERS:
        for layout in (
            by_hash(nodes, number),
            by_hash(nodes, number, is_offered_on=False),
            by_model(nodes, number),
        ):
            yield from _rows(layout, run(layout), single, pods=len(pods))


def _rows(layout: Layout, outcome: Outcome, single: Outcome, *, pods: int) -> Iterator[Result]:
    sizes = sorted(len(group) for group in layout.groups)
    where = f"{len(sizes)} schedulers, {layout.name}"
    method = (
        "`allot simulate`'s placement of the same pods in the same order, with the policy"
        " `fragmentation`; no API server and no kube-scheduler"
    )
    points = {mark: value - single.allocated[mark] for mark, value in outcome.allocated.items()}
    yield Result(
        name=f"{where}: allocated, {_MAIN} % asked for",
        value=outcome.allocated[_MAIN],
        unit="%",
        beside=f"{single.allocated[_MAIN]:.2f} %",
        seen=", ".join(f"{value:+.2f} points at {mark} %" for mark, value in points.items()),
        topic="shards",
        method=method,
    )
    yield Result(
        name=f"{where}: choices a second, by their processor time",
        value=sum(single.busy_s) / max(outcome.busy_s),
        unit="times as many",
        seen=f"{outcome.offers / pods:.2f} schedulers asked for each pod; {sizes[0]} to"
        f" {sizes[-1]} nodes each",
        topic="shards",
        method=method,
    )


def _replayed(trace: Trace, pods: Sequence[TracePod], scale: Scale, layout: Layout) -> Outcome:
    capacity = capacity_milli(trace.nodes)
    placers = [
        ArrayPlacer(group, make(scale.policy, seed=scale.seed), pods=trace.pods)
        for group in layout.groups
    ]
    outcome = Outcome(busy_s=[0.0] * len(placers))
    arrived = allocated = 0
    marks = [*_MARKS]
    for number, pod in enumerate(pods):
        arrived += pod.shape.size_milli
        # The same pod of a trace comes several times, so its name is no key.
        for place in layout.order(f"pod-{number}", pod):
            began = thread_time()
            placer = placers[place]
            placer.arrived(pod)
            spot = placer.place(pod)
            outcome.busy_s[place] += thread_time() - began
            outcome.offers += 1
            if spot is not None:
                placer.book(spot)
                allocated += pod.shape.size_milli
                break
        while marks and (arrived * 100 >= marks[0] * capacity or number == len(pods) - 1):
            outcome.allocated[marks.pop(0)] = 100 * allocated / capacity
    return outcome


def by_hash(nodes: Sequence[TraceNode], number: int, *, is_offered_on: bool = True) -> Layout:
    """Divide by a consistent hash of the nodes' names; a pod starts at one by its own name."""
    groups: list[list[TraceNode]] = [[] for _ in range(number)]
    for node in nodes:
        groups[_ranked(node.name, range(number))[0]].append(node)
    name = "by a hash of names" if is_offered_on else "by a hash, and no second one is asked"

    def order(key: str, pod: TracePod) -> Order:
        del pod
        ranked = _ranked(key, range(number))
        return ranked if is_offered_on else ranked[:1]

    return Layout(name, groups, order)


def by_model(nodes: Sequence[TraceNode], number: int) -> Layout:
    """Divide by a label with the GPU's model; large models are divided, small ones joined.

    A pod for certain models goes to their groups. Another one may go to any, as by a hash.
    """
    models: dict[str, list[TraceNode]] = {}
    for node in nodes:
        models.setdefault(node.model, []).append(node)
    groups: list[list[TraceNode]] = [[] for _ in range(number)]
    most = max(_FEWEST, -(-len(nodes) // number))
    for model in sorted(models, key=lambda name: -len(models[name])):
        for start in range(0, len(models[model]), most):
            smallest = min(groups, key=len)
            smallest.extend(models[model][start : start + most])
    held = [{node.model for node in group} for group in groups]

    def order(key: str, pod: TracePod) -> Order:
        wanted = set(pod.shape.models)
        able = [place for place in range(number) if not wanted or wanted & held[place]]
        return _ranked(key, able)

    return Layout("by the GPU's model", groups, order)


def _ranked(key: str, places: Sequence[int]) -> list[int]:
    """Order places for a key: adding or removing one moves only the keys of that one."""
    return sorted(places, key=lambda place: crc32(f"{place} {key}".encode()))


def _trace(scale: Scale) -> Trace:
    if scale.trace is None:
        return generate(seed=scale.seed, scale=_QUICK_SCALE if scale.is_quick else 1.0)
    nodes, pods = scale.trace
    return Trace(read_nodes(nodes), read_pods(pods))

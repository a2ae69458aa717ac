# SPDX-License-Identifier: Apache-2.0
"""A trace that is made up, with the statistics of a real cluster's and nothing of its lines.

The traces that the literature uses state no licence, so none is shipped. What is published about
them is enough for one that is as hard: how many nodes of which model and size, how many pods ask
for no GPU, for a part, for one and for several, how much in all, and that few kinds of pods make up
most. What they ask for exactly, when they come and how long they run is drawn here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from allotment.simulate.traces import MILLI, PodShape, Trace, TraceNode, TracePod

__all__ = ["generate"]

_GIB = 1024  # MiB


@dataclass(frozen=True, slots=True)
class _Machines:
    """So many nodes that are alike."""

    number: int
    model: str
    gpus: int
    gpu_gib: int
    cores: int
    gib_per_core: int


_CLUSTER = (
    _Machines(131, "P100", 2, 16, 24, 4),
    _Machines(3, "P100", 1, 16, 12, 4),
    _Machines(387, "T4", 2, 16, 98, 5),
    _Machines(17, "T4", 4, 16, 192, 5),
    _Machines(19, "V100M16", 1, 16, 10, 4),
    _Machines(28, "V100M16", 4, 16, 32, 4),
    _Machines(8, "V100M16", 8, 16, 64, 4),
    _Machines(9, "V100M32", 4, 32, 48, 8),
    _Machines(21, "V100M32", 8, 32, 96, 8),
    _Machines(2, "A10", 1, 24, 128, 8),
    _Machines(39, "G3", 8, 80, 128, 6),
    _Machines(549, "G2", 8, 32, 96, 4),
)
"""1213 nodes with 6212 GPUs."""

_PODS = {0: 1088, 1: 3078 + 3911, 2: 16, 4: 15, 8: 44}
"""How many ask for so many GPUs."""
_SHARES = 3078
"""How many of those with one ask for a part of it."""
_SHARE_MILLI = 563
"""The mean of these parts."""
_POD_CORES = 10.5
"""The mean of all pods."""
_MOST_CORES = 8
"""For each GPU of a pod with several: there is room for it on all models."""
_KINDS = {"none": 14, "share": 34, "whole": 34, "several": 3}
"""How many different ones there are of each sort (of each number of several GPUs)."""
_STEEPNESS = 1.6  # of the kinds' frequencies, by rank: 35 of them are 95 of 100 pods
_SPAN_S = 30 * 24 * 3600
_DURATION_S = 600.0  # the median
_DURATION_SPREAD = 2.1  # of its logarithm
_LONGEST_S = 150 * 24 * 3600


def generate(*, seed: int, scale: float = 1.0, constrained: float = 0.1) -> Trace:
    """Make a trace; `scale` 1 has 1213 nodes and 8152 pods.

    `constrained` is the part of the pods with GPUs that take certain models alone. The same
    arguments give the same trace.
    """
    dice = Random(seed)  # noqa: S311 - a sample, no secret
    nodes = _nodes(scale)
    return Trace(nodes, _pods(nodes, dice, scale=scale, constrained=constrained))


def _nodes(scale: float) -> list[TraceNode]:
    machines = [each for each in _CLUSTER for _ in range(_scaled(each.number, scale))]
    return [
        TraceNode(
            name=f"node-{number:04}",
            cpu_milli=each.cores * 1000,
            memory_mib=each.cores * each.gib_per_core * _GIB,
            gpus=each.gpus,
            model=each.model,
            gpu_memory_mib=each.gpu_gib * _GIB,
        )
        for number, each in enumerate(machines)
    ]


def _scaled(number: int, scale: float) -> int:
    return max(1, round(number * scale))


@dataclass(frozen=True, slots=True)
class _Kind:
    shape: PodShape
    memory_mib: int


def _pods(
    nodes: Sequence[TraceNode], dice: Random, *, scale: float, constrained: float
) -> list[TracePod]:
    kinds: list[_Kind] = []
    for gpus, number in _PODS.items():
        shares = _SHARES if gpus == 1 else 0
        if shares:
            kinds += _share_kinds(dice, _scaled(shares, scale))
        sort = {0: "none", 1: "whole"}.get(gpus, "several")
        kinds += _whole_kinds(dice, _scaled(number - shares, scale), gpus=gpus, sort=sort)
    kinds = _with_cores(kinds)
    dice.shuffle(kinds)
    times = sorted(dice.uniform(0, _SPAN_S) for _ in kinds)
    return [
        TracePod(
            name=f"pod-{number:05}",
            shape=_constrained(kind.shape, nodes, dice, part=constrained),
            memory_mib=kind.memory_mib,
            created_s=math.floor(time),
            duration_s=_duration(dice),
        )
        for number, (kind, time) in enumerate(zip(kinds, times, strict=True))
    ]


def _with_cores(kinds: Sequence[_Kind]) -> list[_Kind]:
    """Bring the mean of the cores to what it should be."""
    factor = _POD_CORES * 1000 * len(kinds) / sum(each.shape.cpu_milli for each in kinds)
    return [replace(each, shape=_with_factor(each.shape, factor)) for each in kinds]


def _with_factor(shape: PodShape, factor: float) -> PodShape:
    cpu_milli = 50 * round(shape.cpu_milli * factor / 50)
    if shape.gpus > 1:
        cpu_milli = min(cpu_milli, shape.gpus * _MOST_CORES * 1000)
    return replace(shape, cpu_milli=cpu_milli)


def _share_kinds(dice: Random, number: int) -> list[_Kind]:
    parts = sorted(dice.sample(range(5, 96), k=16), key=lambda _: dice.random())
    kinds = [
        _kind(dice, gpus=1, milli=10 * parts[index % len(parts)], cores=dice.choice((2, 3, 4, 8)))
        for index in range(_KINDS["share"])
    ]
    chosen = dice.choices(kinds, weights=_weights(len(kinds)), k=number)
    return _moved(chosen, dice)


def _moved(chosen: list[_Kind], dice: Random) -> list[_Kind]:
    """Bring the mean of the parts to what it should be: all parts of a kind change alike."""
    mean = sum(each.shape.gpu_milli for each in chosen) / len(chosen)
    factor = _SHARE_MILLI / mean
    parts: dict[_Kind, _Kind] = {}
    for each in chosen:
        if each not in parts:
            milli = min(950, max(10, 10 * round(each.shape.gpu_milli * factor / 10)))
            shape = replace(each.shape, gpu_milli=milli, gpu_memory_mib=_gpu_memory(dice, milli))
            parts[each] = replace(each, shape=shape)
    return [parts[each] for each in chosen]


def _whole_kinds(dice: Random, number: int, *, gpus: int, sort: str) -> list[_Kind]:
    cores = {"none": (4, 8, 12, 16, 24, 32), "whole": (4, 8, 10, 12, 14, 16)}.get(sort)
    kinds = [
        _kind(
            dice,
            gpus=gpus,
            milli=MILLI if gpus else 0,
            cores=dice.choice(cores) if cores else gpus * dice.choice((4, 6, 8)),
        )
        for _ in range(_KINDS[sort])
    ]
    return dice.choices(kinds, weights=_weights(len(kinds)), k=number)


def _kind(dice: Random, *, gpus: int, milli: int, cores: int) -> _Kind:
    # Some more than whole cores, so that what is left over does not fit by luck.
    cpu_milli = cores * 1000 + 50 * dice.randrange(0, 40)
    memory_mib = cores * dice.choice((2, 3, 4)) * _GIB
    memory = _gpu_memory(dice, milli) if gpus else None
    shape = PodShape(cpu_milli=cpu_milli, gpus=gpus, gpu_milli=milli, gpu_memory_mib=memory)
    return _Kind(shape, memory_mib)


def _gpu_memory(dice: Random, milli: int) -> int:
    """Return memory that goes with the time somewhat: of a GPU with 16 GiB, at most all."""
    part = min(1.0, milli / MILLI * dice.uniform(0.5, 1.5))
    return max(256, 256 * round(part * 16 * _GIB * 0.95 / 256))


def _weights(number: int) -> list[float]:
    return [(rank + 1) ** -_STEEPNESS for rank in range(number)]


def _constrained(
    shape: PodShape, nodes: Sequence[TraceNode], dice: Random, *, part: float
) -> PodShape:
    if not shape.gpus or dice.random() >= part:
        return shape
    able = [node.model for node in nodes if node.gpus >= shape.gpus and node.model]
    # By nodes and not by GPUs: people ask for models out of proportion to how many there are.
    models = {dice.choice(able) for _ in range(dice.choice((1, 1, 1, 2, 3)))} if able else set()
    return replace(shape, models=tuple(sorted(models)))


def _duration(dice: Random) -> float:
    return float(
        min(_LONGEST_S, round(dice.lognormvariate(math.log(_DURATION_S), _DURATION_SPREAD)))
    )

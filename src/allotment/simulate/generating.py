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
_POD_CORES = {"none": 17.6, "share": 6.0, "whole": 11.1, "several": 9.5}
"""The mean of each sort's pods; of those with several GPUs, for each GPU."""
_CORES = {
    "none": (8, 12, 16, 16, 32),
    "share": (2, 3, 4, 4, 6, 8, 12),
    "whole": (3, 4, 8, 8, 10, 10, 11, 11, 12, 14, 16, 18, 24),
    "several": (8, 10, 11),
}
"""Among which a sort's kinds are divided. A node has 12 cores for each GPU, or far more."""
_KINDS = {"none": 14, "share": 34, "whole": 34, "several": 3}
"""How many different ones there are of each sort (of each number of several GPUs)."""
_STEEPNESS = 1.4  # of the kinds' frequencies, by rank: some 50 of them are 95 of 100 pods
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


def _with_cores(kinds: Sequence[_Kind], mean: float) -> list[_Kind]:
    """Bring the mean of the cores to what it should be."""
    factor = mean * 1000 * len(kinds) / sum(each.shape.cpu_milli for each in kinds)
    return [replace(each, shape=_with_factor(each.shape, factor)) for each in kinds]


def _with_factor(shape: PodShape, factor: float) -> PodShape:
    return replace(shape, cpu_milli=50 * round(shape.cpu_milli * factor / 50))


def _cores(dice: Random, sort: str) -> list[int]:
    """Return the cores of each kind of a sort: every amount as often as the others."""
    amounts = _CORES[sort]
    cores = [amounts[index % len(amounts)] for index in range(_KINDS[sort])]
    dice.shuffle(cores)
    return cores


def _share_kinds(dice: Random, number: int) -> list[_Kind]:
    parts = sorted(dice.sample(range(5, 96), k=16), key=lambda _: dice.random())
    kinds = [
        _kind(dice, gpus=1, milli=10 * parts[index % len(parts)], cores=cores)
        for index, cores in enumerate(_cores(dice, "share"))
    ]
    chosen = dice.choices(kinds, weights=_weights(len(kinds)), k=number)
    return _with_cores(_moved(chosen, dice), _POD_CORES["share"])


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
    kinds = [
        _kind(dice, gpus=gpus, milli=MILLI if gpus else 0, cores=max(1, gpus) * cores)
        for cores in _cores(dice, sort)
    ]
    chosen = dice.choices(kinds, weights=_weights(len(kinds)), k=number)
    return _with_cores(chosen, _POD_CORES[sort] * (gpus if sort == "several" else 1))


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

# SPDX-License-Identifier: Apache-2.0
"""Generated traces, and the order in which pods of a trace arrive.

The traces of the literature state no licence, so none is shipped. Generated ones follow their
published figures: nodes by model and size, pods by number of GPUs, total requests, and the few
kinds of pods that dominate. Exact requests, arrivals and run times are drawn at random.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from random import Random

import msgspec

from allotment.model.errors import UsageError
from allotment.model.structs import replace
from allotment.simulate.csv_files import MILLI, Trace, TraceNode, TracePod, TraceShape

_GIB = 1024  # MiB


class _Machines(msgspec.Struct, frozen=True):
    """A number of identical nodes."""

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
"""Number of pods by number of GPUs."""
_SHARES = 3078
"""Number of pods with a part of one GPU."""
_SHARE_MILLI = 563
"""Mean of these parts, in thousandths."""
_POD_CORES = {"none": 17.6, "share": 6.0, "whole": 11.1, "several": 9.5}
"""Mean cores per pod of each sort; with several GPUs, per GPU."""
_CORES = {
    "none": (8, 12, 16, 16, 32),
    "share": (2, 3, 4, 4, 6, 8, 12),
    "whole": (3, 4, 8, 8, 10, 10, 11, 11, 12, 14, 16, 18, 24),
    "several": (8, 10, 11),
}
"""Cores of the kinds of each sort. A node has 12 cores per GPU, or far more."""
_KINDS = {"none": 14, "share": 34, "whole": 34, "several": 3}
"""Number of kinds of each sort; with several GPUs, per number of GPUs."""
_STEEPNESS = 1.4  # of the frequencies of kinds by rank: about 50 kinds are 95 of 100 pods
_SPAN_S = 30 * 24 * 3600
_DURATION_S = 600.0  # the median
_DURATION_SPREAD = 2.1  # of its logarithm
_LONGEST_S = 150 * 24 * 3600


def generate(*, seed: int, scale: float = 1.0, constrained: float = 0.1) -> Trace:
    """Generate a trace; `scale` 1 has 1213 nodes and 8152 pods.

    `constrained` is the part of GPU pods that accept only certain models. The same arguments give
    the same trace.
    """
    dice = Random(seed)  # noqa: S311 - not a secret
    nodes = _nodes(scale)
    return Trace(nodes, _pods(nodes, dice, scale=scale, constrained=constrained))


def _nodes(scale: float) -> list[TraceNode]:
    machines = [machine for machine in _CLUSTER for _ in range(_scaled(machine.number, scale))]
    return [
        TraceNode(
            name=f"node-{number:04}",
            cpu_milli=machine.cores * 1000,
            memory_mib=machine.cores * machine.gib_per_core * _GIB,
            gpus=machine.gpus,
            model=machine.model,
            gpu_memory_mib=machine.gpu_gib * _GIB,
        )
        for number, machine in enumerate(machines)
    ]


def _scaled(number: int, scale: float) -> int:
    return max(1, round(number * scale))


class _Kind(msgspec.Struct, frozen=True):
    shape: TraceShape
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
    factor = mean * 1000 * len(kinds) / sum(kind.shape.cpu_milli for kind in kinds)
    return [replace(kind, shape=_with_factor(kind.shape, factor)) for kind in kinds]


def _with_factor(shape: TraceShape, factor: float) -> TraceShape:
    return replace(shape, cpu_milli=50 * round(shape.cpu_milli * factor / 50))


def _cores(dice: Random, sort: str) -> list[int]:
    """Return the cores of each kind of a sort; every amount is equally frequent."""
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
    """Scale the parts to their mean; pods of a kind change alike."""
    mean = sum(kind.shape.gpu_milli for kind in chosen) / len(chosen)
    factor = _SHARE_MILLI / mean
    parts: dict[_Kind, _Kind] = {}
    for kind in chosen:
        if kind not in parts:
            milli = min(950, max(10, 10 * round(kind.shape.gpu_milli * factor / 10)))
            shape = replace(kind.shape, gpu_milli=milli, gpu_memory_mib=_gpu_memory(dice, milli))
            parts[kind] = replace(kind, shape=shape)
    return [parts[kind] for kind in chosen]


def _whole_kinds(dice: Random, number: int, *, gpus: int, sort: str) -> list[_Kind]:
    kinds = [
        _kind(dice, gpus=gpus, milli=MILLI if gpus else 0, cores=max(1, gpus) * cores)
        for cores in _cores(dice, sort)
    ]
    chosen = dice.choices(kinds, weights=_weights(len(kinds)), k=number)
    return _with_cores(chosen, _POD_CORES[sort] * (gpus if sort == "several" else 1))


def _kind(dice: Random, *, gpus: int, milli: int, cores: int) -> _Kind:
    # Not whole cores, so that remainders do not fit by luck.
    cpu_milli = cores * 1000 + 50 * dice.randrange(0, 40)
    memory_mib = cores * dice.choice((2, 3, 4)) * _GIB
    memory = _gpu_memory(dice, milli) if gpus else None
    shape = TraceShape(cpu_milli=cpu_milli, gpus=gpus, gpu_milli=milli, gpu_memory_mib=memory)
    return _Kind(shape, memory_mib)


def _gpu_memory(dice: Random, milli: int) -> int:
    """Return memory that correlates with the time, at most all of a 16 GiB GPU."""
    part = min(1.0, milli / MILLI * dice.uniform(0.5, 1.5))
    return max(256, 256 * round(part * 16 * _GIB * 0.95 / 256))


def _weights(number: int) -> list[float]:
    return [(rank + 1) ** -_STEEPNESS for rank in range(number)]


def _constrained(
    shape: TraceShape, nodes: Sequence[TraceNode], dice: Random, *, part: float
) -> TraceShape:
    if not shape.gpus or dice.random() >= part:
        return shape
    able = [node.model for node in nodes if node.gpus >= shape.gpus and node.model]
    # By nodes, not by GPUs: users request models out of proportion to their number.
    models = {dice.choice(able) for _ in range(dice.choice((1, 1, 1, 2, 3)))} if able else set()
    return replace(shape, models=tuple(sorted(models)))


def _duration(dice: Random) -> float:
    return float(
        min(_LONGEST_S, round(dice.lognormvariate(math.log(_DURATION_S), _DURATION_SPREAD)))
    )


_TURNOVER = 3
"""Factor for the number of drawn pods with departures, since pods leave."""
_STEPS = 60  # of a bisection: more than the bits of a float
_NEVER = 1e12


class Visit(msgspec.Struct, frozen=True):
    """A pod with its arrival and its run time, in seconds."""

    pod: TracePod
    at_s: float
    duration_s: float


def as_listed(pods: Sequence[TracePod], *, seed: int) -> list[TracePod]:
    chosen = _sorted(pods)
    _dice(seed).shuffle(chosen)
    return chosen


def drawn(
    pods: Sequence[TracePod], *, capacity_milli: int, tune: float, seed: int
) -> list[TracePod]:
    """Draw pods until they request `tune` times the capacity; raise `UsageError`."""
    dice = _dice(seed)
    chosen = _draw(pods, milli=tune * capacity_milli, dice=dice)
    dice.shuffle(chosen)
    return chosen


def timed(
    pods: Sequence[TracePod], *, capacity_milli: int, tune: float | None, seed: int
) -> list[Visit]:
    """Return pods by arrival, each with its run time; raise `UsageError`.

    Without `tune`, every pod of the trace arrives once, at its time. With `tune`, pods are drawn
    and
    keep the order of their times, but arrive at random moments. The rate makes the mean of the
    requests `tune` times the capacity in the second half of the time; in the first half the cluster
    fills up. (At the times of the trace the load may be tiny, since many pods run for minutes.)
    """
    _check_times(pods)
    dice = _dice(seed)
    chosen = _sorted(pods)
    if tune is not None:
        chosen = _draw(pods, milli=tune * capacity_milli * _TURNOVER, dice=dice)
    # A stable sort: pods with the same time keep the order in which they were drawn.
    chosen.sort(key=lambda pod: pod.created_s or 0.0)
    if tune is None:
        return [Visit(pod, pod.created_s or 0.0, pod.duration_s or 0.0) for pod in chosen]
    moments = list(accumulate((dice.expovariate(1) for _ in chosen[1:]), initial=0.0))
    factor = _pace(chosen, moments, milli=tune * capacity_milli)
    return [
        Visit(pod, moment * factor, pod.duration_s or 0.0)
        for pod, moment in zip(chosen, moments, strict=True)
    ]


def _draw(pods: Sequence[TracePod], *, milli: float, dice: Random) -> list[TracePod]:
    ordered = _sorted(pods)
    if not any(pod.shape.size_milli for pod in ordered):
        raise UsageError(
            "no pod requests a GPU, so drawing pods cannot reach --tune",
            hint="replay each pod once: --tune 0",
        )
    chosen: list[TracePod] = []
    reached = 0
    while reached < milli:
        pod = dice.choice(ordered)
        chosen.append(pod)
        reached += pod.shape.size_milli
    return chosen


def _sorted(pods: Sequence[TracePod]) -> list[TracePod]:
    return sorted(pods, key=lambda pod: pod.name)


def _dice(seed: int) -> Random:
    return Random(seed)  # noqa: S311 - not a secret


def _check_times(pods: Sequence[TracePod]) -> None:
    for pod in pods:
        if pod.created_s is None or pod.duration_s is None:
            where = f"line {pod.line}: " if pod.line else ""
            raise UsageError(
                f"{where}pod {pod.name!r} has no creation or deletion time",
                hint="--departures needs the columns creation_time and deletion_time",
            )


def _pace(pods: Sequence[TracePod], moments: Sequence[float], *, milli: float) -> float:
    """Return the factor for `moments` that makes the mean demand `milli`."""
    low, high = 0.0, 1.0
    while _demand(pods, moments, high) > milli and high < _NEVER:
        low, high = high, high * 2
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if _demand(pods, moments, middle) > milli else (low, middle)
    return high


def _demand(pods: Sequence[TracePod], moments: Sequence[float], factor: float) -> float:
    end = moments[-1] * factor
    if end <= 0:
        return float("inf")
    asked = sum(
        pod.shape.size_milli * late(moment * factor, pod.duration_s or 0.0, begin=0.0, end=end)
        for pod, moment in zip(pods, moments, strict=True)
    )
    return asked / (end / 2)


def late(at_s: float, duration_s: float, *, begin: float, end: float) -> float:
    """Return how long a visit lasts within the second half of the time."""
    middle = (begin + end) / 2
    return max(0.0, min(at_s + duration_s, end) - max(at_s, middle))

# SPDX-License-Identifier: Apache-2.0
"""Pods bound in a second, and what each costs the processes of the control plane.

Three kinds in turn, on one cluster: pods without GPUs on a stock kube-scheduler, the same on one
that asks `allot scheduler`, and pods with shares there. Then stock, shares, and the same shares on
the schedulers of other systems, where their programs are. A rate is as much a figure of the machine
as of the programs; processor time is one of the programs.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from pathlib import Path
from typing import Final

from scheduling import Scheduler
from testbed.api import Json
from testbed.sandbox import Process

from bench.harness.machine import cpu_seconds
from bench.harness.options import Options
from bench.harness.results import Result
from bench.harness.runner import NoRig
from bench.scheduler.cluster_shape import Scale, Spec, gpus_of, nodes, specs
from bench.scheduler.control_plane import (
    ControlPlane,
    configuration,
    control_plane,
    gpu_body,
    plain_body,
    scheduling,
)
from bench.scheduler.peers import Peer, peers

_PODS = 500
_ROUNDS = 3
_OF_PEERS = 200
"""Pods: some of them place six a second."""
_TRACE = 1213
_SIZES = (50, _TRACE, 5000)
_OURS: Final = "allot scheduler"
_PROCESSES: Final = ("kube-scheduler", "kube-apiserver", "etcd")


@dataclass(frozen=True, slots=True)
class _Kind:
    name: str
    config: str | None
    """Of kube-scheduler; None: stock."""
    body: Callable[[str, Spec], Json]
    target: float | None = None
    """Of its rate over the stock one."""
    peer: Peer | None = None


_STOCK = _Kind("pods without GPUs, stock", None, lambda name, _: plain_body(name))
_SHARES = _Kind("pods with shares", configuration(), gpu_body, 0.5)
_KINDS = (
    _STOCK,
    _Kind("pods without GPUs", configuration(), lambda name, _: plain_body(name), 0.95),
    _SHARES,
)


def rate(_rig: NoRig, options: Options) -> Iterator[Result]:
    """At three sizes, or of `--nodes`; empty, and half full but for the smallest and `--quick`."""
    with tempfile.TemporaryDirectory() as folder:
        found = peers(Path(folder))
        others = [_Kind(f"pods with shares, {e.name}", e.config, e.body, peer=e) for e in found]
        yield from _all_sizes(options, others)


def _all_sizes(options: Options, others: Sequence[_Kind]) -> Iterator[Result]:
    scale = Scale.chosen(options)
    sizes = _SIZES[:1] if scale.is_quick else _SIZES
    for number in sizes if options.nodes is None else (options.nodes,):
        inventories = nodes(number)
        # A pod takes 0.8 of a GPU on average: there is room for all.
        pods = min(scale.of(options.pods or _PODS), 6 * number)
        with control_plane(inventories) as plane, scheduling(plane, scale) as ours:
            yield from _all_kinds(plane, ours, scale, pods, f"{number:,} nodes, empty")
            if others and number <= _TRACE:
                kinds = (_STOCK, _SHARES, *others)
                fewer = min(pods, _OF_PEERS)
                where = f"{number:,} nodes, beside others"
                yield from _all_kinds(plane, ours, scale, fewer, where, kinds=kinds)
            if number <= _SIZES[0] or scale.is_quick:
                continue
            bodies = list(_half(gpus_of(inventories), as_trace=number == _TRACE))
            filled = plane.pods_per_second(bodies, timeout_s=900)
            name = f"filling half of {number:,} nodes, {len(bodies):,} pods"
            yield Result(name=name, value=filled, unit="pods/s")
            yield from _all_kinds(plane, ours, scale, pods, f"{number:,} nodes, half full")


def _half(gpus: int, *, as_trace: bool) -> Iterator[Json]:
    """Pods for half of the GPUs; where there are too many for a mix, of whole nodes."""
    given = 0.0
    for count, spec in enumerate(specs(1) if as_trace else repeat(Spec(8, 80, 100, 64_000))):
        if given >= gpus / 2:
            return
        given += spec.gpus * spec.compute / 100
        yield gpu_body(f"fill-{count}", spec)


def _all_kinds(
    plane: ControlPlane,
    ours: Scheduler,
    scale: Scale,
    pods: int,
    where: str,
    *,
    kinds: Sequence[_Kind] = _KINDS,
) -> Iterator[Result]:
    rates: dict[str, list[float]] = defaultdict(list)
    costs: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for turn in range(1 if scale.is_quick else _ROUNDS):
        for kind in (*kinds[turn:], *kinds[:turn]):  # none has always the same one before it
            plane.configure(kind.config)
            bodies = [kind.body(f"p-{n}", spec) for n, spec in enumerate(islice(specs(2), pods))]
            with kind.peer.running(plane) if kind.peer else contextlib.nullcontext({}) as its:
                placer = None if kind.config or not its else next(iter(its.values()))
                per_second, spent = _measured(
                    plane, {_OURS: ours.process, **its}, bodies, placer=placer
                )
            rates[kind.name].append(per_second)
            for process, seconds in spent.items():
                costs[kind.name][process].append(1000 * seconds / pods)
    stock = rates[_STOCK.name]
    for kind in kinds:
        own = rates[kind.name]
        name = f"{kind.name}, {where}"
        yield Result(name=name, value=statistics.median(own), unit="pods/s")
        if kind is not _STOCK:
            ratio = statistics.median(a / b for a, b in zip(own, stock, strict=True))
            yield Result(
                name=f"{name}: over stock", value=ratio, unit="", target=kind.target, at_least=True
            )
        for process, each in costs[kind.name].items():
            value = statistics.median(each)
            yield Result(name=f"{name}: a pod's time in {process}", value=value, unit="ms")


def _measured(
    plane: ControlPlane,
    beside: Mapping[str, Process],
    bodies: Sequence[Json],
    *,
    placer: Process | None,
) -> tuple[float, dict[str, float]]:
    """Bind pods that wait; return pods a second, and the seconds of each process."""
    pids = {each: plane.cluster.components[each].process.pid for each in _PROCESSES}
    pids |= {name: each.pid for name, each in beside.items()}
    namespace = plane.namespace()
    with plane.held(placer):
        plane.create(namespace, bodies)
        before = {name: cpu_seconds(pid) for name, pid in pids.items()}
    times = plane.bound_at(namespace, len(bodies), timeout_s=600)
    spent = {name: cpu_seconds(pid) - before[name] for name, pid in pids.items()}
    plane.clear(namespace)
    return (len(times) - 1) / (times[-1] - times[0]), spent

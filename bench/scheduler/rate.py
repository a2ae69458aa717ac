# SPDX-License-Identifier: Apache-2.0
"""Pods bound in a second: those that ask for GPUs against those that ask only CPU."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from testbed.api import Json

from bench.harness.options import Options
from bench.harness.results import Result
from bench.harness.runner import NoRig
from bench.scheduler.cluster_shape import Scale, gpus_of, nodes, specs
from bench.scheduler.control_plane import (
    ControlPlane,
    control_plane,
    gpu_body,
    gpu_body_in_percent,
    plain_body,
    scheduling,
)

_PODS = 1000
_ROUNDS = 3


def rate(_rig: NoRig, options: Options) -> Iterator[Result]:
    """1,213 nodes, empty and half full; both kinds of pods in turn, on the same cluster."""
    scale = Scale.chosen(options)
    inventories = nodes()
    wanted = specs(1)
    with control_plane(inventories) as plane, scheduling(plane, scale):
        yield from _both(plane, scale, "empty")
        half = gpus_of(inventories) / 2
        bodies: list[Json] = []
        given = 0.0
        while given < (half if not scale.is_quick else half / 20):
            spec = next(wanted)
            bodies.append(gpu_body(f"fill-{len(bodies)}", spec))
            given += spec.gpus * spec.compute / 100
        rate = plane.pods_per_second(bodies, timeout_s=600)
        yield Result(name=f"filling half of it, {len(bodies):,} pods", value=rate, unit="pods/s")
        yield from _both(plane, scale, "half full")


def _both(plane: ControlPlane, scale: Scale, what: str) -> Iterator[Result]:
    number = scale.of(_PODS)
    wanted = [spec for spec, _ in zip(specs(2), range(number), strict=False)]
    kinds: dict[str, Sequence[Json]] = {
        "only CPU": [plain_body(f"p-{each}") for each in range(number)],
        "GPUs": [gpu_body(f"g-{each}", spec) for each, spec in enumerate(wanted)],
        "GPUs, memory in percent": [
            gpu_body_in_percent(f"h-{each}", spec) for each, spec in enumerate(wanted)
        ],
    }
    rounds = [
        {kind: plane.pods_per_second(bodies, keep=False) for kind, bodies in kinds.items()}
        for _ in range(1 if scale.is_quick else _ROUNDS)
    ]
    for kind in kinds:
        rate = statistics.median(each[kind] for each in rounds)
        yield Result(name=f"pods that ask {kind}, {what}", value=rate, unit="pods/s")
        if kind != "only CPU":
            ratio = statistics.median(each[kind] / each["only CPU"] for each in rounds)
            yield Result(
                name=f"ratio, {kind}, {what}", value=ratio, unit="", target=0.5, at_least=True
            )

# SPDX-License-Identifier: Apache-2.0
"""Pods bound in a second: those that ask for GPUs against those that ask only CPU."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler_figures import Figure, Scale, gpus_of, nodes, specs
from scheduler_ground import Ground, gpu_body, ground, plain_body, scheduling
from testbed.api import Json

_PODS = 1000


def rates(scale: Scale) -> Iterator[Figure]:
    """1,213 nodes, empty and half full; both kinds of pods in turn, on the same cluster."""
    inventories = nodes()
    wanted = specs(1)
    with ground(inventories) as made, scheduling(made, scale):
        yield from _both(made, scale, "empty")
        half = gpus_of(inventories) / 2
        bodies: list[Json] = []
        given = 0.0
        while given < (half if not scale.is_quick else half / 20):
            spec = next(wanted)
            bodies.append(gpu_body(f"fill-{len(bodies)}", spec))
            given += spec.gpus * spec.compute / 100
        rate = made.pods_per_second(bodies, timeout_s=600)
        yield Figure(name=f"filling half of it, {len(bodies):,} pods", value=rate, unit="pods/s")
        yield from _both(made, scale, "half full")


def _both(made: Ground, scale: Scale, what: str) -> Iterator[Figure]:
    number = scale.of(_PODS)
    plain = made.pods_per_second([plain_body(f"p-{each}") for each in range(number)])
    yield Figure(name=f"pods that ask only CPU, {what}", value=plain, unit="pods/s")
    wanted = specs(2)
    rate = made.pods_per_second([gpu_body(f"g-{each}", next(wanted)) for each in range(number)])
    yield Figure(name=f"pods that ask for GPUs, {what}", value=rate, unit="pods/s")
    yield Figure(name=f"ratio, {what}", value=rate / plain, unit="", target="0.5")

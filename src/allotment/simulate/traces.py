# SPDX-License-Identifier: Apache-2.0
"""A trace: the nodes of a cluster and the pods that came to it.

As CSV files with the columns of Alibaba's `openb` traces (clusterdata, cluster-trace-gpu-v2023),
which people have tools for; `gpu_memory_mib` in both files is ours, and may be missing. GPU parts
are in thousandths of a GPU, times in seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["MILLI", "PodShape", "Trace", "TraceNode", "TracePod", "capacity_milli"]

MILLI = 1000
"""A whole GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceNode:
    """A node; its GPUs are all of one model."""

    name: str
    cpu_milli: int
    memory_mib: int
    gpus: int
    model: str = ""
    gpu_memory_mib: int | None = None
    """Of each GPU; None: the trace does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodShape:
    """What makes pods alike when one asks what of a GPU could still be used, and by whom."""

    cpu_milli: int
    gpus: int
    gpu_milli: int
    """Of each of them."""
    models: tuple[str, ...] = ()
    """One of these; empty: any."""
    gpu_memory_mib: int | None = None
    """Of each of them; None: the trace does not say."""

    @property
    def size_milli(self) -> int:
        """What it asks for of all its GPUs together."""
        return self.gpus * self.gpu_milli


@dataclass(frozen=True, slots=True, kw_only=True)
class TracePod:
    """A pod, with when it came and how long it ran, where the trace says so."""

    name: str
    shape: PodShape
    memory_mib: int
    """Of the node."""
    created_s: float | None = None
    duration_s: float | None = None
    line: int = 0
    """Where it stands in its file."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Nodes and pods, as their files have them."""

    nodes: Sequence[TraceNode]
    pods: Sequence[TracePod]


def capacity_milli(nodes: Sequence[TraceNode]) -> int:
    """Return what all GPUs of the nodes are together."""
    return MILLI * sum(node.gpus for node in nodes)

# SPDX-License-Identifier: Apache-2.0
"""The cluster and the pods of the scheduler's benches: shaped like the trace `openb`.

617 nodes of 8 GPUs, 54 of 4, 518 of 2 and 24 of 1: 1,213 nodes with 6,212 GPUs, as in the trace of
a real cluster that placement is measured by. The pods are made up: parts, whole GPUs, few of 8.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Self

from allotment.model.clusters import NodeDevice, NodeInventory
from allotment.model.errors import UsageError
from bench.harness.options import Options

GIB = 1 << 30
SIZES = {8: 617, 4: 54, 2: 518, 1: 24}


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of it."""

    is_quick: bool = False
    policy: str = "fragmentation"
    candidates: int = 1
    trace: tuple[Path, Path] | None = None
    """Files of nodes and pods; None: they are made up."""
    seed: int = 42
    tune: float = 1.3
    ranks_all: bool = True
    """The policy also ranks nodes for pods without GPUs."""

    @classmethod
    def chosen(cls, options: Options) -> Self:
        """Return what the command line chose; UsageError where half of a trace is missing."""
        nodes, pods = options.trace_nodes, options.trace_pods
        if (nodes is None) != (pods is None):
            raise UsageError("--trace-nodes and --trace-pods belong together")
        return cls(
            is_quick=options.is_quick,
            policy=options.policy,
            candidates=options.candidates,
            trace=(nodes, pods) if nodes is not None and pods is not None else None,
            seed=42 if options.seed is None else options.seed,
            ranks_all=not options.without_plain,
        )

    def of(self, number: int) -> int:
        """A tenth where it is to be quick."""
        return max(4, number // 10) if self.is_quick else number


@dataclass(frozen=True, slots=True)
class Spec:
    """A pod: so much of each of its GPUs (GiB, percent), and CPU in thousandths of a core."""

    gpus: int
    memory: int
    compute: int
    cpu: int


_SPECS: dict[Spec, int] = {
    Spec(1, 8, 10, 500): 12,
    Spec(1, 10, 15, 1000): 8,
    Spec(1, 16, 30, 2000): 10,
    Spec(1, 20, 25, 1000): 8,
    Spec(1, 40, 50, 4000): 8,
    Spec(1, 80, 100, 4000): 30,
    Spec(1, 80, 100, 8000): 20,
    Spec(2, 80, 100, 16000): 2,
    Spec(8, 80, 100, 64000): 2,
}


def specs(seed: int) -> Iterator[Spec]:
    """Pods without end, the same for each seed."""
    random = Random(seed)  # noqa: S311 - the same each time
    kinds, weights = list(_SPECS), list(_SPECS.values())
    while True:
        yield random.choices(kinds, weights)[0]


def nodes(number: int = 1213) -> list[NodeInventory]:
    """The nodes of the trace's shape; any other number: of 8 GPUs each."""
    sizes = [size for size, count in SIZES.items() for _ in range(count)]
    if number != len(sizes):
        sizes = [8] * number
    Random(1).shuffle(sizes)  # noqa: S311 - likewise
    return [
        NodeInventory(
            name=f"node-{place:04}",
            devices=tuple(
                NodeDevice(
                    uuid=f"GPU-{place:04}-{index}",
                    model="NVIDIA A100-SXM4-80GB",
                    memory_bytes=80 * GIB,
                    index=index,
                )
                for index in range(size)
            ),
            cpu_milli=96_000,
            memory_bytes=512 * GIB,
        )
        for place, size in enumerate(sizes)
    ]


def gpus_of(inventories: list[NodeInventory]) -> int:
    """How many GPUs all of them have."""
    return sum(len(each.devices) for each in inventories)

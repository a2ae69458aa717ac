# SPDX-License-Identifier: Apache-2.0
"""Figures of the scheduler's bench, and the cluster that they are about: shaped like `openb`.

617 nodes of 8 GPUs, 54 of 4, 518 of 2 and 24 of 1: 1,213 nodes with 6,212 GPUs, as in the trace of
a real cluster that placement is measured by. The pods are made up: parts, whole GPUs, few of 8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from allotment.model.clusters import NodeDevice, NodeInventory

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
    """The policy has a say in where pods without GPUs go."""

    def of(self, number: int) -> int:
        """A tenth where it is to be quick."""
        return max(4, number // 10) if self.is_quick else number


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of the table."""

    name: str
    value: float
    unit: str
    target: str = ""
    is_wrong: bool = False
    """Not slow, but wrong: something was given twice, or lost."""

    def as_json(self) -> dict[str, Any]:
        """As others read it."""
        return {
            "name": self.name,
            "value": round(self.value, 4),
            "unit": self.unit,
            "target": self.target,
            "wrong": self.is_wrong,
        }

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Figure:
        """The other way round."""
        name, value, unit, target = (document[key] for key in ("name", "value", "unit", "target"))
        return cls(name=name, value=value, unit=unit, target=target, is_wrong=document["wrong"])


def in_markdown(figures: Sequence[Figure], *, facts: Mapping[str, str], command: str) -> str:
    """Write a table for a page of the documentation, with the command that makes it."""
    lines = [f"Made by `{command}` on:", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    lines += ["", "| what | seen | target |", "| --- | --- | --- |"]
    for each in figures:
        wrong = " **WRONG**" * each.is_wrong
        lines.append(f"| {each.name} | {_amount(each)} {each.unit}{wrong} | {each.target} |")
    return "\n".join(lines)


def _amount(figure: Figure) -> str:
    if figure.value == round(figure.value) or figure.value >= 100:
        return f"{figure.value:,.0f}"
    return f"{figure.value:,.2f}"


def shown(figure: Figure) -> str:
    """A line for people."""
    target = f"   ({figure.target})" if figure.target else ""
    wrong = "   WRONG" * figure.is_wrong
    return f"{figure.name:<66} {_amount(figure):>9} {figure.unit}{target}{wrong}"


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


def percentile(values: list[float], part: float) -> float:
    """The value that so large a part does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))]

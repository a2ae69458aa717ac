# SPDX-License-Identifier: Apache-2.0
"""What there is of each model of devices, what is given away, and what is left in pieces."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from allotment.model.clusters import NodeDevice
from allotment.model.requests import EXCLUSIVE
from allotment.placement.booking import Load
from allotment.placement.nodes import Node

__all__ = ["ModelTotals", "Totals"]


@dataclass(slots=True)
class ModelTotals:
    """The devices of one model. Bytes; basis points of their time."""

    devices: int = 0
    memory: int = 0
    memory_allocated: int = 0
    memory_fragmented: int = 0
    """Left on devices that are given away in part, or that take no share: no whole one is there."""
    guarantee: int = 0
    guarantee_allocated: int = 0
    guarantee_fragmented: int = 0

    def add(self, other: "ModelTotals", *, sign: int = 1) -> None:
        """Add what another has; `sign` -1: take it away."""
        self.devices += sign * other.devices
        self.memory += sign * other.memory
        self.memory_allocated += sign * other.memory_allocated
        self.memory_fragmented += sign * other.memory_fragmented
        self.guarantee += sign * other.guarantee
        self.guarantee_allocated += sign * other.guarantee_allocated
        self.guarantee_fragmented += sign * other.guarantee_fragmented


class Totals:
    """The sums over all nodes, kept as these change: reading them costs next to nothing."""

    def __init__(self) -> None:
        self._models: dict[str, ModelTotals] = {}
        self._counted: dict[str, list[ModelTotals]] = {}
        """By node, what of its devices is in the sums."""

    def by_model(self) -> dict[str, ModelTotals]:
        """Return the sums of each model that is there."""
        return {name: replace(each) for name, each in sorted(self._models.items())}

    def put(self, node: Node) -> None:
        """Count a node that is not counted."""
        self._counted[node.inventory.name] = [ModelTotals() for _ in node.inventory.devices]
        self.update(node, range(len(node.inventory.devices)))

    def update(self, node: Node, columns: Iterable[int]) -> None:
        """Count these devices of a node as they are now."""
        counted = self._counted[node.inventory.name]
        for column in columns:
            device = node.inventory.devices[column]
            now = _totals_of(device, node.loads[column])
            total = self._models.setdefault(device.model, ModelTotals())
            total.add(counted[column], sign=-1)
            total.add(now)
            counted[column] = now

    def drop(self, node: Node) -> None:
        """Count a node no longer, which is as it was when it was counted last."""
        devices = node.inventory.devices
        for device, each in zip(devices, self._counted.pop(node.inventory.name), strict=True):
            total = self._models[device.model]
            total.add(each, sign=-1)
            if not total.devices:
                del self._models[device.model]


def _totals_of(device: NodeDevice, load: Load) -> ModelTotals:
    """Return what one device adds to its model's totals."""
    whole = load.mode == EXCLUSIVE
    memory = device.memory_bytes if whole else min(load.memory, device.memory_bytes)
    guaranteed = device.guarantee if whole else min(load.guarantee, device.guarantee)
    is_broken = load.shares > 0 or bool(device.problem)
    return ModelTotals(
        devices=1,
        memory=device.memory_bytes,
        memory_allocated=memory,
        memory_fragmented=device.memory_bytes - memory if is_broken else 0,
        guarantee=device.guarantee,
        guarantee_allocated=guaranteed,
        guarantee_fragmented=device.guarantee - guaranteed if is_broken else 0,
    )

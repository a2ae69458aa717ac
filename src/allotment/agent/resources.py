# SPDX-License-Identifier: Apache-2.0
"""What a node offers: devices, health and configuration in, resources and quantities out. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = [
    "GPU_COMPUTE",
    "GPU_MEMORY",
    "GPU_SHARE",
    "Offer",
    "Resource",
    "Slot",
]

GPU_SHARE = "allotment.dev/gpu"
"""How many GPUs a container has a part of: a device-plugin resource whose ids stand for no device."""
GPU_MEMORY = "allotment.dev/gpu-memory"
"""Bytes, of all these GPUs together: a quantity of the node's status."""
GPU_COMPUTE = "allotment.dev/gpu-compute"
"""Percent of a device, of all these GPUs together: likewise (100 for each GPU of the node)."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One id that the kubelet can give to one container."""

    id: str
    """The device's UUID, `UUID::N` for its replica N, or `share::N`, which stands for no device."""
    device: str | None
    """UUID; None: any device of this resource's mode."""
    is_healthy: bool = True
    numa_node: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """A resource that the kubelet is offered. `mode` enforces what is given of it."""

    name: str
    mode: str
    slots: tuple[Slot, ...]
    replicas: int = 1
    """How many slots a device has. In mode soft each is that part of its memory and time."""
    fails_above_one: bool = False
    """More than one of it in a container is refused."""
    family: str = ""
    """The resource's name before it was renamed: what the labels' keys begin with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """All that a node offers at a moment."""

    resources: tuple[Resource, ...] = ()
    quantities: Mapping[str, int] = field(default_factory=dict)
    """`GPU_MEMORY` and `GPU_COMPUTE`, for the node's capacity; healthy devices alone count."""
    modes: Mapping[str, str] = field(default_factory=dict)
    """By UUID: the mode of each device."""
    problems: tuple[str, ...] = ()
    """What of the configuration does not suit these devices, and is left out."""

    def resource(self, name: str) -> Resource | None:
        """Return the resource of that name."""
        return next((each for each in self.resources if each.name == name), None)

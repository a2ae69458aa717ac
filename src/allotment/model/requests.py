# SPDX-License-Identifier: Apache-2.0
"""A request: what a workload asks for, in whatever syntax it was written."""

from dataclasses import dataclass, field

from allotment.model.compute import Compute
from allotment.model.quantities import MemoryAmount

__all__ = ["Request"]


@dataclass(frozen=True, slots=True)
class Request:
    """`count` distinct devices, with `memory` and `compute` on each."""

    memory: MemoryAmount
    count: int = 1
    selectors: tuple[str, ...] = field(default=())
    """UUIDs (or their beginnings) and model names; a device has to match one. Empty: any device."""
    compute: Compute = field(default=Compute())
    may_oversubscribe: bool = False
    """Its memory may live on the host: the device may be promised to more than it holds."""

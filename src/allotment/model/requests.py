# SPDX-License-Identifier: Apache-2.0
"""A request: what a workload asks for, in whatever syntax it was written."""

from dataclasses import dataclass, field, replace
from fractions import Fraction

from allotment.model.compute import WHOLE, Compute
from allotment.model.quantities import MemoryAmount

__all__ = ["EXCLUSIVE", "SOFT", "TIMESLICE", "Request", "replicas_of", "whole_devices"]

SOFT = "soft"
EXCLUSIVE = "exclusive"
TIMESLICE = "timeslice"


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
    mode: str = SOFT
    """How it is to be enforced. The shares of a device at one time are all of one mode."""

    def times(self, number: int) -> "Request":
        """Return the request for so many parts of one device: amounts and guarantee together."""
        if number == 1:
            return self
        memory = self.memory
        if memory.size_bytes is not None:
            memory = replace(memory, size_bytes=memory.size_bytes * number)
        elif memory.part is not None:
            memory = replace(memory, part=min(Fraction(1), memory.part * number))
        compute = self.compute
        guarantee = min(WHOLE, compute.guarantee * number)
        ceiling = min(WHOLE, compute.ceiling * number)
        return replace(
            self,
            memory=replace(memory, text=f"{number} times {self.memory.text}"),
            compute=replace(compute, guarantee=guarantee, ceiling=ceiling),
            count=1,
        )


def whole_devices(count: int, *, mode: str) -> Request:
    """Return the request for devices that nothing parts: mode `exclusive` or `timeslice`."""
    return Request(MemoryAmount("100%", part=Fraction(1)), count=count, mode=mode)


def replicas_of(number: int, *, count: int = 1) -> Request:
    """Return the request for replicas that are enforced: each is one part in `number` of a device.

    That part of its memory, and as a guarantee of its time; all of its time while others leave it.
    """
    return Request(
        MemoryAmount(f"1/{number} of the GPU", part=Fraction(1, number)),
        count=count,
        compute=Compute(guarantee=WHOLE // number, is_governed=True),
    )

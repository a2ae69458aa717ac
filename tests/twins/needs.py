# SPDX-License-Identifier: Apache-2.0
"""What pods ask for, in numbers small enough to count with."""

from __future__ import annotations

from fractions import Fraction

from allotment.model.compute import Compute
from allotment.model.modes import SOFT
from allotment.model.quantities import MemoryAmount
from allotment.model.requests import Constraints, Preferences, Request


def request(
    memory: int | Fraction,
    *,
    count: int = 1,
    guarantee: int = 0,
    floor: int = 0,
    mode: str = SOFT,
    host: bool = False,
    constraints: Constraints | None = None,
    preferences: Preferences | None = None,
) -> Request:
    """A request for bytes or a part of a device, which may be fewer than a program could use."""
    amount = (
        MemoryAmount(f"{memory}", size_bytes=memory)
        if isinstance(memory, int)
        else MemoryAmount(f"{memory}", part=memory)
    )
    return Request(
        amount,
        count=count,
        compute=Compute(guarantee),
        floor=floor,
        may_oversubscribe=host,
        mode=mode,
        constraints=constraints or Constraints(),
        preferences=preferences or Preferences(),
    )

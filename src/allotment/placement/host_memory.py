# SPDX-License-Identifier: Apache-2.0
"""How much of a device may be promised when memory of its shares may live on the host.

What is promised of a device beyond what it holds has to lie on the host when all of it is used:
that much host memory is booked, out of one budget for the whole machine. Limits of shares that are
not oversubscribed always fit in the device, so no such share depends on the host.

All figures are bytes; `fixed` and `oversubscribed` are the sums of the limits of a device's shares
that may not, and that may, have memory on the host.
"""

from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["Promised", "budget_left", "default_budget", "host_part", "room", "room_fixed"]

_PART_OF_HOST = 2
"""The default budget is one part in this many of the host's memory."""


class Promised(NamedTuple):
    """What of one device is promised."""

    capacity: int
    fixed: int
    oversubscribed: int


def host_part(capacity: int, fixed: int, oversubscribed: int) -> int:
    """Return how much host memory stands for what is promised of a device beyond its capacity."""
    return max(0, fixed + oversubscribed - capacity)


def budget_left(budget: int, devices: Iterable[Promised]) -> int:
    """Return what is left of a machine's budget.

    Negative when it was made smaller than what is booked already.
    """
    return budget - sum(host_part(*device) for device in devices)


def room(capacity: int, fixed: int, oversubscribed: int, budget_left: int) -> int:
    """Return the largest limit that one more oversubscribed share can have; never negative.

    What is free of the device comes first: only what is beyond that takes of the budget.
    """
    return max(0, capacity - fixed - oversubscribed) + max(0, budget_left)


def room_fixed(capacity: int, fixed: int, oversubscribed: int, budget_left: int) -> int:
    """Return the largest limit that one more share without oversubscription can have.

    It may push oversubscribed neighbours to the host as far as the budget allows, but all limits of
    its kind fit in the device together.
    """
    beside_all = room(capacity, fixed, oversubscribed, budget_left)
    return min(beside_all, max(0, capacity - fixed))


def default_budget(*, host_bytes: int, simulated_bytes: Iterable[int] | None = None) -> int:
    """Return the budget of a machine for which none was named.

    Half of the host's memory: all of it, not what is free now, so that the budget does not shrink
    as it is used. The memory of simulated GPUs takes none of the host's, so theirs is a host of
    twice their size.
    """
    if simulated_bytes is not None:
        return sum(simulated_bytes)
    return host_bytes // _PART_OF_HOST

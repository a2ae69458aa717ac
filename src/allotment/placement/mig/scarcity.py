# SPDX-License-Identifier: Apache-2.0
"""What a place is worth: the fewer there are for a shape in all GPUs together, the more.

For each shape, say n instances of it would still fit; then what is missed is taken to be 1/(n+1),
and a start is chosen that adds least to the sum over all shapes. So the last place for the largest
shape is given away last, whoever asks for what: there is nothing to learn and nothing to set. What
it serves is 0.01 to 0.8 points below the most that any choice of starts can on one GPU with a mix
that is known, and on several GPUs more than values of one GPU at a time (docs/designs/mig.md).
"""

from collections.abc import Mapping

from allotment.placement.mig.slots import Slots

__all__ = ["loss", "scarcity"]

_DIGITS = 12
"""Sums are compared as decimals of so many digits, so that equal losses are equal in any order."""


def loss(slots: Slots, totals: Mapping[str, int], *, before: int, after: int) -> float:
    """Return what is lost where covered slots become `after`.

    `totals`: how many instances of each shape fit in all GPUs that are looked at, together.
    """
    then = slots.rooms(after)
    lost = 0.0
    for shape, room in slots.rooms(before).items():
        gone = room - then[shape]
        if gone:
            total = totals[shape]
            lost += gone / ((total + 1) * (total + 1 - gone))
    return round(lost, _DIGITS)


def scarcity(slots: Slots, mask: int) -> float:
    """Return how scarce room is on one GPU by itself."""
    return round(sum(1 / (room + 1) for room in slots.rooms(mask).values()), _DIGITS)

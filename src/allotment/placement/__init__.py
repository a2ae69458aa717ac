# SPDX-License-Identifier: Apache-2.0
"""Where a request goes: pure functions from device states to a decision that carries its reasons.

No I/O, no clock, no randomness: the same states and the same request give the same decision. The
caller holds whatever lock keeps the states true until the decision is written down.

What is here needs nothing but the standard library, for one machine. A cluster, which needs numpy,
is in `allotment.placement.cluster`.
"""

from allotment.placement.choose import choose, follow
from allotment.placement.explain import explain, is_asked_for, main_reason, most_telling
from allotment.placement.fit import (
    NOT_SELECTED,
    OTHER_MODE,
    TOO_LITTLE_COMPUTE,
    judge,
    memory_room,
    overflow,
)
from allotment.placement.select import is_selected, unknown_selectors

__all__ = [
    "NOT_SELECTED",
    "OTHER_MODE",
    "TOO_LITTLE_COMPUTE",
    "choose",
    "explain",
    "follow",
    "is_asked_for",
    "is_selected",
    "judge",
    "main_reason",
    "memory_room",
    "most_telling",
    "overflow",
    "unknown_selectors",
]

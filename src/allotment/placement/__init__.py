# SPDX-License-Identifier: Apache-2.0
"""Pure functions from device states to a placement decision with its reasons.

No I/O, no clock, no randomness: equal states and requests give equal decisions. The caller holds
the lock that keeps the states valid until the decision is written. This part needs only the
standard library; `allotment.placement.cluster` needs numpy.
"""

from allotment.placement.judge import (
    NOT_SELECTED,
    OTHER_MODE,
    TOO_LITTLE_COMPUTE,
    is_selected,
    judge,
    memory_room,
    model_matches,
    overflow,
    unknown_selectors,
)
from allotment.placement.ordering import choose, follow

__all__ = [
    "NOT_SELECTED",
    "OTHER_MODE",
    "TOO_LITTLE_COMPUTE",
    "choose",
    "follow",
    "is_selected",
    "judge",
    "memory_room",
    "model_matches",
    "overflow",
    "unknown_selectors",
]

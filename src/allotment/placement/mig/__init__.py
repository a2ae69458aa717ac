# SPDX-License-Identifier: Apache-2.0
"""MIG planning: where slices go on GPUs, and which workloads must restart for one more.

    slots       the rules: where instances may start, and what a start costs later requests
    choose      slices for a request, on one GPU or several
    arrange     a whole configuration for one GPU, and the steps to it
    drain_plan  workloads to restart so that a request fits
    cuts        what the GPUs of a node can be cut into

Based on profiles and placements from the driver (`model.mig`), without a table of models. No I/O,
no clock, no randomness; the standard library only.
"""

from allotment.placement.mig.choose import (
    MigChoice,
    MigRefusal,
    choose,
    is_served,
    reason_of,
    room_of,
    serving,
)

__all__ = [
    "MigChoice",
    "MigRefusal",
    "choose",
    "is_served",
    "reason_of",
    "room_of",
    "serving",
]

# SPDX-License-Identifier: Apache-2.0
"""MIG planned: where slices go on GPUs that can be cut, and what must move for one that is wanted.

slots        the rules: where instances may begin, and how many there can be
scarcity     what a start costs those who come later
choosing     slices for a request, on one GPU or several
arranging    a whole configuration, keeping as much as possible of what is there
moving       whom to ask to start again, so that what is wanted fits
grouping     slices of the groups that an administrator allows, as Volcano and HAMi have them

All of it from the profiles and placements that the driver reports (`model.mig`), and never from a
table of models. No I/O, no clock, no randomness; the standard library alone, so that one machine
without numpy has the same planner as a cluster.
"""

from allotment.placement.mig.arranging import arrange
from allotment.placement.mig.choosing import (
    MigChoice,
    MigRefusal,
    choose,
    is_served,
    reason_of,
    room_of,
    serving,
)
from allotment.placement.mig.grouping import pick_of_groups, start_in_group
from allotment.placement.mig.moving import advise
from allotment.placement.mig.plans import MigAction, MigImpossible, MigPlan, MigStep

__all__ = [
    "MigAction",
    "MigChoice",
    "MigImpossible",
    "MigPlan",
    "MigRefusal",
    "MigStep",
    "advise",
    "arrange",
    "choose",
    "is_served",
    "pick_of_groups",
    "reason_of",
    "room_of",
    "serving",
    "start_in_group",
]

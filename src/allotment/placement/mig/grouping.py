# SPDX-License-Identifier: Apache-2.0
"""Slices of the groups that an administrator allows: which one, and where it begins.

As Volcano does it: a GPU that has slices keeps to their group; on one without, groups are tried in
order, and the first that has a slice large enough is it. In a group the smallest that serves.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from allotment.model.mig import MigHold, MigLayout
from allotment.model.mig_groups import MigGroup, MigGroupSlot
from allotment.placement.mig.arranging import arrange
from allotment.placement.mig.choosing import MigChoice
from allotment.placement.mig.plans import MigAction, MigImpossible, MigStep
from allotment.placement.mig.slots import cover, slots_of

__all__ = ["pick_of_groups", "start_in_group"]


def pick_of_groups(
    groups: Sequence[MigGroup], gpu: str, used: Collection[MigGroupSlot], *, memory_mib: int
) -> MigGroupSlot | None:
    """Return the slice of a GPU for so much memory; None: its group has none left, or none does.

    `used`: those of this GPU that are given out.
    """
    current = {each.group for each in used}
    for group in groups:
        if current and group.name not in current:
            continue
        position = _free(group, {each.position for each in used}, memory_mib)
        if position is not None:
            return MigGroupSlot(gpu, group.name, position)
    return None


def _free(group: MigGroup, used: Collection[int], memory_mib: int) -> int | None:
    for template in sorted(group.templates, key=lambda each: each.memory_mib):
        if template.memory_mib >= memory_mib:
            for position in group.positions(template):
                if position not in used:
                    return position
    return None


def start_in_group(layout: MigLayout, group: MigGroup, position: int) -> MigChoice | MigImpossible:
    """Return where a slice of a group begins, so that the rest of the group still has its places.

    A position says which profile and no start: the starts of a group are ours to choose, and are
    chosen as slices are wanted. What is used is never touched; idle instances that are not of the
    group go. Raises `UsageError` where the group has no such position.
    """
    name = group.at(position).name
    slots = slots_of(layout.profiles)
    held = tuple(
        each if each.hold is MigHold.IDLE else replace(each, hold=MigHold.FOREIGN)
        for each in layout.slices
    )
    plan = arrange(replace(layout, slices=held), group.counts)
    if isinstance(plan, MigImpossible):
        return plan
    profile = slots.by_name[name]
    gone = {step.start for step in plan.those(MigAction.REMOVE)}
    for each in held:
        is_kept = each.hold is MigHold.IDLE and each.start not in gone
        if is_kept and each.profile == profile.number:
            return MigChoice(gpu=layout.gpu, profile=profile, start=each.start, reused=each)
    step = _made(plan.those(MigAction.CREATE), name)
    if step is None:
        return MigImpossible(reason=f"all slices {name} of group {group.name} are used")
    own = cover(step.start, profile.size)
    return MigChoice(
        gpu=layout.gpu,
        profile=profile,
        start=step.start,
        removes=tuple(
            each
            for each in held
            if each.hold is MigHold.IDLE
            and each.start in gone
            and (cover(each.start, each.size) & own or each.profile == profile.number)
        ),
    )


def _made(steps: Iterable[MigStep], name: str) -> MigStep | None:
    return next((each for each in steps if each.profile == name), None)

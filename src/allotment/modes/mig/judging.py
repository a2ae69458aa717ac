# SPDX-License-Identifier: Apache-2.0
"""What a record stands for whose maker died, by what the driver shows. Pure.

The driver has no mark for whose an instance is, and uses ids and places again. What tells is:

* the UUID of a MIG device, which none has twice: from `READY` on there is no doubt;
* that ours has no compute instance as long as none was asked for. At a place of ours where a
  record says `INTENDED`, one with a compute instance is somebody else's, who came between;
* that nobody was given a slice before it is `READY`. What is in use before that is not ours.

What cannot be told apart is somebody else's instance in the very place and of the very profile of
one of ours that was half made or half removed when its process died: one without a compute
instance, or one that was put there after ours had been taken away. Such a one is taken for ours
and removed, unless it is in use.
"""

from collections.abc import Collection, Iterable
from enum import Enum, auto

from allotment.model.devices import Device
from allotment.model.mig import MigInstance
from allotment.modes.mig.records import SliceRecord, Stage

__all__ = ["Verdict", "foreign", "is_of", "judge", "stands_for"]


class Verdict(Enum):
    """What to do about a record that nobody works on."""

    KEEP = auto()
    """It is there, and whole."""
    REMOVE = auto()
    """What is there of it is ours and useless."""
    FORGET = auto()
    """Nothing of ours is there (any more)."""


def judge(record: SliceRecord, instance: MigInstance | None, *, is_used: bool) -> Verdict:
    """Judge a record.

    `instance` is what `stands_for` found, `is_used` whether processes are in it.
    """
    if instance is None:
        return Verdict.FORGET
    match record.stage:
        case Stage.READY:
            return Verdict.KEEP
        case Stage.CUT if is_used:
            return Verdict.FORGET
        case _:
            return Verdict.REMOVE


def stands_for(record: SliceRecord, instances: Iterable[MigInstance]) -> MigInstance | None:
    """Return the instance that is this record's, or None where it is not there."""
    here = next((each for each in instances if _is_at(record, each)), None)
    if here is None:
        return None
    is_whole = here.compute_instance is not None
    is_same = here.gpu_instance == record.gpu_instance
    match record.stage:
        case Stage.INTENDED:
            return None if is_whole else here
        case Stage.CUT:
            return here if is_same else None
        case Stage.READY:
            return here if here.uuid == record.uuid else None
        case Stage.LEAVING:
            # Its compute instance goes first, and with it the UUID.
            is_ours = here.uuid == record.uuid if is_whole else is_same
            return here if is_ours else None


def foreign(
    records: Collection[SliceRecord], instances: Iterable[MigInstance]
) -> tuple[MigInstance, ...]:
    """Return the instances that no record stands for: others made them, and they are left alone."""
    known = list(instances)
    ours = {
        instance.gpu_instance
        for record in records
        if (instance := stands_for(record, known)) is not None
    }
    return tuple(each for each in known if each.gpu_instance not in ours)


def is_of(record: SliceRecord, device: Device) -> bool:
    """Tell whether a MIG device is a record's: by UUID, which one that is being made has not yet.

    Its compute instance may be there before the record says so, and stays so where its maker dies.
    """
    if record.uuid:
        return record.uuid == device.uuid
    where = device.slice_of
    return (
        where is not None and record.gpu == where.gpu and record.gpu_instance == where.gpu_instance
    )


def _is_at(record: SliceRecord, instance: MigInstance) -> bool:
    return (instance.profile, instance.start) == (record.profile, record.start)

# SPDX-License-Identifier: Apache-2.0
"""The slices of one GPU, from its driver's report and its journal. Pure."""

from collections.abc import Collection, Mapping

import msgspec

from allotment.model.mig import MigGpu, MigHold, MigProfile, MigSlice
from allotment.modes.mig.journal import SliceRecord, Stage, foreign, stands_for


class CutGpu(msgspec.Struct, frozen=True, kw_only=True):
    """The state of MIG on one GPU."""

    profiles: tuple[MigProfile, ...]
    is_enabled: bool
    slices: tuple[MigSlice, ...] = ()
    """Those that exist or are being created; a holder is a share's id."""
    lost: tuple[SliceRecord, ...] = ()
    """Slices of our shares that others have removed."""
    claim: int = 0
    """Our claim to its MIG mode (`Journal.claim`); 0: others switched it on."""
    times_switched: int = 0
    """How often we switched the mode on under that claim; all but the first time, others had
    switched it off."""
    proofs: frozenset[str] = frozenset()
    """Ids of complete records while the mode is off: it has been on."""
    problems: tuple[str, ...] = ()
    """Unreadable records: their slices count as foreign."""
    gives_way: bool = False
    """It has only idle slices, which are removed for a share of another mode."""

    @property
    def names(self) -> Mapping[int, str]:
        """The names of the profiles by number."""
        return {each.number: each.name for each in self.profiles}

    @property
    def is_free(self) -> bool:
        """Whether all slices are idle, or none exists."""
        return all(each.hold is MigHold.IDLE for each in self.slices)


def cut_gpu(gpu: MigGpu, before: Collection[SliceRecord], after: Collection[SliceRecord]) -> CutGpu:
    """Join the driver's report with the journal's records from before and after it.

    A record that changed meanwhile proves nothing about others.
    """
    slices = [
        MigSlice(profile=each.profile, start=each.start, size=each.size, hold=MigHold.FOREIGN)
        for each in foreign(after, foreign(before, gpu.instances))
    ]
    lost = []
    for record in after:
        is_there = stands_for(record, gpu.instances) is not None
        if record.stage is Stage.READY and not is_there and record in before:
            if record.holder:
                lost.append(record)
            continue
        if record.stage is Stage.LEAVING and not is_there:
            continue
        slices.append(
            MigSlice(
                profile=record.profile,
                start=record.start,
                size=record.size,
                hold=MigHold.USED if record.holder else MigHold.IDLE,
                holder=record.holder,
            )
        )
    whole = (each for each in after if each.stage is Stage.READY and each in before)
    return CutGpu(
        profiles=gpu.profiles,
        is_enabled=gpu.is_enabled,
        slices=tuple(sorted(slices, key=lambda each: (each.start, each.size))),
        lost=tuple(lost),
        proofs=frozenset() if gpu.is_enabled else frozenset(each.id for each in whole),
    )

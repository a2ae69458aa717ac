# SPDX-License-Identifier: Apache-2.0
"""What one GPU is cut into: its driver's word and its journal's, joined. Pure."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from allotment.model.mig import MigGpu, MigHold, MigProfile, MigSlice
from allotment.modes.mig.judging import foreign, stands_for
from allotment.modes.mig.records import SliceRecord, Stage

__all__ = ["CutGpu", "cut_gpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CutGpu:
    """What one GPU is cut into, as far as it is known."""

    profiles: tuple[MigProfile, ...]
    is_enabled: bool
    slices: tuple[MigSlice, ...] = ()
    """All that are there or being made; who has one is its share's id."""
    lost: tuple[SliceRecord, ...] = ()
    """Ours, of shares, which others have removed."""
    claim: int = 0
    """By which claim of ours its MIG mode is to be on (`Journal.claim`); 0: that is others'."""
    times_switched: int = 0
    """How often the mode was switched on under that claim: by us, and each time but the first after
    others had switched it off."""
    proofs: frozenset[str] = frozenset()
    """Ids of records that were whole, and so had the mode on, while it is off."""
    problems: tuple[str, ...] = ()
    """Records that cannot be read: what they are of counts as others'."""
    gives_way: bool = False
    """Its mode is on for warm slices alone, which go as soon as a share of another mode comes."""

    @property
    def names(self) -> Mapping[int, str]:
        """The profiles' names by their numbers."""
        return {each.number: each.name for each in self.profiles}

    @property
    def is_free(self) -> bool:
        """Whether nobody has a slice of it: all are warm, or there is none."""
        return all(each.hold is MigHold.IDLE for each in self.slices)


def cut_gpu(gpu: MigGpu, before: Collection[SliceRecord], after: Collection[SliceRecord]) -> CutGpu:
    """Join what a driver says of a GPU with what its journal did before and after.

    What came, went or changed meanwhile is nobody else's doing, and is looked at again.
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

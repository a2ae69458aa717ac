# SPDX-License-Identifier: Apache-2.0
"""Slices of one GPU, made and removed so that no crash costs one, or touches somebody else's.

    slices = Slices(driver, journal)
    with slices.cut("1g.10gb", 6, holder=share) as work:
        ...                                # make the share; nobody takes it for left over
    slices.settle(is_there, keep_s=60)     # whose holder has gone is kept warm, or removed

Each step is written down before the driver is asked, and whoever comes next puts right what a dead
process left (`settle`). Every call may block for as long as its GPU does.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Final

from allotment.devices.mig import MigDriver
from allotment.model.errors import (
    AllotError,
    BusyError,
    DoesNotFitError,
    NotFoundError,
    PrerequisiteError,
    StateError,
    UsageError,
)
from allotment.model.mig import MigGpu, MigInstance, MigProfile
from allotment.modes.mig.journal import Journal, Work
from allotment.modes.mig.judging import Verdict, foreign, judge, stands_for
from allotment.modes.mig.records import SliceRecord, Stage

__all__ = ["ModeChangedError", "Reset", "Settled", "Slices"]

Reset = Callable[[], None]
"""Resets the GPU, which nobody uses; raises `AllotError`."""
_SHOWN: Final = 8


class ModeChangedError(BusyError):
    """MIG mode is not as it was when the slice was chosen: choose again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """What a look at the journal and the driver found, and what was done."""

    kept: tuple[SliceRecord, ...] = ()
    """Whole and ours: held, or warm."""
    lost: tuple[SliceRecord, ...] = ()
    """Held, and their instances were removed by others; known for as long as their holders are."""
    removed: tuple[SliceRecord, ...] = ()
    forgotten: tuple[SliceRecord, ...] = ()
    """Their instances were not there (any more): removed by others, or never made. Nobody had
    them."""
    stuck: tuple[tuple[SliceRecord, AllotError], ...] = ()
    """Ought to be removed, and could not be."""
    foreign: tuple[MigInstance, ...] = ()
    """Made by others, and left alone."""
    problems: tuple[StateError, ...] = ()
    """Records that cannot be read."""


class Slices:
    """The slices of one GPU that are ours."""

    __slots__ = ("_clock", "_driver", "_journal", "_reset")

    def __init__(
        self,
        driver: MigDriver,
        journal: Journal,
        *,
        reset: Reset | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Take a GPU and its journal; nothing is asked yet.

        `reset`: how it is reset where its generation needs that for another mode; None: it is not.
        """
        self._driver = driver
        self._journal = journal
        self._reset = reset
        self._clock = clock

    def cut(
        self,
        name: str,
        start: int,
        *,
        holder: str = "",
        keep_s: float = 0.0,
        switches: bool = False,
    ) -> Work:
        """Make a slice of a profile at a slot, and return its record, which is the caller's work.

        `keep_s`: for how many seconds it is kept once its holder has gone, at least. `switches`:
        where MIG is off it is switched on, if that was claimed (`Journal.note_switched`).

        Whoever enters the result keeps it from being settled until the holder is really there.
        Raises `DoesNotFitError` where slots are taken, `UsageError` for a profile or a start that
        the GPU does not have, `ModeChangedError` where MIG is off and not claimed (any more), and
        the driver's errors; nothing is left behind by a failure that the driver lets be undone.
        """
        with self._journal.locked():
            gpu = self._driver.look()
            if not gpu.is_enabled and switches:
                gpu = self._switched_on(gpu)
            profile = _profile(gpu, name, start)
            _refuse_taken(gpu, self._journal.read().records, range(start, start + profile.size))
            work = self._journal.begin(
                SliceRecord(
                    id=self._journal.new_id(),
                    gpu=gpu.uuid,
                    profile=profile.number,
                    name=profile.name,
                    start=start,
                    size=profile.size,
                    stage=Stage.INTENDED,
                    holder=holder,
                    keep_s=keep_s,
                )
            )
        with ExitStack() as undo:
            undo.enter_context(work)
            self._make(work, profile)
            undo.pop_all()
        return work

    def bind(self, name: str, holder: str, *, keep_s: float = 0.0, after: str = "") -> Work:
        """Give a warm slice, by its id, to a holder; the caller's work, as in `cut`.

        `after`: the holder that it is taken over from. Raises `NotFoundError` where there is none,
        `BusyError` where somebody has it.
        """
        work = self._taken(name)
        with ExitStack() as undo:
            undo.enter_context(work)
            record = work.record
            if record.stage is not Stage.READY or record.holder not in {"", after, holder}:
                raise BusyError(f"the slice {record.name} {record.uuid} is not free any more")
            work.write(replace(record, holder=holder, idle_since=None, keep_s=keep_s))
            undo.pop_all()
        return work

    def remove(self, name: str, *, after: str = "") -> None:
        """Remove a slice that nobody holds. Raises `BusyError` also while processes are in it.

        `after`: a holder that is not there any more.
        """
        with self._taken(name) as work:
            if work.record.holder not in {"", after}:
                raise BusyError(
                    f"the slice {work.record.name} {work.record.uuid} is held by"
                    f" {work.record.holder}",
                    hint="it is free when its holder has gone",
                )
            instance = stands_for(work.record, self._driver.look().instances)
            if instance is None:
                work.forget()
            else:
                self._remove(work, instance)

    def give_away(self, name: str) -> None:
        """Forget a slice that stays: from here on it is the machine's, as if made by nvidia-smi."""
        with self._taken(name) as work:
            work.forget()

    def settle(self, is_held: Callable[[str], bool], *, keep_s: float) -> Settled:
        """Put right what dead processes left, and remove what has been warm for long enough.

        That is `keep_s` seconds, or what its last holder asked for if that is longer.

        `is_held` tells whether a holder is still there. A slice that somebody works on is left
        alone. Raises what the driver raises when it is asked what there is; from then on an error
        concerns one slice, and is part of the answer.
        """
        with ExitStack() as works:
            with self._journal.locked():
                self._journal.sweep()
                found = self._journal.read()
                mine = [
                    works.enter_context(work)
                    for record in found.records
                    if (work := self._journal.take(record.id)) is not None
                ]
                instances = self._driver.look().instances  # now that none of these can change
            others = foreign([work.record for work in mine], instances)
            settling = _Settling(is_held=is_held, keep_s=keep_s)
            leaving: list[tuple[Work, MigInstance]] = []
            for work in mine:
                instance = stands_for(work.record, instances)
                try:
                    if instance is not None and self._is_to_go(work, instance, settling):
                        leaving.append((work, instance))
                        continue
                    if instance is None:
                        self._without_instance(work, settling)
                except AllotError as error:
                    settling.stuck.append((work.record, error))
                work.close()  # a warm one can be had while the driver removes others
            for work, instance in leaving:
                try:
                    self._remove(work, instance)
                except AllotError as error:
                    settling.stuck.append((work.record, error))
                else:
                    settling.removed.append(work.record)
                work.close()
        worked_on = {each.id for each in found.records} - {work.record.id for work in mine}
        places = {(each.profile, each.start) for each in found.records if each.id in worked_on}
        return Settled(
            kept=tuple(settling.kept),
            lost=tuple(settling.lost),
            removed=tuple(settling.removed),
            forgotten=tuple(settling.forgotten),
            stuck=tuple(settling.stuck),
            foreign=tuple(each for each in others if (each.profile, each.start) not in places),
            problems=found.problems,
        )

    # ---- the GPU's mode --------------------------------------------------------------------------

    def switch_on(self) -> bool:
        """Switch MIG on now, for slices of ours that are to come; tell if it was off.

        Where it is on and was to go with the next reset, it stays.

        The caller has claimed it (`Journal.note_switched`). Raises as `cut`, and
        `ModeChangedError` where somebody has given the claim up since.
        """
        with self._journal.locked():
            gpu = self._driver.look()
            if gpu.is_enabled:  # somebody else's, or ours already
                if not gpu.is_pending:
                    self._driver.set_mode(is_on=True)
                return False
            self._switched_on(gpu)
            return True

    def _switched_on(self, gpu: MigGpu) -> MigGpu:
        """Switch MIG on, under the journal's lock, look again, and count it.

        Raises `BusyError` where a process is, and `PrerequisiteError` where the GPU takes the mode
        with a reset only and there is none.
        """
        if not self._journal.is_switched:
            raise ModeChangedError(f"GPU {gpu.uuid} is not in MIG mode any more")
        try:
            if not self._driver.set_mode(is_on=True):
                self._put_in_force(gpu)
            found = self._driver.look()
            self._journal.count_switched()
            return found
        except AllotError:
            if not self._driver.look().is_enabled:
                self._journal.forget_switched()
            raise

    def _put_in_force(self, gpu: MigGpu) -> None:
        """Reset a GPU that takes the mode so, or take the wish for the mode back."""
        try:
            if self._reset is None:
                raise PrerequisiteError(
                    f"GPU {gpu.uuid} takes MIG mode with its next reset only",
                    hint="let `allot mig apply` switch it: that resets the GPU; on a node,"
                    " `mig: {reset: true}` in the GPU's rule lets the agent",
                )
            self._reset()
        except AllotError:
            self._driver.set_mode(is_on=gpu.is_enabled)
            raise

    def switch_off(
        self, *, stays: Callable[[], bool] = lambda: False, of_anybody: bool = False
    ) -> bool:
        """Switch MIG off again if it is on for our slices' sake and none is left; tell if it is.

        As long as others have instances there it stays, and so where the mode is theirs, unless it
        may be `of_anybody`, or where `stays` says so, which is asked when nobody else switches it.
        """
        if not (self._journal.is_switched or of_anybody):
            return False
        with self._journal.locked():
            if stays():
                return False
            gpu = self._driver.look()
            if not (gpu.is_enabled or self._journal.is_switched):
                return False
            if gpu.is_enabled:
                found = self._journal.read()
                if found.records or found.problems or gpu.instances:
                    return False
                if not self._driver.set_mode(is_on=False):
                    self._put_in_force(gpu)
            self._journal.forget_switched()
            return True

    # ---- one slice -------------------------------------------------------------------------------

    def _make(self, work: Work, profile: MigProfile) -> None:
        """Take a slice from its intention to being whole, or to never having been."""
        try:
            made = self._driver.create_gpu_instance(profile, work.record.start)
        except AllotError:
            work.forget()
            raise
        try:
            work.write(replace(work.record, stage=Stage.CUT, gpu_instance=made))
            compute = self._driver.create_compute_instance(made, profile)
            work.write(
                replace(
                    work.record,
                    stage=Stage.READY,
                    compute_instance=compute.number,
                    uuid=compute.uuid,
                )
            )
        except AllotError:
            # What cannot be undone stays written down, and is for `settle`.
            with suppress(AllotError):
                self._destroy(made)
                work.forget()
            raise

    def _is_to_go(self, work: Work, instance: MigInstance, settling: "_Settling") -> bool:
        """Judge a slice that is there; tell if it is to be removed."""
        is_used = bool(self._driver.users(instance.gpu_instance))
        verdict = judge(work.record, instance, is_used=is_used)
        if verdict is Verdict.FORGET:
            settling.forgotten.append(work.record)
            work.forget()
            return False
        if verdict is Verdict.KEEP:
            record = work.record
            if record.holder and settling.is_held(record.holder):
                settling.kept.append(record)
                return False
            record = self._let_go(work)
            warm_s = self._clock() - (record.idle_since or 0.0)
            if is_used or warm_s < max(settling.keep_s, record.keep_s):
                settling.kept.append(record)
                return False
        return True

    def _without_instance(self, work: Work, settling: "_Settling") -> None:
        """Forget what is not there, unless somebody was given it, who is there still.

        As long as that one is, its record tells that it is not to have what others have there now.
        """
        record = work.record
        if record.stage is Stage.READY and record.holder and settling.is_held(record.holder):
            settling.lost.append(record)
            return
        settling.forgotten.append(record)
        work.forget()

    def _let_go(self, work: Work) -> SliceRecord:
        if work.record.holder or work.record.idle_since is None:
            work.write(replace(work.record, holder="", idle_since=self._clock()))
        return work.record

    def _remove(self, work: Work, instance: MigInstance) -> None:
        if using := self._driver.users(instance.gpu_instance):
            raise BusyError(
                f"the slice {work.record.name} {instance.uuid} is in use by processes"
                f" {', '.join(map(str, using[:_SHOWN]))}",
                hint="end them first",
            )
        work.write(
            replace(
                work.record,
                stage=Stage.LEAVING,
                holder="",
                gpu_instance=instance.gpu_instance,
                uuid=instance.uuid,
            )
        )
        self._destroy(instance.gpu_instance)
        work.forget()

    def _destroy(self, gpu_instance: int) -> None:
        # Not there any more is as good as removed.
        with suppress(NotFoundError):
            self._driver.destroy_compute_instances(gpu_instance)
            self._driver.destroy_gpu_instance(gpu_instance)

    def _taken(self, name: str) -> Work:
        work = self._journal.take(name)
        if work is not None:
            return work
        if any(record.id == name for record in self._journal.read().records):
            raise BusyError(f"the MIG slice {name} is being made or removed", hint="try again")
        raise NotFoundError(f"there is no MIG slice {name} any more")


@dataclass(slots=True, kw_only=True)
class _Settling:
    """How slices are settled, and what has become of them."""

    is_held: Callable[[str], bool]
    keep_s: float
    kept: list[SliceRecord] = field(default_factory=list)
    lost: list[SliceRecord] = field(default_factory=list)
    removed: list[SliceRecord] = field(default_factory=list)
    forgotten: list[SliceRecord] = field(default_factory=list)
    stuck: list[tuple[SliceRecord, AllotError]] = field(default_factory=list)


def _profile(gpu: MigGpu, name: str, start: int) -> MigProfile:
    if not gpu.is_enabled:
        raise ModeChangedError(
            f"GPU {gpu.uuid} is not in MIG mode", hint="`allot mig apply` switches it on"
        )
    profile = next((each for each in gpu.profiles if each.name == name), None)
    if profile is None:
        has = ", ".join(each.name for each in gpu.profiles) or "no profile"
        raise UsageError(f"GPU {gpu.uuid} has no MIG profile {name!r}", hint=f"it has: {has}")
    if start not in profile.starts:
        starts = ", ".join(map(str, profile.starts))
        raise UsageError(f"{name} cannot begin at slot {start}", hint=f"it can at: {starts}")
    return profile


def _refuse_taken(gpu: MigGpu, records: Iterable[SliceRecord], wanted: range) -> None:
    """Refuse slots that are taken, or will be by a slice that is being made.

    One that is ready and was removed by others takes none.
    """
    there = ((each.start, each.size) for each in gpu.instances)
    coming = ((each.start, each.size) for each in records if each.stage is not Stage.READY)
    for start, size in (*there, *coming):
        if start < wanted.stop and wanted.start < start + size:
            raise DoesNotFitError(
                f"GPU {gpu.uuid}: slots {wanted.start} to {wanted.stop - 1} are wanted, and the"
                f" instance at {start} to {start + size - 1} is in the way",
                hint="`allot devices` shows what is where",
            )

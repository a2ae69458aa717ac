# SPDX-License-Identifier: Apache-2.0
"""Creates and removes the slices of one GPU, safely against crashes and foreign tools.

    slices = Slices(driver, journal)
    with slices.cut("1g.10gb", 6, holder=share) as work:
        ...                                # build the share; the slice counts as used meanwhile
    slices.free_orphans(is_held, keep_s=60)    # keeps warm, or removes, what has no holder

Each step is recorded before the driver call. `free_orphans` repairs what dead processes left. Every
call may block as long as its GPU does.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress

import msgspec

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
from allotment.model.formats import format_pids
from allotment.model.mig import MigGpu, MigInstance, MigProfile
from allotment.model.structs import replace
from allotment.modes.mig.journal import (
    Journal,
    RecordVerdict,
    SliceRecord,
    SliceWork,
    Stage,
    judge,
    new_id,
    stands_for,
)

Reset = Callable[[], None]
"""Resets an unused GPU; raises `AllotError`."""


class ModeChangedError(BusyError):
    """MIG mode has changed since the slice was chosen: choose again."""


class FreedSlices(msgspec.Struct, kw_only=True):
    """The result of `Slices.free_orphans`."""

    kept: list[SliceRecord] = msgspec.field(default_factory=list)
    """Complete: held, or warm."""
    lost: list[SliceRecord] = msgspec.field(default_factory=list)
    """Held, and another tool removed the instance; recorded until the holder ends."""
    removed: list[SliceRecord] = msgspec.field(default_factory=list)
    forgotten: list[SliceRecord] = msgspec.field(default_factory=list)
    """Without holder and without instance."""
    stuck: list[tuple[SliceRecord, AllotError]] = msgspec.field(default_factory=list)
    """Could not be removed."""
    problems: tuple[StateError, ...] = ()
    """Unreadable records."""


class Slices:
    """The slices of one GPU that Allotment made."""

    __slots__ = ("_clock", "_driver", "_reset", "journal")

    def __init__(
        self,
        driver: MigDriver,
        journal: Journal,
        *,
        reset: Reset | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`reset`: for GPUs that need one to change the mode; None: not allowed."""
        self._driver = driver
        self._reset = reset
        self._clock = clock
        self.journal = journal

    def cut(
        self,
        name: str,
        start: int,
        *,
        holder: str = "",
        keep_s: float = 0.0,
        switches: bool = False,
    ) -> SliceWork:
        """Make a slice of a profile at a slot; return its locked record.

        `keep_s`: how long it stays warm without a holder, in seconds. `switches`: switch MIG on if
        it is off and claimed (`Journal.note_switched`).

        The lock protects the slice until the holder exists. Raises `DoesNotFitError` for used
        slots, `UsageError` for an unknown profile or start, `ModeChangedError` if MIG is off and
        not claimed, and the driver's errors. A failure is undone as far as the driver allows.
        """
        with self.journal.locked():
            # Before the look: a slice that becomes ready between the two is in one of them.
            records = self.journal.read().records
            gpu = self._driver.look()
            if not gpu.is_enabled and switches:
                gpu = self._switched_on(gpu)
            profile = _profile(gpu, name, start)
            _check_slots(gpu, records, range(start, start + profile.size))
            work = self.journal.begin(
                SliceRecord(
                    id=new_id(),
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

    def bind(self, name: str, holder: str, *, keep_s: float = 0.0, after: str = "") -> SliceWork:
        """Give a warm slice, by its id, to a holder; return its locked record, as `cut`.

        `after`: the present holder, which it is taken from. Raises `NotFoundError` for an unknown
        slice, `BusyError` if it has another holder.
        """
        work = self._take(name)
        with ExitStack() as undo:
            undo.enter_context(work)
            record = work.record
            if record.stage is not Stage.READY or record.holder not in {"", after, holder}:
                raise BusyError(f"the slice {record.name} {record.uuid} is not free any more")
            work.write(replace(record, holder=holder, idle_since=None, keep_s=keep_s))
            undo.pop_all()
        return work

    def remove(self, name: str, *, after: str = "") -> None:
        """Remove a slice without holder. Raises `BusyError` if processes use it.

        `after`: a holder that has ended.
        """
        with self._take(name) as work:
            if work.record.holder not in {"", after}:
                raise BusyError(
                    f"the slice {work.record.name} {work.record.uuid} is held by"
                    f" {work.record.holder}",
                    hint="it is free when its holder has ended",
                )
            instance = stands_for(work.record, self._driver.look().instances)
            if instance is None:
                work.forget()
            else:
                self._remove(work, instance)

    def give_away(self, name: str) -> None:
        """Forget a slice that stays: from then on it is foreign."""
        with self._take(name) as work:
            work.forget()

    def free_orphans(self, is_held: Callable[[str], bool], *, keep_s: float) -> FreedSlices:
        """Repair what dead processes left, and remove slices that were warm long enough.

        That is `keep_s` seconds, or the last holder's time if that is longer. `is_held`: whether a
        holder exists. Locked slices are skipped. Raises the driver's error for the first look;
        later errors concern one slice, and are part of the result.
        """
        freed = FreedSlices()
        with ExitStack() as works:
            with self.journal.locked():
                self.journal.sweep()
                contents = self.journal.read()
                freed.problems = contents.problems
                own = [
                    works.enter_context(work)
                    for record in contents.records
                    if (work := self.journal.take(record.id)) is not None
                ]
                instances = self._driver.look().instances  # these cannot change from here on
            leaving: list[tuple[SliceWork, MigInstance]] = []
            for work in own:
                instance = stands_for(work.record, instances)
                try:
                    match self._verdict(work, instance, is_held, keep_s):
                        case RecordVerdict.REMOVE if instance is not None:
                            leaving.append((work, instance))
                            continue
                        case RecordVerdict.KEEP:
                            (freed.kept if instance else freed.lost).append(work.record)
                        case _:
                            freed.forgotten.append(work.record)
                            work.forget()
                except AllotError as error:
                    freed.stuck.append((work.record, error))
                work.close()  # a warm slice is available while the driver removes others
            for work, instance in leaving:
                try:
                    self._remove(work, instance)
                except AllotError as error:
                    freed.stuck.append((work.record, error))
                else:
                    freed.removed.append(work.record)
                work.close()
        return freed

    def _verdict(
        self,
        work: SliceWork,
        instance: MigInstance | None,
        is_held: Callable[[str], bool],
        keep_s: float,
    ) -> RecordVerdict:
        """Judge a locked record, and write since when it is idle."""
        record = work.record
        if instance is None:
            # The record of a lost slice stays, so that its holder gets no other one at its place.
            is_lost = record.stage is Stage.READY and record.holder and is_held(record.holder)
            return RecordVerdict.KEEP if is_lost else RecordVerdict.FORGET
        is_used = bool(self._driver.users(instance.gpu_instance))
        verdict = judge(record, instance, is_used=is_used)
        if verdict is not RecordVerdict.KEEP or (record.holder and is_held(record.holder)):
            return verdict
        if record.holder or record.idle_since is None:
            work.write(replace(record, holder="", idle_since=self._clock()))
        warm_s = self._clock() - (work.record.idle_since or 0.0)
        is_warm = is_used or warm_s < max(keep_s, record.keep_s)
        return RecordVerdict.KEEP if is_warm else RecordVerdict.REMOVE

    # ---- the GPU's mode --------------------------------------------------------------------------

    def switch_on(self) -> bool:
        """Switch MIG on for future slices; True if it was off. A pending switch-off is cancelled.

        The caller has claimed it (`Journal.note_switched`). Raises as `cut`, and `ModeChangedError`
        if the claim was given up.
        """
        with self.journal.locked():
            gpu = self._driver.look()
            if gpu.is_enabled:
                if not gpu.is_pending:
                    self._driver.set_mode(is_on=True)
                return False
            self._switched_on(gpu)
            return True

    def _switched_on(self, gpu: MigGpu) -> MigGpu:
        """Switch MIG on and count it, under the journal's lock; look again.

        Raises `BusyError` if processes use the GPU, and `PrerequisiteError` for a reset that is not
        allowed.
        """
        if not self.journal.is_switched:
            raise ModeChangedError(f"GPU {gpu.uuid} is not in MIG mode any more")
        try:
            if not self._driver.set_mode(is_on=True):
                self._reset_for_mode(gpu)
            current = self._driver.look()
            self.journal.count_switched()
            return current
        except AllotError:
            if not self._driver.look().is_enabled:
                self.journal.forget_switched()
            raise

    def _reset_for_mode(self, gpu: MigGpu) -> None:
        """Reset a GPU for its pending mode, or cancel the mode."""
        try:
            if self._reset is None:
                raise PrerequisiteError(
                    f"GPU {gpu.uuid} changes its MIG mode only with a reset",
                    hint="`allot mig apply --reset` resets the GPU; on a node, `mig: {reset: true}`"
                    " in the GPU's rule lets the agent reset it",
                )
            self._reset()
        except AllotError:
            self._driver.set_mode(is_on=gpu.is_enabled)
            raise

    def switch_off(
        self, *, is_needed: Callable[[], bool] = lambda: False, even_foreign: bool = False
    ) -> bool:
        """Switch MIG off if Allotment switched it on and no instance is left; True if it is off.

        `even_foreign`: also if another tool switched it on. `is_needed`: asked under the lock; True
        keeps it on.
        """
        if not (self.journal.is_switched or even_foreign):
            return False
        with self.journal.locked():
            if is_needed():
                return False
            gpu = self._driver.look()
            if not (gpu.is_enabled or self.journal.is_switched):
                return False
            if gpu.is_enabled:
                contents = self.journal.read()
                if contents.records or contents.problems or gpu.instances:
                    return False
                if not self._driver.set_mode(is_on=False):
                    self._reset_for_mode(gpu)
            self.journal.forget_switched()
            return True

    # ---- one slice -------------------------------------------------------------------------------

    def _make(self, work: SliceWork, profile: MigProfile) -> None:
        """Create an intended slice, or undo what was created."""
        try:
            gpu_instance = self._driver.create_gpu_instance(profile, work.record.start)
        except AllotError:
            work.forget()
            raise
        try:
            work.write(replace(work.record, stage=Stage.CUT, gpu_instance=gpu_instance))
            compute = self._driver.create_compute_instance(gpu_instance, profile)
            work.write(
                replace(
                    work.record,
                    stage=Stage.READY,
                    compute_instance=compute.number,
                    uuid=compute.uuid,
                )
            )
        except AllotError:
            # What cannot be undone stays recorded, for `free_orphans`.
            with suppress(AllotError):
                self._destroy(gpu_instance)
                work.forget()
            raise

    def _remove(self, work: SliceWork, instance: MigInstance) -> None:
        if pids := self._driver.users(instance.gpu_instance):
            raise BusyError(
                f"the slice {work.record.name} {instance.uuid} is in use by processes"
                f" {format_pids(pids)}",
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
        with suppress(NotFoundError):  # it is removed already
            self._driver.destroy_compute_instances(gpu_instance)
            self._driver.destroy_gpu_instance(gpu_instance)

    def _take(self, name: str) -> SliceWork:
        work = self.journal.take(name)
        if work is not None:
            return work
        if any(record.id == name for record in self.journal.read().records):
            raise BusyError(f"the MIG slice {name} is being made or removed", hint="try again")
        raise NotFoundError(f"there is no MIG slice {name} any more")


def _profile(gpu: MigGpu, name: str, start: int) -> MigProfile:
    if not gpu.is_enabled:
        raise ModeChangedError(
            f"GPU {gpu.uuid} is not in MIG mode", hint="`allot mig apply` switches it on"
        )
    profile = next((profile for profile in gpu.profiles if profile.name == name), None)
    if profile is None:
        names = ", ".join(profile.name for profile in gpu.profiles) or "no profile"
        raise UsageError(f"GPU {gpu.uuid} has no MIG profile {name!r}", hint=f"it has: {names}")
    if start not in profile.starts:
        starts = ", ".join(map(str, profile.starts))
        raise UsageError(f"{name} cannot begin at slot {start}", hint=f"it can at: {starts}")
    return profile


def _check_slots(gpu: MigGpu, records: Iterable[SliceRecord], wanted: range) -> None:
    """Refuse slots of an instance, or of a slice that is being made.

    The record of a complete slice takes none: another tool may have removed its instance.
    """
    used = [(instance.start, instance.size) for instance in gpu.instances]
    used += [(record.start, record.size) for record in records if record.stage is not Stage.READY]
    for start, size in used:
        if start < wanted.stop and wanted.start < start + size:
            raise DoesNotFitError(
                f"GPU {gpu.uuid}: slots {wanted.start} to {wanted.stop - 1} are wanted, and the"
                f" instance at {start} to {start + size - 1} is in the way",
                hint="`allot devices` shows all instances",
            )

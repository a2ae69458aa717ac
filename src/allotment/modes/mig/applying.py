# SPDX-License-Identifier: Apache-2.0
"""One GPU and what a configuration wants of it: what differs is planned, and then done.

Only what differs is touched: instances that are wanted stay, with whoever is in them. What is in
use and not wanted is refused, with who uses it, before anything is done. An instance that is made
is written down until it is whole (`slices`), and from then on is the machine's, as if nvidia-smi
had made it; what was made by others is removed like ours, for whoever applies a configuration says
what all of the GPU is to be.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from allotment.devices.mig import MigDriver
from allotment.model.errors import AllotError, BusyError, PrerequisiteError, UsageError
from allotment.model.mig import MigGpu, MigHold, MigInstance, MigLayout
from allotment.modes.mig.files import Entry, GpuIdentity
from allotment.modes.mig.journal import Journal
from allotment.modes.mig.judging import stands_for
from allotment.modes.mig.records import SliceRecord
from allotment.modes.mig.slices import Slices
from allotment.placement.mig import MigAction, MigImpossible, arrange

__all__ = [
    "Change",
    "Changer",
    "Occupied",
    "Reset",
    "counts_of",
    "entry_for",
    "has_what_is_wanted",
    "layout_of",
    "occupied_by",
    "plan",
]

Reset = Callable[[], None]
"""Resets the GPU, which nobody uses; raises `AllotError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupied:
    """Who has a GPU, in words for people."""

    whole: tuple[str, ...] = ()
    """Of the GPU as such: shares, processes."""
    instances: Mapping[int, tuple[str, ...]] | None = None
    """Of its GPU instances, by id."""

    def of(self, gpu_instance: int) -> tuple[str, ...]:
        """Return who has one instance."""
        return (self.instances or {}).get(gpu_instance, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What is to be done for a GPU to be as it is wanted; all empty: it is so already."""

    gpu: str
    switch: bool | None = None
    """The mode to switch to."""
    keep: tuple[MigInstance, ...] = ()
    remove: tuple[MigInstance, ...] = ()
    make: tuple[tuple[str, int], ...] = ()
    """Profiles by name, and the slots that they begin at."""
    is_provisional: bool = False
    """The driver tells no profiles before the mode is on: what is made is decided then."""

    @property
    def is_empty(self) -> bool:
        """There is nothing to do."""
        return self.switch is None and not self.remove and not self.make


def _unknown(_: Collection[int]) -> Mapping[int, str | None]:
    return {}


def occupied_by(
    driver: MigDriver,
    gpu: MigGpu,
    journal: Journal,
    *,
    shares: Mapping[str, str],
    of_devices: Mapping[str, Collection[str]] | None = None,
    whose: Callable[[Collection[int]], Mapping[int, str | None]] = _unknown,
) -> Occupied:
    """Ask who has a GPU and its instances: shares by our records, processes by the driver.

    `shares`: the names of the shares that there are, by id; `of_devices`: those of them that have
    the GPU itself or a MIG device that others made, by its UUID; `whose` says who is behind some
    processes, and of which nobody is who would be in the way (None). An instance that is being made
    or removed has somebody, too.
    """
    having = of_devices or {}
    records = journal.read().records
    instances: dict[int, tuple[str, ...]] = {}
    for each in gpu.instances:
        here = next((one for one in records if _is_at(one, each)), None)
        if here is not None and not journal.is_free(here.id):
            holders = ["another process of Allotment, which makes or removes it"]
        elif here is not None and here.holder in shares and stands_for(here, (each,)):
            holders = [f"share {shares[here.holder]}"]
        else:
            holders = [f"share {name}" for name in having.get(each.uuid, ())]
        if who := _users(driver.users(each.gpu_instance), holders, whose):
            instances[each.gpu_instance] = who
    of_whole = [f"share {name}" for name in having.get(gpu.uuid, ())]
    return Occupied(whole=_users(driver.processes(), of_whole, whose), instances=instances)


def entry_for(entries: Sequence[Entry], gpu: GpuIdentity) -> Entry | None:
    """Return the entry that counts for a GPU: the last that names it, as mig-parted does."""
    return next((each for each in reversed(entries) if each.names(gpu)), None)


def counts_of(gpu: MigGpu) -> Mapping[str, int]:
    """Return how many instances of each profile a GPU has that a program can use."""
    names = {each.number: each.name for each in gpu.profiles}
    return Counter(names.get(each.profile, "?") for each in gpu.instances if each.uuid)


def has_what_is_wanted(gpu: MigGpu | None, entry: Entry) -> bool:
    """Tell whether a GPU is as an entry wants it, wherever its instances are.

    A GPU without MIG is so where none is wanted, or where all GPUs are meant.
    """
    if gpu is None:
        return not entry.mig_enabled or entry.devices == "all"
    if gpu.is_enabled != entry.mig_enabled or gpu.is_pending != entry.mig_enabled:
        return False
    whole = all(each.uuid for each in gpu.instances)
    return whole and dict(counts_of(gpu)) == dict(entry.wanted)


def plan(gpu: MigGpu | None, entry: Entry, occupied: Occupied, *, uuid: str) -> Change:
    """Find what to do for a GPU to be as an entry wants it.

    Raises `BusyError` naming who is in the way, or `UsageError` for what the GPU cannot have.
    """
    if has_what_is_wanted(gpu, entry):
        return Change(gpu=uuid, keep=() if gpu is None else gpu.instances)
    if gpu is None:
        raise UsageError(f"GPU {uuid} has no MIG", hint="name other GPUs in `devices`")
    switches = (gpu.is_enabled, gpu.is_pending) != (entry.mig_enabled, entry.mig_enabled)
    if switches and occupied.whole:
        raise BusyError(
            f"GPU {uuid}: MIG cannot be switched {_on(entry)} while it is in use by"
            f" {_listed(occupied.whole)}",
            hint="end them first; other GPUs can be configured without this one",
        )
    if not entry.mig_enabled:
        return _off(gpu, occupied, switches=switches)
    if switches and not gpu.profiles:
        return Change(gpu=uuid, switch=True, is_provisional=True)
    return _cut(gpu, entry, occupied, switches=switches)


def _cut(gpu: MigGpu, entry: Entry, occupied: Occupied, *, switches: bool) -> Change:
    """Let the planner find what stays, goes and is made on a GPU that has MIG on, or will have."""
    # One without a compute instance is nothing that a program could use, and not kept.
    known = (each for each in gpu.instances if each.uuid or occupied.of(each.gpu_instance))
    whole = replace(gpu, instances=tuple(known))
    found = arrange(layout_of(whole, occupied), entry.wanted)
    if isinstance(found, MigImpossible):
        raise UsageError(f"GPU {gpu.uuid}: {found.reason}", hint=found.hint or None)
    if drained := found.those(MigAction.DRAIN):
        users = (f"{each.profile} at slot {each.start} by {each.holder}" for each in drained)
        raise BusyError(
            f"GPU {gpu.uuid}: not wanted and in use: {'; '.join(users)}", hint="end them first"
        )
    gone = {each.start for each in found.those(MigAction.REMOVE)}
    stays = [each for each in whole.instances if each.start not in gone]
    return Change(
        gpu=gpu.uuid,
        switch=True if switches else None,
        keep=tuple(stays),
        remove=tuple(each for each in gpu.instances if each not in stays),
        make=tuple((each.profile, each.start) for each in found.those(MigAction.CREATE)),
    )


def layout_of(gpu: MigGpu, occupied: Occupied) -> MigLayout:
    """Return a GPU as the planner sees it: all of it may be changed, whoever made it."""
    holds = {}
    for each in gpu.instances:
        who = occupied.of(each.gpu_instance)
        holds[each.gpu_instance] = (MigHold.USED if who else MigHold.IDLE, _listed(who))
    return MigLayout.of(gpu, holds=holds)


class Changer:
    """Does what was planned for one GPU."""

    __slots__ = ("_driver", "_journal", "_reset", "_slices")

    def __init__(self, driver: MigDriver, journal: Journal, *, reset: Reset) -> None:
        """Take a GPU, its journal, and how it is reset where its generation needs that."""
        self._driver = driver
        self._journal = journal
        self._slices = Slices(driver, journal)
        self._reset = reset

    def carry_out(self, change: Change, entry: Entry) -> Change:
        """Do it, in an order in which each step is possible; return what was done.

        Raises what the driver raises. What was done until then stays, and to apply the same again
        goes on from there.
        """
        if not change.is_empty:
            self._journal.forget_switched()  # whoever configures a GPU has its mode from here on
        if change.switch is False:
            self._clear(change.remove)
            self._switch(is_on=False)
            return change
        if change.switch:
            self._switch(is_on=True)
            change = self._replanned(change, entry)
        for each in change.keep:
            if (record := self._record_of(each)) is not None and not record.holder:
                self._slices.give_away(record.id)
        self._clear(change.remove)
        for name, start in change.make:
            with self._slices.cut(name, start) as work:
                work.forget()
        return change

    def _replanned(self, change: Change, entry: Entry) -> Change:
        """Plan again what is made, now that the driver tells of a GPU in MIG mode."""
        planned = plan(self._driver.look(), entry, Occupied(), uuid=change.gpu)
        return Change(
            gpu=change.gpu,
            switch=True,
            keep=planned.keep,
            remove=planned.remove,
            make=planned.make,
        )

    def _switch(self, *, is_on: bool) -> None:
        if self._driver.set_mode(is_on=is_on):
            return
        try:
            self._reset()
        except AllotError as error:
            raise PrerequisiteError(
                f"GPU {self._driver.uuid}: MIG is to be {'on' if is_on else 'off'}, which this GPU"
                f" takes with its next reset, and that failed: {error.message}",
                hint=error.hint or f"nvidia-smi --gpu-reset -i {self._driver.uuid}, or reboot",
            ) from error
        if self._driver.look().is_enabled != is_on:
            raise PrerequisiteError(
                f"GPU {self._driver.uuid}: MIG is not {'on' if is_on else 'off'} after its reset",
                hint="reboot the machine; see the kernel's log (dmesg)",
            )

    def _clear(self, instances: Sequence[MigInstance]) -> None:
        for each in instances:
            if (record := self._record_of(each)) is not None:
                self._slices.remove(record.id)
            else:
                self._driver.destroy_compute_instances(each.gpu_instance)
                self._driver.destroy_gpu_instance(each.gpu_instance)

    def _record_of(self, instance: MigInstance) -> SliceRecord | None:
        records = self._journal.read().records
        return next((each for each in records if stands_for(each, (instance,))), None)


def _off(gpu: MigGpu, occupied: Occupied, *, switches: bool) -> Change:
    users = sorted({who for each in gpu.instances for who in occupied.of(each.gpu_instance)})
    if users:
        raise BusyError(
            f"GPU {gpu.uuid}: MIG cannot be switched off while its instances are in use by"
            f" {_listed(users)}",
            hint="end them first",
        )
    return Change(gpu=gpu.uuid, switch=False if switches else None, remove=gpu.instances)


def _on(entry: Entry) -> str:
    return "on" if entry.mig_enabled else "off"


def _is_at(record: SliceRecord, instance: MigInstance) -> bool:
    return (record.profile, record.start) == (instance.profile, instance.start)


def _users(
    pids: Sequence[int],
    holders: Iterable[str],
    whose: Callable[[Collection[int]], Mapping[int, str | None]],
) -> tuple[str, ...]:
    """Name who uses something: each with its processes, and then those that are nobody's."""
    known = whose(pids)
    owned: dict[str, list[int]] = {who: [] for who in holders}
    for pid in pids:
        if who := known.get(pid):
            owned.setdefault(who, []).append(pid)
    named = (
        f"{who} ({', '.join(f'process {pid}' for pid in its)})" if its else who
        for who, its in owned.items()
    )
    return (*named, *(f"process {pid}" for pid in pids if pid not in known))


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words)

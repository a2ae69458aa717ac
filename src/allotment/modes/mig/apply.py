# SPDX-License-Identifier: Apache-2.0
"""Plans and makes the difference between a GPU and its configuration.

Wanted instances stay, also in use. Unwanted ones in use are refused with their users, before any
change. A configuration covers the whole GPU: foreign instances are removed like ours. A new
instance has a record until it is complete, and is foreign from then on, as if nvidia-smi had made
it.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from allotment.devices.mig import MigDriver
from allotment.model.errors import AllotError, BusyError, PrerequisiteError, UsageError
from allotment.model.mig import MigGpu, MigHold, MigInstance, MigLayout
from allotment.model.structs import replace
from allotment.modes.mig.files import ConfigEntry, GpuIdentity
from allotment.modes.mig.journal import Journal, record_of, stands_for
from allotment.modes.mig.slices import Reset, Slices
from allotment.placement.mig.arrange import MigAction, MigImpossible, arrange

Owners = Callable[[Collection[int]], Mapping[int, str | None]]
"""Names the owners of processes; None: a process that does not count as a user."""


class Occupied(msgspec.Struct, frozen=True, kw_only=True):
    """The users of a GPU, named for people."""

    whole: tuple[str, ...] = ()
    """Users of the GPU itself: shares, processes."""
    instances: Mapping[int, tuple[str, ...]] = msgspec.field(default_factory=dict)
    """Users of its GPU instances, by id."""

    def of(self, gpu_instance: int) -> tuple[str, ...]:
        return self.instances.get(gpu_instance, ())

    def inside(self, gpu: MigGpu) -> list[str]:
        """The users of all instances of the GPU."""
        return [user for instance in gpu.instances for user in self.of(instance.gpu_instance)]


class GpuChange(msgspec.Struct, frozen=True, kw_only=True):
    """The steps from a GPU to its configuration."""

    gpu: str
    switch: bool | None = None
    """The MIG mode to switch to; None: as it is."""
    keep: tuple[MigInstance, ...] = ()
    remove: tuple[MigInstance, ...] = ()
    make: tuple[tuple[str, int], ...] = ()
    """Names of profiles, with their start slots."""
    is_provisional: bool = False
    """The driver reports profiles only while MIG is on: `make` is decided then."""

    @property
    def is_empty(self) -> bool:
        return self.switch is None and not self.remove and not self.make


def occupied_by(
    driver: MigDriver,
    gpu: MigGpu,
    journal: Journal,
    *,
    shares: Mapping[str, str],
    of_devices: Mapping[str, Collection[str]] | None = None,
    owners: Owners = lambda _: {},
) -> Occupied:
    """Find the users of a GPU and its instances: shares by records, processes by the driver.

    `shares`: names of shares by id. `of_devices`: names of shares of the GPU itself or of foreign
    MIG devices, by UUID.
    """
    names = of_devices or {}
    records = journal.read().records
    instances: dict[int, tuple[str, ...]] = {}
    for instance in gpu.instances:
        place = instance.profile, instance.start
        record = next((each for each in records if (each.profile, each.start) == place), None)
        if record is not None and not journal.is_free(record.id):
            holders = ["another process of Allotment, which makes or removes it"]
        elif record is not None and record.holder in shares and stands_for(record, (instance,)):
            holders = [f"share {shares[record.holder]}"]
        else:
            holders = [f"share {name}" for name in names.get(instance.uuid, ())]
        if users := _users(driver.users(instance.gpu_instance), holders, owners):
            instances[instance.gpu_instance] = users
    holders = [f"share {name}" for name in names.get(gpu.uuid, ())]
    return Occupied(whole=_users(driver.processes(), holders, owners), instances=instances)


def entry_for(entries: Sequence[ConfigEntry], gpu: GpuIdentity) -> ConfigEntry | None:
    """Return the entry for a GPU: the last that names it, as in mig-parted."""
    return next((entry for entry in reversed(entries) if entry.names(gpu)), None)


def counts_of(gpu: MigGpu) -> Mapping[str, int]:
    """Count the usable instances of each profile, by name."""
    names = {profile.number: profile.name for profile in gpu.profiles}
    return Counter(names.get(each.profile, "?") for each in gpu.instances if each.uuid)


def has_what_is_wanted(gpu: MigGpu | None, entry: ConfigEntry) -> bool:
    """True if a GPU matches an entry, wherever its instances are.

    A GPU without MIG matches an entry without MIG, and an entry for all GPUs.
    """
    if gpu is None:
        return not entry.mig_enabled or entry.devices == "all"
    if gpu.is_enabled != entry.mig_enabled or gpu.is_pending != entry.mig_enabled:
        return False
    whole = all(each.uuid for each in gpu.instances)
    return whole and dict(counts_of(gpu)) == dict(entry.wanted)


def plan(gpu: MigGpu | None, entry: ConfigEntry, occupied: Occupied, *, uuid: str) -> GpuChange:
    """Plan the steps from a GPU to an entry.

    Raises `BusyError` with the users in the way, or `UsageError` for an impossible entry.
    """
    if has_what_is_wanted(gpu, entry):
        return GpuChange(gpu=uuid, keep=() if gpu is None else gpu.instances)
    if gpu is None:
        raise UsageError(f"GPU {uuid} has no MIG", hint="name other GPUs in `devices`")
    switches = (gpu.is_enabled, gpu.is_pending) != (entry.mig_enabled, entry.mig_enabled)
    if switches and occupied.whole:
        raise BusyError(
            f"GPU {uuid}: MIG cannot be switched {'on' if entry.mig_enabled else 'off'} while it is"
            f" in use by {', '.join(occupied.whole)}",
            hint="end them first; other GPUs can be configured without this one",
        )
    if not entry.mig_enabled:
        return _off(gpu, occupied, switches=switches)
    if switches and not gpu.profiles:
        return GpuChange(gpu=uuid, switch=True, is_provisional=True)
    return _cut(gpu, entry, occupied, switches=switches)


def _cut(gpu: MigGpu, entry: ConfigEntry, occupied: Occupied, *, switches: bool) -> GpuChange:
    """Plan the instances of a GPU with MIG on."""
    # An unused instance without a compute instance is useless, and not kept.
    usable = (each for each in gpu.instances if each.uuid or occupied.of(each.gpu_instance))
    whole = replace(gpu, instances=tuple(usable))
    steps = arrange(layout_of(whole, occupied), entry.wanted)
    if isinstance(steps, MigImpossible):
        raise UsageError(f"GPU {gpu.uuid}: {steps.reason}", hint=steps.hint or None)
    if drained := steps.those(MigAction.DRAIN):
        users = (f"{step.profile} at slot {step.start} by {step.holder}" for step in drained)
        raise BusyError(
            f"GPU {gpu.uuid}: not wanted and in use: {'; '.join(users)}", hint="end them first"
        )
    removed = {step.start for step in steps.those(MigAction.REMOVE)}
    kept = tuple(instance for instance in whole.instances if instance.start not in removed)
    return GpuChange(
        gpu=gpu.uuid,
        switch=True if switches else None,
        keep=kept,
        remove=tuple(instance for instance in gpu.instances if instance not in kept),
        make=tuple((step.profile, step.start) for step in steps.those(MigAction.CREATE)),
    )


def layout_of(gpu: MigGpu, occupied: Occupied) -> MigLayout:
    """Return a GPU for the planner, without foreign slices: all may be changed."""
    holds = {}
    for instance in gpu.instances:
        users = occupied.of(instance.gpu_instance)
        hold = MigHold.USED if users else MigHold.IDLE
        holds[instance.gpu_instance] = hold, ", ".join(users)
    return MigLayout.of(gpu, holds=holds)


class Changer:
    """Carries out the plan for one GPU."""

    __slots__ = ("_driver", "_journal", "_reset", "_slices")

    def __init__(self, driver: MigDriver, journal: Journal, *, reset: Reset) -> None:
        self._driver = driver
        self._journal = journal
        self._slices = Slices(driver, journal)
        self._reset = reset

    def carry_out(self, change: GpuChange, entry: ConfigEntry) -> GpuChange:
        """Carry out the steps in a possible order; return what was done.

        Raises the driver's errors. Completed steps stay: the same configuration can be applied
        again.
        """
        if not change.is_empty:
            self._journal.forget_switched()  # the configuration owns the mode from here on
        if change.switch is False:
            self._clear(change.remove)
            self._switch(is_on=False)
            return change
        if change.switch:
            self._switch(is_on=True)
            # The driver reports profiles now.
            planned = plan(self._driver.look(), entry, Occupied(), uuid=change.gpu)
            change = replace(planned, switch=True)
        for instance in change.keep:
            record = record_of(self._journal.read().records, instance)
            if record is not None and not record.holder:
                self._slices.give_away(record.id)
        self._clear(change.remove)
        for name, start in change.make:
            with self._slices.cut(name, start) as work:
                work.forget()
        return change

    def _switch(self, *, is_on: bool) -> None:
        if self._driver.set_mode(is_on=is_on):
            return
        try:
            self._reset()
        except AllotError as error:
            raise PrerequisiteError(
                f"GPU {self._driver.uuid}: switching MIG {'on' if is_on else 'off'} needs a reset,"
                f" which failed: {error.message}",
                hint=error.hint or f"nvidia-smi --gpu-reset -i {self._driver.uuid}, or reboot",
            ) from error
        if self._driver.look().is_enabled != is_on:
            raise PrerequisiteError(
                f"GPU {self._driver.uuid}: MIG is not {'on' if is_on else 'off'} after its reset",
                hint="reboot the machine; see the kernel's log (dmesg)",
            )

    def _clear(self, instances: Sequence[MigInstance]) -> None:
        for instance in instances:
            record = record_of(self._journal.read().records, instance)
            if record is not None:
                self._slices.remove(record.id)
            else:
                self._driver.destroy_compute_instances(instance.gpu_instance)
                self._driver.destroy_gpu_instance(instance.gpu_instance)


def _off(gpu: MigGpu, occupied: Occupied, *, switches: bool) -> GpuChange:
    if users := sorted(set(occupied.inside(gpu))):
        raise BusyError(
            f"GPU {gpu.uuid}: MIG cannot be switched off while its instances are in use by"
            f" {', '.join(users)}",
            hint="end them first",
        )
    return GpuChange(gpu=gpu.uuid, switch=False if switches else None, remove=gpu.instances)


def _users(pids: Sequence[int], holders: Iterable[str], owners: Owners) -> tuple[str, ...]:
    """Name the users: each owner with its processes, then processes without owner."""
    owner_of = owners(pids)
    pids_of: dict[str, list[int]] = {holder: [] for holder in holders}
    for pid in pids:
        if owner := owner_of.get(pid):
            pids_of.setdefault(owner, []).append(pid)
    named = (
        f"{owner} ({', '.join(f'process {pid}' for pid in own)})" if own else owner
        for owner, own in pids_of.items()
    )
    return (*named, *(f"process {pid}" for pid in pids if pid not in owner_of))

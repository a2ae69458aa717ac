# SPDX-License-Identifier: Apache-2.0
"""The work of `allot mig` on a machine: one thread per GPU."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from allotment.cli.documents import Document
from allotment.cli.mig_fits import FitGpu, Planned, ways_to_fit
from allotment.devices.mig_machine import LOOK_S, MigDevice, MigMachine, reset
from allotment.devices.simulated import machine_path
from allotment.model.devices import Device
from allotment.model.errors import AllotError, PrerequisiteError
from allotment.model.mig import MigGpu
from allotment.model.modes import MIG
from allotment.model.shares import ShareId
from allotment.modes.mig.apply import (
    Changer,
    GpuChange,
    Occupied,
    counts_of,
    entry_for,
    has_what_is_wanted,
    plan,
)
from allotment.modes.mig.files import ConfigEntry, GpuIdentity, check_numbers, document_of
from allotment.modes.mig.journal import Journal, foreign
from allotment.modes.mig.mode import takes_mode_at_once
from allotment.modes.mig.slices import Slices
from allotment.shares.folders import StateFolder
from allotment.shares.mig.inspect import GpuUsers
from allotment.shares.mode_policy import BY_NODE, mode_policy_of, refusal
from allotment.shares.mps_daemons import await_way
from allotment.shares.run.command import local_inventory
from allotment.shares.status import current

_T = TypeVar("_T")
_WORK_S: Final = 300.0
"""Time limit for all changes to one GPU."""
_KEEP_S: Final = float("inf")
"""Applying a configuration removes only slices in its way; warm slices stay."""


class GpuOutcome(msgspec.Struct, frozen=True):
    """The outcome for one GPU, as a sentence."""

    text: str
    is_error: bool = False


class MigRun:
    """All GPUs of one machine, during one command."""

    def __init__(self, folder: StateFolder, spec: str | None) -> None:
        """`spec` creates and selects a simulated machine."""
        folder.prepare()
        self._folder = folder
        self._spec = spec
        self._machine: Path | None = machine_path(folder.root, spec) if spec else None

    def document(self, name: str) -> Document:
        """Return the current MIG layout of all GPUs. Raises the first GPU's error."""
        gpus = []
        for _, answer in self._ask(_look, LOOK_S):
            if isinstance(answer, AllotError):
                raise answer
            identity, gpu = answer
            gpus.append((identity, counts_of(gpu) if gpu is not None and gpu.is_enabled else None))
        return document_of(name, gpus)

    def differences(self, entries: Sequence[ConfigEntry]) -> list[tuple[int, str]]:
        """Return the GPUs that do not match, each with its difference."""
        different = []
        answers = self._ask(_look, LOOK_S)
        check_numbers(entries, len(answers))
        for index, answer in answers:
            if isinstance(answer, AllotError):
                different.append((index, answer.message))
                continue
            identity, gpu = answer
            entry = entry_for(entries, identity)
            if entry is not None and not has_what_is_wanted(gpu, entry):
                different.append((index, f"{_state_of(gpu)}, expected {_wanted(entry)}"))
        return different

    def plans(self, entries: Sequence[ConfigEntry]) -> list[Planned]:
        """Plan the changes of every GPU; changes nothing."""
        return self._planned(entries, passes_idle_daemons=True)

    def _planned(
        self, entries: Sequence[ConfigEntry], *, passes_idle_daemons: bool
    ) -> list[Planned]:
        occupants = GpuUsers(
            self._folder, current(self._folder), passes_idle_daemons=passes_idle_daemons
        )
        planned = []
        answers = self._ask(partial(self._plan, entries, occupants, self._devices()), LOOK_S)
        check_numbers(entries, len(answers))
        for index, answer in answers:
            if isinstance(answer, AllotError):
                planned.append(Planned(index=index, uuid="", names={}, error=answer))
            else:
                planned.append(answer)
        return planned

    def advice(self, wanted: Mapping[str, int]) -> list[Planned]:
        """Plan how to make room for `wanted`, per GPU.

        Raises `DoesNotFitError` if no GPU can have these slices, even when drained.
        """
        occupants = GpuUsers(self._folder, current(self._folder), passes_idle_daemons=True)
        gpus: list[FitGpu] = []
        for _, answer in self._ask(partial(self._see, occupants, self._devices()), LOOK_S):
            if isinstance(answer, FitGpu):
                gpus.append(answer)
        ways = ways_to_fit(gpus, wanted)
        return [
            Planned(
                index=gpu.number,
                uuid=gpu.gpu.uuid,
                names={},
                advice=ways.get(gpu.gpu.uuid, ()),
            )
            for gpu in gpus
        ]

    def _devices(self) -> Mapping[str, Device]:
        _, inventory = local_inventory(self._folder, self._spec)
        return {gpu.uuid: gpu for gpu in inventory.devices}

    def apply(
        self, entries: Sequence[ConfigEntry], *, may_reset: bool
    ) -> list[tuple[Planned, GpuOutcome]]:
        """Apply the plan on all GPUs at once.

        Raises the first error of planning; then no GPU is changed. Without `may_reset` a GPU whose
        mode needs a reset is such an error.
        """
        # A GPU that fails here fails again, with an error, when it is planned.
        current(self._folder)
        self._ask(partial(self._make_way, entries), _WORK_S)
        planned = self._planned(entries, passes_idle_daemons=False)
        refusals = [gpu.error for gpu in planned if gpu.error]
        if not may_reset:
            refusals += [_needs_reset(gpu) for gpu in planned if gpu.resets]
        if refusals:
            first = refusals[0]
            more = "".join(f"\n  {refused.message}" for refused in refusals[1:])
            raise type(first)(f"nothing was done: {first.message}{more}", hint=first.hint)
        by_index = {gpu.index: gpu for gpu in planned}
        outcomes = []
        for index, answer in self._ask(partial(self._carry_out, by_index), _WORK_S):
            gpu_plan = by_index[index]
            if isinstance(answer, AllotError):
                outcomes.append((gpu_plan, GpuOutcome(answer.one_line(), is_error=True)))
            else:
                outcomes.append((gpu_plan, GpuOutcome(answer)))
        return outcomes

    # Methods from here to `_carry_out` run in the GPUs' threads.

    def _plan(
        self,
        entries: Sequence[ConfigEntry],
        occupants: GpuUsers,
        devices: Mapping[str, Device],
        device: MigDevice,
    ) -> Planned:
        identity, gpu = _look(device)
        entry = entry_for(entries, identity)
        names = {} if gpu is None else {profile.number: profile.name for profile in gpu.profiles}
        change, error = None, None
        try:
            if entry is not None:
                occupied = Occupied() if gpu is None else occupants.of(device.driver, gpu)
                change = plan(gpu, entry, occupied, uuid=device.uuid)
        except AllotError as refused:
            error = refused
        return Planned(
            index=device.index,
            uuid=device.uuid,
            names=names,
            entry=entry,
            change=change,
            error=error,
            resets=change is not None
            and change.switch not in {None, gpu is not None and gpu.is_enabled}
            and not _takes_at_once(devices, device.uuid),
        )

    def _make_way(self, entries: Sequence[ConfigEntry], device: MigDevice) -> None:
        """Repair leftovers of dead processes, and stop MPS daemons that no share needs."""
        journal = self._journal(device)
        if journal.read().records:
            # Called for each slice after its lock is taken: its share may be new.
            Slices(device.driver, journal).free_orphans(
                lambda share: self._folder.share(ShareId(share)).is_dir(), keep_s=_KEEP_S
            )

        identity, gpu = _look(device)
        entry = entry_for(entries, identity)
        if gpu is None or entry is None or has_what_is_wanted(gpu, entry):
            return
        for uuid in (device.uuid, *(instance.uuid for instance in gpu.instances if instance.uuid)):
            await_way(self._folder, uuid)

    def _see(
        self, occupants: GpuUsers, devices: Mapping[str, Device], device: MigDevice
    ) -> FitGpu | None:
        gpu = device.driver.look_if_any()
        if gpu is None:
            return None
        allowed = mode_policy_of(self._folder, device.uuid)
        others = foreign(self._journal(device).read().records, gpu.instances)
        return FitGpu(
            number=device.index,
            gpu=gpu,
            occupied=occupants.of(device.driver, gpu),
            of_others=frozenset(instance.gpu_instance for instance in others),
            takes_at_once=_takes_at_once(devices, device.uuid),
            kept=refusal(allowed, MIG),
            is_nodes=allowed is not None and allowed.by == BY_NODE,
        )

    def _carry_out(self, plans: Mapping[int, Planned], device: MigDevice) -> str:
        gpu_plan = plans[device.index]
        if gpu_plan.entry is None or gpu_plan.change is None:
            return "not in the configuration, not changed"
        if gpu_plan.change.is_empty:
            return f"already as configured: {_wanted(gpu_plan.entry)}"
        changer = Changer(
            device.driver,
            self._journal(device),
            reset=partial(reset, self._machine, device.uuid),
        )
        done = changer.carry_out(gpu_plan.change, gpu_plan.entry)
        gpu = device.driver.look()
        names = {profile.number: profile.name for profile in gpu.profiles}
        return _sentence(done, names)

    def _ask(
        self, question: Callable[[MigDevice], _T], patience_s: float
    ) -> list[tuple[int, _T | AllotError]]:
        with MigMachine(self._machine) as gpus:
            return gpus.ask(question, patience_s=patience_s)

    def _journal(self, device: MigDevice) -> Journal:
        return Journal(self._folder.mig / device.uuid)


def _look(device: MigDevice) -> tuple[GpuIdentity, MigGpu | None]:
    identity = GpuIdentity(
        index=device.index, pci_id=device.pci_id, pci_subsystem=device.pci_subsystem
    )
    return identity, device.driver.look_if_any()


def _takes_at_once(devices: Mapping[str, Device], uuid: str) -> bool:
    device = devices.get(uuid)
    return device is not None and takes_mode_at_once(device)


def _needs_reset(gpu: Planned) -> PrerequisiteError:
    switch = "on" if gpu.change is not None and gpu.change.switch else "off"
    return PrerequisiteError(
        f"GPU {gpu.uuid} switches MIG {switch} only with a reset",
        hint="add --reset: it resets the unused GPU, and with it the GPUs that NVLink connects to"
        " it",
    )


def _sentence(change: GpuChange, names: Mapping[int, str]) -> str:
    parts = []
    if change.switch is not None:
        parts.append(f"switched MIG {'on' if change.switch else 'off'}")
    if change.keep:
        parts.append(f"kept {len(change.keep)}")
    if change.remove:
        removed = (
            f"{names.get(instance.profile, '?')} at {instance.start}" for instance in change.remove
        )
        parts.append(f"removed {', '.join(removed)}")
    if change.make:
        parts.append(f"made {', '.join(f'{name} at {start}' for name, start in change.make)}")
    return "; ".join(parts)


def _state_of(gpu: MigGpu | None) -> str:
    if gpu is None:
        return "no MIG support"
    if gpu.is_enabled != gpu.is_pending:
        return f"switching MIG {'on' if gpu.is_pending else 'off'} is pending until a reset"
    if not gpu.is_enabled:
        return "MIG is off"
    half = sum(not instance.uuid for instance in gpu.instances)
    unfinished = f" and {half} without a compute instance" if half else ""
    return f"has {_counted(counts_of(gpu))}{unfinished}"


def _wanted(entry: ConfigEntry) -> str:
    return _counted(entry.wanted) if entry.mig_enabled else "MIG off"


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in sorted(counts.items())) or "no instance"

# SPDX-License-Identifier: Apache-2.0
"""What `allot mig` asks of a machine's GPUs and does to them, all GPUs at once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from allotment.cli.documents import Document
from allotment.cli.mig_fits import FitGpu, ways_to_fit
from allotment.cli.mig_plans import Planned
from allotment.devices.mig_machine import LOOK_S, MigDevice, MigMachine, reset
from allotment.devices.simulated import machine_path
from allotment.model.devices import Device
from allotment.model.errors import AllotError
from allotment.model.mig import MigGpu
from allotment.model.requests import MIG
from allotment.model.shares import ShareId
from allotment.modes.mig.applying import (
    Change,
    Changer,
    Occupied,
    counts_of,
    entry_for,
    has_what_is_wanted,
    plan,
)
from allotment.modes.mig.files import Entry, GpuIdentity, check_numbers, document_of
from allotment.modes.mig.journal import Journal
from allotment.modes.mig.judging import foreign
from allotment.modes.mig.mode import takes_mode_at_once
from allotment.modes.mig.slices import Slices
from allotment.shares.folders import StateFolder
from allotment.shares.modes_of_gpus import BY_NODE, allowed_on, refusal
from allotment.shares.mps_daemons import await_way
from allotment.shares.occupying import Occupants
from allotment.shares.sessions import local_inventory
from allotment.shares.views import current

__all__ = ["MigRun", "Outcome"]

_T = TypeVar("_T")
_WORK_S: Final = 300.0
"""How long one GPU may take for all that is to be done to it."""
_KEEP_S: Final = float("inf")
"""Whoever applies a configuration removes what is in its way, and nothing because it is warm."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one GPU, in a sentence."""

    text: str
    is_error: bool = False


class MigRun:
    """One machine's GPUs, for one command."""

    def __init__(self, folder: StateFolder, spec: str | None) -> None:
        """Take the state folder, and which machine is meant; the simulated one is made."""
        folder.prepare()
        self._folder = folder
        self._spec = spec
        self._machine: Path | None = machine_path(folder.root, spec) if spec else None

    def document(self, name: str) -> Document:
        """Return how all GPUs are cut. Raises what the first silent GPU says."""
        gpus = []
        for _, answer in self._ask(_look, LOOK_S):
            if isinstance(answer, AllotError):
                raise answer
            identity, gpu = answer
            gpus.append((identity, counts_of(gpu) if gpu is not None and gpu.is_enabled else None))
        return document_of(name, gpus)

    def differences(self, entries: Sequence[Entry]) -> list[tuple[int, str]]:
        """Return the GPUs that are not as they are wanted, each with what it has."""
        found = []
        answers = self._ask(_look, LOOK_S)
        check_numbers(entries, len(answers))
        for index, answer in answers:
            if isinstance(answer, AllotError):
                found.append((index, answer.message))
                continue
            identity, gpu = answer
            entry = entry_for(entries, identity)
            if entry is not None and not has_what_is_wanted(gpu, entry):
                found.append((index, f"{_state_of(gpu)}, and not {_wanted(entry)}"))
        return found

    def plans(self, entries: Sequence[Entry]) -> list[Planned]:
        """Plan for every GPU; nothing is changed."""
        return self._planned(entries, passes_idle_daemons=True)

    def _planned(self, entries: Sequence[Entry], *, passes_idle_daemons: bool) -> list[Planned]:
        occupants = Occupants(
            self._folder, current(self._folder), passes_idle_daemons=passes_idle_daemons
        )
        planned = []
        answers = self._ask(partial(self._plan, entries, occupants), LOOK_S)
        check_numbers(entries, len(answers))
        for index, answer in answers:
            if isinstance(answer, AllotError):
                planned.append(Planned(index=index, uuid="", names={}, error=answer))
            else:
                planned.append(answer)
        return planned

    def advice(self, wanted: Mapping[str, int]) -> list[Planned]:
        """Plan how slices would come to fit that do not fit as it is, by GPU.

        Raises `DoesNotFitError` where no GPU can have them, whoever leaves it.
        """
        _, inventory = local_inventory(self._folder, self._spec)
        known = {each.uuid: each for each in inventory.devices}
        occupants = Occupants(self._folder, current(self._folder), passes_idle_daemons=True)
        seen: list[FitGpu] = []
        for _, answer in self._ask(partial(self._see, occupants, known), LOOK_S):
            if isinstance(answer, FitGpu):
                seen.append(answer)
        ways = ways_to_fit(seen, wanted)
        return [
            Planned(
                index=each.number,
                uuid=each.gpu.uuid,
                names={},
                advice=ways.get(each.gpu.uuid, ()),
            )
            for each in seen
        ]

    def apply(self, entries: Sequence[Entry]) -> list[tuple[Planned, Outcome]]:
        """Do what is planned, on all GPUs at once.

        Raises the first reason why one cannot be as it is wanted; then nothing is done to any.
        """
        # A GPU that fails in it says so again when it is planned.
        current(self._folder)
        self._ask(partial(self._make_way, entries), _WORK_S)
        planned = self._planned(entries, passes_idle_daemons=False)
        refusals = [each.error for each in planned if each.error]
        if refusals:
            first = refusals[0]
            more = "".join(f"\n  {each.message}" for each in refusals[1:])
            raise type(first)(f"nothing was done: {first.message}{more}", hint=first.hint)
        by_index = {each.index: each for each in planned}
        outcomes = []
        for index, answer in self._ask(partial(self._carry_out, by_index), _WORK_S):
            each = by_index[index]
            if isinstance(answer, AllotError):
                hint = f" ({answer.hint})" if answer.hint else ""
                outcomes.append((each, Outcome(f"{answer.message}{hint}", is_error=True)))
            else:
                outcomes.append((each, Outcome(answer)))
        return outcomes

    # ---- in the GPUs' threads --------------------------------------------------------------------

    def _plan(
        self,
        entries: Sequence[Entry],
        occupants: Occupants,
        device: MigDevice,
    ) -> Planned:
        identity, gpu = _look(device)
        entry = entry_for(entries, identity)
        names = {} if gpu is None else {each.number: each.name for each in gpu.profiles}
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
        )

    def _make_way(self, entries: Sequence[Entry], device: MigDevice) -> None:
        """Put right what dead processes left, and have MPS daemons stop that no share needs."""
        journal = self._journal(device)
        if journal.read().records:
            # Asked of each slice once its lock is had: its share may be new.
            Slices(device.driver, journal).settle(
                lambda share: self._folder.share(ShareId(share)).is_dir(), keep_s=_KEEP_S
            )

        identity, gpu = _look(device)
        entry = entry_for(entries, identity)
        if gpu is None or entry is None or has_what_is_wanted(gpu, entry):
            return
        for uuid in (device.uuid, *(each.uuid for each in gpu.instances if each.uuid)):
            await_way(self._folder, uuid)

    def _see(
        self, occupants: Occupants, known: Mapping[str, Device], device: MigDevice
    ) -> FitGpu | None:
        gpu = device.driver.look_if_any()
        if gpu is None:
            return None
        here = known.get(device.uuid)
        allowed = allowed_on(self._folder, device.uuid)
        others = foreign(self._journal(device).read().records, gpu.instances)
        return FitGpu(
            number=device.index,
            gpu=gpu,
            occupied=occupants.of(device.driver, gpu),
            of_others=frozenset(each.gpu_instance for each in others),
            takes_at_once=here is not None and takes_mode_at_once(here),
            kept=refusal(allowed, MIG),
            is_nodes=allowed is not None and allowed.by == BY_NODE,
        )

    def _carry_out(self, planned: Mapping[int, Planned], device: MigDevice) -> str:
        each = planned[device.index]
        if each.entry is None or each.change is None:
            return "not named, left alone"
        if each.change.is_empty:
            return f"as it is wanted: {_wanted(each.entry)}"
        changer = Changer(
            device.driver,
            self._journal(device),
            reset=partial(reset, self._machine, device.uuid),
        )
        done = changer.carry_out(each.change, each.entry)
        gpu = device.driver.look()
        names = {profile.number: profile.name for profile in gpu.profiles}
        return _sentence(done, names)

    # ---- what is known ---------------------------------------------------------------------------

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


def _sentence(change: Change, names: Mapping[int, str]) -> str:
    """Say what was done to one GPU."""
    said = []
    if change.switch is not None:
        said.append(f"switched MIG {'on' if change.switch else 'off'}")
    if change.keep:
        said.append(f"kept {len(change.keep)}")
    if change.remove:
        removed = (f"{names.get(each.profile, '?')} at {each.start}" for each in change.remove)
        said.append(f"removed {', '.join(removed)}")
    if change.make:
        said.append(f"made {', '.join(f'{name} at {start}' for name, start in change.make)}")
    return "; ".join(said)


def _state_of(gpu: MigGpu | None) -> str:
    if gpu is None:
        return "it has no MIG"
    if gpu.is_enabled != gpu.is_pending:
        return f"MIG is to be {'on' if gpu.is_pending else 'off'} after a reset"
    if not gpu.is_enabled:
        return "MIG is off"
    half = sum(not each.uuid for each in gpu.instances)
    unfinished = f" and {half} without a compute instance" if half else ""
    return f"it has {_counted(counts_of(gpu))}{unfinished}"


def _wanted(entry: Entry) -> str:
    return _counted(entry.wanted) if entry.mig_enabled else "MIG off"


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in sorted(counts.items())) or "no instance"

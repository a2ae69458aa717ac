# SPDX-License-Identifier: Apache-2.0
"""What `allot mig` asks of a machine's GPUs and does to them, all GPUs at once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from allotment.cli.documents import Document
from allotment.devices.mig_machine import LOOK_S, MigDevice, MigMachine, reset
from allotment.devices.simulated import machine_path
from allotment.model.errors import AllotError, DoesNotFitError
from allotment.model.mig import MigGpu
from allotment.model.shares import ShareId
from allotment.modes.mig.applying import (
    Change,
    Changer,
    Occupied,
    counts_of,
    entry_for,
    has_what_is_wanted,
    layout_of,
    occupied_by,
    plan,
)
from allotment.modes.mig.files import Entry, GpuIdentity, check_numbers, document_of
from allotment.modes.mig.journal import Journal
from allotment.modes.mig.slices import Slices
from allotment.placement.mig import MigAction, MigImpossible, MigStep, advise
from allotment.shares.folders import StateFolder
from allotment.shares.views import current

__all__ = ["MigRun", "Outcome", "Planned", "plan_document", "plan_rows"]

_T = TypeVar("_T")
_WORDS: Final[Mapping[MigAction, str]] = {
    MigAction.DRAIN: "drain",
    MigAction.REMOVE: "remove",
    MigAction.CREATE: "make",
}
_WORK_S: Final = 300.0
"""How long one GPU may take for all that is to be done to it."""
_KEEP_S: Final = float("inf")
"""Whoever applies a configuration removes what is in its way, and nothing because it is warm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What is to be done to one GPU, or why it cannot be."""

    index: int
    uuid: str
    names: Mapping[int, str]
    """The profiles' names, by number."""
    entry: Entry | None = None
    """None: the configuration does not name this GPU."""
    change: Change | None = None
    error: AllotError | None = None
    advice: tuple[MigStep, ...] = ()
    """Steps for slices to fit, where that was asked."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one GPU, in a sentence."""

    text: str
    is_error: bool = False


@dataclass(frozen=True, slots=True)
class _Shares:
    """The shares that there are."""

    names: Mapping[str, str]
    """By id."""
    of_devices: Mapping[str, tuple[str, ...]]
    """Names, by the UUID of a device that they have."""


class _Seen(NamedTuple):
    """A GPU with MIG, and who has what of it."""

    number: int
    gpu: MigGpu
    occupied: Occupied


class MigRun:
    """One machine's GPUs, for one command."""

    def __init__(self, folder: StateFolder, spec: str | None) -> None:
        """Take the state folder, and which machine is meant; the simulated one is made."""
        folder.prepare()
        self._folder = folder
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
        shares = self._shares()
        planned = []
        answers = self._ask(partial(self._plan, entries, shares), LOOK_S)
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
        shares = self._shares()
        seen: list[_Seen] = []
        for _, answer in self._ask(partial(self._see, shares), LOOK_S):
            if isinstance(answer, _Seen):
                seen.append(answer)
        found = advise([layout_of(each.gpu, each.occupied) for each in seen], wanted)
        if isinstance(found, MigImpossible):
            raise DoesNotFitError(found.reason, hint=found.hint or None)
        return [
            Planned(
                index=each.number,
                uuid=each.gpu.uuid,
                names={},
                advice=tuple(step for step in found.steps if step.gpu == each.gpu.uuid),
            )
            for each in seen
        ]

    def apply(self, entries: Sequence[Entry]) -> list[tuple[Planned, Outcome]]:
        """Do what is planned, on all GPUs at once.

        Raises the first reason why one cannot be as it is wanted; then nothing is done to any.
        """
        # A GPU that fails in it says so again when it is planned.
        current(self._folder)
        self._ask(self._settle, _WORK_S)
        planned = self.plans(entries)
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
        shares: _Shares,
        device: MigDevice,
    ) -> Planned:
        identity, gpu = _look(device)
        entry = entry_for(entries, identity)
        names = {} if gpu is None else {each.number: each.name for each in gpu.profiles}
        change, error = None, None
        try:
            if entry is not None:
                occupied = self._occupied(device, gpu, shares)
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

    def _occupied(self, device: MigDevice, gpu: MigGpu | None, shares: _Shares) -> Occupied:
        if gpu is None:
            return Occupied()
        return occupied_by(
            device.driver,
            gpu,
            self._journal(device),
            shares=shares.names,
            of_devices=shares.of_devices,
        )

    def _settle(self, device: MigDevice) -> None:
        """Put right what dead processes left."""
        journal = self._journal(device)
        if journal.read().records:
            # Asked of each slice once its lock is had: its share may be new.
            Slices(device.driver, journal).settle(
                lambda share: self._folder.share(ShareId(share)).is_dir(), keep_s=_KEEP_S
            )

    def _see(self, shares: _Shares, device: MigDevice) -> _Seen | None:
        gpu = device.driver.look_if_any()
        return (
            None if gpu is None else _Seen(device.index, gpu, self._occupied(device, gpu, shares))
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

    def _shares(self) -> _Shares:
        names: dict[str, str] = {}
        of_devices: dict[str, list[str]] = {}
        for each in current(self._folder):
            names[each.id] = each.name
            for uuid in each.limits():
                of_devices.setdefault(uuid, []).append(each.name)
        return _Shares(names, {uuid: tuple(found) for uuid, found in of_devices.items()})


def plan_rows(planned: Sequence[Planned]) -> list[tuple[str, ...]]:
    """Return the rows of the table of `allot mig plan`: a step each, in their order."""
    rows: list[tuple[str, ...]] = []
    for each in planned:
        head = (str(each.index), each.uuid)
        if each.error is not None:
            rows.append((*head, "refused", "", "", each.error.message))
        else:
            rows += [(*head, *step) for step in _steps(each)]
    return rows


def _steps(planned: Planned) -> list[tuple[str, str, str, str]]:
    """Return what is done to one GPU: step, profile, slot and remark."""
    change = planned.change
    if change is None:
        steps = [
            (_WORDS[each.action], each.profile, str(each.start), each.holder)
            for each in planned.advice
        ]
        return steps or [("-", "", "", "left as it is")]
    steps = [
        ("keep", planned.names.get(each.profile, "?"), str(each.start), each.uuid)
        for each in change.keep
    ]
    if change.switch is True:
        steps.append(("switch MIG on", "", "", ""))
    steps += [
        ("remove", planned.names.get(each.profile, "?"), str(each.start), each.uuid)
        for each in change.remove
    ]
    steps += [("make", name, str(start), "") for name, start in change.make]
    if change.switch is False:
        steps.append(("switch MIG off", "", "", ""))
    if change.is_provisional:
        steps.append(("make", "", "", "the driver tells the slots once MIG is on"))
    return steps or [("-", "", "", "as it is wanted")]


def plan_document(planned: Sequence[Planned]) -> Document:
    """Describe what would be done: what `allot mig plan -o json` prints."""
    return {
        "gpus": [
            {
                "index": each.index,
                "uuid": each.uuid or None,
                "named": each.entry is not None,
                "problem": each.error.message if each.error else None,
                "steps": [
                    {
                        "step": step,
                        "profile": profile or None,
                        "slot": int(slot) if slot else None,
                        "remark": remark or None,
                    }
                    for step, profile, slot, remark in _steps(each)
                    if step != "-"
                ],
            }
            for each in planned
        ]
    }


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

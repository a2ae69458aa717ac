# SPDX-License-Identifier: Apache-2.0
"""A GPU goes over to other modes: at once where nobody is in the way, else as they end.

    ModeChange(folder, device, machine, modes).carry_out(patience_s=300)

What the GPU is for is written down first (`modes_of_gpus`): from then on nothing of another mode
comes to it, whoever asks, and those that are there end by themselves. So waiting is only looking,
and whoever is cut off in it has left nothing half done: the GPU goes on draining, and `allot
devices` says so, until it is over or somebody says otherwise. Nobody is ended.

Last, MIG is switched where that follows: on for `mig` alone, off where `mig` is not among the
modes. What was switched on so is switched off again when the GPU is for other modes as well and has
no slice; but a GPU that needs a reset for that stays as it is, unless it may be reset.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from allotment.devices.mig_machine import LOOK_S, MigDevice, MigMachine, reset
from allotment.devices.nvml import Nvml
from allotment.devices.topology import nvlink_peers, read_pair_scores
from allotment.model.devices import Device
from allotment.model.errors import AllotError, BusyError, PrerequisiteError, UsageError
from allotment.model.formats import format_count
from allotment.model.mig import MigGpu
from allotment.model.requests import MIG, MPS
from allotment.modes import mode_named
from allotment.modes.mig.journal import Journal
from allotment.modes.mig.judging import foreign, stands_for
from allotment.modes.mig.mode import takes_mode_at_once
from allotment.modes.mig.records import Stage
from allotment.modes.mig.slices import Slices
from allotment.shares import lives, mps_daemons, slicing
from allotment.shares.folders import StateFolder
from allotment.shares.modes_of_gpus import (
    BY_NODE,
    Allowed,
    allowed_on,
    users_of_gpu,
    write_allowed,
)
from allotment.shares.occupying import Occupants
from allotment.shares.steps import step

__all__ = ["ModeChange"]

_T = TypeVar("_T")
_POLL_S: Final = 0.2
_TIDY_EVERY_S: Final = 1.0
_DAEMON_S: Final = 30.0
"""How long an MPS daemon that no share needs may take to end (it waits ten seconds for one)."""
_WORK_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class _Way:
    """Who is in the way, in words."""

    shares: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    """Processes, slices that are being made, the MPS daemon."""
    is_ending: bool = False
    """It is an MPS daemon that no share needs, and nobody else."""
    is_beside: bool = False
    """They have GPUs that NVLink joins to this one, whose reset is theirs as well."""

    def __bool__(self) -> bool:
        return bool(self.shares or self.others)

    def __str__(self) -> str:
        return ", ".join(self.shares or self.others)


@dataclass(slots=True, kw_only=True)
class ModeChange:
    """One GPU, and the modes that it is to be for from now on. `modes` None: all."""

    folder: StateFolder
    device: Device
    machine: Path | None
    modes: tuple[str, ...] | None
    may_reset: bool = False
    tell: Callable[[str], None] = lambda _: None
    """Is told who is waited for, whenever that changes."""
    _mine: Allowed = field(init=False, default_factory=lambda: Allowed(()))
    _was_on: bool = field(init=False, default=False)
    """MIG, at the beginning."""
    _is_put_off: bool = field(init=False, default=False)
    """MIG was on for slices of ours, and whoever settles is not to switch it off meanwhile."""
    _joined: tuple[Device, ...] | None = field(init=False, default=None)
    """The GPUs that NVLink joins to it, once that has been asked."""

    def carry_out(self, *, patience_s: float | None) -> str:
        """Do it; return what was done, for people.

        `patience_s`: for how many seconds the shares of other modes are waited for; None: not at
        all. Raises `BusyError` naming who is in the way, `UsageError` for what the GPU cannot be,
        `PrerequisiteError` for a reset that was not allowed. Where it is refused everything is as
        it was; where waiting takes too long or is cut off, the GPU goes on draining.
        """
        self.folder.prepare()
        gpu = self._look()
        self._was_on = gpu is not None and gpu.is_enabled
        if self.modes is None:
            return self._forget(gpu)
        self._check(gpu, self.modes)
        only_ending = patience_s is None
        deadline = time.monotonic() + (_DAEMON_S if patience_s is None else patience_s)
        self._settle(deadline)
        self._mine = Allowed(self.modes, id=os.urandom(6).hex())
        before = self._begin(self.modes, waits=not only_ending)
        step("modes.written")
        try:
            self._give_up_claim()
            while True:
                self._wait(deadline, only_ending=only_ending)
                step("modes.drained")
                if not self._claim():
                    continue
                try:
                    switched = self._switch(self.modes)
                    break
                except BusyError:  # by who came since it was looked: it is looked again
                    if only_ending or time.monotonic() >= deadline:
                        raise
                    time.sleep(_POLL_S)
        except _StillThereError:
            raise
        except AllotError:
            self._take_back(before)
            raise
        return f"{self._name} is for {self._mine}{switched}"

    @property
    def _name(self) -> str:
        return f"GPU {self.device.index} {self.device.uuid}"

    # ---- what is said of it ----------------------------------------------------------------------

    def _forget(self, gpu: MigGpu | None) -> str:
        with self.folder.locked():
            before = allowed_on(self.folder, self.device.uuid)
            _refuse_the_nodes(before, self._name)
            write_allowed(self.folder, self.device.uuid, None)
        done = self._ask(self._let_go) if gpu is not None else ""
        return f"{self._name} is for every mode{done}"

    def _begin(self, modes: Sequence[str], *, waits: bool) -> Allowed | None:
        """Write it down, unless shares are in the way; return what was said before."""
        with self.folder.locked():
            lives.recover(self.folder)
            before = allowed_on(self.folder, self.device.uuid)
            _refuse_the_nodes(before, self._name)
            way = self._shares(modes)
            if way and not waits:
                raise self._busy(way)
            write_allowed(self.folder, self.device.uuid, self._mine)
        return before

    def _take_back(self, before: Allowed | None) -> None:
        with self.folder.locked():
            now = allowed_on(self.folder, self.device.uuid)
            if now is not None and now.id == self._mine.id:
                usable = None if before is None or before.problem else before
                write_allowed(self.folder, self.device.uuid, usable)
                if self._is_put_off:
                    self._journal.note_switched()

    def _check(self, gpu: MigGpu | None, modes: Sequence[str]) -> None:
        """Refuse what the GPU cannot be, before anything is changed."""
        if MIG in modes and gpu is None:
            raise UsageError(
                f"{self._name} ({self.device.name}) has no MIG", hint="name its other modes"
            )
        for mode in modes:
            if mode != MIG and not self.device.mig and (why := mode_named(mode).fits(self.device)):
                raise UsageError(f"{self._name}: not for mode {mode}: {why}", hint="leave it out")
        if gpu is None or (wanted := _mig_wanted(modes)) is None or gpu.is_enabled == wanted:
            return
        if self.machine is None and os.geteuid() != 0:
            raise PrerequisiteError("MIG is switched by root", hint="sudo allot devices set-mode")
        if not self._takes_it_at_once and not self.may_reset:
            raise PrerequisiteError(
                f"{self._name} ({self.device.name}) takes MIG {'on' if wanted else 'off'} with a"
                " reset only",
                hint="add --reset: it resets the GPU once nobody uses it, and with it those that"
                " NVLink joins to it",
            )
        if not wanted and (others := self._foreign()):
            raise BusyError(
                f"{self._name} has MIG instances that Allotment did not make for shares:"
                f" {', '.join(others)}",
                hint="whoever made them removes them (nvidia-smi mig -dci, -dgi); or `allot mig"
                " apply` with mig-enabled: false",
            )

    @property
    def _takes_it_at_once(self) -> bool:
        return takes_mode_at_once(self.device)

    def _foreign(self) -> list[str]:
        """Name the instances that others made: neither journal knows them, before and after."""
        before = self._journal.read().records
        gpu = self._look()
        if gpu is None:
            return []
        names = {each.number: each.name for each in gpu.profiles}
        after = self._journal.read().records
        return [
            f"{names.get(each.profile, '?')} at slot {each.start}"
            for each in foreign(after, foreign(before, gpu.instances))
        ]

    # ---- who is there ----------------------------------------------------------------------------

    def _wait(self, deadline: float, *, only_ending: bool = False) -> None:
        """Return once nobody is in the way. Raises `BusyError`; others may have said otherwise."""
        modes = self._mine.modes
        told = ""
        tidied = 0.0
        while way := self._in_the_way(modes):
            self._refuse_overtaken()
            if only_ending and not way.is_ending:
                raise self._busy(way)
            if time.monotonic() >= deadline:
                raise self._left(way)
            if str(way) != told:
                told = str(way)
                self.tell(f"waiting for {told}")
            time.sleep(_POLL_S)
            if time.monotonic() - tidied >= _TIDY_EVERY_S:
                tidied = time.monotonic()
                # That is for others, too: it is tried again.
                with suppress(AllotError), self.folder.locked():
                    lives.recover(self.folder)
                self._settle(deadline)

    def _settle(self, deadline: float) -> None:
        """Remove what others left on this GPU: it is nobody's, and not to be in the way.

        No other GPU is asked: one that is slow keeps only its own users waiting.
        """
        uuid = self.device.uuid
        if uuid not in slicing.in_need(self.folder) or not os.access(self.folder.mig, os.W_OK):
            return
        left_s = min(_WORK_S, max(LOOK_S, deadline - time.monotonic()))
        with suppress(AllotError):  # whoever comes next tries again
            slicing.settle_one(
                self.folder,
                self.machine,
                uuid,
                self.device.index,
                may_reset=False,
                patience_s=left_s,
            )

    def _refuse_overtaken(self) -> None:
        now = allowed_on(self.folder, self.device.uuid)
        if now is None or now.id != self._mine.id:
            what = f"for {now}" if now is not None else "for every mode again"
            raise _OvertakenError(f"somebody else said meanwhile that {self._name} is {what}")

    def _in_the_way(self, modes: Sequence[str]) -> _Way:
        shares = self._shares(modes)
        if shares:
            return shares
        if MPS not in modes and _has_daemon(self.folder, self.device.uuid):
            return _Way(others=("the MPS control daemon",), is_ending=True)
        wanted = _mig_wanted(modes)
        if wanted is None:
            return _Way()
        if users := self._ask(partial(self._users, wanted)):
            return _Way(others=users)
        return self._beside(wanted)

    def _beside(self, is_on: bool) -> _Way:  # noqa: FBT001 - bound
        """Return who has the GPUs that would be reset with this one, where it is to be."""
        if not self.may_reset or self._takes_it_at_once:
            return _Way()
        gpu = self._look()
        if gpu is None or gpu.is_enabled == is_on:
            return _Way()
        if self._joined is None:
            self._joined = self._peers()
        shares = lives.look(self.folder)
        occupants = Occupants(self.folder, shares)
        found: list[str] = []
        for each in self._joined:
            users = tuple(f"share {one.name}" for one, _ in users_of_gpu(shares, each.uuid))
            users = users or self._ask(partial(_processes, occupants), index=each.index)
            found += (f"{who} on GPU {each.index} (NVLink)" for who in users)
        return _Way(others=tuple(found), is_beside=True)

    def _peers(self) -> tuple[Device, ...]:
        with Nvml(machine=self.machine) as source:
            here = source.inventory().devices
            joined = nvlink_peers(read_pair_scores(here, machine=self.machine))
        return tuple(each for each in here if each.uuid in joined.get(self.device.uuid, ()))

    def _shares(self, modes: Sequence[str]) -> _Way:
        found = users_of_gpu(lives.look(self.folder), self.device.uuid)
        return _Way(
            tuple(
                f"share {each.name} of mode {mode}"
                + (" (suspended)" if each.share and each.share.suspension else "")
                for each, mode in found
                if mode not in modes
            )
        )

    def _users(self, is_on: bool, device: MigDevice) -> tuple[str, ...]:  # noqa: FBT001 - bound
        """Return who keeps MIG from being switched, by the driver and the journal."""
        gpu = device.driver.look_if_any()
        if gpu is None or (gpu.is_enabled and is_on):
            return ()
        making = tuple(
            f"a slice that is being made or removed ({each.name})"
            for each in self._journal.read().records
            # Of a share that has ended, too: it is removed next, by that one or by `_settle`.
            if each.stage is not Stage.READY or each.holder
        )
        if gpu.is_enabled == is_on:
            return making or (("a slice that is to be made",) if self._journal.is_switched else ())
        occupied = Occupants(self.folder, lives.look(self.folder)).of(device.driver, gpu)
        inside = (who for each in gpu.instances for who in occupied.of(each.gpu_instance))
        return tuple(dict.fromkeys((*inside, *making, *occupied.whole)))

    def _busy(self, way: _Way) -> BusyError:
        if way.is_beside:
            return BusyError(
                f"{self._name} is switched by a reset, which would stop {way} as well",
                hint="end them first, or add --drain, which waits until nobody is there",
            )
        return BusyError(
            f"{self._name} is in use by {way}",
            hint="end them first, or add --drain: nothing new of their mode comes, and when they"
            " have ended it is switched",
        )

    def _left(self, way: _Way) -> BusyError:
        return _StillThereError(
            f"{self._name} is still in use by {way}",
            hint=f"it goes on draining: only mode {' or '.join(self._mine.modes)} comes to it."
            f" To take that back: allot devices set-mode {self.device.uuid} default",
        )

    # ---- MIG -------------------------------------------------------------------------------------

    def _look(self) -> MigGpu | None:
        return self._ask(lambda device: device.driver.look_if_any(), patience_s=LOOK_S)

    def _ask(
        self,
        question: Callable[[MigDevice], _T],
        patience_s: float = _WORK_S,
        index: int | None = None,
    ) -> _T:
        """Ask this GPU, or another one by its number."""
        here = self.device.index if index is None else index
        with MigMachine(self.machine) as gpus:
            return gpus.ask_one(here, question, patience_s=patience_s)

    @property
    def _journal(self) -> Journal:
        return Journal(self.folder.mig / self.device.uuid)

    def _give_up_claim(self) -> None:
        """Forget what was claimed for slices alone, by who died before he switched MIG on.

        So where MIG is on and takes a reset to be off: from here on that is this one's alone.
        """
        if _mig_wanted(self._mine.modes) is not False or not self._journal.is_switched:
            return
        gpu = self._look()
        if gpu is None:
            return
        if not gpu.is_enabled:
            self._ask(lambda device: self._slices(device).switch_off())
        elif not self._takes_it_at_once:
            # Nobody else may reset it, and is not to try while this waits.
            self._is_put_off = True
            self._journal.forget_switched()

    def _claim(self) -> bool:
        """See that nobody has come, and keep those off that were placed here before it was said.

        Under the folder's lock, as whoever makes a share; the driver switches MIG without it, and
        until then a claimed GPU is no share's but a slice's. False: somebody has come.
        """
        modes = self._mine.modes
        gpu = self._look() if _mig_wanted(modes) else None
        with self.folder.locked():
            self._refuse_overtaken()
            lives.recover(self.folder)
            if self._shares(modes):
                return False
            if gpu is not None and not gpu.is_enabled:
                self._journal.note_switched()
        step("modes.claimed")
        return True

    def _switch(self, modes: Sequence[str]) -> str:
        """Switch MIG as the modes have it; return what was done, to be added to a sentence."""
        wanted = _mig_wanted(modes)
        if wanted is None:
            return self._ask(self._let_go)
        return self._ask(self._on if wanted else self._off)

    def _on(self, device: MigDevice) -> str:
        return "; MIG is switched on" if self._slices(device).switch_on() else ""

    def _off(self, device: MigDevice) -> str:
        gpu = device.driver.look_if_any()
        if gpu is None or not gpu.is_enabled:
            # Whoever settled its last slice may have been first.
            return "; MIG is switched off" if self._was_on else ""
        slices = self._slices(device)
        warm = [
            each
            for each in self._journal.read().records
            if each.stage is Stage.READY and stands_for(each, gpu.instances)
        ]
        for each in warm:
            slices.remove(each.id)
        if problems := self._journal.read().problems:
            raise problems[0]
        has_gone = slices.switch_off(of_anybody=True)
        if device.driver.look().is_enabled:
            if has_gone:
                raise PrerequisiteError(
                    f"{self._name}: MIG is not off after its reset",
                    hint="reboot the machine; see the kernel's log (dmesg)",
                )
            raise BusyError(f"{self._name} has a new MIG instance", hint="try again")
        gone = f"{format_count(len(warm), 'warm slice')} removed and " if warm else ""
        return f"; {gone}MIG is switched off"

    def _let_go(self, device: MigDevice) -> str:
        """Take MIG off again where it is on for our slices alone, and there is none.

        Where that takes a reset, whoever allows one wants it off, whoever had switched it on.
        """
        by_reset = not self._takes_it_at_once
        journal = self._journal
        if by_reset and journal.is_switched and not self.may_reset:
            journal.forget_switched()  # nobody would reset it: it is the administrator's
        gone = self._slices(device).switch_off(of_anybody=by_reset and self.may_reset)
        gpu = device.driver.look_if_any()
        if gone or gpu is None or not gpu.is_enabled:
            return "; MIG is switched off" if gone else ""
        if by_reset and journal.is_switched:
            journal.forget_switched()  # who has its last slice may not reset it
        if gpu.instances:
            return f"; MIG stays on: it has {format_count(len(gpu.instances), 'instance')}"
        if by_reset:
            return "; MIG stays on: it is switched off by a reset only, which --reset allows"
        return "; MIG stays on, as `allot mig apply` or nvidia-smi switched it"

    def _slices(self, device: MigDevice) -> Slices:
        may_reset = self.may_reset and not self._takes_it_at_once
        how = partial(reset, self.machine, device.uuid) if may_reset else None
        return Slices(device.driver, self._journal, reset=how)


class _StillThereError(BusyError):
    """Waiting took too long: what was said stays."""


class _OvertakenError(BusyError):
    """Somebody else has said what the GPU is for."""


def _mig_wanted(modes: Sequence[str]) -> bool | None:
    """Tell how MIG is to be switched; None: as slices come and go."""
    if tuple(modes) == (MIG,):
        return True
    return None if MIG in modes else False


def _processes(occupants: Occupants, device: MigDevice) -> tuple[str, ...]:
    """Name the processes that have a GPU or what is cut from it."""
    gpu = device.driver.look_if_any()
    if gpu is None:
        return tuple(f"process {pid}" for pid in device.driver.processes())
    occupied = occupants.of(device.driver, gpu)
    inside = (who for each in gpu.instances for who in occupied.of(each.gpu_instance))
    return tuple(dict.fromkeys((*inside, *occupied.whole)))


def _has_daemon(folder: StateFolder, uuid: str) -> bool:
    place = mps_daemons.place_of(folder, uuid)
    return place.root.is_dir() and place.is_owned()


def _refuse_the_nodes(before: Allowed | None, name: str) -> None:
    if before is not None and before.by == BY_NODE:
        raise UsageError(
            f"what {name} is for is said by its node's annotation allotment.dev/device-modes",
            hint="change that: kubectl annotate node ...",
        )

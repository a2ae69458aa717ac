# SPDX-License-Identifier: Apache-2.0
"""`allot devices set-mode`: changes the modes of a GPU, at once or after a drain.

    ModeChange(folder, device, machine, modes).carry_out(patience_s=300)

The new policy is written first (`mode_policy`), so no new share of another mode comes to the GPU.
Running programs are never killed. An interrupted wait leaves the GPU draining, until the policy is
changed. Last, MIG is switched: on for `mig` alone, off for modes without `mig`.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from allotment.devices.mig_machine import LOOK_S, MigDevice, MigMachine
from allotment.devices.nvml import Nvml
from allotment.devices.topology import read_links
from allotment.model.devices import Device
from allotment.model.errors import AllotError, BusyError, PrerequisiteError, UsageError
from allotment.model.formats import format_count
from allotment.model.mig import MigGpu
from allotment.model.modes import has_only_slices, has_slices
from allotment.modes import mode_named, traits_of
from allotment.modes.mig.journal import Journal, Stage, foreign, stands_for
from allotment.modes.mig.mode import takes_mode_at_once
from allotment.modes.mig.slices import Slices
from allotment.shares import mps_daemons, recovery
from allotment.shares.failpoints import failpoint
from allotment.shares.folders import StateFolder
from allotment.shares.mig import allocate
from allotment.shares.mig.inspect import GpuUsers, slices_on
from allotment.shares.mode_policy import (
    BY_NODE,
    ModePolicy,
    mode_policy_of,
    users_of_gpu,
    write_mode_policy,
)

_T = TypeVar("_T")
_POLL_S: Final = 0.2
_TIDY_EVERY_S: Final = 1.0
_DAEMON_S: Final = 30.0
"""Time for an unneeded MPS daemon to end: it waits ten seconds for new shares."""
_WORK_S: Final = 120.0
_OFF: Final = "; MIG is switched off"


class _Blockers(msgspec.Struct, frozen=True):
    """The users that block a mode change, named for people."""

    users: tuple[str, ...] = ()
    is_ending: bool = False
    """Only an MPS daemon that no share needs."""
    by_reset: bool = False
    """They use GPUs that NVLink connects to this one, and its reset resets these too."""

    def __bool__(self) -> bool:
        return bool(self.users)

    def __str__(self) -> str:
        return ", ".join(self.users)


class ModeChange(msgspec.Struct, kw_only=True, dict=True):
    """One GPU and its new modes. `modes` None: all."""

    folder: StateFolder
    device: Device
    machine: Path | None
    modes: tuple[str, ...] | None
    may_reset: bool = False
    tell: Callable[[str], None] = lambda _: None
    """Reports the users that it waits for, on each change."""
    _policy: ModePolicy = ModePolicy(())
    _was_on: bool = False
    """MIG was on at the beginning."""
    _gave_up_claim: bool = False
    """The claim on MIG mode was given up, so that freed orphans do not switch it off."""

    def carry_out(self, *, patience_s: float | None) -> str:
        """Change the modes; return a sentence for people.

        `patience_s`: time for shares of other modes to end; None: do not wait. Raises `BusyError`
        with the users in the way, `UsageError` for impossible modes, `PrerequisiteError` for a
        reset that is not allowed. A refusal changes nothing; after a timeout or an interruption
        the GPU goes on draining.
        """
        self.folder.prepare()
        gpu = self._look()
        self._was_on = gpu is not None and gpu.is_enabled
        if self.modes is None:
            return self._allow_all(gpu)
        self._policy = ModePolicy(self.modes, id=os.urandom(6).hex())
        self._check(gpu)
        waits = patience_s is not None
        deadline = time.monotonic() + (_DAEMON_S if patience_s is None else patience_s)
        self._free_orphans(deadline)
        before = self._write_policy(waits=waits)
        failpoint("modes.written")
        try:
            self._give_up_claim()
            while True:
                self._wait(deadline, waits=waits)
                failpoint("modes.drained")
                if not self._claim():
                    continue
                try:
                    return f"{self._name} is for {self._policy}{self._switch()}"
                except BusyError:  # a user came since the last look
                    if not waits or time.monotonic() >= deadline:
                        raise
                    time.sleep(_POLL_S)
        except _DrainTimeoutError:
            raise
        except AllotError:
            self._take_back(before)
            raise

    @property
    def _name(self) -> str:
        return f"GPU {self.device.index} {self.device.uuid}"

    @property
    def _wants_mig(self) -> bool | None:
        """Whether MIG is to be on; None: as slices come and go."""
        if has_only_slices(self._policy.modes):
            return True
        return None if has_slices(self._policy.modes) else False

    @property
    def _takes_mode_at_once(self) -> bool:
        return takes_mode_at_once(self.device)

    @property
    def _journal(self) -> Journal:
        return Journal(self.folder.mig / self.device.uuid)

    # ---- the policy ------------------------------------------------------------------------------

    def _allow_all(self, gpu: MigGpu | None) -> str:
        with self.folder.locked():
            self._policy_before()
            write_mode_policy(self.folder, self.device.uuid, None)
        done = self._ask(self._release_mig) if gpu is not None else ""
        return f"{self._name} is for every mode{done}"

    def _write_policy(self, *, waits: bool) -> ModePolicy | None:
        """Write the new policy, unless shares block it; return the old one."""
        with self.folder.locked():
            recovery.recover(self.folder)
            before = self._policy_before()
            blockers = self._shares()
            if blockers and not waits:
                raise self._busy(blockers)
            write_mode_policy(self.folder, self.device.uuid, self._policy)
        return before

    def _policy_before(self) -> ModePolicy | None:
        before = mode_policy_of(self.folder, self.device.uuid)
        if before is not None and before.by == BY_NODE:
            raise UsageError(
                f"the modes of {self._name} are set by its node's annotation"
                " allotment.dev/device-modes",
                hint="change that: kubectl annotate node ...",
            )
        return before

    def _take_back(self, before: ModePolicy | None) -> None:
        with self.folder.locked():
            current = mode_policy_of(self.folder, self.device.uuid)
            if current is not None and current.id == self._policy.id:
                usable = None if before is None or before.problem else before
                write_mode_policy(self.folder, self.device.uuid, usable)
                if self._gave_up_claim:
                    self._journal.note_switched()

    def _check(self, gpu: MigGpu | None) -> None:
        """Refuse impossible modes, before anything is changed."""
        modes = self._policy.modes
        if has_slices(modes) and gpu is None:
            raise UsageError(
                f"{self._name} ({self.device.name}) has no MIG", hint="name its other modes"
            )
        for mode in modes:
            if traits_of(mode).is_slice or self.device.mig:
                continue
            if why := mode_named(mode).fits(self.device):
                raise UsageError(f"{self._name}: not for mode {mode}: {why}", hint="leave it out")
        wanted = self._wants_mig
        if gpu is None or wanted is None or gpu.is_enabled == wanted:
            return
        if self.machine is None and os.geteuid() != 0:
            raise PrerequisiteError("MIG is switched by root", hint="sudo allot devices set-mode")
        if not self._takes_mode_at_once and not self.may_reset:
            raise PrerequisiteError(
                f"{self._name} ({self.device.name}) switches MIG {'on' if wanted else 'off'} only"
                " with a reset",
                hint="add --reset: it resets the unused GPU, and with it the GPUs that NVLink"
                " connects to it",
            )
        if not wanted and (others := self._foreign()):
            raise BusyError(
                f"{self._name} has MIG instances that Allotment did not make for shares:"
                f" {', '.join(others)}",
                hint="remove them with the tool that made them (nvidia-smi mig -dci, -dgi), or with"
                " `allot mig apply` and mig-enabled: false",
            )

    def _foreign(self) -> list[str]:
        """Name the foreign instances: without a record both before and after the look."""
        before = self._journal.read().records
        gpu = self._look()
        if gpu is None:
            return []
        names = {profile.number: profile.name for profile in gpu.profiles}
        after = self._journal.read().records
        return [
            f"{names.get(instance.profile, '?')} at slot {instance.start}"
            for instance in foreign(after, foreign(before, gpu.instances))
        ]

    # ---- the users -------------------------------------------------------------------------------

    def _wait(self, deadline: float, *, waits: bool) -> None:
        """Return once no user blocks the change. Raises `BusyError`, also for a newer policy."""
        reported = ""
        tidied = 0.0
        while blockers := self._blockers():
            self._check_policy()
            if not waits and not blockers.is_ending:
                raise self._busy(blockers)
            if time.monotonic() >= deadline:
                raise self._timeout(blockers)
            if str(blockers) != reported:
                reported = str(blockers)
                self.tell(f"waiting for {reported}")
            time.sleep(_POLL_S)
            if time.monotonic() - tidied >= _TIDY_EVERY_S:
                tidied = time.monotonic()
                with suppress(AllotError), self.folder.locked():  # it is tried again
                    recovery.recover(self.folder)
                self._free_orphans(deadline)

    def _free_orphans(self, deadline: float) -> None:
        """Remove orphaned slices of this GPU. A slow GPU delays only its own users."""
        uuid = self.device.uuid
        if uuid not in allocate.in_need(self.folder) or not os.access(self.folder.mig, os.W_OK):
            return
        with suppress(AllotError):  # the next command tries again
            allocate.free_orphans_on(
                self.folder,
                self.machine,
                uuid,
                self.device.index,
                may_reset=False,
                patience_s=min(_WORK_S, max(LOOK_S, deadline - time.monotonic())),
            )

    def _check_policy(self) -> None:
        current = mode_policy_of(self.folder, self.device.uuid)
        if current is None or current.id != self._policy.id:
            modes = f"for {current}" if current is not None else "for every mode"
            raise BusyError(f"another command has changed {self._name} meanwhile: it is {modes}")

    def _blockers(self) -> _Blockers:
        if blockers := self._shares():
            return blockers
        if not any(traits_of(mode).needs_daemon for mode in self._policy.modes):
            daemon = mps_daemons.place_of(self.folder, self.device.uuid)
            if daemon.root.is_dir() and daemon.is_owned():
                return _Blockers(("the MPS control daemon",), is_ending=True)
        if self._wants_mig is None:
            return _Blockers()
        if users := self._ask(self._users):
            return _Blockers(users)
        return self._users_of_peers()

    def _users_of_peers(self) -> _Blockers:
        """The users of the GPUs that would be reset with this one."""
        if not self.may_reset or self._takes_mode_at_once:
            return _Blockers()
        gpu = self._look()
        if gpu is None or gpu.is_enabled == self._wants_mig:
            return _Blockers()
        peers = self._peers
        shares = recovery.list_shares(self.folder)
        occupants = GpuUsers(self.folder, shares)
        names: list[str] = []
        for peer in peers:
            users = tuple(f"share {share.name}" for share, _ in users_of_gpu(shares, peer.uuid))
            users = users or self._ask(partial(_processes, occupants), index=peer.index)
            names += (f"{user} on GPU {peer.index} (NVLink)" for user in users)
        return _Blockers(tuple(names), by_reset=True)

    @cached_property
    def _peers(self) -> tuple[Device, ...]:
        """The GPUs that NVLink connects to this one."""
        with Nvml(machine=self.machine) as source:
            devices = source.inventory().devices
            peers = read_links(devices, machine=self.machine).peers
        return tuple(device for device in devices if device.uuid in peers.get(self.device.uuid, ()))

    def _shares(self) -> _Blockers:
        """The shares of other modes."""
        users = users_of_gpu(recovery.list_shares(self.folder), self.device.uuid)
        return _Blockers(
            tuple(
                f"share {user.name} of mode {mode}"
                + (" (suspended)" if user.share and user.share.suspension else "")
                for user, mode in users
                if mode not in self._policy.modes
            )
        )

    def _users(self, device: MigDevice) -> tuple[str, ...]:
        """The users that keep MIG from being switched, by driver and journal."""
        gpu = device.driver.look_if_any()
        if gpu is None or (gpu.is_enabled and self._wants_mig):
            return ()
        making = tuple(
            f"a slice that is being made or removed ({record.name})"
            for record in self._journal.read().records
            # Also of a share that has ended: its slice is removed next.
            if record.stage is not Stage.READY or record.holder
        )
        if gpu.is_enabled == self._wants_mig:
            return making or (("a planned slice",) if self._journal.is_switched else ())
        occupied = GpuUsers(self.folder, recovery.list_shares(self.folder)).of(device.driver, gpu)
        return tuple(dict.fromkeys((*occupied.inside(gpu), *making, *occupied.whole)))

    def _busy(self, blockers: _Blockers) -> BusyError:
        if blockers.by_reset:
            return BusyError(
                f"{self._name} is switched by a reset, which would stop {blockers} as well",
                hint="end them first, or add --drain, which waits until they have ended",
            )
        return BusyError(
            f"{self._name} is in use by {blockers}",
            hint="end them first, or add --drain: it takes no new shares of their mode, and is"
            " switched when they have ended",
        )

    def _timeout(self, blockers: _Blockers) -> BusyError:
        return _DrainTimeoutError(
            f"{self._name} is still in use by {blockers}",
            hint=f"it goes on draining: it takes only mode {' or '.join(self._policy.modes)}."
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
        """Query this GPU, or another one by its number."""
        with MigMachine(self.machine) as gpus:
            number = self.device.index if index is None else index
            return gpus.ask_one(number, question, patience_s=patience_s)

    def _give_up_claim(self) -> None:
        """Give up the claim of slices on MIG mode; a dead process may have left it.

        If MIG is on and needs a reset to be off, only this command switches it from here on.
        """
        if self._wants_mig is not False or not self._journal.is_switched:
            return
        gpu = self._look()
        if gpu is None:
            return
        if not gpu.is_enabled:
            self._ask(lambda device: self._slices(device).switch_off())
        elif not self._takes_mode_at_once:
            self._gave_up_claim = True
            self._journal.forget_switched()

    def _claim(self) -> bool:
        """Check for new shares, and claim MIG mode before it is switched on.

        Under the folder's lock, as shares are made. The driver switches without it, and a claimed
        GPU takes only slices. False: a share has come.
        """
        gpu = self._look() if self._wants_mig else None
        with self.folder.locked():
            self._check_policy()
            recovery.recover(self.folder)
            if self._shares():
                return False
            if gpu is not None and not gpu.is_enabled:
                self._journal.note_switched()
        failpoint("modes.claimed")
        return True

    def _switch(self) -> str:
        """Switch MIG for the modes; return the end of a sentence."""
        if self._wants_mig is None:
            return self._ask(self._release_mig)
        return self._ask(self._switch_on if self._wants_mig else self._switch_off)

    def _switch_on(self, device: MigDevice) -> str:
        return "; MIG is switched on" if self._slices(device).switch_on() else ""

    def _switch_off(self, device: MigDevice) -> str:
        gpu = device.driver.look_if_any()
        if gpu is None or not gpu.is_enabled:
            # Another process may have freed the last slice and switched it off.
            return _OFF if self._was_on else ""
        slices = self._slices(device)
        warm = [
            record
            for record in slices.journal.read().records
            if record.stage is Stage.READY and stands_for(record, gpu.instances)
        ]
        for record in warm:
            slices.remove(record.id)
        if problems := slices.journal.read().problems:
            raise problems[0]
        is_switched = slices.switch_off(even_foreign=True)
        if device.driver.look().is_enabled:
            if is_switched:
                raise PrerequisiteError(
                    f"{self._name}: MIG is not off after its reset",
                    hint="reboot the machine; see the kernel's log (dmesg)",
                )
            raise BusyError(f"{self._name} has a new MIG instance", hint="try again")
        removed = f"; {format_count(len(warm), 'warm slice')} removed and " if warm else "; "
        return f"{removed}MIG is switched off"

    def _release_mig(self, device: MigDevice) -> str:
        """Switch MIG off if it is on only for our slices, and no slice is left.

        If that needs a reset, --reset switches it off, whichever tool switched it on.
        """
        by_reset = not self._takes_mode_at_once
        journal = self._journal
        if by_reset and journal.is_switched and not self.may_reset:
            journal.forget_switched()  # it cannot be switched off: it stays the administrator's
        is_off = self._slices(device).switch_off(even_foreign=by_reset and self.may_reset)
        gpu = device.driver.look_if_any()
        if is_off or gpu is None or not gpu.is_enabled:
            return _OFF if is_off else ""
        if by_reset and journal.is_switched:
            journal.forget_switched()  # the process that frees the last slice may not reset it
        if gpu.instances:
            return f"; MIG stays on: it has {format_count(len(gpu.instances), 'instance')}"
        if by_reset:
            return "; MIG stays on: it is switched off by a reset only, which --reset allows"
        return "; MIG stays on, as `allot mig apply` or nvidia-smi switched it"

    def _slices(self, device: MigDevice) -> Slices:
        may_reset = self.may_reset and not self._takes_mode_at_once
        return slices_on(self.folder, device, self.machine, may_reset=may_reset)


class _DrainTimeoutError(BusyError):
    """Waiting took too long: the new policy stays."""


def _processes(occupants: GpuUsers, device: MigDevice) -> tuple[str, ...]:
    """Name the users of a GPU and its instances."""
    gpu = device.driver.look_if_any()
    if gpu is None:
        return tuple(f"process {pid}" for pid in device.driver.processes())
    occupied = occupants.of(device.driver, gpu)
    return tuple(dict.fromkeys((*occupied.inside(gpu), *occupied.whole)))

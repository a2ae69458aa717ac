# SPDX-License-Identifier: Apache-2.0
"""Others who switch MIG off under us: that is told, and not fought for.

Once may be an administrator, who has forgotten that slices are cut here; whoever asks for a slice
next has it switched on again. Twice within minutes is another manager of MIG, and each round of
such a fight costs somebody's containers. So the mode is left off then, for a pause that doubles
each time. What is known of it is in memory alone: another agent begins with the first time.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from allotment.agent.cut_gpus import CutGpu
from allotment.agent.protocols import Reports
from allotment.devices.mig_machine import MigDevice, MigMachine
from allotment.model.devices import Device
from allotment.model.errors import AllotError
from allotment.modes.mig.journal import Journal
from allotment.shares.folders import StateFolder

__all__ = ["FIRST_PAUSE_S", "LAST_PAUSE_S", "WITHIN_S", "Fight", "Fights"]

SWITCHED_OFF: Final = "MigSwitchedOff"
PAUSED: Final = "MigPaused"
"""Reasons of events on the node."""

WITHIN_S: Final = 600.0
"""What lies longer apart is not the same fight; nor is what comes so long after a pause."""
FIRST_PAUSE_S: Final = 120.0
LAST_PAUSE_S: Final = 3600.0
_PATIENCE_S: Final = 60.0
"""How long the one of us who works on the GPU, and its driver, may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fight:
    """How often others have switched MIG off on one GPU lately. Times in seconds, of one clock."""

    times: int = 0
    last: float = 0.0
    pause_s: float = 0.0

    def again(self, now: float) -> "Fight":
        """Return what it is once others have done it (again)."""
        if not self.times or now - self.last > WITHIN_S + self.pause_s:
            return Fight(times=1, last=now)
        pause_s = min(self.pause_s * 2, LAST_PAUSE_S) if self.pause_s else FIRST_PAUSE_S
        return replace(self, times=self.times + 1, last=now, pause_s=pause_s)

    def left_s(self, now: float) -> float:
        """Return for how long the mode is left off from now on; 0: it may be switched on."""
        return max(0.0, self.last + self.pause_s - now)


class Fights:
    """Those of a node's GPUs. All of it belongs to one event loop."""

    def __init__(
        self,
        folder: StateFolder,
        *,
        machine: Path | None,
        reports: Reports,
        changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take where journals are, and what to call when `paused` has changed."""
        self._folder = folder
        self._machine = machine
        self._reports = reports
        self._changed = changed
        self._clock = clock
        self._on: dict[str, int] = {}
        """By which claim of ours the mode of each GPU was on when it was looked at last."""
        self._switched: dict[str, tuple[int, int]] = {}
        """How often the mode of each GPU had been switched on when it was looked at last, and under
        which claim."""
        self._proofs: dict[str, frozenset[str]] = {}
        """Records that have served to prove that others switched the mode of a GPU off."""
        self._judging: dict[str, asyncio.Task[None]] = {}
        self._fights: dict[str, Fight] = {}
        self._paused: Mapping[str, str] = {}

    @property
    def paused(self) -> Mapping[str, str]:
        """Why, by UUID, of GPUs whose MIG mode is not switched on for now. From any thread."""
        return self._paused

    def judge(self, device: Device, found: CutGpu) -> None:
        """See by a look whether others have switched MIG off; if so, it is looked into.

        It was on if it was seen on by the same claim, or if a slice was whole under it. What nobody
        has seen off, since a pod asked for a slice at once, was counted by who switched it on.
        """
        uuid, was_on = device.uuid, self._on.get(device.uuid)
        if times := self._unseen(uuid, found.claim, found.times_switched):
            self._proofs[uuid] = self._proofs.get(uuid, frozenset()) | found.proofs
            self._tell(uuid, times, is_on=found.is_enabled)
        if found.is_enabled:
            self._on[uuid] = found.claim
            return
        proofs = found.proofs - self._proofs.get(uuid, frozenset())
        is_sign = found.claim and (found.claim == was_on or proofs)
        if is_sign and uuid not in self._judging:
            self._judging[uuid] = asyncio.create_task(self._look_into(device, found))

    def end_pauses(self) -> None:
        """Let the modes be switched again whose pause is over."""
        now = self._clock()
        over = {uuid for uuid in self._paused if not self._fights[uuid].left_s(now)}
        if over:
            self._paused = {uuid: why for uuid, why in self._paused.items() if uuid not in over}
            for uuid in over:
                self._reports.gauge("mig_paused", 0, device=uuid)
            self._changed()

    def close(self) -> None:
        """Look into nothing more."""
        for task in self._judging.values():
            task.cancel()

    async def _look_into(self, device: Device, found: CutGpu) -> None:
        uuid = device.uuid
        try:
            switched = await asyncio.to_thread(self._given_up, device, found.claim)
        except AllotError:
            return  # what keeps it from answering is told by the next look
        finally:
            self._judging.pop(uuid, None)
        if switched is None:
            return
        self._on.pop(uuid, None)
        self._proofs[uuid] = found.proofs
        self._tell(uuid, 1 + self._unseen(uuid, found.claim, switched), is_on=False)

    def _unseen(self, uuid: str, claim: int, switched: int) -> int:
        """Return how often others have switched a mode off, and we on again, since the last look.

        What was before the first look at a GPU is not known: it may be another agent's to tell.
        """
        if not claim:
            self._switched.setdefault(uuid, (0, 0))
            return 0
        before = self._switched.get(uuid)
        self._switched[uuid] = (claim, switched)
        if before is None:
            return 0
        known = before[1] if before[0] == claim else 0
        return max(0, switched - max(known, 1))

    def _tell(self, uuid: str, times: int, *, is_on: bool) -> None:
        """Tell that others have switched MIG off, so often; `is_on`: a pod had it on since."""
        now = self._clock()
        fight = self._fights.get(uuid, Fight())
        for _ in range(times):
            fight = fight.again(now)
            self._reports.count("mig_switched_off", device=uuid)
        self._fights[uuid] = fight
        text = f"MIG of GPU {uuid} was switched off by others, and all slices there went with it"
        if not fight.left_s(now):
            text += (
                ": it is on again for a pod that asked for a slice"
                if is_on
                else ": it is switched on again for the next pod that asks for a slice"
            )
            self._reports.node(SWITCHED_OFF, text, is_warning=True)
            return
        until = datetime.now(UTC) + timedelta(seconds=fight.left_s(now))
        why = f"others have switched it off {fight.times} times: it is not switched on before"
        why += f" {until:%H:%M:%S} UTC"
        self._paused = {**self._paused, uuid: why}
        self._reports.gauge("mig_paused", 1, device=uuid)
        text += (
            f"; {why}. Keep the other manager of MIG off this node (NVIDIA's goes by the label"
            " nvidia.com/mig.config), or take mig out of the GPU's rule"
        )
        self._reports.node(PAUSED, text, is_warning=True)
        self._changed()

    def _given_up(self, device: Device, claim: int) -> int | None:
        """Give a claim up whose mode others have switched off; None: it is not so (any more).

        Returns how often the mode had been switched on under it.
        """
        journal = Journal(self._folder.mig / device.uuid)

        def give_up(there: MigDevice) -> int | None:
            with journal.locked():  # nobody of ours is switching it
                if journal.claim != claim or there.driver.look().is_enabled:
                    return None
                switched = journal.times_switched
                journal.forget_switched()
                return switched

        with MigMachine(self._machine) as gpus:
            return gpus.ask_one(device.index, give_up, patience_s=_PATIENCE_S)

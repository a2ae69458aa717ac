# SPDX-License-Identifier: Apache-2.0
"""Detects that others switch MIG off, and leaves it off for a pause if that repeats.

Once may be an administrator's mistake: the next request for a slice switches it on again. Twice
within minutes is another MIG manager, and each round ends containers. So MIG stays off for a pause
that doubles each time. This memory does not outlive the agent.
"""

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import msgspec

from allotment.agent.mig.state import CutGpu
from allotment.agent.node_state import NodeState
from allotment.agent.protocols import Reports
from allotment.devices.mig_machine import MigDevice, MigMachine
from allotment.model.devices import Device
from allotment.model.errors import AllotError
from allotment.model.structs import replace
from allotment.modes.mig.journal import Journal
from allotment.shares.folders import StateFolder

SWITCHED_OFF: Final = "MigSwitchedOff"
PAUSED: Final = "MigPaused"
"""Reasons of events on the node."""

WITHIN_S: Final = 600.0
"""Events further apart, or this long after a pause, are separate conflicts."""
FIRST_PAUSE_S: Final = 120.0
LAST_PAUSE_S: Final = 3600.0
_PATIENCE_S: Final = 60.0
"""How long other work on the GPU, and its driver, may take."""


class MigConflict(msgspec.Struct, frozen=True, kw_only=True):
    """How often others have switched MIG off on one GPU lately. In seconds of one clock."""

    times: int = 0
    last: float = 0.0
    pause_s: float = 0.0

    def again(self, now: float) -> "MigConflict":
        """Return the state after one more time."""
        if not self.times or now - self.last > WITHIN_S + self.pause_s:
            return MigConflict(times=1, last=now)
        pause_s = min(self.pause_s * 2, LAST_PAUSE_S) if self.pause_s else FIRST_PAUSE_S
        return replace(self, times=self.times + 1, last=now, pause_s=pause_s)

    def left_s(self, now: float) -> float:
        """Return the rest of the pause; 0: MIG may be switched on."""
        return max(0.0, self.last + self.pause_s - now)


class MigConflicts:
    """The conflicts on a node's GPUs. For one event loop."""

    def __init__(
        self,
        folder: StateFolder,
        *,
        machine: Path | None,
        reports: Reports,
        state: NodeState,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._machine = machine
        self._reports = reports
        self._state = state
        self._clock = clock
        self._on: dict[str, int] = {}
        """The claim of ours under which each GPU's mode was on at the latest look."""
        self._switched: dict[str, tuple[int, int]] = {}
        """By GPU: the claim at the latest look, and how often the mode had been switched on."""
        self._proofs: dict[str, frozenset[str]] = {}
        """Records that have already proved one switch by others."""
        self._judging: dict[str, asyncio.Task[None]] = {}
        self._conflicts: dict[str, MigConflict] = {}

    def judge(self, device: Device, found: CutGpu) -> None:
        """Check after a look whether others have switched MIG off.

        MIG was on if the same claim had it on at an earlier look, or if a slice was complete. If a
        pod switched it on again before any look, the journal's count shows it.
        """
        uuid, was_on = device.uuid, self._on.get(device.uuid)
        if times := self._unseen(uuid, found.claim, found.times_switched):
            self._proofs[uuid] = self._proofs.get(uuid, frozenset()) | found.proofs
            self._report(uuid, times, is_on=found.is_enabled)
        if found.is_enabled:
            self._on[uuid] = found.claim
            return
        proofs = found.proofs - self._proofs.get(uuid, frozenset())
        is_sign = found.claim and (found.claim == was_on or proofs)
        if is_sign and uuid not in self._judging:
            self._judging[uuid] = asyncio.create_task(self._look_into(device, found))

    def end_pauses(self) -> None:
        """End the pauses that are over."""
        now = self._clock()
        over = {uuid for uuid in self._state.mig_paused if not self._conflicts[uuid].left_s(now)}
        if over:
            self._state.mig_paused = {
                uuid: why for uuid, why in self._state.mig_paused.items() if uuid not in over
            }
            for uuid in over:
                self._reports.gauge("mig_paused", 0, device=uuid)
            self._state.changed.notify()

    def close(self) -> None:
        for task in self._judging.values():
            task.cancel()

    async def _look_into(self, device: Device, found: CutGpu) -> None:
        uuid = device.uuid
        try:
            switched = await asyncio.to_thread(self._given_up, device, found.claim)
        except AllotError:
            return  # the next look reports the reason
        finally:
            self._judging.pop(uuid, None)
        if switched is None:
            return
        self._on.pop(uuid, None)
        self._proofs[uuid] = found.proofs
        self._report(uuid, 1 + self._unseen(uuid, found.claim, switched), is_on=False)

    def _unseen(self, uuid: str, claim: int, switched: int) -> int:
        """Return how often others have switched a mode off, and we on again, since the last look.

        The first look at a GPU counts as none: an earlier agent may have reported it.
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

    def _report(self, uuid: str, times: int, *, is_on: bool) -> None:
        """Report that others have switched MIG off; `is_on`: a pod switched it on again."""
        now = self._clock()
        conflict = self._conflicts.get(uuid, MigConflict())
        for _ in range(times):
            conflict = conflict.again(now)
            self._reports.count("mig_switched_off", device=uuid)
        self._conflicts[uuid] = conflict
        text = f"MIG of GPU {uuid} was switched off by others, and all its slices are gone"
        if not conflict.left_s(now):
            text += (
                ": it is on again for a pod that asked for a slice"
                if is_on
                else ": it is switched on again for the next pod that asks for a slice"
            )
            self._reports.node(SWITCHED_OFF, text, is_warning=True)
            return
        until = datetime.now(UTC) + timedelta(seconds=conflict.left_s(now))
        why = f"others have switched it off {conflict.times} times: it stays off until"
        why += f" {until:%H:%M:%S} UTC"
        self._state.mig_paused = {**self._state.mig_paused, uuid: why}
        self._reports.gauge("mig_paused", 1, device=uuid)
        text += (
            f"; {why}. Keep the other MIG manager off this node (NVIDIA's reads the label"
            " nvidia.com/mig.config), or take mig out of the GPU's rule"
        )
        self._reports.node(PAUSED, text, is_warning=True)
        self._state.changed.notify()

    def _given_up(self, device: Device, claim: int) -> int | None:
        """Give up a claim if others have switched its mode off; None: they have not.

        Returns how often the mode had been switched on under it.
        """
        journal = Journal(self._folder.mig / device.uuid)

        def give_up(gpu: MigDevice) -> int | None:
            with journal.locked():  # no process of ours switches it meanwhile
                if journal.claim != claim or gpu.driver.look().is_enabled:
                    return None
                switched = journal.times_switched
                journal.forget_switched()
                return switched

        with MigMachine(self._machine) as gpus:
            return gpus.ask_one(device.index, give_up, patience_s=_PATIENCE_S)

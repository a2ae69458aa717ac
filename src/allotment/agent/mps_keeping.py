# SPDX-License-Identifier: Apache-2.0
"""Keeps the control daemons of MPS for the shares of pods: one for each GPU that has such shares.

Each GPU has a thread of its own that drives a `modes.mps.Supervisor`, so that a daemon which hangs
keeps nobody at another GPU. The lock of the GPU's folder says who keeps its daemon: where that is
the process that `allot run` started, the thread waits beside it until it has gone, and goes on with
the same daemon. So does the next agent: one that ends leaves the daemons running.

What is known is in the folder (`status.json`); in memory are only the threads, and what has been
told already.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import structlog

from allotment.agent.protocols import Reports
from allotment.devices.compute_modes import ComputeMode, GpuSettings
from allotment.model.errors import AllotError, BusyError, PrerequisiteError, StateError
from allotment.model.requests import MIG, MPS
from allotment.model.shares import Share
from allotment.modes.mps import Control, DaemonState, Limits, Loss, MpsPlace, Supervisor
from allotment.modes.mps.supervision import Timing
from allotment.shares.bookings import Bookings
from allotment.shares.folders import StateFolder
from allotment.shares.found import Found
from allotment.shares.mps_daemons import (
    STOPS,
    control_of,
    needed_otherwise,
    part_of,
    parts_there,
    place_of,
    statuses,
    still_held,
    users,
)

__all__ = ["LOST", "MpsKeeping"]

LOST: Final = "MpsDaemonLost"
"""Reason of events on pods."""

_log = structlog.get_logger("allotment.agent")

_PATIENCE_S: Final = 22.0
"""Of a start: less than `Tenants` has, so that it is the daemon that is named."""
_LONGEST_PAUSE_S: Final = 30.0
_LEAVES_S: Final = 2.0


class MpsKeeping:
    """The daemons of one node. `ready`, `run` and `look` are for the event loop."""

    def __init__(
        self,
        folder: StateFolder,
        *,
        reports: Reports,
        machine: Path | None = None,
        timing: Timing | None = None,
    ) -> None:
        """Name the folder; nothing is started yet. `machine`: the simulated machine's file."""
        self._folder = folder
        self._reports = reports
        self._machine = machine
        self._timing = timing or Timing()
        self._bookings = Bookings(folder)
        self._reading = threading.Lock()
        self._keepers: dict[str, _Keeper] = {}
        self._lock = threading.Lock()
        self._arriving: set[str] = set()
        """Names of shares whose programs have not been let start."""
        self._wanted: set[str] = set()
        """UUIDs of GPUs that somebody would like to have in mode mig."""
        self._began = time.time()
        self._told: set[tuple[str, float]] = set()
        self._restarts: dict[str, int] = {}

    async def ready(self, share: Share) -> None:
        """Return when the share's daemon takes clients.

        For a share of another mode, when its GPUs are no longer kept for such clients. Raises
        `AllotError` saying why there is no daemon: `BusyError` where the GPU is somebody else's.
        It is tried again for as long as the share is there.
        """
        if share.mode != MPS:
            for device in share.devices:
                await self._await_gpu(device.gpu or device.uuid)
            return
        self._arriving.add(share.name)
        try:
            for device in share.devices:
                await self._await_daemon(device.uuid, part_of(share))
        finally:
            self._arriving.discard(share.name)

    async def run(self) -> None:
        """Keep the daemons of all shares there are, and tell what they lost; until cancelled."""
        while True:
            try:
                await asyncio.to_thread(self.look)
                await self._tell()
            except AllotError as error:
                _log.warning("could not look after MPS", error=error.message)
            await asyncio.sleep(self._timing.look)

    def look(self) -> None:
        """See that each GPU with shares of mode mps has its keeper. Raises `StateError`.

        So have those on which something of a daemon is left, until it is put right.
        """
        left = {uuid for uuid, status in statuses(self._folder).items() if status.holds_gpu}
        for uuid in left | {uuid for each in self._by_mps() for uuid in _gpus(each)}:
            self._keeper(uuid)

    def unfit(self, mode: str, uuids: Iterable[str]) -> Mapping[str, str]:
        """Return why GPUs cannot be had in a mode now, by UUID.

        By MPS, where others have them; by MIG, where a daemon has yet to stop: that switches no
        mode beside one, and waits for none.
        """
        if mode not in {MPS, MIG}:
            return {}
        why = self._why_unfit if mode == MPS else self._why_not_free
        reasons = ((uuid, why(uuid)) for uuid in uuids)
        return {uuid: why for uuid, why in reasons if why}

    def close(self) -> None:
        """Leave all daemons as they are to the next agent."""
        with self._lock:
            keepers = list(self._keepers.values())
        for keeper in keepers:
            keeper.stop()
        deadline = time.monotonic() + _LEAVES_S
        for keeper in keepers:
            keeper.thread.join(timeout=max(0.0, deadline - time.monotonic()))

    # ---- one GPU ---------------------------------------------------------------------------------

    async def _await_gpu(self, uuid: str) -> None:
        place = place_of(self._folder, uuid)
        deadline = time.monotonic() + _PATIENCE_S
        while place.status().holds_gpu:
            if time.monotonic() > deadline:
                raise still_held(place, uuid)
            await asyncio.to_thread(self._keeper, uuid)
            await asyncio.sleep(0.05)

    async def _await_daemon(self, uuid: str, part: str) -> None:
        """Wait in the loop and in no thread: many may wait for one GPU, and for long."""
        place = place_of(self._folder, uuid)
        deadline = time.monotonic() + _PATIENCE_S
        keeper = self._keeper(uuid)
        asked = keeper.tries
        keeper.wake()
        place.wake()  # also where the process of an `allot run` keeps it
        pause_s = 0.005
        while not await asyncio.to_thread(place.serves, part):
            error = keeper.error
            if error is not None and keeper.failed > asked:
                raise type(error)(error.message, hint=error.hint) from error
            if time.monotonic() > deadline:
                raise _not_ready(place, uuid)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.1)
            keeper = self._keeper(uuid)

    def _keeper(self, uuid: str) -> "_Keeper":
        """Return the keeper of a GPU, and start it where there is none."""
        with self._lock:
            there = self._keepers.get(uuid)
            if there is None or not there.thread.is_alive():
                # What it knew of failures holds until it has tried by itself.
                there = self._keepers[uuid] = _Keeper(
                    place=place_of(self._folder, uuid),
                    gpu=GpuSettings(uuid, machine=self._machine),
                    control=lambda: control_of(self._folder, uuid, machine=self._machine),
                    shares=lambda: self._users(uuid),
                    parts=lambda: parts_there(self._folder, self._shares, uuid),
                    gives_way=lambda: self._is_wanted(uuid),
                    arriving=self._arriving,
                    timing=self._timing,
                    is_simulated=self._machine is not None,
                )
                there.thread.start()
            return there

    def _why_unfit(self, uuid: str) -> str:
        place = place_of(self._folder, uuid)
        status = place.status()
        if status.mode_before is not None or status.state is DaemonState.READY:
            return ""  # it is kept for MPS already
        gpu = GpuSettings(uuid, machine=self._machine)
        try:
            mode = gpu.compute_mode()
        except AllotError as error:
            return error.message
        if mode is not ComputeMode.DEFAULT:
            return f"it is in compute mode {mode.name}, which somebody else set: MPS cannot have it"
        others = gpu.computing()
        if others and not self._users(uuid):
            return (
                f"it is in use by other programs ({', '.join(map(str, others[:8]))}), which MPS"
                " would lock out"
            )
        return ""

    def _why_not_free(self, uuid: str) -> str:
        if not place_of(self._folder, uuid).status().holds_gpu or self._users(uuid):
            return ""
        self._wanted.add(uuid)
        self._keeper(uuid)
        return STOPS

    # ---- who needs one ---------------------------------------------------------------------------

    def _shares(self) -> tuple[Found, ...]:
        with self._reading:
            return tuple(self._bookings.read()) if self._folder.exists() else ()

    def _by_mps(self) -> tuple[Found, ...]:
        return tuple(each for each in self._shares() if each.mode == MPS)

    def _users(self, uuid: str) -> tuple[str, ...]:
        try:
            names = users(self._shares(), uuid)
        except StateError:  # it stays for as long as without a share
            return ()
        if names:
            self._wanted.discard(uuid)
        return names

    def _is_wanted(self, uuid: str) -> bool:
        try:
            return uuid in self._wanted or needed_otherwise(self._shares(), uuid)
        except StateError:
            return uuid in self._wanted

    # ---- what is told ----------------------------------------------------------------------------

    async def _tell(self) -> None:
        with self._lock:
            keepers = dict(self._keepers)
        if not keepers:
            return
        statuses = await asyncio.to_thread(
            lambda: {uuid: each.place.status() for uuid, each in keepers.items()}
        )
        for uuid, status in statuses.items():
            is_up = status.state in {DaemonState.READY, DaemonState.FAULTED}
            self._reports.gauge("mps_daemon_up", float(is_up), device=uuid)
            before = self._restarts.setdefault(uuid, status.restarts)
            for _ in range(status.restarts - before):
                self._reports.count("mps_restarts", device=uuid)
            self._restarts[uuid] = status.restarts
            for loss in status.losses:
                if loss.time >= self._began and (uuid, loss.time) not in self._told:
                    self._told.add((uuid, loss.time))
                    await self._tell_of(uuid, loss)

    async def _tell_of(self, uuid: str, loss: Loss) -> None:
        self._reports.count("mps_losses", device=uuid)
        found = {each.name: each for each in await asyncio.to_thread(self._by_mps)}
        for name in loss.shares:
            owner = found[name].owner if name in found else None
            if owner is not None:
                text = (
                    f"container {owner.container}: {loss.reason} on GPU {uuid}: its programs lost"
                    " what they had there, and can start again"
                )
                self._reports.pod(owner, LOST, text, is_warning=True)
        if not loss.shares:
            _log.warning("an MPS daemon was lost", reason=loss.reason, device=uuid)


def _gpus(found: Found) -> tuple[str, ...]:
    return tuple(device.uuid for device in found.devices())


def _not_ready(place: MpsPlace, uuid: str) -> AllotError:
    status = place.status()
    kind = BusyError if status.is_busy else PrerequisiteError
    return kind(
        status.problem
        or f"the control daemon of MPS on GPU {uuid} was not ready within {_PATIENCE_S:.0f} s",
        hint=status.hint or f"see {place.root}/events.log and the files in {place.logs}",
    )


@dataclass(slots=True)
class _Keeper:
    """One GPU's thread: keeps its daemon while there are shares, or waits beside who does."""

    place: MpsPlace
    gpu: GpuSettings
    control: Callable[[], Control]
    shares: Callable[[], tuple[str, ...]]
    parts: Callable[[], Mapping[str, Limits | None] | None]
    gives_way: Callable[[], bool]
    arriving: set[str]
    timing: Timing
    is_simulated: bool
    tries: int = 0
    """How often it has begun to try."""
    failed: int = 0
    """Which of these tries failed last."""
    error: AllotError | None = None
    """Why that was."""
    thread: threading.Thread = field(init=False)
    _woken: threading.Event = field(default_factory=threading.Event)
    _stops: bool = False

    def __post_init__(self) -> None:
        """Make the thread. The process does not wait for it: what it does may end at any step."""
        name = f"mps-{self.place.root.name}"
        self.thread = threading.Thread(target=self._keep, name=name, daemon=True)

    def wake(self) -> None:
        """Try again now what would be tried again later."""
        self._woken.set()

    def stop(self) -> None:
        """End soon."""
        self._stops = True
        self._woken.set()
        self.place.wake()

    def _keep(self) -> None:
        pause = self.timing.retry
        # A share is there before anyone asks for its daemon: none is left behind at the end.
        while not self._stops and (self.shares() or self.place.status().holds_gpu):
            self.tries += 1
            try:
                self.place.prepare(simulated=self.is_simulated)
                with self.place.owned() as mine:
                    if mine:
                        self._supervise()
                wait_s = self.timing.look
                if not mine:
                    self.error = None  # somebody else keeps it
                elif not self.place.status().holds_gpu:
                    pause = self.timing.retry
                    continue
                else:  # the compute mode cannot be put back
                    self._woken.clear()  # of shares that were served
                    if self._is_called():
                        continue
                    wait_s = pause
                    pause = min(pause * 2, _LONGEST_PAUSE_S)
            except (AllotError, OSError) as error:
                self._failed(error)
                wait_s = pause
                pause = min(pause * 2, _LONGEST_PAUSE_S)
            self._woken.wait(wait_s)
            self._woken.clear()

    def _is_called(self) -> bool:
        return self._stops or bool(self.shares())

    def _failed(self, error: AllotError | OSError) -> None:
        known = self.error.message if self.error is not None else ""
        self.error = (
            error if isinstance(error, AllotError) else StateError(f"{self.place.root}: {error}")
        )
        self.failed = self.tries
        if self.error.message != known:
            _log.warning("no MPS daemon", error=self.error.message, device=self.place.root.name)

    def _supervise(self) -> None:
        """Keep the daemon until no share needs it. Raises `AllotError` where none can be had."""
        supervisor = Supervisor(
            self.place,
            self.control(),
            self.gpu,
            shares=self.shares,
            parts=self.parts,
            served=lambda: [each for each in self.shares() if each not in self.arriving],
            gives_way=self.gives_way,
            timing=self.timing,
        )
        if not self.shares():
            supervisor.clear()
            return
        supervisor.begin()
        self.error = None
        try:
            while not self._stops and (wait_s := supervisor.step()) is not None:
                supervisor.wait(wait_s)
        finally:
            supervisor.leave()

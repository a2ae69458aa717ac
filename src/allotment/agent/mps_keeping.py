# SPDX-License-Identifier: Apache-2.0
"""Runs the MPS control daemons for the shares of pods: one for each GPU with such shares.

Each GPU has a thread that drives a `modes.mps.Supervisor`, so that a daemon which hangs delays no
other GPU. A lock in the GPU's folder says which process owns its daemon: an `allot run` may. The
thread waits for the lock and continues with the same daemon; so does the next agent.
"""

import asyncio
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import structlog

from allotment.agent.protocols import Reports
from allotment.devices.compute_modes import ComputeMode, GpuSettings
from allotment.model.errors import AllotError, BusyError, PrerequisiteError, StateError
from allotment.model.formats import format_pids
from allotment.model.reported import Reported
from allotment.model.shares import Share
from allotment.modes import traits_of
from allotment.modes.mps.state import DaemonState, Loss, MpsPlace
from allotment.modes.mps.supervisor import Supervisor, Timing
from allotment.shares.booking import Bookings
from allotment.shares.folders import StateFolder
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
from allotment.shares.record import LoadedShare

LOST: Final = "MpsDaemonLost"
"""Reason of events on pods."""

_log = structlog.get_logger("allotment.agent")

_PATIENCE_S: Final = 22.0
"""Of a start: less than `Tenants` has, so that it is the daemon that is named."""
_LONGEST_PAUSE_S: Final = 30.0
_LEAVES_S: Final = 2.0


class MpsKeeping:
    """The daemons of one node. `ready` and `run` are for the event loop."""

    def __init__(
        self,
        folder: StateFolder,
        *,
        reports: Reports,
        machine: Path | None = None,
        timing: Timing | None = None,
    ) -> None:
        """`machine` is the simulated machine's file."""
        self.folder = folder
        self.machine = machine
        self.timing = timing or Timing()
        self.arriving: set[str] = set()
        """Names of shares whose programs may not start yet."""
        self._reports = reports
        self._bookings = Bookings(folder)
        self._reading = threading.Lock()
        self._keepers: dict[str, _Keeper] = {}
        self._lock = threading.Lock()
        self._wanted: set[str] = set()
        """UUIDs of GPUs that an order in mode mig needs."""
        self._began = time.time()
        self._reported = Reported[tuple[str, float]]()
        self._restarts: dict[str, int] = {}

    async def ready(self, share: Share) -> None:
        """Return when the share's daemon accepts clients.

        For a share of another mode: when its GPUs are no longer reserved for MPS clients. Raises
        `AllotError` with the reason: `BusyError` if other programs use the GPU. The share stays,
        and its daemon is tried again.
        """
        if not traits_of(share.mode).needs_daemon:
            for device in share.devices:
                place = place_of(self.folder, device.gpu or device.uuid)
                if place.root.exists():
                    await self._await_gpu(device.gpu or device.uuid)
            return
        self.arriving.add(share.name)
        try:
            for device in share.devices:
                await self._await_daemon(device.uuid, part_of(share))
        finally:
            self.arriving.discard(share.name)

    async def run(self) -> None:
        """Keep the daemons of all shares, and report their losses, until cancelled."""
        while True:
            try:
                await asyncio.to_thread(self.look)
                await self._report()
            except AllotError as error:
                _log.warning("could not check the MPS daemons", error=error.message)
            await asyncio.sleep(self.timing.look)

    def look(self) -> None:
        """Start a keeper for each GPU with shares of mode mps. Raises `StateError`.

        Also for each GPU that is still reserved for a former daemon.
        """
        gpus = {uuid for uuid, status in statuses(self.folder).items() if status.holds_gpu}
        for found in self._by_mps():
            gpus.update(device.uuid for device in found.devices())
        for uuid in gpus:
            self._keeper(uuid)

    def unfit(self, mode: str, uuids: Iterable[str]) -> Mapping[str, str]:
        """Return why GPUs cannot serve in a mode now, by UUID.

        MPS cannot use GPUs of other programs. MIG's mode cannot be switched beside a daemon, and
        does not wait for its end.
        """
        traits = traits_of(mode)
        if not (traits.needs_daemon or traits.is_slice):
            return {}
        why = self._why_unfit if traits.needs_daemon else self._why_not_free
        reasons = ((uuid, why(uuid)) for uuid in uuids)
        return {uuid: why for uuid, why in reasons if why}

    def close(self) -> None:
        """Stop the keepers. The daemons run on, for the next agent."""
        with self._lock:
            keepers = list(self._keepers.values())
        for keeper in keepers:
            keeper.stop()
        deadline = time.monotonic() + _LEAVES_S
        for keeper in keepers:
            keeper.thread.join(timeout=max(0.0, deadline - time.monotonic()))

    # ---- one GPU ---------------------------------------------------------------------------------

    async def _await_gpu(self, uuid: str) -> None:
        place = place_of(self.folder, uuid)
        deadline = time.monotonic() + _PATIENCE_S
        while place.status().holds_gpu:
            if time.monotonic() > deadline:
                raise still_held(place, uuid)
            await asyncio.to_thread(self._keeper, uuid)
            await asyncio.sleep(0.05)

    async def _await_daemon(self, uuid: str, part: str) -> None:
        """Wait in the event loop, not in a thread: many may wait for one GPU, and for long."""
        place = place_of(self.folder, uuid)
        deadline = time.monotonic() + _PATIENCE_S
        keeper = self._keeper(uuid)
        asked = keeper.tries
        keeper.wake()
        place.wake()  # for the process of an `allot run` that owns it
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
        """Return the keeper of a GPU, and start it if there is none."""
        with self._lock:
            keeper = self._keepers.get(uuid)
            if keeper is None or not keeper.thread.is_alive():
                # A new keeper does not know of former failures until it has tried itself.
                keeper = self._keepers[uuid] = _Keeper(self, uuid)
                keeper.thread.start()
            return keeper

    def _why_unfit(self, uuid: str) -> str:
        place = place_of(self.folder, uuid)
        status = place.status()
        if status.mode_before is not None or status.state is DaemonState.READY:
            return ""  # it is reserved for MPS already
        gpu = GpuSettings(uuid, machine=self.machine)
        try:
            mode = gpu.compute_mode()
        except AllotError as error:
            return error.message
        if mode is not ComputeMode.DEFAULT:
            return f"it is in compute mode {mode.name}, set outside Allotment: MPS cannot use it"
        others = gpu.computing()
        if others and not self.users(uuid):
            return (
                f"it is in use by other programs ({format_pids(others)}), which MPS would lock out"
            )
        return ""

    def _why_not_free(self, uuid: str) -> str:
        if not place_of(self.folder, uuid).status().holds_gpu or self.users(uuid):
            return ""
        self._wanted.add(uuid)
        self._keeper(uuid)
        return STOPS

    # ---- the shares ------------------------------------------------------------------------------

    def shares(self) -> tuple[LoadedShare, ...]:
        """Return all shares of the node. Raises `StateError`."""
        with self._reading:
            return tuple(self._bookings.read()) if self.folder.exists() else ()

    def _by_mps(self) -> tuple[LoadedShare, ...]:
        return tuple(each for each in self.shares() if traits_of(each.mode).needs_daemon)

    def users(self, uuid: str) -> tuple[str, ...]:
        """Return the names of the GPU's shares that need its daemon."""
        try:
            names = users(self.shares(), uuid)
        except StateError:  # the daemon stays as long as without shares
            return ()
        if names:
            self._wanted.discard(uuid)
        return names

    def is_wanted(self, uuid: str) -> bool:
        """Return whether the daemon must make way for a share of another mode."""
        try:
            return uuid in self._wanted or needed_otherwise(self.shares(), uuid)
        except StateError:
            return uuid in self._wanted

    # ---- reports ---------------------------------------------------------------------------------

    async def _report(self) -> None:
        with self._lock:
            keepers = dict(self._keepers)
        if not keepers:
            return
        now = await asyncio.to_thread(
            lambda: {uuid: keeper.place.status() for uuid, keeper in keepers.items()}
        )
        for uuid, status in now.items():
            is_up = status.state in {DaemonState.READY, DaemonState.FAULTED}
            self._reports.gauge("mps_daemon_up", float(is_up), device=uuid)
            before = self._restarts.setdefault(uuid, status.restarts)
            for _ in range(status.restarts - before):
                self._reports.count("mps_restarts", device=uuid)
            self._restarts[uuid] = status.restarts
            for loss in status.losses:
                if loss.time >= self._began and self._reported.is_new((uuid, loss.time)):
                    await self._report_loss(uuid, loss)

    async def _report_loss(self, uuid: str, loss: Loss) -> None:
        self._reports.count("mps_losses", device=uuid)
        owners = {found.name: found.owner for found in await asyncio.to_thread(self._by_mps)}
        for name in loss.shares:
            owner = owners.get(name)
            if owner is not None:
                text = (
                    f"container {owner.container}: {loss.reason} on GPU {uuid}: its programs lost"
                    " their state there, and can start again"
                )
                self._reports.pod(owner, LOST, text, is_warning=True)
        if not loss.shares:
            _log.warning("an MPS daemon was lost", reason=loss.reason, device=uuid)


def _not_ready(place: MpsPlace, uuid: str) -> AllotError:
    status = place.status()
    kind = BusyError if status.is_busy else PrerequisiteError
    return kind(
        status.problem
        or f"the control daemon of MPS on GPU {uuid} was not ready within {_PATIENCE_S:.0f} s",
        hint=status.hint or f"see {place.root}/events.log and the files in {place.logs}",
    )


class _Keeper:
    """One GPU's thread: runs its daemon while shares need it, or waits for the daemon's owner."""

    def __init__(self, node: MpsKeeping, uuid: str) -> None:
        self.place = place_of(node.folder, uuid)
        self.tries = 0
        """How often it has begun to try."""
        self.failed = 0
        """The number of the last try that failed."""
        self.error: AllotError | None = None
        """The reason of that."""
        # The process does not wait for the thread, which may end at any step.
        self.thread = threading.Thread(target=self._keep, name=f"mps-{uuid}", daemon=True)
        self._node = node
        self._uuid = uuid
        self._woken = threading.Event()
        self._stopped = threading.Event()

    def wake(self) -> None:
        """Try again now."""
        self._woken.set()

    def stop(self) -> None:
        """End soon."""
        self._stopped.set()
        self._woken.set()
        self.place.wake()

    def _shares(self) -> tuple[str, ...]:
        return self._node.users(self._uuid)

    def _keep(self) -> None:
        timing = self._node.timing
        pause_s = timing.retry
        # A share exists before its daemon is needed: none is missed at the end.
        while not self._stopped.is_set() and (self._shares() or self.place.status().holds_gpu):
            self.tries += 1
            try:
                self.place.prepare(simulated=self._node.machine is not None)
                with self.place.owned() as mine:
                    if mine:
                        self._supervise()
                wait_s = timing.look
                if not mine:
                    self.error = None  # another process runs it
                elif not self.place.status().holds_gpu:
                    pause_s = timing.retry
                    continue
                else:  # the compute mode cannot be restored
                    self._woken.clear()  # of shares that were served
                    if self._stopped.is_set() or self._shares():
                        continue
                    wait_s = pause_s
                    pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
            except (AllotError, OSError) as error:
                self._fail(error)
                wait_s = pause_s
                pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
            self._woken.wait(wait_s)
            self._woken.clear()

    def _fail(self, error: AllotError | OSError) -> None:
        before = self.error.message if self.error is not None else ""
        self.error = (
            error if isinstance(error, AllotError) else StateError(f"{self.place.root}: {error}")
        )
        self.failed = self.tries
        if self.error.message != before:
            _log.warning("no MPS daemon", error=self.error.message, device=self._uuid)

    def _supervise(self) -> None:
        """Run the daemon until no share needs it. Raises `AllotError` if it cannot run."""
        node, uuid = self._node, self._uuid
        supervisor = Supervisor(
            self.place,
            control_of(node.folder, uuid, machine=node.machine),
            GpuSettings(uuid, machine=node.machine),
            shares=self._shares,
            parts=lambda: parts_there(node.folder, node.shares, uuid),
            served=lambda: [name for name in self._shares() if name not in node.arriving],
            gives_way=lambda: node.is_wanted(uuid),
            timing=node.timing,
        )
        if not self._shares():
            supervisor.clear()
            return
        supervisor.begin()
        self.error = None
        try:
            while not self._stopped.is_set() and (wait_s := supervisor.step()) is not None:
                supervisor.wait(wait_s)
        finally:
            supervisor.leave()

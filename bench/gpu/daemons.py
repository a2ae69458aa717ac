# SPDX-License-Identifier: Apache-2.0
"""A control daemon of MPS for the GPU run: on a GPU whose settings stay as they are, or not.

`allot run --mode mps` as root sets the GPU's compute mode while its daemon runs. A GPU that is lent
may not be changed, and MPS needs no change: here the product's own supervisor is driven with a GPU
whose mode cannot be set, as for a user who is not root, and the shares find its daemon.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from allotment.devices.compute_modes import ComputeMode, GpuSettings
from allotment.model.errors import AllotError, BusyError, PrerequisiteError
from allotment.model.modes import MPS
from allotment.modes.mps.state import DaemonState, MpsPlace
from allotment.modes.mps.supervisor import Supervisor, Timing
from allotment.shares.folders import StateFolder
from allotment.shares.mps_daemons import control_of, parts, place_of
from allotment.shares.recovery import list_shares
from bench.compute.rig import Rig

PATIENCE_S: Final = 60.0
_LOOK_S: Final = 0.2
_FOR_GOOD_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class _AsItIs:
    """A GPU that is asked and not changed."""

    settings: GpuSettings

    def compute_mode(self) -> ComputeMode:
        return self.settings.compute_mode()

    def set_compute_mode(self, mode: ComputeMode) -> None:
        message = f"the compute mode is not made {mode.name}"
        raise PrerequisiteError(message, hint="--change-settings")

    def computing(self) -> tuple[int, ...]:
        return self.settings.computing()


def settings_of(rig: Rig) -> GpuSettings:
    """Return the settings of the rig's GPU."""
    return GpuSettings(rig.devices[0].uuid, machine=rig.machine)


@contextmanager
def daemon(rig: Rig, *, change_settings: bool) -> Iterator[MpsPlace]:
    """Have shares of mode mps find a daemon on the rig's GPU; none runs afterwards.

    Raises `AllotError` where there can be none. With `change_settings` it is the product's own, by
    the first `allot run`.
    """
    folder, uuid = StateFolder(rig.state), rig.devices[0].uuid
    folder.prepare()
    place = place_of(folder, uuid)
    if change_settings:
        yield place
        await_that(lambda: place.status().state is DaemonState.STOPPED, "the daemon does not stop")
        return
    place.prepare(simulated=rig.machine is not None)
    with place.owned() as mine:
        if not mine:
            raise BusyError(f"another process keeps the daemon at {place.root}")
        supervisor = Supervisor(
            place,
            control_of(folder, uuid, machine=rig.machine),
            _AsItIs(settings_of(rig)),
            shares=lambda: [each.name for each in list_shares(folder) if each.mode == MPS],
            parts=lambda: parts(list_shares(folder), uuid),
            timing=Timing(idle=_FOR_GOOD_S),
        )
        supervisor.begin()
        over = threading.Event()
        driver = threading.Thread(target=_drive, args=(supervisor, over), daemon=True)
        driver.start()
        try:
            yield place
        finally:
            over.set()
            driver.join()
            supervisor.close()


def await_that(holds: Callable[[], bool], complaint: str) -> float:
    """Return after how many seconds it holds; RuntimeError with the complaint when it does not."""
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > PATIENCE_S:
            raise RuntimeError(complaint)
        time.sleep(0.005)
    return time.monotonic() - began


def _drive(supervisor: Supervisor, over: threading.Event) -> None:
    """Supervise the daemon until the end of the bench."""
    while not over.is_set():
        try:
            pause = supervisor.step()
        except AllotError as error:
            print(f"the daemon is looked after no more: {error}", flush=True)
            return
        if pause is None:
            return
        supervisor.wait(min(pause, _LOOK_S))

# SPDX-License-Identifier: Apache-2.0
"""What the commands ask of machines, real and simulated, in words of `devices`."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from allotment.devices.nvml import Nvml
from allotment.devices.simulated import (
    DEFAULT_PATH,
    MACHINE_VARIABLE,
    SimulatedMachine,
    machine_path,
)
from allotment.devices.sources import Inventory, Problem, Reading
from allotment.model.devices import Device
from allotment.model.errors import (
    AllotError,
    NoDevicesError,
    NotFoundError,
    StateError,
    UsageError,
)
from allotment.model.requests import MIG
from allotment.shares.folders import StateFolder
from allotment.shares.lives import Booking, Found, booked
from allotment.shares.modes_of_gpus import Allowed, modes_on, read_allowed, refusal
from allotment.shares.sessions import inside_share
from allotment.shares.views import Readings

__all__ = [
    "DeviceRow",
    "device_named",
    "devices_of",
    "known_machines",
    "readings",
    "real_inventory",
    "survey",
]


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """A device with all that is known of it. Bytes; None: not known."""

    device: Device
    allotted: int
    shares: tuple[str, ...]
    reading: Reading | None
    problem: str | None = None
    machine: Path | None = None
    """The simulated machine that it is of."""
    guaranteed: int = 0
    """Of its time, what is guaranteed to shares, in basis points."""
    mode: str = ""
    """That of the shares on it, or `mig` where it is cut; empty: none."""
    allowed: Allowed | None = None
    """What `allot devices set-mode` or the node has said; None: nothing."""
    is_draining: bool = False
    """There are shares of a mode that it is not for any more."""


def real_inventory() -> Inventory:
    """Ask the machine's NVML; raise `NoDevicesError` where there is none, or no GPU."""
    with Nvml() as source:
        return source.inventory()


def readings(machine: Path | None) -> Mapping[str, Reading | Problem]:
    """Return the figures of a machine's devices by UUID; none where nobody can be asked."""
    try:
        with Nvml(machine=machine) as source:
            return source.readings()
    except AllotError:
        return {}  # the ledger's figures are shown all the same


def known_machines(folder: StateFolder) -> tuple[Path | None, ...]:
    """Return whom to ask for who uses GPUs, whether shares are there or not.

    The state folder's simulated machines, and the real one (None) where a driver is loaded, so that
    `allot ps` starts at once elsewhere.
    """
    if inside_share():
        return ()  # nobody there tells of more than the share's own
    signs = ("/proc/driver/nvidia", "/dev/dxg")
    real = (None,) if any(map(os.path.exists, signs)) else ()
    return (*real, *sorted(folder.simulated.glob("*/machine")))


def devices_of(found: Found) -> tuple[Device, ...]:
    """Return the devices of the machine that a share is on."""
    if found.problem:
        raise found.problem
    if found.share and found.share.machine:
        return SimulatedMachine(Path(found.share.machine)).devices()
    return real_inventory().devices


def survey(
    folder: StateFolder, spec: str | None, shares: list[Found], ask: Readings = readings
) -> tuple[list[DeviceRow], list[Problem]]:
    """Ask every machine that is meant: the one of `spec`, else the real one and those of shares.

    `ask` is who is asked for live figures. Inside a share that is the share's own part alone: the
    driver there tells of nothing else. Raises `NoDevicesError` when none has a device.
    """
    if inside_share():
        inventory = real_inventory()
        simulated = bool(os.environ.get(MACHINE_VARIABLE)) or DEFAULT_PATH.exists()
        own = [replace(device, simulated=simulated) for device in inventory.devices]
        return _rows(own, None, shares, ask, {}), list(inventory.problems)
    said = read_allowed(folder)
    if spec:
        folder.prepare()
        machine = machine_path(folder.root, spec)
        return _rows(SimulatedMachine(machine).devices(), machine, shares, ask, said), []
    rows: list[DeviceRow] = []
    problems: list[Problem] = []
    failure: NoDevicesError | None = None
    try:
        inventory = real_inventory()
        rows += _rows(inventory.devices, None, shares, ask, said)
        problems += inventory.problems
    except NoDevicesError as error:
        failure = error
    for path in sorted(
        {each.share.machine for each in shares if each.share and each.share.machine}
    ):
        try:
            rows += _rows(SimulatedMachine(Path(path)).devices(), Path(path), shares, ask, said)
        except StateError as error:
            problems.append(Problem(index=-1, uuid=None, message=error.message))
    if not rows and not problems:
        raise failure or NoDevicesError(
            "this machine has no GPU",
            hint="see `allot doctor`, or use simulated GPUs: --simulated a100-80gb",
        )
    return rows, problems


def device_named(folder: StateFolder, spec: str | None, name: str) -> tuple[Path | None, Device]:
    """Return the one GPU whose UUID is `name` or begins with it, and its machine.

    Of the machine of `spec`, else of the real one and the folder's simulated ones. Raises
    `NotFoundError`, or `UsageError` for what may be several.
    """
    found: list[tuple[Path | None, Device]] = []
    there: list[str] = []
    for machine in _machines(folder, spec):
        try:
            devices = (
                real_inventory().devices if machine is None else SimulatedMachine(machine).devices()
            )
        except (NoDevicesError, StateError):
            continue
        there += [each.uuid for each in devices]
        found += [(machine, each) for each in devices if each.uuid.lower().startswith(name.lower())]
    if not name.lower().startswith("gpu-") or not found:
        raise NotFoundError(
            f"there is no GPU {name!r}",
            hint=f"name it by its UUID or the start of it; there are: {', '.join(there) or 'none'}",
        )
    if len(found) > 1:
        raise UsageError(
            f"{name!r} may be any of {', '.join(each.uuid for _, each in found)}",
            hint="write more of the UUID",
        )
    return found[0]


def _machines(folder: StateFolder, spec: str | None) -> tuple[Path | None, ...]:
    if not spec:
        return (None, *sorted(folder.simulated.glob("*/machine")))
    folder.prepare()
    return (machine_path(folder.root, spec),)


def _rows(
    devices: Iterable[Device],
    machine: Path | None,
    shares: Iterable[Found],
    ask: Readings,
    said: Mapping[str, Allowed],
) -> list[DeviceRow]:
    live = ask(machine)
    known = list(shares)
    bookings = booked(known)
    rows = []
    for device in devices:
        here = [each for each in known if device.uuid in each.limits()]
        booking = bookings.get(device.uuid) or Booking()
        answer = live.get(device.uuid)
        modes = modes_on(known, device.uuid)
        allowed = said.get(device.uuid)
        rows.append(
            DeviceRow(
                device=device,
                allotted=booking.memory,
                shares=tuple(each.name for each in here),
                reading=answer if isinstance(answer, Reading) else None,
                problem=answer.message if isinstance(answer, Problem) else None,
                machine=machine,
                guaranteed=booking.guaranteed,
                mode=min(modes, default=MIG if device.mig else ""),
                allowed=allowed,
                is_draining=any(refusal(allowed, each) for each in modes),
            )
        )
    return rows

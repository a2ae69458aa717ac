# SPDX-License-Identifier: Apache-2.0
"""Queries of the commands to real and simulated machines."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from allotment.devices.nvml import Nvml, readings
from allotment.devices.packing import MACHINE_VARIABLE
from allotment.devices.simulated import DEFAULT_PATH, SimulatedMachine, machine_path
from allotment.devices.sources import Inventory, Problem, Reading
from allotment.model.devices import Device
from allotment.model.errors import (
    NoDevicesError,
    NotFoundError,
    StateError,
    UsageError,
)
from allotment.model.modes import MIG
from allotment.model.structs import replace
from allotment.shares.booking import Booking, booked
from allotment.shares.folders import StateFolder
from allotment.shares.mode_policy import ModePolicy, modes_on, read_mode_policies, refusal
from allotment.shares.record import LoadedShare
from allotment.shares.run.command import inside_share
from allotment.shares.status import Readings, ShareStatus, share_status


class DeviceRow(msgspec.Struct, frozen=True):
    """A device with its bookings and readings. Sizes in bytes; None: unknown."""

    device: Device
    allotted: int
    shares: tuple[str, ...]
    reading: Reading | None
    problem: str | None = None
    machine: Path | None = None
    """Its simulated machine; None: a real GPU."""
    guaranteed: int = 0
    """Part of its time that shares are guaranteed, in basis points."""
    mode: str = ""
    """Mode of the shares on it, or `mig` if MIG is on; empty: none."""
    allowed: ModePolicy | None = None
    """Modes set by `allot devices set-mode` or the node; None: not set."""
    is_draining: bool = False
    """Whether shares of a mode that it no longer allows are on it."""


def real_inventory() -> Inventory:
    """Read the inventory from NVML; raise `NoDevicesError` without NVML or a GPU."""
    with Nvml() as source:
        return source.inventory()


def known_machines(folder: StateFolder) -> tuple[Path | None, ...]:
    """Return the machines whose GPUs may be in use: None is the real one.

    The real machine counts only with a driver loaded, so that `allot ps` starts fast elsewhere.
    """
    if inside_share():
        return ()  # inside a share, NVML reports only that share
    signs = ("/proc/driver/nvidia", "/dev/dxg")
    real = (None,) if any(map(os.path.exists, signs)) else ()
    return (*real, *sorted(folder.simulated.glob("*/machine")))


def status_of(
    folder: StateFolder, shares: list[LoadedShare], ask: Readings = readings
) -> ShareStatus:
    """Return the status of these shares and of all processes outside any share."""
    machines = known_machines(folder)
    if not folder.mps.is_dir():
        return share_status(shares, ask, machines=machines)
    from allotment.shares.mps_daemons import losses, servers  # late: few machines have MPS

    return share_status(
        shares, ask, machines=machines, serving=servers(folder), losses=losses(folder)
    )


def devices_of(share: LoadedShare) -> tuple[Device, ...]:
    if share.problem:
        raise share.problem
    if share.share and share.share.machine:
        return SimulatedMachine(Path(share.share.machine)).devices()
    return real_inventory().devices


def survey(
    folder: StateFolder, spec: str | None, shares: list[LoadedShare], ask: Readings = readings
) -> tuple[list[DeviceRow], list[Problem]]:
    """Query the machine of `spec`, else the real one and the simulated ones with shares.

    `ask` returns live figures. Inside a share only the share's own part is visible. Raises
    `NoDevicesError` if no machine has a device.
    """
    if inside_share():
        inventory = real_inventory()
        simulated = bool(os.environ.get(MACHINE_VARIABLE)) or DEFAULT_PATH.exists()
        own = [replace(device, simulated=simulated) for device in inventory.devices]
        return _rows(own, None, shares, ask, {}), list(inventory.problems)
    policies = read_mode_policies(folder)
    if spec:
        folder.prepare()
        machine = machine_path(folder.root, spec)
        return _rows(SimulatedMachine(machine).devices(), machine, shares, ask, policies), []
    rows: list[DeviceRow] = []
    problems: list[Problem] = []
    failure: NoDevicesError | None = None
    try:
        inventory = real_inventory()
        rows += _rows(inventory.devices, None, shares, ask, policies)
        problems += inventory.problems
    except NoDevicesError as error:
        failure = error
    for path in sorted(
        {share.share.machine for share in shares if share.share and share.share.machine}
    ):
        try:
            rows += _rows(SimulatedMachine(Path(path)).devices(), Path(path), shares, ask, policies)
        except StateError as error:
            problems.append(Problem(index=-1, uuid=None, message=error.message))
    if not rows and not problems:
        raise failure or NoDevicesError(
            "this machine has no GPU",
            hint="see `allot doctor`, or use simulated GPUs: --simulated a100-80gb",
        )
    return rows, problems


def device_named(folder: StateFolder, spec: str | None, name: str) -> tuple[Path | None, Device]:
    """Return the only GPU whose UUID starts with `name`, and its machine.

    Looks at the machine of `spec`, else at the real and all simulated ones. Raises `NotFoundError`,
    or `UsageError` if several match.
    """
    matches: list[tuple[Path | None, Device]] = []
    uuids: list[str] = []
    for machine in _machines(folder, spec):
        try:
            devices = (
                real_inventory().devices if machine is None else SimulatedMachine(machine).devices()
            )
        except (NoDevicesError, StateError):
            continue
        uuids += [device.uuid for device in devices]
        matches += [
            (machine, device) for device in devices if device.uuid.lower().startswith(name.lower())
        ]
    if not name.lower().startswith("gpu-") or not matches:
        raise NotFoundError(
            f"no GPU {name!r}",
            hint=f"give its UUID or the start of it; GPUs: {', '.join(uuids) or 'none'}",
        )
    if len(matches) > 1:
        raise UsageError(
            f"{name!r} matches several GPUs: {', '.join(device.uuid for _, device in matches)}",
            hint="give more of the UUID",
        )
    return matches[0]


def _machines(folder: StateFolder, spec: str | None) -> tuple[Path | None, ...]:
    if not spec:
        return (None, *sorted(folder.simulated.glob("*/machine")))
    folder.prepare()
    return (machine_path(folder.root, spec),)


def _rows(
    devices: Iterable[Device],
    machine: Path | None,
    shares: Iterable[LoadedShare],
    ask: Readings,
    policies: Mapping[str, ModePolicy],
) -> list[DeviceRow]:
    live = ask(machine)
    loaded = list(shares)
    bookings = booked(loaded)
    by_device: dict[str, list[LoadedShare]] = {}
    by_gpu: dict[str, list[LoadedShare]] = {}
    for share in loaded:
        limits = share.limits()
        for uuid in limits:
            by_device.setdefault(uuid, []).append(share)
        for uuid in {*limits, *(device.gpu for device in share.devices())}:
            by_gpu.setdefault(uuid, []).append(share)
    rows = []
    for device in devices:
        booking = bookings.get(device.uuid) or Booking()
        reading = live.get(device.uuid)
        modes = modes_on(by_gpu.get(device.uuid, ()), device.uuid)
        allowed = policies.get(device.uuid)
        rows.append(
            DeviceRow(
                device=device,
                allotted=booking.memory,
                shares=tuple(share.name for share in by_device.get(device.uuid, ())),
                reading=reading if isinstance(reading, Reading) else None,
                problem=reading.message if isinstance(reading, Problem) else None,
                machine=machine,
                guaranteed=booking.guaranteed,
                mode=min(modes, default=MIG if device.mig else ""),
                allowed=allowed,
                is_draining=any(refusal(allowed, share) for share in modes),
            )
        )
    return rows

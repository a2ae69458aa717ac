# SPDX-License-Identifier: Apache-2.0
"""What the commands ask of machines, real and simulated, in words of `devices`."""

from collections.abc import Mapping
from pathlib import Path

from allotment.devices.sources import Inventory, Problem, Reading
from allotment.model.devices import Device
from allotment.model.errors import AllotError
from allotment.shares.lives import Found

__all__ = ["NO_GPU_HINT", "devices_of", "real_inventory", "readings"]

NO_GPU_HINT = "see `allot doctor`, or use simulated GPUs: --simulated a100-80gb"


def real_inventory() -> Inventory:
    """Ask the machine's NVML; raise `NoDevicesError` where there is none, or no GPU."""
    from allotment.devices.nvml import NvmlSource

    return NvmlSource().inventory()


def readings(machine: Path | None) -> Mapping[str, Reading | Problem]:
    """Return the figures of a machine's devices by UUID; none where nobody can be asked."""
    from allotment.devices.nvml import NvmlSource

    try:
        return NvmlSource(machine).readings()
    except AllotError:
        return {}  # the ledger's figures are shown all the same


def devices_of(found: Found) -> tuple[Device, ...]:
    """Return the devices of the machine that a share is on."""
    from allotment.devices.simulated import SimulatedMachine

    if found.problem:
        raise found.problem
    if found.share and found.share.machine:
        return SimulatedMachine(Path(found.share.machine)).devices()
    return real_inventory().devices

# SPDX-License-Identifier: Apache-2.0
"""The mode `mig`: a share of one MIG device, isolated by the hardware.

The shim is loaded as well: programs see only this device by CUDA and NVML, and `allot ps` shows
their use. The limit is the whole slice, also for a smaller request, because no other share could
use the rest. No turns are taken. `shares.mig.allocate` creates and removes the slice.
"""

from pathlib import Path
from typing import Final

from allotment import ledger
from allotment.model.devices import Device
from allotment.model.modes import MIG
from allotment.model.placements import Placement
from allotment.model.shares import ShareId
from allotment.model.structs import replace
from allotment.modes.base import Mode
from allotment.modes.soft import SoftMode, create_ledger

_HOPPER: Final = (9, 0)


def takes_mode_at_once(device: Device) -> bool:
    """True if MIG mode takes effect without a reset: from Hopper on.

    Source: MIG user guide, "Enable MIG".
    """
    return device.compute_capability >= _HOPPER


class MigMode(Mode):
    """Keeps a ledger of the limits that the hardware enforces."""

    name = MIG

    def fits(self, device: Device) -> str:
        is_cut = device.mig or device.slice_of is not None
        return "" if is_cut else "it is not cut by MIG"

    def create(
        self, directory: Path, placement: Placement, *, share: ShareId, name: str, devices: Path
    ) -> None:
        """Create the ledger. Without a seat the shim takes no turns."""
        del devices  # without turns
        # A slice's memory never lives on the host.
        request = replace(placement.request, may_oversubscribe=False)
        create_ledger(directory, replace(placement, request=request), share=share, name=name)

    def reconcile(self, directory: Path) -> ledger.Ledger:
        return SoftMode().reconcile(directory)

# SPDX-License-Identifier: Apache-2.0
"""The mode `mig`: a share of one MIG device, which the hardware keeps apart from all others.

Memory, multiprocessors and faults are the slice's, whatever a program does. The shim is loaded all
the same, for what the hardware does not do: the share's programs see this device and no other, by
CUDA and NVML, and `allot ps` knows what each of them uses. Its limit is all of the slice, also
where less was asked for, because nobody else could have the rest; and there are no turns, because
nobody else runs there. Making and removing the slice is `shares.slicing`'s affair: it takes
the driver, and as long as that takes.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from allotment import ledger
from allotment.model.devices import Device
from allotment.model.placements import Placement
from allotment.model.requests import MIG
from allotment.model.shares import ShareId
from allotment.modes.soft import SoftMode

__all__ = ["MigMode", "takes_mode_at_once"]

_HOPPER: Final = (9, 0)


def takes_mode_at_once(device: Device) -> bool:
    """Tell whether MIG mode is in force as soon as it is set: from Hopper on.

    Earlier GPUs take it with a reset (MIG user guide, "Enable MIG").
    """
    return device.compute_capability >= _HOPPER


class MigMode:
    """Keep a ledger of what the hardware enforces."""

    name = MIG
    remark = ""

    def fits(self, device: Device) -> str:
        """Tell a MIG device from a GPU, which has to be cut first."""
        is_cut = device.mig or device.slice_of is not None
        return "" if is_cut else "it is not cut by MIG"

    def create(
        self, directory: Path, placement: Placement, *, share: ShareId, name: str, devices: Path
    ) -> None:
        """Make the ledger. Without a seat the shim takes no turns."""
        del devices  # nobody takes turns there
        policies = tuple(
            ledger.DevicePolicy(
                uuid=placed.device.uuid,
                memory_limit=placed.memory_bytes,
                context_bytes=placed.device.context_bytes,
            )
            for placed in placement.devices
        )
        ledger.create(directory, ledger.Policy(share_id=share, share_name=name, devices=policies))

    def reconcile(self, directory: Path) -> ledger.Ledger:
        """Reclaim what dead processes left, then read."""
        return SoftMode().reconcile(directory)

    def destroy(self, share: ShareId, *, devices: Path) -> None:
        """Leave the slice to whoever settles next: it is known as the share's by its record."""

    def sweep(self, shares: Mapping[ShareId, Collection[str]], *, devices: Path) -> None:
        """Nothing of it is in the devices' folders."""

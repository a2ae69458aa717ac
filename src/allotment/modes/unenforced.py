# SPDX-License-Identifier: Apache-2.0
"""The modes in which Allotment is not in the container: `exclusive` and `timeslice`.

An exclusive share has its devices alone, and a time-sliced one has them like everyone else there:
the driver gives its processes turns, and whoever allocates first has the memory. Neither has a
ledger or a shim. That there is room for them, and that no share of another mode is on the same
device, is `placement`'s business; that they see no other device is the container's.
"""

from collections.abc import Collection, Mapping
from pathlib import Path

from allotment.model.devices import Device
from allotment.model.placements import Placement
from allotment.model.requests import EXCLUSIVE, TIMESLICE
from allotment.model.shares import ShareId

__all__ = ["ExclusiveMode", "TimesliceMode"]


class _UnenforcedMode:
    """A mode that makes nothing beside the share's record."""

    name: str
    remark: str

    def fits(self, device: Device) -> str:  # noqa: ARG002 - the Protocol's question
        """Every device serves."""
        return ""

    def create(
        self, directory: Path, placement: Placement, *, share: ShareId, name: str, devices: Path
    ) -> None:
        """Nothing is to be made: the record says all."""

    def reconcile(self, directory: Path) -> None:  # noqa: ARG002 - the Protocol's question
        """There is no ledger."""
        return

    def destroy(self, share: ShareId, *, devices: Path) -> None:
        """Nothing was made."""

    def sweep(self, shares: Mapping[ShareId, Collection[str]], *, devices: Path) -> None:
        """Nothing was made."""


class ExclusiveMode(_UnenforcedMode):
    """A device for one share alone."""

    name = EXCLUSIVE
    remark = "not enforced: exclusive"


class TimesliceMode(_UnenforcedMode):
    """A device that the driver slices among all of its shares' processes."""

    name = TIMESLICE
    remark = "time-sliced, nothing enforced"

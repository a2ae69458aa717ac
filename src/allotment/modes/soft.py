# SPDX-License-Identifier: Apache-2.0
"""The mode `soft`: a ledger that the shim keeps inside the share's processes.

Exact for every program that the shim is loaded into, and no boundary against hostile code: what
uses the GPU without the shim is found by `shares` and shown as not enforced.
"""

from pathlib import Path

from allotment import ledger
from allotment.model.devices import Device
from allotment.model.errors import LedgerError
from allotment.model.placements import Placement
from allotment.model.shares import ShareId

__all__ = ["SoftMode"]


class SoftMode:
    """Enforce by ledger and shim; needs nothing of the device or its driver."""

    name = "soft"

    def fits(self, device: Device) -> str:  # noqa: ARG002 - the Protocol's question
        """Every device serves."""
        return ""

    def create(self, directory: Path, placement: Placement, *, share: ShareId, name: str) -> None:
        """Make the ledger."""
        devices = tuple(
            ledger.DevicePolicy(
                uuid=placed.device.uuid,
                memory_limit=placed.memory_bytes,
                context_bytes=placed.device.context_bytes,
            )
            for placed in placement.devices
        )
        ledger.create(directory, ledger.Policy(share_id=share, share_name=name, devices=devices))

    def reconcile(self, directory: Path) -> ledger.Ledger:
        """Reclaim what dead processes left, then read.

        Who may not write the ledger (another user's) still reads it, dead processes' use included.
        """
        snapshot = ledger.read(directory)
        try:
            cleared = ledger.reap(directory)
        except LedgerError:
            return snapshot  # readable, so the figures are worth more than the reclaiming
        return ledger.read(directory) if cleared else snapshot

    def resize(self, directory: Path, uuid: str, memory_bytes: int, *, force: bool) -> None:
        """Set the limit; from the return on, no allocation succeeds under the old one."""
        uuids = [device.uuid for device in ledger.read(directory).policy.devices]
        if uuid not in uuids:
            raise LedgerError(
                f"{directory}: its policy does not name {uuid}",
                hint=f"end its programs and remove it: allot rm {directory.name}",
            )
        ledger.set_limit(directory, uuids.index(uuid), memory_bytes, force=force)

    def destroy(self, directory: Path) -> None:
        """Nothing is outside of the directory."""

# SPDX-License-Identifier: Apache-2.0
"""The base of all modes: a share without enforcement.

A mode has no state of its own: its files are in a share's directory and in the devices' folders.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from allotment.ledger import Ledger, SeatAccount, Terms
from allotment.ledger.leases import DeviceFiles
from allotment.model.devices import Device
from allotment.model.placements import Placement
from allotment.model.shares import ShareId


class Turns(msgspec.Struct, frozen=True):
    """A share's use of one device."""

    account: SeatAccount
    is_governed: bool
    """A share of the device requested compute: all take turns, and GPU time is measured."""
    distrusted_by: tuple[str, ...] = ()
    """Shares that go on without turns with it: its file is damaged, or it does not give way."""


class Mode:
    """One way to enforce a share. Here: none."""

    name: str
    """As in requests and records."""
    remark: str = ""
    """For people, in a mode without enforcement."""

    def fits(self, device: Device) -> str:  # noqa: ARG002 - for modes that depend on the device
        """Return why the device cannot serve in this mode; empty: it can."""
        return ""

    def create(
        self, directory: Path, placement: Placement, *, share: ShareId, name: str, devices: Path
    ) -> None:
        """Add the means of enforcement to a share's directory, which is not visible yet.

        `devices` has one folder for each device, for all its shares. Raises `DoesNotFitError` or
        `LedgerError`; then the caller removes `directory`, and nothing remains in `devices`.
        """

    def reconcile(self, directory: Path) -> Ledger | None:  # noqa: ARG002 - as above
        """Reclaim dead processes' use, and return the ledger; None in a mode without one.

        May be repeated at any time. Raises `LedgerError`.
        """
        return None

    def terms(
        self,
        directory: Path,  # noqa: ARG002 - as above
        snapshot: Ledger,  # noqa: ARG002
        files: DeviceFiles,  # noqa: ARG002
    ) -> Mapping[str, Terms]:
        """Return the compute in force on each device with turns, by UUID. Raises `LedgerError`."""
        return {}

    def turns(
        self,
        directory: Path,  # noqa: ARG002 - as above
        snapshot: Ledger,  # noqa: ARG002
        files: DeviceFiles,  # noqa: ARG002
    ) -> Mapping[str, Turns]:
        """Return the share's use of each device with turns, by UUID. Raises `LedgerError`."""
        return {}

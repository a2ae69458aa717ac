# SPDX-License-Identifier: Apache-2.0
"""What every mode can do, and what those can do besides that enforce by a ledger.

A mode has no state of its own: what it made is in a share's directory, and in the devices' folders.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from allotment.ledger import Ledger, SeatAccount, Terms
from allotment.model.devices import Device
from allotment.model.placements import Placement
from allotment.model.shares import ShareDevice, ShareId

__all__ = ["LedgerMode", "Mode", "Turns"]


@dataclass(frozen=True, slots=True)
class Turns:
    """What a share has had of one device."""

    account: SeatAccount
    is_governed: bool
    """Some share of the device asked for compute: all take turns, and GPU time is measured."""


class Mode(Protocol):
    """One way to enforce a share, or to leave it alone with its devices."""

    @property
    def name(self) -> str:
        """What requests and records call it."""
        ...

    @property
    def remark(self) -> str:
        """What is to be known of all its shares where nothing of theirs is enforced; else empty."""
        ...

    def fits(self, device: Device) -> str:
        """Return why the device cannot serve in this mode, or an empty text when it can."""
        ...

    def create(
        self, directory: Path, placement: Placement, *, share: ShareId, name: str, devices: Path
    ) -> None:
        """Fill a share's directory, which exists and is not yet visible, with what enforces it.

        `devices` is the folder of what the shares of one device have in common, one folder each.
        Raises `DoesNotFitError` or `LedgerError`; what was made in `directory` is then removed with
        it, and nothing is left in `devices`.
        """
        ...

    def reconcile(self, directory: Path) -> Ledger | None:
        """Clear what dead processes left, and return what is allowed and used.

        None in a mode without a ledger: the driver alone knows what is used. May be repeated at any
        time. Raises `LedgerError`.
        """
        ...

    def destroy(self, share: ShareId, *, devices: Path) -> None:
        """Undo what `create` did outside of the share's directory, which is out of sight by now.

        May be repeated; never fails.
        """
        ...

    def sweep(self, shares: Mapping[ShareId, Collection[str]], *, devices: Path) -> None:
        """Undo what shares left in `devices` that are not there any more; never fails.

        `shares` are those that are there, with the UUIDs of their devices.
        """
        ...


class LedgerMode(Mode, Protocol):
    """A mode that enforces by a ledger: its shares have limits and turns, and these can change."""

    def reconcile(self, directory: Path) -> Ledger:
        """As every mode's; there is always a ledger."""
        ...

    def terms(self, directory: Path, snapshot: Ledger) -> Mapping[str, Terms]:
        """Return the compute in force on each device of the share, by UUID. Raises `LedgerError`.

        A device on which it takes no turns is left out.
        """
        ...

    def turns(self, directory: Path, snapshot: Ledger) -> Mapping[str, Turns]:
        """Return what the share has had of each device, by UUID. Raises `LedgerError`."""
        ...

    def check_change(self, device: ShareDevice, *, memory_bytes: int, of_compute: bool) -> None:
        """Raise `NotInModeError` for what programs that run already cannot be given of a device.

        `device` is how it was before, `memory_bytes` the limit that is wanted, `of_compute` whether
        the compute is to be another, too.
        """
        ...

    def resize(self, directory: Path, uuid: str, memory_bytes: int, *, force: bool) -> None:
        """Change the limit of one device in force, live.

        Raises `LimitBelowUseError` when more is in use and `force` is false, or `LedgerError`.
        """
        ...

    def revise(self, directory: Path, uuid: str, terms: Terms, *, devices: Path) -> None:
        """Change the compute in force on one device, live.

        Raises `DoesNotFitError` (the guarantees would pass the device) or `LedgerError`.
        """
        ...

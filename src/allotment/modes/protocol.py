# SPDX-License-Identifier: Apache-2.0
"""What every mode can do, whatever enforces it."""

from pathlib import Path
from typing import Protocol

from allotment.ledger import Ledger
from allotment.model.devices import Device
from allotment.model.placements import Placement
from allotment.model.shares import ShareId

__all__ = ["Mode"]


class Mode(Protocol):
    """One way to enforce a share. It has no state of its own: what it made is in `directory`."""

    name: str

    def fits(self, device: Device) -> str:
        """Return why the device cannot serve in this mode, or an empty text when it can."""
        ...

    def create(self, directory: Path, placement: Placement, *, share: ShareId, name: str) -> None:
        """Fill a share's directory, which exists and is not yet visible, with what enforces it.

        Raises `LedgerError`; whatever was made is then removed with the directory.
        """
        ...

    def reconcile(self, directory: Path) -> Ledger:
        """Clear what dead processes left, and return what is allowed and used.

        May be repeated at any time. Raises `LedgerError`.
        """
        ...

    def resize(self, directory: Path, uuid: str, memory_bytes: int, *, force: bool) -> None:
        """Change the limit of one device in force, live.

        Raises `LimitBelowUseError` when more is in use and `force` is false, or `LedgerError`.
        """
        ...

    def destroy(self, directory: Path) -> None:
        """Undo what `create` did outside of the directory. May be repeated; never fails."""
        ...

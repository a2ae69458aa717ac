# SPDX-License-Identifier: Apache-2.0
"""The mode itself: what a share has in its directory. Its daemon is `supervision`'s affair.

Memory is held by the share's ledger and the shim, as in mode `soft`, so that a limit is one for all
processes of the share; the driver's own, which is for each process, is a second line. Compute is
the driver's: a part of the multiprocessors for each process, and no turns.
"""

from collections.abc import Collection, Mapping
from pathlib import Path

from allotment import ledger
from allotment.model.devices import Device
from allotment.model.errors import NotInModeError
from allotment.model.formats import format_bytes
from allotment.model.placements import Placement
from allotment.model.requests import MPS
from allotment.model.shares import ShareDevice, ShareId
from allotment.modes.mps.settings import check_percentage
from allotment.modes.soft import SoftMode

__all__ = ["MpsMode"]

_VOLTA = (7, 0)


class MpsMode(SoftMode):
    """Enforce memory by ledger and shim, and leave compute to MPS."""

    name = MPS

    def fits(self, device: Device) -> str:
        """Tell what the device lacks: clients have address spaces of their own since Volta."""
        if device.compute_capability < _VOLTA:
            return "MPS shares no GPU before Volta safely"
        if device.mig:
            return "it is cut by MIG: name one of its MIG devices"
        return ""

    def create(
        self, directory: Path, placement: Placement, *, share: ShareId, name: str, devices: Path
    ) -> None:
        """Make the ledger. Without a seat the shim takes no turns.

        Raises `NotInModeError` for what MPS cannot give: parts of several GPUs at once, or less
        than a percent.
        """
        del devices  # nobody takes turns there
        if len(placement.devices) != 1:
            raise NotInModeError(
                f"a share of mode {MPS} is of one GPU, not of {len(placement.devices)}: each has a"
                " control daemon of its own, and a program finds one of them",
                hint="ask for one GPU, or for --mode soft",
            )
        (placed,) = placement.devices
        check_percentage(placed.compute or placement.request.compute)
        policy = ledger.DevicePolicy(
            uuid=placed.device.uuid,
            memory_limit=placed.memory_bytes,
            context_bytes=placed.device.context_bytes,
            is_oversubscribed=placement.request.may_oversubscribe,
        )
        ledger.create(directory, ledger.Policy(share_id=share, share_name=name, devices=(policy,)))

    def check_change(self, device: ShareDevice, *, memory_bytes: int, of_compute: bool) -> None:
        """Refuse what the driver does not change for programs that run.

        Its limit of memory for each process is in the environment that they began with, and would
        refuse what the ledger grants beyond it. Memory that may lie on the host has none. A process
        has the part of the multiprocessors that it began with.
        """
        if of_compute:
            raise NotInModeError(
                f"{device.uuid} ({device.name}): under MPS the compute of programs that run cannot"
                " be changed: the driver has given each its part when it began",
                hint="run them in a new share: allot run --mode mps --compute ...; shares of mode"
                " soft can change theirs",
            )
        most = device.memory_bytes if device.begun_bytes is None else device.begun_bytes
        if memory_bytes > most and not device.is_oversubscribed:
            raise NotInModeError(
                f"{device.uuid} ({device.name}): need {format_bytes(memory_bytes)}, have"
                f" {format_bytes(most)}: under MPS the memory of programs that run cannot be made"
                " more than they began with, because the driver holds each of them to that",
                hint="run them in a new share: allot run --mode mps --memory ...",
            )

    def destroy(self, share: ShareId, *, devices: Path) -> None:
        """Nothing was made outside of the share's directory."""

    def sweep(self, shares: Mapping[ShareId, Collection[str]], *, devices: Path) -> None:
        """Nothing was made outside of the shares' directories."""

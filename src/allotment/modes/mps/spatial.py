# SPDX-License-Identifier: Apache-2.0
"""The mode itself: what a share has in its directory. Its daemon is `supervision`'s affair.

Memory is held by the share's ledger and the shim, as in mode `soft`, so that a limit is one for all
processes of the share; the driver's own, which is for each process, is a second line. Compute is
the driver's: a part of the multiprocessors for each process, and no turns.
"""

from collections.abc import Collection, Mapping
from pathlib import Path

from allotment import ledger
from allotment.ledger import Terms
from allotment.model.devices import Device
from allotment.model.errors import LedgerError, UsageError
from allotment.model.formats import format_bytes
from allotment.model.placements import Placement
from allotment.model.requests import MPS
from allotment.model.shares import ShareId
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

        Raises `UsageError` for what MPS cannot give: parts of several GPUs at once, or less than a
        percent.
        """
        del devices  # nobody takes turns there
        if len(placement.devices) != 1:
            raise UsageError(
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

    def resize(self, directory: Path, uuid: str, memory_bytes: int, *, force: bool) -> None:
        """Set the limit; raise `LedgerError` for more than there is.

        The driver's own limit of each process is in the environment that the share's programs
        have, and would refuse what the ledger grants. Memory that may lie on the host has none.
        """
        policy = ledger.read(directory).policy
        (device,) = policy.devices
        if memory_bytes > device.memory_limit and not device.is_oversubscribed:
            raise LedgerError(
                f"share {policy.share_name}: under MPS the memory of programs that run cannot be"
                f" made more: the driver holds each of them to the"
                f" {format_bytes(device.memory_limit)} that they have",
                hint="run them in a new share: allot run --mode mps --memory ...",
            )
        super().resize(directory, uuid, memory_bytes, force=force)

    def revise(self, directory: Path, uuid: str, terms: Terms, *, devices: Path) -> None:
        """Refuse: a process has the part that it began with, and the driver changes it no more."""
        del uuid, terms, devices
        raise LedgerError(
            f"{directory}: under MPS the compute of programs that run cannot be changed",
            hint="run them in a new share: allot run --mode mps --compute ...",
        )

    def destroy(self, share: ShareId, *, devices: Path) -> None:
        """Nothing was made outside of the share's directory."""

    def sweep(self, shares: Mapping[ShareId, Collection[str]], *, devices: Path) -> None:
        """Nothing was made outside of the shares' directories."""

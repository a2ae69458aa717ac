# SPDX-License-Identifier: Apache-2.0
"""The mode `soft`: a ledger that the shim keeps inside the share's processes.

Exact for every program that the shim is loaded into, and no boundary against hostile code: what
uses the GPU without the shim is found by `shares` and shown as not enforced.
"""

from collections.abc import Collection, Mapping
from pathlib import Path

from allotment import ledger
from allotment.ledger.leases import (
    SeatAccount,
    Terms,
    change,
    is_governed,
    read_leases,
    read_terms,
)
from allotment.model.devices import Device
from allotment.model.errors import LedgerError
from allotment.model.formats import format_bytes
from allotment.model.placements import Placement
from allotment.model.requests import SOFT
from allotment.model.shares import ShareDevice, ShareId
from allotment.modes import turns
from allotment.modes.damages import put_down
from allotment.modes.protocol import Turns

__all__ = ["SoftMode"]


class SoftMode:
    """Enforce by ledger and shim; needs nothing of the device or its driver."""

    name = SOFT
    remark = ""

    def fits(self, device: Device) -> str:  # noqa: ARG002 - the Protocol's question
        """Every device serves."""
        return ""

    def create(
        self, directory: Path, placement: Placement, *, share: ShareId, name: str, devices: Path
    ) -> None:
        """Make the ledger, with a seat on each device and links to what turns are taken by."""
        request = placement.request
        try:
            policies = []
            for index, placed in enumerate(placement.devices):
                compute = placed.compute or request.compute
                terms = Terms(compute, is_oversubscribed=request.may_oversubscribe)
                seat = turns.sit(devices, placed.device.uuid, share, terms)
                turns.link(devices, placed.device.uuid, directory, index)
                policies.append(
                    ledger.DevicePolicy(
                        uuid=placed.device.uuid,
                        memory_limit=placed.memory_bytes,
                        context_bytes=placed.device.context_bytes,
                        seat=seat,
                        is_oversubscribed=request.may_oversubscribe,
                    )
                )
            ledger.create(
                directory,
                ledger.Policy(share_id=share, share_name=name, devices=tuple(policies)),
            )
        except BaseException:
            turns.leave(devices, share)
            raise

    def reconcile(self, directory: Path) -> ledger.Ledger:
        """Reclaim what dead processes left, then read.

        Who may not write the ledger (another user's) still reads it, dead processes' use included.
        """
        grown = ledger.cut_usage(directory)
        if grown:
            put_down(
                f"share {directory.name}: its programs made its file `usage` longer by"
                f" {format_bytes(grown)}, which were taken from it again",
                [directory.name],
            )
        snapshot = ledger.read(directory)
        try:
            cleared = ledger.reap(directory)
        except LedgerError:
            return snapshot  # readable, so the figures are worth more than the reclaiming
        return ledger.read(directory) if cleared else snapshot

    def terms(self, directory: Path, snapshot: ledger.Ledger) -> dict[str, Terms]:
        """Read what is in force from the contracts that the share has links to."""
        found = {}
        for index, device in enumerate(snapshot.policy.devices):
            if device.seat is not None:
                terms = read_terms(directory / turns.link_names(index)[0], device.seat)
                if terms is not None:
                    found[device.uuid] = terms
        return found

    def turns(self, directory: Path, snapshot: ledger.Ledger) -> dict[str, Turns]:
        """Read what the share has had of each device."""
        found = {}
        for index, device in enumerate(snapshot.policy.devices):
            if device.seat is not None:
                contract, leases = (directory / name for name in turns.link_names(index))
                account = read_leases(leases).accounts.get(device.seat.serial, SeatAccount())
                found[device.uuid] = Turns(account, is_governed(contract))
        return found

    def check_change(self, device: ShareDevice, *, memory_bytes: int, of_compute: bool) -> None:
        """Programs follow whatever is changed."""

    def resize(self, directory: Path, uuid: str, memory_bytes: int, *, force: bool) -> None:
        """Set the limit; from the return on, no allocation succeeds under the old one."""
        index, _ = _device(directory, uuid)
        ledger.set_limit(directory, index, memory_bytes, force=force)

    def revise(self, directory: Path, uuid: str, terms: Terms, *, devices: Path) -> None:
        """Change the contract; in force when this returns."""
        _, device = _device(directory, uuid)
        if device.seat is None:
            raise LedgerError(
                f"{directory}: this share takes no turns on {uuid}",
                hint="run its programs in a new share: allot run --compute ...",
            )
        change(devices / uuid, device.seat, terms)

    def destroy(self, share: ShareId, *, devices: Path) -> None:
        """Free the share's seats."""
        turns.leave(devices, share)

    def sweep(self, shares: Mapping[ShareId, Collection[str]], *, devices: Path) -> None:
        """Free the seats of shares that are not there any more."""
        turns.sweep(devices, shares)


def _device(directory: Path, uuid: str) -> tuple[int, ledger.DevicePolicy]:
    for index, device in enumerate(ledger.read(directory).policy.devices):
        if device.uuid == uuid:
            return index, device
    raise LedgerError(
        f"{directory}: its policy does not name {uuid}",
        hint=f"end its programs and remove it: allot rm {directory.name}",
    )

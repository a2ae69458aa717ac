# SPDX-License-Identifier: Apache-2.0
"""The mode `soft`: a ledger that the shim keeps inside the share's processes.

Exact for every program that loads the shim, but no boundary against hostile code: `shares` finds
programs without the shim and shows them as not enforced.
"""

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from allotment import ledger
from allotment.ledger.leases import (
    DeviceFiles,
    Seat,
    SeatAccount,
    Terms,
    change,
)
from allotment.model.errors import LedgerError
from allotment.model.formats import format_bytes
from allotment.model.modes import SOFT
from allotment.model.placements import Placement
from allotment.model.shares import ShareDevice, ShareId
from allotment.modes import turns
from allotment.modes.base import Mode, Turns
from allotment.modes.turns import record_tampering


class SoftMode(Mode):
    """Enforces by ledger and shim, on every device. Its limits and turns can change."""

    name = SOFT

    def create(
        self, directory: Path, placement: Placement, *, share: ShareId, name: str, devices: Path
    ) -> None:
        """Take a seat on each device, link the files for turns, and create the ledger."""
        request = placement.request
        seats = []
        try:
            for index, placed in enumerate(placement.devices):
                terms = Terms(
                    placed.compute or request.compute, is_oversubscribed=request.may_oversubscribe
                )
                uuid = placed.device.uuid
                seats.append(turns.take_seat(devices, uuid, share, terms))
                turns.link_files(devices, uuid, directory, index, seats[-1])
            create_ledger(directory, placement, share=share, name=name, seats=seats)
        except BaseException:
            turns.free_seats(devices, share)
            raise

    def reconcile(self, directory: Path) -> ledger.Ledger:
        """Reclaim dead processes' use, then read.

        A user without write access reads the ledger with dead processes' use included.
        """
        grown = ledger.cut_usage(directory)
        if grown:
            record_tampering(
                f"share {directory.name}: its programs made its file `usage` longer by"
                f" {format_bytes(grown)}, which were removed",
                [directory.name],
            )
        snapshot = ledger.read(directory)
        if snapshot.has_dead:
            try:
                ledger.reap(directory)
            except LedgerError:
                return snapshot  # readable: the figures matter more than the reclaiming
        is_whole = all(
            device.used == sum(process.used[index] for process in snapshot.processes)
            for index, device in enumerate(snapshot.devices)
        )
        return snapshot if is_whole else ledger.read(directory)

    def terms(
        self, directory: Path, snapshot: ledger.Ledger, files: DeviceFiles
    ) -> dict[str, Terms]:
        terms_by_uuid = {}
        for index, device in enumerate(snapshot.policy.devices):
            if device.seat is not None:
                contract = f"{directory}/{turns.link_names(index).contract}"
                terms = files.terms(contract, device.seat)
                if terms is not None:
                    terms_by_uuid[device.uuid] = terms
        return terms_by_uuid

    def turns(
        self, directory: Path, snapshot: ledger.Ledger, files: DeviceFiles
    ) -> dict[str, Turns]:
        turns_by_uuid = {}
        for index, device in enumerate(snapshot.policy.devices):
            if device.seat is not None:
                names = turns.link_names(index)
                contract = f"{directory}/{names.contract}"
                leases = files.leases(contract, f"{directory}/{names.seats}")
                turns_by_uuid[device.uuid] = Turns(
                    leases.accounts.get(device.seat.serial, SeatAccount()),
                    leases.is_governed,
                    leases.distrusted.get(device.seat.serial, ()),
                )
        return turns_by_uuid

    def check_change(self, device: ShareDevice, *, memory_bytes: int, of_compute: bool) -> None:
        """Raise `NotInModeError` if running programs cannot follow a change of a device's part.

        `device` is the part before, `memory_bytes` the new limit.
        """

    def resize(self, directory: Path, uuid: str, memory_bytes: int, *, force: bool) -> int:
        """Set the limit; return the use. From then on no allocation succeeds under the old limit.

        Raises `LimitBelowUseError` if more is in use and `force` is false, or `LedgerError`.
        """
        index, _ = _device(directory, uuid)
        return ledger.set_limit(directory, index, memory_bytes, force=force)

    def revise(self, directory: Path, uuid: str, terms: Terms, *, devices: Path) -> None:
        """Change the contract; in force on return.

        Raises `DoesNotFitError` (the guarantees would exceed the device) or `LedgerError`.
        """
        _, device = _device(directory, uuid)
        if device.seat is None:
            raise LedgerError(
                f"{directory}: this share takes no turns on {uuid}",
                hint="run its programs in a new share: allot run --compute ...",
            )
        change(devices / uuid, device.seat, terms)


def create_ledger(
    directory: Path,
    placement: Placement,
    *,
    share: ShareId,
    name: str,
    seats: Sequence[Seat] = (),
    is_of_mps: bool = False,
) -> None:
    """Create the ledger of a share. Without seats its programs take no turns."""
    policies = tuple(
        ledger.DevicePolicy(
            uuid=placed.device.uuid,
            memory_limit=placed.memory_bytes,
            context_bytes=placed.device.context_bytes,
            seat=seat,
            is_oversubscribed=placement.request.may_oversubscribe,
            is_of_mps=is_of_mps,
        )
        for placed, seat in zip_longest(placement.devices, seats)
    )
    ledger.create(directory, ledger.LedgerPolicy(share_id=share, share_name=name, devices=policies))


def _device(directory: Path, uuid: str) -> tuple[int, ledger.DevicePolicy]:
    for index, device in enumerate(ledger.read(directory).policy.devices):
        if device.uuid == uuid:
            return index, device
    raise LedgerError(
        f"{directory}: its policy does not name {uuid}",
        hint=f"end its programs and remove it: allot rm {directory.name}",
    )

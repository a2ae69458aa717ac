# SPDX-License-Identifier: Apache-2.0
"""The booked amounts of each device, from which placements are made.

`booked` adds them up; shares of one pod by phase, because they are not all in use at once.
`Bookings` is the agent's cache: it reads a share again only if its record has changed. The caller
holds the state folder's lock, so the result is exact against every other writer.
"""

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from allotment.ledger.leases import CONTRACT, TakenSeat, Terms, change, read_contract
from allotment.model.accounting import (
    DeviceAmount,
    beside,
    holders,
    most_of,
    overlap,
    phases,
)
from allotment.model.devices import Device
from allotment.model.errors import StateError
from allotment.model.modes import mode_of_all
from allotment.model.placements import DeviceState
from allotment.model.pods import Owner, PodUid
from allotment.model.shares import Share, ShareId
from allotment.model.structs import replace
from allotment.modes import traits_of
from allotment.placement.booking import Promised, budget_left
from allotment.shares.failpoints import failpoint
from allotment.shares.folders import StateFolder, explained
from allotment.shares.record import RECORD, LoadedShare, read_record, read_share


class Booking(msgspec.Struct):
    """The booked amounts of one device: bytes, and basis points of its time."""

    memory: int = 0
    oversubscribed: int = 0
    """The part of `memory` that may live on the host."""
    guaranteed: int = 0
    shares: int = 0
    mode: str = ""
    """The mode of these shares."""
    sharers: list[str] = msgspec.field(default_factory=list)
    """Names of these shares."""
    reusable: int = 0
    """Bytes booked in addition for the viewer's pod, by containers not in use with the viewer."""


def allotted(shares: Iterable[LoadedShare]) -> dict[str, int]:
    """Return the booked memory of each device, by UUID, in bytes."""
    return {uuid: booking.memory for uuid, booking in booked(shares).items()}


def booked(shares: Iterable[LoadedShare], *, seen_by: Owner | None = None) -> dict[str, Booking]:
    """Return the bookings of each device, by UUID.

    `seen_by` is a container that will get one more share: of its own pod only the shares in use
    together with it count. Without it a pod counts with the most that is in use at once.
    """
    devices: dict[str, dict[PodUid | ShareId, list[tuple[LoadedShare, DeviceAmount]]]] = {}
    for loaded in shares:
        pod = loaded.owner.uid if loaded.owner else loaded.id
        for uuid, part in loaded.parts.items():
            devices.setdefault(uuid, {}).setdefault(pod, []).append((loaded, part))
    return {uuid: _booking(pods.values(), seen_by) for uuid, pods in devices.items()}


def _booking(
    pods: Iterable[Sequence[tuple[LoadedShare, DeviceAmount]]], seen_by: Owner | None
) -> Booking:
    """Add up the shares of one device, pod by pod."""
    total = DeviceAmount()
    reusable = 0
    counted: list[LoadedShare] = []
    for pod in pods:
        first, part = pod[0]
        own = seen_by if seen_by and first.owner and first.owner.uid == seen_by.uid else None
        if len(pod) == 1 and own is None:
            total += part
            counted.append(first)
            continue
        members = [(part, loaded.owner) for loaded, part in pod if loaded.owner]
        whole = most_of(phases(members), DeviceAmount())
        if own is None:
            total += whole
            counted += [loaded for loaded, _ in pod]
            continue
        at_once = most_of(beside(own, members), DeviceAmount())
        total += at_once
        counted += [loaded for loaded, _ in pod if loaded.owner and overlap(own, loaded.owner)]
        reusable = max(0, whole.memory - at_once.memory)
    return Booking(
        memory=total.memory,
        oversubscribed=total.oversubscribed,
        guaranteed=total.guarantee,
        shares=len(counted),
        mode=_mode_of(counted),
        sharers=[loaded.name for loaded in counted],
        reusable=reusable,
    )


def _mode_of(shares: Sequence[LoadedShare]) -> str:
    """Return the one mode of a device's shares, even if they differ after a fault."""
    return mode_of_all(loaded.mode for loaded in shares)


def states_of(
    devices: Iterable[Device], bookings: Mapping[str, Booking], host_budget: int | None
) -> list[DeviceState]:
    """Return the state of each device with its bookings.

    `host_budget` is the host memory that may stand for devices' memory on this machine, in bytes;
    None: the default. Its promised part counts over all devices.
    """
    booked_devices = [(device, bookings.get(device.uuid) or Booking()) for device in devices]
    if host_budget is None:
        host_budget = default_host_budget([device for device, _ in booked_devices])
    budget_bytes = budget_left(
        host_budget,
        (
            Promised(
                device.allottable_bytes,
                booking.memory - booking.oversubscribed,
                booking.oversubscribed,
            )
            for device, booking in booked_devices
        ),
    )
    return [
        DeviceState(
            device,
            allotted_bytes=booking.memory,
            oversubscribed_bytes=booking.oversubscribed,
            host_budget_bytes=max(0, budget_bytes),
            guaranteed=booking.guaranteed,
            shares=booking.shares,
            mode=booking.mode,
            sharers=tuple(booking.sharers),
            reusable_bytes=booking.reusable,
        )
        for device, booking in booked_devices
    ]


def default_host_budget(devices: Collection[Device]) -> int:
    """Return the default host memory that may stand for these devices' memory, in bytes.

    Half of the host's total memory, not of its free memory, so that use does not shrink the budget.
    For simulated GPUs the host counts as twice their memory.
    """
    if all(device.simulated for device in devices):
        return sum(device.memory_bytes for device in devices)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


_Stamp = tuple[int, int, int, int]


class Bookings:
    """A cache of a state folder's shares, without their ledgers. For one thread at a time.

    A record is replaced as a whole, and has at least the amounts in force: `resize` writes it first
    when growing and last when shrinking. So an unchanged file is not read again, and a ledger only
    if the record is unreadable.
    """

    def __init__(self, folder: StateFolder) -> None:
        self._folder = folder
        self._shares = str(folder.shares)
        self._cached: dict[str, tuple[_Stamp, LoadedShare]] = {}

    def read(self) -> list[LoadedShare]:
        """Return every share, oldest first. The caller holds the folder's lock."""
        try:
            names = [
                name
                for name in os.listdir(self._folder.shares)  # noqa: PTH208 - names are all
                if not name.startswith(".")
            ]
        except OSError as error:
            raise explained(error, self._folder.shares, "list the shares") from error
        cached = self._cached
        self._cached = {}
        shares = []
        for name in names:
            loaded = self._read_if_changed(name, cached.get(name))
            if loaded is not None:
                shares.append(loaded)
        shares.sort(key=LoadedShare.age_key)
        return shares

    def add(self, share: Share, directory: Path) -> None:
        """Keep a share whose record the caller has just written."""
        stamp = _stamp(f"{directory}/{RECORD}")
        if stamp is not None:
            self._cached[share.id] = (stamp, LoadedShare(share.id, directory, share, None))

    def get(self, share: ShareId) -> LoadedShare | None:
        """Return one share; None if it does not exist."""
        loaded = self._read_if_changed(share, self._cached.get(share))
        if loaded is None:
            self._cached.pop(share, None)
        return loaded

    def _read_if_changed(
        self, name: str, before: tuple[_Stamp, LoadedShare] | None
    ) -> LoadedShare | None:
        stamp = _stamp(f"{self._shares}/{name}/{RECORD}")
        if before is not None and stamp == before[0]:
            self._cached[name] = before
            return before[1]
        directory = self._folder.share(ShareId(name))
        if stamp is not None:
            try:
                loaded = LoadedShare(ShareId(name), directory, read_record(directory), None)
            except StateError:
                return read_share(directory)  # its ledger has the booked amounts
            except FileNotFoundError:
                return None
            self._cached[name] = (stamp, loaded)
            return loaded
        return read_share(directory) if directory.is_dir() else None


def _stamp(path: str) -> _Stamp | None:
    """Return a mark of a file's version; None if it does not exist."""
    try:
        status = os.stat(path)  # noqa: PTH116 - one for each share at each start
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size


def apply_guarantees(
    folder: StateFolder,
    owner: Owner,
    shares: Iterable[LoadedShare],
    *,
    devices: Collection[str] = (),
) -> None:
    """Apply the guarantees of a pod's shares for the start of one of its containers.

    `shares` are all shares; `devices` those that this container will share. The caller holds the
    folder's lock. Raises `LedgerError` or `DoesNotFitError`.
    """
    siblings = [
        loaded
        for loaded in shares
        if loaded.owner and loaded.owner.uid == owner.uid and traits_of(loaded.mode).takes_turns
    ]
    guarantees: dict[str, dict[str, int]] = {}
    for sibling in siblings:
        for device in sibling.devices():
            if device.compute.guarantee:
                guarantees.setdefault(device.uuid, {})[sibling.id] = device.compute.guarantee
    for uuid, promises in sorted(guarantees.items()):
        if len(promises) > 1 or uuid in devices:
            sharing = [sibling for sibling in siblings if sibling.id in promises]
            _apply_on_device(folder, uuid, owner, sharing, promises)


def _apply_on_device(
    folder: StateFolder,
    uuid: str,
    owner: Owner,
    siblings: Sequence[LoadedShare],
    promises: Mapping[str, int],
) -> None:
    contract = read_contract(folder.devices / uuid / CONTRACT)
    seats = {seat.share_id: seat for seat in contract.seats if seat.share_id in promises}
    before = [id_ for id_ in promises if id_ in seats and seats[id_].terms.compute.guarantee]
    members = [(sibling.id, sibling.owner) for sibling in siblings if sibling.owner]
    after = holders(owner, members, before)
    # Reductions first: so the sum never exceeds the whole device.
    for is_in_force in (False, True):
        for share, seat in seats.items():
            if (share in after) is is_in_force:
                _promise(folder, uuid, seat, promises[share] if is_in_force else 0)


def _promise(folder: StateFolder, uuid: str, seat: TakenSeat, guarantee: int) -> None:
    terms: Terms = seat.terms
    if terms.compute.guarantee != guarantee:
        compute = replace(terms.compute, guarantee=guarantee)
        change(folder.devices / uuid, seat.seat, replace(terms, compute=compute))
        failpoint("settle.changed")

# SPDX-License-Identifier: Apache-2.0
"""What of each device is given to shares: the sums that a placement is made from.

`booked` adds up; shares of one pod by phase, because they are never all in use at once. `Bookings`
keeps what was read of each share, and reads again only those whose record has changed: the agent
has one, and a start with sixty shares on the node reads none of them. The caller holds the state
folder's lock meanwhile, so what `Bookings` returns is exact against every other writer.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from allotment.model.devices import Device
from allotment.model.errors import StateError
from allotment.model.phases import Member, beside, overlap, phases
from allotment.model.placements import DeviceState
from allotment.model.pods import Owner, PodUid
from allotment.model.requests import SOFT, TIMESLICE
from allotment.model.shares import ShareId
from allotment.placement.host_memory import Promised, budget_left, default_budget
from allotment.shares.folders import StateFolder, explained
from allotment.shares.found import Found, read_share
from allotment.shares.records import RECORD, read_record

__all__ = ["Booking", "Bookings", "allotted", "booked", "default_host_budget", "states_of"]


@dataclass(slots=True)
class Booking:
    """What of one device is given to shares: bytes, and basis points of its time."""

    memory: int = 0
    oversubscribed: int = 0
    """Of `memory`, what may live on the host."""
    guaranteed: int = 0
    shares: int = 0
    mode: str = ""
    """How they are enforced."""
    sharers: list[str] = field(default_factory=list)
    """Their names."""
    reusable: int = 0
    """What more is booked for the viewer's own pod, for containers that are not in use with it."""


class _Part(NamedTuple):
    """What one share has of one device."""

    fixed: int = 0
    oversubscribed: int = 0
    guaranteed: int = 0

    @property
    def memory(self) -> int:
        return self.fixed + self.oversubscribed

    def plus(self, other: "_Part") -> "_Part":
        return _Part(
            self.fixed + other.fixed,
            self.oversubscribed + other.oversubscribed,
            self.guaranteed + other.guaranteed,
        )

    def most(self, other: "_Part") -> "_Part":
        return _Part(
            max(self.fixed, other.fixed),
            max(self.oversubscribed, other.oversubscribed),
            max(self.guaranteed, other.guaranteed),
        )


def allotted(shares: Iterable[Found]) -> dict[str, int]:
    """Return how much memory of each device is booked, by UUID, in bytes."""
    return {uuid: booking.memory for uuid, booking in booked(shares).items()}


def booked(shares: Iterable[Found], *, seen_by: Owner | None = None) -> dict[str, Booking]:
    """Return what of each device is booked, by UUID.

    `seen_by` is a container that is to have one more share: of its own pod only those shares count
    that are in use at once with it. Without it a pod's shares are booked as the most that is in use
    at once.
    """
    devices: dict[str, dict[PodUid | ShareId, list[tuple[Found, _Part]]]] = {}
    for found in shares:
        pod = found.owner.uid if found.owner else found.id
        for uuid, part in _parts(found).items():
            devices.setdefault(uuid, {}).setdefault(pod, []).append((found, part))
    return {uuid: _booking(pods.values(), seen_by) for uuid, pods in devices.items()}


def _booking(pods: Iterable[Sequence[tuple[Found, _Part]]], seen_by: Owner | None) -> Booking:
    """Add up what the shares of one device have, pod by pod."""
    total = _Part()
    reusable = 0
    counted: list[Found] = []
    for pod in pods:
        first, part = pod[0]
        is_own = seen_by is not None and first.owner is not None and first.owner.uid == seen_by.uid
        if len(pod) == 1 and not is_own:
            total = total.plus(part)
            counted.append(first)
            continue
        here = {found.id: part for found, part in pod}
        group = [found for found, _ in pod]
        sets, those = _sets(group, seen_by)
        most = _most(here, sets)
        total = total.plus(most)
        counted += those
        if len(those) < len(group):
            booked_for_pod = _most(here, _sets(group, None)[0])
            reusable = max(0, booked_for_pod.memory - most.memory)
    return Booking(
        memory=total.memory,
        oversubscribed=total.oversubscribed,
        guaranteed=total.guaranteed,
        shares=len(counted),
        mode=_mode_of(counted),
        sharers=[each.name for each in counted],
        reusable=reusable,
    )


def _sets(
    group: Sequence[Found], seen_by: Owner | None
) -> tuple[Iterable[Sequence[ShareId]], Sequence[Found]]:
    """Return which shares of one pod are in use at once, and those that count for the viewer."""
    owners = [(each.id, each.owner) for each in group if each.owner]
    members: list[Member[ShareId]] = [*owners]
    if not owners:
        return [tuple(each.id for each in group)], group
    if seen_by is None or seen_by.uid != owners[0][1].uid:
        if len(members) == 1:
            return [(members[0][0],)], group
        return phases(members), group
    counted = [each for each in group if each.owner and overlap(seen_by, each.owner)]
    return beside(seen_by, members), counted


def _most(parts: Mapping[ShareId, _Part], sets: Iterable[Sequence[ShareId]]) -> _Part:
    most = _Part()
    for together in sets:
        total = _Part()
        for each in together:
            total = total.plus(parts[each])
        most = most.most(total)
    return most


def _parts(found: Found) -> dict[str, _Part]:
    """Return what a share has of each device."""
    if found.mode == TIMESLICE:
        return {uuid: _Part() for uuid in found.limits()}  # promised to nobody
    guarantees = found.guarantees()
    oversubscribed = {each.uuid for each in found.devices() if each.is_oversubscribed}
    return {
        uuid: _Part(
            fixed=0 if uuid in oversubscribed else limit,
            oversubscribed=limit if uuid in oversubscribed else 0,
            guaranteed=guarantees.get(uuid, 0),
        )
        for uuid, limit in found.booked_memory().items()
    }


def _mode_of(shares: Sequence[Found]) -> str:
    """Return the mode of the shares of a device: there is one, whatever went wrong."""
    modes = {each.mode for each in shares}
    others = modes - {SOFT}
    return min(others) if others else next(iter(modes), "")


def states_of(
    devices: Iterable[Device], bookings: Mapping[str, Booking], host_budget: int | None
) -> list[DeviceState]:
    """Return what is left of each device, beside what is booked.

    `host_budget` is how much host memory may stand for devices' memory on this machine, in bytes;
    None: its default. What is promised of it already counts over all devices.
    """
    known = [(device, bookings.get(device.uuid) or Booking()) for device in devices]
    left = budget_left(
        default_host_budget(device for device, _ in known) if host_budget is None else host_budget,
        (
            Promised(device.allottable_bytes, one.memory - one.oversubscribed, one.oversubscribed)
            for device, one in known
        ),
    )
    return [
        DeviceState(
            device,
            allotted_bytes=one.memory,
            oversubscribed_bytes=one.oversubscribed,
            host_budget_bytes=max(0, left),
            guaranteed=one.guaranteed,
            shares=one.shares,
            mode=one.mode,
            sharers=tuple(one.sharers),
            reusable_bytes=one.reusable,
        )
        for device, one in known
    ]


def default_host_budget(devices: Iterable[Device]) -> int:
    """Return how much host memory may stand for these devices' memory on this machine, in bytes."""
    known = list(devices)
    return default_budget(
        host_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        simulated_bytes=[device.memory_bytes for device in known]
        if all(device.simulated for device in known)
        else None,
    )


_Stamp = tuple[int, int, int, int]


class Bookings:
    """The shares of a state folder as far as they are booked, without their ledgers.

    A record is replaced as a whole, and says at least as much as is in force: `resize` writes what
    grows first and what shrinks last. So a record that is the file that it was need not be read
    again, and a ledger only where the record cannot be. For one thread at a time.
    """

    def __init__(self, folder: StateFolder) -> None:
        """Know nothing yet."""
        self._folder = folder
        self._shares = str(folder.shares)
        self._known: dict[str, tuple[_Stamp, Found]] = {}

    def read(self) -> list[Found]:
        """Return every share, oldest first. The caller holds the folder's lock."""
        try:
            names = [
                name
                for name in os.listdir(self._folder.shares)  # noqa: PTH208 - names are all
                if not name.startswith(".")
            ]
        except OSError as error:
            raise explained(error, self._folder.shares, "list the shares") from error
        known = self._known
        self._known = {}
        shares = []
        for name in names:
            found = self._look(name, known.get(name))
            if found is not None:
                shares.append(found)
        shares.sort(key=lambda each: (each.share.created if each.share else 0.0, each.id))
        return shares

    def get(self, share: ShareId) -> Found | None:
        """Return one share; None where it is not there."""
        found = self._look(share, self._known.get(share))
        if found is None:
            self._known.pop(share, None)
        return found

    def _look(self, name: str, before: tuple[_Stamp, Found] | None) -> Found | None:
        stamp = _stamp(f"{self._shares}/{name}/{RECORD}")
        if before is not None and stamp == before[0]:
            self._known[name] = before
            return before[1]
        directory = self._folder.share(ShareId(name))
        if stamp is not None:
            try:
                found = Found(ShareId(name), directory, read_record(directory), None)
            except StateError:
                return read_share(directory)  # its ledger says what is booked
            except FileNotFoundError:
                return None
            self._known[name] = (stamp, found)
            return found
        return read_share(directory) if directory.is_dir() else None


def _stamp(path: str) -> _Stamp | None:
    """Return what tells one version of a file from the next; None where it is not there."""
    try:
        status = os.stat(path)  # noqa: PTH116 - one for each share at each start
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size

# SPDX-License-Identifier: Apache-2.0
"""A share as it is found in the state folder, whole or not."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from allotment.ledger import Ledger, Terms
from allotment.model.errors import AllotError, LedgerError, StateError, UsageError
from allotment.model.pods import Owner
from allotment.model.shares import Share, ShareDevice, ShareId
from allotment.modes import DEFAULT_MODE, ledger_mode, mode_named
from allotment.shares.records import read_record

__all__ = ["Found", "read_share"]


@dataclass(frozen=True, slots=True)
class Found:
    """A share's directory, and what could be read of it: `problem` says what could not."""

    id: ShareId
    directory: Path
    share: Share | None
    ledger: Ledger | None
    """None also in a mode without one."""
    problem: AllotError | None = None
    terms: Mapping[str, Terms] = field(default_factory=dict)
    """The compute in force on each device, by UUID; not on those where it takes no turns."""

    @property
    def name(self) -> str:
        """The name it goes by."""
        return self.share.name if self.share else self.id

    @property
    def mode(self) -> str:
        """How it is enforced."""
        return self.share.mode if self.share else DEFAULT_MODE

    @property
    def owner(self) -> Owner | None:
        """The container that it is for, on Kubernetes."""
        return self.share.owner if self.share else None

    def limits(self) -> dict[str, int]:
        """Return what is booked on each device, by UUID, in bytes.

        The greater of record and ledger where both can be read: a resize writes one after the
        other, and the booking must never be below the limit in force.
        """
        limits: dict[str, int] = {}
        if self.share:
            limits = {device.uuid: device.memory_bytes for device in self.share.devices}
        if self.ledger:
            for device in self.ledger.policy.devices:
                limits[device.uuid] = max(limits.get(device.uuid, 0), device.memory_limit)
        return limits

    def booked_memory(self) -> dict[str, int]:
        """Return what of each device nobody else can have, by UUID, in bytes.

        Its limits; nothing while it is suspended and its memory is off its devices.
        """
        is_off = self.share is not None and self.share.is_off_device
        return {uuid: 0 if is_off else limit for uuid, limit in self.limits().items()}

    def guarantees(self) -> dict[str, int]:
        """Return what compute is promised on each device, by UUID, in basis points.

        As with limits, the greater of what is recorded and what is in force.
        """
        booked = {device.uuid: device.compute.guarantee for device in self.devices()}
        for uuid, terms in self.terms.items():
            booked[uuid] = max(booked.get(uuid, 0), terms.compute.guarantee)
        return booked

    def devices(self) -> tuple[ShareDevice, ...]:
        """Return its devices as they were booked; none where its record cannot be read."""
        return self.share.devices if self.share else ()


def read_share(directory: Path) -> Found | None:
    """Read one share; None when it went away meanwhile. Dead processes' use is reclaimed."""
    share_id = ShareId(directory.name)
    share: Share | None = None
    problem: AllotError | None = None
    try:
        share = read_record(directory)
    except FileNotFoundError:
        return None
    except StateError as error:
        problem = error
    name = share.mode if share else DEFAULT_MODE
    snapshot: Ledger | None = None
    terms: Mapping[str, Terms] = {}
    try:
        snapshot = mode_named(name).reconcile(directory)
        mode = ledger_mode(name)
        if mode is not None and snapshot is not None:
            terms = mode.terms(directory, snapshot)
    except (LedgerError, UsageError) as error:
        if not directory.is_dir():
            return None
        problem = problem or error
    return Found(share_id, directory, share, snapshot, problem, terms)

# SPDX-License-Identifier: Apache-2.0
"""A placement: the devices that serve a request, and how much of each, or why none can."""

import msgspec

from allotment.model.compute import WHOLE, Compute
from allotment.model.devices import Device
from allotment.model.mig import MigLayout, MigPlace
from allotment.model.modes import traits_of
from allotment.model.requests import Request

MAX_SHARES = 63
"""Shares of one device: the seats of its contract (native/lease.h, ALLOT_SEAT_UNBOOKED)."""


class DeviceState(msgspec.Struct, frozen=True):
    """A device and its current shares.

    `problem` is the reason why a device takes no share; empty: healthy.
    """

    device: Device
    allotted_bytes: int = 0
    """Sum of the limits of its shares."""
    problem: str = ""
    oversubscribed_bytes: int = 0
    """Of these, limits of shares whose memory may live on the host."""
    host_budget_bytes: int = 0
    """Bytes that may be promised beyond the device's memory, backed by host memory."""
    guaranteed: int = 0
    """Sum of the guarantees of its shares, in basis points of the device's time."""
    floor: int = 0
    """Basis points of its time that its shares without a compute request keep from guarantees."""
    shares: int = 0
    """Number of its shares."""
    mode: str = ""
    """Mode of its shares; empty: no shares."""
    sharers: tuple[str, ...] = ()
    """Names of its shares."""
    reusable_bytes: int = 0
    """Free memory already booked for the asking pod, by one of its ended containers."""

    most_shares: int = MAX_SHARES
    seats_kept: int = 0
    """Seats of the asking pod that are not in use at the same time; they do not count as other
    shares."""
    guaranteeable: int = WHOLE
    """Basis points of its time that can be guaranteed in total."""
    modes: frozenset[str] | None = None
    """Modes that it serves; None: the caller checks this."""
    affinities: frozenset[str] = frozenset()
    """Known tags of its shares."""
    anti_affinities: frozenset[str] = frozenset()
    exclusions: frozenset[str] = frozenset()
    """Known exclusion tags of its shares; empty text: a share without one."""
    own_modes: frozenset[str] = frozenset()
    """Modes of the asking pod's containers that are not in use at the same time."""
    own_slices: tuple[MigPlace, ...] = ()
    """Slices of these containers: the asking container may reuse each of them unchanged."""
    layout: MigLayout | None = None
    """Its MIG layout. None: no slices can be created, or shares of another mode use it."""
    mig_off: str = ""
    """Why `modes` lacks mig for a time; empty: no such reason."""

    @property
    def unguaranteed(self) -> int:
        """Time that is not guaranteed, in basis points; never negative."""
        return max(0, self.guaranteeable - self.guaranteed)

    @property
    def free_guarantee(self) -> int:
        """Time left to guarantee, in basis points; never negative."""
        return max(0, self.unguaranteed - self.floor)


class Placed(msgspec.Struct, frozen=True):
    """A part of one device."""

    device: Device
    memory_bytes: int
    compute: Compute | None = None
    """None: as in the request."""
    gpu: str = ""
    """For a MIG device, the UUID of its GPU; empty: a whole GPU."""
    profile: str = ""
    """For a MIG device, its profile name."""


class Placement(msgspec.Struct, frozen=True):
    """The decision: distinct devices, in the order in which the workload sees them."""

    request: Request
    devices: tuple[Placed, ...]


class Verdict(msgspec.Struct, frozen=True):
    """Whether one device can serve the request, with the figures.

    `reason` is empty if it can; else a phrase like `too little memory left`. Memory is in bytes,
    guarantees in basis points of the device's time.
    """

    state: DeviceState
    need_bytes: int
    have_bytes: int
    reason: str = ""
    need_guarantee: int = 0
    have_guarantee: int = WHOLE
    slices: int = 0
    """In mode `mig`: how many such slices can be created on it at the same time."""

    @property
    def fits(self) -> bool:
        return not self.reason


class Judgement(msgspec.Struct, frozen=True):
    """Each device's verdict on one request; without a placement, they are the reasons."""

    request: Request
    verdicts: tuple[Verdict, ...]
    together: str = ""
    """What the fitting devices lack together, like `on one NUMA node`."""

    @property
    def fitting(self) -> int:
        """Number of devices that could serve their part of the request."""
        return sum(verdict.fits for verdict in self.verdicts)

    @property
    def parts(self) -> int:
        """Number of devices that fit alone, or of slices on them all."""
        if not traits_of(self.request.mode).is_slice:
            return self.fitting
        return sum(verdict.slices for verdict in self.verdicts if verdict.fits)

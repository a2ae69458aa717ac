# SPDX-License-Identifier: Apache-2.0
"""A placement: which devices serve a request and how much of each, or why none can."""

from dataclasses import dataclass

from allotment.model.compute import WHOLE, Compute
from allotment.model.devices import Device
from allotment.model.mig import MigLayout, MigPlace
from allotment.model.requests import Request

__all__ = [
    "MAX_MPS_SHARES",
    "MAX_SHARES",
    "DeviceState",
    "Placed",
    "Placement",
    "Rejection",
    "Verdict",
]

MAX_SHARES = 63
"""Shares of one device: the seats of its contract (native/lease.h, ALLOT_SEAT_UNBOOKED)."""

MAX_MPS_SHARES = 48
"""Clients that each driver's control daemon takes (docs.nvidia.com/deploy/mps): one for a share.

60 since CUDA 13.1, which who places from afar does not know of; NVIDIA's plugin stops at 48, too.
"""


@dataclass(frozen=True, slots=True)
class DeviceState:
    """A device and what of it is given to shares already.

    `problem` says what is wrong with a device that does not answer, and takes no share therefore.
    """

    device: Device
    allotted_bytes: int = 0
    """The limits of all its shares together."""
    problem: str = ""
    oversubscribed_bytes: int = 0
    """Of these, the limits of shares whose memory may live on the host."""
    host_budget_bytes: int = 0
    """How much more than it holds may be promised of this device: host memory stands for that."""
    guaranteed: int = 0
    """The guarantees of all its shares together, in basis points of the device's time."""
    shares: int = 0
    """How many shares have a part of it."""
    mode: str = ""
    """How these are enforced; empty where there are none."""
    sharers: tuple[str, ...] = ()
    """Their names."""
    reusable_bytes: int = 0
    """Of what is left, what is booked for who asks already: for an ended container of its pod."""

    most_shares: int = MAX_SHARES
    seats_kept: int = 0
    """Seats of containers of the asker's own pod that are not in use with it: no company for it."""
    guaranteeable: int = WHOLE
    """Basis points of its time that can be guaranteed, in all."""
    modes: frozenset[str] | None = None
    """Those that it serves; None: whoever asks has seen to that."""
    affinities: frozenset[str] = frozenset()
    """Tags of its shares, as far as they are known."""
    anti_affinities: frozenset[str] = frozenset()
    exclusions: frozenset[str] = frozenset()
    """Exclusion tags of its shares, as far as they are known; empty text: a share without one."""
    own_modes: frozenset[str] = frozenset()
    """Modes of containers of the asker's own pod that are not in use with it."""
    own_slices: tuple[MigPlace, ...] = ()
    """Slices of these: it may have each of them as it is, in their place."""
    layout: MigLayout | None = None
    """What MIG makes of it. None: nothing is cut from it, or shares of another mode are on it."""
    mig_off: str = ""
    """Why mode mig is not among `modes` for a time; empty: there is no more to say."""

    @property
    def free_guarantee(self) -> int:
        """What is left of its time to guarantee, in basis points; never negative."""
        return max(0, self.guaranteeable - self.guaranteed)


@dataclass(frozen=True, slots=True)
class Placed:
    """A part of one device."""

    device: Device
    memory_bytes: int
    compute: Compute | None = None
    """None: as the request has it."""
    gpu: str = ""
    """Of a MIG device, the UUID of the GPU that it is cut from; empty: it is a whole GPU."""
    profile: str = ""
    """Of a MIG device, by name."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The decision: distinct devices, in the order in which the workload will see them."""

    request: Request
    devices: tuple[Placed, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether one device can serve the request, with the numbers.

    `reason` is empty when it can; else a phrase like `not selected` or `too little memory left`.
    Memory is in bytes, guarantees are in basis points of the device's time.
    """

    state: DeviceState
    need_bytes: int
    have_bytes: int
    reason: str = ""
    need_guarantee: int = 0
    have_guarantee: int = WHOLE
    slices: int = 0
    """In mode `mig`: how many such slices could be cut from it at once."""

    @property
    def fits(self) -> bool:
        """Can the device serve the request?"""
        return not self.reason


@dataclass(frozen=True, slots=True)
class Rejection:
    """No placement exists; every device's verdict says why."""

    request: Request
    verdicts: tuple[Verdict, ...]
    together: str = ""
    """What devices that fit one by one are not together, like `on one NUMA node`."""

    @property
    def fitting(self) -> int:
        """How many devices could serve their part of the request."""
        return sum(verdict.fits for verdict in self.verdicts)

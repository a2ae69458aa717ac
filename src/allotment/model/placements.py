# SPDX-License-Identifier: Apache-2.0
"""A placement: which devices serve a request and how much of each, or why none can."""

from dataclasses import dataclass

from allotment.model.devices import Device
from allotment.model.requests import Request

__all__ = ["DeviceState", "Placed", "Placement", "Rejection", "Verdict"]


@dataclass(frozen=True, slots=True)
class DeviceState:
    """A device and what of it is given to shares already, in bytes.

    `problem` says what is wrong with a device that does not answer, and takes no share therefore.
    """

    device: Device
    allotted_bytes: int = 0
    problem: str = ""

    @property
    def free_bytes(self) -> int:
        """What is left to allot; never negative."""
        return max(0, self.device.allottable_bytes - self.allotted_bytes)


@dataclass(frozen=True, slots=True)
class Placed:
    """A part of one device."""

    device: Device
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Placement:
    """The decision: distinct devices, in the order in which the workload will see them."""

    request: Request
    devices: tuple[Placed, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether one device can serve the request, with the numbers.

    `reason` is empty when it can; else a phrase like `not selected` or `too little memory left`.
    """

    state: DeviceState
    need_bytes: int
    have_bytes: int
    reason: str = ""

    @property
    def fits(self) -> bool:
        """Can the device serve the request?"""
        return not self.reason


@dataclass(frozen=True, slots=True)
class Rejection:
    """No placement exists; every device's verdict says why."""

    request: Request
    verdicts: tuple[Verdict, ...]

    @property
    def fitting(self) -> int:
        """How many devices could serve their part of the request."""
        return sum(verdict.fits for verdict in self.verdicts)

# SPDX-License-Identifier: Apache-2.0
"""What the inventory hears of a GPU, one moment each: what health is judged by."""

from dataclasses import dataclass

from allotment.devices.events import GpuEvent
from allotment.devices.watching import Vitals
from allotment.model.devices import Device

__all__ = ["Answered", "Failed", "Gone", "Sighting", "Silent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """It told what it is and how it is."""

    uuid: str
    device: Device
    vitals: Vitals


@dataclass(frozen=True, slots=True, kw_only=True)
class Silent:
    """It was asked `for_s` seconds ago, and has not answered."""

    uuid: str
    for_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """It, or NVML for it, answered with an error."""

    uuid: str
    message: str
    is_lost: bool = False
    needs_reset: bool = False
    is_driver: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """The driver does not list it any more. With `is_replaced`, another GPU is in its place."""

    uuid: str
    is_replaced: bool = False


Sighting = Answered | Silent | Failed | Gone | GpuEvent

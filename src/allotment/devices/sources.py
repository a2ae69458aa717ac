# SPDX-License-Identifier: Apache-2.0
"""What a machine has and how it is used, whoever is asked: NVML, or a simulated machine's file."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from allotment.model.devices import Device

__all__ = ["DeviceProcess", "DeviceSource", "Inventory", "LiveSource", "Problem", "Reading"]


@dataclass(frozen=True, slots=True)
class Problem:
    """A GPU that could not be asked. The others are listed all the same.

    `device` is what it would be, where that is known without its answer.
    """

    index: int
    uuid: str | None
    message: str
    device: Device | None = None


@dataclass(frozen=True, slots=True)
class Inventory:
    """The devices that answered, in NVML's order, and those that did not."""

    devices: tuple[Device, ...]
    problems: tuple[Problem, ...]
    slices: tuple[Device, ...] = ()
    """The MIG devices of `devices`, from a source that asks for them."""


@dataclass(frozen=True, slots=True)
class DeviceProcess:
    """A process that has memory of a device. `pid` is the host's; None: NVML does not say."""

    pid: int
    used_bytes: int | None
    gpu_percent: int | None = None
    """Of the last second or so, how much of it kernels of this process ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One device at one moment. None: the device does not have this figure.

    `used_bytes` is what processes have (without what the driver keeps); percentages are of the last
    second or so; power is in milliwatts.
    """

    used_bytes: int
    gpu_percent: int | None
    memory_percent: int | None
    temperature_c: int | None
    power_mw: int | None
    processes: tuple[DeviceProcess, ...]


class DeviceSource(Protocol):
    """Something that knows the devices of a machine."""

    def inventory(self) -> Inventory:
        """Return what there is; raise `NoDevicesError` if nobody can tell."""
        ...


class LiveSource(DeviceSource, Protocol):
    """A source that also knows what is going on."""

    def readings(self) -> Mapping[str, Reading | Problem]:
        """Return, by UUID, every device's figures, or why it has none."""
        ...

# SPDX-License-Identifier: Apache-2.0
"""A machine's devices and their use, from NVML or a simulated machine's file."""

import msgspec

from allotment.model.devices import Device


class Problem(msgspec.Struct, frozen=True):
    """A GPU that does not answer. The others are listed nevertheless.

    `device` is its description, if known without its answer.
    """

    index: int
    uuid: str | None
    message: str
    device: Device | None = None


class Inventory(msgspec.Struct, frozen=True):
    """The devices that answered, in NVML's order, and the problems of the others."""

    devices: tuple[Device, ...]
    problems: tuple[Problem, ...]
    slices: tuple[Device, ...] = ()
    """The MIG devices of `devices`, from a source that queries them."""


class DeviceProcess(msgspec.Struct, frozen=True):
    """A process with memory on a device. `pid` is the host's; None: NVML does not report it."""

    pid: int
    used_bytes: int | None
    gpu_percent: int | None = None
    """Percent of the last second or so in which its kernels ran."""


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """One device at one moment. None: not supported by the device.

    `used_bytes` is the use by processes (without the driver's reserve); percentages are for the
    last second or so; power is in milliwatts.
    """

    used_bytes: int
    gpu_percent: int | None
    memory_percent: int | None
    temperature_c: int | None
    power_mw: int | None
    processes: tuple[DeviceProcess, ...]
    asked_ns: int = 0
    """When the driver was asked, by CLOCK_BOOTTIME. 0: unknown."""

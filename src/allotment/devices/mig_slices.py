# SPDX-License-Identifier: Apache-2.0
"""The MIG devices of a GPU as devices of their own, whoever cut them.

`GpuMig` tells of GPU instances and makes them; here is what programs can be given: each MIG device
with its UUID, memory and multiprocessors, and its GPU's place on the machine. A container gets one
by two device nodes beside its GPU's, which the kernel's module numbers (`capability_nodes`).
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

from allotment.devices.mig import mig_devices
from allotment.model.devices import Device, DeviceSlice
from allotment.model.errors import NoDevicesError

__all__ = ["CapabilityNode", "capability_nodes", "mig_slices"]

_TRIES: Final = 3
"""Somebody who cuts the GPU meanwhile makes a list that is out of date; rarely twice."""
_CAPABILITIES: Final = "proc/driver/nvidia/capabilities"
_MODULE: Final = "nvidia-caps"
_MINOR_KEY: Final = "DeviceFileMinor"

Handle = Any  # nvidia-ml-py's pointer to a device


def mig_slices(nvml: ModuleType, handle: Handle, gpu: Device) -> tuple[Device, ...]:
    """Return the MIG devices of a GPU in MIG mode, in NVML's order; `gpu` is the whole of it.

    None where the driver tells them to root alone. Raises nvidia-ml-py's errors.
    """
    for _ in range(_TRIES - 1):
        try:
            return _in_order(_each(nvml, handle, gpu))
        except nvml.NVMLError_NoPermission:
            return ()
        except nvml.NVMLError_NotFound:
            continue  # one was removed between the list and the questions
    return _in_order(_each(nvml, handle, gpu))


def _in_order(found: Iterator[tuple[int, Device]]) -> tuple[Device, ...]:
    return tuple(device for _, device in sorted(found, key=lambda each: each[0]))


def _each(nvml: ModuleType, handle: Handle, gpu: Device) -> Iterator[tuple[int, Device]]:
    for whole, device in mig_devices(nvml, handle):
        told = nvml.nvmlDeviceGetAttributes(device)
        # NVML's of a MIG device is its place among those of its GPU (nvml.h, nvmlDeviceGetIndex).
        number = int(nvml.nvmlDeviceGetIndex(device))
        profile = whole.of_compute(int(told.computeInstanceSliceCount))
        yield (
            number,
            replace(
                gpu,
                uuid=str(nvml.nvmlDeviceGetUUID(device)),
                name=f"{gpu.name} MIG {profile}",  # as drivers from R470 on name it
                memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(device).total),
                sm_count=int(told.multiprocessorCount),
                mig=False,
                reserved_bytes=0,
                slice_of=DeviceSlice(
                    gpu=gpu.uuid,
                    number=number,
                    profile=profile,
                    gpu_instance=int(nvml.nvmlDeviceGetGpuInstanceId(device)),
                    compute_instance=int(nvml.nvmlDeviceGetComputeInstanceId(device)),
                ),
            ),
        )


# ---- device nodes --------------------------------------------------------------------------------


class CapabilityNode(NamedTuple):
    """A device node that lets a program use an instance. `major` None: no module has told it."""

    path: str
    major: int | None
    minor: int


def capability_nodes(
    device: Device, gpu_minor: int, *, root: Path = Path("/"), capabilities: Path | None = None
) -> tuple[CapabilityNode, ...]:
    """Return the nodes of a MIG device, GPU instance first; `gpu_minor` is N of /dev/nvidiaN.

    The kernel's module tells their numbers below /proc/driver/nvidia/capabilities, and its own in
    /proc/devices (NVIDIA's MIG User Guide, "Device Nodes and Capabilities"). `root` is where the
    machine's files are; `capabilities` where that folder is somewhere else, as a simulated
    machine's is. Raises `NoDevicesError` where the instance has none.
    """
    where = device.slice_of
    if where is None:
        return ()
    top = root / _CAPABILITIES if capabilities is None else capabilities
    instance = top / f"gpu{gpu_minor}" / "mig" / f"gi{where.gpu_instance}"
    major = _major(root / "proc/devices")
    return tuple(
        CapabilityNode(f"/dev/{_MODULE}/nvidia-cap{minor}", major, minor)
        for minor in (
            _minor(instance / "access", device),
            _minor(instance / f"ci{where.compute_instance}" / "access", device),
        )
    )


def _minor(path: Path, device: Device) -> int:
    try:
        for line in path.read_text("ascii").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == _MINOR_KEY:
                return int(value)
    except (OSError, ValueError) as error:
        problem = str(error)
    else:
        problem = f"{path} has no {_MINOR_KEY}"
    raise NoDevicesError(
        f"MIG device {device.index_text} ({device.uuid}) has no device node: {problem}",
        hint="it was removed meanwhile (see `allot devices`), or the driver has no nvidia-caps"
        " (450.51.06 and later have): a container sees /proc/driver where it is mounted",
    )


def _major(path: Path) -> int | None:
    """Return the module's major number for character devices."""
    try:
        lines = path.read_text("ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        number, _, name = line.strip().partition(" ")
        if name.strip() == _MODULE and number.isdecimal():
            return int(number)
    return None

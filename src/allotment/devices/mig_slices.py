# SPDX-License-Identifier: Apache-2.0
"""The MIG devices of a GPU as devices of their own, including foreign ones.

`GpuMig` manages GPU instances; this module describes MIG devices for programs: UUID, memory,
multiprocessors and place. A container gets one through two more device nodes, which the kernel's
module numbers (`capability_nodes`).
"""

from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

from allotment.devices.mig import mig_devices, removed
from allotment.model.devices import Device, DeviceSlice
from allotment.model.errors import NoDevicesError
from allotment.model.structs import replace

_TRIES: Final = 3
"""Retries if another process changes the GPU meanwhile; rarely two."""
_CAPABILITIES: Final = "proc/driver/nvidia/capabilities"
_MODULE: Final = "nvidia-caps"
_MINOR_KEY: Final = "DeviceFileMinor"

Handle = Any  # nvidia-ml-py's pointer to a device


def mig_slices(nvml: ModuleType, handle: Handle, gpu: Device) -> tuple[Device, ...]:
    """The MIG devices of a GPU in MIG mode, in NVML's order; `gpu` is the whole GPU.

    Empty if the driver reports them to root only. Raises nvidia-ml-py's errors.
    """
    for _ in range(_TRIES - 1):
        try:
            return _in_order(_numbered(nvml, handle, gpu))
        except nvml.NVMLError_NoPermission:
            return ()
        except removed(nvml):
            continue
    return _in_order(_numbered(nvml, handle, gpu))


def _in_order(numbered: Iterator[tuple[int, Device]]) -> tuple[Device, ...]:
    return tuple(device for _, device in sorted(numbered, key=itemgetter(0)))


def _numbered(nvml: ModuleType, handle: Handle, gpu: Device) -> Iterator[tuple[int, Device]]:
    for whole, device in mig_devices(nvml, handle):
        attributes = nvml.nvmlDeviceGetAttributes(device)
        # NVML's index of a MIG device is its position on its GPU (nvml.h, nvmlDeviceGetIndex).
        number = int(nvml.nvmlDeviceGetIndex(device))
        profile = whole.of_compute(int(attributes.computeInstanceSliceCount))
        yield (
            number,
            replace(
                gpu,
                uuid=str(nvml.nvmlDeviceGetUUID(device)),
                name=f"{gpu.name} MIG {profile}",  # the name in drivers from R470 on
                memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(device).total),
                sm_count=int(attributes.multiprocessorCount),
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
    """A device node for using an instance. `major` None: no module reports it."""

    path: str
    major: int | None
    minor: int


def capability_nodes(
    device: Device, gpu_minor: int, *, root: Path = Path("/"), capabilities: Path | None = None
) -> tuple[CapabilityNode, ...]:
    """The nodes of a MIG device, GPU instance first; `gpu_minor` is N of /dev/nvidiaN.

    Numbers are below /proc/driver/nvidia/capabilities and in /proc/devices (NVIDIA's MIG User
    Guide, "Device Nodes and Capabilities"). `root` is the machine's root folder; `capabilities`
    replaces that folder, for simulated machines. Raises `NoDevicesError` if the instance has none.
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
        hint=(
            "it was removed in the meantime (see `allot devices`), or the driver lacks "
            "nvidia-caps (450.51.06 and later include it); a container needs /proc/driver "
            "mounted"
        ),
    )


def _major(path: Path) -> int | None:
    """The module's major number for character devices."""
    try:
        lines = path.read_text("ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        number, _, name = line.strip().partition(" ")
        if name.strip() == _MODULE and number.isdecimal():
            return int(number)
    return None

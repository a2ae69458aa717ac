# SPDX-License-Identifier: Apache-2.0
"""What a node's GPUs and driver are, as far as labels tell it: names, versions, capabilities.

    reader = FactReader()                   # the GPUs of this computer
    reader = FactReader(machine=path)       # a simulated machine's
    reader.read()                           # now and then, always in a thread

Nothing here moves by itself, so a GPU that once told its facts keeps them while it is silent: a
hanging driver must not take a label from a node. Every GPU is asked in a thread of its own
(`watching.Asker`), so one that hangs costs that thread, and the others nothing.
"""

from __future__ import annotations

import ctypes
import re
import struct
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from allotment.devices import loading
from allotment.devices.mig import mig_devices
from allotment.devices.sources import Problem
from allotment.devices.watching import Asker
from allotment.model.errors import NoDevicesError
from allotment.model.mig import MigProfile

__all__ = [
    "DeviceFacts",
    "FabricPlace",
    "FactReader",
    "MigFacts",
    "NodeFacts",
    "VgpuHost",
    "vgpu_host",
]

PATIENCE_S: Final = 2.0
"""How long the GPUs may take to answer, together, before the silent ones are given up on."""

_MIB: Final = 1 << 20
_CLASS_BITS_OF_INTERFACE: Final = 8  # sysfs tells class, subclass and programming interface

# The configuration space of a PCI device (PCI 3.0 §6.1, §6.7) and what NVIDIA put into it.
_STATUS: Final = 0x06
_HAS_CAPABILITIES: Final = 0x10
_FIRST_CAPABILITY: Final = 0x34
_VENDOR_CAPABILITY: Final = 0x09
_MOST_CAPABILITIES: Final = 48  # as many as there is room for: a chain in a circle ends
_VGPU_SIGNATURE: Final = b"VF"
_VGPU_RECORDS_AT: Final = 5
_VGPU_TEXT: Final = 10

_SILENT: Final = "it has not answered in time"

Handle = Any  # nvidia-ml-py's pointer to a device


@dataclass(frozen=True, slots=True)
class FabricPlace:
    """Where a GPU is in an NVLink fabric of several nodes."""

    cluster: str
    """A UUID in small digits."""
    clique: int


@dataclass(frozen=True, slots=True)
class VgpuHost:
    """The hypervisor's driver under a virtual GPU; `branch` like `r582_12`."""

    driver_version: str
    driver_branch: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MigFacts:
    """One MIG device."""

    profile: str
    """Written like `1g.5gb+me`; `1c.3g.20gb` where it has a part of a GPU instance's compute."""
    memory_mib: int
    multiprocessors: int
    gi_slices: int
    ci_slices: int
    copy_engines: int
    decoders: int
    encoders: int
    jpeg_engines: int
    ofa_engines: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """One GPU. What is None is not known, or the GPU does not have it."""

    uuid: str
    name: str
    """The model as NVML names it."""
    memory_mib: int
    """As NVML (v1) reports `total`."""
    compute_capability: tuple[int, int] | None = None
    pci_class: int | None = None
    """Class and subclass: 0x0300 drives a screen, 0x0302 does not."""
    is_mig_capable: bool = False
    is_mig_enabled: bool = False
    migs: tuple[MigFacts, ...] | None = None
    """Its MIG devices; None: MIG is off, or the driver does not tell them to this user."""
    fabric: FabricPlace | None = None
    vgpu_host: VgpuHost | None = None
    """Set where this is a virtual GPU in a virtual machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """A node's driver and GPUs. `cuda_version` is what the driver supports: (13, 0)."""

    driver_version: str
    cuda_version: tuple[int, int]
    devices: tuple[DeviceFacts, ...] = ()
    """In NVML's order."""
    problems: tuple[Problem, ...] = ()
    """GPUs that did not answer this time. Those that answered earlier are among `devices` still."""


class FactReader:
    """Reads the facts of one machine again and again, for as long as the process lives.

    NVML is never shut down by it: others of this process may be using it. `sysfs` is where the
    kernel tells of PCI devices; a simulated machine has none, NVML tells its PCI classes.
    """

    __slots__ = ("_askers", "_busy", "_known", "_machine", "_patience_s", "_started", "_sysfs")

    def __init__(
        self,
        *,
        machine: Path | None = None,
        sysfs: Path = Path("/sys"),
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._machine = machine
        self._sysfs = sysfs
        self._patience_s = patience_s
        self._known: dict[int, DeviceFacts] = {}
        self._askers: dict[int, Asker] = {}
        self._started = False
        self._busy = threading.Lock()

    def read(self) -> NodeFacts:
        """Return what is known, at most a little more than the patience later.

        Raises `NoDevicesError` where NVML cannot be had, or another thread is reading still.
        """
        if not self._busy.acquire(blocking=False):
            raise NoDevicesError(
                "NVML was asked for the node's facts and has not answered yet",
                hint="see `nvidia-smi`: if it hangs too, the driver or a GPU needs a restart",
            )
        try:
            with loading.nvml_of(self._machine) as nvml:
                return self._read(nvml)
        finally:
            self._busy.release()

    def close(self) -> None:
        """Let the threads end; one that a GPU keeps ends with the process."""
        for asker in self._askers.values():
            asker.close()
        self._askers = {}

    def _read(self, nvml: ModuleType) -> NodeFacts:
        try:
            if self._machine is None and not self._started:
                loading.hold(None)
                self._started = True
            driver = str(nvml.nvmlSystemGetDriverVersion())
            cuda = int(nvml.nvmlSystemGetCudaDriverVersion())
            count = int(nvml.nvmlDeviceGetCount())
        except nvml.NVMLError as error:
            self._started = False  # the driver may be another one when it comes back
            raise NoDevicesError(
                f"NVML does not tell about its driver: {error}",
                hint="see `nvidia-smi` and `allot doctor`",
            ) from error
        problems = self._ask(nvml, count)
        return NodeFacts(
            driver_version=driver,
            cuda_version=(cuda // 1000, cuda % 1000 // 10),
            devices=self._devices(count),
            problems=problems,
        )

    def _ask(self, nvml: ModuleType, count: int) -> tuple[Problem, ...]:
        """Ask every GPU that does not owe an answer still, and keep what they say."""
        asked = {}
        for index in range(count):
            asker = self._askers.setdefault(index, Asker(f"nvml-facts-{index}"))
            asked[index] = asker.ask(partial(self._device, nvml, index))
        deadline = time.monotonic() + self._patience_s
        problems = []
        for index, future in asked.items():
            answer = _outcome(nvml, future, deadline)
            if isinstance(answer, DeviceFacts):
                self._known[index] = answer
            else:
                known = self._known.get(index)
                problems.append(Problem(index, None if known is None else known.uuid, answer))
        return tuple(problems)

    def _devices(self, count: int) -> tuple[DeviceFacts, ...]:
        """Return the facts of all that NVML counts; each UUID once, whatever index it had."""
        self._known = {index: known for index, known in self._known.items() if index < count}
        found = {self._known[index].uuid: self._known[index] for index in sorted(self._known)}
        return tuple(found.values())

    def _device(self, nvml: ModuleType, index: int) -> DeviceFacts:
        """Ask one GPU all of it."""
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        mig = _figure(nvml, nvml.nvmlDeviceGetMigMode, handle)
        is_mig_enabled = mig is not None and mig[0] == nvml.NVML_DEVICE_MIG_ENABLE
        capability = _figure(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
        folder = None
        if self._machine is None:
            folder = _pci_folder(self._sysfs, nvml.nvmlDeviceGetPciInfo(handle).busId)
        return DeviceFacts(
            uuid=nvml.nvmlDeviceGetUUID(handle),
            name=nvml.nvmlDeviceGetName(handle),
            memory_mib=int(nvml.nvmlDeviceGetMemoryInfo(handle).total) // _MIB,
            compute_capability=None if capability is None else (capability[0], capability[1]),
            pci_class=_pci_class(nvml, handle, folder),
            is_mig_capable=mig is not None,
            is_mig_enabled=is_mig_enabled,
            migs=_migs(nvml, handle) if is_mig_enabled else None,
            fabric=_fabric(nvml, handle),
            vgpu_host=None if folder is None else vgpu_host(_read(folder / "config")),
        )


def _migs(nvml: ModuleType, handle: Handle) -> tuple[MigFacts, ...] | None:
    """Return the facts of a GPU's MIG devices, those of the smallest profiles first."""
    try:
        found = [
            _mig_facts(profile, nvml.nvmlDeviceGetAttributes(device))
            for profile, device in mig_devices(nvml, handle)
        ]
    except (nvml.NVMLError_NoPermission, nvml.NVMLError_NotFound):
        return None  # root's to see; or one was removed while it was being asked
    return tuple(sorted(found, key=lambda each: (each.gi_slices, each.memory_mib, each.profile)))


def _mig_facts(profile: MigProfile, told: Any) -> MigFacts:  # noqa: ANN401 - NVML's structure
    return MigFacts(
        profile=profile.of_compute(int(told.computeInstanceSliceCount)),
        memory_mib=int(told.memorySizeMB),
        multiprocessors=int(told.multiprocessorCount),
        gi_slices=int(told.gpuInstanceSliceCount),
        ci_slices=int(told.computeInstanceSliceCount),
        copy_engines=int(told.sharedCopyEngineCount),
        decoders=int(told.sharedDecoderCount),
        encoders=int(told.sharedEncoderCount),
        jpeg_engines=int(told.sharedJpegCount),
        ofa_engines=int(told.sharedOfaCount),
    )


def _outcome(
    nvml: ModuleType, future: Future[DeviceFacts] | None, deadline: float
) -> DeviceFacts | str:
    """Wait for an answer until `deadline` (monotonic seconds); a text says why there is none."""
    if future is None:  # it owes the answer to an earlier question, and is not waited for again
        return _SILENT
    try:
        return future.result(max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        return _SILENT
    except nvml.NVMLError as error:
        return f"NVML: {error}"


def _figure(nvml: ModuleType, call: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401
    """Return a figure, or None from a device or driver that does not have it."""
    try:
        return call(*arguments)
    except (
        nvml.NVMLError_NotSupported,
        nvml.NVMLError_FunctionNotFound,
        nvml.NVMLError_NoPermission,
    ):
        return None


def _is_filled(nvml: ModuleType, call: Callable[..., Any], handle: Handle, info: Any) -> bool:  # noqa: ANN401
    """Let NVML fill in a structure; False: the device or the driver does not have it."""
    try:
        call(handle, ctypes.byref(info))
    except (
        nvml.NVMLError_NotSupported,
        nvml.NVMLError_FunctionNotFound,
        nvml.NVMLError_NoPermission,
        nvml.NVMLError_ArgumentVersionMismatch,
    ):
        return False
    return True


def _fabric(nvml: ModuleType, handle: Handle) -> FabricPlace | None:
    """Return the GPU's place, once the fabric manager has made one.

    The GPUs of one HGX board have a fabric without a cluster: its UUID is zero, and counts as none
    (go-nvlib pkg/nvlib/device/device.go, IsFabricAttached).
    """
    info = nvml.c_nvmlGpuFabricInfo_v2_t()
    if not _is_filled(nvml, nvml.nvmlDeviceGetGpuFabricInfoV, handle, info):
        info = nvml.c_nvmlGpuFabricInfo_t()  # a driver before R545
        if not _is_filled(nvml, nvml.nvmlDeviceGetGpuFabricInfo, handle, info):
            return None
    cluster = bytes(info.clusterUuid)
    is_made = info.state == nvml.NVML_GPU_FABRIC_STATE_COMPLETED
    if not is_made or info.status != nvml.NVML_SUCCESS or not any(cluster):
        return None
    return FabricPlace(str(uuid.UUID(bytes=cluster)), int(info.cliqueId))


def _pci_class(nvml: ModuleType, handle: Handle, folder: Path | None) -> int | None:
    """Return class and subclass: the kernel's word where there is one, else NVML's."""
    if folder is not None:
        text = _read(folder / "class").decode("ascii", "replace").strip()
        if re.fullmatch(r"0x[0-9a-fA-F]{1,6}", text):
            return int(text, 16) >> _CLASS_BITS_OF_INTERFACE
    info = nvml.nvmlPciInfoExt_v1_t()
    info.version = nvml.nvmlPciInfoExt_v1
    if not _is_filled(nvml, nvml.nvmlDeviceGetPciInfoExt, handle, info):
        return None
    return int(info.baseClass) << 8 | int(info.subClass)


def _pci_folder(sysfs: Path, bus_id: str) -> Path:
    """Return the kernel's folder of a GPU. NVML's bus id has four digits of domain more."""
    return sysfs / "bus" / "pci" / "devices" / bus_id.lower()[-12:]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""  # no such device (WSL), or a kernel that does not tell


# ---- virtual GPUs --------------------------------------------------------------------------------


def vgpu_host(config: bytes) -> VgpuHost | None:
    """Find the hypervisor's driver in a PCI device's configuration space; None: no virtual GPU.

    NVIDIA's vGPU manager leaves it in a vendor-specific capability that holds `VF`, as a record
    with id 0: ten bytes of version, ten of branch. Without privilege the kernel gives only the
    first 64 bytes, and there is no telling.
    """
    for capability in _vendor_capabilities(config):
        if capability[3:_VGPU_RECORDS_AT] == _VGPU_SIGNATURE:
            return _host_of(capability)
    return None


def _vendor_capabilities(config: bytes) -> list[bytes]:
    if len(config) <= _FIRST_CAPABILITY:
        return []
    (status,) = struct.unpack_from("<H", config, _STATUS)
    if not status & _HAS_CAPABILITIES:
        return []
    found = []
    at = config[_FIRST_CAPABILITY] & ~3
    for _ in range(_MOST_CAPABILITIES):
        if at == 0 or at + 3 > len(config):
            break
        if config[at] == _VENDOR_CAPABILITY:
            found.append(config[at : at + config[at + 2]])
        at = config[at + 1] & ~3
    return found


def _host_of(capability: bytes) -> VgpuHost:
    """Walk the records (id, length, data) to the driver's; nothing known where it is missing."""
    at = _VGPU_RECORDS_AT
    while at + 1 < len(capability):
        if capability[at] == 0:
            texts = capability[at + 2 : at + 2 + 2 * _VGPU_TEXT]
            return VgpuHost(_text(texts[:_VGPU_TEXT]), _text(texts[_VGPU_TEXT:]))
        if capability[at + 1] == 0:
            break
        at += capability[at + 1]
    return VgpuHost("", "")


def _text(data: bytes) -> str:
    return data.strip(b"\0").decode("ascii", "replace")

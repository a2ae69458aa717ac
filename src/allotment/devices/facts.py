# SPDX-License-Identifier: Apache-2.0
"""A node's GPU and driver facts for labels: names, versions, capabilities.

    reader = FactReader()                   # the GPUs of this computer
    reader = FactReader(machine=path)       # a simulated machine's
    reader.read()                           # now and then, always in a thread

Facts do not change, so a GPU keeps them while it does not answer: a hanging driver must not remove
a node's label. Each GPU has its own thread (`watching.Asker`).
"""

from __future__ import annotations

import ctypes
import re
import struct
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import msgspec

from allotment.devices import loading
from allotment.devices.mig import mig_devices, removed
from allotment.devices.nvml import Handle, optional, problem_text
from allotment.devices.sources import Problem
from allotment.devices.watching import Asker
from allotment.model.errors import NoDevicesError
from allotment.model.mig import MigProfile

PATIENCE_S: Final = 2.0
"""Time for all GPUs together to answer."""

_BRANDS: Final = {
    1: "Quadro",
    2: "Tesla",
    3: "NVS",
    4: "GRID",
    5: "GeForce",
    6: "Titan",
    12: "QuadroRTX",
    13: "NvidiaRTX",
    14: "Nvidia",
    15: "GeForceRTX",
    16: "TitanRTX",
}
"""By `nvmlBrandType_t`."""
_MIB: Final = 1 << 20
_CLASS_BITS_OF_INTERFACE: Final = 8  # sysfs has class, subclass and programming interface

_ROOT_COMPLEX: Final = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")

# The configuration space of a PCI device (PCI 3.0 §6.1, §6.7) and NVIDIA's data in it.
_STATUS: Final = 0x06
_HAS_CAPABILITIES: Final = 0x10
_FIRST_CAPABILITY: Final = 0x34
_VENDOR_CAPABILITY: Final = 0x09
_MOST_CAPABILITIES: Final = 48  # bounds a circular chain
_VGPU_SIGNATURE: Final = b"VF"
_VGPU_RECORDS_AT: Final = 5
_VGPU_TEXT: Final = 10


class FabricPlace(msgspec.Struct, frozen=True):
    """A GPU's place in an NVLink fabric of several nodes."""

    cluster: str
    """A UUID in lower case."""
    clique: int


class VgpuHost(msgspec.Struct, frozen=True):
    """The hypervisor's driver under a virtual GPU; `branch` like `r582_12`."""

    driver_version: str
    driver_branch: str


class MigFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One MIG device."""

    profile: str
    """Like `1g.5gb+me`; `1c.3g.20gb` for a part of a GPU instance's compute."""
    memory_mib: int
    multiprocessors: int
    gi_slices: int
    ci_slices: int
    copy_engines: int
    decoders: int
    encoders: int
    jpeg_engines: int
    ofa_engines: int


class DeviceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU. None: unknown, or not supported by the GPU."""

    uuid: str
    name: str
    """Model name from NVML."""
    memory_mib: int
    """As NVML (v1) reports `total`."""
    compute_capability: tuple[int, int] | None = None
    brand: str = ""
    """As NVIDIA's DRA driver writes it: `Nvidia`, `Tesla`, `GeForce`. Empty: unknown."""
    pci_class: int | None = None
    """Class and subclass: 0x0300 drives a screen, 0x0302 does not."""
    pcie_root: str = ""
    """The PCIe root complex, `pci0000:00`. Empty: unknown."""
    is_mig_capable: bool = False
    is_mig_enabled: bool = False
    mig_devices: tuple[MigFacts, ...] | None = None
    """Its MIG devices; None: MIG is off, or hidden from this user."""
    fabric: FabricPlace | None = None
    vgpu_host: VgpuHost | None = None
    """Set for a virtual GPU in a virtual machine."""


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A node's driver and GPUs. `cuda_version` is the version that the driver supports: (13, 0)."""

    driver_version: str
    cuda_version: tuple[int, int]
    devices: tuple[DeviceFacts, ...] = ()
    """In NVML's order."""
    problems: tuple[Problem, ...] = ()
    """GPUs that did not answer this time. Known ones are still in `devices`."""


class FactReader:
    """Reads the facts of one machine repeatedly, as long as the process lives.

    It never shuts NVML down, because other parts of the process may use it. `sysfs` has the
    kernel's data of PCI devices; for a simulated machine NVML has the PCI classes.
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
        """Known facts; returns slightly after the patience at the latest.

        Raises `NoDevicesError` if NVML is unavailable, or another thread is still reading.
        """
        if not self._busy.acquire(blocking=False):
            raise NoDevicesError(
                "NVML has not yet answered the query for the node's facts",
                hint="see `nvidia-smi`: if it hangs too, the driver or a GPU needs a restart",
            )
        try:
            with loading.nvml_of(self._machine) as nvml:
                return self._read(nvml)
        finally:
            self._busy.release()

    def close(self) -> None:
        """Let the threads end; a thread stuck in a GPU ends with the process."""
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
            self._started = False  # the driver may have changed when NVML returns
            raise NoDevicesError(
                f"NVML does not report its driver: {error}",
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
        futures = {}
        for index in range(count):
            asker = self._askers.setdefault(index, Asker(f"nvml-facts-{index}"))
            futures[index] = asker.ask(partial(self._device, nvml, index))
        deadline = time.monotonic() + self._patience_s
        problems = []
        for index, future in futures.items():
            try:
                if future is None:
                    raise TimeoutError  # noqa: TRY301 - do not wait for the older question
                self._known[index] = future.result(max(0.0, deadline - time.monotonic()))
            except (TimeoutError, nvml.NVMLError) as error:
                known = self._known.get(index)
                uuid = None if known is None else known.uuid
                problems.append(Problem(index, uuid, problem_text(nvml, error)))
        return tuple(problems)

    def _devices(self, count: int) -> tuple[DeviceFacts, ...]:
        self._known = {index: gpu for index, gpu in self._known.items() if index < count}
        # A GPU that changed its number is listed once.
        by_uuid = {self._known[index].uuid: self._known[index] for index in sorted(self._known)}
        return tuple(by_uuid.values())

    def _device(self, nvml: ModuleType, index: int) -> DeviceFacts:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        mig = optional(nvml, nvml.nvmlDeviceGetMigMode, handle)
        is_mig_enabled = mig is not None and mig[0] == nvml.NVML_DEVICE_MIG_ENABLE
        capability = optional(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
        folder = None
        if self._machine is None:
            folder = _pci_folder(self._sysfs, nvml.nvmlDeviceGetPciInfo(handle).busId)
        return DeviceFacts(
            uuid=nvml.nvmlDeviceGetUUID(handle),
            name=nvml.nvmlDeviceGetName(handle),
            memory_mib=int(nvml.nvmlDeviceGetMemoryInfo(handle).total) // _MIB,
            compute_capability=None if capability is None else (capability[0], capability[1]),
            brand=_BRANDS.get(optional(nvml, nvml.nvmlDeviceGetBrand, handle), ""),
            pci_class=_pci_class(nvml, handle, folder),
            pcie_root="" if folder is None else pcie_root(folder),
            is_mig_capable=mig is not None,
            is_mig_enabled=is_mig_enabled,
            mig_devices=_mig_devices(nvml, handle) if is_mig_enabled else None,
            fabric=_fabric(nvml, handle),
            vgpu_host=None if folder is None else vgpu_host(_read(folder / "config")),
        )


def _mig_devices(nvml: ModuleType, handle: Handle) -> tuple[MigFacts, ...] | None:
    try:
        facts = [
            _mig_facts(profile, nvml.nvmlDeviceGetAttributes(device))
            for profile, device in mig_devices(nvml, handle)
        ]
    except (nvml.NVMLError_NoPermission, *removed(nvml)):
        return None  # only root may read them; or one was removed meanwhile
    return tuple(sorted(facts, key=lambda mig: (mig.gi_slices, mig.memory_mib, mig.profile)))


def _mig_facts(profile: MigProfile, attributes: Any) -> MigFacts:  # noqa: ANN401 - NVML's structure
    return MigFacts(
        profile=profile.of_compute(int(attributes.computeInstanceSliceCount)),
        memory_mib=int(attributes.memorySizeMB),
        multiprocessors=int(attributes.multiprocessorCount),
        gi_slices=int(attributes.gpuInstanceSliceCount),
        ci_slices=int(attributes.computeInstanceSliceCount),
        copy_engines=int(attributes.sharedCopyEngineCount),
        decoders=int(attributes.sharedDecoderCount),
        encoders=int(attributes.sharedEncoderCount),
        jpeg_engines=int(attributes.sharedJpegCount),
        ofa_engines=int(attributes.sharedOfaCount),
    )


def _is_filled(nvml: ModuleType, call: Callable[..., Any], handle: Handle, info: Any) -> bool:  # noqa: ANN401
    """Let NVML fill a structure; False: not supported by device or driver."""
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
    """The GPU's place, once the fabric manager has assigned one.

    The GPUs of one HGX board have a fabric without a cluster: its UUID is zero and counts as none
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
    """Class and subclass, from the kernel if possible, else from NVML."""
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
    """The kernel's folder of a GPU. NVML's bus id has four more digits of domain."""
    return sysfs / "bus" / "pci" / "devices" / bus_id.lower()[-12:]


def pcie_root(folder: Path) -> str:
    """Return the root complex above a device: `.../devices/pci0000:00/0000:00:01.0/0000:01:00.0`.

    The kernel's folder is a link to the device's place in the tree. Empty: there is none.
    """
    tree = folder.resolve().parts
    return next((part for part in tree if _ROOT_COMPLEX.fullmatch(part)), "")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""  # no such device (WSL), or a kernel without this file


# ---- virtual GPUs --------------------------------------------------------------------------------


def vgpu_host(config: bytes) -> VgpuHost | None:
    """The hypervisor's driver, from a PCI configuration space; None: not a virtual GPU.

    NVIDIA's vGPU manager stores it in a vendor-specific capability with `VF`, as a record with id
    0: ten bytes of version, ten of branch. Without privilege the kernel returns only the first 64
    bytes, which do not suffice.
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
    capabilities = []
    at = config[_FIRST_CAPABILITY] & ~3
    for _ in range(_MOST_CAPABILITIES):
        if at == 0 or at + 3 > len(config):
            break
        if config[at] == _VENDOR_CAPABILITY:
            capabilities.append(config[at : at + config[at + 2]])
        at = config[at + 1] & ~3
    return capabilities


def _host_of(capability: bytes) -> VgpuHost:
    """Find the driver's record (id, length, data); empty if missing."""
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

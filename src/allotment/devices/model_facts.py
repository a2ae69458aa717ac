# SPDX-License-Identifier: Apache-2.0
"""The columns of `models`: facts of a GPU model, and of a chip family."""

from enum import IntEnum

import msgspec

from allotment.devices import geometries


class Architecture(IntEnum):
    """`nvmlDeviceArchitecture_t`."""

    PASCAL = 4
    VOLTA = 5
    TURING = 6
    AMPERE = 7
    ADA = 8
    HOPPER = 9
    BLACKWELL = 10


class Brand(IntEnum):
    """`nvmlBrandType_t`."""

    TESLA = 2
    GEFORCE = 5
    NVIDIA = 14
    GEFORCE_RTX = 15


class NvlinkVersion(IntEnum):
    """`nvmlNvlinkVersion_t`: what `nvmlDeviceGetNvLinkVersion` returns."""

    NONE = 0
    V2_0 = 2
    V3_0 = 4
    V4_0 = 6
    V5_0 = 7


class Fabric(IntEnum):
    """NVLink topology of one model's GPUs in one machine."""

    NONE = 0
    PAIR = 1  # a bridge between two neighbours
    DIRECT = 2  # links between GPUs, evenly distributed
    SWITCH = 3  # every link ends in an NVSwitch


class Core(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a chip family, per multiprocessor and per block."""

    architecture: Architecture
    compute_capability: tuple[int, int]
    max_threads_per_sm: int
    shared_per_block_optin: int
    shared_per_sm: int
    pcie_generation: int
    nvlink_version: NvlinkVersion = NvlinkVersion.NONE
    """Of the models with NVLink."""
    concurrent_kernels: int = 128


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """One model. Clocks in MHz, power in W, temperatures in °C, rates in MiB/s."""

    key: str
    name: str
    core: Core
    memory_mib: int
    reserved_mib: int
    context_mib: int
    bar1_mib: int
    sm_count: int
    l2_kib: int
    memory_bus_bits: int
    sm_clock: int
    sm_clock_max: int
    memory_clock: int
    power: tuple[int, int, int]  # default limit, lowest, highest
    power_idle: int
    temperatures: tuple[int, int, int]  # idle, slowdown, shutdown
    pci_device: int
    pci_subsystem: int
    part_number: str
    vbios: str
    h2d: int
    d2h: int
    d2d: int
    brand: Brand = Brand.NVIDIA
    pcie_width: int = 16
    fans: int = 0
    ecc: bool | None = True  # on or off when new; None: no ECC
    mig: geometries.Geometry | None = None
    fabric: Fabric = Fabric.NONE
    nvlinks: int = 0
    has_serial: bool = True
    encoders: bool = False
    coherent: bool = False  # host and device share one address space (C2C)
    pci_vendor: int = 0x10DE

    @property
    def nvlink_version(self) -> NvlinkVersion:
        return self.core.nvlink_version if self.nvlinks else NvlinkVersion.NONE


GP100 = Core(
    architecture=Architecture.PASCAL,
    compute_capability=(6, 0),
    max_threads_per_sm=2048,
    shared_per_block_optin=48 << 10,
    shared_per_sm=64 << 10,
    pcie_generation=3,
)
GV100 = Core(
    architecture=Architecture.VOLTA,
    compute_capability=(7, 0),
    max_threads_per_sm=2048,
    shared_per_block_optin=96 << 10,
    shared_per_sm=96 << 10,
    pcie_generation=3,
    nvlink_version=NvlinkVersion.V2_0,
)
TU104 = Core(
    architecture=Architecture.TURING,
    compute_capability=(7, 5),
    max_threads_per_sm=1024,
    shared_per_block_optin=64 << 10,
    shared_per_sm=64 << 10,
    pcie_generation=3,
)
GA100 = Core(
    architecture=Architecture.AMPERE,
    compute_capability=(8, 0),
    max_threads_per_sm=2048,
    shared_per_block_optin=163 << 10,
    shared_per_sm=164 << 10,
    pcie_generation=4,
    nvlink_version=NvlinkVersion.V3_0,
)
GA102 = Core(
    architecture=Architecture.AMPERE,
    compute_capability=(8, 6),
    max_threads_per_sm=1536,
    shared_per_block_optin=99 << 10,
    shared_per_sm=100 << 10,
    pcie_generation=4,
)
AD10X = Core(
    architecture=Architecture.ADA,
    compute_capability=(8, 9),
    max_threads_per_sm=1536,
    shared_per_block_optin=99 << 10,
    shared_per_sm=100 << 10,
    pcie_generation=4,
)
GH100 = Core(
    architecture=Architecture.HOPPER,
    compute_capability=(9, 0),
    max_threads_per_sm=2048,
    shared_per_block_optin=227 << 10,
    shared_per_sm=228 << 10,
    pcie_generation=5,
    nvlink_version=NvlinkVersion.V4_0,
)
GB100 = Core(
    architecture=Architecture.BLACKWELL,
    compute_capability=(10, 0),
    max_threads_per_sm=2048,
    shared_per_block_optin=227 << 10,
    shared_per_sm=228 << 10,
    pcie_generation=5,
    nvlink_version=NvlinkVersion.V5_0,
)
GB202 = Core(
    architecture=Architecture.BLACKWELL,
    compute_capability=(12, 0),
    max_threads_per_sm=1536,
    shared_per_block_optin=99 << 10,
    shared_per_sm=100 << 10,
    pcie_generation=5,
)

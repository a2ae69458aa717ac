# SPDX-License-Identifier: Apache-2.0
"""The GPU models that can be simulated, as NVML and CUDA report the real ones.

A table and nothing else. It is Python and not a data file because `allot run` must start in a few
tens of milliseconds: a compiled module loads in one, a YAML parser alone takes thirty.

`memory_mib` is what NVML calls total, `reserved_mib` what the driver keeps of it (both as R5xx
drivers report them), so that total less reserved is what `cuDeviceTotalMem` says. `context_mib` is
what a bare CUDA context costs. Copy rates are those of pinned memory on the model's own bus.
"""

from dataclasses import dataclass
from enum import IntEnum

from allotment.devices import geometries

__all__ = ["MODELS", "Architecture", "Brand", "Fabric", "Model", "NvlinkVersion"]


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
    """How GPUs of one model are joined by NVLink in one machine."""

    NONE = 0
    PAIR = 1  # a bridge between two neighbours
    DIRECT = 2  # links from GPU to GPU, dealt out evenly
    SWITCH = 3  # every link ends in an NVSwitch


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """What all models of one chip family share, per multiprocessor and per block."""

    architecture: Architecture
    compute_capability: tuple[int, int]
    max_threads_per_sm: int
    shared_per_block_optin: int
    shared_per_sm: int
    engine_copies: int = 2
    concurrent_kernels: int = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
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
    power: tuple[int, int, int]  # default limit, least, most
    power_idle: int
    temperatures: tuple[int, int, int]  # idle, slowdown, shutdown
    pci_device: int
    pci_subsystem: int
    part_number: str
    vbios: str
    pcie_generation: int
    h2d: int
    d2h: int
    d2d: int
    brand: Brand = Brand.NVIDIA
    pcie_width: int = 16
    fans: int = 0
    ecc: bool | None = True  # on or off when new; None: the model has none
    mig: geometries.Geometry | None = None
    fabric: Fabric = Fabric.NONE
    nvlinks: int = 0
    nvlink_version: NvlinkVersion = NvlinkVersion.NONE
    has_serial: bool = True
    encoders: bool = False
    coherent: bool = False  # host and device share one address space (C2C)
    pci_vendor: int = 0x10DE


_GP100 = Core(
    architecture=Architecture.PASCAL,
    compute_capability=(6, 0),
    max_threads_per_sm=2048,
    shared_per_block_optin=48 << 10,
    shared_per_sm=64 << 10,
)
_GV100 = Core(
    architecture=Architecture.VOLTA,
    compute_capability=(7, 0),
    max_threads_per_sm=2048,
    shared_per_block_optin=96 << 10,
    shared_per_sm=96 << 10,
)
_TU104 = Core(
    architecture=Architecture.TURING,
    compute_capability=(7, 5),
    max_threads_per_sm=1024,
    shared_per_block_optin=64 << 10,
    shared_per_sm=64 << 10,
)
_GA100 = Core(
    architecture=Architecture.AMPERE,
    compute_capability=(8, 0),
    max_threads_per_sm=2048,
    shared_per_block_optin=163 << 10,
    shared_per_sm=164 << 10,
)
_GA102 = Core(
    architecture=Architecture.AMPERE,
    compute_capability=(8, 6),
    max_threads_per_sm=1536,
    shared_per_block_optin=99 << 10,
    shared_per_sm=100 << 10,
)
_AD10X = Core(
    architecture=Architecture.ADA,
    compute_capability=(8, 9),
    max_threads_per_sm=1536,
    shared_per_block_optin=99 << 10,
    shared_per_sm=100 << 10,
)
_GH100 = Core(
    architecture=Architecture.HOPPER,
    compute_capability=(9, 0),
    max_threads_per_sm=2048,
    shared_per_block_optin=227 << 10,
    shared_per_sm=228 << 10,
)
_GB100 = Core(
    architecture=Architecture.BLACKWELL,
    compute_capability=(10, 0),
    max_threads_per_sm=2048,
    shared_per_block_optin=227 << 10,
    shared_per_sm=228 << 10,
)
_GB202 = Core(
    architecture=Architecture.BLACKWELL,
    compute_capability=(12, 0),
    max_threads_per_sm=1536,
    shared_per_block_optin=99 << 10,
    shared_per_sm=100 << 10,
)

_ROWS = (
    Model(
        key="t4",
        name="Tesla T4",
        core=_TU104,
        brand=Brand.TESLA,
        memory_mib=15360,
        reserved_mib=450,
        context_mib=104,
        bar1_mib=256,
        sm_count=40,
        l2_kib=4096,
        memory_bus_bits=256,
        sm_clock=585,
        sm_clock_max=1590,
        memory_clock=5001,
        power=(70, 60, 70),
        power_idle=9,
        temperatures=(34, 93, 96),
        pci_device=0x1EB8,
        pci_subsystem=0x12A2,
        part_number="900-2G183-0000-001",
        vbios="90.04.96.00.02",
        pcie_generation=3,
        h2d=11800,
        d2h=12400,
        d2d=115000,
        encoders=True,
    ),
    Model(
        key="p100",
        name="Tesla P100-PCIE-16GB",
        core=_GP100,
        brand=Brand.TESLA,
        memory_mib=16384,
        reserved_mib=108,
        context_mib=256,
        bar1_mib=16384,
        sm_count=56,
        l2_kib=4096,
        memory_bus_bits=4096,
        sm_clock=1189,
        sm_clock_max=1328,
        memory_clock=715,
        power=(250, 125, 250),
        power_idle=26,
        temperatures=(33, 82, 85),
        pci_device=0x15F8,
        pci_subsystem=0x118F,
        part_number="900-2H400-0000-000",
        vbios="86.00.4D.00.01",
        pcie_generation=3,
        h2d=11600,
        d2h=12300,
        d2d=230000,
        encoders=True,
    ),
    Model(
        key="v100-16gb",
        name="Tesla V100-SXM2-16GB",
        core=_GV100,
        brand=Brand.TESLA,
        memory_mib=16384,
        reserved_mib=232,
        context_mib=308,
        bar1_mib=16384,
        sm_count=80,
        l2_kib=6144,
        memory_bus_bits=4096,
        sm_clock=1312,
        sm_clock_max=1530,
        memory_clock=877,
        power=(300, 150, 300),
        power_idle=42,
        temperatures=(35, 87, 90),
        pci_device=0x1DB1,
        pci_subsystem=0x1212,
        part_number="900-2G503-0000-000",
        vbios="88.00.4F.00.09",
        pcie_generation=3,
        h2d=11700,
        d2h=12600,
        d2d=370000,
        fabric=Fabric.DIRECT,
        nvlinks=6,
        nvlink_version=NvlinkVersion.V2_0,
        encoders=True,
    ),
    Model(
        key="v100-32gb",
        name="Tesla V100-SXM2-32GB",
        core=_GV100,
        brand=Brand.TESLA,
        memory_mib=32768,
        reserved_mib=266,
        context_mib=308,
        bar1_mib=32768,
        sm_count=80,
        l2_kib=6144,
        memory_bus_bits=4096,
        sm_clock=1290,
        sm_clock_max=1530,
        memory_clock=877,
        power=(300, 150, 300),
        power_idle=42,
        temperatures=(35, 87, 90),
        pci_device=0x1DB5,
        pci_subsystem=0x1249,
        part_number="900-2G503-0010-000",
        vbios="88.00.80.00.01",
        pcie_generation=3,
        h2d=11700,
        d2h=12600,
        d2d=370000,
        fabric=Fabric.DIRECT,
        nvlinks=6,
        nvlink_version=NvlinkVersion.V2_0,
        encoders=True,
    ),
    Model(
        key="a10",
        name="NVIDIA A10",
        core=_GA102,
        memory_mib=23028,
        reserved_mib=430,
        context_mib=256,
        bar1_mib=32768,
        sm_count=72,
        l2_kib=6144,
        memory_bus_bits=384,
        sm_clock=885,
        sm_clock_max=1695,
        memory_clock=6251,
        power=(150, 100, 150),
        power_idle=16,
        temperatures=(36, 95, 98),
        pci_device=0x2236,
        pci_subsystem=0x1482,
        part_number="900-2G133-0020-000",
        vbios="94.02.75.00.01",
        pcie_generation=4,
        h2d=23600,
        d2h=24700,
        d2d=235000,
        encoders=True,
    ),
    Model(
        key="a30",
        name="NVIDIA A30",
        core=_GA100,
        memory_mib=24576,
        reserved_mib=412,
        context_mib=312,
        bar1_mib=32768,
        sm_count=56,
        l2_kib=24576,
        memory_bus_bits=3072,
        sm_clock=930,
        sm_clock_max=1440,
        memory_clock=1215,
        power=(165, 100, 165),
        power_idle=29,
        temperatures=(33, 89, 92),
        pci_device=0x20B7,
        pci_subsystem=0x1532,
        part_number="900-21001-0040-000",
        vbios="92.00.66.00.01",
        pcie_generation=4,
        h2d=23700,
        d2h=24800,
        d2d=400000,
        mig=geometries.A30,
        fabric=Fabric.PAIR,
        nvlinks=4,
        nvlink_version=NvlinkVersion.V3_0,
    ),
    Model(
        key="a100-40gb",
        name="NVIDIA A100-SXM4-40GB",
        core=_GA100,
        memory_mib=40960,
        reserved_mib=512,
        context_mib=420,
        bar1_mib=65536,
        sm_count=108,
        l2_kib=40960,
        memory_bus_bits=5120,
        sm_clock=1095,
        sm_clock_max=1410,
        memory_clock=1215,
        power=(400, 100, 400),
        power_idle=48,
        temperatures=(32, 89, 92),
        pci_device=0x20B0,
        pci_subsystem=0x134F,
        part_number="692-2G506-0200-002",
        vbios="92.00.19.00.01",
        pcie_generation=4,
        h2d=24300,
        d2h=25100,
        d2d=620000,
        mig=geometries.A100_40GB,
        fabric=Fabric.SWITCH,
        nvlinks=12,
        nvlink_version=NvlinkVersion.V3_0,
    ),
    Model(
        key="a100-80gb",
        name="NVIDIA A100-SXM4-80GB",
        core=_GA100,
        memory_mib=81920,
        reserved_mib=764,
        context_mib=420,
        bar1_mib=131072,
        sm_count=108,
        l2_kib=40960,
        memory_bus_bits=5120,
        sm_clock=1155,
        sm_clock_max=1410,
        memory_clock=1593,
        power=(400, 100, 400),
        power_idle=58,
        temperatures=(32, 89, 92),
        pci_device=0x20B2,
        pci_subsystem=0x1463,
        part_number="692-2G506-0210-003",
        vbios="92.00.45.00.03",
        pcie_generation=4,
        h2d=24300,
        d2h=25100,
        d2d=800000,
        mig=geometries.A100_80GB,
        fabric=Fabric.SWITCH,
        nvlinks=12,
        nvlink_version=NvlinkVersion.V3_0,
    ),
    Model(
        key="l4",
        name="NVIDIA L4",
        core=_AD10X,
        memory_mib=23034,
        reserved_mib=466,
        context_mib=204,
        bar1_mib=32768,
        sm_count=58,
        l2_kib=49152,
        memory_bus_bits=192,
        sm_clock=795,
        sm_clock_max=2040,
        memory_clock=6251,
        power=(72, 40, 72),
        power_idle=12,
        temperatures=(37, 88, 93),
        pci_device=0x27B8,
        pci_subsystem=0x16CA,
        part_number="900-2G193-0000-000",
        vbios="95.04.29.00.06",
        pcie_generation=4,
        h2d=23500,
        d2h=24600,
        d2d=115000,
        encoders=True,
    ),
    Model(
        key="l40s",
        name="NVIDIA L40S",
        core=_AD10X,
        memory_mib=46068,
        reserved_mib=480,
        context_mib=390,
        bar1_mib=65536,
        sm_count=142,
        l2_kib=98304,
        memory_bus_bits=384,
        sm_clock=1110,
        sm_clock_max=2520,
        memory_clock=9001,
        power=(350, 100, 350),
        power_idle=32,
        temperatures=(33, 92, 97),
        pci_device=0x26B9,
        pci_subsystem=0x1851,
        part_number="900-2G133-0080-000",
        vbios="95.02.66.00.02",
        pcie_generation=4,
        h2d=23900,
        d2h=24900,
        d2d=330000,
        encoders=True,
    ),
    Model(
        key="rtx4090",
        name="NVIDIA GeForce RTX 4090",
        core=_AD10X,
        brand=Brand.GEFORCE,
        memory_mib=24564,
        reserved_mib=476,
        context_mib=376,
        bar1_mib=32768,
        sm_count=128,
        l2_kib=73728,
        memory_bus_bits=384,
        sm_clock=2235,
        sm_clock_max=3105,
        memory_clock=10501,
        power=(450, 150, 600),
        power_idle=15,
        temperatures=(31, 99, 104),
        pci_device=0x2684,
        pci_subsystem=0x16F3,
        part_number="",
        vbios="95.02.18.80.5F",
        pcie_generation=4,
        h2d=24800,
        d2h=25600,
        d2d=440000,
        fans=2,
        ecc=False,
        has_serial=False,
        encoders=True,
    ),
    Model(
        key="h100-80gb",
        name="NVIDIA H100 80GB HBM3",
        core=_GH100,
        memory_mib=81559,
        reserved_mib=550,
        context_mib=520,
        bar1_mib=131072,
        sm_count=132,
        l2_kib=51200,
        memory_bus_bits=5120,
        sm_clock=1980,
        sm_clock_max=1980,
        memory_clock=2619,
        power=(700, 200, 700),
        power_idle=72,
        temperatures=(30, 89, 95),
        pci_device=0x2330,
        pci_subsystem=0x16C1,
        part_number="692-2G520-0200-000",
        vbios="96.00.89.00.01",
        pcie_generation=5,
        h2d=52700,
        d2h=53300,
        d2d=1250000,
        mig=geometries.H100_80GB,
        fabric=Fabric.SWITCH,
        nvlinks=18,
        nvlink_version=NvlinkVersion.V4_0,
    ),
    Model(
        key="h100nvl",
        name="NVIDIA H100 NVL",
        core=_GH100,
        memory_mib=95830,
        reserved_mib=550,
        context_mib=520,
        bar1_mib=131072,
        sm_count=132,
        l2_kib=51200,
        memory_bus_bits=6144,
        sm_clock=1785,
        sm_clock_max=1785,
        memory_clock=2619,
        power=(400, 200, 400),
        power_idle=62,
        temperatures=(30, 89, 95),
        pci_device=0x2321,
        pci_subsystem=0x1839,
        part_number="900-21010-0020-000",
        vbios="96.00.88.00.11",
        pcie_generation=5,
        h2d=52700,
        d2h=53300,
        d2d=1450000,
        mig=geometries.H100_94GB,
        fabric=Fabric.PAIR,
        nvlinks=12,
        nvlink_version=NvlinkVersion.V4_0,
    ),
    Model(
        key="h200",
        name="NVIDIA H200",
        core=_GH100,
        memory_mib=143771,
        reserved_mib=606,
        context_mib=528,
        bar1_mib=262144,
        sm_count=132,
        l2_kib=51200,
        memory_bus_bits=6144,
        sm_clock=1980,
        sm_clock_max=1980,
        memory_clock=3201,
        power=(700, 200, 700),
        power_idle=76,
        temperatures=(30, 89, 95),
        pci_device=0x2335,
        pci_subsystem=0x18BE,
        part_number="692-2G520-0280-000",
        vbios="96.00.A0.00.03",
        pcie_generation=5,
        h2d=52700,
        d2h=53300,
        d2d=1850000,
        mig=geometries.H200,
        fabric=Fabric.SWITCH,
        nvlinks=18,
        nvlink_version=NvlinkVersion.V4_0,
    ),
    Model(
        key="gh200",
        name="NVIDIA GH200 480GB",
        core=_GH100,
        memory_mib=97871,
        reserved_mib=620,
        context_mib=534,
        bar1_mib=131072,
        sm_count=132,
        l2_kib=51200,
        memory_bus_bits=6144,
        sm_clock=1980,
        sm_clock_max=1980,
        memory_clock=2619,
        power=(900, 100, 900),
        power_idle=88,
        temperatures=(30, 89, 95),
        pci_device=0x2342,
        pci_subsystem=0x16EB,
        part_number="699-2G530-0200-310",
        vbios="96.00.A2.00.01",
        pcie_generation=5,
        pcie_width=1,
        h2d=360000,
        d2h=280000,
        d2d=1500000,
        mig=geometries.H100_96GB,
        fabric=Fabric.DIRECT,
        nvlinks=18,
        nvlink_version=NvlinkVersion.V4_0,
        coherent=True,
    ),
    Model(
        key="b200",
        name="NVIDIA B200",
        core=_GB100,
        memory_mib=183359,
        reserved_mib=726,
        context_mib=606,
        bar1_mib=262144,
        sm_count=148,
        l2_kib=129536,
        memory_bus_bits=8192,
        sm_clock=1965,
        sm_clock_max=1965,
        memory_clock=3996,
        power=(1000, 200, 1000),
        power_idle=140,
        temperatures=(29, 89, 95),
        pci_device=0x2901,
        pci_subsystem=0x1999,
        part_number="692-2G525-0220-000",
        vbios="97.00.82.00.1F",
        pcie_generation=5,
        h2d=54500,
        d2h=55300,
        d2d=3100000,
        mig=geometries.B200,
        fabric=Fabric.SWITCH,
        nvlinks=18,
        nvlink_version=NvlinkVersion.V5_0,
    ),
    Model(
        key="rtx-pro-6000",
        name="NVIDIA RTX PRO 6000 Blackwell Server Edition",
        core=_GB202,
        memory_mib=97887,
        reserved_mib=638,
        context_mib=520,
        bar1_mib=131072,
        sm_count=188,
        l2_kib=131072,
        memory_bus_bits=512,
        sm_clock=1590,
        sm_clock_max=2430,
        memory_clock=12481,
        power=(600, 300, 600),
        power_idle=34,
        temperatures=(31, 90, 95),
        pci_device=0x2BB5,
        pci_subsystem=0x204E,
        part_number="900-2G153-0000-000",
        vbios="98.02.73.00.01",
        pcie_generation=5,
        h2d=53900,
        d2h=54700,
        d2d=760000,
        mig=geometries.RTX_PRO_6000,
        encoders=True,
    ),
)

MODELS: dict[str, Model] = {row.key: row for row in _ROWS}

# SPDX-License-Identifier: Apache-2.0
"""A machine description as the bytes that the simulated driver and NVML read, and back.

Everything that a short form leaves open is decided here and only from the description itself:
UUIDs, serial numbers, PCI addresses, NUMA nodes, who is linked to whom. The same description is
the same machine, byte for byte, whoever makes it.
"""

import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from allotment.devices import layout
from allotment.devices.cuts import pack_cuts
from allotment.devices.descriptions import GpuDescription, MachineDescription
from allotment.devices.geometries import Geometry
from allotment.devices.model_facts import Architecture, Fabric
from allotment.model.devices import Device

__all__ = [
    "MachineFacts",
    "identity",
    "link_peers",
    "numa_nodes",
    "pack",
    "pack_mig",
    "unpack",
]

_MIB: Final = 1 << 20
_LINKS: Final = 18
_NO_PEER: Final = -1
_SWITCH_PEER: Final = -2
_BUS_STEP: Final = 15  # 16 GPUs on one domain's 256 buses, none of them 0

Value = int | str | bytes | Sequence[int]


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What a machine file says about its machine."""

    devices: tuple[Device, ...]
    driver_version: str
    cuda_version: int
    timeslice_us: int
    kernel_us: int


def identity(description: MachineDescription) -> str:
    """Return the machine's name: a hash of all that it is, and of the layout it is written in.

    Two releases of allotment that disagree about the file never meet in one.
    """
    return identity_of(pack(description), pack_mig(description))


def identity_of(packed: bytes, mig: bytes) -> str:
    """Return the name of a machine whose file has this description and these cuts."""
    return hashlib.sha256(packed + mig + layout.STATE_LAYOUT.encode()).hexdigest()[:16]


def unpack(data: bytes) -> MachineFacts:
    """Read what `pack` wrote; raise `ValueError` where the bytes are no such description."""
    if len(data) < layout.MACHINE_SIZE:
        raise ValueError(f"it has {len(data)} bytes, too few for a simulated machine")
    machine = _fields(data, layout.MACHINE_FIELDS, 0)
    if _number(machine, "magic") != layout.MACHINE_MAGIC:
        raise ValueError("it does not begin like a simulated machine")
    version = _number(machine, "version")
    if version != layout.MACHINE_VERSION:
        raise ValueError(f"it is of version {version}, this allot knows {layout.MACHINE_VERSION}")
    count = _number(machine, "gpu_count")
    if not 1 <= count <= layout.MACHINE_GPUS:
        raise ValueError(f"it says that it has {count} GPUs")
    return MachineFacts(
        devices=tuple(_device(data, at) for at in range(count)),
        driver_version=_string(machine, "driver_version"),
        cuda_version=_number(machine, "cuda_version"),
        timeslice_us=_number(machine, "timeslice_us"),
        kernel_us=_number(machine, "default_kernel_us"),
    )


# ---- what follows from a description -------------------------------------------------------------


def numa_nodes(gpus: Sequence[GpuDescription]) -> list[int]:
    """Return each GPU's NUMA node: as described, else the first half on 0, the second on 1."""
    half = (len(gpus) + 1) // 2
    return [
        (0 if at < half else 1) if gpu.numa_node is None else gpu.numa_node
        for at, gpu in enumerate(gpus)
    ]


def link_peers(gpus: Sequence[GpuDescription]) -> list[list[int]]:
    """Return, for each GPU, where each of its NVLinks ends: a GPU's index, -1 none, -2 a switch.

    GPUs of one model are joined as that model's boards are. What GPU a has towards b, b has
    towards a.
    """
    peers = []
    for at, gpu in enumerate(gpus):
        alike = [i for i, other in enumerate(gpus) if other.model.key == gpu.model.key]
        links = _links(gpu, alike.index(at), alike)
        peers.append([*links, *[_NO_PEER] * (_LINKS - len(links))])
    return peers


def _links(gpu: GpuDescription, rank: int, alike: Sequence[int]) -> list[int]:
    count = gpu.model.nvlinks
    match gpu.model.fabric:
        case Fabric.NONE:
            return []
        case Fabric.SWITCH:
            return [_SWITCH_PEER] * count
        case Fabric.PAIR:
            other = rank ^ 1
            return [alike[other] if other < len(alike) else _NO_PEER] * count
        case Fabric.DIRECT:
            if len(alike) == 1:
                return [_NO_PEER] * count
            distances = _distances(len(alike))
            steps = [next(distances) for _ in range(count)]
            return [alike[(rank + step) % len(alike)] for step in steps]


def _distances(count: int) -> Iterator[int]:
    """Yield steps around a ring of `count`, each followed by its opposite: links come in pairs."""
    while True:
        for distance in range(1, count):
            yield distance
            yield -distance


def _seed(description: MachineDescription) -> str:
    """Return what UUIDs and serial numbers are made from: the description, and no layout."""
    gpus = [
        (gpu.model.key, gpu.memory_bytes, gpu.uuid, gpu.numa_node, gpu.ecc)
        for gpu in description.gpus
    ]
    driver = (description.driver_version, description.cuda_version)
    times = (description.timeslice_us, description.kernel_us)
    return hashlib.sha256(repr((gpus, driver, times)).encode()).hexdigest()


# ---- bytes ---------------------------------------------------------------------------------------


def pack(description: MachineDescription) -> bytes:
    """Return `allot_machine_description` of native/simulated/machine.h for a description."""
    seed = _seed(description)
    data = bytearray(layout.MACHINE_SIZE)
    driver, cuda = description.driver_version, description.cuda_version
    _write(
        data,
        layout.MACHINE_FIELDS,
        0,
        {
            "magic": layout.MACHINE_MAGIC,
            "version": layout.MACHINE_VERSION,
            "gpu_count": len(description.gpus),
            "file_bytes": layout.MACHINE_FILE_BYTES,
            "driver_version": driver,
            "nvml_version": f"{cuda // 1000}.{driver}",
            "cuda_version": cuda,
            "timeslice_us": description.timeslice_us,
            "default_kernel_us": description.kernel_us,
        },
    )
    nodes = numa_nodes(description.gpus)
    peers = link_peers(description.gpus)
    for at, gpu in enumerate(description.gpus):
        values = {
            **_model_values(gpu),
            **_own_values(gpu, seed, at),
            "numa_node": nodes[at],
            "nvlink_peer": peers[at],
        }
        _write(data, layout.GPU_FIELDS, _gpu_at(at), values)
        if gpu.model.mig is not None:
            _write_profiles(data, _gpu_at(at), gpu.model.mig, gpu.model.memory_mib)
    return bytes(data)


def pack_mig(description: MachineDescription) -> bytes:
    """Return what a new machine has at `layout.MIG_AT`: what its GPUs are cut into."""
    data = bytearray(layout.MACHINE_GPUS * layout.GPU_MIG_SIZE)
    seed = _seed(description)
    for at, gpu in enumerate(description.gpus):
        if gpu.cuts is None or gpu.model.mig is None:
            continue
        packed = pack_cuts(gpu.cuts, gpu.model.mig.slots, f"{seed}/{at}")
        data[at * layout.GPU_MIG_SIZE : (at + 1) * layout.GPU_MIG_SIZE] = packed
    return bytes(data)


def _write_profiles(data: bytearray, gpu_at: int, geometry: Geometry, memory_mib: int) -> None:
    profiles_at = gpu_at + layout.GPU_FIELDS["mig_profiles"][0]
    for shape in geometry.shapes:
        copies, decoders, encoders, jpegs, ofas = shape.engines
        values: dict[str, Value] = {
            "name": shape.name_on(memory_mib),
            "slices": shape.slices,
            "id": shape.number,
            "size": shape.size,
            "starts": sum(1 << start for start in shape.starts),
            "most": shape.most,
            "media": int(shape.has_media),
            "sm_count": shape.multiprocessors,
            "copy_engines": copies,
            "decoders": decoders,
            "encoders": encoders,
            "jpegs": jpegs,
            "ofas": ofas,
            "memory_bytes": shape.memory_mib * _MIB,
        }
        at = profiles_at + shape.place * layout.MIG_PROFILE_SIZE
        _write(data, layout.MIG_PROFILE_FIELDS, at, values)


def _own_values(gpu: GpuDescription, seed: str, at: int) -> dict[str, Value]:
    """What tells one GPU of a model from the next."""
    digest = hashlib.sha256(f"{seed}/{at}".encode()).hexdigest()
    made = f"GPU-{digest[:8]}-{digest[8:12]}-{digest[12:16]}-{digest[16:20]}-{digest[20:32]}"
    serial = f"13{int(digest[32:48], 16) % 10**11:011d}"
    return {
        "uuid": gpu.uuid or made,
        "serial": serial if gpu.model.has_serial else "",
        "pci_domain": 0,
        "pci_bus": 7 + _BUS_STEP * at,
        "pci_device": 0,
        "pci_function": 0,
        "minor": at,
    }


def _model_values(gpu: GpuDescription) -> dict[str, Value]:
    model = gpu.model
    core = model.core
    enabled = model.ecc if gpu.ecc is None else gpu.ecc
    return {
        "name": model.name,
        "architecture": core.architecture.name.capitalize(),
        "vbios": model.vbios,
        "part_number": model.part_number,
        "memory_total": gpu.memory_bytes,
        "memory_reserved": model.reserved_mib * _MIB,
        "context_bytes": model.context_mib * _MIB,
        "bar1_total": model.bar1_mib * _MIB,
        "sm_count": model.sm_count,
        "compute_major": core.compute_capability[0],
        "compute_minor": core.compute_capability[1],
        "max_threads_per_sm": core.max_threads_per_sm,
        "max_threads_per_block": 1024,
        "warp_size": 32,
        "shared_per_block": 48 << 10,
        "shared_per_block_optin": core.shared_per_block_optin,
        "shared_per_sm": core.shared_per_sm,
        "registers_per_sm": 65536,
        "l2_bytes": model.l2_kib << 10,
        "memory_bus_width": model.memory_bus_bits,
        "sm_clock_mhz": model.sm_clock,
        "sm_clock_max_mhz": model.sm_clock_max,
        "memory_clock_mhz": model.memory_clock,
        "memory_clock_max_mhz": model.memory_clock,
        "power_limit_mw": model.power[0] * 1000,
        "power_limit_min_mw": model.power[1] * 1000,
        "power_limit_max_mw": model.power[2] * 1000,
        "power_idle_mw": model.power_idle * 1000,
        "temperature_idle_c": model.temperatures[0],
        "temperature_slowdown_c": model.temperatures[1],
        "temperature_shutdown_c": model.temperatures[2],
        "fan_count": model.fans,
        "pci_device_id": model.pci_device << 16 | model.pci_vendor,
        "pci_subsystem_id": model.pci_subsystem << 16 | model.pci_vendor,
        "pcie_generation": model.pcie_generation,
        "pcie_width": model.pcie_width,
        "brand": int(model.brand),
        "nvml_architecture": int(core.architecture),
        "ecc_supported": int(model.ecc is not None),
        "ecc_enabled": int(bool(enabled)),
        "mig_slots": 0 if model.mig is None else model.mig.slots,
        "mig_needs_reset": int(core.architecture is Architecture.AMPERE),
        "nvlink_count": model.nvlinks,
        "nvlink_version": int(model.nvlink_version),
        "encoder_supported": int(model.encoders),
        "engine_concurrent_kernels": core.concurrent_kernels,
        "h2d_mib_per_s": model.h2d,
        "d2h_mib_per_s": model.d2h,
        "d2d_mib_per_s": model.d2d,
        "integrated": int(model.coherent),
    }


def _device(data: bytes, at: int) -> Device:
    gpu = _fields(data, layout.GPU_FIELDS, _gpu_at(at))
    address = tuple(_number(gpu, f"pci_{part}") for part in ("domain", "bus", "device", "function"))
    return Device(
        uuid=_string(gpu, "uuid"),
        name=_string(gpu, "name"),
        index=at,
        memory_bytes=_number(gpu, "memory_total"),
        sm_count=_number(gpu, "sm_count"),
        compute_capability=(_number(gpu, "compute_major"), _number(gpu, "compute_minor")),
        numa_node=None if (node := _number(gpu, "numa_node")) < 0 else node,
        pci_bus_id="{:08X}:{:02X}:{:02X}.{:X}".format(*address),
        simulated=True,
        mig=False,
        reserved_bytes=_number(gpu, "memory_reserved"),
        context_bytes=_number(gpu, "context_bytes"),
    )


def _gpu_at(index: int) -> int:
    return layout.MACHINE_FIELDS["gpus"][0] + index * layout.GPU_SIZE


def _write(
    data: bytearray, fields: Mapping[str, tuple[int, str]], base: int, values: Mapping[str, Value]
) -> None:
    for name, value in values.items():
        at, code = fields[name]
        if isinstance(value, str):
            raw = value.encode("ascii")
            if len(raw) >= struct.calcsize(code):
                raise ValueError(f"{name} is too long: {value!r}")
            struct.pack_into(code, data, base + at, raw)
        elif isinstance(value, (int, bytes)):
            struct.pack_into(f"<{code}", data, base + at, value)
        else:
            struct.pack_into(f"<{code}", data, base + at, *value)


def _fields(
    data: bytes, fields: Mapping[str, tuple[int, str]], base: int
) -> dict[str, int | bytes]:
    """Read the first value of each field: all of a text, of an array only the beginning."""
    return {
        name: struct.unpack_from(f"<{code}", data, base + at)[0]
        for name, (at, code) in fields.items()
    }


def _number(fields: Mapping[str, int | bytes], name: str) -> int:
    return int(fields[name])


def _string(fields: Mapping[str, int | bytes], name: str) -> str:
    return bytes(fields[name]).split(b"\0", 1)[0].decode("ascii", errors="replace")

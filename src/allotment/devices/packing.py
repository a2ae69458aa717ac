# SPDX-License-Identifier: Apache-2.0
"""Converts a machine description to the simulated driver's bytes, and back.

Values that the description leaves open follow only from it: UUIDs, serial numbers, PCI addresses,
NUMA nodes, links. Equal descriptions give byte-identical machines.
"""

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import msgspec

from allotment.devices import layout
from allotment.devices.descriptions import Cut, GpuDescription, MachineDescription
from allotment.devices.geometries import Geometry
from allotment.devices.model_facts import Architecture, Fabric
from allotment.files import open_regular
from allotment.model.devices import Device, mps_clients
from allotment.model.errors import StateError
from allotment.model.formats import format_uuid

_MIB: Final = 1 << 20
_LINKS: Final = 18
_NO_PEER: Final = -1
_SWITCH_PEER: Final = -2
_WHOLE: Final = 8
_HALF: Final = 4
_ORDINARY_SLICES: Final = 3
_GPUS_AT: Final = layout.MACHINE_FIELDS["gpus"][0]
_BUS_STEP: Final = 15  # 16 GPUs on one domain's 256 buses, none of them 0

Value = int | str | bytes | Sequence[int]


class MachineFacts(msgspec.Struct, frozen=True):
    """The facts in a machine file."""

    devices: tuple[Device, ...]
    driver_version: str
    cuda_version: int
    timeslice_us: int
    kernel_us: int


def identity(packed: bytes, mig: bytes) -> str:
    """The machine's name: a hash of its description, its slices and the file's layout.

    So releases with different layouts never share a file.
    """
    return _digest(packed + mig + layout.STATE_LAYOUT.encode())[:16]


def _digest(data: bytes) -> str:
    import hashlib  # late: it loads OpenSSL, which most commands do not need

    return hashlib.sha256(data).hexdigest()


@lru_cache(maxsize=16)  # `allot top` reads its machines every second
def unpack(data: bytes) -> MachineFacts:
    """The inverse of `pack`; raises `ValueError` for invalid bytes."""
    if len(data) < layout.MACHINE_SIZE:
        raise ValueError(f"it has {len(data)} bytes, too few for a simulated machine")
    machine = _fields(data, layout.MACHINE_FIELDS, 0)
    if machine["magic"] != layout.MACHINE_MAGIC:
        raise ValueError("it does not start with the magic number")
    version = machine["version"]
    if version != layout.MACHINE_VERSION:
        raise ValueError(f"it has version {version}, this allot reads {layout.MACHINE_VERSION}")
    count = machine["gpu_count"]
    if not 1 <= count <= layout.MACHINE_GPUS:
        raise ValueError(f"its number of GPUs is {count}")
    return MachineFacts(
        devices=tuple(_device(data, at, cuda=machine["cuda_version"]) for at in range(count)),
        driver_version=machine["driver_version"],
        cuda_version=machine["cuda_version"],
        timeslice_us=machine["timeslice_us"],
        kernel_us=machine["default_kernel_us"],
    )


# ---- what follows from a description -------------------------------------------------------------


def numa_nodes(gpus: Sequence[GpuDescription]) -> list[int]:
    """Each GPU's NUMA node: as described, else the first half on 0, the second on 1."""
    half = (len(gpus) + 1) // 2
    return [
        (0 if at < half else 1) if gpu.numa_node is None else gpu.numa_node
        for at, gpu in enumerate(gpus)
    ]


def link_peers(gpus: Sequence[GpuDescription]) -> list[list[int]]:
    """For each GPU, the other end of each of its NVLinks: a GPU's index, -1 none, -2 a switch.

    GPUs of one model are joined as on that model's boards. Links are symmetric.
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
    """Seed of UUIDs and serial numbers: the description, without the layout."""
    gpus = [
        (gpu.model.key, gpu.memory_bytes, gpu.uuid, gpu.numa_node, gpu.ecc)
        for gpu in description.gpus
    ]
    driver = (description.driver_version, description.cuda_version)
    times = (description.timeslice_us, description.kernel_us)
    return _digest(repr((gpus, driver, times)).encode())


# ---- bytes ---------------------------------------------------------------------------------------


def pack(description: MachineDescription) -> bytes:
    """`allot_machine_description` of native/simulated/machine.h for a description."""
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
        gpu_at = _GPUS_AT + at * layout.GPU_SIZE
        _write(data, layout.GPU_FIELDS, gpu_at, values)
        if gpu.model.mig is not None:
            _write_profiles(data, gpu_at, gpu.model.mig, gpu.model.memory_mib)
    return bytes(data)


def pack_mig(description: MachineDescription) -> bytes:
    """A new machine's bytes at `layout.MIG_AT`: the slices of its GPUs."""
    data = bytearray(layout.MACHINE_GPUS * layout.GPU_MIG_SIZE)
    seed = _seed(description)
    for at, gpu in enumerate(description.gpus):
        if gpu.cuts is None or gpu.model.mig is None:
            continue
        base = at * layout.GPU_MIG_SIZE
        _write_cuts(data, base, gpu.cuts, gpu.model.mig.slots, f"{seed}/{at}/mig")
    return bytes(data)


def _write_cuts(data: bytearray, base: int, cuts: Sequence[Cut], slots: int, seed: str) -> None:
    """Write `allot_gpu_mig` with MIG on. `seed` determines the UUIDs."""
    _write(data, layout.GPU_MIG_FIELDS, base, {"enabled": 1, "pending": 1})
    instances = base + layout.GPU_MIG_FIELDS["instances"][0]
    computes = base + layout.GPU_MIG_FIELDS["computes"][0]
    ids: list[int] = []
    for cut in cuts:
        ids.append(_instance_id(cut, slots, ids))
        _write(
            data,
            layout.GPU_INSTANCE_FIELDS,
            instances + cut.start * layout.GPU_INSTANCE_SIZE,
            {"there": 1, "id": ids[-1], "profile": cut.shape.place},
        )
        digits = _digest(f"{seed}/{cut.start}".encode())
        _write(
            data,
            layout.COMPUTE_INSTANCE_FIELDS,
            computes + cut.start * layout.COMPUTE_INSTANCE_SIZE,
            {
                "there": 1,
                "id": 0,
                "slices": cut.shape.slices,
                "sm_count": cut.shape.multiprocessors,
                "uuid": format_uuid("MIG", digits),
            },
        )


def _instance_id(cut: Cut, slots: int, taken: Sequence[int]) -> int:
    """NVML's id of a GPU instance (cuts.c, id_for)."""
    if slots == _WHOLE and cut.shape.size == _HALF:
        first = 2 if cut.shape.slices == _ORDINARY_SLICES and cut.start == 0 else 1
        return first if first not in taken else 3 - first
    return slots // cut.shape.size - 1 + cut.start // cut.shape.size


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
    digest = _digest(f"{seed}/{at}".encode())
    serial = f"13{int(digest[32:48], 16) % 10**11:011d}"
    return {
        "uuid": gpu.uuid or format_uuid("GPU", digest),
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
        "pcie_generation": core.pcie_generation,
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


def _device(data: bytes, at: int, *, cuda: int) -> Device:
    gpu = _fields(data, layout.GPU_FIELDS, _GPUS_AT + at * layout.GPU_SIZE)
    address = (gpu[f"pci_{part}"] for part in ("domain", "bus", "device", "function"))
    return Device(
        uuid=gpu["uuid"],
        name=gpu["name"],
        index=at,
        memory_bytes=gpu["memory_total"],
        sm_count=gpu["sm_count"],
        compute_capability=(gpu["compute_major"], gpu["compute_minor"]),
        numa_node=None if gpu["numa_node"] < 0 else gpu["numa_node"],
        pci_bus_id="{:08X}:{:02X}:{:02X}.{:X}".format(*address),
        simulated=True,
        mig=False,
        reserved_bytes=gpu["memory_reserved"],
        context_bytes=gpu["context_bytes"],
        mps_clients=mps_clients(cuda),
    )


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


def _fields(data: bytes, fields: Mapping[str, tuple[int, str]], base: int) -> dict[str, Any]:
    """The first value of each field: a whole text, the first entry of an array."""
    values: dict[str, Any] = {}
    for name, (at, code) in fields.items():
        value = struct.unpack_from(f"<{code}", data, base + at)[0]
        is_text = isinstance(value, bytes)
        values[name] = value.split(b"\0", 1)[0].decode("ascii", "replace") if is_text else value
    return values


MACHINE_VARIABLE: Final = "ALLOTMENT_SIMULATED_MACHINE"
"""Variable with the machine file's path, for the libraries."""


def read_machine(path: Path) -> MachineFacts:
    """Raises `StateError` for a file that is not a machine."""
    try:
        with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
            data = file.read(layout.MACHINE_SIZE)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise StateError(
            f"cannot read the simulated machine {path}: {error.strerror}",
            hint="create it again with --simulated, or unset ALLOTMENT_SIMULATED_MACHINE",
        ) from error
    try:
        facts = unpack(data)
    except ValueError as error:
        raise damaged_machine(path, str(error)) from error
    if size < layout.MACHINE_FILE_BYTES:
        raise damaged_machine(path, f"it has {size} of {layout.MACHINE_FILE_BYTES} bytes")
    return facts


def damaged_machine(path: Path, problem: str) -> StateError:
    return StateError(
        f"{path} is not a simulated machine: {problem}",
        hint=f"end the programs that use it, and remove it: rm -r {path.parent}",
    )

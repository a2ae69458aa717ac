# SPDX-License-Identifier: Apache-2.0
"""A node's GPUs as devices of Dynamic Resource Allocation: shares, whole GPUs, MIG slices. Pure.

Every GPU is offered in all ways at once. The counters of its set let a scheduler give it in one way
only: a share device takes them all with its first claim, a slice takes its memory slots.

NVIDIA's DRA driver has one type, `gpu`, for parts and for the whole: so it publishes GPUs with
`--consumable-shares=memory`. In its place (`is_nvidias`) a GPU is one such device.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

import msgspec

from allotment.agent.labels.features import architecture_family
from allotment.agent.mig.state import CutGpu
from allotment.devices.facts import DeviceFacts, NodeFacts
from allotment.dialects.own.resource_claims import (
    COMPUTE_CAPACITY,
    MEMORY_CAPACITY,
    DevicePart,
)
from allotment.kube.nodes import format_quantity
from allotment.model.clusters import TakenPart
from allotment.model.compute import WHOLE
from allotment.model.devices import Device
from allotment.model.mig import MigPlace, MigProfile, MigSlice
from allotment.model.structs import replace
from allotment.modes import ledger_mode

TAKEN: Final = "allotment.dev/taken"
"""A taint: shares that are no claims' have some of the GPU."""
UNUSABLE: Final = "allotment.dev/unusable"
"""A taint: the GPU takes nothing new, for the reason in its value."""
MONITOR: Final = "allotment.dev/monitor"
"""A taint of each device that is for monitors alone."""
DEFAULT_COMPUTE: Final = 5
"""Percent of a GPU's time that a claim consumes if it names no amount."""

_MIB: Final = 1 << 20
_ALL: Final = 100
"""Percent."""
_MOST_DEVICES: Final = 64
"""Of a slice whose devices have taints or counters (resource.k8s.io/v1, types.go)."""
_MOST_SETS: Final = 8
"""Counter sets of a slice."""
_PREFIX: Final = "GPU-"
_SHORT: Final = 8
_LONGEST_VALUE: Final = 63
_MEDIA: Final = "media"


class DeviceType(StrEnum):
    """The attribute `type`."""

    SHARE = "share"
    """A GPU that several claims consume in parts."""
    GPU = "gpu"
    """A whole GPU."""
    MIG = "mig"
    """A place for a MIG slice, which is cut when a pod needs it."""
    MONITOR = "monitor"
    """The sight of a GPU, for claims with adminAccess."""


class PoolDevice(msgspec.Struct, frozen=True, kw_only=True):
    """One device, and what it stands for."""

    name: str
    part: DevicePart
    document: Mapping[str, Any]
    is_whole_by_default: bool = False
    """A claim that names no amount of it has all of it."""

    def part_for(self, amounts: Collection[str]) -> DevicePart:
        """Return what a claim that names these capacities has of it."""
        if self.is_whole_by_default and not {MEMORY_CAPACITY, COMPUTE_CAPACITY} & {*amounts}:
            return replace(self.part, is_whole=True)
        return self.part


class GpuState(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a GPU for its devices."""

    device: Device
    facts: DeviceFacts | None = None
    cut: CutGpu | None = None
    """None: it has no MIG, or is not offered in mode mig."""
    taken: TakenPart = msgspec.field(default=TakenPart())
    """By shares that are no claims', without slices."""
    slices: tuple[MigSlice, ...] = ()
    """Slices that no claim has: of pods, of `allot run`, of other tools."""
    problem: str = ""
    """Why it takes nothing new."""
    is_evicted: bool = False
    """Its pods have to go as well."""


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """The devices of a node, and the contents of its slices."""

    devices: Mapping[str, PoolDevice] = msgspec.field(default_factory=dict)
    """By name."""
    slices: tuple[Mapping[str, Any], ...] = ()


def pool_of(gpus: Sequence[GpuState], node: NodeFacts | None, *, is_nvidias: bool = False) -> Pool:
    """Return the pool of a node with these GPUs, in the order in which they are to be filled.

    `is_nvidias`: with the types of devices of NVIDIA's driver.
    """
    names = _names([each.device.uuid for each in gpus])
    found: dict[str, PoolDevice] = {}
    sets = []
    for gpu in gpus:
        name = names[gpu.device.uuid]
        counters = _counters(gpu)
        sets.append({"name": name, "counters": _values(counters)})
        common = _attributes(gpu, node)
        undivided = (
            _gpu(gpu, name, common, counters) if is_nvidias else _ways(gpu, name, common, counters)
        )
        for device in (*undivided, *_slices(gpu, name, common)):
            found[device.name] = device
    documents = [each.document for each in found.values()]
    slices: list[Mapping[str, Any]] = [
        {"sharedCounters": sets[at : at + _MOST_SETS]} for at in range(0, len(sets), _MOST_SETS)
    ]
    slices += [
        {"devices": documents[at : at + _MOST_DEVICES]}
        for at in range(0, len(documents), _MOST_DEVICES)
    ]
    return Pool(devices=found, slices=tuple(slices))


def _names(uuids: Sequence[str]) -> Mapping[str, str]:
    """Return a name for each GPU: the start of its UUID, as long as it has to be."""
    bare = {uuid: uuid.removeprefix(_PREFIX).lower() for uuid in uuids}
    length = _SHORT
    while len({text[:length] for text in bare.values()}) < len(bare):
        length += 1
    return {uuid: f"gpu-{text[:length].strip('-')}" for uuid, text in bare.items()}


def _counters(gpu: GpuState) -> Mapping[str, int]:
    """Return what the ways of giving a GPU exclude each other by."""
    if gpu.cut is None or not gpu.cut.profiles:
        return {"gpu": 1}
    slots = max(start + each.size for each in gpu.cut.profiles for start in each.starts)
    found = {f"memory-slice-{slot}": 1 for slot in range(slots)}
    return {**found, _MEDIA: 1} if any(map(_is_scarce, gpu.cut.profiles)) else found


def _is_scarce(profile: MigProfile) -> bool:
    """Whether a GPU has media engines for one slice of this profile alone (`+me`)."""
    return "+me" in profile.name


def _values(counters: Mapping[str, int]) -> Mapping[str, Any]:
    return {name: {"value": str(amount)} for name, amount in counters.items()}


def _unusable(gpu: GpuState) -> Sequence[Mapping[str, str]]:
    return _taints(UNUSABLE, gpu.problem, "NoExecute" if gpu.is_evicted else "NoSchedule")


def _taken(gpu: GpuState) -> Sequence[Mapping[str, str]]:
    """Return the taint of devices that need all of a GPU."""
    return _unusable(gpu) or _taints(TAKEN, gpu.taken.mode or "share" if gpu.taken.shares else "")


def _closed(gpu: GpuState) -> Sequence[Mapping[str, str]]:
    """Return the taint of devices that need a GPU without slices."""
    return _taken(gpu) or (_taints(TAKEN, "slice") if gpu.slices else ())


def _gpu(
    gpu: GpuState, name: str, common: Mapping[str, object], counters: Mapping[str, int]
) -> Iterator[PoolDevice]:
    """Yield a GPU as the one device for parts and for the whole.

    Its default is all memory, so that it keeps its size: a GPU with other shares is not given.
    """
    device = gpu.device
    memory = device.allottable_bytes // _MIB * _MIB
    yield PoolDevice(
        name=name,
        part=DevicePart(uuid=device.uuid),
        is_whole_by_default=True,
        document=_document(
            name,
            {**common, "type": DeviceType.GPU},
            {
                MEMORY_CAPACITY: _capacity(memory, default=memory, step=_MIB),
                COMPUTE_CAPACITY: _capacity(_ALL, default=DEFAULT_COMPUTE, step=1, least=0),
                # For selectors: a claim consumes none, or the first would take them all.
                "multiprocessors": {
                    "value": str(device.sm_count),
                    "requestPolicy": {"default": "0", "validValues": ["0"]},
                },
            },
            [{"counterSet": name, "counters": _values(counters)}],
            _closed(gpu),
            allowMultipleAllocations=True,
        ),
    )


def _ways(
    gpu: GpuState, name: str, common: Mapping[str, object], counters: Mapping[str, int]
) -> Iterator[PoolDevice]:
    """Yield a GPU as a device for parts and one for the whole."""
    device = gpu.device
    everything = [{"counterSet": name, "counters": _values(counters)}]
    total = device.memory_bytes - device.reserved_bytes  # also while it is in MIG mode
    memory = max(0, total - gpu.taken.memory) // _MIB * _MIB
    compute = max(0, WHOLE - gpu.taken.guarantee) // (WHOLE // _ALL)
    unusable, closed = _unusable(gpu), _closed(gpu)
    is_undivided = not gpu.taken.shares or ledger_mode(gpu.taken.mode) is not None
    if memory and compute:
        yield PoolDevice(
            name=name,
            part=DevicePart(uuid=device.uuid),
            document=_document(
                name,
                {**common, "type": DeviceType.SHARE},
                {
                    MEMORY_CAPACITY: _capacity(memory, default=memory, step=_MIB),
                    COMPUTE_CAPACITY: _capacity(
                        compute, default=min(compute, DEFAULT_COMPUTE), step=1, least=0
                    ),
                },
                everything,
                unusable if is_undivided and not gpu.slices else closed,
                allowMultipleAllocations=True,
            ),
        )
    yield PoolDevice(
        name=f"{name}-whole",
        part=DevicePart(uuid=device.uuid, is_whole=True),
        document=_document(
            f"{name}-whole",
            {**common, "type": DeviceType.GPU},
            {
                MEMORY_CAPACITY: {"value": format_quantity(device.memory_bytes)},
                "multiprocessors": {"value": str(device.sm_count)},
            },
            everything,
            closed,
        ),
    )
    # kube-scheduler checks the counters of claims with adminAccess as well (1.36): it has none.
    yield PoolDevice(
        name=f"{name}-monitor",
        part=DevicePart(uuid=device.uuid, is_monitor=True),
        document=_document(
            f"{name}-monitor",
            {**common, "type": DeviceType.MONITOR},
            {},
            (),
            _taints(MONITOR, "admin-access"),
        ),
    )


def _slices(gpu: GpuState, name: str, common: Mapping[str, object]) -> Iterator[PoolDevice]:
    """Yield the places for MIG slices."""
    device, taken = gpu.device, _taken(gpu)
    for profile, start in _places(gpu):
        word = re.sub(r"[^a-z0-9]+", "-", profile.name).strip("-")
        slots = {f"memory-slice-{slot}": 1 for slot in range(start, start + profile.size)}
        if _is_scarce(profile):
            slots[_MEDIA] = 1
        place = MigPlace(profile.name, start)
        is_free = _is_free(gpu, profile, start)
        yield PoolDevice(
            name=f"{name}-mig-{word}-{start}",
            part=DevicePart(uuid=device.uuid, slice=place),
            document=_document(
                f"{name}-mig-{word}-{start}",
                {
                    **common,
                    "type": DeviceType.MIG,
                    "uuid": None,
                    "parentUUID": device.uuid,
                    "profile": profile.name,
                },
                {
                    MEMORY_CAPACITY: {"value": format_quantity(profile.memory_bytes)},
                    "multiprocessors": {"value": str(profile.multiprocessors)},
                },
                [{"counterSet": name, "counters": _values(slots)}],
                taken or (() if is_free else _taints(TAKEN, "slice")),
            ),
        )


def _places(gpu: GpuState) -> Iterator[tuple[MigProfile, int]]:
    for profile in gpu.cut.profiles if gpu.cut is not None else ():
        for start in profile.starts:
            yield profile, start


def _is_free(gpu: GpuState, profile: MigProfile, start: int) -> bool:
    """Whether no slice is in the place but claims'."""
    return all(
        each.start >= start + profile.size or each.start + each.size <= start for each in gpu.slices
    )


def _attributes(gpu: GpuState, node: NodeFacts | None) -> Mapping[str, object]:
    """Return the attributes of all devices of a GPU; the names are those of NVIDIA's driver."""
    device = gpu.device
    major, minor = device.compute_capability
    found: dict[str, object] = {
        "uuid": device.uuid,
        "productName": device.name,
        "architecture": architecture_family(major, minor).replace("-", " ").title(),
        "brand": (gpu.facts.brand if gpu.facts else "") or None,
        "cudaComputeCapability": _Version((major, minor)),
        "resource.kubernetes.io/pciBusID": _bus(device.pci_bus_id),
    }
    if node is not None:
        found["driverVersion"] = _Version(tuple(map(int, re.findall(r"\d+", node.driver_version))))
        found["cudaDriverVersion"] = _Version(node.cuda_version)
    if gpu.facts is not None and gpu.facts.pcie_root:
        found["resource.kubernetes.io/pcieRoot"] = gpu.facts.pcie_root
    if device.numa_node is not None:
        found["numaNode"] = found["resource.kubernetes.io/numaNode"] = device.numa_node
    return found


class _Version(msgspec.Struct, frozen=True):
    """A version with the three numbers that semver wants."""

    numbers: tuple[int, ...]

    def __str__(self) -> str:
        return ".".join(map(str, (*self.numbers, 0, 0)[:3]))


def _bus(text: str) -> str:
    """Return a PCI address with the kernel's four digits of domain; NVML writes eight."""
    return text.lower()[-len("0000:00:00.0") :]


def _document(
    name: str,
    attributes: Mapping[str, object],
    capacity: Mapping[str, Any],
    counters: Sequence[Mapping[str, Any]],
    taints: Sequence[Mapping[str, str]],
    **more: object,
) -> Mapping[str, Any]:
    return {
        "name": name,
        "attributes": {
            key: _value(value) for key, value in attributes.items() if value is not None
        },
        **({"capacity": capacity} if capacity else {}),
        **({"consumesCounters": counters} if counters else {}),
        **({"taints": list(taints)} if taints else {}),
        **more,
    }


def _value(value: object) -> Mapping[str, object]:
    match value:
        case _Version():
            return {"version": str(value)}
        case int():
            return {"int": value}
        case _:
            return {"string": str(value)}


def _capacity(
    total: int, *, default: int, step: int, least: int | None = None
) -> Mapping[str, Any]:
    return {
        "value": format_quantity(total),
        "requestPolicy": {
            "default": format_quantity(default),
            "validRange": {
                "min": format_quantity(step if least is None else least),
                "max": format_quantity(total),
                "step": format_quantity(step),
            },
        },
    }


def _taints(key: str, why: str, effect: str = "NoSchedule") -> Sequence[Mapping[str, str]]:
    """Return a taint that keeps new claims away, or none; its value is a label's."""
    if not why:
        return ()
    value = re.sub(r"[^A-Za-z0-9._-]+", "-", why)[:_LONGEST_VALUE].strip("-_.")
    return ({"key": key, "value": value, "effect": effect},)

# SPDX-License-Identifier: Apache-2.0
"""A node's GPUs as devices of Dynamic Resource Allocation: shares, whole GPUs, MIG slices. Pure.

Also the orders for shares of the claims that have some of them.

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
from allotment.agent.node_state import NodeState
from allotment.devices.facts import DeviceFacts, NodeFacts
from allotment.dialects.foreign.claim_bookings import request_of
from allotment.dialects.own.resource_claims import (
    COMPUTE_CAPACITY,
    MEMORY_CAPACITY,
    SEATS_CAPACITY,
    SHARED_MODES,
    AllocatedDevice,
    DevicePart,
    ResourceClaim,
    gpu_names,
    monitor_name,
    slice_name,
    whole_name,
)
from allotment.kube.nodes import format_quantity
from allotment.model.clusters import TakenPart
from allotment.model.compute import WHOLE
from allotment.model.devices import Device
from allotment.model.errors import NotFoundError
from allotment.model.mig import MigHold, MigPlace, MigProfile, MigSlice
from allotment.model.modes import EXCLUSIVE, MIG, SOFT, TIMESLICE
from allotment.model.placements import MAX_SHARES
from allotment.model.pods import ContainerKind, Owner, PodUid
from allotment.model.shares import Injection, Share
from allotment.model.structs import replace
from allotment.modes import traits_of
from allotment.placement.mig.slots import TakenSlots, cover, loss, slots_of
from allotment.shares.booking import booked
from allotment.shares.mode_policy import ModePolicy, refusal
from allotment.shares.placing import ShareOrder
from allotment.shares.record import LoadedShare

TAKEN: Final = "allotment.dev/taken"
"""A taint: shares that are no claims' have some of the GPU."""
UNUSABLE: Final = "allotment.dev/unusable"
"""A taint: the GPU takes nothing new, for the reason in its value."""
MONITOR: Final = "allotment.dev/monitor"
"""A taint of each device that is for monitors alone."""
DEFAULT_COMPUTE: Final = 5
"""Percent of a GPU's time that a claim consumes if it names no amount."""

_MIB: Final = 1 << 20
_LEAST_LEFT: Final = 2 * _MIB
"""The API refuses a capacity that is less than its policy's least amount and one step."""
_ALL: Final = 100
"""Percent."""
_MOST_DEVICES: Final = 64
"""Of a slice whose devices have taints or counters (resource.k8s.io/v1, types.go)."""
_MOST_SETS: Final = 8
"""Counter sets of a slice."""
_LONGEST_VALUE: Final = 63
_LONGEST_TEXT: Final = 64
"""Of an attribute."""
_MEDIA: Final = "media"
_UNDIVIDED: Final = (EXCLUSIVE, TIMESLICE)


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
    mode: str = ""
    """Of its shares, claims' too, without slices."""
    slices: tuple[MigSlice, ...] = ()
    """Slices that no claim has: of pods, of `allot run`, of other tools."""
    allowed: ModePolicy | None = None
    """The modes of new shares, by an administrator; None: all."""
    problem: str = ""
    """Why it takes nothing new."""
    booked_bytes: int = 0
    """Memory that shares have of it, claims' and others', slices' as well."""
    is_evicted: bool = False
    """Its pods have to go as well."""


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """The devices of a node, and the contents of its slices."""

    devices: Mapping[str, PoolDevice] = msgspec.field(default_factory=dict)
    """By name."""
    slices: tuple[Mapping[str, Any], ...] = ()


def filling_key(gpu: GpuState) -> tuple[int, tuple[int, int, str]]:
    """Return the sort key of GPUs in a pool: the fullest first, as the first that fits is taken."""
    return -gpu.booked_bytes, gpu.device.place


def pool_of(gpus: Sequence[GpuState], node: NodeFacts | None, *, is_nvidias: bool = False) -> Pool:
    """Return the pool of a node with these GPUs, in the order in which they are to be filled.

    `is_nvidias`: with the types of devices of NVIDIA's driver.
    """
    gpus = sorted(gpus, key=filling_key)
    names = gpu_names([each.device.uuid for each in gpus])
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


def gpus_of(
    state: NodeState, shares: Sequence[LoadedShare], facts: NodeFacts | None, *, driver: str
) -> Sequence[GpuState]:
    """Return the GPUs, with what shares have of them.

    kube-scheduler counts the claims of `driver` itself. Those of a driver of another name are as
    other shares.
    """
    claims = {
        each.id
        for each in shares
        if each.owner and each.owner.is_claim and each.owner.resource == driver
    }
    everything = booked(shares)
    others = booked([each for each in shares if each.id not in claims]) if claims else everything
    by_uuid = {each.uuid: each for each in facts.devices} if facts else {}
    gpus = [each for each in state.devices.values() if each.slice_of is None]
    reserved = state.reserved_whole()
    parts = [part for each in shares for part in each.devices()]

    def filled(uuid: str) -> int:
        booking = everything.get(uuid)
        whole = booking.memory if booking else 0
        return whole + sum(part.memory_bytes for part in parts if part.gpu == uuid)

    def slices(uuid: str) -> tuple[MigSlice, ...]:
        cut = state.cut_gpus.get(uuid)
        return tuple(
            each
            for each in (cut.slices if cut else ())
            if each.hold is not MigHold.IDLE and each.holder not in claims
        )

    return [
        GpuState(
            device=gpu,
            facts=by_uuid.get(gpu.uuid),
            cut=state.cut_gpus.get(gpu.uuid),
            taken=TakenPart(booking.memory, booking.guaranteed, booking.shares, booking.mode)
            if (booking := others.get(gpu.uuid))
            else TakenPart(),
            mode=everything[gpu.uuid].mode if gpu.uuid in everything else "",
            slices=slices(gpu.uuid),
            allowed=state.mode_policies.get(gpu.uuid),
            problem=state.unusable.get(gpu.uuid, "")
            or ("cordoned" if gpu.uuid in state.cordoned else "")
            or reserved.get(gpu.uuid, ""),
            booked_bytes=filled(gpu.uuid),
            is_evicted=gpu.uuid in state.evicted,
        )
        for gpu in gpus
    ]


def parts_of(
    claim: ResourceClaim,
    request: str,
    group: Sequence[AllocatedDevice],
    pool: Pool,
    *,
    node: str,
) -> Sequence[tuple[AllocatedDevice, DevicePart]]:
    """Return what the devices of a claim's request stand for. Raises `NotFoundError`."""
    known = pool.devices
    missing = [each.device for each in group if each.pool != node or each.device not in known]
    if missing:
        raise NotFoundError(
            f"ResourceClaim {claim}: {', '.join(missing)} is not on node {node}",
            hint="its GPU is lost or was replaced: delete the pod, so that another is chosen",
        )
    amounts = claim.capacities.get(request, frozenset())
    return [(each, known[each.device].part_for(amounts)) for each in group]


def orders_of(claim: ResourceClaim, pool: Pool, *, node: str) -> Mapping[str, ShareOrder]:
    """Return the order for each request of a claim. Raises `NotFoundError`, `UsageError`."""
    orders = {}
    for request, group in claim.requests().items():
        parts = parts_of(claim, request, group, pool, node=node)
        uuids = tuple(part.uuid for _, part in parts)
        orders[request] = ShareOrder(
            id=claim.share_id(request),
            owner=owner_of(claim, request),
            request=request_of(claim, request, parts),
            devices=uuids,
            slices=tuple(part.slice for _, part in parts if part.slice is not None),
            candidates=uuids,
            injection=Injection.CDI,
        )
    return orders


def owner_of(claim: ResourceClaim, request: str) -> Owner:
    return Owner(
        uid=PodUid(claim.uid),
        namespace=claim.namespace,
        pod=claim.name,
        container=request,
        kind=ContainerKind.REGULAR,
        resource=claim.driver,
        is_claim=True,
    )


def _counters(gpu: GpuState) -> Mapping[str, int]:
    """Return what the ways of giving a GPU exclude each other by."""
    if gpu.cut is None or not gpu.cut.profiles:
        return {"gpu": 1}
    slots = max(start + each.size for each in gpu.cut.profiles for start in each.starts)
    found = {f"memory-slice-{slot}": 1 for slot in range(slots)}
    media = max((each.most for each in gpu.cut.profiles if each.has_media), default=0)
    return {**found, _MEDIA: media} if media else found


def _values(counters: Mapping[str, int]) -> Mapping[str, Any]:
    return {name: {"value": str(amount)} for name, amount in counters.items()}


def _size(device: Device) -> int:
    """Return what a GPU has for shares, also while it is in MIG mode."""
    return (device.memory_bytes - device.reserved_bytes) // _MIB * _MIB


def _most_shares(gpu: GpuState) -> int:
    """Return how many shares of the mode of its present ones a GPU serves at a time."""
    return gpu.device.mps_clients if traits_of(gpu.mode or SOFT).needs_daemon else MAX_SHARES


def _kept(gpu: GpuState, *modes: str) -> Sequence[Mapping[str, str]]:
    """Return the taint of devices of which an administrator allows none of the modes."""
    reasons = [refusal(gpu.allowed, mode) for mode in modes]
    return _taints(UNUSABLE, reasons[0] if all(reasons) else "")


def _unusable(gpu: GpuState) -> Sequence[Mapping[str, str]]:
    return _taints(UNUSABLE, gpu.problem, "NoExecute" if gpu.is_evicted else "NoSchedule")


def _taken(gpu: GpuState) -> Sequence[Mapping[str, str]]:
    """Return the taint of devices that need all of a GPU."""
    return _unusable(gpu) or _taints(TAKEN, gpu.taken.mode or "share" if gpu.taken.shares else "")


def _closed(gpu: GpuState) -> Sequence[Mapping[str, str]]:
    """Return the taint of devices that need a GPU without slices."""
    return _taken(gpu) or (_taints(TAKEN, "slice") if _is_cut(gpu) else ())


def _is_cut(gpu: GpuState) -> bool:
    """Whether others have slices of a GPU, or it is in MIG mode and we leave that to others."""
    return bool(gpu.slices) or (gpu.cut is None and gpu.device.mig)


def _gpu(
    gpu: GpuState, name: str, common: Mapping[str, object], counters: Mapping[str, int]
) -> Iterator[PoolDevice]:
    """Yield a GPU as the one device for parts and for the whole.

    Its default is all memory, so that it keeps its size: a GPU with other shares is not given.
    """
    device = gpu.device
    memory = _size(device)
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
                    "requestPolicy": _always("0"),
                },
                SEATS_CAPACITY: _seats(_most_shares(gpu)),
            },
            [{"counterSet": name, "counters": _values(counters)}],
            _kept(gpu, *_UNDIVIDED, *SHARED_MODES) or _closed(gpu),
            allowMultipleAllocations=True,
        ),
    )


def _ways(
    gpu: GpuState, name: str, common: Mapping[str, object], counters: Mapping[str, int]
) -> Iterator[PoolDevice]:
    """Yield a GPU as a device for parts and one for the whole."""
    device = gpu.device
    everything = [{"counterSet": name, "counters": _values(counters)}]
    memory = max(0, _size(device) - gpu.taken.memory) // _MIB * _MIB
    compute = max(0, WHOLE - gpu.taken.guarantee) // (WHOLE // _ALL)
    seats = _most_shares(gpu) - gpu.taken.shares
    closed = _closed(gpu)
    # A claim that names no mode is a share of mode soft, which takes turns with like ones alone.
    is_divided = not _is_cut(gpu) and (
        not gpu.taken.shares or traits_of(gpu.taken.mode).takes_turns
    )
    if memory < _LEAST_LEFT or not compute or seats < 1:
        # The API has no capacity of nothing. It stays, closed: claims may have parts of it.
        memory, compute, seats, is_divided = _size(device), _ALL, MAX_SHARES, False
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
                SEATS_CAPACITY: _seats(seats),
            },
            everything,
            _kept(gpu, *SHARED_MODES) or (_unusable(gpu) if is_divided else closed),
            allowMultipleAllocations=True,
        ),
    )
    yield PoolDevice(
        name=whole_name(name),
        part=DevicePart(uuid=device.uuid, is_whole=True),
        document=_document(
            whole_name(name),
            {**common, "type": DeviceType.GPU},
            {
                MEMORY_CAPACITY: {"value": format_quantity(device.memory_bytes)},
                "multiprocessors": {"value": str(device.sm_count)},
            },
            everything,
            _kept(gpu, EXCLUSIVE) or closed,
        ),
    )
    # kube-scheduler checks the counters of claims with adminAccess as well (1.36): it has none.
    yield PoolDevice(
        name=monitor_name(name),
        part=DevicePart(uuid=device.uuid, is_monitor=True),
        document=_document(
            monitor_name(name),
            {**common, "type": DeviceType.MONITOR},
            {},
            (),
            _taints(MONITOR, "admin-access"),
        ),
    )


def _slices(gpu: GpuState, name: str, common: Mapping[str, object]) -> Iterator[PoolDevice]:
    """Yield the places for MIG slices."""
    device, taken = gpu.device, _kept(gpu, MIG) or _taken(gpu)
    for profile, start, is_free in _places(gpu):
        slots = {f"memory-slice-{slot}": 1 for slot in range(start, start + profile.size)}
        if profile.has_media:
            slots[_MEDIA] = 1
        place = MigPlace(profile.name, start)
        yield PoolDevice(
            name=slice_name(name, place),
            part=DevicePart(uuid=device.uuid, slice=place),
            document=_document(
                slice_name(name, place),
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


def _places(gpu: GpuState) -> Iterator[tuple[MigProfile, int, bool]]:
    """Yield the places of each profile, and whether no slice is in the way but claims'.

    In the order of the planner: first what costs later slices least.
    """
    cut = gpu.cut
    if cut is None or not cut.profiles:
        return
    slots = slots_of(cut.profiles)
    others = TakenSlots.by(gpu.slices)
    used = TakenSlots.by(each for each in cut.slices if each.hold is not MigHold.IDLE).mask
    for profile in cut.profiles:
        free = slots.starts(profile, others)

        def cost(start: int, size: int = profile.size) -> tuple[bool, float, int]:
            after = used | cover(start, size)
            lost = loss(slots, slots.rooms(used), before=used, after=after)
            return bool(used & cover(start, size)), lost, start

        for start in sorted(profile.starts, key=cost):
            yield profile, start, start in free


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
            return {"string": str(value)[:_LONGEST_TEXT]}


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


def _always(amount: str) -> Mapping[str, Any]:
    """Return the policy of a capacity of which each claim consumes the same, unasked."""
    return {"default": amount, "validValues": [amount]}


def _seats(count: int) -> Mapping[str, Any]:
    return {"value": str(count), "requestPolicy": _always("1")}


def _taints(key: str, why: str, effect: str = "NoSchedule") -> Sequence[Mapping[str, str]]:
    """Return a taint that keeps new claims away, or none; its value is a label's."""
    if not why:
        return ()
    value = re.sub(r"[^A-Za-z0-9._-]+", "-", why)[:_LONGEST_VALUE].strip("-_.")
    return ({"key": key, "value": value, "effect": effect},)


def status_data(share: Share, part: DevicePart) -> Mapping[str, Any]:
    """Return what a claim's status says about one device of its share, as `allot ps` names it."""
    profile = part.slice.profile if part.slice is not None else ""
    device = next(
        (
            each
            for each in share.devices
            if part.uuid in {each.uuid, each.gpu} and profile in {"", each.profile}
        ),
        None,
    )
    is_enforced = traits_of(share.mode).has_shim
    data: dict[str, Any] = {"share": share.id, "mode": share.mode, "enforced": is_enforced}
    if is_enforced and device is not None:
        data["memory_limit_bytes"] = device.memory_bytes
        data["compute"] = {
            "guarantee_percent": device.compute.guarantee * 100 / WHOLE,
            "ceiling_percent": device.compute.ceiling * 100 / WHOLE,
        }
    return data

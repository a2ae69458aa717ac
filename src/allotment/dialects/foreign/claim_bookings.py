# SPDX-License-Identifier: Apache-2.0
"""What a ResourceClaim takes of a node's GPUs, or will take. Pure.

The node makes a claim's shares from the same requests. Until a node's inventory counts a share, a
scheduler counts it by the claim, in the same form as a pod. For a claim that waits, it ranks nodes
as for a pod that asks for the same.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from allotment.dialects.foreign.nvidia_claims import DRIVER as NVIDIAS_DRIVER
from allotment.dialects.foreign.nvidia_claims import is_nvidias, read_sharing
from allotment.dialects.own.resource_claims import (
    COMPUTE_CAPACITY,
    DRIVER,
    MEMORY_CAPACITY,
    AllocatedDevice,
    ClaimSharing,
    DevicePart,
    ResourceClaim,
    WantedDevices,
    part_named,
    request_for,
)
from allotment.model.clusters import (
    NodeDevice,
    NodeInventory,
    PlacedContainer,
    PlacedDevice,
    PodBooking,
    WantedContainer,
)
from allotment.model.compute import DEFAULT_FLOOR, WHOLE, Compute
from allotment.model.errors import QuantityError, UsageError
from allotment.model.formats import format_bytes
from allotment.model.modes import SOFT
from allotment.model.pods import PodUid
from allotment.model.quantities import MemoryAmount, parse_whole
from allotment.model.requests import Request, whole_devices
from allotment.placement.search import placed_container, slice_guarantee


def sharing_of(claim: ResourceClaim, request: str, *, is_slice: bool) -> ClaimSharing | None:
    """Return how a request's device is shared, by NVIDIA's parameters. Raises `UsageError`."""
    return read_sharing(filter(is_nvidias, claim.parameters_of(request)), is_slice=is_slice)


def request_of(
    claim: ResourceClaim, request: str, parts: Sequence[tuple[AllocatedDevice, DevicePart]]
) -> Request:
    """Return what the share of one of a claim's requests asks for. Raises `UsageError`."""
    is_slice = any(part.slice is not None for _, part in parts)
    return request_for(
        parts,
        [each for each in claim.parameters_of(request) if not is_nvidias(each)],
        asks_compute=COMPUTE_CAPACITY in claim.capacities.get(request, ()),
        sharing=sharing_of(claim, request, is_slice=is_slice),
    )


def claim_booking(claim: ResourceClaim, node: NodeInventory) -> PodBooking | None:
    """Return what a claim takes of a node's GPUs that the inventory does not count yet.

    A request with parameters that the node refuses takes nothing: it never has a share.
    """
    containers = tuple(_containers(claim, node))
    if not containers:
        return None
    return PodBooking(uid=PodUid(claim.uid), node=node.name, containers=containers)


def _containers(claim: ResourceClaim, node: NodeInventory) -> Iterator[PlacedContainer]:
    devices = {each.uuid: each for each in node.devices}
    gpus = {uuid: each.mig.profiles if each.mig else () for uuid, each in devices.items()}
    for request, group in claim.requests().items():
        if claim.share_id(request) in node.claims:
            continue
        amounts = claim.capacities.get(request, frozenset())
        named = (
            (each, part_named(each.device, gpus, driver=claim.driver, amounts=amounts))
            for each in group
            if each.pool == node.name
        )
        parts = [(each, part) for each, part in named if part is not None]
        if not parts:
            continue
        try:
            wanted = request_of(claim, request, parts)
        except UsageError:
            continue
        placed = tuple(_placed(part, wanted, devices) for _, part in parts)
        yield placed_container(WantedContainer(name=request, request=wanted), wanted, placed)


def _placed(part: DevicePart, wanted: Request, devices: Mapping[str, NodeDevice]) -> PlacedDevice:
    device = devices[part.uuid]
    if part.slice is None:
        memory = wanted.memory.of(device.memory_bytes)
        return PlacedDevice(part.uuid, memory, wanted.compute.guarantee)
    profiles = device.mig.profiles if device.mig else ()
    profile = next((each for each in profiles if each.name == part.slice.profile), None)
    if profile is None:
        return PlacedDevice(part.uuid, 0)  # without a place the whole GPU counts as used
    guarantee = slice_guarantee(profile, device.mig)
    return PlacedDevice(part.uuid, profile.memory_bytes, guarantee, part.slice)


def wanted_containers(claims: Iterable[ResourceClaim]) -> tuple[WantedContainer, ...]:
    """Return what claims that wait will take, by the first of alternatives; empty: unknown.

    A class is known by its name alone, and a request with an amount of memory is for a part.
    """
    containers: dict[str, WantedContainer] = {}
    for claim in claims:
        for each in claim.wanted:
            name = f"{claim.name}/{each.request.partition('/')[0]}"
            if name in containers:
                continue
            request = _wanted(each)
            if request is None:
                return ()
            containers[name] = WantedContainer(name=name, request=request)
    return tuple(containers.values())


def _wanted(each: WantedDevices) -> Request | None:
    if MEMORY_CAPACITY not in each.amounts:
        is_whole = each.device_class in {DRIVER, NVIDIAS_DRIVER}
        return whole_devices(each.count, mode=SOFT) if is_whole else None
    try:
        size = parse_whole(each.amounts[MEMORY_CAPACITY])
        percent = parse_whole(each.amounts.get(COMPUTE_CAPACITY, "0"))
    except QuantityError:
        return None
    guarantee = min(WHOLE, percent * WHOLE // 100)
    return Request(
        MemoryAmount(format_bytes(size), size_bytes=size),
        count=each.count,
        compute=Compute(guarantee, guarantee) if guarantee else Compute(),
        floor=0 if COMPUTE_CAPACITY in each.amounts else DEFAULT_FLOOR,
    )

# SPDX-License-Identifier: Apache-2.0
"""What a pod has of a node whose agent chose the GPUs by itself, so that no placement tells. Pure.

The node's annotation has, of each device, the sum of all such pods and of the machine's own
programs. What a pod asks for is known, so it can be on those devices alone of which at least that
much is taken. Often that is one, and then it is known; otherwise it is not, and only that much
is taken off as it has, wherever it may be.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from allotment.model.clusters import (
    NodeDevice,
    NodeInventory,
    PlacedContainer,
    PlacedDevice,
    PodBooking,
    PodNeed,
    Taken,
)
from allotment.model.requests import Request
from allotment.placement.constraints import matches_model

__all__ = ["Unplaced", "unplaced"]


@dataclass(frozen=True, slots=True)
class Unplaced:
    """What a node's agent gave a pod."""

    node: NodeInventory
    """The node without it."""
    booking: PodBooking
    """What it has, of those containers of which that is known."""
    choices: tuple[str, ...] = ()
    """Where it is not known for a container: the UUIDs of the devices among which its are."""


def unplaced(need: PodNeed, node: NodeInventory, running: Collection[str]) -> Unplaced | None:
    """Find what a pod has of its node; None: nothing that is taken there can be its own.

    `running` has the names of its containers that run: others have nothing.
    """
    devices = {each.uuid: each for each in node.devices}
    placed = []
    choices: dict[str, None] = {}
    for each in need.containers:
        if each.name not in running:
            continue
        request = each.request
        there = [one for one in devices.values() if _may_be_on(one, request)]
        if len(there) < request.count:
            return None
        parts = []
        for device in there[: request.count]:
            part = _part(device, request)
            if device.taken.shares == 1:
                # Nobody else is there: if it is more than was asked for, it was resized.
                part = PlacedDevice(device.uuid, device.taken.memory, device.taken.guarantee)
            devices[device.uuid] = replace(device, taken=_less(device.taken, part))
            parts.append(part)
        if len(there) == request.count:
            placed.append(
                PlacedContainer(
                    name=each.name,
                    devices=tuple(parts),
                    kind=each.kind,
                    place=each.place,
                    mode=request.mode,
                )
            )
        else:
            choices |= dict.fromkeys(one.uuid for one in there)
    if not placed and not choices:
        return None
    booking = PodBooking(uid=need.uid, node=node.name, containers=tuple(placed))
    without = replace(node, devices=tuple(devices.values()))
    return Unplaced(without, booking, tuple(choices))


def _may_be_on(device: NodeDevice, request: Request) -> bool:
    """Tell whether what is taken of a device may be a share of this request, or more than it."""
    wanted, taken = request.constraints, device.taken
    part = _part(device, request)
    return (
        taken.mode == request.mode
        and taken.shares > 0
        and part.memory <= taken.memory
        and part.guarantee <= taken.guarantee
        and (not wanted.uuids or device.uuid in wanted.uuids)
        and device.uuid not in wanted.not_uuids
        and (not wanted.models or any(matches_model(device.model, one) for one in wanted.models))
        and not any(matches_model(device.model, one) for one in wanted.not_models)
    )


def _part(device: NodeDevice, request: Request) -> PlacedDevice:
    memory = request.memory.of(device.memory_bytes)
    return PlacedDevice(device.uuid, memory, request.compute.guarantee)


def _less(taken: Taken, part: PlacedDevice) -> Taken:
    if taken.shares == 1:
        return Taken()
    return Taken(
        memory=taken.memory - part.memory,
        guarantee=taken.guarantee - part.guarantee,
        shares=taken.shares - 1,
        mode=taken.mode,
    )

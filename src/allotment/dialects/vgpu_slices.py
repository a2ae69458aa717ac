# SPDX-License-Identifier: Apache-2.0
"""How HAMi and Volcano call a pod's MIG devices.

Volcano, and HAMi up to v2.9, by a place in one of the groups that the administrator allows,
`GPU-UUID[GROUP-POSITION]`. It says of which profile a slice is, and not where it begins. HAMi v2.10
writes both, as JSON in an annotation of its own:

    [{"containerIndex": 0, "deviceIndex": 0, "gpuUUID": "GPU-...", "profile": "1g.10gb",
      "placement": {"start": 4, "size": 1}}]

Its three fields of what the driver has made of it (`migUUID` and two ids) are all there or none is;
they are not known when a pod is bound. (HAMi v2.10 `pkg/device/nvidia`; Volcano v1.13
`pkg/scheduler/api/devices/nvidia/vgpu/mig.go`.)
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from allotment.dialects.foreign import ForeignPod, GivenSlice, NodeView
from allotment.dialects.foreign_amounts import PLACE_ANEW
from allotment.dialects.protocol import refusal
from allotment.model.clusters import PlacedDevice, PodBooking
from allotment.model.mig_groups import MigGroup, MigGroupSlot, MigModelGroups, groups_of

__all__ = ["allocations", "allocations_of", "name_of", "slice_of"]

_MOST: Final = 4096
_MOST_CHARACTERS: Final = 64 << 10
_Small = Annotated[int, Meta(ge=0, lt=_MOST)]
_Text = Annotated[str, Meta(min_length=1, max_length=128)]


class _Where(msgspec.Struct, frozen=True):
    start: Annotated[int, Meta(ge=0, lt=64)]
    size: Annotated[int, Meta(ge=0, le=64)]


class _Allocation(msgspec.Struct, frozen=True, rename="camel"):
    container_index: _Small
    device_index: _Small
    gpu_uuid: _Text = msgspec.field(name="gpuUUID")
    profile: _Text
    placement: _Where


_decoder: Final = msgspec.json.Decoder(Annotated[list[_Allocation], Meta(max_length=_MOST)])


# ---- places in groups ----------------------------------------------------------------------------


def slice_of(slot: MigGroupSlot, known: Sequence[MigModelGroups], node: NodeView) -> GivenSlice:
    """Return what a place in a group is. Raises `UsageError` where the group has none such.

    Of a group that is not known it is some slice of the GPU.
    """
    for group in groups_of(known, node.models.get(slot.gpu, "")):
        if group.name == slot.group:
            template = group.at(slot.position)
            rank = slot.position - group.positions(template).start
            return GivenSlice(slot.gpu, template.name, rank=rank)
    return GivenSlice(slot.gpu)


def name_of(device: PlacedDevice, known: Sequence[MigModelGroups], node: NodeView) -> str:
    """Return how a device is called: a slice of a group that is known by its place in it.

    Slices are cut where there is room, so the place follows from where one begins.
    """
    if device.slice is None:
        return device.uuid
    profiles = node.profiles.get(device.uuid, ())
    starts = next((each.starts for each in profiles if each.name == device.slice.profile), ())
    rank = starts.index(device.slice.start) if device.slice.start in starts else 0
    for group in groups_of(known, node.models.get(device.uuid, "")):
        places = _positions(group, device.slice.profile)
        if places:
            return str(MigGroupSlot(device.uuid, group.name, places[rank % len(places)]))
    return device.uuid


def _positions(group: MigGroup, profile: str) -> list[int]:
    return [
        position
        for template in group.templates
        if template.name == profile
        for position in group.positions(template)
    ]


# ---- allocations ---------------------------------------------------------------------------------


def allocations(pod: ForeignPod, booking: PodBooking, node: NodeView) -> str:
    """Write the slices of a pod as HAMi v2.10 does; empty: it has none."""
    had = {each.name: each.devices for each in booking.containers}
    found = [
        _Allocation(
            container_index=container_index,
            device_index=device_index,
            gpu_uuid=device.uuid,
            profile=device.slice.profile,
            placement=_Where(device.slice.start, _size(device, node)),
        )
        for container_index, container in enumerate(pod.containers)
        for device_index, device in enumerate(had.get(container.name, ()))
        if device.slice is not None
    ]
    return msgspec.json.encode(found).decode() if found else ""


def _size(device: PlacedDevice, node: NodeView) -> int:
    profiles = node.profiles.get(device.uuid, ())
    place = device.slice
    return next((each.size for each in profiles if place and each.name == place.profile), 0)


def allocations_of(
    pod: ForeignPod, key: str, given: Mapping[str, Sequence[str | GivenSlice]]
) -> Mapping[str, Sequence[str | GivenSlice]]:
    """Say of what a pod was given where its slices are. Raises `UsageError`: it cannot be read.

    An allocation counts for a device of the pod's record alone, on the same GPU.
    """
    text = pod.annotations.get(key)
    if not text:
        return given
    if len(text) > _MOST_CHARACTERS:
        problem = f"the annotation {key} has {len(text)} characters, more than {_MOST_CHARACTERS}"
        raise refusal(pod, None, problem, hint=PLACE_ANEW)
    try:
        found = _decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        problem = f"the annotation {key} is no list of slices: {str(error)[:200]}"
        raise refusal(pod, None, problem, hint=PLACE_ANEW) from error
    places = {(each.container_index, each.device_index): each for each in found}
    if len(places) != len(found):
        problem = f"the annotation {key} names a device of a container twice"
        raise refusal(pod, None, problem, hint=PLACE_ANEW)
    indexes = {each.name: index for index, each in enumerate(pod.containers)}
    return {
        name: [
            _placed(device, places.get((indexes[name], index)))
            for index, device in enumerate(devices)
        ]
        for name, devices in given.items()
    }


def _placed(device: str | GivenSlice, its: _Allocation | None) -> str | GivenSlice:
    uuid = device if isinstance(device, str) else device.uuid
    if its is None or its.gpu_uuid != uuid:
        return device
    return GivenSlice(uuid, its.profile, its.placement.start)

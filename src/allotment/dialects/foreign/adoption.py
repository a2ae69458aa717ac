# SPDX-License-Identifier: Apache-2.0
"""Counts GPUs that other systems assigned to running pods, while the administrator enables this.

Records on pods can be forged. Only the GPUs are read from them, and Volcano's amounts if they are
larger than the request. Whether a pod has GPUs follows from its resources (immutable) or scheduler
name; amounts come from its request. Records of systems whose controllers create pods with them are
not accepted.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from allotment.dialects.foreign.base import (
    DIALECT,
    ForeignDialect,
    GivenSlice,
    NodeView,
    Translated,
)
from allotment.dialects.foreign.parsing import PLACE_ANEW
from allotment.dialects.foreign.settings import SYSTEMS
from allotment.dialects.own.protocol import refusal, shown
from allotment.model.clusters import (
    NodeInventory,
    NodeMig,
    PlacedContainer,
    PlacedDevice,
    PodBooking,
)
from allotment.model.compute import WHOLE
from allotment.model.formats import format_count
from allotment.model.mig import MigHold, MigPlace, MigProfile, named_profile
from allotment.model.modes import MIG, SOFT
from allotment.model.pods import ForeignContainer, ForeignPod, PodUid
from allotment.model.requests import Request

_OURS = "allotment.dev/"
_KUBERNETES = re.compile(r"(?:[^/]*\.)?kubernetes\.io/|[^/]*$")
_MARKS = re.compile(
    r"kubeshare/|sharedgpu/|runai-gpu-group|received-resource-type$|nvidia\.com/con"
)
"""Keys of KubeShare's and KAI's pods, which ask by annotations and labels alone."""


def may_be_given(resources: Iterable[str], written: Iterable[str]) -> bool:
    """A cheap first test by names of resources and annotations: most pods have no GPU."""
    return any(
        not resource.startswith(_OURS) and _KUBERNETES.match(resource) is None
        for resource in resources
    ) or any(_MARKS.match(each) is not None for each in written)


def adopted_usage(
    pod: ForeignPod,
    node: NodeInventory,
    dialects: Sequence[ForeignDialect],
    *,
    uid: PodUid,
    systems: Collection[str] = SYSTEMS,
) -> PodBooking | None:
    """The booking for a pod that another system bound; None: no GPUs, or the pod is ours.

    Counts only `systems`. The caller fills in CPU and memory. Raises `UsageError` for GPUs of
    another system that cannot be counted.
    """
    if DIALECT in pod.annotations or not pod.node or pod.node != node.name:
        return None
    view = node_view(node)
    for dialect in dialects:
        if not dialect.recognises(pod):
            continue
        given = dialect.given(pod, view)
        if not given:
            continue
        if dialect.name not in systems:
            problem = f"{dialect.title} record gives it GPUs, and such pods are not counted"
            hint = f"to adopt such pods, run: allot scheduler --take-over {dialect.name}"
            raise refusal(pod, None, problem, hint=f"{hint}; or end the pod")
        containers = _held(pod, dialect, given, view)
        return PodBooking(uid=uid, node=pod.node, containers=containers) if containers else None
    return None


def node_view(node: NodeInventory) -> NodeView:
    mig_states = {device.uuid: device.mig for device in node.devices if device.mig is not None}
    return NodeView(
        indexes={device.uuid: device.index for device in node.devices},
        models={device.uuid: device.model for device in node.devices},
        memory_bytes={device.uuid: device.memory_bytes for device in node.devices},
        profiles={uuid: mig.profiles for uuid, mig in mig_states.items()},
        foreign_slices={uuid: tuple(_places(mig)) for uuid, mig in mig_states.items()},
        in_mig_mode=frozenset(uuid for uuid, mig in mig_states.items() if mig.is_enabled),
    )


def _places(mig: NodeMig) -> Iterator[MigPlace]:
    names = {profile.number: profile.name for profile in mig.profiles}
    for slice_ in sorted(mig.slices, key=lambda one: one.start):
        if slice_.hold is MigHold.FOREIGN and slice_.profile in names:
            yield MigPlace(names[slice_.profile], slice_.start)


def _held(
    pod: ForeignPod,
    dialect: ForeignDialect,
    given: Mapping[str, Sequence[str | GivenSlice]],
    node: NodeView,
) -> tuple[PlacedContainer, ...]:
    asked = {each.container: each for each in dialect.translate(pod).containers}
    return tuple(
        _container(pod, container, place, asked[container.name], given=given, node=node)
        for place, container in enumerate(pod.containers)
        if container.name in asked and (container.name in given or not dialect.ignores(container))
    )


def _container(
    pod: ForeignPod,
    container: ForeignContainer,
    place: int,
    asked: Translated,
    *,
    given: Mapping[str, Sequence[str | GivenSlice]],
    node: NodeView,
) -> PlacedContainer:
    devices = given.get(container.name, ())
    request = asked.request
    if len(devices) != request.count:
        problem = f"it asks for {format_count(request.count, 'GPU')}, and its record names"
        raise refusal(pod, asked.container, f"{problem} {len(devices)}", hint=PLACE_ANEW)
    uuids = [device if isinstance(device, str) else device.uuid for device in devices]
    for uuid in uuids:
        if uuid not in node.memory_bytes:
            problem = f"its record names {shown(uuid)}, which is not a GPU of the node"
            raise refusal(pod, asked.container, problem, hint=PLACE_ANEW)
    slices = [GivenSlice(device) if isinstance(device, str) else device for device in devices]
    is_cut = node.in_mig_mode.issuperset(uuids)
    return PlacedContainer(
        name=container.name,
        devices=(_slices if is_cut else _parts)(request, slices, node),
        kind=container.kind,
        place=place,
        mode=MIG if is_cut else SOFT,
    )


def _parts(
    request: Request, given: Sequence[GivenSlice], node: NodeView
) -> tuple[PlacedDevice, ...]:
    found = []
    # Several MIG devices may be on one GPU, where Allotment creates no slices.
    for uuid, number in Counter(each.uuid for each in given).items():
        total = node.memory_bytes[uuid]
        part = request.times(number)
        recorded = [each for each in given if each.uuid == uuid]
        memory = max(part.memory.of(total), sum(each.memory_bytes for each in recorded))
        guarantee = max(part.compute.guarantee, sum(each.guarantee for each in recorded))
        found.append(PlacedDevice(uuid, min(total, memory), min(WHOLE, guarantee)))
    return tuple(found)


def _slices(
    request: Request, given: Sequence[GivenSlice], node: NodeView
) -> tuple[PlacedDevice, ...]:
    """Slices with their places. If a place is unknown, the whole GPU counts as used."""
    found = []
    for each in given:
        profile = named_profile(each.profile, node.profiles[each.uuid])
        place = None if profile is None else _place(each, profile, node)
        total = node.memory_bytes[each.uuid]
        memory = max(request.memory.of(total), each.memory_bytes)
        if profile and place:
            memory = profile.memory_bytes
        guarantee = max(request.compute.guarantee, each.guarantee)
        found.append(PlacedDevice(each.uuid, min(total, memory), guarantee, place))
    return tuple(found)


def _place(given: GivenSlice, profile: MigProfile, node: NodeView) -> MigPlace | None:
    """The place of a slice: as recorded, or any foreign one with its profile.

    Any of them is right, because all of them are in use.
    """
    if given.start is not None:
        is_legal = given.start in profile.starts
        return MigPlace(profile.name, given.start) if is_legal else None
    alike = [each for each in node.foreign_slices[given.uuid] if each.profile == profile.name]
    return alike[given.rank % len(alike)] if alike else None

# SPDX-License-Identifier: Apache-2.0
"""What other systems have given the pods that they bound, as bookings.

A pod that runs by another system's share when Allotment comes to its node keeps it, and what it has
is counted, so that nobody else is given the same. While that is so, and no longer: it is on for the
systems that the administrator names.

A record on a pod is a text that others may have a hand in, so that as little as can be is believed
of it. That is where the pod is, on which GPUs. That it has any at all is in its containers'
resources, which nobody can change once it is made (or, where a system asks by annotations, in its
scheduler's name); how much it has is what it asks for, neither less nor more. That nobody but a
scheduler writes a record is the admission policies' business, and nothing is believed of a system
that creates its pods with one: so might anybody's controller.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

from allotment.dialects.foreign import (
    DIALECT,
    ForeignContainer,
    ForeignDialect,
    ForeignPod,
    GivenSlice,
    NodeView,
    Translated,
)
from allotment.dialects.foreign_amounts import PLACE_ANEW
from allotment.dialects.protocol import refusal, shown
from allotment.model.clusters import (
    NodeInventory,
    NodeMig,
    PlacedContainer,
    PlacedDevice,
    PodBooking,
)
from allotment.model.formats import format_count
from allotment.model.mig import MigHold, MigPlace, MigProfile
from allotment.model.pods import ContainerKind, PodUid
from allotment.model.requests import MIG, SOFT, Request

__all__ = ["SYSTEMS", "may_be_given", "node_view", "taken_over"]

SYSTEMS: Final = (
    "hami",
    "volcano",
    "volcano-gpushare",
    "aliyun",
    "tencent",
    "elastic-gpu",
    "kai",
)
"""Dialects of systems whose pods say which GPUs they have, in words that can be held."""

_OURS = "allotment.dev/"
_KUBERNETES = re.compile(r"(?:[^/]*\.)?kubernetes\.io/|[^/]*$")
_MARKS = re.compile(
    r"kubeshare/|sharedgpu/|runai-gpu-group|received-resource-type$|nvidia\.com/con"
)
"""What KubeShare's and KAI's pods have: these ask by annotations and labels alone."""


def may_be_given(resources: Iterable[str], written: Iterable[str]) -> bool:
    """Tell by the names of its resources and annotations whether to look at a pod more closely.

    Most pods of a cluster have no GPU, and no time is to be spent on them.
    """
    return any(
        not each.startswith(_OURS) and _KUBERNETES.match(each) is None for each in resources
    ) or any(_MARKS.match(each) is not None for each in written)


def taken_over(
    pod: ForeignPod,
    node: NodeInventory,
    dialects: Sequence[ForeignDialect],
    *,
    uid: PodUid,
    systems: Collection[str] = SYSTEMS,
) -> PodBooking | None:
    """Return what another system has given a pod that it bound; None: nothing, or it is ours.

    Counted are those of `systems`. CPU and memory are the caller's to fill in. Raises `UsageError`:
    it has GPUs of another system that cannot be counted.
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
            problem = f"it has GPUs by {dialect.title} record, and these pods are not counted"
            hint = f"while nodes are taken over: allot scheduler --take-over {dialect.name}"
            raise refusal(pod, None, problem, hint=f"{hint}; or end the pod")
        containers = _held(pod, dialect, given, view)
        return PodBooking(uid=uid, node=pod.node, containers=containers) if containers else None
    return None


def node_view(node: NodeInventory) -> NodeView:
    """Return what a record may have to say about a node's devices."""
    return NodeView(
        indexes={each.uuid: each.index for each in node.devices},
        models={each.uuid: each.model for each in node.devices},
        memory_bytes={each.uuid: each.memory_bytes for each in node.devices},
        profiles={each.uuid: each.mig.profiles for each in node.devices if each.mig is not None},
        foreign_slices={
            each.uuid: tuple(_places(each.mig)) for each in node.devices if each.mig is not None
        },
        in_mig_mode=frozenset(
            each.uuid for each in node.devices if each.mig is not None and each.mig.is_enabled
        ),
    )


def _places(mig: NodeMig) -> Iterator[MigPlace]:
    names = {each.number: each.name for each in mig.profiles}
    for each in sorted(mig.slices, key=lambda one: one.start):
        if each.hold is MigHold.FOREIGN and each.profile in names:
            yield MigPlace(names[each.profile], each.start)


def _held(
    pod: ForeignPod,
    dialect: ForeignDialect,
    given: Mapping[str, Sequence[str | GivenSlice]],
    node: NodeView,
) -> tuple[PlacedContainer, ...]:
    """Hold a record to what the pod asks for: on so many GPUs, so much of each. `UsageError`."""
    asked = {each.container: each for each in dialect.translate(pod).containers}
    return tuple(
        _container(pod, container, place, asked[container.name], given=given, node=node)
        for place, container in enumerate(pod.containers)
        # Several of these systems pass init containers over.
        if container.name in asked
        and (container.name in given or container.kind is ContainerKind.REGULAR)
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
    uuids = [each if isinstance(each, str) else each.uuid for each in devices]
    for uuid in uuids:
        if uuid not in node.memory_bytes:
            problem = f"its record names {shown(uuid)}, which is no GPU of the node"
            raise refusal(pod, asked.container, problem, hint=PLACE_ANEW)
    slices = [GivenSlice(each) if isinstance(each, str) else each for each in devices]
    is_cut = node.in_mig_mode.issuperset(uuids)
    return PlacedContainer(
        name=container.name,
        devices=_slices(request, slices, node) if is_cut else _parts(request, uuids, node),
        kind=container.kind,
        place=place,
        mode=MIG if is_cut else SOFT,
    )


def _parts(request: Request, uuids: Sequence[str], node: NodeView) -> tuple[PlacedDevice, ...]:
    found = []
    # Several MIG devices may be of one GPU, of which nobody cuts slices here.
    for uuid, number in Counter(uuids).items():
        total = node.memory_bytes[uuid]
        part = request.times(number)
        found.append(PlacedDevice(uuid, min(total, part.memory.of(total)), part.compute.guarantee))
    return tuple(found)


def _slices(
    request: Request, given: Sequence[GivenSlice], node: NodeView
) -> tuple[PlacedDevice, ...]:
    """Return slices by where they are. Of whom that is not known all of the GPU counts as taken."""
    found = []
    for each in given:
        profile = next((one for one in node.profiles[each.uuid] if one.name == each.profile), None)
        place = None if profile is None else _place(each, profile, node)
        total = node.memory_bytes[each.uuid]
        memory = profile.memory_bytes if profile and place else request.memory.of(total)
        found.append(PlacedDevice(each.uuid, min(total, memory), request.compute.guarantee, place))
    return tuple(found)


def _place(given: GivenSlice, profile: MigProfile, node: NodeView) -> MigPlace | None:
    """Return where a slice is: as it is said, or else one of its profile that others have cut.

    Which of these does not matter: all of them are there.
    """
    if given.start is not None:
        is_legal = given.start in profile.starts
        return MigPlace(profile.name, given.start) if is_legal else None
    alike = [each for each in node.foreign_slices[given.uuid] if each.profile == profile.name]
    return alike[given.rank % len(alike)] if alike else None

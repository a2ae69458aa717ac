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
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from allotment.dialects.foreign import DIALECT, ForeignDialect, ForeignPod, NodeView, Translated
from allotment.dialects.foreign_amounts import PLACE_ANEW
from allotment.dialects.protocol import refusal, shown
from allotment.model.clusters import NodeInventory, PlacedContainer, PlacedDevice, PodBooking
from allotment.model.formats import format_count
from allotment.model.pods import ContainerKind, PodUid

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
    )


def _held(
    pod: ForeignPod,
    dialect: ForeignDialect,
    given: Mapping[str, Sequence[str]],
    node: NodeView,
) -> tuple[PlacedContainer, ...]:
    """Hold a record to what the pod asks for: on so many GPUs, so much of each. `UsageError`."""
    asked = {each.container: each for each in dialect.translate(pod).containers}
    return tuple(
        PlacedContainer(
            name=container.name,
            devices=_devices(pod, asked[container.name], given.get(container.name, ()), node),
            kind=container.kind,
            place=place,
        )
        for place, container in enumerate(pod.containers)
        # Several of these systems pass init containers over.
        if container.name in asked
        and (container.name in given or container.kind is ContainerKind.REGULAR)
    )


def _devices(
    pod: ForeignPod, asked: Translated, uuids: Sequence[str], node: NodeView
) -> tuple[PlacedDevice, ...]:
    request = asked.request
    if len(uuids) != request.count:
        problem = f"it asks for {format_count(request.count, 'GPU')}, and its record names"
        raise refusal(pod, asked.container, f"{problem} {len(uuids)}", hint=PLACE_ANEW)
    found = []
    # Several MIG devices may be of one GPU.
    for uuid, number in Counter(uuids).items():
        total = node.memory_bytes.get(uuid)
        if total is None:
            problem = f"its record names {shown(uuid)}, which is no GPU of the node"
            raise refusal(pod, asked.container, problem, hint=PLACE_ANEW)
        part = request.times(number)
        found.append(PlacedDevice(uuid, min(total, part.memory.of(total)), part.compute.guarantee))
    return tuple(found)

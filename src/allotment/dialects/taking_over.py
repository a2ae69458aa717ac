# SPDX-License-Identifier: Apache-2.0
"""What other systems have given the pods that they bound: their records, as bookings.

A pod that runs by another system's share when Allotment comes to its node keeps it, and what it has
is counted, so that nobody else is given the same.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from allotment.dialects.foreign import DIALECT, ForeignDialect, ForeignPod, NodeView
from allotment.model.clusters import NodeInventory, PodBooking
from allotment.model.pods import PodUid

__all__ = ["may_be_given", "node_view", "taken_over"]

_OURS = "allotment.dev/"
_KUBERNETES = re.compile(r"(?:[^/]*\.)?kubernetes\.io/|[^/]*$")
_MARKS = re.compile(r"kubeshare/|sharedgpu/|gpu-fraction|gpu-memory|runai-|received-resource-type$")
"""What KubeShare's and KAI's pods have: these two ask by annotations and labels alone."""


def may_be_given(resources: Iterable[str], written: Iterable[str]) -> bool:
    """Tell by the names of its resources and annotations whether to look at a pod more closely.

    Most pods of a cluster have no GPU, and no time is to be spent on them. The record alone is not
    enough: anybody may write that on a pod, but for a resource that no plugin gives the kubelet
    refuses the pod.
    """
    return any(
        not each.startswith(_OURS) and _KUBERNETES.match(each) is None for each in resources
    ) or any(_MARKS.match(each) is not None for each in written)


def taken_over(
    pod: ForeignPod, node: NodeInventory, dialects: Sequence[ForeignDialect], *, uid: PodUid
) -> PodBooking | None:
    """Return what another system has given a pod that it bound; None: nothing, or it is ours.

    CPU and memory are the caller's to fill in. Raises `UsageError`: its record cannot be read.
    """
    if DIALECT in pod.annotations or not pod.node or pod.node != node.name:
        return None
    view = node_view(node)
    for dialect in dialects:
        found = dialect.take_over(pod, view)
        if found is not None:
            return replace(found, uid=uid, node=pod.node)
    return None


def node_view(node: NodeInventory) -> NodeView:
    """Return what a record may have to say about a node's devices."""
    return NodeView(
        indexes={each.uuid: each.index for each in node.devices},
        models={each.uuid: each.model for each in node.devices},
        memory_bytes={each.uuid: each.memory_bytes for each in node.devices},
    )

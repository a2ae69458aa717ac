# SPDX-License-Identifier: Apache-2.0
"""What other systems have given the pods that they bound: their records, as bookings.

A pod that runs by another system's share when Allotment comes to its node keeps it, and what it has
is counted, so that nobody else is given the same.
"""

from collections.abc import Sequence
from dataclasses import replace

from allotment.dialects.foreign import DIALECT, ForeignDialect, ForeignPod, NodeView
from allotment.model.clusters import NodeInventory, PodBooking
from allotment.model.pods import PodUid

__all__ = ["node_view", "taken_over"]


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

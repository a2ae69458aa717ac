# SPDX-License-Identifier: Apache-2.0
"""What other systems' tools read on a pod: written at binding, and read where they bound it.

Neither may keep a pod from running: a record that cannot be written is left out. Nothing of
Allotment's own is written here, whatever a dialect returns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from allotment.dialects.annotations import PREFIX
from allotment.dialects.foreign import (
    DIALECT,
    ForeignContainer,
    ForeignDialect,
    ForeignPod,
    NodeView,
)
from allotment.dialects.translating import speaker_of
from allotment.model.clusters import NodeInventory, PodBooking
from allotment.model.errors import UsageError
from allotment.model.pods import Pod, PodUid

__all__ = ["node_view", "receipt_of", "taken_over"]


def receipt_of(
    pod: Pod,
    booking: PodBooking,
    node: NodeInventory,
    dialects: Sequence[ForeignDialect],
    *,
    now: float,
    annotations: Mapping[str, str] | None = None,
) -> Mapping[str, str]:
    """Return what a pod's own system would write on it, being bound so. Unix seconds.

    Empty for a pod that was not translated. `annotations` has those of the pod that are not
    Allotment's, as far as they are known: KAI's dialect goes by its own.
    """
    seen = ForeignPod(
        namespace=pod.namespace,
        name=pod.name,
        annotations={**(annotations or {}), **pod.annotations},
        containers=tuple(
            ForeignContainer(name=each.name, kind=each.kind) for each in pod.containers
        ),
        node=booking.node,
    )
    dialect = speaker_of(seen, dialects)
    if dialect is None:
        return {}
    try:
        record = dialect.receipt(seen, booking, node_view(node), now=now)
    except UsageError:
        return {}  # what it says of itself was refused before, or edited since: for no tool to read
    return {key: text for key, text in record.items() if not key.startswith(PREFIX)}


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

# SPDX-License-Identifier: Apache-2.0
"""What other systems' tools read on a pod: written at binding, for pods that were translated.

A receipt needs the pod as its author wrote it, which is more than is kept of 30,000 pods: it is
read from what kube-scheduler sends with its question, and from the API server where that was asked
of another replica.
"""

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import msgspec
import structlog

from allotment.dialects.foreign import ForeignDialect, ForeignPod
from allotment.dialects.taking_over import node_view
from allotment.kube.errors import KubeError
from allotment.model.clusters import NodeInventory, PodBooking, PodNeed
from allotment.model.errors import AllotError
from allotment.model.pods import PodUid
from allotment.scheduler.admission_pods import read_pod

__all__ = ["Receipts"]

_MOST_KEPT: Final = 4096
_log = structlog.get_logger(__name__)


class _Asked(msgspec.Struct):
    """kube-scheduler's question, of which the pod is kept as it came."""

    pod: msgspec.Raw = msgspec.field(name="Pod")


_asked: Final = msgspec.json.Decoder(_Asked)


class Receipts:
    """Receipts of the dialects."""

    def __init__(
        self,
        dialects: Sequence[ForeignDialect],
        *,
        node: Callable[[str], NodeInventory | None],
        read: Callable[[str, str], Awaitable[bytes]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`node` finds a node's devices; `read` fetches a pod by namespace and name."""
        self._dialects = {each.name: each for each in dialects}
        self._node = node
        self._read = read
        self._clock = clock
        self._pods: OrderedDict[PodUid, tuple[str, ForeignPod]] = OrderedDict()

    def asked(self, uid: PodUid, dialect: str, namespace: str, body: bytes) -> None:
        """Keep the pod of a question, if somebody's receipt will be asked for."""
        if dialect in self._dialects and uid not in self._pods:
            self._keep(uid, dialect, namespace, _asked.decode(body).pod)

    async def of(self, need: PodNeed, booking: PodBooking, dialect: str) -> Mapping[str, str]:
        """Return what is to be written besides the placement.

        A pod is not left unbound for the sake of another system's tools: what cannot be written is
        told in the log.
        """
        kept = self._pods.get(need.uid)
        dialect = dialect or (kept[0] if kept is not None else "")
        speaker = self._dialects.get(dialect)
        node = self._node(booking.node)
        if speaker is None or node is None:
            return {}
        try:
            if need.uid not in self._pods:
                body = await self._read(need.namespace, need.name)
                self._keep(need.uid, dialect, need.namespace, body)
            _, pod = self._pods.pop(need.uid)
            return speaker.receipt(pod, booking, node_view(node), now=self._clock())
        except (AllotError, KubeError, ValueError, KeyError) as error:
            _log.warning("no receipt", dialect=dialect, pod=str(need), why=str(error))
            return {}

    def _keep(self, uid: PodUid, dialect: str, namespace: str, raw: bytes | msgspec.Raw) -> None:
        self._pods[uid] = (dialect, read_pod(raw, namespace=namespace).pod)
        while len(self._pods) > _MOST_KEPT:
            self._pods.popitem(last=False)

# SPDX-License-Identifier: Apache-2.0
"""Annotations that other systems' tools read from bound pods, written for translated pods.

This needs the pod as its author wrote it. That is too much to keep for 30,000 pods, so it
comes from kube-scheduler's request, or from the API server if another replica got that request.
"""

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import msgspec
import structlog

from allotment.dialects.foreign.adoption import node_view
from allotment.dialects.foreign.base import ForeignDialect
from allotment.kube.errors import KubeError
from allotment.model.clusters import NodeInventory, PodBooking, PodNeed
from allotment.model.errors import AllotError
from allotment.model.pods import ForeignPod, PodUid
from allotment.scheduler.admission.pod_patch import read_pod

_MOST_KEPT: Final = 4096
_log = structlog.get_logger(__name__)


class _Asked(msgspec.Struct):
    """kube-scheduler's request; the pod is kept undecoded."""

    pod: msgspec.Raw = msgspec.field(name="Pod")


_asked: Final = msgspec.json.Decoder(_Asked)


class ResultAnnotations:
    """Writes the dialects' result annotations."""

    def __init__(
        self,
        dialects: Sequence[ForeignDialect],
        *,
        node: Callable[[str], NodeInventory | None],
        read: Callable[[str, str], Awaitable[bytes]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`node` returns a node's devices; `read` gets a pod by namespace and name."""
        self._dialects = {dialect.name: dialect for dialect in dialects}
        self._node = node
        self._read = read
        self._clock = clock
        self._pods: OrderedDict[PodUid, tuple[str, ForeignPod]] = OrderedDict()

    def asked(self, uid: PodUid, dialect: str, namespace: str, body: bytes) -> None:
        """Keep the pod of a request if its dialect writes some."""
        if dialect in self._dialects and uid not in self._pods:
            self._keep(uid, dialect, namespace, _asked.decode(body).pod)

    async def of(self, need: PodNeed, booking: PodBooking, dialect: str) -> Mapping[str, str]:
        """Return the annotations to write in addition to the placement.

        A failure is logged and does not keep the pod from being bound.
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
            return speaker.result_annotations(pod, booking, node_view(node), now=self._clock())
        except (AllotError, KubeError, ValueError, KeyError) as error:
            _log.warning(
                "no result annotations",
                dialect=dialect,
                pod=str(need),
                why=str(error),
            )
            return {}

    def _keep(self, uid: PodUid, dialect: str, namespace: str, raw: bytes | msgspec.Raw) -> None:
        self._pods[uid] = (dialect, read_pod(raw, namespace=namespace).pod)
        while len(self._pods) > _MOST_KEPT:
            self._pods.popitem(last=False)

# SPDX-License-Identifier: Apache-2.0
"""Pods that another system bound and that still run: they keep what they have, and it is booked.

What a record means depends on the GPUs of the node (some systems name them by index), so that a pod
is looked at again when its node changes. Of a node that publishes no devices nothing is read:
nothing is placed there either. Counted are the pods of those systems that were named at start:
moving from one is a passing state. Those of others are told, each once.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from allotment.dialects.foreign import ForeignDialect
from allotment.dialects.taking_over import taken_over
from allotment.kube.cluster_feed import ClusterPod
from allotment.model.clusters import NodeInventory
from allotment.model.errors import UsageError
from allotment.model.pods import PodUid

__all__ = ["TakeOver"]


def _nobody(pod: ClusterPod, why: str) -> None:
    del pod, why


class TakeOver:
    """Reads other systems' records on running pods. For one thread, as the book."""

    def __init__(
        self,
        dialects: Sequence[ForeignDialect],
        *,
        node: Callable[[str], NodeInventory | None],
        systems: Collection[str] = (),
        on_unread: Callable[[ClusterPod, str], None] = _nobody,
    ) -> None:
        """`node` finds a node's devices; `systems` has the dialects whose pods are counted.

        `on_unread` is told once of each pod and reason.
        """
        self._dialects = dialects
        self._systems = frozenset(systems)
        self._node = node
        self._on_unread = on_unread
        self._pods: dict[PodUid, ClusterPod] = {}
        """Those that another system may have given GPUs."""
        self._by_node: dict[str, dict[PodUid, None]] = {}
        self.taken: set[PodUid] = set()
        """Those whose GPUs are booked."""
        self.unread: dict[PodUid, str] = {}
        """Those that have GPUs of another system that are not counted, with the reason."""

    def put(self, pod: ClusterPod) -> ClusterPod:
        """Take note of a pod that came or changed; return it with what it was given."""
        if pod.foreign is None or pod.booking is None:
            self.gone(pod.uid)
            return pod
        self._pods[pod.uid] = pod
        self._by_node.setdefault(pod.node, {})[pod.uid] = None
        found, problem = self._read(pod)
        if found is pod:
            self.taken.discard(pod.uid)
        else:
            self.taken.add(pod.uid)
        if not problem:
            self.unread.pop(pod.uid, None)
        elif self.unread.get(pod.uid) != problem:
            self.unread[pod.uid] = problem
            self._on_unread(pod, problem)
        return found

    def gone(self, uid: PodUid) -> None:
        """Forget a pod, known or not."""
        pod = self._pods.pop(uid, None)
        if pod is None:
            return
        self.taken.discard(uid)
        self.unread.pop(uid, None)
        there = self._by_node[pod.node]
        del there[uid]
        if not there:
            del self._by_node[pod.node]

    def on(self, node: str) -> Iterator[ClusterPod]:
        """Yield the pods of a node that has changed, each with what it was given."""
        for uid in list(self._by_node.get(node, ())):
            yield self.put(self._pods[uid])

    def completed(self, pod: ClusterPod) -> ClusterPod:
        """Return a pod with what it was given; nothing is noted, and nobody is told."""
        return self._read(pod)[0]

    def _read(self, pod: ClusterPod) -> tuple[ClusterPod, str]:
        if pod.foreign is None or pod.booking is None:
            return pod, ""
        node = self._node(pod.node)
        if node is None:
            return pod, ""
        try:
            found = taken_over(
                pod.foreign, node, self._dialects, uid=pod.uid, systems=self._systems
            )
        except UsageError as error:
            return pod, f"{error.message}; hint: {error.hint}" if error.hint else error.message
        if found is None or not found.containers:
            return pod, ""
        return replace(pod, booking=replace(pod.booking, containers=found.containers)), ""

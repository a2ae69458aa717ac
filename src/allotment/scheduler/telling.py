# SPDX-License-Identifier: Apache-2.0
"""Tells of pods that come what was passed over when they were translated.

Whoever creates a pod reads a warning; a Deployment or a Job reads it and drops it. So the webhook
writes it on the pod, too, and it becomes an event, which stays where people look.
"""

from collections.abc import Callable

from allotment.kube.cluster_feed import ClusterPod, Listener
from allotment.model.clusters import NodeInventory
from allotment.model.pods import PodUid

__all__ = ["PassedOverTeller"]


class PassedOverTeller:
    """Hears of pods before `listener` does, and tells of each once. A `cluster_feed.Listener`."""

    def __init__(
        self,
        listener: Listener,
        *,
        tell: Callable[[ClusterPod, str], None],
        leads: Callable[[], bool],
    ) -> None:
        """Tell of nobody yet. Of all replicas, the one that leads tells."""
        self._listener = listener
        self._tell = tell
        self._leads = leads
        self._told: set[PodUid] = set()

    def pod_put(self, pod: ClusterPod) -> None:
        """A pod came or changed. One that nobody was leading for is told of when it changes."""
        if pod.passed_over and pod.uid not in self._told and self._leads():
            self._told.add(pod.uid)
            self._tell(pod, pod.passed_over)
        self._listener.pod_put(pod)

    def pod_gone(self, uid: PodUid) -> None:
        """A pod is gone."""
        self._told.discard(uid)
        self._listener.pod_gone(uid)

    def node_put(self, node: NodeInventory) -> None:
        """A node came or changed."""
        self._listener.node_put(node)

    def node_dropped(self, name: str) -> None:
        """A node is gone, or has no devices."""
        self._listener.node_dropped(name)

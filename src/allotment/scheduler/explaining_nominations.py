# SPDX-License-Identifier: Apache-2.0
"""What `allot explain` knows of pods that others are being ended for.

Which GPUs are kept for them, the scheduler that runs alone knows for certain. Here they are chosen
as one does that starts now: where pods are ending already, or else where any of them may be ended.
"""

from collections.abc import Iterator

from allotment.kube.live import LiveCluster, LivePod
from allotment.model.clusters import PodBooking, PodNeed
from allotment.scheduler.nominations import NominatedCluster, without_host

__all__ = ["keep_nominated", "keepers"]


def keep_nominated(cluster: NominatedCluster, live: LiveCluster) -> None:
    """Keep GPUs for each pod that is nominated, the most important first."""
    for pod in _nominated(live):
        there = [
            each
            for each in live.pods
            if each.booking is not None
            and each.booking.node == pod.nominated_node
            and each.priority < pod.priority
        ]
        ending = [each for each in there if each.is_ending]
        for gone in (ending, there):
            placed = cluster.place(
                without_host(pod.need), pod.nominated_node, without=[each.need.uid for each in gone]
            )
            if isinstance(placed, PodBooking):
                cluster.keep(pod.need, placed)
                break


def keepers(live: LiveCluster, need: PodNeed) -> list[LivePod]:
    """Return the nominated pods that this one does not get past; itself among them."""
    return [pod for pod in _nominated(live) if pod.priority >= need.priority]


def _nominated(live: LiveCluster) -> Iterator[LivePod]:
    return (
        pod
        for pod in live.pods
        if pod.nominated_node and pod.booking is None and pod.need.containers
    )

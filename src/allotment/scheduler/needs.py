# SPDX-License-Identifier: Apache-2.0
"""What a pod asks for: out of its resources and annotations, in placement's words."""

from allotment.dialects.registry import wanted
from allotment.kube.cluster_feed import ClusterPod
from allotment.model.clusters import PodNeed

__all__ = ["need_of"]


def need_of(pod: ClusterPod) -> PodNeed:
    """Say what a pod asks for; without containers where it asks for no GPU of ours.

    A placement that it has already is not looked at: somebody may have copied it from another pod
    with all the rest. Raises `UsageError`: what is wrong with what is written, and the next step.
    """
    return PodNeed(
        uid=pod.uid,
        namespace=pod.namespace,
        name=pod.name,
        cpu_milli=pod.cpu_milli,
        memory_bytes=pod.memory_bytes,
        priority=pod.priority,
        containers=() if pod.asks is None else wanted(pod.asks),
    )

# SPDX-License-Identifier: Apache-2.0
"""What a pod that waits asks for: out of its resources and annotations, in placement's words."""

from dataclasses import replace

from allotment.dialects.allotment import GPU
from allotment.dialects.placements import PLACEMENT
from allotment.dialects.registry import asks_of
from allotment.kube.cluster_feed import ClusterPod
from allotment.model.clusters import PodNeed, WantedContainer
from allotment.model.pods import Pod

__all__ = ["need_of"]


def need_of(pod: ClusterPod) -> PodNeed:
    """Say what a pod asks for; without containers where it asks for no GPU of ours.

    Raises `UsageError`: what is wrong with what it has written, and the next step.
    """
    return PodNeed(
        uid=pod.uid,
        namespace=pod.namespace,
        name=pod.name,
        cpu_milli=pod.cpu_milli,
        memory_bytes=pod.memory_bytes,
        containers=() if pod.asks is None else _wanted(pod.asks),
    )


def _wanted(pod: Pod) -> tuple[WantedContainer, ...]:
    if PLACEMENT in pod.annotations:
        # Somebody copied it from another pod with all the rest. Binding writes its own over it.
        kept = {key: text for key, text in pod.annotations.items() if key != PLACEMENT}
        pod = replace(pod, annotations=kept)
    places = {each.name: place for place, each in enumerate(pod.containers)}
    return tuple(
        WantedContainer(
            name=ask.container,
            request=replace(ask.request, mode=ask.mode or ask.request.mode),
            kind=ask.kind,
            place=places[ask.container],
        )
        for ask in asks_of(pod, nvidia=())
        if ask.resource == GPU and ask.request is not None
    )

# SPDX-License-Identifier: Apache-2.0
"""What was passed over is told of each pod once, by the replica that leads."""

from __future__ import annotations

from allotment.dialects.foreign.base import PASSED_OVER
from allotment.kube.cluster_feed import to_cluster_pod
from allotment.kube.objects import Metadata, PodObject, PodSpec
from allotment.model.clusters import ClusterPod
from allotment.model.pods import PodUid
from allotment.model.structs import replace
from allotment.placement.cluster.cluster import Cluster
from allotment.scheduler.core.book import Book
from allotment.scheduler.core.cluster_events import ClusterEventHandler, TranslationWarnings
from allotment.scheduler.core.quota import QuotaBook

POD = ClusterPod(uid=PodUid("u"), namespace="team", name="p", passed_over="mps")


def test_each_pod_is_told_of_once_by_whoever_leads() -> None:
    told, leading = list[tuple[str, str]](), list[bool]()
    warnings = TranslationWarnings(
        report=lambda pod, text: told.append((pod.uid, text)), leads=lambda: bool(leading)
    )
    keeper = ClusterEventHandler(Book(Cluster()), QuotaBook(), warnings=warnings)
    keeper.pod_put(POD)
    assert not told
    leading.append(True)
    keeper.pod_put(POD)
    keeper.pod_put(replace(POD, version="2"))
    keeper.pod_put(replace(POD, uid=PodUid("v"), passed_over=""))
    assert told == [("u", "mps")]
    keeper.pod_gone(PodUid("u"))
    keeper.pod_put(POD)
    assert told == [("u", "mps")] * 2


def test_it_is_read_of_pods_that_wait() -> None:
    """Of one that is bound it was told when it came; a restart tells of none anew."""
    meta = Metadata(name="p", namespace="team", uid="u", annotations={PASSED_OVER: "mps"})
    waiting = PodObject(metadata=meta, spec=PodSpec())
    assert to_cluster_pod(waiting).passed_over == "mps"
    waiting.spec.node_name = "n"
    assert not to_cluster_pod(waiting).passed_over

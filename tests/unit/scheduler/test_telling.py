# SPDX-License-Identifier: Apache-2.0
"""What was passed over is told of each pod once, by the replica that leads."""

from __future__ import annotations

from dataclasses import replace

from allotment.dialects.foreign import PASSED_OVER
from allotment.kube.cluster_feed import ClusterPod, to_cluster_pod
from allotment.kube.objects import Metadata, PodObject, PodSpec
from allotment.model.clusters import NodeInventory
from allotment.model.pods import PodUid
from allotment.scheduler.telling import PassedOverTeller

POD = ClusterPod(uid=PodUid("u"), namespace="team", name="p", passed_over="mps")


class Keeper:
    """A `Listener` that notes what it hears."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    def pod_put(self, pod: ClusterPod) -> None:
        self.heard.append(pod)

    def pod_gone(self, uid: PodUid) -> None:
        self.heard.append(uid)

    def node_put(self, node: NodeInventory) -> None:
        self.heard.append(node)

    def node_dropped(self, name: str) -> None:
        self.heard.append(name)


def test_each_pod_is_told_of_once_by_whoever_leads() -> None:
    keeper, told, leading = Keeper(), list[tuple[str, str]](), list[bool]()
    teller = PassedOverTeller(
        keeper, tell=lambda pod, text: told.append((pod.uid, text)), leads=lambda: bool(leading)
    )
    teller.pod_put(POD)
    assert not told
    leading.append(True)
    teller.pod_put(POD)
    teller.pod_put(replace(POD, version="2"))
    teller.pod_put(replace(POD, uid=PodUid("v"), passed_over=""))
    assert told == [("u", "mps")]
    teller.pod_gone(PodUid("u"))
    teller.pod_put(POD)
    assert told == [("u", "mps")] * 2
    node = NodeInventory(name="n", devices=())
    teller.node_put(node)
    teller.node_dropped("n")
    assert len(keeper.heard) == 8
    assert keeper.heard[-2:] == [node, "n"]


def test_it_is_read_of_pods_that_wait() -> None:
    """Of one that is bound it was told when it came; a restart tells of none anew."""
    meta = Metadata(name="p", namespace="team", uid="u", annotations={PASSED_OVER: "mps"})
    waiting = PodObject(metadata=meta, spec=PodSpec())
    assert to_cluster_pod(waiting).passed_over == "mps"
    waiting.spec.node_name = "n"
    assert not to_cluster_pod(waiting).passed_over

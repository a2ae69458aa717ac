# SPDX-License-Identifier: Apache-2.0
"""Nodes and clusters that are asked to place a pod, and have to."""

from __future__ import annotations

from collections.abc import Sequence

from allotment.model.clusters import NodeInventory, PodBooking, PodNeed
from allotment.placement.cluster.cluster import Cluster
from allotment.placement.explain import Refusal
from allotment.placement.nodes import Node
from allotment.placement.ordering import DeviceChain

CHAIN = DeviceChain()


def place(there: Node, need: PodNeed) -> PodBooking | Refusal:
    return there.place(need, [CHAIN] * len(need.containers))


def placed(there: Node, need: PodNeed) -> PodBooking:
    decision = place(there, need)
    assert isinstance(decision, PodBooking), decision
    return decision


def cluster_of(
    *nodes: NodeInventory, policy: str = "fragmentation", devices: Sequence[str] = ()
) -> Cluster:
    """A cluster with these nodes; `devices`: other policies for those than for nodes."""
    cluster = Cluster(node_policies=[policy], device_policies=devices or [policy])
    for node in nodes:
        cluster.put(node)
    return cluster


def booked(cluster: Cluster, pod: PodNeed, node: str | None = None) -> PodBooking:
    """Place a pod on a node, else on the best one, and book it."""
    decision = cluster.place(pod, node or cluster.rank(pod).best[0])
    assert isinstance(decision, PodBooking), decision
    cluster.book(decision)
    return decision

# SPDX-License-Identifier: Apache-2.0
"""Which nodes are looked at for a pod that names a GPU: each that tells of it."""

import pytest

from allotment.model.clusters import NodeDevice, NodeInventory, PodNeed, WantedContainer
from allotment.model.pods import PodUid
from allotment.model.quantities import MemoryAmount
from allotment.model.requests import Constraints, Request
from allotment.placement.cluster.cluster import Cluster

NAMES_A = PodNeed(
    uid=PodUid("p"),
    containers=(
        WantedContainer(
            name="main",
            request=Request(
                MemoryAmount("1", size_bytes=1), constraints=Constraints(uuids=("GPU-a",))
            ),
        ),
    ),
)


def node(name: str, *uuids: str) -> NodeInventory:
    devices = tuple(NodeDevice(uuid=each, model="T4", memory_bytes=16) for each in uuids)
    return NodeInventory(name=name, devices=devices)


def best(cluster: Cluster) -> list[str]:
    return sorted(cluster.rank(NAMES_A).best)


@pytest.mark.parametrize("order", [("old", "new"), ("new", "old")])
def test_a_gpu_of_which_two_nodes_tell_is_found_on_each_and_told(order: tuple[str, str]) -> None:
    # A machine that joined again under another name, or an inventory that somebody forged.
    cluster = Cluster()
    for name in order:
        cluster.put(node(name, "GPU-a", f"GPU-{name}"))
    assert best(cluster) == ["new", "old"]
    assert cluster.reported_twice() == {"GPU-a": frozenset({"new", "old"})}


@pytest.mark.parametrize("goes", ["drop", "change"])
def test_when_one_of_both_goes_the_other_one_has_it_still(goes: str) -> None:
    cluster = Cluster()
    cluster.put(node("first", "GPU-a"))
    cluster.put(node("second", "GPU-a", "GPU-b"))
    if goes == "drop":
        cluster.drop("second")
    else:
        cluster.put(node("second", "GPU-b"))
    assert best(cluster) == ["first"]
    assert cluster.reported_twice() == {}
    cluster.drop("first")
    assert best(cluster) == []

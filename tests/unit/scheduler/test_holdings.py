# SPDX-License-Identifier: Apache-2.0
"""Who has what in a cluster: holders by name, and sums that are the book's own."""

from __future__ import annotations

from typing import Any

from explained_twin import GI, asking, node, pod
from needs import request
from served_cluster import read_live
from small_nodes import INIT, REGULAR, device
from small_nodes import node as small_node
from small_nodes import pod as small_pod

from allotment.dialects.foreign.claim_bookings import claim_booking
from allotment.dialects.own.resource_claims import (
    COMPUTE_CAPACITY,
    MEMORY_CAPACITY,
    AllocatedDevice,
    ResourceClaim,
)
from allotment.kube.live import LiveCluster, LivePod
from allotment.model.clusters import PlacedContainer, PlacedDevice, PodBooking, TakenPart
from allotment.model.compute import Compute, ComputeClass
from allotment.model.mig import MigPlace
from allotment.model.modes import EXCLUSIVE, MIG, SOFT, TIMESLICE
from allotment.model.pods import PodUid
from allotment.model.structs import replace
from allotment.placement.cluster.cluster import Cluster
from allotment.scheduler.holdings import ClusterHoldings, Holder, Tenant, cluster_holdings

UUID = "GPU-4a0ae330-00aa"


def holdings(nodes: list[Any], pods: list[Any]) -> ClusterHoldings:
    return cluster_holdings(read_live(nodes, pods))


def test_each_device_names_its_holders_and_what_is_left() -> None:
    written = {"allotment.dev/compute": ":80", "allotment.dev/class": "latency"}
    runs = pod("runs", asking(), on=("a", 1), phase="Running", annotations=written)
    ends = pod("ends", asking(), on=("a", 1), deleted="2026-01-01T00:02:00Z")
    found = holdings([node("a"), node("b", devices=1)], [runs, ends, pod("waits", asking())])
    first, second = found.nodes[0].devices
    assert (first.holders, first.free_bytes, first.shares) == ((), 40 * GI, 0)
    assert [(str(each), each.phase, each.memory_bytes) for each in second.holders] == [
        ("ml/ends/main", "Terminating", 20 * GI),
        ("ml/runs/main", "Running", 20 * GI),
    ]
    latency = Compute(5000, 8000, kind=ComputeClass.LATENCY, is_governed=True)
    assert [each.compute for each in second.holders] == [
        Compute(5000, 5000, is_governed=True),
        latency,
    ]
    assert (second.allotted_bytes, second.guaranteed, second.free_bytes) == (40 * GI, 10_000, 0)
    assert [each.need.name for each in found.waiting] == ["waits"]
    assert found.nodes[1].allotted_bytes == 0


def test_pods_without_known_devices_are_unlocated() -> None:
    unplaced = pod("unplaced", asking(), node="a")
    elsewhere = pod("elsewhere", asking(), on=("gone", 0))
    replaced = pod("replaced", asking(), on=("a", 7))
    found = holdings([node("a")], [unplaced, elsewhere, replaced, pod("plain", node="a")])
    unlocated = {one.name: [str(each) for each in one.unlocated] for one in found.nodes}
    assert unlocated == {"a": ["ml/replaced", "ml/unplaced"], "gone": ["ml/elsewhere"]}


def live(*pods: LivePod, **fields: Any) -> LiveCluster:  # noqa: ANN401
    return LiveCluster(nodes=(small_node(device(0, 10), device(1, 10)),), pods=pods, **fields)


def placed(uid: str, mode: str, memory: int, **fields: Any) -> LivePod:  # noqa: ANN401
    container = PlacedContainer(
        name="c0", devices=(PlacedDevice("GPU-0", memory, 1000),), mode=mode, **fields
    )
    return LivePod(
        need=small_pod((REGULAR, request(memory, guarantee=1000)), uid=uid),
        booking=PodBooking(uid=PodUid(uid), node="n", containers=(container,)),
    )


def test_sums_are_those_of_the_book() -> None:
    need = small_pod((INIT, request(8)), (REGULAR, request(6)), uid="phases")
    containers = tuple(
        PlacedContainer(name=each.name, kind=each.kind, devices=(PlacedDevice("GPU-0", amount),))
        for each, amount in zip(need.containers, (8, 6), strict=True)
    )
    booking = PodBooking(uid=need.uid, node="n", containers=containers)
    pods = (LivePod(need=need, booking=booking), placed("host", SOFT, 3, may_oversubscribe=True))
    found = cluster_holdings(live(*pods))
    cluster = Cluster()
    cluster.put(small_node(device(0, 10), device(1, 10)))
    for each in pods:
        assert each.booking is not None
        cluster.book(each.booking)
    state = cluster.nodes["n"].view.state(0)
    shown = found.nodes[0].devices[0]
    # The init container has ended before the other one starts.
    assert sum(each.memory_bytes for each in shown.holders) == 17
    assert sum(each.memory for each in shown.parts.values()) == 11
    assert shown.allotted_bytes == state.allotted_bytes == 11
    assert shown.oversubscribed_bytes == state.oversubscribed_bytes == 3
    assert shown.guaranteed == state.guaranteed


def test_each_mode_shows_what_it_promises() -> None:
    def of(mode: str, **fields: Any) -> tuple[Holder, bool]:  # noqa: ANN401
        shown = cluster_holdings(live(placed("p", mode, 4, **fields))).nodes[0].devices[0]
        return shown.holders[0], shown.is_open

    soft, is_open = of(SOFT)
    assert (soft.memory_bytes, soft.compute, is_open) == (4, Compute(1000), True)
    whole, is_open = of(EXCLUSIVE)
    assert (whole.memory_bytes, whole.compute, is_open) == (4, None, False)
    sliced, _ = of(TIMESLICE)
    assert (sliced.memory_bytes, sliced.guarantee, sliced.compute) == (0, 0, None)
    cut = placed("p", MIG, 4)
    assert cut.booking is not None
    [container] = cut.booking.containers
    slices = (replace(container.devices[0], slice=MigPlace("1g.10gb", 2)),)
    booking = replace(cut.booking, containers=(replace(container, devices=slices),))
    shown = cluster_holdings(live(replace(cut, booking=booking))).nodes[0].devices[0]
    assert shown.holders[0].slice == MigPlace("1g.10gb", 2)
    assert shown.holders[0].compute == Compute(1000, 1000, is_governed=True)


def test_a_resized_pod_has_its_new_ceiling() -> None:
    before = placed("p", SOFT, 4)
    need = small_pod((REGULAR, request(4)), uid="p")
    [container] = need.containers
    wider = replace(container.request, compute=Compute(1000, 3000, is_governed=True))
    after = replace(need, containers=(replace(container, request=wider),))
    shown = cluster_holdings(live(replace(before, resized=after))).nodes[0].devices[0]
    assert shown.holders[0].compute == Compute(1000, 3000, is_governed=True)


def claim(name: str) -> ResourceClaim:
    return ResourceClaim(
        uid=name,
        namespace="lab",
        name=name,
        devices=(
            AllocatedDevice(
                request="gpu",
                pool="n",
                device="gpu-4a0ae330",
                consumed={MEMORY_CAPACITY: "4Gi", COMPUTE_CAPACITY: "20"},
            ),
        ),
        capacities={"gpu": frozenset({MEMORY_CAPACITY, COMPUTE_CAPACITY})},
        pods=(PodUid("user"), PodUid("gone")),
    )


def test_claims_are_named_whoever_counts_them() -> None:
    """One is counted by the node, beside a share of another program; the other by the claim."""
    counted, fresh = claim("counted"), claim("fresh")
    taken = TakenPart(memory=7 * GI, guarantee=2500, shares=2, mode=SOFT)
    gpu = replace(device(0, 40 * GI, taken=taken), uuid=UUID)
    inventory = replace(small_node(gpu), claims=frozenset({counted.share_id("gpu")}))
    user = LivePod(
        need=replace(small_pod(uid="user"), name="train"),
        booking=PodBooking(uid=PodUid("user"), node="n"),
    )
    part = claim_booking(fresh, inventory)
    assert part is not None
    assert claim_booking(counted, inventory) is None
    found = cluster_holdings(
        LiveCluster(nodes=(inventory,), pods=(user,), claims=(part,), allocated=(counted, fresh))
    )
    [shown] = found.nodes[0].devices
    assert [(str(each), each.is_claim, each.pods) for each in shown.holders] == [
        ("lab/counted/gpu", True, ("train",)),
        ("lab/fresh/gpu", True, ("train",)),
    ]
    assert shown.allotted_bytes == 11 * GI
    assert shown.others == TakenPart(3 * GI, 500, 1, SOFT)
    assert found.nodes[0].unlocated == ()


def test_a_tenant_is_named_as_kubectl_names_it() -> None:
    booking = PodBooking(uid=PodUid("u"), node="n")
    assert str(Tenant(booking=booking, namespace="ml", name="train")) == "ml/train"

# SPDX-License-Identifier: Apache-2.0
"""Pods without a compute request: a part of their GPUs' time is not guaranteed to others."""

import pytest
from needs import request
from placing import booked, cluster_of
from small_clusters import inventory, need
from small_nodes import MODES

from allotment.dialects.own.placement import read_booking, write_booking
from allotment.model.clusters import PodBooking, PodNeed
from allotment.model.compute import DEFAULT_FLOOR, WHOLE
from allotment.model.modes import MPS, SOFT
from allotment.model.structs import replace
from allotment.placement.cluster.cluster import Cluster
from allotment.placement.explain import Refusal

POLICIES = ["fragmentation", "binpack", "spread", "first-fit", "fgd"]


def asking(uid: str, memory: int = 1, **amounts: int | str) -> PodNeed:
    pod = need(uid, memory)
    wanted = request(memory, **amounts)  # type: ignore[arg-type]
    return replace(pod, containers=(replace(pod.containers[0], request=wanted),))


def frugal(uid: str, memory: int = 1) -> PodNeed:
    """A pod that asks for memory alone, as the scheduler reads it."""
    return asking(uid, memory, floor=DEFAULT_FLOOR)


def refused(cluster: Cluster, pod: PodNeed, node: str = "a") -> Refusal:
    decision = cluster.place(pod, node)
    assert isinstance(decision, Refusal), decision
    refusal = cluster.rank(pod).refused[node]
    assert (refusal.reason, refusal.text) == (decision.reason, decision.text)
    cluster.check_invariants()
    return decision


@pytest.mark.parametrize("policy", POLICIES)
def test_a_gpu_whose_time_is_all_guaranteed_does_not_fit(policy: str) -> None:
    """It would be the fullest GPU, and an idle one is beside it."""
    cluster = cluster_of(inventory("a", 10, 10), policy=policy)
    busy = booked(cluster, asking("busy", 8, guarantee=WHOLE - DEFAULT_FLOOR + 1))
    free = booked(cluster, frugal("frugal"))
    assert busy.containers[0].devices[0].uuid != free.containers[0].devices[0].uuid
    cluster.check_invariants()


def test_a_refusal_has_what_is_not_guaranteed() -> None:
    cluster = cluster_of(inventory("a", 10, 10))
    booked(cluster, asking("first", guarantee=WHOLE))
    booked(cluster, asking("second", guarantee=9800))
    refusal = refused(cluster, frugal("frugal"))
    assert refusal.reason == "compute-floor"
    assert refusal.text == (
        "need a GPU with 1, have at most 2 % of a GPU's compute that is not guaranteed to others"
    )


def test_guarantees_leave_the_floor_to_those_that_are_there() -> None:
    cluster = cluster_of(inventory("a", 10))
    booked(cluster, frugal("one"))
    refusal = refused(cluster, asking("large", guarantee=WHOLE - DEFAULT_FLOOR + 1))
    assert (refusal.reason, refusal.have) == ("gpu-compute", WHOLE - DEFAULT_FLOOR)
    booked(cluster, asking("fits", guarantee=WHOLE - DEFAULT_FLOOR))
    # All such pods of a GPU share one floor.
    booked(cluster, frugal("two"))
    booked(cluster, frugal("three"))
    cluster.check_invariants()


def test_the_floor_ends_with_its_last_pod() -> None:
    cluster = cluster_of(inventory("a", 10))
    booked(cluster, frugal("one"))
    booked(cluster, frugal("two"))
    whole = asking("whole", guarantee=WHOLE)
    cluster.release(need("one").uid)
    refused(cluster, whole)
    cluster.release(need("two").uid)
    booked(cluster, whole)
    cluster.check_invariants()


@pytest.mark.parametrize(
    "pod", [asking("pod"), asking("pod", guarantee=1)], ids=["floor-0", "guarantee"]
)
def test_a_pod_without_a_floor_needs_only_its_guarantee(pod: PodNeed) -> None:
    cluster = cluster_of(inventory("a", 10))
    booked(cluster, asking("busy", guarantee=WHOLE - 1))
    booked(cluster, pod)


def test_the_floor_is_of_mode_soft_alone() -> None:
    node = inventory("a", 10)
    node = replace(node, devices=(replace(node.devices[0], modes=(*MODES, MPS)),))
    cluster = cluster_of(node)
    booked(cluster, asking("busy", guarantee=WHOLE, mode=MPS))
    booking = booked(cluster, asking("pod", floor=DEFAULT_FLOOR, mode=MPS))
    assert booking.containers[0].floor == 0


def test_the_floor_is_part_of_the_placement() -> None:
    booking = booked(cluster_of(inventory("a", 10)), frugal("frugal"))
    read = read_booking(write_booking(booking), uid=booking.uid, node="a")
    assert [(each.mode, each.floor) for each in read.containers] == [(SOFT, DEFAULT_FLOOR)]
    cluster = cluster_of(inventory("a", 10))
    cluster.book(read)
    refused(cluster, asking("large", guarantee=WHOLE))


def test_a_policy_counts_the_compute_that_is_left() -> None:
    """Memory alone would send the pod to the fuller node, where it takes the last time."""
    cluster = cluster_of(inventory("a", 10), inventory("b", 10), policy="binpack")
    booked(cluster, asking("busy", 1, guarantee=9000), "a")
    booked(cluster, asking("full", 2), "b")
    decision = cluster.place(frugal("frugal"), cluster.rank(frugal("frugal")).best[0])
    assert isinstance(decision, PodBooking)
    assert decision.node == "a"


def test_fragmentation_prices_the_places_of_pods_without_compute() -> None:
    """With the pod, node a has no place left for pods without compute; node b has some."""
    cluster = cluster_of(inventory("a", 10), inventory("b", 10))
    for number in range(50):
        cluster.arrived(frugal(f"frugal-{number}"))
    booked(cluster, asking("busy", 1, guarantee=WHOLE - DEFAULT_FLOOR), "a")
    booked(cluster, asking("full", 1, guarantee=WHOLE - 2 * DEFAULT_FLOOR), "b")
    small = asking("small", guarantee=DEFAULT_FLOOR)
    assert cluster.rank(small).best == ["b", "a"]

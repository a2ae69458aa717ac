# SPDX-License-Identifier: Apache-2.0
"""The cluster: on which node a pod gets which devices, and why it gets none."""

from fractions import Fraction

import pytest
from placing import booked
from small_clusters import binpack, inventory, need, uuids

from allotment.model.clusters import PodBooking, PodNeed, TakenPart
from allotment.model.compute import WHOLE
from allotment.model.errors import UsageError
from allotment.model.modes import EXCLUSIVE, SOFT
from allotment.model.pods import ContainerKind, PodUid
from allotment.model.requests import Constraints, DeviceWeights, ModelRule, Preferences
from allotment.model.structs import replace
from allotment.placement.cluster.cluster import Cluster
from allotment.placement.explain import grouped


def test_the_fullest_node_is_best_and_ties_go_by_name() -> None:
    cluster = binpack(*(inventory(name, 10) for name in ("c", "a", "b")))
    assert cluster.rank(need("one")).best == ["a", "b", "c"]
    booked(cluster, need("one"), "b")
    assert cluster.rank(need("two")).best == ["b", "a", "c"]
    assert cluster.rank(need("two"), most=1).best == ["b"]
    assert cluster.rank(need("two"), {"c", "a"}).best == ["a", "c"]


def test_a_chain_goes_on_where_one_policy_holds_nodes_for_equal() -> None:
    nodes = [inventory("a", 10), inventory("b", 10), inventory("c", 10)]
    for second, best in (("binpack", ["b", "a", "c"]), ("spread", ["a", "c", "b"])):
        cluster = Cluster(node_policies=["first-fit", second], device_policies=["binpack"])
        for node in nodes:
            cluster.put(node)
        booked(cluster, need("one"), "b")
        assert cluster.rank(need("two")).best == best


def test_a_pod_may_have_policies_of_its_own() -> None:
    cluster = binpack(inventory("a", 10, 10), inventory("b", 10, 10))
    booked(cluster, need("one"), "a")
    preferences = Preferences(node_policies=("spread",), device_policies=("spread",))
    spread = need("two", preferences=preferences)
    assert cluster.rank(spread).best == ["b", "a"]
    assert uuids(cluster.place(spread, "a")) == ["a-1"]
    assert uuids(cluster.place(need("two"), "a")) == ["a-0"]


def test_weights_say_what_counts_among_devices() -> None:
    """Of one device the memory is given away, of the other the time, of the third seats alone."""
    taken = [
        TakenPart(memory=5, guarantee=0, shares=1, mode=SOFT),
        TakenPart(memory=0, guarantee=6000, shares=1, mode=SOFT),
        TakenPart(memory=0, guarantee=0, shares=40, mode=SOFT),
    ]
    cluster = binpack(inventory("a", 10, 10, 10, taken=taken))
    for weights, device in (
        (DeviceWeights(shares=0, compute=0, memory=1), "a-0"),
        (DeviceWeights(shares=0, compute=1, memory=0), "a-1"),
        (DeviceWeights(shares=1, compute=0, memory=0), "a-2"),
    ):
        pod = need("x", 1, preferences=Preferences(weights=weights))
        assert uuids(cluster.place(pod, "a")) == [device]
        preferences = Preferences(device_policies=("spread",), weights=weights)
        assert uuids(cluster.place(need("x", 1, preferences=preferences), "a")) != [device]


def test_devices_of_one_numa_node_are_preferred_where_that_is_wished() -> None:
    taken = [
        TakenPart(memory=1, shares=1, mode=SOFT),
        TakenPart(),
        TakenPart(memory=2, shares=1, mode=SOFT),
    ]
    node = inventory("a", 10, 10, 10, 10, taken=taken)
    pod = need("x", count=2)
    assert uuids(binpack(node).place(pod, "a")) == ["a-0", "a-2"]
    chain = binpack(node, devices=["numa", "binpack"])
    assert uuids(chain.place(pod, "a")) == ["a-2", "a-3"]
    assert uuids(chain.place(need("x", count=4), "a")) == ["a-0", "a-1", "a-2", "a-3"]


def test_devices_that_are_near_are_preferred_where_that_is_wished() -> None:
    links = {("a-0", "a-3"): 200, ("a-1", "a-2"): 100, ("a-0", "a-1"): 20}
    node = replace(inventory("a", 10, 10, 10, 10), links=links)
    for devices in (["topology"], ["topology", "spread"]):
        cluster = binpack(node, devices=devices)
        assert uuids(cluster.place(need("x", count=2), "a")) == ["a-0", "a-3"]


def test_a_node_that_nobody_knows_is_refused_for_that() -> None:
    ranking = binpack(inventory("a", 10)).rank(need("x"), ["a", "b"])
    assert ranking.best == ["a"]
    assert list(ranking.refused) == ["b"]
    assert ranking.refused["b"].reason == "unknown-node"
    with pytest.raises(KeyError):
        ranking.refused["a"]


def test_what_is_booked_on_an_unknown_node_is_remembered_until_it_comes() -> None:
    cluster = binpack(inventory("a", 10))
    pod = booked(cluster, need("x", 8))
    cluster.drop("a")
    assert cluster.booking(pod.uid) == pod
    assert cluster.rank(need("y", 4)).best == []
    cluster.put(inventory("a", 10))
    assert cluster.rank(need("y", 4)).best == []
    assert cluster.rank(need("y", 2)).best == ["a"]
    cluster.drop("a")
    cluster.release(pod.uid)
    cluster.put(inventory("a", 10))
    assert cluster.rank(need("y", 10)).best == ["a"]


def test_a_node_that_comes_back_with_fewer_gpus_keeps_what_is_booked_on_the_others() -> None:
    cluster = binpack(inventory("a", 10, 10))
    booked(cluster, need("x", 8, count=2))
    cluster.put(inventory("a", 10))
    assert cluster.totals()["T4"].memory_allocated == 8
    cluster.put(inventory("a", 10, 10))
    assert cluster.totals()["T4"].memory_allocated == 16
    cluster.check_invariants()


def test_a_pod_that_moves_leaves_nothing_behind() -> None:
    cluster = binpack(inventory("a", 10), inventory("b", 10))
    booked(cluster, need("x", 8, constraints=Constraints(affinity="t")), "a")
    booked(cluster, need("x", 8, constraints=Constraints(affinity="t")), "b")
    assert cluster.rank(need("y", 4)).best == ["a"]
    cluster.check_invariants()


def test_pods_without_gpus_count_too() -> None:
    cluster = binpack(inventory("a", 10, cpu=1000))
    plain = PodNeed(uid=PodUid("web"), cpu_milli=800)
    assert cluster.rank(plain).best == ["a"]
    cluster.book(PodBooking(uid=PodUid("web"), node="a", cpu_milli=800))
    refusal = cluster.rank(need("x", cpu=300)).refused["a"]
    assert refusal.reason == "cpu"
    assert refusal.text == "need 300m of CPU, have 200m"
    assert cluster.rank(need("x", cpu=0)).best == ["a"]


def test_a_tag_draws_to_the_node_where_it_is() -> None:
    cluster = binpack(*(inventory(name, 10, 10) for name in "abc"))
    wanted = Constraints(affinity="t")
    booked(cluster, need("first", 4, constraints=wanted), "c")
    booked(cluster, need("full", 4), "b")
    pod = need("second", 5, constraints=wanted)
    assert cluster.rank(pod).best == ["c", "b", "a"]
    assert uuids(cluster.place(pod, "c")) == ["c-0"]
    large = need("large", 7, constraints=wanted)
    assert cluster.rank(large).best == ["b", "c", "a"]


def test_a_cordoned_device_is_no_choice_and_counts_as_fragmented() -> None:
    cluster = binpack(inventory("a", 10, 10, problems=["cordoned"]))
    assert uuids(cluster.place(need("x"), "a")) == ["a-1"]
    assert cluster.rank(need("x", count=2)).best == []
    totals = cluster.totals()["T4"]
    assert (totals.devices, totals.memory_fragmented, totals.guarantee_fragmented) == (2, 10, WHOLE)


def test_a_container_alone_on_a_gpu_has_all_of_it_whatever_it_asks_for() -> None:
    cluster = binpack(inventory("a", 10, 10))
    placed = cluster.place(need("x", 1, mode=EXCLUSIVE), "a")
    assert isinstance(placed, PodBooking)
    assert [(each.memory, each.guarantee) for each in placed.containers[0].devices] == [(10, WHOLE)]


def test_totals_are_by_model() -> None:
    cluster = binpack(inventory("a", 10, 10), inventory("b", 30, model="A100"))
    booked(cluster, need("x", 4, guarantee=2500), "a")
    booked(cluster, need("y", Fraction(1), mode=EXCLUSIVE), "b")
    totals = cluster.totals()
    assert list(totals) == ["A100", "T4"]
    t4, a100 = totals["T4"], totals["A100"]
    assert (t4.devices, t4.memory, t4.memory_allocated, t4.memory_fragmented) == (2, 20, 4, 6)
    assert (t4.guarantee, t4.guarantee_allocated, t4.guarantee_fragmented) == (20_000, 2500, 7500)
    assert (a100.memory_allocated, a100.guarantee_allocated) == (30, WHOLE)
    cluster.drop("b")
    assert list(cluster.totals()) == ["T4"]


def test_nodes_that_fail_alike_are_told_together() -> None:
    small = [inventory(f"s{number}", 8 + number) for number in range(3)]
    cluster = binpack(*small, inventory("v", 40, model="V100"), inventory("w", 40, cpu=50))
    wanted = Constraints(not_models=(ModelRule("v100"),))
    refusals = cluster.rank(need("x", 30, constraints=wanted)).refused
    assert [(group.text, group.nodes) for group in grouped(refusals)] == [
        ("need a GPU (no v100) with 30, have at most 10B on a GPU", ("s0", "s1", "s2")),
        ("need 100m of CPU, have 50m", ("w",)),
        ("need a GPU (no v100) with 30, have GPUs of other models", ("v",)),
    ]


def test_a_policy_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="best-of-all"):
        Cluster(node_policies=["best-of-all"])


def test_what_a_pod_has_is_not_in_its_own_way() -> None:
    cluster = binpack(inventory("a", 10))
    pod = need("x", 8)
    booked(cluster, pod)
    assert cluster.rank(pod).best == ["a"]
    assert cluster.rank(need("y", 8)).best == []


def test_a_share_with_a_tag_draws_its_like_alone() -> None:
    cluster = binpack(inventory("a", 10))
    booked(cluster, need("x", 4, constraints=Constraints(exclusion="t")))
    assert cluster.rank(need("y", 4, constraints=Constraints(exclusion="t"))).best == ["a"]
    for other in (Constraints(), Constraints(exclusion="u")):
        ranking = cluster.rank(need("z", 4, constraints=other))
        assert ranking.refused["a"].reason == "tags"


def test_what_a_search_found_out_holds_until_the_node_changes() -> None:
    cluster = binpack(inventory("a", 10), inventory("b", 4))
    first, second = (need(uid, 6, constraints=Constraints(exclusion="t")) for uid in "xy")
    for _ in range(2):
        assert cluster.rank(first).best == ["a"]
    booked(cluster, first)
    for _ in range(2):
        assert cluster.rank(second).best == []
        assert cluster.rank(first).best == ["a"]
    apart = [need(uid, 1, constraints=Constraints(anti_affinity="t")) for uid in "vw"]
    booked(cluster, apart[0], "b")
    for _ in range(2):
        assert cluster.rank(apart[1], ["b"]).best == []
        assert cluster.rank(apart[0], ["b"]).best == ["b"]
    cluster.release(apart[0].uid)
    cluster.release(first.uid)
    assert cluster.rank(second).best == ["a"]
    cluster.put(inventory("b", 16))
    assert cluster.rank(second).best == ["a", "b"]


def test_a_refusal_that_is_asked_for_late_is_still_one() -> None:
    cluster = binpack(inventory("a", 10))
    booked(cluster, need("x", 8))
    for constraints in (Constraints(), Constraints(exclusion="t")):
        ranking = cluster.rank(need("y", 8, constraints=constraints))
        cluster.release(PodUid("x"))
        assert ranking.refused["a"].reason == "changed"
        booked(cluster, need("x", 8))


def test_host_memory_is_one_budget_for_all_devices_of_a_node() -> None:
    cluster = binpack(inventory("a", 10, 10, budget=5))
    booked(cluster, need("x", 14, host=True))
    booked(cluster, need("y", 8, host=True))
    assert cluster.rank(need("z", 3)).best == ["a"]
    assert cluster.rank(need("z", 4)).best == []
    cluster.release(PodUid("x"))
    cluster.check_invariants()
    assert cluster.rank(need("z", 10, count=2)).best == []
    assert cluster.rank(need("z", 7, count=2)).best == ["a"]


def test_devices_of_one_request_share_the_hosts_memory() -> None:
    cluster = binpack(inventory("a", 10, 10, budget=3))
    for uid in ("x", "y"):
        booked(cluster, need(uid, 8, host=True))
    assert cluster.rank(need("z", 4)).best == ["a"]
    ranking = cluster.rank(need("z", 4, count=2))
    assert ranking.best == []
    assert ranking.refused["a"].reason == "host-memory"
    assert cluster.rank(need("z", 3, count=2)).best == ["a"]


def test_of_a_pod_with_several_containers_all_find_room_or_none() -> None:
    cluster = binpack(inventory("a", 10, 4), inventory("b", 10, 10))
    one, other = need("x", 8).containers[0], need("x", 6).containers[0]
    pod = replace(need("x"), containers=(one, replace(other, name="second", place=1)))
    ranking = cluster.rank(pod)
    assert ranking.best == ["b"]
    assert ranking.refused["a"].text == (
        "container second and others: need 2 times a GPU with 6, have room for 1"
    )


def test_an_init_container_alone_asks_for_no_more_than_it_needs() -> None:
    cluster = binpack(inventory("a", 10))
    wanted = need("x", 9).containers[0]
    pod = replace(
        need("x"),
        containers=(
            replace(wanted, name="load", kind=ContainerKind.INIT),
            replace(wanted, place=1),
        ),
    )
    assert uuids(booked(cluster, pod)) == ["a-0", "a-0"]
    assert cluster.rank(need("y", 2)).best == []
    assert cluster.rank(need("y", 1)).best == ["a"]

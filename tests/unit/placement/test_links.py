# SPDX-License-Identifier: Apache-2.0
"""Links between GPUs: they break the ties of every policy, and change nothing else."""

from itertools import combinations
from random import Random

import pytest
from needs import request
from placing import booked, cluster_of
from small_clusters import inventory, need, uuids
from small_nodes import REGULAR, device, linked, node, pod

from allotment.model.clusters import NodeInventory, PodNeed
from allotment.model.compute import WHOLE
from allotment.model.requests import Constraints
from allotment.model.structs import replace
from allotment.placement.cluster.cluster import Cluster
from allotment.placement.explain import Refusal
from allotment.placement.nodes import Node
from allotment.placement.ordering import DeviceChain

NVLINK_PAIR, PCIE = 210, 10
CHAINS = [
    ["fragmentation"],
    ["fragmentation", "topology"],
    ["binpack"],
    ["spread"],
    ["topology"],
]
GPUS = [f"a-{index}" for index in range(8)]


def in_pairs(name: str = "a", gpus: int = 8) -> NodeInventory:
    """Each two neighbours are joined by NVLink, and the first is not of the first pair."""
    plain = inventory(name, *[16] * gpus, cpu=64_000)
    order = Random(name).sample(range(gpus), gpus)  # noqa: S311 - a sample, no secret
    pairs = {frozenset(order[place : place + 2]) for place in range(0, gpus, 2)}
    links = {
        (f"{name}-{one}", f"{name}-{other}"): NVLINK_PAIR
        if frozenset((one, other)) in pairs
        else PCIE
        for one, other in combinations(range(gpus), 2)
    }
    return replace(plain, links=links)


def pairs_of(inventory: NodeInventory) -> list[frozenset[str]]:
    return [frozenset(pair) for pair, score in inventory.links.items() if score == NVLINK_PAIR]


def whole(uid: str, count: int) -> PodNeed:
    return need(uid, 16, count=count, guarantee=WHOLE)


def idle(cluster: Cluster) -> frozenset[str]:
    free = cluster.arrays.idle[cluster.arrays.row["a"]]
    return frozenset(uuid for uuid, is_idle in zip(GPUS, free, strict=False) if is_idle)


@pytest.mark.parametrize("chain", CHAINS, ids=[",".join(chain) for chain in CHAINS])
def test_pairs_stay_together(chain: list[str]) -> None:
    """No pod with two GPUs is split, and no pod with one splits a pair, if it can be avoided."""
    there = in_pairs()
    pairs = pairs_of(there)
    cluster = cluster_of(there, policy=chain[0], devices=chain)
    dice = Random(15)  # noqa: S311 - a sample, no secret
    there_now: list[PodNeed] = []
    together = 0
    for at in range(300):
        pod = whole(f"pod-{at}", dice.choice([1, 2]))
        count = pod.containers[0].request.count
        while len(idle(cluster)) < max(count, dice.randrange(8)):
            cluster.release(there_now.pop(dice.randrange(len(there_now))).uid)
        free = idle(cluster)
        whole_pairs = [pair for pair in pairs if pair <= free]
        there_now.append(pod)
        chosen = frozenset(uuids(booked(cluster, pod, "a")))
        if count == 2:
            assert not whole_pairs or chosen in pairs
            together += chosen in pairs
        else:
            is_cut = any(chosen < pair for pair in whole_pairs)
            assert not is_cut or len(free) == 2 * len(whole_pairs)
    assert together > 100


@pytest.mark.parametrize("policy", ["fragmentation", "binpack", "spread"])
def test_links_change_no_amounts(policy: str) -> None:
    """What is left on the nodes is the same with and without links, pod by pod."""
    linked_nodes = [in_pairs("a"), in_pairs("b", 4)]
    clusters = [
        cluster_of(*nodes, policy=policy)
        for nodes in (linked_nodes, [replace(each, links={}) for each in linked_nodes])
    ]
    dice = Random(3)  # noqa: S311 - a sample, no secret
    different = 0
    for at in range(60):
        pod = need(
            f"pod-{at}",
            dice.choice([2, 4, 8, 16]),
            count=dice.choice([1, 1, 2, 4]),
            guarantee=dice.choice([1000, 2500, 5000, WHOLE]),
        )
        for cluster in clusters:
            cluster.arrived(pod)
        best = [cluster.rank(pod).best for cluster in clusters]
        assert best[0] == best[1]
        if best[0]:
            one, other = (booked(cluster, pod) for cluster in clusters)
            different += uuids(one) != uuids(other)
        for row in (0, 1):
            rooms = [
                sorted(map(cluster.arrays.rooms.value, cluster.arrays.room[row].tolist()), key=repr)
                for cluster in clusters
            ]
            assert rooms[0] == rooms[1]
    assert different, "else nothing was compared"


@pytest.mark.parametrize("policy", ["fragmentation", "binpack", "spread"])
def test_a_policy_goes_before_links(policy: str) -> None:
    cluster = cluster_of(in_pairs(), policy=policy)
    pair = sorted(pairs_of(cluster.nodes["a"].inventory)[0])
    booked(cluster, need("first", 4, guarantee=2500, constraints=Constraints(uuids=(pair[0],))))
    chosen = uuids(booked(cluster, need("second", 4, guarantee=2500)))
    assert (chosen == [pair[0]]) == (policy != "spread")
    # The other GPU of the pair has no idle peer left.
    third = uuids(booked(cluster, need("third", 16, guarantee=WHOLE)))
    assert third == [pair[1]] or policy == "spread"


def test_a_pod_whose_containers_need_a_place_each_still_gets_the_best_links() -> None:
    links = linked(*combinations(range(6), 2), score=PCIE) | linked((1, 4), (2, 5))
    there = Node(node(*(device(index, 10) for index in range(6)), links=links))
    need = pod((REGULAR, request(10, count=2)), (REGULAR, request(10, count=2)))
    decision = there.place(need, [DeviceChain(policies=("binpack",))] * 2)
    assert not isinstance(decision, Refusal)
    chosen = {frozenset(each.uuid for each in one.devices) for one in decision.containers}
    assert chosen == {frozenset(("GPU-1", "GPU-4")), frozenset(("GPU-2", "GPU-5"))}


def test_gpus_behind_switches_satisfy_a_need_for_nvlink() -> None:
    """As an agent publishes an HGX board: 18 links, and the distance over PCIe."""
    links = {
        (f"GPU-{one}", f"GPU-{other}"): 1800 + (50 if one // 2 == other // 2 else PCIE)
        for one, other in combinations(range(8), 2)
    }
    there = Node(node(*(device(index, 10) for index in range(8)), links=links))
    wanted = request(10, count=8, constraints=Constraints(needs_nvlink=True))
    assert not isinstance(there.place(pod((REGULAR, wanted)), [DeviceChain()]), Refusal)


def test_a_choice_among_many_different_links_is_bounded() -> None:
    """Eight of sixteen GPUs, no two alike: some sets are compared, and a place is found."""
    dice = Random(1)  # noqa: S311 - a sample, no secret
    links = {pair: dice.randrange(10, 600) for pair in linked(*combinations(range(16), 2))}
    there = Node(node(*(device(index, 10) for index in range(16)), links=links))
    one = pod((REGULAR, request(10, count=8)))
    several = pod(*[(REGULAR, request(10, count=2))] * 8)
    for asking in (one, several):
        decision = there.place(asking, [DeviceChain()] * len(asking.containers))
        assert not isinstance(decision, Refusal)

# SPDX-License-Identifier: Apache-2.0
"""One node: which of its devices a pod gets, and why it gets none."""

from itertools import combinations

import pytest
from needs import request
from placing import CHAIN, place, placed
from small_nodes import INIT, REGULAR, SIDECAR, device, linked, node, pod, uuids

from allotment.model.clusters import PodBooking, TakenPart
from allotment.model.modes import SOFT
from allotment.model.pods import PodUid
from allotment.model.requests import Constraints
from allotment.model.structs import replace
from allotment.placement.explain import Refusal
from allotment.placement.nodes import Node
from allotment.placement.ordering import DeviceChain


def test_several_devices_are_distinct_and_in_index_order() -> None:
    there = Node(node(*(device(index, 10) for index in range(4))))
    assert uuids(placed(there, pod((REGULAR, request(4, count=3))))) == [
        ["GPU-0", "GPU-1", "GPU-2"]
    ]


@pytest.mark.parametrize("policy", ["binpack", "spread"])
def test_several_devices_are_alike_if_they_can_be(policy: str) -> None:
    """The other model is the fullest and the emptiest, but it is only one."""
    full = TakenPart(memory=4, shares=1, mode=SOFT)
    half = TakenPart(memory=2, shares=1, mode=SOFT)
    others = (device(1, 10, taken=half), device(2, 10, taken=half))
    chain = DeviceChain(policies=(policy,))
    for odd in (device(0, 10, taken=full), device(0, 10)):
        there = Node(node(replace(odd, model="A100"), *others))
        for count, chosen in ((2, ["GPU-1", "GPU-2"]), (3, ["GPU-0", "GPU-1", "GPU-2"])):
            decision = there.place(pod((REGULAR, request(4, count=count))), [chain])
            assert isinstance(decision, PodBooking)
            assert uuids(decision) == [chosen]


def test_a_large_container_finds_its_device_though_a_small_one_likes_it_too() -> None:
    """Binpack alone would put the small one where the large one has to be."""
    there = Node(node(device(0, 10), device(1, 6)))
    need = pod((REGULAR, request(6)), (REGULAR, request(4)), (REGULAR, request(6)))
    assert uuids(placed(there, need)) == [["GPU-0"], ["GPU-0"], ["GPU-1"]]


def test_an_init_container_goes_into_the_room_of_those_that_follow() -> None:
    there = Node(node(device(0, 10), device(1, 10)))
    need = pod((INIT, request(8)), (REGULAR, request(9)))
    booking = placed(there, need)
    assert uuids(booking) == [["GPU-0"], ["GPU-0"]]
    there.book(booking)
    assert there.room(0).free_memory == 1
    assert there.room(1).free_memory == 10


def test_room_of_its_own_pod_goes_before_what_a_policy_likes() -> None:
    taken = TakenPart(memory=2, shares=1, mode=SOFT)
    there = Node(node(device(0, 10), device(1, 10, taken=taken)))
    need = pod((INIT, request(8)), (REGULAR, request(9)))
    assert uuids(placed(there, need)) == [["GPU-0"], ["GPU-0"]]


def test_an_affinity_tag_goes_before_what_a_policy_likes() -> None:
    there = Node(node(device(0, 10), device(1, 10)))
    need = pod((REGULAR, request(3, constraints=Constraints(affinity="a"))))
    there.book(placed(there, replace(need, uid=PodUid("first"))))
    decision = there.place(need, [DeviceChain(policies=("spread",))])
    assert isinstance(decision, PodBooking)
    assert uuids(decision) == [["GPU-0"]]


def test_a_sidecar_counts_beside_init_containers_that_follow_it() -> None:
    there = Node(node(device(0, 10)))
    before = pod((SIDECAR, request(4)), (INIT, request(7)))
    refusal = place(there, before)
    assert isinstance(refusal, Refusal)
    after = replace(
        before,
        containers=tuple(
            replace(each, place=1 - each.place, name=f"c{1 - each.place}")
            for each in before.containers
        ),
    )
    assert isinstance(place(there, after), PodBooking)


def test_an_init_container_has_the_host_memory_of_those_that_follow() -> None:
    there = Node(node(device(0, 10), budget=5))
    assert uuids(
        placed(there, pod((INIT, request(14, host=True)), (REGULAR, request(15, host=True))))
    ) == [["GPU-0"], ["GPU-0"]]
    refusal = place(there, pod((INIT, request(14, host=True)), (REGULAR, request(16, host=True))))
    assert isinstance(refusal, Refusal)


def test_what_one_choice_makes_hopeless_another_may_not() -> None:
    """The first container likes the device that the second has to have."""
    there = Node(node(device(0, 10), device(1, 10), device(2, 10, taken=TakenPart(9, 0, 1, SOFT))))
    bound = Constraints(uuids=("GPU-0",))
    need = pod((REGULAR, request(6)), (REGULAR, request(6, constraints=bound)))
    assert uuids(placed(there, need)) == [["GPU-1"], ["GPU-0"]]


def test_each_container_of_a_pod_keeps_its_seat() -> None:
    there = Node(node(device(0, 10, taken=TakenPart(shares=3, mode=SOFT))))
    assert isinstance(place(there, pod((REGULAR, request(1)))), PodBooking)
    refusal = place(there, pod((INIT, request(1)), (REGULAR, request(1))))
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "shares"


def test_devices_of_one_numa_node_are_found_though_others_are_liked_better() -> None:
    taken = TakenPart(memory=5, shares=1, mode=SOFT)
    there = Node(
        node(
            device(0, 10, numa=0, taken=taken),
            device(1, 10, numa=0),
            device(2, 10, numa=1),
            device(3, 10, numa=1),
        )
    )
    wanted = Constraints(same_numa=True)
    assert uuids(placed(there, pod((REGULAR, request(8, count=2, constraints=wanted))))) == [
        ["GPU-2", "GPU-3"]
    ]
    refusal = place(there, pod((REGULAR, request(8, count=3, constraints=wanted))))
    assert isinstance(refusal, Refusal)
    assert refusal.text == (
        "need 3 GPUs with 8 each on one NUMA node, have at most 2 of them on one NUMA node"
    )
    assert refusal.reason == "topology"


def test_linked_devices_are_linked_each_to_each() -> None:
    """A chain of links is none; and the clique is not where a greedy choice begins."""
    links = linked((0, 1), (1, 2), (2, 3), (3, 4), (2, 4))
    there = Node(node(*(device(index, 10) for index in range(5)), links=links))
    wanted = Constraints(needs_nvlink=True)
    found = placed(there, pod((REGULAR, request(8, count=3, constraints=wanted))))
    assert uuids(found) == [["GPU-2", "GPU-3", "GPU-4"]]
    assert isinstance(
        place(there, pod((REGULAR, request(8, count=4, constraints=wanted)))), Refusal
    )


def test_what_a_pod_has_is_not_in_its_own_way() -> None:
    there = Node(node(device(0, 10)))
    need = pod((REGULAR, request(9)))
    there.book(placed(there, need))
    assert isinstance(place(there, need), PodBooking)
    assert isinstance(place(there, replace(need, uid=PodUid("other"))), Refusal)


def test_a_victim_makes_room() -> None:
    there = Node(node(device(0, 10)))
    there.book(placed(there, pod((REGULAR, request(9)), uid="victim", cpu=8000)))
    need = pod((REGULAR, request(5)))
    assert isinstance(place(there, need), Refusal)
    assert isinstance(there.place(need, [CHAIN], without={PodUid("victim")}), PodBooking)
    assert isinstance(place(there, need), Refusal)


def test_a_device_with_a_problem_takes_nothing_and_says_why() -> None:
    sick = replace(device(0, 10), problem="cordoned by annotation")
    refusal = place(Node(node(sick)), pod((REGULAR, request(5))))
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "problem"
    assert "cordoned by annotation" in refusal.text


TAGS = ("affinity", "anti_affinity", "exclusion")


@pytest.mark.parametrize(
    ("first", "second", "third"),
    [
        # Beside the share with its tag, though another device is as full.
        (Constraints(), Constraints(affinity="a"), Constraints(affinity="a")),
        (Constraints(), Constraints(exclusion="a"), Constraints(exclusion="a")),
        (Constraints(exclusion="a"), Constraints(), Constraints()),
    ],
)
def test_tags_bring_together(first: Constraints, second: Constraints, third: Constraints) -> None:
    there = Node(node(*(device(index, 10) for index in range(3))))
    for number, constraints in enumerate((first, second)):
        need = pod((REGULAR, request(3, constraints=constraints)), uid=f"p{number}")
        there.book(placed(there, need))
    found = placed(there, pod((REGULAR, request(3, constraints=third))))
    assert uuids(found) == [["GPU-1"]]


def test_an_affinity_tag_that_nobody_has_wants_an_idle_device() -> None:
    there = Node(node(device(0, 10), device(1, 10)))
    there.book(placed(there, pod((REGULAR, request(3)), uid="other")))
    need = pod((REGULAR, request(3, constraints=Constraints(affinity="a"))))
    assert uuids(placed(there, need)) == [["GPU-1"]]
    there.book(placed(there, replace(need, uid=PodUid("same"))))
    full = pod((REGULAR, request(9, constraints=Constraints(affinity="a"))))
    refusal = place(there, full)
    assert isinstance(refusal, Refusal)
    one = node(device(0, 10, taken=TakenPart(memory=1, shares=1, mode=SOFT)))
    alone = place(Node(one), need)
    assert isinstance(alone, Refusal)
    assert alone.reason == "tags"


def test_an_anti_affinity_tag_keeps_away_from_its_like_alone() -> None:
    there = Node(node(device(0, 10), device(1, 10)))
    wanted = Constraints(anti_affinity="a")
    need = pod((REGULAR, request(3, constraints=wanted)), (REGULAR, request(3, constraints=wanted)))
    assert uuids(placed(there, need)) == [["GPU-0"], ["GPU-1"]]
    there.book(placed(there, need))
    other = pod((REGULAR, request(3, constraints=Constraints(anti_affinity="b"))), uid="b")
    assert isinstance(place(there, other), PodBooking)
    again = place(there, pod((REGULAR, request(3, constraints=wanted)), uid="again"))
    assert isinstance(again, Refusal)
    assert again.reason == "tags"


def test_who_wants_to_be_alone_comes_to_idle_devices_and_others_may_follow() -> None:
    there = Node(node(device(0, 10)))
    alone = pod((REGULAR, request(3, constraints=Constraints(is_alone=True))), uid="alone")
    there.book(placed(there, alone))
    assert isinstance(place(there, pod((REGULAR, request(3)))), PodBooking)
    refusal = place(there, replace(alone, uid=PodUid("second")))
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "company"


def test_sixteen_equal_devices_are_one_choice() -> None:
    """With a second container for which there is none: every choice of the first is hopeless."""
    everyone = linked(*combinations(range(16), 2))
    there = Node(node(*(device(index, 10, numa=index // 8) for index in range(16)), links=everyone))
    wanted = Constraints(same_numa=True, needs_nvlink=True)
    need = pod((REGULAR, request(6, count=8, constraints=wanted)), (REGULAR, request(5, count=9)))
    refusal = place(there, need)
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "gpu-memory"


def test_a_search_that_is_too_large_says_so() -> None:
    """No two devices alike, and links between them that leave many sets to look at."""
    count = 24
    links = linked(
        *((one, other) for one, other in combinations(range(count), 2) if (one + other) % 5)
    )
    there = Node(node(*(device(index, 100 + index) for index in range(count)), links=links))
    wanted = Constraints(needs_nvlink=True)
    need = pod((REGULAR, request(60, count=12, constraints=wanted)))
    refusal = place(there, need)
    assert isinstance(refusal, Refusal)
    assert refusal.reason in {"undecided", "topology"}

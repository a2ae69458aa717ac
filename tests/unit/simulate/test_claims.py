# SPDX-License-Identifier: Apache-2.0
"""Pods as claims: the devices that kube-scheduler alone gives, and the node that it chooses."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from cut_nodes import cut_device
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from allotment.agent.dra.devices import DeviceType, pool_of
from allotment.model.clusters import NodeDevice, NodeInventory, TakenPart
from allotment.model.mig import MigHold
from allotment.model.quantities import MemoryAmount, parse_memory, parse_whole
from allotment.model.requests import Constraints, ModelRule
from allotment.model.structs import replace
from allotment.simulate.claim_placers import ClaimPlacer, ClaimPod, StockScheduler
from allotment.simulate.claims import Allocated, ClaimRequest, Claims, NodeClaims, gpu_state
from allotment.simulate.csv_files import TraceNode, TracePod, TraceShape, capacity_milli
from allotment.simulate.placers import with_gpu_memory, without_gpu_memory
from allotment.simulate.workloads import drawn, generate

GI = 1 << 30
WHOLE = ClaimRequest(type=DeviceType.GPU)
SMALL = ClaimRequest(type=DeviceType.MIG, profile="1g.5gb")


def share(memory: str = "1Gi", compute: int | None = None, *, count: int = 1) -> ClaimRequest:
    return ClaimRequest(
        type=DeviceType.SHARE, memory=parse_memory(memory), compute=compute, count=count
    )


def node_of(*gpus: NodeDevice, name: str = "n", cores: int = 8) -> NodeClaims:
    inventory = NodeInventory(
        name=name, devices=gpus, cpu_milli=1000 * cores, memory_bytes=8 * GI * cores
    )
    return NodeClaims(inventory, [gpu_state(each) for each in gpus])


def gpus(number: int) -> list[NodeDevice]:
    return [
        NodeDevice(uuid=f"GPU-{each}", model="H", memory_bytes=10 * GI, index=each)
        for each in range(number)
    ]


def taken(node: NodeClaims, *claims: ClaimRequest) -> tuple[Allocated, ...] | None:
    """Take what is found for one pod, each claim without an alternative."""
    found = node.find(tuple((each,) for each in claims))
    if found is not None:
        node.take(found)
        node.check_invariants()
    return found


def places(found: tuple[Allocated, ...] | None) -> list[str]:
    return [each.device.part.uuid for each in found or ()]


def test_the_fullest_gpu_comes_first_and_a_whole_one_last() -> None:
    node = node_of(*gpus(3))
    assert places(taken(node, share("6Gi"))) == ["GPU-0"]
    second = taken(node, share("5Gi"))
    assert places(second) == ["GPU-1"]
    assert places(taken(node, share("3Gi"))) == ["GPU-0"]
    assert places(taken(node, share("2Gi"))) == ["GPU-1"]
    assert places(taken(node, WHOLE)) == ["GPU-2"]
    assert taken(node, WHOLE) is None
    assert second is not None
    node.give_back(second)
    assert places(taken(node, share("8Gi"))) == ["GPU-1"], "2 of its 10 GiB are taken"


def test_the_first_claim_of_a_share_device_takes_the_counters_and_the_last_gives_them_back() -> (
    None
):
    node = node_of(*gpus(1))
    one, other = taken(node, share()), taken(node, share())
    assert one is not None
    assert other is not None
    node.give_back(one)
    assert taken(node, WHOLE) is None
    node.give_back(other)
    assert places(taken(node, WHOLE)) == ["GPU-0"]


def test_amounts_are_rounded_up_by_the_devices_request_policy() -> None:
    """An eighth of a GPU is 13 percent: seven of them fit, in place of eight."""
    eighth = ClaimRequest(
        type=DeviceType.SHARE, memory=MemoryAmount("1/8", part=Fraction(1, 8)), compute=13
    )
    node = node_of(*gpus(1))
    assert [taken(node, eighth) is not None for _ in range(8)] == [True] * 7 + [False]
    (odd,) = taken(node_of(*gpus(1)), share("1500Ki")) or ()
    assert odd.consumed == {"memory": 2 << 20, "compute": 5, "seats": 1}
    assert taken(node_of(*gpus(1)), share("11Gi")) is None


def test_a_gpu_serves_no_more_claims_than_it_has_seats() -> None:
    node = node_of(*gpus(1))
    tiny = replace(share("1Mi"), compute=0)
    assert [taken(node, tiny) is not None for _ in range(64)] == [True] * 63 + [False]


def test_several_devices_of_a_claim_are_distinct_gpus() -> None:
    node = node_of(*gpus(2))
    assert places(taken(node, share(count=2))) == ["GPU-0", "GPU-1"]
    assert taken(node, share(count=3)) is None


def test_a_claim_names_models() -> None:
    two = [replace(each, model=f"model {each.index}") for each in gpus(2)]
    wanted = Constraints(models=(ModelRule("model 1"),))
    node = node_of(*two)
    assert places(taken(node, replace(WHOLE, constraints=wanted))) == ["GPU-1"]
    assert taken(node, replace(WHOLE, constraints=wanted)) is None


def test_slices_close_the_whole_and_the_shares_of_their_gpu() -> None:
    node = node_of(cut_device("GPU-0", model="A100-40GB"))
    found = [taken(node, SMALL) for _ in range(8)]
    assert [each is not None for each in found] == [True] * 7 + [False]
    assert taken(node, share()) is None
    assert taken(node, WHOLE) is None
    for each in filter(None, found):
        node.give_back(each)
    assert places(taken(node, WHOLE)) == ["GPU-0"]


def test_the_smallest_listed_slice_with_the_memory() -> None:
    node = node_of(cut_device("GPU-0", model="A100-40GB"))
    wanted = ClaimRequest(type=DeviceType.MIG, memory=parse_memory("8Gi"))
    (found,) = taken(node, wanted) or ()
    assert found.device.part.slice is not None
    assert found.device.part.slice.profile == "1g.10gb"


def test_slices_go_to_the_gpu_that_has_some() -> None:
    node = node_of(*(cut_device(f"GPU-{each}", model="A100-40GB", index=each) for each in (0, 1)))
    first = taken(node, WHOLE)
    assert places(taken(node, SMALL)) == ["GPU-1"]
    assert first is not None
    node.give_back(first)
    assert places(taken(node, SMALL)) == ["GPU-1"]


def test_slices_go_where_the_pool_lists_them_first_beside_those_that_are_there() -> None:
    device = cut_device("GPU-0", model="A100-40GB")
    node = node_of(device)
    there = device
    for _ in range(7):
        gpu = gpu_state(there)
        assert gpu.cut is not None
        taken_slots = {each.start for each in gpu.cut.slices}
        listed = [
            each.part.slice.start
            for each in pool_of([gpu], None).devices.values()
            if each.part.slice and each.part.slice.profile == SMALL.profile
        ]
        (found,) = taken(node, SMALL) or ()
        assert found.device.part.slice is not None
        start = found.device.part.slice.start
        assert start == next(each for each in listed if each not in taken_slots)
        pieces = [("1g.5gb", each, MigHold.USED) for each in (*taken_slots, start)]
        there = cut_device("GPU-0", *pieces, model="A100-40GB")


def test_alternatives_are_tried_in_their_order_and_claims_together() -> None:
    """The first claim gives way if the second has only one place."""
    two = [replace(each, model=f"model {each.index}") for each in gpus(2)]
    only_first = replace(WHOLE, constraints=Constraints(models=(ModelRule("model 0"),)))
    assert places(taken(node_of(*two), WHOLE, only_first)) == ["GPU-1", "GPU-0"]
    node = node_of(*gpus(1))
    taken(node, share())
    (found,) = node.find(((WHOLE, share()),)) or ()
    assert found.request.type is DeviceType.SHARE


def test_what_others_hold_is_not_given() -> None:
    half = replace(gpus(1)[0], taken=TakenPart(6 * GI, 3000, 1, "soft"))
    node = node_of(half)
    assert taken(node, WHOLE) is None
    assert taken(node, share("5Gi")) is None
    assert places(taken(node, share("4Gi", 70))) == ["GPU-0"]
    idle = cut_device("GPU-0", ("1g.5gb", 0, MigHold.IDLE), model="A100-40GB")
    foreign = cut_device("GPU-0", ("1g.5gb", 0, MigHold.FOREIGN), model="A100-40GB")
    assert taken(node_of(idle), WHOLE) is not None
    assert taken(node_of(foreign), WHOLE) is None
    sick = replace(gpus(1)[0], problem="XID 79")
    assert taken(node_of(sick), share()) is None


KINDS: list[Claims] = [
    ((share("4Gi", 30),),),
    ((share("11Gi", 5, count=2),),),
    ((WHOLE,),),
    ((SMALL,),),
    ((replace(SMALL, profile="3g.20gb"), share("20Gi", 50)),),
    ((SMALL,), (share("1500Ki"),)),
]
STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 50)), max_size=40)


@settings(max_examples=examples(0.5), deadline=None)
@given(steps=STEPS)
def test_counters_and_capacity_hold_by_an_account_of_its_own(steps: list[tuple[bool, int]]) -> None:
    devices = [cut_device(f"GPU-{each}", model="A100-40GB", index=each) for each in (0, 1)]
    node = node_of(*devices)
    pool = pool_of([gpu_state(each) for each in devices], None)
    held: list[tuple[Allocated, ...]] = []
    for is_taken, number in steps:
        if is_taken or not held:
            found = node.find(KINDS[number % len(KINDS)])
            if found is not None:
                node.take(found)
                held.append(found)
        else:
            node.give_back(held.pop(number % len(held)))
        everything = [each for claims in held for each in claims]
        used = {each.device.name: each.device.document for each in everything}
        consumed: Counter[tuple[str, str]] = Counter()
        for document in used.values():
            for each in document["consumesCounters"]:
                for name, counter in each["counters"].items():
                    consumed[each["counterSet"], name] += int(counter["value"])
        sets = [each for content in pool.slices for each in content.get("sharedCounters", ())]
        have = {
            (each["name"], name): int(counter["value"])
            for each in sets
            for name, counter in each["counters"].items()
        }
        assert all(amount <= have[key] for key, amount in consumed.items())
        for device, document in used.items():
            mine = [each for each in everything if each.device.name == device]
            if not document.get("allowMultipleAllocations"):
                assert len(mine) == 1
                continue
            for name, capacity in document["capacity"].items():
                total = sum(each.consumed[name] for each in mine)
                assert total <= parse_whole(capacity["value"])


# ---- nodes ---------------------------------------------------------------------------------------


def scheduler(*nodes: NodeClaims) -> StockScheduler:
    free = [(each.node.cpu_milli, each.node.memory_bytes) for each in nodes]
    return StockScheduler(nodes, free=free, seed=1)


def test_the_node_with_the_most_cpu_and_memory_left_is_chosen() -> None:
    """Even if its GPUs are empty, and those of another node have room."""
    stock = scheduler(node_of(*gpus(1), name="a"), node_of(*gpus(1), name="b"))
    pod = ClaimPod(cpu_milli=1000, memory_bytes=8 * GI, claims=((share(),),))
    chosen = []
    for _ in range(2):
        row = stock.choose(pod)
        assert row is not None
        found = stock.nodes[row].find(pod.claims)
        assert found is not None
        stock.reserve(row, pod, found)
        chosen.append(row)
    assert sorted(chosen) == [0, 1]


def test_the_scores_are_those_of_kube_scheduler() -> None:
    """LeastAllocated: the mean of what is left; BalancedAllocation: 100 less half the difference.

    Of a, with 75 and 25 % left: 50 + 75. Of b in turn: 62 and 37 %, 49 + 87; 37 and 37 %, 37 + 100;
    25 and 37 %, 31 + 93. Each score is rounded down.
    """
    host = ClaimPod(cpu_milli=0, memory_bytes=0)
    stock = scheduler(node_of(name="a"), node_of(name="b"))
    stock.reserve(0, ClaimPod(cpu_milli=2000, memory_bytes=48 * GI), ())
    stock.reserve(1, ClaimPod(cpu_milli=3000, memory_bytes=40 * GI), ())
    assert stock.choose(host) == 1
    stock.reserve(1, ClaimPod(cpu_milli=2000, memory_bytes=0), ())
    assert stock.choose(host) == 1
    stock.reserve(1, ClaimPod(cpu_milli=1000, memory_bytes=0), ())
    assert stock.choose(host) == 0


def test_in_a_large_cluster_some_of_the_nodes_are_scored_and_others_for_the_next_pod() -> None:
    stock = scheduler(*(node_of(name=f"n{each}", cores=8) for each in range(300)))
    chosen = [stock.choose(ClaimPod(cpu_milli=1000)) for _ in range(3)]
    # 300 nodes: 48 percent of them, 144.
    assert [each is not None and each // 144 for each in chosen[:2]] == [0, 1]
    assert chosen[2] is not None
    assert not 132 <= chosen[2] < 288


def test_a_node_that_gets_room_is_found_again() -> None:
    stock = scheduler(node_of(*gpus(1)))
    pod = ClaimPod(claims=((WHOLE,),))
    found = stock.nodes[0].find(pod.claims)
    assert found is not None
    assert stock.choose(pod) == 0
    stock.reserve(0, pod, found)
    assert stock.choose(pod) is None
    stock.release(0, pod, found)
    assert stock.choose(pod) == 0


# ---- traces --------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_memory", [False, True], ids=["time", "time and memory"])
def test_nothing_is_given_that_is_not_there(*, has_memory: bool) -> None:
    """By the books of the other policies, too."""
    made = generate(seed=3, scale=0.01, constrained=0.3)
    trace = with_gpu_memory(made) if has_memory else without_gpu_memory(made)
    placer = ClaimPlacer(trace.nodes, pods=trace.pods, seed=1)
    spots = []
    for number, pod in enumerate(
        drawn(trace.pods, capacity_milli=capacity_milli(trace.nodes), tune=1.3, seed=1)
    ):
        spot = placer.place(pod)
        if spot is not None:
            placer.book(spot)  # raises if it is not there
            spots.append(spot)
            model = trace.nodes[spot.node].model
            assert not pod.shape.models or model in pod.shape.models
        if number % 5 == 0 and spots:
            placer.release(spots.pop(number % len(spots)))
        placer.check_invariants()
    assert len(spots) > 50


def test_a_pod_is_placed_on_a_given_node_or_not_at_all() -> None:
    nodes = [
        TraceNode(name=name, cpu_milli=8000, memory_mib=1024, gpus=1, model="T4") for name in "ab"
    ]
    pod = TracePod(name="p", shape=TraceShape(cpu_milli=5000, gpus=1, gpu_milli=400), memory_mib=1)
    placer = ClaimPlacer(nodes, pods=[pod], seed=1)
    spot = placer.place(pod, 1)
    assert spot is not None
    assert (spot.node, spot.devices) == (1, (0,))
    placer.book(spot)
    assert placer.place(pod, 1) is None, "its CPU is taken"

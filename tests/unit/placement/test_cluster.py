# SPDX-License-Identifier: Apache-2.0
"""The cluster: what the arrays answer is what each node answers, in whatever order events came."""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from needs import request
from placing import booked, cluster_of

from allotment.model.clusters import (
    NodeDevice,
    NodeInventory,
    NodeRejection,
    PlacedContainer,
    PlacedDevice,
    PodBooking,
    PodNeed,
    Taken,
    WantedContainer,
)
from allotment.model.compute import WHOLE
from allotment.model.errors import UsageError
from allotment.model.pods import ContainerKind, PodUid
from allotment.model.requests import (
    EXCLUSIVE,
    SOFT,
    TIMESLICE,
    Constraints,
    DeviceWeights,
    ModelRule,
    Preferences,
)
from allotment.placement.cluster import Cluster
from allotment.placement.kinds import Kinds
from allotment.placement.policies import choose_on, make
from allotment.placement.refusals import grouped

GI = 1 << 30
MODES = (SOFT, EXCLUSIVE, TIMESLICE)


def inventory(
    name: str,
    *sizes: int,
    model: str = "T4",
    taken: Sequence[Taken] = (),
    budget: int = 0,
    problems: Sequence[str] = (),
    cpu: int = 8000,
) -> NodeInventory:
    return NodeInventory(
        name=name,
        cpu_milli=cpu,
        memory_bytes=64,
        devices=tuple(
            NodeDevice(
                uuid=f"{name}-{index}",
                model=model,
                memory_bytes=memory,
                index=index,
                numa_node=index // 2,
                modes=MODES,
                taken=taken[index] if index < len(taken) else Taken(),
                problem=problems[index] if index < len(problems) else "",
            )
            for index, memory in enumerate(sizes)
        ),
        host_budget_bytes=budget,
    )


def need(
    uid: str,
    memory: int | Fraction = 4,
    *,
    count: int = 1,
    guarantee: int = 0,
    cpu: int = 100,
    host_memory: int = 1,
    mode: str = SOFT,
    host: bool = False,
    constraints: Constraints | None = None,
    preferences: Preferences | None = None,
) -> PodNeed:
    asked = request(
        memory,
        count=count,
        guarantee=guarantee,
        mode=mode,
        host=host,
        constraints=constraints,
        preferences=preferences,
    )
    return PodNeed(
        uid=PodUid(uid),
        cpu_milli=cpu,
        memory_bytes=host_memory,
        containers=(WantedContainer(name="main", request=asked),),
    )


def binpack(*nodes: NodeInventory, devices: Sequence[str] = ("binpack",)) -> Cluster:
    return cluster_of(*nodes, policy="binpack", devices=devices)


def uuids(booking: PodBooking | NodeRejection) -> list[str]:
    assert isinstance(booking, PodBooking), booking
    return [each.uuid for one in booking.containers for each in one.devices]


# ---- by examples ---------------------------------------------------------------------------------


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
    wishes = Preferences(node_policies=("spread",), device_policies=("spread",))
    spread = need("two", preferences=wishes)
    assert cluster.rank(spread).best == ["b", "a"]
    assert uuids(cluster.place(spread, "a")) == ["a-1"]
    assert uuids(cluster.place(need("two"), "a")) == ["a-0"]


def test_weights_say_what_counts_among_devices() -> None:
    """Of one device the memory is given away, of the other the time, of the third seats alone."""
    taken = [
        Taken(memory=5, guarantee=0, shares=1, mode=SOFT),
        Taken(memory=0, guarantee=6000, shares=1, mode=SOFT),
        Taken(memory=0, guarantee=0, shares=40, mode=SOFT),
    ]
    cluster = binpack(inventory("a", 10, 10, 10, taken=taken))
    for weights, device in (
        (DeviceWeights(shares=0, compute=0, memory=1), "a-0"),
        (DeviceWeights(shares=0, compute=1, memory=0), "a-1"),
        (DeviceWeights(shares=1, compute=0, memory=0), "a-2"),
    ):
        pod = need("x", 1, preferences=Preferences(weights=weights))
        assert uuids(cluster.place(pod, "a")) == [device]
        wishes = Preferences(device_policies=("spread",), weights=weights)
        assert uuids(cluster.place(need("x", 1, preferences=wishes), "a")) != [device]


def test_devices_of_one_numa_node_are_preferred_where_that_is_wished() -> None:
    taken = [Taken(memory=1, shares=1, mode=SOFT), Taken(), Taken(memory=2, shares=1, mode=SOFT)]
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
    answers = cluster.explain(need("x", 30, constraints=wanted))
    refusals = [each for each in answers if isinstance(each, NodeRejection)]
    assert grouped(refusals) == [
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


# ---- the arrays and the nodes --------------------------------------------------------------------

models = st.sampled_from(["T4", "T4", "A100-80GB"])
takens = st.just(Taken()) | st.builds(
    Taken,
    memory=st.integers(0, 6),
    guarantee=st.sampled_from([0, 3000]),
    shares=st.integers(1, 3),
    mode=st.sampled_from([SOFT, SOFT, TIMESLICE]),
)
nodes = st.builds(
    lambda name, sizes, model, taken, budget, problems, cpu: inventory(
        name, *sizes, model=model, taken=taken, budget=budget, problems=problems, cpu=cpu
    ),
    st.sampled_from("abc"),
    st.lists(st.integers(4, 10), max_size=3),
    models,
    st.lists(takens, max_size=4),
    st.sampled_from([0, 0, 5]),
    st.lists(st.sampled_from(["", "", "", "sick"]), max_size=4),
    st.sampled_from([500, 8000]),
)
constraints = st.builds(
    Constraints,
    models=st.sampled_from([(), (), (ModelRule("t4"),), (ModelRule("a100"), ModelRule("V100"))]),
    not_models=st.sampled_from([(), (), (ModelRule("80gb"),)]),
    uuids=st.sampled_from([(), (), (), ("a-0", "b-1", "c-0")]),
    affinity=st.sampled_from(["", "", "", "s", "t"]),
    anti_affinity=st.sampled_from(["", "", "", "s"]),
    exclusion=st.sampled_from([None, None, None, "s"]),
    is_alone=st.booleans(),
    same_numa=st.booleans(),
)
amounts = st.integers(1, 9) | st.sampled_from([Fraction(1, 3), Fraction(1, 2), Fraction(1)])
needs = st.builds(
    lambda uid, memory, rest: need(uid, memory, **rest),
    st.sampled_from([f"p{number}" for number in range(8)]),
    amounts,
    st.fixed_dictionaries(
        {
            "count": st.integers(1, 3),
            "guarantee": st.sampled_from([0, 0, 2500, 6000, WHOLE]),
            "cpu": st.sampled_from([0, 100, 300]),
            "mode": st.sampled_from([SOFT, SOFT, SOFT, EXCLUSIVE, TIMESLICE]),
            "host": st.sampled_from([False, False, True]),
            "constraints": st.just(Constraints()) | constraints,
        }
    ),
)


class Events(RuleBasedStateMachine):
    """Nodes and pods come and go; the cluster never promises more than there is, and agrees."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster(node_policies=["binpack"], device_policies=["binpack"])
        self.nodes: dict[str, NodeInventory] = {}
        self.pods: dict[PodUid, PodBooking] = {}

    @rule(node=nodes)
    def put(self, node: NodeInventory) -> None:
        self.cluster.put(node)
        self.nodes[node.name] = node

    @rule(name=st.sampled_from("abcd"))
    def drop(self, name: str) -> None:
        self.cluster.drop(name)
        self.nodes.pop(name, None)

    @rule(pod=needs)
    def book(self, pod: PodNeed) -> None:
        self.cluster.arrived(pod)
        ranking = self.cluster.rank(pod)
        assert not set(ranking.best) & set(ranking.refused)
        assert {*ranking.best, *ranking.refused} == set(self.nodes)
        for name in self.nodes:
            decision = self.cluster.place(pod, name)
            if isinstance(decision, PodBooking):
                assert name in ranking.best, pod
            else:
                assert ranking.refused[name] == decision
        assert self.cluster.rank(pod, most=1).best == ranking.best[:1]
        asked = frozenset(sorted(self.nodes)[::2])
        few = self.cluster.rank(pod, asked, most=2)
        assert few.best == [name for name in ranking.best if name in asked][:2]
        assert few.refused.keys() <= ranking.refused.keys() & asked
        if ranking.best:
            decision = self.cluster.place(pod, ranking.best[0])
            assert isinstance(decision, PodBooking)
            self.cluster.book(decision)
            self.pods[pod.uid] = decision

    @precondition(lambda self: self.pods)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(sorted(self.pods)))
        before = self.cluster.rank(need("probe"))
        self.cluster.release(uid)
        self.cluster.book(self.pods[uid])
        after = self.cluster.rank(need("probe"))
        assert (before.best, dict(before.refused)) == (after.best, dict(after.refused))
        self.cluster.release(uid)
        del self.pods[uid]

    @rule(number=st.integers(0, 3))
    def book_elsewhere(self, number: int) -> None:
        """On a node or device that may be there or not."""
        part = PlacedDevice(f"d-{number}", 1, 100)
        booking = PodBooking(
            uid=PodUid(f"f{number}"),
            node="d",
            cpu_milli=10,
            containers=(PlacedContainer(name="main", devices=(part,), exclusion="s"),),
        )
        self.cluster.book(booking)
        self.pods[booking.uid] = booking

    @invariant()
    def all_that_is_known_is_right(self) -> None:
        self.cluster.check_invariants()
        fresh = Cluster(node_policies=["binpack"], device_policies=["binpack"])
        for booking in reversed(self.pods.values()):
            fresh.book(booking)
        for node in self.nodes.values():
            fresh.put(node)
        for name in self.nodes:
            assert described(fresh, name) == described(self.cluster, name)
        assert fresh.totals() == self.cluster.totals()
        assert {uid: self.cluster.booking(uid) for uid in self.pods} == self.pods


def described(cluster: Cluster, name: str) -> list[object]:
    arrays = cluster.arrays
    row = arrays.row[name]
    columns = ("usable", "idle", "free", "free_memory", "memory", "shares", "numa")
    return [
        float(arrays.cpu_free[row]),
        float(arrays.memory_free[row]),
        *(
            [float(each) for each in getattr(arrays, column)[row]][: arrays.gpu_there[row].sum()]
            for column in columns
        ),
    ]


TestEvents = Events.TestCase
TestEvents.settings = settings(max_examples=80, stateful_step_count=12, deadline=None)


@settings(max_examples=60, deadline=None)
@given(st.lists(nodes, min_size=1, max_size=4), st.lists(needs, max_size=12))
def test_no_device_is_ever_over_committed(
    inventories: list[NodeInventory], pods: list[PodNeed]
) -> None:
    cluster = binpack(*inventories)
    there = {each.name: each for each in inventories}
    kept: dict[PodUid, PodBooking] = {}
    for number, pod in enumerate(pods):
        unique = replace(pod, uid=PodUid(f"u{number}"))
        best = cluster.rank(unique).best
        if best:
            kept[unique.uid] = booked(cluster, unique, best[0])
    event(f"{len(kept)} of {len(pods)} placed")
    for node in there.values():
        beyond = beyond_before = 0
        for device in node.devices:
            fixed = oversubscribed = guarantee = 0
            modes: list[str] = [device.taken.mode] * device.taken.shares
            for booking in kept.values():
                for one in booking.containers:
                    for each in one.devices:
                        if each.uuid == device.uuid and booking.node == node.name:
                            modes.append(one.mode)
                            is_counted = one.mode != TIMESLICE
                            fixed += each.memory * (is_counted and not one.may_oversubscribe)
                            oversubscribed += each.memory * (is_counted and one.may_oversubscribe)
                            guarantee += each.guarantee * is_counted
            taken = device.taken
            assert not fixed or fixed + taken.memory <= device.memory_bytes
            assert not guarantee or guarantee + taken.guarantee <= WHOLE
            assert len(set(modes)) <= 1
            assert EXCLUSIVE not in modes or len(modes) == 1
            beyond += max(0, taken.memory + fixed + oversubscribed - device.memory_bytes)
            beyond_before += max(0, taken.memory - device.memory_bytes)
        assert beyond <= max(node.host_budget_bytes, beyond_before)


@settings(max_examples=40, deadline=None)
@given(st.lists(nodes, min_size=1, max_size=4), st.lists(needs, min_size=1, max_size=8))
def test_the_same_events_give_the_same_decisions(
    inventories: list[NodeInventory], pods: list[PodNeed]
) -> None:
    one, other = binpack(*inventories), binpack(*inventories)
    for pod in pods:
        rankings = [cluster.rank(pod) for cluster in (one, other)]
        assert rankings[0].best == rankings[1].best
        if rankings[0].best:
            booked(one, pod)
            booked(other, pod)


@pytest.mark.parametrize("policy", ["binpack", "spread", "topology", "numa", "fgd", "first-fit"])
@settings(max_examples=25, deadline=None)
@given(st.lists(nodes, min_size=1, max_size=4), st.lists(needs, min_size=1, max_size=6))
def test_devices_are_those_that_the_policy_likes_best(
    policy: str, inventories: list[NodeInventory], pods: list[PodNeed]
) -> None:
    """For pods of which the arrays know all, the exact search takes the policy's own choice."""
    cluster = Cluster(node_policies=[policy], device_policies=[policy])
    for node in inventories:
        cluster.put(node)
    for pod in pods:
        wanted = pod.containers[0]
        request = replace(wanted.request, constraints=Constraints(), may_oversubscribe=False)
        plain = replace(pod, containers=(replace(wanted, request=request),))
        cluster.release(plain.uid)
        best = cluster.rank(plain).best
        if best:
            row = cluster.arrays.row[best[0]]
            kind = Kinds(cluster.arrays).of(plain)
            liked = choose_on(make(policy), cluster.arrays, kind, row)
            booking = booked(cluster, plain, best[0])
            assert uuids(booking) == [f"{best[0]}-{column}" for column in liked]


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

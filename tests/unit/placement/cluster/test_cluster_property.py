# SPDX-License-Identifier: Apache-2.0
"""The cluster: what the arrays answer is what each node answers, in whatever order events came."""

from fractions import Fraction

import pytest
from examples import examples
from hypothesis import event, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from placing import booked
from small_clusters import binpack, inventory, need, uuids

from allotment.model.clusters import (
    NodeInventory,
    PlacedContainer,
    PlacedDevice,
    PodBooking,
    PodNeed,
    TakenPart,
)
from allotment.model.compute import WHOLE
from allotment.model.modes import EXCLUSIVE, SOFT, TIMESLICE
from allotment.model.pods import PodUid
from allotment.model.requests import Constraints, ModelRule
from allotment.model.structs import replace
from allotment.placement.cluster.cluster import Cluster, ModelTotals
from allotment.placement.cluster.filters import PodShapes
from allotment.placement.policies import choose_on, make

models = st.sampled_from(["T4", "T4", "A100-80GB"])
takens = st.just(TakenPart()) | st.builds(
    TakenPart,
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
        by_node = self.cluster.totals_by_node()
        assert sorted(by_node.names) == sorted(self.cluster.nodes)
        of_models = [sum(each) for each in zip(*self.cluster.totals().values(), strict=True)]
        assert by_node.sums.sum(axis=0).tolist() == (of_models or [0] * len(ModelTotals._fields))
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
TestEvents.settings = settings(stateful_step_count=12)


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
@settings(max_examples=examples(1 / 2))
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
            kind = PodShapes(cluster.arrays).of(plain)
            liked = choose_on(make(policy), cluster.arrays, kind, row)
            booking = booked(cluster, plain, best[0])
            assert uuids(booking) == [f"{best[0]}-{column}" for column in liked]

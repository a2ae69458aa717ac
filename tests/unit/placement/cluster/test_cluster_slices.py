# SPDX-License-Identifier: Apache-2.0
"""Slices in a cluster: which node is best, what all arrays say, and in which mode a pod goes."""

from collections.abc import Sequence

from cut_nodes import GIB, Piece, cut_device, node_of, pod_of, shared_profiles, slices
from hypothesis import event, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from placing import booked, cluster_of

from allotment.model.clusters import (
    NodeDevice,
    NodeInventory,
    PodBooking,
    PodNeed,
    TakenPart,
)
from allotment.model.mig import MigHold, MigLayout, MigRequest
from allotment.model.modes import EXCLUSIVE, MIG, SOFT
from allotment.model.pods import PodUid
from allotment.model.requests import Constraints, ModelRule, Preferences
from allotment.model.structs import replace
from allotment.placement.cluster.cluster import Cluster
from allotment.placement.explain import Refusal, grouped
from allotment.placement.mig import MigChoice, choose
from allotment.placement.mig.cuts import Cuts

IDLE, FOREIGN = MigHold.IDLE, MigHold.FOREIGN
A100 = "A100-40GB"


def one_gpu(name: str, *pieces: Piece, is_on: bool = True, model: str = "A30") -> NodeInventory:
    return node_of(cut_device(f"{name}-0", *pieces, is_on=is_on, model=model), name=name)


# ---- by examples ---------------------------------------------------------------------------------


def test_the_node_is_best_whose_start_takes_least_from_the_cluster() -> None:
    """A hole is filled before a whole GPU is begun; ties go by name."""
    cluster = cluster_of(
        one_gpu("a", model=A100),
        one_gpu("b", ("1g.5gb", 0, FOREIGN), model=A100),
        one_gpu("c", ("3g.20gb", 4, FOREIGN), ("1g.5gb", 0, FOREIGN), model=A100),
        one_gpu("d", ("4g.20gb", 0, FOREIGN), ("3g.20gb", 4, FOREIGN), model=A100),
    )
    assert cluster.rank(pod_of(slices("1g.5gb"))).best == ["b", "c", "a"]
    assert cluster.rank(pod_of(slices("1g.5gb")), most=1).best == ["b"]
    assert cluster.rank(pod_of(slices("1g.5gb")), {"a", "c"}, most=1).best == ["c"]


def test_a_warm_slice_comes_first_and_a_gpu_to_be_switched_last() -> None:
    cluster = cluster_of(one_gpu("a", is_on=False), one_gpu("b"), one_gpu("c", ("1g.6gb", 3, IDLE)))
    assert cluster.rank(pod_of(slices("1g.6gb"))).best == ["c", "b", "a"]
    booked(cluster, pod_of(slices("1g.6gb"), uid="p"), "a")
    assert cluster.rank(pod_of(slices("2g.12gb"))).best == ["a", "b", "c"]


def test_nodes_where_the_first_mode_fits_come_before_all_others() -> None:
    soft = node_of(replace(cut_device("s-0", modes=(SOFT,)), mig=None), name="s")
    full = one_gpu("full", ("4g.24gb", 0, FOREIGN))
    cluster = cluster_of(one_gpu("m"), full, soft, one_gpu("either", is_on=False))
    first_mig = pod_of(slices("1g.6gb", modes=(MIG, SOFT), gib=1))
    assert cluster.rank(first_mig).best == ["m", "either", "s"]
    first_soft = pod_of(slices("1g.6gb", modes=(SOFT, MIG), gib=1))
    assert cluster.rank(first_soft).best == ["either", "s", "m"]
    assert cluster.rank(first_soft, most=1).best == ["either"]
    assert cluster.rank(first_soft, most=3).best == ["either", "s", "m"]
    refused = cluster.rank(first_mig).refused
    assert list(refused) == ["full"]
    assert refused["full"].text == (
        "mode mig: need a MIG slice 1g.6gb, have no room for one; "
        "mode soft: need a GPU with 1Gi, have GPUs in MIG mode"
    )
    assert list(cluster.rank(first_soft, most=1).refused) == ["full"]
    for name, mode in (("m", MIG), ("s", SOFT), ("either", MIG)):
        decision = cluster.place(first_mig, name)
        assert isinstance(decision, PodBooking)
        assert [each.mode for each in decision.containers] == [mode]


def test_several_containers_each_have_the_mode_that_fits() -> None:
    soft = node_of(replace(cut_device("s-0", modes=(SOFT,)), mig=None), name="s")
    both = node_of(cut_device("b-0"), cut_device("b-1", is_on=False), name="b")
    cluster = cluster_of(soft, both)
    need = pod_of(
        slices("4g.24gb", modes=(MIG, SOFT), gib=20), slices("4g.24gb", modes=(MIG, SOFT), gib=3)
    )
    assert cluster.rank(need).best == ["b", "s"]
    assert {each.mode for each in booked(cluster, need, "s").containers} == {SOFT}
    assert {each.mode for each in booked(cluster, need, "b").containers} == {MIG}


def test_pods_of_which_arrays_do_not_know_all_find_the_last_place() -> None:
    cluster = cluster_of(one_gpu("a"), one_gpu("b", ("1g.6gb", 0, FOREIGN)))
    tagged = slices("4g.24gb", constraints=Constraints(exclusion="t"))
    assert cluster.rank(pod_of(tagged)).best == ["a"]
    halves = pod_of(slices("2g.12gb"), slices("2g.12gb", modes=(SOFT, MIG), gib=1))
    assert cluster.rank(halves).best == ["a"]


def test_a_pods_own_policies_rank_nodes_for_slices_too() -> None:
    cluster = cluster_of(one_gpu("a", ("2g.12gb", 0, FOREIGN)), one_gpu("b"))
    asked = slices("1g.6gb")
    spread = replace(asked, preferences=Preferences(node_policies=("first-fit",)))
    assert cluster.rank(pod_of(asked)).best == ["a", "b"]
    assert set(cluster.rank(pod_of(spread)).best) == {"a", "b"}


def test_nodes_without_room_are_told_together_and_one_alone_with_its_gpus() -> None:
    full = [one_gpu(name, ("4g.24gb", 0, FOREIGN)) for name in "abc"]
    cluster = cluster_of(*full, one_gpu("d", ("2g.12gb", 0, FOREIGN)))
    one = cluster.rank(pod_of(slices("1g.6gb"))).refused
    assert [(group.text, group.nodes) for group in grouped(one)] == [
        ("need a MIG slice 1g.6gb, have no room for one", ("a", "b", "c"))
    ]
    alone = cluster.rank(pod_of(slices("1g.6gb")), ["a"]).refused
    assert [(group.text, group.nodes) for group in grouped(alone)] == [
        (
            (
                "need a MIG slice 1g.6gb, have no room for one (GPU 0: 1g.6gb can start "
                "at slot 0, 1, 2, 3: slots 0-3 of others)"
            ),
            ("a",),
        )
    ]
    many = cluster.rank(pod_of(slices("1g.6gb", count=3))).refused
    assert many["d"].text == "need 3 MIG slices 1g.6gb, have room for 2"


def test_what_is_booked_before_its_node_is_known_counts_once_it_is() -> None:
    cluster = cluster_of(one_gpu("a"))
    booking = booked(cluster, pod_of(slices("4g.24gb"), uid="p"))
    cluster.drop("a")
    cluster.put(one_gpu("a"))
    assert cluster.rank(pod_of(slices("1g.6gb"))).best == []
    cluster.release(booking.uid)
    assert cluster.rank(pod_of(slices("1g.6gb"))).best == ["a"]
    cluster.check_invariants()


def test_totals_count_what_slices_have() -> None:
    cluster = cluster_of(one_gpu("a"))
    booked(cluster, pod_of(slices("2g.12gb"), uid="p"))
    totals = cluster.totals()["A30"]
    profile = next(each for each in shared_profiles("A30") if each.name == "2g.12gb")
    assert totals.memory_allocated == profile.memory_bytes
    assert totals.guarantee_allocated == 5000


# ---- what a start is worth -----------------------------------------------------------------------

PIECES: tuple[tuple[Piece, ...], ...] = (
    (),
    (),
    (("1g.6gb", 1, FOREIGN),),
    (("1g.6gb", 0, IDLE), ("1g.6gb+me", 3, FOREIGN)),
    (("2g.12gb", 0, FOREIGN), ("1g.6gb", 2, FOREIGN)),
    (("2g.12gb", 0, IDLE), ("2g.12gb", 2, IDLE)),
    (("4g.24gb", 0, FOREIGN),),
)
requests = st.builds(
    MigRequest,
    profile=st.sampled_from(["", "1g.6gb", "1g.6gb+me", "2g.12gb", "4g.24gb"]),
    memory_bytes=st.sampled_from([0, 6 * GIB]),
    compute=st.sampled_from([0, 5000]),
)


@given(st.lists(st.tuples(st.sampled_from(PIECES), st.booleans()), min_size=1), requests)
def test_the_gpu_of_least_cost_is_the_one_that_the_planner_takes(
    there: Sequence[tuple[tuple[Piece, ...], bool]], request: MigRequest
) -> None:
    """Among GPUs whose mode is on, as `choose` looks at these first."""
    cuts = Cuts()
    layouts = []
    for number, (pieces, is_on) in enumerate(there):
        device = cut_device(f"GPU-{number:03}", *(pieces if is_on else ()))
        assert device.mig
        mig = replace(device.mig, is_enabled=True)
        layouts.append(MigLayout(gpu=device.uuid, profiles=mig.profiles, slices=mig.slices))
    numbers = [cuts.take(each) for each in layouts]
    costs = cuts.costs(request)[numbers]
    chosen = choose(layouts, request)
    if isinstance(chosen, tuple):
        (choice,) = chosen
        assert isinstance(choice, MigChoice)
        place = [each.gpu for each in layouts].index(choice.gpu)
        event("warm" if choice.reused else "to be cut")
        assert abs(costs[place] - costs.min()) < 1e-9
    else:
        assert costs.min() == float("inf")
        assert cuts.rooms(request)[numbers].sum() == 0
    for number in numbers:
        cuts.release(number)
    cuts.check_invariants({}, {})


# ---- all events ----------------------------------------------------------------------------------

gpus = st.builds(
    lambda kind, modes, taken, problem: (kind, modes, taken, problem),
    st.sampled_from(PIECES).map(lambda pieces: (True, pieces)) | st.just((False, ())),
    st.sampled_from([(SOFT, MIG), (MIG,), (SOFT, EXCLUSIVE, MIG), (SOFT,)]),
    st.sampled_from([TakenPart()] * 4 + [TakenPart(memory=GIB, shares=1, mode=SOFT)]),
    st.sampled_from([""] * 5 + ["sick"]),
)


def gpu_of(
    uuid: str,
    each: tuple[tuple[bool, tuple[Piece, ...]], tuple[str, ...], TakenPart, str],
) -> NodeDevice:
    (is_on, pieces), modes, taken, problem = each
    device = cut_device(
        uuid, *pieces, is_on=is_on, modes=modes, taken=TakenPart() if is_on else taken
    )
    return replace(device, problem=problem, mig=device.mig if MIG in modes else None)


nodes = st.builds(
    lambda name, devices: node_of(
        *(gpu_of(f"{name}-{index}", each) for index, each in enumerate(devices)), name=name
    ),
    st.sampled_from("abc"),
    st.lists(gpus, max_size=2),
)
orders = st.sampled_from([(MIG,), (MIG,), (SOFT,), (MIG, SOFT), (SOFT, MIG), (EXCLUSIVE, MIG)])
asked = st.builds(
    slices,
    st.sampled_from(["", "1g.6gb", "2g.12gb", "1g.6gb+me", "4g.24gb", "7g.80gb"]),
    count=st.integers(1, 3),
    modes=orders,
    gib=st.sampled_from([1, 6, 20]),
    guarantee=st.sampled_from([0, 0, 5000]),
    constraints=st.just(Constraints())
    | st.builds(
        Constraints,
        models=st.sampled_from([(), (ModelRule("a30"),), (ModelRule("t4"),)]),
        uuids=st.sampled_from([(), (), ("a-0", "b-0")]),
        affinity=st.sampled_from(["", "t"]),
        exclusion=st.sampled_from([None, "s"]),
        is_alone=st.booleans(),
    ),
)
needs = st.builds(
    lambda number, containers: pod_of(*containers, uid=f"p{number}"),
    st.integers(0, 7),
    st.lists(asked, min_size=1, max_size=2),
)


class Events(RuleBasedStateMachine):
    """Nodes and pods come and go; what is ranked is what is placed, in the mode liked best."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster()
        self.nodes: dict[str, NodeInventory] = {}
        self.pods: dict[PodUid, PodBooking] = {}

    @rule(node=nodes)
    def put(self, node: NodeInventory) -> None:
        self.cluster.put(node)
        self.nodes[node.name] = node

    @rule(name=st.sampled_from("abc"))
    def drop(self, name: str) -> None:
        self.cluster.drop(name)
        self.nodes.pop(name, None)

    @rule(pod=needs)
    def book(self, pod: PodNeed) -> None:
        self.cluster.arrived(pod)
        ranking = self.cluster.rank(pod)
        assert not set(ranking.best) & set(ranking.refused)
        assert {*ranking.best, *ranking.refused} == set(self.nodes)
        decisions = {name: self.cluster.place(pod, name) for name in self.nodes}
        for name, decision in decisions.items():
            if isinstance(decision, PodBooking):
                assert name in ranking.best, pod
            elif len(pod.containers) == 1:
                refusal = ranking.refused[name]
                assert (refusal.reason, refusal.text) == (decision.reason, decision.text)
        if len(pod.containers) == 1:
            request = pod.containers[0].request
            order = [request.mode, *request.other_modes]
            placed = [decisions[name] for name in ranking.best]
            modes = [each.containers[0].mode for each in placed if isinstance(each, PodBooking)]
            assert modes == sorted(modes, key=order.index)
        assert self.cluster.rank(pod, most=1).best == ranking.best[:1]
        half = frozenset(sorted(self.nodes)[::2])
        few = self.cluster.rank(pod, half, most=2)
        assert few.best == [name for name in ranking.best if name in half][:2]
        assert few.refused.keys() <= ranking.refused.keys() & half
        if ranking.best:
            decision = decisions[ranking.best[0]]
            assert isinstance(decision, PodBooking)
            self.cluster.book(decision)
            self.pods[pod.uid] = decision

    @precondition(lambda self: self.pods)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(sorted(self.pods)))
        self.cluster.release(uid)
        del self.pods[uid]

    @invariant()
    def all_that_is_known_is_right(self) -> None:
        self.cluster.check_invariants()
        fresh = Cluster()
        for booking in reversed(self.pods.values()):
            fresh.book(booking)
        for node in self.nodes.values():
            fresh.put(node)
        fresh.check_invariants()
        assert fresh.totals() == self.cluster.totals()
        for pod in (pod_of(slices("1g.6gb"), uid="probe"), pod_of(slices(gib=8), uid="probe")):
            one, other = fresh.rank(pod), self.cluster.rank(pod)
            assert (one.best, dict(one.refused)) == (other.best, dict(other.refused))


TestEvents = Events.TestCase
TestEvents.settings = settings(stateful_step_count=12)


def test_a_request_of_which_nothing_is_known_is_refused_everywhere() -> None:
    cluster = cluster_of(one_gpu("a"), node_of(name="b"))
    ranking = cluster.rank(pod_of(slices("9g.99gb")))
    assert ranking.best == []
    assert ranking.refused["a"].reason == "mig-profile"
    assert isinstance(ranking.refused["b"], Refusal)
    assert ranking.refused["b"].text == "need a MIG slice 9g.99gb, have no GPU"

# SPDX-License-Identifier: Apache-2.0
"""Slices on one node: what pods have of them, and what they are told where they have none."""

from collections import Counter

import pytest
from cut_nodes import GIB, cut_device, node_of, pod_of, slices
from placing import CHAIN, place, placed

from allotment.model.clusters import (
    PlacedContainer,
    PlacedDevice,
    PodBooking,
    PodNeed,
    TakenPart,
)
from allotment.model.mig import MigHold, MigPlace
from allotment.model.modes import EXCLUSIVE, MIG, MPS, SOFT
from allotment.model.pods import ContainerKind, PodUid
from allotment.model.requests import Constraints, Request
from allotment.model.structs import replace
from allotment.placement.explain import Refusal
from allotment.placement.nodes import Node

INIT, SIDECAR, REGULAR = ContainerKind.INIT, ContainerKind.SIDECAR, ContainerKind.REGULAR
IDLE, FOREIGN, USED = MigHold.IDLE, MigHold.FOREIGN, MigHold.USED
A100 = "A100-40GB"


def refused(there: Node, need: PodNeed) -> Refusal:
    decision = place(there, need)
    assert isinstance(decision, Refusal), decision
    return decision


def where(booking: PodBooking) -> list[tuple[str, str, int]]:
    return [
        (each.uuid, each.slice.profile, each.slice.start)
        for one in booking.containers
        for each in one.devices
        if each.slice
    ]


def modes(booking: PodBooking) -> list[str]:
    return [each.mode for each in booking.containers]


# ---- by examples ---------------------------------------------------------------------------------


def test_a_slice_is_told_with_its_gpu_and_what_it_has() -> None:
    there = Node(node_of(cut_device("GPU-0", model=A100)))
    (container,) = placed(there, pod_of(slices("1g.5gb"))).containers
    assert container.mode == MIG
    assert container.devices == (PlacedDevice("GPU-0", 4864 << 20, 1428, MigPlace("1g.5gb", 6)),)


def test_eight_pods_on_a_gpu_of_seven_slices() -> None:
    there = Node(node_of(cut_device("GPU-0", model=A100)))
    for number in range(7):
        there.book(placed(there, pod_of(slices("1g.5gb"), uid=f"p{number}")))
    there.check_invariants()
    last = refused(there, pod_of(slices("1g.5gb"), uid="last"))
    assert last.reason == "mig-room"
    assert last.text == "need a MIG slice 1g.5gb, have no room for one"
    assert last.details == (
        "GPU 0: has the most 1g.5gb or profiles with its engines that fit: slot 0 of a pod, "
        "slot 1 of a pod, slot 2 of a pod, slot 3 of a pod, slot 4 of a pod, slot 5 of a pod, "
        "slot 6 of a pod"
    )
    there.release(PodUid("p3"))
    assert isinstance(place(there, pod_of(slices("1g.5gb"), uid="last")), PodBooking)


def test_a_gpu_whose_mig_is_left_off_for_a_time_says_why_to_who_asks_for_a_slice() -> None:
    why = "MIG is off, and others have switched it off 2 times"
    device = replace(cut_device("GPU-0", model=A100), modes=(SOFT,), mig=None, mig_off=why)
    there = Node(node_of(device))
    refusal = refused(there, pod_of(slices("1g.5gb")))
    assert why in refusal.text
    assert "configuration" not in " ".join(refusal.details)
    assert modes(placed(there, pod_of(slices(gib=1, modes=(SOFT,))))) == [SOFT]


def test_memory_and_compute_are_a_floor() -> None:
    there = Node(node_of(cut_device("GPU-0", model=A100)))
    assert where(placed(there, pod_of(slices(gib=5)))) == [("GPU-0", "1g.10gb", 6)]
    assert where(placed(there, pod_of(slices(gib=5, guarantee=2500)))) == [("GPU-0", "2g.10gb", 4)]


def test_one_container_may_have_slices_of_several_gpus() -> None:
    there = Node(node_of(cut_device("GPU-0"), cut_device("GPU-1"), cut_device("GPU-2")))
    booking = placed(there, pod_of(slices("2g.12gb", count=5)))
    assert Counter(uuid for uuid, _, _ in where(booking)) == {"GPU-0": 2, "GPU-1": 2, "GPU-2": 1}
    more = refused(there, pod_of(slices("2g.12gb", count=7)))
    assert more.text == "need 7 MIG slices 2g.12gb, have room for 6"


def test_slices_of_one_container_are_on_one_numa_node_where_that_is_asked() -> None:
    there = Node(
        node_of(
            cut_device("GPU-0", ("2g.12gb", 0, FOREIGN), numa=0),
            cut_device("GPU-1", ("2g.12gb", 0, FOREIGN), numa=1),
            cut_device("GPU-2", ("2g.12gb", 0, FOREIGN), numa=1),
        )
    )
    together = Constraints(same_numa=True)
    booking = placed(there, pod_of(slices("2g.12gb", count=2, constraints=together)))
    assert {uuid for uuid, _, _ in where(booking)} == {"GPU-1", "GPU-2"}
    more = refused(there, pod_of(slices("2g.12gb", count=3, constraints=together)))
    assert more.reason == "topology"
    assert "have at most 2 of them on one NUMA node" in more.text


def test_warm_slices_are_taken_first_and_go_where_they_are_in_the_way() -> None:
    there = Node(node_of(cut_device("GPU-0", ("1g.5gb", 2, IDLE), model=A100)))
    assert where(placed(there, pod_of(slices("1g.5gb")))) == [("GPU-0", "1g.5gb", 2)]
    assert where(placed(there, pod_of(slices("7g.40gb")))) == [("GPU-0", "7g.40gb", 0)]


def test_what_is_decided_counts_and_not_what_an_agent_has_seen_before() -> None:
    """Of a warm slice that a pod was given nobody has another; one in a new one's way has gone."""
    there = Node(node_of(cut_device("GPU-0", ("1g.5gb", 2, IDLE), ("1g.5gb", 5, IDLE), model=A100)))
    there.book(placed(there, pod_of(slices("1g.5gb"), uid="warm")))
    there.book(placed(there, pod_of(slices("3g.20gb"), uid="over")))
    assert sorted(map(repr, there.loads[0].slices)) == [
        "MigPlace(profile='1g.5gb', start=5)",
        "MigPlace(profile='3g.20gb', start=0)",
    ]
    for uid in "ab":
        there.book(placed(there, pod_of(slices("1g.5gb"), uid=uid)))
    assert refused(there, pod_of(slices("1g.5gb"))).reason == "mig-room"


def test_foreign_slices_and_those_of_the_machines_own_shares_stay() -> None:
    there = Node(node_of(cut_device("GPU-0", ("2g.12gb", 0, FOREIGN), ("1g.6gb", 2, USED))))
    assert where(placed(there, pod_of(slices("1g.6gb")))) == [("GPU-0", "1g.6gb", 3)]
    last = refused(there, pod_of(slices("2g.12gb")))
    assert last.details == (
        "GPU 0: 2g.12gb can start at slot 0, 2: slots 0-1 of others, slot 2 of another process"
    )


def test_gpus_whose_mode_is_on_come_before_those_that_have_to_be_switched() -> None:
    there = Node(node_of(cut_device("GPU-0", is_on=False), cut_device("GPU-1")))
    assert where(placed(there, pod_of(slices("1g.6gb")))) == [("GPU-1", "1g.6gb", 0)]
    four = placed(there, pod_of(slices("4g.24gb"), uid="large"))
    there.book(four)
    switched = placed(there, pod_of(slices("1g.6gb")))
    assert [uuid for uuid, _, _ in where(switched)] == ["GPU-0"]
    there.book(switched)
    # It counts as on from then on, though its agent has not said so.
    assert refused(there, pod_of(slices(modes=(SOFT,), gib=1), uid="soft")).reason == "company"


def test_a_gpu_is_of_one_mode_at_a_time() -> None:
    there = Node(node_of(cut_device("GPU-0", is_on=False)))
    soft = placed(there, pod_of(slices(modes=(SOFT,), gib=1), uid="soft"))
    there.book(soft)
    assert refused(there, pod_of(slices("1g.6gb"))).reason == "company"
    there.release(PodUid("soft"))
    there.book(placed(there, pod_of(slices("1g.6gb"), uid="cut")))
    assert refused(there, pod_of(slices(modes=(SOFT,), gib=1))).reason == "company"
    assert refused(there, pod_of(slices(modes=(EXCLUSIVE,)))).reason == "mode"


def test_a_gpu_in_mig_mode_takes_nothing_else_until_it_has_left_it() -> None:
    there = Node(node_of(cut_device("GPU-0", ("1g.6gb", 0, IDLE))))
    refusal = refused(there, pod_of(slices(modes=(SOFT,), gib=1)))
    assert refusal.text == "need a GPU with 1Gi, have GPUs in MIG mode"


def test_programs_of_the_machine_keep_mig_from_being_switched_on() -> None:
    there = Node(node_of(cut_device("GPU-0", is_on=False, taken=TakenPart(memory=GIB, shares=1))))
    refusal = refused(there, pod_of(slices("1g.6gb")))
    assert refusal.reason == "company"
    assert "MIG off" in refusal.text


def test_a_gpu_that_cannot_be_cut_so_says_what_it_can() -> None:
    there = Node(node_of(cut_device("GPU-0"), cut_device("GPU-1")))
    refusal = refused(there, pod_of(slices("1g.10gb")))
    assert refusal.reason == "mig-profile"
    assert refusal.text == "need a MIG slice 1g.10gb, have GPUs without such a profile"
    assert refusal.details.startswith("GPUs 0, 1: has no profile 1g.10gb, but 1g.6gb, ")


def test_a_node_that_cuts_nothing_refuses_slices_for_that() -> None:
    soft = replace(cut_device("GPU-0", modes=(SOFT,)), mig=None)
    assert refused(Node(node_of(soft)), pod_of(slices("1g.6gb"))).reason == "mode"


def test_the_first_mode_that_fits_is_taken() -> None:
    there = Node(node_of(cut_device("GPU-0", is_on=False), cut_device("GPU-1")))
    assert modes(placed(there, pod_of(slices("1g.6gb", modes=(MIG, SOFT), gib=1)))) == [MIG]
    assert modes(placed(there, pod_of(slices("1g.6gb", modes=(SOFT, MIG), gib=1)))) == [SOFT]
    large = placed(there, pod_of(slices("7g.40gb", modes=(MIG, SOFT), gib=1)))
    assert modes(large) == [SOFT]
    assert large.containers[0].devices == (PlacedDevice("GPU-0", GIB, 0),)


def test_a_refusal_says_of_each_mode_why() -> None:
    there = Node(node_of(cut_device("GPU-0", is_on=False), cut_device("GPU-1")))
    refusal = refused(there, pod_of(slices("7g.40gb", modes=(MIG, SOFT), gib=30)))
    assert refusal.text == (
        "mode mig: need a MIG slice 7g.40gb, have GPUs without such a profile; mode soft: "
        "need a GPU with 30Gi, have at most 24Gi on a GPU"
    )
    assert refusal.stem.count("{have}") == 1


def test_what_one_mode_makes_hopeless_another_may_not() -> None:
    """One GPU: the first container likes a slice, and the other one cannot have any."""
    there = Node(node_of(cut_device("GPU-0", is_on=False)))
    need = pod_of(slices("1g.6gb", modes=(MIG, SOFT), gib=2), slices(modes=(SOFT,), gib=1))
    assert modes(placed(there, need)) == [SOFT, SOFT]


def test_what_one_gpu_makes_hopeless_another_may_not() -> None:
    """The larger slice likes the hole, which is all there is for the other one."""
    there = Node(node_of(cut_device("GPU-0", ("2g.12gb", 0, FOREIGN)), cut_device("GPU-1")))
    bound = Constraints(uuids=("GPU-0",))
    need = pod_of(slices("2g.12gb"), slices("1g.6gb", constraints=bound))
    assert where(placed(there, pod_of(slices("2g.12gb")))) == [("GPU-0", "2g.12gb", 2)]
    assert {uuid for uuid, _, _ in where(placed(there, need))} == {"GPU-0", "GPU-1"}


def test_what_one_start_makes_hopeless_another_may_not() -> None:
    """A `+me` has one place left, which a plain slice would take first."""
    there = Node(node_of(cut_device("GPU-0", ("1g.6gb", 0, FOREIGN), ("2g.12gb", 2, FOREIGN))))
    need = pod_of(slices("1g.6gb"), slices("1g.6gb+me"))
    assert "beside the pod's other containers" in refused(there, need).text


def test_an_init_containers_slice_is_the_next_containers_as_well() -> None:
    there = Node(node_of(cut_device("GPU-0")))
    whole = slices("4g.24gb")
    booking = placed(there, pod_of((INIT, whole), (INIT, whole), (REGULAR, whole)))
    assert where(booking) == [("GPU-0", "4g.24gb", 0)] * 3
    there.book(booking)
    assert there.loads[0].slices == {MigPlace("4g.24gb", 0): 1}
    assert there.loads[0].fixed == booking.containers[0].devices[0].memory
    there.check_invariants()
    there.release(PodUid("pod"))
    assert there.loads == Node(there.inventory).loads


def test_an_init_container_has_any_slice_of_the_pod_that_is_large_enough() -> None:
    there = Node(node_of(cut_device("GPU-0")))
    booking = placed(there, pod_of((INIT, slices(gib=1)), slices("2g.12gb"), slices("2g.12gb")))
    assert Counter(where(booking)) == {("GPU-0", "2g.12gb", 0): 2, ("GPU-0", "2g.12gb", 2): 1}


def test_a_container_has_its_init_containers_larger_slice_where_there_is_no_other() -> None:
    one, two = (
        Node(node_of(*map(cut_device, names))) for names in (("GPU-0",), ("GPU-0", "GPU-1"))
    )
    need = pod_of((INIT, slices("4g.24gb")), slices(gib=1))
    assert where(placed(one, need)) == [("GPU-0", "4g.24gb", 0)] * 2
    assert {name for _, name, _ in where(placed(two, need))} == {"4g.24gb", "1g.6gb"}


def test_an_init_containers_slice_is_not_cut_anew() -> None:
    """Neither of another size, nor beside a sidecar that has it."""
    there = Node(node_of(cut_device("GPU-0")))
    need = pod_of((INIT, slices("2g.12gb")), slices("2g.12gb"), slices("1g.6gb"), slices("1g.6gb"))
    assert isinstance(place(there, need), PodBooking)
    need = pod_of((INIT, slices("4g.24gb")), slices("1g.6gb"))
    assert "beside" in refused(there, need).text
    need = pod_of((SIDECAR, slices("2g.12gb")), (INIT, slices("4g.24gb")))
    assert "beside" in refused(there, need).text
    need = pod_of((SIDECAR, slices("2g.12gb")), (INIT, slices("2g.12gb")), slices("2g.12gb"))
    assert len(set(where(placed(there, need)))) == 2


def test_several_slices_of_an_init_container_are_those_of_several_others() -> None:
    there = Node(node_of(cut_device("GPU-0"), cut_device("GPU-1")))
    need = pod_of((INIT, slices("2g.12gb", count=4)), *[slices("2g.12gb")] * 3)
    booking = placed(there, need)
    assert len(where(booking)) == 7
    assert len(set(where(booking))) == 4


SOFTLY = slices(modes=(SOFT,), gib=1)


BY_MPS = slices(modes=(MPS,), gib=1)


@pytest.mark.parametrize(
    "order",
    [
        (SOFTLY, slices("1g.6gb")),
        (slices("1g.6gb"), SOFTLY),
        (SOFTLY, BY_MPS),
        (BY_MPS, SOFTLY),
    ],
)
def test_an_init_container_is_of_no_other_mode_than_those_after_it_on_one_gpu(
    order: tuple[Request, Request],
) -> None:
    """Its share stays: MIG cannot be switched until then, and others come to one of two modes."""
    need = pod_of((INIT, order[0]), (REGULAR, order[1]))
    one, two = (
        node_of(
            *(
                cut_device(f"GPU-{index}", is_on=False, modes=(SOFT, MIG, MPS))
                for index in range(number)
            )
        )
        for number in (1, 2)
    )
    assert refused(Node(one), need).reason == "company"
    assert isinstance(place(Node(two), need), PodBooking)


def test_a_victims_slices_are_free_again() -> None:
    there = Node(node_of(cut_device("GPU-0")))
    there.book(placed(there, pod_of(slices("4g.24gb"), uid="victim")))
    need = pod_of(slices("2g.12gb"))
    assert isinstance(place(there, need), Refusal)
    assert isinstance(there.place(need, [CHAIN], without={PodUid("victim")}), PodBooking)
    assert isinstance(place(there, need), Refusal)


def booked_by_hand(there: Node, *places: MigPlace | None, uid: str = "strange") -> None:
    devices = tuple(PlacedDevice("GPU-0", GIB, 0, each) for each in places)
    container = PlacedContainer(name="c", devices=devices, mode=MIG)
    there.book(PodBooking(uid=PodUid(uid), node="n", containers=(container,)))


@pytest.mark.parametrize("strange", [MigPlace("9g.99gb", 0), None])
def test_a_slice_of_which_nothing_is_known_takes_the_whole_gpu(strange: MigPlace | None) -> None:
    """The driver has changed, or another system has not told which slice it gave."""
    there = Node(node_of(cut_device("GPU-0")))
    booked_by_hand(there, strange)
    refusal = refused(there, pod_of(slices("1g.6gb")))
    assert refusal.reason == "mig-room"
    named = " of 9g.99gb, which is not one of its profiles" if strange else ""
    assert f"slots 0-3 of a pod{named}" in refusal.details
    there.check_invariants()
    there.release(PodUid("strange"))
    assert isinstance(place(there, pod_of(slices("1g.6gb"))), PodBooking)


def test_slices_of_a_gpu_that_is_cut_no_longer_keep_others_away() -> None:
    there = Node(node_of(cut_device("GPU-0")))
    booked_by_hand(there, MigPlace("1g.6gb", 0))
    there.put(node_of(replace(cut_device("GPU-0"), mig=None, modes=(SOFT,))))
    assert refused(there, pod_of(slices(modes=(SOFT,), gib=1))).reason == "company"
    there.check_invariants()


def test_two_pods_with_the_same_slice_are_counted_twice() -> None:
    """That cannot be; and where somebody has written it, neither takes the other's away."""
    there = Node(node_of(cut_device("GPU-0")))
    for uid in "ab":
        booked_by_hand(there, MigPlace("4g.24gb", 0), uid=uid)
    there.release(PodUid("a"))
    assert refused(there, pod_of(slices("1g.6gb"))).reason == "mig-room"
    there.release(PodUid("b"))
    assert isinstance(place(there, pod_of(slices("1g.6gb"))), PodBooking)


def test_more_slices_than_there_can_be_are_refused_without_a_search() -> None:
    """Any choice of 56 of 56 slices leaves none, and there are more orders than can be tried."""
    there = Node(node_of(*(cut_device(f"GPU-{index}", model=A100) for index in range(8))))
    need = pod_of(*[slices("1g.5gb")] * 57)
    assert refused(there, need).reason == "containers"
    assert isinstance(place(there, pod_of(*[slices("1g.5gb")] * 56)), PodBooking)


def test_who_has_no_place_by_itself_is_found_out_before_all_ways_to_place_the_others() -> None:
    """Three GPUs in MIG mode hold small slices in thousands of ways, and nothing of mode soft."""
    there = Node(node_of(*(cut_device(f"GPU-{number}") for number in range(3))))
    small = slices(gib=1)
    need = pod_of(small, small, slices(gib=1, modes=(SOFT,)), slices(gib=1, count=2))
    rejection = refused(there, need)
    assert (rejection.reason, rejection.text[:14]) == ("company", "container c2: ")


def test_gpus_that_leave_mig_off_for_reasons_of_their_own_are_alike_for_others() -> None:
    whys = [f"MIG is off, and others have switched it off {number} times" for number in range(16)]
    devices = [
        replace(cut_device(f"GPU-{number}", is_on=False, modes=(SOFT,)), mig=None, mig_off=why)
        for number, why in enumerate(whys)
    ]
    half = [slices(gib=13, count=9, modes=(SOFT,)), slices(gib=13, count=8, modes=(SOFT,))]
    rejection = refused(Node(node_of(*devices)), pod_of(*half))
    assert rejection.reason != "undecided"

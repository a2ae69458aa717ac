# SPDX-License-Identifier: Apache-2.0
"""Slices on one node: a pod has a place iff any choice of modes, GPUs and starts is one."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, permutations
from typing import NamedTuple

import pytest
from cut_nodes import GIB, Piece, cut_device, node_of, pod_of, slices
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from allotment.dialects.decisions import read_booking, write_booking
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
from allotment.model.mig import MigHold, MigPlace, MigProfile
from allotment.model.pods import ContainerKind, PodUid
from allotment.model.requests import EXCLUSIVE, MIG, SOFT, Constraints, Request
from allotment.placement.nodes import Node
from allotment.placement.ordering import DeviceChain

INIT, SIDECAR, REGULAR = ContainerKind.INIT, ContainerKind.SIDECAR, ContainerKind.REGULAR
IDLE, FOREIGN, USED = MigHold.IDLE, MigHold.FOREIGN, MigHold.USED
A100 = "A100-40GB"
ALONE = (MIG,)
CHAIN = DeviceChain()


def place(there: Node, need: PodNeed) -> PodBooking | NodeRejection:
    return there.place(need, [CHAIN] * len(need.containers))


def placed(there: Node, need: PodNeed) -> PodBooking:
    decision = place(there, need)
    assert isinstance(decision, PodBooking), decision
    return decision


def refused(there: Node, need: PodNeed) -> NodeRejection:
    decision = place(there, need)
    assert isinstance(decision, NodeRejection), decision
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
        "GPU 0: has as many 1g.5gb or others with its engines as it can have: slot 0 of a pod, "
        "slot 1 of a pod, slot 2 of a pod, slot 3 of a pod, slot 4 of a pod, slot 5 of a pod, "
        "slot 6 of a pod"
    )
    there.release(PodUid("p3"))
    assert isinstance(place(there, pod_of(slices("1g.5gb"), uid="last")), PodBooking)


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
        "GPU 0: 2g.12gb may begin at slot 0, 2: slots 0-1 of others, slot 2 of somebody"
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
    there = Node(node_of(cut_device("GPU-0", is_on=False, taken=Taken(memory=GIB, shares=1))))
    refusal = refused(there, pod_of(slices("1g.6gb")))
    assert refusal.reason == "company"
    assert "MIG is off" in refusal.text


def test_a_gpu_that_cannot_be_cut_so_says_what_it_can() -> None:
    there = Node(node_of(cut_device("GPU-0"), cut_device("GPU-1")))
    refusal = refused(there, pod_of(slices("1g.10gb")))
    assert refusal.reason == "mig-profile"
    assert refusal.text == "need a MIG slice 1g.10gb, have GPUs that cannot be cut so"
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
        "mode mig: need a MIG slice 7g.40gb, have GPUs that cannot be cut so; "
        "mode soft: need a GPU with 30Gi, have at most 24Gi on a GPU"
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


def test_an_init_container_has_a_slice_of_its_own() -> None:
    there = Node(node_of(cut_device("GPU-0")))
    booking = placed(there, pod_of((INIT, slices("2g.12gb")), (REGULAR, slices("2g.12gb"))))
    assert len(set(where(booking))) == 2
    need = pod_of((INIT, slices("2g.12gb")), (INIT, slices("2g.12gb")), slices("1g.6gb"))
    assert refused(there, need).reason == "containers"


SOFTLY = slices(modes=(SOFT,), gib=1)


@pytest.mark.parametrize("order", [(SOFTLY, slices("1g.6gb")), (slices("1g.6gb"), SOFTLY)])
def test_an_init_container_is_of_no_other_mode_than_its_gpu_is_cut_for(
    order: tuple[Request, Request],
) -> None:
    """Its share stays until it is known to be over, and MIG cannot be switched until then."""
    need = pod_of((INIT, order[0]), (REGULAR, order[1]))
    one, two = (
        node_of(*(cut_device(f"GPU-{index}", is_on=False) for index in range(number)))
        for number in (1, 2)
    )
    assert refused(Node(one), need).reason == "company"
    assert isinstance(place(Node(two), need), PodBooking)


def test_a_victims_slices_are_free_again() -> None:
    there = Node(node_of(cut_device("GPU-0")))
    there.book(placed(there, pod_of(slices("4g.24gb"), uid="victim")))
    need = pod_of(slices("2g.12gb"))
    assert isinstance(place(there, need), NodeRejection)
    assert isinstance(there.place(need, [CHAIN], without={PodUid("victim")}), PodBooking)
    assert isinstance(place(there, need), NodeRejection)


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
    named = " of 9g.99gb, a profile that it has not" if strange else ""
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


# ---- against every choice there is ---------------------------------------------------------------


class Choice(NamedTuple):
    """What one container might have: parts of devices, in a mode."""

    mode: str
    parts: tuple[tuple[NodeDevice, MigProfile | None, int], ...]


def profiles_of(device: NodeDevice) -> tuple[MigProfile, ...]:
    return device.mig.profiles if device.mig else ()


def serves(profile: MigProfile, device: NodeDevice, asked: Request) -> bool:
    if asked.mig_profile:
        is_named = profile.name == asked.mig_profile
    else:
        is_named = "+" not in profile.name and "-" not in profile.name
    most = max(each.multiprocessors for each in profiles_of(device))
    return (
        is_named
        and profile.memory_bytes >= (asked.memory.size_bytes or 0)
        and profile.multiprocessors * 10_000 >= asked.compute.guarantee * most
    )


def choices(there: NodeInventory, asked: Request) -> Iterator[Choice]:
    """Yield all that one container might have on an empty node."""
    for mode in (asked.mode, *asked.other_modes):
        devices = [
            each
            for each in there.devices
            if mode in each.modes and asked.constraints.uuids in {(), (each.uuid,)}
        ]
        parts: list[tuple[NodeDevice, MigProfile | None, int]] = [
            (each, None, 0) for each in devices
        ]
        if mode == MIG:
            parts = [
                (each, profile, start)
                for each in devices
                for profile in profiles_of(each)
                if serves(profile, each, asked)
                for start in profile.starts
            ]
        for chosen in combinations(parts, asked.count):
            numas = {each.numa_node for each, _, _ in chosen}
            if len(numas) == 1 or not asked.constraints.same_numa:
                yield Choice(mode, chosen)


def is_right(there: NodeInventory, chosen: Sequence[tuple[WantedContainer, Choice]]) -> bool:
    return all(
        is_right_on(
            device,
            [
                (wanted, choice.mode, profile, start)
                for wanted, choice in chosen
                for part, profile, start in choice.parts
                if part is device
            ],
        )
        for device in there.devices
    )


def is_right_on(
    device: NodeDevice, here: Sequence[tuple[WantedContainer, str, MigProfile | None, int]]
) -> bool:
    """Does a device keep every promise with these parts of one pod on it?"""
    if not here:
        return True
    taken, mig = device.taken, device.mig
    if any(mode == MIG for _, mode, _, _ in here):
        is_in_the_way = taken.shares and (
            taken.mode not in {"", MIG} or not (mig and mig.is_enabled)
        )
        if mig is None or is_in_the_way or any(mode != MIG for _, mode, _, _ in here):
            return False
        by_number = {each.number: each for each in mig.profiles}
        there = [
            (by_number[each.profile], each.start) for each in mig.slices if each.hold is not IDLE
        ]
        return is_legal([*there, *((profile, start) for _, _, profile, start in here if profile)])
    if (mig is not None and mig.is_enabled) or any(
        taken.shares and (mode == EXCLUSIVE or taken.mode not in {"", mode})
        for _, mode, _, _ in here
    ):
        return False
    if any(
        beside(one, other) and (EXCLUSIVE in {mode, other_mode} or mode != other_mode)
        for (one, mode, _, _), (other, other_mode, _, _) in combinations(here, 2)
    ):
        return False
    at_once = [
        group
        for number in range(1, len(here) + 1)
        for group in combinations([wanted for wanted, _, _, _ in here], number)
        if all(beside(one, other) for one, other in combinations(group, 2))
    ]
    memory = max(sum(each.request.memory.size_bytes or 0 for each in group) for group in at_once)
    guarantee = max(sum(each.request.compute.guarantee for each in group) for group in at_once)
    return (
        taken.memory + memory <= device.memory_bytes
        and taken.guarantee + guarantee <= device.guarantee
    )


def is_legal(cut: Sequence[tuple[MigProfile, int]]) -> bool:
    """As the driver has it: no slot twice, no more of a profile than it allows."""
    slots = [slot for profile, start in cut for slot in range(start, start + profile.size)]
    numbers = Counter(profile.number for profile, _ in cut)
    media = [profile for profile, _ in cut if profile.has_media]
    return (
        len(set(slots)) == len(slots)
        and all(numbers[profile.number] <= profile.most for profile, _ in cut)
        and len(media) <= max((each.most for each in media), default=0)
    )


def beside(one: WantedContainer, other: WantedContainer) -> bool:
    """Can both be in use at once? As Kubernetes documents init containers and sidecars."""
    first, second = sorted((one, other), key=lambda each: each.place)
    if second.kind is REGULAR:
        return first.kind is not INIT
    if second.kind is SIDECAR:
        return first.kind is not INIT
    return first.kind is SIDECAR


def has_any(
    there: NodeInventory,
    wanted: Sequence[WantedContainer],
    chosen: tuple[tuple[WantedContainer, Choice], ...] = (),
) -> bool:
    """Is there any right choice for these? What is wrong stays so, whatever is added."""
    if not wanted:
        return True
    return any(
        is_right(there, more) and has_any(there, wanted[1:], more)
        for more in ((*chosen, (wanted[0], choice)) for choice in choices(there, wanted[0].request))
    )


kinds = st.sampled_from([REGULAR, REGULAR, INIT, SIDECAR])
orders = st.sampled_from(
    [ALONE, ALONE, ALONE, (MIG, SOFT), (SOFT, MIG), (SOFT,), (EXCLUSIVE, MIG), (EXCLUSIVE,)]
)
requests = st.builds(
    slices,
    st.sampled_from(["", "", "1g.6gb", "1g.6gb+me", "2g.12gb", "2g.12gb+me", "4g.24gb"]),
    count=st.sampled_from([1, 1, 1, 1, 2]),
    modes=orders,
    gib=st.sampled_from([1, 1, 1, 6, 12, 20]),
    guarantee=st.sampled_from([0, 0, 0, 5000]),
    constraints=st.builds(
        Constraints,
        uuids=st.sampled_from([(), (), (), ("GPU-0",), ("GPU-1",)]),
        same_numa=st.booleans(),
    ),
)
needs = st.lists(st.tuples(kinds, requests), min_size=2, max_size=4).map(lambda each: pod_of(*each))
PIECES: tuple[tuple[Piece, ...], ...] = (
    (),
    (("1g.6gb", 1, FOREIGN),),
    (("1g.6gb", 0, IDLE), ("1g.6gb+me", 3, FOREIGN)),
    (("2g.12gb", 2, USED),),
    (("2g.12gb", 0, IDLE), ("2g.12gb", 2, IDLE)),
)
on = st.sampled_from(PIECES).map(lambda pieces: (True, pieces, Taken()))
off = st.sampled_from(
    [Taken(), Taken(), Taken(memory=8 * GIB, shares=1, mode=SOFT), Taken(shares=1)]
).map(lambda taken: (False, (), taken))
inventories = st.lists(
    st.tuples(
        on | off,
        st.sampled_from([(SOFT, MIG), (SOFT, MIG, EXCLUSIVE), (MIG,)]),
        st.sampled_from([0, 0, 1]),
    ),
    min_size=1,
    max_size=3,
).map(
    lambda devices: node_of(
        *(
            cut_device(f"GPU-{index}", *pieces, is_on=is_on, modes=of, numa=numa, taken=taken)
            for index, ((is_on, pieces, taken), of, numa) in enumerate(devices)
        )
    )
)


def chosen_of(
    there: NodeInventory, need: PodNeed, booking: PodBooking
) -> list[tuple[WantedContainer, Choice]]:
    by_uuid = {each.uuid: each for each in there.devices}
    found = []
    for wanted, one in zip(need.containers, booking.containers, strict=True):
        assert wanted.name == one.name
        parts = []
        for each in one.devices:
            device = by_uuid[each.uuid]
            profile = None
            if each.slice:
                profile = next(p for p in profiles_of(device) if p.name == each.slice.profile)
                assert serves(profile, device, wanted.request)
                assert each.slice.start in profile.starts
                assert each.memory == profile.memory_bytes
            parts.append((device, profile, each.slice.start if each.slice else 0))
        found.append((wanted, Choice(one.mode, tuple(parts))))
    return found


@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(inventories, needs)
def test_a_pod_has_a_place_iff_some_choice_is_right(there: NodeInventory, need: PodNeed) -> None:
    known = Node(there)
    before = [load.copy() for load in known.loads]
    decision = place(known, need)
    event("placed" if isinstance(decision, PodBooking) else f"refused: {decision.reason}")
    if isinstance(decision, PodBooking):
        for wanted, one in zip(need.containers, decision.containers, strict=True):
            assert one.mode in {wanted.request.mode, *wanted.request.other_modes}
        assert is_right(there, chosen_of(there, need, decision))
        known.book(decision)
        known.check_invariants()
        known.release(need.uid)
        assert known.loads == before
    else:
        assert not has_any(there, need.containers)
        assert decision.text
        assert decision.reason != "undecided"


@settings(max_examples=100, deadline=None)
@given(inventories, st.lists(needs, min_size=1, max_size=5), st.randoms())
def test_no_two_slices_overlap_and_a_gpu_is_of_one_mode(
    there: NodeInventory, pods: list[PodNeed], random: object
) -> None:
    known = Node(there)
    kept: dict[PodUid, PodBooking] = {}
    for number, need in enumerate(pods):
        decision = place(known, replace(need, uid=PodUid(f"p{number}")))
        if isinstance(decision, PodBooking):
            known.book(decision)
            kept[decision.uid] = decision
    for device, load in zip(there.devices, known.loads, strict=True):
        of_pods = Counter(
            each.slice
            for booking in kept.values()
            for one in booking.containers
            for each in one.devices
            if each.uuid == device.uuid and each.slice
        )
        assert load.slices == of_pods
        assert set(of_pods.values()) <= {1}
        by_name = {each.name: each for each in profiles_of(device)}
        by_number = {each.number: each for each in profiles_of(device)}
        fixed = [
            (by_number[each.profile], each.start)
            for each in (device.mig.slices if device.mig else ())
            if each.hold is not IDLE
        ]
        assert is_legal([*((by_name[each.profile], each.start) for each in of_pods), *fixed])
        assert not of_pods or set(load.modes) == {MIG}
    # Another replica reads the same annotations, in whatever order, and says the same.
    other = Node(there)
    order = list(kept.values())
    random.shuffle(order)  # type: ignore[attr-defined]
    for booking in order:
        other.book(read_booking(write_booking(booking), uid=booking.uid, node="n"))
    assert other.loads == known.loads
    for need in pods:
        assert place(other, replace(need, uid=PodUid("new"))) == place(
            known, replace(need, uid=PodUid("new"))
        )
    for uid in kept:
        known.release(uid)
    assert known.loads == Node(there).loads


def test_the_order_of_containers_makes_no_difference() -> None:
    there = node_of(cut_device("GPU-0", ("1g.6gb", 1, FOREIGN)), cut_device("GPU-1"))
    asked = [slices("2g.12gb"), slices("1g.6gb+me"), slices("4g.24gb"), slices("1g.6gb")]
    for some in permutations(asked):
        assert isinstance(place(Node(there), pod_of(*some[:3])), PodBooking) == has_any(
            there, pod_of(*some[:3]).containers
        )

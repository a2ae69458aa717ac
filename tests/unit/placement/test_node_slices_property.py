# SPDX-License-Identifier: Apache-2.0
"""Slices on one node, against every choice there is: modes, GPUs and starts."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations, permutations
from typing import NamedTuple

from cut_nodes import GIB, Piece, cut_device, node_of, pod_of, slices
from examples import examples
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from placing import place

from allotment.dialects.own.placement import read_booking, write_booking
from allotment.model.clusters import (
    NodeDevice,
    NodeInventory,
    PodBooking,
    PodNeed,
    TakenPart,
    WantedContainer,
)
from allotment.model.mig import MigHold, MigProfile
from allotment.model.modes import EXCLUSIVE, MIG, MPS, SOFT
from allotment.model.pods import ContainerKind, PodUid
from allotment.model.requests import Constraints, Request
from allotment.model.structs import replace
from allotment.placement.nodes import Node

INIT, SIDECAR, REGULAR = ContainerKind.INIT, ContainerKind.SIDECAR, ContainerKind.REGULAR
IDLE, FOREIGN, USED = MigHold.IDLE, MigHold.FOREIGN, MigHold.USED
ALONE = (MIG,)


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
        return is_legal([*there, *handed_on(here)])
    if (mig is not None and mig.is_enabled) or any(
        taken.shares and (mode == EXCLUSIVE or taken.mode not in {"", mode})
        for _, mode, _, _ in here
    ):
        return False
    # An init container's share stays, so its GPU is of one mode: but who has it alone has it alone.
    if any(
        (EXCLUSIVE in {mode, other_mode} or mode != other_mode)
        if beside(one, other)
        else (EXCLUSIVE not in {mode, other_mode} and mode != other_mode)
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


def handed_on(
    here: Sequence[tuple[WantedContainer, str, MigProfile | None, int]],
) -> list[tuple[MigProfile, int]]:
    """A slice that containers have who are never in use at once is one, or else there are more."""
    most: Counter[tuple[MigProfile, int]] = Counter()
    for slot in {(profile, start) for _, _, profile, start in here if profile}:
        owners = [wanted for wanted, _, profile, start in here if (profile, start) == slot]
        is_shared = any(beside(one, other) for one, other in combinations(owners, 2))
        most[slot] = 2 if is_shared else 1
    return list(most.elements())


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


def has_any(there: NodeInventory, wanted: Sequence[WantedContainer]) -> bool:
    """Is there any right choice for these? What is wrong stays so, whatever is added."""
    alone = [
        [
            (each, choice)
            for choice in choices(there, each.request)
            if is_right(there, [(each, choice)])
        ]
        for each in wanted
    ]
    return _has_any(there, sorted(alone, key=len), ())


def _has_any(
    there: NodeInventory,
    left: Sequence[Sequence[tuple[WantedContainer, Choice]]],
    chosen: tuple[tuple[WantedContainer, Choice], ...],
) -> bool:
    return not left or any(
        is_right(there, (*chosen, one)) and _has_any(there, left[1:], (*chosen, one))
        for one in left[0]
    )


kinds = st.sampled_from([REGULAR, REGULAR, INIT, SIDECAR])
orders = st.sampled_from(
    [
        *(ALONE, ALONE, ALONE, (MIG, SOFT), (SOFT, MIG), (SOFT,), (EXCLUSIVE, MIG), (EXCLUSIVE,)),
        *((MPS,), (MPS, SOFT)),
    ]
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
on = st.sampled_from(PIECES).map(lambda pieces: (True, pieces, TakenPart()))
off = st.sampled_from(
    [TakenPart(), TakenPart(), TakenPart(memory=8 * GIB, shares=1, mode=SOFT), TakenPart(shares=1)]
).map(lambda taken: (False, (), taken))
inventories = st.lists(
    st.tuples(
        on | off,
        st.sampled_from([(SOFT, MIG), (SOFT, MIG, EXCLUSIVE), (MIG,), (SOFT, MIG, MPS)]),
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


@settings(max_examples=examples(4))
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
        # The search is bounded, and says so: Hypothesis fails where that is more than rare.
        assume(decision.reason != "undecided")
        assert not has_any(there, need.containers)
        assert decision.text


@settings(max_examples=examples(2))
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
        # Of one pod some containers may have a slice in turn; of two, nobody has one together.
        of_pods = Counter(
            place
            for booking in kept.values()
            for place in {
                each.slice
                for one in booking.containers
                for each in one.devices
                if each.uuid == device.uuid and each.slice
            }
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

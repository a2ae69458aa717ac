# SPDX-License-Identifier: Apache-2.0
"""One node: a pod has a place iff any choice of devices is one, and its agent then agrees."""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations, permutations, product
from pathlib import Path

from examples import examples
from gpus import gpu
from hypothesis import event, given, settings
from hypothesis import strategies as st
from needs import request
from placing import place
from small_nodes import INIT, REGULAR, SIDECAR, device, linked, node, pod

from allotment.model.clusters import (
    NodeDevice,
    NodeInventory,
    PlacedContainer,
    PlacedDevice,
    PodBooking,
    PodNeed,
    TakenPart,
    WantedContainer,
)
from allotment.model.compute import WHOLE, Compute
from allotment.model.modes import EXCLUSIVE, SOFT, TIMESLICE
from allotment.model.placements import Placement
from allotment.model.pods import ContainerKind, Owner, PodUid
from allotment.model.requests import Constraints
from allotment.model.shares import Injection, Share, ShareDevice, ShareId
from allotment.model.structs import replace
from allotment.placement import follow
from allotment.placement.explain import Refusal
from allotment.placement.nodes import Node
from allotment.shares.booking import booked, states_of
from allotment.shares.record import LoadedShare

kinds = st.sampled_from(ContainerKind)
tags = st.sampled_from(["", "", "a", "b"])
constraints = st.builds(
    Constraints,
    uuids=st.sampled_from([(), (), (), ("GPU-0", "GPU-2")]),
    not_uuids=st.sampled_from([(), (), ("GPU-1",)]),
    anti_affinity=tags,
    exclusion=st.sampled_from([None, None, None, "", "a"]),
    same_numa=st.booleans(),
    needs_nvlink=st.booleans(),
)
requests = st.builds(
    request,
    st.integers(1, 8) | st.sampled_from([Fraction(1, 2), Fraction(1)]),
    count=st.integers(1, 2),
    guarantee=st.sampled_from([0, 0, 4000, 6000]),
    mode=st.sampled_from([SOFT, SOFT, SOFT, EXCLUSIVE, TIMESLICE]),
    host=st.booleans(),
    constraints=st.just(Constraints()) | constraints,
)
needs = st.lists(st.tuples(kinds, requests), min_size=1, max_size=3).map(lambda each: pod(*each))
takens = st.just(TakenPart()) | st.builds(
    TakenPart,
    memory=st.integers(0, 6),
    guarantee=st.sampled_from([0, 3000]),
    shares=st.integers(1, 4),
    mode=st.just(SOFT),
)
takens |= st.builds(TakenPart, shares=st.integers(1, 4), mode=st.just(TIMESLICE))
inventories = st.builds(
    lambda devices, budget, pairs: node(
        *(
            device(index, memory, numa=numa, taken=taken)
            for index, (memory, numa, taken) in enumerate(devices)
        ),
        budget=budget,
        links=linked(*pairs),
    ),
    st.lists(
        st.tuples(st.integers(4, 10), st.sampled_from([None, 0, 1]), takens), min_size=1, max_size=3
    ),
    st.integers(0, 6),
    st.sets(st.sampled_from([(0, 1), (0, 2), (1, 2)])),
)


def beside(one: WantedContainer, other: WantedContainer) -> bool:
    """Can both be in use at once? As Kubernetes documents init containers and sidecars."""
    first, second = sorted((one, other), key=lambda each: each.place)
    if second.kind is REGULAR:
        return first.kind is not INIT
    if second.kind is SIDECAR:
        return first.kind is not INIT
    return first.kind is SIDECAR


def most_at_once(containers: Sequence[WantedContainer], amounts: Sequence[int]) -> int:
    """The effective request of a pod, as k8s.io/component-helpers/resource computes it."""
    sidecars = most = 0
    for each, amount in zip(containers, amounts, strict=True):
        if each.kind is SIDECAR:
            sidecars += amount
            most = max(most, sidecars)
        elif each.kind is INIT:
            most = max(most, sidecars + amount)
    regular = sum(
        amount for each, amount in zip(containers, amounts, strict=True) if each.kind is REGULAR
    )
    return max(most, sidecars + regular)


def is_right(there: NodeInventory, need: PodNeed, choice: Sequence[tuple[NodeDevice, ...]]) -> bool:
    """Does this choice of devices keep every promise?"""
    chosen = list(zip(need.containers, choice, strict=True))
    for wanted, devices in chosen:
        rules = wanted.request.constraints
        if rules.same_numa and len({each.numa_node for each in devices}) > 1:
            return False
        if rules.needs_nvlink and any(
            (one.uuid, other.uuid) not in there.links for one, other in combinations(devices, 2)
        ):
            return False
        if any(
            (rules.uuids and each.uuid not in rules.uuids) or each.uuid in rules.not_uuids
            for each in devices
        ):
            return False
    host_before = host_after = 0
    for each in there.devices:
        here = [wanted for wanted, devices in chosen if each in devices]
        taken = each.taken
        if not here:
            more = max(0, taken.memory - each.memory_bytes)
            host_before, host_after = host_before + more, host_after + more
            continue
        if not fits_device(each, here):
            return False
        before = max(0, taken.memory - each.memory_bytes)
        amounts = {host: [bytes_of(one, each, host=host) for one in here] for host in (True, False)}
        promised = taken.memory + sum(most_at_once(here, amounts[host]) for host in (True, False))
        host_before += before
        host_after += max(0, promised - each.memory_bytes)
    return host_after <= max(there.host_budget_bytes, host_before)


def bytes_of(one: WantedContainer, each: NodeDevice, *, host: bool) -> int:
    if one.request.may_oversubscribe is not host or one.request.mode == TIMESLICE:
        return 0
    return one.request.memory.of(each.memory_bytes)


def fits_device(each: NodeDevice, here: Sequence[WantedContainer]) -> bool:
    taken = each.taken
    fixed = most_at_once(here, [bytes_of(one, each, host=False) for one in here])
    if any(bytes_of(one, each, host=False) for one in here) and (
        taken.memory + fixed > each.memory_bytes
    ):
        return False
    if TIMESLICE in {one.request.mode for one in here}:
        # It is promised nothing, and yet is not let in where what it asks for is not there.
        return all(fits_alone(each, one, here) for one in here)
    guarantees = [one.request.compute.guarantee for one in here]
    if any(guarantees) and taken.guarantee + most_at_once(here, guarantees) > WHOLE:
        return False
    return all(fits_alone(each, one, here) for one in here)


def fits_alone(each: NodeDevice, one: WantedContainer, here: Sequence[WantedContainer]) -> bool:
    """Who may be on a device with whom."""
    taken, mode = each.taken, one.request.mode
    rules = one.request.constraints
    others = [other.request for other in here if other is not one and beside(one, other)]
    shares = max(taken.shares, 1 if taken.memory or taken.guarantee else 0)
    is_refused = [
        mode == EXCLUSIVE and (shares > 0 or len(others) > 0),
        shares > 0 and taken.mode not in {"", mode},
        shares > 0 and rules.exclusion not in {None, ""},
        mode == SOFT and shares + len(here) > each.max_shares,
        any(other.mode != mode for other in others),
        # An init container's share stays, so its GPU is of one mode: but who has it alone has it.
        any({mode, other.request.mode} not in ({mode}, {mode, EXCLUSIVE}) for other in here)
        and mode != EXCLUSIVE,
        any((other.constraints.exclusion or "") != (rules.exclusion or "") for other in others),
        rules.anti_affinity != ""
        and any(other.constraints.anti_affinity == rules.anti_affinity for other in others),
    ]
    return not any(is_refused)


def choices(there: NodeInventory, need: PodNeed) -> Iterator[tuple[tuple[NodeDevice, ...], ...]]:
    return product(*(combinations(there.devices, each.request.count) for each in need.containers))


def without_timeslices(need: PodNeed) -> PodNeed:
    """Time-sliced shares see what is left and take none of it, so for them the order counts."""
    return replace(
        need,
        containers=tuple(
            replace(each, request=replace(each.request, mode=SOFT))
            if each.request.mode == TIMESLICE
            else each
            for each in need.containers
        ),
    )


@settings(max_examples=examples(4))
@given(inventories, needs.map(without_timeslices))
def test_a_pod_has_a_place_iff_some_choice_of_devices_is_right(
    there: NodeInventory, need: PodNeed
) -> None:
    known = Node(there)
    decision = place(known, need)
    by_uuid = {each.uuid: each for each in there.devices}
    event("placed" if isinstance(decision, PodBooking) else f"refused: {decision.reason}")
    if isinstance(decision, PodBooking):
        choice = [tuple(by_uuid[each.uuid] for each in one.devices) for one in decision.containers]
        assert is_right(there, need, choice)
        known.book(decision)
        known.check_invariants()
    else:
        assert not any(is_right(there, need, choice) for choice in choices(there, need))
        assert decision.text
        assert decision.reason != "undecided"


@settings(max_examples=examples(2))
@given(inventories, st.lists(needs, min_size=1, max_size=4))
def test_the_nodes_agent_finds_room_for_all_that_was_placed(
    there: NodeInventory, pods: list[PodNeed]
) -> None:
    """Each container, when it starts, in the order in which the kubelet starts them."""
    known = Node(there)
    devices = [
        gpu(
            each.index,
            uuid=each.uuid,
            name=each.model,
            memory_bytes=each.memory_bytes,
            numa_node=each.numa_node,
        )
        for each in there.devices
    ]
    shares = [of_machine(each) for each in there.devices if each.taken.shares]
    for number, need in enumerate(pods):
        decision = place(known, replace(need, uid=PodUid(f"p{number}")))
        if isinstance(decision, Refusal):
            continue
        known.book(decision)
        for one, wanted in zip(decision.containers, need.containers, strict=True):
            owner = Owner(
                uid=decision.uid,
                namespace="lab",
                pod=decision.uid,
                container=one.name,
                kind=one.kind,
                resource="allotment.dev/gpu",
                place=one.place,
            )
            states = states_of(devices, booked(shares, seen_by=owner), there.host_budget_bytes)
            answer = follow(states, wanted.request, [each.uuid for each in one.devices])
            assert isinstance(answer, Placement), (answer, one)
            assert [each.memory_bytes for each in answer.devices] == [
                each.memory for each in one.devices
            ]
            shares.append(share_of(f"{decision.uid}-{one.name}", owner, one))
    compare_with_shares(known, there, shares)


def compare_with_shares(known: Node, there: NodeInventory, shares: Sequence[LoadedShare]) -> None:
    """When all have started, agent and node have the same sums."""
    bookings = booked(shares)
    for column, each in enumerate(there.devices):
        load, booking = known.loads[column], bookings.get(each.uuid)
        if booking is None:
            assert load.shares == 0
            continue
        assert load.fixed + load.oversubscribed == booking.memory
        assert load.oversubscribed == booking.oversubscribed
        assert load.guarantee == booking.guaranteed
        assert load.mode == booking.mode
        assert load.shares >= booking.shares  # `taken` may have several


def share_of(name: str, owner: Owner | None, one: PlacedContainer) -> LoadedShare:
    record = Share(
        id=ShareId(name),
        name=name,
        created=0.0,
        mode=one.mode,
        devices=tuple(
            ShareDevice(
                each.uuid,
                "T4",
                each.memory,
                compute=Compute(each.guarantee),
                is_oversubscribed=one.may_oversubscribe,
            )
            for each in one.devices
        ),
        injection=Injection.CDI,
        owner=owner,
    )
    return LoadedShare(ShareId(name), Path("/none"), record, None)


def of_machine(each: NodeDevice) -> LoadedShare:
    """What a device has been given to by `allot run`."""
    taken = each.taken
    part = PlacedDevice(each.uuid, taken.memory, taken.guarantee)
    found = share_of(f"run-{each.uuid}", None, PlacedContainer(name="run", devices=(part,)))
    assert found.share
    return replace(found, share=replace(found.share, mode=taken.mode))


@given(inventories, needs, st.randoms())
def test_the_decision_does_not_depend_on_what_came_and_went(
    there: NodeInventory, need: PodNeed, random: object
) -> None:
    fresh, used = Node(there), Node(there)
    others = [replace(need, uid=PodUid(f"o{number}")) for number in range(3)]
    for other in others:
        decision = place(used, other)
        if isinstance(decision, PodBooking):
            used.book(decision)
    random.shuffle(others)  # type: ignore[attr-defined]
    for other in others:
        used.release(other.uid)
    assert used.loads == fresh.loads
    assert place(used, need) == place(fresh, need)


def test_kubernetes_formula_of_ours_is_the_phases() -> None:
    """The oracle above, held to the sets of containers that are in use at once."""
    for length in (1, 2, 3):
        for some in product(ContainerKind, repeat=length):
            need = pod(*((kind, request(1)) for kind in some))
            for amounts in permutations(range(1, length + 1)):
                groups = (
                    group
                    for number in range(1, length + 1)
                    for group in combinations(need.containers, number)
                    if all(beside(one, other) for one, other in combinations(group, 2))
                )
                most = max(sum(amounts[each.place] for each in group) for group in groups)
                assert most == most_at_once(need.containers, amounts)

# SPDX-License-Identifier: Apache-2.0
"""Slices, parts and open modes of whole pods: nothing is given twice, and each scheduler says so.

Judged by what is written on the pods alone, with rules of its own.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple

from examples import examples
from hypothesis import event, given, settings
from hypothesis import strategies as st
from mig_profiles import piece
from scheduler_twin import GIB, node, pod_json
from sliced_office import MODEL, PROFILES, Office, cut

from allotment.dialects.own.registry import NeedSettings, need_of
from allotment.model.clusters import ClusterPod, NodeInventory, PlacedContainer
from allotment.model.mig import MigHold
from allotment.model.pods import ContainerKind

INIT, SIDECAR, REGULAR = ContainerKind.INIT, ContainerKind.SIDECAR, ContainerKind.REGULAR
NEEDS = NeedSettings(("mig", "soft", "mps"))
BY_NAME = {each.name: each for each in PROFILES}
NODES: tuple[NodeInventory, ...] = (
    cut("a", 2, "soft", "mig", "mps", is_enabled=False),
    cut(
        "b",
        1,
        slices=(
            piece(MODEL, "1g.10gb", 3, hold=MigHold.FOREIGN),
            piece(MODEL, "1g.10gb", 5, hold=MigHold.IDLE),
        ),
    ),
    node("c", 1),
)


class Asked(NamedTuple):
    """One container."""

    kind: ContainerKind
    mode: str
    """Empty: left open."""
    profile: str
    gib: int
    percent: int
    number: int


PROFILED = st.sampled_from(["1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb"])
kinds = st.sampled_from([REGULAR, REGULAR, INIT, INIT, SIDECAR])
asks = st.one_of(
    st.builds(
        Asked, kinds, st.just("mig"), PROFILED, st.just(0), st.just(0), st.sampled_from([1, 2])
    ),
    st.builds(
        Asked,
        kinds,
        st.sampled_from(["", "strongest", "mig,soft", "soft,mig", "mps,mig", "soft", "mig"]),
        st.just(""),
        st.sampled_from([4, 15, 39, 70]),
        st.sampled_from([0, 0, 30]),
        st.just(1),
    ),
)
pods = st.lists(asks, min_size=1, max_size=3)
steps = st.one_of(pods, pods, pods, st.integers(0, 9), st.just("restart"))


def pod_of(name: str, asked: Sequence[Asked]) -> dict[str, Any]:
    every = sorted(asked, key=lambda each: each.kind is REGULAR)
    named = [(f"c{place}", each) for place, each in enumerate(every)]
    containers = {
        is_regular: [
            {
                "name": own,
                "resources": {"limits": limits_of(each)},
                **({"restartPolicy": "Always"} if each.kind is SIDECAR else {}),
            }
            for own, each in named
            if (each.kind is REGULAR) == is_regular
        ]
        for is_regular in (True, False)
    }
    modes = ";".join(f"{own}={each.mode}" for own, each in named if each.mode)
    sizes = ",".join(f"{own}={each.profile}" for own, each in named if each.profile)
    return pod_json(
        name,
        annotations={
            **({"allotment.dev/mode": modes} if modes else {}),
            **({"allotment.dev/mig-profile": sizes} if sizes else {}),
        },
        containers=containers[True] or [{"name": "nothing"}],
        initContainers=containers[False],
    )


def limits_of(asked: Asked) -> dict[str, str]:
    limits = {"allotment.dev/gpu": str(asked.number)}
    if asked.gib:
        limits["allotment.dev/gpu-memory"] = f"{asked.gib}Gi"
    if asked.percent:
        limits["allotment.dev/gpu-compute"] = str(asked.percent)
    return limits


# ---- the judge -----------------------------------------------------------------------------------


def are_beside(one: PlacedContainer, other: PlacedContainer) -> bool:
    """Can both run at once? As Kubernetes documents init containers and sidecars."""
    first, second = sorted((one, other), key=lambda each: each.place)
    if second.kind is INIT:
        return first.kind is SIDECAR
    return first.kind is not INIT


def judge(bound: Sequence[ClusterPod]) -> None:
    there: dict[str, list[tuple[ClusterPod, list[PlacedContainer]]]] = defaultdict(list)
    for pod in bound:
        has_what_it_asked_for(pod)
        assert pod.booking is not None
        uuids = {each.uuid for one in pod.booking.containers for each in one.devices}
        for uuid in uuids:
            here = [one for one in pod.booking.containers if uuid in {d.uuid for d in one.devices}]
            there[uuid].append((pod, here))
    for each in (device for inventory in NODES for device in inventory.devices):
        modes = {one.mode for _, here in there[each.uuid] for one in here}
        assert len(modes) <= 1, (each.uuid, modes)
        assert modes <= set(each.modes)
        if modes == {"mig"}:
            foreign = each.mig.slices if each.mig else ()
            can_be_cut(
                [
                    *(
                        place
                        for _, here in there[each.uuid]
                        for place in slices_of(each.uuid, here)
                    ),
                    *(
                        (BY_NUMBER[s.profile], s.start)
                        for s in foreign
                        if s.hold is MigHold.FOREIGN
                    ),
                ]
            )
        else:
            memory = sum(most(each.uuid, here)[0] for _, here in there[each.uuid])
            compute = sum(most(each.uuid, here)[1] for _, here in there[each.uuid])
            assert memory <= each.memory_bytes, each.uuid
            assert compute <= 10_000, each.uuid


BY_NUMBER = {each.number: each.name for each in PROFILES}


def slices_of(uuid: str, here: Sequence[PlacedContainer]) -> set[tuple[str, int]]:
    """Return what a pod has of a GPU; two containers that run at once never have one together."""
    had = [
        [(d.slice.profile, d.slice.start) for d in one.devices if d.uuid == uuid and d.slice]
        for one in here
    ]
    for places, one in zip(had, here, strict=True):
        assert len(places) == len(set(places)) == sum(d.uuid == uuid for d in one.devices)
    for (one, first), (other, second) in combinations(zip(here, had, strict=True), 2):
        assert not (are_beside(one, other) and set(first) & set(second)), (one, other)
    return {place for places in had for place in places}


def can_be_cut(places: Sequence[tuple[str, int]]) -> None:
    """Hold a GPU to what its driver would make: no slot twice, no more than it allows."""
    slots: Counter[int] = Counter()
    for name, start in places:
        assert start in BY_NAME[name].starts
        slots.update(range(start, start + BY_NAME[name].size))
    assert set(slots.values()) <= {1}, sorted(places)
    for name, number in Counter(name for name, _ in places).items():
        assert number <= BY_NAME[name].most


def most(uuid: str, here: Sequence[PlacedContainer]) -> tuple[int, int]:
    """Return memory and time of a pod on a GPU that is shared: the most that runs at once."""
    parts = [
        (one, [(d.memory, d.guarantee) for d in one.devices if d.uuid == uuid]) for one in here
    ]
    at_once = [
        [amount for _, amounts in group for amount in amounts]
        for number in range(1, len(parts) + 1)
        for group in combinations(parts, number)
        if all(are_beside(one, other) for (one, _), (other, _) in combinations(group, 2))
    ]
    return (
        max(sum(memory for memory, _ in amounts) for amounts in at_once),
        max(sum(guarantee for _, guarantee in amounts) for amounts in at_once),
    )


def has_what_it_asked_for(pod: ClusterPod) -> None:
    assert pod.booking is not None
    wanted = need_of(pod, NEEDS).containers
    for asked, one in zip(wanted, pod.booking.containers, strict=True):
        request = asked.request
        assert (one.name, one.kind, one.place) == (asked.name, asked.kind, asked.place)
        assert one.mode in {request.mode, *request.other_modes}
        assert len(one.devices) == request.count
        for device in one.devices:
            if one.mode != "mig":
                assert device.memory == request.memory.of(79 * GIB)
                assert device.guarantee == request.compute.guarantee
                continue
            assert device.slice is not None
            if request.mig_profile:
                assert device.slice.profile == request.mig_profile
            assert device.memory == BY_NAME[device.slice.profile].memory_bytes
            assert device.memory >= (request.memory.size_bytes or 0)
            assert device.guarantee >= request.compute.guarantee


# ---- stories -------------------------------------------------------------------------------------


def loads(office: Office) -> dict[str, Any]:
    office.book.cluster.check_invariants()
    nodes = office.book.cluster.nodes
    return {name: there.loads for name, there in nodes.items()}


def tell(story: Sequence[list[Asked] | int | str]) -> None:
    office = Office(*NODES, needs=NEEDS)
    for number, each in enumerate(story):
        if each == "restart":
            before = loads(office)
            office = office.next_one()
            assert loads(office) == before
        elif isinstance(each, int):
            names = [pod.name for pod in office.pods.values() if pod.booking]
            if names:
                office.end(names[each % len(names)])
        elif isinstance(each, list):
            said = office.schedule_pod(pod_of(f"p{number}", each))
            event("refused" if said else "placed")
            if said:
                office.end(f"p{number}")
        judge([pod for pod in office.pods.values() if pod.booking])
    assert loads(office.next_one()) == loads(office)
    for pod in list(office.pods.values()):
        office.end(pod.name)
    assert loads(office) == loads(Office(*NODES, needs=NEEDS))


@settings(max_examples=examples(2))
@given(st.lists(steps, min_size=1, max_size=25))
def test_nothing_is_given_twice_and_the_next_scheduler_knows_it(
    story: list[list[Asked] | int | str],
) -> None:
    tell(story)

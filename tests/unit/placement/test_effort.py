# SPDX-License-Identifier: Apache-2.0
"""One question takes no more than one bound, however many nodes it is about."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allotment.model.clusters import (
    NodeDevice,
    NodeInventory,
    PodBooking,
    PodNeed,
    TakenPart,
    WantedContainer,
)
from allotment.model.compute import Compute
from allotment.model.modes import EXCLUSIVE, SOFT
from allotment.model.placements import DeviceState, Verdict
from allotment.model.pods import ContainerKind, PodUid
from allotment.model.quantities import MemoryAmount, parse_memory
from allotment.model.requests import Request
from allotment.placement import search
from allotment.placement.judge import judge
from allotment.placement.search import MOST_EFFORT
from allotment.scheduler.core.book import Book
from allotment.scheduler.core.nominations import NominatedCluster

GIB = 1 << 30


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """All devices that searches have judged: what they take their time for."""
    found: list[object] = []

    def counted(state: DeviceState, request: Request) -> Verdict:
        found.append(state)
        return judge(state, request)

    monkeypatch.setattr(search, "judge", counted)
    return found


def uneven(name: str, first: int) -> NodeInventory:
    """A node of eight GPUs, none of them used like another."""
    devices = tuple(
        NodeDevice(
            uuid=f"GPU-{name}-{index}",
            model="NVIDIA H100",
            memory_bytes=80 * GIB,
            index=index,
            taken=TakenPart(memory=(index * 3 + 1 + first) * GIB, shares=1, mode="soft"),
        )
        for index in range(8)
    )
    return NodeInventory(name=name, devices=devices, cpu_milli=64_000, memory_bytes=512 * GIB)


def asking(*amounts: str) -> PodNeed:
    return PodNeed(
        uid=PodUid("u"),
        namespace="a",
        name="p",
        cpu_milli=1000,
        containers=tuple(
            WantedContainer(name=f"c{place}", place=place, request=Request(parse_memory(amount)))
            for place, amount in enumerate(amounts)
        ),
    )


def book_of(number: int) -> Book:
    book = Book(NominatedCluster())
    for place in range(number):
        book.node_put(uneven(f"n{place:03}", place % 3))
    return book


HARD = asking(*(f"{size}Gi" for size in (60, 55, 45, 45, 40, 40, 37, 37, 35, 35, 33, 33)))
"""No sum says that these do not go on eight GPUs, and there are more choices than can be tried."""


def test_many_nodes_take_no_more_than_the_bound_and_words_take_nothing_more(
    judged: list[object],
) -> None:
    names = [f"n{place:03}" for place in range(60)]
    choice = book_of(60).filter(HARD, names, now=0.0, version="1")
    reasons = {each.reason for each in choice.refused.values()}
    assert len(choice.refused) == 60
    assert "undecided" in reasons
    # A search judges eight devices for each fifty of effort; and once on each node, to begin with.
    assert len(judged) <= MOST_EFFORT // 50 * 8 + 2 * 60 * 8


def test_what_sums_of_places_say_is_not_searched(judged: list[object]) -> None:
    """Five shares of which no two fit on a GPU, where four GPUs have room for one."""
    names = [f"n{place:03}" for place in range(60)]
    five = asking(*["68Gi"] * 5)
    choice = book_of(60).filter(five, names, now=0.0, version="1")
    assert {each.reason for each in choice.refused.values()} == {"containers"}
    assert {each.text for each in choice.refused.values()} == {
        "container c0 and others: need 5 times a GPU with 68Gi, have room for 4"
    }
    assert not judged


requests = st.builds(
    lambda memory, count, guarantee, host, mode: Request(
        memory, count=count, compute=Compute(guarantee), may_oversubscribe=host, mode=mode
    ),
    st.integers(1, 9).map(lambda size: MemoryAmount(f"{size}", size_bytes=size))
    | st.sampled_from([3, 2, 1]).map(lambda part: MemoryAmount("x", part=Fraction(1, part))),
    st.sampled_from([1, 1, 2]),
    st.sampled_from([0, 0, 2500, 6000]),
    st.sampled_from([False, False, True]),
    st.sampled_from([SOFT, SOFT, SOFT, EXCLUSIVE]),
)
containers = st.lists(
    st.tuples(st.sampled_from(list(ContainerKind)), requests), min_size=1, max_size=3
)
sizes = st.lists(st.tuples(st.integers(4, 10), st.integers(0, 6)), max_size=3)


@given(wanted=containers, devices=sizes, budget=st.sampled_from([0, 0, 5]))
def test_pods_of_few_containers_are_ranked_as_they_are_placed(
    wanted: list[tuple[ContainerKind, Request]], devices: list[tuple[int, int]], budget: int
) -> None:
    """No node is left out that has room, and none is told to have any that has none."""
    cluster = NominatedCluster()
    cluster.put(
        NodeInventory(
            name="a",
            devices=tuple(
                NodeDevice(
                    uuid=f"GPU-{index}",
                    model="T4",
                    memory_bytes=size,
                    index=index,
                    modes=(SOFT, EXCLUSIVE),
                    taken=TakenPart(memory=taken, shares=1, mode=SOFT) if taken else TakenPart(),
                )
                for index, (size, taken) in enumerate(devices)
            ),
            host_budget_bytes=budget,
        )
    )
    need = PodNeed(
        uid=PodUid("u"),
        namespace="a",
        name="p",
        containers=tuple(
            WantedContainer(name=f"c{place}", place=place, request=request, kind=kind)
            for place, (kind, request) in enumerate(wanted)
        ),
    )
    placed = cluster.place(need, "a")
    ranking = cluster.rank(need)
    assert ranking.best == (["a"] if isinstance(placed, PodBooking) else [])
    assert {each.reason for each in ranking.refused.values()}.isdisjoint({"changed", "undecided"})

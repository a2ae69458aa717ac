# SPDX-License-Identifier: Apache-2.0
"""One question takes no more than one bound, however many nodes it is about."""

from __future__ import annotations

import pytest

from allotment.model.clusters import NodeDevice, NodeInventory, PodNeed, Taken, WantedContainer
from allotment.model.placements import DeviceState, Verdict
from allotment.model.pods import PodUid
from allotment.model.quantities import parse_memory
from allotment.model.requests import Request
from allotment.placement import searches
from allotment.placement.fit import judge
from allotment.placement.searches import MOST_EFFORT
from allotment.scheduler.book import Book
from allotment.scheduler.nominations import NominatedCluster

GIB = 1 << 30


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """All devices that searches have judged: what they take their time for."""
    found: list[object] = []

    def counted(state: DeviceState, request: Request) -> Verdict:
        found.append(state)
        return judge(state, request)

    monkeypatch.setattr(searches, "judge", counted)
    return found


def uneven(name: str, first: int) -> NodeInventory:
    """A node of eight GPUs, none of them used like another."""
    devices = tuple(
        NodeDevice(
            uuid=f"GPU-{name}-{index}",
            model="NVIDIA H100",
            memory_bytes=80 * GIB,
            index=index,
            taken=Taken(memory=(index * 3 + 1 + first) * GIB, shares=1, mode="soft"),
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


NINE = asking(*(f"{42 - number % 2}Gi" for number in range(9)))
"""Of nine shares of which no two fit on a GPU, with eight GPUs: no sum says that it cannot be."""


def test_many_nodes_take_no_more_than_the_bound_and_words_take_nothing_more(
    judged: list[object],
) -> None:
    names = [f"n{place:03}" for place in range(60)]
    choice = book_of(60).filter(NINE, names, now=0.0, version="1")
    reasons = {each.reason for each in choice.refused.values()}
    assert len(choice.refused) == 60
    assert reasons <= {"undecided", "containers", "gpu-memory"}
    # A search judges eight devices for each fifty of effort; and once on each node, to begin with.
    assert len(judged) <= MOST_EFFORT // 50 * 8 + 2 * 60 * 8

# SPDX-License-Identifier: Apache-2.0
"""What the scheduler writes, it reads again as it was; and of others' it reads nothing."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allotment.dialects.own.placement import (
    MOST_CHARACTERS,
    PLACEMENT,
    placements_of,
    read_booking,
    write_booking,
)
from allotment.dialects.own.registry import asks_of
from allotment.model.clusters import AcceptedResize, PlacedContainer, PlacedDevice, PodBooking
from allotment.model.errors import UsageError
from allotment.model.mig import MigPlace
from allotment.model.modes import EXCLUSIVE, MIG, SOFT
from allotment.model.pods import Container, ContainerKind, Pod, PodUid

UID = PodUid("0f1e")

amounts = st.integers(1 << 20, 1 << 60)


@st.composite
def containers(draw: st.DrawFn, name: str, place: int) -> PlacedContainer:
    uuids = draw(st.lists(st.text("ab1-", min_size=1, max_size=6), min_size=1, unique=True))
    mode = draw(st.sampled_from([SOFT, EXCLUSIVE, MIG]))
    guarantee = draw(st.integers(0, 10_000))
    devices = tuple(
        PlacedDevice(uuid, draw(st.integers(1 << 20, 1 << 60)), guarantee) for uuid in uuids
    )
    if mode == MIG:
        places = st.builds(MigPlace, st.sampled_from(["1g.10gb", "2g.20gb+me"]), st.integers(0, 7))
        slices = draw(
            st.lists(st.tuples(st.sampled_from(uuids), places), min_size=1, max_size=5, unique=True)
        )
        devices = tuple(
            PlacedDevice(uuid, draw(amounts), draw(st.integers(0, 10_000)), slice_)
            for uuid, slice_ in slices
        )
    return PlacedContainer(
        name=name,
        devices=devices,
        kind=draw(st.sampled_from(ContainerKind)),
        place=place,
        mode=mode,
        affinity=draw(st.sampled_from(["", "red"])),
        anti_affinity=draw(st.sampled_from(["", "blue"])),
        exclusion=draw(st.sampled_from([None, "", "team"])),
        may_oversubscribe=draw(st.booleans()),
    )


@given(st.data(), st.integers(1, 3))
def test_a_booking_comes_back_as_it_was(data: st.DataObject, number: int) -> None:
    booking = PodBooking(
        uid=UID,
        node="n1",
        cpu_milli=300,
        memory_bytes=5,
        containers=tuple(data.draw(containers(f"c{each}", each)) for each in range(number)),
        resize=data.draw(
            st.just(AcceptedResize())
            | st.builds(AcceptedResize, st.text(max_size=40), st.integers(1, 1 << 52))
        ),
    )
    text = write_booking(booking)
    assert read_booking(text, uid=UID, node="n1", cpu_milli=300, memory_bytes=5) == booking
    assert write_booking(booking) == text


def test_the_node_reads_it_too() -> None:
    placed = PlacedContainer(name="main", devices=(PlacedDevice("GPU-1", 4 << 30, 3000),))
    text = write_booking(PodBooking(uid=UID, node="n1", containers=(placed,)))
    pod = Pod(
        uid=UID,
        namespace="ml",
        name="train",
        node="n1",
        annotations={PLACEMENT: text},
        containers=(Container("main", ContainerKind.REGULAR),),
    )
    wish = placements_of(pod, {"main": True})["main"]
    assert (wish.devices, wish.memory_bytes) == (("GPU-1",), 4 << 30)
    assert json.loads(text) == {
        "version": 1,
        "node": "n1",
        "pod": "0f1e",
        "containers": {"main": {"devices": ["GPU-1"], "memory": 4 << 30, "guarantee": 3000}},
    }


def test_a_container_with_whole_gpus_may_ask_for_less() -> None:
    placed = PlacedContainer(
        name="main", mode=EXCLUSIVE, devices=(PlacedDevice("GPU-1", 80 << 30, 10_000),)
    )
    text = write_booking(PodBooking(uid=UID, node="n1", containers=(placed,)))
    asked = {"allotment.dev/gpu": 1, "allotment.dev/gpu-memory": 1 << 20}
    pod = Pod(
        uid=UID,
        namespace="ml",
        name="train",
        node="n1",
        annotations={PLACEMENT: text, "allotment.dev/mode": EXCLUSIVE},
        containers=(Container("main", ContainerKind.REGULAR, asked),),
    )
    (ask,) = asks_of(pod, nvidia=())
    assert (ask.devices, ask.mode) == (("GPU-1",), EXCLUSIVE)


def test_the_node_reads_which_slices_too() -> None:
    placed = PlacedContainer(
        name="main",
        mode=MIG,
        devices=tuple(
            PlacedDevice("GPU-1", 10 << 30, 1428, MigPlace("1g.10gb", start)) for start in (0, 4)
        ),
    )
    text = write_booking(PodBooking(uid=UID, node="n1", containers=(placed,)))
    pod = Pod(
        uid=UID,
        namespace="ml",
        name="train",
        node="n1",
        annotations={PLACEMENT: text},
        containers=(Container("main", ContainerKind.REGULAR),),
    )
    wish = placements_of(pod, {"main": True})["main"]
    assert wish.devices == ("GPU-1", "GPU-1")
    assert wish.slices == (MigPlace("1g.10gb", 0), MigPlace("1g.10gb", 4))
    assert (wish.mode, wish.memory_bytes) == (MIG, 10 << 30)
    assert json.loads(text)["containers"]["main"] == {
        "devices": ["GPU-1", "GPU-1"],
        "memory": 10 << 30,
        "guarantee": 1428,
        "mode": "mig",
        "slices": [["1g.10gb", 0], ["1g.10gb", 4]],
    }


SLICED = {"devices": ["a", "a"], "memory": 1, "mode": "mig", "slices": [["1g", 0], ["1g", 1]]}


@pytest.mark.parametrize(
    "change",
    [
        {"pod": "another"},
        {"node": "n2"},
        {"version": 2},
        {"pod": None},
        {"containers": {"main": {"devices": []}}},
        {"containers": {"main": {"devices": ["a", "a"], "memory": 1}}},
        {"containers": {"main": {"devices": ["a"], "memories": [1, 2]}}},
        {"containers": {"main": {"devices": ["a"], "memory": -1}}},
        {"containers": {"main": {"devices": ["a"], "memory": 1, "guarantee": 10_001}}},
        {"containers": {"main": {"devices": ["a"], "memory": 1, "kind": "else"}}},
        {"containers": {"main": {"devices": ["a"], "memory": 1, "guarantees": [1, 2]}}},
        {"containers": {"main": {"devices": ["a"], "memory": 1, "slices": [["1g", 0]]}}},
        {"containers": {"main": {"devices": ["a"], "memory": 1, "mode": "mig"}}},
        {"containers": {"main": {**SLICED, "mode": "soft"}}},
        {"containers": {"main": {**SLICED, "slices": [["1g", 0]]}}},
        {"containers": {"main": {**SLICED, "slices": [["1g", 0], ["1g", 0]]}}},
        {"containers": {"main": {**SLICED, "slices": [["1g", 0], ["1g", 64]]}}},
        {"containers": {"main": {**SLICED, "slices": [["1g", 0], ["1g"]]}}},
    ],
)
def test_what_was_not_decided_for_this_pod_on_this_node_is_refused(
    change: dict[str, object],
) -> None:
    good: dict[str, object] = {
        "version": 1,
        "node": "n1",
        "pod": UID,
        "containers": {"main": {"devices": ["a"], "memory": 1}},
    }
    assert read_booking(json.dumps(good), uid=UID, node="n1").containers
    with pytest.raises(UsageError):
        read_booking(json.dumps(good | change), uid=UID, node="n1")


@given(st.text() | st.sampled_from(["[" * 10_000, "{" * 10_000, " " * (MOST_CHARACTERS + 1)]))
def test_any_text_is_a_placement_or_refused(text: str) -> None:
    with pytest.raises(UsageError, match=PLACEMENT):
        read_booking(text, uid=UID, node="n1")

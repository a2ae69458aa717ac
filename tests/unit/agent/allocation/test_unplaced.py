# SPDX-License-Identifier: Apache-2.0
"""What a scheduler counts by its placements and what the node tells it come to what is booked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allotment.agent.allocation.reconcile import claimed, placed_slices, unplaced
from allotment.agent.mig.state import CutGpu
from allotment.dialects.own.placement import PLACEMENT, write_booking
from allotment.model.clusters import PlacedContainer, PlacedDevice, PodBooking, TakenPart
from allotment.model.compute import Compute
from allotment.model.mig import MigHold, MigPlace, MigSlice
from allotment.model.pods import ContainerKind, Owner, Pod, PodUid
from allotment.model.shares import Injection, Share, ShareDevice, ShareId
from allotment.model.structs import replace
from allotment.shares.booking import booked
from allotment.shares.record import LoadedShare

GI = 1 << 30
NODE = "n1"


def found(
    number: int,
    *uuids: str,
    pod: str | None = None,
    memory: int = 4 * GI,
    guarantee: int = 3000,
    container: str = "main",
    kind: ContainerKind = ContainerKind.REGULAR,
) -> LoadedShare:
    owner = None
    if pod is not None:
        owner = Owner(
            uid=PodUid(pod),
            namespace="ml",
            pod=pod,
            container=container,
            kind=kind,
            resource="allotment.dev/gpu",
            place=number,
        )
    share = Share(
        id=ShareId(f"{number:012x}"),
        name=str(owner or number),
        created=float(number),
        mode="soft",
        devices=tuple(
            ShareDevice(uuid, "T4", memory, compute=Compute(guarantee, is_governed=True))
            for uuid in uuids
        ),
        injection=Injection.CDI,
        owner=owner,
    )
    return LoadedShare(share.id, Path("/nowhere"), share, None)


def placed(
    uid: str,
    *uuids: str,
    memory: int | None = 4 * GI,
    guarantee: int = 3000,
    containers: tuple[str, ...] = ("main",),
    has_ended: bool = False,
    **changes: object,
) -> Pod:
    one: dict[str, object] = {"devices": list(uuids), "guarantee": guarantee}
    if memory is not None:
        one["memory"] = memory
    document = {
        "version": 1,
        "pod": uid,
        "node": NODE,
        "containers": dict.fromkeys(containers, one),
        **changes,
    }
    return Pod(
        uid=PodUid(uid),
        namespace="ml",
        name=uid,
        node=NODE,
        annotations={PLACEMENT: json.dumps({k: v for k, v in document.items() if v is not None})},
        has_ended=has_ended,
    )


def told(shares: list[LoadedShare], *pods: Pod) -> dict[str, TakenPart]:
    return dict(unplaced(shares, {each.uid: each for each in pods}.get))


ONE = {"GPU-a": TakenPart(4 * GI, 3000, 1, "soft")}


def test_what_nobody_placed_is_taken() -> None:
    alone = Pod(uid=PodUid("p"), namespace="ml", name="p", node=NODE)
    assert told([found(1, "GPU-a")]) == ONE
    assert told([found(1, "GPU-a", pod="p")], alone) == ONE


def test_what_a_scheduler_placed_is_not() -> None:
    assert told([found(1, "GPU-a", pod="p")], placed("p", "GPU-a")) == {}


@pytest.mark.parametrize(
    "pod",
    [
        pytest.param(placed("p", "GPU-a", pod=None), id="of no pod"),
        pytest.param(placed("p", "GPU-a", pod="q"), id="of another pod"),
        pytest.param(placed("p", "GPU-a", node=None), id="of no node"),
        pytest.param(placed("p", "GPU-a", node="n2"), id="of another node"),
        pytest.param(placed("p", "GPU-a", version=2), id="of another version"),
        pytest.param(placed("p", "GPU-a", containers=("side",)), id="of another container"),
        pytest.param(placed("p", "GPU-b"), id="of another device"),
        pytest.param(placed("p", "GPU-a", has_ended=True), id="of a pod that has ended"),
        pytest.param(placed("q", "GPU-a"), id="the pod is gone"),
        pytest.param(placed("p", "GPU-a", memory=None), id="of no amount"),
        pytest.param(
            replace(placed("p", "GPU-a"), annotations={PLACEMENT: "{"}), id="cannot be read"
        ),
    ],
)
def test_what_no_scheduler_can_have_counted_is_taken(pod: Pod) -> None:
    assert told([found(1, "GPU-a", pod="p")], pod) == ONE


def test_what_a_share_has_beyond_its_placement_is_taken() -> None:
    larger = found(1, "GPU-a", "GPU-b", pod="p", memory=5 * GI)
    assert told([larger], placed("p", "GPU-a", "GPU-b")) == {
        uuid: TakenPart(GI, 0, 1, "soft") for uuid in ("GPU-a", "GPU-b")
    }


def test_what_a_share_is_guaranteed_beyond_its_placement_is_taken() -> None:
    larger = found(1, "GPU-a", pod="p", guarantee=8000)
    assert told([larger], placed("p", "GPU-a")) == {"GPU-a": TakenPart(0, 5000, 1, "soft")}
    both = found(1, "GPU-a", pod="p", guarantee=8000, memory=5 * GI)
    assert told([both], placed("p", "GPU-a")) == {"GPU-a": TakenPart(GI, 5000, 1, "soft")}
    shrunk = found(1, "GPU-a", pod="p", guarantee=1000, memory=5 * GI)
    assert told([shrunk], placed("p", "GPU-a")) == {"GPU-a": TakenPart(GI, 0, 1, "soft")}


def test_where_each_device_was_given_another_amount_it_is_that_which_counts() -> None:
    # A fourth of each of two GPUs of different sizes.
    sizes = {"GPU-a": 4 * GI, "GPU-b": 8 * GI}
    booking = PodBooking(
        uid=PodUid("p"),
        node=NODE,
        containers=(
            PlacedContainer(
                name="main",
                devices=tuple(PlacedDevice(uuid, size, 3000) for uuid, size in sizes.items()),
            ),
        ),
    )
    pod = replace(placed("p"), annotations={PLACEMENT: write_booking(booking)})
    share = found(1, *sizes, pod="p")
    assert share.share is not None
    as_placed = tuple(replace(each, memory_bytes=sizes[each.uuid]) for each in share.share.devices)
    share = replace(share, share=replace(share.share, devices=as_placed))
    assert told([share], pod) == {}
    grown = tuple(replace(each, memory_bytes=each.memory_bytes + GI) for each in as_placed)
    assert share.share is not None
    share = replace(share, share=replace(share.share, devices=grown))
    assert told([share], pod) == {uuid: TakenPart(GI, 0, 1, "soft") for uuid in sizes}


def test_a_pods_containers_count_as_kubernetes_counts_them() -> None:
    shares = [
        found(0, "GPU-a", pod="p", memory=7 * GI, container="i", kind=ContainerKind.INIT),
        found(1, "GPU-a", pod="p", memory=2 * GI),
        found(2, "GPU-a", pod="p", memory=3 * GI, container="side"),
    ]
    assert told(shares)["GPU-a"].memory == 7 * GI


@given(
    st.lists(
        st.tuples(
            st.sampled_from([None, "placed", "alone", "gone"]),
            st.sampled_from([("GPU-a",), ("GPU-b",), ("GPU-a", "GPU-b")]),
            st.integers(4, 8),
            st.integers(0, 3),
        ),
        max_size=6,
    )
)
def test_placements_and_what_is_told_come_to_what_is_booked(
    drawn: list[tuple[str | None, tuple[str, ...], int, int]],
) -> None:
    shares, pods = [], []
    counted: dict[str, tuple[int, int]] = {}

    def count(uuid: str, memory: int, guarantee: int) -> None:
        before = counted.get(uuid, (0, 0))
        counted[uuid] = (before[0] + memory, before[1] + guarantee)

    for number, (whose, uuids, size, grown) in enumerate(drawn):
        uid = None if whose is None else f"{whose}-{number}"
        shares.append(found(number, *uuids, pod=uid, memory=size * GI))
        if whose == "placed":
            memory, guarantee = (size - grown) * GI, 3000 - 500 * grown
            pods.append(placed(str(uid), *uuids, memory=memory, guarantee=guarantee))
            for uuid in uuids:
                count(uuid, memory, guarantee)
        elif whose == "alone":
            pods.append(Pod(uid=PodUid(str(uid)), namespace="ml", name=str(uid), node=NODE))
    for uuid, taken in told(shares, *pods).items():
        count(uuid, taken.memory, taken.guarantee)
    assert counted == {
        uuid: (booking.memory, booking.guaranteed) for uuid, booking in booked(shares).items()
    }


def test_slices_that_placements_name_are_a_schedulers_to_count() -> None:
    place = MigPlace("1g.10gb", 5)

    def sliced(uid: str, *, decided_for: str | None = None, has_ended: bool = False) -> Pod:
        container = PlacedContainer(
            name="main", devices=(PlacedDevice(f"GPU-{uid}", GI, slice=place),), mode="mig"
        )
        booking = PodBooking(uid=PodUid(decided_for or uid), node=NODE, containers=(container,))
        return Pod(
            uid=PodUid(uid),
            namespace="ml",
            name=uid,
            node=NODE,
            annotations={PLACEMENT: write_booking(booking)},
            containers=(),
            has_ended=has_ended,
        )

    pods = [
        sliced("a"),
        sliced("b", has_ended=True),
        sliced("c", decided_for="another"),  # a copy: no scheduler counts it
    ]
    assert placed_slices(pods) == {("GPU-a", place)}


def test_a_claims_share_is_named_once_it_is_counted() -> None:
    """A slice's share, once its GPU reports the slice: until then the scheduler counts it."""

    def of_claim(number: int, mode: str) -> LoadedShare:
        loaded = found(number, "GPU-a", pod=f"claim {number}")
        assert loaded.share is not None
        assert loaded.share.owner is not None
        owner = replace(loaded.share.owner, is_claim=True)
        return replace(loaded, share=replace(loaded.share, owner=owner, mode=mode))

    part, new, cut = of_claim(1, "soft"), of_claim(2, "mig"), of_claim(3, "mig")
    slice_ = MigSlice(profile=19, start=0, size=1, hold=MigHold.USED, holder=cut.id)
    gpu = CutGpu(profiles=(), is_enabled=True, slices=(slice_,))
    shares = [part, new, cut, found(4, "GPU-a", pod="p"), found(5, "GPU-a")]
    assert claimed(shares, [gpu]) == {part.id, cut.id}

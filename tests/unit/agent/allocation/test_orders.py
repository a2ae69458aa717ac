# SPDX-License-Identifier: Apache-2.0
"""What is to be made for a container, from what it asks, what it was given and what there is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allotment.agent.allocation.orders import (
    again,
    describe,
    is_room_coming,
    order_for,
    request_of_share,
)
from allotment.agent.protocols import CheckpointEntry
from allotment.agent.resources import GPU_COMPUTE, GPU_MEMORY, GPU_SHARE, Offer, Resource, Slot
from allotment.model.compute import Compute
from allotment.model.errors import AllotError, MisplacedError, StateError, UsageError
from allotment.model.pods import Container, ContainerKind, Owner, Pod, PodUid
from allotment.model.requests import Constraints, whole_devices
from allotment.model.shares import Amounts, Injection, Share, ShareDevice, ShareId
from allotment.model.structs import replace
from allotment.shares.placing import ShareOrder

GI = 1 << 30
GPUS = ("GPU-a", "GPU-b", "GPU-c", "GPU-d")


def replicated(name: str, mode: str, *uuids: str, replicas: int = 4) -> Resource:
    slots = tuple(Slot(f"{uuid}::{n}", uuid) for uuid in uuids for n in range(replicas))
    return Resource(name=name, mode=mode, slots=slots, replicas=replicas)


OFFER = Offer(
    resources=(
        Resource(
            name=GPU_SHARE,
            mode="soft",
            slots=tuple(Slot(f"share::{number}", None) for number in range(8)),
        ),
        Resource(name="nvidia.com/gpu", mode="exclusive", slots=(Slot("GPU-c", "GPU-c"),)),
        replicated("nvidia.com/gpu.shared", "timeslice", "GPU-d"),
    ),
    modes={"GPU-a": "soft", "GPU-b": "soft", "GPU-c": "exclusive", "GPU-d": "timeslice"},
    shared={"GPU-a": ("soft",), "GPU-b": ("soft",)},
)


def order(
    limits: Mapping[str, int],
    *ids: str,
    offer: Offer = OFFER,
    share: str | None = "1234",
    annotations: dict[str, str] | None = None,
) -> ShareOrder:
    pod = Pod(
        uid=PodUid("uid-1"),
        namespace="team",
        name="train",
        annotations=annotations or {},
        containers=(
            Container("init", ContainerKind.INIT),
            Container("main", ContainerKind.REGULAR, limits),
        ),
    )
    entry = CheckpointEntry(
        pod=pod.uid,
        container="main",
        resource=next(iter(limits)),
        ids=frozenset(ids),
        share=None if share is None else ShareId(share),
        injection=Injection.CDI,
    )
    return order_for(pod, entry, offer)


def test_parts_of_any_soft_device() -> None:
    found = order({GPU_SHARE: 1, GPU_MEMORY: 4 * GI, GPU_COMPUTE: 30}, "share::3")
    assert found.id == "1234"
    assert found.request.mode == "soft"
    assert found.request.memory.size_bytes == 4 * GI
    assert found.request.compute == Compute(3000, 3000, is_governed=True)
    assert found.devices == ()
    assert found.candidates == ("GPU-a", "GPU-b")
    assert found.asked == found.request
    assert found.injection is Injection.CDI
    assert found.owner is not None
    assert str(found.owner) == "team/train/main"
    assert (found.owner.kind, found.owner.place, found.owner.resource) == (
        ContainerKind.REGULAR,
        1,
        GPU_SHARE,
    )


def test_a_schedulers_choice_is_followed() -> None:
    placement = '{"version": 1, "containers": {"main": {"devices": ["GPU-b"]}}}'
    found = order({GPU_SHARE: 1}, "share::3", annotations={"allotment.dev/placement": placement})
    assert found.devices == ("GPU-b",)
    assert found.asked is None  # the scheduler decides what it may have later


def test_a_whole_gpu() -> None:
    found = order({"nvidia.com/gpu": 1}, "GPU-c")
    assert found.request.mode == "exclusive"
    assert found.request.memory.part == Fraction(1)
    assert found.devices == ("GPU-c",)


def test_replicas_of_one_gpu_are_one_device() -> None:
    found = order({"nvidia.com/gpu.shared": 2}, "GPU-d::0", "GPU-d::3")
    assert found.request.mode == "timeslice"
    assert found.request.count == 1
    assert found.devices == ("GPU-d",)


def test_replicas_that_are_enforced_are_parts() -> None:
    offer = Offer(
        resources=(replicated("nvidia.com/gpu", "soft", "GPU-a", "GPU-b"),),
        modes={"GPU-a": "soft", "GPU-b": "soft"},
    )
    found = order({"nvidia.com/gpu": 3}, "GPU-a::0", "GPU-a::1", "GPU-b::3", offer=offer)
    assert found.request.memory.part == Fraction(1, 4)
    assert found.request.compute == Compute(2500, is_governed=True)
    assert found.request.count == 2
    assert found.devices == ("GPU-a", "GPU-a", "GPU-b")


def test_a_whole_gpu_beside_replicas_is_exclusive() -> None:
    shared = replicated("nvidia.com/gpu", "timeslice", "GPU-d")
    mixed = replace(shared, slots=(*shared.slots, Slot("GPU-c", "GPU-c")))
    offer = replace(OFFER, resources=(mixed,))
    assert order({"nvidia.com/gpu": 1}, "GPU-c", offer=offer).request.mode == "exclusive"
    assert order({"nvidia.com/gpu": 1}, "GPU-d::1", offer=offer).request.mode == "timeslice"
    both = order({"nvidia.com/gpu": 2}, "GPU-c", "GPU-d::1", offer=offer)
    assert both.request.mode == "timeslice"


@pytest.mark.parametrize(
    ("ids", "mode"), [(("GPU-c",), "exclusive"), (("GPU-d::1", "GPU-d::2"), "timeslice")]
)
def test_what_another_plugin_gave_is_booked_and_nothing_else(
    ids: tuple[str, ...], mode: str
) -> None:
    found = order({"nvidia.com/gpu": len(ids)}, *ids, share=None)
    assert found.injection is Injection.NONE
    assert found.request.mode == mode
    assert found.devices == (ids[0].partition("::")[0],)


PLACED = '{"version": 1, "containers": {"main": {"devices": ["%s"]}}}'


@pytest.mark.parametrize(
    ("limits", "ids", "annotations", "kind", "said"),
    [
        (
            {"nvidia.com/b200": 1},
            ("GPU-c",),
            {},
            MisplacedError,
            "no longer offers nvidia.com/b200",
        ),
        ({"nvidia.com/gpu": 1}, ("GPU-x",), {}, MisplacedError, "GPU-x is no longer on this node"),
        ({"nvidia.com/gpu": 1}, ("GPU-a",), {}, MisplacedError, "the mode of GPU-a is now 'soft'"),
        ({"nvidia.com/gpu": 2}, ("GPU-c",), {}, StateError, "requests 2 of nvidia.com/gpu, the"),
        ({"nvidia.com/gpu": 0}, ("GPU-c",), {}, StateError, "which does not request it"),
        ({"nvidia.com/gpu": 1}, ("GPU-c",), {"mode": "soft"}, UsageError, "it wants mode 'soft'"),
        ({GPU_SHARE: 1}, ("share::0",), {"mode": "mps"}, UsageError, "of this node is 'soft'"),
        (
            {GPU_SHARE: 1},
            ("share::0",),
            {"placement": PLACED % "GPU-x"},
            MisplacedError,
            "not on this",
        ),
        (
            {GPU_SHARE: 1},
            ("share::0",),
            {"placement": PLACED % "GPU-c"},
            MisplacedError,
            "whose mode",
        ),
    ],
)
def test_refused_with_the_next_step(
    limits: dict[str, int],
    ids: tuple[str, ...],
    annotations: dict[str, str],
    kind: type[AllotError],
    said: str,
) -> None:
    written = {f"allotment.dev/{key}": value for key, value in annotations.items()}
    with pytest.raises(kind) as refused:
        order(limits, *ids, annotations=written)
    assert said in refused.value.message
    assert "pod team/train" in refused.value.message
    assert refused.value.hint


def test_two_resources_where_one_is_a_part_are_refused() -> None:
    offer = replace(
        OFFER, resources=(*OFFER.resources, replicated("nvidia.com/part", "soft", "GPU-a"))
    )
    limits = {"nvidia.com/part": 1, "nvidia.com/gpu": 1}
    with pytest.raises(UsageError, match=r"nvidia.com/part is a part of GPUs"):
        order(limits, "GPU-a::0", offer=offer)


@given(st.integers(1, 16), st.data())
def test_enforced_replicas_of_a_device_come_to_no_more_than_it(
    replicas: int, data: st.DataObject
) -> None:
    offer = Offer(
        resources=(replicated("nvidia.com/gpu", "soft", "GPU-a", replicas=replicas),),
        modes={"GPU-a": "soft"},
    )
    slots = [slot.id for slot in offer.resources[0].slots]
    ids = data.draw(st.lists(st.sampled_from(slots), min_size=1, unique=True))
    found = order({"nvidia.com/gpu": len(ids)}, *ids, offer=offer)
    whole = found.request.times(len(found.devices))
    assert whole.memory.of(GI) <= GI
    assert whole.compute.guarantee <= 10_000
    assert len(found.devices) == len(ids)


def bound(uuid: str, **more: object) -> dict[str, str]:
    """What a scheduler writes in its binding."""
    chosen = {"version": 1, "pod": "uid-1", "containers": {"main": {"devices": [uuid], **more}}}
    return {"allotment.dev/placement": json.dumps(chosen)}


def test_a_part_of_a_device_is_as_large_as_the_scheduler_has_counted_it() -> None:
    half = {"allotment.dev/memory": "50%"}
    limits = {GPU_SHARE: 1}
    found = order(limits, "share::0", annotations=half | bound("GPU-b", memory=7 * GI))
    assert found.devices == ("GPU-b",)
    assert found.request.memory.size_bytes == 7 * GI
    whole = order(limits, "share::0", annotations=bound("GPU-b", memory=9 * GI))
    assert whole.request.memory.size_bytes == 9 * GI
    # One that says nothing of it leaves it to the node.
    silent = order(limits, "share::0", annotations=half | bound("GPU-b"))
    assert silent.request.memory.part == Fraction(1, 2)


def test_amounts_that_are_asked_for_in_bytes_are_not_a_schedulers_to_change() -> None:
    limits = {GPU_SHARE: 1, GPU_MEMORY: 4 * GI}
    assert order(limits, "share::0", annotations=bound("GPU-b", memory=4 * GI)).devices
    with pytest.raises(UsageError, match=r"has 5368709120 bytes of each device"):
        order(limits, "share::0", annotations=bound("GPU-b", memory=5 * GI))


def test_what_a_scheduler_has_seen_to_is_not_asked_again() -> None:
    wanted = {"allotment.dev/alone": "true", "allotment.dev/models": "a100"}
    limits = {GPU_SHARE: 1, GPU_MEMORY: 4 * GI}
    found = order(limits, "share::0", annotations=wanted | bound("GPU-b"))
    assert found.request.constraints == Constraints()
    models = order(limits, "share::0", annotations={"allotment.dev/models": "a100"})
    assert [each.text for each in models.request.constraints.models] == ["a100"]


def test_soft_gpus_that_are_given_in_replicas_are_no_place_for_parts() -> None:
    replicas = replicated("nvidia.com/part", "soft", "GPU-b")
    offer = replace(OFFER, resources=(*OFFER.resources, replicas), shared={"GPU-a": ("soft",)})
    assert order({GPU_SHARE: 1}, "share::0", offer=offer).candidates == ("GPU-a",)
    written = {"allotment.dev/placement": PLACED % "GPU-b"}
    with pytest.raises(MisplacedError, match=r"GPU-b, which is offered in replicas"):
        order({GPU_SHARE: 1}, "share::0", offer=offer, annotations=written)


def test_what_is_there_is_ordered_as_it_is() -> None:
    found = order({GPU_SHARE: 1, GPU_MEMORY: 4 * GI}, "share::3")
    share = Share(
        id=found.id,
        name="team/train/main",
        created=0.0,
        mode="soft",
        devices=(
            ShareDevice(
                "GPU-b",
                "T4",
                4 * GI,
                compute=Compute(3000, is_governed=True),
                asked=Amounts(5 * GI, 4000, 8000),
            ),
        ),
        injection=Injection.MOUNTS,
        owner=found.owner,
    )
    assert found.owner is not None
    repeated = again(share, found.owner)
    assert (repeated.id, repeated.owner) == (found.id, found.owner)
    assert repeated.devices == ("GPU-b",)
    assert repeated.request.memory.size_bytes == 4 * GI
    assert repeated.request.compute.guarantee == 3000
    assert repeated.asked is not None
    assert repeated.asked.memory.size_bytes == 5 * GI
    assert repeated.asked.compute == Compute(4000, 8000)
    assert repeated.injection is Injection.MOUNTS
    assert describe(share) == "share 1234: 4Gi and 30 to 100 % of compute of GPU-b (T4), mode soft"


@pytest.mark.parametrize(
    ("mode", "wish", "is_asked"),
    [
        ("mig", "", False),
        ("mig", "side=memory:2Gi", False),
        ("mig", "main=memory:4Gi", False),
        ("mig", "main=class:normal", False),
        ("mig", "main=memory:5Gi", True),
        ("mig", "memory:2Gi", True),
        ("soft", "", True),
        ("soft", "main=memory:4Gi", True),
    ],
)
def test_what_a_mode_fixes_is_asked_for_if_it_is_to_change(
    mode: str, wish: str, *, is_asked: bool
) -> None:
    """A slice has more than its container asks for: that alone is no change."""
    placement = {"version": 1, "node": "node-1", "pod": "uid-1", "containers": {}}
    pod = Pod(
        uid=PodUid("uid-1"),
        namespace="team",
        name="train",
        node="node-1",
        annotations={
            "allotment.dev/placement": json.dumps(
                placement | {"resize": {"wish": wish, "generation": 1}}
            )
        },
        containers=tuple(
            Container(name, ContainerKind.REGULAR, {GPU_SHARE: 1, GPU_MEMORY: 4 * GI})
            for name in ("main", "side")
        ),
    )
    share = Share(
        id=ShareId("1234"),
        name="team/train/main",
        created=0.0,
        mode=mode,
        devices=(ShareDevice("MIG-1", "H100", 10 * GI, compute=Compute(1428)),),
        injection=Injection.CDI,
        owner=Owner(
            uid=pod.uid,
            namespace="team",
            pod="train",
            container="main",
            kind=ContainerKind.REGULAR,
            resource=GPU_SHARE,
        ),
    )
    assert (request_of_share(pod, share, OFFER) is not None) == is_asked


# ---- room that comes -----------------------------------------------------------------------------


def held(uid: str, uuid: str, *, is_claim: bool = False) -> Share:
    """A container's share of one GPU."""
    owner = Owner(
        uid=PodUid(uid), namespace="team", pod=uid, container="main", kind=ContainerKind.REGULAR,
        resource=GPU_SHARE, is_claim=is_claim,
    )  # fmt: skip
    return Share(
        id=ShareId(uid),
        name=uid,
        created=0.0,
        mode="soft",
        devices=(ShareDevice(uuid, "T4", 1 << 30),),
        injection=Injection.CDI,
        owner=owner,
    )


@pytest.mark.parametrize(
    ("former", "places", "listed", "is_coming"),
    [
        (held("old", "GPU-0"), {"devices": ("GPU-0",)}, ["new"], True),
        (held("old", "GPU-0"), {"candidates": ("GPU-0", "GPU-1")}, ["new"], True),
        (held("old", "GPU-0"), {}, ["new"], True),
        (held("old", "GPU-0"), {"devices": ("GPU-0",)}, ["new", "old"], False),
        (held("old", "GPU-1"), {"devices": ("GPU-0",)}, ["new"], False),
        (held("old", "GPU-1"), {"candidates": ("GPU-0",)}, ["new"], False),
        (held("old", "GPU-0"), {"devices": ("GPU-0",)}, [], False),
        (held("old", "GPU-0", is_claim=True), {"devices": ("GPU-0",)}, ["new"], False),
    ],
    ids=["its device", "a candidate", "any", "listed", "another device", "no candidate",
         "no checkpoint", "a claim"],
)  # fmt: skip
def test_room_comes_where_a_dropped_pod_has_a_share(
    former: Share, places: dict[str, Any], listed: list[str], *, is_coming: bool
) -> None:
    mine = held("new", "GPU-0")
    asked = replace(ShareOrder(whole_devices(1, mode="exclusive"), owner=mine.owner), **places)
    entries = [
        CheckpointEntry(
            pod=PodUid(uid), container="main", resource=GPU_SHARE, ids=frozenset({uid}), share=None
        )
        for uid in listed
    ]
    assert is_room_coming(asked, [former], entries) is is_coming

# SPDX-License-Identifier: Apache-2.0
"""What other systems' tools find on a pod after its binding, and what they left on theirs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest

from allotment.dialects.foreign import DIALECT, ForeignContainer, ForeignPod, NodeView, Translation
from allotment.dialects.receipts import receipt_of, taken_over
from allotment.dialects.systems import foreign_dialects
from allotment.model.clusters import (
    NodeDevice,
    NodeInventory,
    PlacedContainer,
    PlacedDevice,
    PodBooking,
)
from allotment.model.errors import UsageError
from allotment.model.pods import Container, ContainerKind, Pod, PodUid

DIALECTS = foreign_dialects()
MI = 1 << 20
NODE = NodeInventory(
    name="node-1",
    devices=(
        NodeDevice(uuid="GPU-1", model="Tesla T4", memory_bytes=15 << 30),
        NodeDevice(uuid="GPU-2", model="Tesla T4", memory_bytes=15 << 30, index=1),
    ),
)
BOOKING = PodBooking(
    uid=PodUid("uid-1"),
    node="node-1",
    containers=(
        PlacedContainer(name="train", devices=(PlacedDevice("GPU-2", 100 * MI, 3000),), place=1),
    ),
)


def pod(dialect: str) -> Pod:
    return Pod(
        uid=PodUid("uid-1"),
        namespace="team",
        name="train-0",
        annotations={DIALECT: dialect} if dialect else {},
        containers=(
            Container("init", ContainerKind.INIT),
            Container("train", ContainerKind.REGULAR),
        ),
    )


def test_whose_it_was_gets_its_record() -> None:
    record = receipt_of(pod("hami"), BOOKING, NODE, DIALECTS, now=5.0)
    assert record["hami.io/vgpu-devices-allocated"] == ";GPU-2,NVIDIA,100,30:;"
    assert record["hami.io/vgpu-node"] == "node-1"
    shared = receipt_of(pod("volcano-gpushare"), BOOKING, NODE, DIALECTS, now=5.0)
    assert shared["volcano.sh/gpu-index"] == "1"


@pytest.mark.parametrize("dialect", ["", "other", "nvidia", "deepomatic"])
def test_others_get_none(dialect: str) -> None:
    assert receipt_of(pod(dialect), BOOKING, NODE, DIALECTS, now=5.0) == {}


def test_annotations_of_its_own_are_seen() -> None:
    its = {"nvidia.com/container.train.gpu-memory.request": "1Gi"}
    record = receipt_of(pod("kai"), BOOKING, NODE, DIALECTS, now=5.0, annotations=its)
    assert record["nvidia.com/container.train.gpus.devices"] == "GPU-2"


@dataclass(frozen=True)
class Wrong:
    """A dialect that writes what it must not, or nothing."""

    fails: bool
    name: str = "wrong"
    title: str = "Nobody's"

    def recognises(self, pod: ForeignPod) -> tuple[str, ...]:
        return (pod.name,)

    def translate(self, pod: ForeignPod) -> Translation:
        return Translation(dialect=pod.name, containers=())

    def receipt(
        self, pod: ForeignPod, booking: PodBooking, node: NodeView, *, now: float
    ) -> Mapping[str, str]:
        if self.fails:
            raise UsageError(f"{pod.name}{node}{now}", hint="")
        return {"allotment.dev/placement": "{}", "example.com/x": booking.node}

    def take_over(self, pod: ForeignPod, node: NodeView) -> PodBooking | None:
        raise UsageError(f"{pod.name}{node}", hint="")


def test_a_record_never_says_what_is_ours_and_never_fails_a_binding() -> None:
    assert receipt_of(pod("wrong"), BOOKING, NODE, (Wrong(fails=False),), now=0) == {
        "example.com/x": "node-1"
    }
    assert receipt_of(pod("wrong"), BOOKING, NODE, (Wrong(fails=True),), now=0) == {}


def running() -> ForeignPod:
    return ForeignPod(
        namespace="team",
        name="train-0",
        node="node-1",
        annotations={
            "hami.io/vgpu-node": "node-1",
            "hami.io/vgpu-devices-allocated": ";GPU-2,NVIDIA,100,30:;",
        },
        containers=(
            ForeignContainer(name="init", kind=ContainerKind.INIT),
            ForeignContainer(name="train"),
        ),
    )


def test_what_another_system_gave_is_booked() -> None:
    assert taken_over(running(), NODE, DIALECTS, uid=PodUid("uid-1")) == BOOKING


def test_nothing_is_taken_over_of_ours_or_of_other_nodes() -> None:
    subject = running()
    ours = replace(subject, annotations={**subject.annotations, DIALECT: "hami"})
    elsewhere = replace(NODE, name="node-2")
    assert taken_over(ours, NODE, DIALECTS, uid=PodUid("u")) is None
    assert taken_over(subject, elsewhere, DIALECTS, uid=PodUid("u")) is None
    assert taken_over(replace(subject, node=""), NODE, DIALECTS, uid=PodUid("u")) is None
    assert taken_over(replace(subject, annotations={}), NODE, DIALECTS, uid=PodUid("u")) is None

# SPDX-License-Identifier: Apache-2.0
"""What other systems left on pods that they bound is booked, once."""

from dataclasses import replace

import pytest

from allotment.dialects.foreign import DIALECT, ForeignContainer, ForeignPod
from allotment.dialects.systems import foreign_dialects
from allotment.dialects.taking_over import node_view, taken_over
from allotment.model.clusters import (
    NodeDevice,
    NodeInventory,
    PlacedContainer,
    PlacedDevice,
    PodBooking,
)
from allotment.model.errors import UsageError
from allotment.model.pods import ContainerKind, PodUid

DIALECTS = foreign_dialects()
MI = 1 << 20
NODE = NodeInventory(
    name="node-1",
    devices=(
        NodeDevice(uuid="GPU-1", model="Tesla T4", memory_bytes=15 << 30),
        NodeDevice(uuid="GPU-2", model="Tesla T4", memory_bytes=15 << 30, index=1),
    ),
)
ALLOCATED = "hami.io/vgpu-devices-allocated"


def running(record: str = ";GPU-2,NVIDIA,100,30:;") -> ForeignPod:
    return ForeignPod(
        namespace="team",
        name="train-0",
        node="node-1",
        annotations={"hami.io/vgpu-node": "node-1", ALLOCATED: record},
        containers=(
            ForeignContainer(name="init", kind=ContainerKind.INIT),
            ForeignContainer(name="train"),
        ),
    )


def test_what_another_system_gave_is_booked() -> None:
    train = PlacedContainer(name="train", devices=(PlacedDevice("GPU-2", 100 * MI, 3000),), place=1)
    assert taken_over(running(), NODE, DIALECTS, uid=PodUid("uid-1")) == PodBooking(
        uid=PodUid("uid-1"), node="node-1", containers=(train,)
    )


def test_records_by_index_are_read_by_the_nodes_own() -> None:
    subject = ForeignPod(
        namespace="team",
        name="train-0",
        node="node-1",
        annotations={"volcano.sh/gpu-index": "1"},
        containers=(ForeignContainer(name="train", limits={"volcano.sh/gpu-memory": "100"}),),
    )
    found = taken_over(subject, NODE, DIALECTS, uid=PodUid("uid-1"))
    assert found is not None
    assert found.containers[0].devices == (PlacedDevice("GPU-2", 100 * MI),)
    assert node_view(NODE).indexes == {"GPU-1": 0, "GPU-2": 1}


def test_nothing_is_taken_over_of_ours_or_of_other_nodes() -> None:
    subject = running()
    ours = replace(subject, annotations={**subject.annotations, DIALECT: "hami"})
    elsewhere = replace(NODE, name="node-2")
    assert taken_over(ours, NODE, DIALECTS, uid=PodUid("u")) is None
    assert taken_over(subject, elsewhere, DIALECTS, uid=PodUid("u")) is None
    assert taken_over(replace(subject, node=""), NODE, DIALECTS, uid=PodUid("u")) is None
    assert taken_over(replace(subject, annotations={}), NODE, DIALECTS, uid=PodUid("u")) is None


def test_a_record_that_cannot_be_read_is_told() -> None:
    with pytest.raises(UsageError, match="pod team/train-0: the annotation hami"):
        taken_over(running("x"), NODE, DIALECTS, uid=PodUid("u"))

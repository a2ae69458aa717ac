# SPDX-License-Identifier: Apache-2.0
"""Volcano's vGPUs and its GPU sharing: what they come to, and its records."""

from fractions import Fraction

import pytest
from foreign_pods import taken
from hypothesis import given
from hypothesis import strategies as st

from allotment.dialects.foreign.adoption import node_view
from allotment.dialects.foreign.base import DIALECT, Translation
from allotment.dialects.foreign.translate import written
from allotment.dialects.foreign.volcano import (
    VolcanoDialect,
    VolcanoGpuShareDialect,
    VolcanoSettings,
)
from allotment.model.clusters import (
    NodeDevice,
    NodeInventory,
    PlacedContainer,
    PlacedDevice,
    PodBooking,
)
from allotment.model.compute import WHOLE, Compute
from allotment.model.errors import UsageError
from allotment.model.pods import ContainerKind, ForeignContainer, ForeignPod, PodUid
from allotment.model.requests import ModelRule, Request
from allotment.model.structs import replace

MI = 1 << 20
INVENTORY = NodeInventory(
    name="node-1",
    devices=(
        NodeDevice(uuid="GPU-a", model="Tesla T4", memory_bytes=16 << 30),
        NodeDevice(uuid="GPU-b", model="Tesla T4", memory_bytes=8 << 30, index=1),
    ),
)
NODE = node_view(INVENTORY)


def container(name: str = "train", /, **amounts: object) -> ForeignContainer:
    limits = {f"volcano.sh/{key.replace('_', '-')}": str(value) for key, value in amounts.items()}
    return ForeignContainer(name=name, limits=limits)


def pod(*containers: ForeignContainer, **annotations: str) -> ForeignPod:
    return ForeignPod(
        namespace="team",
        name="train-0",
        node="node-1",
        containers=containers,
        annotations={
            f"volcano.sh/{key.replace('_', '-')}": text for key, text in annotations.items()
        },
    )


def translate(subject: ForeignPod, **settings: object) -> Translation:
    dialect = VolcanoDialect(VolcanoSettings(**settings))  # type: ignore[arg-type]
    assert dialect.recognises(subject)
    found = dialect.translate(subject)
    written(subject, found)
    return found


def request(subject: ForeignPod, **settings: object) -> Request:
    (found,) = translate(subject, **settings).containers
    return found.request


def test_a_vgpu() -> None:
    (found,) = translate(pod(container(vgpu_number=2, vgpu_memory=3000, vgpu_cores=50))).containers
    assert found.request.count == 2
    assert found.request.memory.size_bytes == 3000 * MI
    assert found.request.compute == Compute(5000, WHOLE, is_governed=True)
    assert found.removes == (
        "volcano.sh/vgpu-number",
        "volcano.sh/vgpu-memory",
        "volcano.sh/vgpu-cores",
    )


def test_memory_alone_is_of_one_gpu_and_the_factor_counts() -> None:
    found = request(pod(container(vgpu_memory=100)), gpu_memory_factor=10)
    assert (found.count, found.memory.size_bytes) == (1, 1000 * MI)
    part = request(pod(container(vgpu_number=1, vgpu_memory_percentage=25)))
    assert part.memory.part == Fraction(1, 4)
    assert request(pod(container(vgpu_number=1))).memory.part == 1


def test_cores_are_a_ceiling_where_the_policy_is_force() -> None:
    forced = {"GPU_CORE_UTILIZATION_POLICY": "force"}
    asking = replace(container(vgpu_number=1, vgpu_cores=50), environment=forced)
    assert request(pod(asking)).compute == Compute(5000, 5000, is_governed=True)


def test_annotations() -> None:
    subject = pod(
        container(vgpu_number=1, vgpu_cores=100),
        vgpu_mode="hami-core",
        vgpu_use_gpuuuid="GPU-a,GPU-b",
        vgpu_nouse_gpuuuid="GPU-c",
        vgpu_podgroup_policy="spread",
    )
    annotations = {**subject.annotations, "nvidia.com/use-gputype": "A100"}
    found = translate(replace(subject, annotations=annotations))
    its = found.containers[0].request.constraints
    assert its.models == (ModelRule("A100"),)
    assert its.uuids == ("GPU-a", "GPU-b")
    assert its.not_uuids == ("GPU-c",)
    assert its.is_alone
    assert "volcano.sh/vgpu-podgroup-policy" in found.passed_over[0]


@pytest.mark.parametrize(
    ("subject", "said"),
    [
        (pod(container(vgpu_number=1, vgpu_memory="x")), "volcano.sh/vgpu-memory: 'x'"),
        (pod(container(vgpu_number=1, vgpu_memory_percentage=0)), "percentage is 0"),
        (pod(container(vgpu_number=1), vgpu_mode="mig"), "where its memory is 100% of a GPU"),
    ],
)
def test_refused(subject: ForeignPod, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        translate(subject)
    assert refused.value.message.startswith("pod team/train-0")
    assert said in refused.value.message
    assert refused.value.hint


def booking(*containers: PlacedContainer) -> PodBooking:
    return PodBooking(uid=PodUid(""), node="node-1", containers=containers)


def has(name: str, *devices: PlacedDevice, place: int = 0) -> PlacedContainer:
    return PlacedContainer(name=name, devices=devices, place=place)


def test_result_has_those_that_ask_and_no_end() -> None:
    init = replace(container("init"), kind=ContainerKind.INIT)
    given_ = booking(
        replace(has("init", PlacedDevice("GPU-a", MI)), kind=ContainerKind.INIT),
        has("a", PlacedDevice("GPU-b", 2 * MI, 1000), place=2),
        has("b", PlacedDevice("GPU-a", MI, 500), PlacedDevice("GPU-b", MI, 500), place=1),
    )
    found = VolcanoDialect().result_annotations(pod(init), given_, NODE, now=1_700_000_000.1)
    assert found == {
        "volcano.sh/vgpu-ids-new": "GPU-a,NVIDIA,1,5:GPU-b,NVIDIA,1,5:;GPU-b,NVIDIA,2,10:",
        "volcano.sh/vgpu-node": "node-1",
        "volcano.sh/vgpu-time": "1700000000",
        "volcano.sh/bind-time": "1700000000",
        "volcano.sh/bind-phase": "success",
    }


def running(record: str, *containers: ForeignContainer) -> ForeignPod:
    annotations = {"volcano.sh/vgpu-node": "node-1", "volcano.sh/vgpu-ids-new": record}
    return replace(pod(*containers), annotations=annotations)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        # There a percentage wins over MiB: 50 percent of 16 GiB were given.
        ("GPU-a,NVIDIA,8192,30:", PlacedDevice("GPU-a", 8192 * MI, 3000)),
        ("GPU-a,NVIDIA,500,5:", PlacedDevice("GPU-a", 1000 * MI, 2000)),
        ("GPU-a,NVIDIA,999999999,999:", None),
        ("GPU-a,NVIDIA,x,:", PlacedDevice("GPU-a", 1000 * MI, 2000)),
    ],
)
def test_the_larger_of_record_and_request_is_booked(
    record: str, expected: PlacedDevice | None
) -> None:
    asking = container("main", vgpu_memory=1000, vgpu_memory_percentage=50, vgpu_cores=20)
    found = taken(VolcanoDialect(), running(record, asking), INVENTORY)
    everything = PlacedDevice("GPU-a", NODE.memory_bytes["GPU-a"], WHOLE)
    assert found == booking(has("main", expected or everything))


def test_a_record_counts_memory_in_units_of_the_factor() -> None:
    dialect = VolcanoDialect(VolcanoSettings(gpu_memory_factor=10))
    subject = running("GPU-a,NVIDIA,819,30:", container("main", vgpu_memory=100))
    placed = PlacedDevice("GPU-a", 8190 * MI, 3000)
    assert taken(dialect, subject, INVENTORY) == booking(has("main", placed))
    record = dialect.result_annotations(subject, booking(has("main", placed)), NODE, now=0)
    assert record["volcano.sh/vgpu-ids-new"] == "GPU-a,NVIDIA,819,30:"


def test_a_container_with_cores_alone_has_nothing_there_and_drops_no_pod() -> None:
    asking = container("main", vgpu_number=1, vgpu_memory=100)
    subject = running("GPU-a,NVIDIA,100,0:", container("side", vgpu_cores=10), asking)
    placed = PlacedDevice("GPU-a", 100 * MI)
    assert taken(VolcanoDialect(), subject, INVENTORY) == booking(has("main", placed, place=1))


@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from(["GPU-a", "GPU-b"]), min_size=1, max_size=2, unique=True),
            st.integers(1, 1000),
            st.integers(0, 99),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_what_is_written_is_taken_over(parts: list[tuple[list[str], int, int]]) -> None:
    asking, placed = [container("web")], []
    for place, (uuids, mebibytes, percent) in enumerate(parts, 1):
        amounts = {"vgpu_memory": mebibytes, "vgpu_cores": percent}
        if len(uuids) > 1:  # memory alone asks for one GPU, too
            amounts["vgpu_number"] = len(uuids)
        asking.append(container(f"c{place}", **amounts))
        had = (PlacedDevice(uuid, mebibytes * MI, percent * 100) for uuid in uuids)
        placed.append(has(f"c{place}", *had, place=place))
    expected, subject = booking(*placed), pod(*asking)
    record = VolcanoDialect().result_annotations(subject, expected, NODE, now=0)
    written_ = replace(subject, annotations=record)
    assert taken(VolcanoDialect(), written_, INVENTORY) == expected
    ours = replace(subject, annotations={**record, DIALECT: "volcano"})
    assert taken(VolcanoDialect(), ours, INVENTORY) is None
    moved = replace(written_, node="node-2")
    assert taken(VolcanoDialect(), moved, INVENTORY) is None


def test_a_record_of_more_containers_than_ask_is_refused() -> None:
    record = {
        "volcano.sh/vgpu-ids-new": "GPU-a,NVIDIA,1,5:;",
        "volcano.sh/vgpu-node": "node-1",
    }
    subject = replace(pod(container(vgpu_number=1), container("web")), annotations=record)
    with pytest.raises(UsageError, match="has 2 containers, the pod has 1 that"):
        taken(VolcanoDialect(), subject, INVENTORY)


# ---- GPU sharing ---------------------------------------------------------------------------------


def shared(subject: ForeignPod) -> list[Request]:
    dialect = VolcanoGpuShareDialect()
    assert dialect.recognises(subject)
    found = dialect.translate(subject)
    written(subject, found)
    return [each.request for each in found.containers]


def test_gpu_memory_is_a_part_of_one_gpu_and_gpu_number_whole_ones() -> None:
    part, whole = shared(pod(container("a", gpu_memory=1024), container("b", gpu_number=2)))
    assert (part.count, part.memory.size_bytes) == (1, 1 << 30)
    assert whole.count == 2
    assert whole.memory.part == 1
    assert whole.compute.guarantee == 10_000


def test_gpu_memory_beside_gpu_number_is_refused() -> None:
    with pytest.raises(UsageError, match="a part of a GPU, and for whole GPUs"):
        shared(pod(container(gpu_memory=1024, gpu_number=2)))


def test_gpu_sharing_writes_indexes_and_reads_them() -> None:
    subject = pod(container("a", gpu_memory=1024), container("b", gpu_memory=1))
    expected = booking(
        has("a", PlacedDevice("GPU-b", 1 << 30)), has("b", PlacedDevice("GPU-b", MI), place=1)
    )
    dialect = VolcanoGpuShareDialect()
    record = dialect.result_annotations(subject, expected, NODE, now=2.5)
    assert record == {"volcano.sh/gpu-index": "1", "volcano.sh/predicate-time": "2500000000"}
    assert taken(dialect, replace(subject, annotations=record), INVENTORY) == expected
    whole = pod(container(gpu_number=2), gpu_index="0,1")
    found = taken(dialect, whole, INVENTORY)
    assert found is not None
    assert [each.memory for each in found.containers[0].devices] == [16 << 30, 8 << 30]
    with pytest.raises(UsageError, match="asks for 2 GPUs, and its record names 1"):
        taken(dialect, pod(container(gpu_number=2), gpu_index="0"), INVENTORY)

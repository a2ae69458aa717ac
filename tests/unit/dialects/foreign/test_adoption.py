# SPDX-License-Identifier: Apache-2.0
"""What other systems left on pods that they bound is booked, held to what these ask for."""

from fnmatch import fnmatchcase

import pytest
from foreign_pods import GI, INVENTORY, MI, outcome, texts
from hypothesis import given
from hypothesis import strategies as st

from allotment.dialects.foreign.adoption import adopted_usage, may_be_given, node_view
from allotment.dialects.foreign.base import DIALECT
from allotment.dialects.foreign.settings import NAMES, SYSTEMS, foreign_dialects
from allotment.model.clusters import PlacedContainer, PlacedDevice, PodBooking
from allotment.model.compute import WHOLE
from allotment.model.errors import UsageError
from allotment.model.pods import ContainerKind, ForeignContainer, ForeignPod, PodUid
from allotment.model.structs import replace

DIALECTS = foreign_dialects()
ALLOCATED = "hami.io/vgpu-devices-allocated"
UID = PodUid("uid-1")


def pod(
    annotations: dict[str, str],
    limits: dict[str, str] | None = None,
    *,
    labels: dict[str, str] | None = None,
    scheduler: str = "default-scheduler",
) -> ForeignPod:
    return ForeignPod(
        namespace="team",
        name="train-0",
        node="node-1",
        annotations=annotations,
        labels=labels or {},
        containers=(
            ForeignContainer(name="init", kind=ContainerKind.INIT),
            ForeignContainer(name="train", limits=limits or {"cpu": "1"}),
        ),
        scheduler=scheduler,
    )


HAMI = pod(
    {"hami.io/vgpu-node": "node-1", ALLOCATED: ";GPU-b,NVIDIA,100,30:;"},
    {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "100", "nvidia.com/gpucores": "30"},
)
RUNNING = {
    "hami": HAMI,
    "volcano": pod(
        {"volcano.sh/vgpu-node": "node-1", "volcano.sh/vgpu-ids-new": "GPU-b,NVIDIA,100,30:"},
        {"volcano.sh/vgpu-memory": "100", "volcano.sh/vgpu-cores": "30"},
    ),
    "volcano-gpushare": pod({"volcano.sh/gpu-index": "1"}, {"volcano.sh/gpu-memory": "100"}),
    "aliyun": pod(
        {"scheduler.framework.gpushare.allocation": '{"0":{"1":1}}'}, {"aliyun.com/gpu-mem": "1"}
    ),
    "tencent": pod(
        {"tencent.com/predicate-gpu-idx-0": "1", "tencent.com/predicate-node": "node-1"},
        {"tencent.com/vcuda-core": "30", "tencent.com/vcuda-memory": "4"},
    ),
    "elastic-gpu": pod({"elasticgpu.io/container-train": "1"}, {"elasticgpu.io/gpu-memory": "100"}),
    "kai": pod(
        {
            "nvidia.com/container.train.gpu-memory.limit": "1Gi",
            "nvidia.com/container.train.gpus.devices": "GPU-b",
        },
        scheduler="kai-scheduler",
    ),
}
HAS = {
    "hami": (100 * MI, 3000),
    "volcano": (100 * MI, 3000),
    "volcano-gpushare": (100 * MI, 0),
    "aliyun": (GI, 0),
    "tencent": (GI, 3000),
    "elastic-gpu": (100 * MI, 0),
    "kai": (GI, 0),
}


def books(subject: ForeignPod, **options: tuple[str, ...]) -> PodBooking | None:
    return adopted_usage(subject, INVENTORY, DIALECTS, uid=UID, **options)


@pytest.mark.parametrize("system", SYSTEMS)
def test_what_another_system_gave_is_booked_where_it_is_named(system: str) -> None:
    subject = RUNNING[system]
    train = PlacedContainer(name="train", devices=(PlacedDevice("GPU-b", *HAS[system]),), place=1)
    expected = PodBooking(uid=UID, node="node-1", containers=(train,))
    assert books(subject, systems=(system,)) == expected
    others = tuple(each for each in SYSTEMS if each != system)
    with pytest.raises(UsageError, match="such pods are not counted") as told:
        books(subject, systems=others)
    assert f"--take-over {system}" in str(told.value.hint)
    names = (*subject.annotations, *subject.labels)
    assert may_be_given(subject.containers[1].limits, names)


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_record_alone_gives_nothing(system: str) -> None:
    """Anybody may write annotations and labels on a pod; what is fixed is what it was made as."""
    subject = RUNNING[system]
    bare = tuple(replace(each, limits={"cpu": "10m"}) for each in subject.containers)
    marks = {**subject.annotations, "kubeshare/x": "y", "kai.scheduler/queue": "team"}
    forged = replace(
        subject, containers=bare, scheduler="default-scheduler", annotations=marks,
        labels={**subject.labels, "kai.scheduler/queue": "team"},
    )  # fmt: skip
    assert books(forged) is None
    assert books(replace(forged, scheduler="hami-scheduler")) is None


@pytest.mark.parametrize("system", SYSTEMS)
def test_where_it_is_stands_in_its_records_and_nowhere_else(system: str) -> None:
    """The admission policy holds these, and no other annotation."""
    subject = RUNNING[system]
    (dialect,) = (each for each in DIALECTS if each.name == system)
    records = dialect.records
    kept = {
        key: text
        for key, text in subject.annotations.items()
        if any(fnmatchcase(key, each) for each in records)
    }
    view = node_view(INVENTORY)
    (given_,) = dialect.given(replace(subject, annotations=kept), view)["train"]
    assert (given_ if isinstance(given_, str) else given_.uuid) == "GPU-b"
    bare = {key: text for key, text in subject.annotations.items() if key not in kept}
    assert not dialect.given(replace(subject, annotations=bare), view)


def test_nothing_is_taken_over_of_ours_or_of_other_nodes() -> None:
    ours = replace(HAMI, annotations={**HAMI.annotations, DIALECT: "hami"})
    elsewhere = replace(INVENTORY, name="node-2")
    assert books(ours) is None
    assert adopted_usage(HAMI, elsewhere, DIALECTS, uid=UID) is None
    assert books(replace(HAMI, node="")) is None
    assert books(replace(HAMI, annotations={})) is None


def test_a_record_that_cannot_be_read_is_told() -> None:
    broken = {**HAMI.annotations, ALLOCATED: "x"}
    with pytest.raises(UsageError, match="pod team/train-0: the annotation hami"):
        books(replace(HAMI, annotations=broken))


def test_systems_of_which_nothing_can_be_read_cannot_be_named() -> None:
    assert {*SYSTEMS} == {*NAMES} - {*("qgpu", "kubeshare", "kubeshare-2", "deepomatic", "nvidia")}


def test_a_system_that_creates_pods_with_records_is_not_believed() -> None:
    """So may anybody who has a controller create them."""
    labels = {"sharedgpu/gpu_limit": "1.0", "sharedgpu/gpu_request": "0.5"}
    theirs = pod({"sharedgpu/gpu_uuid": "GPU-b"}, labels=labels, scheduler="kubeshare-scheduler")
    for systems in (SYSTEMS, NAMES):
        with pytest.raises(UsageError, match=r"KubeShare 2\.0.*which any user can forge") as told:
            books(theirs, systems=systems)
        assert "end it" in str(told.value.hint)
    assert books(replace(theirs, scheduler="default-scheduler")) is None


RECORDS = st.one_of(
    texts,
    st.builds(
        lambda uuid, memory, percent: f"{uuid},NVIDIA,{memory},{percent}:;",
        st.sampled_from(["GPU-a", "GPU-b", "GPU-x"]), texts, texts,
    ),
    st.builds(lambda index, units: f'{{"0":{{"{index}":{units}}}}}', st.integers(0, 9), texts),
)  # fmt: skip
KEYS = sorted({key for each in RUNNING.values() for key in each.annotations if key != "x"} - {
    "nvidia.com/container.train.gpu-memory.limit"})  # fmt: skip


@pytest.mark.parametrize("system", SYSTEMS)
@given(records=st.dictionaries(st.sampled_from(KEYS), RECORDS, max_size=4))
def test_no_record_is_believed_beyond_what_is_asked_for(
    system: str, records: dict[str, str]
) -> None:
    subject = RUNNING[system]
    subject = replace(subject, annotations={**subject.annotations, **records})
    found = outcome(lambda: books(subject))
    if isinstance(found, PodBooking):
        ((part,),) = (each.devices for each in found.containers)
        assert part.uuid in node_view(INVENTORY).memory_bytes
        memory, guarantee = HAS[system]
        if system == "volcano":
            assert memory <= part.memory <= node_view(INVENTORY).memory_bytes[part.uuid]
            assert guarantee <= part.guarantee <= WHOLE
        else:
            assert (part.memory, part.guarantee) == (memory, guarantee)

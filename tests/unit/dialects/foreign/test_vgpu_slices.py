# SPDX-License-Identifier: Apache-2.0
"""Slices in HAMi's and Volcano's records: written, read back, and what is no record refused."""

from __future__ import annotations

import json

import pytest
from foreign_pods import check_take_over, load_settings, outcome, taken, texts
from hypothesis import given
from hypothesis import strategies as st
from mig_profiles import piece, profiles

from allotment.dialects.foreign.adoption import node_view
from allotment.dialects.foreign.base import ForeignDialect
from allotment.dialects.foreign.hami import HamiDialect
from allotment.dialects.foreign.mig_geometries import groups_from
from allotment.dialects.foreign.settings import mig_groups_of
from allotment.dialects.foreign.volcano import VolcanoDialect
from allotment.model.clusters import (
    NodeDevice,
    NodeInventory,
    NodeMig,
    PlacedContainer,
    PlacedDevice,
    PodBooking,
)
from allotment.model.errors import UsageError
from allotment.model.mig import MigHold, MigPlace
from allotment.model.pods import ForeignContainer, ForeignPod, PodUid
from allotment.model.structs import replace

MI = 1 << 20
MODEL = "A100-40GB"
PROFILES = profiles(MODEL)
SIZES = {each.name: each.memory_bytes for each in PROFILES}
HELD = [
    piece(MODEL, "1g.5gb", 2, hold=MigHold.FOREIGN),
    piece(MODEL, "2g.10gb", 0, hold=MigHold.FOREIGN),
    piece(MODEL, "1g.5gb", 5, hold=MigHold.FOREIGN),
    piece(MODEL, "1g.5gb", 6, hold=MigHold.IDLE),
]
INVENTORY = NodeInventory(
    name="node-1",
    devices=tuple(
        NodeDevice(
            uuid=uuid,
            model="NVIDIA A100-SXM4-40GB",
            memory_bytes=40_960 * MI,
            modes=("mig", "soft"),
            mig=NodeMig(profiles=PROFILES, slices=tuple(slices), is_enabled=is_enabled),
        )
        for uuid, slices, is_enabled in (
            ("GPU-a", HELD, True),
            ("GPU-b", [], True),
            ("GPU-off", [], False),
        )
    ),
)
NODE = node_view(INVENTORY)
VOLCANO = """
volcano:
  knownMigGeometries:
  - models: [A30]
    allowedGeometries:
    - {group: group1, geometries: [{name: 1g.6gb, memory: 6144, count: 4}]}
  - models: [A100-SXM4-40GB, A100-PCIE-40GB]
    allowedGeometries:
    - {group: group1, geometries: [{name: 1g.5gb, memory: 5120, count: 7}]}
    - group: group2
      geometries:
      - {name: 2g.10gb, memory: 10240, count: 3}
      - {name: 1g.5gb, memory: 5120, count: 1}
"""
HAMI = """
hami:
  knownMigGeometries:
  - models: [A100-SXM4-40GB]
    allowedGeometries:
    - - {name: 1g.5gb, memory: 5120, count: 7}
    - - {name: 2g.10gb, memory: 10240, count: 3}
      - {name: 1g.5gb, memory: 5120, count: 1}
"""


def hami(text: str = HAMI) -> HamiDialect:
    return HamiDialect(load_settings(text).sections.get("hami"))  # type: ignore[arg-type]


def volcano(text: str = VOLCANO) -> VolcanoDialect:
    return VolcanoDialect(load_settings(text).sections.get("volcano"))  # type: ignore[arg-type]


def container(name: str = "train", /, **limits: int) -> ForeignContainer:
    names = {"gpu": "nvidia.com/gpu", "mem": "nvidia.com/gpumem"}
    names |= {"number": "volcano.sh/vgpu-number", "memory": "volcano.sh/vgpu-memory"}
    return ForeignContainer(
        name=name, limits={names[key]: str(amount) for key, amount in limits.items()}
    )


def pod(*containers: ForeignContainer, **annotations: str) -> ForeignPod:
    keys = {"hami": "hami.io/vgpu-devices-allocated", "volcano": "volcano.sh/vgpu-ids-new"}
    keys |= {"mig": "hami.io/vgpu-mig-allocations"}
    keys |= {"hami_mode": "nvidia.com/vgpu-mode", "volcano_mode": "volcano.sh/vgpu-mode"}
    return ForeignPod(
        namespace="team",
        name="train-0",
        node="node-1",
        containers=containers,
        annotations={
            "hami.io/vgpu-node": "node-1",
            "volcano.sh/vgpu-node": "node-1",
            **{keys[key]: text for key, text in annotations.items()},
        },
    )


def booking(**parts: list[PlacedDevice]) -> PodBooking:
    return PodBooking(
        uid=PodUid(""),
        node="node-1",
        containers=tuple(
            PlacedContainer(name=name, devices=tuple(devices), place=place, mode="mig")
            for place, (name, devices) in enumerate(parts.items())
        ),
    )


def cut(profile: str, start: int, uuid: str = "GPU-a") -> PlacedDevice:
    return PlacedDevice(uuid, SIZES[profile], 0, MigPlace(profile, start))


# ---- groups in the settings ----------------------------------------------------------------------


def test_groups_are_read_as_both_write_them() -> None:
    (volcanos,) = mig_groups_of(load_settings(VOLCANO)).values()
    assert [[group.name for group in each.groups] for each in volcanos] == [
        ["group1"],
        ["group1", "group2"],
    ]
    ((hamis,),) = mig_groups_of(load_settings(HAMI)).values()
    assert [group.name for group in hamis.groups] == ["0", "1"]
    assert hamis.groups[1].counts == {"2g.10gb": 3, "1g.5gb": 1}
    assert mig_groups_of(load_settings("")) == {}
    assert groups_from(()) == ()


@pytest.mark.parametrize(
    "geometry",
    [
        "{}",
        "[]",
        "[{}]",
        "[{models: [], allowedGeometries: []}]",
        "[{models: [A], allowedGeometries: [[]]}]",
        "[{models: [A], allowedGeometries: [{group: 'a[', geometries: [{name: 1g.5gb}]}]}]",
        "[{models: [A], allowedGeometries: [[{name: x, memory: 1, count: 1}]]}]",
        "[{models: [A], allowedGeometries: [[{name: 1g.5gb, memory: 0, count: 1}]]}]",
        "[{models: [A], allowedGeometries: [[{name: 1g.5gb, memory: 1, count: 1000}]]}]",
    ],
)
@pytest.mark.parametrize("name", ["hami", "volcano"])
def test_groups_that_are_none_are_refused(name: str, geometry: str) -> None:
    if geometry == "[]":
        assert mig_groups_of(load_settings(f"{name}: {{knownMigGeometries: []}}")) == {}
        return
    with pytest.raises(UsageError) as refused:
        load_settings(f"{name}: {{knownMigGeometries: {geometry}}}")
    assert refused.value.hint


NAMES = ["1g.5gb", "1g.10gb+me", "1g.12gb-me", "1g.24gb+me.all", "2g.48gb+gfx"]
NO_NAMES = ["1g.5gbzzz!!", "1g.5gb+", "1g.5gb+me!", '"1g.5gb\\n"', '"1g.5gb 2g.10gb"', "x1g.5gb"]


@pytest.mark.parametrize("name", [*NAMES, *NO_NAMES])
def test_profiles_are_listed_by_whole_names(name: str) -> None:
    geometry = f"{{name: {name}, memory: 1, count: 1}}"
    for text in (
        f"{{migProfileAllowlist: [{{models: [A], profiles: [{name}]}}]}}",
        f"{{knownMigGeometries: [{{models: [A], allowedGeometries: [[{geometry}]]}}]}}",
    ):
        if name in NAMES:
            assert mig_groups_of(load_settings(f"hami: {text}"))
        else:
            with pytest.raises(UsageError):
                load_settings(f"hami: {text}")


# ---- written -------------------------------------------------------------------------------------


def test_volcanos_record_names_places_in_groups() -> None:
    subject = pod(container(number=2, memory=5120), container("other", number=1, memory=10240))
    its = booking(train=[cut("1g.5gb", 0), cut("1g.5gb", 6)], other=[cut("2g.10gb", 4)])
    record = volcano().result_annotations(subject, its, NODE, now=0)["volcano.sh/vgpu-ids-new"]
    assert record == (
        "GPU-a[group1-0],NVIDIA,4864,0:GPU-a[group1-6],NVIDIA,4864,0:;"
        "GPU-a[group2-2],NVIDIA,9856,0:"
    )


def test_without_groups_and_for_profiles_that_are_in_none_it_is_the_gpu() -> None:
    subject = pod(container(number=1, memory=5120))
    for dialect in (volcano(""), volcano()):
        its = booking(train=[cut("3g.20gb", 4)])
        record = dialect.result_annotations(subject, its, NODE, now=0)["volcano.sh/vgpu-ids-new"]
        assert record.startswith("GPU-a,NVIDIA,")


def test_hamis_record_says_where_slices_are() -> None:
    subject = pod(container("web"), container(gpu=2, mem=4000))
    its = booking(train=[cut("1g.5gb", 3), cut("2g.10gb", 0, "GPU-b")])
    found = hami("").result_annotations(subject, its, NODE, now=0)
    assert found["hami.io/vgpu-devices-allocated"] == (";GPU-a,NVIDIA,4864,0:GPU-b,NVIDIA,9856,0:;")
    assert json.loads(found["hami.io/vgpu-mig-allocations"]) == [
        {
            "containerIndex": 1,
            "deviceIndex": 0,
            "gpuUUID": "GPU-a",
            "profile": "1g.5gb",
            "placement": {"start": 3, "size": 1},
        },
        {
            "containerIndex": 1,
            "deviceIndex": 1,
            "gpuUUID": "GPU-b",
            "profile": "2g.10gb",
            "placement": {"start": 0, "size": 2},
        },
    ]
    named = hami().result_annotations(subject, its, NODE, now=0)["hami.io/vgpu-devices-allocated"]
    assert named == ";GPU-a[0-3],NVIDIA,4864,0:GPU-b[1-0],NVIDIA,9856,0:;"


# ---- read back -----------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["GPU-a", "GPU-b"]), st.sampled_from(PROFILES), st.integers(0, 6)
        ),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([HAMI, ""]),
)
def test_what_hami_is_told_is_taken_over(parts: list[tuple[str, object, int]], text: str) -> None:
    devices = []
    for uuid, profile, number in parts:
        starts = profile.starts  # type: ignore[attr-defined]
        devices.append(cut(profile.name, starts[number % len(starts)], uuid))  # type: ignore[attr-defined]
    its = booking(train=devices)
    subject = pod(container(gpu=len(devices), mem=1), hami_mode="mig")
    record = hami(text).result_annotations(subject, its, NODE, now=0)
    running = replace(subject, annotations={**subject.annotations, **record})
    assert taken(hami(text), running, INVENTORY) == its


@pytest.mark.parametrize(
    ("position", "place"),
    [
        ("group1-0", MigPlace("1g.5gb", 2)),
        ("group1-1", MigPlace("1g.5gb", 5)),
        ("group1-4", MigPlace("1g.5gb", 2)),
        ("group2-0", MigPlace("2g.10gb", 0)),
        ("group2-3", MigPlace("1g.5gb", 2)),
        ("group9-0", None),
    ],
)
def test_a_place_in_a_group_is_one_of_the_slices_that_are_there(
    position: str, place: MigPlace | None
) -> None:
    subject = pod(container(number=1, memory=5000), volcano=f"GPU-a[{position}],NVIDIA,5000,0:")
    found = taken(volcano(), subject, INVENTORY)
    assert found is not None
    (only,) = found.containers
    assert only.mode == "mig"
    assert [each.slice for each in only.devices] == [place]


def test_a_slice_that_is_not_there_takes_all_of_the_gpu() -> None:
    for record in ("GPU-b[group1-0],NVIDIA,1,0:", "GPU-b,NVIDIA,1,0:"):
        subject = pod(container(number=1, memory=5000), volcano=record)
        assert taken(volcano(), subject, INVENTORY) == booking(
            train=[PlacedDevice("GPU-b", 5000 * MI)]
        )


def test_on_gpus_that_are_not_in_mig_mode_it_is_a_part_of_the_gpu() -> None:
    subject = pod(container(number=1, memory=5000), volcano="GPU-off,NVIDIA,1,0:")
    found = taken(volcano(), subject, INVENTORY)
    assert found is not None
    assert (found.containers[0].mode, found.containers[0].devices) == (
        "soft",
        (PlacedDevice("GPU-off", 5000 * MI),),
    )


@pytest.mark.parametrize(
    ("where", "place"),
    [
        ({"containerIndex": 0, "deviceIndex": 0, "gpuUUID": "GPU-a"}, MigPlace("1g.5gb", 3)),
        ({"containerIndex": 1, "deviceIndex": 0, "gpuUUID": "GPU-a"}, None),
        ({"containerIndex": 0, "deviceIndex": 1, "gpuUUID": "GPU-a"}, None),
        ({"containerIndex": 0, "deviceIndex": 0, "gpuUUID": "GPU-b"}, None),
        ({"profile": "9g.90gb"}, None),
        # The name that the administrator listed, which the driver does not have.
        ({"profile": "1g.6gb"}, MigPlace("1g.5gb", 3)),
        ({"placement": {"start": 7, "size": 1}}, None),
    ],
)
def test_an_allocation_counts_for_its_device_alone(
    where: dict[str, object], place: MigPlace | None
) -> None:
    its = {
        "containerIndex": 0,
        "deviceIndex": 0,
        "gpuUUID": "GPU-a",
        "profile": "1g.5gb",
        "placement": {"start": 3, "size": 1},
        "migUUID": "MIG-1",
        "gpuInstanceID": 7,
        "computeInstanceID": 0,
        **where,
    }
    subject = pod(container(gpu=1, mem=1000), hami="GPU-a,NVIDIA,1,0:;", mig=json.dumps([its]))
    found = taken(hami(), subject, INVENTORY)
    assert found is not None
    assert found.containers[0].devices[0].slice == place


@pytest.mark.parametrize(
    "text", ["x", "{}", "[1]", '[{"containerIndex": -1}]', "[" * 10_000, " " * 70_000]
)
def test_allocations_that_cannot_be_read_are_refused(text: str) -> None:
    subject = pod(container(gpu=1, mem=1000), hami="GPU-a,NVIDIA,1,0:;", mig=text)
    with pytest.raises(UsageError, match=r"hami\.io/vgpu-mig-allocations") as refused:
        taken(hami(), subject, INVENTORY)
    assert refused.value.message.startswith("pod team/train-0: ")
    assert len(refused.value.message) < 400


def test_a_device_that_is_allocated_twice_is_refused() -> None:
    its = {"containerIndex": 0, "deviceIndex": 0, "gpuUUID": "GPU-a", "profile": "1g.5gb"}
    text = json.dumps([{**its, "placement": {"start": each, "size": 1}} for each in (0, 1)])
    subject = pod(container(gpu=1, mem=1000), hami="GPU-a,NVIDIA,1,0:;", mig=text)
    with pytest.raises(UsageError, match="names a container's device twice"):
        taken(hami(), subject, INVENTORY)


def test_a_position_that_a_group_has_not_is_refused() -> None:
    subject = pod(container(number=1, memory=5), volcano="GPU-a[group1-7],NVIDIA,1,0:")
    with pytest.raises(UsageError, match="no slice at position 7"):
        taken(volcano(), subject, INVENTORY)


PIECES = st.sampled_from(
    ["GPU-a", "GPU-b", "[", "]", "group1", "0", "-", "1", ",", "NVIDIA", ":", ";", "{", "}", '"']
)
RECORDS = st.lists(PIECES, max_size=12).map("".join) | texts
PLACES = st.builds(
    lambda one, other, start, profile: json.dumps(
        [
            {
                "containerIndex": one,
                "deviceIndex": other,
                "gpuUUID": "GPU-a",
                "profile": profile,
                "placement": {"start": start, "size": 1},
            }
        ]
    ),
    st.integers(-1, 3),
    st.integers(-1, 3),
    st.integers(-1, 99),
    texts,
)


@given(st.sampled_from([hami(), hami(""), volcano(), volcano("")]), RECORDS, PLACES | texts)
def test_whatever_stands_on_a_pod_is_read_or_refused(
    dialect: ForeignDialect, record: str, places: str
) -> None:
    subject = pod(
        container(gpu=1, mem=100, number=1, memory=100), hami=record, volcano=record, mig=places
    )
    found = outcome(lambda: taken(dialect, subject, INVENTORY))
    if isinstance(found, UsageError):
        assert str(subject) in found.message
        return
    check_take_over(dialect, subject)
    for each in found.containers if found is not None else ():
        for device in each.devices:
            assert device.uuid in NODE.memory_bytes
            if device.slice is not None:
                (profile,) = (one for one in PROFILES if one.name == device.slice.profile)
                assert device.slice.start in profile.starts

# SPDX-License-Identifier: Apache-2.0
"""`allotment.agent.labels.features`: a node's labels, beside those that NVIDIA documents."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allotment.agent.config.schema import Config, ReplicatedResource, Replication
from allotment.agent.labels.features import OWNED_PREFIXES, node_features
from allotment.agent.labels.publisher import written
from allotment.agent.resources import Offer
from allotment.devices.facts import DeviceFacts, FabricPlace, NodeFacts, VgpuHost
from allotment.devices.sources import Problem
from allotment.model.structs import replace

if TYPE_CHECKING:
    from tests.unit.agent.labels.conftest import Scene

GOLDEN = Path(__file__).parent / "golden"
CLUSTER = "7b968a6d-c8aa-45e1-9e07-e1e51be99c31"
OURS = "allotment.dev/"

# docs.nvidia.com, "MIG Support in Kubernetes": the node with an A100 and the driver 450.80.02.
A100_450 = {
    "nvidia.com/cuda.driver.major": "450",
    "nvidia.com/cuda.driver.minor": "80",
    "nvidia.com/cuda.driver.rev": "02",
    "nvidia.com/cuda.runtime.major": "11",
    "nvidia.com/cuda.runtime.minor": "0",
    "nvidia.com/gpu.compute.major": "8",
    "nvidia.com/gpu.compute.minor": "0",
    "nvidia.com/gpu.count": "1",
    "nvidia.com/gpu.family": "ampere",
    "nvidia.com/gpu.machine": "NVIDIA-DGX",
    "nvidia.com/gpu.memory": "40537",
    "nvidia.com/gpu.product": "A100-SXM4-40GB",
}


def holds(labels: Mapping[str, str], expected: Mapping[str, str]) -> bool:
    return {key: labels.get(key) for key in expected} == dict(expected)


def a100_450(*devices: DeviceFacts) -> NodeFacts:
    return NodeFacts(driver_version="450.80.02", cuda_version=(11, 0), devices=devices)


@pytest.fixture
def old_a100(scene: Scene) -> DeviceFacts:
    return replace(scene.mock, name="A100-SXM4-40GB", memory_mib=40537, is_mig_capable=True)


# ---- what NVIDIA documents -----------------------------------------------------------------------


def test_two_a100_have_all_labels_to_the_byte(scene: Scene) -> None:
    devices = scene.gpus("a100-80gb", 2)
    features = scene.features(
        *devices, offer=scene.offer(devices), machine_type="PowerEdge R7525\n"
    )
    assert written(features.labels) == (GOLDEN / "a100-80gb-2.txt").read_text()
    assert features.notes == ()


def test_a_node_of_nvidias_readme(scene: Scene) -> None:
    device = replace(scene.mock, name="A100-SXM4-40GB", memory_mib=39538)
    facts = NodeFacts(driver_version="455.06", cuda_version=(11, 1), devices=(device,))
    labels = scene.features(facts=facts, machine_type="NVIDIA DGX-2H").labels
    assert holds(
        labels,
        {
            "nvidia.com/cuda.driver.major": "455",
            "nvidia.com/cuda.driver.minor": "06",
            "nvidia.com/cuda.driver.rev": "",
            "nvidia.com/cuda.runtime.major": "11",
            "nvidia.com/cuda.runtime.minor": "1",
            "nvidia.com/gpu.compute.major": "8",
            "nvidia.com/gpu.compute.minor": "0",
            "nvidia.com/gfd.timestamp": "1594644571",
            "nvidia.com/gpu.count": "1",
            "nvidia.com/gpu.family": "ampere",
            "nvidia.com/gpu.machine": "NVIDIA-DGX-2H",
            "nvidia.com/gpu.memory": "39538",
            "nvidia.com/gpu.product": "A100-SXM4-40GB",
        },
    )


@pytest.mark.parametrize(
    ("name", "product"),
    [("nvidia.com/gpu", "Tesla-T4-SHARED"), ("nvidia.com/gpu.shared", "Tesla-T4")],
    ids=["renameByDefault: false", "renameByDefault: true"],
)
def test_time_sliced_t4_of_the_operators_guide(scene: Scene, name: str, product: str) -> None:
    devices = scene.gpus("t4", 4)
    labels = scene.features(*devices, offer=scene.offer(devices, replicas=4, name=name)).labels
    assert holds(
        labels,
        {
            "nvidia.com/gpu.count": "4",
            "nvidia.com/gpu.product": product,
            "nvidia.com/gpu.replicas": "4",
            "nvidia.com/gpu.sharing-strategy": "time-slicing",
            "allotment.dev/gpu.mode.timeslice": "4",
        },
    )


def test_mig_strategy_none_tells_of_the_whole_gpu(scene: Scene, old_a100: DeviceFacts) -> None:
    facts = a100_450(scene.split(old_a100))
    labels = scene.features(facts=facts, machine_type="NVIDIA DGX").labels
    assert holds(labels, {**A100_450, "nvidia.com/gpu.replicas": "0"})
    assert not any(key.startswith("nvidia.com/mig-") for key in labels)
    assert "nvidia.com/mig.strategy" not in labels


def test_mig_strategy_single_tells_of_the_mig_devices(scene: Scene, old_a100: DeviceFacts) -> None:
    one = scene.mig("1g.5gb", 4864, gi=1, ci=1, figures="14 1 0 0 0 0")
    facts = a100_450(scene.split(old_a100, *[one] * 7))
    features = scene.features(
        facts=facts, config=Config(mig_strategy="single"), machine_type="NVIDIA DGX"
    )
    assert holds(
        features.labels,
        {
            **A100_450,
            "nvidia.com/gpu.count": "7",
            "nvidia.com/gpu.replicas": "1",
            "nvidia.com/gpu.engines.copy": "1",
            "nvidia.com/gpu.engines.decoder": "0",
            "nvidia.com/gpu.engines.encoder": "0",
            "nvidia.com/gpu.engines.jpeg": "0",
            "nvidia.com/gpu.engines.ofa": "0",
            "nvidia.com/gpu.memory": "4864",
            "nvidia.com/gpu.multiprocessors": "14",
            "nvidia.com/gpu.product": "A100-SXM4-40GB-MIG-1g.5gb",
            "nvidia.com/gpu.slices.ci": "1",
            "nvidia.com/gpu.slices.gi": "1",
            "nvidia.com/mig.strategy": "single",
        },
    )
    assert features.notes == ()


def test_mig_strategy_mixed_tells_of_each_profile(scene: Scene, old_a100: DeviceFacts) -> None:
    facts = a100_450(
        scene.split(
            old_a100,
            scene.mig("3g.20gb", 20096, gi=3, ci=3, figures="42 3 2 0 0 0"),
            scene.mig("2g.10gb", 9984, gi=2, ci=2, figures="28 2 1 0 0 0"),
            scene.mig("1g.5gb+me", 4864, gi=1, ci=1, figures="14 1 1 0 1 1"),
        )
    )
    labels = scene.features(
        facts=facts, config=Config(mig_strategy="mixed"), machine_type="NVIDIA DGX"
    ).labels
    assert holds(labels, {**A100_450, "nvidia.com/mig.strategy": "mixed"})
    assert holds(
        labels,
        {
            "nvidia.com/mig-2g.10gb.count": "1",
            "nvidia.com/mig-2g.10gb.engines.copy": "2",
            "nvidia.com/mig-2g.10gb.engines.decoder": "1",
            "nvidia.com/mig-2g.10gb.engines.encoder": "0",
            "nvidia.com/mig-2g.10gb.memory": "9984",
            "nvidia.com/mig-2g.10gb.multiprocessors": "28",
            "nvidia.com/mig-2g.10gb.product": "A100-SXM4-40GB-MIG-2g.10gb",
            "nvidia.com/mig-2g.10gb.replicas": "1",
            "nvidia.com/mig-2g.10gb.sharing-strategy": "none",
            "nvidia.com/mig-2g.10gb.slices.ci": "2",
            "nvidia.com/mig-2g.10gb.slices.gi": "2",
            "nvidia.com/mig-3g.20gb.memory": "20096",
            "nvidia.com/mig-1g.5gb.me.product": "A100-SXM4-40GB-MIG-1g.5gb.me",
        },
    )


# ---- several models, and what cannot be told -----------------------------------------------------


def test_of_several_models_the_last_has_nvidias_labels_and_ours_count_each(scene: Scene) -> None:
    devices = (*scene.gpus("a100-80gb", 3), *scene.gpus("t4", first=3))
    features = scene.features(*devices, offer=scene.offer(devices))
    assert holds(
        features.labels,
        {
            "nvidia.com/gpu.product": "Tesla-T4",
            "nvidia.com/gpu.count": "1",
            "nvidia.com/gpu.memory": "15360",
            "nvidia.com/mig.capable": "true",
            "allotment.dev/gpu.model.NVIDIA-A100-SXM4-80GB": "3",
            "allotment.dev/gpu.model.Tesla-T4": "1",
        },
    )
    (note,) = features.notes
    assert note.startswith("Multiple device types detected: [NVIDIA A100-SXM4-80GB Tesla T4]")


def test_gpus_offered_under_a_name_of_their_own_have_labels_of_their_own(scene: Scene) -> None:
    big, small = scene.gpus("a100-80gb", 2), scene.gpus("t4", first=2)
    both = Offer(
        resources=(
            *scene.offer(big, name="nvidia.com/a100", family="nvidia.com/a100").resources,
            *scene.offer(small, replicas=3).resources,
        )
    )
    labels = scene.features(*big, *small, offer=both).labels
    assert holds(
        labels,
        {
            "nvidia.com/a100.product": "NVIDIA-A100-SXM4-80GB",
            "nvidia.com/a100.count": "2",
            "nvidia.com/a100.replicas": "1",
            "nvidia.com/gpu.product": "Tesla-T4-SHARED",
            "nvidia.com/gpu.replicas": "3",
        },
    )


def test_soft_gpus_that_nvidias_resource_does_not_offer_are_not_shared_by_it(scene: Scene) -> None:
    devices = scene.gpus("t4", 2)
    offer = Offer(modes={each.uuid: "soft" for each in devices})
    labels = scene.features(*devices, offer=offer).labels
    assert holds(
        labels,
        {
            "nvidia.com/gpu.replicas": "1",
            "nvidia.com/gpu.product": "Tesla-T4",
            "allotment.dev/gpu.mode.soft": "2",
        },
    )


@pytest.mark.parametrize(
    ("classes", "mode"),
    [
        ((0x0302,), "compute"),
        ((0x0300, 0x0300), "graphics"),
        ((0x0680,), "unknown"),
        ((0x0302, 0x0300), "unknown"),
        ((0x0302, None), "unknown"),
    ],
)
def test_the_mode_is_the_pci_class(
    scene: Scene, classes: tuple[int | None, ...], mode: str
) -> None:
    devices = [replace(scene.mock, uuid=f"{at}", pci_class=it) for at, it in enumerate(classes)]
    assert scene.features(*devices).labels["nvidia.com/gpu.mode"] == mode


def test_the_clique_is_told_where_all_agree(scene: Scene) -> None:
    here = replace(scene.mock, fabric=FabricPlace(CLUSTER, 1))
    for there, expected, notes in (
        (replace(here, uuid="GPU-1"), f"{CLUSTER}.1", 0),
        (replace(here, uuid="GPU-1", fabric=None), f"{CLUSTER}.1", 0),
        (replace(here, uuid="GPU-1", fabric=FabricPlace(CLUSTER, 2)), None, 1),
        (replace(here, uuid="GPU-1", fabric=FabricPlace("0", 1)), None, 1),
    ):
        features = scene.features(here, there)
        assert features.labels.get("nvidia.com/gpu.clique") == expected
        assert len(features.notes) == notes


def test_a_virtual_gpu_tells_of_its_host(scene: Scene) -> None:
    guest = replace(scene.mock, vgpu_host=VgpuHost("580.126.08", "r582_12"))
    assert holds(
        scene.features(guest).labels,
        {
            "nvidia.com/vgpu.present": "true",
            "nvidia.com/vgpu.host-driver-version": "580.126.08",
            "nvidia.com/vgpu.host-driver-branch": "r582_12",
        },
    )


def test_mps_is_told_of_and_not_together_with_mig(scene: Scene) -> None:
    mps = Replication(resources=(ReplicatedResource(name="nvidia.com/gpu", replicas=2),))
    config = Config(mps=mps)
    shared = scene.features(scene.mock, config=config)
    assert holds(
        shared.labels,
        {
            "nvidia.com/mps.capable": "true",
            "nvidia.com/gpu.sharing-strategy": "mps",
            "nvidia.com/gpu.product": "MOCKMODEL-SHARED",
        },
    )
    with_mig = scene.features(scene.split(scene.mock), config=config)
    assert with_mig.labels["nvidia.com/mps.capable"] == "false"
    assert with_mig.notes == ("MPS sharing is not supported for mig devices",)


def test_a_driver_of_another_shape_costs_its_own_labels_only(scene: Scene) -> None:
    facts = NodeFacts(driver_version="N/A", cuda_version=(13, 0), devices=(scene.mock,))
    features = scene.features(facts=facts)
    assert not any(key.startswith("nvidia.com/cuda.driver") for key in features.labels)
    assert features.labels["nvidia.com/gpu.count"] == "1"
    assert 'does not match format "X.Y[.Z]"' in features.notes[0]


def test_a_node_without_gpus_has_a_machine_and_a_time(scene: Scene) -> None:
    assert dict(scene.features(machine_type="KVM").labels) == {
        "nvidia.com/gfd.timestamp": "1594644571",
        "nvidia.com/gpu.machine": "KVM",
        "nvidia.com/vgpu.present": "false",
    }


def test_no_timestamp_where_none_is_wanted(scene: Scene) -> None:
    facts = NodeFacts(driver_version="580.95.05", cuda_version=(13, 0), devices=(scene.mock,))
    features = node_features(facts, offer=Offer(), config=Config(), machine_type="unknown")
    assert "nvidia.com/gfd.timestamp" not in features.labels


def test_gpus_that_do_not_answer_are_told(scene: Scene) -> None:
    facts = NodeFacts(
        driver_version="580.95.05",
        cuda_version=(13, 0),
        devices=(scene.mock,),
        problems=(
            Problem(0, scene.mock.uuid, "it has not answered in time"),
            Problem(3, None, "NVML: GPU is lost"),
        ),
    )
    assert scene.features(facts=facts).notes == (
        "GPU 0 (GPU-mock): it has not answered in time; its labels are as they were",
        "GPU 3 (unknown): NVML: GPU is lost; its labels are missing",
    )


def test_mig_devices_that_were_not_read_make_no_node_invalid(scene: Scene) -> None:
    unread = replace(scene.split(scene.mock), mig_devices=None)
    features = scene.features(unread, config=Config(mig_strategy="single"))
    assert features.labels["nvidia.com/mig.strategy"] == "single"
    assert features.labels["nvidia.com/gpu.product"] == "MOCKMODEL"
    assert features.notes == ("MIG devices are unknown: labels describe whole GPUs only",)


# ---- for all nodes -------------------------------------------------------------------------------

_TEXTS = st.text(alphabet=st.characters(codec="utf-8"), max_size=90)
_DEVICES = st.lists(
    st.builds(
        DeviceFacts,
        uuid=st.sampled_from(["GPU-a", "GPU-b", "GPU-c"]),
        name=_TEXTS,
        memory_mib=st.integers(0, 1 << 20),
        compute_capability=st.none() | st.tuples(st.integers(1, 14), st.integers(0, 9)),
        pci_class=st.none() | st.integers(0, 0xFFFF),
        is_mig_capable=st.booleans(),
        is_mig_enabled=st.booleans(),
        mig_devices=st.none() | st.just(()),
        fabric=st.none() | st.builds(FabricPlace, _TEXTS, st.integers(0, 9)),
        vgpu_host=st.none() | st.builds(VgpuHost, _TEXTS, _TEXTS),
    ),
    max_size=4,
    unique_by=lambda each: each.uuid,
)


@given(_DEVICES, _TEXTS, _TEXTS, st.sampled_from(["none", "single", "mixed"]))
def test_any_node_has_labels_that_are_ours_to_set(
    devices: list[DeviceFacts], driver: str, machine_type: str, strategy: str
) -> None:
    facts = NodeFacts(driver_version=driver, cuda_version=(13, 0), devices=tuple(devices))
    features = node_features(
        facts, offer=Offer(), config=Config(mig_strategy=strategy), machine_type=machine_type
    )
    assert all(key.startswith(OWNED_PREFIXES) for key in features.labels)
    assert list(features.labels) == sorted(features.labels)
    again = node_features(
        facts, offer=Offer(), config=Config(mig_strategy=strategy), machine_type=machine_type
    )
    assert again == features

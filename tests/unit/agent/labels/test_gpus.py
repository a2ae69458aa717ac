# SPDX-License-Identifier: Apache-2.0
"""`allotment.agent.labels.features`: one resource's labels, by the tables of NVIDIA's own tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from allotment.agent.config.schema import Config, ReplicatedResource, Replication
from allotment.agent.labels.features import UNSHARED, architecture_family, sharing_of
from allotment.agent.resources import Offer
from allotment.devices.model_facts import Architecture
from allotment.devices.models import MODELS
from allotment.model.structs import replace

if TYPE_CHECKING:
    from tests.unit.agent.labels.conftest import Scene

ZEROS = "0 0 0 0 0 0"
ARCHITECTURE = {
    "nvidia.com/gpu.family": "ampere",
    "nvidia.com/gpu.compute.major": "8",
    "nvidia.com/gpu.compute.minor": "0",
}
SHARED_BY_TWO = Config(
    time_slicing=Replication(resources=(ReplicatedResource(name="nvidia.com/gpu", replicas=2),))
)
RENAMED = Config(
    time_slicing=Replication(
        resources=(ReplicatedResource(name="nvidia.com/gpu", replicas=2),), rename_by_default=True
    )
)
INVALID = {
    "nvidia.com/gpu.count": "0",
    "nvidia.com/gpu.replicas": "0",
    "nvidia.com/gpu.memory": "0",
    "nvidia.com/gpu.sharing-strategy": "",
    "nvidia.com/gpu.product": "MOCKMODEL-MIG-INVALID",
    "nvidia.com/mig.strategy": "single",
}


def whole(
    product: str, *, count: int = 1, replicas: int = 1, strategy: str = "none"
) -> dict[str, str]:
    """The labels of NVIDIA's mock GPU but for its architecture."""
    return {
        "nvidia.com/gpu.count": str(count),
        "nvidia.com/gpu.replicas": str(replicas),
        "nvidia.com/gpu.sharing-strategy": strategy,
        "nvidia.com/gpu.memory": "300",
        "nvidia.com/gpu.product": product,
    }


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Config(), {**whole("MOCKMODEL"), **ARCHITECTURE}),
        (
            Config(
                time_slicing=Replication(
                    resources=(ReplicatedResource(name="nvidia.com/not-gpu", replicas=2),)
                )
            ),
            {**whole("MOCKMODEL"), **ARCHITECTURE},
        ),
        (
            SHARED_BY_TWO,
            {**whole("MOCKMODEL-SHARED", replicas=2, strategy="time-slicing"), **ARCHITECTURE},
        ),
        (
            RENAMED,
            {**whole("MOCKMODEL", replicas=2, strategy="time-slicing"), **ARCHITECTURE},
        ),
    ],
    ids=["no sharing", "of another resource", "shared", "renamed"],
)
def test_a_whole_gpu(scene: Scene, config: Config, expected: dict[str, str]) -> None:
    assert scene.resource_labels(scene.mock, config=config) == expected


def test_a_gpu_that_mig_splits_is_shared_by_nobody(scene: Scene) -> None:
    other = replace(scene.mock, uuid="GPU-other")
    blind = replace(scene.mock, compute_capability=None)  # as NVIDIA's mock of one
    one = scene.split(blind)
    assert scene.resource_labels(one, config=SHARED_BY_TWO) == whole("MOCKMODEL", replicas=0)
    both = scene.resource_labels(one, other, config=SHARED_BY_TWO)
    shared = whole("MOCKMODEL-SHARED", count=2, replicas=2, strategy="time-slicing")
    assert both == {**shared, **ARCHITECTURE}
    assert scene.resource_labels(other, one, config=SHARED_BY_TWO) == both


@pytest.mark.parametrize(
    ("name", "config", "product", "replicas"),
    [
        ("single", Config(), "MOCKMODEL-MIG-1g.300gb", "1"),
        ("single", SHARED_BY_TWO, "MOCKMODEL-MIG-1g.300gb-SHARED", "2"),
        ("single", RENAMED, "MOCKMODEL-MIG-1g.300gb", "2"),
        ("mixed", SHARED_BY_TWO, "MOCKMODEL-MIG-1g.300gb", "1"),
    ],
)
def test_a_mig_device(scene: Scene, name: str, config: Config, product: str, replicas: str) -> None:
    one = scene.split(scene.mock, scene.mig("1g.300gb", 300, gi=1, ci=2, figures=ZEROS))
    labels = scene.resource_labels(one, config=replace(config, mig_strategy=name))
    key = "nvidia.com/gpu" if name == "single" else "nvidia.com/mig-1g.300gb"
    assert labels[f"{key}.product"] == product
    assert labels[f"{key}.replicas"] == replicas
    assert labels[f"{key}.memory"] == "300"
    assert (labels[f"{key}.slices.gi"], labels[f"{key}.slices.ci"]) == ("1", "2")
    assert labels[f"{key}.multiprocessors"] == "0"
    assert {labels[f"{key}.engines.{each}"] for each in ("copy", "decoder", "jpeg", "ofa")} == {"0"}


def test_a_node_that_does_not_suit_single(scene: Scene) -> None:
    config = Config(mig_strategy="single")
    one = scene.mig("1g.100gb", 100, gi=1, ci=2, figures=ZEROS)
    other = scene.mig("3g.100gb", 100, gi=3, ci=4, figures=ZEROS)
    blind = replace(scene.mock, compute_capability=None)
    full = replace(scene.mock, uuid="GPU-full")
    empty = replace(blind, uuid="GPU-empty")
    for devices, extra, reason in (
        ((scene.split(blind),), {}, "enabled but empty"),
        ((scene.split(blind, one, other),), {}, "more than one MIG device type"),
        ((scene.split(blind, one), full), ARCHITECTURE, "MIG enabled and disable detected"),
        ((scene.split(blind, one), full, scene.split(empty)), ARCHITECTURE, "enabled but empty"),
    ):
        assert scene.resource_labels(*devices, config=config) == {**INVALID, **extra}
        (note,) = scene.features(*devices, config=config).notes
        assert note.startswith("Invalid configuration detected for mig-strategy=single: ")
        assert reason in note


def test_single_without_mig_is_as_none(scene: Scene) -> None:
    labels = scene.resource_labels(scene.mock, config=Config(mig_strategy="single"))
    assert labels == {**whole("MOCKMODEL"), **ARCHITECTURE, "nvidia.com/mig.strategy": "single"}


def test_what_is_offered_counts_more_than_what_was_configured(scene: Scene) -> None:
    devices = scene.gpus("t4", 2)
    offer = scene.offer(devices[:1], replicas=4)
    found = sharing_of("nvidia.com/gpu", offer=offer, config=SHARED_BY_TWO)
    assert (found.replicas, found.strategy, found.is_renamed) == (4, "time-slicing", False)
    elsewhere = frozenset({devices[1].uuid})
    assert (
        sharing_of("nvidia.com/gpu", offer=offer, config=SHARED_BY_TWO, devices=elsewhere)
        == UNSHARED
    )
    assert sharing_of("nvidia.com/x", offer=Offer(), config=SHARED_BY_TWO) == UNSHARED


@pytest.mark.parametrize(
    ("capability", "family"),
    [
        ((1, 3), "tesla"),
        ((2, 1), "fermi"),
        ((3, 7), "kepler"),
        ((4, 0), "undefined"),
        ((5, 2), "maxwell"),
        ((6, 1), "pascal"),
        ((7, 0), "volta"),
        ((7, 2), "volta"),
        ((7, 5), "turing"),
        ((8, 0), "ampere"),
        ((8, 6), "ampere"),
        ((8, 9), "ada-lovelace"),
        ((9, 0), "hopper"),
        ((10, 3), "blackwell"),
        ((11, 0), "undefined"),
        ((12, 0), "blackwell"),
        ((13, 0), "rubin"),
    ],
)
def test_families(capability: tuple[int, int], family: str) -> None:
    assert architecture_family(*capability) == family


def test_every_model_that_can_be_simulated_has_its_family() -> None:
    for model in MODELS.values():
        chip = model.core.architecture
        expected = "ada-lovelace" if chip is Architecture.ADA else chip.name.lower()
        assert architecture_family(*model.core.compute_capability) == expected

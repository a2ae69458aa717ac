# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's published configurations give the resources and labels that its documentation shows."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from gpus import gpu

from allotment.agent.config.holder import ChoiceRules, ConfigHolder, ConfigOutcome
from allotment.agent.config.schema import Config
from allotment.agent.labels.features import node_features
from allotment.agent.resources import Offer, plan
from allotment.devices.facts import DeviceFacts, NodeFacts
from allotment.devices.models import MODELS
from allotment.model.devices import Device

EXAMPLES = Path(__file__).parent / "examples"


@dataclass(frozen=True, slots=True)
class Node:
    """A node of NVIDIA's documentation."""

    gpus: tuple[Device, ...]

    def allocatable(self, config: Config) -> dict[str, int]:
        return {each.name: len(each.slots) for each in self.offer(config).resources}

    def offer(self, config: Config) -> Offer:
        return plan(self.gpus, {}, config)

    def labels(self, config: Config) -> Mapping[str, str]:
        facts = NodeFacts(
            driver_version="580.95.05",
            cuda_version=(13, 0),
            devices=tuple(
                DeviceFacts(uuid=each.uuid, name=each.name, memory_mib=each.memory_bytes >> 20)
                for each in self.gpus
            ),
        )
        features = node_features(facts, offer=self.offer(config), config=config, machine_type="")
        return features.labels


def node(model: str, count: int) -> Node:
    known = MODELS[model]
    return Node(
        tuple(
            gpu(
                index,
                uuid=f"GPU-{index:08x}-0000-4000-8000-000000000000",
                name=known.name,
                memory_bytes=known.memory_mib << 20,
                pci_bus_id=f"00000000:{index + 1:02X}:00.0",
            )
            for index in range(count)
        )
    )


def heard(example: str, label: str | None = None, default: str = "") -> ConfigOutcome:
    """Bring an example into force: a file, or a ConfigMap on a node with that label."""
    text = (EXAMPLES / f"{example}.yaml").read_text()
    holder = ConfigHolder(source="ConfigMap a/b", rules=ChoiceRules(default=default))
    document = yaml.safe_load(text)
    if "data" not in document:
        return holder.file_changed(text, path=example)
    holder.label_changed(label)
    return holder.data_changed(document["data"])


def config_of(example: str, label: str | None = None, default: str = "") -> Config:
    outcome = heard(example, label, default)
    assert outcome.problem is None
    assert outcome.config is not None
    return outcome.config


@pytest.mark.parametrize(
    ("example", "label", "gpus", "allocatable"),
    [
        ("plain", None, ("h100-80gb", 8), {"nvidia.com/gpu": 8}),
        ("plain-mixed", None, ("h100-80gb", 8), {"nvidia.com/gpu": 8}),
        ("shared-10", None, ("h100-80gb", 8), {"nvidia.com/gpu": 80}),
        ("shared-10-renamed", None, ("h100-80gb", 8), {"nvidia.com/gpu.shared": 80}),
        ("shared-10-strict", None, ("h100-80gb", 8), {"nvidia.com/gpu": 80}),
        ("mps-10", None, ("h100-80gb", 8), {"nvidia.com/gpu": 80}),
        ("time-slicing-config-all", None, ("t4", 4), {"nvidia.com/gpu": 16}),
        ("time-slicing-config-all-renamed", None, ("t4", 4), {"nvidia.com/gpu.shared": 16}),
        ("time-slicing-config-fine", "tesla-t4", ("t4", 1), {"nvidia.com/gpu": 4}),
        ("time-slicing-config-fine", "a100-40gb", ("a100-40gb", 1), {"nvidia.com/gpu": 8}),
    ],
)
def test_allocatable(
    example: str, label: str | None, gpus: tuple[str, int], allocatable: dict[str, int]
) -> None:
    assert node(*gpus).allocatable(config_of(example, label)) == allocatable


@pytest.mark.parametrize(
    ("example", "label", "gpus", "labels"),
    [
        ("plain", None, ("t4", 4), "count=4 product=Tesla-T4 replicas=1 sharing-strategy=none"),
        (
            "time-slicing-config-all",
            None,
            ("t4", 4),
            "count=4 product=Tesla-T4-SHARED replicas=4 sharing-strategy=time-slicing",
        ),
        (
            "time-slicing-config-all-renamed",
            None,
            ("t4", 4),
            "count=4 product=Tesla-T4 replicas=4 sharing-strategy=time-slicing",
        ),
        (
            "mps-10",
            None,
            ("h100-80gb", 8),
            "count=8 product=NVIDIA-H100-80GB-HBM3-SHARED replicas=10 sharing-strategy=mps",
        ),
        (
            "time-slicing-config-fine",
            "a100-40gb",
            ("a100-40gb", 8),
            "count=8 product=NVIDIA-A100-SXM4-40GB-SHARED replicas=8",
        ),
    ],
)
def test_labels(example: str, label: str | None, gpus: tuple[str, int], labels: str) -> None:
    config = config_of(example, label)
    told = node(*gpus).labels(config)
    for each in labels.split():
        name, _, value = each.partition("=")
        assert told[f"nvidia.com/gpu.{name}"] == value


def test_requests_above_one_fail_as_documented() -> None:
    (resource,) = node("t4", 1).offer(config_of("shared-10-strict")).resources
    assert resource.fails_above_one
    (by_mps,) = node("t4", 1).offer(config_of("mps-10")).resources
    assert by_mps.fails_above_one
    assert by_mps.mode == "mps"


def test_what_of_the_examples_has_no_effect_is_told() -> None:
    mixed = config_of("time-slicing-config-fine", "a100-40gb")
    assert mixed.notes == ()
    (problem,) = node("a100-40gb", 1).offer(mixed).problems
    assert "nvidia.com/mig-1g.5gb or nvidia.com/mig-2g.10gb" in problem
    assert all(
        not config_of(example).notes
        for example in ("plain", "shared-10", "shared-10-renamed", "time-slicing-config-all")
    )


def test_a_node_that_no_label_chooses_for_has_the_default_or_a_problem() -> None:
    assert config_of("time-slicing-config-fine", default="tesla-t4").mig_strategy == "none"
    outcome = heard("time-slicing-config-fine")
    assert outcome.problem is not None
    assert "all fallbacks failed" in outcome.problem.message


def test_every_example_is_looked_at() -> None:
    named = set((EXAMPLES / "README.md").read_text().split("`"))
    tested = Path(__file__).read_text()
    for path in EXAMPLES.glob("*.yaml"):
        assert path.name in named
        assert f'"{path.stem}"' in tested or f'"{path.name}"' in tested

# SPDX-License-Identifier: Apache-2.0
"""From a configuration file, as NVIDIA publishes them, to a node's labels: no step by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from allotment.agent.config.overlay import load
from allotment.agent.resources import plan
from allotment.devices.simulated import SimulatedMachine
from allotment.model.structs import replace

if TYPE_CHECKING:
    from tests.unit.agent.labels.conftest import Scene

TIME_SLICING = """\
version: v1
sharing:
  timeSlicing:
    renameByDefault: {rename}
    resources:
    - name: nvidia.com/gpu
      replicas: 4
"""
SOFT = "\nallotment:\n  devices: [{mode: soft}]\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "version: v1\n",
            {"product": "Tesla-T4", "replicas": "1", "sharing-strategy": "none"},
        ),
        (
            TIME_SLICING.format(rename="false"),
            {"product": "Tesla-T4-SHARED", "replicas": "4", "sharing-strategy": "time-slicing"},
        ),
        (
            TIME_SLICING.format(rename="true"),
            {"product": "Tesla-T4", "replicas": "4", "sharing-strategy": "time-slicing"},
        ),
        (
            TIME_SLICING.format(rename="false") + SOFT,
            {"product": "Tesla-T4-SHARED", "replicas": "4", "sharing-strategy": "time-slicing"},
        ),
        (
            "version: v1" + SOFT,
            {"product": "Tesla-T4", "replicas": "1", "sharing-strategy": "none"},
        ),
    ],
    ids=["nothing", "time-slicing", "renamed", "replicas of soft GPUs", "soft"],
)
def test_four_t4(
    scene: Scene, machine: Callable[[str], Path], text: str, expected: dict[str, str]
) -> None:
    devices = SimulatedMachine(machine("t4:4")).devices()
    config = load(text, source="config.yaml")
    facts = [
        replace(fact, uuid=device.uuid)
        for fact, device in zip(scene.gpus("t4", 4), devices, strict=True)
    ]
    features = scene.features(*facts, offer=plan(devices, {}, config), config=config)
    found = {each: features.labels[f"nvidia.com/gpu.{each}"] for each in expected}
    assert found == expected
    assert features.labels["nvidia.com/gpu.count"] == "4"
    assert features.labels["nvidia.com/gpu.memory"] == "15360"
    mode = "soft" if "soft" in text else "timeslice" if "replicas" in text else "exclusive"
    assert features.labels[f"allotment.dev/gpu.mode.{mode}"] == "4"
    assert features.notes == ()


def test_a_sick_gpu_changes_no_label(scene: Scene, machine: Callable[[str], Path]) -> None:
    devices = SimulatedMachine(machine("t4:2")).devices()
    config = load(TIME_SLICING.format(rename="false"), source="config.yaml")
    facts = [
        replace(fact, uuid=device.uuid)
        for fact, device in zip(scene.gpus("t4", 2), devices, strict=True)
    ]
    healthy, sick = (
        scene.features(*facts, offer=plan(devices, unhealthy, config), config=config)
        for unhealthy in ({}, {devices[0].uuid: "XID 79"})
    )
    assert sick == healthy


def test_patterns_that_are_honoured_have_labels_of_their_own(
    scene: Scene, machine: Callable[[str], Path]
) -> None:
    text = """\
version: v1
resources:
  gpus: [{pattern: "*A100*", name: a100}, {pattern: "*", name: gpu}]
sharing:
  timeSlicing:
    resources: [{name: nvidia.com/gpu, replicas: 2}]
allotment: {honourResources: true}
"""
    devices = SimulatedMachine(machine("a100-80gb:2,t4")).devices()
    config = load(text, source="config.yaml")
    facts = [
        replace(fact, uuid=device.uuid)
        for fact, device in zip(
            (*scene.gpus("a100-80gb", 2), *scene.gpus("t4")), devices, strict=True
        )
    ]
    labels = scene.features(*facts, offer=plan(devices, {}, config), config=config).labels
    assert labels["nvidia.com/a100.product"] == "NVIDIA-A100-SXM4-80GB"
    assert labels["nvidia.com/a100.count"] == "2"
    assert labels["nvidia.com/a100.replicas"] == "1"
    assert labels["nvidia.com/gpu.product"] == "Tesla-T4-SHARED"

# SPDX-License-Identifier: Apache-2.0
"""The reference of ResourceClaims lists what the driver publishes, reads and refuses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpus import gpu
from mig_profiles import profiles as profiles_of

from allotment.agent.dra.devices import DeviceType, GpuState, pool_of
from allotment.agent.mig.state import CutGpu
from allotment.devices.facts import DeviceFacts, NodeFacts
from allotment.dialects.own.resource_claims import Parameters, read_parameters
from allotment.model.clusters import TakenPart
from allotment.model.errors import UsageError

Document = Mapping[str, Any]


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    return (root / "docs" / "reference" / "resource-claims.md").read_text("utf-8")


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of a section's table, without its head."""
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def words(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.fixture(scope="module")
def published() -> list[Document]:
    """Devices of each type and with each taint."""
    cut = CutGpu(profiles=tuple(profiles_of("A100-80GB")), is_enabled=True)
    taken = TakenPart(1 << 30, 0, 1, "soft")
    facts = DeviceFacts(
        uuid="GPU-0", name="A100", memory_mib=81920, brand="Nvidia", pcie_root="pci0000:00"
    )
    gpus = [
        GpuState(device=gpu(0, numa_node=0), cut=cut, facts=facts),
        GpuState(device=gpu(1), cut=cut, taken=taken),
        GpuState(device=gpu(2), problem="xid 79"),
        GpuState(device=gpu(3), problem="it is lost", is_evicted=True),
    ]
    node = NodeFacts(driver_version="580.95.05", cuda_version=(13, 0), devices=())
    return [each.document for each in pool_of(gpus, node).devices.values()]


def type_of(device: Document) -> str:
    return str(device["attributes"]["type"]["string"])


def test_attributes_are_those_that_are_published(page: str, published: list[Document]) -> None:
    found: dict[tuple[str, str], set[str]] = {}
    for device in published:
        for name, value in device["attributes"].items():
            found.setdefault((name, *value), set()).add(type_of(device))
    everywhere = {str(each) for each in DeviceType}
    listed = {
        (words(name)[0], kind): everywhere if of == "all" else set(words(of))
        for name, kind, of, _ in rows(page, "Attributes")
    }
    assert listed == found


def test_capacities_are_those_that_are_published(page: str, published: list[Document]) -> None:
    found = {(type_of(each), name) for each in published for name in each.get("capacity", ())}
    listed = {
        (kind, words(name)[0]) for name, of, _, _ in rows(page, "Capacities") for kind in words(of)
    }
    assert listed == found
    ruled = {
        (type_of(each), name)
        for each in published
        for name, value in each.get("capacity", {}).items()
        if "requestPolicy" in value
    }
    assert ruled == {("share", "memory"), ("share", "compute"), ("share", "seats")}


def test_taints_are_those_that_are_published(page: str, published: list[Document]) -> None:
    taints = [each for device in published for each in device.get("taints", ())]
    found = {(each["key"], each["effect"]) for each in taints}
    assert {(words(name)[0], effect) for name, effect, _, _ in rows(page, "Taints")} == found


def test_classes_are_those_of_the_manifest(page: str, root: Path) -> None:
    text = (root / "deploy" / "manifests" / "device-classes.yaml").read_text("utf-8")
    found = {
        (each["metadata"]["name"], kind)
        for each in yaml.safe_load_all(text)
        for kind in re.findall(r"type == '(\w+)'", str(each["spec"]))
    }
    classes = rows(page, "Classes and types")
    assert {(words(name)[0], words(kind)[0]) for name, kind, *_ in classes} == found


def test_parameters_are_those_that_are_read(page: str) -> None:
    content = {"apiVersion": "allotment.dev/v1", "kind": "ShareConfig", "x": 1}
    with pytest.raises(UsageError) as caught:
        read_parameters(Parameters(where="w", content=content))
    hint = (caught.value.hint or "").removeprefix("the fields are: ")
    assert [words(name)[0] for name, *_ in rows(page, "Parameters")] == hint.split(", ")


def test_errors_are_those_of_the_code(page: str, root: Path) -> None:
    rooms = (
        "agent/dra/devices.py",
        "agent/dra/driver.py",
        "dialects/own/resource_claims.py",
        "kube/resource_claims.py",
        "placement/explain.py",
        "shares/cdi.py",
        "shares/mode_policy.py",
        "shares/placing.py",
    )
    source = "".join(
        re.sub(r'"\s*f?"', "", (root / "src" / "allotment" / path).read_text("utf-8"))
        for path in rooms
    )
    texts = [words(text)[0] for text, _ in rows(page, "Errors")]
    assert [text for text in texts if text not in source] == []
    assert len(texts) > 10


@pytest.mark.parametrize(
    ("name", "begin"),
    [
        ("quarter", "apiVersion: resource.k8s.io/v1"),
        ("whole", "exactly:"),
        ("mig", "exactly:"),
        ("shared", "apiVersion: resource.k8s.io/v1"),
        ("first-available", "requests:"),
        ("parameters", "config:"),
    ],
)
def test_the_guide_has_the_claims_of_the_examples(root: Path, name: str, begin: str) -> None:
    guide = (root / "docs" / "guides" / "resource-claims.md").read_text("utf-8")
    text = (root / "examples" / "claims" / f"{name}.yaml").read_text("utf-8")
    claim = text.partition("\n---\n")[0]
    assert stripped(claim[claim.index(begin) :]) in stripped(guide)


def stripped(text: str) -> str:
    return "\n".join(line.strip() for line in text.splitlines())

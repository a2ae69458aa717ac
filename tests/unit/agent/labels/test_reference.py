# SPDX-License-Identifier: Apache-2.0
"""docs/reference/labels.md names every label that a node can have, with examples that are true."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from allotment.agent.config.schema import Config
from allotment.agent.labels.features import architecture_family
from allotment.agent.resources import Offer
from allotment.devices.facts import FabricPlace, VgpuHost
from allotment.model.structs import replace

if TYPE_CHECKING:
    from tests.unit.agent.labels.conftest import Scene

ROW = re.compile(r"^\| `(?P<key>(?:nvidia\.com|allotment\.dev)/[^`]+)` \| `(?P<example>[^`]*)` \|")
CLUSTER = "7b968a6d-c8aa-45e1-9e07-e1e51be99c31"


@pytest.fixture
def reference(root: Path) -> str:
    return (root / "docs" / "reference" / "labels.md").read_text()


def nodes(scene: Scene) -> Iterator[Mapping[str, str]]:
    """The labels of nodes that have, together, every label there is."""
    a100 = scene.gpus("a100-40gb")[0]
    slice_ = scene.mig("1g.5gb", 4864, gi=1, ci=1, figures="14 1 0 0 0 0")
    t4 = scene.gpus("t4", 4)
    machine_type = "PowerEdge R7525"
    yield scene.features(*t4, offer=scene.offer(t4, replicas=4), machine_type=machine_type).labels
    yield scene.features(*scene.gpus("h100-80gb"), *t4[:1], offer=Offer()).labels
    yield scene.features(
        replace(
            a100,
            fabric=FabricPlace(CLUSTER, 1),
            vgpu_host=VgpuHost("580.126.08", "r582_12"),
        )
    ).labels
    for strategy in ("single", "mixed"):
        yield scene.features(
            scene.split(a100, slice_, slice_), config=Config(mig_strategy=strategy)
        ).labels


def general(key: str) -> str:
    """The key as the reference writes it: for any profile, mode or model."""
    key = re.sub(r"/mig-[0-9]+g\.[0-9]+gb\.", "/mig-<profile>.", key)
    return re.sub(r"/gpu\.(mode|model)\.[^`]+$", r"/gpu.\1.<\1>", key)


def test_every_label_is_documented_and_no_other(scene: Scene, reference: str) -> None:
    rows = [match for line in reference.splitlines() if (match := ROW.match(line))]
    documented = [match["key"] for match in rows]
    assert len(documented) == len(set(documented)), "a label has two rows"
    assert {general(key) for labels in nodes(scene) for key in labels} == set(documented)


def test_every_example_is_one(scene: Scene, reference: str) -> None:
    made = {(general(key), value) for labels in nodes(scene) for key, value in labels.items()}
    rows = [match for line in reference.splitlines() if (match := ROW.match(line))]
    assert [match.groups() for match in rows if match.groups() not in made] == []


def test_the_long_example_is_a_nodes(reference: str) -> None:
    golden = Path(__file__).parent / "golden" / "a100-80gb-2.txt"
    assert f"```text\n{golden.read_text()}```" in reference


def test_families_are_those_of_the_table(reference: str) -> None:
    table = reference.partition("| family |")[2].partition("\n\n")[0]
    told = set(re.findall(r"`([a-z-]+)`", table))
    made = {architecture_family(major, minor) for major in range(5, 16) for minor in range(10)}
    assert told == made

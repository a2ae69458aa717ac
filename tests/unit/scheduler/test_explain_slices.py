# SPDX-License-Identifier: Apache-2.0
"""What is told of pods that have slices, wait for one, or leave their mode open."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from explained_twin import Twin, pod
from mig_profiles import piece, profiles

from allotment.cli.explain import print_explanation
from allotment.dialects.own.placement import write_booking
from allotment.kube.inventories import DEVICES, encode
from allotment.model.clusters import (
    NodeDevice,
    NodeInventory,
    NodeMig,
    PlacedContainer,
    PlacedDevice,
    PodBooking,
)
from allotment.model.mig import MigHold, MigPlace
from allotment.model.pods import PodUid
from allotment.model.structs import replace
from allotment.scheduler.explain_evidence import Explanation, Standing

GI = 1 << 30
MODEL = "H100-80GB"
PROFILES = profiles(MODEL)
PROFILE = {"allotment.dev/mig-profile": "1g.10gb"}
GPU = {"allotment.dev/gpu": "1"}


def node(name: str, *modes: str, **mig: object) -> dict[str, object]:
    device = NodeDevice(
        uuid=f"GPU-{name}",
        model="NVIDIA H100",
        memory_bytes=79 * GI,
        modes=modes or ("mig",),
        mig=NodeMig(profiles=PROFILES, **mig),  # type: ignore[arg-type]
    )
    inventory = NodeInventory(name=name, devices=(device,))
    return {
        "metadata": {"name": name, "uid": name, "annotations": {DEVICES: encode(inventory)}},
        "status": {"allocatable": {"cpu": "8", "memory": "64Gi"}},
    }


def placed(name: str, where: str, start: int) -> dict[str, object]:
    """A pod that has a slice."""
    device = PlacedDevice(f"GPU-{where}", PROFILES[0].memory_bytes, 0, MigPlace("1g.10gb", start))
    booking = PodBooking(
        uid=PodUid(f"uid-{name}"),
        node=where,
        containers=(PlacedContainer(name="main", devices=(device,), mode="mig"),),
    )
    annotations = {**PROFILE, "allotment.dev/placement": write_booking(booking)}
    return pod(name, GPU, annotations=annotations, node=where)


def shown(explanation: Explanation) -> str:
    import click

    @click.command()
    def command() -> None:
        print_explanation(explanation)

    return CliRunner().invoke(command).output


def test_a_placed_pod_has_its_slice_named() -> None:
    found = Twin([node("a")], [placed("it", "a", 4)]).explain()
    assert found.standing is Standing.PLACED
    (asked,) = found.containers
    assert (asked.mode, asked.text) == ("mig", "a MIG slice 1g.10gb")
    (part,) = asked.parts
    assert part.placed.slice == MigPlace("1g.10gb", 4)
    text = shown(found)
    assert "MODE" in text
    assert "1g.10gb at 4" in text


def test_a_pod_that_waits_for_a_slice_is_told_what_is_in_its_way() -> None:
    others = [placed(f"p{start}", "a", start) for start in range(7)]
    waits = pod("it", GPU, annotations=PROFILE)
    found = Twin([node("a")], [*others, waits]).explain()
    assert found.standing is Standing.PENDING
    assert found.fitting == ()
    (group,) = found.refused
    assert "1g.10gb" in group.text
    assert found.beyond is None  # it would have room on an empty GPU
    assert "no node has room for it" in shown(found)
    found = Twin([node("a")], [*others[:6], waits]).explain()
    assert found.fitting == ("a",)
    assert found.proposal[0].parts[0].placed.slice == MigPlace("1g.10gb", 6)


def test_a_profile_that_no_gpu_has_is_told_as_such() -> None:
    annotations = {"allotment.dev/mig-profile": "1g.5gb"}
    found = Twin([node("a")], [pod("it", GPU, annotations=annotations)]).explain()
    assert found.beyond is not None
    assert "1g.5gb" in found.beyond.text


def test_a_pod_that_waits_for_a_mode_is_told_so() -> None:
    soft = pod("soft", {**GPU, "allotment.dev/gpu-memory": "4Gi"}, on=("a", 0))
    text = soft["metadata"]["annotations"]["allotment.dev/placement"]
    soft["metadata"]["annotations"]["allotment.dev/placement"] = text.replace("GPU-a-0", "GPU-a")
    there = node("a", "soft", "mig", is_enabled=False)
    waits = pod("it", GPU, annotations=PROFILE)
    found = Twin([there], [soft, waits]).explain()
    assert found.fitting == ()
    (group,) = found.refused
    assert "another mode" in group.text or "MIG" in group.text
    assert Twin([there], [waits]).explain().fitting == ("a",)


@pytest.mark.parametrize(
    ("modes", "text", "became"),
    [
        (("soft",), "a GPU with 4Gi", "soft"),
        (("mig", "soft"), "a MIG slice with 4Gi, or a GPU with 4Gi", "mig"),
        (("mps", "soft"), "a GPU with 4Gi by MPS, or a GPU with 4Gi", "soft"),
    ],
)
def test_what_is_left_open_is_told_by_the_schedulers_modes(
    modes: tuple[str, ...], text: str, became: str
) -> None:
    there = node("a", "soft", "mig", is_enabled=False)
    waits = pod("it", {**GPU, "allotment.dev/gpu-memory": "4Gi"})
    found = Twin([there], [waits]).explain(modes=modes)
    assert found.containers[0].text == text
    (proposed,) = found.proposal
    assert proposed.mode == became
    assert (proposed.parts[0].placed.slice is not None) is (became == "mig")


def test_slices_of_others_are_in_the_way() -> None:
    slices = (piece(MODEL, "7g.80gb", 0, hold=MigHold.FOREIGN),)
    waits = pod("it", GPU, annotations=PROFILE)
    found = Twin([node("a", slices=slices)], [waits]).explain()
    assert found.fitting == ()
    idle = tuple(replace(each, hold=MigHold.IDLE) for each in slices)
    assert Twin([node("a", slices=idle)], [waits]).explain().fitting == ("a",)

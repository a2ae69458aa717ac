# SPDX-License-Identifier: Apache-2.0
"""Monitors: what their containers see, and what a killed call leaves to the next one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from killing import killed_at
from pod_node import Node, owner

from allotment.model.pods import PodUid
from allotment.model.shares import ShareId
from allotment.model.structs import replace
from allotment.shares.monitors import Monitors

ONE = ShareId("0123456789ab")
CLAIM = PodUid("claim")
WHOSE = replace(owner("watch"), uid=CLAIM, is_claim=True)


@pytest.fixture
def node(tmp_path: Path, native_dir: Path) -> Node:
    assert native_dir.is_dir()
    return Node(tmp_path)


def monitors(node: Node) -> Monitors:
    return Monitors(node.folder, cdi_folder=node.cdi, sight=node.restarted().sight)


def left(node: Node) -> list[Path]:
    folder = node.folder.monitors
    return [*node.specs(), *(folder.iterdir() if folder.exists() else ())]


def test_its_container_sees_its_gpus_alone_and_has_no_shim(node: Node) -> None:
    _, second = node.devices
    monitors(node).show(ONE, WHOSE, [second])
    (spec,) = node.specs()
    (device,) = json.loads(spec.read_text())["devices"]
    targets = {
        each["containerPath"]: each["hostPath"] for each in device["containerEdits"]["mounts"]
    }
    assert Path(targets[f"/run/allotment/simulated/devices/{ONE}"]).read_text() == (
        f"{second.uuid}\n"
    )
    assert "/run/allotment/simulated/machine" in targets
    assert "/etc/ld.so.preload" not in targets
    assert not [each for each in targets if each.startswith("/run/allotment/share")]
    assert node.shares.owned() == ()
    node.shares.tidy()
    assert node.specs() == [spec], "it is not the spec of a share that has ended"


def test_a_claim_that_is_allocated_anew_sees_its_new_gpus(node: Node) -> None:
    first, second = node.devices
    monitors(node).show(ONE, WHOSE, [first])
    monitors(node).show(ONE, WHOSE, [second])
    (spec,) = node.specs()
    assert (node.folder.monitors / ONE / "devices").read_text() == f"{second.uuid}\n"
    before = spec.stat()
    monitors(node).show(ONE, WHOSE, [second])
    assert spec.stat() == before, "a repeated call finds it"


def test_the_monitors_of_other_claims_stay(node: Node) -> None:
    other = replace(WHOSE, uid=PodUid("other"))
    monitors(node).show(ONE, WHOSE, node.devices)
    monitors(node).show(ShareId("ba9876543210"), other, node.devices)
    monitors(node).hide(CLAIM)
    assert list(monitors(node).owners().values()) == [other]
    assert len(node.specs()) == 1
    monitors(node).hide(PodUid("other"))
    assert left(node) == []


def test_what_a_power_failure_emptied_is_made_again_or_removed(node: Node) -> None:
    monitors(node).show(ONE, WHOSE, node.devices)
    (spec,) = node.specs()
    spec.unlink()
    (node.folder.monitors / ONE / "owner.json").write_bytes(b"")
    assert monitors(node).owners() == {}
    monitors(node).show(ONE, WHOSE, node.devices)
    assert monitors(node).owners() == {ONE: WHOSE}
    (node.folder.monitors / ONE / "owner.json").write_bytes(b"")
    monitors(node).hide(CLAIM)
    assert left(node) == []


@pytest.mark.parametrize(
    "point",
    ["monitor.begun", "monitor.drafted", "monitor.shown", "publish.drafted", "publish.shown"],
)
def test_killed_while_it_is_made(node: Node, point: str) -> None:
    assert killed_at(point, lambda: monitors(node).show(ONE, WHOSE, node.devices))
    monitors(node).show(ONE, WHOSE, node.devices)
    assert monitors(node).owners() == {ONE: WHOSE}
    assert [path.name for path in left(node)] == [f"allotment.dev-monitor-{ONE}.json", ONE]
    assert killed_at(point, lambda: monitors(node).show(ShareId("b" * 12), WHOSE, node.devices))
    monitors(node).hide(CLAIM)
    assert left(node) == [], "also if it was never made"


@pytest.mark.parametrize("point", ["monitor.ending", "monitor.unpublished", "monitor.hidden"])
def test_killed_while_it_is_removed(node: Node, point: str) -> None:
    monitors(node).show(ONE, WHOSE, node.devices)
    assert killed_at(point, lambda: monitors(node).hide(CLAIM))
    monitors(node).hide(CLAIM)
    assert left(node) == []

# SPDX-License-Identifier: Apache-2.0
"""How well simulated GPUs are linked, as NVML tells; and that a sick one hides only itself."""

from __future__ import annotations

import time
from itertools import combinations
from pathlib import Path

import pytest

from allotment.devices.faults import clear_faults, set_fault
from allotment.devices.packing import read_machine
from allotment.devices.simulated import machine_path
from allotment.devices.topology import DeviceLinks, read_links

pytestmark = pytest.mark.usefixtures("native_dir")

SWITCH, PROCESSOR, SYSTEM = 50, 20, 10


def read(machine: Path, **options: float) -> tuple[DeviceLinks, list[str]]:
    devices = read_machine(machine).devices
    uuids = [device.uuid for device in devices]
    return read_links(devices, machine=machine, **options), uuids


def test_points_are_for_where_a_pair_meets(tmp_path: Path) -> None:
    machine = machine_path(tmp_path, "t4[numa=0]:4,t4[numa=1]:2")
    links, uuids = read(machine)
    scores = links.scores

    def score(one: int, other: int) -> int:
        return scores[frozenset((uuids[one], uuids[other]))]

    assert score(0, 1) == score(2, 3) == score(4, 5) == SWITCH
    assert score(0, 2) == score(1, 3) == PROCESSOR
    assert score(0, 4) == score(3, 5) == SYSTEM
    assert len(scores) == 15


@pytest.mark.parametrize(
    ("spec", "links"), [("a100-80gb:4", 12), ("h100-80gb:4", 18)], ids=["a100", "h100"]
)
def test_nvlink_through_switches_joins_all_pairs(tmp_path: Path, spec: str, links: int) -> None:
    found, uuids = read(machine_path(tmp_path, f"{spec},t4"))
    switched = {frozenset(pair) for pair in combinations(uuids[:4], 2)}
    assert {pair: score // 100 for pair, score in found.scores.items()} == {
        frozenset(pair): links if frozenset(pair) in switched else 0
        for pair in combinations(uuids, 2)
    }
    assert not found.peers, "each of them resets alone"


@pytest.mark.parametrize(
    ("lost", "hang_us"), [(True, 0), (None, 60_000_000)], ids=["lost", "hangs"]
)
def test_a_sick_gpu_hides_only_itself(tmp_path: Path, lost: bool | None, hang_us: int) -> None:  # noqa: FBT001 - a parameter
    machine = machine_path(tmp_path, "t4:16")
    set_fault(machine, 5, lost=lost, hang_us=hang_us)
    started = time.monotonic()
    links, uuids = read(machine, patience_s=3.0)
    scores = links.scores
    assert time.monotonic() - started < 20
    clear_faults(machine)
    sick = uuids.pop(5)
    assert set(scores) == {frozenset(pair) for pair in combinations(uuids, 2)}
    assert not any(sick in pair for pair in scores)

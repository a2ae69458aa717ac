# SPDX-License-Identifier: Apache-2.0
"""GPUs that somebody else keeps are told of, those that MPS daemons of ours keep are not."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from allotment.agent.device_modes import ComputeModes
from allotment.agent.node_state import NodeState
from allotment.agent.resources import Offer
from allotment.devices.compute_modes import ComputeMode, GpuSettings
from allotment.devices.packing import read_machine
from allotment.devices.simulated import machine_path
from allotment.kube.watching import Signal
from allotment.modes.mps.state import MpsStatus
from allotment.shares.folders import StateFolder
from allotment.shares.mps_daemons import place_of

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a GPU's compute mode is root's to set")


class CountedSignal(Signal):
    """Counts its notifications."""

    times = 0

    def notify(self) -> None:
        self.times += 1
        super().notify()


class World:
    """Two simulated GPUs."""

    def __init__(self, root: Path) -> None:
        self.machine = machine_path(root, "a100-80gb:2")
        self.uuids = [each.uuid for each in read_machine(self.machine).devices]
        self.folder = StateFolder(root / "state")
        self.folder.prepare()
        self.signal = CountedSignal()
        self.state = NodeState(changed=self.signal)
        self.ask(*self.uuids)
        self.modes = ComputeModes(self.folder, state=self.state, machine=self.machine)

    def ask(self, *uuids: str) -> None:
        self.state.offer = Offer(shared=dict.fromkeys(uuids, ("soft",)))

    def put(self, mode: ComputeMode) -> None:
        GpuSettings(self.uuids[1], machine=self.machine).set_compute_mode(mode)

    def kept(self) -> dict[str, str]:
        asyncio.run(self.modes.look())
        return dict(self.state.reserved)


@pytest.fixture
def world(tmp_path: Path, native_dir: Path) -> World:
    assert native_dir.is_dir()
    return World(tmp_path)


@pytest.mark.parametrize("mode", [ComputeMode.EXCLUSIVE_PROCESS, ComputeMode.PROHIBITED])
def test_what_somebody_else_set_is_told_until_it_is_put_back(
    world: World, mode: ComputeMode
) -> None:
    assert world.kept() == {}
    world.put(mode)
    why = f"it is in compute mode {mode.name}, set outside Allotment"
    assert world.kept() == world.kept() == {world.uuids[1]: why}
    assert world.signal.times == 1
    world.put(ComputeMode.DEFAULT)
    assert world.kept() == {}
    assert world.signal.times == 2


def test_what_an_mps_daemon_of_ours_keeps_is_not(world: World) -> None:
    world.put(ComputeMode.EXCLUSIVE_PROCESS)
    place = place_of(world.folder, world.uuids[1])
    place.prepare(simulated=True)
    place.write(MpsStatus(mode_before=int(ComputeMode.DEFAULT)))
    assert world.kept() == {}
    place.write(MpsStatus())
    assert set(world.kept()) == {world.uuids[1]}


def test_a_gpu_that_is_not_given_in_parts_is_forgotten(world: World) -> None:
    world.put(ComputeMode.PROHIBITED)
    assert world.kept()
    world.ask(world.uuids[0])
    assert world.kept() == {}


def test_one_that_does_not_answer_is_not_told_of_here(world: World) -> None:
    world.ask(*world.uuids, "GPU-that-is-gone")
    assert world.kept() == {}


def test_one_that_is_asked_no_more_keeps_no_thread(world: World) -> None:
    others = set(threading.enumerate())
    world.kept()
    gone = world.uuids[1]
    world.ask(world.uuids[0])
    name = f"compute mode of {gone}"
    (asker,) = (each for each in set(threading.enumerate()) - others if each.name == name)
    world.kept()
    asker.join(timeout=30)
    assert not asker.is_alive()
    world.ask(*world.uuids)
    world.put(ComputeMode.PROHIBITED)
    assert set(world.kept()) == {gone}, "it is asked again"


def test_an_error_that_nobody_foresaw_ends_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: GpuSettings) -> ComputeMode:
        raise OSError(5, "broken")

    monkeypatch.setattr(GpuSettings, "compute_mode", broken)
    assert world.kept() == {}


@pytest.mark.parametrize("is_beginning", [True, False])
def test_a_daemon_of_ours_that_begins_or_ends_meanwhile_is_seen(
    world: World, monkeypatch: pytest.MonkeyPatch, *, is_beginning: bool
) -> None:
    world.ask(world.uuids[1])
    place = place_of(world.folder, world.uuids[1])
    place.prepare(simulated=True)
    ours, nobodys = MpsStatus(mode_before=int(ComputeMode.DEFAULT)), MpsStatus()
    place.write(nobodys if is_beginning else ours)

    def meanwhile(_: GpuSettings) -> ComputeMode:
        place.write(ours if is_beginning else nobodys)
        return ComputeMode.EXCLUSIVE_PROCESS

    monkeypatch.setattr(GpuSettings, "compute_mode", meanwhile)
    assert world.kept() == {}

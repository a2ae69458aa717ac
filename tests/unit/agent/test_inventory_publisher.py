# SPDX-License-Identifier: Apache-2.0
"""The annotation says what there is, follows what happens, and is gone where nothing is shared."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Mapping
from pathlib import Path

import pytest
from gpus import gpu
from kubelet_twin import PodsTwin, ReportsTwin
from own_node_twin import OwnNodeTwin, beside, until

from allotment.agent.config.overlay import load
from allotment.agent.device_modes import ComputeModes
from allotment.agent.inventory_publisher import InventoryPublisher, build_inventory
from allotment.agent.mig.state import CutGpu
from allotment.agent.node_state import NodeState
from allotment.agent.resources import Offer, plan
from allotment.devices.compute_modes import ComputeMode, GpuSettings
from allotment.devices.packing import read_machine
from allotment.devices.simulated import machine_path
from allotment.devices.topology import DeviceLinks
from allotment.kube.inventories import CORDONS, DEVICES, decode
from allotment.model.clusters import NodeDevice, NodeInventory, TakenPart
from allotment.model.devices import Device
from allotment.model.quantities import parse_memory
from allotment.model.requests import Request
from allotment.model.shares import Injection
from allotment.shares import lifecycle
from allotment.shares.folders import StateFolder
from allotment.shares.placing import ShareOrder

GI = 1 << 30
LEAST_S = 0.3
SOFT = "allotment: {devices: [{mode: soft}]}"
MIXED = "allotment: {devices: [{match: {index: [0]}, mode: soft}]}"


GPUS = {f"GPU-{index}": gpu(index, numa_node=index % 2, reserved_bytes=GI) for index in range(3)}


def offered(text: str, devices: Mapping[str, Device] = GPUS) -> Offer:
    return plan(tuple(devices.values()), {}, load(text, source="f"))


def test_all_that_a_scheduler_needs_is_told() -> None:
    links = {frozenset(("GPU-0", "GPU-2")): 160, frozenset(("GPU-0", "GPU-9")): 60}
    inventory = build_inventory(
        NodeState(offer=offered(SOFT), devices=GPUS, links=DeviceLinks(links)),
        {"GPU-1": "XID 79"},
        taken={"GPU-0": TakenPart(GI, 1000, 1, "soft"), "GPU-9": TakenPart(GI, 0, 1, "soft")},
    )
    assert inventory == NodeInventory(
        name="",
        devices=tuple(
            NodeDevice(
                uuid=f"GPU-{index}",
                model="NVIDIA A100-SXM4-80GB",
                memory_bytes=79 * GI,
                index=index,
                numa_node=index % 2,
                problem="XID 79" if index == 1 else "",
                taken=TakenPart(GI, 1000, 1, "soft") if index == 0 else TakenPart(),
            )
            for index in range(3)
        ),
        host_budget_bytes=240 * GI,
        links={("GPU-0", "GPU-2"): 160},
    )


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ("", []),
        (MIXED, ["GPU-0"]),
        # Replicas are the kubelet's to give, whoever enforces them.
        (SOFT + "\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}", []),
    ],
)
def test_only_what_is_given_in_parts_is_told(config: str, told: list[str]) -> None:
    inventory = build_inventory(NodeState(offer=offered(config), devices=GPUS), {}, taken={})
    assert [each.uuid for each in inventory.devices] == told if inventory else not told


# ---- as things happen ----------------------------------------------------------------------------


class World:
    """A node whose GPUs are two simulated T4."""

    def __init__(self, root: Path) -> None:
        self.machine = machine_path(root, "t4:2")
        self.devices = read_machine(self.machine).devices
        self.folder = StateFolder(root / "state")
        self.folder.prepare()
        self.node = OwnNodeTwin()
        self.state = NodeState(devices={each.uuid: each for each in self.devices})
        self.pods = PodsTwin()
        self.reports = ReportsTwin()
        self.compute_modes = ComputeModes(self.folder, state=self.state, machine=self.machine)
        self.announcing = self.publisher(least_s=LEAST_S)

    def publisher(self, *, least_s: float) -> InventoryPublisher:
        return InventoryPublisher(
            self.folder,
            state=self.state,
            node=self.node,
            pods=self.pods,
            reports=self.reports,
            least_s=least_s,
        )

    def offer(self, text: str) -> None:
        self.state.renew_offer(plan(self.devices, self.state.unusable, load(text, source="f")))

    def problems(self) -> list[str]:
        told = self.told
        return [each.problem for each in told.devices] if told else []

    def taken(self) -> list[int]:
        told = self.told
        return [each.taken.memory for each in told.devices] if told else []

    @property
    def told(self) -> NodeInventory | None:
        key, text = self.node.written[-1] if self.node.written else (DEVICES, None)
        assert key == DEVICES
        return None if text is None else decode("n1", text)

    def run(self, test: Awaitable[None]) -> None:
        beside(self.announcing.run, test)


@pytest.fixture
def world(tmp_path: Path, native_dir: Path) -> World:
    assert native_dir.is_dir()
    return World(tmp_path)


def test_nothing_is_told_before_it_is_known_what_is_offered(world: World) -> None:
    async def test() -> None:
        world.pods.is_synced = True
        await asyncio.sleep(0.6)
        assert world.node.written == []
        world.offer(SOFT)
        await until(lambda: world.taken() == [0, 0])

    world.run(test())


def test_nothing_is_told_before_the_pods_are_known(world: World) -> None:
    async def test() -> None:
        world.offer(SOFT)
        await asyncio.sleep(0.6)
        # Which of them have placements would not be known: their shares would count twice.
        assert world.node.written == []
        world.pods.is_synced = True
        world.announcing.wake()
        await until(lambda: world.taken() == [0, 0])

    world.run(test())


@pytest.mark.skipif(os.geteuid() != 0, reason="a GPU's compute mode is root's to set")
def test_a_gpu_that_somebody_else_keeps_takes_nothing(world: World) -> None:
    settings = GpuSettings(world.devices[1].uuid, machine=world.machine)

    async def test() -> None:
        world.pods.is_synced = True
        world.offer(SOFT)
        await until(lambda: world.problems() == ["", ""])
        settings.set_compute_mode(ComputeMode.PROHIBITED)
        await world.compute_modes.look()
        why = "it is in compute mode PROHIBITED, set outside Allotment"
        await until(lambda: world.problems() == ["", why])
        settings.set_compute_mode(ComputeMode.DEFAULT)
        await world.compute_modes.look()
        await until(lambda: world.problems() == ["", ""])

    world.run(test())


def test_a_share_of_the_machine_is_taken_until_it_ends(world: World) -> None:
    order = ShareOrder(
        request=Request(parse_memory("3Gi")), injection=Injection.NONE, machine=world.machine
    )

    async def test() -> None:
        world.pods.is_synced = True
        world.offer(SOFT)
        await until(lambda: world.taken() == [0, 0])
        share, directory = await asyncio.to_thread(
            lifecycle.create, world.folder, order, world.devices
        )
        await until(lambda: sorted(world.taken()) == [0, 3 * GI])
        found = lifecycle.find(world.folder, share.id)
        assert found.directory == directory
        await asyncio.to_thread(lifecycle.destroy, world.folder, found, force=True)
        await until(lambda: world.taken() == [0, 0])

    world.run(test())


def test_sick_and_cordoned_devices_say_so_and_get_well(world: World) -> None:
    first, second = (each.uuid for each in world.devices)

    async def test() -> None:
        world.pods.is_synced = True
        world.offer(SOFT)
        await until(lambda: world.problems() == ["", ""])
        world.state.unusable = {first: "XID 79"}
        world.offer(SOFT)
        await until(lambda: world.problems() == ["XID 79", ""])
        world.node.say({CORDONS[0]: f"{first},{second}"})
        # What is worse is said.
        await until(lambda: world.problems() == ["XID 79", "cordoned: it takes no new shares"])
        assert world.state.cordoned == {first, second}
        world.state.unusable = {}
        world.node.say({})
        await until(lambda: world.problems() == ["", ""])

    world.run(test())


def test_a_gpu_that_is_closed_does_not_wait_for_the_next_write(world: World) -> None:
    """The pause is for pods that start."""
    first, second = (each.uuid for each in world.devices)
    world.announcing = world.publisher(least_s=3600)

    async def test() -> None:
        world.pods.is_synced = True
        world.offer(SOFT)
        await until(lambda: world.problems() == ["", ""])
        world.state.unusable = {first: "XID 79"}
        world.offer(SOFT)
        await until(lambda: world.problems() == ["XID 79", ""])
        world.node.say({CORDONS[0]: second})
        await until(lambda: world.problems()[1:] == ["cordoned: it takes no new shares"])
        world.state.unusable = {}
        world.offer(SOFT)
        await until(lambda: world.problems()[0] == "")

    world.run(test())


def test_it_is_removed_where_nothing_is_shared_any_more(world: World) -> None:
    async def test() -> None:
        world.pods.is_synced = True
        world.offer(SOFT)
        await until(lambda: world.told)
        world.offer("")
        await until(lambda: world.node.written[-1] == (DEVICES, None))

    world.run(test())


def test_a_burst_is_one_write(world: World) -> None:
    async def test() -> None:
        world.pods.is_synced = True
        world.offer(SOFT)
        await until(lambda: world.told)
        before, began = len(world.node.written), time.monotonic()
        for _ in range(100):
            world.announcing.wake()
            await asyncio.sleep(0.002)
        # A loaded machine may make the burst a long one.
        assert len(world.node.written) <= before + 1 + (time.monotonic() - began) // LEAST_S

    world.run(test())


class _ChangingDict(dict[str, CutGpu]):
    """Loses each entry after a look at it, as when the event loop removes it meanwhile."""

    def __contains__(self, key: object) -> bool:
        found = super().__contains__(key)
        self.pop(str(key), None)
        return found


def test_reserved_gpus_can_be_read_while_a_gpu_leaves_mig() -> None:
    cut = CutGpu(profiles=(), is_enabled=True)
    state = NodeState(
        reserved={"GPU-0": "reserved", "GPU-1": "reserved"},
        cut_gpus=_ChangingDict({"GPU-0": cut}),
    )
    assert state.reserved_whole() == {"GPU-1": "reserved"}

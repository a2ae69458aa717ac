# SPDX-License-Identifier: Apache-2.0
"""Which drivers run: the configured one, and those of claims that have shares."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import get_args

import driver_twin
import yaml
from gpus import gpu
from own_node_twin import until

from allotment.agent.config.schema import DriverName
from allotment.agent.dra.devices import gpus_of, pool_of
from allotment.agent.dra.driver import ResourceDriver
from allotment.agent.dra.drivers import ResourceDrivers
from allotment.agent.node_state import NodeState
from allotment.dialects.own.allotment import RESOURCES
from allotment.model.pods import ContainerKind, Owner, PodUid
from allotment.model.shares import Injection, Share, ShareDevice, ShareId
from allotment.model.structs import replace
from allotment.shares.record import LoadedShare

OURS, NVIDIAS = "gpu.allotment.dev", "gpu.nvidia.com"


class Driver:
    """A driver's life, without a cluster."""

    def __init__(self) -> None:
        self.is_running = False
        self.is_published: bool | None = None
        self.is_settled = True

    async def run(self) -> None:
        self.is_running = True
        try:
            await asyncio.Event().wait()
        finally:
            self.is_running = False

    def offer(self, _: Sequence[LoadedShare], *, is_published: bool) -> None:
        self.is_published = is_published


def claimed(driver: str) -> LoadedShare:
    owner = Owner(
        uid=PodUid("u1"),
        namespace="default",
        pod="mine",
        container="gpu",
        kind=ContainerKind.REGULAR,
        resource=driver,
        is_claim=True,
    )
    share = Share(
        id=ShareId("0123456789ab"),
        name="mine",
        created=1.0,
        mode="soft",
        devices=(ShareDevice("GPU-0", "x", 1),),
        injection=Injection.CDI,
        owner=owner,
    )
    return LoadedShare(share.id, Path("/x"), share, None)


class Scene:
    def __init__(self) -> None:
        self.made: dict[str, Driver] = {}
        self.name: str | None = None
        self.monitors: list[Owner] = []
        self.drivers = ResourceDrivers(
            self._make, name=lambda: self.name, monitors=lambda: self.monitors, look_s=0
        )

    def _make(self, name: str) -> ResourceDriver:
        self.made[name] = Driver()
        return self.made[name]  # type: ignore[return-value]

    def running(self) -> dict[str, bool | None]:
        """Those that run, and whether their pools are published."""
        return {name: each.is_published for name, each in self.made.items() if each.is_running}

    async def has(self, **expected: bool) -> None:
        wanted = {{"ours": OURS, "nvidias": NVIDIAS}[key]: value for key, value in expected.items()}
        async with asyncio.timeout(20):
            await until(lambda: self.running() == wanted)


def test_each_name_is_permitted_and_has_classes() -> None:
    """By the policy of the agent's manifest, and in files of their own."""
    manifests = Path(__file__).parents[4] / "deploy" / "manifests"
    (policy,) = (
        each
        for each in yaml.safe_load_all((manifests / "agent.yaml").read_text("utf-8"))
        if each["kind"] == "ValidatingAdmissionPolicy"
        and each["metadata"]["name"] == "allotment-agent-own-slices"
    )
    rules = [each["expression"] for each in policy["spec"]["validations"]]
    names = get_args(DriverName)
    assert f"variables.spec.driver in {[*names]}" in rules
    (writes,) = (
        rule
        for each in yaml.safe_load_all((manifests / "agent.yaml").read_text("utf-8"))
        if each["kind"] == "ClusterRole"
        for rule in each["rules"]
        if rule["resources"] == ["resourceclaims/driver"]
    )
    assert writes["resourceNames"] == [*names]
    for name, file in zip(names, ("device-classes", "device-classes-nvidia"), strict=True):
        text = (manifests / f"{file}.yaml").read_text("utf-8")
        for each in yaml.safe_load_all(text):
            (selector,) = each["spec"]["selectors"]
            assert selector["cel"]["expression"].startswith(f"device.driver == '{name}'")
            assert each["spec"].get("extendedResourceName") not in RESOURCES, "they are counted"


def test_the_configured_driver_runs_once_it_is_known() -> None:
    async def story() -> None:
        scene = Scene()
        task = asyncio.create_task(scene.drivers.run())
        scene.drivers.offer([])
        await asyncio.sleep(0)
        assert not scene.made
        scene.name = NVIDIAS
        await scene.has(nvidias=True)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(story())


def test_another_name_takes_over_when_the_former_has_no_slices() -> None:
    async def story() -> None:
        scene = Scene()
        scene.name = OURS
        task = asyncio.create_task(scene.drivers.run())
        scene.drivers.offer([])
        await scene.has(ours=True)
        scene.made[OURS].is_settled = False
        scene.name = NVIDIAS
        await scene.has(ours=False, nvidias=True)
        scene.made[OURS].is_settled = True
        await scene.has(nvidias=True)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(story())


def test_a_former_driver_serves_its_claims_to_their_end() -> None:
    """Also one that was configured before the agent started."""

    async def story() -> None:
        scene = Scene()
        scene.name = NVIDIAS
        scene.drivers.offer([claimed(OURS)])
        task = asyncio.create_task(scene.drivers.run())
        await scene.has(ours=False, nvidias=True)
        scene.drivers.offer([])
        await scene.has(nvidias=True)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(story())


def test_a_former_driver_serves_its_monitors_to_their_end() -> None:
    """They have no share."""

    async def story() -> None:
        scene = Scene()
        scene.name = NVIDIAS
        owner = claimed(OURS).owner
        assert owner is not None
        scene.monitors = [owner]
        scene.drivers.offer([])
        task = asyncio.create_task(scene.drivers.run())
        await scene.has(ours=False, nvidias=True)
        scene.monitors = []
        await scene.has(nvidias=True)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(story())


def test_an_api_server_without_claims_has_no_driver(tmp_path: Path) -> None:
    async def story() -> None:
        scene = driver_twin.Scene(tmp_path, None)
        scene.is_older = True
        task = asyncio.create_task(scene.driver.run())
        await until(lambda: scene.looks)
        assert not task.done(), "it looks again"
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(story())
    assert not list(tmp_path.glob("plugins*"))


def test_claims_of_another_name_are_taken_off_the_pool() -> None:
    """kube-scheduler counts the claims of each driver by themselves."""
    device = gpu(0)
    share = claimed(OURS)
    assert share.share is not None
    held = replace(share.share.devices[0], uuid=device.uuid, memory_bytes=4 << 30)
    shares = [replace(share, share=replace(share.share, devices=(held,)))]
    state = NodeState(devices={device.uuid: device})
    taken = {
        driver: gpus_of(state, shares, None, driver=driver)[0].taken.memory
        for driver in (OURS, NVIDIAS)
    }
    assert taken == {OURS: 0, NVIDIAS: 4 << 30}


def test_the_gpu_that_is_fullest_comes_first_also_by_its_slices() -> None:
    first, second = gpu(0), gpu(1)
    share = claimed(OURS)
    assert share.share is not None
    part = replace(share.share.devices[0], uuid="MIG-1", memory_bytes=1 << 30, gpu=second.uuid)
    shares = [replace(share, share=replace(share.share, mode="mig", devices=(part,)))]
    state = NodeState(devices={each.uuid: each for each in (first, second)})
    pool = pool_of(gpus_of(state, shares, None, driver=OURS), None)
    order = list(dict.fromkeys(each.part.uuid for each in pool.devices.values()))
    assert order == [second.uuid, first.uuid]

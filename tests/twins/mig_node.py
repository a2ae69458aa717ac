# SPDX-License-Identifier: Apache-2.0
"""A node's agent without a kubelet, on simulated GPUs that are cut for who asks."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from kubelet_twin import ContainerTwin, KubeletTwin, PodsTwin, PodTwin, ReportsTwin

from allotment.agent.allocation import Patience, Tenants
from allotment.agent.config.overlay import load
from allotment.agent.evictions import Evictions
from allotment.agent.inventory_publisher import build_inventory
from allotment.agent.mig.slices import NodeSlices
from allotment.agent.mig.state import CutGpu
from allotment.agent.node_state import NodeState
from allotment.agent.resources import GPU_SHARE, Offer, plan
from allotment.devices.mig_machine import MigDevice, MigMachine
from allotment.devices.simulated import SimulatedMachine, machine_path
from allotment.devices.watching import NvmlSession
from allotment.model.clusters import NodeDevice, NodeMig
from allotment.model.devices import Device
from allotment.model.mig import MigGpu
from allotment.model.pods import ContainerKind, PodUid
from allotment.model.shares import ShareId
from allotment.modes.mig.journal import Journal
from allotment.shares.folders import StateFolder
from allotment.shares.pods import NodeFolders, NodePolicy, PodShares

TENANT = Path(__file__).parents[1] / "local" / "mig_tenant.py"
SPEC = "h100-80gb:2"
SMALL = "1g.10gb"
SOFT = {"allotment.dev/mode": "soft"}
PROFILE = {"allotment.dev/mig-profile": SMALL}
PATIENCE = Patience(
    deadline=60, pod=5, room=(0.0, 0.05), departure=(), look=0.2, retry=0.05, pause=0.01
)
NOT_SEEN = CutGpu(profiles=(), is_enabled=False)
UNKNOWN = 999
"""NVML_ERROR_UNKNOWN."""
T = TypeVar("T")


class LiveState(NodeState, kw_only=True):
    """The state of a node whose devices are read when they are asked for."""

    node: Node

    @property  # type: ignore[misc] # in place of a field
    def devices(self) -> Mapping[str, Device]:
        return {each.uuid: each for each in self.node.devices()}

    @devices.setter
    def devices(self, devices: Mapping[str, Device]) -> None:
        pass


class Node:
    """A node's agent without a kubelet: its tenancy and its slices, on simulated GPUs."""

    def __init__(self, root: Path, rules: str = "[{mode: mig}]", spec: str = SPEC) -> None:
        self.root = root
        self.machine = machine_path(root, spec)
        self.spec = spec
        self.folder = StateFolder(root / "state")
        self.uuids = [each.uuid for each in self.devices()]
        self.state = LiveState(node=self)
        self.configure(rules)
        self.kubelet = KubeletTwin(self.state.offer)
        self.pods = PodsTwin()
        self.pods.is_synced = True
        self.start_agent()

    def configure(self, rules: str) -> None:
        config = f"version: v1\nflags: {{migStrategy: mixed}}\nallotment: {{devices: {rules}}}"
        self.config = load(config, source="c.yaml")
        self.state.offer = self.planned()

    def planned(self) -> Offer:
        return plan(self.devices(), {}, self.config)

    def devices(self) -> tuple[Any, ...]:
        return SimulatedMachine(self.machine).devices()

    def start_agent(self) -> None:
        self.reports = ReportsTwin()
        shares = PodShares(
            self.folder,
            machine=self.machine,
            spec=self.spec,
            folders=NodeFolders(cdi=self.root / "cdi"),
        )
        shares.tidy()
        self.slices = NodeSlices(
            self.folder,
            machine=self.machine,
            state=self.state,
            shares=lambda: self.tenants.shares,
            reports=self.reports,
            look_s=1.0,
        )
        self.tenants = Tenants(
            checkpoint=self.kubelet,
            pods=self.pods,
            evictions=Evictions(pods=self.pods, reports=self.reports),
            offer=lambda: self.state.offer,
            reports=self.reports,
            store=shares,
            policy=lambda _: NodePolicy(devices=self.devices(), mig=self.slices.terms()),
            clear=self.slices.clear,
            patience=PATIENCE,
        )

    def admit(
        self, uid: str, *containers: ContainerTwin, annotations: Mapping[str, str] | None = None
    ) -> PodTwin:
        pod = PodTwin(PodUid(uid), list(containers), annotations=dict(annotations or PROFILE))
        assert self.kubelet.admit(pod, self.tenants)
        self.hear()
        return pod

    def hear(self) -> None:
        while self.kubelet.news:
            self.pods.hear(*self.kubelet.news.popleft())

    async def start(self, pod: PodTwin, number: int = 0) -> str:
        return await self.kubelet.start(
            pod, pod.containers[number], self.tenants, lambda share: self.spec_of(share).exists()
        )

    def spec_of(self, share: ShareId) -> Path:
        return self.root / "cdi" / f"allotment.dev-share-{share}.json"

    def share_of(self, pod: PodTwin, number: int = 0) -> ShareId:
        share = self.kubelet.entry(pod, pod.containers[number]).share
        assert share is not None
        return share

    def remove(self, pod: PodTwin) -> None:
        self.kubelet.delete(pod)
        self.hear()

    def on(self, gpu: int, question: Callable[[MigDevice], T]) -> T:
        with MigMachine(self.machine) as gpus:
            return gpus.ask_one(gpu, question, patience_s=30)

    def look(self, gpu: int = 0) -> MigGpu:
        return self.on(gpu, lambda device: device.driver.look())

    def journal(self, gpu: int = 0) -> Journal:
        return Journal(self.folder.mig / self.uuids[gpu])

    def seen(self, gpu: int = 0) -> CutGpu:
        """What the agent knows of a GPU: nothing is there before it has looked."""
        return self.state.cut_gpus.get(self.uuids[gpu], NOT_SEEN)

    def there(self, gpu: int = 0) -> list[tuple[str, int]]:
        seen = self.look(gpu)
        names = {each.number: each.name for each in seen.profiles}
        return sorted((names[each.profile], each.start) for each in seen.instances)

    def seen_inside(self, share: ShareId) -> dict[str, Any]:
        """What a program of a share's container sees, by CUDA and NVML."""
        (device,) = json.loads(self.spec_of(share).read_text())["devices"]
        assert device["name"] == share
        edits = device["containerEdits"]
        mounts = {each["containerPath"]: each["hostPath"] for each in edits["mounts"]}
        assert all(Path(each).exists() for each in mounts.values()), mounts
        shim = next(each for each in mounts if each.startswith("/run/allotment/shim/"))
        library = mounts["/usr/lib/libcuda.so.1"]
        done = subprocess.run(
            [sys.executable, TENANT, "64"],
            env={
                "PATH": os.environ["PATH"],
                "LD_LIBRARY_PATH": str(Path(library).parent),
                "LD_PRELOAD": f"{mounts[shim]}/liballotment-shim.so",
                "ALLOTMENT_SHARE": str(Path(mounts[f"/run/allotment/share/{share}/policy"]).parent),
                "ALLOTMENT_SIMULATED_MACHINE": mounts["/run/allotment/simulated/machine"],
                "ALLOTMENT_SIMULATED_DEVICES": ",".join(
                    Path(mounts[f"/run/allotment/simulated/devices/{share}"]).read_text().split()
                ),
                **dict(each.split("=", 1) for each in edits["env"]),
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    async def until(self, is_so: Callable[[], object], what: str, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while not await asyncio.to_thread(is_so):
            assert time.monotonic() < deadline, (what, self.there(), self.reports.events)
            await asyncio.sleep(0.05)


def asking(name: str = "main", *, count: int = 1) -> ContainerTwin:
    return ContainerTwin(name, ContainerKind.REGULAR, resource=GPU_SHARE, count=count)


def at(*places: tuple[str, str, int]) -> dict[str, str]:
    """What a scheduler writes: slices by their GPU, profile and start."""
    main = {
        "mode": "mig",
        "devices": [uuid for uuid, _, _ in places],
        "slices": [[profile, start] for _, profile, start in places],
        "memory": 1,
    }
    return {
        **PROFILE,
        "allotment.dev/placement": json.dumps({"version": 1, "containers": {"main": main}}),
    }


Story = Callable[[], Coroutine[object, object, None]]


def tell(node: Node, story: Story, *, keeps: bool = True) -> None:
    """Tells a story while the agent's loops run; `keeps`: that of its slices as well."""

    async def told() -> None:
        session = NvmlSession(node.machine)
        session.open()  # the agent holds NVML for as long as it lives
        await node.tenants.adopt()
        loops = [asyncio.create_task(node.tenants.run())]
        loops += [asyncio.create_task(node.slices.run())] if keeps else []
        try:
            await story()
        finally:
            for each in loops:
                each.cancel()
            await asyncio.gather(*loops, return_exceptions=True)
            await node.tenants.close()
            session.close()

    asyncio.run(told())


def by_hand(device: MigDevice, *, start: int = 6) -> str:
    """Cuts one as nvidia-smi does, and returns its UUID."""
    device.driver.set_mode(is_on=True)
    profile = next(each for each in device.driver.look().profiles if each.name == SMALL)
    made = device.driver.create_gpu_instance(profile, start)
    return device.driver.create_compute_instance(made, profile).uuid


def removing(start: int, *, is_off: bool = False) -> Callable[[MigDevice], None]:
    """Removes the slice at a slot as nvidia-smi does; `is_off`: and the mode with it."""

    def remove(device: MigDevice) -> None:
        here = next(each for each in device.driver.look().instances if each.start == start)
        device.driver.destroy_compute_instances(here.gpu_instance)
        device.driver.destroy_gpu_instance(here.gpu_instance)
        if is_off:
            device.driver.set_mode(is_on=False)

    return remove


def told(node: Node) -> NodeDevice:
    """What schedulers hear of the first GPU."""
    found = build_inventory(node.state, {}, taken={})
    assert found is not None
    return found.devices[0]


def told_mig(node: Node) -> NodeMig:
    mig = told(node).mig
    assert mig is not None
    return mig


def has_told(node: Node, reason: str, times: int = 1) -> bool:
    return node.reports.reasons("node").count(reason) == times


def soft_on(uuid: str) -> dict[str, str]:
    place = f'{{"main": {{"mode": "soft", "devices": ["{uuid}"], "memory": {4 << 30}}}}}'
    return {**SOFT, "allotment.dev/placement": f'{{"version": 1, "containers": {place}}}'}

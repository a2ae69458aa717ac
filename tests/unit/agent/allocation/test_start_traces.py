# SPDX-License-Identifier: Apache-2.0
"""The node's spans of a pod: the kubelet's calls, and its programs' steps by their ledger."""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kubelet_twin import SOFT_DEVICES, ContainerTwin, PodTwin
from spans import RecordedTraces, attributes
from tenancy_scene import INIT, Scene, part, whole

from allotment import ledger
from allotment.agent.allocation.start_traces import StartTraces
from allotment.agent.resources import GPU_SHARE
from allotment.ledger import DevicePolicy, LedgerPolicy, layout
from allotment.model.errors import DoesNotFitError
from allotment.model.pods import ContainerKind, Owner, PodUid
from allotment.model.quantities import parse_memory
from allotment.model.requests import Request
from allotment.model.shares import ShareId
from allotment.model.structs import replace
from allotment.shares.folders import StateFolder
from allotment.shares.placing import ShareOrder

SECOND = 1_000_000_000
CREATED = "2026-11-29T08:00:00Z"


class Traced:
    """A node between twins, whose shares have real ledgers."""

    def __init__(self, scene: Scene, root: Path) -> None:
        self.scene = scene
        self.recorded = RecordedTraces()
        self.folder = StateFolder(root)
        self.now = time.time_ns()
        self.starts = StartTraces(
            self.recorded.traces,
            folder=self.folder,
            pods=scene.pods,
            checkpoint=scene.kubelet,
            shares=lambda: scene.tenants.shares,
            clock_ns=lambda: self.now,
        )

    def admit(self, uid: str, *containers: ContainerTwin) -> PodTwin:
        pod = self.scene.admit(uid, *containers)
        self.scene.pods.hear(pod.uid, replace(pod.seen(), created=CREATED))
        return pod

    async def start(self, pod: PodTwin, name: str = "main") -> Path:
        entry = self.scene.kubelet.entry(pod, self.scene.container(pod, name))
        self.starts.allocated(entry.resource, entry.ids, f"{self.now - 9}-{self.now - 5}")
        with self.starts.pre_start(entry.resource, entry.ids):
            try:
                await self.scene.tenants.pre_start(entry.resource, entry.ids)
            finally:
                self.now += SECOND
        assert entry.share is not None
        directory = self.folder.share(entry.share)
        directory.mkdir(parents=True)
        if entry.resource == GPU_SHARE:
            device = DevicePolicy(uuid="GPU-1", memory_limit=1 << 30)
            policy = LedgerPolicy(share_id=entry.share, share_name="s", devices=(device,))
            ledger.create(directory, policy)
        await self.starts.look()
        return directory

    async def look(self, after_ns: int = SECOND // 4) -> float | None:
        self.now += after_ns
        return await self.starts.look()


def write(directory: Path, at: int, value: int, kind: str = "Q") -> None:
    with (directory / "usage").open("r+b") as file:
        file.seek(at)
        file.write(struct.pack(f"={kind}", value))


@contextmanager
def program(directory: Path, *, began_ns: int) -> Iterator[None]:
    """A program of the share, as its shim takes a slot."""
    slot = layout.USAGE_SLOTS_AT
    booted_ns = time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    ticks = (began_ns - booted_ns) * os.sysconf("SC_CLK_TCK") // SECOND
    write(directory, slot + layout.SLOT_STATE_AT, layout.SLOT_TAKEN, "I")
    write(directory, slot + layout.SLOT_PID_AT, 7, "I")
    write(directory, slot + layout.SLOT_START_TIME_AT, ticks)
    write(directory, layout.USAGE_HIGH_SLOT_AT, 1, "I")
    with (directory / "usage").open("r+b") as file:
        lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, layout.SLOT_LOCK_BASE, 1, 0)
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, lock)
        yield


def counted(directory: Path, at: int, value: int) -> None:
    write(directory, layout.USAGE_DEVICES_AT + at, value)


Story = Callable[[Traced], Coroutine[object, object, None]]
Tell = Callable[[Story], RecordedTraces]


@pytest.fixture
def tell(tmp_path: Path, native_dir: Path) -> Tell:
    assert native_dir.is_dir()

    def told(story: Story) -> RecordedTraces:
        async def main() -> RecordedTraces:
            scene = Scene()
            await scene.tenants.adopt()
            try:
                traced = Traced(scene, tmp_path)
                await story(traced)
                return traced.recorded
            finally:
                await scene.tenants.close()

        return asyncio.run(main())

    return told


def test_a_start_has_each_step_until_the_first_launch(tell: Tell) -> None:
    times: list[int] = []

    async def story(node: Traced) -> None:
        directory = await node.start(node.admit("a", part()))
        ready = node.now
        with program(directory, began_ns=ready + SECOND // 10):
            assert await node.look() == 0.25
            counted(directory, layout.USAGE_DEVICE_LAUNCHES_AT, 3)
            counted(directory, layout.USAGE_DEVICE_PEAK_AT, 4096)
            assert await node.look() is None
            times.extend((ready, node.now))
            await node.look()

    recorded = tell(story)
    assert recorded.names == [
        "Allocate",
        "PreStartContainer",
        "program start",
        "first allocation",
        "first launch",
        "pod start",
    ]
    ready, launched = times
    assert recorded.times("PreStartContainer") == (ready - SECOND, ready)
    assert attributes(recorded.span("PreStartContainer"))["allotment.mode"] == "soft"
    began, program_began = recorded.times("program start")
    assert began == ready
    assert abs((program_began or 0) - (ready + SECOND // 10)) < SECOND // 50  # clock ticks
    assert recorded.times("first launch") == (program_began, launched)
    assert attributes(recorded.span("first launch"))["allotment.resolution_ms"] == 250
    assert recorded.times("pod start")[1] == launched
    assert attributes(recorded.span("pod start"))["allotment.last_step"] == "first launch"
    assert (recorded.times("pod start")[0] or 1) % SECOND == 0


def test_where_launches_are_not_counted_the_first_allocation_is_the_last_step(tell: Tell) -> None:
    async def story(node: Traced) -> None:
        directory = await node.start(node.admit("a", part()))
        counted(directory, layout.USAGE_DEVICE_PEAK_AT, 4096)
        assert await node.look() is None

    recorded = tell(story)
    assert attributes(recorded.span("pod start"))["allotment.last_step"] == "first allocation"
    assert "first launch" not in recorded.names


def test_a_mode_without_a_ledger_ends_with_its_container_running(tell: Tell) -> None:
    async def story(node: Traced) -> None:
        pod = node.admit("a", whole())
        await node.start(pod)
        assert await node.look() is not None
        seen = node.scene.pods.get(pod.uid)
        assert seen is not None
        running = tuple(replace(each, is_started=True) for each in seen.containers)
        node.scene.pods.hear(pod.uid, replace(seen, containers=running))
        assert await node.look() is None

    recorded = tell(story)
    assert attributes(recorded.span("pod start"))["allotment.last_step"] == "share made"


def test_a_refusal_is_recorded_once_and_so_is_the_success_after_it(tell: Tell) -> None:
    async def story(node: Traced) -> None:
        big = node.admit("big", part(memory=90))
        for _ in range(3):
            with pytest.raises(DoesNotFitError):
                await node.start(big)
            await node.look()

    recorded = tell(story)
    assert recorded.names == ["Allocate", "PreStartContainer"]
    assert recorded.span("PreStartContainer").status.description


def test_a_restart_is_no_start(tell: Tell) -> None:
    async def story(node: Traced) -> None:
        pod = node.admit("a", part())
        directory = await node.start(pod)
        counted(directory, layout.USAGE_DEVICE_PEAK_AT, 4096)
        await node.look()
        entry = node.scene.kubelet.entry(pod, node.scene.container(pod, "main"))
        with node.starts.pre_start(entry.resource, entry.ids):
            await node.scene.tenants.pre_start(entry.resource, entry.ids)
        assert await node.look() is None

    assert tell(story).names.count("PreStartContainer") == 1


def test_an_init_container_does_not_end_the_start(tell: Tell) -> None:
    async def story(node: Traced) -> None:
        pod = node.admit("a", part("first", INIT), part())
        directory = await node.start(pod, "first")
        counted(directory, layout.USAGE_DEVICE_PEAK_AT, 4096)
        await node.look()

    assert "pod start" not in tell(story).names


def test_a_claim_is_prepared_in_the_traces_of_its_pods(tell: Tell) -> None:
    async def story(node: Traced) -> None:
        for uid, claim in (("a", "quarter"), ("b", "quarter"), ("c", "half")):
            pod = node.admit(uid, part())
            seen = replace(pod.seen(), claims={claim: False}, created=CREATED)
            node.scene.pods.hear(pod.uid, seen)
        owner = Owner(
            uid=PodUid("claim"),
            namespace=seen.namespace,
            pod="quarter",
            container="gpu",
            kind=ContainerKind.REGULAR,
            resource="gpu.allotment.dev",
            is_claim=True,
        )
        order = ShareOrder(
            id=ShareId("5" * 16),
            request=Request(memory=parse_memory("4Gi")),
            owner=owner,
            candidates=SOFT_DEVICES,
        )
        with node.starts.prepare_claim([order]):
            await node.scene.tenants.prepare_claim(owner.uid, [order])
        await node.look()

    recorded = tell(story)
    assert {attributes(span)["k8s.pod.uid"] for span in recorded.spans} == {"a", "b"}
    prepared = [span for span in recorded.spans if span.name == "NodePrepareResources"]
    assert [attributes(span)["allotment.mode"] for span in prepared] == ["soft", "soft"]

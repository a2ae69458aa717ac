# SPDX-License-Identifier: Apache-2.0
"""The front without its agent, and one front after another, at a twin of the kubelet."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import pytest

from allotment.agent.plugin.front import ALIVE, OFFER, STATUS, _FolderWatch, read_status
from allotment.agent.plugin.front import LOCK as FRONT_LOCK
from allotment.agent.plugin.front_keeping import FrontKeeping
from allotment.agent.plugin.serving import AGENT_SOCKET, socket_name
from allotment.agent.protocols import SHARE_ANNOTATION
from allotment.model.errors import DoesNotFitError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.agent.plugin.conftest import World

GPU = "nvidia.com/gpu"
SHARE = "allotment.dev/gpu"


def test_pods_are_admitted_without_an_agent_and_start_with_the_next_one(world: World) -> None:
    async def story() -> None:
        kubelet = world.kubelet
        await kubelet.start()
        async with world.running(world.front().run()):
            async with world.agent(world.opaque(2), world.gpus(2)):
                await world.until(lambda: len(kubelet.healthy(SHARE)) == 2)
                await world.until(lambda: len(kubelet.healthy(GPU)) == 2)
            answers = [
                await kubelet.allocate(SHARE, [f"share::{n}"], pod=f"u{n}", container="c")
                for n in range(2)
            ]
            assert len({each.annotations[SHARE_ANNOTATION] for each in answers}) == 2
            # No device is preferred, and the kubelet takes any.
            assert await kubelet.preferred(GPU, ["GPU-0", "GPU-1"], 1) == []
            starting = asyncio.create_task(kubelet.pre_start(SHARE, ["share::0"]))
            await asyncio.sleep(0.5)
            assert not starting.done()
            async with world.agent(world.opaque(2), world.gpus(2)) as agent:
                assert agent.problem is not None  # ready only with an offer of its own
                await starting
                await world.until(lambda: agent.problem is None)
            assert world.tenancy.prepared == [(SHARE, frozenset({"share::0"}))]
            assert kubelet.ends == []
            assert sorted(kubelet.registrations) == [SHARE, GPU]
        await kubelet.stop()

    asyncio.run(story())


def test_an_agent_that_ends_in_the_middle_of_a_start_is_followed_by_the_next_one(
    world: World,
) -> None:
    async def story() -> None:
        kubelet = world.kubelet
        await kubelet.start()
        async with world.running(world.front().run()):
            async with world.agent(world.opaque(1)):
                await world.until(lambda: len(kubelet.healthy(SHARE)) == 1)
                world.tenancy.together = asyncio.Barrier(2)  # nobody else comes
                starting = asyncio.create_task(kubelet.pre_start(SHARE, ["share::0"]))
                await world.until(lambda: world.tenancy.waits > 0)
            world.tenancy.together = None
            async with world.agent(world.opaque(1)):
                await starting
        await kubelet.stop()

    asyncio.run(story())


def test_a_refusal_of_the_agents_is_final(world: World) -> None:
    async def story() -> None:
        kubelet = world.kubelet
        await kubelet.start()
        async with world.serving(world.opaque(1)):
            await world.until(lambda: len(kubelet.healthy(SHARE)) == 1)
            world.tenancy.error = DoesNotFitError("no room")
            with pytest.raises(grpc.aio.AioRpcError, match="no room"):
                await kubelet.pre_start(SHARE, ["share::0"])
            assert world.tenancy.failures == 1
            # Nor is an error of its own code one that another try would mend.
            world.tenancy.error = ValueError("of a defect")
            with pytest.raises(grpc.aio.AioRpcError, match="of a defect"):
                await kubelet.pre_start(SHARE, ["share::0"])
            assert world.tenancy.failures == 2

    asyncio.run(story())


def test_an_agent_that_stays_away_is_named_before_the_kubelet_gives_up(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allotment.agent.plugin.serving._PREPARE_S", 0.3)

    async def story() -> None:
        kubelet = world.kubelet
        await kubelet.start()
        async with world.running(world.front().run()):
            async with world.agent(world.opaque(1)):
                await world.until(lambda: len(kubelet.healthy(SHARE)) == 1)
            with pytest.raises(grpc.aio.AioRpcError, match="agent did not answer"):
                await kubelet.pre_start(SHARE, ["share::0"])
        await kubelet.stop()

    asyncio.run(story())


def test_a_front_that_was_killed_needs_no_agent_to_be_back(world: World) -> None:
    async def story() -> None:
        kubelet = world.kubelet
        await kubelet.start()
        async with world.running(world.front().run()), world.agent(world.opaque(2)):
            await world.until(lambda: len(kubelet.healthy(SHARE)) == 2)
        await world.until(lambda: kubelet.healthy(SHARE) == [])
        async with world.running(world.front().run()):
            await world.until(lambda: len(kubelet.healthy(SHARE)) == 2)
        await kubelet.stop()

    asyncio.run(story())


def test_a_damaged_offer_leaves_the_last_one_in_force(world: World) -> None:
    async def story() -> None:
        kubelet = world.kubelet
        await kubelet.start()
        async with world.serving(world.opaque(2)):
            await world.until(lambda: len(kubelet.healthy(SHARE)) == 2)
            (kubelet.folder / OFFER).write_text("{")
            await asyncio.sleep(0.5)
            assert len(kubelet.healthy(SHARE)) == 2

    asyncio.run(story())


def test_a_front_takes_over_and_no_device_is_unhealthy_for_a_moment(
    world: World, tmp_path: Path
) -> None:
    """The kubelet ends the plugin of a resource when the stream of any of its fronts ends."""
    world.haste = 1
    ready = tmp_path / "ready"

    async def story() -> None:
        kubelet = world.kubelet
        await kubelet.start()
        async with contextlib.AsyncExitStack() as stack:
            former = await stack.enter_async_context(world.running(world.front().run()))
            await stack.enter_async_context(world.agent(world.opaque(2), world.gpus(2)))
            await world.until(lambda: len(kubelet.healthy(GPU)) == 2)
            await world.until(lambda: read_status(world.state).is_ready)
            await stack.enter_async_context(world.running(world.front(ready_file=ready).run()))
            await world.until(ready.exists)
            assert len(kubelet.registrations) == 4
            # A kubelet that starts meanwhile has one front, the new one.
            former.cancel()
            await asyncio.wait({former})
            assert kubelet.ends == []
            await kubelet.allocate(GPU, ["GPU-0"], pod="u", container="c")
            # It registers again: from then on its own end is noticed, as it should be.
            await world.until(lambda: len(kubelet.registrations) == 6)
            await world.until(ready.exists)
            assert kubelet.clients.keys() == {GPU, SHARE}
            assert kubelet.ends == []
            await kubelet.allocate(GPU, ["GPU-1"], pod="u", container="c")
        assert set(kubelet.ends) == {GPU, SHARE}
        await kubelet.stop()

    asyncio.run(story())


def test_the_latest_front_never_gives_way(world: World) -> None:
    """Else both may take the other one for the later one, and neither registers."""

    async def story() -> None:
        kubelet = world.kubelet
        await kubelet.start()
        path = kubelet.folder / socket_name(GPU, kubelet.folder)
        with (world.state / FRONT_LOCK).open("a") as lock, socket.socket(socket.AF_UNIX) as other:
            fcntl.flock(lock, fcntl.LOCK_EX)
            async with world.agent(world.gpus(2)), world.running(world.front().run()):
                await world.until(lambda: len(kubelet.registrations) == 1)
                other.bind(str(kubelet.folder / "other"))
                other.listen()
                (kubelet.folder / "other").rename(path)
                await world.until(lambda: len(kubelet.registrations) == 2)
                await kubelet.allocate(GPU, ["GPU-0"], pod="u", container="c")
        await kubelet.stop()

    asyncio.run(story())


def test_a_front_takes_its_place_back_from_a_successor_that_fails(world: World) -> None:
    async def story() -> None:
        kubelet = world.kubelet
        await kubelet.start()
        async with world.running(world.front().run()), world.agent(world.gpus(2)):
            await world.until(lambda: len(kubelet.healthy(GPU)) == 2)
            async with world.running(world.front().run()):
                await world.until(lambda: len(kubelet.registrations) == 2)
                await world.until(lambda: GPU not in kubelet.clients)
            await world.until(lambda: len(kubelet.registrations) == 3)
            await world.until(lambda: len(kubelet.healthy(GPU)) == 2)
            await kubelet.allocate(GPU, ["GPU-0"], pod="u", container="c")
        await kubelet.stop()

    asyncio.run(story())


def test_devices_without_an_agent_for_long_are_unhealthy_until_it_is_back(world: World) -> None:
    async def story() -> None:
        kubelet = world.kubelet
        await kubelet.start()
        async with world.running(world.front(bridge_s=2.0).run()):
            async with world.agent(world.gpus(2)):
                await world.until(lambda: len(kubelet.healthy(GPU)) == 2)
                await asyncio.sleep(3.0 / world.haste)
                assert len(kubelet.healthy(GPU)) == 2
            await world.until(lambda: kubelet.healthy(GPU) == [])
            assert kubelet.capacity(GPU) == 2
            async with world.agent(world.gpus(2)):
                await world.until(lambda: len(kubelet.healthy(GPU)) == 2)
            assert kubelet.ends == []
        await kubelet.stop()

    asyncio.run(story())


def test_an_agent_that_does_not_answer_counts_as_absent(world: World) -> None:
    """The kernel takes connections for a process that hangs."""

    async def story() -> None:
        kubelet = world.kubelet
        await kubelet.start()
        async with world.running(world.front(bridge_s=2.0).run()):
            async with world.agent(world.gpus(2)):
                await world.until(lambda: len(kubelet.healthy(GPU)) == 2)
            with (
                socket.socket(socket.AF_UNIX) as hung,
                (world.state / "agent.lock").open("a") as lock,
            ):
                fcntl.flock(lock, fcntl.LOCK_EX)
                hung.bind(str(world.state / AGENT_SOCKET))
                hung.listen()
                await world.until(lambda: kubelet.healthy(GPU) == [])
        await kubelet.stop()

    asyncio.run(story())


def test_no_front_is_started_while_one_takes_over_from_another(world: World) -> None:
    """The former one has ended, and the later one does not have its lock yet."""

    async def story() -> None:
        await world.kubelet.start()
        async with world.running(world.front().run()), world.agent(world.gpus(1)) as agent:
            await world.until(lambda: agent.problem is None)
            (world.state / FRONT_LOCK).unlink()  # so that no process has it
            assert agent.problem is None
        await world.until(lambda: agent.problem == "no front is running")
        await world.kubelet.stop()

    asyncio.run(story())


def test_a_front_whose_folder_was_emptied_gives_way_to_the_next_one(world: World) -> None:
    """Else both take themselves for the latest one, and the kubelet's devices for theirs."""

    async def story() -> None:
        kubelet = world.kubelet
        await kubelet.start()
        async with world.agent(world.gpus(1)), world.running(world.front().run()):
            await world.until(lambda: len(kubelet.healthy(GPU)) == 1)
            for name in (FRONT_LOCK, ALIVE, STATUS):
                (world.state / name).unlink()
            async with world.running(world.front().run()):
                await world.until(lambda: len(kubelet.registrations) == 2)
                await asyncio.sleep(1.0)
                assert len(kubelet.registrations) == 2
        await kubelet.stop()

    asyncio.run(story())


def test_a_front_is_ready_when_it_has_an_offer_even_an_empty_one(
    world: World, tmp_path: Path
) -> None:
    ready = tmp_path / "ready"

    async def story() -> None:
        await world.kubelet.start()
        async with world.running(world.front(ready_file=ready).run()):
            await world.until((world.state / STATUS).exists)
            assert not read_status(world.state).is_ready
            assert not ready.exists()
            async with world.agent():
                await world.until(ready.exists)
        await world.kubelet.stop()

    asyncio.run(story())


def test_a_front_begins_without_the_ready_file_of_a_killed_one(tmp_path: Path) -> None:
    ready, state = tmp_path / "ready", tmp_path / "state"
    ready.touch()
    state.touch()  # no folder: the front ends before it serves
    words = ["front", "--ready-file", str(ready), "--state", str(state)]
    done = subprocess.run(
        [sys.executable, "-m", "allotment", *words], capture_output=True, check=False
    )
    assert done.returncode == 1
    assert not ready.exists()


def test_a_front_that_an_agent_started_ends_when_it_is_not_needed(world: World) -> None:
    async def story() -> None:
        kubelet = world.kubelet
        await kubelet.start()
        async with world.running(world.front(bridge_s=1.0, is_spawned=True).run()) as alone:
            async with world.agent(world.gpus(1)):
                await world.until(lambda: len(kubelet.healthy(GPU)) == 1)
                assert not alone.done()
            await world.until(alone.done)
        await kubelet.stop()

    asyncio.run(story())


def test_what_the_front_writes_is_private(world: World) -> None:
    async def story() -> None:
        await world.kubelet.start()
        async with world.serving(world.gpus(1)) as keeping:
            await world.until(lambda: keeping.registered == {GPU: True})
            for path in (world.state / STATUS, world.kubelet.folder / OFFER):
                assert path.stat().st_mode & 0o077 == 0

    asyncio.run(story())


@pytest.fixture
def systemd(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """What hears a unit of `Type=notify`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(str(world.state / "notify"))
        heard.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(world.state / "notify"))
        yield heard


async def notice(systemd: socket.socket) -> bytes:
    async with asyncio.timeout(30):
        return await asyncio.get_running_loop().sock_recv(systemd, 64)


@pytest.mark.parametrize("is_new", [False, True])
def test_systemd_starts_the_kubelet_when_a_front_watches_its_folder(
    world: World, systemd: socket.socket, *, is_new: bool
) -> None:
    """On a new node the kubelet has not made its folder yet: it starts after the front."""
    if is_new:
        world.kubelet.folder.rmdir()

    async def story() -> None:
        async with world.running(world.front().run()):
            assert await notice(systemd) == b"READY=1"
            assert world.kubelet.folder.is_dir()

    asyncio.run(story())


@pytest.mark.parametrize("is_watched", [True, False])
def test_systemd_waits_some_time_while_the_kernel_watches_nothing(
    world: World, systemd: socket.socket, *, is_watched: bool
) -> None:
    later, now = world.state / "later", 0.0
    world.kubelet.folder.rmdir()
    world.kubelet.folder.symlink_to(later)

    async def story() -> None:
        nonlocal now
        async with world.running(world.front(clock=lambda: now).run()):
            await world.until((world.state / STATUS).exists)
            with pytest.raises(BlockingIOError):
                systemd.recv(64)
            if is_watched:
                later.mkdir()
            else:
                now = 60.0  # a node without a kubelet is worse than a front that is slow to see it
            assert await notice(systemd) == b"READY=1"

    asyncio.run(story())


def test_a_folder_that_was_made_again_is_watched_again(world: World) -> None:
    folder, called = world.kubelet.folder, asyncio.Event()

    async def story() -> None:
        watch = _FolderWatch(folder, called.set)
        assert watch.renew() is None
        folder.rmdir()
        async with asyncio.timeout(30):
            await called.wait()  # the kernel says that it watches that one no more
            called.clear()
            assert watch.renew() == "No such file or directory"
            folder.mkdir()
            assert watch.renew() is None
            (folder / "kubelet.sock").touch()
            await called.wait()
        watch.close()

    asyncio.run(story())


def test_no_second_front_is_started_while_the_first_one_begins(world: World) -> None:
    """Its imports may take seconds; nor does an agent that begins meanwhile start one."""
    now = 100.0

    def agent() -> FrontKeeping:
        return FrontKeeping(
            kubelet=world.kubelet.socket,
            state=world.state,
            duties=world.duties,
            checkpoint=world.checkpoint,
            starts_front=True,
            clock=lambda: now,
        )

    def fronts(keeping: FrontKeeping) -> subprocess.Popen[bytes] | None:
        keeping._keep_front()  # noqa: SLF001 - once, without its loop
        return keeping._front  # noqa: SLF001

    keeping, next_one = agent(), agent()
    first = fronts(keeping)
    assert first is not None
    try:
        now += 60
        assert fronts(keeping) is first
        assert fronts(next_one) is None
    finally:
        first.kill()
        first.wait()
    second = fronts(next_one)
    assert second is not None
    second.kill()
    second.wait()

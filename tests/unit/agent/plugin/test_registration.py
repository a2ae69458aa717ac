# SPDX-License-Identifier: Apache-2.0
"""Resources at a twin of the kubelet: offered, changed, given up; the kubelet comes and goes."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import pytest

from allotment.agent.plugin.front import OFFER
from allotment.agent.plugin.serving import socket_name
from allotment.agent.protocols import SHARE_ANNOTATION
from allotment.agent.resources import Slot
from allotment.model.errors import DoesNotFitError
from allotment.model.structs import replace

if TYPE_CHECKING:
    from tests.unit.agent.plugin.conftest import World

GPU = "nvidia.com/gpu"
SHARE = "allotment.dev/gpu"


@pytest.fixture
def late_kubelet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kubelet may take its time to list what it registered: nobody registers a second time."""
    monkeypatch.setattr("allotment.agent.plugin.front._LISTEN_S", 3600.0)


def test_resources_are_offered_and_answered(world: World) -> None:
    more = world.tenancy.more
    more.envs["A"] = "b"
    more.mounts.add(host_path="/host", container_path="/inside", read_only=True)
    more.devices.add(host_path="/dev/host", container_path="/dev/inside", permissions="rw")

    async def story() -> None:
        await world.kubelet.start()
        async with world.serving(world.gpus(2), world.opaque(3)) as plugins:
            kubelet = world.kubelet
            await world.until(lambda: all(plugins.registered.values()))
            await world.until(lambda: kubelet.healthy(GPU) == ["GPU-0", "GPU-1"])
            await world.until(lambda: len(kubelet.healthy(SHARE)) == 3)
            assert kubelet.endpoints[GPU].numa == {"GPU-0": [0], "GPU-1": [1]}
            with_preferences, without = (kubelet.endpoints[name].options for name in (GPU, SHARE))
            assert with_preferences is not None
            assert without is not None
            assert with_preferences.pre_start_required
            assert with_preferences.get_preferred_allocation_available
            assert not without.get_preferred_allocation_available
            answer = await kubelet.allocate(SHARE, ["share::1"], pod="u-1", container="main")
            share = answer.annotations[SHARE_ANNOTATION]
            assert len(share) == 12
            assert [each.name for each in answer.cdi_devices] == [f"allotment.dev/share={share}"]
            assert dict(answer.envs) == {"A": "b"}
            mounts = [
                (each.host_path, each.container_path, each.read_only) for each in answer.mounts
            ]
            assert mounts == [("/host", "/inside", True)]
            (node,) = answer.devices
            found = (node.host_path, node.container_path, node.permissions)
            assert found == ("/dev/host", "/dev/inside", "rw")
            await kubelet.pre_start(SHARE, ["share::1"])
            assert world.tenancy.prepared == [(SHARE, frozenset({"share::1"}))]
            assert await kubelet.preferred(GPU, ["GPU-1", "GPU-0"], 1) == ["GPU-0"]
            world.tenancy.modes["GPU-0"] = "soft"
            assert await kubelet.preferred(GPU, ["GPU-1", "GPU-0"], 1) == ["GPU-1"]
            (entry,) = world.checkpoint.entries()
            assert (entry.pod, entry.container, entry.share) == ("u-1", "main", share)
        names = {name for name, _ in world.reports.observed}
        assert names == {"prepare_seconds", "preferred_seconds"}
        left = {each.name for each in world.kubelet.folder.glob("*allotment-*")}
        assert left == {OFFER}

    asyncio.run(story())


@pytest.mark.usefixtures("late_kubelet")
def test_a_change_is_told_at_once_and_once(world: World) -> None:
    async def story() -> None:
        await world.kubelet.start()
        async with world.serving(world.gpus(2)) as plugins:
            kubelet = world.kubelet
            await world.until(lambda: len(kubelet.healthy(GPU)) == 2)
            sick = replace(
                world.gpus(2), slots=(Slot("GPU-0", "GPU-0", is_healthy=False), Slot("new", "new"))
            )
            plugins.offer([sick])
            plugins.offer([sick])
            await world.until(lambda: kubelet.endpoints[GPU].lists == 2)
            assert kubelet.endpoints[GPU].devices == {"GPU-0": "Unhealthy", "new": "Healthy"}
            plugins.offer([replace(sick)])
            await asyncio.sleep(0.3)
            assert kubelet.endpoints[GPU].lists == 2
            assert kubelet.registrations == [GPU]

    asyncio.run(story())


@pytest.mark.usefixtures("late_kubelet")
def test_the_list_is_sent_again_for_the_checkpoint(world: World) -> None:
    async def story() -> None:
        await world.kubelet.start()
        async with world.serving(world.gpus(2)) as plugins:
            await world.until(lambda: len(world.kubelet.healthy(GPU)) == 2)
            plugins.relist()
            await world.until(lambda: world.kubelet.endpoints[GPU].lists == 2)

    asyncio.run(story())


@pytest.mark.usefixtures("late_kubelet")
def test_a_new_resource_comes_beside_those_that_are_there(world: World) -> None:
    async def story() -> None:
        await world.kubelet.start()
        async with world.serving(world.gpus(1)) as plugins:
            await world.until(lambda: plugins.registered == {GPU: True})
            plugins.offer([world.gpus(1), world.opaque(4)])
            await world.until(lambda: len(world.kubelet.healthy(SHARE)) == 4)
            assert world.kubelet.registrations == [GPU, SHARE]

    asyncio.run(story())


def test_what_is_given_up_is_empty_before_it_is_gone(world: World) -> None:
    async def story() -> None:
        await world.kubelet.start()
        async with world.serving(world.gpus(2), world.opaque(2)) as plugins:
            kubelet = world.kubelet
            await world.until(lambda: all(plugins.registered.values()))
            await world.until(lambda: len(kubelet.healthy(SHARE)) == 2)
            plugins.offer([world.gpus(2)])
            await world.until(lambda: kubelet.capacity(SHARE) == 0)
            await world.until(lambda: not kubelet.endpoints[SHARE].is_connected)
            # Not "2 unhealthy", which is what a plugin leaves behind that just ends.
            assert kubelet.capacity(SHARE) == 0
            assert kubelet.endpoints[SHARE].has_ended_well
            assert len(kubelet.healthy(GPU)) == 2

    asyncio.run(story())


@pytest.mark.usefixtures("late_kubelet")
def test_what_containers_have_stays_served_though_it_is_given_up(world: World) -> None:
    async def story() -> None:
        await world.kubelet.start()
        async with world.serving(world.opaque(2)) as plugins:
            kubelet = world.kubelet
            await world.until(lambda: len(kubelet.healthy(SHARE)) == 2)
            await kubelet.allocate(SHARE, ["share::0"], pod="u", container="c")
            plugins.offer([])
            await world.until(lambda: kubelet.capacity(SHARE) == 0)
            await asyncio.sleep(1.5 / world.haste)
            await kubelet.pre_start(SHARE, ["share::0"])  # the container was restarted
            assert kubelet.endpoints[SHARE].is_connected
            assert kubelet.registrations == [SHARE]

    asyncio.run(story())


def test_nothing_is_given_up_while_nobody_can_tell_who_has_it(world: World) -> None:
    async def story() -> None:
        await world.kubelet.start()
        async with world.serving(world.opaque(2)) as plugins:
            await world.until(lambda: len(world.kubelet.healthy(SHARE)) == 2)
            world.checkpoint.path.write_text("{")
            plugins.offer([])
            await world.until(lambda: world.kubelet.capacity(SHARE) == 0)
            await asyncio.sleep(1.5 / world.haste)
            assert world.kubelet.endpoints[SHARE].is_connected
            world.kubelet.write_checkpoint()
            await world.until(lambda: not world.kubelet.endpoints[SHARE].is_connected)

    asyncio.run(story())


def test_what_containers_have_is_served_by_an_agent_that_never_offered_it(world: World) -> None:
    async def story() -> None:
        await world.kubelet.start()
        async with world.serving(world.opaque(2)):
            await world.until(lambda: len(world.kubelet.healthy(SHARE)) == 2)
            await world.kubelet.allocate(SHARE, ["share::0"], pod="u", container="c")
        await world.kubelet.start()
        async with world.serving(world.gpus(1)):
            await world.until(lambda: SHARE in world.kubelet.endpoints)
            # A front may start before the agent and list the last offer first.
            endpoint = world.kubelet.endpoints[SHARE]
            await world.until(lambda: endpoint.lists >= 1 and not endpoint.devices)
            await world.kubelet.pre_start(SHARE, ["share::0"])

    asyncio.run(story())


@pytest.mark.usefixtures("late_kubelet")
def test_a_new_kubelet_is_registered_with(world: World) -> None:
    async def story() -> None:
        await world.kubelet.start()
        async with world.serving(world.gpus(2), world.opaque(1)):
            kubelet = world.kubelet
            for starts in range(1, 4):
                await world.until(lambda: len(kubelet.healthy(GPU)) == 2)
                await world.until(lambda: len(kubelet.healthy(SHARE)) == 1)
                assert len(kubelet.registrations) == 2 * starts
                await kubelet.restart()

    asyncio.run(story())


def test_a_new_kubelet_is_registered_with_though_it_left_the_sockets_there(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # At once, and not when it is noticed that nobody listens.
    monkeypatch.setattr("allotment.agent.plugin.front._LISTEN_S", 3600.0)

    async def story() -> None:
        await world.kubelet.start()
        async with world.serving(world.gpus(2)):
            await world.until(lambda: len(world.kubelet.healthy(GPU)) == 2)
            await world.kubelet.restart(wipes=False)
            await world.until(lambda: len(world.kubelet.healthy(GPU)) == 2)

    asyncio.run(story())


def test_an_offer_that_a_kubelet_removed_is_written_again(world: World) -> None:
    async def story() -> None:
        await world.kubelet.start()
        async with world.serving(world.gpus(2)):
            offer = world.kubelet.folder / OFFER
            await world.until(lambda: len(world.kubelet.healthy(GPU)) == 2)
            before = offer.read_bytes()
            await world.kubelet.restart(is_old=True)
            await world.until(lambda: len(world.kubelet.healthy(GPU)) == 2)
            await world.until(offer.exists)
            assert offer.read_bytes() == before

    asyncio.run(story())


def test_a_kubelet_that_comes_later_is_waited_for(world: World) -> None:
    async def story() -> None:
        async with world.serving(world.gpus(1)) as plugins:
            await asyncio.sleep(0.4)
            assert plugins.registered == {GPU: False}
            await world.kubelet.start()
            await world.until(lambda: plugins.registered == {GPU: True})
        assert world.reports.events == []

    asyncio.run(story())


def test_a_socket_that_was_removed_is_made_again(world: World) -> None:
    world.haste = 1  # the kubelet has to notice within that second

    async def story() -> None:
        await world.kubelet.start()
        async with world.serving(world.gpus(1)):
            kubelet = world.kubelet
            await world.until(lambda: len(kubelet.healthy(GPU)) == 1)
            old = kubelet.endpoints[GPU]
            removed = time.monotonic()
            (world.kubelet.folder / socket_name(GPU, kubelet.folder)).unlink()
            await world.until(lambda: not old.is_connected)
            await world.until(lambda: len(kubelet.registrations) == 2)
            # It had the time to notice before it heard of the new one.
            assert time.monotonic() - removed >= 1.0
            await world.until(lambda: len(kubelet.healthy(GPU)) == 1)
            await kubelet.allocate(GPU, ["GPU-0"], pod="u", container="c")

    asyncio.run(story())


def test_a_kubelet_that_hung_up_is_registered_with_again(world: World) -> None:
    async def story() -> None:
        await world.kubelet.start()
        async with world.serving(world.gpus(1)):
            kubelet = world.kubelet
            await world.until(lambda: len(kubelet.healthy(GPU)) == 1)
            await kubelet.hang_up(GPU)
            await world.until(lambda: len(kubelet.registrations) == 2)
            await world.until(lambda: len(kubelet.healthy(GPU)) == 1)

    asyncio.run(story())


def test_a_kubelet_of_another_version_is_told_of_once(world: World) -> None:
    async def story() -> None:
        world.kubelet.versions = ("v2",)
        await world.kubelet.start()
        async with world.serving(world.gpus(1)) as plugins:
            await world.until(lambda: len(world.kubelet.refusals) >= 6, within_s=30)
            assert plugins.registered == {GPU: False}
        ((reason, message),) = world.reports.events
        assert reason == "DevicePluginNotRegistered"
        assert "v1beta1" in message
        assert '["v2"]' in message
        assert "newer agent" in message
        # It is asked less and less often: after 1.6 s of the agent's clock, or 0.4 of ours.
        *_, fifth, sixth = world.kubelet.refusals
        assert sixth - fifth > 0.35

    asyncio.run(story())


def test_a_name_that_the_kubelet_refuses_does_not_keep_others_from_it(world: World) -> None:
    async def story() -> None:
        await world.kubelet.start()
        async with world.serving(world.gpus(1, name="gpu"), world.opaque(1)) as plugins:
            await world.until(lambda: plugins.registered[SHARE])
            await world.until(lambda: bool(world.reports.events))
        ((_, message),) = world.reports.events
        assert 'the ResourceName "gpu" is invalid' in message

    asyncio.run(story())


def test_a_refusal_says_what_is_wrong_and_what_to_do(world: World) -> None:
    async def story() -> None:
        await world.kubelet.start()
        async with world.serving(world.opaque(1)):
            await world.until(lambda: len(world.kubelet.healthy(SHARE)) == 1)
            world.tenancy.error = DoesNotFitError(
                "no GPU has 8Gi left:\n  GPU-0: need 8Gi, have 2Gi", hint="ask for less"
            )
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await world.kubelet.pre_start(SHARE, ["share::0"])
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert raised.value.details() == (
            "no GPU has 8Gi left: GPU-0: need 8Gi, have 2Gi; hint: ask for less"
        )

    asyncio.run(story())


def test_devices_that_no_container_can_get_are_told_of_once(world: World) -> None:
    world.tenancy.problem = "/dev/nvidia0 does not exist"

    async def story() -> None:
        await world.kubelet.start()
        async with world.serving(world.gpus(1)) as plugins:
            await world.until(lambda: plugins.registered == {GPU: True})
            plugins.offer([world.gpus(1), world.opaque(1)])
            await world.until(lambda: len(world.reports.events) == 2)
            with pytest.raises(grpc.aio.AioRpcError, match="/dev/nvidia0"):
                await world.kubelet.allocate(GPU, ["GPU-0"], pod="u", container="c")
        first, second = world.reports.events
        assert first == (
            "ResourceWithheld",
            f"the devices of {GPU} count as unhealthy: /dev/nvidia0 does not exist",
        )
        assert SHARE in second[1]

    asyncio.run(story())


def test_a_refused_allocation_says_why(world: World) -> None:
    async def story() -> None:
        await world.kubelet.start()
        async with world.serving(world.opaque(1)):
            await world.until(lambda: len(world.kubelet.healthy(SHARE)) == 1)
            with pytest.raises(grpc.aio.AioRpcError, match="unknown device: x") as raised:
                await world.kubelet.allocate(SHARE, ["x"], pod="u", container="c")
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "delete the pod" in (raised.value.details() or "")

    asyncio.run(story())


def test_many_containers_are_prepared_at_once(world: World) -> None:
    async def story() -> None:
        await world.kubelet.start()
        async with world.serving(world.opaque(20)):
            await world.until(lambda: len(world.kubelet.healthy(SHARE)) == 20)
            world.tenancy.together = asyncio.Barrier(20)  # none ends before all have begun
            await asyncio.gather(
                *(world.kubelet.pre_start(SHARE, [f"share::{n}"]) for n in range(20))
            )
        assert len(world.tenancy.prepared) == 20

    asyncio.run(story())


def test_what_a_killed_agent_left_is_removed(world: World) -> None:
    left = world.kubelet.folder / "allotment-old_resource.sock"

    async def story() -> None:
        await world.kubelet.start()
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(left))
        async with world.serving(world.gpus(1)) as plugins:
            await world.until(lambda: plugins.registered == {GPU: True})
            assert not left.exists()

    asyncio.run(story())


def test_a_folder_that_is_not_there_is_waited_for(world: World) -> None:
    world.kubelet.folder.rmdir()

    async def story() -> None:
        async with world.serving(world.gpus(1)) as plugins:
            await asyncio.sleep(0.5)
            await world.kubelet.start()
            await world.until(lambda: plugins.registered == {GPU: True})

    asyncio.run(story())


@pytest.mark.parametrize("name", [GPU, "nvidia.com/gpu.shared", "a/" + "x" * 61], ids=len)
def test_a_sockets_path_is_short_enough(name: str) -> None:
    folder = Path("/var/lib/kubelet/device-plugins")
    assert len(str(folder / socket_name(name, folder))) <= 107


def test_resources_have_sockets_of_their_own() -> None:
    names = ("a.b/c", "a/b.c", "a/b_c", "a.b/c-d", "a.b-c/d")
    assert len({socket_name(name, Path("/x")) for name in names}) == len(names)


def test_a_kubelet_that_is_not_there_is_waited_for_and_told_of(world: World) -> None:
    async def story() -> None:
        async with world.serving(world.gpus(2)) as plugins:
            socket = str(world.kubelet.folder / "kubelet.sock")
            await world.until(lambda: socket in (plugins.problem or ""))
            await world.kubelet.start()
            await world.until(lambda: plugins.problem is None)
            await world.until(lambda: all(plugins.registered.values()))

    asyncio.run(story())

# SPDX-License-Identifier: Apache-2.0
"""The driver's sockets: what a kubelet asks, of either version, and what it is answered.

The kubelet is a plain gRPC client here, and the shares are a twin's; tests/cluster has real ones.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from driver_twin import DEVICE, DRIVER, Scene, claim, result, serving
from mig_profiles import profiles as profiles_of
from own_node_twin import until

from allotment.agent.kubelet import services
from allotment.agent.kubelet.proto import dra_health_pb2 as health
from allotment.agent.kubelet.proto import pluginregistration_pb2 as registration
from allotment.agent.mig.state import CutGpu
from allotment.devices.facts import NodeFacts
from allotment.model.errors import (
    BusyError,
    NoDevicesError,
)
from allotment.model.mig import MigSlice
from allotment.model.pods import ContainerKind, Owner, PodUid
from allotment.model.shares import Injection, Share, ShareId
from allotment.model.structs import replace


def test_the_kubelet_finds_the_driver_and_its_versions(folder: Path) -> None:
    async def story() -> None:
        async with serving(folder):
            (announced,) = (folder / "plugins_registry").iterdir()
            async with grpc.aio.insecure_channel(f"unix:{announced}") as channel:
                info = await services.PLUGIN_INFO.on_aio(channel)(registration.InfoRequest())
            assert (info.type, info.name) == ("DRAPlugin", DRIVER)
            assert {"v1.DRAPlugin", "v1beta1.DRAPlugin"} <= set(info.supported_versions)
            assert {"v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth"} <= set(
                info.supported_versions
            )
        assert not list((folder / "plugins_registry").iterdir())
        assert not list((folder / "plugins" / DRIVER).iterdir())

    asyncio.run(story())


@pytest.mark.parametrize(
    ("kubelet", "version"),
    [
        pytest.param("1.36", "v1", id="v1"),
        pytest.param("1.33", "v1beta1", id="v1beta1 alone"),
    ],
)
def test_a_claim_is_prepared_and_released_for_either_version(
    folder: Path, kubelet: str, version: str
) -> None:
    async def story() -> None:
        async with serving(folder, claim(result()), kubelet=kubelet) as scene:
            assert f".{version}." in scene.service
            answer = await scene.prepare()
            again = await scene.prepare()
            assert answer.error == ""
            (device,) = answer.devices
            assert (device.pool_name, device.device_name) == ("n1", "gpu-0")
            assert list(device.request_names) == ["gpu"]
            one, other = scene.shares.orders
            assert list(device.cdi_device_ids) == [f"allotment.dev/share={one.id}"]
            assert device.share_id == "s1"
            assert again == answer
            assert one.id == other.id, "a repeated call finds its share"
            assert one.owner is not None
            assert (str(one.owner), one.owner.is_claim) == ("default/mine/gpu", True)
            assert one.devices == (DEVICE.uuid,)
            assert await scene.release() == ""
            assert scene.shares.released == ["u1"]

    asyncio.run(story())


def test_each_request_has_a_share_and_alternatives_are_of_their_parent(folder: Path) -> None:
    found = claim(result("a/first"), result("b", shareID="s2"), result("b", "gpu-0", shareID="s3"))

    async def story() -> None:
        async with serving(folder, found) as scene:
            answer = await scene.prepare()
            names = [list(each.request_names) for each in answer.devices]
            assert names == [["a"], ["b"], ["b"]]
            assert [len(each.cdi_device_ids) for each in answer.devices] == [1, 1, 0]
            assert [each.request.count for each in scene.shares.orders] == [1, 2]

    asyncio.run(story())


def test_another_drivers_devices_are_left_alone(folder: Path) -> None:
    async def story() -> None:
        found = claim(result(), result("nic", "eth0", driver="nic.example.com"))
        async with serving(folder, found) as scene:
            assert [each.device_name for each in (await scene.prepare()).devices] == ["gpu-0"]

    asyncio.run(story())


def test_a_claims_status_says_what_it_has_beside_other_drivers(folder: Path) -> None:
    theirs = {"driver": "nic.example.com", "pool": "p", "device": "eth0"}
    found = claim(result())
    found["metadata"]["resourceVersion"] = "7"
    found["status"]["devices"] = [theirs]

    async def story() -> None:
        async with serving(folder, found, look_s=60) as scene:
            scene.is_denied = True
            assert (await scene.prepare()).error == "", "the share is complete without it"
            await until(lambda: scene.written)
            scene.is_denied = False
            await scene.prepare()
            await until(lambda: len(scene.written) > 1)
            path = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/mine/status"
            assert scene.written[-1].path == path
            document = json.loads(scene.written[-1].body or b"")
            assert document["metadata"] == {"resourceVersion": "7"}
            first, own = document["status"]["devices"]
            assert first == theirs
            assert [own[key] for key in ("driver", "pool", "device", "shareID")] == [
                *(DRIVER, "n1", "gpu-0", "s1")
            ]
            assert own["conditions"][0]["lastTransitionTime"] == "1970-01-01T00:00:01Z"
            assert own["data"] == {
                "share": scene.shares.orders[0].id,
                "mode": "soft",
                "enforced": True,
                "memory_limit_bytes": 4 << 30,
                "compute": {"guarantee_percent": 0, "ceiling_percent": 100},
            }
            # It is so already: nothing is written.
            scene.claim = {**found, "status": {**found["status"], **document["status"]}}
            await scene.prepare()
            scene.claim = found
            await scene.prepare()
            await until(lambda: len(scene.written) > 2)
            assert len(scene.written) == 3
            assert scene.reads == 4, "each preparation has read it, and its status needs no more"
            # A claim that has changed meanwhile is read again.
            scene.conflicts = 1
            await scene.prepare()
            await until(lambda: len(scene.written) == 4)
            assert scene.reads == 6

    asyncio.run(story())


def test_a_monitor_sees_its_gpu_and_takes_nothing(folder: Path) -> None:
    devices = ("gpu-0-monitor", "gpu-0-whole")
    admin = [result("watch", name, adminAccess=True, shareID="") for name in devices]

    async def story() -> None:
        async with serving(folder, claim(*admin, result())) as scene:
            first, second, third = (await scene.prepare()).devices
            (name,) = first.cdi_device_ids
            kind, _, monitor = name.partition("=")
            assert kind == "allotment.dev/monitor"
            assert list(second.cdi_device_ids) == []
            assert third.cdi_device_ids[0].startswith("allotment.dev/share=")
            assert [each.request.count for each in scene.shares.orders] == [1]
            (spec,) = (folder / "cdi").iterdir()
            document = json.loads(spec.read_text())
            assert document["kind"] == kind
            (device,) = document["devices"]
            assert device["name"] == monitor
            assert device["containerEdits"]["deviceNodes"] == [{"path": "/dev/nvidia0"}]
            assert device["containerEdits"]["mounts"] == []
        # The next agent knows it by the folder alone.
        async with serving(folder, None) as scene:
            assert await scene.release() == ""
        assert not list((folder / "cdi").iterdir())
        assert not list((folder / "state" / "monitors").iterdir())

    asyncio.run(story())


def test_a_release_that_has_to_wait_is_told(folder: Path) -> None:

    async def story() -> None:
        async with serving(folder) as scene:
            scene.shares.refusal = BusyError("share x is in use by 1 process (7)")
            assert "in use by 1 process" in await scene.release()
            scene.shares.refusal = None
            assert await scene.release() == ""
            assert scene.shares.released == ["u1", "u1"]

    asyncio.run(story())


def left_over(uid: str) -> tuple[Share, ...]:
    """The share of a claim that an agent finds at its start."""
    whose = Owner(
        uid=PodUid(uid),
        namespace="default",
        pod="mine",
        container="gpu",
        kind=ContainerKind.REGULAR,
        resource=DRIVER,
        is_claim=True,
    )
    pods = replace(whose, uid=PodUid("pod"), is_claim=False)
    return tuple(
        Share(
            id=ShareId(each.uid),
            name=str(each),
            created=1.0,
            mode="soft",
            devices=(),
            injection=Injection.CDI,
            owner=each,
        )
        for each in (whose, pods)
    )


OTHER_NODE = claim(result(pool="n2"))
UNALLOCATED = {**claim(), "status": {}}


@pytest.mark.parametrize(
    ("found", "is_ended"),
    [
        pytest.param(None, True, id="gone"),
        pytest.param(claim(result(), uid="u2"), True, id="replaced"),
        pytest.param(UNALLOCATED, True, id="not allocated"),
        pytest.param(OTHER_NODE, True, id="on another node"),
        pytest.param(claim(result()), False, id="needed"),
    ],
)
def test_a_claim_whose_release_was_lost_is_ended(
    folder: Path, found: dict[str, Any] | None, *, is_ended: bool
) -> None:
    async def story() -> None:
        async with serving(folder, found) as scene:
            scene.is_down = True
            scene.shares.shares = left_over("u1")
            await until(lambda: scene.reads > 1)
            assert scene.shares.released == [], "nothing is ended without an answer"
            scene.is_down = False
            if not is_ended:
                before = scene.reads
                await until(lambda: scene.reads > before + 2)
                assert scene.shares.released == []
                return
            scene.shares.refusal = BusyError("share x is in use by 1 process (7)")
            await until(lambda: len(scene.shares.released) > 1)
            scene.shares.refusal = None
            before = len(scene.shares.released)
            await until(lambda: len(scene.shares.released) > before)
            assert set(scene.shares.released) == {"u1"}

    asyncio.run(story())


def test_health_is_told_and_told_again(folder: Path) -> None:
    method = services.watch_health(services.HEALTH_SERVICES["v1alpha1.DRAResourceHealth"])

    async def story() -> None:
        async with serving(folder) as scene:
            watching = scene.channel.unary_stream(
                method.path,
                request_serializer=method.ask.SerializeToString,
                response_deserializer=method.reply.FromString,
            )(health.NodeWatchResourcesRequest(), timeout=10)
            call: Any = watching
            first = await call.read()
            assert {each.health for each in first.devices} == {health.HEALTHY}
            scene.state.unusable = {DEVICE.uuid: "XID 79"}
            scene.driver.offer([])
            told = [first]
            while {each.health for each in told[-1].devices} == {health.HEALTHY}:
                told.append(await call.read())
            assert {each.health for each in told[-1].devices} == {health.UNHEALTHY}
            assert {each.message for each in told[-1].devices} == {"XID 79"}
            call.cancel()

    asyncio.run(story())


def test_a_call_that_the_kubelet_gave_up_is_done_before_the_next_one(folder: Path) -> None:
    """It waits for 45 s. Nothing is released while it is still being made."""

    async def story() -> None:
        async with serving(folder, claim(result())) as scene:
            scene.shares.is_open.clear()
            with pytest.raises(grpc.aio.AioRpcError):
                await scene.prepare(timeout_s=0.3)
            releasing = asyncio.create_task(scene.release())
            again = asyncio.create_task(scene.prepare(timeout_s=20))
            await asyncio.sleep(0.2)
            assert not scene.shares.released
            scene.shares.is_open.set()
            assert await releasing == ""
            assert (await again).error == ""
            assert scene.shares.released == ["u1"]
            assert len(scene.shares.orders) == 2, "the one that was given up, and the next"

    asyncio.run(story())


@pytest.mark.parametrize("change", ["another device", "another alternative"])
def test_a_claim_that_is_allocated_anew_keeps_nothing_of_the_former_time(
    folder: Path, change: str
) -> None:
    """Its release was lost, and a scheduler chose again."""

    async def story() -> None:
        async with serving(folder, claim(result("gpu/large"))) as scene:
            assert (await scene.prepare()).error == ""
            assert not scene.shares.released
            (before,) = scene.shares.shares
            if change == "another device":
                elsewhere = replace(before.devices[0], uuid="GPU-1")
                scene.shares.shares = (replace(before, devices=(elsewhere,)),)
            else:
                scene.claim = claim(result("gpu/small"))
            scene.shares.refusal = BusyError("share x is in use by 1 process (7)")
            assert "in use" in (await scene.prepare()).error
            scene.shares.refusal = None
            scene.shares.released.clear()
            assert (await scene.prepare()).error == ""
            assert scene.shares.released == ["u1"]

    asyncio.run(story())


@pytest.mark.parametrize("start", [2, 3])
def test_a_claim_of_a_slice_that_is_allocated_anew_gets_the_new_place(
    folder: Path, start: int
) -> None:
    async def story() -> None:
        async with serving(folder, claim(result(device="gpu-0-mig-1g-10gb-3"))) as scene:
            profiles = profiles_of("A100-80GB")
            number = next(each.number for each in profiles if each.name == "1g.10gb")
            cut = CutGpu(profiles=profiles, is_enabled=True)
            scene.state.cut_gpus[DEVICE.uuid] = cut
            scene.driver.offer([])
            assert (await scene.prepare()).error == ""
            holder = scene.shares.shares[0].id
            held = MigSlice(profile=number, start=start, size=1, holder=holder)
            scene.state.cut_gpus[DEVICE.uuid] = replace(cut, slices=(held,))
            assert (await scene.prepare()).error == ""
            assert scene.shares.released == ([] if start == 3 else ["u1"])

    asyncio.run(story())


def test_a_status_that_meets_with_another_write_is_written_again(folder: Path) -> None:
    async def story() -> None:
        async with serving(folder, claim(result())) as scene:
            scene.conflicts = 2
            await scene.prepare()
            await until(lambda: scene.written)

    asyncio.run(story())


def test_health_is_told_before_the_kubelet_forgets_it(folder: Path) -> None:
    """Without news for `health_check_timeout_seconds` a device is Unknown to it."""
    method = services.watch_health(services.HEALTH_SERVICES["v1.DRAResourceHealth"])

    async def story() -> None:
        async with serving(folder) as scene:
            call: Any = scene.channel.unary_stream(
                method.path,
                request_serializer=method.ask.SerializeToString,
                response_deserializer=method.reply.FromString,
            )(health.NodeWatchResourcesRequest(), timeout=10)
            first, second = await call.read(), await call.read()
            assert first == second
            call.cancel()

    asyncio.run(story())


def test_sockets_of_killed_agents_are_removed(folder: Path) -> None:
    former = [
        folder / "plugins" / DRIVER / "dra-0123abcd.sock",
        folder / "plugins_registry" / f"{DRIVER}-0123abcd-reg.sock",
    ]
    others = [
        folder / "plugins_registry" / "nic.example.com-0123abcd-reg.sock",
        folder / "plugins_registry" / f"{DRIVER}-59d14df3-a9d4-43c6-a1e6-eac1c15f9a0c-reg.sock",
    ]
    for each in (*former, *others):
        each.parent.mkdir(parents=True, exist_ok=True)
        each.touch()

    async def story() -> None:
        scene = Scene(folder, None)
        task = asyncio.create_task(scene.driver.run())
        async with asyncio.timeout(20):
            await until(lambda: not any(each.exists() for each in former))
        assert all(each.exists() for each in others)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(story())


# ---- in the place of NVIDIA's driver -------------------------------------------------------------

NVIDIAS = "gpu.nvidia.com"


def nvidias(strategy: str = "TimeSlicing", *, named: bool = False, **more: Any) -> dict[str, Any]:  # noqa: ANN401
    """A claim of NVIDIA's class with a GpuConfig."""
    capacity = {"capacity": {"requests": {"memory": "4Gi"}}} if named else {}
    found = claim(
        result(driver=NVIDIAS),
        requests=[{"name": "gpu", "exactly": {"deviceClassName": NVIDIAS, **capacity}}],
    )
    parameters = {
        "apiVersion": "resource.nvidia.com/v1beta1",
        "kind": "GpuConfig",
        "sharing": {"strategy": strategy, **more},
    }
    config = [{"source": "FromClaim", "opaque": {"driver": NVIDIAS, "parameters": parameters}}]
    found["status"]["allocation"]["devices"]["config"] = config
    return found


def test_a_claim_that_names_no_amount_has_the_whole_gpu(folder: Path) -> None:
    async def story() -> None:
        found = nvidias()
        del found["status"]["allocation"]["devices"]["config"]
        async with serving(folder, found, NVIDIAS) as scene:
            assert (await scene.prepare()).error == ""
            (order,) = scene.shares.orders
            assert order.request.mode == "exclusive"
            assert order.owner is not None
            assert order.owner.resource == NVIDIAS
            scene.claim = nvidias(named=True)
            assert (await scene.prepare()).error == ""
            assert scene.shares.orders[-1].request.mode == "soft"
            assert scene.shares.orders[-1].request.memory.size_bytes == 4 << 30

    asyncio.run(story())


def test_a_time_slice_is_set_for_the_claim_and_set_back(folder: Path) -> None:
    async def story() -> None:
        long = nvidias(timeSlicingConfig={"interval": "Long"})
        async with serving(folder, long, NVIDIAS) as scene:
            assert (await scene.prepare()).error == ""
            assert scene.shares.orders[0].request.mode == "timeslice"
            assert scene.sliced == [(DEVICE.uuid, "long")]
            assert await scene.release() == ""
            assert scene.sliced[1:] == [(DEVICE.uuid, "default")]
            assert scene.shares.released == ["u1"]

    asyncio.run(story())


def test_a_claim_whose_time_slice_cannot_be_set_has_no_share(folder: Path) -> None:
    async def story() -> None:
        long = nvidias(timeSlicingConfig={"interval": "Long"})
        async with serving(folder, long, NVIDIAS) as scene:
            scene.slicing_fails = True
            assert "nvidia-smi is missing" in (await scene.prepare()).error
            assert scene.shares.released == ["u1"]
            assert scene.sliced[-1] == (DEVICE.uuid, "default"), "of several GPUs one may have it"

    asyncio.run(story())


def test_a_running_claim_whose_time_slice_cannot_be_set_again_keeps_its_share(folder: Path) -> None:
    """For its next pod, after a restart of the kubelet."""

    async def story() -> None:
        long = nvidias(timeSlicingConfig={"interval": "Long"})
        async with serving(folder, long, NVIDIAS) as scene:
            assert (await scene.prepare()).error == ""
            scene.slicing_fails = True
            assert "nvidia-smi is missing" in (await scene.prepare()).error
            assert scene.shares.released == []

    asyncio.run(story())


def test_facts_that_are_being_read_are_read_again(folder: Path) -> None:
    async def story() -> None:
        scene = Scene(folder, None)
        asked = 0

        def facts() -> NodeFacts:
            nonlocal asked
            asked += 1
            if asked == 1:
                raise NoDevicesError("NVML has not answered")
            return NodeFacts(driver_version="580.95.05", cuda_version=(13, 0))

        scene.driver._facts = facts  # noqa: SLF001 - the reader of the node
        task = asyncio.create_task(scene.driver.run())
        async with asyncio.timeout(20):
            await until(lambda: list((folder / "plugins_registry").glob("*-reg.sock")))
        assert asked == 2
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(story())

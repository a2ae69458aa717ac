# SPDX-License-Identifier: Apache-2.0
"""The driver's sockets: what a kubelet asks, of either version, and what it is answered.

The kubelet is a plain gRPC client here, and the shares are a twin's; tests/cluster has real ones.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc.aio
import pytest
from api_server_twin import Reply, answered, api_of
from gpus import gpu
from kubelet_twin import ReportsTwin
from own_node_twin import OwnNodeTwin, until

from allotment.agent.dra.driver import ResourceDriver
from allotment.agent.kubelet import services
from allotment.agent.kubelet.proto import dra_health_pb2 as health
from allotment.agent.kubelet.proto import dra_pb2 as dra
from allotment.agent.kubelet.proto import pluginregistration_pb2 as registration
from allotment.agent.node_state import NodeState
from allotment.devices.facts import NodeFacts
from allotment.devices.timeslices import TimeSlice
from allotment.kube.clients import HttpRequest
from allotment.model.devices import Device
from allotment.model.errors import (
    BusyError,
    DoesNotFitError,
    NoDevicesError,
    PrerequisiteError,
)
from allotment.model.pods import ContainerKind, Owner, PodUid
from allotment.model.shares import Injection, Share, ShareDevice, ShareId
from allotment.model.structs import replace
from allotment.shares.cdi import CdiContent
from allotment.shares.folders import StateFolder
from allotment.shares.monitors import Monitors
from allotment.shares.placing import ShareOrder

DRIVER = "gpu.allotment.dev"
DEVICE = gpu(0)


class Shares:
    """What `Tenants` does with claims, without shares."""

    def __init__(self) -> None:
        self.orders: list[ShareOrder] = []
        self.released: list[str] = []
        self.shares: tuple[Share, ...] = ()
        self.refusal: Exception | None = None

    async def prepare_claim(self, _: PodUid, orders: Sequence[ShareOrder]) -> tuple[Share, ...]:
        if self.refusal is not None:
            raise self.refusal
        self.orders += orders
        self.shares = tuple(
            Share(
                id=order.id,
                name=str(order.owner),
                created=1.0,
                mode=order.request.mode,
                devices=(ShareDevice(DEVICE.uuid, DEVICE.name, 4 << 30),),
                injection=Injection.CDI,
                owner=order.owner,
            )
            for order in orders
        )
        return self.shares

    async def release_claim(self, uid: PodUid) -> None:
        self.released.append(uid)
        if self.refusal is not None:
            raise self.refusal


def claim(*results: dict[str, Any], uid: str = "u1", **spec: Any) -> dict[str, Any]:  # noqa: ANN401
    return {
        "metadata": {"name": "mine", "namespace": "default", "uid": uid},
        "spec": {"devices": spec},
        "status": {"allocation": {"devices": {"results": list(results)}}},
    }


def result(request: str = "gpu", device: str = "gpu-0", **fields: Any) -> dict[str, Any]:  # noqa: ANN401
    return {
        "request": request,
        "driver": DRIVER,
        "pool": "n1",
        "device": device,
        "shareID": "s1",
        "consumedCapacity": {"memory": "4Gi", "compute": "30"},
        **fields,
    }


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a path that is short enough for sockets."""
    with TemporaryDirectory(prefix="dra-") as name:
        yield Path(name)


def seen(directory: Path, visible: Path, devices: Sequence[Device]) -> CdiContent:
    """What a container sees of real GPUs."""
    assert visible.parent == directory
    nodes = [{"path": f"/dev/nvidia{each.index}"} for each in devices]
    return CdiContent(directory=directory, driver={"deviceNodes": nodes})


class Scene:
    """A driver that serves, and a kubelet's channel to it."""

    def __init__(
        self,
        folder: Path,
        found: dict[str, Any] | None,
        driver: str = DRIVER,
        *,
        look_s: float = 0.01,
    ) -> None:
        self.sliced: list[tuple[str, str]] = []
        self.slicing_fails = False
        self.shares = Shares()
        self.reports = ReportsTwin()
        self.claim = found
        self.reads = 0
        self.is_down = False
        self.is_denied = False
        self.is_outdated = False
        self.written: list[HttpRequest] = []
        self.folder = folder
        self.state = NodeState(devices={DEVICE.uuid: DEVICE})
        self.driver = ResourceDriver(
            api_of(self._answer),
            driver=driver,
            node=OwnNodeTwin(),  # type: ignore[arg-type]
            name="n1",
            state=self.state,
            tenants=self.shares,  # type: ignore[arg-type]
            monitors=Monitors(StateFolder(folder / "state"), cdi_folder=folder / "cdi", sight=seen),
            reports=self.reports,
            facts=lambda: NodeFacts(driver_version="580.95.05", cuda_version=(13, 0)),
            set_time_slice=self._slice_time,
            kubelet=folder,
            look_s=look_s,
        )
        self.channel: grpc.aio.Channel

    def _slice_time(self, uuid: str, length: TimeSlice) -> None:
        if self.slicing_fails:
            raise PrerequisiteError("nvidia-smi is missing")
        self.sliced.append((uuid, str(length)))

    def _answer(self, request: HttpRequest) -> Reply:
        if "/resourceclaims/" in request.path:
            if request.method == "PATCH":
                self.written.append(request)
                if self.is_outdated:
                    self.is_outdated = False
                    return answered({"code": 409, "reason": "Conflict"}, 409)
                return answered({"code": 403}, 403) if self.is_denied else answered({})
            self.reads += 1
            if self.is_down:
                return answered({"code": 503}, 503)
            return answered(self.claim, 200) if self.claim else answered({"code": 404}, 404)
        if request.path.endswith("/resourceslices") and request.method == "GET":
            return answered({"metadata": {"resourceVersion": "1"}, "items": []})
        return answered({"metadata": {"name": "x", "uid": "x"}})

    async def call(self, method: services.Method[Any, Any], asked: Any) -> Any:  # noqa: ANN401
        return await method.on_aio(self.channel)(asked, timeout=10)

    async def prepare(
        self, version: str = "v1", uid: str = "u1"
    ) -> dra.NodePrepareResourceResponse:
        method = services.prepare_resources(services.DRA_SERVICES[f"{version}.DRAPlugin"])
        asked = dra.Claim(namespace="default", name="mine", uid=uid)
        answer = await self.call(method, dra.NodePrepareResourcesRequest(claims=[asked]))
        found: dra.NodePrepareResourceResponse = answer.claims[uid]
        return found


@asynccontextmanager
async def serving(
    folder: Path,
    found: dict[str, Any] | None = None,
    driver: str = DRIVER,
    *,
    look_s: float = 0.01,
) -> AsyncIterator[Scene]:
    scene = Scene(folder, found, driver, look_s=look_s)
    task = asyncio.create_task(scene.driver.run())
    try:
        async with asyncio.timeout(20):
            await until(lambda: list((folder / "plugins_registry").glob("*-reg.sock")))
        (announced,) = (folder / "plugins_registry").glob("*-reg.sock")
        scene.driver.offer([])
        async with grpc.aio.insecure_channel(
            f"unix:{announced}", options=services.CHANNEL_OPTIONS
        ) as channel:
            scene.channel = channel
            info = await scene.call(services.PLUGIN_INFO, registration.InfoRequest())
        async with grpc.aio.insecure_channel(
            f"unix:{info.endpoint}", options=services.CHANNEL_OPTIONS
        ) as channel:
            scene.channel = channel
            yield scene
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


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


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
def test_a_claim_is_prepared_for_either_version(folder: Path, version: str) -> None:
    async def story() -> None:
        async with serving(folder, claim(result())) as scene:
            answer = await scene.prepare(version)
            again = await scene.prepare(version)
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


def test_what_is_wrong_is_told_for_its_claim_alone(folder: Path) -> None:
    async def story() -> None:
        async with serving(folder, claim(result())) as scene:
            assert "gone, or another one has its name" in (await scene.prepare(uid="u2")).error
            scene.claim = None
            assert "gone" in (await scene.prepare()).error
            scene.claim = {**claim(), "status": {}}
            assert "is not allocated" in (await scene.prepare()).error
            scene.claim = claim(result(device="gpu-0-monitor"))
            assert "type monitor gives no part" in (await scene.prepare()).error
            scene.claim = claim(result())
            scene.shares.refusal = DoesNotFitError("need 4Gi, have 1Gi")
            assert "need 4Gi, have 1Gi" in (await scene.prepare()).error
            assert not scene.shares.orders

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
            scene.is_outdated = True
            await scene.prepare()
            await until(lambda: len(scene.written) == 5)
            assert scene.reads == 6

    asyncio.run(story())


def test_a_monitor_sees_its_gpu_and_takes_nothing(folder: Path) -> None:
    method = services.unprepare_resources(services.DRA_SERVICES["v1.DRAPlugin"])
    asked = dra.NodeUnprepareResourcesRequest(
        claims=[dra.Claim(namespace="default", name="mine", uid="u1")]
    )
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
            answer = await scene.call(method, asked)
            assert answer.claims["u1"].error == ""
        assert not list((folder / "cdi").iterdir())
        assert not list((folder / "state" / "monitors").iterdir())

    asyncio.run(story())


def test_a_release_that_has_to_wait_is_told(folder: Path) -> None:
    method = services.unprepare_resources(services.DRA_SERVICES["v1.DRAPlugin"])
    asked = dra.NodeUnprepareResourcesRequest(
        claims=[dra.Claim(namespace="default", name="mine", uid="u1")]
    )

    async def story() -> None:
        async with serving(folder) as scene:
            scene.shares.refusal = BusyError("share x is in use by 1 process (7)")
            answer = await scene.call(method, asked)
            assert "in use by 1 process" in answer.claims["u1"].error
            scene.shares.refusal = None
            answer = await scene.call(method, asked)
            assert answer.claims["u1"].error == ""
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
            second = await call.read()
            assert {each.health for each in second.devices} == {health.UNHEALTHY}
            assert {each.message for each in second.devices} == {"XID 79"}
            call.cancel()

    asyncio.run(story())


def test_a_folder_that_cannot_have_sockets_is_told(tmp_path: Path) -> None:
    async def story() -> None:
        scene = Scene(tmp_path / ("long" * 30), None)
        task = asyncio.create_task(scene.driver.run())
        async with asyncio.timeout(20):
            await until(lambda: scene.reports.reasons("node") == ["ClaimsNotServed"])
        assert not task.done(), "the rest of the agent goes on"
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
            method = services.unprepare_resources(services.DRA_SERVICES["v1.DRAPlugin"])
            asked = dra.Claim(namespace="default", name="mine", uid="u1")
            await scene.call(method, dra.NodeUnprepareResourcesRequest(claims=[asked]))
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

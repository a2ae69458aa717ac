# SPDX-License-Identifier: Apache-2.0
"""A driver of claims that serves, a kubelet's channel to it, and the claims that it reads."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc.aio
from api_server_twin import Reply, answered, api_of
from gpus import gpu
from kubelet_twin import PodsTwin, ReportsTwin
from own_node_twin import OwnNodeTwin, until

from allotment.agent.dra.driver import ResourceDriver
from allotment.agent.kubelet import services
from allotment.agent.kubelet.proto import dra_pb2 as dra
from allotment.agent.kubelet.proto import pluginregistration_pb2 as registration
from allotment.agent.node_state import NodeState
from allotment.devices.facts import NodeFacts
from allotment.devices.timeslices import TimeSlice
from allotment.kube.clients import HttpRequest
from allotment.kube.resource_claims import API
from allotment.model.devices import Device
from allotment.model.errors import BusyError, PrerequisiteError
from allotment.model.pods import PodUid
from allotment.model.shares import Injection, Share, ShareDevice
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
        self.is_busy = False
        """Nothing can be released."""
        self.is_open = asyncio.Event()
        """Cleared: preparing waits."""
        self.is_open.set()

    async def prepare_claim(self, _: PodUid, orders: Sequence[ShareOrder]) -> tuple[Share, ...]:
        if self.refusal is not None:
            raise self.refusal
        await self.is_open.wait()
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
        if self.is_busy:
            raise BusyError("a process uses it")
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
        self.others: dict[str, dict[str, Any]] = {}
        """More claims, by name."""
        self.pods = PodsTwin()
        self.reads = 0
        self.is_down = False
        self.is_denied = False
        self.written: list[HttpRequest] = []
        self.conflicts = 0
        """So many writes of a status meet with another one."""
        self.is_older = False
        """The API server has no ResourceClaims."""
        self.looks = 0
        """So many requests for the API itself."""
        self.refuses_slices = False
        self.slices = 0
        """So many requests for slices."""
        self.folder = folder
        self.state = NodeState(devices={DEVICE.uuid: DEVICE})
        self.driver = ResourceDriver(
            api_of(self._answer),
            driver=driver,
            node=OwnNodeTwin(),  # type: ignore[arg-type]
            name="n1",
            state=self.state,
            tenants=self.shares,  # type: ignore[arg-type]
            pods=self.pods,
            monitors=Monitors(StateFolder(folder / "state"), cdi_folder=folder / "cdi", sight=seen),
            reports=self.reports,
            facts=lambda: NodeFacts(driver_version="580.95.05", cuda_version=(13, 0)),
            set_time_slice=self._slice_time,
            kubelet=folder,
            look_s=look_s,
            tell_s=0.05,
            pod_s=0.05,
            soon_s=0.05,
        )
        self.channel: grpc.aio.Channel
        self.service = ""
        """By which the kubelet asks, of those that the driver registered."""

    def _slice_time(self, uuid: str, length: TimeSlice) -> None:
        self.sliced.append((uuid, str(length)))
        if self.slicing_fails:
            raise PrerequisiteError("nvidia-smi is missing")

    def _answer(self, request: HttpRequest) -> Reply:
        if "/resourceclaims/" in request.path:
            return self._of_claim(request)
        if request.path == API:
            self.looks += 1
            return answered({"code": 404}, 404) if self.is_older else answered({})
        self.slices += "/resourceslices" in request.path
        if request.path.endswith("/resourceslices") and request.method == "GET":
            return answered({"metadata": {"resourceVersion": "1"}, "items": []})
        if self.refuses_slices:
            return answered({"code": 422, "reason": "Invalid", "message": "no such field"}, 422)
        return answered({"metadata": {"name": "x", "uid": "x"}})

    def _of_claim(self, request: HttpRequest) -> Reply:
        if request.method == "PATCH":
            if self.conflicts:
                self.conflicts -= 1
                return answered({"code": 409, "reason": "Conflict"}, 409)
            self.written.append(request)
            return answered({"code": 403}, 403) if self.is_denied else answered({})
        self.reads += 1
        if self.is_down:
            return answered({"code": 503}, 503)
        if (other := self.others.get(request.path.rpartition("/")[2])) is not None:
            return answered(other)
        return answered(self.claim, 200) if self.claim else answered({"code": 404}, 404)

    async def call(
        self,
        method: services.Method[Any, Any],
        asked: Any,  # noqa: ANN401
        *,
        timeout_s: float = 10,
    ) -> Any:  # noqa: ANN401
        return await method.on_aio(self.channel)(asked, timeout=timeout_s)

    async def release(self, uid: str = "u1") -> str:
        """Release a claim; return the error."""
        method = services.unprepare_resources(self.service)
        asked = dra.Claim(namespace="default", name="mine", uid=uid)
        answer = await self.call(method, dra.NodeUnprepareResourcesRequest(claims=[asked]))
        return str(answer.claims[uid].error)

    async def prepare(
        self, uid: str = "u1", *, timeout_s: float = 10
    ) -> dra.NodePrepareResourceResponse:
        method = services.prepare_resources(self.service)
        asked = dra.Claim(namespace="default", name="mine", uid=uid)
        request = dra.NodePrepareResourcesRequest(claims=[asked])
        answer = await self.call(method, request, timeout_s=timeout_s)
        found: dra.NodePrepareResourceResponse = answer.claims[uid]
        return found


KUBELETS = {
    "1.33": {"v1beta1.DRAPlugin": "k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin"},
    "1.36": {
        "v1.DRAPlugin": "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin",
        "v1beta1.DRAPlugin": "k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin",
    },
}
"""The services that kubelets can ask, the newest first, by the names of registrations."""


def chosen_service(info: registration.PluginInfo, kubelet: str) -> str:
    """The service that a kubelet chooses at a registration.

    As `validateSupportedServices` of pkg/kubelet/cm/dra/plugin, without the kubelets' v1alpha4.
    """
    assert info.type == "DRAPlugin"
    known = KUBELETS[kubelet]
    common = [service for name, service in known.items() if name in info.supported_versions]
    assert common, f"kubelet {kubelet} knows none of {info.supported_versions}"
    return common[0]


@asynccontextmanager
async def serving(
    folder: Path,
    found: dict[str, Any] | None = None,
    driver: str = DRIVER,
    *,
    look_s: float = 0.01,
    kubelet: str = "1.36",
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
            assert not scene.slices, "no claim comes before the kubelet knows the driver"
            scene.service = chosen_service(info, kubelet)
            known = registration.RegistrationStatus(plugin_registered=True)
            await scene.call(services.PLUGIN_REGISTERED, known)
        async with grpc.aio.insecure_channel(
            f"unix:{info.endpoint}", options=services.CHANNEL_OPTIONS
        ) as channel:
            scene.channel = channel
            yield scene
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

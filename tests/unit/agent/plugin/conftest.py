# SPDX-License-Identifier: Apache-2.0
"""A twin of the kubelet's device manager, and of those whom the device plugin asks."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec
import pytest

from allotment.agent.config.schema import Config
from allotment.agent.kubelet import services
from allotment.agent.kubelet.checkpoint import KubeletCheckpoint
from allotment.agent.kubelet.proto import deviceplugin_pb2 as messages
from allotment.agent.plugin.allocate_response import describe
from allotment.agent.plugin.front import Front
from allotment.agent.plugin.front_keeping import Duties, FrontKeeping
from allotment.agent.plugin.serving import LAST, OfferedResource
from allotment.agent.resources import Resource, Slot
from allotment.model.pods import Owner, Pod

# As the kubelet: a connection to whatever listens at the path by now.
_DIALED_ANEW = (*services.CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))


@dataclass
class Endpoint:
    """One plugin, as the kubelet sees it."""

    channel: grpc.aio.Channel
    options: messages.DevicePluginOptions | None = None
    devices: dict[str, str] = field(default_factory=dict)
    """Health by id."""
    numa: dict[str, list[int]] = field(default_factory=dict)
    lists: int = 0
    is_connected: bool = True
    has_ended_well: bool = False
    """The plugin ended the stream, in so many words."""
    task: asyncio.Task[None] | None = None


class KubeletTwin:
    """Behaves as kubelet pkg/kubelet/cm/devicemanager of v1.36 does, as far as plugins notice."""

    def __init__(self, folder: Path, versions: Sequence[str] = ("v1beta1",)) -> None:
        self.folder = folder
        self.versions = versions
        self.endpoints: dict[str, Endpoint] = {}
        self.clients: dict[str, Endpoint] = {}
        """The plugin that ends when a stream of the resource ends, whichever stream that is."""
        self.registrations: list[str] = []
        self.ends: list[str] = []
        """Resources whose devices became unhealthy by the end of a stream."""
        self._tasks: list[asyncio.Task[None]] = []
        self.refusals: list[float] = []
        """When it refused a registration."""
        self.entries: list[dict[str, Any]] = []
        self._server: grpc.aio.Server | None = None

    @property
    def socket(self) -> Path:
        return self.folder / "kubelet.sock"

    async def start(self, *, wipes: bool = True, is_old: bool = False) -> None:
        """`is_old`: before 1.33, which removes every file but its checkpoint."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.iterdir():
            is_wiped = path.is_socket() or (is_old and path.name != "kubelet_internal_checkpoint")
            if is_wiped and wipes:
                path.unlink()
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers(
            services.handlers({services.REGISTER: self._register})
        )
        # Under another name first: gRPC unlinks by path when it stops, whosever file that is.
        draft = self.folder / f".kubelet-{len(self.registrations)}"
        self._server.add_insecure_port(f"unix:{draft}")
        await self._server.start()
        draft.rename(self.socket)

    async def stop(self) -> None:
        """Ends as a killed kubelet does: its socket stays."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for name in list(self.endpoints):
            await self.hang_up(name)
        self.endpoints.clear()
        self.clients.clear()
        self._tasks.clear()
        if self._server is not None:
            await self._server.stop(None)

    async def hang_up(self, resource: str) -> None:
        """Listens to a plugin no more."""
        endpoint = self.endpoints[resource]
        if endpoint.task is not None:
            endpoint.task.cancel()
            await asyncio.gather(endpoint.task, return_exceptions=True)
        await endpoint.channel.close()

    async def restart(self, *, wipes: bool = True, is_old: bool = False) -> None:
        await self.stop()
        await self.start(wipes=wipes, is_old=is_old)

    async def _register(
        self, request: messages.RegisterRequest, context: services.Context
    ) -> messages.Empty:
        if request.version not in self.versions:
            self.refusals.append(time.monotonic())
            supported = " ".join(self.versions)
            await context.abort(
                grpc.StatusCode.UNKNOWN,
                f'requested API version "{request.version}" is not supported by kubelet.'
                f' Supported version is ["{supported}"]',
            )
        if "/" not in request.resource_name:
            self.refusals.append(time.monotonic())
            await context.abort(
                grpc.StatusCode.UNKNOWN, f'the ResourceName "{request.resource_name}" is invalid'
            )
        channel = grpc.aio.insecure_channel(
            f"unix:{self.folder / request.endpoint}", options=_DIALED_ANEW
        )
        name = request.resource_name
        endpoint = Endpoint(channel)
        self.clients[name] = endpoint
        try:
            endpoint.options = await services.OPTIONS.on_aio(channel)(messages.Empty(), timeout=30)
        except grpc.aio.AioRpcError as error:
            del self.clients[name]
            await context.abort(
                grpc.StatusCode.UNKNOWN, f"failed to get device plugin options: {error.details()}"
            )
        assert endpoint.options == request.options
        self.endpoints[name] = endpoint
        self.registrations.append(name)
        endpoint.task = asyncio.create_task(self._watch(name, endpoint))
        self._tasks.append(endpoint.task)
        return messages.Empty()

    async def _watch(self, name: str, endpoint: Endpoint) -> None:
        listing = services.LIST_AND_WATCH
        stream = endpoint.channel.unary_stream(
            listing.path,
            request_serializer=listing.ask.SerializeToString,
            response_deserializer=listing.reply.FromString,
        )(messages.Empty())
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for reply in stream:
                # Each stream writes what the kubelet has of the resource.
                current = self.endpoints[name]
                current.devices = {each.ID: each.health for each in reply.devices}
                current.numa = {
                    each.ID: [node.ID for node in each.topology.nodes] for each in reply.devices
                }
                endpoint.lists += 1
            endpoint.has_ended_well = True
        endpoint.is_connected = False
        client = self.clients.pop(name, None)
        if client is not None:
            client.is_connected = False
            current = self.endpoints[name]
            current.devices = dict.fromkeys(current.devices, "Unhealthy")
            self.ends.append(name)
            await client.channel.close()

    def healthy(self, resource: str) -> list[str]:
        endpoint = self.endpoints.get(resource)
        if endpoint is None:
            return []
        return [each for each, health in endpoint.devices.items() if health == "Healthy"]

    def capacity(self, resource: str) -> int:
        """What the node's status says: unhealthy ones too, also of a plugin that is gone."""
        endpoint = self.endpoints.get(resource)
        return 0 if endpoint is None else len(endpoint.devices)

    async def preferred(
        self, resource: str, available: Sequence[str], size: int, required: Sequence[str] = ()
    ) -> list[str]:
        request = messages.PreferredAllocationRequest()
        request.container_requests.add(
            available_deviceIDs=available, must_include_deviceIDs=required, allocation_size=size
        )
        channel = self.endpoints[resource].channel
        reply = await services.PREFERRED.on_aio(channel)(request, timeout=30)
        return [each for some in reply.container_responses for each in some.deviceIDs]

    async def allocate(
        self, resource: str, ids: Sequence[str], *, pod: str, container: str
    ) -> messages.ContainerAllocateResponse:
        request = messages.AllocateRequest()
        request.container_requests.add(devices_ids=ids)
        channel = self.endpoints[resource].channel
        reply = await services.ALLOCATE.on_aio(channel)(request, timeout=30)
        response = reply.container_responses[0]
        self.entries.append(
            {
                "PodUID": pod,
                "ContainerName": container,
                "ResourceName": resource,
                "DeviceIDs": {"-1": list(ids)},
                "AllocResp": base64.b64encode(response.SerializeToString()).decode(),
            }
        )
        self.write_checkpoint()
        return response

    async def pre_start(self, resource: str, ids: Sequence[str]) -> None:
        request = messages.PreStartContainerRequest(devices_ids=ids)
        channel = self.endpoints[resource].channel
        await services.PRE_START.on_aio(channel)(request, timeout=30)

    def write_checkpoint(self) -> None:
        data: dict[str, object] = {"PodDeviceEntries": self.entries, "RegisteredDevices": {}}
        draft = self.folder / ".checkpoint"
        draft.write_text(json.dumps({"Data": data, "Checksum": 1}))
        draft.rename(self.folder / "kubelet_internal_checkpoint")


@dataclass
class TenancyTwin:
    """Describes resources, prepares what it is asked to, and fails when it is told to."""

    prepared: list[tuple[str, frozenset[str]]] = field(default_factory=list)
    error: Exception | None = None
    more: messages.ContainerAllocateResponse = field(
        default_factory=messages.ContainerAllocateResponse
    )
    """What its answers have besides."""
    together: asyncio.Barrier | None = None
    """Where those who prepare wait for each other."""
    waits: int = 0
    problem: str | None = None
    """Of each resource."""
    failures: int = 0
    modes: dict[str, str] = field(default_factory=dict)
    """Of the shares on each device that has some."""

    def offered(self, resource: Resource) -> OfferedResource:
        described = describe(resource, config=Config(), devices={})
        parts = {**described.parts, LAST: self.more.SerializeToString()}
        return msgspec.structs.replace(described, parts=parts, problem=self.problem)

    async def prepare(self, resource: str, ids: frozenset[str]) -> None:
        if self.together is not None:
            self.waits += 1
            await self.together.wait()
        if self.error is not None:
            self.failures += 1
            raise self.error
        self.prepared.append((resource, ids))


@dataclass
class ReportsTwin:
    """Remembers what it was told."""

    events: list[tuple[str, str]] = field(default_factory=list)
    counted: list[tuple[str, Mapping[str, str]]] = field(default_factory=list)
    observed: list[tuple[str, float]] = field(default_factory=list)

    def pod(self, subject: Pod | Owner, reason: str, message: str, *, is_warning: bool) -> None:
        raise AssertionError((subject, reason, message, is_warning))

    def node(self, reason: str, message: str, *, is_warning: bool) -> None:
        assert is_warning
        self.events.append((reason, message))

    def count(self, name: str, **labels: str) -> None:
        self.counted.append((name, labels))

    def observe(self, name: str, value: float, **labels: str) -> None:
        assert labels["resource"]
        self.observed.append((name, value))

    def gauge(self, name: str, value: float, **labels: str) -> None:
        del name, value, labels


@dataclass
class World:
    """All of it, for one test."""

    kubelet: KubeletTwin
    state: Path
    tenancy: TenancyTwin
    reports: ReportsTwin
    duties: Duties
    checkpoint: KubeletCheckpoint
    haste: float = 4.0
    """How many seconds of the agent's clock pass in one of ours."""

    @staticmethod
    def gpus(count: int, *, name: str = "nvidia.com/gpu") -> Resource:
        """A resource of whole GPUs."""
        slots = (Slot(f"GPU-{n}", f"GPU-{n}", numa_node=n % 2) for n in range(count))
        return Resource(name=name, mode="exclusive", slots=tuple(slots))

    @staticmethod
    def opaque(count: int) -> Resource:
        """A resource whose ids stand for no device."""
        slots = tuple(Slot(f"share::{n}", None) for n in range(count))
        return Resource(name="allotment.dev/gpu", mode="soft", slots=slots)

    @staticmethod
    @asynccontextmanager
    async def running(work: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Task[None]]:
        """Work beside the block, cancelled at its end."""
        task = asyncio.create_task(work)
        try:
            yield task
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def front(self, **options: Any) -> Front:  # noqa: ANN401 - Front's own
        """A front beside this kubelet, to be run."""
        clock = options.pop("clock", lambda: self.haste * time.monotonic())
        return Front(kubelet=self.kubelet.socket, state=self.state, clock=clock, **options)

    @asynccontextmanager
    async def agent(self, *resources: Resource) -> AsyncIterator[FrontKeeping]:
        """An agent behind the front, until the block ends; it ends as a killed one does."""
        keeping = FrontKeeping(
            kubelet=self.kubelet.socket,
            state=self.state,
            duties=self.duties,
            checkpoint=self.checkpoint,
            clock=lambda: self.haste * time.monotonic(),
        )
        keeping.offer(resources)
        async with self.running(keeping.run()):
            yield keeping

    @asynccontextmanager
    async def serving(self, *resources: Resource) -> AsyncIterator[FrontKeeping]:
        """A front and an agent beside this kubelet, until the block ends."""
        try:
            async with self.running(self.front().run()), self.agent(*resources) as keeping:
                yield keeping
        finally:
            await self.kubelet.stop()

    @staticmethod
    async def until(condition: Callable[[], bool], *, within_s: float = 30.0) -> None:
        """Waits for something; a loaded machine may take its time."""
        async with asyncio.timeout(within_s):
            while not condition():  # noqa: ASYNC110 - others make it true
                await asyncio.sleep(0.02)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose sockets' paths are short enough, which those of `tmp_path` may not be."""
    with tempfile.TemporaryDirectory(prefix="dp-") as folder:
        yield Path(folder)


@pytest.fixture
def world(short_folder: Path) -> World:
    tenancy, reports = TenancyTwin(), ReportsTwin()
    folder = short_folder / "plugins"
    folder.mkdir()
    state = short_folder / "state"
    state.mkdir()
    duties = Duties(
        offered=tenancy.offered,
        pre_start=tenancy.prepare,
        reports=reports,
        links=dict,
        policy=lambda: "distributed",
        modes=lambda: tenancy.modes,
    )
    return World(
        kubelet=KubeletTwin(folder),
        state=state,
        tenancy=tenancy,
        reports=reports,
        duties=duties,
        checkpoint=KubeletCheckpoint(folder / "kubelet_internal_checkpoint"),
    )

# SPDX-License-Identifier: Apache-2.0
"""A twin of the kubelet's device manager, and of those whom the device plugin asks."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from allotment.agent.kubelet import services
from allotment.agent.kubelet.checkpoint import KubeletCheckpoint
from allotment.agent.kubelet.proto import deviceplugin_pb2 as messages
from allotment.agent.plugin.registration import DevicePlugins
from allotment.agent.plugin.serving import Duties
from allotment.agent.protocols import SHARE_ANNOTATION, AllocateAnswer
from allotment.agent.resources import Resource, Slot
from allotment.model.errors import AllotError
from allotment.model.pods import Owner, Pod


@dataclass
class Endpoint:
    """One plugin, as the kubelet sees it."""

    channel: grpc.aio.Channel
    options: messages.DevicePluginOptions
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
        self.registrations: list[str] = []
        self.refusals: list[float] = []
        """When it refused a registration."""
        self.entries: list[dict[str, Any]] = []
        self._server: grpc.aio.Server | None = None

    @property
    def socket(self) -> Path:
        return self.folder / "kubelet.sock"

    async def start(self, *, wipes: bool = True) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.iterdir():
            if path.is_socket() and wipes:
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
        for name in list(self.endpoints):
            await self.hang_up(name)
        self.endpoints.clear()
        if self._server is not None:
            await self._server.stop(None)

    async def hang_up(self, resource: str) -> None:
        """Listens to a plugin no more."""
        endpoint = self.endpoints[resource]
        if endpoint.task is not None:
            endpoint.task.cancel()
            await asyncio.gather(endpoint.task, return_exceptions=True)
        await endpoint.channel.close()

    async def restart(self, *, wipes: bool = True) -> None:
        await self.stop()
        await self.start(wipes=wipes)

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
            f"unix:{self.folder / request.endpoint}", options=services.CHANNEL_OPTIONS
        )
        options = await services.OPTIONS.on_aio(channel)(messages.Empty(), timeout=30)
        assert options == request.options
        endpoint = Endpoint(channel, options)
        self.endpoints[request.resource_name] = endpoint
        self.registrations.append(request.resource_name)
        endpoint.task = asyncio.create_task(self._watch(endpoint))
        return messages.Empty()

    @staticmethod
    async def _watch(endpoint: Endpoint) -> None:
        listing = services.LIST_AND_WATCH
        stream = endpoint.channel.unary_stream(
            listing.path,
            request_serializer=listing.ask.SerializeToString,
            response_deserializer=listing.reply.FromString,
        )(messages.Empty())
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for reply in stream:
                endpoint.devices = {each.ID: each.health for each in reply.devices}
                endpoint.numa = {
                    each.ID: [node.ID for node in each.topology.nodes] for each in reply.devices
                }
                endpoint.lists += 1
            endpoint.has_ended_well = True
        endpoint.is_connected = False
        endpoint.devices = dict.fromkeys(endpoint.devices, "Unhealthy")

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
        return list(reply.container_responses[0].deviceIDs)

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
    """Answers at once, prepares what it is asked to, and fails when it is told to."""

    answered: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    prepared: list[tuple[str, frozenset[str]]] = field(default_factory=list)
    error: AllotError | None = None
    more: AllocateAnswer = field(default_factory=AllocateAnswer)
    """What its answers have besides."""
    together: asyncio.Barrier | None = None
    """Where those who prepare wait for each other."""

    def answer(self, resource: Resource, ids: Sequence[str]) -> AllocateAnswer:
        if self.error is not None:
            raise self.error
        self.answered.append((resource.name, tuple(ids)))
        share = f"{len(self.answered):012x}"
        return replace(
            self.more,
            annotations={SHARE_ANNOTATION: share},
            cdi_devices=(f"allotment.dev/share={share}",),
        )

    async def prepare(self, resource: str, ids: frozenset[str]) -> None:
        if self.together is not None:
            await self.together.wait()
        if self.error is not None:
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

    @asynccontextmanager
    async def serving(self, *resources: Resource) -> AsyncIterator[DevicePlugins]:
        """An agent's device plugins beside this kubelet, until the block ends."""
        plugins = DevicePlugins(
            kubelet=self.kubelet.socket,
            duties=self.duties,
            checkpoint=self.checkpoint,
            clock=lambda: self.haste * time.monotonic(),
        )
        plugins.offer(resources)
        task = asyncio.create_task(plugins.run())
        try:
            yield plugins
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
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
    duties = Duties(
        allocate=tenancy.answer,
        pre_start=tenancy.prepare,
        reports=reports,
        links=dict,
        policy=lambda: "distributed",
    )
    return World(
        kubelet=KubeletTwin(folder),
        tenancy=tenancy,
        reports=reports,
        duties=duties,
        checkpoint=KubeletCheckpoint(folder / "kubelet_internal_checkpoint"),
    )

# SPDX-License-Identifier: Apache-2.0
"""One resource's gRPC server: the kubelet's `DevicePlugin` service, version v1beta1.

It knows nothing of shares: `Duties` answers. The resource may change at any time; the kubelet gets
the new list at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
import grpc.aio

from allotment.agent.kubelet import services
from allotment.agent.kubelet.proto import deviceplugin_pb2 as messages
from allotment.agent.kubelet.services import Context
from allotment.agent.plugin.preferred import Links, preferred
from allotment.agent.protocols import AllocateAnswer, Reports
from allotment.agent.resources import Resource
from allotment.files import FileIdentity, file_identity
from allotment.model.errors import (
    AllotError,
    BusyError,
    DoesNotFitError,
    NoDevicesError,
    NotFoundError,
    PrerequisiteError,
    StateError,
    UsageError,
)

SOCKET_PREFIX: Final = "allotment-"
DRAFT_PREFIX: Final = ".allotment-"

_PREPARE_S: Final = 25.0
"""The kubelet waits for 30 s, and then reports a timeout without the reason."""

_FLUSH_S: Final = 0.5
"""How long the calls in progress may take when a server stops."""

_LONGEST_PATH: Final = 104
"""Of a Unix socket: 108 bytes with the final zero, less a few for the draft's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Duties:
    """What a server calls."""

    allocate: Callable[[Resource, Sequence[str]], AllocateAnswer]
    """Answers `Allocate` for one container, whose pod is not known yet. Raises `AllotError`."""
    pre_start: Callable[[str, frozenset[str]], Awaitable[None]]
    """Makes the shares of the containers that hold these ids of a resource. May be repeated. Raises
    `AllotError`: the container waits, and the kubelet asks again."""
    reports: Reports
    links: Callable[[], Links]
    """How well the devices are linked, as far as it is known yet."""
    policy: Callable[[], str]
    """`sharedDevicesAllocationPolicy` of the configuration in force."""
    modes: Callable[[], Mapping[str, str]] = dict
    """The mode of the shares on each device that has some, by its UUID."""


def socket_name(resource: str, folder: Path) -> str:
    """Return the name of a resource's socket file in `folder`."""
    # A domain has no `_`: no two resources have the same name here.
    name = f"{SOCKET_PREFIX}{resource.replace('/', '_')}.sock"
    if len(str(folder / name)) > _LONGEST_PATH:
        return f"{SOCKET_PREFIX}{hashlib.sha256(resource.encode()).hexdigest()[:16]}.sock"
    return name


class ResourceServer:
    """Serves one resource, from `start` to `stop`."""

    def __init__(
        self,
        resource: Resource,
        *,
        folder: Path,
        duties: Duties,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.endpoint: Final = socket_name(resource.name, folder)
        """The socket's name in the kubelet's folder."""
        self._path: Final = folder / self.endpoint
        self._duties: Final = duties
        self._clock: Final = clock
        self._resource = resource
        self._changed = asyncio.Event()
        self._server: grpc.aio.Server | None = None
        self._socket: FileIdentity | None = None
        self._watchers = 0
        self._is_ending = False
        self.unwatched_since = clock()
        """When the kubelet's last stream ended, by the clock."""

    @property
    def resource(self) -> Resource:
        """The offered resource."""
        return self._resource

    @property
    def options(self) -> messages.DevicePluginOptions:
        """The plugin's options, for its registration."""
        slots = self._resource.slots
        return messages.DevicePluginOptions(
            pre_start_required=True,
            # Ids of no device are all alike. The kubelet reads this once.
            get_preferred_allocation_available=not slots
            or any(slot.device is not None for slot in slots),
        )

    @property
    def is_watched(self) -> bool:
        """Whether the kubelet reads the list of devices."""
        return self._watchers > 0

    @property
    def has_socket(self) -> bool:
        """Whether its socket is in place: the kubelet removes all sockets when it starts."""
        return self._socket is not None and self._socket == file_identity(self._path)

    def update(self, resource: Resource) -> None:
        """Replace the offered resource, under the same name."""
        if resource != self._resource:
            self._resource = resource
            self._wake()

    def relist(self) -> None:
        """Send the list again: at each list the kubelet writes its checkpoint from memory."""
        self._wake()

    async def start(self) -> None:
        """Listen. Raises `StateError` if the socket cannot be made."""
        await self.stop()
        server = grpc.aio.server()
        server.add_generic_rpc_handlers(
            services.handlers(
                {
                    services.OPTIONS: self._get_options,
                    services.LIST_AND_WATCH: self._list_and_watch,
                    services.PREFERRED: self._get_preferred,
                    services.ALLOCATE: self._allocate,
                    services.PRE_START: self._pre_start,
                }
            )
        )
        # gRPC removes its socket's path some time after it stops. A name that is used once cannot
        # be the socket of a later server.
        draft = self._path.with_name(f"{DRAFT_PREFIX}{os.urandom(4).hex()}")
        try:
            try:
                server.add_insecure_port(f"unix:{draft}")
                await server.start()
                draft.rename(self._path)
            except (OSError, RuntimeError) as error:
                await server.stop(None)
                raise StateError(
                    f"cannot listen on {self._path}: {error}",
                    hint="the agent has to run as root, with the host's"
                    " /var/lib/kubelet/device-plugins mounted there, writable",
                ) from error
        finally:
            draft.unlink(missing_ok=True)
        self._server, self._is_ending = server, False
        self._socket = file_identity(self._path)
        self.unwatched_since = self._clock()

    async def stop(self) -> None:
        """Stop listening. Streams end, which the kubelet takes for failed devices."""
        server, self._server = self._server, None
        if server is None:
            return
        if self.has_socket:
            with contextlib.suppress(OSError):  # the folder may be gone by now
                self._path.unlink()
        self._socket = None
        self._is_ending = True
        self._wake()
        await server.stop(_FLUSH_S)

    def _wake(self) -> None:
        """Wake all streams: the resource changed, or the server stops."""
        # Each stream waits for the event of its time: it misses no change and sees none twice.
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # ---- the calls -------------------------------------------------------------------------------

    async def _get_options(
        self, _request: messages.Empty, _context: Context
    ) -> messages.DevicePluginOptions:
        return self.options

    async def _list_and_watch(
        self, _request: messages.Empty, _context: Context
    ) -> AsyncIterator[messages.ListAndWatchResponse]:
        self._watchers += 1
        try:
            while not self._is_ending:
                changed = self._changed
                yield _listing(self._resource)
                await changed.wait()
        finally:
            self._watchers -= 1
            self.unwatched_since = self._clock()

    async def _get_preferred(
        self, request: messages.PreferredAllocationRequest, context: Context
    ) -> messages.PreferredAllocationResponse:
        duties = self._duties
        response = messages.PreferredAllocationResponse()
        async with self._answering(context, "preferred_seconds"):
            for each in request.container_requests:
                chosen = preferred(
                    self._resource,
                    available=each.available_deviceIDs,
                    must_include=each.must_include_deviceIDs,
                    size=each.allocation_size,
                    links=duties.links(),
                    policy=duties.policy(),
                    modes=duties.modes(),
                )
                response.container_responses.add(deviceIDs=chosen)
        return response

    async def _allocate(
        self, request: messages.AllocateRequest, context: Context
    ) -> messages.AllocateResponse:
        response = messages.AllocateResponse()
        async with self._answering(context, "allocate_seconds"):
            for each in request.container_requests:
                answer = self._duties.allocate(self._resource, tuple(each.devices_ids))
                response.container_responses.append(_message(answer))
        return response

    async def _pre_start(
        self, request: messages.PreStartContainerRequest, context: Context
    ) -> messages.PreStartContainerResponse:
        ids = frozenset(request.devices_ids)
        # `Tenants` knows the container, and has counted and reported its refusal.
        async with self._answering(context, "prepare_seconds", is_counted=False):
            try:
                async with asyncio.timeout(_PREPARE_S):
                    await self._duties.pre_start(self._resource.name, ids)
            except TimeoutError:
                self._duties.reports.count("refusals", reason=StateError.__name__)
                raise StateError(
                    f"the share was not ready within {_PREPARE_S:.0f} s",
                    hint="the kubelet asks again; see the agent's log for the cause",
                ) from None
        return messages.PreStartContainerResponse()

    @asynccontextmanager
    async def _answering(
        self, context: Context, figure: str, *, is_counted: bool = True
    ) -> AsyncIterator[None]:
        """Measure a call, and end it with the gRPC code of its error."""
        reports = self._duties.reports
        started = time.perf_counter()
        try:
            yield
        except AllotError as error:
            if is_counted:
                reports.count("refusals", reason=type(error).__name__)
            await context.abort(code_of(error), error.one_line(longest=MOST_EVENT))
        finally:
            seconds = time.perf_counter() - started
            reports.observe(figure, seconds, resource=self._resource.name)


def _listing(resource: Resource) -> messages.ListAndWatchResponse:
    response = messages.ListAndWatchResponse()
    for slot in resource.slots:
        device = response.devices.add(
            ID=slot.id, health="Healthy" if slot.is_healthy else "Unhealthy"
        )
        if slot.numa_node is not None:
            device.topology.nodes.add(ID=slot.numa_node)
    return response


def _message(answer: AllocateAnswer) -> messages.ContainerAllocateResponse:
    response = messages.ContainerAllocateResponse(envs=answer.envs, annotations=answer.annotations)
    for mount in answer.mounts:
        response.mounts.add(
            container_path=mount.container_path,
            host_path=mount.host_path,
            read_only=mount.is_read_only,
        )
    for node in answer.devices:
        response.devices.add(
            container_path=node.container_path,
            host_path=node.host_path,
            permissions=node.permissions,
        )
    for name in answer.cdi_devices:
        response.cdi_devices.add(name=name)
    return response


# The first class that fits counts.
_CODES: Final[Mapping[type[AllotError], grpc.StatusCode]] = {
    UsageError: grpc.StatusCode.INVALID_ARGUMENT,
    DoesNotFitError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    NotFoundError: grpc.StatusCode.NOT_FOUND,
    NoDevicesError: grpc.StatusCode.UNAVAILABLE,
    BusyError: grpc.StatusCode.UNAVAILABLE,
    StateError: grpc.StatusCode.FAILED_PRECONDITION,
    PrerequisiteError: grpc.StatusCode.FAILED_PRECONDITION,
}

MOST_EVENT: Final = 800
"""Characters. An event's message ends at 1024, and the kubelet's own text comes first."""


def code_of(error: AllotError) -> grpc.StatusCode:
    """Return the gRPC code for an error."""
    codes = (code for kind, code in _CODES.items() if isinstance(error, kind))
    return next(codes, grpc.StatusCode.UNKNOWN)

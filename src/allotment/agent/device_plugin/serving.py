# SPDX-License-Identifier: Apache-2.0
"""One resource's gRPC server: the kubelet's `DevicePlugin` service, version v1beta1.

It knows nothing of shares: what is answered, and what is to be ready before a container starts, is
the `Tenancy`'s. What the resource has can change at any time; the kubelet hears of it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc.aio

from allotment.agent.device_plugin.preferred import Links, preferred
from allotment.agent.device_plugin.refusals import code_of, one_line
from allotment.agent.kubelet import services
from allotment.agent.kubelet.proto import deviceplugin_pb2 as messages
from allotment.agent.kubelet.services import Context
from allotment.agent.protocols import Answer, Reports, Tenancy
from allotment.agent.resources import Resource
from allotment.model.errors import AllotError, StateError

__all__ = ["DRAFT_PREFIX", "SOCKET_PREFIX", "Duties", "ResourceServer", "socket_name"]

SOCKET_PREFIX: Final = "allotment-"
DRAFT_PREFIX: Final = ".allotment-"

_PREPARE_S: Final = 25.0
"""The kubelet waits for 30 s, and then says only that it has waited (real-cluster facts)."""

_FLUSH_S: Final = 0.5
"""How long calls that are under way may take to end when a server stops."""

_LONGEST_PATH: Final = 104
"""Of a Unix socket: 108 bytes with its end, and a few for the name it has at first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Duties:
    """Whom a server asks."""

    tenancy: Tenancy
    reports: Reports
    links: Callable[[], Links]
    """How well the devices are linked, as far as it is known yet."""
    policy: Callable[[], str]
    """`sharedDevicesAllocationPolicy` of the configuration in force."""


def socket_name(resource: str, folder: Path) -> str:
    """Return the name of a resource's socket file in `folder`."""
    # A domain has no `_`: no two resources have the same name here.
    name = f"{SOCKET_PREFIX}{resource.replace('/', '_')}.sock"
    if len(str(folder / name)) > _LONGEST_PATH:
        return f"{SOCKET_PREFIX}{hashlib.sha256(resource.encode()).hexdigest()[:16]}.sock"
    return name


class ResourceServer:
    """Serves one resource, from `start` to `stop`."""

    def __init__(self, resource: Resource, *, folder: Path, duties: Duties) -> None:
        self.endpoint: Final = socket_name(resource.name, folder)
        """The socket's name in the folder, as the kubelet is told."""
        self._path: Final = folder / self.endpoint
        self._duties: Final = duties
        self._resource = resource
        self._changed = asyncio.Event()
        self._server: grpc.aio.Server | None = None
        self._socket: tuple[int, int] | None = None
        self._watchers = 0
        self._is_ending = False
        self.unwatched_since = time.monotonic()
        """When the last stream of the kubelet ended (monotonic seconds), if none is there."""

    @property
    def resource(self) -> Resource:
        """What is offered at the moment."""
        return self._resource

    @property
    def options(self) -> messages.DevicePluginOptions:
        """What the kubelet is told of this plugin when it registers."""
        slots = self._resource.slots
        return messages.DevicePluginOptions(
            pre_start_required=True,
            # Ids that stand for no device are all the same. (The kubelet asks for this once.)
            get_preferred_allocation_available=not slots
            or any(slot.device is not None for slot in slots),
        )

    @property
    def is_watched(self) -> bool:
        """The kubelet listens to what the resource has."""
        return self._watchers > 0

    @property
    def has_socket(self) -> bool:
        """Its socket is where the kubelet looks for it: the kubelet removes all when it starts."""
        return self._socket is not None and self._socket == _identity(self._path)

    def update(self, resource: Resource) -> None:
        """Offer something else under the same name from this moment on."""
        if resource != self._resource:
            self._resource = resource
            self._wake()

    async def start(self) -> None:
        """Listen. Raises `StateError` where the socket cannot be made."""
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
        # gRPC removes its socket's path when it stops, at a moment of its own: under a name that is
        # not used again, that cannot be the socket of a later server.
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
        self._socket = _identity(self._path)
        self.unwatched_since = time.monotonic()

    async def stop(self) -> None:
        """Stop listening; streams end, and the kubelet takes that for the resource's absence."""
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
        """Tell every stream that something changed."""
        # Whoever waits has the event of its own time: none misses a change, none sees it twice.
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
            self.unwatched_since = time.monotonic()

    async def _get_preferred(
        self, request: messages.PreferredAllocationRequest, context: Context
    ) -> messages.PreferredAllocationResponse:
        duties = self._duties
        response = messages.PreferredAllocationResponse()
        try:
            with self._timed("preferred_seconds"):
                for each in request.container_requests:
                    chosen = preferred(
                        self._resource,
                        available=each.available_deviceIDs,
                        must_include=each.must_include_deviceIDs,
                        size=each.allocation_size,
                        links=duties.links(),
                        policy=duties.policy(),
                    )
                    response.container_responses.add(deviceIDs=chosen)
        except AllotError as error:
            await self._refuse(context, error)
        return response

    async def _allocate(
        self, request: messages.AllocateRequest, context: Context
    ) -> messages.AllocateResponse:
        response = messages.AllocateResponse()
        try:
            with self._timed("allocate_seconds"):
                for each in request.container_requests:
                    answer = self._duties.tenancy.answer(self._resource, tuple(each.devices_ids))
                    response.container_responses.append(_message(answer))
        except AllotError as error:
            await self._refuse(context, error)
        return response

    async def _pre_start(
        self, request: messages.PreStartContainerRequest, context: Context
    ) -> messages.PreStartContainerResponse:
        ids = frozenset(request.devices_ids)
        try:
            with self._timed("prepare_seconds"):
                async with asyncio.timeout(_PREPARE_S):
                    await self._duties.tenancy.prepare(self._resource.name, ids)
        except AllotError as error:
            # The tenancy knows whose container it is, and has told of it.
            await context.abort(code_of(error), one_line(error))
        except TimeoutError:
            late = f"the share was not ready within {_PREPARE_S:.0f} s"
            hint = "the kubelet asks again; see the agent's log for what it waited for"
            await self._refuse(context, StateError(late, hint=hint))
        return messages.PreStartContainerResponse()

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            self._duties.reports.observe(name, seconds, resource=self._resource.name)

    async def _refuse(self, context: Context, error: AllotError) -> None:
        """End a call with an error, and count it. Does not return."""
        self._duties.reports.count("refusals", reason=type(error).__name__)
        await context.abort(code_of(error), one_line(error))


def _identity(path: Path) -> tuple[int, int] | None:
    """Return which file it is; None: it is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns


def _listing(resource: Resource) -> messages.ListAndWatchResponse:
    response = messages.ListAndWatchResponse()
    for slot in resource.slots:
        device = response.devices.add(
            ID=slot.id, health="Healthy" if slot.is_healthy else "Unhealthy"
        )
        if slot.numa_node is not None:
            device.topology.nodes.add(ID=slot.numa_node)
    return response


def _message(answer: Answer) -> messages.ContainerAllocateResponse:
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

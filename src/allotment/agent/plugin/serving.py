# SPDX-License-Identifier: Apache-2.0
"""One resource's gRPC server: the kubelet's `DevicePlugin` service, version v1beta1.

It answers `Allocate` from the agent's last offer, and passes `PreStartContainer` to the agent. It
is part of the front, a process with few imports: nothing here may know shares or devices.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import grpc
import grpc.aio
import msgspec
from google.protobuf.message import Message

from allotment.agent.kubelet import services
from allotment.agent.kubelet.proto import deviceplugin_pb2 as messages
from allotment.agent.kubelet.services import Context, Method
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

_Reply = TypeVar("_Reply", bound=Message)

SOCKET_PREFIX: Final = "allotment-"
DRAFT_PREFIX: Final = ".allotment-"
AGENT_SOCKET: Final = "agent.sock"
"""In the state folder: where the agent answers the front."""
RESOURCE_KEY: Final = "resource"
"""Metadata of a call to the agent: the resource's name."""
ALLOCATED_KEY: Final = "allocated"
"""Metadata of `PreStartContainer`, for the pod's trace: when `Allocate` gave out the ids. Begin and
end in nanoseconds after the epoch."""
REFUSAL_KEY: Final = "refusal"
"""Metadata of an error that the agent decided: it is final, unlike that of a lost connection."""

SHARE_PLACE: Final = "{share-name}"
"""Stands in an offer for the share's id, which has as many characters."""
FIRST: Final = "first"
LAST: Final = "last"

_FLUSH_S: Final = 0.5
"""How long the calls in progress may take when a server stops."""
_PREPARE_S: Final = 29.0
"""The kubelet waits for 30 s, and then reports a timeout without the reason."""
_PREFERRED_S: Final = 1.0
"""The kubelet admits no other pod meanwhile, and takes any devices without an answer."""
_RETRY_S: Final = 0.05
_LONGEST_RETRY_S: Final = 1.0
_ABSENT: Final = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""The codes of calls that no agent answered."""

_LONGEST_PATH: Final = 104
"""Of a Unix socket: 108 bytes with the final zero, less a few for the draft's name."""
_RECONNECT: Final = (
    *services.CHANNEL_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 250),
)


class OfferedResource(msgspec.Struct, frozen=True, kw_only=True):
    """A resource as the agent offers it: all that `ListAndWatch` and `Allocate` need."""

    name: str
    listing: bytes = b""
    """A `ListAndWatchResponse`."""
    devices: dict[str, str] = {}
    """The device of each slot, by the slot's id; empty: any device."""
    has_preferences: bool = True
    names_devices: bool = False
    """Its answers need a part for each device."""
    fails_above_one: bool = False
    problem: str | None = None
    """Why no container can get it at the moment; then all its devices are listed as unhealthy."""
    parts: dict[str, bytes] = {}
    """Parts of an answer (`ContainerAllocateResponse`), each with `SHARE_PLACE`, by key: `FIRST`;
    a device; `#N` for N devices; `DEVICE*N` for N slots of the first device; `LAST`."""

    @property
    def options(self) -> messages.DevicePluginOptions:
        """The plugin's options, for its registration."""
        return messages.DevicePluginOptions(
            pre_start_required=True, get_preferred_allocation_available=self.has_preferences
        )

    def listed(self, *, is_withdrawn: bool) -> messages.ListAndWatchResponse:
        """Return the list for the kubelet; `is_withdrawn`: nothing of it can be allocated."""
        response = messages.ListAndWatchResponse.FromString(self.listing)
        if is_withdrawn:
            for device in response.devices:
                device.health = "Unhealthy"
        return response

    def answer(self, ids: Sequence[str]) -> messages.ContainerAllocateResponse:
        """Answer `Allocate` for one container, with a share's id that is used once.

        Raises `UsageError`, in NVIDIA's words, for ids that cannot be given together, and
        `StateError` for the resource's problem.
        """
        self._check(ids)
        if self.problem is not None:
            raise StateError(self.problem)
        any_device = not all(self.devices[slot] for slot in ids)
        devices = [] if any_device else list(dict.fromkeys(self.devices[slot] for slot in ids))
        for device in devices:
            if self.names_devices and device not in self.parts:
                raise self._refusal(
                    f"unknown device: {device}",
                    "the GPU does not answer at the moment: see the node's events",
                )
        count = len(devices) or len(ids)
        keys = [FIRST, *devices, f"#{count}"]
        keys += [f"{devices[0]}*{len(ids)}"] if devices else []
        share = os.urandom(len(SHARE_PLACE) // 2).hex().encode()
        response = messages.ContainerAllocateResponse()
        for key in (*keys, LAST):
            # Of the same length: the encoded text keeps its length.
            part = self.parts.get(key, b"").replace(SHARE_PLACE.encode(), share)
            _join(response, messages.ContainerAllocateResponse.FromString(part))
        return response

    def _check(self, ids: Sequence[str]) -> None:
        """Refuse what NVIDIA's plugin refuses."""
        unknown = [slot for slot in ids if slot not in self.devices]
        if unknown:
            raise self._refusal(
                f"unknown device: {unknown[0]}",
                "the node's GPUs or its configuration changed: delete the pod, so that its"
                " controller creates it again",
            )
        if self.fails_above_one and len(ids) > 1:
            raise self._refusal(
                f"maximum request size for shared resources is 1; found {len(ids)}",
                "ask for 1, or set failRequestsGreaterThanOne: false in the configuration's"
                " sharing",
            )

    def _refusal(self, reason: str, hint: str) -> UsageError:
        return UsageError(
            f'invalid allocation request for "{self.name}": invalid request: {reason}', hint=hint
        )


def _join(
    response: messages.ContainerAllocateResponse, part: messages.ContainerAllocateResponse
) -> None:
    """Add a part; two values of the same name are joined by a comma, as lists of devices are."""
    for kind in ("envs", "annotations"):
        values = getattr(response, kind)
        for key, value in getattr(part, kind).items():
            values[key] = f"{values[key]},{value}" if key in values else value
    for kind in ("mounts", "devices", "cdi_devices"):
        present = getattr(response, kind)
        present.extend(each for each in getattr(part, kind) if each not in present)


class AgentChannel:
    """The agent, at its socket. It may be away for a while at any time."""

    def __init__(self, socket: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._channel = grpc.aio.insecure_channel(f"unix:{socket}", options=_RECONNECT)
        self._clock = clock

    async def close(self) -> None:
        await self._channel.close()

    async def pre_start(self, resource: str, request: Message, *, allocated: str = "") -> Message:
        """Pass on `PreStartContainer`; wait for the agent within the kubelet's limit.

        `allocated` is that of `ALLOCATED_KEY`. It may repeat the call. Raises the agent's
        `grpc.aio.AioRpcError`, or `StateError`.
        """
        deadline = self._clock() + _PREPARE_S
        pause_s = _RETRY_S
        while (left_s := deadline - self._clock()) > 0:
            try:
                return await self._call(
                    services.PRE_START, resource, request, left_s, (ALLOCATED_KEY, allocated)
                )
            except grpc.aio.AioRpcError as error:
                is_refusal = REFUSAL_KEY in dict(error.trailing_metadata() or ())
                if is_refusal or error.code() not in _ABSENT:
                    raise
            await asyncio.sleep(pause_s)  # the agent ended; the next one finds what it did
            pause_s = min(_LONGEST_RETRY_S, pause_s * 2)
        raise StateError(
            f"the node's agent did not answer within {_PREPARE_S:.0f} s",
            hint="the container starts when it is back; see the agent's pod on this node",
        )

    async def answers(self, *, within_s: float) -> bool:
        """Return whether an agent answers."""
        try:
            await self._call(services.OPTIONS, "", messages.Empty(), within_s)
        except grpc.aio.AioRpcError:
            return False
        return True

    async def preferred(
        self, resource: str, request: messages.PreferredAllocationRequest
    ) -> messages.PreferredAllocationResponse:
        """Pass on `GetPreferredAllocation`; no device is preferred if the agent has no answer.

        An error would fail the pod, though the kubelet can take any devices.
        """
        try:
            return await self._call(services.PREFERRED, resource, request, _PREFERRED_S)
        except grpc.aio.AioRpcError:
            return messages.PreferredAllocationResponse()

    async def _call(
        self,
        method: Method[Any, _Reply],
        resource: str,
        request: Message,
        timeout_s: float,
        *more: tuple[str, str],
    ) -> _Reply:
        return await method.on_aio(self._channel)(
            request,
            timeout=timeout_s,
            metadata=((RESOURCE_KEY, resource), *more),
            wait_for_ready=True,
        )


def socket_name(resource: str, folder: Path) -> str:
    """Return the name of a resource's socket file in `folder`."""
    # A domain has no `_`: no two resources have the same name here.
    name = f"{SOCKET_PREFIX}{resource.replace('/', '_')}.sock"
    if len(str(folder / name)) > _LONGEST_PATH:
        return f"{SOCKET_PREFIX}{hashlib.sha256(resource.encode()).hexdigest()[:16]}.sock"
    return name


class SocketServer:
    """A gRPC server on a Unix socket that appears in one step, in place of another one's."""

    def __init__(self, path: Path) -> None:
        self.path: Final = path
        self._server: grpc.aio.Server | None = None
        self._socket: FileIdentity | None = None

    @property
    def was_started(self) -> bool:
        """Whether it listens, also where another socket took its path."""
        return self._server is not None

    @property
    def has_socket(self) -> bool:
        """Whether its socket is in place: the kubelet removes all sockets when it starts."""
        return self._socket is not None and self._socket == file_identity(self.path)

    async def start(self, answered: Mapping[Method[Any, Any], services.MethodHandler]) -> None:
        """Listen. Raises `StateError` if the socket cannot be made."""
        server = grpc.aio.server()
        server.add_generic_rpc_handlers(services.handlers(answered))
        # gRPC removes its socket's path some time after it stops. A name that is used once cannot
        # be the socket of a later server.
        draft = self.path.with_name(f"{DRAFT_PREFIX}{os.urandom(4).hex()}")
        try:
            try:
                server.add_insecure_port(f"unix:{draft}")
                await server.start()
                draft.rename(self.path)
            except (OSError, RuntimeError) as error:
                await server.stop(None)
                raise StateError(
                    f"cannot listen on {self.path}: {error}",
                    hint=f"it has to run as root, with the host's {self.path.parent} mounted"
                    " there, writable",
                ) from error
        finally:
            draft.unlink(missing_ok=True)
        self._server, self._socket = server, file_identity(self.path)

    async def stop(self) -> None:
        """Stop listening. A successor's socket at the same path stays."""
        server, self._server = self._server, None
        if server is None:
            return
        if self.has_socket:
            with contextlib.suppress(OSError):  # the folder may be gone by now
                self.path.unlink()
        self._socket = None
        await server.stop(_FLUSH_S)


class ResourceServer:
    """Serves one resource, from `start` to `stop`."""

    def __init__(
        self,
        resource: OfferedResource,
        *,
        folder: Path,
        agent: AgentChannel,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.endpoint: Final = socket_name(resource.name, folder)
        """The socket's name in the kubelet's folder."""
        self.listener: Final = SocketServer(folder / self.endpoint)
        self._agent: Final = agent
        self._clock: Final = clock
        self._resource = resource
        self._is_withdrawn = False
        self._allocated: dict[str, str] = {}
        """`ALLOCATED_KEY` of each container that has not started, by its first id."""
        self._changed = asyncio.Event()
        self._watchers = 0
        self._is_ending = False
        self.refuses_options = False
        """Whether the next registration is to fail (`Front`)."""
        self.unwatched_since = clock()
        """When the kubelet's last stream ended, by the clock."""

    @property
    def resource(self) -> OfferedResource:
        """The offered resource."""
        return self._resource

    @property
    def is_watched(self) -> bool:
        """Whether the kubelet reads the list of devices."""
        return self._watchers > 0

    def update(self, resource: OfferedResource, *, is_withdrawn: bool = False) -> None:
        """Replace the offered resource, under the same name."""
        is_listed_alike = (resource.listing, is_withdrawn) == (
            self._resource.listing,
            self._is_withdrawn,
        )
        self._resource, self._is_withdrawn = resource, is_withdrawn
        if not is_listed_alike:
            self._wake()

    def relist(self) -> None:
        """Send the list again: at each list the kubelet writes its checkpoint from memory."""
        self._wake()

    async def start(self) -> None:
        """Listen. Raises `StateError` if the socket cannot be made."""
        await self.stop()
        self._is_ending = False
        await self.listener.start(
            {
                services.OPTIONS: self._get_options,
                services.LIST_AND_WATCH: self._list_and_watch,
                services.PREFERRED: self._get_preferred,
                services.ALLOCATE: self._allocate,
                services.PRE_START: self._pre_start,
            }
        )
        self.unwatched_since = self._clock()

    async def stop(self) -> None:
        """Stop listening. Streams end, which the kubelet takes for failed devices."""
        self._is_ending = True
        self._wake()
        await self.listener.stop()

    def _wake(self) -> None:
        """Wake all streams: the resource changed, or the server stops."""
        # Each stream waits for the event of its time: it misses no change and sees none twice.
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # ---- the calls -------------------------------------------------------------------------------

    async def _get_options(
        self, _request: messages.Empty, context: Context
    ) -> messages.DevicePluginOptions:
        if self.refuses_options:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "it takes over from another front")
        return self._resource.options

    async def _list_and_watch(
        self, _request: messages.Empty, _context: Context
    ) -> AsyncIterator[messages.ListAndWatchResponse]:
        self._watchers += 1
        try:
            while not self._is_ending:
                changed = self._changed
                yield self._resource.listed(is_withdrawn=self._is_withdrawn)
                await changed.wait()
        finally:
            self._watchers -= 1
            self.unwatched_since = self._clock()

    async def _get_preferred(
        self, request: messages.PreferredAllocationRequest, _context: Context
    ) -> messages.PreferredAllocationResponse:
        return await self._agent.preferred(self._resource.name, request)

    async def _allocate(
        self, request: messages.AllocateRequest, context: Context
    ) -> messages.AllocateResponse:
        response = messages.AllocateResponse()
        began_ns = time.time_ns()
        try:
            for each in request.container_requests:
                response.container_responses.append(self._resource.answer(each.devices_ids))
                self._allocated[min(each.devices_ids, default="")] = f"{began_ns}-{time.time_ns()}"
        except AllotError as error:
            await refuse(error, context)
        return response

    async def _pre_start(
        self, request: messages.PreStartContainerRequest, context: Context
    ) -> Message:
        try:
            first = min(request.devices_ids, default="")
            return await self._agent.pre_start(
                self._resource.name, request, allocated=self._allocated.pop(first, "")
            )
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details() or "")
        except AllotError as error:
            await refuse(error, context)


async def refuse(error: AllotError, context: Context) -> NoReturn:
    """End a call with the gRPC code of its error."""
    await context.abort(
        code_of(error), error.one_line(longest=MOST_EVENT), trailing_metadata=((REFUSAL_KEY, "1"),)
    )


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

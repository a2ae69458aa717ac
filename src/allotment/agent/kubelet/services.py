# SPDX-License-Identifier: Apache-2.0
"""The kubelet's gRPC services, as far as they are used: the name and the messages of each call.

A table in place of generated stubs: it is typed, and fits every gRPC that there is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from allotment.agent.kubelet.proto import deviceplugin_pb2 as device_plugin
from allotment.agent.kubelet.proto import podresources_pb2 as pod_resources

__all__ = [
    "ALLOCATE",
    "CHANNEL_OPTIONS",
    "GET_POD",
    "LIST_AND_WATCH",
    "LIST_PODS",
    "OPTIONS",
    "PREFERRED",
    "PRE_START",
    "REGISTER",
    "Context",
    "Handler",
    "Method",
    "handlers",
]

Ask = TypeVar("Ask", bound=Message)
Reply = TypeVar("Reply", bound=Message)

CHANNEL_OPTIONS: Final = (("grpc.default_authority", "localhost"),)
"""For every channel to a socket: gRPC would name the socket's path, which some servers refuse."""


@dataclass(frozen=True, slots=True)
class Method(Generic[Ask, Reply]):
    """One call of a service."""

    service: str
    name: str
    ask: type[Ask]
    reply: type[Reply]
    is_stream: bool = False
    """It is answered by many messages."""

    @property
    def path(self) -> str:
        """Return its name on the wire."""
        return f"/{self.service}/{self.name}"

    def on(self, channel: grpc.Channel) -> grpc.UnaryUnaryMultiCallable[Ask, Reply]:
        """Return the call on a channel."""
        return channel.unary_unary(
            self.path,
            request_serializer=self.ask.SerializeToString,
            response_deserializer=self.reply.FromString,
        )

    def on_aio(self, channel: grpc.aio.Channel) -> grpc.aio.UnaryUnaryMultiCallable[Ask, Reply]:
        """Return the call on a channel of asyncio."""
        return channel.unary_unary(
            self.path,
            request_serializer=self.ask.SerializeToString,
            response_deserializer=self.reply.FromString,
        )

    def stream_on_aio(
        self, channel: grpc.aio.Channel
    ) -> grpc.aio.UnaryStreamMultiCallable[Ask, Reply]:
        """Return the call that is answered by many messages, on a channel of asyncio."""
        return channel.unary_stream(
            self.path,
            request_serializer=self.ask.SerializeToString,
            response_deserializer=self.reply.FromString,
        )


_REGISTRATION: Final = "v1beta1.Registration"
_DEVICE_PLUGIN: Final = "v1beta1.DevicePlugin"
_POD_RESOURCES: Final = "v1.PodResourcesLister"

REGISTER: Final = Method(
    _REGISTRATION, "Register", device_plugin.RegisterRequest, device_plugin.Empty
)
OPTIONS: Final = Method(
    _DEVICE_PLUGIN,
    "GetDevicePluginOptions",
    device_plugin.Empty,
    device_plugin.DevicePluginOptions,
)
LIST_AND_WATCH: Final = Method(
    _DEVICE_PLUGIN,
    "ListAndWatch",
    device_plugin.Empty,
    device_plugin.ListAndWatchResponse,
    is_stream=True,
)
PREFERRED: Final = Method(
    _DEVICE_PLUGIN,
    "GetPreferredAllocation",
    device_plugin.PreferredAllocationRequest,
    device_plugin.PreferredAllocationResponse,
)
ALLOCATE: Final = Method(
    _DEVICE_PLUGIN, "Allocate", device_plugin.AllocateRequest, device_plugin.AllocateResponse
)
PRE_START: Final = Method(
    _DEVICE_PLUGIN,
    "PreStartContainer",
    device_plugin.PreStartContainerRequest,
    device_plugin.PreStartContainerResponse,
)
LIST_PODS: Final = Method(
    _POD_RESOURCES,
    "List",
    pod_resources.ListPodResourcesRequest,
    pod_resources.ListPodResourcesResponse,
)
GET_POD: Final = Method(
    _POD_RESOURCES,
    "Get",
    pod_resources.GetPodResourcesRequest,
    pod_resources.GetPodResourcesResponse,
)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
"""What a handler knows of its caller."""

# The messages differ from method to method; each handler says which are its own.
Handler: TypeAlias = (
    Callable[[Any, Context], Awaitable[Message]]
    | Callable[[Any, Context], AsyncIterator[Message]]
    | Callable[[Any, grpc.ServicerContext], Message]
)
"""The last kind is for servers without asyncio."""


def handlers(answered: Mapping[Method[Any, Any], Handler]) -> tuple[grpc.GenericRpcHandler, ...]:
    """Return what a server is given to answer these methods."""
    services: dict[str, dict[str, grpc.RpcMethodHandler[Any, Any]]] = {}
    for method, handler in answered.items():
        make: Any = (
            grpc.unary_stream_rpc_method_handler
            if method.is_stream
            else grpc.unary_unary_rpc_method_handler
        )
        services.setdefault(method.service, {})[method.name] = make(
            handler,
            request_deserializer=method.ask.FromString,
            response_serializer=method.reply.SerializeToString,
        )
    return tuple(
        grpc.method_handlers_generic_handler(service, methods)
        for service, methods in services.items()
    )

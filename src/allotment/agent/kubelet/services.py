# SPDX-License-Identifier: Apache-2.0
"""The kubelet's gRPC services that the agent uses: the name and the messages of each call.

A table in place of generated stubs: it is typed, and fits every version of gRPC.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final, Generic, TypeAlias, TypeVar

import grpc
import grpc.aio
import msgspec
from google.protobuf.message import Message

from allotment.agent.kubelet.proto import deviceplugin_pb2 as device_plugin
from allotment.agent.kubelet.proto import dra_health_pb2 as dra_health
from allotment.agent.kubelet.proto import dra_pb2 as dra
from allotment.agent.kubelet.proto import pluginregistration_pb2 as registration

Ask = TypeVar("Ask", bound=Message)
Response = TypeVar("Response", bound=Message)

CHANNEL_OPTIONS: Final = (("grpc.default_authority", "localhost"),)
"""For every channel to a socket: gRPC would send the socket's path, which some servers refuse."""


class Method(msgspec.Struct, Generic[Ask, Response], frozen=True):
    """One call of a service."""

    service: str
    name: str
    ask: type[Ask]
    reply: type[Response]
    is_stream: bool = False

    @property
    def path(self) -> str:
        return f"/{self.service}/{self.name}"

    def on(self, channel: grpc.Channel) -> grpc.UnaryUnaryMultiCallable[Ask, Response]:
        return channel.unary_unary(
            self.path,
            request_serializer=self.ask.SerializeToString,
            response_deserializer=self.reply.FromString,
        )

    def on_aio(self, channel: grpc.aio.Channel) -> grpc.aio.UnaryUnaryMultiCallable[Ask, Response]:
        return channel.unary_unary(
            self.path,
            request_serializer=self.ask.SerializeToString,
            response_deserializer=self.reply.FromString,
        )


_REGISTRATION: Final = "v1beta1.Registration"
_DEVICE_PLUGIN: Final = "v1beta1.DevicePlugin"

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

_PLUGIN_REGISTRATION: Final = "pluginregistration.Registration"

PLUGIN_INFO: Final = Method(
    _PLUGIN_REGISTRATION, "GetInfo", registration.InfoRequest, registration.PluginInfo
)
PLUGIN_REGISTERED: Final = Method(
    _PLUGIN_REGISTRATION,
    "NotifyRegistrationStatus",
    registration.RegistrationStatus,
    registration.RegistrationStatusResponse,
)
DRA_SERVICES: Final = {
    f"{version}.DRAPlugin": f"k8s.io.kubelet.pkg.apis.dra.{version}.DRAPlugin"
    for version in ("v1", "v1beta1")
}
"""By the name under which a plugin registers it. v1beta1 has the same messages without `share_id`,
which its kubelets skip."""
HEALTH_SERVICES: Final = {
    f"{version}.DRAResourceHealth": f"{version}.DRAResourceHealth"
    for version in ("v1", "v1beta1", "v1alpha1")
}
"""Likewise; all have the same messages."""


def prepare_resources(service: str) -> Method[Any, Any]:
    """Return the call by which a kubelet has claims prepared, of one of `DRA_SERVICES`."""
    return Method(
        service,
        "NodePrepareResources",
        dra.NodePrepareResourcesRequest,
        dra.NodePrepareResourcesResponse,
    )


def unprepare_resources(service: str) -> Method[Any, Any]:
    return Method(
        service,
        "NodeUnprepareResources",
        dra.NodeUnprepareResourcesRequest,
        dra.NodeUnprepareResourcesResponse,
    )


def watch_health(service: str) -> Method[Any, Any]:
    """Return the call by which a kubelet follows the devices' health."""
    return Method(
        service,
        "NodeWatchResources",
        dra_health.NodeWatchResourcesRequest,
        dra_health.NodeWatchResourcesResponse,
        is_stream=True,
    )


Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

# The messages differ from method to method.
MethodHandler: TypeAlias = (
    Callable[[Any, Context], Awaitable[Message]]
    | Callable[[Any, Context], AsyncIterator[Message]]
    | Callable[[Any, grpc.ServicerContext], Message]
)
"""The last kind is for servers without asyncio."""


def handlers(
    answered: Mapping[Method[Any, Any], MethodHandler],
) -> tuple[grpc.GenericRpcHandler, ...]:
    """Return the gRPC handlers of these methods."""
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

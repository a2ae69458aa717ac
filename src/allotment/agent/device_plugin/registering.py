# SPDX-License-Identifier: Apache-2.0
"""Telling the kubelet that there is a resource, and whose socket serves it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
import grpc.aio

from allotment.agent.device_plugin.serving import ResourceServer
from allotment.agent.kubelet.proto import deviceplugin_pb2 as messages
from allotment.agent.kubelet.services import CHANNEL_OPTIONS, REGISTER
from allotment.model.errors import AllotError, PrerequisiteError, StateError, UsageError

__all__ = ["VERSION", "KubeletSocket", "register", "socket_of"]

VERSION: Final = "v1beta1"

_PATIENCE_S: Final = 10.0
"""The kubelet calls the plugin back before it answers, and gives that 10 s."""


@dataclass(frozen=True, slots=True)
class KubeletSocket:
    """Which socket it is: each start of the kubelet makes a new one."""

    inode: int
    changed_ns: int


def socket_of(path: Path) -> KubeletSocket | None:
    """Return which socket is there; None: the kubelet is not, or is about to start."""
    try:
        status = path.stat()
    except OSError:
        return None
    return KubeletSocket(status.st_ino, status.st_ctime_ns)


async def register(server: ResourceServer, kubelet: Path) -> None:
    """Register one resource at the kubelet's socket.

    Raises `PrerequisiteError` for a kubelet of another version of the interface, `UsageError` for a
    name it does not take, `StateError` for one that does not answer.
    """
    request = messages.RegisterRequest(
        version=VERSION,
        endpoint=server.endpoint,
        resource_name=server.resource.name,
        options=server.options,
    )
    async with grpc.aio.insecure_channel(f"unix:{kubelet}", options=CHANNEL_OPTIONS) as channel:
        try:
            await REGISTER.on_aio(channel)(request, timeout=_PATIENCE_S)
        except grpc.aio.AioRpcError as error:
            raise _explained(error, server.resource.name, kubelet) from error


def _explained(error: grpc.aio.AioRpcError, resource: str, kubelet: Path) -> AllotError:
    details = error.details() or error.code().name
    # Its words: kubelet pkg/kubelet/cm/devicemanager/plugin/v1beta1/api.go.
    if error.code() is grpc.StatusCode.UNIMPLEMENTED or "API version" in details:
        return PrerequisiteError(
            f"the kubelet does not take device plugins of version {VERSION}: {details}",
            hint="this agent needs a kubelet that has it (all since Kubernetes 1.10): see whether"
            " there is a newer agent for this kubelet",
        )
    if "is invalid" in details:
        return UsageError(
            f"the kubelet does not take the resource {resource}: {details}",
            hint="a resource's name is DOMAIN/NAME, without kubernetes.io: see `resources` and"
            " `rename` in the configuration",
        )
    return StateError(
        f"the kubelet does not register {resource} at {kubelet}: {details}",
        hint="it is tried again; see the kubelet's log if this goes on",
    )

# SPDX-License-Identifier: Apache-2.0
"""The kubelet's podresources API: the devices and claims of each container, of every plugin.

It knows pods by name alone, and no init containers that have ended: `checkpoint` is the record for
decisions, this one is for metrics (kubelet pkg/kubelet/apis/podresources/server_v1.go, v1.36;
version v1 since Kubernetes 1.20).
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Self

import grpc
import msgspec

from allotment.agent.kubelet.proto import podresources_pb2 as messages
from allotment.agent.kubelet.services import CHANNEL_OPTIONS, Ask, Method, Response
from allotment.model.errors import NotFoundError, StateError

SOCKET: Final = Path("pod-resources/kubelet.sock")
"""In the kubelet's folder."""
SERVICE: Final = "v1.PodResourcesLister"
LIST_PODS: Final = Method(
    SERVICE, "List", messages.ListPodResourcesRequest, messages.ListPodResourcesResponse
)
_MOST_BYTES: Final = 16 << 20
"""Of an answer, as of the kubelet's own client (pkg/kubelet/apis/podresources/client.go)."""


class HeldClaim(msgspec.Struct, frozen=True, kw_only=True):
    """A device of a ResourceClaim."""

    namespace: str
    claim: str
    driver: str
    device: str
    """Its name in the driver's ResourceSlice."""


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """The devices of one container."""

    namespace: str
    pod: str
    container: str
    ids: Mapping[str, frozenset[str]] = msgspec.field(default_factory=dict)
    """By resource."""
    claims: tuple[HeldClaim, ...] = ()


class PodResources:
    """The service, while it is entered. Its calls block: use it in a thread."""

    def __init__(self, socket: Path, *, patience_s: float = 5.0) -> None:
        self._socket = socket
        self._patience_s = patience_s
        self._channel: grpc.Channel | None = None

    def __enter__(self) -> Self:
        options = (*CHANNEL_OPTIONS, ("grpc.max_receive_message_length", _MOST_BYTES))
        self._channel = grpc.insecure_channel(f"unix:{self._socket}", options=options)
        return self

    def __exit__(self, *_: object) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def list(self) -> tuple[Held, ...]:
        """Return the devices of every container of the node. Raises `StateError`."""
        reply = self.call(LIST_PODS, messages.ListPodResourcesRequest())
        return tuple(held for pod in reply.pod_resources for held in held_by(pod))

    def call(self, method: Method[Ask, Response], ask: Ask) -> Response:
        """Make one call. Raises `NotFoundError` or `StateError`."""
        if self._channel is None:
            raise StateError("PodResources is used before it was entered")
        try:
            return method.on(self._channel)(ask, timeout=self._patience_s)
        except grpc.RpcError as error:
            call: Any = error  # it is the failed call, too
            code, details = call.code(), call.details()
            is_unknown = code is grpc.StatusCode.UNKNOWN and "not found" in details
            if code is grpc.StatusCode.NOT_FOUND or is_unknown:
                raise NotFoundError(f"the kubelet knows no such pod: {details}") from error
            raise StateError(
                f"the kubelet does not answer on {self._socket}: {details}",
                hint="mount the host's /var/lib/kubelet/pod-resources there",
            ) from error


def held_by(pod: messages.PodResources) -> list[Held]:
    return [
        Held(
            namespace=pod.namespace,
            pod=pod.name,
            container=container.name,
            ids=by_resource(container.devices),
            claims=tuple(
                HeldClaim(
                    namespace=claim.claim_namespace,
                    claim=claim.claim_name,
                    driver=device.driver_name,
                    device=device.device_name,
                )
                for claim in container.dynamic_resources
                for device in claim.claim_resources
            ),
        )
        for container in pod.containers
    ]


def by_resource(devices: Iterable[messages.ContainerDevices]) -> dict[str, frozenset[str]]:
    """Return the ids of each resource, which may be listed once for each NUMA node."""
    ids: dict[str, frozenset[str]] = {}
    for each in devices:
        ids[each.resource_name] = ids.get(each.resource_name, frozenset()).union(each.device_ids)
    return ids

# SPDX-License-Identifier: Apache-2.0
"""The kubelet's PodResources service: what it says that containers have, by the pods' names.

A second opinion beside the checkpoint, for tests and diagnosis: it knows no init containers that
end, and no UIDs (real-cluster facts: docs/designs/identity.md).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import grpc
import podresources_pb2 as messages
from google.protobuf.message import Message

from allotment.agent.kubelet.services import CHANNEL_OPTIONS, Method
from allotment.model.errors import NotFoundError, StateError

POD_RESOURCES_SOCKET: Final = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
_SERVICE: Final = "v1.PodResourcesLister"
LIST_PODS: Final = Method(
    _SERVICE, "List", messages.ListPodResourcesRequest, messages.ListPodResourcesResponse
)
LIST_ALLOCATABLE: Final = Method(
    _SERVICE,
    "GetAllocatableResources",
    messages.AllocatableResourcesRequest,
    messages.AllocatableResourcesResponse,
)
GET_POD: Final = Method(
    _SERVICE, "Get", messages.GetPodResourcesRequest, messages.GetPodResourcesResponse
)
_PATIENCE_S: Final = 5.0

Ask = TypeVar("Ask", bound=Message)
Reply = TypeVar("Reply", bound=Message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What one container has."""

    namespace: str
    pod: str
    container: str
    ids: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """By resource."""


class PodResources:
    """The service, while it is entered. Its calls block: use it in a thread."""

    __slots__ = ("_channel", "_socket")

    def __init__(self, socket: Path = POD_RESOURCES_SOCKET) -> None:
        self._socket = socket
        self._channel: grpc.Channel | None = None

    def __enter__(self) -> Self:
        """Connect; a kubelet that is not there is told of by the first call."""
        self._channel = grpc.insecure_channel(f"unix:{self._socket}", options=CHANNEL_OPTIONS)
        return self

    def __exit__(self, *_: object) -> None:
        """Disconnect."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def list(self) -> tuple[Held, ...]:
        """Return what every container of the node has. Raises `StateError`."""
        reply = self._call(LIST_PODS, messages.ListPodResourcesRequest())
        return tuple(held for pod in reply.pod_resources for held in _held(pod))

    def allocatable(self) -> dict[str, int]:
        """Return how many devices the kubelet gives out, by resource. Raises `StateError`."""
        reply = self._call(LIST_ALLOCATABLE, messages.AllocatableResourcesRequest())
        return {name: len(ids) for name, ids in _by_resource(reply.devices).items()}

    def get(self, namespace: str, pod: str) -> tuple[Held, ...]:
        """Return what the containers of one pod have. Raises `NotFoundError` or `StateError`."""
        ask = messages.GetPodResourcesRequest(pod_name=pod, pod_namespace=namespace)
        return tuple(_held(self._call(GET_POD, ask).pod_resources))

    def _call(self, method: Method[Ask, Reply], ask: Ask) -> Reply:
        if self._channel is None:
            raise StateError("PodResources is used before it was entered")
        try:
            return method.on(self._channel)(ask, timeout=_PATIENCE_S, wait_for_ready=True)
        except grpc.RpcError as error:
            call: Any = error  # what a call raises is the call, too
            details = call.details()
            if call.code() is grpc.StatusCode.NOT_FOUND or "not found" in details:
                raise NotFoundError(f"the kubelet knows no such pod: {details}") from error
            raise StateError(
                f"the kubelet does not answer on {self._socket}: {details}",
                hint="mount the host's /var/lib/kubelet/pod-resources there",
            ) from error


def _held(pod: messages.PodResources) -> list[Held]:
    return [
        Held(
            namespace=pod.namespace,
            pod=pod.name,
            container=container.name,
            ids=_by_resource(container.devices),
        )
        for container in pod.containers
    ]


def _by_resource(devices: Iterable[messages.ContainerDevices]) -> dict[str, frozenset[str]]:
    """The ids of each resource, which may be listed once for each NUMA node."""
    ids: dict[str, frozenset[str]] = {}
    for each in devices:
        ids[each.resource_name] = ids.get(each.resource_name, frozenset()).union(each.device_ids)
    return ids

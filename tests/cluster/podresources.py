# SPDX-License-Identifier: Apache-2.0
"""The calls of the kubelet's PodResources service that tests make, beside the agent's one.

A second opinion beside the checkpoint, for tests and diagnosis (real-cluster facts:
docs/designs/identity.md).
"""

from pathlib import Path
from typing import Final

from allotment.agent.kubelet import podresources
from allotment.agent.kubelet.podresources import SERVICE, Held, by_resource, held_by
from allotment.agent.kubelet.proto import podresources_pb2 as messages
from allotment.agent.kubelet.services import Method

POD_RESOURCES_SOCKET: Final = Path("/var/lib/kubelet") / podresources.SOCKET
LIST_ALLOCATABLE: Final = Method(
    SERVICE,
    "GetAllocatableResources",
    messages.AllocatableResourcesRequest,
    messages.AllocatableResourcesResponse,
)
GET_POD: Final = Method(
    SERVICE, "Get", messages.GetPodResourcesRequest, messages.GetPodResourcesResponse
)


class PodResources(podresources.PodResources):
    """The service, while it is entered. Its calls block: use it in a thread."""

    def __init__(self, socket: Path = POD_RESOURCES_SOCKET) -> None:
        super().__init__(socket)

    def allocatable(self) -> dict[str, int]:
        """Return how many devices the kubelet gives out, by resource. Raises `StateError`."""
        reply = self.call(LIST_ALLOCATABLE, messages.AllocatableResourcesRequest())
        return {name: len(ids) for name, ids in by_resource(reply.devices).items()}

    def get(self, namespace: str, pod: str) -> tuple[Held, ...]:
        """Return what the containers of one pod have. Raises `NotFoundError` or `StateError`."""
        ask = messages.GetPodResourcesRequest(pod_name=pod, pod_namespace=namespace)
        return tuple(held_by(self.call(GET_POD, ask).pod_resources))

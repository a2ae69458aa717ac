# SPDX-License-Identifier: Apache-2.0
"""Binds a pod to a node and writes its annotations in one request.

`pods/binding` merges the Binding's annotations in the same write as the node, only for this uid and
resource version (kubernetes pkg/registry/core/pod/storage, `setPodNodeAndMetadata`). So no bound
pod lacks its placement, and a late bind cannot bind a changed pod.
"""

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from allotment.dialects.own.placement import PLACEMENT, RESIZE
from allotment.kube.clients import Api, PatchKind, find, read_and_write
from allotment.kube.cluster_feed import to_cluster_pod
from allotment.kube.objects import NOMINATOR, PodObject
from allotment.model.clusters import ClusterPod
from allotment.model.errors import NotFoundError
from allotment.model.pods import PodUid
from allotment.model.structs import replace

MOST_WRITES: Final = 160
"""Binds in progress: no more than there are connections, so that none waits in a hidden queue."""


class Binding(msgspec.Struct, frozen=True, kw_only=True):
    """A pod, its node, and its new annotations."""

    uid: PodUid
    namespace: str
    name: str
    node: str
    version: str = ""
    """The required resource version; empty: any, for pods without devices."""
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)


_pod = msgspec.json.Decoder(PodObject)


async def write_wish(api: Api, namespace: str, name: str, change: Callable[[str], str]) -> str:
    """Change a pod's `allotment.dev/resize`, and return the new text.

    Raises `NotFoundError`, `KubeError`.
    """
    return await read_and_write(lambda: _write_wish(api, namespace, name, change))


async def _write_wish(api: Api, namespace: str, name: str, change: Callable[[str], str]) -> str:
    path = f"/api/v1/namespaces/{namespace}/pods/{name}"
    item = await find(api, path, _pod, asked=f"get pod {namespace}/{name}")
    if item is None:
        raise NotFoundError(
            f"there is no pod {namespace}/{name}", hint="`kubectl get pods -A` lists all"
        )
    text = change((item.metadata.annotations or {}).get(RESIZE, ""))
    metadata = {
        "uid": item.metadata.uid,
        "resourceVersion": item.metadata.resource_version,
        "annotations": {RESIZE: text},
    }
    await api.patch(path, {"metadata": metadata}, asked=f"resize pod {namespace}/{name}")
    return text


class Bindings:
    """Binds pods, and reads single pods."""

    def __init__(
        self, api: Api, *, complete: Callable[[ClusterPod], ClusterPod] = lambda pod: pod
    ) -> None:
        """`complete` adds adopted devices to a pod that was read."""
        self._api = api
        self._complete = complete

    async def bind(self, binding: Binding) -> None:
        """Raises `KubeError`; if it `is_passing`, the outcome is unknown."""
        metadata: dict[str, object] = {
            "name": binding.name,
            "namespace": binding.namespace,
            "uid": binding.uid,
            "annotations": binding.annotations,
        }
        if binding.version:
            metadata["resourceVersion"] = binding.version
        item = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": metadata,
            "target": {"apiVersion": "v1", "kind": "Node", "name": binding.node},
        }
        path = f"/api/v1/namespaces/{binding.namespace}/pods/{binding.name}/binding"
        await self._api.create(path, item, asked=f"bind pod {binding.namespace}/{binding.name}")

    async def read(self, *, uid: PodUid, namespace: str, name: str) -> ClusterPod | None:
        """Read a pod; None if no pod has this uid. Raises `KubeError`."""
        path = f"/api/v1/namespaces/{namespace}/pods/{name}"
        item = await find(self._api, path, _pod, asked=f"get pod {namespace}/{name}")
        if item is None or item.metadata.uid != uid:
            return None
        # Of bound pods only those that are read have a version.
        return replace(self._complete(to_cluster_pod(item)), version=item.metadata.resource_version)

    async def nominate(self, pod: ClusterPod, node: str | None) -> None:
        """Have kube-scheduler try this node first, unless the pod changed; None: withdraw that.

        Raises `KubeError`.
        """
        change = {
            "metadata": {"uid": pod.uid, "resourceVersion": pod.version},
            "status": {"nominatedNodeName": node},
        }
        path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}/status"
        asked = f"nominate a node for pod {pod}"
        await self._api.patch(
            path, change, asked=asked, kind=PatchKind.STRATEGIC, manager=NOMINATOR
        )

    async def place_again(self, pod: ClusterPod, placement: str, *, version: str) -> None:
        """Replace the placement of a bound pod, if it still has that version. Raises `KubeError`.

        The status subresource keeps the annotations that it gets, and needs no right to change
        containers.
        """
        metadata = {
            "uid": pod.uid,
            "resourceVersion": version,
            "annotations": {PLACEMENT: placement},
        }
        path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}/status"
        await self._api.patch(path, {"metadata": metadata}, asked=f"patch pod {pod}")

# SPDX-License-Identifier: Apache-2.0
"""Binding a pod to a node, together with what is written on it: one request.

`pods/binding` merges the annotations of the Binding into the pod's in the same write as its node,
and only if the pod is still the one with this uid and resource version (kubernetes
pkg/registry/core/pod/storage, `setPodNodeAndMetadata`). So nobody sees a bound pod without its
placement, and a binding that comes late cannot bind a pod that has changed since.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from allotment.kube.clients import Api
from allotment.kube.cluster_feed import ClusterPod, to_cluster_pod
from allotment.kube.errors import KubeError, ObjectMissingError
from allotment.kube.objects import PodObject
from allotment.model.pods import PodUid

__all__ = ["Binding", "Bindings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """A pod, its node, and what is to stand on it."""

    uid: PodUid
    namespace: str
    name: str
    node: str
    version: str = ""
    """The resource version that it must have; empty: any."""
    annotations: Mapping[str, str] = field(default_factory=dict)


_pod = msgspec.json.Decoder(PodObject)


class Bindings:
    """Binds pods, and reads one by itself."""

    def __init__(self, api: Api) -> None:
        """Take a connection."""
        self._api = api

    async def bind(self, binding: Binding) -> None:
        """Bind. Raises `KubeError`; where it `is_passing`, the pod may have been bound or not."""
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
        """Read a pod as it is now; None: there is none of this uid. Raises `KubeError`."""
        path = f"/api/v1/namespaces/{namespace}/pods/{name}"
        try:
            body = await self._api.get(path, asked=f"get pod {namespace}/{name}")
        except ObjectMissingError:
            return None
        try:
            item = _pod.decode(body)
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise KubeError(f"pod {namespace}/{name} is not understood: {error}") from error
        return to_cluster_pod(item) if item.metadata.uid == uid else None

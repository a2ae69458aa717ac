# SPDX-License-Identifier: Apache-2.0
"""KubeShare 1.0's SharePods at the API server, and their pods.

`sharepods.kubeshare.nthu` v1 exists only if defined. The status uses Go's field names
(`pkg/apis/kubeshare/v1/types.go`) and is written through the status subresource, which only our
definition in deploy/manifests has. A pod is read when its status is copied, to keep no whole pods
in memory.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from allotment.dialects.foreign.kubeshare import GROUP, KIND
from allotment.kube.clients import Api, decoded, find, shallow
from allotment.kube.errors import KubeError
from allotment.kube.objects import Metadata
from allotment.kube.watching import Following, Subject

MADE_FOR: Final = "allotment.dev/made-for"
"""A label on pods that were created for a SharePod, with the kind as its value."""
MANIFEST: Final = "deploy/manifests/kubeshare-sharepods.yaml"
"""Defines SharePods, and grants the rights to serve them."""
_VERSION: Final = f"{GROUP}/v1"
_PATH: Final = f"/apis/{_VERSION}"
_MOST_LEVELS: Final = 100
"""Depth of nested lists and maps; less than the decoder's limit."""


class _Object(msgspec.Struct, kw_only=True):
    """A SharePod; its spec is undecoded and unchecked."""

    metadata: Metadata
    spec: msgspec.Raw = msgspec.Raw(b"null")
    status: msgspec.Raw = msgspec.Raw(b"null")


class _Pod(msgspec.Struct):
    """A pod of which only the version is read."""

    metadata: Metadata


class _Resource(msgspec.Struct):
    name: str


class _Resources(msgspec.Struct):
    """The resources of an API group (`APIResourceList`)."""

    resources: list[_Resource] | None = None


_resources = msgspec.json.Decoder(_Resources)


class SharePod(msgspec.Struct, frozen=True, kw_only=True):
    """A SharePod, as stored by the API server."""

    uid: str
    namespace: str
    name: str
    version: str
    document: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """The author's part as JSON: all but the status."""
    status: Mapping[str, Any] = msgspec.field(default_factory=dict)
    is_ending: bool = False
    problem: str = ""
    """Why it can have no pod, if its document is invalid."""

    def __str__(self) -> str:
        return f"SharePod {self.namespace}/{self.name}"


class PodSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A SharePod's pod, and its version."""

    uid: str
    namespace: str
    name: str
    version: str


class SharePods:
    """Reads and writes SharePods. All methods but `follow` raise `KubeError`."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def are_defined(self) -> bool:
        """Return whether the API server has SharePods that this client can serve."""
        group = await find(self._api, _PATH, _resources, asked=f"discover {_VERSION}")
        names = {resource.name for resource in (group and group.resources) or ()}
        if "sharepods" not in names:
            return False
        if "sharepods/status" not in names:
            raise KubeError(
                "SharePods are defined without a status, as KubeShare itself defines them",
                hint=f"`kubectl apply -f {MANIFEST}` replaces the definition; SharePods stay",
            )
        await self._api.get(f"{_PATH}/sharepods", asked="list sharepods", params={"limit": "1"})
        return True

    def follow(
        self, on_change: Callable[[str, SharePod | None], None]
    ) -> Following[_Object, SharePod]:
        """Follow all SharePods. Sends nothing before it runs."""
        subject = Subject("sharepods", f"{_PATH}/sharepods", _Object, _sharepod)
        return Following(self._api, subject, on_change=on_change)

    def follow_pods(
        self, on_change: Callable[[str, PodSeen | None], None]
    ) -> Following[_Pod, PodSeen]:
        subject = Subject(
            name="pods of sharepods",
            path="/api/v1/pods",
            labels={MADE_FOR: KIND},
            item=_Pod,
            convert=_seen,
        )
        return Following(self._api, subject, on_change=on_change)

    async def read(self, sharepod: SharePod) -> SharePod | None:
        """Read a SharePod; None if it is gone, even if another one has its name."""
        path = f"{_PATH}/namespaces/{sharepod.namespace}/sharepods/{sharepod.name}"
        asked = f"get sharepod {sharepod.namespace}/{sharepod.name}"
        item = await find(self._api, path, _one, asked=asked)
        current = item and _sharepod(item)
        return current if current and current.uid == sharepod.uid else None

    async def namespace_labels(self, name: str) -> Mapping[str, str]:
        path = f"/api/v1/namespaces/{name}"
        item = await find(self._api, path, _pod, asked=f"get namespace {name}")
        return (item and item.metadata.labels) or {}

    async def read_pod(self, namespace: str, name: str) -> dict[str, Any] | None:
        path = f"/api/v1/namespaces/{namespace}/pods/{name}"
        return await find(self._api, path, _any, asked=f"get pod {namespace}/{name}")

    async def create_pod(self, namespace: str, pod: Mapping[str, Any]) -> dict[str, Any]:
        path = f"/api/v1/namespaces/{namespace}/pods"
        asked = "create pods"
        return decoded(_any, await self._api.create(path, pod, asked=asked), asked=asked)

    async def write_status(self, sharepod: SharePod, status: Mapping[str, Any]) -> None:
        """Write the SharePod's status, if it still has that version."""
        path = f"{_PATH}/namespaces/{sharepod.namespace}/sharepods/{sharepod.name}/status"
        change = {
            "metadata": {"resourceVersion": sharepod.version, "uid": sharepod.uid},
            "status": changed(sharepod.status, status),
        }
        await self._api.patch(path, change, asked="patch sharepods/status")


_one = msgspec.json.Decoder(_Object)
_any = msgspec.json.Decoder(dict[str, Any])
_pod = msgspec.json.Decoder(_Pod)


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the merge patch (RFC 7396) from `before` to `after`, without equal keys."""
    patch: dict[str, Any] = {key: None for key in before if key not in after}
    for key, value in after.items():
        old = before.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            if inner := changed(old, value):
                patch[key] = inner
        elif old != value or key not in before:
            patch[key] = value
    return patch


def _sharepod(item: _Object) -> SharePod:
    """Convert a SharePod; too deep nesting is cut, and a problem."""
    meta = item.metadata
    spec = bytes(item.spec)
    cut = shallow(spec, levels=_MOST_LEVELS)
    problem = ""
    if cut != spec:
        problem = f"its spec is nested more than {_MOST_LEVELS} levels deep;"
        problem += " hint: use only fields of a pod's spec"
    metadata = {
        "name": meta.name,
        "namespace": meta.namespace,
        "uid": meta.uid,
        "labels": meta.labels or {},
        "annotations": meta.annotations or {},
    }
    status = msgspec.json.decode(shallow(bytes(item.status), levels=_MOST_LEVELS))
    return SharePod(
        uid=meta.uid,
        namespace=meta.namespace,
        name=meta.name,
        version=meta.resource_version,
        document={
            "apiVersion": _VERSION,
            "kind": KIND,
            "metadata": metadata,
            "spec": msgspec.json.decode(cut),
        },
        status=status if isinstance(status, dict) else {},
        is_ending=meta.deletion_timestamp is not None,
        problem=problem,
    )


def _seen(item: _Pod) -> PodSeen:
    meta = item.metadata
    return PodSeen(
        uid=meta.uid, namespace=meta.namespace, name=meta.name, version=meta.resource_version
    )

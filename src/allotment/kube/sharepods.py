# SPDX-License-Identifier: Apache-2.0
"""SharePods of KubeShare 1.0 at the API server, and the pods that stand for them.

`sharepods.kubeshare.nthu` v1 is there only where somebody has defined it. The status has the names
of Go's fields (`pkg/apis/kubeshare/v1/types.go`): `PodStatus`, `PodObjectMeta`, `BoundDeviceID`.
It is written through the status subresource, which the definition in deploy/manifests has and
KubeShare's own has not: nobody needs the right to change what an author wrote.

Of the pods, which are few, a watch tells only that one has changed; what is copied from a pod is
read when it is copied, so that nobody keeps whole pods in memory.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from allotment.dialects.kubeshare_sharepods import GROUP, KIND
from allotment.kube.clients import Api
from allotment.kube.errors import KubeError, ObjectMissingError
from allotment.kube.listing import decoded
from allotment.kube.nesting import shallow
from allotment.kube.objects import Metadata, ObjectList
from allotment.kube.watching import Following, Subject

__all__ = ["MADE_FOR", "MANIFEST", "PodSeen", "SharePod", "SharePods", "changed"]

MADE_FOR: Final = "allotment.dev/made-for"
"""A pod that was made for a SharePod has this label, with the kind as its value."""
MANIFEST: Final = "deploy/manifests/kubeshare-sharepods.yaml"
"""Defines them, and has the rights to serve them."""
_VERSION: Final = f"{GROUP}/v1"
_PATH: Final = f"/apis/{_VERSION}"
_MOST_LEVELS: Final = 100
"""Of lists and maps in one another. Fewer than are left when an answer is cut."""


class _Object(msgspec.Struct, kw_only=True):
    """A SharePod; what it is about is as its author wrote it, and checked by whoever uses it."""

    metadata: Metadata
    spec: msgspec.Raw = msgspec.Raw(b"null")
    status: msgspec.Raw = msgspec.Raw(b"null")


class _Pod(msgspec.Struct):
    """A pod of which the version alone counts."""

    metadata: Metadata


class _Resource(msgspec.Struct):
    name: str


class _Resources(msgspec.Struct):
    """What a group has (`APIResourceList`)."""

    resources: list[_Resource] | None = None


_resources = msgspec.json.Decoder(_Resources)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharePod:
    """A SharePod, as the API server has it."""

    uid: str
    namespace: str
    name: str
    version: str
    document: Mapping[str, Any] = field(default_factory=dict)
    """All of it that its author wrote, as JSON has it: without its status."""
    status: Mapping[str, Any] = field(default_factory=dict)
    is_ending: bool = False
    problem: str = ""
    """Why it can have no pod, whatever is in its document."""

    def __str__(self) -> str:
        """Name it as people do."""
        return f"SharePod {self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSeen:
    """That a pod which was made for a SharePod is there, in this version."""

    uid: str
    namespace: str
    name: str
    version: str


class SharePods:
    """Reads and writes them. By one connection; all its methods but `follow` raise `KubeError`."""

    def __init__(self, api: Api) -> None:
        """Ask nothing yet."""
        self._api = api

    async def are_defined(self) -> bool:
        """Tell whether the API server knows SharePods, as they can be served by this client."""
        asked = f"discover {_VERSION}"
        try:
            body = await self._api.get(_PATH, asked=asked)
        except ObjectMissingError:
            return False
        names = {each.name for each in decoded(_resources, body, asked=asked).resources or ()}
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
        """Follow all of them. Nothing is asked before it runs."""
        subject = Subject(
            name="sharepods",
            path=f"{_PATH}/sharepods",
            fields={},
            item=_Object,
            items=ObjectList[_Object],
            convert=_sharepod,
        )
        return Following(self._api, subject, on_change=on_change)

    def follow_pods(
        self, on_change: Callable[[str, PodSeen | None], None]
    ) -> Following[_Pod, PodSeen]:
        """Follow the pods that were made for SharePods, by their label."""
        subject = Subject(
            name="pods of sharepods",
            path="/api/v1/pods",
            fields={},
            labels={MADE_FOR: KIND},
            item=_Pod,
            items=ObjectList[_Pod],
            convert=_seen,
        )
        return Following(self._api, subject, on_change=on_change)

    async def read(self, sharepod: SharePod) -> SharePod | None:
        """Read a SharePod as it is now; None: it is gone, whatever has its name."""
        path = f"{_PATH}/namespaces/{sharepod.namespace}/sharepods/{sharepod.name}"
        asked = f"get sharepod {sharepod.namespace}/{sharepod.name}"
        try:
            body = await self._api.get(path, asked=asked)
        except ObjectMissingError:
            return None
        found = _sharepod(decoded(_one, body, asked=asked))
        return found if found.uid == sharepod.uid else None

    async def namespace_labels(self, name: str) -> Mapping[str, str]:
        """Read a namespace's labels; none where there is no such namespace."""
        asked = f"get namespace {name}"
        try:
            body = await self._api.get(f"/api/v1/namespaces/{name}", asked=asked)
        except ObjectMissingError:
            return {}
        return decoded(_pod, body, asked=asked).metadata.labels or {}

    async def read_pod(self, namespace: str, name: str) -> dict[str, Any] | None:
        """Read a pod as it is now; None: there is none."""
        path = f"/api/v1/namespaces/{namespace}/pods/{name}"
        asked = f"get pod {namespace}/{name}"
        try:
            body = await self._api.get(path, asked=asked)
        except ObjectMissingError:
            return None
        return decoded(_any, body, asked=asked)

    async def create_pod(self, namespace: str, pod: Mapping[str, Any]) -> dict[str, Any]:
        """Make a pod, and return it as it was made."""
        path = f"/api/v1/namespaces/{namespace}/pods"
        asked = "create pods"
        return decoded(_any, await self._api.create(path, pod, asked=asked), asked=asked)

    async def write_status(self, sharepod: SharePod, status: Mapping[str, Any]) -> None:
        """Make this the SharePod's status, if it is still of that version."""
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
    """Return the merge patch (RFC 7396) that makes the one the other; what stays is left out."""
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
    """Read one; what is nested deeper than any pod's is cut, and a problem."""
    meta = item.metadata
    spec = bytes(item.spec)
    cut = shallow(spec, levels=_MOST_LEVELS)
    problem = ""
    if cut != spec:
        problem = f"its spec is nested more than {_MOST_LEVELS} levels deep, as no pod's is;"
        problem += " hint: write what a pod's spec may have"
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

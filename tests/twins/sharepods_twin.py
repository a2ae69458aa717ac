# SPDX-License-Identifier: Apache-2.0
"""An API server that knows SharePods and pods, and tells of both: over HTTP, in one process.

It is what a SharePod's controller sees of a cluster: names are given once, versions count up, a
status is written under the version that it was read in, watches tell what has changed.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from typing import Any

from api_server_twin import Reply, answered, api_of

from allotment.kube.clients import Api, HttpRequest

Json = dict[str, Any]
GROUP = "/apis/kubeshare.nthu/v1"


class ClusterTwin:
    """SharePods and pods; what a test does to them goes by the methods, what is asked by `api`."""

    def __init__(self) -> None:
        self.is_defined = True
        self.has_status = True
        self.may_list = True
        self.unheard: set[str] = set()
        """Kinds of which watches tell nothing."""
        self.objects: dict[tuple[str, str, str], Json] = {}
        self.namespaces: dict[str, dict[str, str]] = {}
        self.refusal: tuple[int, str] | None = None
        """How creating a pod is refused."""
        self.created: list[Json] = []
        self.written: list[Json] = []
        self.requests: list[tuple[str, str]] = []
        self._history: list[tuple[str, str, Json]] = []
        self._news = asyncio.Event()

    def api(self) -> Api:
        return api_of(self._answer)

    # ---- what a test does -----------------------------------------------------------------------

    def put(self, kind: str, namespace: str, name: str, **fields: Any) -> Json:  # noqa: ANN401 - JSON
        """Make or change an object."""
        before = self.objects.get((kind, namespace, name))
        item = {"metadata": {}, **copy.deepcopy(before or {}), **copy.deepcopy(fields)}
        version = self._next_version()
        item["metadata"] = {
            "uid": f"uid-{kind}-{name}-{version}",
            **(before or {}).get("metadata", {}),
            **item["metadata"],
            "namespace": namespace,
            "name": name,
            "resourceVersion": version,
        }
        self.objects[kind, namespace, name] = item
        self._tell("MODIFIED" if before else "ADDED", kind, item)
        return item

    def define(self, *, is_defined: bool) -> None:
        """Define SharePods, or remove their definition, which ends who watches them."""
        self.is_defined = is_defined
        self._news.set()
        self._news = asyncio.Event()

    def delete(self, kind: str, namespace: str, name: str, *, cascades: bool = True) -> None:
        """Delete an object, and what belongs to it."""
        item = self.objects.pop((kind, namespace, name))
        item["metadata"]["resourceVersion"] = self._next_version()
        self._tell("DELETED", kind, item)
        for (other, where, called), each in list(self.objects.items()) if cascades else ():
            owners = each["metadata"].get("ownerReferences", ())
            if any(owner["uid"] == item["metadata"]["uid"] for owner in owners):
                self.delete(other, where, called)

    def sharepod(self, name: str = "sharepod1", namespace: str = "team") -> Json:
        return self.objects["sharepods", namespace, name]

    def pod(self, name: str = "sharepod1", namespace: str = "team") -> Json | None:
        return self.objects.get(("pods", namespace, name))

    def _next_version(self) -> str:
        return str(len(self._history) + 1)

    def _tell(self, event: str, kind: str, item: Json) -> None:
        told = "" if kind in self.unheard else kind
        self._history.append((event, told, copy.deepcopy(item)))
        self._news.set()
        self._news = asyncio.Event()

    # ---- what is asked --------------------------------------------------------------------------

    async def _answer(self, request: HttpRequest) -> Reply:
        await asyncio.sleep(0)
        path = request.path
        self.requests.append((request.method, path))
        if path.startswith(GROUP) and not self.is_defined:
            return _refused(HTTPStatus.NOT_FOUND)
        if path == GROUP:
            names = ["sharepods", *(["sharepods/status"] if self.has_status else [])]
            return answered({"resources": [{"name": each} for each in names]})
        parts = path.strip("/").split("/")
        if "namespaces" not in parts:
            return self._list(parts[-1], request)
        if parts[-2] == "namespaces":
            item = {"metadata": {"name": parts[-1], "labels": self.namespaces.get(parts[-1], {})}}
            return answered(item)
        return self._one(parts[parts.index("namespaces") + 1 :], request)

    def _one(self, parts: list[str], request: HttpRequest) -> Reply:
        """Answer about one object: its namespace, what kind it is, its name."""
        if request.method == "POST":
            return self._create(parts[0], json.loads(request.body or b""))
        if request.method == "PATCH":
            return self._patch(parts[0], parts[2], json.loads(request.body or b""))
        found = self.objects.get((parts[1], parts[0], parts[2]))
        return answered(found) if found else _refused(HTTPStatus.NOT_FOUND)

    def _list(self, kind: str, request: HttpRequest) -> Reply:
        if not self.may_list:
            return _refused(HTTPStatus.FORBIDDEN, f"{kind} is forbidden")
        chosen = _chooses(request.params.get("labelSelector", ""))
        if "watch" in request.params:
            since = int(request.params["resourceVersion"])
            return Reply(200, self._stream(kind, since, chosen))
        items = [each for (other, *_), each in self.objects.items() if other == kind]
        version = str(len(self._history))
        body = {"metadata": {"resourceVersion": version}, "items": list(filter(chosen, items))}
        return answered(body)

    async def _stream(
        self, kind: str, since: int, chosen: Callable[[Json], bool]
    ) -> AsyncIterator[bytes]:
        while True:
            news = self._news
            for event, other, item in self._history[since:]:
                if other == kind and chosen(item):
                    yield json.dumps({"type": event, "object": item}).encode() + b"\n"
            since = len(self._history)
            if kind == "sharepods" and not self.is_defined:
                return
            await news.wait()

    def _create(self, namespace: str, item: Json) -> Reply:
        if self.refusal is not None:
            return _refused(*self.refusal)
        name = item["metadata"]["name"]
        if ("pods", namespace, name) in self.objects:
            return _refused(HTTPStatus.CONFLICT, "it exists")
        self.created.append(item)
        made = self.put(
            "pods",
            namespace,
            name,
            metadata=item["metadata"],
            spec=item["spec"],
            status={"phase": "Pending"},
        )
        return answered(made, 201)

    def _patch(self, namespace: str, name: str, change: Json) -> Reply:
        item = self.objects.get(("sharepods", namespace, name))
        if item is None:
            return _refused(HTTPStatus.NOT_FOUND)
        if change["metadata"]["resourceVersion"] != item["metadata"]["resourceVersion"]:
            return _refused(HTTPStatus.CONFLICT, "it has changed")
        status = merged(item.get("status", {}), change["status"])
        self.written.append(status)
        return answered(self.put("sharepods", namespace, name, status=status))


def merged(before: Any, patch: Any) -> Any:  # noqa: ANN401 - JSON
    """Apply a merge patch, as RFC 7396 says it."""
    if not isinstance(patch, dict):
        return patch
    result = dict(before) if isinstance(before, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def _chooses(selector: str) -> Callable[[Json], bool]:
    wanted = dict(each.split("=") for each in selector.split(",") if each)

    def chooses(item: Json) -> bool:
        return wanted.items() <= (item["metadata"].get("labels") or {}).items()

    return chooses


def _refused(code: int, message: str = "no") -> Reply:
    return answered({"kind": "Status", "code": code, "message": message}, code)

# SPDX-License-Identifier: Apache-2.0
"""An API server with a made-up cluster for the page: its objects, and what users may list."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from api_server_twin import Reply, answered
from explained_twin import asking, node, pod

from allotment.kube.clients import HttpRequest

Json = dict[str, Any]
NODES = [node("a"), node("b")]
PODS = [
    pod("one", asking(), on=("a", 0)),
    pod("two", asking(), on=("a", 0)),
    pod("other", asking(), on=("b", 1), namespace="web"),
    pod("it", asking("60Gi", gpus=2)),
]
QUOTA = {
    "metadata": {"name": "gpus", "namespace": "ml"},
    "spec": {"hard": {"limits.allotment.dev/gpu-memory": "100Gi"}},
}
EVENT = {
    "metadata": {"name": "e", "namespace": "ml"},
    "involvedObject": {"kind": "Pod", "name": "one", "namespace": "ml"},
    "reason": "ShareReady",
    "message": "share of 20Gi",
    "lastTimestamp": "2026-01-01T00:00:00Z",
}
ROOT, ANNE, NONE = "token-of-root", "token-of-anne", "token-of-none"
USERS: Mapping[str, Json] = {
    ANNE: {"username": "anne", "groups": ["dev"]},
    ROOT: {"username": "root"},
    NONE: {"username": "none"},
}
ALLOWED = {
    ("root", "*", ""),
    ("anne", "pods", "web"),
    ("anne", "nodes", ""),
}


def large(nodes: int, devices: int = 8) -> tuple[list[Json], list[Json]]:
    """Nodes of GPUs with 0 to 2 pods each, and pods that wait."""
    names = [f"node-{number:04}" for number in range(nodes)]
    pods = [
        pod(
            f"train-{name}-{index}-{place}",
            asking(),
            on=(name, index),
            namespace=("ml", "web")[place],
        )
        for number, name in enumerate(names)
        for index in range(devices)
        for place in range((number + index) % 3)
    ]
    waiting = [pod(f"waits-{number}", asking("60Gi", gpus=2)) for number in range(20)]
    return [node(name, devices=devices) for name in names], pods + waiting


SHARE_READY: Json = {
    "metadata": {},
    "reason": "ShareReady",
    "firstTimestamp": "2026-01-01T00:00:04Z",
}


class ServerTwin:
    """An API server with these objects; `denied`: lists that it refuses."""

    def __init__(
        self, *denied: str, nodes: Sequence[Json] = NODES, pods: Sequence[Json] = PODS
    ) -> None:
        self.denied = denied
        self.reviews: list[Json] = []
        self._pods = {
            f"/api/v1/namespaces/{each['metadata']['namespace']}/pods/{each['metadata']['name']}": (
                answered(each)
            )
            for each in pods
        }
        lists: Mapping[str, Sequence[Json]] = {
            "/api/v1/nodes": nodes,
            "/api/v1/pods": pods,
            "/api/v1/resourcequotas": [QUOTA],
            "/api/v1/namespaces/ml/resourcequotas": [QUOTA],
            "/api/v1/namespaces/default/resourcequotas": [],
            "/api/v1/namespaces/ml/events": [SHARE_READY],
            "/api/v1/events": [],
            "/api/v1/namespaces/allotment-system/pods": [],
        }
        self._lists = {
            path: answered({"metadata": {}, "items": each}) for path, each in lists.items()
        }

    def __call__(self, request: HttpRequest) -> Reply:
        path = request.path
        if path.endswith(("tokenreviews", "subjectaccessreviews")):
            return self._review(path, json.loads(request.body or b""))
        assert request.method == "GET"
        if path.endswith(self.denied or ("-",)):
            return answered({"kind": "Status", "code": 403, "message": "no"}, 403)
        if request.params.get("fieldSelector") == "source=allotment-agent":
            return answered({"metadata": {}, "items": [EVENT]})
        missing = answered({"kind": "Status", "code": 404, "message": "not there"}, 404)
        return self._lists.get(path) or self._pods.get(path) or missing

    def _review(self, path: str, review: Json) -> Reply:
        self.reviews.append(review)
        spec = review["spec"]
        if path.endswith("tokenreviews"):
            user = USERS.get(spec["token"])
            return answered({"status": {"authenticated": user is not None, "user": user or {}}})
        asked = spec["resourceAttributes"]
        names = {(spec["user"], asked["resource"], asked["namespace"]), (spec["user"], "*", "")}
        return answered({"status": {"allowed": bool(names & ALLOWED)}})

# SPDX-License-Identifier: Apache-2.0
"""An API server with a made-up cluster for the page: its objects, and what users may list."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from api_server_twin import Reply, answered
from explained_twin import GI, asking, node, pod
from served_cluster import agent_pod

from allotment.kube.clients import HttpRequest
from allotment.metrics.use import GpuUse, ShareUse, Use, UseMetrics

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


def name_of(item: Json) -> str:
    return str(item["metadata"]["name"])


class Agents:
    """The same API server with an agent on each node of `large`, whose metrics it passes on."""

    def __init__(self, server: ServerTwin, nodes: Sequence[str], devices: int) -> None:
        self._server = server
        path = "/api/v1/namespaces/allotment-system/pods"
        agents = [agent_pod(name) for name in nodes]
        self._answers = {path: answered({"metadata": {}, "items": agents})}
        texts = [_metrics(number, devices) for number in range(3)]
        for number, name in enumerate(nodes):
            text = texts[number % 3].replace(b"NODE", name.encode())
            self._answers[f"{path}/agent-{name}:9446/proxy/metrics"] = Reply(200, text)

    def __call__(self, request: HttpRequest) -> Reply:
        return self._answers.get(request.path) or self._server(request)


def _metrics(number: int, devices: int) -> bytes:
    """Return the metrics of node NODE, which has the pods of the node of this number."""
    gpus = [f"GPU-NODE-{index}" for index in range(devices)]
    use = Use(
        node="NODE",
        gpus=tuple(
            GpuUse(
                uuid=uuid, index=index, model="A100", pci_bus_id="", memory_total=40 * GI,
                memory_used=30 * GI, utilization=0.5, temperature_c=50, power_mw=300_000,
            )
            for index, uuid in enumerate(gpus)
        ),
        shares=tuple(
            ShareUse(
                namespace=("ml", "web")[place], pod=f"train-NODE-{index}-{place}", gpu=uuid,
                container="main", share=f"{index}-{place}", device=uuid, mode="soft",
                memory_used=15 * GI, memory_limit=20 * GI, guarantee=0.5, ceiling=1.0, gpu_ns=10**9,
            )
            for index, uuid in enumerate(gpus)
            for place in range((number + index) % 3)
        ),
        are_shares_read=True,
    )  # fmt: skip
    return UseMetrics(lambda: use, lambda: ()).text(is_open=False)


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

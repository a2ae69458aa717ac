# SPDX-License-Identifier: Apache-2.0
"""An API server that lists objects, by their paths."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from api_server_twin import Reply, answered, api_of

from allotment.kube.clients import Api, HttpRequest
from allotment.kube.live import LiveCluster, read_cluster

Json = dict[str, Any]


class ServedCluster:
    """Lists and objects by path; what is `forbidden` is answered with 403, all else with 404."""

    def __init__(
        self, lists: Mapping[str, Sequence[Json]], *, forbidden: Sequence[str] = ()
    ) -> None:
        self.lists = dict(lists)
        self.texts: dict[str, bytes] = {}
        """Other answers, by path."""
        self.forbidden = forbidden

    def api(self) -> Api:
        return api_of(self._answer)

    def _answer(self, request: HttpRequest) -> Reply:
        assert request.method == "GET"
        path = request.path
        if path.endswith(tuple(self.forbidden)):
            return answered({"kind": "Status", "code": 403, "message": "no"}, 403)
        if path in self.texts:
            return Reply(200, self.texts[path])
        if path in self.lists:
            return answered({"metadata": {}, "items": list(self.lists[path])})
        return answered({"kind": "Status", "code": 404, "message": "not there"}, 404)


def read_live(nodes: Sequence[Json], pods: Sequence[Json]) -> LiveCluster:
    served = ServedCluster({"/api/v1/nodes": nodes, "/api/v1/pods": pods})

    async def read() -> LiveCluster:
        async with served.api() as api:
            return await read_cluster(api)

    return asyncio.run(read())


def agent_pod(
    node: str,
    *,
    name: str = "",
    port: int | None = 9446,
    is_ready: bool = True,
    waiting: str = "",
    created: str = "2026-01-01T00:00:00Z",
    component: str = "agent",
    image: str = "allotment:0.1.0",
) -> Json:
    """A pod of an installation, as deploy/manifests has it."""
    ports = [] if port is None else [{"name": "metrics", "containerPort": port}]
    state = {"waiting": {"reason": waiting}} if waiting else {"running": {}}
    return {
        "metadata": {
            "name": name or f"{component}-{node}",
            "namespace": "allotment-system",
            "uid": f"uid-{component}-{node}",
            "creationTimestamp": created,
            "labels": {
                "app.kubernetes.io/name": "allotment",
                "app.kubernetes.io/component": component,
            },
        },
        "spec": {
            "nodeName": node,
            "containers": [{"name": component, "image": image, "ports": ports}],
        },
        "status": {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "True" if is_ready else "False"}],
            "containerStatuses": [{"name": component, "restartCount": 0, "state": state}],
        },
    }

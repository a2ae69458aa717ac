# SPDX-License-Identifier: Apache-2.0
"""An API server with nodes and pods to explain."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from api_server_twin import Reply, answered, api_of

from allotment.dialects.own.placement import write_booking
from allotment.kube.clients import HttpRequest
from allotment.kube.inventories import DEVICES, encode
from allotment.model.clusters import (
    NodeDevice,
    NodeInventory,
    PlacedContainer,
    PlacedDevice,
    PodBooking,
    TakenPart,
)
from allotment.model.pods import PodUid
from allotment.scheduler.explain import explained
from allotment.scheduler.explain_evidence import Evidence, Explanation, read_evidence

GI = 1 << 30
Json = dict[str, Any]


def asking(memory: str = "20Gi", compute: int = 50, gpus: int = 1) -> dict[str, str]:
    return {
        "allotment.dev/gpu": str(gpus),
        "allotment.dev/gpu-memory": memory,
        "allotment.dev/gpu-compute": str(compute),
    }


def node(
    name: str,
    *,
    devices: int = 2,
    memory: int = 40 * GI,
    problem: str = "",
    modes: tuple[str, ...] = ("soft",),
    taken: Mapping[int, TakenPart] | None = None,
) -> Json:
    inventory = NodeInventory(
        name=name,
        devices=tuple(
            NodeDevice(
                uuid=f"GPU-{name}-{index}",
                model="A100",
                memory_bytes=memory,
                index=index,
                problem=problem,
                modes=modes,
                taken=(taken or {}).get(index, TakenPart()),
            )
            for index in range(devices)
        ),
    )
    return {
        "metadata": {"name": name, "uid": name, "annotations": {DEVICES: encode(inventory)}},
        "status": {"allocatable": {"cpu": "8", "memory": "64Gi"}},
    }


def pod(
    name: str,
    limits: Mapping[str, str] | None = None,
    *,
    on: tuple[str, int] | None = None,
    annotations: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    said: str | None = "0/2 nodes are available",
    **changes: str,
) -> Json:
    """A pod that waits; `on`: that has half of this device."""
    written = dict(annotations or {})
    spec: Json = {
        "containers": [{"name": "main", "resources": {"limits": dict(limits or {})}}],
        "schedulerName": changes.get("scheduler", "allotment-scheduler"),
    }
    if on is not None:
        home, index = on
        spec["nodeName"] = home
        placed = PlacedContainer(
            name="main", devices=(PlacedDevice(f"GPU-{home}-{index}", 20 * GI, 5000),)
        )
        booking = PodBooking(uid=PodUid(f"uid-{name}"), node=home, containers=(placed,))
        written["allotment.dev/placement"] = write_booking(booking)
    if "node" in changes:
        spec["nodeName"] = changes["node"]
    metadata = {
        "name": name,
        "namespace": changes.get("namespace", "ml"),
        "uid": f"uid-{name}",
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "annotations": written,
        "labels": dict(labels or {}),
    }
    if "deleted" in changes:
        metadata["deletionTimestamp"] = changes["deleted"]
    status: Json = {"phase": changes.get("phase", "Pending")}
    if said is not None and "nodeName" not in spec:
        status["conditions"] = [
            {"type": "Ready", "status": "False"},
            {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": said,
                "lastTransitionTime": "2026-01-01T00:01:00Z",
            },
        ]
    return {"metadata": metadata, "spec": spec, "status": status}


def quota(name: str, **hard: str) -> Json:
    return {"metadata": {"name": name, "namespace": "ml"}, "spec": {"hard": hard}}


class Twin:
    """An API server with these objects; of what is `forbidden`, it tells nothing."""

    def __init__(
        self,
        nodes: Sequence[Json] = (),
        pods: Sequence[Json] = (),
        quotas: Sequence[Json] = (),
        *,
        forbidden: str = "-",
    ) -> None:
        self.nodes, self.pods, self.quotas = list(nodes), list(pods), list(quotas)
        self.forbidden = forbidden

    def read(self, name: str, *, systems: Collection[str] = ()) -> Evidence:
        async def read() -> Evidence:
            async with api_of(self._answer) as api:
                return await read_evidence(api, "ml", name, systems=systems)

        return asyncio.run(read())

    def explain(
        self,
        name: str = "it",
        *,
        systems: Collection[str] = (),
        **options: Any,  # noqa: ANN401
    ) -> Explanation:
        return explained(self.read(name, systems=systems), **options)

    def _answer(self, request: HttpRequest) -> Reply:
        assert request.method == "GET"
        path = request.path
        if path.endswith(self.forbidden):
            return answered({"kind": "Status", "code": 403, "message": "no"}, 403)
        chosen = request.params.get("fieldSelector", "").removeprefix("metadata.name=")
        mine = [each for each in self.pods if each["metadata"]["namespace"] == "ml"]
        lists = {
            "/api/v1/nodes": self.nodes,
            "/api/v1/pods": [
                each for each in self.pods if chosen in {"", each["metadata"]["name"]}
            ],
            "/api/v1/namespaces/ml/pods": mine,
            "/api/v1/namespaces/ml/resourcequotas": self.quotas,
        }
        if path in lists:
            return answered({"metadata": {}, "items": lists[path] or None})
        for each in mine:
            if path == f"/api/v1/namespaces/ml/pods/{each['metadata']['name']}":
                return answered(each)
        return answered({"kind": "Status", "code": 404, "message": "not there"}, 404)

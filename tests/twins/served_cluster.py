# SPDX-License-Identifier: Apache-2.0
"""An API server that lists objects, by their paths."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

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


class ServedHttp:
    """The same over HTTP, for commands; `kubeconfig` leads to it."""

    def __init__(self, folder: Path) -> None:
        self.lists: dict[str, list[Json]] = {}
        self.objects: dict[str, Json] = {}
        self.texts: dict[str, str] = {}
        self.forbidden: dict[str, str] = {}
        """Messages of refusals, by path."""
        self.asked: list[str] = []
        self.kubeconfig = folder / "kubeconfig"

    def answer(self, url: str) -> tuple[int, bytes]:
        path, _, query = url.partition("?")
        self.asked.append(path)
        if path in self.forbidden:
            refusal = {"kind": "Status", "code": 403, "message": self.forbidden[path]}
            return 403, json.dumps(refusal).encode()
        if path in self.texts:
            return 200, self.texts[path].encode()
        if path in self.lists:
            selector = parse_qs(query).get("labelSelector", [""])[0]
            wanted = {tuple(each.split("=")) for each in selector.split(",") if each}
            items = [
                each
                for each in self.lists[path]
                if not wanted or wanted <= {*(each["metadata"].get("labels") or {}).items()}
            ]
            return 200, json.dumps({"metadata": {}, "items": items}).encode()
        if path in self.objects:
            return 200, json.dumps(self.objects[path]).encode()
        missing = {"kind": "Status", "code": 404, "message": f"{path} is not there"}
        return 404, json.dumps(missing).encode()


@contextmanager
def served_http(folder: Path) -> Iterator[ServedHttp]:
    """Serve a cluster until the end of the block."""
    served = ServedHttp(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = served.answer(self.path)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with suppress(BrokenPipeError):  # a reader that has ended
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    context = {"cluster": "c", "user": "u", "namespace": "ml"}
    config = {
        "current-context": "it",
        "contexts": [{"name": "it", "context": context}],
        "clusters": [
            {"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
        ],
        "users": [{"name": "u", "user": {}}],
    }
    served.kubeconfig.write_text(json.dumps(config))
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

# SPDX-License-Identifier: Apache-2.0
"""A cluster whose nodes move: objects by path, merge patches, and DaemonSets that have pods.

After each request the DaemonSets do what their controller does: a pod on each node that their
selectors allow, and none on the others. Over HTTP for commands, or as an `Api`.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

import yaml
from api_server_twin import Reply, api_of
from click.testing import CliRunner, Result

from allotment.cli import main
from allotment.kube.clients import Api, HttpRequest

Json = dict[str, Any]
AGENT = "allotment-system/allotment-agent"
_LISTS = {
    "/api/v1/configmaps": "config_maps",
    "/apis/apps/v1/deployments": "deployments",
    "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations": "webhooks",
    "/apis/node.k8s.io/v1/runtimeclasses": "runtime_classes",
    "/apis/resource.k8s.io/v1/deviceclasses": "device_classes",
    "/apis/resource.k8s.io/v1/resourceclaims": "claims",
}


def merged(before: object, patch: object) -> Any:  # noqa: ANN401 - JSON
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    found = dict(before) if isinstance(before, dict) else {}
    for key, value in patch.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = merged(found.get(key), value)
    return found


class MigratedCluster:
    """Its state is public; a test changes it between commands."""

    def __init__(self) -> None:
        self.nodes: dict[str, Json] = {}
        self.daemon_sets: dict[str, Json] = {}
        self.users: dict[str, Json] = {}
        """Pods of no DaemonSet, by `namespace/name`."""
        self.plugins: dict[tuple[str, str], Json] = {}
        """Pods of DaemonSets, by DaemonSet and node."""
        self.others: dict[str, list[Json]] = {name: [] for name in _LISTS.values()}
        self.stuck: set[str] = set()
        """DaemonSets whose pods do not leave."""
        self.sick: set[str] = set()
        """DaemonSets whose pods are not ready."""
        self.forbidden: set[str] = set()
        self.writes: list[tuple[str, Json]] = []
        self.on_write: Callable[[str], None] = lambda _: None
        """Called with the path before each write; and after each read of one object:"""
        self.on_read: Callable[[str], None] = lambda _: None

    # ---- set up ----

    def add_node(
        self, name: str, *, labels: Mapping[str, str] | None = None, **more: object
    ) -> None:
        """`more`: parts of its spec and status."""
        self.nodes[name] = {
            "metadata": {"name": name, "labels": dict(labels or {}), "annotations": {}},
            "spec": more.pop("spec", {}),
            "status": {"capacity": copy.copy(more.pop("capacity", {}))},
        }

    def add_daemon_set(
        self,
        name: str,
        *,
        image: str = "",
        selector: Mapping[str, str] | None = None,
        **spec: object,
    ) -> None:
        """`spec`: more of its pods' spec."""
        namespace, _, own = name.partition("/")
        labels = {"app": own}
        if name == AGENT:
            labels = {
                "app.kubernetes.io/name": "allotment",
                "app.kubernetes.io/component": "agent",
            }
        containers = spec.pop("containers", [{"name": "main", "image": image}])
        self.daemon_sets[name] = {
            "metadata": {
                "name": own,
                "namespace": namespace,
                "labels": labels,
                "resourceVersion": "1",
            },
            "spec": {
                "selector": {"matchLabels": labels},
                "template": {
                    "metadata": {"labels": labels},
                    "spec": {
                        "containers": containers,
                        "nodeSelector": dict(selector or {}),
                        **spec,
                    },
                },
            },
        }
        self.reconcile()

    def add_pod(self, name: str, node: str, limits: Mapping[str, str], phase: str = "Running",
                **spec: object) -> None:  # fmt: skip
        self.users[name] = _pod(name, node, {}, phase=phase, limits=limits, spec=spec)

    def add(self, kind: str, name: str, **more: object) -> None:
        """An object of another kind: `config_maps`, `deployments`, ..."""
        namespace, _, own = name.rpartition("/")
        self.others[kind].append({"metadata": {"name": own, "namespace": namespace}, **more})

    # ---- look ----

    def labels(self, node: str) -> dict[str, str]:
        return dict(self.nodes[node]["metadata"]["labels"])

    def record(self, node: str) -> Json | None:
        text = self.nodes[node]["metadata"]["annotations"].get("allotment.dev/migration")
        record: Json | None = None if text is None else json.loads(text)
        return record

    def is_cordoned(self, node: str) -> bool:
        return bool(self.nodes[node]["spec"].get("unschedulable"))

    def on(self, node: str) -> set[str]:
        """The DaemonSets with a pod on a node."""
        return {name for name, where in self.plugins if where == node}

    def affinity(self, name: str) -> Json | None:
        found: Json | None = self.daemon_sets[name]["spec"]["template"]["spec"].get("affinity")
        return found

    # ---- serve ----

    def api(self) -> Api:
        return api_of(self._reply)

    def _reply(self, request: HttpRequest) -> Reply:
        query = {key: [value] for key, value in request.params.items()}
        status, body = self.answer(request.method, request.path, query, request.body)
        return Reply(status, json.dumps(body).encode())

    def answer(
        self, method: str, path: str, query: Mapping[str, list[str]], body: bytes | None
    ) -> tuple[int, Json]:
        self.reconcile()
        if path in self.forbidden:
            message = f'User "u" cannot list resource "{path.rpartition("/")[2]}" in API group ""'
            return _status(403, f"{message} at the cluster scope")
        if method == "PATCH":
            return self._patch(path, json.loads(body or b"{}"))
        lists: dict[str, list[Json]] = {
            "/api/v1/nodes": list(self.nodes.values()),
            "/api/v1/pods": [*self.users.values(), *self.plugins.values()],
            "/apis/apps/v1/daemonsets": list(self.daemon_sets.values()),
        } | {each: self.others[name] for each, name in _LISTS.items()}
        if path in lists:
            field, _, wanted = query.get("fieldSelector", [""])[0].partition("=")
            items = [
                each
                for each in lists[path]
                if not field
                or wanted == (each["spec"].get("nodeName") if "spec" in field else _name(each))
            ]
            return 200, {"metadata": {}, "items": copy.deepcopy(items)}
        found = copy.deepcopy(self._find(path))
        self.on_read(path)
        return (200, found) if found is not None else _status(404, f"{path} is not there")

    def _find(self, path: str) -> Json | None:
        parts = path.split("/")
        if path.startswith("/api/v1/nodes/"):
            return self.nodes.get(parts[4])
        if "/daemonsets/" in path:
            return self.daemon_sets.get(f"{parts[-3]}/{parts[-1]}")
        if "/deployments/" in path:
            wanted = {"name": parts[-1], "namespace": parts[-3]}
            found = [each for each in self.others["deployments"] if each["metadata"] == wanted]
            return found[0] if found else None
        return None

    def _patch(self, path: str, patch: Json) -> tuple[int, Json]:
        found = self._find(path)
        if found is None:
            return _status(404, f"{path} is not there")
        wanted = patch.get("metadata", {}).get("resourceVersion")
        metadata = found["metadata"]
        if wanted not in (None, metadata.get("resourceVersion")):
            return _status(409, "the object has been modified")
        self.on_write(path)
        self.writes.append((path, patch))
        changed = merged(found, patch)
        found.clear()
        found.update(changed)
        metadata = found["metadata"]
        metadata["resourceVersion"] = str(int(metadata.get("resourceVersion", "1")) + 1)
        self.reconcile()
        return 200, found

    def reconcile(self) -> None:
        """Do what the controller of DaemonSets does."""
        for name, each in self.daemon_sets.items():
            spec = each["spec"]["template"]["spec"]
            labels = each["spec"]["selector"]["matchLabels"]
            for node, found in self.nodes.items():
                key = name, node
                if _allows(spec, found["metadata"]["labels"]):
                    own = f"{name}-{node}"
                    self.plugins[key] = _pod(own, node, labels, is_ready=name not in self.sick)
                elif name not in self.stuck:
                    self.plugins.pop(key, None)
        for key in [key for key in self.plugins if key[0] not in self.daemon_sets]:
            del self.plugins[key]


def _name(each: Json) -> object:
    return each["metadata"]["name"]


def _pod(
    name: str,
    node: str,
    labels: Mapping[str, str],
    *,
    phase: str = "Running",
    is_ready: bool = True,
    limits: Mapping[str, str] | None = None,
    spec: Mapping[str, object] | None = None,
) -> Json:
    namespace, _, own = name.partition("/")
    condition = {"type": "Ready", "status": "True" if is_ready else "False"}
    return {
        "metadata": {"name": own, "namespace": namespace, "labels": dict(labels)},
        "spec": {
            "nodeName": node,
            "containers": [{"name": "main", "resources": {"limits": dict(limits or {})}}],
            **(spec or {}),
        },
        "status": {"phase": phase, "conditions": [condition]},
    }


def _allows(spec: Json, labels: Mapping[str, str]) -> bool:
    if not (spec.get("nodeSelector") or {}).items() <= labels.items():
        return False
    required = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    )
    if not required:
        return True
    # A null or empty term matches no objects, as Kubernetes has it.
    return any(
        term and all(_matches(each, labels) for each in term.get("matchExpressions", ()))
        for term in required["nodeSelectorTerms"]
    )


def _matches(rule: Json, labels: Mapping[str, str]) -> bool:
    match rule["operator"]:
        case "DoesNotExist":
            return rule["key"] not in labels
        case "Exists":
            return rule["key"] in labels
        case "In":
            return labels.get(rule["key"]) in rule["values"]
    raise AssertionError(rule)


def _status(code: int, message: str) -> tuple[int, Json]:
    return code, {"kind": "Status", "code": code, "message": message}


@contextmanager
def migrated_http(cluster: MigratedCluster, folder: Path) -> Iterator[Path]:
    """Serve a cluster until the end of the block; yields a kubeconfig."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length) if length else None
            status, found = cluster.answer(self.command, path, parse_qs(unquote(query)), body)
            text = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_PATCH = do_GET  # noqa: N815 - its name

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    config = {
        "current-context": "it",
        "contexts": [{"name": "it", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [
            {"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
        ],
        "users": [{"name": "u", "user": {}}],
    }
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(json.dumps(config))
    try:
        yield kubeconfig
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Terminal:
    """Runs `allot migrate` against a cluster."""

    def __init__(self, cluster: MigratedCluster, kubeconfig: Path) -> None:
        self.cluster = cluster
        self.kubeconfig = kubeconfig

    def run(self, *words: str, answer: str | None = None) -> Result:
        arguments = ["migrate", *words, "--kubeconfig", str(self.kubeconfig)]
        return CliRunner().invoke(main, arguments, input=answer)

    def plan(self, *words: str) -> dict[str, Any]:
        done = self.run("plan", "-o", "json", *words)
        assert done.exit_code == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        found["values"] = yaml.safe_load(found["values"])
        found["dialects"] = yaml.safe_load(found["dialects"] or "{}")
        for node in found["nodes"]:
            node["labels"] = {each["key"]: each["value"] for each in node["labels"]}
            node["offers"] = {each["resource"]: each["amount"] for each in node["offers"]}
        return found

    def settings(self, *words: str) -> dict[str, str]:
        """What each setting becomes, or why not."""
        return {
            each["name"]: each["becomes"] or f"no: {each['reason']}"
            for each in self.plan(*words)["settings"]
        }

# SPDX-License-Identifier: Apache-2.0
"""`allot explain pod`: what it prints, and what it says when it cannot."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner, Result

from allotment.cli import main
from allotment.cli.explain import document
from allotment.dialects.decisions import write_booking
from allotment.kube.inventories import DEVICES, encode
from allotment.model.clusters import (
    NodeDevice,
    NodeInventory,
    PlacedContainer,
    PlacedDevice,
    PodBooking,
)
from allotment.model.pods import PodUid
from allotment.scheduler.explaining import Explanation, Standing

GI = 1 << 30
LIMITS = {
    "allotment.dev/gpu": "1",
    "allotment.dev/gpu-memory": "20Gi",
    "allotment.dev/gpu-compute": "50",
}


def node(name: str) -> dict[str, Any]:
    device = NodeDevice(uuid=f"GPU-{name}-0", model="A100", memory_bytes=40 * GI)
    text = encode(NodeInventory(name=name, devices=(device,)))
    return {
        "metadata": {"name": name, "annotations": {DEVICES: text}},
        "status": {"allocatable": {"cpu": "8", "memory": "64Gi"}},
    }


def pod(name: str, memory: str = "20Gi", home: str = "") -> dict[str, Any]:
    uid = PodUid(f"uid-{name}")
    placed = PlacedContainer(name="main", devices=(PlacedDevice(f"GPU-{home}-0", 20 * GI, 5000),))
    booking = PodBooking(uid=uid, node=home, containers=(placed,))
    limits = {**LIMITS, "allotment.dev/gpu-memory": memory}
    return {
        "metadata": {
            "name": name,
            "namespace": "ml",
            "uid": uid,
            "annotations": {"allotment.dev/placement": write_booking(booking)} if home else {},
        },
        "spec": {
            "containers": [{"name": "main", "resources": {"limits": limits}}],
            "schedulerName": "allotment-scheduler",
            "nodeName": home,
        },
        "status": {
            "phase": "Pending",
            "conditions": [
                {
                    "type": "PodScheduled",
                    "status": "False",
                    "reason": "Unschedulable",
                    "message": "0/3 nodes are available:\n 3 had untolerated taints",
                    "lastTransitionTime": "2026-01-01T00:01:00Z",
                }
            ],
        },
    }


class Server(BaseHTTPRequestHandler):
    """An API server."""

    answers: ClassVar[dict[str, object]] = {}
    forbidden: ClassVar[set[str]] = set()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        status, body = 404, {"kind": "Status", "code": 404, "message": "not there"}
        if path in self.forbidden:
            status, body = 403, {"kind": "Status", "code": 403, "message": "no rights"}
        elif path in self.answers:
            status, body = 200, self.answers[path]  # type: ignore[assignment]
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name
        """Say nothing."""


def kubeconfig(path: Path, server: str) -> Path:
    path.write_text(
        json.dumps(
            {
                "current-context": "it",
                "contexts": [
                    {"name": "it", "context": {"cluster": "c", "user": "u", "namespace": "ml"}}
                ],
                "clusters": [{"name": "c", "cluster": {"server": server}}],
                "users": [{"name": "u", "user": {}}],
            }
        )
    )
    return path


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Path]:
    nodes = [node("a"), node("b"), {"metadata": {"name": "plain"}}]
    pods = [pod("placed", home="b"), pod("large", "50Gi"), pod("small")]
    Server.forbidden = set()
    Server.answers = {
        "/api/v1/nodes": {"metadata": {}, "items": nodes},
        "/api/v1/pods": {"metadata": {}, "items": pods},
        "/api/v1/namespaces/ml/pods": {"metadata": {}, "items": pods},
        "/api/v1/namespaces/ml/resourcequotas": {"metadata": {}, "items": []},
        **{f"/api/v1/namespaces/ml/pods/{each['metadata']['name']}": each for each in pods},
    }
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield kubeconfig(tmp_path / "kubeconfig", f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    server.server_close()
    thread.join()


def explain(config: Path, *words: str) -> Result:
    return CliRunner().invoke(main, ["explain", "pod", "--kubeconfig", str(config), *words])


def test_a_placed_pod(config: Path) -> None:
    shown = explain(config, "ml/placed", "--policy", "first-fit")
    assert shown.exit_code == 0, shown.stderr
    assert shown.stderr == ""
    assert shown.stdout == (
        "Pod ml/placed is placed on node b\n"
        "  container main asks for a GPU with 20Gi and 50 % of compute\n"
        "  scheduler: allotment-scheduler\n"
        "  policy: first-fit\n"
        "\n"
        "It has:\n"
        "CONTAINER  GPU      INDEX  MODEL  MEMORY    OF  COMPUTE\n"
        "main       GPU-b-0      0  A100     20Gi  40Gi     50 %\n"
        "\n"
        "Without it there would be room on 2 of 3 nodes now; by first-fit its own is number 2 of"
        " them.\n"
        "  plain: need a node with GPUs, have none that its agent has published\n"
    )


def test_a_pod_that_fits_nowhere_in_the_kubeconfigs_namespace(config: Path) -> None:
    shown = explain(config, "large")
    assert shown.exit_code == 0, shown.stderr
    assert shown.stdout == (
        "Pod ml/large waits\n"
        "  container main asks for a GPU with 50Gi and 50 % of compute\n"
        "  scheduler: allotment-scheduler\n"
        "  policy: fragmentation\n"
        "\n"
        "It has room on none of 3 nodes:\n"
        "  2 nodes (a, b): need a GPU with 50Gi and 50 % of compute, have at most 40Gi on a GPU\n"
        "  plain: need a node with GPUs, have none that its agent has published\n"
        "\n"
        "Its scheduler says (Unschedulable since 2026-01-01T00:01:00Z):\n"
        "  0/3 nodes are available: 3 had untolerated taints\n"
    )


def test_a_pod_that_waits_with_room_is_told_where(config: Path) -> None:
    shown = explain(config, "ml/small")
    assert "It would get:\nCONTAINER" in shown.stdout
    assert "It has room on 2 of 3 nodes now; by fragmentation the best is b." in shown.stdout
    assert "0/3 nodes are available" in shown.stdout


def test_what_could_not_be_read_is_told(config: Path) -> None:
    Server.forbidden = {"/api/v1/namespaces/ml/resourcequotas"}
    shown = explain(config, "ml/small", "-o", "json")
    assert shown.exit_code == 0
    assert shown.stderr.startswith("left out: quotas: ")
    assert len(json.loads(shown.stdout)["left_out"]) == 1


def test_json_has_all_that_the_text_has(config: Path) -> None:
    found = json.loads(explain(config, "ml/large", "-o", "json").stdout)
    assert (found["namespace"], found["name"], found["state"]) == ("ml", "large", "pending")
    assert found["refused"][0]["nodes"] == ["a", "b"]
    assert found["condition"]["reason"] == "Unschedulable"
    assert found["node"] is None
    assert found["rank"] is None
    found = json.loads(explain(config, "ml/placed", "-o", "json").stdout)
    assert found["containers"][0]["devices"] == [
        {
            "uuid": "GPU-b-0",
            "index": 0,
            "model": "A100",
            "memory_bytes": 20 * GI,
            "memory_total_bytes": 40 * GI,
            "guarantee_percent": 50.0,
        }
    ]
    assert found["condition"] is None


def test_of_a_pod_that_ended_nothing_is_claimed() -> None:
    ended = Explanation(
        namespace="ml", name="it", uid="0", standing=Standing.ENDED, scheduler="s", node="a"
    )
    found = document(ended)
    assert (found["state"], found["containers"], found["fitting"]) == ("ended", [], [])


def test_no_such_pod(config: Path) -> None:
    shown = explain(config, "ml/larg")
    assert shown.exit_code == 1
    assert "there is no pod ml/larg" in shown.stderr
    assert "did you mean ml/large?" in shown.stderr


def test_no_rights(config: Path) -> None:
    Server.forbidden = {"/api/v1/nodes"}
    shown = explain(config, "ml/small")
    assert shown.exit_code == 1
    assert "refused to list nodes: no rights" in shown.stderr
    assert "kubectl auth can-i" in shown.stderr


def test_not_reachable(tmp_path: Path) -> None:
    shown = explain(kubeconfig(tmp_path / "away", "http://127.0.0.1:1"), "ml/small")
    assert shown.exit_code == 1
    assert "cannot be reached" in shown.stderr
    assert "asked again" not in shown.stderr


@pytest.mark.parametrize("name", ["a/b/c", "", "ml/", "/x", "ML/x", "x?y", "../x", "a_b/x"])
def test_what_names_no_pod(tmp_path: Path, name: str) -> None:
    shown = explain(kubeconfig(tmp_path / "away", "http://127.0.0.1:1"), name)
    assert shown.exit_code == 2
    assert "names no pod" in shown.stderr


def test_a_policy_that_is_not_there_is_told_before_anything_is_read(tmp_path: Path) -> None:
    shown = explain(kubeconfig(tmp_path / "away", "http://127.0.0.1:1"), "x", "--policy", "binpakc")
    assert shown.exit_code == 2
    assert "binpakc" in shown.stderr

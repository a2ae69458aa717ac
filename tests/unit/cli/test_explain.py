# SPDX-License-Identifier: Apache-2.0
"""`allot explain pod`: what it prints, and what it says when it cannot."""

import contextlib
import json
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import jsonschema_rs
import pytest
from click.testing import CliRunner, Result

from allotment.cli import main
from allotment.cli.explain import document
from allotment.dialects.own.placement import write_booking
from allotment.kube.inventories import DEVICES, encode
from allotment.model.clusters import (
    NodeDevice,
    NodeInventory,
    PlacedContainer,
    PlacedDevice,
    PodBooking,
)
from allotment.model.pods import PodUid
from allotment.scheduler.explain_evidence import Explanation, Standing

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
        "  container main requests a GPU with 20Gi and 50 % of compute\n"
        "  scheduler: allotment-scheduler\n"
        "  policy: first-fit\n"
        "\n"
        "Its GPUs:\n"
        "CONTAINER  GPU      INDEX  MODEL  MEMORY    OF  COMPUTE\n"
        "main       GPU-b-0      0  A100     20Gi  40Gi     50 %\n"
        "\n"
        "Not counting its own use, it fits on 2 of 3 nodes now; by first-fit its own node ranks"
        " number 2.\n"
        "  plain: need a node with GPUs, have no GPUs published by its agent\n"
    )


def test_a_pod_that_fits_nowhere_in_the_kubeconfigs_namespace(config: Path) -> None:
    shown = explain(config, "large")
    assert shown.exit_code == 0, shown.stderr
    assert shown.stdout == (
        "Pod ml/large waits: no GPU of the cluster is large enough, even when empty\n"
        "  container main requests a GPU with 50Gi and 50 % of compute\n"
        "  scheduler: allotment-scheduler\n"
        "  policy: fragmentation\n"
        "\n"
        "It fits on none of 3 nodes:\n"
        "  2 nodes (a, b): need a GPU with 50Gi and 50 % of compute, have at most 40Gi on a GPU\n"
        "  plain: need a node with GPUs, have no GPUs published by its agent\n"
        "  Even if all were empty and healthy: need a GPU with 50Gi and 50 % of compute, have at"
        " most 40Gi on a GPU\n"
        "\n"
        "Message of its scheduler (Unschedulable since 2026-01-01T00:01:00Z):\n"
        "  0/3 nodes are available: 3 had untolerated taints\n"
    )


def test_a_pod_that_waits_with_room_is_told_where(config: Path) -> None:
    shown = explain(config, "ml/small")
    assert shown.stdout.startswith("Pod ml/small waits; a node has room for it\n")
    room = shown.stdout.index("It fits on 2 of 3 nodes now; the best by fragmentation is b.")
    proposal = shown.stdout.index("It would get:\nCONTAINER")
    assert room < proposal < shown.stdout.index("0/3 nodes are available")


def test_what_keeps_a_pod_comes_before_any_node(config: Path) -> None:
    quota = {
        "metadata": {"name": "q", "namespace": "ml"},
        "spec": {"hard": {"limits.allotment.dev/gpu-memory": "1Gi"}},
    }
    Server.answers["/api/v1/namespaces/ml/resourcequotas"] = {"metadata": {}, "items": [quota]}
    shown = explain(config, "ml/small").stdout
    assert shown.startswith("Pod ml/small waits\n")
    keeps = shown.index("Obstacles other than GPUs:\n  quota of its namespace")
    assert keeps < shown.index("It fits on") < shown.index("Otherwise it would get:")


def test_whose_words_a_pod_is_written_in(config: Path) -> None:
    written = pod("hami")
    written["metadata"]["annotations"]["allotment.dev/dialect"] = "hami"
    Server.answers["/api/v1/namespaces/ml/pods/hami"] = written
    assert "  written in HAMi's syntax\n" in explain(config, "hami").stdout


def test_which_models_there_are_instead_and_who_has_cordoned(config: Path) -> None:
    wanted = pod("h100")
    wanted["metadata"]["annotations"]["allotment.dev/models"] = "H100"
    Server.answers["/api/v1/namespaces/ml/pods/h100"] = wanted
    shown = explain(config, "h100").stdout
    assert "have GPUs of other models\n    they are A100\n" in shown
    # Of nodes without GPUs last: they are the most, and tell the least.
    assert shown.index("other models") < shown.index("plain: need a node with GPUs")
    for each in Server.answers["/api/v1/nodes"]["items"][:2]:  # type: ignore[index]
        each["metadata"]["annotations"]["allotment.dev/device-cordon"] = (
            f"GPU-{each['metadata']['name']}-0"
        )
    shown = explain(config, "small").stdout
    assert "(cordoned)\n    GPUs are cordoned: see" in shown
    assert "allotment.dev/device-cordon" in shown


def test_on_which_gpus_a_pod_may_be(config: Path) -> None:
    wanted = pod("picky")
    wanted["metadata"]["annotations"] |= {
        "allotment.dev/uuids": "GPU-b-0",
        "allotment.dev/anti-affinity": "web",
    }
    Server.answers["/api/v1/namespaces/ml/pods/picky"] = wanted
    shown = explain(config, "picky").stdout
    assert "50 % of compute, on GPU-b-0, not beside 'web'\n" in shown


def test_what_is_wrong_with_other_pods_is_not_told_and_with_its_own_once(config: Path) -> None:
    broken = [pod(f"broken{number}", "4") for number in range(6)]
    Server.answers["/api/v1/pods"]["items"] += broken  # type: ignore[index]
    Server.answers["/api/v1/namespaces/ml/pods/broken0"] = broken[0]
    shown = explain(config, "small")
    assert shown.stderr == ""
    assert len(json.loads(explain(config, "small", "-o", "json").stdout)["left_out"]) == 6
    shown = explain(config, "broken0")
    assert shown.stderr == ""
    assert shown.stdout.count("allotment.dev/gpu-memory is 4 bytes") == 1


def test_nodes_that_cannot_be_read_are_a_few_lines(config: Path) -> None:
    """Each of them may have the room that is looked for."""
    for number in range(6):
        lame = node(f"lame{number}")
        lame["metadata"]["annotations"][DEVICES] = "{}"
        Server.answers["/api/v1/nodes"]["items"].append(lame)  # type: ignore[index]
    shown = explain(config, "small")
    assert len(shown.stderr.splitlines()) == 4
    assert shown.stderr.endswith("left out: 3 more; -o json lists all\n")


def test_a_pod_whose_node_refuses_it_is_said_to_wait_for_nothing(config: Path) -> None:
    typo = pod("typo")
    typo["spec"]["nodeName"] = "a"
    typo["metadata"]["annotations"] = {"allotment.dev/comptue": "30"}
    Server.answers["/api/v1/namespaces/ml/pods/typo"] = typo
    first, *_, why, what, hint = explain(config, "typo").stdout.splitlines()
    assert first == "Pod ml/typo is bound on node a, and does not start: the node refuses it"
    assert why == "Why:"
    assert "allotment.dev/comptue" in what
    assert "hint: " in hint


def test_a_narrow_terminal_breaks_lines_between_words(config: Path) -> None:
    command = [sys.executable, "-m", "allotment", "explain", "pod", "large"]
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        process = subprocess.Popen(
            [*command, "--kubeconfig", str(config)],
            stdout=theirs,
            env={**os.environ, "COLUMNS": "60"},
        )
        os.close(theirs)
        read = b""
        with contextlib.suppress(OSError):  # its end
            while chunk := terminal.read(4096):
                read += chunk
        assert process.wait(timeout=30) == 0
    shown = read.decode().replace("\r\n", "\n")
    assert max(map(len, shown.splitlines())) <= 60
    assert shown.split() == explain(config, "large").stdout.split()
    assert "  container main requests a GPU with 50Gi and 50 % of\n      compute\n" in shown


def test_the_namespace_may_be_said_as_to_kubectl(config: Path) -> None:
    assert explain(config, "small", "-n", "ml").exit_code == 0
    assert explain(config, "ml/small", "--namespace", "ml").exit_code == 0
    shown = explain(config, "ml/small", "-n", "prod")
    assert shown.exit_code == 2
    assert "'prod'" in shown.stderr
    assert explain(config, "small", "-n", "a/b").exit_code == 2


def test_another_context_than_the_current_one(config: Path) -> None:
    written = json.loads(config.read_text())
    written["contexts"] += [{"name": "two", "context": {"cluster": "none", "user": "u"}}]
    written["clusters"] += [{"name": "none", "cluster": {"server": "http://127.0.0.1:1"}}]
    config.write_text(json.dumps(written))
    assert explain(config, "small", "--context", "it").exit_code == 0
    assert "http://127.0.0.1:1" in explain(config, "small", "--context", "two").stderr
    shown = explain(config, "small", "--context", "three")
    assert shown.exit_code == 1
    assert 'has no context "three"' in shown.stderr
    assert "it has: it, two" in shown.stderr


def test_a_kubeconfig_is_found_as_kubectl_finds_it(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked() -> Result:
        return CliRunner().invoke(main, ["explain", "pod", "small"])

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert "no credentials for the API server" in asked().stderr
    monkeypatch.setenv("KUBECONFIG", "")
    assert "no credentials for the API server" in asked().stderr
    (tmp_path / ".kube").mkdir()
    (tmp_path / ".kube" / "config").write_text(config.read_text())
    assert asked().exit_code == 0
    # In a pod, that pod's account is meant.
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    assert "no credentials for the API server" in asked().stderr
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path / 'none'}:{config}")
    assert asked().exit_code == 0
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert "none: cannot be used" in asked().stderr


def test_a_claim_names_what_it_consumes(config: Path) -> None:
    api, kind = "/apis/resource.k8s.io/v1", "share.allotment.dev"
    consumed = {"compute": "25", "memory": "10Gi"}
    result = {"request": "gpu", "driver": "gpu.allotment.dev", "pool": "a", "device": "gpu-1"}
    claim = {
        "metadata": {"name": "quarter", "namespace": "ml", "uid": "u"},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": kind}}]}},
        "status": {"allocation": {"devices": {"results": [result]}}},
    }
    Server.answers[f"{api}/namespaces/ml/resourceclaims/quarter"] = claim
    words = ["explain", "claim", "--kubeconfig", str(config), "quarter"]
    assert "ResourceClaims need Kubernetes 1.36" in CliRunner().invoke(main, words).stderr
    result["consumedCapacity"] = consumed  # type: ignore[assignment]
    Server.answers |= {
        api: {},
        f"{api}/resourceclaims": {"metadata": {}, "items": [claim]},
        f"{api}/resourceslices": {"metadata": {}, "items": []},
    }
    assert "  memory 10Gi, compute 25  " in CliRunner().invoke(main, words).stdout


@pytest.mark.parametrize("name", ["placed", "large", "small", "broken", "plain"])
def test_json_is_as_its_schema_says(config: Path, name: str) -> None:
    root = Path(__file__).resolve().parents[3]
    text = (root / "docs" / "reference" / "explain-pod.schema.json").read_text("utf-8")
    made = {"broken": pod("broken", "4"), "plain": {**pod("plain"), "spec": {"containers": []}}}
    if name in made:
        Server.answers[f"/api/v1/namespaces/ml/pods/{name}"] = made[name]
    found = json.loads(explain(config, name, "-o", "json").stdout)
    jsonschema_rs.validate(json.loads(text), found)
    with pytest.raises(jsonschema_rs.ValidationError):
        jsonschema_rs.validate(json.loads(text), {**found, "rank": "first"})


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
            "mig_profile": None,
            "mig_start": None,
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
    assert shown.exit_code == 4
    assert "there is no pod ml/larg" in shown.stderr
    assert "did you mean ml/large?" in shown.stderr


@pytest.mark.parametrize(
    ("status", "word"),
    [
        ({"phase": "Pending", "message": "kubeshare/gpu_limit is '2'"}, "kubeshare/gpu_limit is"),
        ({"phase": "Succeeded"}, "has ended (Succeeded)"),
        (None, "kubeshare-sharepods.yaml is applied"),
    ],
)
def test_why_a_sharepod_has_no_pod(config: Path, status: dict[str, str] | None, word: str) -> None:
    path = "/apis/kubeshare.nthu/v1/namespaces/ml/sharepods/shared"
    Server.answers[path] = {"status": {"PodStatus": status}} if status else {}
    shown = explain(config, "ml/shared")
    assert shown.exit_code == 4
    assert "there is no pod ml/shared" in shown.stderr
    assert "SharePod ml/shared ha" in shown.stderr
    assert word in shown.stderr


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
    assert "is not a pod name" in shown.stderr


def test_a_policy_that_is_not_there_is_told_before_anything_is_read(tmp_path: Path) -> None:
    shown = explain(kubeconfig(tmp_path / "away", "http://127.0.0.1:1"), "x", "--policy", "binpakc")
    assert shown.exit_code == 2
    assert "binpakc" in shown.stderr


# ---- claims --------------------------------------------------------------------------------------

API = "/apis/resource.k8s.io/v1"
DRIVER = "gpu.allotment.dev"


def claimed(**status: Any) -> dict[str, Any]:  # noqa: ANN401
    capacity = {"requests": {"memory": "20Gi"}}
    exactly = {"deviceClassName": "share.allotment.dev", "capacity": capacity}
    return {
        "metadata": {"namespace": "ml", "name": "quarter", "uid": "u"},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}},
        "status": status,
    }


def explain_claim(config: Path, claim: dict[str, Any], *words: str) -> Result:
    capacity = {"memory": {"value": "16Gi"}, "compute": {"value": "100"}}
    device = {
        "name": "gpu-4a0ae330",
        "attributes": {"type": {"string": "share"}, "uuid": {"string": "GPU-4a0ae330-00aa"}},
        "capacity": capacity,
        "allowMultipleAllocations": True,
    }
    pool = {"name": "a", "generation": 1, "resourceSliceCount": 1}
    piece = {"metadata": {}, "spec": {"driver": DRIVER, "pool": pool, "devices": [device]}}
    selector = {"cel": {"expression": f"device.attributes['{DRIVER}'].type == 'share'"}}
    Server.answers |= {
        API: {"kind": "APIResourceList"},
        f"{API}/resourceclaims": {"metadata": {}, "items": [claim]},
        f"{API}/namespaces/ml/resourceclaims/quarter": claim,
        f"{API}/resourceslices": {"metadata": {}, "items": [piece]},
        f"{API}/deviceclasses/share.allotment.dev": {
            "metadata": {},
            "spec": {"selectors": [selector]},
        },
    }
    command = ["explain", "claim", "--kubeconfig", str(config), "ml/quarter", *words]
    return CliRunner().invoke(main, command)


def test_a_pod_with_claims_names_them(config: Path) -> None:
    using = pod("using")
    using["spec"]["containers"] = [{"name": "main"}]
    using["spec"]["resourceClaims"] = [
        {"name": "one", "resourceClaimName": "quarter"},
        {"name": "two", "resourceClaimTemplateName": "half"},
        {"name": "late", "resourceClaimTemplateName": "half"},
    ]
    using["status"]["resourceClaimStatuses"] = [{"name": "two", "resourceClaimName": "using-two"}]
    Server.answers["/api/v1/namespaces/ml/pods/using"] = using
    shown = explain(config, "using").stdout
    assert "uses the ResourceClaim quarter: see `allot explain claim ml/quarter`\n" in shown
    found = json.loads(explain(config, "using", "-o", "json").stdout)
    assert found["claims"] == ["quarter", "using-two"]


def test_a_claim_that_waits(config: Path) -> None:
    shown = explain_claim(config, claimed())
    assert shown.exit_code == 0, shown.stderr
    assert shown.stdout == (
        "Claim ml/quarter waits: it is not allocated\n"
        "  request gpu: 1 device of class share.allotment.dev with memory 20Gi\n"
        "  kube-scheduler allocates it when it places a pod that uses it\n"
        "\n"
        "It fits on none of 1 node now\n"
        "  request gpu:\n"
        "    a: need 20Gi of memory on a device, have at most 16Gi\n"
    )


def test_a_claim_that_is_prepared(config: Path) -> None:
    key = {"driver": DRIVER, "pool": "a", "device": "gpu-4a0ae330", "shareID": "x"}
    compute = {"guarantee_percent": 30, "ceiling_percent": 80}
    data = {"share": "0123456789ab", "mode": "soft", "enforced": True, "compute": compute}
    consumed = {"memory": "20Gi", "compute": "30", "seats": "1"}
    result = {**key, "request": "gpu", "consumedCapacity": consumed}
    claim = claimed(
        allocation={"devices": {"results": [result]}},
        devices=[{**key, "data": {**data, "memory_limit_bytes": 20 * GI}}],
        reservedFor=[{"resource": "pods", "name": "train", "uid": "p"}],
    )
    shown = explain_claim(config, claim)
    assert shown.exit_code == 0, shown.stderr
    first, *_, heading, row = shown.stdout.splitlines()
    assert first == "Claim ml/quarter is prepared on node a"
    assert "  reserved for train\n" in shown.stdout
    assert heading.split()[-4:] == ["MODE", "LIMIT", "COMPUTE", "ENFORCED"]
    assert "  memory 20Gi, compute 30  " in row, "a seat says nothing"
    assert row.split()[-5:] == ["soft", "20Gi", "30:80", "%", "yes"]
    found = json.loads(explain_claim(config, claim, "-o", "json").stdout)
    assert found["devices"][0]["share"] == "0123456789ab"
    assert found["devices"][0]["ceiling_percent"] == 80


def test_a_claim_or_an_api_that_is_not_there(config: Path) -> None:
    shown = CliRunner().invoke(main, ["explain", "claim", "--kubeconfig", str(config), "x"])
    assert shown.exit_code == 4
    assert "the API server has no resource.k8s.io/v1" in shown.stderr
    Server.answers[API] = {}
    shown = CliRunner().invoke(main, ["explain", "claim", "--kubeconfig", str(config), "x"])
    assert shown.exit_code == 4
    assert "there is no ResourceClaim ml/x" in shown.stderr
    shown = CliRunner().invoke(main, ["explain", "claim", "--kubeconfig", str(config), "a/b/c"])
    assert "is not a claim name" in shown.stderr

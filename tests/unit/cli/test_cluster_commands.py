# SPDX-License-Identifier: Apache-2.0
"""`kubectl allot top`, `status`, `why`, `doctor` and `bundle`, of a cluster with troubles."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from explained_twin import asking, node, pod
from served_cluster import ServedHttp, agent_pod, served_http

from allotment.cli import main

SYSTEM = "/api/v1/namespaces/allotment-system"
WEBHOOKS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/allotment-scheduler"
LEASE = "/apis/coordination.k8s.io/v1/namespaces/allotment-system/leases/allotment-scheduler"
DAEMON_SETS = "/apis/apps/v1/daemonsets"
NOW = datetime.now(UTC)
PAGE = """\
allotment_use_read{what="shares"} 1
allotment_gpu_info{gpu="GPU-a-1",index="1",model="A100",node="a"} 1
allotment_gpu_memory_total_bytes{gpu="GPU-a-1",node="a"} 42949672960
allotment_gpu_memory_used_bytes{gpu="GPU-a-1",node="a"} 21474836480
allotment_gpu_utilization_ratio{gpu="GPU-a-1",node="a"} 0.5
allotment_share_memory_used_bytes{container="main",gpu="GPU-a-1",namespace="ml",pod="train"} 1e9
allotment_share_memory_limit_bytes{container="main",gpu="GPU-a-1",namespace="ml",pod="train"} 2e10
allotment_share_utilization_ratio{container="main",gpu="GPU-a-1",namespace="ml",pod="train"} 0.25
allotment_share_enforced{container="main",gpu="GPU-a-1",namespace="ml",pod="train"} 1
"""
SECRET = "hunter2hunter2"  # noqa: S105 - a test of its removal


def certificate(days: float) -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "authority")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(NOW - timedelta(days=30))
        .not_valid_after(NOW + timedelta(days=days))
        .sign(key, hashes.SHA256())
    )
    return made.public_bytes(serialization.Encoding.PEM)


def webhook(bundle: bytes) -> dict[str, Any]:
    import base64

    config = {"caBundle": base64.b64encode(bundle).decode()}
    return {"metadata": {}, "webhooks": [{"name": "pods.allotment.dev", "clientConfig": config}]}


def lease(age_s: float) -> dict[str, Any]:
    when = (datetime.now(UTC) - timedelta(seconds=age_s)).isoformat().replace("+00:00", "Z")
    return {"metadata": {}, "spec": {"holderIdentity": "scheduler-a_1", "renewTime": when}}


def daemon_set(name: str, image: str, nodes: int = 2) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "kube-system"},
        "spec": {"template": {"spec": {"containers": [{"name": "x", "image": image}]}}},
        "status": {"desiredNumberScheduled": nodes},
    }


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedHttp]:
    """A cluster that is well."""
    with served_http(tmp_path) as cluster:
        placed = pod("train", asking(), on=("a", 1), phase="Running")
        large = pod("large", asking("60Gi"))
        system = [
            agent_pod("a"),
            agent_pod("b"),
            agent_pod("a", component="scheduler", port=9448),
        ]
        cluster.lists = {
            "/api/v1/nodes": [node("a"), node("b", devices=1)],
            "/api/v1/pods": [placed, large, *system],
            "/api/v1/namespaces/ml/pods": [placed, large],
            "/api/v1/namespaces/ml/resourcequotas": [],
            f"{SYSTEM}/pods": system,
            DAEMON_SETS: [daemon_set("calico-node", "calico/node:v3")],
        }
        cluster.objects = {
            "/version": {"gitVersion": "v1.36.3"},
            WEBHOOKS: webhook(certificate(days=3000)),
            LEASE: lease(1),
            "/api/v1/namespaces/ml/pods/large": large,
            "/api/v1/namespaces/ml/pods/train": placed,
        }
        cluster.texts = {f"{SYSTEM}/pods/agent-{name}:9446/proxy/metrics": PAGE for name in "ab"}
        yield cluster


def run(served: ServedHttp, *words: str) -> Result:
    command, *rest = words
    return CliRunner().invoke(main, [command, "--kubeconfig", str(served.kubeconfig), *rest])


def findings(served: ServedHttp) -> dict[str, tuple[str, str, str]]:
    found = json.loads(run(served, "doctor", "--cluster", "-o", "json").stdout)["checks"]
    return {each["name"]: (each["outcome"], each["detail"], each["fix"] or "") for each in found}


def test_what_each_share_uses(served: ServedHttp) -> None:
    del served.texts[f"{SYSTEM}/pods/agent-b:9446/proxy/metrics"]
    shown = run(served, "top", "--cluster")
    assert shown.exit_code == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[:2] == [
        "NODE  GPU  SHARE OF       MODE     USED   LIMIT  PEAK  BUSY  COMPUTE  REFUSED  ENFORCED",
        "a       1  ml/train/main  -     953.7Mi  18.6Gi     -  25 %        -        -  yes",
    ]
    assert lines[3] == "1 share on 1 GPU of 1 node: 20Gi of 40Gi used, GPUs 50 % busy"
    assert lines[4].startswith("node b: the API server refused to get the metrics of pod")
    document = json.loads(run(served, "top", "--cluster", "-o", "json").stdout)
    assert [each["name"] for each in document["nodes"]] == ["a", "b"]
    assert document["nodes"][0]["shares"][0]["busy_percent"] == 25


def test_the_right_to_ask_agents(served: ServedHttp) -> None:
    for name in "ab":
        path = f"{SYSTEM}/pods/agent-{name}:9446/proxy/metrics"
        served.forbidden[path] = (
            'User "eve" cannot get resource "pods/proxy" in API group "" in the namespace'
            ' "allotment-system"'
        )
    shown = run(served, "top", "--cluster").stdout
    assert 'hint: add this rule to a Role in the agents\' namespace: {apiGroups: [""]' in shown


def test_a_cluster_that_is_well(served: ServedHttp) -> None:
    shown = run(served, "status")
    assert shown.exit_code == 0
    server = shown.stdout.splitlines()[0].rpartition(" ")[2]
    assert shown.stdout == (
        f"Allotment works in the cluster {server}\n"
        "  agents:    2 of 2 ready\n"
        "  scheduler: 1 of 1 ready; scheduler-a_1 leads\n"
        "  GPUs:      3 on 2 nodes, 2 idle; 20Gi of 120Gi allotted (16 %)\n"
        "  pods:      1 waits for GPUs\n"
    )
    outcomes = {
        outcome for name, (outcome, _, _) in findings(served).items() if "pods'" not in name
    }
    assert outcomes == {"ok"}


def test_troubles_come_with_fixes(served: ServedHttp) -> None:
    sick = agent_pod("a", is_ready=False, waiting="CrashLoopBackOff", image="allotment:0.0.9")
    served.lists["/api/v1/nodes"].append(node("c", problem="cordoned"))
    served.lists[f"{SYSTEM}/pods"][0] = sick
    served.lists[DAEMON_SETS].append(daemon_set("nvdp", "nvcr.io/nvidia/k8s-device-plugin:v0.17"))
    served.objects[LEASE] = lease(300)
    served.objects[WEBHOOKS] = webhook(certificate(days=3))
    found = findings(served)
    assert found["agent agent-a"][:2] == (
        "note",
        "not ready on node a: container agent: CrashLoopBackOff",
    )
    assert found["nodes without an agent"][1] == "1 node with GPUs: c"
    assert found["GPUs"][1].startswith("2 GPUs closed to new shares: GPU-c-0 of node c (cordoned)")
    assert "has not renewed its lease for 3" in found["leader"][1]
    assert found["versions"][0] == "note"
    assert "its authority expires on" in found["webhook pods.allotment.dev"][1]
    assert (
        "NVIDIA's device plugin (DaemonSet kube-system/nvdp, 2 nodes)" in found["other plugins"][1]
    )
    assert all(fix for name, (outcome, _, fix) in found.items() if outcome != "ok")
    shown = run(served, "status")
    assert "works, with problems" in shown.stdout
    assert "fixes: kubectl allot doctor" in shown.stdout


@pytest.mark.parametrize(
    ("bundle", "detail"),
    [
        (b"", "no caBundle"),
        (certificate(days=-1), "its authority expired on"),
        (b"-----BEGIN", "its caBundle is unreadable"),
    ],
    ids=["none", "expired", "damaged"],
)
def test_a_webhook_that_is_not_trusted(served: ServedHttp, bundle: bytes, detail: str) -> None:
    served.objects[WEBHOOKS] = webhook(bundle)
    outcome, text, fix = findings(served)["webhook pods.allotment.dev"]
    assert (outcome, bool(fix)) == ("missing", True)
    assert detail in text
    assert run(served, "status").exit_code == 8


def test_a_cluster_without_allotment(served: ServedHttp) -> None:
    served.lists[f"{SYSTEM}/pods"] = []
    del served.objects[WEBHOOKS], served.objects[LEASE]
    found = findings(served)
    assert found["agents"][:2] == ("missing", "no agent in namespace allotment-system")
    assert "webhook" not in found
    assert run(served, "status").exit_code == 8


def test_what_a_user_may_not_read_is_named_with_the_rule(served: ServedHttp) -> None:
    served.forbidden[DAEMON_SETS] = (
        'daemonsets.apps is forbidden: User "eve" cannot list resource "daemonsets" in API group'
        ' "apps" at the cluster scope'
    )
    served.forbidden[f"{SYSTEM}/pods"] = "no"
    found = findings(served)
    assert found["other plugins"][2] == (
        'add this rule to a ClusterRole of this user: {apiGroups: ["apps"], resources:'
        " [daemonsets], verbs: [list]}"
    )
    assert found["agents and scheduler"][0] == "note"
    served.forbidden["/api/v1/pods"] = "no"
    shown = run(served, "status")
    assert (shown.exit_code, "left out: " in shown.stderr) == (0, True)


def test_why_a_pod_waits_and_what_would_help(served: ServedHttp) -> None:
    assert run(served, "why", "large").stdout == (
        "Pod ml/large waits: no GPU of the cluster is large enough, even when empty\n"
        "  2 nodes (a, b): need a GPU with 60Gi and 50 % of compute, have at most 40Gi on a GPU\n"
        "  even if all were empty and healthy: need a GPU with 60Gi and 50 % of compute, have at"
        " most 40Gi on a GPU\n"
        "  help: ask for less, or add a node with other GPUs\n"
    )
    assert run(served, "why", "ml/train").stdout == (
        "Pod ml/train is placed on node a\n"
        "  container main has a GPU with 20Gi and 50 % of compute: GPU-a-1\n"
    )
    shown = run(served, "why", "lage")
    assert (shown.exit_code, "did you mean ml/large?" in shown.stderr) == (4, True)


def secretive(served: ServedHttp) -> None:
    """Put a secret everywhere."""
    token = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJ4In0.c2lnbmF0dXJl"  # noqa: S105 - a test of its removal
    private = "-----BEGIN EC PRIVATE KEY-----\nMHcCAQEEI\n-----END EC PRIVATE KEY-----"
    for item in (*served.lists["/api/v1/pods"], *served.lists["/api/v1/nodes"]):
        item["metadata"].setdefault("annotations", {})[
            "kubectl.kubernetes.io/last-applied-configuration"
        ] = SECRET
        item["metadata"].setdefault("labels", {})["team-password"] = SECRET
    for item in served.lists["/api/v1/pods"]:
        [container] = item["spec"]["containers"]
        container |= {
            "env": [{"name": "DB_PASSWORD", "value": SECRET}],
            "envFrom": [{"secretRef": {"name": SECRET}}],
            "command": ["run", f"--token={SECRET}"],
            "args": [SECRET],
            "volumeMounts": [{"mountPath": SECRET}],
        }
        item["spec"]["volumes"] = [{"name": "v", "secret": {"secretName": SECRET}}]
        item["spec"]["imagePullSecrets"] = [{"name": SECRET}]
        state = {"terminated": {"exitCode": 1, "message": SECRET}}
        item["status"]["containerStatuses"] = [{"name": "main", "lastState": state}]
    log = f'level=info\npassword="{SECRET}"\nAuthorization: Bearer {SECRET}\n{token}\n{private}\n'
    for item in served.lists[f"{SYSTEM}/pods"]:
        served.texts[f"{SYSTEM}/pods/{item['metadata']['name']}/log"] = log
    served.texts[f"{SYSTEM}/pods/scheduler-a:9448/proxy/metrics"] = "up 1\n"
    data = {"default": f"version: v1\napiToken: {SECRET}\n"}
    served.objects[f"{SYSTEM}/configmaps/allotment-config"] = {"metadata": {}, "data": data}
    event = {"reason": "ShareRefused", "reportingComponent": "allotment-agent", "message": "why"}
    foreign = {"reason": "Failed", "reportingComponent": "kubelet", "message": SECRET}
    served.lists["/api/v1/events"] = [event, foreign]
    served.lists["/apis/resource.k8s.io/v1/resourceclaims"] = []
    served.lists[DAEMON_SETS][0]["spec"]["template"]["spec"]["containers"][0]["env"] = [
        {"name": "X", "value": SECRET}
    ]


def test_a_bundle_has_no_secret(served: ServedHttp, tmp_path: Path) -> None:
    secretive(served)
    path = tmp_path / "bug.tar.gz"
    shown = run(served, "bundle", "-f", str(path))
    assert shown.exit_code == 0, shown.stderr
    assert path.stat().st_mode & 0o777 == 0o600
    with tarfile.open(path) as archive:
        texts = {}
        for member in archive:
            content = archive.extractfile(member)
            assert content is not None
            texts[member.name.partition("/")[2]] = content.read().decode()
    assert set(texts) == {
        "README.txt",
        "allotment-config.yaml",
        "claims.json",
        "daemonsets.json",
        "doctor.txt",
        "events.json",
        "holdings.json",
        "logs/agent-a-agent.log",
        "logs/agent-b-agent.log",
        "logs/scheduler-a-scheduler.log",
        "metrics/scheduler-a.txt",
        "nodes.json",
        "pods.json",
        "use.json",
    }
    for name, text in texts.items():
        for secret in (SECRET, "eyJhb", "PRIVATE KEY", "MHcCAQEEI", "c2lnbmF0", "DB_PASSWORD"):
            assert secret not in text, name
    assert not any("/secrets" in path for path in served.asked)
    # What is of use is there.
    assert "level=info" in texts["logs/agent-a-agent.log"]
    assert {each["metadata"]["name"] for each in json.loads(texts["pods.json"])} >= {"train"}
    assert "allotment.dev/devices" in texts["nodes.json"]
    assert "ShareRefused" in texts["events.json"]
    assert all(name in shown.stdout for name in texts)


def test_a_bundle_names_what_was_refused(served: ServedHttp, tmp_path: Path) -> None:
    served.forbidden["/api/v1/events"] = (
        'events is forbidden: User "eve" cannot list resource "events" in API group "" at the'
        " cluster scope"
    )
    path = tmp_path / "bug.tar.gz"
    assert run(served, "bundle", "-f", str(path)).exit_code == 0
    with tarfile.open(path) as archive:
        [member] = [each for each in archive if each.name.endswith("refused.txt")]
        content = archive.extractfile(member)
        assert content is not None
        text = content.read().decode()
    assert "events.json: the API server refused to list events" in text
    assert "resources: [events], verbs: [list]" in text

# SPDX-License-Identifier: Apache-2.0
"""The scheduler's manifest on a cluster of the testbed, and the rights of service accounts."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

import yaml
from testbed import roles
from testbed.api import Json
from testbed.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = ROOT / "deploy" / "manifests" / "scheduler.yaml"
POLICIES = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
# What runs in pods has an image that nobody can build here.
IN_PODS = ("Deployment", "PodDisruptionBudget", "ConfigMap", "Service", "EndpointSlice")
_CONFIGURATION = (
    "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/allotment-scheduler"
)
_SERVICE = "allotment-webhook.allotment-system.svc"
_RBAC = "/apis/rbac.authorization.k8s.io/v1"


def documents() -> list[Json]:
    """The manifest's objects."""
    return [each for each in yaml.safe_load_all(MANIFEST.read_text("utf-8")) if each]


def apply(
    cluster: Cluster, *, only: Collection[str] = (), without: Collection[str] = IN_PODS
) -> None:
    """Applies the objects of the manifest, or those of some kinds alone."""
    chosen = [
        each
        for each in documents()
        if (each["kind"] in only if only else each["kind"] not in without)
    ]
    path = cluster.state / "scheduler-manifest.yaml"
    path.write_text(yaml.safe_dump_all(chosen), "utf-8")
    cluster.kubectl_run("apply", "--server-side", "--force-conflicts", "-f", str(path))


def install(cluster: Cluster, *, webhook_port: int) -> None:
    """Applies all but what runs in pods, and leads the webhook's Service to a port of the node."""
    apply(cluster)
    roles.bind_agent(cluster.api, ROOT / "deploy" / "manifests" / "agent.yaml")
    # There is no kube-proxy that would lead to the Service, so its name leads to the node.
    hosts = "cp /etc/hosts /run/hosts && echo 127.0.0.1 {0} >>/run/hosts && mount --bind"
    lead = f"{hosts.format(_SERVICE)} /run/hosts /etc/hosts"
    cluster.node.run(["sh", "-c", f"grep -q {_SERVICE} /etc/hosts || {{ {lead}; }}"])
    found = cluster.api.get(_CONFIGURATION)
    url = f"https://{_SERVICE}:{webhook_port}/webhook/pods"
    found["webhooks"][0]["clientConfig"] = {"url": url}
    cluster.api.put(_CONFIGURATION, found)


def make_account(cluster: Cluster, name: str, *, namespace: str) -> None:
    """Makes a service account, which has no rights yet."""
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    cluster.api.post(path, {"metadata": {"name": name}})


def bind(
    cluster: Cluster, name: str, *, namespace: str, role: str, everywhere: bool = False
) -> None:
    """Gives a service account a ClusterRole, in its namespace or in all of them."""
    kind = "ClusterRoleBinding" if everywhere else "RoleBinding"
    path = "" if everywhere else f"/namespaces/{namespace}"
    cluster.api.post(
        f"{_RBAC}{path}/{kind.lower()}s",
        {
            "metadata": {"name": f"{name}-{role}"},
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "ClusterRole",
                "name": role,
            },
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
        },
    )


def make_role(cluster: Cluster, name: str, rules: list[Json]) -> None:
    """Makes a ClusterRole."""
    cluster.api.post(f"{_RBAC}/clusterroles", {"metadata": {"name": name}, "rules": rules})


def as_account(
    cluster: Cluster, name: str = "allotment-scheduler", *, namespace: str = "allotment-system"
) -> Path:
    """A kubeconfig with a service account's token, as a pod has it."""
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
    made = cluster.api.post(path, {"spec": {}})
    config = json.loads(cluster.kubeconfig.read_text("utf-8"))
    config["users"][0]["user"] = {"token": made["status"]["token"]}
    kubeconfig = cluster.state / f"as-{name}.kubeconfig"
    kubeconfig.write_text(json.dumps(config), "utf-8")
    return kubeconfig

# SPDX-License-Identifier: Apache-2.0
"""The scheduler's manifest on a cluster of the testbed, and the rights of service accounts."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml
from scheduling import Scheduler
from testbed import roles
from testbed.api import ApiError, Json
from testbed.cluster import Cluster
from testbed.pods import container, pod
from testbed.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = ROOT / "deploy" / "manifests" / "scheduler.yaml"
SHAREPODS = ROOT / "deploy" / "manifests" / "kubeshare-sharepods.yaml"
POLICIES = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
# What runs in pods has an image that nobody can build here.
IN_PODS = ("Deployment", "PodDisruptionBudget", "ConfigMap", "Service", "EndpointSlice")
SYSTEM = "/api/v1/namespaces/allotment-system"
CONFIGURATION = (
    "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/allotment-scheduler"
)
WEBHOOK_PORT = 9448
"""Of the node, where the webhook is served unless a test says something else."""
# In a pod the kubelet renews it each hour. A cluster to try things in may stay for days.
_TOKEN_LIFE_S = 30 * 24 * 3600
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
    apply_all(cluster, chosen)


def apply_all(cluster: Cluster, chosen: Iterable[Json]) -> None:
    """Applies objects."""
    apply_text(cluster, yaml.safe_dump_all(chosen))


def apply_text(cluster: Cluster, text: str) -> None:
    """Applies a manifest, as a user would; again, it puts right what was changed since."""
    path = cluster.credentials.folder / "scheduler-manifest.yaml"
    path.write_text(text, "utf-8")
    said = cluster.kubectl_run(
        *("apply", "--server-side", "--force-conflicts", "--validate=strict", "-f", str(path))
    )
    assert "Warning" not in said


def lead(cluster: Cluster, url: str) -> None:
    """Tells the API server where the webhook of pods is, and beside it that of claims."""
    # At one go: who keeps the certificates may write into it between a look and a change.
    webhooks = [
        {
            "name": f"{kind}.allotment.dev",
            "clientConfig": {"service": None, "url": f"{url.removesuffix('pods')}{kind}"},
        }
        for kind in ("pods", "claims")
    ]
    cluster.api.patch(CONFIGURATION, {"webhooks": webhooks}, kind="strategic")


def install(cluster: Cluster, *, webhook_port: int = WEBHOOK_PORT) -> None:
    """Applies all but what runs in pods, and leads the webhook's Service to a port of the node."""
    apply(cluster)
    roles.bind_agent(cluster.api, ROOT / "deploy" / "manifests" / "agent.yaml")
    # There is no kube-proxy that would lead to the Service, so its name leads to the node.
    hosts = "cp /etc/hosts /run/hosts && echo 127.0.0.1 {0} >>/run/hosts && mount --bind"
    named = f"{hosts.format(_SERVICE)} /run/hosts /etc/hosts"
    cluster.node.run(["sh", "-c", f"grep -q {_SERVICE} /etc/hosts || {{ {named}; }}"])
    lead(cluster, f"https://{_SERVICE}:{webhook_port}/webhook/pods")


def serve(cluster: Cluster, *flags: str) -> Scheduler:
    """Starts `allot scheduler` as the manifest does, but for its replicas."""
    its = ["--webhook-listen", f"0.0.0.0:{WEBHOOK_PORT}", "--scheduler-name", "allotment-scheduler"]
    return Scheduler(cluster, *its, *flags, kubeconfig=str(as_account(cluster)))


@contextmanager
def serving(cluster: Cluster, *flags: str) -> Iterator[Scheduler]:
    """`allot scheduler` for the length of a `with`, from when it is ready."""
    with serve(cluster, *flags) as made:
        yield made


def wait_translates(cluster: Cluster) -> None:
    """Waits until the API server asks the webhook, and it answers."""
    probe = pod("probe", container(["true"], limits={"aliyun.com/gpu-mem": 4}))

    def is_translated() -> bool:
        try:
            made = cluster.api.post("/api/v1/namespaces/default/pods", probe, dryRun="All")
        except ApiError:
            return False
        return "allotment.dev/dialect" in made["metadata"].get("annotations", {})

    wait_until(is_translated, "a review by the webhook", timeout_s=60)


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
    made = cluster.api.post(path, {"spec": {"expirationSeconds": _TOKEN_LIFE_S}})
    config = json.loads(cluster.kubeconfig.read_text("utf-8"))
    config["users"][0]["user"] = {"token": made["status"]["token"]}
    kubeconfig = cluster.credentials.folder / f"as-{name}.kubeconfig"
    kubeconfig.write_text(json.dumps(config), "utf-8")
    return kubeconfig

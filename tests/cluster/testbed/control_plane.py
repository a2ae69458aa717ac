# SPDX-License-Identifier: Apache-2.0
"""The command lines of etcd, kube-apiserver, kube-scheduler and kube-controller-manager.

They listen on the ports that they have everywhere, in the sandbox's network. Nothing is switched
off that tests of an agent or a scheduler are about: RBAC, node authorization, service accounts,
taints, garbage collection.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from testbed.certificates import SERVICE_ADDRESS, Credentials
from testbed.components import Component, answers
from testbed.sandbox import Sandbox

API_SERVER_PORT = 443
"""The port of the service `kubernetes`: there is no kube-proxy that would lead to another."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What the control plane is told about the cluster."""

    binaries: Path
    sandbox: Sandbox
    credentials: Credentials
    has_fake_nodes: bool
    """Nodes that no kubelet reports for: nothing may come of their silence."""
    scheduler_config: str | None = None
    """A KubeSchedulerConfiguration; `{kubeconfig}` in it becomes the scheduler's path."""
    feature_gates: str = ""
    api_server_flags: tuple[str, ...] = ()
    """More of them."""


def etcd(plan: Plan) -> Component:
    """The store. It syncs nothing to the disk: a cluster lives as long as its sandbox."""
    peers = "http://127.0.0.1:2380"
    return Component(
        name="etcd",
        sandbox=plan.sandbox,
        command=(
            str(plan.binaries / "etcd"),
            "--name=testbed",
            f"--data-dir={plan.sandbox.state / 'etcd'}",
            "--listen-client-urls=http://0.0.0.0:2379",
            "--advertise-client-urls=http://127.0.0.1:2379",
            f"--listen-peer-urls={peers}",
            f"--initial-advertise-peer-urls={peers}",
            f"--initial-cluster=testbed={peers}",
            "--unsafe-no-fsync",
            "--log-level=warn",
        ),
        is_ready=answers(f"http://{plan.sandbox.link.inner}:2379/health"),
    )


def api_server(plan: Plan) -> Component:
    """The API server, at the sandbox's address and at the service's."""
    credentials, address = plan.credentials, plan.sandbox.link.inner
    flags = [
        "--etcd-servers=http://127.0.0.1:2379",
        "--bind-address=0.0.0.0",
        f"--advertise-address={address}",
        f"--secure-port={API_SERVER_PORT}",
        f"--tls-cert-file={credentials.certificate}",
        f"--tls-private-key-file={credentials.key}",
        f"--token-auth-file={credentials.tokens}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-signing-key-file={credentials.service_accounts}",
        f"--service-account-key-file={credentials.service_accounts}",
        f"--service-cluster-ip-range={SERVICE_ADDRESS.removesuffix('.1')}.0/24",
        "--endpoint-reconciler-type=none",
        "--allow-privileged=true",
        "--kubelet-preferred-address-types=InternalIP",
        "--enable-priority-and-fairness=false",
        "--max-requests-inflight=2000",
        "--max-mutating-requests-inflight=1000",
    ]
    if plan.has_fake_nodes:
        # It would taint each new node as not ready, until a controller hears from its kubelet.
        flags.append("--disable-admission-plugins=TaintNodesByCondition")
    return Component(
        name="kube-apiserver",
        sandbox=plan.sandbox,
        command=(
            str(plan.binaries / "kube-apiserver"),
            *flags,
            *plan.api_server_flags,
            *_gates(plan),
        ),
        # Open to everyone by the role system:public-info-viewer, which comes with the first start.
        is_ready=answers(f"https://{address}:{API_SERVER_PORT}/readyz"),
    )


_SCHEDULER_CONFIG = """\
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
clientConnection: {{kubeconfig: "{kubeconfig}", qps: 2000, burst: 4000}}
leaderElection: {{leaderElect: false}}
"""


def scheduler(plan: Plan) -> Component:
    """The scheduler, with Kubernetes' defaults or a test's own configuration."""
    kubeconfig = plan.credentials.kubeconfig("scheduler")
    config = plan.credentials.folder / "scheduler.yaml"
    text = plan.scheduler_config or _SCHEDULER_CONFIG.format(kubeconfig="{kubeconfig}")
    config.write_text(text.replace("{kubeconfig}", str(kubeconfig)), encoding="utf-8")
    return Component(
        name="kube-scheduler",
        sandbox=plan.sandbox,
        command=(
            str(plan.binaries / "kube-scheduler"),
            f"--config={config}",
            *_serving(plan, "kube-scheduler", kubeconfig),
            *_gates(plan),
        ),
        is_ready=answers(f"https://{plan.sandbox.link.inner}:10259/healthz"),
    )


def controller_manager(plan: Plan) -> Component:
    """The controllers, each with its own service account."""
    kubeconfig = plan.credentials.kubeconfig("controller-manager")
    controllers = ["*"]
    if plan.has_fake_nodes:
        controllers += ["-node-lifecycle-controller", "-taint-eviction-controller"]
    return Component(
        name="kube-controller-manager",
        sandbox=plan.sandbox,
        command=(
            str(plan.binaries / "kube-controller-manager"),
            f"--kubeconfig={kubeconfig}",
            f"--controllers={','.join(controllers)}",
            "--leader-elect=false",
            "--use-service-account-credentials=true",
            f"--service-account-private-key-file={plan.credentials.service_accounts}",
            f"--root-ca-file={plan.credentials.authority}",
            # It makes this folder, by default in the machine's /usr/libexec.
            f"--flex-volume-plugin-dir={plan.sandbox.state / 'volume-plugins'}",
            "--kube-api-qps=500",
            "--kube-api-burst=1000",
            *_serving(plan, "kube-controller-manager", kubeconfig),
            *_gates(plan),
        ),
        is_ready=answers(f"https://{plan.sandbox.link.inner}:10257/healthz"),
    )


def _serving(plan: Plan, name: str, kubeconfig: Path) -> list[str]:
    return [
        "--bind-address=0.0.0.0",
        f"--cert-dir={plan.credentials.folder / name}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
    ]


def _gates(plan: Plan) -> list[str]:
    return [f"--feature-gates={plan.feature_gates}"] if plan.feature_gates else []

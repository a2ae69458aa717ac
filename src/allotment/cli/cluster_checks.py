# SPDX-License-Identifier: Apache-2.0
"""What `kubectl allot doctor` and `kubectl allot status` check of a cluster."""

from __future__ import annotations

import re
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from allotment import __version__
from allotment.cli.findings import CheckResult, Finding
from allotment.cli.options import installed, lacking, read_of_cluster
from allotment.model.errors import UsageError
from allotment.model.formats import format_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from allotment.kube.components import ComponentPod
    from allotment.kube.errors import KubeError
    from allotment.kube.installation import InstalledParts
    from allotment.kube.objects import NodeObject
    from allotment.kube.webhooks import Webhook

_NAMED: Final = 5
_SOON: Final = timedelta(days=14)
_LATE: Final = timedelta(seconds=60)
"""A leader renews its lease every second; clocks may differ."""
_OLDEST: Final = (1, 30)
_APPLY: Final = "kubectl apply -f deploy/manifests/"
_OTHERS: Final = {
    "NVIDIA's device plugin": r"nvidia-device-plugin|nvidia/k8s-device-plugin",
    "NVIDIA's GPU feature discovery": r"gpu-feature-discovery",
    "NVIDIA's DRA driver": r"k8s-dra-driver",
    "HAMi's device plugin": r"hami-device-plugin|projecthami/hami",
    "Volcano's vGPU device plugin": r"volcano-vgpu|volcano-device-plugin",
    "Aliyun's gpushare device plugin": r"gpushare-device-plugin|k8s-gpushare-plugin",
    "Tencent's GPU manager": r"gpu-manager",
    "KubeShare's device manager": r"kubeshare",
}
"""Programs that offer GPUs to the kubelet, by their images and names."""


def examine_cluster(kubeconfig: Path | None, context: str | None, namespace: str) -> list[Finding]:
    """Read a cluster and check it. Raises `UnreachableError`."""
    return list(check(read(kubeconfig, context, namespace), now=datetime.now(UTC)))


def read(kubeconfig: Path | None, context: str | None, namespace: str) -> InstalledParts:
    with installed("kubectl allot doctor", extra="kubernetes"):
        from allotment.kube.installation import read_installation
    return read_of_cluster(
        kubeconfig,
        context,
        lambda api: read_installation(api, namespace=namespace),
        rights="read the cluster",
        check="list pods -A",
    )


def check(found: InstalledParts, *, now: datetime) -> Iterator[Finding]:
    """Yield what is well and what is not, the essential parts first."""
    from allotment.kube.errors import KubeError

    if isinstance(found.version, KubeError):
        yield unread("Kubernetes", found.version)
    else:
        yield _kubernetes(found.version)
    if isinstance(found.pods, KubeError):
        yield unread("agents and scheduler", found.pods)
    elif isinstance(found.nodes, KubeError):
        yield unread("nodes", found.nodes)
        yield from _schedulers(found, found.pods, now)
    else:
        yield from _agents(found, found.pods, found.nodes)
        yield from _schedulers(found, found.pods, now)
    if not isinstance(found.pods, KubeError):
        yield from _versions(found.pods)
    if not isinstance(found.nodes, KubeError):
        yield from _inventories(found.nodes)
    yield from _webhook(found, now)
    if isinstance(found.daemon_sets, KubeError):
        yield unread("other plugins", found.daemon_sets)
    else:
        yield from _others(found)


def unread(name: str, error: KubeError) -> Finding:
    """Return the finding of a part that this user may not read, or that was refused."""
    return Finding(name, CheckResult.NOTE, error.message, lacking(error.message) or "")


def _kubernetes(version: str) -> Finding:
    numbers = re.match(r"v?(\d+)\.(\d+)", version)
    if numbers and (int(numbers[1]), int(numbers[2])) < _OLDEST:
        fix = "upgrade the cluster: admission policies need Kubernetes 1.30"
        return Finding("Kubernetes", CheckResult.MISSING, version, fix)
    return Finding("Kubernetes", CheckResult.OK, version or "unknown version")


def _of(pods: Sequence[ComponentPod], component: str) -> list[ComponentPod]:
    return [pod for pod in pods if pod.component == component]


def _agents(
    found: InstalledParts, pods: Sequence[ComponentPod], nodes: Sequence[NodeObject]
) -> Iterator[Finding]:
    agents = _of(pods, "agent")
    if not agents:
        fix = f"{_APPLY}agent.yaml; in another namespace: --system-namespace"
        detail = f"no agent in namespace {found.namespace}"
        yield Finding("agents", CheckResult.MISSING, detail, fix)
        return
    ready = {pod.node for pod in agents if pod.is_ready}
    yield from _not_ready("agent", [pod for pod in agents if pod.node not in ready])
    without = [
        node.metadata.name
        for node in nodes
        if _has_gpus(node) and node.metadata.name not in {pod.node for pod in agents}
    ]
    if without:
        yield Finding(
            "nodes without an agent",
            CheckResult.NOTE,
            f"{format_count(len(without), 'node')} with GPUs: {_names(without)}",
            "compare the nodes' labels and taints with the agents' nodeSelector and tolerations",
        )
    if ready:
        detail = f"{len(ready)} of {len({pod.node for pod in agents})} ready"
        yield Finding("agents", CheckResult.OK, detail)


def _has_gpus(node: NodeObject) -> bool:
    from allotment.kube.inventories import DEVICES

    labels, offered = node.metadata.labels or {}, node.status.allocatable or {}
    return (
        DEVICES in (node.metadata.annotations or {})
        or labels.get("nvidia.com/gpu.present") == "true"
        or any(name.startswith("nvidia.com/") and text != "0" for name, text in offered.items())
    )


def _not_ready(component: str, pods: Sequence[ComponentPod]) -> Iterator[Finding]:
    for pod in pods[:_NAMED]:
        restarts = f", {format_count(pod.restarts, 'restart')}" if pod.restarts else ""
        yield Finding(
            f"{component} {pod.name}",
            CheckResult.NOTE,
            f"not ready on node {pod.node or '(none)'}: {pod.problem}{restarts}",
            f"kubectl -n {pod.namespace} describe pod {pod.name}; kubectl -n {pod.namespace} logs"
            f" {pod.name} --all-containers",
        )
    if len(pods) > _NAMED:
        yield Finding(component, CheckResult.NOTE, f"{len(pods) - _NAMED} more are not ready")


def _schedulers(
    found: InstalledParts, pods: Sequence[ComponentPod], now: datetime
) -> Iterator[Finding]:
    from allotment.kube.errors import KubeError

    schedulers = _of(pods, "scheduler")
    if not schedulers:
        detail = f"none in namespace {found.namespace}: each node places the pods that it gets"
        yield Finding("scheduler", CheckResult.OK, detail, f"{_APPLY}scheduler.yaml")
        return
    ready = [pod for pod in schedulers if pod.is_ready]
    yield from _not_ready("scheduler", [pod for pod in schedulers if not pod.is_ready])
    outcome = CheckResult.OK if ready else CheckResult.MISSING
    fix = "" if ready else "pods with parts of GPUs wait: see the scheduler's log"
    detail = f"{len(ready)} of {len(schedulers)} ready"
    lease = found.lease
    if isinstance(lease, KubeError):
        yield unread("leader", lease)
    elif lease is None or not lease.spec.holder_identity:
        yield Finding("leader", CheckResult.NOTE, "no replica leads", "see the schedulers' logs")
    else:
        holder = lease.spec.holder_identity
        age = now - _time(lease.spec.renew_time, now)
        if age > _LATE:
            detail_of = f"{holder} has not renewed its lease for {age.total_seconds():.0f} s"
            yield Finding("leader", CheckResult.NOTE, detail_of, "see the schedulers' logs")
        else:
            detail += f"; {holder} leads"
    yield Finding("scheduler", outcome, detail, fix)


def _time(text: str | None, default: datetime) -> datetime:
    try:
        return datetime.fromisoformat(text) if text else default
    except ValueError:
        return default


def _versions(pods: Sequence[ComponentPod]) -> Iterator[Finding]:
    images = Counter(
        image
        for pod in pods
        if pod.component in {"agent", "scheduler"}
        for image in dict.fromkeys(pod.images)
    )
    if not images:
        return
    listed = ", ".join(
        f"{image} ({format_count(number, 'pod')})" for image, number in images.most_common()
    )
    tags = {image.rpartition(":")[2] for image in images}
    if len(images) > 1:
        fix = "finish the upgrade: agents and scheduler are tested with the same version"
        yield Finding("versions", CheckResult.NOTE, listed, fix)
    elif all(re.fullmatch(r"v?\d+\.\d+\.\d+\S*", tag) for tag in tags) and not any(
        tag.removeprefix("v") == __version__ for tag in tags
    ):
        detail = f"{listed}; this command is {__version__}"
        yield Finding("versions", CheckResult.NOTE, detail, "use the command of the same version")
    else:
        yield Finding("versions", CheckResult.OK, listed)


def _inventories(nodes: Sequence[NodeObject]) -> Iterator[Finding]:
    from allotment.kube.inventories import inventory_of

    sick = []
    for node in nodes:
        try:
            inventory = inventory_of(node)
        except UsageError as error:
            yield Finding(
                f"GPUs of node {node.metadata.name}",
                CheckResult.NOTE,
                error.message,
                error.hint or "",
            )
            continue
        devices = inventory.devices if inventory else ()
        sick += [
            f"{each.uuid} of node {node.metadata.name} ({each.problem})"
            for each in devices
            if each.problem
        ]
    if sick:
        detail = f"{format_count(len(sick), 'GPU')} closed to new shares: {_names(sick)}"
        fix = "on the node: allot doctor; for cordons, see the node's annotations"
        yield Finding("GPUs", CheckResult.NOTE, detail, fix)


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


# ---- webhook -------------------------------------------------------------------------------------


def _webhook(found: InstalledParts, now: datetime) -> Iterator[Finding]:
    from allotment.kube.errors import KubeError

    webhooks = found.webhooks
    if isinstance(webhooks, KubeError):
        yield unread("webhook", webhooks)
        return
    pods = () if isinstance(found.pods, KubeError) else found.pods
    has_scheduler = bool(_of(pods, "scheduler"))
    if webhooks is None:
        if has_scheduler:
            detail = "no MutatingWebhookConfiguration allotment-scheduler: pods of other systems"
            detail += " are not translated"
            yield Finding("webhook", CheckResult.NOTE, detail, f"{_APPLY}scheduler.yaml")
        return
    for each in webhooks:
        yield _certificates(each, now)


def _certificates(webhook: Webhook, now: datetime) -> Finding:
    """Check the authorities by which the API server trusts the webhook."""
    name = f"webhook {webhook.name}"
    if not webhook.bundle:
        detail = "no caBundle: the API server does not trust the webhook"
        fix = "the scheduler writes it within seconds of its start: see its log"
        return Finding(name, CheckResult.MISSING, detail, fix)
    from cryptography import x509

    try:
        ends = [
            each.not_valid_after_utc for each in x509.load_pem_x509_certificates(webhook.bundle)
        ]
    except ValueError as error:
        fix = "restart the schedulers: the leader writes it again"
        return Finding(name, CheckResult.MISSING, f"its caBundle is unreadable: {error}", fix)
    last = max(ends)
    until = last.date().isoformat()
    if last <= now:
        fix = "see the scheduler's log: it renews its certificates itself"
        return Finding(name, CheckResult.MISSING, f"its authority expired on {until}", fix)
    if last - now < _SOON:
        fix = "see the scheduler's log: it renews its certificates itself"
        return Finding(name, CheckResult.NOTE, f"its authority expires on {until}", fix)
    return Finding(name, CheckResult.OK, f"trusted by the API server until {until}")


# ---- other plugins -------------------------------------------------------------------------------


def _others(found: InstalledParts) -> Iterator[Finding]:
    from allotment.kube.errors import KubeError

    assert not isinstance(found.daemon_sets, KubeError)  # noqa: S101 - the caller checked
    others = []
    for each in found.daemon_sets:
        labels = each.metadata.labels or {}
        if labels.get("app.kubernetes.io/name") == "allotment":
            continue
        words = " ".join((each.metadata.name, *each.images))
        title = next((name for name, mark in _OTHERS.items() if re.search(mark, words)), "")
        if title and each.status.desired_number_scheduled:
            nodes = format_count(each.status.desired_number_scheduled, "node")
            others.append(f"{title} (DaemonSet {each}, {nodes})")
    if others:
        yield Finding(
            "other plugins",
            CheckResult.NOTE,
            f"{'; '.join(others)}: where an agent also runs, a GPU may be given out twice",
            "`kubectl allot migrate plan` shows how nodes move from one to the other, one by one;"
            " or keep them off the agents' nodes by a nodeSelector",
        )
    else:
        yield Finding("other plugins", CheckResult.OK, "no other program offers GPUs")

# SPDX-License-Identifier: Apache-2.0
"""The plan of `allot migrate`: a value, made from what a cluster has. No I/O.

It says what was found, what each setting becomes, what the nodes' steps are, and what is left to
the user. `apply` makes the same plan again, and does its nodes' steps (`allotment.kube.moving`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from allotment.cli.migrate_systems import (
    OLD_SYSTEMS,
    CarriedSettings,
    OldSystem,
    Setting,
    SystemParts,
)
from allotment.kube.migrations import AGENT_LABEL, Departure, MovedNode, WorkloadObject
from allotment.kube.moving import is_shut
from allotment.model.errors import NotFoundError, UsageError
from allotment.model.formats import format_count, meant
from allotment.model.structs import replace

if TYPE_CHECKING:
    from allotment.kube.migrations import MigrationEvidence, NeighbourPod

_CONFIG_LABEL: Final = "nvidia.com/device-plugin.config"
_TOLERATED: Final[list[dict[str, str]]] = [
    {"key": "CriticalAddonsOnly", "operator": "Exists"},
    {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
    {"key": "allotment.dev/gpu", "operator": "Exists", "effect": "NoSchedule"},
]
"""The chart's usual tolerations of the agent."""
_MPS_LABEL: Final = "nvidia.com/mps.capable"
_OF_CLUSTER: Final = ("node.kubernetes.io/", "node.cloudprovider.kubernetes.io/")
"""Every DaemonSet tolerates these."""


class FoundPart(msgspec.Struct, frozen=True):
    """An object of the old system."""

    kind: str
    name: str
    role: str


class PlannedNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node with the old system, or one that moved from it."""

    name: str
    state: str
    """`old`, or the step of its record: `leaving`, `arriving`, `moved`, `returning`."""
    capacity: Mapping[str, str]
    """What the old system offers there."""
    config: str
    """The agent's configuration."""
    pods: tuple[str, ...]
    """Running pods of the old system: they run on."""
    obstacle: str
    """Why it cannot move yet; empty: it can."""
    departure: Departure


class MigrationPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A whole migration."""

    system: str
    title: str
    found: tuple[FoundPart, ...]
    settings: tuple[Setting, ...]
    values: Mapping[str, Any]
    """Of the chart deploy/charts/allotment."""
    dialects: Mapping[str, Any]
    """For `allot scheduler --dialects`: the chart has no value for it."""
    take_over: tuple[str, ...] = ()
    """Dialects whose running pods the scheduler has to count."""
    shut: tuple[str, ...]
    """DaemonSets that get a rule to avoid moved nodes, because no label takes them off."""
    nodes: tuple[PlannedNode, ...]
    before: tuple[str, ...]
    """What the user does before `apply`."""
    after: tuple[str, ...]
    """What the user does when all nodes have moved."""
    notes: tuple[str, ...]


def systems_in(evidence: MigrationEvidence) -> tuple[str, ...]:
    """Return the names of the systems with a plugin, or with a node that moved from them."""
    moved = {node.record.system for node in evidence.nodes if node.record}
    return tuple(
        name
        for name, system in OLD_SYSTEMS.items()
        if name in moved or any(_is_plugin(system, each) for each in evidence.daemon_sets)
    )


def chosen_system(evidence: MigrationEvidence, wanted: str | None) -> OldSystem:
    """Return the system to leave. Raises `NotFoundError` and `UsageError`."""
    found = systems_in(evidence)
    known = ", ".join(OLD_SYSTEMS)
    if wanted is not None:
        if wanted not in OLD_SYSTEMS:
            problem = f"--from {wanted}: unknown system{meant(wanted, tuple(OLD_SYSTEMS))}"
            raise UsageError(problem, hint=f"known systems: {known}")
        if wanted not in found:
            raise NotFoundError(
                f"no {OLD_SYSTEMS[wanted].title} in this cluster",
                hint=f"found: {', '.join(found) or 'no known system'}",
            )
        return OLD_SYSTEMS[wanted]
    if not found:
        raise NotFoundError(
            "no other GPU system in this cluster: no DaemonSet of one, and no moved node",
            hint=f"known systems: {known}",
        )
    if len(found) > 1:
        raise UsageError(
            f"this cluster has {len(found)} GPU systems: {', '.join(found)}",
            hint=f"move them one by one: --from {found[0]}",
        )
    return OLD_SYSTEMS[found[0]]


def make_plan(
    evidence: MigrationEvidence, *, system: OldSystem, is_enforced: bool = False
) -> MigrationPlan:
    """`is_enforced`: replicas without limits become enforced parts."""
    plugins = [each for each in evidence.daemon_sets if _is_plugin(system, each)]
    deployments = [
        each for each in evidence.deployments if re.search(system.others, each.words, re.IGNORECASE)
    ]
    mounted = {
        (each.metadata.namespace, volume.config_map.name)
        for each in plugins
        for volume in each.pod.volumes or ()
        if volume.config_map
    }
    config_maps = [
        each
        for each in evidence.config_maps
        if (each.metadata.namespace, each.metadata.name) in mounted
        or re.search(system.config_maps, each.metadata.name)
    ]
    parts = SystemParts(
        daemon_sets=plugins,
        deployments=deployments,
        config_maps=config_maps,
        is_enforced=is_enforced,
    )
    reading = system.read(parts)
    reading.settings.extend(_unknown(plugins, reading))
    nodes = tuple(_nodes(evidence, system, plugins, reading))
    here = {name for node in nodes for name in node.departure.daemon_sets}
    ruled = [each for each in plugins if str(each) in here and not _labels_off(system, each)]
    return MigrationPlan(
        system=system.name,
        title=system.title,
        found=tuple(_found(evidence, system, parts)),
        settings=tuple(reading.settings),
        values=_values(evidence, system, plugins, reading, nodes),
        dialects=reading.dialects,
        take_over=system.take_over,
        shut=tuple(map(str, ruled)),
        nodes=tuple(_held(system, ruled, nodes)),
        before=(*system.before, *_before(system, reading, is_enforced=is_enforced)),
        after=system.after,
        notes=(*reading.notes, *_evicted(evidence, plugins, nodes), *evidence.unread),
    )


_OF_PROCESS: Final = re.compile(
    r"--(c|v|vmodule|\w*logtostderr|stderrthreshold|log-.*|kubeconfig|config-file)"
    r"|KUBECONFIG|PATH|LD_LIBRARY_PATH|HOOK_PATH|N(ODE_NAME|odeName)|(POD_)?NAMESPACE"
    r"|NVIDIA_(VISIBLE_DEVICES|DRIVER_CAPABILITIES|MIG_MONITOR_DEVICES)"
    r"|ONESHOT|CONFIG_FILE.*|DEFAULT_CONFIG|SEND_SIGNAL|SIGNAL|PROCESS_TO_SIGNAL"
)
"""Flags and variables of a plugin's own process, which say nothing of GPUs."""


def _unknown(plugins: Sequence[WorkloadObject], reading: CarriedSettings) -> list[Setting]:
    """Return flags and variables that no reader looks at."""
    named = reading.known | {each.name for each in reading.settings}
    unknown: dict[tuple[str, str], Setting] = {}
    for each in plugins:
        where = f"DaemonSet {each}"
        for container in each.pod.all_containers:
            for name, value in container.options:
                if name not in named and not _OF_PROCESS.fullmatch(name):
                    reason = "`allot migrate` does not know it: look for it in the chart's values"
                    unknown[where, name] = Setting(where, name, value, reason=reason)
            for name in container.referred:
                reason = "its value is in another object: add it to the chart's values"
                unknown[where, name] = Setting(where, name, "(valueFrom)", reason=reason)
    return list(unknown.values())


def _is_plugin(system: OldSystem, workload: WorkloadObject) -> bool:
    labels = workload.metadata.labels or {}
    is_ours = labels.get("app.kubernetes.io/name") == "allotment"
    return not is_ours and re.search(system.plugins, workload.words) is not None


def _labels_off(system: OldSystem, workload: WorkloadObject) -> dict[str, str | None]:
    """Return the labels that take a plugin off a node; none: its DaemonSet needs a rule."""
    selector = workload.pod.node_selector or {}
    return {key: value for key, value in system.labels.items() if key in selector}


def _evicted(
    evidence: MigrationEvidence, plugins: Sequence[WorkloadObject], nodes: Sequence[PlannedNode]
) -> Iterator[str]:
    """Yield a note for each other DaemonSet that selects a label which `apply` changes."""
    changed = {
        key: value
        for node in nodes
        for key, value in node.departure.labels.items()
        if key != _CONFIG_LABEL
    }
    for each in evidence.daemon_sets:
        selector = each.pod.node_selector or {}
        keys = [key for key in changed if key in selector and selector[key] != changed[key]]
        if keys and each not in plugins:
            yield (
                f"DaemonSet {each} selects nodes by the label {', '.join(keys)}, which `apply`"
                " changes: its pods leave the moved nodes, too"
            )


def _before(system: OldSystem, reading: CarriedSettings, *, is_enforced: bool) -> Iterator[str]:
    words = f"--from {system.name}{' --enforce' if is_enforced else ''} -o values"
    yield (
        f"install Allotment: allot migrate plan {words} >values.yaml; helm install allotment"
        " deploy/charts/allotment -n allotment-system --create-namespace -f values.yaml"
    )
    if reading.dialects:
        yield (
            "the chart has no value for --dialects: install the chart with scheduler.enabled=false,"
            " and deploy/manifests/scheduler.yaml with --dialects (the sections `dialects` of"
            f" `allot migrate plan -o json`) and --take-over={','.join(system.take_over)}"
        )


def _found(
    evidence: MigrationEvidence, system: OldSystem, parts: SystemParts
) -> Iterator[FoundPart]:
    for each in parts.daemon_sets:
        pods = format_count(sum(pod.is_of(each) for pod in evidence.pods), "pod")
        yield FoundPart("DaemonSet", str(each), f"plugin, {pods}: leaves each node")
    for each in parts.deployments:
        yield FoundPart("Deployment", str(each), "stays: yours to remove at the end")
    for settings in parts.config_maps:
        name = f"{settings.metadata.namespace}/{settings.metadata.name}"
        yield FoundPart("ConfigMap", name, "settings")
    for name in _runtime_classes(parts.daemon_sets):
        yield FoundPart("RuntimeClass", name, "of the plugin: agent.runtimeClassName")
    for kind, names in (
        ("MutatingWebhookConfiguration", evidence.webhooks),
        ("RuntimeClass", evidence.runtime_classes),
        ("DeviceClass", evidence.device_classes),
    ):
        for name in names:
            if re.search(system.others, name, re.IGNORECASE):
                yield FoundPart(kind, name, "stays: yours to remove at the end")


def _nodes(
    evidence: MigrationEvidence,
    system: OldSystem,
    plugins: Sequence[WorkloadObject],
    reading: CarriedSettings,
) -> Iterator[PlannedNode]:
    on: dict[str, list[NeighbourPod]] = {}
    for pod in evidence.pods:
        on.setdefault(pod.spec.node_name, []).append(pod)
    for node in evidence.nodes:
        name, record = node.metadata.name, node.record
        there = on.get(name, [])
        if record is not None and record.system == system.name:
            daemon_sets = record.daemon_sets
        else:
            daemon_sets = tuple(str(each) for each in plugins if any(p.is_of(each) for p in there))
        if not daemon_sets or (record is not None and record.system != system.name):
            continue
        labels: dict[str, str | None] = {}
        for each in plugins:
            if str(each) in daemon_sets:
                labels |= _labels_off(system, each)
        config = reading.node_configs.get(name, "")
        if config:
            labels[_CONFIG_LABEL] = config
        users = _users(evidence, system, name, there)
        ends_pods = _ends_pods(system, node, plugins, there)
        yield PlannedNode(
            name=name,
            state=record.step if record else "old",
            capacity=_offered(system, node),
            config=config or node.labels.get(_CONFIG_LABEL) or reading.default_config,
            pods=users,
            obstacle="" if record else _obstacle(evidence, system, ends_pods, users),
            departure=Departure(
                node=name,
                system=system.name,
                labels=labels,
                annotations=system.annotations,
                daemon_sets=daemon_sets,
                resources=system.resources,
                claims_of=system.claims_of,
                ends_pods=ends_pods,
            ),
        )


def _users(
    evidence: MigrationEvidence, system: OldSystem, node: str, there: Sequence[NeighbourPod]
) -> tuple[str, ...]:
    """Return the running pods of the system on a node."""
    if system.claims_of:
        claims = evidence.claims or ()
        found = [each for each in claims if each.is_on(node, driver=system.claims_of)]
        return tuple(dict.fromkeys(name for each in found for name in each.pods))
    return tuple(
        str(pod)
        for pod in there
        if not pod.has_ended and any(re.fullmatch(system.resources, name) for name in pod.asks)
    )


def _ends_pods(
    system: OldSystem,
    node: MovedNode,
    plugins: Sequence[WorkloadObject],
    there: Sequence[NeighbourPod],
) -> str:
    """Return why running pods end or fail when the plugins leave; empty: they run on."""
    if system.claims_of:
        return "a claim ends at the driver that prepared it"
    servers = [each for each in plugins if re.search(system.mps, each.metadata.name)]
    is_labelled = bool(servers) and node.labels.get(_MPS_LABEL) == "true"
    if is_labelled or any(pod.is_of(each) for pod in there for each in servers):
        return "the MPS server leaves with the plugin, and its running clients end"
    return ""


def _obstacle(
    evidence: MigrationEvidence, system: OldSystem, ends_pods: str, users: Sequence[str]
) -> str:
    if system.claims_of and evidence.claims is None:
        return "its claims are unknown: this needs the right to list resourceclaims"
    if not ends_pods or not users:
        return ""
    return f"{ends_pods}: drain the node of {', '.join(users[:5])}"


def _held(
    system: OldSystem, ruled: Sequence[WorkloadObject], nodes: Sequence[PlannedNode]
) -> Iterator[PlannedNode]:
    """Hold all nodes if a new rule replaces MPS servers that have clients, on any node."""
    servers = [each for each in ruled if re.search(system.mps, each.metadata.name)]
    clients = [
        pod
        for node in nodes
        if node.departure.ends_pods and node.state not in {"arriving", "moved"}
        for pod in node.pods
    ]
    obstacle = ""
    if clients and not all(is_shut(each.pod.affinity) for each in servers):
        obstacle = (
            "the rule to avoid moved nodes replaces the MPS servers of all nodes, and their running"
            f" clients end: drain the nodes of {', '.join(clients[:5])}"
        )
    for node in nodes:
        yield replace(node, obstacle=node.obstacle or obstacle)


def _offered(system: OldSystem, node: MovedNode) -> dict[str, str]:
    capacity = node.status.capacity or {}
    return {
        name: text
        for name, text in sorted(capacity.items())
        if re.fullmatch(system.resources, name) and text != "0"
    }


def _runtime_classes(plugins: Sequence[WorkloadObject]) -> list[str]:
    return sorted({each.pod.runtime_class_name or "" for each in plugins} - {""})


def _values(
    evidence: MigrationEvidence,
    system: OldSystem,
    plugins: Sequence[WorkloadObject],
    reading: CarriedSettings,
    nodes: Sequence[PlannedNode],
) -> dict[str, Any]:
    agent: dict[str, Any] = {
        "nodeSelector": {"kubernetes.io/os": "linux", AGENT_LABEL: "true"},
        "defaultConfig": reading.default_config,
    }
    if reading.configs:
        agent["configs"] = dict(reading.configs)
    names = {node.name for node in nodes}
    tainted = {
        (taint.key, taint.effect)
        for node in evidence.nodes
        if node.metadata.name in names
        for taint in node.spec.taints or ()
        if not any(
            taint.key == each["key"] and each.get("effect") in {None, taint.effect}
            for each in _TOLERATED
        )
        and not taint.key.startswith(_OF_CLUSTER)
        and taint.effect in {"NoSchedule", "NoExecute"}
    }
    if tainted:
        more = [{"key": k, "operator": "Exists", "effect": e} for k, e in sorted(tainted)]
        agent["tolerations"] = _TOLERATED + more
    classes = _runtime_classes(plugins)
    if len(classes) == 1:
        (agent["runtimeClassName"],) = classes
    values: dict[str, Any] = {"agent": agent, **reading.values}
    if system.take_over:
        values["scheduler"] = {"takeOver": list(system.take_over)}
    return values

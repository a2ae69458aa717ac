# SPDX-License-Identifier: Apache-2.0
"""Moves nodes from another system's plugin to the agent, and back (docs/designs/migrate.md).

Everything that a later command needs is in the cluster: a record on each node, and a rule in the
plugins' DaemonSets. Each write can be repeated, so that an interrupted move goes on.
"""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from allotment.kube.clients import Api, PatchKind, find, read, read_and_write
from allotment.kube.components import SYSTEM
from allotment.kube.errors import ObjectMissingError
from allotment.kube.live import listed
from allotment.kube.migrations import (
    AGENT_LABEL,
    CLAIMS,
    DAEMON_SETS,
    MOVED_LABEL,
    RECORD,
    Departure,
    MovedNode,
    MoveRecord,
    NeighbourPod,
    UsedClaimObject,
    WorkloadObject,
)
from allotment.kube.nodes import Wanted, remove_fields
from allotment.model.errors import BusyError, NotFoundError
from allotment.model.structs import replace

AGENT_SET: Final = "allotment-agent"
SCHEDULER_SET: Final = "allotment-scheduler"
_TAKE_OVER: Final = "--take-over="
_OURS: Final = "allotment.dev/"
_DRIVERS: Final = ("gpu.allotment.dev", "gpu.nvidia.com")
"""Names under which an agent serves ResourceClaims."""
_ANY: Final = rf"nvidia\.com/.*|{re.escape(_OURS)}.*"
_RULE: Final = {"key": MOVED_LABEL, "operator": "DoesNotExist"}
_REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"
_TERMS: Final = "nodeSelectorTerms"
_RULES: Final = "matchExpressions"
_NAMED: Final = 5

# ---- DaemonSets that avoid moved nodes -----------------------------------------------------------


def shut(affinity: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the affinity with the rule that the node has not moved, in each of its terms.

    Terms are alternatives, and an empty one matches no node.
    """
    nodes, required = _required(affinity)
    ruled = [
        term if not term or _has_rule(term) else {**term, _RULES: [*_rules(term), _RULE]}
        for term in required.get(_TERMS) or [{_RULES: [_RULE]}]
    ]
    nodes = {**nodes, _REQUIRED: {**required, _TERMS: ruled}}
    return {**(affinity or {}), "nodeAffinity": nodes}


def opened(affinity: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the affinity without that rule, and without parts that only it is in."""
    nodes, required = _required(affinity)
    if not any(_has_rule(term) for term in required.get(_TERMS) or ()):
        return dict(affinity or {})
    terms = []
    for term in required[_TERMS]:
        rules = [each for each in _rules(term) if each != _RULE]
        rest = {key: value for key, value in term.items() if key != _RULES}
        left = rest | ({_RULES: rules} if rules else {})
        if left or not term:
            terms.append(left)
    nodes = {key: value for key, value in nodes.items() if key != _REQUIRED}
    if terms:
        nodes[_REQUIRED] = {**required, _TERMS: terms}
    others = {key: value for key, value in (affinity or {}).items() if key != "nodeAffinity"}
    return others | ({"nodeAffinity": nodes} if nodes else {})


def is_shut(affinity: Mapping[str, Any] | None) -> bool:
    terms = [term for term in _required(affinity)[1].get(_TERMS) or () if term]
    return bool(terms) and all(map(_has_rule, terms))


def _rules(term: Mapping[str, Any]) -> list[Any]:
    rules: list[Any] = term.get(_RULES) or []
    return rules


def _has_rule(term: Mapping[str, Any]) -> bool:
    return _RULE in _rules(term)


def _required(affinity: Mapping[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    nodes = (affinity or {}).get("nodeAffinity") or {}
    return nodes, nodes.get(_REQUIRED) or {}


_WORKLOAD: Final = msgspec.json.Decoder(WorkloadObject)
_NODE: Final = msgspec.json.Decoder(MovedNode)


# ---- moving --------------------------------------------------------------------------------------


class Mover:
    """Moves nodes, one at a time. Its methods raise `AllotError` with the state of the node."""

    def __init__(
        self,
        api: Api,
        *,
        report: Callable[[str], None],
        timeout_s: float,
        poll_s: float = 0.5,
        namespace: str = SYSTEM,
        agent_fields: Wanted | None = None,
    ) -> None:
        """`report` gets a line for each step; `timeout_s` is the longest wait for one.

        `agent_fields`: what an agent writes into its node, which is removed on the way back.
        """
        self._api = api
        self._report = report
        self._timeout_s, self._poll_s = timeout_s, poll_s
        self._namespace = namespace
        self._agent_fields = agent_fields

    async def check_agent(self) -> None:
        """Raise unless the agent is installed, and only on nodes with `AGENT_LABEL`."""
        path = f"/apis/apps/v1/namespaces/{self._namespace}/daemonsets/{AGENT_SET}"
        found = await find(self._api, path, _WORKLOAD, asked=f"get daemonset {AGENT_SET}")
        values = "`allot migrate plan -o values` prints the chart's values"
        if found is None:
            raise NotFoundError(
                f"the agent is not installed: no DaemonSet {self._namespace}/{AGENT_SET}",
                hint=f"install Allotment first; {values}",
            )
        if (found.pod.node_selector or {}).get(AGENT_LABEL) != "true":
            raise BusyError(
                f"DaemonSet {found} runs on all nodes, also beside the old plugins",
                hint=f'its nodeSelector must have {AGENT_LABEL}: "true"; {values}',
            )

    async def check_counted(self, systems: Sequence[str]) -> None:
        """Raise unless the scheduler counts the running pods of these systems, by their records."""
        path = f"/apis/apps/v1/namespaces/{self._namespace}/deployments/{SCHEDULER_SET}"
        found = await find(self._api, path, _WORKLOAD, asked=f"get deployment {SCHEDULER_SET}")
        words = [] if found is None else [w for c in found.pod.all_containers for w in c.args or ()]
        named = next((w for w in words if w.startswith(_TAKE_OVER)), _TAKE_OVER)
        missing = set(systems) - set(named.removeprefix(_TAKE_OVER).split(","))
        if missing:
            raise BusyError(
                "Allotment's scheduler would place pods on GPUs that the old system's running pods"
                f" have: it has no {_TAKE_OVER}{','.join(sorted(missing))}",
                hint="install it with the plan's values (scheduler.takeOver), or drain the nodes",
            )

    async def take_agents_off(self, names: Sequence[str]) -> set[str]:
        """Take the agent off moved nodes where one of these plugins is, too; return the nodes.

        An upgrade of the old chart removes the rule. When the plugin then leaves, the kubelet ends
        the agent's registration with it: `take_over` has to start the agent again.
        """
        sets = [each for name in names if (each := await self._set(name)) is not None]
        old = [each for each in sets if not is_shut(each.pod.affinity)]
        nodes = await listed(self._api, "/api/v1/nodes", MovedNode, asked="list nodes")
        both = set()
        for node in nodes if old else ():
            name, record = node.metadata.name, node.record
            if record is None or AGENT_LABEL not in node.labels:
                continue
            if not any(pod.is_of(each) for pod in await self._pods(name) for each in old):
                continue
            self._report(f"node {name}: the old plugin is there again")
            cordoned = _is_cordoned_here(node, record)
            record = replace(record, step="leaving", cordoned=cordoned)
            await self._write(name, record, spec={"unschedulable": True})
            self._report(f"node {name}: cordoned")
            await self._wait_started(name, _ANY)
            await self._write(name, record, labels={AGENT_LABEL: None})
            await self._wait_agent_left(name)
            both.add(name)
        return both

    async def shut_out(self, names: Sequence[str]) -> None:
        """Make DaemonSets avoid nodes that moved. Their other pods are replaced, one by one."""
        for name in names:
            if await self._change(name, shut, unless=is_shut):
                self._report(f"DaemonSet {name} avoids nodes with the label {MOVED_LABEL}")

    async def let_in(self) -> None:
        """Remove that rule from all DaemonSets, if no node has a record any more."""
        nodes = await listed(self._api, "/api/v1/nodes", MovedNode, asked="list nodes")
        if any(RECORD in (node.metadata.annotations or {}) for node in nodes):
            return
        sets = await listed(self._api, DAEMON_SETS, WorkloadObject, asked="list daemonsets")
        for each in sets:
            if await self._change(
                str(each), opened, unless=lambda affinity: opened(affinity) == (affinity or {})
            ):
                self._report(f"DaemonSet {each} selects nodes as before")

    async def _change(
        self,
        name: str,
        change: Callable[[Mapping[str, Any] | None], dict[str, Any]],
        *,
        unless: Callable[[Mapping[str, Any] | None], bool],
    ) -> bool:
        path = _set_path(name)

        async def changed() -> bool:
            found = await read(self._api, path, _WORKLOAD, asked=f"get daemonset {name}")
            before = found.pod.affinity
            if unless(before):
                return False
            # A merge patch merges maps: parts that are gone have to be null.
            affinity: dict[str, Any] | None = change(before) or None
            if affinity is not None:
                affinity = _merged(before or {}, affinity)
            body = {
                "metadata": {"resourceVersion": found.metadata.resource_version},
                "spec": {"template": {"spec": {"affinity": affinity}}},
            }
            await self._api.patch(path, body, asked=f"patch daemonset {name}")
            return True

        return await read_and_write(changed)

    async def take_over(self, departure: Departure) -> bool:
        """Move a node to the agent; return False if it has moved already."""
        name = departure.node
        node = await self._node(name)
        record = node.record
        if record is not None and record.system != departure.system:
            raise BusyError(
                f"node {name} was moved from {record.system}",
                hint=f"allot migrate apply --from {record.system} {name}",
            )
        if record is not None and record.step == "moved" and _has(node, departure.labels):
            return False
        has_plugin = record is None or record.step == "leaving"
        record = MoveRecord(
            system=departure.system,
            labels={key: node.labels.get(key) for key in departure.labels}
            | (dict(record.labels) if record else {}),
            daemon_sets=departure.daemon_sets,
            cordoned=_is_cordoned_here(node, record),
            step="leaving",
        )
        # Where another program set the old labels again, plugin and agent are both there.
        is_mixed = AGENT_LABEL in node.labels and not _has(node, departure.labels)
        off = {**departure.labels, MOVED_LABEL: record.system}
        await self._write(name, record, spec={"unschedulable": True})
        self._report(f"node {name}: cordoned")
        await self._wait_started(name, departure.resources)
        if has_plugin and departure.ends_pods and AGENT_LABEL not in node.labels:
            await self._refuse_ended(departure)
        await self._write(name, record, labels=off | ({AGENT_LABEL: None} if is_mixed else {}))
        sets = [await self._set(each) for each in departure.daemon_sets]
        old = [each for each in sets if each is not None]
        await self._wait(
            name,
            lambda pods: [
                str(pod)
                for pod in pods
                if any(pod.is_of(each) for each in old)
                or (is_mixed and self._is_agent(pod, is_ready=False))
            ],
            "the old plugin to leave",
            "check whether another program (an operator, Argo CD, Flux) writes its DaemonSet again",
        )
        self._report(f"node {name}: the old plugin has left")
        record = replace(record, step="arriving")
        await self._write(
            name,
            record,
            labels={AGENT_LABEL: "true"},
            annotations=dict.fromkeys(departure.annotations),
        )
        await self._wait(
            name,
            lambda pods: [] if any(self._is_agent(pod) for pod in pods) else ["no agent is ready"],
            "the agent",
            f"kubectl -n {self._namespace} describe daemonset {AGENT_SET}",
        )
        await self._finish(name, replace(record, step="moved"))
        self._report(f"node {name}: the agent is ready")
        return True

    async def give_back(self, name: str, *, keeps_pods: bool) -> None:
        """Return a node to its system.

        `keeps_pods`: also if pods with shares run there, which the old system does not count.
        """
        node, record, old = await self._returning(name)
        if not keeps_pods:
            await self._refuse_users(node)
        record = replace(record, step="returning", cordoned=_is_cordoned_here(node, record))
        await self._write(name, record, spec={"unschedulable": True})
        self._report(f"node {name}: cordoned")
        await self._wait_started(name, _ANY)
        if not keeps_pods:
            await self._refuse_users(node, is_cordoned=True)
        await self._write(name, record, labels={AGENT_LABEL: None})
        await self._wait_agent_left(name)
        if self._agent_fields is not None:
            await remove_fields(self._api, unwanted=self._agent_fields, node_name=name)
        self._report(f"node {name}: the agent has left")
        await self._write(name, record, labels={MOVED_LABEL: None, **record.labels})
        await self._wait(
            name,
            lambda pods: [
                f"{each} is not ready"
                for each in old
                if not any(pod.is_of(each) and pod.is_ready for pod in pods)
            ],
            "the old plugin",
            "see the DaemonSet's pods: kubectl get pods -A -o wide",
        )
        await self._finish(name, record, removes=True)
        self._report(f"node {name}: the old plugin is ready")

    async def check_back(self, name: str, *, keeps_pods: bool) -> None:
        """Raise if `give_back` would refuse this node."""
        node, _, _ = await self._returning(name)
        if not keeps_pods:
            await self._refuse_users(node)

    # -- parts ---------------------------------------------------------------------------------

    async def _returning(self, name: str) -> tuple[MovedNode, MoveRecord, list[WorkloadObject]]:
        """Return a moved node, its record, and the DaemonSets of its old plugins."""
        node = await self._node(name)
        record = node.record
        if record is None:
            raise NotFoundError(
                f"node {name} was not moved by `allot migrate apply`",
                hint="`allot migrate plan` lists the nodes that were",
            )
        old = []
        for each in record.daemon_sets:
            found = await self._set(each)
            if found is None:
                raise NotFoundError(
                    f"node {name}: DaemonSet {each} is gone, so the node would have no plugin",
                    hint=f"install {record.system} again, then repeat this command",
                )
            old.append(found)
        return node, record, old

    async def _node(self, name: str) -> MovedNode:
        return await read(self._api, f"/api/v1/nodes/{name}", _NODE, asked=f"get node {name}")

    async def _set(self, name: str) -> WorkloadObject | None:
        return await find(self._api, _set_path(name), _WORKLOAD, asked=f"get daemonset {name}")

    async def _pods(self, node: str) -> list[NeighbourPod]:
        return await listed(
            self._api,
            "/api/v1/pods",
            NeighbourPod,
            asked=f"list pods of node {node}",
            params={"fieldSelector": f"spec.nodeName={node}"},
        )

    def _is_agent(self, pod: NeighbourPod, *, is_ready: bool = True) -> bool:
        labels = pod.metadata.labels or {}
        return (
            pod.metadata.namespace == self._namespace
            and labels.get("app.kubernetes.io/name") == "allotment"
            and labels.get("app.kubernetes.io/component") == "agent"
            and (not is_ready or (pod.is_ready and pod.metadata.deletion_timestamp is None))
        )

    async def _write(
        self,
        name: str,
        record: MoveRecord | None,
        *,
        labels: Mapping[str, str | None] | None = None,
        annotations: Mapping[str, None] | None = None,
        spec: Mapping[str, object] | None = None,
    ) -> None:
        """Change a node and its record in one write."""
        text = None if record is None else msgspec.json.encode(record).decode()
        metadata = {"labels": labels or {}, "annotations": {**(annotations or {}), RECORD: text}}
        body = {"metadata": metadata, **({"spec": spec} if spec else {})}
        path = f"/api/v1/nodes/{name}"
        await self._api.patch(path, body, asked=f"patch node {name}", kind=PatchKind.MERGE)

    async def _finish(self, name: str, record: MoveRecord, *, removes: bool = False) -> None:
        spec = {"unschedulable": None} if record.cordoned else None
        await self._write(name, None if removes else record, spec=spec)

    async def _wait_started(self, node: str, resources: str) -> None:
        """Wait for pods that are bound and not started: without a plugin the kubelet fails them.

        It looks twice: a scheduler may bind a pod that it placed before the cordon.
        """
        pattern = re.compile(resources)
        for pause_s in (self._poll_s, 0.0):
            await self._wait(
                node,
                lambda pods: [
                    f"{pod} is starting"
                    for pod in pods
                    if pod.status.phase == "Pending" and any(map(pattern.fullmatch, pod.asks))
                ],
                "pods that start",
                "delete the pods that cannot start, or wait for their images",
            )
            await asyncio.sleep(pause_s)

    async def _wait(
        self,
        node: str,
        obstacles: Callable[[Sequence[NeighbourPod]], Sequence[str]],
        what: str,
        hint: str,
    ) -> None:
        """Wait until the node's pods are no obstacle any more."""
        found: Sequence[str] = ()
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    found = obstacles(await self._pods(node))
                    if not found:
                        return
                    await asyncio.sleep(self._poll_s)
        except TimeoutError as error:
            raise BusyError(
                f"node {node} waited {self._timeout_s:g} s for {what}:"
                f" {'; '.join(found[:_NAMED]) or 'no answer'}; it stays cordoned",
                hint=f"{hint}; then repeat this command, or run `allot migrate back {node}`",
            ) from error

    async def _wait_agent_left(self, name: str) -> None:
        await self._wait(
            name,
            lambda pods: [str(pod) for pod in pods if self._is_agent(pod, is_ready=False)],
            "the agent to leave",
            f"kubectl -n {self._namespace} get daemonset {AGENT_SET} -o yaml",
        )

    async def _claimants(self, node: str, drivers: Sequence[str]) -> list[str]:
        """Return the pods that use claims with devices of a node."""
        try:
            claims = await listed(self._api, CLAIMS, UsedClaimObject, asked="list resourceclaims")
        except ObjectMissingError:
            return []  # an API that this server does not have
        return [
            pod
            for each in claims
            if any(each.is_on(node, driver=driver) for driver in drivers)
            for pod in each.pods
        ]

    async def _refuse_ended(self, departure: Departure) -> None:
        """Refuse a cordoned node whose pods would end: some may have come since the plan."""
        name, pattern = departure.node, re.compile(departure.resources)
        drivers = (departure.claims_of,) if departure.claims_of else ()
        users = await self._claimants(name, drivers) if drivers else []
        users += [
            str(pod)
            for pod in await self._pods(name)
            if not pod.has_ended and any(map(pattern.fullmatch, pod.asks))
        ]
        if users:
            raise BusyError(
                f"node {name}: {departure.ends_pods}: {', '.join(users[:_NAMED])}; it stays"
                " cordoned",
                hint="drain the node, then repeat this command,"
                f" or run `allot migrate back {name}`",
            )

    async def _refuse_users(self, node: MovedNode, *, is_cordoned: bool = False) -> None:
        name = node.metadata.name
        users = [
            str(pod)
            for pod in await self._pods(name)
            if not pod.has_ended and any(each.startswith(_OURS) for each in pod.asks)
        ]
        # Without the agent's label, claims are those of the old system's driver.
        if AGENT_LABEL in node.labels:
            users += await self._claimants(name, _DRIVERS)
        if users:
            raise BusyError(
                f"node {name} has pods with shares that its old system would not count:"
                f" {', '.join(dict.fromkeys(users[:_NAMED]))}"
                f"{'; it stays cordoned' if is_cordoned else ''}",
                hint=f"drain the node, or add --keep-pods: allot migrate back --keep-pods {name}",
            )


def _is_cordoned_here(node: MovedNode, record: MoveRecord | None) -> bool:
    """Return whether the cordon of a move is its own: not if the user cordoned the node before."""
    if record is None or record.step == "moved":
        return not node.spec.unschedulable
    return record.cordoned


def _has(node: MovedNode, labels: Mapping[str, str | None]) -> bool:
    return all(node.labels.get(key) == value for key, value in labels.items())


def _set_path(name: str) -> str:
    namespace, _, own = name.partition("/")
    return f"/apis/apps/v1/namespaces/{namespace}/daemonsets/{own}"


def _merged(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the merge patch of a map: keys that are gone are null, inner maps likewise."""
    patch: dict[str, Any] = {key: None for key in before if key not in after}
    for key, value in after.items():
        old = before.get(key)
        both = isinstance(value, Mapping) and isinstance(old, Mapping)
        patch[key] = _merged(old, value) if both else value  # type: ignore[arg-type]
    return patch
